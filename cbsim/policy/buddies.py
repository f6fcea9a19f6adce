"""Knuth's buddy system (The Art of Computer Programming 1, 2.5): pieces of a power of two of blocks.

Each lies at a multiple of its own size, so that it has one buddy, the other half of the next larger piece. A piece is
halved until the size asked for is reached; a freed one is joined with its buddy as long as that is free. A cache of
another size is cut into such pieces from the start, largest first, which are never joined.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Buddies:
    """Free pieces by their size. The lowest of the smallest size that will do is handed out."""

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
        wanted = size = (count - 1).bit_length()
        while not self._starts[size]:
            size += 1
        start = self._starts[size].pop(0)
        while size > wanted:
            size -= 1
            insort(self._starts[size], start + (1 << size))
        self.free -= 1 << wanted
        return list(range(start, start + (1 << wanted)))

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

    def pick(self, block: int) -> None:
        raise AssertionError(("a piece holds nothing once it is free", block))

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
