"""The CUDA device. What needs no GPU is tested everywhere: sizes, warm-ups, times, errors, and that a step computes the
same when padded, and never asks the device for a value. The rest is marked `gpu`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

from hypothesis import given, settings
from hypothesis import strategies as st
from served import INLINE, LOOPS, MS, SCHEDULERS, SHAPE, Run, asked, check_texts, spec, steps
from torch.utils._python_dispatch import TorchDispatchMode

from cbengine import build, servers
from cbengine.batch import Capacity
from cbengine.build import Setup
from cbengine.device import graphs
from cbengine.device.base import DeviceError, Inline, Lanes
from cbengine.device.executor import Executor
from cbengine.device.faults import Watchdog, guarded, out_of_memory
from cbengine.device.layout import arrays
from cbengine.device.timeline import Timeline
from cbengine.device.warmup import scratch_step, warm_ups
from cbengine.model import weights
from cbengine.model.architecture import Architecture
from cbengine.model.decoder import Model
from cbengine.model.kvcache import KvCache
from cbengine.model.ops import Rows, TorchOps
from cbengine.sampling import Sampling
from cbengine.settings import SamplingSettings
from cbsim.policy.graphs import CAPTURED, bucket, captured_sizes
from cbsim.results import invariants
from cbsim.results.metrics import Steps
from cbsim.results.record import STEP_COLUMNS
from cbsim.workload.generators import Workload

torch.set_num_threads(1)
TINY = Architecture(name="tiny", tied_embeddings=False, max_position=256, **SHAPE)
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)
WAYS = {"greedy": Sampling(), "sampled": SAMPLED}
MIXED = SamplingSettings(
    {"r1": Sampling(), "r2": Sampling(temperature=1.2, top_p=0.8), "r4": Sampling(temperature=2.0, top_k=3)}
)
capacities = st.builds(
    lambda slots, width, rows, tokens: Capacity(slots, width, min(rows, slots), tokens + min(rows, slots) + 64),
    *(st.integers(1, 300), st.integers(1, 40), st.integers(1, 300), st.integers(0, 5000)),
)


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


# -- warm-ups ---------------------------------------------------------------------------------------------------------


@given(capacity=capacities, reach=st.integers(2, 400), graphs=st.booleans(), random=st.booleans())
def test_warm_ups_fit_the_buffers_and_the_last_is_the_largest_step(
    capacity: Capacity, reach: int, graphs: bool, random: bool
) -> None:
    """All rows sample, and together they have all the query tokens that slots can take."""
    done = list(warm_ups(capacity, reach, graphs=graphs, random=random))
    for header, values in done:
        assert len(values) == header.size <= capacity.staging
        assert header.sampling == header.rows <= capacity.sampling
        assert header.tokens <= max(capacity.tokens, capacity.rows)
        step = arrays(values, header)
        counts = np.diff(step.starts)
        assert counts.tolist() == step.kv_tokens.tolist()
        assert 1 <= counts.min() <= counts.max() == header.longest <= reach
        assert (counts[: header.decodes] == 1).all()
    last = done[-1][0]
    assert last.rows == capacity.rows
    assert last.tokens == capacity.tokens or last.longest == reach
    assert {header.padded for header, _ in done} == ({False} if graphs else {False, True})


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@given(most=st.integers(1, 1100))
@settings(max_examples=60)
def test_warm_ups_meet_every_way_to_split_a_row(kv_heads: int, most: int) -> None:
    """The kernel that joins the parts of a row is compiled for each number of parts: none is left for the run."""
    ops = pytest.importorskip(
        "cbengine.model.kernels.triton_ops", reason="the kernels are written in Triton"
    ).TritonOps(132)
    capacity = Capacity(slots=most, width=4, rows=most, tokens=most + 64)
    met = {
        ops._splits(header.decodes * kv_heads)
        for header, _ in warm_ups(capacity, 64, graphs=False, random=False)
        if header.decodes
    }
    captured = {ops._splits(size * kv_heads) for size in captured_sizes(most)}
    needed = {ops._splits(rows * kv_heads) for rows in range(1, most + 1)}
    assert needed <= met
    assert needed <= captured | {1}


@given(capacity=capacities, reach=st.integers(200, 400), random=st.booleans())
def test_warm_ups_mix_prefill_and_decode_at_every_size(capacity: Capacity, reach: int, random: bool) -> None:
    """A library of matrix products loads its kernels when a size is first met: sizes double from 64 query tokens up to
    the budget, with decoding rows beside chunks where there are two rows; no table is updated.
    """
    met = [header for header, _ in warm_ups(capacity, reach, graphs=True, random=random)][:-1]
    assert all((header.decodes > 0) == (capacity.rows > 1) and header.further > 0 for header in met)
    assert (64 << len(met)) >= capacity.tokens
    roomy = [header.tokens for header in met if header.tokens < reach]
    assert roomy == [64 << i for i in range(len(roomy))]


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_warm_ups_are_steps_that_a_model_can_compute(how: Sampling) -> None:
    """Places, positions and tables are within bounds, every row gets a token, and no slot but scratch is touched."""
    capacity = Capacity(slots=3, width=2, rows=3, tokens=70)
    executor, cache = tiny_executor(capacity)
    for header, values in warm_ups(capacity, executor.reach, graphs=False, random=not how.greedy):
        step = arrays(torch.from_numpy(values), header)
        executor.update_tables(step)
        tokens = executor.run(step, header)
        assert tokens.shape == (header.sampling,)
        assert int(tokens.min()) >= 0
    assert not cache.keys[:, : cache.scratch].any()
    assert not executor._last[: capacity.slots].any()


def tiny_executor(capacity: Capacity) -> tuple[Executor, KvCache]:
    cpu = torch.device("cpu")
    model = Model(TINY, weights.random(TINY, 1, torch.float32, cpu), TorchOps(), 4 * capacity.width)
    cache = KvCache(TINY, capacity.slots * capacity.width, 4, torch.float32, cpu)
    return Executor(model, cache, capacity), cache


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

    def attention(self, queries: Any, keys: Any, values: Any, rows: Rows) -> Any:
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


def tiny_load(requests: int = 7) -> Workload:
    """Requests that come in one by one and end one by one."""
    kinds = [(13, 9), (1, 20), (8, 14), (30, 3)]
    specs = [spec(i, *kinds[i % 4], arrival_ns=6 * MS * i) for i in range(requests)]
    return Workload(specs, len(specs))


def tiny_server(scheduler: str, *overrides: str) -> Any:
    limit = {"vllm": "max_num_batched_tokens", "static": None}.get(scheduler.partition(" ")[0], "max_batch_tokens")
    seats = {"vllm": "max_num_seqs", "static": "batch_size"}.get(scheduler.partition(" ")[0], "max_requests_per_batch")
    budget = [f"scheduler.{limit}=24"] if limit else []
    sizes = ("kv_cache={block_size: 4, num_blocks: 200}", f"scheduler.{seats}=6", "model.dtype=float32")
    return asked(scheduler, *sizes, *budget, *overrides)


def tiny_run(scheduler: str, loop: str, setup: Setup, tick_ns: int = MS, *overrides: str, **hooks: Any) -> Run:
    return Run(tiny_server(scheduler, *overrides), loop, tiny_load(), setup=setup, tick_ns=tick_ns, **hooks)


# -- times ------------------------------------------------------------------------------------------------------------


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
        found.append(timeline.place(edges, flight.launched, flight.awaited))
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
        mine = timeline.place(sorted(edges), launched, awaited)
        assert launched <= mine.h2d_start_ns
        assert list(mine) == sorted(mine)
        assert mine.d2h_end_ns <= awaited
        assert mine.h2d_start_ns >= (last.h2d_end_ns if overlap else last.d2h_end_ns)
        assert mine.compute_start_ns >= last.compute_end_ns
        assert mine.d2h_start_ns >= last.d2h_end_ns
        last = mine


def test_an_undisturbed_run_is_told_exactly() -> None:
    """Clocks that agree, to the nanosecond: nothing is moved or clipped."""
    took = [Durations(5_000, 9_000, 8_000, 3_000, 40_000 + i, 2_000, 6_000, 7_000) for i in range(30)]
    flights = played(took, 2, True)
    assert measured(flights, True, 1.0, 1) == [flight.lanes for flight in flights]


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
    assert graphs.captured(lambda: capturing.append("run"), STREAM)[1] is None
    assert capturing == ["run", "run", "capture", "run", "replay", "replay"]


def test_what_fails_in_a_capture_is_told_and_not_what_follows_from_it(capturing: list[str]) -> None:
    """Out of memory stays out of memory: it says what was asked for."""

    def fails() -> None:
        if "capture" in capturing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.50 GiB"):
        graphs.captured(fails, STREAM)
    assert "replay" not in capturing


# -- errors -----------------------------------------------------------------------------------------------------------


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


# -- on a GPU ---------------------------------------------------------------------------------------------------------

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GRAPHS = {"graphs": True, "kernel by kernel": False}
each_graphs = pytest.mark.parametrize("graphs", GRAPHS.values(), ids=GRAPHS)
each_loop = pytest.mark.parametrize("loop", LOOPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights that every engine on a CPU draws: on a GPU a seed means others."""
    plan = build.executor_plan(asked("vllm"), "sync", [], INLINE)
    path = tmp_path_factory.mktemp("weights")
    weights.to_transformers(plan.architecture, plan.tensors()).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def broken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that turn everything into NaN."""
    plan = build.executor_plan(asked("vllm"), "sync", [], INLINE)
    tensors = plan.tensors()
    tensors["model.norm.weight"].fill_(torch.nan)
    path = tmp_path_factory.mktemp("broken")
    weights.to_transformers(plan.architecture, tensors).save_pretrained(path)
    return path


def on(folder: Path, graphs: bool = True, how: Sampling = WAYS["greedy"]) -> Setup:
    return Setup(device="cuda", weights=folder, sampling=how, cuda_graphs=graphs)


@pytest.mark.gpu
@GPU
@each_graphs
@each_loop
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_texts_are_those_of_the_cpu(scheduler: str, loop: str, graphs: bool, folder: Path) -> None:
    """Float32, every policy, replayed or launched one by one: all tokens are those of `generate` on a CPU."""
    run = tiny_run(scheduler, loop, on(folder, graphs))
    check_texts(run)
    assert bool(run.device.facts["captured_batches"]) == (graphs and scheduler != "static")


@pytest.mark.gpu
@GPU
@each_loop
@pytest.mark.parametrize("requests", [SamplingSettings(), MIXED], ids=["alike", "mixed"])
def test_replayed_or_launched_sampled_texts_are_the_same(loop: str, requests: SamplingSettings, folder: Path) -> None:
    gpu = [replace(on(folder, graphs, SAMPLED), requests=requests) for graphs in (True, False)]
    cpu = Setup(device="inline", sampling=SAMPLED, requests=requests)
    one, other, third = (tiny_run(SCHEDULERS[0], loop, setup).texts for setup in (*gpu, cpu))
    assert one == other == third


@pytest.mark.gpu
@GPU
@each_graphs
@each_loop
@pytest.mark.parametrize("streams", [True, False])
def test_the_step_table_is_that_of_a_machine(streams: bool, loop: str, graphs: bool, folder: Path) -> None:
    """On the real clock. Asynchronous, a step computes before the one before it has been applied."""
    run = tiny_run(SCHEDULERS[0], loop, on(folder, graphs), 0, f"loop.streams={str(streams).lower()}")
    table, depth = run.steps, LOOPS.index(loop) + 1
    invariants.check(table, depth=depth, overlap=streams, total_blocks=200)
    assert (table.lane("compute")[table["rows"] > 0] > 0).all()
    overlapped = table["compute_start_ns"][1:] < table["update_end_ns"][:-1]
    assert overlapped.mean() > 0.5 if loop == "async" else not overlapped.any()


@pytest.mark.gpu
@GPU
def test_bfloat16_logits_are_near_float32_ones() -> None:
    """A prompt in one piece, then a token behind it, through the kernels."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    ids = torch.randint(0, TINY.vocab, (41,), generator=torch.Generator().manual_seed(1))
    found = []
    for device, dtype in ((gpu, torch.bfloat16), (cpu, torch.float32)):
        drawn = weights.random(TINY, 1, torch.float32, cpu)
        tensors = {name: tensor.bfloat16().to(device, dtype) for name, tensor in drawn.items()}
        model, cache = Model(TINY, tensors, build.ops(device.type), 64), KvCache(TINY, 16, 4, dtype, device)
        with torch.inference_mode():
            pieces = [
                model.logits(model.forward(ids[a:b].to(device), cache, one_row(a, b, device)))
                for a, b in ((0, 40), (40, 41))
            ]
        found.append(torch.cat(pieces).cpu())
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 3e-2


def one_row(low: int, high: int, device: Any) -> Rows:
    """Tokens low to high - 1 of a sequence whose blocks of 4 lie in order."""

    def ints(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    at = torch.arange(low, high, device=device)
    tables = torch.arange(16, dtype=torch.int32, device=device)[None]
    single = high - low == 1
    return Rows(tables, ints(0), ints(high), ints(0, high - low), at, at, decodes=int(single), longest=high - low)


@pytest.mark.gpu
@GPU
@each_graphs
def test_runs_give_all_memory_back(graphs: bool, folder: Path, broken: Path) -> None:
    """Whether they finish, are cancelled or produce NaN; the first run of a process leaves cuBLAS its workspaces."""
    tiny_run(SCHEDULERS[0], "async", on(folder, graphs))
    before, kept = taken(), torch.cuda.memory_reserved()
    tiny_run(SCHEDULERS[0], "async", on(folder, graphs))
    assert taken() == before
    load = tiny_load()
    given_up = Workload(load.open, load.total, [(60 * MS, load.open[1]), (61 * MS, load.open[2])])
    run = Run(tiny_server(SCHEDULERS[0]), "async", given_up, setup=on(folder, graphs))
    assert run.statuses["aborted"] > 0
    assert taken() == before
    run = tiny_run(SCHEDULERS[0], "async", on(broken, graphs))
    assert run.statuses == {"failed": 7}
    assert taken() == before
    assert torch.cuda.memory_reserved() <= kept + (8 << 20)  # torch takes memory from the GPU in pieces


def taken() -> int:
    """Bytes in tensors."""
    gc.collect()
    return int(torch.cuda.memory_allocated())


@pytest.fixture
def fraction() -> Iterator[Any]:
    """Sets how much of the GPU this process may take."""
    yield torch.cuda.set_per_process_memory_fraction
    torch.cuda.set_per_process_memory_fraction(1.0)


WIDE = ("model.intermediate=16384", "model.hidden=256", "scheduler.max_num_batched_tokens=4096")


@pytest.mark.gpu
@GPU
@each_graphs
def test_a_step_too_large_for_the_memory_is_found_at_the_start(graphs: bool, fraction: Any) -> None:
    """Its 4,096 tokens need half a gigabyte; the next run, with memory, finds nothing left of the attempt."""
    setup, wide = Setup(device="cuda", cuda_graphs=graphs), tiny_server("vllm", *WIDE)
    specs = [spec(i, 2000, 3) for i in range(6)]
    wide = wide.model_copy(update={"kv_cache": wide.kv_cache.model_copy(update={"num_blocks": 4000})})
    Run(wide, "async", Workload(list(specs), 6), setup=setup)
    before = taken()
    fraction((torch.cuda.memory_reserved() + 400e6) / torch.cuda.mem_get_info()[1])
    with pytest.raises(
        DeviceError, match=r"no memory for a step of 4096 query tokens in 6 rows: .+ asked for, .+ free"
    ):
        build.engine(wide, "async", Workload(list(specs), 6), setup)
    fraction(1.0)
    assert taken() == before
    assert Run(wide, "async", Workload(list(specs), 6), setup=setup).statuses == {"length": 6}


@pytest.mark.gpu
@GPU
def test_a_step_that_finds_no_memory_ends_the_run(fraction: Any) -> None:
    """A chunk's 24 tokens need more than what is left over in torch's own pieces. What ran until then is in the record,
    and the memory is there again.
    """
    setup, server = Setup(device="cuda", cuda_graphs=False), tiny_server("vllm", *WIDE[:2])
    Run(server, "async", Workload([spec(0, 200, 5)], 1), setup=setup)
    before, seen = taken(), []

    def on_plan(plan: Any) -> None:
        seen.append(plan)
        if len(seen) == 5:
            torch.cuda.empty_cache()
            fraction(1e-6)

    engine, _ = build.engine(server, "async", Workload([spec(0, 200, 5)], 1), setup, on_plan=on_plan)
    with pytest.raises(DeviceError, match=r"no memory for a step of 24 query tokens in 1 rows: .+ asked for"):
        engine.run()
    engine.close()
    engine.close()
    fraction(1.0)
    assert len(steps(engine)) == 3  # the fourth was in flight
    assert taken() == before
    assert Run(server, "async", Workload([spec(0, 200, 5)], 1), setup=setup).statuses == {"length": 1}


@pytest.mark.gpu
@GPU
@each_graphs
def test_profile_shows_both_figures(graphs: bool, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The events' GPU-active, and that of the kernels which the profiler saw."""
    server = tiny_server(SCHEDULERS[0])
    load = Workload([spec(0, 8, 60)], 1)
    servers.Measured(on(folder, graphs), 10, server, "async", load).run(lambda _: None)
    said = capsys.readouterr().err
    assert "GPU active over steps 21 to 30: events " in said
    assert ", profiler " in said
