"""Free lists: the order in which free blocks are handed out, in which real block managers differ."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from cbsim.policy.plan import PACKED, packed, unpacked


class FreeList:
    """A free list, which determines the block that is handed out next."""

    free: int  # number of free blocks, unless the pool counts them by itself

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks; the caller has checked that there are enough."""
        raise NotImplementedError

    def give(self, blocks: list[int], hashed: int) -> None:
        """Take back blocks of one table, in table order; the first `hashed` of them hold reusable content."""
        raise NotImplementedError

    def pick(self, block: int) -> None:
        """Remove one particular free block, because its content is wanted."""
        raise NotImplementedError

    def order(self) -> list[int]:
        """Return every free block, in the order of its list."""
        raise NotImplementedError


class FreeQueue(FreeList):
    """A free list as vLLM's one queue: blocks are taken from the front; a freed table is walked tail first.

    0.19 appends every block. 0.33 (`unhashed_first`) puts blocks without content to the front and appends the others,
    which makes the queue a true LRU of cache entries. `pick` marks an entry dead; it is dropped when it surfaces. Both
    ends are lists, so that blocks go in and out by the slice: a stack in front, `_top` blocks of `_stack`, the last of
    them the next one, and behind it `_queue` from `_head` on.
    """

    def __init__(self, blocks: Iterable[int], *, unhashed_first: bool) -> None:
        self._stack: list[int] = []
        self._top = 0
        self._queue = list(blocks)
        self._head = 0
        self._dead: dict[int, int] = {}
        self.free = len(self._queue)
        self._unhashed_first = unhashed_first

    def take(self, count: int) -> list[int]:
        self.free -= count
        taken = self._next(count)
        if self._dead:
            taken = [block for block in taken if not self._bury(block)]
            while len(taken) < count:
                taken += [block for block in self._next(count - len(taken)) if not self._bury(block)]
        return taken

    def _next(self, count: int) -> list[int]:
        """Return the next entries, dead or alive; fewer if there are no more."""
        top, first = self._top, self._head
        least = self._top = top - count if top > count else 0
        front = self._stack[least:top] if top else []
        front.reverse()
        if top >= count:
            return front
        self._head = end = first + count - top
        entries = self._queue[first:end]
        if end > len(self._queue) // 2:
            del self._queue[:end]
            self._head = 0
        return front + entries if top else entries

    def _bury(self, block: int) -> bool:
        """True if this entry is dead. The dead entries of a block always lie before its live one."""
        dead = self._dead.pop(block, 0)
        if dead > 1:
            self._dead[block] = dead - 1
        return dead > 0

    def give(self, blocks: list[int], hashed: int) -> None:
        self.free += len(blocks)
        if self._unhashed_first:
            self._stack[self._top :] = blocks[hashed:]
            self._top = len(self._stack)
            self._queue += blocks[hashed - 1 :: -1] if hashed else ()
        else:
            self._queue += blocks[::-1]

    def pick(self, block: int) -> None:
        self.free -= 1
        self._dead[block] = self._dead.get(block, 0) + 1

    def order(self) -> list[int]:
        entries = [*self._stack[: self._top][::-1], *self._queue[self._head :]]
        if not self._dead:
            return entries
        dead = dict(self._dead)
        live: list[int] = []
        for block in entries:
            if dead.get(block, 0):
                dead[block] -= 1
            else:
                live.append(block)
        return live


class PageQueue(FreeList):
    """A free list as SGLang's: pages are taken from the front; freed ones are appended, or with `in_front` put there,
    head first. They are packed, in pieces that stay as they are until they are handed out.
    """

    def __init__(self, pages: Iterable[int], *, in_front: bool) -> None:
        self._piece, self._at = packed([*pages]), 0  # the first one, and its bytes that have been handed out
        self._pieces = deque[bytes]()  # behind it
        self.free = len(self._piece) // PACKED
        self._in_front = in_front

    def take(self, count: int) -> list[int]:
        return [*unpacked(self.cut(count))]

    def cut(self, count: int) -> bytes:
        """Hand out `count` pages, packed."""
        assert count <= self.free, ("no room was made", count, self.free)
        self.free -= count
        taken, end = list[bytes](), self._at + PACKED * count
        while end > len(self._piece):
            taken.append(self._piece[self._at :])
            end -= len(self._piece)
            self._piece, self._at = self._pieces.popleft(), 0
        last, self._at = self._piece[self._at : end], end
        return b"".join([*taken, last]) if taken else last

    def give(self, blocks: list[int], hashed: int) -> None:
        self.put(packed(blocks))

    def put(self, pages: bytes) -> None:
        """Take back packed pages, in order."""
        self.free += len(pages) // PACKED
        if not self._in_front:
            self._pieces.append(pages)
            return
        if self._at < len(self._piece):
            self._pieces.appendleft(self._piece[self._at :])
        self._piece, self._at = pages, 0

    def order(self) -> list[int]:
        return [page for piece in (self._piece[self._at :], *self._pieces) for page in unpacked(piece)]


class CachedLast(FreeList):
    """A free list as transformers' two: blocks without content are a FIFO queue; cached blocks are taken only when that
    is short, newest first. A freed table is walked head first.
    """

    def __init__(self, blocks: Iterable[int]) -> None:
        self.plain = deque(blocks)
        self.cached: dict[int, None] = {}
        self.free = len(self.plain)

    def take(self, count: int) -> list[int]:
        self.free -= count
        for _ in range(count - len(self.plain)):
            self.plain.append(self.cached.popitem()[0])
        return [self.plain.popleft() for _ in range(count)]

    def give(self, blocks: list[int], hashed: int) -> None:
        self.free += len(blocks)
        self.cached.update(dict.fromkeys(blocks[:hashed]))
        self.plain.extend(blocks[hashed:])

    def pick(self, block: int) -> None:
        self.free -= 1
        del self.cached[block]

    def order(self) -> list[int]:
        return [*self.plain, *self.cached]
