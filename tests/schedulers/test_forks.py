"""Samples that share a prompt, and KV that waits on the host: what rows read is what their requests said.

A model of the memory performs every plan's moves and rows, here by hand, in test_schedulers.py in random runs. A block
shared too long, copied too early, moved to a wrong place or handed out twice shows as a row that reads something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import DEPTHS, Case, ran, transformers_cases
from support.contents import Memory
from support.helpers import Ask, Drive

from cbsim.kv.blocks import BlockPool, CachedLast
from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.policy.transfers import Direction
from cbsim.schedulers.transformers.scheduler import TransformersScheduler
from cbsim.schedulers.transformers.settings import TransformersOptions

SIZE = 4


def scheduler(blocks: int, host: int = 0, **changes: Any) -> TransformersScheduler:
    bounds = {"max_batch_tokens": 32, "max_requests_per_batch": 8, "max_blocks_per_request": 0, "safety_margin": 0.0}
    sizes = {"block_size": SIZE, "num_blocks": blocks, "host_blocks": host}
    return TransformersScheduler(TransformersOptions(name="transformers_fifo", **sizes | bounds | changes))


def samples(prompt: int, outputs: Sequence[int], index: int = 0, *, named: bool = True) -> list[Ask]:
    """A request and its further samples, which differ in their outputs."""
    asks: list[Ask] = []
    for i, count in enumerate(outputs):
        text = (*[50 + index] * prompt, *[100 + 10 * index + i] * count)
        first = asks[0].spec if asks else None
        shared: dict[str, Any] = {"prefix": (index + 1,), "prefix_block_tokens": prompt, "prefix_tokens": prompt}
        shared = shared if named else {}
        spec = RequestSpec(index + i, f"{i}_{index}", 0, prompt, count, count, sample_of=first, **shared)
        asks.append(Ask(spec, 0, None, None, text))
    return asks


def forked(policy: TransformersScheduler, asks: Sequence[Ask], depth: int = 1) -> tuple[Drive, Memory, list[StepPlan]]:
    drive = Drive(policy, asks, depth)
    memory = Memory(drive)
    plans: list[StepPlan] = []

    def step(plan: StepPlan, rows: list[Row]) -> None:
        plans.append(plan)
        memory.step(plan, rows)

    return ran(drive, step), memory, plans


@pytest.mark.parametrize("named", [True, False])
def test_full_blocks_are_shared_and_the_open_one_is_copied(named: bool) -> None:
    """A prompt of 10 in blocks of 4, three samples: the first reads 9 tokens, the others share two blocks, copy the
    third, and all compute the last token themselves. It takes no name of the prompt for that."""
    _, memory, plans = forked(scheduler(20), samples(10, [5, 5, 5], named=named))
    first, second = plans[0], plans[1]
    assert [(c.start, c.tokens, c.outputs) for c in first.work.chunks] == [(0, 9, 0)]
    assert [(c.start, c.tokens, c.outputs, c.admitted) for c in second.work.chunks] == [
        (9, 1, 1, False),
        (9, 1, 1, True),
        (9, 1, 1, True),
    ]
    (own,) = first.work.chunks
    children = second.work.chunks[1:]
    assert [c.blocks[:2] for c in children] == [own.blocks[:2]] * 2
    assert [(m.direction, m.sources, m.targets, m.spec) for m in second.transfers] == [
        (Direction.COPY, own.blocks[2:], child.blocks[2:], child.spec) for child in children
    ]
    assert [plan.counts.new_blocks for plan in plans[:2]] == [3, 2]
    assert not any(plan.transfers for plan in plans[2:])
    assert len(memory.moves) == 2


def test_blocks_that_sharing_saves_are_counted() -> None:
    """Three samples share two blocks: four table entries more than blocks, until the last of them has ended."""
    policy = scheduler(20)
    saved: list[int] = []
    ran(Drive(policy, samples(10, [2, 5, 3]), 1), lambda plan, rows: saved.append(policy.pool.saved))
    assert saved == [0, 4, 4, 2, 0, 0]


def test_without_sharing_every_block_is_copied() -> None:
    _, _, plans = forked(scheduler(20, allow_block_sharing=False), samples(10, [5, 5]))
    (move,) = plans[1].transfers
    assert (len(move.sources), plans[1].counts.new_blocks) == (3, 3)


def test_samples_that_find_no_room_wait_the_last_one_first() -> None:
    """Six blocks: the first sample holds three of which two are whole, so three others fit, and two wait."""
    drive, _, plans = forked(scheduler(6), samples(10, [2] * 6))
    assert {m.spec.id for m in plans[1].transfers if m.spec} == {"1_0", "2_0", "3_0"}
    admitted = [c.spec.id for plan in plans for c in plan.work.chunks if c.admitted]
    assert admitted == ["0_0", "1_0", "2_0", "3_0", "5_0", "4_0"]
    assert len(drive.finished) == 6


@DEPTHS
def test_samples_of_a_request_that_was_given_up_serve_themselves(depth: int) -> None:
    """It is cancelled while it reads the prompt, chunk by chunk: its samples read the prompt on their own."""
    first, *others = samples(20, [5, 5, 5])
    asks = [first._replace(cancelled=2), *others]
    drive, _, _ = forked(scheduler(30, max_batch_tokens=4), asks, depth)
    assert drive.cancelled == [first.spec]
    assert [spec for spec, _ in drive.finished] == [ask.spec for ask in others]


@DEPTHS
def test_a_copy_is_called_off_with_its_request(depth: int) -> None:
    """Everybody is cancelled after the fork and before the next plan: no move is left for blocks that are free."""
    policy = scheduler(20)
    asks = samples(10, [5, 5, 5])
    for ask in asks:
        policy.add(ask.spec)
    drive = Drive(policy, asks, depth)
    plans = [policy.schedule() for _ in range(depth)]
    for plan in plans:
        assert plan is not None
        policy.update(plan, drive.executor.result(plan.step))
    assert len(policy.decoding.transfers) == 2
    policy.cancel(asks[1].spec)
    after = policy.schedule()
    assert after is not None
    assert [move.spec for move in after.transfers] == [asks[2].spec]
    policy.decoding.check()


def test_a_request_of_one_token_is_admitted_without_a_row() -> None:
    """Nothing of its prompt can be read before the fork: a plan without rows, then all samples read the one token."""
    _, memory, plans = forked(scheduler(8), samples(1, [3, 3, 3]))
    assert [plan.work.rows for plan in plans[:2]] == [0, 3]
    assert not memory.moves


def alone(index: int, prompt: int, outputs: int, arrives: int = 0) -> Ask:
    (ask,) = samples(prompt, [outputs], index)
    return ask._replace(arrives=arrives)


@DEPTHS
@pytest.mark.parametrize("host", [0, 2, 8])
def test_who_is_kept_on_the_host_keeps_what_was_computed(depth: int, host: int) -> None:
    """Three requests outgrow 12 blocks. Those whose blocks fit the host come back to where they were, but for a token
    whose result was in flight; the others start over."""
    drive, memory, plans = forked(scheduler(12, host=host), [alone(i, 7, 16) for i in range(3)], depth)
    lost = [preempted for plan in plans for preempted in plan.changes.preempted]
    ways = Counter(move.direction for move in memory.moves)
    assert lost
    assert ways[Direction.OUT] == ways[Direction.IN] == (len(lost) if host == 8 else 0)
    recomputed = sum(chunk.recomputed for plan in plans for chunk in plan.work.chunks)
    most = len(lost) * (depth - 1)
    assert all((gone.lost_tokens <= depth - 1) == (host == 8) for gone in lost)
    assert recomputed <= most if host == 8 else recomputed > most
    for chunk in (chunk for plan in plans for chunk in plan.work.chunks if chunk.resumed and host == 8):
        assert chunk.start > 7 and not chunk.cached  # it comes from the host
        assert len(chunk.blocks) * SIZE >= chunk.start + chunk.tokens
    assert drive.scheduler.pool.host_blocks == host


def test_those_on_the_host_and_the_others_come_by_turns() -> None:
    """Copied-out requests first, then one of each, in the order of the queue."""
    policy = scheduler(40, host=40)
    asks = [alone(i, 4, 4) for i in range(6)]
    for ask in asks:
        policy.add(ask.spec)
    waiting = list(policy.waiting)
    for request in (waiting[1], waiting[4], waiting[5]):
        policy.host.tables[request] = []
    turns = [r.spec.index for r in policy._in_queue()]
    assert turns == [1, 0, 4, 2, 5, 3]


class FreesTooEarly(BlockPool):
    """Frees shared blocks with their first owner."""

    def release(self, request: Request, *, returns: bool = False) -> int:
        table = list(self.tables.get(request, ()))
        held = super().release(request, returns=returns)
        shared = [block for block in table if self._refs.get(block)]
        self._free.give(shared, 0)
        return held


class Faulty(TransformersScheduler):
    def make_pool(self, observer: Any) -> BlockPool:
        return FreesTooEarly(SIZE, self.options.num_blocks, CachedLast(range(self.options.num_blocks)), observer)


def test_a_shared_block_freed_with_its_first_owner_is_found() -> None:
    """By the pool's own check, as soon as the first of three samples ends."""
    drive = Drive(Faulty(scheduler(20).options), samples(10, [2, 5, 5]), 1)
    with pytest.raises(AssertionError, match="in use and free"):
        drive.run()


@DEPTHS
def test_a_preempted_request_comes_back_once_no_request_runs(depth: int) -> None:
    """A preemption ends admission until a running request ends. If the last one is cancelled, admission resumes."""
    asks = [alone(i, 7, 16) for i in range(2)]
    drive = Drive(scheduler(8), asks, depth)
    preempted: list[RequestSpec] = []

    def cancel_the_survivor(plan: StepPlan, rows: list[Row]) -> None:
        preempted.extend(lost.spec for lost in plan.changes.preempted)
        drive.asks |= {ask.spec: ask._replace(cancelled=0) for ask in asks if preempted and ask.spec not in preempted}

    ran(drive, cancel_the_survivor)
    assert set(preempted) | set(drive.cancelled) == {ask.spec for ask in asks}
    assert dict(drive.finished)[preempted[0]] is Finish.LENGTH


@pytest.mark.parametrize("cases", [transformers_cases(), transformers_cases("5.23")], ids=["5.17", "5.23"])
def test_the_random_cases_fork_copy_and_come_back(cases: st.SearchStrategy[Case]) -> None:
    """What the properties above are about does happen in their cases."""
    seen: Counter[str] = Counter()

    @given(case=cases, depth=st.sampled_from([1, 2]))
    @settings(max_examples=150, database=None, derandomize=True)
    def look(case: Case, depth: int) -> None:
        build, workload = case
        drive = Drive(build(), workload, depth)
        memory = Memory(drive)
        ran(drive, memory.step)
        seen.update(move.direction.name for move in memory.moves)
        seen["cancelled sample"] += any(spec.sample_of for spec in drive.cancelled)
        seen["aborted first"] += any(
            ask.spec.sample_of and drive.requests[ask.spec.sample_of].finish is Finish.ABORTED
            for ask in workload
            if ask.spec.sample_of in drive.requests
        )

    look()
    assert min(seen[name] for name in ("COPY", "OUT", "IN", "cancelled sample", "aborted first")) >= 10, seen
