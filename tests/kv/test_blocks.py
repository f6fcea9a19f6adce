"""The block pool against the simplest model that could be right: lists, counts, and no index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cbsim.kv.blocks import BlockPool, CachedLast, FreeList, FreeQueue
from cbsim.policy.request import Request, RequestSpec

SIZE = 2
KINDS = ("append", "unhashed_first", "cached_last")
CONTENTS = 3  # so few texts that requests share, duplicate and find each other's blocks


class NaiveQueue:
    """The free lists as their docstrings state them: plain lists, searched and rebuilt."""

    def __init__(self, kind: str, blocks: Sequence[int]) -> None:
        self.kind = kind
        self.plain = list(blocks)
        self.cached: list[int] = []  # of `cached_last` only

    def order(self) -> list[int]:
        return self.plain + self.cached

    def take(self, count: int) -> list[int]:
        return [self.plain.pop(0) if self.plain else self.cached.pop() for _ in range(count)]

    def give(self, blocks: Sequence[int], hashed: int) -> None:
        if self.kind == "cached_last":
            self.cached += blocks[:hashed]
            self.plain += blocks[hashed:]
        elif self.kind == "unhashed_first":
            self.plain = list(blocks[hashed:])[::-1] + self.plain + list(blocks[:hashed])[::-1]
        else:
            self.plain += list(blocks)[::-1]

    def pick(self, block: int) -> None:
        (self.cached if block in self.cached else self.plain).remove(block)


class Pools(RuleBasedStateMachine):
    """Random legal calls, in any order, on the pool and on the model."""

    @initialize(kind=st.sampled_from(KINDS), blocks=st.integers(1, 12))
    def start(self, kind: str, blocks: int) -> None:
        free: FreeList
        if kind == "cached_last":
            free = CachedLast(range(blocks))
        else:
            free = FreeQueue(range(blocks), unhashed_first=kind == "unhashed_first")
        self.kind, self.count = kind, blocks
        self.pool, self.naive = BlockPool(SIZE, blocks, free), NaiveQueue(kind, range(blocks))
        self.tables: dict[Request, list[int]] = {}
        self.content: dict[int, int] = {}  # block -> key
        self.requests: list[Request] = []
        self.named: dict[Request, int] = {}  # leading blocks that have a key
        self.waiting: list[Request] = []  # released, may come back
        self.index = 0

    @rule(text=st.integers(0, CONTENTS - 1), shared=st.integers(0, 4), returns=st.booleans())
    def admit(self, text: int, shared: int, returns: bool) -> None:
        """A new request, or one that was requeued, adopts what is cached of its text."""
        if returns and self.waiting:
            request = self.waiting.pop(0)
        else:
            prefix = tuple(10 * text + i for i in range(shared))
            spec = RequestSpec(self.index, f"r{self.index}", 0, 50, 1, 1, 0, prefix, SIZE, shared * SIZE)
            request, self.index = Request(spec, 1, SIZE), self.index + 1
        hits = self.pool.longest_prefix(request.spec, 4)
        assert hits == self._naive_prefix(request)
        assert self.pool.idle(hits) == sum(b in self.naive.order() for b in hits)
        for block in hits:
            if block in self.naive.order():
                self.naive.pick(block)
        request.admit(self.index, len(hits) * SIZE)
        self.pool.adopt(request, hits)
        self.requests.append(request)
        self.tables[request], self.named[request] = list(hits), len(hits)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), most=st.integers(0, 4))
    def ask(self, data: st.DataObject, most: int) -> None:
        """Who waits asks again at every step, and hears what is true now."""
        request = data.draw(st.sampled_from(self.waiting), label="request")
        hits = self.pool.longest_prefix(request.spec, most)
        assert hits == self._naive_prefix(request)[:most]
        assert self.pool.idle(hits) == sum(b in self.naive.order() for b in hits)

    def _naive_prefix(self, request: Request) -> list[int]:
        found = []
        for i in range(4):
            candidates = [b for b, key in self.content.items() if key == request.spec.block_key(i, SIZE)]
            if not candidates:
                break
            found.append(candidates[0])
        return found

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(0, 3))
    def grow(self, data: st.DataObject, count: int) -> None:
        """Fresh blocks come off the head of the free list, and what they cached is forgotten."""
        request = data.draw(st.sampled_from(self.requests), label="request")
        count = min(count, self.pool.free)
        blocks = self.pool.grow(request, count)
        assert blocks == self.naive.take(count)
        for block in blocks:
            self.content.pop(block, None)
        self.tables[request] += blocks

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), count=st.integers(1, 4))
    def name(self, data: st.DataObject, count: int) -> None:
        """Full blocks get their keys; transformers merges duplicates, vLLM keeps them."""
        request = data.draw(st.sampled_from(self.requests), label="request")
        table, first = self.tables[request], self.named[request]
        count = min(count, len(table))
        merges = self.kind == "cached_last"
        (self.pool.merge if merges else self.pool.publish)(request, count)
        for i in range(first, count):
            self._name(request, i, merges)
        self.named[request] = max(first, count)

    def _name(self, request: Request, i: int, merges: bool) -> None:
        table, key = self.tables[request], request.spec.block_key(i, SIZE)
        if i >= request.spec.shared_blocks(SIZE) and not request.preemptions:
            return  # nobody else can ask for it
        existing = [b for b, k in self.content.items() if k == key]
        if merges and existing:
            if existing[0] in self.naive.order():
                self.naive.pick(existing[0])
            self.naive.give([table[i]], 0)
            table[i] = existing[0]
        else:
            self.content.setdefault(table[i], key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A sample takes over full blocks of a request; a block that has no key until then gets one."""
        request = data.draw(st.sampled_from(self.requests), label="request")
        count = data.draw(st.integers(0, self.named[request]), label="count")
        spec = replace(request.spec, index=self.index, id=f"r{self.index}", sample_of=request.spec)
        sample, self.index = Request(spec, 1, SIZE), self.index + 1
        self.pool.share(request, sample, count)
        for i, block in enumerate(self.tables[request][:count]):
            self.content.setdefault(block, request.spec.block_key(i, SIZE))
        sample.admit(self.index, count * SIZE)
        self.requests.append(sample)
        self.tables[sample], self.named[sample] = self.tables[request][:count], count

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), returns=st.booleans())
    def release(self, data: st.DataObject, returns: bool) -> None:
        """Blocks that nobody else uses are free again, in the order of the list's kind."""
        request = data.draw(st.sampled_from(self.requests), label="request")
        table, named = self.tables.pop(request), self.named.pop(request)
        self.requests.remove(request)
        assert self.pool.release(request, returns=returns) == len(table)
        if returns:
            for i in range(request.spec.shared_blocks(SIZE), named):
                self.content.setdefault(table[i], request.spec.block_key(i, SIZE))
            request.requeue(drop_in_flight=False)
            self.waiting.append(request)
        used = {b for other in self.tables.values() for b in other}
        kept = [b for b in table if b not in used]
        self.naive.give(kept, sum(b not in used for b in table[:named]))

    @invariant()
    def agree(self) -> None:
        """Free order, tables and counts are the model's after every call."""
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.free_order() == self.naive.order()
        assert self.pool.tables == {r: t for r, t in self.tables.items() if r in self.pool.tables}
        assert all(self.pool.allocated(r) == len(t) for r, t in self.tables.items())
        assert self.pool.free == len(self.naive.order())
        assert self.pool.cached == sum(block in self.content for block in self.naive.order())


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=150, stateful_step_count=40)


def _spec(index: int, prefix: tuple[int, ...] = ()) -> RequestSpec:
    return RequestSpec(index, f"r{index}", 0, 8, 1, 1, 0, prefix, SIZE, len(prefix) * SIZE)


def test_check_notices_a_lost_block() -> None:
    """The invariant can fail: a block that is neither free nor in a table is reported."""
    pool = BlockPool(SIZE, 4, CachedLast(range(4)))
    request = Request(_spec(0), 1, SIZE)
    pool.grow(request, 2)
    pool.tables[request].pop()
    with pytest.raises(AssertionError, match="blocks lost"):
        pool.check()


def test_check_notices_a_wrong_count_of_cached_blocks() -> None:
    """Shared content that nobody uses at present counts, content in use or handed out again does not."""
    pool = BlockPool(SIZE, 3, FreeQueue(range(3), unhashed_first=True))
    first, second = Request(_spec(0, (7, 8)), 1, SIZE), Request(_spec(1, (7, 9)), 1, SIZE)
    first.admit(0, 0)
    pool.grow(first, 2)
    pool.publish(first, 2)
    assert pool.cached == 0
    pool.release(first)
    assert pool.cached == 2
    pool.adopt(second, pool.longest_prefix(second.spec, 2))
    assert pool.cached == 1
    pool.grow(second, 2)
    assert pool.cached == 0
    pool.check()
    pool.cached = 1
    with pytest.raises(AssertionError, match="cached blocks"):
        pool.check()
