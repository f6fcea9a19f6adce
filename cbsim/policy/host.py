"""Requests that wait while their KV is on the host: which of its blocks hold whose, and which are free."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol

from cbsim.policy.decoding import Decoding
from cbsim.policy.moves import Move, Way
from cbsim.policy.plan import Preempted
from cbsim.policy.request import Request


class Places(Protocol):
    """Which free block of the host goes next."""

    num_blocks: int

    @property
    def free(self) -> int:
        """How many there are."""

    def take(self, counts: list[int]) -> list[list[int]] | None:
        """For each table of a request so many, or None if there are not enough."""

    def give(self, tables: list[list[int]]) -> None:
        """These are free again."""

    def pages(self, group: int, blocks: list[int]) -> list[int]:
        """As moves name them, in the order of the blocks: those of the table of a group."""

    def order(self) -> list[int]:
        """Every free block, in the order of its list."""

    def check(self) -> None:
        """Raise AssertionError unless its own accounts agree."""


class LowestFirst:
    """In order of their numbers."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._returned: list[int] = []  # heap of free blocks that have been in use; all below `_fresh`
        self._fresh = 0  # from here on no block has been in use

    @property
    def free(self) -> int:
        return len(self._returned) + self.num_blocks - self._fresh

    def take(self, counts: list[int]) -> list[list[int]] | None:
        if sum(counts) > self.free:
            return None
        return [[self._next() for _ in range(count)] for count in counts]

    def _next(self) -> int:
        if self._returned:
            return heappop(self._returned)
        self._fresh += 1
        return self._fresh - 1

    def give(self, tables: list[list[int]]) -> None:
        for table in tables:
            for block in table:
                heappush(self._returned, block)

    def pages(self, group: int, blocks: list[int]) -> list[int]:
        return blocks

    def order(self) -> list[int]:
        return [*sorted(self._returned), *range(self._fresh, self.num_blocks)]

    def check(self) -> None:
        assert len(self._returned) <= self._fresh <= self.num_blocks, (self._returned, self._fresh, self.num_blocks)


class Host:
    """Every block of a table takes one here; those written are moved."""

    def __init__(self, decoding: Decoding, places: Places) -> None:
        decoding.pool.host_blocks = self.num_blocks = places.num_blocks
        self.places = places
        self.held: dict[Request, list[list[int]]] = {}  # for each table
        self._decoding = decoding

    @property
    def free(self) -> int:
        return self.places.free

    def park(self, request: Request, *, drop_in_flight: bool) -> bool:
        """Take the blocks of a loose request back and keep their KV here; it has to wait, and keeps its progress. Where
        they do not fit, nothing happens and the answer is False.
        """
        decoding, computed = self._decoding, request.computed
        pool = decoding.pool
        count, tables = pool.held(request), pool.tables_of(request)
        places = self.places.take([len(table) for table in tables])
        if places is None:
            return False
        self.held[request] = places
        here, there = self._written(tables, places, pool.blocks_for(computed))
        if here:
            decoding.moves.append(Move(Way.OUT, here, there, request.spec))
        del decoding.loose[request]
        pool.release(request, returns=True)
        request.park(drop_in_flight)
        decoding.preempted.append(Preempted(request.spec, computed - request.computed, count))
        return True

    def restore(self, request: Request) -> None:
        """A request that was parked has a table again: its KV comes back with the next plan."""
        pool, places = self._decoding.pool, self.held[request]
        here, there = self._written(pool.tables_of(request), places, pool.blocks_for(request.computed))
        self.forget(request)
        if here:
            self._decoding.moves.append(Move(Way.IN, there, here, request.spec))

    def _written(
        self, tables: list[list[int]], places: list[list[int]], written: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the first `written` blocks of every table, the pages on the device and those here that stand for them."""
        here: list[int] = []
        there: list[int] = []
        for group, table in enumerate(tables):
            count = min(written, len(table), len(places[group]))
            here += self._decoding.pool.pages(group, table[:count])
            there += self.places.pages(group, places[group][:count])
        return tuple(here), tuple(there)

    def forget(self, request: Request) -> None:
        """The KV of a request is wanted here no longer, if it is here."""
        if request in self.held:
            self.places.give(self.held.pop(request))

    def check(self) -> None:
        """Raise AssertionError unless every block is free or held by one request."""
        held: list[int] = []
        for tables in self.held.values():
            for group, table in enumerate(tables):
                held += self.places.pages(group, table)
        free = self.places.order()
        assert len(free) == self.free, ("free host blocks", len(free), self.free)
        self.places.check()
        assert sorted(held + free) == list(range(self.num_blocks)), ("host blocks", self.held, free)
