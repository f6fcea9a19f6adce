"""`python -m analysis`: exit statuses, one message for a user's mistake, and no run is ever written over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from analysis.cli import parser
from cbsim.cli.parser import main as simulator

WORDS = ("--set", "workload.output_tokens=8", "--set", "workload.requests=12")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sync, async; `other` of another workload; `measured`, which says that it was run on a device."""
    out = tmp_path_factory.mktemp("runs")
    assert simulator(["run", "worked_example", "--quiet", *WORDS, "--out", str(out)]) == 0
    more = ("--set", "workload.output_tokens=9", "--loop", "sync")
    assert simulator(["run", "worked_example", "--quiet", *WORDS, *more, "--out", str(out / "o")]) == 0
    next((out / "o").iterdir()).rename(out / "other")
    for loop in ("sync", "async"):
        next(out.glob(f"*-{loop}-*")).rename(out / loop)
    shutil.copytree(out / "async", out / "measured")
    facts = json.loads((out / "measured" / "env.json").read_text()) | {"device": "a GPU", "engine": "cbengine"}
    (out / "measured" / "env.json").write_text(json.dumps(facts))
    return out


def _status(*words: object) -> int:
    try:
        return parser.main([str(word) for word in words])
    except SystemExit as stop:  # argparse
        return int(stop.code or 0)


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
    assert _status("compare", runs / "sync", runs / "async", "--fail-if", condition, *options) == status


def test_the_other_commands_exit_0(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status("report", runs / "sync", runs / "async") == 0
    assert _status("compare", runs / "sync", runs / "sync", "--fail-if", "makespan_s>+0%") == 0
    assert _status("compare", runs / "sync", runs / "measured") == 0
    said = capsys.readouterr().out.partition("simulated  ")[2]
    assert said.startswith(f"{runs / 'sync'}\nmeasured   {runs / 'measured'}\n") and "replayed: " in said
    assert _status("compare", runs / "sync", runs / "measured", "--fail-if", "makespan_s>+1%") == 3
    capsys.readouterr()
    assert _status("compare", runs / "measured", runs / "sync") == 0
    assert capsys.readouterr().out.startswith(f"simulated  {runs / 'sync'}\nmeasured   {runs / 'measured'}\n")


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
        (("report", "RUNS/sync", "--slo", "ttft<1s"), "--slo: "),
        (("report", "RUNS/sync", "--check"), "--check: "),
        (("report", "RUNS/sync", "RUNS/nope.parquet"), "nope.parquet: no such run directory"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(
    runs: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    """Never a traceback; a run directory is the same afterwards, also if `--out` names it."""
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    assert _status(*(word.replace("RUNS", str(runs)) for word in words)) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and len(err.splitlines()) <= 5
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before
