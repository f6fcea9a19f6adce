"""Requests that wait while their KV is on the host: which of its blocks hold whose, and which are free."""

from __future__ import annotations

from heapq import heappop, heappush

from cbsim.policy.decoding import Decoding
from cbsim.policy.moves import Move, Way
from cbsim.policy.plan import Preempted
from cbsim.policy.request import Request


class Host:
    """Its free blocks go out in order of their number. Every block of a table takes one; those written are moved."""

    def __init__(self, decoding: Decoding, blocks: int) -> None:
        decoding.pool.host_blocks = self.num_blocks = blocks
        self.held: dict[Request, list[int]] = {}
        self._returned: list[int] = []  # heap of free blocks that have been in use; all below `_fresh`
        self._fresh = 0  # from here on no block has been in use
        self._decoding = decoding

    @property
    def free(self) -> int:
        return len(self._returned) + self.num_blocks - self._fresh

    def free_order(self) -> list[int]:
        """The free blocks in the order in which they go out."""
        return [*sorted(self._returned), *range(self._fresh, self.num_blocks)]

    def _take(self) -> int:
        if self._returned:
            return heappop(self._returned)
        self._fresh += 1
        return self._fresh - 1

    def park(self, request: Request, *, drop_in_flight: bool) -> bool:
        """Take the blocks of a loose request back and keep their KV here; it has to wait, and keeps its progress. Where
        they do not fit, nothing happens and the answer is False.
        """
        decoding, computed = self._decoding, request.computed
        pool = decoding.pool
        count = pool.held(request)
        if count > self.free:
            return False
        blocks = self.held[request] = [self._take() for _ in range(count)]
        written = pool.tables[request][: pool.blocks_for(computed)]
        if written:
            decoding.moves.append(Move(Way.OUT, tuple(written), tuple(blocks[: len(written)]), request.spec))
        del decoding.loose[request]
        pool.release(request, returns=True)
        request.park(drop_in_flight)
        decoding.preempted.append(Preempted(request.spec, computed - request.computed, count))
        return True

    def restore(self, request: Request) -> None:
        """A request that was parked has a table again: its KV comes back with the next plan."""
        pool = self._decoding.pool
        blocks, table = self.held[request], pool.tables[request]
        self.forget(request)
        written = pool.blocks_for(request.computed)
        if written:
            move = Move(Way.IN, tuple(blocks[:written]), tuple(table[:written]), request.spec)
            self._decoding.moves.append(move)

    def forget(self, request: Request) -> None:
        """The KV of a request is wanted here no longer, if it is here."""
        for block in self.held.pop(request, ()):
            heappush(self._returned, block)

    def check(self) -> None:
        """Raise AssertionError unless every block is free or held by one request."""
        held = [block for blocks in self.held.values() for block in blocks]
        assert sorted(held + self._returned) == list(range(self._fresh)), ("host blocks", self.held, self._returned)
        assert self._fresh <= self.num_blocks
