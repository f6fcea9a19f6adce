"""The scripts for a GPU that is there for minutes: how a campaign goes on, and how a kernel is timed."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from support.scripts import script

from cbengine import build
from cbengine.build import Setup
from cbengine.cli.parser import command_line
from cbengine.measure import suite
from cbsim.cli.measured import measure_arguments
from cbsim.errors import INTERRUPTED, USAGE, UserError
from cbsim.scenario import scenario as scenarios
from reports import own_engine

campaign, speed, peer, served = (script(f"hardware/{name}") for name in ("campaign", "speed", "peer", "served"))
WRITES = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('seen'); sys.exit(int(sys.argv[2]))"


@pytest.fixture
def two_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of two commands, each of which leaves a file; the second one fails."""

    def parts(_: str, folder: Path) -> dict[str, list[list[str]]]:
        left = {"tables.parquet": "0", "timeline.json.gz": "1"}
        return {"right": [["-c", WRITES, str(folder / "right" / name), code] for name, code in left.items()]}

    monkeypatch.setattr(campaign, "parts", parts)
    monkeypatch.setattr(campaign, "code_version", lambda: "abc")


def called(out: Path, archive: Path) -> int:
    return int(campaign.main(["right", "--device", "process", "--out", str(out), "--archive", str(archive)]))


def test_a_campaign_goes_on_from_its_archive(
    two_commands: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file has all that is kept, whatever the machine forgets: another call, in an empty folder, runs only what has
    not succeeded yet.
    """
    archive = tmp_path / "kept" / "results.tgz"
    assert called(tmp_path / "first", archive) == 1
    with tarfile.open(archive) as file:
        names = sorted(name for name in file.getnames() if "." in name)
    folder = "cpu-process"
    assert names == [f"{folder}/provenance.json", f"{folder}/right/log.txt", f"{folder}/right/tables.parquet"]
    assert "done before" not in capsys.readouterr().out
    assert called(tmp_path / "second", archive) == 1
    said = capsys.readouterr().out.splitlines()
    assert ["done before" in line for line in said if line.startswith("right")] == [True, False]
    assert (tmp_path / "second" / folder / "right" / "tables.parquet").read_text() == "seen"


def test_tests_that_measure_memory_have_the_gpu_to_themselves(tmp_path: Path) -> None:
    """All others that need a GPU run beside each other. A CPU collects the same ones: a module that is missing there
    would keep every one of them from being run on a GPU.
    """
    beside, alone = campaign.parts("cuda", tmp_path)["tests"]
    assert "-n" in beside and "-n" not in alone
    assert beside[-1] == f"not ({alone[-1]})"
    rehearsed = campaign.parts("process", tmp_path)["tests"]
    assert rehearsed == [[*beside[: beside.index("-n")], "--collect-only"]]


@pytest.mark.parametrize("device", ["cuda", "process", "modelled"])
def test_no_time_of_a_gpu_goes_to_a_command_that_is_refused(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every part is in a call. Its scenarios load with their changes, its workloads are known, its scripts take their
    options.
    """
    known = campaign.parts(device, tmp_path)
    assert sorted(known) == sorted(chain.from_iterable(campaign.CALLS.values()))
    commands = list(chain.from_iterable(known.values()))
    for words in (command[2:] for command in commands if command[:2] == ["-m", "cbengine"]):
        arguments = command_line().parse_args(words)
        if arguments.command == "predict":
            assert suite.chosen(arguments.cases, device)
        else:
            scenario = scenarios.load(arguments.scenario, arguments.set)
            build.adapted(scenario, Setup(device="modelled" if device == "modelled" else "inline"))
    client = argparse.ArgumentParser()
    measure_arguments.arguments(client)
    for arguments in (served.arguments(command[1:]) for command in commands if command[0].endswith("served.py")):
        scenarios.load(arguments.scenario, arguments.set)
        client.parse_args(["http://127.0.0.1", "--budget", arguments.budget])
    for name, main in (("speed.py", speed.main), ("peer.py", peer.main)):
        for script_, *options in (command for command in commands if command[0].endswith(name)):
            if "cuda" in options and not torch.cuda.is_available():
                with pytest.raises(SystemExit):
                    main(options)
                assert capsys.readouterr().err.endswith("torch finds no CUDA device here\n"), script_


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_served_session_that_is_interrupted_leaves_no_process(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its client, which sends the signal and would never end, is killed. The engine ends its session."""
    processes, start = [], own_engine.started

    def noted(line: list[str], **options: Any) -> subprocess.Popen[bytes]:
        processes.append(start(line, **options))
        return processes[-1]

    signals = f"import os, signal; os.kill(os.getppid(), {number.value}); signal.pause()"
    monkeypatch.setattr(own_engine, "started", noted)
    monkeypatch.setattr(served, "started", lambda _: noted(["-c", signals]))
    before = signal.getsignal(number)
    code = served.main(["tiny_cpu", "--set", "kv_cache.num_blocks=64", "--device", "process", "--out", str(tmp_path)])
    assert (code, capfd.readouterr().err) == (INTERRUPTED, "served.py: interrupted\n")
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]
    assert signal.getsignal(number) == before


def ended(main: Any, options: list[str]) -> Any:
    """The exit status of a script."""
    try:
        return main(options)
    except SystemExit as end:
        return end.code


def test_mistakes_of_a_served_session_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A budget that `cbsim measure` refuses is refused before the server starts; other mistakes are the engine's."""
    for options, reason in (
        (["tiny_cpu", "--budget", "foo"], "served.py: argument --budget: 'foo': expected FIELD=VALUE"),
        (["tiny_cpu", "--budget", "seconds=8"], "served.py: argument --budget: 'seconds=8': got seconds=8, expected"),
        (["nosuch"], "cbengine: unknown scenario 'nosuch'"),
    ):
        assert ended(served.main, [*options, "--device", "process", "--out", str(tmp_path)]) == USAGE
        (line,) = capfd.readouterr().err.splitlines()
        assert reason in line.replace(Path(sys.argv[0]).name, "served.py")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("uneven", "--device cpu: tiles and uneven measure Triton kernels, which need a GPU"),
        ("copies tiles", "--device cpu: tiles and uneven measure Triton kernels, which need a GPU"),
        ("copies --model nosuch", "unknown model 'nosuch'"),
        ("copies --out /proc/x", "/proc/x: cannot be written: No such file or directory"),
    ],
)
def test_mistakes_of_speed_are_one_line(options: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(speed.main, ["--out", "/proc/unused", "--device", "cpu", *options.split()]) == USAGE
    output = capsys.readouterr()
    assert reason in output.err and output.err.count("\n") == 1 and output.out == ""


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--minutes nan", "argument --minutes: 'nan': expected a number of minutes > 0"),
        ("--minutes -1", "argument --minutes: '-1': expected a number of minutes > 0"),
        ("--out /proc/x", "/proc/x/cpu-process/provenance.json: cannot be written: No such file or directory"),
        ("--out {}", "provenance.json: not valid JSON"),
        ("--out {}/new --archive {}/junk.tgz", "junk.tgz: is not a whole .tgz of results"),
        ("--out {}/new --archive /proc/x.tgz", "/proc/x.tgz.part: No such file or directory"),
    ],
)
def test_mistakes_of_a_campaign_are_one_line(
    two_commands: None, options: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured."""
    for file in (tmp_path / "cpu-process" / "provenance.json", tmp_path / "junk.tgz"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("junk")
    assert ended(campaign.main, ["right", "--device", "process", *options.format(tmp_path, tmp_path).split()]) == USAGE
    output = capsys.readouterr()
    assert reason in output.err and output.err.count("\n") == 1 and output.out == ""


def test_a_record_without_its_commands_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "provenance.json"
    for commands in ("{}", '{"commands": [1]}', '{"commands": [{"command": "x"}]}'):
        file.write_text(commands)
        with pytest.raises(UserError, match="commands: expected a list of objects with command, commit, exit"):
            campaign.recorded(file)


def test_a_part_without_commands_on_a_device_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["uneven", "predict-1b", "--device", "process", "--out", str(tmp_path)]) == 0
    assert campaign.main(["speculation", "served", "--device", "modelled", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"{name}: not on --device process" for name in ("uneven", "predict-1b")),
        *(f"{name}: not on --device modelled" for name in ("speculation", "served")),
    ]


class Stream:
    """Notes what is done on it, as `said`."""

    said: list[str]


class Event:
    """An event of a GPU on which a replay takes 2 ms, and 9 ms where the stream had been idle."""

    now_ms = 0.0

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, _: Any) -> None:
        Stream.said.append("event")
        self.at = Event.now_ms

    def elapsed_time(self, later: Any) -> float:
        return float(later.at - self.at)


def test_a_launch_is_no_time_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays are queued back to back, and the host waits once, at the end: the GPU is never idle between two of them,
    where it would wait for the launch within the time that is taken.
    """
    Stream.said, Event.now_ms = [], 0.0

    class Graph:
        def replay(self) -> None:
            Event.now_ms += 2.0 if Stream.said[-2:-1] == ["replay"] else 9.0
            Stream.said.append("replay")

    monkeypatch.setattr(speed, "captured", lambda act, stream: (Graph(), act()))
    monkeypatch.setattr(speed, "streams", lambda: (Stream(),))
    for name, stand_in in (
        ("Event", Event),
        ("stream", lambda _: contextlib.nullcontext()),
        ("synchronize", lambda: Stream.said.append("wait")),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert speed.timed(lambda: None, "cuda", repeats=20) == pytest.approx(2e-3)
    assert Stream.said == ["event", "replay"] * 23 + ["event", "wait"]
