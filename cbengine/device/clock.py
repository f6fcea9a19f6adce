"""An engine's clocks: the wall clock, and a clock that stands for a machine without other work."""

from __future__ import annotations

import time
from typing import Protocol

NAP_NS = 20_000_000  # waiting is cut into naps, so that an interrupt is noticed


class Clock(Protocol):
    """A clock that counts nanoseconds since some moment."""

    def now_ns(self) -> int: ...

    def wait_until(self, at_ns: int) -> None:
        """Return at `at_ns` or before."""

    def work_until(self, at_ns: int) -> None:
        """Keep the CPU busy until `at_ns`."""


class WallClock:
    """The machine's own clock."""

    now_ns = staticmethod(time.perf_counter_ns)

    def wait_until(self, at_ns: int) -> None:
        left = min(at_ns - time.perf_counter_ns(), NAP_NS)
        if left > 0:
            time.sleep(left / 1e9)

    def work_until(self, at_ns: int) -> None:
        while time.perf_counter_ns() < at_ns:
            pass


class CpuClock:
    """A clock that advances only while this thread computes, and jumps over waits: other processes do not show."""

    def __init__(self) -> None:
        self._skipped_ns = 0

    def now_ns(self) -> int:
        return time.thread_time_ns() + self._skipped_ns

    def wait_until(self, at_ns: int) -> None:
        self._skipped_ns += max(0, at_ns - self.now_ns())

    work_until = wait_until  # the work is synthetic: only the time it takes matters
