"""A cache of chunks in the host's tier, as in vLLM's native offloading: where chunks lie, their readers and writers. An
`Eviction`, LRU or ARC, chooses the chunk to evict among those at rest. Both learn from requests, not from single
chunks: a `Visitor` records the chunks that a request has looked up.

`HostBlocks` are blocks of the host's tier found by content: the free ones in vLLM's queue, the others referred to.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter

from cbsim.kv.blocks import BlockPool, FreeQueue

by_number = itemgetter(1)
WRITING = -1  # in the place of a number of readers
Rank = tuple[int, int]  # of the request, and minus the number of the chunk in it


class Visitor:
    """A request's use of a cache. `numbers`: the chunks it has looked up, each with its index in the request."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.brought: set[int] = set()  # chunks that it has stored
        self.reused: set[int] = set()  # chunks that it has found
        self.missed: set[int] = set()
        self.rank = 0


class Eviction:
    """The order in which resting chunks are evicted. `insert` and `evict` define which chunks there are."""

    def insert(self, visitor: Visitor, key: int) -> None:
        raise NotImplementedError

    def access(self, visitor: Visitor, key: int) -> None:
        """Record that a request reads this chunk, or stores it."""

    def miss(self, visitor: Visitor, keys: Sequence[int]) -> None:
        """Record that a request is about to store these chunks, which the cache does not have."""

    def unused(self, key: int) -> None:
        """Record that the chunk has no reader or writer any more."""

    def evict(self, count: int, resting: dict[int, None], retained: set[int]) -> list[int] | None:
        """Return `count` resting chunks, none retained; change nothing and return None if there are fewer."""
        raise NotImplementedError

    def left(self, visitor: Visitor) -> None:
        """Record that the request is over."""


class HostCache:
    """A cache with `capacity` places for chunks, each under the key of its content."""

    def __init__(self, capacity: int, eviction: Eviction) -> None:
        self.capacity = capacity
        self.eviction = eviction
        self.writing = 0  # chunks that are there but not written yet
        self._places: dict[int, int] = {}
        self._users: dict[int, int] = {}  # readers of each chunk, or WRITING
        self._resting: dict[int, None] = {}
        self._unused = 0  # the first place that was never used
        self._left: list[int] = []  # places that were used, and are free

    @property
    def free(self) -> int:
        return self.capacity - len(self._places)

    @property
    def resting(self) -> int:
        """The number of chunks without reader or writer."""
        return len(self._resting)

    def has(self, key: int) -> bool:
        return key in self._places

    def written(self, key: int) -> bool:
        return self._users.get(key, WRITING) != WRITING

    def read(self, visitor: Visitor, first: int, keys: Sequence[int]) -> list[int]:
        """Return the places of these chunks, number `first` of the request and on. They stay until `has_read`."""
        self._access(visitor, keys, {key: first + i for i, key in enumerate(keys)})
        for key in keys:
            assert self.written(key), key
            self._users[key] += 1
            self._resting.pop(key, None)
        return [self._places[key] for key in keys]

    def has_read(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._users[key] -= 1
            if not self._users[key]:
                self._rest(key)

    def store(self, visitor: Visitor, first: int, keys: Sequence[int]) -> list[int] | None:
        """Give a place to those of these chunks, number `first` of the request and those after it, that have none; they
        have to be written then. Return their keys in order, or None if too few chunks can be evicted.
        """
        new = [key for key in keys if key not in self._places]
        self.eviction.miss(visitor, new)
        requested = [*new, *[key for key in keys if self.written(key)]]
        self._access(visitor, requested, {key: first + i for i, key in enumerate(keys)})
        lacking = len(new) - self.free
        if lacking > 0:
            if lacking > len(self._resting):
                return None
            victims = self.eviction.evict(lacking, self._resting, {*keys})
            if victims is None:
                return None
            for key in victims:
                del self._resting[key], self._users[key]
                self._left.append(self._places.pop(key))
        for key, slot in zip(new, self._take(len(new)), strict=True):
            self._places[key], self._users[key] = slot, WRITING
            visitor.brought.add(key)
            self.eviction.insert(visitor, key)
        self.writing += len(new)
        return new

    def places(self, keys: Sequence[int]) -> list[int]:
        return [self._places[key] for key in keys]

    def has_written(self, keys: Sequence[int]) -> None:
        self.writing -= len(keys)
        for key in keys:
            assert self._users[key] == WRITING, key
            self._rest(key)

    def _rest(self, key: int) -> None:
        self._users[key] = 0
        self._resting[key] = None
        self.eviction.unused(key)

    def _access(self, visitor: Visitor, keys: Sequence[int], numbers: dict[int, int]) -> None:
        """Record that a request uses these chunks: each counts once, also if it is not there yet."""
        for key in keys:
            if key not in visitor.brought and self.written(key):
                visitor.reused.add(key)
            if key not in visitor.numbers:
                visitor.numbers[key] = numbers[key]
                self.eviction.access(visitor, key)

    def _take(self, count: int) -> list[int]:
        fresh = min(count, self.capacity - self._unused)
        taken = [*range(self._unused, self._unused + fresh)]
        self._unused += fresh
        return taken + [self._left.pop() for _ in range(count - fresh)]

    def check(self) -> None:
        """Raise AssertionError unless every place is free or a chunk's, exactly, and the sums equal a recount."""
        places = [*self._places.values(), *self._left, *range(self._unused, self.capacity)]
        assert sorted(places) == list(range(self.capacity)), ("places", len(places), self.capacity)
        assert self._users.keys() == self._places.keys(), "chunks without users' count"
        assert self._resting.keys() == {key for key, users in self._users.items() if not users}, "resting chunks"
        assert self.writing == sum(users == WRITING for users in self._users.values()), self.writing


class Lru(Eviction):
    """An eviction by rank, least first. All that a request looks up has one number, later chunks rank lower; when it is
    over, these chunks get new numbers, its first chunk the largest.
    """

    def __init__(self) -> None:
        self._last = 0
        self._ranks: dict[int, Rank] = {}
        self._heap: list[tuple[Rank, int]] = []  # of chunks that rested when they were pushed, with their rank then

    def insert(self, visitor: Visitor, key: int) -> None:
        self._ranks[key] = self._rank(visitor, key)

    def access(self, visitor: Visitor, key: int) -> None:
        rank, before = self._rank(visitor, key), self._ranks.get(key)
        if before is not None and rank > before:
            self._raise(key, rank)

    def _rank(self, visitor: Visitor, key: int) -> Rank:
        if not visitor.rank:
            self._last += 1
            visitor.rank = self._last
        return visitor.rank, -visitor.numbers[key]

    def unused(self, key: int) -> None:
        heappush(self._heap, (self._ranks[key], key))

    def _raise(self, key: int, rank: Rank) -> None:
        self._ranks[key] = rank
        heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapify(self._heap)

    def evict(self, count: int, resting: dict[int, None], retained: set[int]) -> list[int] | None:
        victims: dict[int, None] = {}
        passed: list[tuple[Rank, int]] = []
        heap, ranks = self._heap, self._ranks
        while heap and len(victims) < count:
            rank, key = heappop(heap)
            if key not in resting or ranks[key] != rank:
                continue  # it comes again when it rests, or lies further behind
            passed.append((rank, key))
            if key not in retained:
                victims[key] = None
        enough = len(victims) == count
        for entry in passed:
            if not enough or entry[1] in retained:
                heappush(heap, entry)
        if not enough:
            return None
        for key in victims:
            del ranks[key]
        return [*victims]

    def left(self, visitor: Visitor) -> None:
        for key, number in sorted(visitor.numbers.items(), key=by_number, reverse=True):
            if key in self._ranks:
                self._last += 1
                self._raise(key, (self._last, -number))


class Arc(Eviction):
    """An adaptive replacement cache: `once` and `often` hold the chunks, two ghost lists remember those evicted from
    each, and a ghost that is wanted again changes `goal`, the size that `once` should have.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.goal = 0.0
        self.once: dict[int, None] = {}
        self.often: dict[int, None] = {}
        self.once_ghosts: dict[int, None] = {}
        self.often_ghosts: dict[int, None] = {}

    def insert(self, visitor: Visitor, key: int) -> None:
        self.once[key] = None
        self.once_ghosts.pop(key, None)
        self.often_ghosts.pop(key, None)

    def miss(self, visitor: Visitor, keys: Sequence[int]) -> None:
        once, often = self.once_ghosts, self.often_ghosts
        for key in reversed(keys):
            if key in visitor.missed:
                continue
            visitor.missed.add(key)
            if key in once:
                self.goal = min(self.goal + max(1.0, len(often) / len(once)), float(self.capacity))
                _to_end(once, key)
            elif key in often:
                self.goal = max(self.goal - max(1.0, len(once) / len(often)), 0.0)
                _to_end(often, key)

    def evict(self, count: int, resting: dict[int, None], retained: set[int]) -> list[int] | None:
        once = _first(self.once, count, resting, retained)
        often = _first(self.often, count, resting, retained)
        if len(once) + len(often) < count:
            return None
        victims: list[int] = []
        size, first, second = len(self.once), 0, 0  # what is left of `once`, and how many of either go
        while len(victims) < count:
            if first < len(once) and (size >= int(self.goal) or second == len(often)):
                victims.append(once[first])
                first += 1
                size -= 1
            else:
                victims.append(often[second])
                second += 1
        for key in victims:
            ghosts, chunks = (self.once_ghosts, self.once) if key in self.once else (self.often_ghosts, self.often)
            del chunks[key]
            ghosts[key] = None
        for ghosts in (self.once_ghosts, self.often_ghosts):
            for key in list(ghosts)[: max(0, len(ghosts) - self.capacity)]:
                del ghosts[key]
        return victims

    def left(self, visitor: Visitor) -> None:
        for key, _ in sorted(visitor.numbers.items(), key=by_number, reverse=True):
            if key in visitor.reused and (key in self.once or key in self.often):
                self.once.pop(key, None)
                self.often.pop(key, None)
                self.often[key] = None
            elif key in visitor.brought:
                _to_end(self.once, key)
                _to_end(self.often, key)


def _first(keys: dict[int, None], count: int, resting: dict[int, None], retained: set[int]) -> list[int]:
    """Return the oldest of these chunks that may be evicted, at most `count`."""
    oldest: list[int] = []
    for key in keys:
        if len(oldest) == count:
            break
        if key in resting and key not in retained:
            oldest.append(key)
    return oldest


def _to_end(keys: dict[int, None], key: int) -> None:
    """Make a key the last one, if it is there."""
    if key in keys:
        del keys[key]
        keys[key] = None


class HostBlocks(BlockPool):
    """A pool of blocks 1 to `num_blocks` - 1; block 0 is never used. A block without references is free, and found by
    its key until it is handed out again. Several may have the same key. There are no tables.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(1, num_blocks, FreeQueue(range(1, num_blocks), unhashed_first=True))

    def oldest(self, key: int) -> int | None:
        """Return the oldest block with this content."""
        entry = self._index.get(key)
        return next(iter(entry)) if isinstance(entry, dict) else entry

    def take(self, count: int) -> list[int]:
        """Return `count` free blocks, each with one reference; their former content is evicted."""
        blocks = self._free.take(count)
        for block in blocks:
            self._forget(block)
            self._refs[block] = 1
        return blocks

    def filled(self, block: int, key: int) -> None:
        """Record the content of a block that was taken."""
        self._register(block, key)

    def pin(self, blocks: list[int]) -> None:
        """Add one reference to each block."""
        for block in blocks:
            self._acquire(block)

    def put_back(self, blocks: list[int]) -> None:
        """Remove one reference from each block. All are filled; the last used is the last to be handed out again."""
        for block in blocks:
            if self._drop(block):
                self._free.give([block], 1)

    def check(self) -> None:
        """Raise AssertionError unless every block is free or referred to, and keys and index agree."""
        free, used = self._free.order(), {block for block, refs in self._refs.items() if refs}
        assert len(free) == len({*free}) == self.free, ("free list", len(free), self.free)
        assert not {*free} & used, ("free and referred to", {*free} & used)
        assert sorted([*free, *used]) == list(range(1, self.num_blocks)), "host blocks lost"
        listed = [(entry if isinstance(entry, dict) else [entry], key) for key, entry in self._index.items()]
        indexed = sorted([(block, key) for blocks, key in listed for block in blocks])
        assert indexed == sorted(self._key_of.items()), "index and keys disagree"
