"""The radix tree of SGLang 0.5.23 (its UnifiedRadixCache, one group of full-attention layers): which pages hold which
tokens, how many requests read them, and which are evicted when room is needed.

A clock counts uses: every use has a time of its own, and the ancestors of a node that was matched are a hundred
thousandth older each. Everything is in whole pages; with pages of one token that is every token. Page numbers are
packed (policy.plan.packed).

A `RadixKey` stands for the tokens of a request, prompt and outputs, whose content no workload states. Every token has a
number, and equal numbers at one position mean equal tokens up to and including it: a declared block has its chained id,
private tokens have their request's number, a prompt that of the first of its samples. So two keys, once different,
never have an equal number again, and where they part is found by halving.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Final

from cbsim.policy.plan import PACKED
from cbsim.policy.request import RequestSpec
from cbsim.policy.value import mypyc_attr

TICK: Final = 100_000  # of the clock; an ancestor is 1 older
MAJOR: Final = 1 << 64  # of a rank whose minor part is a time of the clock


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixTree:
    """A tree of keys by their pages. `evictable` pages lie in nodes without readers."""

    def __init__(self, page_size: int, strategy: str) -> None:
        self.page_size = page_size
        self.root = Node(None, RadixKey(RequestSpec(0, "root", 0, 1, 1, 1)), 0, b"")
        self.evictable = 0
        self.on_cache: Callable[[Node, bool], None] | None = None  # called with nodes that are new, or evicted
        self._clock = 0
        self._leaves = Leaves(strategy)

    def match(self, key: RadixKey, tokens: int) -> Node:
        """Return the node that ends the longest cached prefix of the first `tokens` tokens; a node that matches in part
        is split. All nodes on the path to it count as used.
        """
        node, pages = self.root, tokens // self.page_size
        while node.end < pages and (child := self._next(node, key)) is not None:
            end = key.common(child.key, self.page_size, child.start + 1, min(child.end, pages))
            node = child if end == child.end else self.split(child, end)
        now = self._tick()
        for depth, used in enumerate(node.lineage()):
            self._used(used, now - depth)
        return node

    def _next(self, node: Node, key: RadixKey) -> Node | None:
        """Return the child with the next page of a key."""
        return node.children.get(key.page(node.end, self.page_size)) if node.children else None

    def split(self, node: Node, at: int) -> Node:
        """Cut a node in front of page `at` of its key; return the new node for the part before it."""
        parent, size, head = node.parent, self.page_size, PACKED * (at - node.start)
        assert parent is not None
        assert node.start < at < node.end, (node.start, at, node.end)
        upper = self._new(parent, node.key, node.start, node.pages[:head])
        upper.lock, upper.hits, upper.born, upper.priority = node.lock, node.hits, node.born, node.priority
        parent.children[node.key.page(node.start, size)] = upper
        upper.children[node.key.page(at, size)] = node
        node.parent, node.start, node.pages = upper, at, node.pages[head:]
        self._used(node, self._tick())
        return upper

    def insert(
        self, prefix: Node, key: RadixKey, own: bytes, *, first: int, priority: int, counted: int
    ) -> tuple[Node, list[bytes], bytes]:
        """Insert a key up to the end of `own`, whose first page is its page number `first`; those before it are in the
        tree, and `prefix` ends some of them. Nodes that end within `counted` pages have counted this key. Return the
        node at the end of the key, which the caller locks, those of the pages that were in the tree already, a piece
        for each node, and the tree's pages in their stead.
        """
        node, size, pages, path = self.root, self.page_size, first + len(own) // PACKED, prefix.lineage()
        left = len(path)
        duplicates: list[bytes] = []
        shared = b""
        while node.end < pages and (child := path[left - 1] if left > 0 else self._next(node, key)) is not None:
            left -= 1
            self._used(child, self._tick())
            end = key.common(child.key, size, child.start + 1, min(child.end, pages))
            node = child if end == child.end else self.split(child, end)
            node.priority = max(node.priority, priority)
            if first < end:
                known = first * PACKED + len(shared)
                duplicates.append(own[len(shared) : PACKED * (end - first)])
                shared += node.pages[known - PACKED * node.start :]
            node.hits += end > counted
        matched = node.end
        if matched < pages:
            leaf = self._new(node, key, matched, own[PACKED * (matched - first) :] if matched > first else own)
            leaf.priority, leaf.hits = priority, 1
            node.children[key.page(matched, size)] = node = leaf
            self.evictable += pages - matched
            if self.on_cache is not None:
                self.on_cache(leaf, True)
        return node, duplicates, shared

    def path(self, node: Node) -> bytes:
        """Return the pages from the root to the end of a node."""
        return b"".join([node.pages for node in reversed(node.lineage())])

    def lock(self, node: Node) -> None:
        """Add a reader to a node and its ancestors."""
        while node.parent is not None:
            if not node.lock:
                self.evictable -= node.end - node.start
            node.lock += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        """Remove a reader from a node and its ancestors."""
        while node.parent is not None:
            assert node.lock > 0, "a node without readers"
            node.lock -= 1
            if not node.lock:
                self.evictable += node.end - node.start
                if not node.children:
                    self._leaves.add(node)
            node = node.parent

    def evict(self) -> bytes:
        """Evict the evictable leaf of least rank; return its pages, none if there is no such leaf."""
        node = self._leaves.pop()
        if node is None:
            return b""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key.page(node.start, self.page_size)]
        node.parent = None
        self.evictable -= node.end - node.start
        if parent.evictable:
            self._leaves.add(parent)
        if self.on_cache is not None:
            self.on_cache(node, False)
        return node.pages

    def _new(self, parent: Node, key: RadixKey, start: int, pages: bytes) -> Node:
        node = Node(parent, key, start, pages)
        node.time, node.born = self._tick(), self._tick()
        return node

    def _tick(self) -> int:
        self._clock += TICK
        return self._clock

    def _used(self, node: Node, time: int) -> None:
        node.time = time
        if self._leaves.falls and node.evictable:
            self._leaves.add(node)

    def nodes(self) -> list[Node]:
        """Return all nodes but the root, parents before children, older children first."""
        nodes, ahead = list[Node](), [self.root]
        while ahead:
            nodes.append(ahead.pop())
            ahead += [*nodes[-1].children.values()][::-1]
        return nodes[1:]

    def check(self) -> None:
        """Raise AssertionError unless parents and children agree, keys part where nodes do, and sums are a recount."""
        nodes = self.nodes()
        for node in (self.root, *nodes):
            for number, child in node.children.items():
                self._check_child(node, number, child)
        evictable = sum(node.end - node.start for node in nodes if not node.lock)
        assert self.evictable == evictable, ("pages evictable", self.evictable, evictable)
        self._leaves.check([node for node in nodes if node.evictable])

    def _check_child(self, node: Node, number: int, child: Node) -> None:
        assert child.parent is node, "a child of another"
        assert child.start == node.end, ("a gap in a key", node.end, child.start)
        assert child.start < child.end == child.start + len(child.pages) // PACKED, "an empty node"
        assert number == child.key.page(child.start, self.page_size), "a child under a wrong key"
        below = child.key.common(node.key, self.page_size, 0, node.end)
        assert below == node.end, ("a child of another key", below, node.end)
        assert child.lock <= node.lock or node is self.root, ("locks", node.lock, child.lock)


class RadixKey:
    """The tokens of a request as numbers. Ids of declared blocks are not negative; a run has one size of blocks."""

    __slots__ = ("_declared", "_ids", "_own", "_source", "_width", "prompt_tokens")

    def __init__(self, spec: RequestSpec) -> None:
        self.prompt_tokens = spec.prompt_tokens
        self._ids = spec.prefix
        self._width = spec.prefix_block_tokens
        self._declared = min(spec.prefix_tokens, len(spec.prefix) * spec.prefix_block_tokens)
        self._own = -1 - spec.index
        self._source = self._own if spec.sample_of is None else -1 - spec.sample_of.index

    def at(self, position: int) -> int:
        """Return the number of a token; also of positions that the request will never reach."""
        if position < self._declared:
            return self._ids[position // self._width]
        return self._source if position < self.prompt_tokens else self._own

    def page(self, page: int, size: int) -> int:
        """Return the number of a page of `size` tokens, its last one's: equal numbers, equal tokens up to its end."""
        return self.at((page + 1) * size - 1)

    def common(self, other: RadixKey, size: int, known: int, most: int) -> int:
        """Return how many leading pages are equal, of `most`, when `known` of them are."""
        if self is other or (known < most and self.page(most - 1, size) == other.page(most - 1, size)):
            return most
        while known + 1 < most:  # pages up to `known` are equal, page number `most` is not
            middle = (known + most) // 2
            if self.page(middle - 1, size) == other.page(middle - 1, size):
                known = middle
            else:
                most = middle
        return known


class Node:
    """A node: pages `start` up to `end` of a key, and what ranks it for eviction. Pages before `start` are the
    ancestors'; a node that is split keeps its end.

    `lock` counts its readers, `hits` the keys that went through it. `born` and `time` (last use) are the tree's clock.
    `queued`: its rank among the leaves, if it is listed there. `parent` is None for the root and for evicted nodes.
    """

    def __init__(self, parent: Node | None, key: RadixKey, start: int, pages: bytes) -> None:
        self.parent = parent
        self.key = key
        self.start = start
        self.end = start + len(pages) // PACKED
        self.pages = pages
        self.children: dict[int, Node] = {}  # by the number of their first page, in the order in which they came
        self.lock = self.hits = self.born = self.time = self.priority = 0
        self.queued: int | None = None

    @property
    def evictable(self) -> bool:
        """Whether it is a leaf without readers."""
        return not self.lock and not self.children and self.parent is not None

    def lineage(self) -> list[Node]:
        """Return the node and its ancestors, without the root."""
        nodes, node = list[Node](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes


RANKS: dict[str, Callable[[Node], Any]] = {  # ints, which stay Python's: they are put in lists and compared
    "lru": lambda node: node.time,
    "lfu": lambda node: node.hits * MAJOR + node.time,
    "fifo": lambda node: node.born,
    "mru": lambda node: -node.time,
    "filo": lambda node: -node.born,
    "slru": lambda node: (node.hits >= 2) * MAJOR + node.time,
    "priority": lambda node: node.priority * MAJOR + node.time,
}


class Leaves:
    """The evictable leaves of a tree by their ranks, which are in a heap. No two have one rank at a time: clocks never
    repeat, and of the nodes of one birth that a split leaves, one at most is a leaf.

    Ranks change with every use. All but mru's only rise, so a stale entry comes up too early and is put back. Under mru
    the ranks fall (`falls`): then a used leaf has to be added again.
    """

    def __init__(self, strategy: str) -> None:
        self.falls = strategy == "mru"
        self.rank = RANKS[strategy]
        self._heap: list[Any] = []
        self._nodes: dict[Any, Node] = {}

    def add(self, node: Node) -> None:
        """Add a node that has become evictable or, if ranks fall, was used while it is."""
        if node.queued is None:
            self._push(node)
        elif self.falls and node.queued != self.rank(node):
            del self._nodes[node.queued]
            self._push(node)
            if len(self._heap) > 2 * len(self._nodes) + 64:
                self._heap = [*self._nodes]
                heapify(self._heap)

    def _push(self, node: Node) -> None:
        node.queued = rank = self.rank(node)
        assert rank not in self._nodes, ("two leaves of one rank", rank)
        self._nodes[rank] = node
        heappush(self._heap, rank)

    def pop(self) -> Node | None:
        """Remove and return the evictable leaf of least rank, or None if there is none."""
        while self._heap:
            rank = heappop(self._heap)
            node = self._nodes.pop(rank, None)
            if node is None:
                continue  # it has another entry by now
            node.queued = None
            if node.evictable:
                if self.rank(node) == rank:
                    return node
                self._push(node)
        return None

    def check(self, evictable: list[Node]) -> None:
        """Raise AssertionError unless these nodes are listed, and in the order of their ranks."""
        assert self._nodes.keys() <= {*self._heap}, "a rank is forgotten"
        for node in evictable:
            assert node.queued is not None
            assert self._nodes.get(node.queued) is node, "an evictable leaf is forgotten"
            rank = self.rank(node)
            assert node.queued == rank or (not self.falls and node.queued < rank), ("rank", node.queued, rank)
