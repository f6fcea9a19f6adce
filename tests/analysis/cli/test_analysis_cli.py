"""`python -m analysis`: exit statuses, one message for a user's mistake, and no run is ever written over."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.calls import Said, call, simulated
from support.validations import edited

from analysis.cli import parser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sync, async; `other` of another workload; `measured`, which says that it was run on a device."""
    out, fields = tmp_path_factory.mktemp("runs"), ("worked_example", "workload.requests=12")
    made = simulated(out, *fields, "workload.output_tokens=8")
    made += simulated(out, *fields, "workload.output_tokens=9", "loop.mode=sync")
    for path, name in zip(made, ("sync", "async", "other"), strict=True):
        path.rename(out / name)
    shutil.copytree(out / "async", out / "measured")
    edited(out / "measured" / "env.json", device="a GPU", engine="cbengine")
    return out


def _said(*words: object) -> Said:
    return call(*words, of=parser.main)


@pytest.mark.parametrize(
    ("condition", "sure", "status"),
    [
        ("makespan_s>-99%", False, 3),
        ("makespan_s<-99%", False, 0),
        ("tpot.p50<-1%", True, 3),
        ("tpot.p50<-99%", True, 0),
        ("slo.met>+1%", False, 3),
    ],
)
def test_compare_exits_3_if_a_condition_holds(runs: Path, condition: str, sure: bool, status: int) -> None:
    """An async loop takes less time a step. A metric that the runs do not have fails: nothing passes unseen."""
    options = ["--sure"] if sure else []
    assert _said("compare", runs / "sync", runs / "async", "--fail-if", condition, *options).status == status


def test_the_directory_of_each_run_is_named(runs: Path, tmp_path: Path) -> None:
    """Runs that nothing tells apart are numbered in the tables; a list says which directory each is."""
    shutil.copytree(runs / "sync", tmp_path / "again")
    said = _said("report", runs / "sync", runs / "async", tmp_path / "again").out.splitlines()
    assert said[:3] == [f"sync     {runs / 'sync'}", f"async    {runs / 'async'}", f"sync #2  {tmp_path / 'again'}"]


def test_the_other_commands_exit_0(runs: Path) -> None:
    assert _said("report", runs / "sync", runs / "async").status == 0
    assert _said("compare", runs / "sync", runs / "sync", "--fail-if", "makespan_s>+0%").status == 0
    paths = f"simulated  {runs / 'sync'}\nmeasured   {runs / 'measured'}\n"
    for pair in ((runs / "sync", runs / "measured"), (runs / "measured", runs / "sync")):
        status, out, _ = _said("compare", *pair)
        assert status == 0 and out.startswith(paths) and "replayed: " in out
    assert _said("compare", runs / "sync", runs / "measured", "--fail-if", "makespan_s>+1%").status == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "COMMAND"),
        (("compare", "RUNS/sync", "RUNS/nope"), "nope: no such run directory"),
        (("compare", "RUNS/sync", "RUNS/other"), "workload.output_tokens is 8 and 9"),
        (("report", "RUNS/sync", "RUNS/other"), "output_tokens=8 and output_tokens=9: the workload differs"),
        (("compare", "RUNS/sync", "RUNS/async", "--fail-if", "tpot.p50>+1e999%"), "not a finite number"),
        (("compare", "RUNS/sync", "RUNS/async", "--fail-if", ""), "expected METRIC>CHANGE"),
        (("report", "RUNS/sync", "--out", "RUNS/sync"), "which is no report"),
        (("report", "RUNS/sync", "--out", "RUNS/sync/env.json"), "cannot be written"),
        (("report", "RUNS/sync", "--check", "ttft<1s"), "--check: "),
        (("report", "RUNS/sync", "--strict"), "--strict: "),
        (("report", "RUNS/sync", "RUNS/nope.parquet"), "nope.parquet: no such run directory"),
        (
            ("report", *["RUNS/sync/steps.parquet"] * 2),
            "steps.parquet: is a file, expected a run directory: tables are",
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(runs: Path, words: tuple[str, ...], said: str) -> None:
    """Never a traceback; a run directory is the same afterwards, also if `--out` names it."""
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    status, _, err = _said(*(word.replace("RUNS", str(runs)) for word in words))
    assert status == 2 and said in err and "Traceback" not in err and len(err.splitlines()) <= 5
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before
