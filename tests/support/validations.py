"""Validation folders for tests: small simulated runs, some of which say that they were measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbsim.metrics.metrics import summarise
from cbsim.record import columns, directory, parquet
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps
from cbsim.runs import reading
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


def prolonged(run: Path, makespan_s: float) -> None:
    """Let the last step of a run end so late; its summary says what its tables do."""
    read = reading.load(run)
    table, last = read.steps.table.copy(), STEP_COLUMNS.index("update_end_ns")
    table[-1, last] = read.requests.numbers("arrival_ns").min() + round(makespan_s * 1e9)
    steps, price = Steps(table), read.summary.get("cost", {}).get("price_usd_hour")
    content = parquet.encoded(columns.STEPS, directory.step_columns(steps), directory.PIECE, **directory.COUNTERS)
    (run / "steps.parquet").write_bytes(content)
    total = read.summary["total_blocks"]
    edited(run / "summary.json", **summarise(read.requests, steps, total_blocks=total, price_usd_hour=price))


def put(source: Path, place: Path, *, measured: bool) -> Path:
    """A copy of a run there; if `measured`, it says that it was."""
    shutil.copytree(source, place)
    if measured:
        edited(place / "env.json", device=GPU)
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
