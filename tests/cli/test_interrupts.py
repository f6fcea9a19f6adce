"""A run that is interrupted: exit 130, one line, and a directory that can be read as far as it goes."""

from __future__ import annotations

import errno
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.calls import ROOT, Said, call, refused, runs

from cbsim.draw.render import Picture
from cbsim.record import directory, optional_tables
from cbsim.runs import progress, reading, result


def test_ctrl_c_leaves_a_readable_directory(small: Path, out: Path) -> None:
    """SIGINT while a run is under way, which its live progress line on a terminal shows: exit 130, one line with
    the directory, which has the tables of what was simulated, a marker that says how far it got, and can be replayed.
    """
    words = ("--set", "workload.requests=60000", "--set", "workload.output_tokens=400", "--out", str(out))
    terminal, theirs = os.openpty()
    command = [sys.executable, "-m", "cbsim", "run", str(small), *words]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    try:
        said = seen(terminal, until=" steps, ", seconds=60)
        assert " steps, " in said, said
        child.send_signal(signal.SIGINT)
        said += seen(terminal, until=None, seconds=60)
        printed, _ = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
        os.close(terminal)
    assert (child.returncode, printed) == (130, "")
    assert "Traceback" not in said
    (path,) = runs(out)
    assert said.rstrip().endswith(f"cbsim: interrupted: what was simulated until then is in {path}")
    run = reading.load(path)
    assert run.incomplete is not None
    assert run.incomplete.startswith("interrupted")
    assert run.incomplete.endswith(f"after {len(run.steps)} steps")
    assert run.summary["complete"] is False
    assert run.summary["steps"] == len(run.steps) > 0
    assert 0 < len(run.requests) <= 60000
    replayed = call("replan", path)
    count = f"{len(run.steps)} of {len(run.steps)} plans identical"
    assert replayed == Said(0, f"{path}: {count}; the run is incomplete: {run.incomplete}\n", "")


def test_sigterm_ends_a_sweep_as_ctrl_c_does(tmp_path: Path) -> None:
    """SIGTERM after the first points: exit 130, one line, and what was done is kept."""
    (tmp_path / "s.yaml").write_text(
        "scenario: 8k_b32\naxes: {workload.output_tokens: {range: {low: 4000, high: 6000, step: 5}}}\n"
    )
    words = (str(tmp_path / "s.yaml"), "--jobs", "1", "--store", str(tmp_path / "st"))
    terminal, theirs = os.openpty()
    child = subprocess.Popen([sys.executable, "-m", "cbsim", "sweep", *words], cwd=ROOT, stderr=theirs)
    os.close(theirs)
    try:
        said = seen(terminal, until=" points, ", seconds=60)
        child.send_signal(signal.SIGTERM)
        said += seen(terminal, until=None, seconds=60)
        assert child.wait(60) == 130, said
    finally:
        child.kill()
        os.close(terminal)
    assert said.rstrip().endswith("cbsim: interrupted; the same command goes on where it stopped"), said
    assert any((tmp_path / "st" / "runs").rglob("*.json"))


@pytest.mark.parametrize("program", ["cbsim", "analysis", "cbengine"])
def test_an_interruption_while_a_program_is_imported(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before there is a command: exit 130, no traceback of imports."""

    class Pressed:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == f"{program}.cli.parser":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, f"{program}.cli.parser", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Pressed, *sys.meta_path])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(program, run_name="__main__")
    assert end.value.code == 130


def test_the_reason_of_a_run_that_dies_is_in_its_directory(small: Path, out: Path) -> None:
    """A clock that comes to more than the columns hold is exit 2 with both, and the marker says so, too."""
    said = call("run", small, "--set", "cost={kind: constant, step_s: 1e9}", "--out", out, "--quiet")
    reason = "simulated time came to 3e+09 s, must be <= 2.31e+09 s, 73 years"
    refused(said, 2, f"run: a number is too large for a run: {reason}")
    assert (runs(out)[0] / directory.MARKER).read_text() == f"{reason}\n"


def seen(terminal: int, until: str | None, seconds: float) -> str:
    """What appears on a terminal, until a text does or its other side is closed."""
    text, deadline = "", time.monotonic() + seconds
    while time.monotonic() < deadline and (until is None or until not in text):
        ready, _, _ = select.select([terminal], [], [], 0.1)
        if ready:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # EIO: nobody has the other side any more
                break
            if not part:
                break
            text += part.decode()
    return text


def test_a_long_run_that_is_interrupted_joins_its_pieces(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a run that has written pieces: the directory has what that of a short one has, and no piece."""
    monkeypatch.setattr(directory.RunWriter, "group", 7)
    step, seen = progress.Progress.__call__, []

    def interrupted(self: progress.Progress, now_ns: int) -> None:
        seen.append(now_ns)
        if len(seen) == 30:
            self.interrupt()
        step(self, now_ns)

    monkeypatch.setattr(progress.Progress, "__call__", interrupted)
    refused(call("run", small, "--loop", "sync", "--trace-steps", "0:9", "--out", out, "--quiet"), 130, "interrupted")
    (path,) = runs(out)
    assert {file.name for file in path.iterdir()} == {*result.OURS} - {directory.TERMS, optional_tables.TRANSFERS}
    run = reading.load(path)
    assert run.incomplete == "interrupted, after 30 steps"
    assert len(run.steps) == run.summary["steps"] == 30
    assert call("replan", path).status == 0


def test_a_full_disk_in_the_middle_of_a_long_run(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third piece does not fit: exit 1, the file and the reason in a line and in the marker, and what was written
    before is read and replayed."""
    monkeypatch.setattr(directory.RunWriter, "group", 7)
    whole = Path.write_bytes

    def until_full(path: Path, content: bytes) -> int:
        if "000002" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, content)

    monkeypatch.setattr(Path, "write_bytes", until_full)
    refused(call("run", small, "--loop", "sync", "--out", out, "--quiet"), 1, "No space left on device")
    (path,) = runs(out)
    run = reading.load(path)
    assert run.incomplete is not None and run.incomplete.endswith(
        "000002.parquet: cannot be written: No space left on device"
    )
    assert len(run.steps) == run.summary["steps"] == 14
    assert call("replan", path).out.startswith(f"{path}: 14 of 14 plans identical; the run is incomplete")


def test_an_interrupt_in_process_is_one_line(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt outside the simulation, here while tables are written: exit 1, one line, and the marker says it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directory.RunWriter, "steps", interrupted)
    refused(call("run", small, "--out", out, "--quiet"), 130, "interrupted")
    assert (runs(out)[0] / directory.MARKER).read_text() == "interrupted while its files were written\n"


def test_a_run_killed_while_its_figure_is_drawn_is_not_called_complete(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads summary.json alone is told the same as by the marker, at every moment."""

    def killed(self: result.Result) -> Picture:
        (path,) = runs(out)
        summary = json.loads((path / "summary.json").read_text())
        assert (path / directory.MARKER).exists() and summary["complete"] is False
        assert summary["makespan_s"] == self.summary["makespan_s"]
        return result.figure([self])

    monkeypatch.setattr(result.Result, "figure", killed)
    assert call("run", small, "--loop", "sync", "--out", out, "--quiet").status == 0
    assert json.loads((runs(out)[0] / "summary.json").read_text())["complete"] is True
