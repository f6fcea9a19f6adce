"""A CUDA GPU as a device: three streams tied by events, decode steps replayed as graphs, one CPU block a step.

    h2d       pinned staging -> inbound[slot]
    compute   waits for it; tables; a decode step: inbound -> the graph's inputs, replay; else kernel by kernel;
              the tokens -> outbound[slot]
    d2h       waits for that; outbound[slot] -> pinned; the CPU blocks on the end of this copy

A step's time on the device is that of its replay or its kernels alone: inputs and tables are written before `start`.
A slot's buffers are written again only after its step was awaited, and are freed only when everything has ended.
All other memory is allocated and used on the compute stream alone, except for KV transfers (below). The last
sampled token of every request stays on the device, so a step never waits for the host to know what it computes on.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import accumulate, islice, product
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from cbengine.batch import Capacity
from cbengine.device import gpu
from cbengine.device.base import DeviceError, EngineDevice, Lanes
from cbengine.device.executor import Executor
from cbengine.device.layout import Header, Ints, arrays
from cbengine.device.moves import Moved, numbered
from cbengine.model.kvcache import Carrier
from cbsim.policy.captures import captured_sizes
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import Direction, Transfer

LOOK_S = 20e-6  # between two polls of transfers, when there is nothing else to do
WARM_UPS = 2  # runs before a graph's capture, and replays after it
T = TypeVar("T")
NOTHING = StepPlan(0)  # the plan of a warm-up, which transfers nothing


class Marks(NamedTuple):
    """The events at the edges of one step's copies and kernels."""

    h2d_start: torch.cuda.Event
    h2d_end: torch.cuda.Event
    start: torch.cuda.Event
    end: torch.cuda.Event
    done: torch.cuda.Event

    @classmethod
    def new(cls, *, spin: bool) -> Self:
        """Create events. With `spin` the CPU is kept busy while it waits for a step, and wakes up sooner."""
        first, second, third, fourth = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        return cls(first, second, third, fourth, torch.cuda.Event(enable_timing=True, blocking=not spin))


class Cuda(EngineDevice):
    """A CUDA GPU. `graphs`: capture decode steps, those that draw tokens (if `random`, some do) and those that do not.
    `overlap`: copies use own streams. `spin`: wait without sleeping.
    """

    def __init__(
        self,
        executor: Executor,
        capacity: Capacity,
        depth: int,
        *,
        graphs: bool,
        overlap: bool,
        random: bool,
        spin: bool = False,
    ) -> None:
        """Capture every graph that the run may need, and run every kind of step once. Raises DeviceError."""
        self._executor, self._capacity, self._random, self._overlap = executor, capacity, random, overlap
        self.group = executor.group
        self._compute, self._h2d, self._d2h = streams()[:3] if overlap else streams()[:1] * 3
        drafts = capacity.drafts
        self._sizes = captured_sizes(capacity.rows) if graphs and drafts < executor.reach else []
        self._graphs: dict[tuple[int, bool], Graph] = {}  # by rows, and whether some draw
        self._capture_s = 0.0  # seconds to capture one graph, the kernels' compilation included
        self.staging: list[Ints] = []
        self._pinned: list[Tensor] = []
        self._received: list[Tensor] = []
        self._inbound: list[Tensor] = []
        self._outbound: list[Tensor] = []
        self._marks = [Marks.new(spin=spin) for _ in range(depth + 1)]
        self._launched = 0
        self._in_flight: dict[int, tuple[Marks, int, int]] = {}  # slot -> events, result values, time of launch
        self._anchor: torch.cuda.Event  # a step's edges are measured from here
        self._timeline: Timeline
        self._moves: CudaMoves
        self._watchdog = Watchdog(60.0)  # a step that takes longer has hung
        try:
            guarded(lambda: "a step's inputs and outputs", partial(self._allocate, depth))
            self._warm_up()
        except BaseException:
            self.close()
            raise
        self.facts = {
            **gpu.facts(),
            "wait": "spin" if spin else "block",
            "captured_batches": self._sizes,
            "capture_s": self._capture_s,
            "allocated_bytes": torch.cuda.memory_allocated(),
        }

    def launch(self, slot: int, header: Header, plan: StepPlan = NOTHING, excess: Ints | None = None) -> None:
        at = time.perf_counter_ns()
        marks = self._marks[self._launched % len(self._marks)]
        self._launched += 1
        guarded(
            lambda: f"a step of {header.tokens} query tokens in {header.rows} rows",
            lambda: self._enqueue(slot, header, marks, plan, excess),
        )
        self._in_flight[slot] = marks, header.results, at

    def done(self, slot: int) -> bool:
        """Whether the step is over, so that `wait` returns at once."""
        return bool(self._in_flight[slot][0].done.query())

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        marks, count, launched = self._in_flight.pop(slot)
        with self._watchdog:
            guarded(lambda: "a step that had been launched", marks.done.synchronize)
        awaited = time.perf_counter_ns()
        edges = edges_of(marks, self._anchor)
        self._anchor = marks.h2d_start
        results: Ints = self._received[slot][:count].numpy().copy()
        return results, self._timeline.aligned(edges, launched, awaited)

    def moved(self, until_ns: int | None) -> list[Moved]:
        with self._watchdog:
            while not (over := guarded(lambda: "moves of KV", self._moves.over)):
                if until_ns is None or time.perf_counter_ns() >= until_ns:
                    break
                time.sleep(LOOK_S)
        return [Moved(queued.step, queued.at, self._time(queued.start), self._time(queued.end)) for queued in over]

    def _time(self, event: torch.cuda.Event) -> int:
        return self._timeline.at(round(self._anchor.elapsed_time(event) * 1e6))

    def close(self) -> None:
        if self._watchdog.closed:
            return
        with suppress(RuntimeError), self._watchdog:  # a GPU that has failed for good has nothing to free
            torch.cuda.synchronize()
        self._watchdog.close()
        self._graphs.clear()
        self._in_flight.clear()
        self.staging, self._pinned, self._received, self._inbound, self._outbound = [], [], [], [], []
        del self._executor
        if hasattr(self, "_moves"):
            del self._moves
        with suppress(RuntimeError):
            torch.cuda.empty_cache()

    def _enqueue(self, slot: int, header: Header, marks: Marks, plan: StepPlan, excess: Ints | None) -> None:
        inbound, outbound, size = self._inbound[slot], self._outbound[slot][: header.results], header.size
        transfers = bool(plan.transfers or plan.awaited)
        graph = self._graphs.get((header.rows, header.random)) if header.plain else None
        step = arrays(inbound, header) if graph is None or header.updates else None
        with torch.cuda.stream(self._h2d):
            marks.h2d_start.record(self._h2d)
            inbound[:size].copy_(self._pinned[slot][:size], non_blocking=True)
            marks.h2d_end.record(self._h2d)
        if transfers:
            self._moves.before_rows(plan)
        with torch.cuda.stream(self._compute):
            self._compute.wait_event(marks.h2d_end)
            if step is not None:
                self._executor.update_tables(step, excess)
            if graph is not None:
                graph.inputs.copy_(inbound[: len(graph.inputs)])
            marks.start.record(self._compute)
            if transfers:
                self._moves.copies(plan)
            if graph is not None:
                graph.graph.replay()
                outbound.copy_(graph.tokens)
            else:
                assert step is not None
                outbound.copy_(self._executor.run(step, header))
            marks.end.record(self._compute)
        with torch.cuda.stream(self._d2h):
            self._d2h.wait_event(marks.end)
            self._received[slot][: header.results].copy_(outbound, non_blocking=True)
            marks.done.record(self._d2h)
        if transfers:
            self._moves.after_rows(plan, marks.end)

    def _allocate(self, depth: int) -> None:
        torch.cuda.empty_cache()  # cached memory left over from building the weights
        size, results, device = self._capacity.staging, self._capacity.results, self._executor.device
        self._pinned = [gpu.pinned(size) for _ in range(depth)]
        self._received = [gpu.pinned(results) for _ in range(depth)]
        self._inbound = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(depth)]
        self._outbound = [torch.zeros(results, dtype=torch.int32, device=device) for _ in range(depth)]
        self.staging = [buffer.numpy() for buffer in self._pinned]
        self._moves = CudaMoves(self._executor.carrier, self._compute, overlap=self._overlap)
        self._anchor = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()  # weights, cache and buffers were written on another stream
        self._timeline = Timeline(time.perf_counter_ns(), overlap=self._overlap)
        self._anchor.record(self._h2d)

    def _warm_up(self) -> None:
        """Run every kind of step once, so that no run compiles a kernel or allocates memory for the first time."""
        if self._sizes:
            gc.collect()  # graphs of earlier runs must not be destroyed while another one is captured
            pool = torch.cuda.graph_pool_handle()
            began = time.perf_counter()
            draws = (True, False) if self._random else (False,)
            for rows, random in product(reversed(self._sizes), draws):  # later ones reuse the largest one's memory
                doing = partial("capturing a decode step of {} requests".format, rows)
                self._graphs[rows, random] = guarded(doing, partial(self._capture, rows, pool, random=random))
            self._capture_s = (time.perf_counter() - began) / len(self._graphs)
        self._run_warm_ups()
        warm_up = partial(self._moves.warm_up, self._executor.scratch, host_tier=self._executor.has_host_tier)
        guarded(lambda: "moving a block", warm_up)

    def settle(self) -> None:
        """Run a step kernel by kernel: cuBLAS makes a handle and a workspace for each thread that does."""
        self._run_warm_ups(1)

    def _run_warm_ups(self, count: int | None = None) -> None:
        steps = warm_ups(self._capacity, self._executor.reach, graphs=bool(self._sizes), random=self._random)
        for header, values in islice(steps, count):
            self.staging[0][: len(values)] = values
            self.launch(0, header)
            self.wait(0)

    def _capture(self, rows: int, pool: Any, *, random: bool) -> Graph:
        drafts = self._capacity.drafts
        counts = [1 + drafts] * rows if drafts else []
        decodes = 0 if drafts else rows
        header, values = scratch_step(counts, self._capacity.slots, decodes=decodes, random=random, drafts=drafts)
        with torch.cuda.stream(self._compute):
            inputs = torch.from_numpy(values).to(self._executor.device)
        step = arrays(inputs, header)
        graph, tokens = captured(lambda: self._executor.run(step, header), self._compute, pool)
        return Graph(graph, inputs, tokens)


# -- KV transfers: those in order on the compute stream, jobs on a stream for each direction, tied by events ----------
#
#   compute   waits for the jobs that a plan awaits; its transfers in order; `ready`; then its rows, `end`
#   out       waits for `end` of the plan that lists a job to the host; carries its blocks
#   in        waits for `ready` of the plan that lists a job from the host: before it, its targets may be in use
#
# A captured graph holds no transfer: they are queued before its replay. The CPU waits for none of them; their events
# are queried for completion. Blocks that a job reads or writes have no other user until then, as policy guarantees.


class QueuedMove(NamedTuple):
    """A transfer queued on the GPU, and the events at its edges."""

    step: int
    at: int  # its index in its plan's transfers
    job: int
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaMoves:
    """A GPU's KV transfers. `carrier` makes a carrier for each stream; without `overlap` all use the compute stream."""

    def __init__(self, carrier: Callable[[], Carrier], compute: torch.cuda.Stream, *, overlap: bool) -> None:
        self._compute = compute
        self._out, self._in = streams()[3:] if overlap else (compute, compute)
        self._carriers = {stream: carrier() for stream in (self._compute, self._out, self._in)}
        self._queued: list[QueuedMove] = []  # not known to have ended
        self._ready = torch.cuda.Event()

    def warm_up(self, scratch: int, *, host_tier: bool) -> None:
        """Run every kind of copy once on every stream, on unused blocks, so that a run loads no kernel."""
        for stream, carrier in self._carriers.items():
            with torch.cuda.stream(stream):
                carrier.carry(Direction.COPY, (0,), (scratch,))
                if host_tier:
                    carrier.carry(Direction.OUT, (scratch,), (0,))
                    carrier.carry(Direction.IN, (0,), (scratch,))
            torch.cuda.synchronize()  # the next one uses the same blocks

    def before_rows(self, plan: StepPlan) -> None:
        """Queue the transfers before a plan's rows, but for the last device copies, which are left to `copies`."""
        for queued in self._queued:
            if queued.job in plan.awaited:
                self._compute.wait_event(queued.end)
        self._carry(plan.step, crossing(plan), self._compute)

    def copies(self, plan: StepPlan) -> None:
        """Queue the copies on the device, whose time counts as the step's."""
        self._carry(plan.step, list(numbered(plan, in_order=True))[len(crossing(plan)) :], self._compute)
        self._ready.record(self._compute)

    def after_rows(self, plan: StepPlan, end: torch.cuda.Event) -> None:
        """Queue the jobs of a plan whose rows have been queued, up to `end`."""
        for at, move in numbered(plan, in_order=False):
            stream, event = (self._out, end) if move.direction is Direction.OUT else (self._in, self._ready)
            stream.wait_event(event)
            self._carry(plan.step, [(at, move)], stream)

    def over(self) -> list[QueuedMove]:
        """Return the transfers that have ended and were not returned before."""
        over: list[QueuedMove] = []
        left: list[QueuedMove] = []
        for queued in self._queued:
            (over if queued.end.query() else left).append(queued)
        self._queued = left
        return over

    def _carry(self, step: int, transfers: Iterable[tuple[int, Transfer]], stream: torch.cuda.Stream) -> None:
        for at, move in transfers:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                start.record(stream)
                self._carriers[stream].carry(move.direction, move.sources, move.targets)
                end.record(stream)
            self._queued.append(QueuedMove(step, at, move.job, start, end))


def crossing(plan: StepPlan) -> list[tuple[int, Transfer]]:
    """Return the in-order transfers up to the last one from or to the host; only device copies follow it."""
    listed = list(numbered(plan, in_order=True))
    while listed and listed[-1][1].direction is Direction.COPY:
        listed.pop()
    return listed


def edges_of(marks: Marks, anchor: torch.cuda.Event) -> list[int]:
    """Return the nanoseconds from `anchor`, maybe hours before: too far for float32, except for the first event."""
    first = marks.h2d_start
    since = round(anchor.elapsed_time(first) * 1e6)
    return [since, *(since + round(first.elapsed_time(mark) * 1e6) for mark in marks[1:])]


class Timeline:
    """A mapping of a step's events to times of its copies and kernels on the host's clock. Events give distances in
    time, not times, and the two clocks drift. Two facts tie them: a step's first copy begins after its launch has, and
    its last one ends before the host knows. The mapping is shifted when it would break one of these, by the least
    amount, so its error never exceeds the time of launching and waking up. What drift within a step then leaves out of
    order is clipped.
    """

    def __init__(self, anchor_ns: int, *, overlap: bool) -> None:
        """Count the first edges from `anchor_ns`."""
        self._anchor_ns, self._overlap = anchor_ns, overlap
        self._last = Lanes(*[anchor_ns] * 6)

    def at(self, edge: int) -> int:
        """Return the time of an event `edge` ns behind, or long before, the H2D copy of the step aligned last."""
        return self._anchor_ns + edge

    def aligned(self, edges: Sequence[int], launched_ns: int, awaited_ns: int) -> Lanes:
        """Map nanoseconds since the previous step's H2D copy began, an event near and before all others, to times:
        start and end of this step's H2D copy, of its kernels, end of its D2H copy. Called in order of launch.
        """
        at = [self._anchor_ns + edge for edge in edges]
        shift = max(launched_ns - at[0], 0) or min(awaited_ns - at[-1], 0)
        self._anchor_ns = at[0] + shift
        last = self._last

        def clipped(ns: int, *after: int) -> int:
            return max(min(ns + shift, awaited_ns), *after)

        h2d_start = clipped(at[0], launched_ns, last.h2d_end_ns if self._overlap else last.d2h_end_ns)
        h2d_end = clipped(at[1], h2d_start)
        start = clipped(at[2], h2d_end, last.compute_end_ns)
        end = clipped(at[3], start)
        d2h_start = max(end, last.d2h_end_ns)
        self._last = Lanes(h2d_start, h2d_end, start, end, d2h_start, clipped(at[4], d2h_start))
        return self._last


class Watchdog:
    """A watchdog that ends the process when a wait lasts too long, because a hung kernel cannot be interrupted."""

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


def guarded(doing: Callable[[], str], act: Callable[[], T]) -> T:
    """Return what `act` does; turn a GPU's errors into a DeviceError that names the activity, and pass others on."""
    try:
        return act()
    except torch.OutOfMemoryError as error:
        failure = DeviceError(out_of_memory(doing(), str(error), *torch.cuda.mem_get_info()))
    except RuntimeError as error:
        if isinstance(error, DeviceError) or "CUDA" not in str(error):
            raise
        failure = DeviceError(f"the GPU failed in {doing()}: {str(error).strip().splitlines()[0]}")
    raise failure  # raised here, where nothing refers to the memory allocated until then


def out_of_memory(doing: str, complaint: str, free: int, total: int) -> str:
    """Return a message with torch's own words on what was requested, and the memory that is free."""
    size = re.search(r"Tried to allocate ([\d.]+ \w+)", complaint)
    requested, there = size[1] if size else "more", f"{free / 2**30:.2f} of the GPU's {total / 2**30:.2f} GiB are free"
    return f"no memory for {doing}: {requested} asked for, {there}"


class Graph(NamedTuple):
    """A captured decode step: the graph, its inputs, its outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    tokens: Tensor


@cache
def streams() -> list[torch.cuda.Stream]:
    """Return streams for kernels, copies in and out, KV to and from the host: one set for all runs of a process, as
    cuBLAS keeps a workspace for every stream.
    """
    return [torch.cuda.Stream() for _ in range(5)]


def captured(act: Callable[[], T], stream: torch.cuda.Stream, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture `act` as a graph; return it and what `act` returned: tensors that every replay writes again. `act` is run
    before on the same stream, so that what happens only once (compiling, loading, workspaces) is not captured; the
    graph is replayed after, because its first launch uploads it. Raises what `act` raises.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            act()
    graph, first = torch.cuda.CUDAGraph(), None
    mode = "thread_local" if torch.distributed.is_initialized() else "global"  # NCCL has a thread that queries events
    capturing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode)
    try:  # on the stream already, since a capture that cannot be ended leaves its own stream current
        with torch.cuda.stream(stream), capturing:
            try:
                result = act()
            except Exception as error:
                first = error
                raise
    except Exception:
        if first is not None:  # ending the capture then fails, too, and hides the cause
            raise first from None
        raise
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            graph.replay()
    return graph, result


def warm_ups(capacity: Capacity, reach: int, *, graphs: bool, random: bool) -> Iterator[tuple[Header, Ints]]:
    """Yield steps that need every kernel of a run, except for decode steps replayed as graphs, and as much memory as
    its largest step. That one comes last: every row samples, and the rows have the most query tokens possible, though
    no row more than the `reach` of a slot.
    """
    most, beams, tokens = capacity.rows, capacity.beams, 64  # tokens of the least warm-up that mixes prefill and decode
    step = partial(scratch_step, slot=capacity.slots, random=random, drafts=capacity.drafts)
    sizes = sorted({most, *(1 << i for i in range(most.bit_length()))})  # doubling the rows halves the splits of each
    for rows in sizes:
        if 0 < beams <= rows:
            yield step([], decodes=rows // beams * beams, beams=beams)
    while tokens < capacity.tokens:  # kernels of matrix products differ with the size
        decodes = min(most - 1, tokens // 2)  # half of the tokens and one of the rows are left to chunks
        chunks = min(most - decodes, max(1, -(-(tokens - decodes) // reach)))
        yield step(spread(tokens - decodes, chunks, reach), decodes=decodes)
        tokens *= 2
    largest = spread(capacity.tokens, most, reach)
    for padded in (False,) if graphs else (False, True):
        for rows in () if graphs else sizes:
            yield step([], decodes=rows, padded=padded, random=False)
        chunked = max(largest) > 1
        yield step(largest if chunked else [], decodes=0 if chunked else most, padded=padded)


def spread(tokens: int, rows: int, reach: int) -> list[int]:
    """Distribute `tokens` evenly over this many rows, none above `reach`."""
    return [min(reach, (tokens + i) // rows) for i in range(rows)]


def scratch_step(
    chunks: list[int],
    slot: int,
    *,
    random: bool,
    decodes: int = 0,
    padded: bool = False,
    beams: int = 0,
    drafts: int = 0,
) -> tuple[Header, Ints]:
    """Return a step on the scratch slot: decode rows, then the first chunks of sequences. Every row samples. With
    `drafts` there are no decode rows: each row verifies so many, or all its tokens but one.
    """
    if drafts:
        chunks, decodes = [1] * decodes + chunks, 0
    counts = [1] * decodes + chunks
    verifies = [min(drafts, count - 1) for count in counts]
    header = Header(
        rows=len(counts),
        decodes=decodes,
        live=decodes,
        tokens=sum(counts),
        longest=max(chunks, default=1),
        further=len(chunks),
        updates=0,
        random=random,
        padded=padded,
        beams=beams,
        most_drafts=drafts,
        verified=sum(verifies),
        proposed=drafts,
    )
    values: Ints = np.zeros(header.size, dtype=np.int32)
    step = arrays(values, header)
    step.slots[:], step.kv_tokens[:] = slot, counts
    step.starts[:] = [0, *accumulate(counts)]
    step.sampled[:] = range(decodes, header.rows)
    step.verifies[:] = verifies if drafts else []
    return header, values
