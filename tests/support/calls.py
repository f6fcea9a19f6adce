"""The command line as tests call it: in this process or in one of its own, on a small scenario."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cbsim.cli.parser import main

ROOT = Path(__file__).parents[2]
SMALL = """\
question: What does a small run cost?
model: llama-3.1-8b
hardware: h200-sxm
workload:
  kind: synthetic
  requests: 12
  prompt_tokens: {uniform: {low: 20, high: 90}}
  output_tokens: {uniform: {low: 2, high: 30}}
  arrivals: {kind: poisson, rate_per_s: 50}
loop:
  mode: sync
"""


class Said(NamedTuple):
    """What a command did: its exit status, stdout and stderr."""

    status: int
    out: str
    err: str


def call(*argv: object, of: Callable[[list[str]], int] = main) -> Said:
    """The command in this process; `of` is another package's."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = of([str(word) for word in argv])
        except SystemExit as end:
            status = int(end.code or 0)
    return Said(status, out.getvalue(), err.getvalue())


def process(*argv: object, cwd: Path | None = None, **options: Any) -> Said:
    """The command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "cbsim", *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd or ROOT,
        env=environment(),
        timeout=60,
        **options,
    )
    return Said(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def started(program: str, *words: object, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, in a group of its own as a terminal makes one. Its stderr ends when the last
    process that holds it has ended, workers included. `more` are variables of its environment.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", program, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment() | more,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def runs(out: Path) -> list[Path]:
    """Run directories, oldest first: the loops of a run are written one after the other."""
    return sorted(out.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def simulated(out: Path, scenario: str, *fields: str, more: Sequence[str] = ()) -> list[Path]:
    """The new run directories of a scenario with these fields, sync before async."""
    before = set(out.iterdir()) if out.exists() else set()
    words = [word for field in fields for word in ("--set", field)]
    assert main(["run", scenario, "--quiet", *words, *more, "--out", str(out)]) == 0
    return sorted(set(out.iterdir()) - before, key=lambda path: "-async-" in path.name)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def refused(said: Said, status: int, *words: str, program: str = "cbsim") -> None:
    """A user's mistake: nothing on stdout, no traceback, one message that says all of `words`."""
    assert "Traceback" not in said.err
    assert said.status == status, said
    assert not said.out
    assert said.err.startswith(f"{program}: ")
    assert len(said.err.splitlines()) == 1, said.err
    for word in words:
        assert word in said.err


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"
