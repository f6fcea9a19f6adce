"""A CUDA GPU as a device: three streams tied by events, decode steps replayed as graphs, one CPU block a step.

    h2d       pinned staging -> inbound[slot]
    compute   waits for it; tables; a decode step: inbound -> the graph's inputs, replay; else kernel by kernel;
              the tokens -> outbound[slot]
    d2h       waits for that; outbound[slot] -> pinned; the CPU blocks on the end of this copy

A slot's buffers are written again only after its step was awaited. The last sampled token of every request stays on
the device, so a step never waits for the host to know what it computes on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cbengine.batch import Capacity, Header
from cbengine.device import DeviceError, Ints, Lanes
from cbengine.executor import Executor, arrays
from cbsim.policy.plan import StepPlan

CAPTURED = (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 32))
"""Decode batches with a graph; others are padded up to the next. Padding is nearly free: a matrix product over 128 rows
takes as long as over one."""
WARM_UPS = 2
STUCK_S = 300.0  # a step that takes longer than this has hung


class Marks(NamedTuple):
    """Events at the edges of one step's copies and kernels."""

    h2d_start: torch.cuda.Event
    h2d_end: torch.cuda.Event
    start: torch.cuda.Event
    end: torch.cuda.Event
    done: torch.cuda.Event

    @classmethod
    def new(cls) -> Marks:
        first, second, third, fourth = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        return cls(first, second, third, fourth, torch.cuda.Event(enable_timing=True, blocking=True))


class Graph(NamedTuple):
    """A captured decode step: what it reads, what it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    tokens: Tensor


class Cuda:
    """`graphs`: capture decode steps. `overlap`: copies have streams of their own."""

    def __init__(
        self, executor: Executor, capacity: Capacity, depth: int, *, graphs: bool, overlap: bool, random: bool
    ) -> None:
        """Captures every graph that the run may need. Raises DeviceError."""
        self._executor, self._scratch_slot, self._random = executor, capacity.slots, random
        self._sizes = [size for size in CAPTURED if size <= _above(capacity.rows)] if graphs else []
        size, device = capacity.staging, torch.device("cuda")
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(depth)]
        self._received = [torch.zeros(capacity.sampling, dtype=torch.int32, pin_memory=True) for _ in range(depth)]
        self._inbound = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(depth)]
        self._outbound = [torch.zeros(capacity.sampling, dtype=torch.int32, device=device) for _ in range(depth)]
        self.staging: list[Ints] = [buffer.numpy() for buffer in self._pinned]
        self._compute = torch.cuda.Stream()
        self._h2d, self._d2h = (torch.cuda.Stream() if overlap else self._compute for _ in range(2))
        self._marks = [Marks.new() for _ in range(depth + 1)]  # one more: the next step is timed from the last one's
        self._launched = 0
        self._in_flight: dict[int, tuple[Marks, int, int]] = {}  # slot -> events, sampling rows, time of launch
        self._graphs: dict[int, Graph] = {}
        self._watchdog = Watchdog(STUCK_S)
        self._origin: tuple[torch.cuda.Event, int]  # an event and the host time at which it happened
        torch.cuda.synchronize()
        self._capture_all()
        self._origin = self._synchronised()
        self.facts = self._describe()

    def bucket(self, rows: int) -> int:
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else rows

    def launch(self, slot: int, header: Header, plan: StepPlan) -> None:
        del plan
        at = time.perf_counter_ns()
        marks = self._marks[self._launched % len(self._marks)]
        self._launched += 1
        used = header.offsets()[-1]
        inbound, outbound = self._inbound[slot], self._outbound[slot][: header.sampling]
        try:
            with torch.cuda.stream(self._h2d):
                marks.h2d_start.record()
                inbound[:used].copy_(self._pinned[slot][:used], non_blocking=True)
                marks.h2d_end.record()
            self._compute.wait_event(marks.h2d_end)
            with torch.cuda.stream(self._compute):
                marks.start.record()
                self._run(inbound, header, outbound)
                marks.end.record()
            self._d2h.wait_event(marks.end)
            with torch.cuda.stream(self._d2h):
                self._received[slot][: header.sampling].copy_(outbound, non_blocking=True)
                marks.done.record()
        except torch.OutOfMemoryError as error:
            raise DeviceError(_out_of_memory(header, error)) from None
        except RuntimeError as error:
            raise DeviceError(f"the GPU failed: {_first_line(error)}") from None
        self._in_flight[slot] = marks, header.sampling, at

    def _run(self, inbound: Tensor, header: Header, outbound: Tensor) -> None:
        step = arrays(inbound, header)
        self._executor.update_tables(step)
        graph = self._graphs.get(header.rows) if header.decodes == header.rows and not header.padded else None
        if graph is None:
            outbound.copy_(self._executor.run(step, header))
            return
        graph.inputs.copy_(inbound[: len(graph.inputs)])
        graph.graph.replay()
        outbound.copy_(graph.tokens)

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        marks, sampling, launched = self._in_flight.pop(slot)
        try:
            with self._watchdog:
                marks.done.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"the GPU failed: {_first_line(error)}") from None
        tokens: Ints = self._received[slot][:sampling].numpy().copy()
        return tokens, self._timed(marks, launched, time.perf_counter_ns())

    def _timed(self, marks: Marks, launched_ns: int, now_ns: int) -> Lanes:
        """The step's times on the host's clock: distances from the end of the step before, which keeps them precise.
        The two clocks drift apart slowly, so the mapping is moved whenever a step would have run before its launch
        or ended after it was awaited.
        """
        event, at_ns = self._origin
        offsets = [at_ns + round(event.elapsed_time(mark) * 1e6) for mark in marks]
        shift = max(launched_ns - offsets[0], 0) + min(now_ns - offsets[-1], 0)
        h2d_start, h2d_end, start, end, done = (offset + shift for offset in offsets)
        self._origin = marks.end, end
        return Lanes(h2d_start, h2d_end, start, end, end, max(done, end))

    def _synchronised(self) -> tuple[torch.cuda.Event, int]:
        event = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(self._compute):
            event.record()
        event.synchronize()
        return event, time.perf_counter_ns()

    def _capture_all(self) -> None:
        """The largest graph first: the smaller ones find room in its memory."""
        pool = torch.cuda.graph_pool_handle() if self._sizes else None
        for rows in reversed(self._sizes):
            try:
                self._graphs[rows] = self._capture(rows, pool)
            except torch.OutOfMemoryError as error:
                raise DeviceError(
                    f"no memory to capture a decode step of {rows} requests: {_first_line(error)}"
                ) from None

    def _capture(self, rows: int, pool: Any) -> Graph:
        header = Header(
            *(rows, rows, rows, rows),
            *(1, 0, 0),
            random=self._random,
            padded=False,
        )
        inputs = torch.zeros(header.offsets()[-1], dtype=torch.int32, device="cuda")
        step = arrays(inputs, header)
        step.slots.fill_(self._scratch_slot)
        step.kv_tokens.fill_(1)
        step.starts.copy_(torch.arange(rows + 1))
        with torch.cuda.stream(self._compute):
            for _ in range(WARM_UPS):
                self._executor.run(step, header)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._compute):
            tokens = self._executor.run(step, header)
        return Graph(graph, inputs, tokens)

    def _describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(0)
        return {
            "device": properties.name,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "gpu_memory_bytes": properties.total_memory,
            "captured_batches": sorted(self._graphs),
            "allocated_bytes": torch.cuda.memory_allocated(),
        }

    def close(self) -> None:
        if self._watchdog.closed:
            return
        self._watchdog.close()
        torch.cuda.synchronize()
        self._graphs.clear()
        self.staging, self._pinned, self._received, self._inbound, self._outbound = [], [], [], [], []
        del self._executor


class Watchdog:
    """Ends the process when a wait lasts too long: a hung kernel cannot be interrupted."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            since = self._since
            if since is not None and time.monotonic() - since > self._limit_s:
                print(f"cbengine: a step has not ended after {self._limit_s:.0f} s: the GPU hangs", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)


def _above(rows: int) -> int:
    """The captured size that holds `rows`."""
    return int(CAPTURED[min(bisect_left(CAPTURED, rows), len(CAPTURED) - 1)])


def _driver() -> str | None:
    """Version of the GPU's driver, where the system says it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="ascii").partition("\n")[0].split()
    except (OSError, UnicodeDecodeError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _out_of_memory(header: Header, error: Exception) -> str:
    free, total = torch.cuda.mem_get_info()
    what = f"a step of {header.tokens} query tokens in {header.rows} rows does not fit the GPU's memory"
    return f"{what} ({free / 1e9:.2f} of {total / 1e9:.2f} GB free): {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
