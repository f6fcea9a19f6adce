"""A cache in which a request reserves all that it will need when it is admitted, as one extent of consecutive blocks.

Caches were managed like this before they were paged (FasterTransformer, Orca): no table grows, so no request is ever
preempted, and what is reserved but not used is lost. Any scheduler may compose it: it calls `fits`, then `reserve`, and
`Decoding` does the rest.

A piece is a run of consecutive blocks. `Extents` has the free runs and joins neighbours, as an allocator of a heap
does. `Buddies` is Knuth's buddy system (The Art of Computer Programming 1, 2.5): pieces of a power of two of blocks,
each at a multiple of its own size, so that it has one buddy, the other half of the next larger piece. A piece is halved
until the size needed is reached; a freed one is joined with its buddy as long as that is free. A cache of another size
is cut into such pieces from the start, largest first, which are never joined.

Each is a `FreeList` (free_lists.py) whose `take(count)` hands out one piece of `granted(count)` blocks and whose `give`
takes a whole one back; no content is cached. `largest` is the most that can be taken at present, `most` when all is
free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal

from cbsim.kv.blocks import BlockPool, FreeList
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.request import Request, RequestSpec
from cbsim.policy.value import mypyc_attr

Reserve = Literal["max_model_len", "max_tokens", "power_of_two", "exact"]
Placement = Literal["first_fit", "best_fit", "buddy"]


def reserved_tokens(rule: Reserve, spec: RequestSpec, longest: int) -> int:
    """Return the tokens that a request reserves, never more than a sequence's `longest`.

    `max_model_len`: the longest there is. `max_tokens`: prompt and limit, what is known. The last two know what the
    workload declares and no server can: `exact` prompt and outputs, `power_of_two` prompt and the least power of two
    that is not below the outputs.
    """
    if rule == "max_model_len":
        return longest
    outputs = spec.max_tokens if rule == "max_tokens" else spec.output_tokens
    if rule == "power_of_two":
        outputs = 1 << (outputs - 1).bit_length()
    return min(spec.prompt_tokens + outputs, longest)


def free_pieces(placement: Placement, blocks: int) -> FreePieces:
    """Return the free pieces of a cache of `blocks` blocks, all free."""
    return Buddies(blocks) if placement == "buddy" else Extents(blocks, best=placement == "best_fit")


@mypyc_attr(allow_interpreted_subclasses=True)
class PiecePool(BlockPool):
    """A block pool whose tables are one piece each. `spare` are blocks of a table beyond what its request needs: the
    placement rounds. `sought` is the last piece looked for in vain, in blocks, else 0.
    """

    def __init__(
        self, block_size: int, num_blocks: int, pieces: FreePieces, observer: Observer = NULL_OBSERVER
    ) -> None:
        super().__init__(block_size, num_blocks, pieces, observer)
        self.pieces = pieces
        self.spare: dict[Request, int] = {}
        self.sought = 0

    def fits(self, blocks: int) -> bool:
        """True if there is a free piece of `blocks` blocks."""
        fits = self.pieces.largest >= blocks
        self.sought = 0 if fits else blocks
        return fits

    def reserve(self, request: Request, blocks: int) -> list[int]:
        """Take a piece, which must be there, as the table of a request that has none."""
        assert request not in self.tables, request.spec.id
        piece = self.grow(request, blocks)
        if len(piece) > blocks:
            self.spare[request] = len(piece) - blocks
        return piece

    def release(self, request: Request, *, returns: bool = False) -> int:
        self.spare.pop(request, None)
        return super().release(request, returns=returns)

    def check(self) -> None:
        super().check()
        self.pieces.check()
        for table in self.tables.values():
            assert table[-1] - table[0] == len(table) - 1, ("not one piece", table)
        assert self.spare.keys() <= self.tables.keys(), "spare blocks of nobody"


class Buddies(FreeList):
    """A buddy system: free pieces by their size. The lowest of the smallest sufficient size is handed out."""

    def __init__(self, blocks: int) -> None:
        self.free = self._blocks = blocks
        self._sizes = blocks.bit_length()
        self._starts: list[list[int]] = [[] for _ in range(self._sizes)]  # by size: of 1 << i blocks, ascending
        start = 0
        for i in range(self._sizes - 1, -1, -1):
            if blocks >> i & 1:
                self._starts[i].append(start)
                start += 1 << i

    @property
    def largest(self) -> int:
        for i in range(self._sizes - 1, -1, -1):
            if self._starts[i]:
                return 1 << i
        return 0

    @property
    def most(self) -> int:
        return 1 << self._sizes - 1

    def granted(self, count: int) -> int:
        return 1 << (count - 1).bit_length()

    def take(self, count: int) -> list[int]:
        least = size = (count - 1).bit_length()
        while not self._starts[size]:
            size += 1
        start = self._starts[size].pop(0)
        while size > least:
            size -= 1
            insort(self._starts[size], start + (1 << size))
        self.free -= 1 << least
        return list(range(start, start + (1 << least)))

    def give(self, blocks: list[int], hashed: int) -> None:
        if not blocks:
            return
        start, size = blocks[0], len(blocks).bit_length() - 1
        assert blocks[-1] - start == len(blocks) - 1, ("not one piece", blocks)
        assert (len(blocks), start % len(blocks)) == (1 << size, 0), ("not a piece that was handed out", blocks)
        self.free += len(blocks)
        while True:
            buddy, free = start ^ (1 << size), self._starts[size]
            at = bisect_left(free, buddy)
            if at == len(free) or free[at] != buddy:
                break
            del free[at]
            start = min(start, buddy)
            size += 1
        insort(self._starts[size], start)

    def order(self) -> list[int]:
        runs = [(start, 1 << i) for i, starts in enumerate(self._starts) for start in starts]
        runs.sort()
        return [block for start, length in runs for block in range(start, start + length)]

    def check(self) -> None:
        seen = self.order()
        assert len(seen) == len(set(seen)) == self.free, ("free blocks", len(seen), self.free)
        assert not seen or seen[-1] < self._blocks, ("a piece beyond the cache", seen[-1], self._blocks)
        for i, starts in enumerate(self._starts):
            assert starts == sorted(starts), (i, starts)
            for start in starts:
                assert start % (1 << i) == 0, ("not aligned", start, i)
                assert start ^ (1 << i) not in starts, ("two buddies that are not joined", start, i)


class Extents(FreeList):
    """A list of free runs in order of address; two that touch are one. A piece is cut from the front of a run: of the
    first one that is long enough (first fit), or of the shortest such, the first of equals (`best`: best fit).
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
        """Return the index of the run from which a piece is cut."""
        chosen = -1
        for at, length in enumerate(self._lengths):
            if length >= count and (chosen < 0 or length < self._lengths[chosen]):
                chosen = at
                if not self._best:
                    break
        assert chosen >= 0, (count, self._lengths)
        return chosen

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


FreePieces = Extents | Buddies
