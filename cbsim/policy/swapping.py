"""Preemption by swapping, the rule of vLLM V0: who loses its blocks waits on the host with what it has computed.

Whole requests go out and come in, blocks that they share included, in order with the steps. Those who are out come back
in the order in which they went, each into fresh blocks, and go before everybody else who waits. A row that was in
flight when its request went out has written its KV before that is moved, and its token is delivered as usual; so no
token is computed twice. Who finds no room on the host has to be recomputed. V0 ends the server then.

`Host` keeps which blocks of the host hold whose KV; `Swapping` is the rule above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import Protocol

from cbsim.policy.decoding import Decoding
from cbsim.policy.plan import Preempted
from cbsim.policy.queues import Queue
from cbsim.policy.request import Request
from cbsim.policy.transfers import Direction, Transfer


class Swapping:
    """The requests of `queue`, and before them those who are out.

    Head and end are those of `queue`: a scheduler asks for them when nobody is out.
    """

    def __init__(self, decoding: Decoding, queue: Queue, host_blocks: int) -> None:
        self.host = Host(decoding, LowestFirst(host_blocks))
        self.out = self.host.tables  # in the order in which they went
        self.turned_away = 0  # how often the host had no room
        self._decoding = decoding
        self._queue = queue

    # -- out and in ---------------------------------------------------------------------------------------------------

    def take_out(self, request: Request) -> bool:
        """Take the blocks of an unbatched request back and transfer what they hold. False if the host lacks room."""
        out = self.host.park(request, drop_in_flight=False)
        self.turned_away += not out
        return out

    def has_room(self, request: Request, tokens: int, spare: int) -> bool:
        """Would `spare` blocks stay free if a request came back and computed so many tokens?"""
        pool = self._decoding.pool
        return pool.free - pool.blocks_for(request.computed + tokens) >= spare

    def bring_in(self, request: Request) -> None:
        """A request that is out runs again. Its blocks are filled before the rows of the next plan."""
        pool = self._decoding.pool
        self._decoding.resume(request)
        pool.grow(request, pool.blocks_for(request.computed))
        self.host.restore(request)

    # -- the queue ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.out) + len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.out, self._queue)

    def push(self, request: Request) -> None:
        self._queue.push(request)

    def push_front(self, request: Request) -> None:
        self._queue.push_front(request)

    def head(self) -> Request:
        return self._queue.head()

    def pop(self) -> Request:
        return self._queue.pop()

    def remove(self, request: Request) -> None:
        if request in self.out:
            self.host.forget(request)
        else:
            self._queue.remove(request)

    def check(self) -> None:
        """Raise AssertionError unless the host adds up, and who is out has places there and no blocks."""
        pool = self._decoding.pool
        self.host.check()
        for request, (places,) in self.out.items():
            assert len(places) >= pool.blocks_for(request.computed) > 0, (request.spec.id, places, request.computed)
            assert request not in pool.tables, (request.spec.id, "is out and holds blocks")


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
        """As transfers name them, in the order of the blocks: those of the table of a group."""

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
        self.tables: dict[Request, list[list[int]]] = {}  # for each table
        self._decoding = decoding

    @property
    def free(self) -> int:
        return self.places.free

    def park(self, request: Request, *, drop_in_flight: bool) -> bool:
        """Take the blocks of an unbatched request back and keep their KV here. It waits again and keeps its progress.
        Where they do not fit, nothing happens and the answer is False.
        """
        decoding, computed = self._decoding, request.computed
        pool = decoding.pool
        count, tables = pool.allocated(request), pool.tables_of(request)
        places = self.places.take([len(table) for table in tables])
        if places is None:
            return False
        self.tables[request] = places
        here, there = self._written(tables, places, pool.blocks_for(computed))
        if here:
            decoding.transfers.append(Transfer(Direction.OUT, here, there, request.spec))
        del decoding.unbatched[request]
        pool.release(request, returns=True)
        request.park(drop_in_flight)
        decoding.preempted.append(Preempted(request.spec, computed - request.computed, count))
        return True

    def restore(self, request: Request) -> None:
        """A request that was parked has a table again: its KV comes back with the next plan."""
        pool, places = self._decoding.pool, self.tables[request]
        here, there = self._written(pool.tables_of(request), places, pool.blocks_for(request.computed))
        self.forget(request)
        if here:
            self._decoding.transfers.append(Transfer(Direction.IN, there, here, request.spec))

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
        if request in self.tables:
            self.places.give(self.tables.pop(request))

    def check(self) -> None:
        """Raise AssertionError unless every block is free or held by one request."""
        in_use: list[int] = []
        for tables in self.tables.values():
            for group, table in enumerate(tables):
                in_use += self.places.pages(group, table)
        free = self.places.order()
        assert len(free) == self.free, ("free host blocks", len(free), self.free)
        self.places.check()
        assert sorted(in_use + free) == list(range(self.num_blocks)), ("host blocks", self.tables, free)
