"""Steps that a graph may capture: their sizes, that none asks the device for a value, that each computes the same when
padded, and how a capture is made or fails. None of it needs a GPU.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.served import LOOPS, SCHEDULERS
from support.engine.tiny_runs import MIXED, SAMPLED, TINY, WAYS, capacities, tiny_run
from torch.utils._python_dispatch import TorchDispatchMode

from cbengine.batch import Capacity
from cbengine.build import Setup
from cbengine.device import cuda
from cbengine.device.base import DeviceError, Inline, Lanes
from cbengine.device.cuda import Timeline, Watchdog, guarded, out_of_memory, scratch_step
from cbengine.device.executor import Executor
from cbengine.device.layout import arrays
from cbengine.model import weights
from cbengine.model.decoder import Model
from cbengine.model.kvcache import KvCache
from cbengine.model.ops import Rows, TorchOps
from cbengine.sampling import Sampling, SamplingSettings
from cbsim.policy.captures import CAPTURED, bucket, captured_sizes
from cbsim.record import invariants
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps

# -- sizes ------------------------------------------------------------------------------------------------------------


@given(capacity=capacities, rows=st.integers(1, 1500))
def test_a_batch_is_padded_to_the_next_captured_size(capacity: Capacity, rows: int) -> None:
    """Every batch of a run has a graph, the smallest that holds it, and the padded step fits the buffers. Batches too
    large for any graph stay as they are; so do all without graphs.
    """
    sizes = captured_sizes(capacity.rows)
    mine = min(rows, capacity.rows)
    assert bucket(sizes, mine) == min(size for size in CAPTURED if size >= mine)
    assert bucket(sizes, mine) <= capacity.sampling
    assert bucket(captured_sizes(1500), 1025 + rows) == 1025 + rows
    assert bucket([], rows) == rows


@given(rows=st.sampled_from(CAPTURED), updates=st.integers(0, 40), random=st.booleans(), live=st.integers(1, 1024))
def test_the_inputs_of_a_graph_are_the_head_of_a_step(rows: int, updates: int, random: bool, live: int) -> None:
    """A replayed step copies as many values as its graph reads: all arrays but the table updates, in their places."""
    captured, _ = scratch_step([], 5, decodes=rows, random=random, padded=False)
    header = captured._replace(live=min(live, rows), updates=updates)
    staging = torch.arange(header.size, dtype=torch.int32)
    read, sent = arrays(staging[: captured.size].clone(), captured), arrays(staging, header)
    for name, array in read._asdict().items():
        if name in ("places", "blocks"):
            assert len(array) == 0
        else:
            assert torch.equal(array, getattr(sent, name)), name


# -- what a graph may capture -----------------------------------------------------------------------------------------


class OnlyMeta(TorchDispatchMode):
    """Every operation is between tensors without data, and none of them asks for a value."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        found = [x for x in torch.utils._pytree.tree_leaves((args, kwargs, made)) if isinstance(x, torch.Tensor)]
        assert all(x.is_meta for x in found if x.dim()), op
        assert not any(word in str(op) for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select"))
        return made


class NoAttention(TorchOps):
    """The reference reads lengths on the host; the kernels do not."""

    def attention(self, queries: Any, keys: Any, values: Any, rows: Rows, sees: Any) -> Any:
        return torch.empty_like(queries)


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("decodes", "chunks"), [(8, []), (0, [3, 1, 5]), (4, [3, 2])], ids=["decode", "prefill", "mixed"]
)
def test_no_step_waits_for_the_device(decodes: int, chunks: list[int], padded: bool, how: Sampling) -> None:
    """On tensors that have no data, an operation that needs a value on the host, or a tensor of the CPU's, is an error:
    what passes can be launched without waiting and, for decode steps, be captured.
    """
    meta, capacity = torch.device("meta"), Capacity(slots=8, width=4, rows=8, tokens=72)
    tensors = {name: torch.empty(shape, device=meta) for name, shape in weights.expected(TINY).items()}
    cache = KvCache(TINY, 32, 4, torch.float32, meta)
    executor = Executor(Model(TINY, tensors, NoAttention(), 16), cache, capacity)
    header, values = scratch_step(chunks, capacity.slots, decodes=decodes, random=not how.greedy, padded=padded)
    header = header._replace(updates=2)
    buffer = torch.zeros(len(values) + 4, dtype=torch.int32, device=meta)
    with OnlyMeta():
        step = arrays(buffer, header)
        executor.update_tables(step)
        tokens = executor.run(step, header)
    assert tokens.is_meta
    assert tokens.shape == (header.sampling,)


def test_the_check_above_finds_what_it_looks_for() -> None:
    x = torch.zeros(3, device="meta")
    with OnlyMeta():
        with pytest.raises((RuntimeError, NotImplementedError)):
            x[0].item()
        with pytest.raises((RuntimeError, NotImplementedError)):
            _ = x[x > 0]
        with pytest.raises((RuntimeError, AssertionError)):
            _ = x[torch.tensor([1, 2])] + torch.ones(2)


# -- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS, "mixed"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS[:4])
def test_padding_rows_change_nobody_s_text(
    scheduler: str, loop: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps padded to captured sizes, as for graphs, give every live row the tokens that it has without."""
    requests = MIXED if way == "mixed" else SamplingSettings()
    setup = Setup(device="inline", sampling=WAYS.get(way, SAMPLED), requests=requests)
    plain = tiny_run(scheduler, loop, setup)
    monkeypatch.setattr(Inline, "bucket", lambda _, rows: bucket(captured_sizes(1024), rows))
    padded = tiny_run(scheduler, loop, setup)
    table = padded.steps
    alone = table["prefill_tokens"] == 0
    assert (table["padded_tokens"] == [bucket(CAPTURED, rows) if rows else 0 for rows in table["rows"]])[alone].all()
    assert (table["padded_tokens"] > table["tokens"]).sum() > 3
    assert padded.texts == plain.texts


# -- captures ---------------------------------------------------------------------------------------------------------


class Capture:
    """Stands for `torch.cuda.graph`: ending a capture in which something failed fails, too."""

    def __init__(self, graph: Any, **_: Any) -> None:
        self._graph = graph

    def __enter__(self) -> None:
        self._graph.said.append("capture")

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


class Replayed:
    """Stands for `torch.cuda.CUDAGraph`."""

    said: list[str]

    def replay(self) -> None:
        self.said.append("replay")


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens round a capture, with nothing behind it."""
    Replayed.said = []
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    return Replayed.said


STREAM: Any = SimpleNamespace(wait_stream=lambda _: None)


def test_a_graph_is_run_before_and_replayed_after_its_capture(capturing: list[str]) -> None:
    """What happens once is neither captured nor left for the first step of a run."""
    assert cuda.captured(lambda: capturing.append("run"), STREAM)[1] is None
    assert capturing == ["run", "run", "capture", "run", "replay", "replay"]


def test_what_fails_in_a_capture_is_told_and_not_what_follows_from_it(capturing: list[str]) -> None:
    """Out of memory stays out of memory: it says what was asked for."""

    def fails() -> None:
        if "capture" in capturing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.50 GiB"):
        cuda.captured(fails, STREAM)
    assert "replay" not in capturing


# -- errors of the device ---------------------------------------------------------------------------------------------


def test_a_wait_is_overdue_after_its_limit_and_only_while_it_lasts() -> None:
    dog = Watchdog(5.0)
    try:
        assert not dog.overdue(1e12)
        with dog:
            began = dog._since
            assert began is not None
            assert not dog.overdue(began + 5.0)
            assert dog.overdue(began + 5.1)
        assert not dog.overdue(1e12)
    finally:
        dog.close()
    assert dog.closed


class Big:
    """Stands for a tensor."""


def test_a_failed_step_holds_no_memory_and_says_what_it_was() -> None:
    """The message becomes an error of its own when the frames of the failure, and their tensors, are gone."""
    held: list[weakref.ref[Big]] = []

    def fails() -> None:
        big = Big()
        held.append(weakref.ref(big))
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    with pytest.raises(DeviceError) as caught:
        guarded(lambda: "a step of 3 query tokens in 2 rows", fails)
    assert str(caught.value) == (
        "the GPU failed in a step of 3 query tokens in 2 rows: CUDA error: an illegal memory access was encountered"
    )
    assert caught.value.__context__ is None
    assert held[0]() is None


def test_errors_that_are_not_the_gpu_s_pass() -> None:
    def ours() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    def told_before() -> None:
        raise DeviceError("the GPU failed: CUDA error")

    with pytest.raises(RuntimeError, match=r"^mat1 and mat2"):
        guarded(str, ours)
    with pytest.raises(DeviceError, match=r"^the GPU failed: CUDA error$"):
        guarded(str, told_before)
    assert guarded(str, lambda: 7) == 7


def test_out_of_memory_says_what_was_asked_and_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_s = (
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.00 GiB"
    )
    said = "no memory for a step of 8 query tokens in 1 rows: 2.50 GiB asked for, 1.00 of the GPU's 79.00 GiB are free"
    what = "a step of 8 query tokens in 1 rows"
    assert out_of_memory(what, torch_s, 1 << 30, 79 << 30) == said
    assert ": more asked for, " in out_of_memory(what, "CUDA error: out of memory", 0, 1)

    def fails() -> None:
        raise torch.OutOfMemoryError(torch_s)

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 79 << 30))
    with pytest.raises(DeviceError) as caught:
        guarded(lambda: what, fails)
    assert str(caught.value) == said


# -- times that events tell -------------------------------------------------------------------------------------------


class Durations(NamedTuple):
    """What one step of a made-up run takes, in nanoseconds."""

    schedule: int
    prepare: int
    launch: int  # from the launch's beginning to that of the H2D copy
    h2d: int
    compute: int
    d2h: int
    wake: int  # from the end of the D2H copy until the host knows
    update: int


durations = st.builds(
    Durations,
    *(st.integers(0, 2_000_000), st.integers(0, 300_000), st.integers(1_000, 100_000), st.integers(0, 20_000)),
    *(st.integers(1_000, 30_000_000), st.integers(0, 20_000), st.integers(0, 80_000), st.integers(0, 200_000)),
)


@dataclass
class Flight:
    """A launched step of a made-up run: phases on the CPU and lanes, in true time."""

    phases: dict[str, tuple[int, int]]
    launched: int
    lanes: Lanes
    awaited: int = 0


def played(given_steps: list[Durations], depth: int, overlap: bool) -> list[Flight]:
    """A run as it truly was: in-order lanes, the CPU as far ahead as `depth` lets it."""
    now = 1_000
    free = {"h2d": 0, "compute": 0, "d2h": 0}
    flights: list[Flight] = []

    def wait(flight: Flight, took: Durations) -> int:
        start = now
        flight.awaited = max(start, flight.lanes.d2h_end_ns + took.wake)
        flight.phases["await"] = start, flight.awaited
        flight.phases["update"] = flight.awaited, flight.awaited + took.update
        return flight.awaited + took.update

    for i, took in enumerate(given_steps):
        launched = now + took.schedule + took.prepare
        phases = {"schedule": (now, now + took.schedule), "prepare": (now + took.schedule, launched)}
        copied = max(launched + took.launch, free["h2d"] if overlap else free["d2h"])
        start = max(copied + took.h2d, free["compute"])
        end = start + took.compute
        out = max(end, free["d2h"])
        lanes = Lanes(copied, copied + took.h2d, start, end, out, out + took.d2h)
        free = {"h2d": lanes.h2d_end_ns, "compute": end, "d2h": lanes.d2h_end_ns}
        now = launched + took.launch
        flights.append(Flight(phases | {"launch": (launched, now)}, launched, lanes))
        if i - depth + 1 >= 0:
            now = wait(flights[i - depth + 1], given_steps[i - depth + 1])
    for flight, took in list(zip(flights, given_steps, strict=True))[len(flights) - depth + 1 :]:
        now = wait(flight, took)
    return flights


def measured(flights: list[Flight], overlap: bool, rate: float, quantum: int) -> list[Lanes]:
    """The same as events of a GPU tell it, whose clock runs `rate` as fast and ticks every `quantum` nanoseconds."""

    def told(ns: int) -> int:
        return int(ns * rate) // quantum * quantum

    timeline, anchor, found = Timeline(0, overlap=overlap), told(0), []
    for flight in flights:
        lanes = flight.lanes
        marks = (lanes.h2d_start_ns, lanes.h2d_end_ns, lanes.compute_start_ns, lanes.compute_end_ns, lanes.d2h_end_ns)
        edges = [round(float(np.float32((told(mark) - anchor) / 1e6)) * 1e6) for mark in marks]
        assert min(edges) >= 0
        anchor = told(lanes.h2d_start_ns)
        found.append(timeline.aligned(edges, flight.launched, flight.awaited))
    return found


def recorded(flights: list[Flight], found: list[Lanes]) -> Steps:
    """The step table of a run of one request that decodes, with the lanes that were measured."""
    columns = ("rows", "decode_rows", "tokens", "padded_tokens", "sampled_rows", "running")
    table = np.zeros((len(flights), len(STEP_COLUMNS)), dtype=np.int64)
    for i, (flight, lanes) in enumerate(zip(flights, found, strict=True)):
        row = dict.fromkeys(columns, 1) | {"step": i}
        pieces = flight.phases | {"h2d": lanes[:2], "compute": lanes[2:4], "d2h": lanes[4:]}
        for name, (start, end) in pieces.items():
            row |= {f"{name}_start_ns": start, f"{name}_end_ns": end}
        for column, value in row.items():
            table[i, STEP_COLUMNS.index(column)] = value
    return Steps(table)


@given(
    steps=st.lists(durations, min_size=12, max_size=30),
    depth=st.sampled_from((1, 2)),
    overlap=st.booleans(),
    drift=st.sampled_from((0.0, 5e-5, -2e-3, 2e-3)),
    quantum=st.sampled_from((1, 32, 500, 1000)),
)
@settings(max_examples=100)
def test_times_of_a_gpu_whose_clock_drifts(
    steps: list[Durations], depth: int, overlap: bool, drift: float, quantum: int
) -> None:
    """Whatever the clocks do, the step table obeys every rule of a machine's. No time is further from the truth than
    what lay between a launch and its first copy and between a last copy and the host's knowing of it, in this step or
    any before, but for the drift since. The GPU's busy time is right likewise.
    """
    flights = played(steps, depth, overlap)
    found = measured(flights, overlap, 1 + drift, quantum)
    invariants.check(recorded(flights, found), depth=depth, overlap=overlap, total_blocks=0)

    begun, known, most = 0, [math.inf], 0
    for flight, mine in zip(flights, found, strict=True):
        true, span = flight.lanes, flight.awaited - begun
        begun, slack = true.h2d_start_ns, flight.awaited - flight.launched - (true.d2h_end_ns - true.h2d_start_ns)
        noise = 2 * abs(drift) * span + 3 * quantum + 2e-7 * span + 10
        known.append(min(known[-1], slack) + noise)
        most = max(most, slack)
        bound = max(known[-1], known[-2] + noise) if len(known) > 2 else known[-1]
        assert max(abs(a - b) for a, b in zip(mine, true, strict=True)) <= bound
    busy = sum(lanes.compute_end_ns - lanes.compute_start_ns for lanes in found)
    truly = sum(flight.lanes.compute_end_ns - flight.lanes.compute_start_ns for flight in flights)
    noise = (3 * abs(drift) + 2e-7) * flights[-1].awaited + len(steps) * (2 * quantum + 2)
    assert abs(busy - truly) <= most + noise


@given(
    told=st.lists(
        st.tuples(st.integers(0, 9000), st.integers(0, 9000), st.lists(st.integers(0, 30_000), min_size=5, max_size=5)),
        min_size=1,
        max_size=12,
    ),
    overlap=st.booleans(),
)
def test_times_obey_the_rules_whatever_events_say(told: list[tuple[int, int, list[int]]], overlap: bool) -> None:
    """Also of clocks that no GPU has: between launch and await, each lane in order, kernels after their inputs."""
    timeline, launched, awaited, last = Timeline(0, overlap=overlap), 0, 0, Lanes(*[0] * 6)
    for pause, lasted, edges in told:
        launched += pause
        awaited = max(awaited, launched) + lasted
        mine = timeline.aligned(sorted(edges), launched, awaited)
        assert launched <= mine.h2d_start_ns
        assert list(mine) == sorted(mine)
        assert mine.d2h_end_ns <= awaited
        assert mine.h2d_start_ns >= (last.h2d_end_ns if overlap else last.d2h_end_ns)
        assert mine.compute_start_ns >= last.compute_end_ns
        assert mine.d2h_start_ns >= last.d2h_end_ns
        last = mine


class At(NamedTuple):
    """An event at a time in nanoseconds; distances are what CUDA's are, float32 milliseconds."""

    ns: int

    def elapsed_time(self, later: Any) -> float:
        return float(np.float32((later.ns - self.ns) / 1e6))


def test_a_step_after_an_idle_hour_has_the_times_of_any_other() -> None:
    """An hour is known to a quarter of a millisecond; what lies within the step is not measured from so far."""
    hour, within = 3_600_000_000_000, (0, 4_000, 9_000, 90_000, 97_000)
    marks: Any = cuda.Marks(*[At(hour + 123_457 + ns) for ns in within])
    first, *later = cuda.edges_of(marks, At(0))  # type: ignore[arg-type]
    assert abs(first - hour - 123_457) <= 250_000
    assert [ns - first for ns in later] == pytest.approx(within[1:], abs=1)


def test_an_undisturbed_run_is_told_exactly() -> None:
    """Clocks that agree, to the nanosecond: nothing is moved or clipped."""
    took = [Durations(5_000, 9_000, 8_000, 3_000, 40_000 + i, 2_000, 6_000, 7_000) for i in range(30)]
    flights = played(took, 2, True)
    assert measured(flights, True, 1.0, 1) == [flight.lanes for flight in flights]
