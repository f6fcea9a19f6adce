"""Validation folders for tests: small simulated runs, some of which say that they were measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.calls import simulated

GPU = "a GPU"
COST = "cost={{kind: constant, step_s: {0}, cpu: {{schedule: {{base_s: {1}}}, update: {{base_s: {1}}}}}}}"
FEW = ("workload.requests=12", "workload.output_tokens=8")
ABOUT = {"about": "few requests", "model": "tiny", "scheduler": "vllm", "injected_ms": 4.0, "load": None, "curve": None}
ABOUT["predicted"] = {}


def served(out: Path, *overrides: str) -> Path:
    """Both loops of a small workload, simulated, by their names."""
    for loop, path in zip(("sync", "async"), simulated(out, "tiny_cpu", *FEW, *overrides), strict=True):
        path.rename(out / loop)
    return out


def edited(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def put(source: Path, place: Path, *, measured: bool, **summary: Any) -> Path:
    """A copy of a run there; if `measured`, it says that it was."""
    shutil.copytree(source, place)
    if measured:
        edited(place / "env.json", device=GPU)
    edited(place / "summary.json", **summary)
    return place


def case(place: Path, name: str, simulated: Path, measured: Sequence[Path], **about: Any) -> Path:
    """A case with both loops: the simulated runs, and the measured ones as often as there are sources."""
    made = place / "validation" / name
    for loop in ("sync", "async"):
        put(simulated / loop, made / "simulated" / loop, measured=False)
        for index, source in enumerate(measured):
            put(source / loop, made / "measured" / f"{loop}-{index}", measured=True)
    (made / "case.json").write_text(json.dumps({"name": name, **ABOUT, **about}))
    return made
