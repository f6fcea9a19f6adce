"""A second opinion on GPU-active: the kernels that torch.profiler saw, against the events around the steps."""

from __future__ import annotations

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from cbsim.metrics import Steps
from cbsim.record import STEP_COLUMNS, Record

SKIPPED = 20  # steps before the profiler starts


class Profile:
    """Told of every step, as progress is; profiles `count` of them after the first SKIPPED."""

    def __init__(self, record: Record, count: int) -> None:
        self._record, self._count = record, count
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
        self._first: int | None = None
        self._last: int | None = None

    def __call__(self) -> None:
        done = self._record.step_count
        if self._first is None and done >= SKIPPED:
            self._first = done
            self._profiler.start()
        elif self._first is not None and self._last is None and done >= self._first + self._count:
            self.stop()

    def stop(self) -> None:
        """End of the run, or of the steps asked for."""
        if self._first is not None and self._last is None:
            torch.cuda.synchronize()
            self._profiler.stop()
            self._last = self._record.step_count

    def verdict(self) -> str:
        """Both figures, over the same steps; a profiled step is slower than others."""
        if self._first is None or self._last is None or self._last - self._first < 2:
            return f"profile: the run has too few steps ({self._record.step_count}, {SKIPPED} are skipped)"
        steps = Steps(np.frombuffer(self._record.steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))
        window = Steps(steps.table[self._first : self._last])
        span = int(window["compute_end_ns"].max() - window["compute_start_ns"].min())
        events = int(window.lane("compute").sum()) / span
        busy, reach = _union(self._kernels())
        kernels = busy / reach if reach else 0.0
        return f"GPU active over steps {self._first} to {self._last - 1}: events {events:.2%}, profiler {kernels:.2%}"

    def _kernels(self) -> list[tuple[float, float]]:
        events = [e for e in self._profiler.events() or () if e.device_type.name == "CUDA"]
        return sorted((event.time_range.start, event.time_range.end) for event in events)


def _union(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """(time covered by at least one interval, time from the first start to the last end)."""
    covered, reach = 0.0, float("-inf")
    for start, end in intervals:
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered, reach - intervals[0][0] if intervals else 0.0
