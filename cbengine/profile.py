"""A second opinion on GPU-active: the kernels that torch.profiler saw, against the events around the steps."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from cbsim.metrics import Steps
from cbsim.record import STEP_COLUMNS, Record

SKIPPED = 20  # steps before the profiler starts
COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # to and from the host: no kernels, and beside them
Intervals = list[tuple[float, float]]


class Profile:
    """Told of every step, as progress is; profiles `count` of them after the first SKIPPED."""

    def __init__(self, record: Record, count: int) -> None:
        self._record, self._count = record, count
        self._profiler: Any = None
        self._first = 0
        self._last: int | None = None

    def __call__(self) -> None:
        done = self._record.step_count
        if self._profiler is None:
            if done >= SKIPPED:
                self._start(done)
        elif self._last is None and done >= self._first + self._count:
            self.stop()

    def _start(self, done: int) -> None:
        """Starting takes a while, in which the step that may be in flight ends: the one after it is the first."""
        torch.cuda.synchronize()
        self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
        self._profiler.start()
        self._first = done + 1

    def stop(self) -> None:
        """End of the run, or of the steps asked for."""
        if self._profiler is not None and self._last is None:
            self._last = self._record.step_count
            with suppress(RuntimeError):  # of a GPU that has failed, which has been said
                torch.cuda.synchronize()
                self._profiler.stop()

    def verdict(self) -> str:
        """Both figures, over the same steps; a profiled step is slower than others."""
        steps = Steps(np.frombuffer(self._record.steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))
        window = Steps(steps.table[self._first : self._last or 0])
        if len(window) < 2:
            return f"profile: the run has too few steps ({len(steps)}, {SKIPPED} are skipped)"
        return said(window, kernels(self._profiler.events() or ()))


def said(window: Steps, intervals: Intervals) -> str:
    """What is shown of two steps or more and the kernels seen in that time."""
    span = int(window["compute_end_ns"].max() - window["compute_start_ns"].min())
    busy, reach = union(intervals)
    other = f"profiler {busy / reach:.2%}" if reach else "the profiler saw no kernels"
    first, last = int(window["step"][0]), int(window["step"][-1])
    return f"GPU active over steps {first} to {last}: events {window.lane('compute').sum() / span:.2%}, {other}"


def kernels(events: Iterable[Any]) -> Intervals:
    """(start, end) of what ran on the GPU's multiprocessors, of all that a profiler tells."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA"
        and not event.name.startswith(COPIES)
        and not getattr(event, "is_user_annotation", False)
    ]


def union(intervals: Intervals) -> tuple[float, float]:
    """(time covered by at least one interval, time from the first start to the last end)."""
    covered, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return covered, reach - min(intervals)[0] if intervals else 0.0
