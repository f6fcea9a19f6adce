"""Moves of KV on the simulated machine, by hand: when they run, what waits for them, what may not happen under them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from support.machines import COSTS, STEP, Fixed, load, run, server, spec, vllm_options

from cbsim.cost.base import Copies
from cbsim.machine.device import Mover, OneGpu, Timing
from cbsim.machine.graphs import Shape
from cbsim.policy.plan import Chunk, StepChanges, StepPlan, StepWork
from cbsim.policy.transfers import Direction, Transfer
from cbsim.record import optional_tables
from cbsim.record.record import StepTimes, TransferLog

A, B = spec(0, 8, 4), spec(1, 8, 4)
HOST_NS, COPY_NS = 10, 4  # of a block: 1,000 bytes at 100 bytes/ns, and twice that at 500
COPIES = Copies(1000, 1e11, 5e11)
H2D, COMPUTE, D2H = 2, 40, 3


class Gpu:
    """A GPU with nothing before its lanes, whose steps take the same each."""

    def __init__(self, *, overlap: bool = True) -> None:
        self.log = TransferLog()
        cost = Fixed((0, 0, 0, 0), (H2D, COMPUTE, D2H))
        mover = partial(Mover, COPIES, self.log, 4)
        self.device = OneGpu(cost, Timing(2, overlap), mover)

    def launch(self, plan: StepPlan, at_ns: int = 0) -> StepTimes:
        times = StepTimes(at_ns)
        times.launch_start_ns = times.launch_end_ns = at_ns
        self.device.launch(plan, Shape(plan.work.tokens, False, 0), times)
        return times

    def over(self, now_ns: int, step: int) -> tuple[int, ...]:
        assert self.device.mover
        return self.device.mover.over(now_ns, step)

    def moved(self) -> list[tuple[int, int]]:
        table = optional_tables.values_of(optional_tables.TRANSFERS, self.log.rows)
        return list(zip(table["start_ns"].tolist(), table["end_ns"].tolist(), strict=True))


def rows(*chunks: Chunk) -> StepWork:
    return StepWork(chunks, prefill_tokens=sum(chunk.tokens for chunk in chunks))


def row(of: object, *blocks: int) -> Chunk:
    assert of in (A, B)
    return Chunk(A if of is A else B, 0, 0, 4, blocks, 1, admitted=True)


def plan(step: int, *listed: Transfer, work: StepWork | None = None, awaited: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(step, rows(row(A)) if work is None else work, transfers=listed, awaited=awaited)


def test_moves_in_order_come_between_the_rows_before_and_their_own() -> None:
    """Step 0 computes from 2 to 42. Step 1, launched at 10, swaps two blocks out (42 to 62) and one in (62 to 72), then
    computes."""
    gpu = Gpu()
    assert gpu.launch(plan(0)).compute_end_ns == 42
    times = gpu.launch(plan(1, Transfer(Direction.OUT, (5, 6), (0, 1), B), Transfer(Direction.IN, (2,), (7,), A)), 10)
    assert gpu.moved() == [(42, 62), (62, 72)]
    assert (times.compute_start_ns, times.compute_end_ns) == (72, 112)
    assert not gpu.over(1000, 1)  # nobody asks for them


def test_a_copy_on_the_device_takes_its_time_on_the_compute_lane() -> None:
    gpu = Gpu()
    times = gpu.launch(plan(0, Transfer(Direction.COPY, (1, 2), (3, 4), A), Transfer(Direction.COPY, (1,), (5,), A)))
    assert gpu.moved() == [(2, 2 + 2 * COPY_NS), (2 + 2 * COPY_NS, 2 + 3 * COPY_NS)]
    assert times.compute_end_ns - times.compute_start_ns == COMPUTE + 3 * COPY_NS


def test_jobs_go_on_beside_the_steps() -> None:
    """A store begins behind its plan's rows, a load behind those before; each direction does one at a time; a result
    names a job once, when all its moves are over."""
    gpu = Gpu()
    gpu.launch(plan(0, Transfer(Direction.OUT, (1, 2), (0, 1), job=4), Transfer(Direction.OUT, (3,), (2,), job=4)))
    times = gpu.launch(plan(1, Transfer(Direction.IN, (7,), (8,), B, job=5)), 10)
    assert gpu.moved() == [(42, 62), (62, 72), (42, 52)]
    assert times.compute_start_ns == 42  # and waits for neither
    assert [gpu.over(now, 1) for now in (51, 52, 71, 72, 99)] == [(), (5,), (), (4,), ()]
    assert optional_tables.values_of(optional_tables.TRANSFERS, gpu.log.rows)["reported_step"].tolist() == [1, 1, 1]


def test_rows_wait_for_the_jobs_that_their_plan_awaits() -> None:
    gpu = Gpu()
    gpu.launch(plan(0, Transfer(Direction.OUT, tuple(range(10)), tuple(range(10)), job=0)))
    assert gpu.launch(plan(1, awaited=(0,), work=rows(row(B, 1, 2)))).compute_start_ns == 42 + 10 * HOST_NS
    assert gpu.over(142, 1) == (0,)


def test_one_queue_for_everything() -> None:
    """Without streams of their own the moves stand in the queue of the kernels: step 0's output copy, then its job,
    then step 1."""
    gpu = Gpu(overlap=False)
    gpu.launch(plan(0, Transfer(Direction.OUT, (1,), (0,), job=0)))
    times = gpu.launch(plan(1))
    assert gpu.moved() == [(42, 52)]
    assert times.compute_start_ns == 52 + D2H + H2D


FAULTS = {
    "a table gets a block that a store reads": (Direction.OUT, plan(1, work=rows(row(B, 9, 1)))),
    "a member grows into a block that a load writes": (
        Direction.IN,
        StepPlan(1, changes=StepChanges(grown=(A,), listed=(3,))),
    ),
    "a row finds content that a load still writes": (
        Direction.IN,
        plan(1, work=rows(Chunk(B, 0, 4, 4, (3, 9), 1, admitted=True, cached=4))),
    ),
    "a store goes to a host block that a load reads": (
        Direction.IN,
        plan(1, Transfer(Direction.OUT, (8,), (1,), job=1)),
    ),
    "a load reads a host block that a store writes": (
        Direction.OUT,
        plan(1, Transfer(Direction.IN, (3,), (8,), job=1)),
    ),
    "a copy overwrites what a store reads": (Direction.OUT, plan(1, Transfer(Direction.COPY, (8,), (1,)))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_handed_out_under_a_move(fault: str) -> None:
    """A plan that breaks the rule stops the run; the same plan is fine when the job is over, or awaited."""
    way, broken = FAULTS[fault]

    def begun() -> Gpu:
        gpu = Gpu()
        gpu.launch(plan(0, Transfer(way, (1,), (3,), job=0)))
        return gpu

    with pytest.raises(AssertionError, match=r"handed out under a transfer|read before a transfer"):
        begun().launch(broken)
    gpu = begun()
    gpu.over(1000, 0)
    gpu.launch(broken)
    begun().launch(StepPlan(1, broken.work, broken.changes, transfers=broken.transfers, awaited=(0,)))


# -- what the CPU waits for -------------------------------------------------------------------------------------------


def test_a_wait_for_transfers_ends_with_an_arrival() -> None:
    """The KV of a prompt is on its way for 4 blocks of 1,000 ns, and nothing can be computed. A request that arrives at
    50 ns is not kept waiting: the step that computes it starts then."""
    options = replace(vllm_options(), kv_connector="hand_off", kv_role="kv_consumer")
    workload = load(spec(0, 16, 2, computed_elsewhere=True), spec(1, 8, 2, at=50))
    steps = run(server(workload, STEP, options=options, copies=Copies(1000, 1e9, 5e11)))
    computing = steps["rows"] > 0
    assert (steps["rows"][0], steps["schedule_start_ns"][computing][0]) == (0, 50)
    assert steps["schedule_start_ns"][computing][-1] >= 4000


def test_planning_that_finds_nothing_takes_its_time() -> None:
    """At depth 2 a step is planned behind the only one that a request needs: 3 ns, before that one is awaited."""
    steps = run(server(load(spec(0)), COSTS, name="sarathi", depth=2))
    assert steps["await_start_ns"].tolist() == [3 + 5 + 7 + 3]
