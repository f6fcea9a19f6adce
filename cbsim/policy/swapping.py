"""Preemption by swapping, the rule of vLLM V0: who loses its blocks waits on the host with what it has computed.

Whole requests go out and come in, blocks that they share included, in order with the steps. Those who are out come back
in the order in which they went, each into fresh blocks, and go before everybody else who waits. A row that was in
flight when its request went out has written its KV before that is moved, and its token is delivered as usual; so no
token is computed twice. Who finds no room on the host has to be recomputed. V0 ends the server then.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from cbsim.policy.decoding import Decoding
from cbsim.policy.moves import Move, Way
from cbsim.policy.queues import Queue
from cbsim.policy.request import Request


class Swapping:
    """The requests of `queue`, and before them those who are `out`, each with the places of its blocks on the host.

    Head and end are those of `queue`: a scheduler asks for them when nobody is out.
    """

    def __init__(self, decoding: Decoding, queue: Queue, host_blocks: int) -> None:
        decoding.pool.host_blocks = host_blocks
        self.out: dict[Request, list[int]] = {}
        self.turned_away = 0  # how often the host had no room
        self._decoding = decoding
        self._queue = queue
        self._free = list(range(host_blocks - 1, -1, -1))  # places, the next one last

    # -- out and in ---------------------------------------------------------------------------------------------------

    def take_out(self, request: Request) -> bool:
        """Take the blocks of a loose request back and move those that hold something. False if the host lacks room."""
        pool = self._decoding.pool
        blocks = pool.tables[request][: pool.blocks_for(request.computed)]
        if len(blocks) > len(self._free):
            self.turned_away += 1
            return False
        places = [self._free.pop() for _ in blocks]
        self._decoding.moves.append(Move(Way.OUT, tuple(blocks), tuple(places), request.spec))
        self._decoding.park(request, drop_in_flight=False)
        self.out[request] = places
        return True

    def has_room(self, request: Request, tokens: int, spare: int) -> bool:
        """Would `spare` blocks stay free if a request came back and computed so many tokens?"""
        pool = self._decoding.pool
        return pool.free - pool.blocks_for(request.computed + tokens) >= spare

    def bring_in(self, request: Request) -> None:
        """A request that is out runs again. Its blocks are filled before the rows of the next plan."""
        places, pool = self.out.pop(request), self._decoding.pool
        self._decoding.resume(request)
        blocks = pool.grow(request, pool.blocks_for(request.computed))
        self._decoding.moves.append(Move(Way.IN, tuple(places[: len(blocks)]), tuple(blocks), request.spec))
        self._free_places(places)

    def _free_places(self, places: list[int]) -> None:
        self._free.extend(reversed(places))

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
        places = self.out.pop(request, None)
        if places is None:
            self._queue.remove(request)
        else:
            self._free_places(places)

    def check(self) -> None:
        """Raise AssertionError unless every place is free or somebody's, exactly, and all that was computed has one."""
        pool = self._decoding.pool
        taken = [place for places in self.out.values() for place in places]
        assert sorted([*taken, *self._free]) == list(range(pool.host_blocks)), ("host places", taken, self._free)
        for request, places in self.out.items():
            needed = pool.blocks_for(request.computed)
            assert len(places) >= needed > 0, (request.spec.id, len(places), needed)
            assert request not in pool.tables, (request.spec.id, "is out and holds blocks")
