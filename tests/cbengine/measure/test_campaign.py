"""The campaign on a GPU, rehearsed: what is done is not done again, what failed or took too long is; all is kept."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engine's extra: pip install -e '.[engine]'")
from cbengine.cli import parser
from cbengine.cli.arguments import command_line
from cbengine.measure import campaign, provenance, suite
from cbengine.measure.campaign import Part
from cbsim.cli.arguments import run_options


def write(path: Path, body: str) -> str:
    """A module to be run with -m, beside the part."""
    path.write_text(body)
    return path.stem


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two parts of small commands instead of the real ones; the second fails until `mended` exists."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    write(
        tmp_path / "says.py",
        "import sys, pathlib\np = pathlib.Path(sys.argv[1]); p.mkdir(parents=True, exist_ok=True)\n"
        "(p / 'timeline.json.gz').touch(); (p / 'kept').touch(); print('said', *sys.argv[2:])\n",
    )
    write(
        tmp_path / "fails.py",
        "import sys, pathlib\nfor i in range(40): print('line', i)\n"
        f"sys.exit(not pathlib.Path({str(tmp_path / 'mended')!r}).exists())\n",
    )
    write(tmp_path / "sleeps.py", "import time\ntime.sleep(60)\n")
    found = {
        "first": Part("one that works", [("says", "{runs}/a", "x"), ("says", "{runs}/b", "{runs}/*")]),
        "second": Part("one that does not", [("fails",), ("says", "{runs}/c")]),
        "slow": Part("one that takes too long", [("sleeps",)], minutes=0.02),
    }
    monkeypatch.setattr(campaign, "parts", lambda device: found)
    monkeypatch.setattr(campaign, "CALLS", {"process": {"both": ("second", "first")}, "cuda": {}})
    monkeypatch.setattr(campaign, "LEAST_S", 0.01)
    return tmp_path / "out"


def ledger(out: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((out / "cpu-process" / "provenance.json").read_text())
    return facts


def test_what_is_done_is_not_done_again(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands run in order, with the part's folders in them; a second call runs only what failed."""
    words = ["campaign", "first", "second", "--device", "process", "--out", str(small)]
    assert parser.main(words) == 1
    place = small / "cpu-process"
    assert (place / "first" / "log.txt").read_text().count("said") == 2
    assert f"said {place / 'first' / 'runs' / 'a'}" in (place / "first" / "log.txt").read_text()
    assert (place / "second" / "runs" / "c" / "kept").exists()  # a failure does not keep the next from running
    assert not list(small.rglob("timeline.json.gz"))
    assert [c["exit"] for c in ledger(small)["commands"]] == [0, 0, 1, 0]
    said = capsys.readouterr().err
    assert "failed or not begun: python -m fails" in said
    assert [line.split() for line in said.splitlines() if "line " in line] == [["line", str(i)] for i in range(10, 40)]
    (small.parent / "mended").touch()
    assert parser.main(words) == 0
    assert [c["exit"] for c in ledger(small)["commands"]] == [0, 0, 1, 0, 0]
    assert (place / "first" / "log.txt").read_text().count("said") == 2


def test_a_part_ends_with_its_time(small: Path) -> None:
    """A command that does not fit is ended and recorded as 124, as by `timeout`."""
    assert parser.main(["campaign", "slow", "--device", "process", "--out", str(small)]) == 1
    assert [c["exit"] for c in ledger(small)["commands"]] == [124]


def test_what_a_command_started_ends_with_it(small: Path, tmp_path: Path) -> None:
    """A test that hangs has children; they would keep the GPU."""
    write(
        tmp_path / "sleeps.py",
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\ntime.sleep(60)\n",
    )
    assert parser.main(["campaign", "slow", "--device", "process", "--out", str(small)]) == 1
    with contextlib.suppress(ProcessLookupError):  # gone already
        ended = os.pidfd_open(int((tmp_path / "child").read_text()))
        assert select.select([ended], [], [], 30)[0], "it is still there"
        os.close(ended)


def test_a_call_ends_with_its_time(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not begun by then is said, and is for the next call: a name of its own for parts that go together."""
    monkeypatch.setattr(campaign, "LEAST_S", 60.0)
    words = ["campaign", "both", "--device", "process", "--out", str(small)]
    assert parser.main([*words, "--minutes", "0.5"]) == 1
    assert "not begun, no time is left: python -m fails" in capsys.readouterr().err
    assert not (small / "cpu-process" / "provenance.json").exists()
    (small.parent / "mended").touch()
    assert parser.main(words) == 0
    told = [c["command"].split()[2] for c in ledger(small)["commands"]]
    assert told == ["fails", "says", "says", "says"], "second, then first"


def test_an_unknown_commit_has_done_nothing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git and without CBSIM_COMMIT two trees may differ: everything is measured again."""
    words = ["campaign", "first", "--device", "process", "--out", str(small)]
    monkeypatch.setattr(provenance, "code_version", lambda: None)
    assert parser.main(words) == parser.main(words) == 0
    assert len(ledger(small)["commands"]) == 4


def test_commands_are_the_same_elsewhere(small: Path) -> None:
    """Results go on to another machine, where the folder has another path."""
    words = ["campaign", "first", "--device", "process", "--out"]
    assert parser.main([*words, str(small)]) == 0
    assert not any(str(small) in c["command"] for c in ledger(small)["commands"])
    assert "OUT/cpu-process/first/runs/a" in ledger(small)["commands"][0]["command"]
    small.rename(small.with_name("moved"))
    assert parser.main([*words, str(small.with_name("moved"))]) == 0
    assert len(ledger(small.with_name("moved"))["commands"]) == 2


def test_a_rehearsal_says_that_it_is_one(small: Path) -> None:
    """Nobody may take its numbers for a GPU's."""
    assert parser.main(["campaign", "first", "--device", "process", "--out", str(small)]) == 0
    facts = ledger(small)
    assert facts["device"] == "CPU (process): no GPU was measured"
    assert {"torch", "transformers"} <= set(facts["packages"])
    assert set(facts["git"]) == {"commit", "dirty"}


def test_another_commit_measures_again(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number belongs to the code that made it."""
    words = ["campaign", "first", "--device", "process", "--out", str(small)]
    assert parser.main(words) == 0
    monkeypatch.setattr(provenance, "code_version", lambda: "another")
    assert parser.main(words) == 0
    assert len(ledger(small)["commands"]) == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "part 'nothing': expected one of both, first, second, slow"),
        (["first", "--device", "cuda"], "--device cuda: torch finds no CUDA device here"),
    ],
)
def test_bad_arguments(small: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in words and campaign.torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert parser.main(["campaign", "--device", "process", *words, "--out", str(small)]) in (1, 2)
    assert says in capsys.readouterr().err


def test_a_bar_that_is_missed_has_said_so_and_pytest_has_not() -> None:
    """3 is a measurement that misses its bar; of pytest it is a failure of its own."""
    assert provenance.ended_well("python -m cbengine predict", 3)
    assert not provenance.ended_well("python -m pytest tests", 3)
    assert not provenance.ended_well("python -m cbengine predict", 124)


def test_runs_that_were_cut_short_are_no_part_of_a_report(tmp_path: Path) -> None:
    """A part that was ended goes on in the next call: what it left behind is not read."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    (tmp_path / "cut" / "INCOMPLETE").touch()
    assert campaign.whole_runs(tmp_path) == [str(tmp_path / "whole")]
    assert campaign.whole_runs(tmp_path / "nowhere") == []


@pytest.mark.parametrize("content", ["[]", '{"commands": [{"command": "x"}]}', "[" * 100_000])
def test_a_broken_ledger_is_named(content: str, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small / "cpu-process" / "provenance.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert parser.main(["campaign", "first", "--device", "process", "--out", str(small)]) == 2
    assert f"{path}: not the record of an earlier call" in capsys.readouterr().err


def test_a_foreign_ledger_is_left_alone(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be read is not written over."""
    path = small / "cpu-process" / "provenance.json"
    path.parent.mkdir(parents=True)
    path.write_text("[]")
    assert parser.main(["campaign", "first", "--device", "process", "--out", str(small)]) == 2
    assert f"{path}: not the record of an earlier call" in capsys.readouterr().err
    assert path.read_text() == "[]"


@pytest.mark.parametrize("device", ["cuda", "process", "modelled"])
def test_every_command_parses(device: str) -> None:
    """Each word of a part is one that the command it names understands; options and scenarios exist."""
    for call in campaign.CALLS[device].values():
        assert set(call) <= set(campaign.parts(device))
    for part in campaign.parts(device).values():
        assert 0 < part.minutes < 10
        for command in part.commands:
            if command[0] == "cbengine":
                arguments = command_line().parse_args(list(command[1:]))
                assert arguments.command in ("replay", "speed", "predict", "smoke")
                if arguments.command == "predict":
                    assert suite.chosen(arguments.cases, device)
                if arguments.command == "replay":
                    assert run_options(arguments).scenario in ("8k_b32", "8k_prompt_b32", "tiny_cpu")
            else:
                assert command[0] in ("pytest", "analysis"), command
    assert sys.executable
