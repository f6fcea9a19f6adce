"""Streams, events, graphs and pinned buffers of the CUDA device, without a GPU: whatever order a GPU takes, the result
is the same. `ordered` notes every access; here the whole engine runs on it, and planted faults must be found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

from support.engine.ordered import Event, Stream, WholeTables, World, ordered
from support.engine.restless import Restless
from support.engine.served import DRAFTERS, INLINE, LOOPS, MS, SCHEDULERS, Run, asked, check_texts, spec, speculating
from test_moved_tokens import KINDS, case, restless

from cbengine import batch, build
from cbengine.build import Setup
from cbengine.device.cuda import Cuda
from cbengine.device.layout import Header
from cbengine.sampling import Sampling, SamplingSettings
from cbsim.scenario.scenario import depth
from cbsim.workload.requests import Workload

GRAPHS = {"graphs": True, "kernel by kernel": False}
each_loop = pytest.mark.parametrize("loop", LOOPS)
each_graphs = pytest.mark.parametrize("graphs", GRAPHS.values(), ids=GRAPHS)
Plant = Callable[[Cuda, World], None]


def served(
    monkeypatch: pytest.MonkeyPatch,
    loop: str,
    *,
    graphs: bool,
    scheduler: str = SCHEDULERS[0],
    overlap: bool = True,
    before: Callable[[World], None] = lambda _: None,
    plant: Plant = lambda *_: None,
    requests: int = 3,
    setup: Setup = INLINE,
    drafter: str | None = None,
) -> tuple[Run, list[str]]:
    """A run on the stand-in, and what was out of order. `before` the device is made and after it a fault is planted."""
    specs = [spec(i, *((13, 9), (30, 5), (8, 14), (1, 20))[i % 4], arrival_ns=6 * MS * i) for i in range(requests)]
    budget = ["scheduler.max_num_batched_tokens=24", "scheduler.max_num_seqs=4"]
    limits = budget if scheduler.startswith("vllm") else []
    server = asked(scheduler, "kv_cache={block_size: 4, num_blocks: 60}", "model.dtype=float32", *limits)
    server = server if drafter is None else speculating(server, drafter)
    with ordered() as world:

        def device(scenario: Any, loop: str, plan: Any, *_: Any) -> Cuda:
            before(world)
            made = Cuda(plan(), plan.capacity, depth(loop), graphs=graphs, overlap=overlap, random=plan.random)
            call_buffers(world, made)
            world.running = True
            plant(made, world)
            return made

        monkeypatch.setattr(build, "ops", lambda _: WholeTables())
        run = Run(server, loop, Workload(specs, len(specs)), setup, device=device)
    return run, world.races


def call_buffers(world: World, device: Cuda) -> None:
    for name in ("_pinned", "_received", "_inbound", "_outbound"):
        for slot, buffer in enumerate(getattr(device, name)):
            world.call(f"{name.strip('_')}[{slot}]", buffer)


@each_loop
@each_graphs
@pytest.mark.parametrize("overlap", [True, False], ids=["three streams", "one stream"])
@pytest.mark.parametrize("scheduler", [SCHEDULERS[0], "transformers_fifo", "static"])
def test_every_order_that_a_gpu_may_take_is_the_same(
    scheduler: str, overlap: bool, graphs: bool, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each access of a buffer is ordered after those that it depends on; and the tokens are those of `generate`."""
    captures = graphs and scheduler != "static"
    run, races = served(monkeypatch, loop, graphs=captures, scheduler=scheduler, overlap=overlap, requests=4)
    assert races == []
    assert bool(run.device.facts["captured_batches"]) == captures
    check_texts(run)


@each_loop
@each_graphs
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_with_speculation_every_order_is_the_same_too(
    drafter: str, graphs: bool, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose rows all verify as many drafts as may be are replayed, padded to a captured size; sampled rows and
    greedy ones. No draft and no start of a row waits for the host.
    """
    setup = replace(INLINE, requests=SamplingSettings({"r1": Sampling(temperature=1.0, seed=4)}))
    met: list[bool] = []

    def plant(device: Cuda, _: World) -> None:
        launch = device.launch

        def launched(slot: int, header: Header, *more: Any) -> None:
            met.append((header.rows, header.random) in device._graphs and header.plain)
            launch(slot, header, *more)

        device.launch = launched  # type: ignore[method-assign]

    run, races = served(monkeypatch, loop, graphs=graphs, plant=plant, setup=setup, requests=4, drafter=drafter)
    assert races == []
    assert run.steps["padded_tokens"].max() >= run.steps["tokens"].max()
    assert any(met) == (graphs and (drafter, loop) != ("ngram", "sync"))
    server, load = run.scenario, Workload(run.load.specs(), len(run.load.specs()))
    plain = server.model_copy(update={"speculation": None})
    assert run.texts == Run(plain, loop, load, setup).texts


@each_loop
def test_only_steps_in_which_somebody_draws_pay_for_it(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are graphs of both kinds: while all rows are greedy, one that sorts no vocabulary is replayed. Texts are
    those of the CPU.
    """
    setup = replace(INLINE, requests=SamplingSettings({"r1": Sampling(temperature=1.0, seed=4)}))
    met: list[tuple[bool, bool]] = []

    def plant(device: Cuda, _: World) -> None:
        assert {key: graph.inputs.numel() for key, graph in device._graphs.items()} == {
            (rows, random): (3 + 5 * random) * rows + 1 + rows for rows in (1, 2, 4) for random in (True, False)
        }
        launch = device.launch

        def launched(slot: int, header: Header, *given: Any) -> None:
            met.append((header.random, header.decodes == header.rows > 0))
            launch(slot, header, *given)

        device.launch = launched  # type: ignore[method-assign]

    run, races = served(monkeypatch, loop, graphs=True, plant=plant, setup=setup)
    assert races == []
    assert {(True, True), (False, True)} <= set(met)
    server, load = run.scenario, Workload(run.load.specs(), len(run.load.specs()))
    assert run.texts == Run(server, loop, load, setup).texts


@each_loop
@each_graphs
def test_updates_beyond_the_buffer_are_in_order(graphs: bool, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written on the compute stream before their step: one in flight may still read the tables."""
    monkeypatch.setattr(batch, "MOST_UPDATES", 1)
    written: list[int] = []

    def plant(device: Cuda, _: World) -> None:
        update = device._executor.update_tables

        def noted(step: Any, excess: Any) -> None:
            written.append(0 if excess is None else excess.shape[1])
            update(step, excess)

        device._executor.update_tables = noted  # type: ignore[method-assign]

    run, races = served(monkeypatch, loop, graphs=graphs, plant=plant)
    assert races == []
    assert max(written) > 3
    check_texts(run)


def test_a_thread_settles_by_a_step_kernel_by_kernel() -> None:
    """What a library keeps for each thread is made before clients wait; the step leaves no trace."""
    launched: list[Header] = []
    with ordered() as world:
        plan = build.executor_plan(asked("vllm"), "sync", [spec(0, 200, 5)], INLINE)
        device = Cuda(plan(), plan.capacity, 1, graphs=True, overlap=True, random=True)
        enqueue = device._enqueue

        def noted(slot: int, header: Header, *given: Any) -> None:
            launched.append(header)
            enqueue(slot, header, *given)

        device._enqueue = noted  # type: ignore[method-assign]
        device.settle()
        device.close()
    assert world.races == []
    assert [(one.tokens, one.further > 0) for one in launched] == [(64, True)]


class Told:
    """Notes the order of what `launch` queues, by name."""

    def __init__(self, device: Cuda) -> None:
        self.said: list[str] = []
        device.launch = self.noting("launch", device.launch)  # type: ignore[method-assign]
        tables = device._executor.update_tables
        device._executor.update_tables = self.noting("tables", tables)  # type: ignore[method-assign]
        for rows, graph in device._graphs.items():
            device._graphs[rows] = graph._replace(inputs=Inputs(graph.inputs, self))  # type: ignore[arg-type]
        for marks in device._marks:
            marks.start.record = self.noting("start", marks.start.record)  # type: ignore[method-assign]
            marks.end.record = self.noting("end", marks.end.record)  # type: ignore[method-assign]

    def noting(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            self.said.append(name)
            return act(*given)

        return noted


class Inputs:
    """A graph's inputs, whose filling is noted."""

    def __init__(self, inputs: Any, told: Told) -> None:
        self._inputs = inputs
        self.copy_ = told.noting("inputs", inputs.copy_)

    def __len__(self) -> int:
        return len(self._inputs)


@each_loop
@each_graphs
def test_a_step_s_time_is_that_of_its_kernels(graphs: bool, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and inputs are queued before its first event: with an idle GPU it would count the CPU's queueing."""
    found: list[Told] = []
    served(monkeypatch, loop, graphs=graphs, plant=lambda device, _: found.append(Told(device)))
    steps = " ".join(found[0].said).split("launch ")[1:]
    assert all(step.strip().endswith("start end") for step in steps)
    assert any(step.startswith("tables") for step in steps)
    assert any("inputs" in step for step in steps) == graphs


# -- planted ----------------------------------------------------------------------------------------------------------


def compute_does_not_wait(device: Cuda, world: World) -> None:
    device._compute.wait_event = lambda event: None  # type: ignore[method-assign]


def results_do_not_wait(device: Cuda, world: World) -> None:
    device._d2h.wait_event = lambda event: None  # type: ignore[method-assign]


def nobody_waits_for_the_step(device: Cuda, world: World) -> None:
    """The slot's buffers are taken again before its step has ended."""
    for marks in device._marks:
        marks.done.synchronize = lambda: None  # type: ignore[method-assign]


def staging_is_rewritten_in_flight(device: Cuda, world: World) -> None:
    launch = device.launch

    def launched(slot: int, *given: Any) -> None:
        launch(slot, *given)
        device.staging[slot][0] = device.staging[slot][0]

    device.launch = launched  # type: ignore[method-assign]


def tables_are_written_beside_the_step(device: Cuda, world: World) -> None:
    executor, update = device._executor, device._executor.update_tables

    def on_the_copies_stream(step: Any, *excess: Any) -> None:
        with torch.cuda.stream(device._h2d):
            update(step, *excess)

    executor.update_tables = on_the_copies_stream  # type: ignore[method-assign]


def an_event_is_recorded_too_early(device: Cuda, world: World) -> None:
    """`end` lies before the kernels: the copy out may overtake them."""
    for marks in device._marks:
        marks.start.record = marks.end.record  # type: ignore[method-assign]
        marks.end.record = lambda stream: None  # type: ignore[method-assign]


def two_slots_share(name: str) -> Plant:
    def plant(device: Cuda, world: World) -> None:
        buffers = getattr(device, name)
        buffers[-1] = buffers[0]
        if name == "_pinned":
            device.staging[-1] = device.staging[0]

    return plant


FAULTS: dict[str, tuple[Plant, str]] = {
    "compute does not wait": (compute_does_not_wait, "compute reads inbound"),
    "results do not wait": (results_do_not_wait, "d2h reads outbound"),
    "nobody waits": (nobody_waits_for_the_step, "host reads received"),
    "staging rewritten": (staging_is_rewritten_in_flight, "host writes pinned"),
    "tables beside": (tables_are_written_beside_the_step, "nothing orders the two"),
    "event too early": (an_event_is_recorded_too_early, "d2h reads outbound"),
}
AT_DEPTH_2: dict[str, tuple[Plant, str]] = {
    "one staging buffer": (two_slots_share("_pinned"), "host writes pinned"),
    "one inbound buffer": (two_slots_share("_inbound"), "h2d writes inbound"),
    "one outbound buffer": (two_slots_share("_outbound"), "compute writes outbound"),
}


@each_loop
@each_graphs
@pytest.mark.parametrize(("plant", "found"), FAULTS.values(), ids=FAULTS)
def test_planted_faults_are_found(
    plant: Plant, found: str, graphs: bool, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing wait, a buffer taken again too early, work on the wrong stream: told by buffer and stream."""
    _, races = served(monkeypatch, loop, graphs=graphs, plant=plant)
    assert any(found in race for race in races), races[:5]


@each_graphs
@pytest.mark.parametrize(("plant", "found"), AT_DEPTH_2.values(), ids=AT_DEPTH_2)
def test_two_steps_in_flight_need_two_of_every_buffer(
    plant: Plant, found: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, races = served(monkeypatch, "async", graphs=graphs, plant=plant)
    assert any(found in race for race in races), races[:5]


def test_weights_must_be_there_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were written on another stream: without the wait at the start, the first step may not see them."""
    _, races = served(
        monkeypatch, "sync", graphs=False, before=lambda _: monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    )
    assert any("compute reads a buffer, which default wrote" in race for race in races), races[:5]


def test_what_one_stream_frees_another_must_not_use() -> None:
    """The caching allocator gives memory out again on the stream that took it, whatever others are doing with it."""
    with ordered() as world:
        one, other, done = Stream(world, "one"), Stream(world, "other"), Event(world)
        world.running = True
        with torch.cuda.stream(one):
            made = torch.ones(3)
            done.record(one)
        other.wait_event(done)
        with torch.cuda.stream(other):
            made.add_(1)
    assert world.races == ["other writes a buffer, which one's allocator may give out again"]


def test_a_time_is_read_only_of_what_has_happened() -> None:
    with ordered() as world:
        stream, first, last = Stream(world, "one"), Event(world), Event(world)
        first.record(stream)
        last.record(stream)
        first.synchronize()
        first.elapsed_time(last)
        assert world.races == ["host reads the time of an event that need not have happened"]
        last.synchronize()
        assert first.elapsed_time(last) > 0
    assert len(world.races) == 1


# -- KV transfers -----------------------------------------------------------------------------------------------------


MovePlant = Callable[[Cuda], None]


def moved(
    monkeypatch: pytest.MonkeyPatch,
    loop: str,
    *,
    graphs: bool = True,
    overlap: bool = True,
    patience: int = 2,
    plant: MovePlant = lambda _: None,
) -> tuple[Run, Restless, list[str]]:
    """A restless run on the stand-in, and what was out of order. A job is over when it has been asked of `patience`
    times.
    """
    with ordered() as world:

        def device(_: Any, loop: str, plan: Any, *__: Any) -> Cuda:
            made = Cuda(plan(), plan.capacity, depth(loop), graphs=graphs, overlap=overlap, random=False)
            share_out(world, made)
            world.running, world.patience = True, patience
            plant(made)
            return made

        monkeypatch.setattr(build, "ops", lambda _: WholeTables())
        run, scheduler = restless(lambda: Run(*case()[:1], loop, case().load, INLINE, device=device), 3)
    return run, scheduler, world.races


def share_out(world: World, device: Cuda) -> None:
    call_buffers(world, device)
    executor = device._executor
    assert executor._host is not None
    world.share_out("keys", executor._cache.keys, 1)
    world.share_out("values", executor._cache.values, 1)
    world.share_out("the host's", executor._host, 0)
    for stream, carrier in device._moves._carriers.items():
        world.call(f"{stream.name}'s staging", carrier._staging)  # type: ignore[attr-defined]


@each_loop
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "kernel by kernel"])
@pytest.mark.parametrize("overlap", [True, False], ids=["five streams", "one stream"])
def test_every_order_of_moves_is_the_same(
    overlap: bool, graphs: bool, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each access of a block is ordered after those that it depends on; the tokens are those of `generate`."""
    run, scheduler, races = moved(monkeypatch, loop, graphs=graphs, overlap=overlap)
    assert races == []
    assert all(scheduler.moved[kind] for kind in KINDS), scheduler.moved
    assert max(scheduler.late) >= 1
    assert not run.device.__dict__.get("_moves"), "given back"
    check_texts(run)


# -- planted ----------------------------------------------------------------------------------------------------------


def out_does_not_wait(device: Cuda) -> None:
    """... for the rows of its plan."""
    device._moves._out.wait_event = lambda event: None  # type: ignore[method-assign]


def in_does_not_wait(device: Cuda) -> None:
    """... for those of the plans before."""
    device._moves._in.wait_event = lambda event: None  # type: ignore[method-assign]


def nobody_waits_for_jobs(device: Cuda) -> None:
    before = device._moves.before_rows

    def deaf(plan: Any) -> None:
        queued, device._moves._queued = device._moves._queued, []
        before(plan)
        device._moves._queued = queued + device._moves._queued

    device._moves.before_rows = deaf  # type: ignore[method-assign]


def moves_are_told_too_early(device: Cuda) -> None:
    """Who asks is told that they are over, and knows nothing."""
    over = device._moves.over

    def early() -> Any:
        for queued in device._moves._queued:
            queued.end.query = lambda: True  # type: ignore[method-assign]
        return over()

    device._moves.over = early  # type: ignore[method-assign]


def in_order_moves_go_beside(device: Cuda) -> None:
    carry, moves = device._moves._carry, device._moves
    device._moves._carry = lambda step, listed, _: carry(step, listed, moves._out)  # type: ignore[method-assign]


def one_staging_block(device: Cuda) -> None:
    carriers = device._moves._carriers
    for carrier in carriers.values():
        carrier._staging = carriers[device._compute]._staging


MOVE_FAULTS: dict[str, tuple[MovePlant, str]] = {
    "out does not wait": (out_does_not_wait, "nothing orders the two"),
    "in does not wait": (in_does_not_wait, "nothing orders the two"),
    "nobody waits for jobs": (nobody_waits_for_jobs, "nothing orders the two"),
    "told too early": (moves_are_told_too_early, "nothing orders the two"),
    "beside": (in_order_moves_go_beside, "nothing orders the two"),
    "one staging block": (one_staging_block, "staging"),
}


@each_loop
@pytest.mark.parametrize(("plant", "found"), MOVE_FAULTS.values(), ids=MOVE_FAULTS)
def test_planted_faults_of_moves_are_found(
    plant: MovePlant, found: str, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... by block and stream, though here everything is computed at once and the tokens may be right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "elapsed_time", lambda event, later: (later.at - event.at) / 1e3)
        _, _, races = moved(monkeypatch, loop, plant=plant)
    assert any(found in race for race in races), races[:5]
