"""What a person sees while a run works, and how he ends it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cbsim.server.running import Session

SOON_S = 1.0  # before, nobody can say how long it will take


class Progress:
    """A line on stderr that says how far a run is: rewritten in place on a terminal, else a line now and then."""

    def __init__(self, session: Session, *, quiet: bool) -> None:
        self._label, self._server, self._total, self._quiet = session.loop, session.server, session.requests, quiet
        self._measured = session.server.measured
        self._live = sys.stderr.isatty()
        self._every_s = 0.1 if self._live else 2.0
        self._start = self._last = time.monotonic()
        self._interrupted = False

    def interrupt(self, *_: object) -> None:
        """A signal handler: stop the run at the end of the step under way. The next signal ends the process."""
        self._interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C, or a request to end, ends a run where its state is whole: after a step."""
        before = {number: signal.signal(number, self.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def __call__(self, now_ns: int) -> None:
        """To be called after every step. Raises KeyboardInterrupt if the run is to stop."""
        if self._interrupted:
            raise KeyboardInterrupt
        if self._quiet or time.monotonic() - self._last < self._every_s:
            return
        self._last = time.monotonic()
        self._write(now_ns, end="" if self._live else "\n")

    def done(self, now_ns: int) -> None:
        if not self._quiet:
            self._write(now_ns, end="\n")

    def _write(self, now_ns: int, end: str) -> None:
        record, spent = self._server.record, time.monotonic() - self._start
        finished = record.finished_count
        text = f"{self._label}: {finished:,} of {self._total:,} requests, {record.step_count:,} steps, "
        if self._measured:
            rate = record.sampled_tokens / (now_ns / 1e9) if now_ns else 0.0
            text += f"{now_ns / 1e9:,.1f} s, {rate:,.0f} tokens/s"
        else:
            text += f"{now_ns / 1e9:,.1f} s simulated in {spent:.1f} s"
        if 0 < finished < self._total and spent > SOON_S:
            text += f", {roughly(spent * (self._total - finished) / finished)} left"
        sys.stderr.write(f"\r{text}\x1b[K{end}" if self._live else f"{text}{end}")
        sys.stderr.flush()


def roughly(seconds: float) -> str:
    """As far as an estimate goes: "40 s", "3 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
