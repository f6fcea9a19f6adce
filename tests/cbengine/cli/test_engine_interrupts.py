"""The engine interrupted or killed: a directory that can be read, and no worker that is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbsim.runs import reading

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="folders are written, and texts read, by transformers")

from support.calls import ROOT, Said, environment, read, runs
from support.engine.calls import call, derived, refused, started
from support.engine.served import LOOPS

from cbengine.device.base import Clock
from cbsim.runs.progress import Progress


@contextlib.contextmanager
def replaying(*words: object) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, once it has served a few requests and said so."""
    with started("replay", "tiny_cpu", "--loop", "sync", *words) as process:
        assert process.stderr
        line = process.stderr.readline()
        assert " requests, " in line, line + process.stderr.read()
        yield process


LONG = ("--set", "workload.requests=5000", "--set", "kv_cache.num_blocks=200")


def test_an_interrupt_leaves_a_readable_directory(out: Path) -> None:
    """Ctrl-C reaches the worker, too: it goes on until the step is done. One message, exit status 130, all processes
    gone, no complaint of a resource left behind; the directory says that it is incomplete, and its plans are right.
    """
    with replaying(*LONG, "--device", "process", "--out", out) as process:
        os.killpg(process.pid, signal.SIGINT)
        said, told = process.communicate(timeout=60)
    (path,) = runs(out)
    assert (process.returncode, said) == (130, "")
    lines = [line for line in told.splitlines() if not line.startswith("sync: ")]
    assert lines == [f"cbengine: interrupted: what was measured until then is in {path}"]
    run = reading.load(path)
    assert str(run.incomplete).startswith("interrupted, after ")
    assert len(run.steps) > 0
    derived(path)


def interrupted(said: Said, out: Path, loop: str) -> None:
    """Exit status 130, one message, and a directory that can be read, said to be incomplete."""
    (path,) = out.glob(f"*-{loop}-*")
    refused(said, 130, f"cbengine: interrupted: what was measured until then is in {path}")
    run = reading.load(path)
    assert str(run.incomplete).startswith("interrupted, after ")
    assert read(path / "summary.json")["complete"] is False
    derived(path)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("device", ["inline", "modelled"])
def test_an_interrupt_ends_a_run_after_a_step(
    small: Path, out: Path, monkeypatch: pytest.MonkeyPatch, device: str, loop: str
) -> None:
    """Ctrl-C in the middle of the run of a run; afterwards Ctrl-C means what it meant before."""
    before, told = signal.getsignal(signal.SIGINT), []
    step = Progress.__call__

    def pressed(self: Progress, now_ns: int) -> None:
        told.append(now_ns)
        if len(told) == 4:
            signal.raise_signal(signal.SIGINT)
        step(self, now_ns)

    monkeypatch.setattr(Progress, "__call__", pressed)
    said = call("replay", small, "--loop", loop, "--quiet", "--out", out, "--device", device)
    interrupted(said, out, loop)
    assert len(told) == 4
    assert signal.getsignal(signal.SIGINT) == before


def test_an_interrupt_is_heard_while_nothing_arrives(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request is two minutes away; the wait for it is cut into naps."""
    monkeypatch.setattr(Clock, "wait_until", lambda *_: signal.raise_signal(signal.SIGINT))
    arrivals = ("--set", "workload.arrivals={kind: constant, rate_per_s: 0.008}")
    interrupted(call("replay", small, "--device", "inline", "--loop", "sync", *arrivals, "--out", out), out, "sync")


@pytest.mark.parametrize("at", ["serving.fleet.alone_adapted", "build.executor_plan", "build.ops"])
def test_an_interrupt_before_the_run(small: Path, out: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """While the scenario is read or the model loads: one message, nothing written."""

    def pressed(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(f"cbengine.{at}", pressed)
    assert call("replay", small, "--device", "inline", "--out", out) == Said(130, "", "cbengine: interrupted\n")
    assert not out.exists()


def test_a_second_interrupt_ends_the_process(out: Path) -> None:
    """... in the middle of a step that has seconds to go."""
    slow = ("--inject", "schedule=2000", "--inject", "update=2500", "--inject", "prepare=2500")
    with replaying(*slow, "--device", "modelled", "--out", out) as process:
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_driver_that_is_killed_leaves_no_worker(out: Path, ranks: str) -> None:
    """The workers notice, and say nothing."""
    with replaying(*LONG, "--device", "process", "--tensor-parallel", ranks, "--out", out) as process:
        process.kill()
        said, told = process.communicate(timeout=60)  # returns when the worker has closed its end, too
    assert process.returncode == -signal.SIGKILL
    assert said == ""
    assert "Error" not in told.replace("BrokenPipeError", "")


SPAWNED = """
import os
from functools import partial
from multiprocessing.context import SpawnProcess
from cbengine.batch import Capacity
from cbengine.device.process import Process

start = SpawnProcess.start
SpawnProcess.start = lambda self: (start(self), os._exit(3))
Process(partial({build}), Capacity(slots=1, width=1, rows=1, tokens=1), 1)
"""


@pytest.mark.parametrize("build", ["int, '7'", "int, 'none'"], ids=["ready", "fails"])
def test_a_driver_that_dies_while_its_worker_starts(build: str) -> None:
    """Nobody hears that the worker is ready, nor why it is not: it ends, and says nothing."""
    done = subprocess.run(
        [sys.executable, "-c", SPAWNED.format(build=build)],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=60,
        env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
