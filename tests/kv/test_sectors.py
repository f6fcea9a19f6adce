"""Sectors against the plainest model of them, and what transformers 5.23 makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cbsim.kv.sectors import SectorPool, Sectors
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.policy.request import Request, RequestSpec
from cbsim.schedulers.transformers.scheduler_523 import make
from cbsim.schedulers.transformers.settings import TransformersOptions, cut

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
            assert sectors.ready + len(sectors.cached) == len(sectors.order()) == len(set(sectors.order()))


TwoKinds.TestCase.settings = settings(max_examples=150)
TestTwoKinds = TwoKinds.TestCase


def _in_anothers_list(sectors: Sectors) -> None:
    first, second = list(sectors.trees.values())[:2]
    first[-1], second[-1] = second[-1], first[-1]


@pytest.mark.parametrize(
    "fault",
    [
        _in_anothers_list,
        lambda sectors: next(iter(sectors.trees.values())).pop(),  # a block is lost
        lambda sectors: sectors.stack.append(next(iter(sectors.trees))),  # free and claimed
        lambda sectors: sectors.cached.update({next(iter(sectors.trees.values()))[0]: None}),  # cached and ready
    ],
)
def test_the_check_finds_each_fault(fault: Callable[[Sectors], object]) -> None:
    sectors = Sectors(list(range(4)), 3)
    taken = sectors.take(6)
    sectors.give([taken[0], taken[1], taken[3], taken[4]], 0)
    sectors.check()
    fault(sectors)
    with pytest.raises(AssertionError):
        sectors.check()


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


# -- the scheduler; what its traces show is in tests/golden ------------------------------------------------------------


@pytest.mark.parametrize(("window", "read"), [(0, 8), (6, 6)])
def test_a_row_without_tokens_pays_for_what_it_reads(window: int, read: int) -> None:
    """A request with samples has one token left to read, the others decode on the fast path, whose reads are free. Its
    row is none of that path. So it waits until the budget holds what it reads, at most a window if all layers have one;
    the original plans more than it has room for."""
    sizes = {"block_size": SIZE, "num_blocks": 8, "max_batch_tokens": 64, "max_requests_per_batch": 8}
    options = TransformersOptions(
        name="transformers_fifo", version="5.23", **sizes, max_blocks_per_request=8, safety_margin=0.0
    )
    layers = [Attention(Sight.SLIDING, window)] if window else [FULL]
    policy = make(replace(options, groups=cut(layers, SIZE, "5.23").groups))
    first = named(0, 9, 2)
    policy.add(first)
    policy.add(replace(first, index=1, id="r1", sample_of=first))
    plan = policy.schedule()
    assert plan is not None and [(c.tokens, c.outputs) for c in plan.work.chunks] == [(8, 0)]
    step = policy._attempt()  # as an asynchronous loop does: its row is in flight, it has not forked
    assert [request.spec for request in step.held_back] == [first]
    request = policy.requests[first]
    for left, fits in ((read - 1, False), (read, True)):
        step.kv, step.fast = left, True
        assert policy._fits(request, step) is fits
