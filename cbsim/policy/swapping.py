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
from cbsim.policy.host import Host, LowestFirst
from cbsim.policy.queues import Queue
from cbsim.policy.request import Request


class Swapping:
    """The requests of `queue`, and before them those who are out.

    Head and end are those of `queue`: a scheduler asks for them when nobody is out.
    """

    def __init__(self, decoding: Decoding, queue: Queue, host_blocks: int) -> None:
        self.host = Host(decoding, LowestFirst(host_blocks))
        self.out = self.host.held  # in the order in which they went
        self.turned_away = 0  # how often the host had no room
        self._decoding = decoding
        self._queue = queue

    # -- out and in ---------------------------------------------------------------------------------------------------

    def take_out(self, request: Request) -> bool:
        """Take the blocks of a loose request back and move what they hold. False if the host lacks room."""
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
