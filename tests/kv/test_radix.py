"""The radix tree and its pool against texts that are written out, in random calls; and faults that are noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.naive_radix import NaiveRadix, Words, specs, written

from cbsim.kv.radix import RANKS, Node, RadixKey
from cbsim.kv.radix_pool import RadixPool
from cbsim.policy.plan import packed, unpacked
from cbsim.policy.request import Request, RequestSpec

SIZES = (1, 2, 16)
PAGES = 24


@dataclass
class Live:
    """A request as the simplest cache knows it."""

    spec: RequestSpec
    words: Words
    table: list[int]
    reads: Words
    counted: int = 0


class Radix(RuleBasedStateMachine):
    """Random legal calls, in any order, on the pool and on the simplest cache."""

    @initialize(size=st.sampled_from(SIZES), strategy=st.sampled_from(list(RANKS)))
    def start(self, size: int, strategy: str) -> None:
        self.size = size
        self.pool, self.naive = RadixPool(size, PAGES, strategy), NaiveRadix(size, PAGES, strategy)
        self.live: dict[Request, Live] = {}
        self.specs: list[RequestSpec] = []
        self.words: dict[RadixKey, Words] = {}

    def _text(self, spec: RequestSpec) -> RadixKey:
        key = RadixKey(spec)
        self.specs.append(spec)
        self.words[key] = written(spec)
        return key

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        """A request reads what is cached of all its prompt but the last token, and computes the rest."""
        spec = data.draw(specs(len(self.specs), self.size, self.specs), label="request")
        key, asked = self._text(spec), spec.prompt_tokens - 1
        node, reads = self.pool.match(key, asked), self.naive.match(self.words[key][:asked])
        assert node.end * self.size == len(reads)
        missing = self.pool.blocks_for(spec.prompt_tokens) - node.end
        self.pool.lock(node)
        self.naive.readers.append(reads)
        if missing <= self.pool.free:
            assert self._room(missing) == self.naive.make_room(missing * self.size)
            self._enter(spec, key, node, reads, missing)
        else:
            self.naive.readers.remove(reads)
        self.pool.unlock(node)

    def _enter(self, spec: RequestSpec, key: RadixKey, node: Node, reads: Words, missing: int) -> None:
        request = Request(spec, spec.max_tokens, self.size)
        request.admit(0, len(reads))
        self.pool.admit(request, key, node)
        new = self.naive.take(missing)
        assert self.pool.grow(request, missing) == new
        request.advance(spec.prompt_tokens - len(reads), 1)
        request.receive(0)
        ends = range(self.size, len(reads) + 1, self.size)
        table = [self.naive.pages[reads[:end]] for end in ends] + new
        self.live[request] = Live(spec, self.words[key], table, reads)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        """One token more, and a page where one is due."""
        request = data.draw(st.sampled_from(list(self.live)), label="request")
        full = request.computed % self.size == 0
        if request.seen == request.limit or (full and not self.pool.free):
            return
        if full:
            assert self._room(1) == self.naive.make_room(self.size)
            new = self.naive.take(1)
            assert [*unpacked(self.pool.grow_each([request]))] == new
            self.live[request].table += new
        request.advance(1, 1)
        request.receive(1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """What a request has computed goes into the tree; what the tree had takes the place of its own."""
        request = data.draw(st.sampled_from(list(self.live)), label="request")
        before, blocks = list(self.live[request].table), request.computed // self.size
        changed = self.pool.merge(request, blocks)
        self._naive_keep(request)
        after = self.live[request].table
        assert changed == [(i, page) for i, page in enumerate(after) if page != before[i]]

    def _naive_keep(self, request: Request) -> None:
        live, size = self.live[request], self.size
        words, prompt = self.naive.whole(live.words[: request.computed]), live.spec.prompt_tokens // size
        self.naive.insert(words, live.table, live.spec.priority, live.counted, len(live.reads) // size)
        if 0 < prompt < len(words) // size:
            self.naive.insert(words[: prompt * size], live.table, live.spec.priority + 1, prompt, prompt)
        self.naive.readers.remove(live.reads)
        self.naive.readers.append(words)
        live.reads, live.counted = words, max(live.counted, len(words) // size)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), returns=st.booleans(), result=st.booleans())
    def release(self, data: st.DataObject, returns: bool, result: bool) -> None:
        """Some end while a result is processed, or outside of one; those that return leave nothing of their own."""
        ending = data.draw(st.lists(st.sampled_from(list(self.live)), min_size=1, max_size=3, unique=True))
        if result:
            self.pool.collect()
            self.naive.collected = []
        for request in ending:
            held = len(self.live[request].table)
            assert self.pool.release(request, returns=returns) == held
            if not returns:
                self._naive_keep(request)
            live = self.live.pop(request)
            self.naive.give(live.table[len(live.reads) // self.size :])
            self.naive.readers.remove(live.reads)
        if result:
            self.pool.put_back()
            self.naive.put_back()

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """Who waits may look at the cache, all of its text: that counts as use, and may split."""
        spec = data.draw(specs(len(self.specs), self.size, self.specs), label="request")
        key, tokens = self._text(spec), data.draw(st.integers(0, spec.prompt_tokens), label="tokens")
        found = self.naive.match(self.words[key][:tokens])
        assert self.pool.match(key, tokens).end * self.size == len(found)

    @rule(pages=st.integers(0, PAGES))
    def room(self, pages: int) -> None:
        """Leaves go by rank until there is room, and nobody's who reads."""
        assert self._room(pages) == self.naive.make_room(pages * self.size)

    def _room(self, pages: int) -> list[list[int]]:
        return [[*unpacked(evicted)] for evicted in self.pool.make_room(pages * self.size)]

    @invariant()
    def agree(self) -> None:
        """The same nodes, used in the same order, with the same pages; the same tables; the same free list."""
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        nodes = {self.words[node.key][: node.end * self.size]: node for node in self.pool.tree.nodes()}
        assert nodes.keys() == self.naive.ends.keys()
        for end, held in self.naive.ends.items():
            assert (nodes[end].hits, nodes[end].priority) == (held.hits, held.priority)
            assert nodes[end].lock == sum(key[: len(end)] == end for key in self.naive.readers)
        by_time = sorted(nodes, key=lambda end: nodes[end].time)
        assert by_time == sorted(nodes, key=lambda end: self.naive.ends[end].time)
        paths = [unpacked(self.pool.tree.path(node)) for node in nodes.values()]
        size = self.size
        assert {
            end[: (i + 1) * size]: p for end, path in zip(nodes, paths, strict=True) for i, p in enumerate(path)
        } == (self.naive.pages)
        assert self.pool.free_order() == self.naive.free
        assert {request: self.pool.table(request) for request in self.live} == {
            request: live.table for request, live in self.live.items()
        }
        assert self.pool.tables.keys() == self.live.keys()
        assert self.pool.cached == self.naive.unread
        assert self.pool.free == self.naive.unread + len(self.naive.free)
        tables = [page for live in self.live.values() for page in live.table]
        assert self.pool.saved == len(tables) - len(set(tables))


TestRadix = Radix.TestCase
TestRadix.settings = settings(max_examples=150, stateful_step_count=40)


# -- faults that the check notices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda pool, request, node: request.cut(8), "blocks"),
        (lambda pool, request, node: request.own.write(packed([7])), "blocks"),
        (lambda pool, request, node: pool.tree.lock(node), "locks"),
        (lambda pool, request, node: setattr(node, "lock", 0), "pages evictable"),
        (lambda pool, request, node: setattr(pool.tree, "evictable", 5), "pages evictable"),
        (lambda pool, request, node: node.parent.children.update({99: node}), "wrong key"),
        (lambda pool, request, node: setattr(node, "pages", b""), "empty node"),
        (lambda pool, request, node: setattr(pool, "cached", 1), "cached blocks"),
    ],
)
def test_check_notices(break_it: Callable[[RadixPool, Request, Node], None], said: str) -> None:
    pool = RadixPool(2, 10)
    request, node = admitted(pool, RequestSpec(0, "r0", 0, 7, 4, 4))
    pool.check()
    break_it(pool, request, node)
    with pytest.raises(AssertionError, match=said):
        pool.check()


def admitted(pool: RadixPool, spec: RequestSpec) -> tuple[Request, Node]:
    """A request whose prompt is computed and in the tree."""
    key, size = RadixKey(spec), pool.block_size
    node = pool.match(key, spec.prompt_tokens - 1)
    request = Request(spec, spec.max_tokens, size)
    request.admit(0, node.end * size)
    pool.admit(request, key, node)
    pool.grow(request, pool.blocks_for(spec.prompt_tokens) - node.end)
    request.advance(spec.prompt_tokens - request.computed, 1)
    request.receive(0)
    pool.merge(request, spec.prompt_tokens // size)
    return request, pool.positions[request].node


# -- what the rules come to -------------------------------------------------------------------------------------------


def test_without_sharing_nothing_is_kept() -> None:
    pool = RadixPool(1, 8, shares=False)
    request, _ = admitted(pool, RequestSpec(0, "r0", 0, 3, 2, 2, 0, (1, 2, 3), 1, 3))
    assert pool.release(request) == 3
    assert pool.free_order() == [3, 4, 5, 6, 7, 0, 1, 2]
    assert pool.tree.evictable == 0 and not pool.tree.nodes()
    pool.check()


@given(st.data())
@settings(max_examples=200)
def test_texts_have_in_common_what_is_equal_when_written_out(data: st.DataObject) -> None:
    """Whatever is declared: leading pages are equal as far as the tokens are, and pages have equal numbers so far."""
    size = data.draw(st.sampled_from((1, 2, 3, 4, 7)))
    first = data.draw(specs(0, 4, []))
    other = data.draw(specs(1, 4, [first]))
    written_out = [written(spec) for spec in (first, other)]
    one, two = RadixKey(first), RadixKey(other)
    pages = min(map(len, written_out)) // size
    equal = 0
    while equal < pages and len({words[: (equal + 1) * size] for words in written_out}) == 1:
        equal += 1
    known = data.draw(st.integers(0, equal))
    assert one.common(two, size, known, pages) == two.common(one, size, known, pages) == equal
    assert [one.page(i, size) == two.page(i, size) for i in range(pages)] == [i < equal for i in range(pages)]
    assert one.common(one, size, 0, 10**9) == 10**9
