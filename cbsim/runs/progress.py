"""Progress of work, a line on stderr, and its interruption: of a run, and of worker processes, by their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from cbsim.runs.running import Session

MANAGER_ENDS_S = 10.0  # it has no more to do than to join terminated processes
SOON_S = 1.0  # earlier, an estimate of the time left is noise


@contextmanager
def handled(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Let signals have this handler for the time being; they keep theirs outside of the main thread."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if main}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)


class ProgressLine:
    """A line on stderr: rewritten in place on a terminal, else printed every `pause_s` seconds."""

    def __init__(self, pause_s: float) -> None:
        self._live = sys.stderr.isatty()
        self._pause_s = 0.1 if self._live else pause_s
        self._begun_s = self._last_s = time.monotonic()

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._begun_s

    @property
    def due(self) -> bool:
        """Whether the pause since the last line has passed."""
        return time.monotonic() - self._last_s > self._pause_s

    def write(self, message: str, done: int, total: int, *, last: bool = False) -> None:
        """Write the message, with an estimate of the time that the rest of `total` will take."""
        self._last_s, spent_s = time.monotonic(), self.spent_s
        if 0 < done < total and spent_s > SOON_S:
            message += f", {roughly(spent_s * (total - done) / done)} left"
        end = "\n" if last or not self._live else ""
        sys.stderr.write(f"\r{message}\x1b[K{end}" if self._live else f"{message}{end}")
        sys.stderr.flush()


class Progress:
    """The progress of a run, as a line on stderr, and its interruption by the user."""

    def __init__(self, session: Session, *, quiet: bool) -> None:
        self._label, self._server, self._total, self._quiet = session.loop, session.server, session.requests, quiet
        self._measured = session.server.measured
        self._line = ProgressLine(2.0)
        self._interrupted = False

    def interrupt(self, *_: object) -> None:
        """Handle a signal: stop the run at the end of the step under way. The next signal ends the process."""
        self._interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let Ctrl-C, SIGTERM and SIGHUP end a run where its state is consistent: after a step."""
        ending = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            ending.append(signal.SIGHUP)
        with handled(self.interrupt, *ending):
            yield

    def __call__(self, now_ns: int) -> None:
        """Report progress; called after every step. Raises KeyboardInterrupt if the run is to stop."""
        if self._interrupted:
            raise KeyboardInterrupt
        if not self._quiet and self._line.due:
            self._write(now_ns)

    def done(self, now_ns: int) -> None:
        if not self._quiet:
            self._write(now_ns, last=True)

    def _write(self, now_ns: int, *, last: bool = False) -> None:
        record, finished = self._server.record, self._server.record.finished_count
        message = f"{self._label}: {finished:,} of {self._total:,} requests, {record.step_count:,} steps, "
        if self._measured:
            rate = record.sampled_tokens / (now_ns / 1e9) if now_ns else 0.0
            message += f"{now_ns / 1e9:,.1f} s, {rate:,.0f} tokens/s"
        else:
            message += f"{now_ns / 1e9:,.1f} s simulated in {self._line.spent_s:.1f} s"
        self._line.write(message, finished, self._total, last=last)


def roughly(seconds: float) -> str:
    """Return a rounded duration: "40 s", "3 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def worker_pool(jobs: int) -> ProcessPoolExecutor:
    """Return a pool of so many processes, which start with the first task and exit when the parent does."""
    with handled(signal.SIG_IGN, signal.SIGHUP):  # which Python's resource tracker, that starts now, would die of
        return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_begin_worker)


def submitted(to: ProcessPoolExecutor, act: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Submit a task. Processes that start with it ignore SIGINT and SIGHUP from the first moment, while they import."""
    with handled(signal.SIG_IGN, signal.SIGINT, signal.SIGHUP):
        return to.submit(act, *arguments)


def end_pool(of: ProcessPoolExecutor) -> None:
    """Terminate the processes without waiting for their tasks."""
    working = list((of._processes or {}).values())
    manager: Any = of._executor_manager_thread
    of.shutdown(wait=False, cancel_futures=True)
    for process in working:
        process.terminate()
    if manager is not None:  # else it may close its pipe while the interpreter, at its exit, writes to it
        manager.join(MANAGER_ENDS_S)


def _begin_worker() -> None:
    """Initialise a worker process: it ignores SIGINT, and exits when the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
