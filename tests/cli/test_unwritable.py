"""Output that cannot be written: one line that names the place, and a marker on what is incomplete. Exit 1, or 2 for an
`--out` that is no folder.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.calls import ROOT, call, process, refused, runs

from cbsim.record import directory
from cbsim.scenario import scenario


@pytest.mark.parametrize("place", ["taken", "taken/below"])
@pytest.mark.parametrize("command", [("run",), ("tune", "--knob", "seed=1,2", "--maximise", "goodput")])
def test_out_that_is_a_file(small: Path, tmp_path: Path, place: str, command: tuple[str, ...]) -> None:
    """--out that is, or lies below, a file is a mistake of the arguments of every command: one line, nothing run."""
    (tmp_path / "taken").write_text("")
    said = call(command[0], small, *command[1:], "--out", tmp_path / place)
    refused(said, 2, f"--out {tmp_path / place}: cannot be written: Not a directory")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
def test_a_closed_stream_is_no_failure(closed: str, small: Path, out: Path) -> None:
    """Started without stdout or stderr, as some supervisors do, or with a full stderr, a command does its work and
    exits with its status.
    """
    command = [sys.executable, "-m", "cbsim", "run", str(small), "--out", str(out)]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    (run,) = out.iterdir()
    assert not (run / directory.MARKER).exists()


FILES = (
    directory.MARKER,
    *("scenario.resolved.yaml", "env.json", "requests.parquet", "timeline.json.gz", "steps.parquet"),
    *("summary.json", "timeline.png"),
)
MEANWHILE = ("requests.parquet", "timeline.json.gz")  # written beside the step table, whose thread goes on


def fill_up_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room for half of the file of this name."""
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        if name in path.name:
            write(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)


@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_fills_up(small: Path, out: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file the disk is full at: exit 1, one line that names it, and a directory marked as incomplete whose
    other files are whole.
    """
    fill_up_at(name, monkeypatch)
    refused(call("run", small, "--out", out, "--quiet"), 1, name, "No space left on device")
    (path,) = runs(out)
    assert (path / directory.MARKER).read_text().strip() or name == directory.MARKER
    written = {file.name for file in path.rglob("*") if file.is_file()}
    beside = ("steps.parquet",) if name in MEANWHILE else ()
    assert written == {*FILES[: max(FILES.index(name), 1)], *beside}


def test_a_disk_that_fills_up_at_the_last_picture(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture of both loops is drawn when both directories are complete: they stay so, and hold no half of it."""
    fill_up_at("sync_above_async", monkeypatch)
    refused(call("run", small, "--loop", "both", "--out", out, "--quiet"), 1, "No space left on device")
    left = [file.name for path in runs(out) for file in path.rglob("*")]
    assert directory.MARKER not in left and not [name for name in left if "sync_above_async" in name]


def test_a_file_too_large_for_its_limit(out: Path) -> None:
    """The same from outside: a process that may not write more than 8 KiB to a file (RLIMIT_FSIZE) leaves a marker and
    a line, and is not killed by SIGXFSZ. The scenario's 1,000 steps make a table of more than that.
    """

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    said = process("run", "worked_example", "--loop", "sync", "--out", out, "--quiet", preexec_fn=limit)
    refused(said, 1, "steps.parquet", "cannot be written")
    (path,) = runs(out)
    assert (path / directory.MARKER).exists()
    assert scenario.load(path / "scenario.resolved.yaml").name == "worked_example"


@pytest.mark.parametrize("argv", [["list"], ["run", "worked_example", "--loop", "sync", "--json"]], ids=lambda v: v[0])
def test_a_reader_that_goes_away(argv: Sequence[str], tmp_path: Path) -> None:
    """`python -m cbsim ... | head -0`: no traceback, nor Python's complaint about stdout at exit."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [*argv, *(["--out", str(tmp_path)] if argv[0] == "run" else [])]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "cbsim", *words],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
