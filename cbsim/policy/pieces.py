"""Free space that is handed out in pieces: a piece is a run of consecutive blocks, for one request as long as it runs.

Two managers of it stand behind one Protocol. `Extents` keeps the free runs and merges neighbours, as any allocator of a
heap does; `Buddies` (buddies.py) hands out powers of two. Each is a `FreeList` of a block pool (blocks.py) as well.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol


class FreePieces(Protocol):
    """Which consecutive blocks go next. `free` is how many blocks are free, in however many runs."""

    free: int

    @property
    def largest(self) -> int:
        """The largest count of blocks that can be taken at present."""

    @property
    def most(self) -> int:
        """The largest count of blocks that can be taken when all are free."""

    def granted(self, count: int) -> int:
        """Blocks that whoever takes `count` gets."""

    def take(self, count: int) -> list[int]:
        """Hand out one piece of `granted(count)` blocks; the caller has checked that `largest` is enough."""

    def give(self, blocks: list[int], hashed: int) -> None:
        """Take back one whole piece, or nothing; content is not kept."""

    def pick(self, block: int) -> None:
        """Nothing cached is ever free: not called."""

    def order(self) -> list[int]:
        """Every free block, ascending."""

    def check(self) -> None:
        """Raise AssertionError unless the free runs are what they should be."""


class Extents:
    """Free runs in order of address; two that touch are one. A piece is cut from the front of a run: of the first one
    that is long enough (first fit), or of the shortest such, the first of equals (`best`: best fit).
    """

    def __init__(self, blocks: int, *, best: bool) -> None:
        self.free = self._blocks = blocks
        self._best = best
        self._starts = [0]
        self._lengths = [blocks]

    @property
    def largest(self) -> int:
        return max(self._lengths, default=0)

    @property
    def most(self) -> int:
        return self._blocks

    def granted(self, count: int) -> int:
        return count

    def take(self, count: int) -> list[int]:
        at = self._fitting(count)
        start, length = self._starts[at], self._lengths[at]
        if length == count:
            del self._starts[at], self._lengths[at]
        else:
            self._starts[at], self._lengths[at] = start + count, length - count
        self.free -= count
        return list(range(start, start + count))

    def _fitting(self, count: int) -> int:
        """The index of the run that is cut."""
        found = -1
        for at, length in enumerate(self._lengths):
            if length >= count and (found < 0 or length < self._lengths[found]):
                found = at
                if not self._best:
                    break
        assert found >= 0, (count, self._lengths)
        return found

    def give(self, blocks: list[int], hashed: int) -> None:
        if not blocks:
            return
        start, length = blocks[0], len(blocks)
        assert blocks[-1] - start == length - 1, ("not one piece", blocks)
        starts, lengths = self._starts, self._lengths
        self.free += length
        at = bisect_left(starts, start)
        if at < len(starts) and start + length == starts[at]:
            length += lengths[at]
            del starts[at], lengths[at]
        if at > 0 and starts[at - 1] + lengths[at - 1] == start:
            lengths[at - 1] += length
        else:
            starts.insert(at, start)
            lengths.insert(at, length)

    def pick(self, block: int) -> None:
        raise AssertionError(("a piece holds nothing once it is free", block))

    def order(self) -> list[int]:
        return [block for at, start in enumerate(self._starts) for block in range(start, start + self._lengths[at])]

    def check(self) -> None:
        end = -1  # a run at 0 touches nothing
        for at, start in enumerate(self._starts):
            assert start > end, ("runs overlap or touch", self._starts, self._lengths)
            assert self._lengths[at] > 0, ("an empty run", self._starts, self._lengths)
            end = start + self._lengths[at]
        assert end <= self._blocks, ("a run ends beyond the cache", end, self._blocks)
        assert sum(self._lengths) == self.free, ("free blocks", self._lengths, self.free)
