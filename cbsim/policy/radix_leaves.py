"""Which leaf of the radix tree is evicted next: ranks, least first, and the leaves that wait by them."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from cbsim.policy.radix_node import Node, Rank


def _lru(node: Node) -> Rank:
    return 0, node.time


def _lfu(node: Node) -> Rank:
    return node.hits, node.time


def _fifo(node: Node) -> Rank:
    return 0, node.born


def _mru(node: Node) -> Rank:
    return 0, -node.time


def _filo(node: Node) -> Rank:
    return 0, -node.born


def _slru(node: Node) -> Rank:
    return int(node.hits >= 2), node.time


def _priority(node: Node) -> Rank:
    return node.priority, node.time


RANKS: dict[str, Callable[[Node], Rank]] = {
    "lru": _lru,
    "lfu": _lfu,
    "fifo": _fifo,
    "mru": _mru,
    "filo": _filo,
    "slru": _slru,
    "priority": _priority,
}


class Leaves:
    """The evictable leaves of a tree. No two have one rank at a time: clocks never repeat, and what a split leaves with
    one birth is a line of nodes, of which one at most is a leaf.

    Ranks change with every use. All but mru's only rise, so an entry may be late: it comes up too early, and is put
    back. Under mru a used leaf gets a new entry at once, for which `falls` asks its owner.
    """

    def __init__(self, strategy: str) -> None:
        self.falls = strategy == "mru"
        self.rank = RANKS[strategy]
        self._heap: list[tuple[int, int, Node]] = []
        self._queued = 0

    def add(self, node: Node) -> None:
        """A node has become evictable, or, if ranks fall, was used while it is."""
        if node.queued is None:
            self._queued += 1
            self._push(node, self.rank(node))
        elif self.falls:
            rank = self.rank(node)
            if rank != node.queued:
                self._push(node, rank)
                if len(self._heap) > 2 * self._queued + 64:
                    self._heap = [entry for entry in self._heap if entry[2].queued == (entry[0], entry[1])]
                    heapify(self._heap)

    def _push(self, node: Node, rank: Rank) -> None:
        node.queued = rank
        heappush(self._heap, (rank[0], rank[1], node))

    def pop(self) -> Node | None:
        """The evictable leaf of least rank, or None if there is none."""
        while self._heap:
            first, second, node = heappop(self._heap)
            if node.queued != (first, second):
                continue  # it has another entry by now
            if node.evictable:
                rank = self.rank(node)
                if rank == node.queued:
                    self._leave(node)
                    return node
                self._push(node, rank)
            else:
                self._leave(node)
        return None

    def _leave(self, node: Node) -> None:
        node.queued = None
        self._queued -= 1

    def check(self, evictable: list[Node]) -> None:
        """Raise AssertionError unless these are found, and in the order of their ranks."""
        queued = {entry[2] for entry in self._heap if entry[2].queued == (entry[0], entry[1])}
        assert len(queued) == self._queued, ("entries", len(queued), self._queued)
        assert queued.issuperset(evictable), "an evictable leaf is forgotten"
        for node in evictable:
            assert node.queued is not None
            rank = self.rank(node)
            assert node.queued == rank or (not self.falls and node.queued < rank), ("rank", node.queued, rank)
