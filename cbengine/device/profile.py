"""A torch.profiler profile of some steps: every kernel's time, and GPU-active against the events round the steps."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from cbsim.record.record import Record
from cbsim.record.tables import Steps

SKIPPED = 20  # steps before the profiler starts
COPIES = ("Memcpy HtoD", "Memcpy DtoH")  # copies to and from the host run beside kernels and are none
FILE = "kernels.csv"


class Span(NamedTuple):
    """One execution of a kernel, microseconds on the profiler's clock."""

    name: str
    start_us: float
    end_us: float


class Kernel(NamedTuple):
    """A summary of one kernel's executions. `gap_us`: the total idle time of the GPU before them."""

    name: str
    launches: int
    total_us: float
    share: float  # of the time of all kernels
    gap_us: float


class Profile:
    """A profiler of `count` steps after the first SKIPPED, called after every step; `depth` are in flight at a time."""

    def __init__(self, record: Record, count: int, depth: int) -> None:
        self._record, self._count, self._ahead = record, count, depth - 1
        self._profiler: Any = None
        self._first = 0
        self._stopped = False

    def __call__(self) -> None:
        done = self._record.step_count
        if self._profiler is None:
            if done >= SKIPPED:
                torch.cuda.synchronize()
                self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
                self._profiler.start()
                self._first = done + self._ahead  # a step in flight ends meanwhile: it is not profiled
        elif not self._stopped and done >= self._first + self._count - self._ahead:
            self.stop()

    def stop(self) -> None:
        """Stop at the end of the run, or after `count` steps; a step in flight is the last one."""
        if self._profiler is not None and not self._stopped:
            self._stopped = True
            with suppress(RuntimeError):  # raised by a GPU that has failed, which is reported elsewhere
                torch.cuda.synchronize()
                self._profiler.stop()

    @property
    def window(self) -> Steps:
        """The profiled steps among those recorded so far."""
        steps = Steps.of(self._record)
        return Steps(steps.table[self._first : self._first + self._count] if self._profiler else steps.table[:0])

    def verdict(self) -> str:
        """Return GPU-active by events and by profiler over the same steps; profiled steps are slower than others."""
        window = self.window
        if len(window) < 2:
            return f"profile: the run has too few steps ({self._record.step_count}, {SKIPPED} are skipped)"
        return shares(window, self._spans())

    def files(self) -> dict[str, bytes]:
        """Return the table of kernels, once the profiler has stopped."""
        return {FILE: written(by_kernel(self._spans()))} if self._stopped else {}

    def _spans(self) -> list[Span]:
        return kernels(self._profiler.events() or ())


def shares(window: Steps, spans: Sequence[Span]) -> str:
    """Return the GPU's active share over two steps or more, by their events and by the kernels seen in that time."""
    span = int(window["compute_end_ns"].max() - window["compute_start_ns"].min())
    reach = max((end for _, _, end in spans), default=0.0) - (spans[0].start_us if spans else 0.0)
    busy = reach - sum(kernel.gap_us for kernel in by_kernel(spans))
    other = f"profiler {busy / reach:.2%}" if reach else "the profiler saw no kernels"
    first, last = int(window["step"][0]), int(window["step"][-1])
    return f"GPU active over steps {first} to {last}: events {window.lane('compute').sum() / span:.2%}, {other}"


def kernels(events: Iterable[Any]) -> list[Span]:
    """Return the profiler's spans of kernels on the GPU's multiprocessors, in order of time."""
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA"
        and not event.name.startswith(COPIES)
        and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(spans, key=attrgetter("start_us"))


def by_kernel(spans: Sequence[Span]) -> list[Kernel]:
    """Return a line for each kernel, the one that took longest first; spans in order of time."""
    counts: dict[str, list[float]] = {}
    reach = spans[0].start_us if spans else 0.0
    for name, start, end in spans:
        line = counts.setdefault(name, [0, 0.0, 0.0])
        line[0] += 1
        line[1] += end - start
        line[2] += max(0.0, start - reach)
        reach = max(reach, end)
    whole = sum(line[1] for line in counts.values()) or 1.0
    totals = [Kernel(name, int(n), total, total / whole, gap) for name, (n, total, gap) in counts.items()]
    return sorted(totals, key=lambda kernel: (-kernel.total_us, kernel.name))


def written(lines: Sequence[Kernel]) -> bytes:
    """Return the lines as CSV."""
    content = io.StringIO()
    writer = csv.writer(content, lineterminator="\n")
    writer.writerow(Kernel._fields)
    writer.writerows((name, n, round(total, 3), round(share, 6), round(gap, 3)) for name, n, total, share, gap in lines)
    return content.getvalue().encode()
