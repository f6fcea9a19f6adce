"""Beam search on paged blocks: tables that share what their texts have in common, exchanged as the texts are.

All beams of a request are as long as each other. A step's result says whose text each goes on with. Full blocks are
shared by reference; a block that is written to belongs to one beam: of the beams that go on with the same text the
first to keep it does so, and the others get a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cbsim.policy.blocks import BlockPool, FreeQueue
from cbsim.policy.observer import NOBODY, Observer
from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr


class Exchanged(NamedTuple):
    """A beam with another text: the entries of its table that changed, and the block of which its last is a copy."""

    request: Request
    entries: list[tuple[int, int]]  # (index, block)
    copied: int | None


@mypyc_attr(allow_interpreted_subclasses=True)
class BeamPool(BlockPool):
    """A pool whose blocks may be in several tables; none has a content key."""

    def __init__(self, block_size: int, num_blocks: int, observer: Observer = NOBODY) -> None:
        super().__init__(block_size, num_blocks, FreeQueue(range(num_blocks), unhashed_first=True), observer)
        self._users: dict[int, int] = {}

    def grow(self, request: Request, count: int) -> list[int]:
        blocks = super().grow(request, count)
        for block in blocks:
            self._users[block] = 1
        return blocks

    def release(self, request: Request, *, returns: bool = False) -> int:
        assert not returns, "nobody is preempted"
        table = self.tables.pop(request, [])
        self._leave(table)
        self._observer.released(request, table)
        return len(table)

    def fork(self, request: Request, beam: Request, computed: int) -> int | None:
        """A beam gets a table of its own for what a request has computed. Returns the block that it has to copy."""
        whole, table = computed // self.block_size, self.tables[request]
        self.tables[beam] = table[:whole]
        self._enter(table[:whole])
        if computed % self.block_size == 0:
            return None
        self.grow(beam, 1)
        return table[whole]

    def exchange(self, beams: Sequence[Request], parents: Sequence[Request], computed: int) -> list[Exchanged]:
        """Beam i goes on with the text of parents[i], of which `computed` tokens are computed: all tables hold just
        these. Returns those whose tables hold something else now.
        """
        whole, rest = divmod(computed, self.block_size)
        before = {beam: self.tables[beam] for beam in beams}
        keeper: dict[Request, Request] = {}  # of a text: the beam that keeps the block that is written to
        for i, beam in enumerate(beams):
            if beam is parents[i] or parents[i] not in keeper:
                keeper[parents[i]] = beam
        for i, beam in enumerate(beams):
            table = before[parents[i]]
            self.tables[beam] = table[:] if keeper[parents[i]] is beam else table[:whole]
            self._enter(self.tables[beam])
        for table in before.values():
            self._leave(table)
        exchanged: list[Exchanged] = []
        for i, beam in enumerate(beams):
            copied: int | None = None
            if rest and keeper[parents[i]] is not beam:
                copied = before[parents[i]][whole]
                self.grow(beam, 1)
            own, now = before[beam], self.tables[beam]
            entries = [(at, block) for at, block in enumerate(now) if block != own[at]]
            if entries or copied is not None:  # the block to copy to may be the one that it had
                exchanged.append(Exchanged(beam, entries, copied))
        return exchanged

    def _enter(self, blocks: Sequence[int]) -> None:
        """These are in one table more."""
        for block in blocks:
            self._users[block] = self._users.get(block, 0) + 1

    def _leave(self, blocks: Sequence[int]) -> None:
        """These are in one table less; those that are in none are free."""
        freed: list[int] = []
        for block in blocks:
            users = self._users[block] - 1
            if users:
                self._users[block] = users
            else:
                del self._users[block]
                freed.append(block)
        self._free.give(freed, 0)

    def check(self) -> None:
        users: dict[int, int] = {}
        for table in self.tables.values():
            assert len(set(table)) == len(table), ("a table names a block twice", table)
            for block in table:
                users[block] = users.get(block, 0) + 1
        assert users == self._users, ("users of blocks", users, self._users)
        free = self._free.order()
        assert sorted([*users, *free]) == list(range(self.num_blocks)), ("blocks lost or double", users, free)
        assert self.free == len(free), ("free blocks", self.free, len(free))
