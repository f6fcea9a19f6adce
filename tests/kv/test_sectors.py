"""Sectors against the plainest model of them, and what transformers 5.23 makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.helpers import Ask, Drive

from cbsim.kv.sectors import HostSectors, SectorPool, Sectors
from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import Request, RequestSpec
from cbsim.policy.transfers import Direction, Transfer
from cbsim.schedulers.transformers.scheduler_523 import Transformers523
from cbsim.schedulers.transformers.settings import TransformersOptions

# -- sectors ----------------------------------------------------------------------------------------------------------


class Naive:
    """What two kinds of layers have of one stack: lists of (sector, its free blocks), searched and rebuilt."""

    def __init__(self, stack: Sequence[int], per: Sequence[int]) -> None:
        self.stack, self.per = list(stack), per
        self.lists: list[list[tuple[int, list[int]]]] = [[] for _ in per]
        self.cached: list[list[int]] = [[] for _ in per]

    def loose(self, kind: int) -> int:
        return sum(len(blocks) for _, blocks in self.lists[kind])

    def take(self, kind: int, count: int) -> list[int]:
        per = self.per[kind]
        while self.loose(kind) < count:
            sector = self.stack.pop()
            self.lists[kind].append((sector, [sector * per + i for i in range(per)][::-1]))
        taken: list[int] = []
        for _, blocks in self.lists[kind]:
            part = blocks[-min(len(blocks), count - len(taken)) :] if len(taken) < count else []
            taken += part
            for block in part:
                blocks.remove(block)
        self.lists[kind] = [(sector, blocks) for sector, blocks in self.lists[kind] if blocks]
        return taken

    def give(self, kind: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            home = [free for sector, free in self.lists[kind] if sector == block // self.per[kind]]
            if home:
                home[0].append(block)
            else:
                self.lists[kind].append((block // self.per[kind], [block]))

    def reclaim(self, kind: int) -> None:
        per = self.per[kind]
        self.stack += [sector for sector, blocks in self.lists[kind] if len(blocks) == per]
        self.lists[kind] = [(sector, blocks) for sector, blocks in self.lists[kind] if len(blocks) < per]


class TwoKinds(RuleBasedStateMachine):
    """Random legal calls by two kinds, in any order."""

    @initialize(count=st.integers(1, 6), per=st.tuples(st.integers(1, 4), st.integers(1, 4)))
    def start(self, count: int, per: tuple[int, int]) -> None:
        stack = list(range(2, 2 + count))
        self.naive = Naive(stack, per)
        self.kinds = [Sectors(stack, n) for n in per]
        self.used: list[list[list[int]]] = [[], []]

    @rule(kind=st.integers(0, 1), data=st.data())
    def take(self, kind: int, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.kinds[kind].ready))
        taken = self.kinds[kind].take(count)
        assert taken == self.naive.take(kind, count)
        self.used[kind].append(taken)

    @rule(kind=st.integers(0, 1), data=st.data())
    def give(self, kind: int, data: st.DataObject) -> None:
        if not self.used[kind]:
            return
        blocks = self.used[kind].pop(data.draw(st.integers(0, len(self.used[kind]) - 1)))
        cached = data.draw(st.integers(0, len(blocks)))
        self.kinds[kind].give(blocks, cached)
        self.naive.cached[kind] += blocks[:cached]
        self.naive.give(kind, blocks[cached:])

    @rule(kind=st.integers(0, 1), data=st.data())
    def pick(self, kind: int, data: st.DataObject) -> None:
        cached = self.naive.cached[kind]
        if cached:
            block = cached.pop(data.draw(st.integers(0, len(cached) - 1)))
            self.kinds[kind].pick(block)
            self.used[kind].append([block])

    @rule(kind=st.integers(0, 1))
    def evict(self, kind: int) -> None:
        assert self.kinds[kind].evict() == self.naive.cached[kind]
        self.naive.give(kind, self.naive.cached[kind])
        self.naive.cached[kind] = []

    @rule(kind=st.integers(0, 1))
    def reclaim(self, kind: int) -> None:
        self.kinds[kind].reclaim()
        self.naive.reclaim(kind)

    @invariant()
    def same(self) -> None:
        for kind, sectors in enumerate(self.kinds):
            sectors.check()
            assert sectors.stack == self.naive.stack
            assert list(sectors.trees.items()) == self.naive.lists[kind]
            assert list(sectors.cached) == self.naive.cached[kind]
            assert sectors.ready == self.naive.loose(kind) + len(self.naive.stack) * sectors.per
            assert sectors.free == len(sectors.order()) == len(set(sectors.order()))


TwoKinds.TestCase.settings = settings(max_examples=150)
TestTwoKinds = TwoKinds.TestCase


def test_blocks_come_from_the_oldest_sector_and_whole_lists_keep_their_order() -> None:
    sectors = Sectors([0, 1, 2], 3)
    assert sectors.take(4) == [8, 7, 6, 3]  # a list with more than is wanted gives its last ones
    sectors.give([7, 8], 0)
    assert sectors.take(2) == [5, 4]  # sector 1 has been in the dict for longer
    assert sectors.take(1) == [8]


def _lost(sectors: Sectors) -> None:
    sectors.trees[next(iter(sectors.trees))].pop()


def _in_anothers_list(sectors: Sectors) -> None:
    first, second = list(sectors.trees)[:2]
    sectors.trees[first][-1], sectors.trees[second][-1] = sectors.trees[second][-1], sectors.trees[first][-1]


def _free_and_claimed(sectors: Sectors) -> None:
    sectors.stack.append(next(iter(sectors.trees)))


def _cached_and_ready(sectors: Sectors) -> None:
    sectors.cached[next(iter(sectors.trees.values()))[0]] = None


@pytest.mark.parametrize("fault", [_lost, _in_anothers_list, _free_and_claimed, _cached_and_ready])
def test_the_check_finds_each_fault(fault: Callable[[Sectors], None]) -> None:
    sectors = Sectors(list(range(4)), 3)
    taken = sectors.take(6)
    sectors.give([taken[0], taken[1], taken[3], taken[4]], 0)
    sectors.check()
    fault(sectors)
    with pytest.raises(AssertionError):
        sectors.check()


def test_a_victim_that_does_not_fit_the_host_is_turned_away() -> None:
    """Also after blocks came back, where the original counts its sectors before it reclaims them, and dies."""
    host = HostSectors(4, [1], 1)
    assert host.take([3]) == [[1, 2, 3]]
    host.give([[1, 2]])
    assert host.take([4]) is None
    assert host.take([3]) == [[0, 1, 2]]
    host.check()


# -- the pool ---------------------------------------------------------------------------------------------------------

SIZE = 4


def named(index: int, prompt: int, outputs: int, text: int = 0) -> RequestSpec:
    """A request whose prompt and outputs are those of its text."""
    blocks = (prompt + outputs) // SIZE
    ids = tuple(1000 * text + i for i in range(blocks))
    tokens = {"prefix": ids, "prefix_block_tokens": SIZE, "prefix_tokens": blocks * SIZE}
    return RequestSpec(index, f"r{index}", 0, prompt, outputs, outputs, **tokens)


def pool_of(blocks: int) -> SectorPool:
    return SectorPool(SIZE, blocks, Sectors(list(range(blocks)), 1))


def holder(pool: SectorPool, index: int, blocks: int) -> Request:
    request = Request(named(index, blocks * SIZE, 1), 1, SIZE)
    pool.grow(request, blocks)
    return request


def test_cached_blocks_are_free_but_not_ready() -> None:
    pool = pool_of(6)
    request = holder(pool, 0, 4)
    pool.merge(request, 3)
    pool.release(request)
    assert (pool.free, pool.ready, pool.cached, pool.keyed) == (6, 3, 3, 3)
    assert pool.evict_all() and not pool.evict_all()
    assert (pool.free, pool.ready, pool.cached, pool.keyed) == (6, 6, 0, 0)
    pool.check()


def test_who_comes_back_does_not_find_its_blocks_but_those_of_others() -> None:
    """Set back, a request forgets what it had named, except the blocks that another one has, too."""
    pool = pool_of(8)
    first = holder(pool, 0, 3)
    pool.merge(first, 3)
    other = Request(named(1, 8, 1), 1, SIZE)
    pool.adopt(other, pool.longest_prefix(other.spec, 2))
    pool.release(first, returns=True)
    assert len(pool.longest_prefix(first.spec, 3)) == 2
    pool.release(other, returns=True)
    assert pool.longest_prefix(first.spec, 3) == []
    assert (pool.ready, pool.saved) == (8, 0)
    pool.check()


def test_blocks_without_keys_are_shared_and_named_once() -> None:
    """A fork before its parent's row has landed: whichever lands first names the blocks, the others pass them over."""
    pool = pool_of(8)
    parent = holder(pool, 0, 3)
    pool.merge(parent, 1)
    children = [Request(named(i, 12, 1), 1, SIZE) for i in (1, 2)]
    for child in children:
        pool.share(parent, child, 2)
        pool.grow(child, 1)
    assert pool.saved == 4 and pool.keyed == 1
    pool.check()
    assert pool.merge(children[0], 2) == [] and pool.keyed == 2
    assert pool.merge(parent, 2) == [] and pool.merge(children[1], 2) == []
    pool.check()
    for request in (parent, *children):
        pool.release(request)
        pool.check()
    assert (pool.cached, pool.saved, pool.free) == (2, 0, 8)


def test_a_shared_block_that_is_merged_stays_with_the_others() -> None:
    """The content turns up elsewhere first: one of the two takes that block over, the other one still reads its own."""
    pool = pool_of(8)
    parent, child, twin = holder(pool, 0, 2), Request(named(1, 8, 1), 1, SIZE), holder(pool, 2, 2)
    pool.share(parent, child, 1)
    pool.grow(child, 1)
    own = pool.tables[parent][0]
    pool.merge(twin, 1)
    assert pool.merge(parent, 1) == [(0, pool.tables[twin][0])]
    assert pool.tables[child][0] == own and own not in pool.free_order()
    pool.check()
    assert pool.merge(child, 1) == [(0, pool.tables[twin][0])]
    assert own in pool.free_order()
    pool.check()


# -- the scheduler ----------------------------------------------------------------------------------------------------


def scheduler(blocks: int, host: int = 0, **changes: Any) -> Transformers523:
    options = TransformersOptions(
        name="transformers_fifo",
        version="5.23",
        block_size=SIZE,
        num_blocks=blocks,
        max_batch_tokens=64,
        max_requests_per_batch=8,
        max_blocks_per_request=0,
        safety_margin=0.0,
        allow_block_sharing=True,
        host_blocks=host,
    )
    return Transformers523(replace(options, **changes))


def alone(index: int, prompt: int, outputs: int, arrives: int = 0) -> Ask:
    return Ask(named(index, prompt, outputs, text=index + 1), arrives, None, None)


def ran(policy: Transformers523, asks: Sequence[Ask], depth: int = 1) -> list[StepPlan]:
    plans: list[StepPlan] = []
    drive = Drive(policy, asks, depth)

    def step(plan: StepPlan, rows: list[Row]) -> None:
        del rows
        plans.append(plan)

    drive.on_step = step
    drive.run()
    assert len(drive.finished) == len(asks)
    return plans


def admitted(plans: Sequence[StepPlan]) -> list[list[int]]:
    """Who is admitted in each step that admits somebody."""
    steps = [[chunk.spec.index for chunk in plan.work.chunks if chunk.admitted] for plan in plans]
    return [step for step in steps if step]


def test_a_small_request_overtakes_a_large_one() -> None:
    """Five blocks of eight are taken; four do not fit, one does."""
    plans = ran(scheduler(8), [alone(0, 19, 2), alone(1, 15, 2), alone(2, 3, 2)])
    assert admitted(plans) == [[0, 2], [1]]


def test_one_step_admits_far_below_the_margin() -> None:
    """The margin is tested once, before the step: half of the blocks are to stay free, and all are taken."""
    plans = ran(scheduler(8, safety_margin=0.5), [alone(i, 7, 2) for i in range(4)])
    assert admitted(plans) == [[0, 1, 2, 3]]
    assert plans[0].counts.free_blocks == 0


def test_a_breached_margin_evicts_all_that_is_cached() -> None:
    """Six blocks stay cached, which leaves two of eight ready: with no margin they stay, with one of half they go."""
    asks = [alone(0, 25, 2), alone(1, 5, 2, arrives=8)]
    for margin, cached in ((0.0, 6), (0.5, 0)):
        last = ran(scheduler(8, safety_margin=margin), asks)[-2]
        assert last.counts.cached_blocks == cached
        asks = [ask._replace(spec=replace(ask.spec)) for ask in asks]


def test_the_whole_prompt_is_never_found() -> None:
    """Equal prompts of two blocks, one after the other: the second one finds the first block only."""
    specs = [named(i, 8, 2) for i in range(2)]
    plans = ran(scheduler(8), [Ask(spec, 8 * i, None, None) for i, spec in enumerate(specs)])
    assert [c.cached for plan in plans for c in plan.work.chunks if c.admitted] == [0, 4]


def test_a_request_gets_the_blocks_that_it_lacks() -> None:
    """None beforehand: seven tokens take two blocks, and eight do (of 5.17: three)."""
    plans = ran(scheduler(8), [alone(0, 7, 3)])
    assert [plan.counts.table_blocks for plan in plans] == [2, 2, 3]


def test_the_newest_of_the_starved_goes_to_the_host() -> None:
    """Three requests outgrow nine blocks, the host has three: who is set back first is the youngest."""
    plans = ran(scheduler(9, host=3), [alone(i, 11, 9) for i in range(3)])
    outs = [(move.spec.index, move.targets) for move in moves(plans) if move.spec and move.direction is Direction.OUT]
    assert outs[0] == (2, (0, 1, 2))


def moves(plans: Sequence[StepPlan]) -> list[Transfer]:
    return [move for plan in plans for move in plan.transfers]


def test_samples_that_find_no_room_wait_in_their_order() -> None:
    """Six blocks: the first of six samples holds three of which two are whole, so three others fit, and two wait."""
    first = replace(named(0, 10, 2), prefix_tokens=8)
    others = [replace(first, index=i, id=f"r{i}", sample_of=first) for i in range(1, 6)]
    plans = ran(scheduler(6), [Ask(spec, 0, None, None) for spec in (first, *others)])
    assert [index for step in admitted(plans) for index in step] == [0, 1, 2, 3, 4, 5]
    assert {move.spec.index for move in moves(plans) if move.spec} == {1, 2, 3}


def test_a_row_without_tokens_pays_for_what_it_reads() -> None:
    """A request with samples has one token left to read, the others decode on the fast path, whose reads are free. Its
    row is none of that path. So it waits until the budget holds what it reads; the original plans more than it has
    room for."""
    policy = scheduler(8, max_blocks_per_request=8)
    first = named(0, 9, 2)
    policy.add(first)
    policy.add(replace(first, index=1, id="r1", sample_of=first))
    plan = policy.schedule()
    assert plan is not None and [(c.tokens, c.outputs) for c in plan.work.chunks] == [(8, 0)]
    step = policy._attempt()  # as an asynchronous loop does: its row is in flight, it has not forked
    assert [request.spec for request in step.held_back] == [first]
    request = policy.requests[first]
    for left, fits in ((7, False), (8, True)):
        step.kv, step.fast = left, True
        assert policy._fits(request, step) is fits
