"""Run directories broken at random: whoever reads one refuses it, or says nothing that cannot be."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import mutations
from support.calls import SMALL, Said, call, simulated
from support.mutations import SEED, as_json, damaged, edited, rewritten, table_changed

import cbsim
from analysis.cli import parser as reports
from cbsim.draw import render
from cbsim.scenario import documents

CASES, READ_S = 120, 9.0


def as_yaml(text: str, rng: random.Random) -> str:
    return documents.write(mutations.with_a_value(documents.parse(text, "base"), rng))


CHANGES: dict[str, tuple[Callable[[Path, random.Random], None], ...]] = {
    "steps.parquet": (table_changed, table_changed, table_changed, damaged),
    "requests.parquet": (table_changed, table_changed, table_changed, damaged),
    "summary.json": (rewritten(as_json), rewritten(as_json), rewritten(edited), damaged),
    "env.json": (rewritten(as_json), rewritten(edited), damaged),
    "scenario.resolved.yaml": (rewritten(as_yaml), rewritten(edited), damaged),
}


def opened(path: Path) -> Said:
    """What the front door says of a directory."""
    try:
        result = cbsim.read(path)
    except cbsim.UserError as error:
        return Said(2, "", str(error))
    return Said(0, f"{result}\n{result.check('makespan>=0s')}\n{result.requests.num_rows}\n{result.warnings}", "")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directories `a` and `b`, of the two loops."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "s.yaml").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "images", lambda chart, *kinds: [b""] * len(kinds))
        made = simulated(folder / "out", str(folder / "s.yaml"), "loop.mode=both")
        for path, name in zip(made, "ab", strict=True):
            path.rename(folder / name)
    return folder


def readers(run: Path, other: Path, out: Path) -> dict[str, Callable[[], Said]]:
    """Who reads a run directory, and how."""
    return {
        "read": lambda: opened(run),
        "replan": lambda: call("replan", run),
        "compare": lambda: call("compare", run, other, of=reports.main),
        "report": lambda: call("report", run, "--out", out, of=reports.main),
    }


def test_broken_runs_end_with_a_status_and_a_short_message(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 0, 1 or 2, whoever reads them, and no number less than nothing."""
    monkeypatch.setattr(render, "images", lambda chart, *kinds: [b""] * len(kinds))
    run, seen = tmp_path / "run", dict[str, set[int]]()
    for case, rng in mutations.until(READ_S, CASES):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(runs / "a", run)
        name: Any = rng.choice(list(CHANGES))
        change = rng.choice(CHANGES[name])
        change(run / name, rng)
        who, act = rng.choice(list(readers(run, runs / "b", tmp_path / "out").items()))
        about = f"seed {SEED}, case {case}: {name} {change.__qualname__}, {who}"
        seen.setdefault(who, set()).add(mutations.survived(about, (0, 1, 2), act, path=run))
    assert all(2 in statuses or 1 in statuses for statuses in seen.values()), seen
