"""Preemption by swapping: what is in the blocks that rows read, who comes back when, and what it takes of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.cases import DEPTHS, MOST_TOKENS, Case, Watch, check_ends, vllm_cases
from support.contents import Contents, said
from support.examples import examples
from support.helpers import Ask, Drive

from cbsim.policy.kind import SettingsError
from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import Finish, RequestSpec
from cbsim.policy.transfers import DEVICE, HOST, IN_ORDER, Direction, Transfer
from cbsim.scenario import shapes
from cbsim.scenario.shapes import Place
from cbsim.schedulers.vllm.scheduler import VLLM, VllmScheduler
from cbsim.schedulers.vllm.settings import VllmOptions, VllmSettings, resolve

SIZE = 4


class Executed:
    """A run whose plans are performed by an executor that knows what lies where. `plans` are all of them."""

    def __init__(self, scheduler: VllmScheduler, asks: list[Ask], depth: int) -> None:
        self.plans: list[StepPlan] = []
        self.drive = Drive(scheduler, asks, depth)
        self.watch = Watch(self.drive)
        self.contents = self.watch.memory.contents
        self.drive.on_step = self._step

    def run(self) -> Executed:
        self.drive.run()
        check_ends(self.drive)
        return self

    def _step(self, plan: StepPlan, rows: list[Row]) -> None:
        self.plans.append(plan)
        self.watch.step(plan, rows)
        swapping = self.drive.scheduler.swapping  # type: ignore[union-attr]
        assert swapping is not None
        swapping.check()
        check_moves(plan, swapping)

    def moves(self, way: Direction) -> list[tuple[int, str, int]]:
        """(step, request, blocks) of the moves of one way."""
        return [
            (plan.step, move.spec.id, len(move.sources))
            for plan in self.plans
            for move in plan.transfers
            if move.direction is way and move.spec is not None
        ]


def check_moves(plan: StepPlan, swapping: Any) -> None:
    """All in order, of one way; the victims that keep what they computed are those who go out, the admitted ones that
    begin behind nothing cached those who come in."""
    assert {move.job for move in plan.transfers} <= {IN_ORDER}
    assert len({move.direction for move in plan.transfers}) <= 1
    out = [move.spec for move in plan.transfers if move.direction is Direction.OUT]
    assert out == [victim.spec for victim in plan.changes.preempted if not victim.lost_tokens]
    come = [move.spec for move in plan.transfers if move.direction is Direction.IN]
    back = [c for c in plan.work.chunks if c.admitted and c.start > c.cached]
    assert come == [chunk.spec for chunk in back]
    assert all(chunk.resumed and not chunk.cached for chunk in back)
    if swapping.out:
        admitted = {chunk.spec for chunk in plan.work.chunks if chunk.admitted}
        assert admitted == set(come), "somebody new was admitted while others are out"


@st.composite
def swapping_cases(draw: st.DrawFn) -> Case:
    """A vLLM scheduler that swaps, with a cache for one long request or a little more, a host tier of nothing to twice
    that, and a workload that comes all at once."""
    build, workload = draw(vllm_cases())
    scheduler = build()
    assert isinstance(scheduler, VllmScheduler)
    least = MOST_TOKENS // scheduler.options.block_size
    swapped = replace(
        scheduler.options,
        num_blocks=1 + least + draw(st.integers(0, 3)),
        max_num_seqs=draw(st.integers(2, 8)),
        preemption_mode="swap",
        host_blocks=draw(st.integers(0, 2 * least)),
    )
    return partial(VllmScheduler, swapped), [ask._replace(arrives=ask.arrives // 5) for ask in workload]


@DEPTHS
@given(case=swapping_cases())
@examples(50)
def test_rows_read_their_own_tokens(depth: int, case: Case) -> None:
    """Whoever goes out, comes back, is cancelled outside or finds the host full: each row's context is exactly its own
    tokens, host places are accounted for after every step, every token comes from the row that sampled it, and in the
    end cache and host are free."""
    build, workload = case
    scheduler = build()
    assert isinstance(scheduler, VllmScheduler)
    done = Executed(scheduler, workload, depth).run()
    swapping = scheduler.swapping
    assert swapping is not None
    assert not swapping.out
    swapping.check()
    out, back = done.moves(Direction.OUT), done.moves(Direction.IN)
    losses = [victim for plan in done.plans for victim in plan.changes.preempted if victim.lost_tokens]
    event(f"went out {len(out) > 0}, came back {len(back) > 0}, host was full {len(losses) > 0}")
    event(f"ended outside {len(out) > len(back)}")
    recomputed = sum(chunk.recomputed for plan in done.plans for chunk in plan.work.chunks)
    assert recomputed <= sum(victim.lost_tokens for victim in losses)


# -- by hand ----------------------------------------------------------------------------------------------------------


def options(blocks: int, host: int, **changed: Any) -> VllmOptions:
    usual: dict[str, Any] = {
        "block_size": SIZE,
        "num_blocks": 1 + blocks,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "preemption_mode": "swap",
        "host_blocks": host,
    }
    return VllmOptions(**(usual | changed))


def asks(*lengths: tuple[int, int], **changed: Any) -> list[Ask]:
    """Requests of (prompt, output tokens), here from the start."""
    specs = [RequestSpec(i, f"r{i}", i, prompt, out, out) for i, (prompt, out) in enumerate(lengths)]
    return [Ask(spec, 0, changed.get("cancelled", {}).get(spec.index), None) for spec in specs]


def ran(blocks: int, host: int, lengths: list[tuple[int, int]], depth: int = 1, **changed: Any) -> Executed:
    cancelled = changed.pop("cancelled", {})
    scheduler = VllmScheduler(options(blocks, host, **changed))
    return Executed(scheduler, asks(*lengths, cancelled=cancelled), depth).run()


@pytest.mark.parametrize(("depth", "computed"), [(1, 8), (2, 8)])
def test_who_goes_out_comes_back_with_what_it_had(depth: int, computed: int) -> None:
    """Two prompts of 4 that decode need 2 blocks each from the 2nd step on and 3 from the 6th; the cache has 5. So r1
    goes out in step 5 with its 2 blocks of 8 tokens, waits until r0 has ended, and computes its 9th token next. In the
    asynchronous loop its 4th output is in flight then, and is delivered while r1 is out."""
    done = ran(5, 2, [(4, 8), (4, 8)], depth)
    assert done.moves(Direction.OUT) == [(5, "r1", 2)]
    (step, _, blocks) = done.moves(Direction.IN)[0]
    assert blocks == 2
    (chunk,) = done.plans[step].work.chunks
    assert (chunk.start, chunk.tokens, chunk.cached, chunk.recomputed) == (computed, 1, 0, 0)
    assert chunk.admitted
    assert chunk.resumed
    assert len(chunk.blocks) == 3
    requests = {spec.id: request for spec, request in done.drive.requests.items()}
    assert [request.preemptions for request in requests.values()] == [0, 1]
    assert requests["r1"].runs == [[0, 5], [step, 3]]


def test_out_means_first_out_first_in_and_nobody_new() -> None:
    """Three that run and one that waits. r2 goes out, later r1; r2 is first to come back, although r1 was there before
    it, and r3 is admitted when both have."""
    done = ran(7, 9, [(4, 14), (4, 10), (4, 6), (4, 2)], max_num_seqs=3)
    assert [name for _, name, _ in done.moves(Direction.OUT)] == ["r2", "r1"]
    assert [name for _, name, _ in done.moves(Direction.IN)] == ["r2", "r1"]
    admitted = {c.spec.id: plan.step for plan in done.plans for c in plan.work.chunks if c.admitted and not c.resumed}
    assert admitted["r3"] > done.moves(Direction.IN)[-1][0]


@pytest.mark.parametrize(("watermark", "runs"), [(0.0, True), (0.2, False)])
def test_blocks_stay_free_when_somebody_comes_back(watermark: float, runs: bool) -> None:
    """r0 is out with 8 tokens, and r1 holds 5 of the 8 blocks: the other 3 do for r0's ninth token, but not if one has
    to stay free as long as somebody runs."""
    scheduler = VllmScheduler(options(8, 8, watermark=watermark))
    swapping, decoding = scheduler.swapping, scheduler.decoding
    assert swapping is not None
    request = decoding.add(RequestSpec(0, "r0", 0, 8, 4, 4), 4)
    decoding.admit(request)
    scheduler.pool.grow(request, 2)
    row = decoding.row(request, 8, scheduler.pool.tables[request])
    decoding.plan({request: row}, running=1, waiting=0)
    decoding.split()
    swapping.host.park(request, drop_in_flight=False)
    other = decoding.add(RequestSpec(1, "r1", 0, 20, 4, 4), 4)
    decoding.admit(other)
    scheduler.pool.grow(other, 5)
    scheduler.running[other] = None
    assert scheduler.pool.free == 3
    assert swapping.has_room(request, 1, scheduler.kept_free) == runs


def test_no_room_on_the_host_means_recomputing() -> None:
    """One place for two blocks: r1 waits in the queue as it would without a host, and its 8 tokens are lost."""
    done = ran(5, 1, [(4, 8), (4, 8)])
    assert not done.moves(Direction.OUT)
    assert [victim.lost_tokens for plan in done.plans for victim in plan.changes.preempted] == [8]


def test_a_prompt_half_read_goes_on_where_it_was() -> None:
    """r1 reads 4 tokens a step beside r0. There is no third block for it, so it goes out with 8, half-way through its
    prompt of 13. When r0 has ended they come back, and the 5 that are left are its next row: nobody else is there."""
    done = ran(4, 4, [(3, 6), (13, 2)], long_prefill_token_threshold=4, scheduler_reserve_full_isl=False)
    ((_, name, blocks),) = done.moves(Direction.OUT)
    assert name == "r1"
    (step, _, back) = done.moves(Direction.IN)[0]
    assert back == blocks
    (chunk,) = done.plans[step].work.chunks
    assert (chunk.start, chunk.tokens, chunk.outputs) == (8, 5, 1)


@DEPTHS
def test_cancelled_outside(depth: int) -> None:
    """r1 is given up while it is out: its places are free, nothing comes back, and its row is not sampled again."""
    done = ran(5, 2, [(4, 9), (4, 8)], depth, cancelled={1: 16})
    assert len(done.moves(Direction.OUT)) == 1
    assert not done.moves(Direction.IN)
    request = next(r for spec, r in done.drive.requests.items() if spec.id == "r1")
    assert request.finish is Finish.ABORTED


# -- the executor finds faults ----------------------------------------------------------------------------------------


def late(plans: list[StepPlan]) -> Callable[[StepPlan], StepPlan]:
    """The moves of each plan with the plan behind it."""

    def change(plan: StepPlan) -> StepPlan:
        plans.append(plan)
        before = plans[-2].transfers if len(plans) > 1 else ()
        return StepPlan(plan.step, plan.work, plan.changes, plan.counts, before, plan.awaited)

    return change


def swapped_places(plan: StepPlan) -> StepPlan:
    """The first two blocks that come in change places."""
    moves = tuple(
        type(m)(m.direction, (m.sources[1], m.sources[0], *m.sources[2:]), m.targets, m.spec)
        if m.direction is Direction.IN
        else m
        for m in plan.transfers
    )
    return StepPlan(plan.step, plan.work, plan.changes, plan.counts, moves, plan.awaited)


@pytest.mark.parametrize("fault", [late([]), swapped_places], ids=["blocks handed out before the move", "places mixed"])
def test_the_executor_finds_what_a_policy_does_wrong(fault: Callable[[StepPlan], StepPlan]) -> None:
    """Blocks that are handed out before they have been moved, and blocks that come in in another order."""
    scheduler = VllmScheduler(options(5, 2))
    drive = Drive(scheduler, asks((4, 8), (4, 8)), 1)
    contents = Contents(drive.asks, SIZE)
    drive.on_step = lambda plan, rows: contents.step(fault(plan), rows, drive.executor.tables)
    with pytest.raises(AssertionError, match="position 0, block"):
        drive.run()


def test_a_job_writes_early_and_reads_late() -> None:
    """Until a job is over its targets hold nothing, and what is written over its sources is what it copies."""
    here = {ask.spec: ask for ask in asks((4, 1), (4, 1))}
    contents, (spec, other) = Contents(here, SIZE), here
    tables = {spec: [0], other: [0]}
    row, over = (Row(s, 0, 4, (0,), None) for s in (spec, other))
    contents.step(StepPlan(0, transfers=(Transfer(Direction.OUT, (0,), (5,), spec, 7),)), [row], tables)
    assert contents.held((HOST, 5)) == [None] * SIZE
    contents.step(StepPlan(1), [over], tables)
    contents.completed((7,))
    assert sum(contents.moved.values()) == 1
    assert contents.held((HOST, 5)) == contents.held((DEVICE, 0)) == [said(here, other, at) for at in range(SIZE)]


# -- settings ---------------------------------------------------------------------------------------------------------


def place(tensor: int = 1) -> Place:
    return Place(shapes.model("llama-3.1-8b"), shapes.hardware("h200-sxm"), 1, 16, 0.9, 600, tensor)


def test_swap_space_becomes_blocks() -> None:
    """128 KiB a token, 2 MiB a block: 4 GiB hold 2,048; a GPU that has half of the heads holds twice as many."""
    swap = VllmSettings(preemption_mode="swap")
    assert resolve(swap, place()).host_blocks == 2048
    assert resolve(swap, place(tensor=2)).host_blocks == 4096
    assert resolve(VllmSettings(), place()).host_blocks == 0
    scheduler = VLLM.make(resolve(swap, place()))
    assert scheduler.pool.host_blocks == 2048
    assert VLLM.make(resolve(VllmSettings(), place())).pool.host_blocks == 0


def test_swap_space_for_no_block_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"got 0.001, must be >= 0.001953: one block") as refused:
        resolve(VllmSettings(preemption_mode="swap", swap_space_gib=0.001), place())
    assert refused.value.field == "swap_space_gib"
