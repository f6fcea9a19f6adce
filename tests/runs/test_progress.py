"""The line that a person sees while a run works."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from cbsim.runs import progress
from cbsim.runs.progress import Progress


def line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finished: int, spent_s: float) -> str:
    """What is said of a run of a thousand requests after so many seconds."""
    clock = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    record = SimpleNamespace(finished_count=finished, step_count=1234, sampled_tokens=0)
    server = SimpleNamespace(record=record, measured=False)
    session: Any = SimpleNamespace(loop="sync", server=server, requests=1000)
    said = Progress(session, quiet=False)
    clock[0] += spent_s
    said(5_000_000_000)
    return capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whatever_signal_ends_a_run_it_ends_after_a_step(number: signal.Signals) -> None:
    """Its tables are kept then. Afterwards the signal means what it meant before."""
    server = SimpleNamespace(measured=False)
    session: Any = SimpleNamespace(loop="sync", server=server, requests=1)
    run, before = Progress(session, quiet=True), signal.signal(number, signal.default_int_handler)
    try:
        with run.interruptible():
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    with pytest.raises(KeyboardInterrupt):
        run(0)


@pytest.mark.parametrize(
    ("finished", "spent_s", "left"),
    [(0, 10.0, None), (500, 10.0, "10 s"), (100, 40.0, "6 min"), (1, 40.0, "11.1 h"), (1000, 10.0, None)],
)
def test_what_is_left_follows_from_what_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], finished: int, spent_s: float, left: str | None
) -> None:
    """In proportion to the requests that are over; nothing before the first and after the last of them."""
    begin = f"sync: {finished:,} of 1,000 requests, 1,234 steps, 5.0 s simulated in {spent_s:.1f} s"
    assert line(monkeypatch, capsys, finished, spent_s) == f"{begin}{f', {left} left' if left else ''}\n"


def test_a_pool_that_has_ended_leaves_no_thread() -> None:
    """... which would close its pipe while the exit of the interpreter writes to it: a bad file descriptor."""
    pool = progress.worker_pool(1)
    progress.submitted(pool, abs, -1)
    manager = pool._executor_manager_thread
    progress.end_pool(pool)
    assert manager is not None and not manager.is_alive()
