"""Preemption by swapping, the rule of vLLM V0: a preempted request waits on the host with what it has computed.

Whole requests are swapped out and in, blocks that they share included, in order with the steps. Swapped requests return
in the order in which they left, each into fresh blocks, before every other waiting request. A row that was in flight
when its request was swapped out has written its KV before that is copied, and its token is delivered as usual; so no
token is computed twice. A request that finds no room on the host has to be recomputed. V0 ends the server then.

`Host` keeps which blocks of the host hold whose KV; `Swapping` is the rule above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain

from cbsim.kv.sectors import HostSectors
from cbsim.policy.decoding import Decoding
from cbsim.policy.plan import Preempted
from cbsim.policy.queues import Queue
from cbsim.policy.request import Request
from cbsim.policy.transfers import Direction, Transfer


class Swapping:
    """The requests of `queue`, and before them those swapped out; without such, head and end are the queue's."""

    def __init__(self, decoding: Decoding, queue: Queue, host_blocks: int) -> None:
        self.host = Host(decoding, LowestFirst(host_blocks))
        self.out = self.host.tables  # in the order in which they went
        self._decoding = decoding
        self._queue = queue
        self.push, self.push_front, self.head, self.pop = queue.push, queue.push_front, queue.head, queue.pop

    def has_room(self, request: Request, tokens: int, spare: int) -> bool:
        """True if `spare` blocks would stay free if a request were swapped in and computed `tokens` tokens."""
        pool = self._decoding.pool
        return pool.free - pool.blocks_for(request.computed + tokens) >= spare

    def bring_in(self, request: Request) -> None:
        """Swap in a request. Its blocks are filled before the rows of the next plan."""
        pool = self._decoding.pool
        self._decoding.resume(request)
        pool.grow(request, pool.blocks_for(request.computed))
        self.host.restore(request)

    def __len__(self) -> int:
        return len(self.out) + len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.out, self._queue)

    def remove(self, request: Request) -> None:
        if request in self.out:
            self.host.forget(request)
        else:
            self._queue.remove(request)

    def check(self) -> None:
        """Raise AssertionError unless the host adds up, and swapped requests have places there and no blocks."""
        pool = self._decoding.pool
        self.host.check()
        for request, (places,) in self.out.items():
            assert len(places) >= pool.blocks_for(request.computed) > 0, (request.spec.id, places, request.computed)
            assert request not in pool.tables, (request.spec.id, "is out and holds blocks")


class LowestFirst:
    """A free list of the host's blocks that hands out the lowest number first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._returned: list[int] = []  # heap of free blocks that have been in use; all below `_fresh`
        self._fresh = 0  # from here on no block has been in use

    @property
    def free(self) -> int:
        return len(self._returned) + self.num_blocks - self._fresh

    def take(self, counts: list[int]) -> list[list[int]] | None:
        """Take `counts[i]` blocks for table i of a request, or return None if there are not enough."""
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
        """Return the names that transfers use for these blocks of a group's table, in the same order."""
        return blocks

    def order(self) -> list[int]:
        return [*sorted(self._returned), *range(self._fresh, self.num_blocks)]

    def check(self) -> None:
        assert len(self._returned) <= self._fresh <= self.num_blocks, (self._returned, self._fresh, self.num_blocks)


Places = LowestFirst | HostSectors  # free lists of the host's blocks


class Host:
    """The host's copy of parked requests: every block of a table takes a place here; the written ones are copied."""

    def __init__(self, decoding: Decoding, places: Places) -> None:
        decoding.pool.host_blocks = self.num_blocks = places.num_blocks
        self.places = places
        self.tables: dict[Request, list[list[int]]] = {}  # for each table
        self._decoding = decoding

    @property
    def free(self) -> int:
        return self.places.free

    def park(self, request: Request, *, drop_in_flight: bool) -> bool:
        """Release the blocks of an unbatched request and keep their KV here. It waits again and keeps its progress.
        Return False and do nothing where they do not fit.
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
        """Restore the KV of a parked request that has a table again; it comes with the next plan."""
        pool, places = self._decoding.pool, self.tables[request]
        here, there = self._written(pool.tables_of(request), places, pool.blocks_for(request.computed))
        self.forget(request)
        if here:
            self._decoding.transfers.append(Transfer(Direction.IN, there, here, request.spec))

    def _written(
        self, tables: list[list[int]], places: list[list[int]], written: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the device pages of each table's first `written` blocks, and the host pages for them."""
        here: list[int] = []
        there: list[int] = []
        for group, table in enumerate(tables):
            count = min(written, len(table), len(places[group]))
            here += self._decoding.pool.pages(group, table[:count])
            there += self.places.pages(group, places[group][:count])
        return tuple(here), tuple(there)

    def forget(self, request: Request) -> None:
        """Drop the KV of a request, if it is here."""
        if request in self.tables:
            self.places.give(self.tables.pop(request))

    def check(self) -> None:
        """Raise AssertionError unless every block is free or taken by one request."""
        in_use: list[int] = []
        for tables in self.tables.values():
            for group, table in enumerate(tables):
                in_use += self.places.pages(group, table)
        free = self.places.order()
        assert len(free) == self.free, ("free host blocks", len(free), self.free)
        self.places.check()
        assert sorted(in_use + free) == list(range(self.num_blocks)), ("host blocks", self.tables, free)
