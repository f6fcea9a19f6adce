"""First contact: every check has a line, whatever the others do; here with checks that fail, hang, crash and break."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engine's extra: pip install -e '.[engine]'")

from faulty_checks import faulty

from cbengine.cli import parser
from cbengine.first import smoke
from cbengine.first.smoke import CheckOutcome, CheckPlace, NotHereError, SmokeCheck
from cbengine.first.smoke_checks import checks

PROGRAM = Path(__file__).with_name("faulty_checks.py")
ENDS = ("good", "bad", "hangs", "good", "crashes", "leaves", "breaks", "elsewhere", "good")


@pytest.fixture(autouse=True)
def found_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find the project, installed or not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def told(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "smoke.jsonl").read_text().splitlines()]


def run(out: Path, names: tuple[str, ...], limit_s: float = 60) -> tuple[bool, list[str]]:
    """These checks in processes of their own."""
    said: list[str] = []
    worker = (sys.executable, str(PROGRAM), str(out), ",".join(names))
    return smoke.smoke(out, faulty(names), worker, said.append, limit_s), said


def test_nothing_stops_the_others(tmp_path: Path) -> None:
    """Failures are told with type, place and message; hangs and crashes by the process that watches. A process is lost
    to each of these and to a broken context, and four are all there are.
    """
    well, said = run(tmp_path, ENDS)
    lines = told(tmp_path)
    assert not well
    assert [line["check"] for line in lines] == list(ENDS)
    assert [line["ended"] for line in lines] == ["ok", "failed", "failed", "ok", *["failed"] * 3, "not checked", "ok"]
    errors = {line["check"]: line["error"] for line in lines}
    assert errors["bad"].startswith("ValueError at faulty_checks.py:")
    assert errors["bad"].endswith("wrong by a factor of 2")
    assert "its process had not ended after" in errors["hangs"]
    assert "in hangs" in errors["hangs"]
    assert "its process died, exit status -6: " in errors["crashes"]
    assert errors["leaves"].endswith("no more")
    assert errors["elsewhere"] == "needs a CUDA device"
    assert said[0].split() == ["ok", "0.0", "s", "good:", "device", "cpu;", "share", "0.1235"]
    assert said[-1].startswith("3 ok, 5 failed, 1 not checked: ")


def test_what_no_process_is_left_for_is_said(tmp_path: Path) -> None:
    well, _ = run(tmp_path, ("crashes",) * smoke.PROCESSES + ("good",))
    assert not well
    assert told(tmp_path)[-1]["error"] == "not reached: no process or no time was left"


def test_the_whole_has_a_limit(tmp_path: Path) -> None:
    """A check that would take a minute is ended with the time of all."""
    well, _ = run(tmp_path, ("good", "hangs_long", "good"), limit_s=6)
    assert not well
    assert [line["ended"] for line in told(tmp_path)] == ["ok", "failed", "failed"]
    assert "had not ended" in told(tmp_path)[1]["error"]


def test_all_well_is_success(tmp_path: Path) -> None:
    assert run(tmp_path, ("good", "elsewhere"))[0]


def test_a_missing_package_is_named() -> None:
    """Before anything else: the machine may have no network."""

    def missing(place: CheckPlace) -> smoke.Found:
        raise NotHereError("needs more")

    line = smoke.looked(SmokeCheck("x", 1, missing), CheckPlace("cpu", Path()))
    assert (line.ended, line.error) == ("not checked", "needs more")
    assert json.loads(line.json())["check"] == "x"
    assert CheckOutcome(**json.loads(line.json())) == line


def test_on_a_cpu_it_says_what_it_could_not_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real checks: tokens, kernels' reference, the 8B shape; what needs a GPU is named."""
    assert parser.main(["smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
    lines = {line["check"]: line for line in told(tmp_path)}
    assert list(lines) == [check.name for check in checks()]
    skipped = [name for name, line in lines.items() if line["ended"] == "not checked"]
    assert "one capture" in skipped
    assert all(lines[name]["error"] == "needs a CUDA device" for name in skipped)
    assert lines["tokens of a tiny model"]["found"] == {
        "sync: texts as generate's": "8 of 8",
        "async: texts as generate's": "8 of 8",
        "sampled: texts as a CPU's": "8 of 8",
    }
    assert capsys.readouterr().out.count("\n") == len(lines) + 1


def test_a_folder_that_cannot_be_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert parser.main(["smoke", "--device", "cpu", "--out", str(tmp_path / "file")]) == 2
    assert f"--out: {tmp_path / 'file'}: " in capsys.readouterr().err


def test_the_first_checks_are_those_that_decide() -> None:
    """Environment, a kernel, a capture, tokens: before anything that takes long."""
    assert [check.name for check in checks()[:4]] == [
        "environment",
        "one kernel",
        "one capture",
        "tokens of a tiny model",
    ]
