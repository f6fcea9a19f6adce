"""The simulated machine: invariants of every run, closed forms of small ones, and what clients do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from cbsim.cost.base import Cost
from cbsim.cost.constant import ConstantCost
from cbsim.cost.cpu import PHASES, CpuCost, PhaseCost
from cbsim.cost.fitted import Curve, FittedCost
from cbsim.cost.roofline import Rates, RooflineCost, Weights
from cbsim.machine.device import OneGpu
from cbsim.machine.driver import Machine
from cbsim.machine.graphs import Graphs, transformers_buckets, unpadded, vllm_buckets
from cbsim.machine.lanes import Lane, Slots, Stream
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.policy.schedulers.registry import OURS
from cbsim.policy.schedulers.static import StaticOptions
from cbsim.policy.schedulers.transformers import TransformersOptions
from cbsim.policy.schedulers.vllm import VllmOptions
from cbsim.results import invariants
from cbsim.results.metrics import Steps, token_times
from cbsim.results.record import STEP_COLUMNS, Record
from cbsim.server.inbox import Inbox
from cbsim.workload.generators import Sessions, Users, Workload

LONGEST = 24  # tokens of a request that every scheduler below can serve


def transformers_options(kind: Any) -> TransformersOptions:
    return TransformersOptions(
        name=f"transformers_{kind}",
        block_size=4,
        num_blocks=16,
        max_batch_tokens=16,
        max_requests_per_batch=6,
        max_blocks_per_request=4,
        safety_margin=0.0,
        allow_block_sharing=True,
    )


def vllm_options(*, max_model_len: int = 2 * LONGEST, num_blocks: int = 17) -> VllmOptions:
    return VllmOptions(
        version="0.33",
        policy="fcfs",
        block_size=4,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        long_prefill_token_threshold=0,
        adaptive_long_prefill_threshold=False,
        scheduler_reserve_full_isl=True,
        watermark=0.0,
        prefill_schedule_interval=1,
    )


OPTIONS: dict[str, Any] = {
    "static": StaticOptions(batch_size=3, block_size=4, num_blocks=48),
    "transformers_fifo": transformers_options("fifo"),
    "transformers_prefill_first": transformers_options("prefill_first"),
    "vllm": vllm_options(),
}
NAMES = pytest.mark.parametrize("name", OPTIONS)
DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


def server(
    workload: Workload,
    cost: Cost,
    *,
    name: str = "vllm",
    options: Any = None,
    depth: int = 1,
    overlap: bool = True,
    graphs: Graphs | None = None,
    gap_ns: int = 0,
) -> Machine:
    """A server that has not run yet; graphs without padding or capture cost unless given."""
    policy = OURS[name].make(options or OPTIONS[name])
    record = Record(policy.pool.num_blocks)
    graphs = graphs or Graphs(unpadded, 0)
    device = OneGpu(cost, depth=depth, overlap=overlap, gap_ns=gap_ns)
    return Machine(policy, cost, graphs, device, Inbox(workload, record), record, depth)


def run(machine: Machine, on_step: Callable[[int], None] | None = None) -> Steps:
    """Run to the end; the step table."""
    env = simpy.Environment()
    env.process(machine.run(env, on_step))
    env.run()
    return table(machine.record)


def table(record: Record) -> Steps:
    return Steps(np.frombuffer(bytes(record.steps), dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))


def spec(index: int, prompt: int = 1, outputs: int = 1, at: int = 0, **more: Any) -> RequestSpec:
    asked = {"max_tokens": outputs} | more
    return RequestSpec(index, str(index), at, prompt, outputs, **asked)


def load(*specs: RequestSpec, cancels: Sequence[tuple[int, RequestSpec]] = (), follow: Any = None) -> Workload:
    later = len(list(follow.drafts())) if follow else 0
    return Workload(list(specs), len(specs) + later, cancels=list(cancels), follow=follow)


@dataclass(frozen=True)
class Fixed:
    """Every step costs the same, in ns: (schedule, prepare, launch, update), (h2d, compute, d2h), kernel launches."""

    cpu: tuple[int, int, int, int] = (0, 0, 0, 0)
    gpu: tuple[int, int, int] = (0, 0, 0)
    kernels: int = 0

    def cpu_ns(self, plan: StepPlan | None) -> tuple[int, int, int, int]:
        return self.cpu

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        return self.gpu if tokens else (0, 0, 0)

    def eager_launch_ns(self, plan: StepPlan) -> int:
        return self.kernels


# -- every run --------------------------------------------------------------------------------------------------------

coefficients = st.one_of(st.just(0.0), st.floats(0, 40))


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    """Any cost model, all its coefficients random; steps of some tens of ns, so that arrivals fall into them."""
    term = lambda: draw(coefficients)  # noqa: E731
    cpu = CpuCost({phase: PhaseCost(term(), term() / 4, term() / 8, term() / 8) for phase in PHASES})
    kind = draw(st.sampled_from(["constant", "fitted", "roofline", "fixed"]))
    if kind == "constant":
        return ConstantCost(cpu, term(), term(), term(), term())
    if kind == "fitted":
        terms = ("chunk", "prefill_token", "cached_token", "prefill_pair", "decode_row", "context_token")
        names = ("base", *(f"per_{name}" for name in terms), "h2d", "d2h", "launch")
        curves = [Curve([0, 10], sorted((term(), term()))) for _ in range(2)]
        terms_of = {name: term() for name in names}
        return FittedCost(cpu_ns=cpu, query_tokens=curves[0], context_tokens=curves[1], **terms_of)
    if kind == "fixed":
        ns = st.integers(0, 40)
        return Fixed(draw(st.tuples(ns, ns, ns, ns)), draw(st.tuples(ns, ns, ns)), draw(ns))
    rates = Rates(*(draw(st.floats(1e8, 1e11)) for _ in Rates._fields))
    weights = Weights(*(draw(st.integers(1, 50)) for _ in Weights._fields))
    return RooflineCost(cpu, rates, weights, term() / 1e9, term() / 1e9)


@st.composite
def graph_rules(draw: st.DrawFn) -> Graphs:
    rule: Any = draw(
        st.sampled_from([None, unpadded, transformers_buckets(6, 64, 64), vllm_buckets([1, 2, 4, 8])]),
    )
    return Graphs(rule, draw(st.sampled_from([0, 100])))


@st.composite
def specs(draw: st.DrawFn, index: int) -> RequestSpec:
    """A small request; one in six has a prompt that nobody can serve; prompts may share their beginning."""
    fits = draw(st.integers(0, 5)) > 0
    prompt, most = draw(st.integers(1, 16)) if fits else 400, draw(st.integers(1, LONGEST - 16))
    outputs = draw(st.one_of(st.just(most), st.integers(1, most)))
    shared = draw(st.sampled_from([0, 0, 8]))
    keys = {"prefix": (7, 8), "prefix_block_tokens": 4, "prefix_tokens": min(shared, prompt)} if shared else {}
    return spec(index, prompt, outputs, draw(st.integers(0, 300)), max_tokens=most, **keys)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Open, closed loop or sessions; some of the first requests are given up."""
    asked = [draw(specs(index)) for index in range(draw(st.integers(1, 9)))]
    kind = draw(st.sampled_from(["open", "users", "sessions"]))
    first, later = asked, asked[len(asked) :]
    if kind != "open":
        cut = draw(st.integers(1, len(asked)))
        first, later = asked[:cut], asked[cut:]
    delay = draw(st.sampled_from([0, 30]))
    follow: Any = Users(later, delay) if kind == "users" else None
    if kind == "sessions":
        before = [first[-1], *later]
        follow = Sessions({a.index: (b, delay) for a, b in zip(before, later, strict=False)})
    gives_up = st.lists(st.tuples(st.integers(0, 900), st.sampled_from(first)), max_size=3, unique_by=lambda c: c[1])
    return load(*first, cancels=sorted(draw(gives_up), key=lambda c: c[0]), follow=follow)


def check_ends(machine: Machine, workload: Workload, steps: Steps) -> None:
    """Everybody who was asked for is in the record once and is over, with the tokens that the end implies."""
    rows = machine.record.requests()
    assert [row.index for row in rows] == list(range(workload.total))
    for row in rows:
        tokens = sum(row.token_runs[1::2])
        assert row.status in ("length", "stop", "aborted", "refused"), row
        assert row.status == "aborted" or tokens == (0 if row.status == "refused" else row.output_tokens)
        assert (row.reason != "") == (row.status == "refused")
        assert row.queued_ns >= row.arrival_ns
    over = sum(row.status in ("length", "stop") for row in rows)
    assert int(steps["finished"].sum()) == over
    assert machine.record.finished_count == len(rows)
    check_tokens(steps, [row.token_runs for row in rows])


def check_tokens(steps: Steps, runs: Sequence[Sequence[int]]) -> None:
    """A step delivers the tokens that it sampled, but for those of wasted rows, of which not all sampled."""
    delivered = np.zeros(len(steps), dtype=np.int64)
    for first, count in (run for row in runs for run in zip(row[::2], row[1::2], strict=True)):
        delivered[first : first + count] += 1
    sampled, wasted = steps["sampled_rows"], steps["wasted_rows"]
    assert (sampled - wasted <= delivered).all()
    assert (delivered <= np.minimum(sampled, steps["rows"] - wasted)).all()


def check_cancels(machine: Machine, steps: Steps, cancels: Sequence[tuple[int, RequestSpec]]) -> None:
    """Whoever gave up before its last step was planned did not get its last token."""
    rows = {row.index: row for row in machine.record.requests()}
    for at, asked in cancels:
        row = rows[asked.index]
        if row.status in ("length", "stop") and at >= asked.arrival_ns:
            last = sum(row.token_runs[-2:]) - 1
            assert steps["schedule_start_ns"][last] < at, (row, at)


@NAMES
@DEPTHS
def test_invariants_hold_in_every_run(name: str, depth: int) -> None:
    """The step table obeys the machine's rules and nobody is lost, for any cost model, graph rule, stream setting and
    traffic. Times are tens of ns so that arrivals and cancellations fall into every phase of a step."""

    @given(cost=costs(), graphs=graph_rules(), overlap=st.booleans(), workload=workloads())
    @settings(max_examples=100)
    def check(cost: Cost, graphs: Graphs, overlap: bool, workload: Workload) -> None:
        cancels = list(workload.cancels)
        machine = server(workload, cost, name=name, depth=depth, overlap=overlap, graphs=graphs)
        steps = run(machine)
        invariants.check(steps, depth=depth, overlap=overlap, total_blocks=machine.record.total_blocks)
        check_ends(machine, workload, steps)
        check_cancels(machine, steps, cancels)
        assert machine.scheduler.pool.free == machine.scheduler.pool.num_blocks

    check()


# -- the invariants can fail ------------------------------------------------------------------------------------------

COSTS = Fixed(cpu=(3, 5, 7, 11), gpu=(2, 40, 4))


def good() -> Steps:
    """A table of eight steps, asynchronous: three requests, one of which waits for tokens in its step's budget."""
    machine = server(load(spec(0, 5, 4), spec(1, 12, 3), spec(2, 2, 6, at=60)), COSTS, depth=2)
    return run(machine)


def violated(steps: Steps, *, depth: int = 2, overlap: bool = True) -> str:
    with pytest.raises(AssertionError) as caught:
        invariants.check(steps, depth=depth, overlap=overlap, total_blocks=16)
    return str(caught.value)


@pytest.mark.parametrize(
    ("column", "row", "change", "rule"),
    [
        ("step", 3, 1, "steps are numbered 0, 1, 2 ...: row 3 has 4 against 3"),
        ("launch_end_ns", 2, -8, "launch ends at or after its start"),
        ("update_start_ns", 2, -1, "update follows await"),
        ("schedule_start_ns", 3, -1, "one thing at a time"),
        ("compute_end_ns", 3, 41, "compute: one thing at a time"),
        ("h2d_start_ns", 1, -8, "H2D copy waits for what it copies"),
        ("compute_start_ns", 0, -3, "compute waits for its inputs"),
        ("d2h_start_ns", 2, -1, "D2H copy waits for compute"),
        ("d2h_end_ns", 2, 1, "CPU waits for the outputs"),
        ("rows", 2, -3, "decoding rows are rows"),
        ("decode_rows", 2, -4, "decode_rows is not negative"),
        ("prefill_tokens", 0, -16, "a listed row has a token"),
        ("prefill_tokens", 4, 1, "tokens are listed for rows only"),
        ("tokens", 1, 1, "tokens = prefill_tokens + decode_rows"),
        ("padded_tokens", 0, -1, "padding is not negative"),
        ("sampled_rows", 4, -1, "every decoding row samples"),
        ("sampled_rows", 0, 2, "only rows sample"),
        ("running", 0, -1, "only running requests have rows"),
        ("finished", 0, 3, "only sampling ends a request"),
        ("wasted_rows", 0, 3, "only rows are wasted"),
        ("recomputed_tokens", 4, 1, "only listed tokens are recomputed"),
        ("used_blocks", 4, 30, "blocks in use and cached blocks exist"),
        ("cached_blocks", 4, 16, "blocks in use and cached blocks exist"),
        ("cached_blocks", 4, -1, "cached blocks are not negative"),
        ("new_blocks", 0, 30, "new blocks are in use"),
    ],
)
def test_each_invariant_can_fail(column: str, row: int, change: int, rule: str) -> None:
    """One number of a good table is changed; the rule that it breaks is named, with the two sides that disagree."""
    invariants.check(good(), depth=2, overlap=True, total_blocks=16)
    table = good().table.copy()
    table[row, STEP_COLUMNS.index(column)] += change
    message = violated(Steps(table))
    assert rule in message
    assert " against " in message


def test_a_table_is_checked_against_the_right_machine() -> None:
    """Two steps in flight are too many for a synchronous loop, and copies beside kernels too many for one stream."""
    assert "a buffer is written after its last outputs were copied" in violated(good(), depth=1)
    assert "h2d + compute + d2h: one thing at a time" in violated(good(), overlap=False)


def test_an_empty_table_is_fine() -> None:
    """A run that refused everything, or was stopped at once, has no steps: nothing is violated."""
    invariants.check(Steps(good().table[:0]), depth=2, overlap=True, total_blocks=1)


# -- closed forms -----------------------------------------------------------------------------------------------------

FIRST_STEP = {
    "schedule": (0, 3),
    "prepare": (3, 8),
    "launch": (8, 15),
    "h2d": (15, 17),
    "compute": (17, 57),
    "d2h": (57, 61),
    "await": (15, 61),
    "update": (61, 72),
}


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    """By hand: CPU phases of 3, 5, 7 and 11 ns, copies of 2 and 4, kernels of 40: one after the other, 72 ns a step."""
    steps = run(server(load(spec(0, 4, 5)), COSTS, name="transformers_fifo"))
    for name, (start, end) in FIRST_STEP.items():
        assert steps[f"{name}_start_ns"].tolist() == [start + 72 * i for i in range(5)], name
        assert steps[f"{name}_end_ns"].tolist() == [end + 72 * i for i in range(5)], name


def test_an_asynchronous_run_by_hand() -> None:
    """The first three steps of the same costs, two in flight: the second is planned at 15, while the first computes,
    and its kernels wait for those of the first (57); the third waits for the CPU to have applied the first (72)."""
    steps = run(server(load(spec(0, 4, 5)), COSTS, name="transformers_fifo", depth=2))
    assert steps["schedule_start_ns"][:3].tolist() == [0, 15, 72]
    assert steps["h2d_start_ns"][:3].tolist() == [15, 30, 87]
    assert steps["compute_start_ns"][:3].tolist() == [17, 57, 97]
    assert steps["d2h_end_ns"][:3].tolist() == [61, 101, 141]
    assert steps["update_end_ns"][:2].tolist() == [72, 112]


@pytest.mark.parametrize("overlap", [True, False])
@given(cpu=st.tuples(*[st.integers(0, 30)] * 4), gpu=st.tuples(*[st.integers(0, 30)] * 3))
@settings(max_examples=40)
def test_the_steady_state_of_an_asynchronous_loop(
    overlap: bool, cpu: tuple[int, int, int, int], gpu: tuple[int, int, int]
) -> None:
    """The period is the longest cycle's: the CPU's phases; each lane, or all in one stream; and, over two steps, CPU
    and device one after the other, because step N+2 is planned when step N has come back."""
    options = vllm_options(max_model_len=256, num_blocks=65)
    steps = run(server(load(spec(0, 4, 160)), Fixed(cpu, gpu), options=options, depth=2, overlap=overlap))
    lanes = gpu if overlap else (sum(gpu),)
    twice = max(2 * sum(cpu), *(2 * lane for lane in lanes), sum(cpu) + sum(gpu))
    starts = steps["compute_start_ns"]
    assert int(starts[140] - starts[40]) == 50 * twice


@given(cpu=st.tuples(*[st.integers(0, 30)] * 4), compute=st.integers(0, 90))
@settings(max_examples=40)
def test_without_copies_the_slower_of_cpu_and_gpu_sets_the_pace(cpu: tuple[int, int, int, int], compute: int) -> None:
    """Synchronous: cpu + gpu a step. Asynchronous: max(cpu, gpu). That is what overlapping them is for."""
    options = vllm_options(max_model_len=256, num_blocks=65)
    paces = []
    for depth in (1, 2):
        steps = run(server(load(spec(0, 4, 160)), Fixed(cpu, (0, compute, 0)), options=options, depth=depth))
        paces.append(int(steps["compute_end_ns"][140] - steps["compute_end_ns"][40]) / 100)
    assert paces == [sum(cpu) + compute, max(sum(cpu), compute)]


@pytest.mark.parametrize(("compute", "period"), [(10, 37), (34, 39), (90, 95)])
def test_an_eager_step_is_not_shorter_than_its_kernel_launches(compute: int, period: int) -> None:
    """By hand: prepare 5, launch 2 and 30 more for the kernels, which run while they are launched. Kernels of 10 ns
    are done when the CPU is: 5 + 32. Kernels of 34 or 90 ns take longer than that: 5 + 34, 5 + 90."""
    cost = Fixed(cpu=(0, 5, 2, 0), gpu=(0, compute, 0), kernels=30)
    steps = run(server(load(spec(0, 4, 5)), cost, name="transformers_fifo", graphs=Graphs(None, 0)))
    assert steps["update_end_ns"].tolist() == [period * (i + 1) for i in range(5)]
    assert (steps.lane("compute") == max(compute, 32)).all()
    assert (steps.lane("launch") == 32).all()


def test_a_graph_is_captured_once_for_each_bucket() -> None:
    """A prompt of 3 runs in the bucket of 4, then single tokens in that of 1: the first of each pays 1,000 ns on the
    CPU before it is launched. A prompt of 12 fits no bucket: eager, and nothing is captured."""
    graphs = Graphs(vllm_buckets([1, 2, 4, 8]), 1000)
    workload = load(spec(0, 3, 4), spec(1, 3, 2, at=50_000), spec(2, 12, 1, at=90_000))
    cost = Fixed(cpu=(0, 0, 7, 0), gpu=(0, 5, 0), kernels=100)
    steps = run(server(workload, cost, name="transformers_fifo", graphs=graphs))
    assert steps["padded_tokens"].tolist() == [4, 1, 1, 1, 4, 1, 12]
    assert steps.lane("launch").tolist() == [1007, 1007, 7, 7, 7, 7, 107]
    assert steps["compute_start_ns"][0] == 1007


def test_one_stream_puts_copies_and_kernels_in_a_line() -> None:
    """Copies of 10 and kernels of 40 ns: with streams of their own the next step's inputs arrive while a step
    computes, a step every 40 ns; in one queue nothing runs beside a kernel, and a step takes 60."""
    periods = []
    for overlap in (True, False):
        cost = Fixed(gpu=(10, 40, 10))
        steps = run(server(load(spec(0, 4, 9)), cost, name="transformers_fifo", depth=2, overlap=overlap))
        periods.append(int(steps["compute_start_ns"][8] - steps["compute_start_ns"][4]) / 4)
        beside = steps["h2d_start_ns"][1:] < steps["compute_end_ns"][:-1]
        assert beside.all() if overlap else not beside.any()
    assert periods == [40, 60]


def test_lanes_run_in_order_of_submission() -> None:
    """Work starts at the later of its dependencies and the end of the work before; lanes of a stream share that."""
    stream = Stream()
    first, second = Lane("h2d", stream), Lane("compute", stream)
    assert first.book(5, 10) == (5, 15)
    assert second.book(7, 10) == (15, 25)
    assert first.book(40, 0) == (40, 40)
    with pytest.raises(AssertionError):
        first.book(0, -1)


def test_a_slot_comes_round_again() -> None:
    """With two buffers step 2 has to wait for step 0, step 3 for step 1."""
    slots = Slots(2)
    slots.hold(0, 50)
    slots.hold(1, 70)
    assert [slots.free_ns(step) for step in (2, 3, 4)] == [50, 70, 50]


# -- clients ----------------------------------------------------------------------------------------------------------

STEP = Fixed(gpu=(0, 10, 0))


def statuses(machine: Machine) -> dict[str, str]:
    return {row.id: row.status for row in machine.record.requests()}


@NAMES
@DEPTHS
def test_a_request_given_up_half_way_ends_there(name: str, depth: int) -> None:
    """Steps of 10 ns: the client leaves at 25. Steps planned after that have no row for it; tokens that it has got
    remain its own, those in flight are thrown away, and its blocks come back."""
    asked = spec(0, 4, 8)
    machine = server(load(asked, cancels=[(25, asked)]), STEP, name=name, depth=depth)
    steps = run(machine)
    row = machine.record.requests()[0]
    assert row.status == "aborted"
    assert row.cancelled_poll > 0
    assert 1 <= sum(row.token_runs[1::2]) < 8
    assert int(steps["decode_rows"][steps["schedule_start_ns"] >= 25].sum()) == 0
    assert machine.scheduler.pool.free == machine.scheduler.pool.num_blocks


@NAMES
@DEPTHS
def test_a_request_given_up_before_it_is_taken_in(name: str, depth: int) -> None:
    """It arrives while a step runs and is given up before the server looks again: it is recorded, and never runs."""
    unlucky = spec(1, 4, 8, at=12)
    machine = server(load(spec(0, 4, 4), unlucky, cancels=[(13, unlucky)]), STEP, name=name, depth=depth)
    run(machine)
    assert statuses(machine) == {"0": "length", "1": "aborted"}
    assert machine.record.requests()[1].first_step == -1


def test_a_cancellation_too_early_or_too_late_changes_nothing() -> None:
    """One comes before its request, one after its end, and one for a request that was refused."""
    first, second, refused = spec(0, 4, 2, at=50), spec(1, 4, 2), spec(2, 400, 1)
    cancels = [(10, first), (30, second), (30, refused)]
    machine = server(load(first, second, refused, cancels=cancels), STEP)
    run(machine)
    assert statuses(machine) == {"0": "length", "1": "length", "2": "refused"}
    assert not machine.record.cancels


@NAMES
@DEPTHS
def test_the_end_of_a_request_is_followed_once(name: str, depth: int) -> None:
    """Two users and eight requests, of which some are refused, or given up before or while they run: each user sends
    its next one when the last is over for whatever reason, so never more than two are present, and all are sent."""
    asked = [spec(i, 400 if i in (0, 5, 6) else 4, 3) for i in range(8)]
    follow = Users(asked[2:], think_ns=15)
    workload = load(*asked[:2], cancels=[(0, asked[0]), (0, asked[1])], follow=follow)
    machine = server(workload, STEP, name=name, depth=depth)
    steps = run(machine)
    assert len(machine.record.requests()) == 8
    assert int((steps["running"] + steps["waiting"]).max()) <= 2
    assert [i for i, status in statuses(machine).items() if status == "refused"] == ["0", "5", "6"]
    assert statuses(machine)["1"] == "aborted"


@NAMES
def test_a_closed_loop_thinks_from_the_end_of_the_last(name: str) -> None:
    """One user, requests of three steps of 10 ns, 25 ns to think: they arrive at 0, 55, 110."""
    asked = [spec(i, 4, 3) for i in range(3)]
    machine = server(load(asked[0], follow=Users(asked[1:], 25)), STEP, name=name)
    run(machine)
    assert [row.arrival_ns for row in machine.record.requests()] == [0, 55, 110]


@NAMES
def test_a_refused_turn_does_not_end_its_session(name: str) -> None:
    """A session's second turn is too long for the cache. It is in the record with the reason, and the third turn
    comes its delay after the refusal; so does what follows a first turn that is refused."""
    first, second, third = spec(0, 4, 1), spec(1, 400, 1), spec(2, 4, 1)
    machine = server(load(first, follow=Sessions({0: (second, 5), 1: (third, 7)})), STEP, name=name)
    run(machine)
    rows = machine.record.requests()
    assert [row.status for row in rows] == ["length", "refused", "length"]
    assert [row.arrival_ns for row in rows] == [0, 15, 22]
    assert "400" in rows[1].reason or "401" in rows[1].reason
    alone = server(load(spec(0, 400, 1), follow=Sessions({0: (spec(1, 4, 1), 5)})), STEP, name=name)
    run(alone)
    assert list(statuses(alone).values()) == ["refused", "length"]


# -- interruption -----------------------------------------------------------------------------------------------------


@dataclass
class Interrupted:
    """STEP until the call number `at` of any of its methods, which is interrupted."""

    at: int

    def _count(self) -> None:
        self.at -= 1
        if self.at < 0:
            raise KeyboardInterrupt

    def cpu_ns(self, plan: StepPlan | None) -> tuple[int, int, int, int]:
        self._count()
        return 1, 1, 1, 1

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        self._count()
        return 2, 30, 2

    def eager_launch_ns(self, plan: StepPlan) -> int:
        return 0


def check_partial(machine: Machine, depth: int) -> None:
    """The tables agree: no request refers to a step that is not there, and the steps obey the rules."""
    steps, rows = table(machine.record), machine.record.requests()
    invariants.check(steps, depth=depth, overlap=True, total_blocks=machine.record.total_blocks)
    assert all(row.first_step < len(steps) and sum(row.token_runs[-2:]) <= len(steps) for row in rows)
    requests = token_times(rows, steps)
    assert (requests.generated[requests.done] == [r.output_tokens for r in rows if r.status == "length"]).all()
    assert (requests.first_token_ns[requests.done] > 0).all()
    check_tokens(steps, [row.token_runs for row in rows])


@NAMES
@DEPTHS
def test_an_interrupted_run_leaves_tables_that_agree(name: str, depth: int) -> None:
    """Interrupted while the n-th step is planned or launched, for every n, with one or two steps in flight."""
    asked = [spec(i, 3 + i, 4 + i % 3, at=20 * i) for i in range(5)]
    for at in range(200):
        machine = server(load(*asked), Interrupted(at), name=name, depth=depth)
        try:
            run(machine)
        except KeyboardInterrupt:
            check_partial(machine, depth)
        else:
            break
    assert 10 < at < 199


@NAMES
@DEPTHS
@pytest.mark.parametrize("applied", [1, 3, 6])
def test_an_interruption_between_result_and_record(name: str, depth: int, applied: int) -> None:
    """The policy has taken a step's result, and the driver does not get to write it down: that step never was."""
    asked = [spec(i, 3 + i, 4 + i % 3, at=20 * i) for i in range(5)]
    machine = server(load(*asked), STEP, name=name, depth=depth)
    update, calls = machine.scheduler.update, []

    def counted(*arguments: Any) -> Any:
        outcome = update(*arguments)
        calls.append(outcome)
        if len(calls) == applied:
            raise KeyboardInterrupt
        return outcome

    machine.scheduler.update = counted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run(machine)
    assert machine.record.step_count == applied - 1
    check_partial(machine, depth)


def test_progress_is_reported_and_may_interrupt() -> None:
    """`on_step` hears the simulated time; if it raises, the run stops there, with the step it was told of recorded."""
    options = vllm_options(max_model_len=1024, num_blocks=257)
    heard: list[int] = []

    def stop_late(now_ns: int) -> None:
        heard.append(now_ns)
        if now_ns > 2000:
            raise KeyboardInterrupt

    machine = server(load(spec(0, 4, 600)), STEP, options=options, depth=2)
    with pytest.raises(KeyboardInterrupt):
        run(machine, stop_late)
    assert heard[0] == 10
    assert machine.record.step_count == heard[-1] // 10
    check_partial(machine, 2)


def test_kernels_of_two_steps_keep_a_gap() -> None:
    """Asynchronous, the GPU always has work: without a gap a step of 30 follows the last, with one of 7 it starts 7
    later; a synchronous step, which comes later anyway, is not moved.
    """
    cost = Fixed((1, 1, 1, 1), (2, 30, 2), 0)
    for depth, gaps in ((2, (0, 7)), (1, (8, 8))):
        for gap_ns, wanted in zip((0, 7), gaps, strict=True):
            machine = server(load(spec(0, 4, 40)), cost, depth=depth, gap_ns=gap_ns)
            run(machine)
            steps = table(machine.record)
            between = steps["compute_start_ns"][1:] - steps["compute_end_ns"][:-1]
            assert (between[3:-3] == wanted).all(), (depth, gap_ns, between)
