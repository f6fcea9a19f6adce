"""A CUDA GPU as a device: three streams tied by events, decode steps replayed as graphs, one CPU block a step.

    h2d       pinned staging -> inbound[slot]
    compute   waits for it; tables; a decode step: inbound -> the graph's inputs, replay; else kernel by kernel;
              the tokens -> outbound[slot]
    d2h       waits for that; outbound[slot] -> pinned; the CPU blocks on the end of this copy

A slot's buffers are written again only after its step was awaited, and are given back only when everything has ended.
All other memory is taken and used on the compute stream alone. The last sampled token of every request stays on the
device, so a step never waits for the host to know what it computes on.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cbengine.batch import Capacity, Header
from cbengine.device import DeviceError, Ints, Lanes
from cbengine.executor import Arrays, Executor, arrays
from cbengine.timeline import Timeline
from cbengine.warmup import scratch_step, warm_ups
from cbsim.policy.graphs import bucket, captured_sizes
from cbsim.policy.plan import StepPlan

WARM_UPS = 2  # runs before a capture
STUCK_S = 300.0  # a step that takes longer than this has hung
T = TypeVar("T")


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
        """Captures every graph that the run may need, and runs every kind of step once. Raises DeviceError."""
        self._executor, self._capacity, self._random, self._overlap = executor, capacity, random, overlap
        self._compute, self._h2d, self._d2h = streams() if overlap else (streams()[0],) * 3
        self._sizes = captured_sizes(capacity.rows) if graphs else []
        self._graphs: dict[int, Graph] = {}
        self._capture_s = 0.0  # of one graph, the kernels' compilation included
        self.staging: list[Ints] = []
        self._pinned: list[Tensor] = []
        self._received: list[Tensor] = []
        self._inbound: list[Tensor] = []
        self._outbound: list[Tensor] = []
        self._marks = [Marks.new() for _ in range(depth + 1)]  # one more: the next step is timed from the last one's
        self._launched = 0
        self._in_flight: dict[int, tuple[Marks, int, int]] = {}  # slot -> events, sampling rows, time of launch
        self._anchor: torch.cuda.Event  # a step's edges are measured from here
        self._timeline: Timeline
        self._watchdog = Watchdog(STUCK_S)
        try:
            guarded(lambda: "a step's inputs and outputs", partial(self._allocate, depth))
            self._warm_up()
        except BaseException:
            self.close()
            raise
        self.facts = self._describe()

    def bucket(self, rows: int) -> int:
        return bucket(self._sizes, rows)

    def launch(self, slot: int, header: Header, plan: StepPlan) -> None:
        del plan
        self._launch(slot, header)

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        marks, sampling, launched = self._in_flight.pop(slot)
        with self._watchdog:
            guarded(lambda: "a step that had been launched", marks.done.synchronize)
        awaited = time.perf_counter_ns()
        edges = [round(self._anchor.elapsed_time(mark) * 1e6) for mark in marks]
        self._anchor = marks.h2d_start
        tokens: Ints = self._received[slot][:sampling].numpy().copy()
        return tokens, self._timeline.place(edges, launched, awaited)

    def close(self) -> None:
        if self._watchdog.closed:
            return
        self._watchdog.close()
        with suppress(RuntimeError):  # a GPU that has failed for good has nothing to give back
            torch.cuda.synchronize()
        self._graphs.clear()
        self._in_flight.clear()
        self.staging, self._pinned, self._received, self._inbound, self._outbound = [], [], [], [], []
        del self._executor
        with suppress(RuntimeError):
            torch.cuda.empty_cache()

    # -- a step -------------------------------------------------------------------------------------------------------

    def _launch(self, slot: int, header: Header) -> None:
        at = time.perf_counter_ns()
        marks = self._marks[self._launched % len(self._marks)]
        self._launched += 1
        guarded(
            lambda: f"a step of {header.tokens} query tokens in {header.rows} rows",
            lambda: self._enqueue(slot, header, marks),
        )
        self._in_flight[slot] = marks, header.sampling, at

    def _enqueue(self, slot: int, header: Header, marks: Marks) -> None:
        inbound, used, outbound = self._inbound[slot], header.offsets()[-1], self._outbound[slot][: header.sampling]
        graph = self._graphs.get(header.rows) if header.decodes == header.rows and not header.padded else None
        step = arrays(inbound, header) if graph is None or header.updates else None
        with torch.cuda.stream(self._h2d):
            marks.h2d_start.record(self._h2d)
            inbound[:used].copy_(self._pinned[slot][:used], non_blocking=True)
            marks.h2d_end.record(self._h2d)
        with torch.cuda.stream(self._compute):
            self._compute.wait_event(marks.h2d_end)
            marks.start.record(self._compute)
            self._run(graph, inbound, step, header, outbound)
            marks.end.record(self._compute)
        with torch.cuda.stream(self._d2h):
            self._d2h.wait_event(marks.end)
            self._received[slot][: header.sampling].copy_(outbound, non_blocking=True)
            marks.done.record(self._d2h)

    def _run(self, graph: Graph | None, inbound: Tensor, step: Arrays | None, header: Header, outbound: Tensor) -> None:
        """`step` may be left out of a graph's that changes no table."""
        if step is not None:
            self._executor.update_tables(step)
        if graph is not None:
            graph.inputs.copy_(inbound[: len(graph.inputs)])
            graph.graph.replay()
            outbound.copy_(graph.tokens)
        else:
            assert step is not None
            outbound.copy_(self._executor.run(step, header))

    # -- before the first one -----------------------------------------------------------------------------------------

    def _allocate(self, depth: int) -> None:
        torch.cuda.empty_cache()  # what is left of putting weights together
        size, sampling, device = self._capacity.staging, self._capacity.sampling, torch.device("cuda")
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(depth)]
        self._received = [torch.zeros(sampling, dtype=torch.int32, pin_memory=True) for _ in range(depth)]
        self._inbound = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(depth)]
        self._outbound = [torch.zeros(sampling, dtype=torch.int32, device=device) for _ in range(depth)]
        self.staging = [buffer.numpy() for buffer in self._pinned]
        self._anchor = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()  # weights, cache and buffers were written on another stream
        self._timeline = Timeline(time.perf_counter_ns(), overlap=self._overlap)
        self._anchor.record(self._h2d)

    def _warm_up(self) -> None:
        """No kernel is compiled and no memory asked for the first time in a run."""
        if self._sizes:
            gc.collect()  # graphs of runs before must not be destroyed while another one is captured
            pool = torch.cuda.graph_pool_handle()
            began = time.perf_counter()
            for rows in reversed(self._sizes):  # the smaller ones find room in the largest one's memory
                capture = partial(self._capture, rows, pool)
                self._graphs[rows] = guarded(partial("capturing a decode step of {} requests".format, rows), capture)
            self._capture_s = (time.perf_counter() - began) / len(self._sizes)
        reach, graphs = self._executor.reach, bool(self._sizes)
        for header, values in warm_ups(self._capacity, reach, graphs=graphs, random=self._random):
            self.staging[0][: len(values)] = values
            self._launch(0, header)
            self.wait(0)

    def _capture(self, rows: int, pool: Any) -> Graph:
        header, values = scratch_step([1] * rows, self._capacity.slots, random=self._random, padded=False)
        with torch.cuda.stream(self._compute):
            inputs = torch.from_numpy(values).cuda()
        step = arrays(inputs, header)
        graph, tokens = captured(lambda: self._executor.run(step, header), self._compute, pool)
        return Graph(graph, inputs, tokens)

    def _describe(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "device": properties.name,
            "driver": _driver(),
            "cuda": torch.version.cuda,
            "gpu_memory_bytes": properties.total_memory,
            "captured_batches": sorted(self._graphs),
            "capture_s": self._capture_s,
            "allocated_bytes": torch.cuda.memory_allocated(),
        }


@cache
def streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream, torch.cuda.Stream]:
    """For kernels, copies in, copies out: the same in every run of a process, because cuBLAS keeps a workspace for each
    stream that it has ever computed on.
    """
    return torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream()


def captured(act: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """`act` as a graph, and what it returned: tensors that every replay writes again. It is run before, on the same
    stream, so that what happens only once (compiling, loading, workspaces) is not captured.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            act()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = act()
    return graph, result


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

    def overdue(self, now: float) -> bool:
        since = self._since  # read once: the other thread may end its wait at any moment
        return since is not None and now - since > self._limit_s

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            if self.overdue(time.monotonic()):
                print(f"cbengine: a step has not ended after {self._limit_s:.0f} s: the GPU hangs", file=sys.stderr)
                sys.stderr.flush()
                os._exit(1)


# -- errors -----------------------------------------------------------------------------------------------------------


def guarded(doing: Callable[[], str], act: Callable[[], T]) -> T:
    """What `act` returns. Errors of the GPU's become a DeviceError that says what was being done; others are ours."""
    try:
        return act()
    except torch.OutOfMemoryError as error:
        failure = DeviceError(out_of_memory(doing(), str(error), *torch.cuda.mem_get_info()))
    except RuntimeError as error:
        if isinstance(error, DeviceError) or "CUDA" not in str(error):
            raise
        failure = DeviceError(f"the GPU failed in {doing()}: {_first_line(error)}")
    raise failure  # out here nothing holds what had been allocated until then


def out_of_memory(doing: str, complaint: str, free: int, total: int) -> str:
    """What was asked for, in torch's words, and what is there."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", complaint)
    wanted, there = asked[1] if asked else "more", f"{free / 2**30:.2f} of the GPU's {total / 2**30:.2f} GiB are free"
    return f"no memory for {doing}: {wanted} asked for, {there}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _driver() -> str | None:
    """Version of the GPU's driver, where the system says it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="ascii").partition("\n")[0].split()
    except (OSError, UnicodeDecodeError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)
