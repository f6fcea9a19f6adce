"""The block pool: free list (free_lists.py), reference counts, block tables, and the index from content key to block.

A block with a content key may be shared; every other block has one owner. Keys of blocks that no
other request can name (`RequestSpec.block_key` below zero) enter the index only when their owner is requeued: before
that nobody could find them, and afterwards only the owner can.
"""

from __future__ import annotations

from cbsim.policy.free_lists import CachedLast, FreeList, FreeQueue
from cbsim.policy.lookup import NEVER_ASKED, Lookup
from cbsim.policy.observer import NOBODY, Observer
from cbsim.policy.request import Request, RequestSpec
from cbsim.policy.value import mypyc_attr

__all__ = ["BlockPool", "CachedLast", "FreeList", "FreeQueue", "Replaced"]

Replaced = tuple[RequestSpec, int, int]  # a request, an index in its table, the block that is there now


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockPool:
    """Owner of every block of the KV cache. Only a scheduler writes it."""

    def __init__(self, block_size: int, num_blocks: int, free: FreeList, observer: Observer = NOBODY) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.host_blocks = 0  # places of a host tier, that moves name; a scheduler that has one says so
        self.saved = 0  # by sharing: entries of tables, less the different blocks that they name
        self.cached = 0  # free blocks with a key: their content is found until they are handed out again
        self.tables: dict[Request, list[int]] = {}
        self._free = free
        self._observer = observer
        self._index: dict[
            int, int | dict[int, None]
        ] = {}  # key -> block, or the blocks that duplicate it, oldest first
        self._key_of: dict[int, int] = {}
        self._refs: dict[int, int] = {}  # of blocks with a key; every other block in use has one owner
        self._holds: dict[int, int] = {}  # those of them that moves hold, and how often
        self._last = NEVER_ASKED

    @property
    def free(self) -> int:
        """Blocks that can be handed out; cached blocks that nobody uses count as free."""
        return self._free.free

    @property
    def contents(self) -> int:
        """Different contents that a request could find; several blocks may hold the same."""
        return len(self._index)

    @property
    def keyed(self) -> int:
        """Blocks whose content a request could find, in use or free."""
        return len(self._key_of)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def held(self, request: Request) -> int:
        return len(self.tables.get(request, ()))

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks that a request lacks to hold its first `tokens` tokens."""
        return max(0, self.blocks_for(tokens) - self.held(request))

    def grow(self, request: Request, count: int) -> list[int]:
        """Add `count` fresh blocks to a table; what they cached before is forgotten."""
        observer = self._observer
        if observer is not NOBODY:
            observer.growing(request, count)
        blocks = self._free.take(count)
        if self._key_of:
            for block in blocks:
                self._forget(block)
        self.tables.setdefault(request, []).extend(blocks)
        if observer is not NOBODY:
            observer.grew(request, blocks)
        return blocks

    def grow_each(self, requests: list[Request]) -> list[int]:
        """Add a fresh block to the table of each of `requests`, in order; each has a table."""
        if self._observer is not NOBODY:
            return [self.grow(request, 1)[0] for request in requests]
        blocks = self._free.take(len(requests))
        tables = self.tables
        for i, request in enumerate(requests):
            tables[request].append(blocks[i])
        if self._key_of:
            for block in blocks:
                self._forget(block)
        return blocks

    def longest_prefix(self, spec: RequestSpec, blocks: int) -> list[int]:
        """The cached blocks that hold the first tokens of a request, at most `blocks` of them."""
        if not self._index:
            return []
        last = self._last
        if last.spec is not spec or last.most != blocks:
            last = self._last = self._look_up(spec, blocks)
        return last.found

    def _look_up(self, spec: RequestSpec, blocks: int) -> Lookup:
        found: list[int] = []
        read: set[int] = set()
        for i in range(blocks):
            key = spec.block_key(i, self.block_size)
            read.add(key)
            entry = self._index.get(key)
            if entry is None:
                break
            found.append(entry if isinstance(entry, int) else next(iter(entry)))
        return Lookup(spec, blocks, found, read, sum([not self._refs[block] for block in found]))

    def idle(self, blocks: list[int]) -> int:
        """How many of these cached blocks are free at present, and so would leave the free list if adopted."""
        last = self._last
        return last.idle if blocks is last.found else sum([not self._refs[block] for block in blocks])

    def adopt(self, request: Request, blocks: list[int]) -> None:
        """Share cached blocks: they become the head of the request's table."""
        for block in blocks:
            self._acquire(block)
        self.tables[request] = list(blocks)
        request.hash_to(len(blocks))

    def share(self, request: Request, sample: Request, blocks: int) -> None:
        """The first `blocks` blocks of a request, all hashed, become the head of the table of another of the same text.
        Those that nobody could ask for get their keys now.
        """
        assert blocks <= request.hashed
        table = self.tables[request][:blocks]
        for i, block in enumerate(table):
            self._register(block, self.key(request, i))
        self.adopt(sample, table)

    def key(self, request: Request, block: int) -> int:
        """Content key under which a block of `request` is registered."""
        return request.spec.block_key(block, self.block_size)

    def publish(self, request: Request, blocks: int) -> None:
        """The first `blocks` blocks of a request are full: give the new ones their keys. Duplicates are kept."""
        if request.hashed < request.named:
            for i in range(request.hashed, min(blocks, request.named)):
                self._register(self.tables[request][i], self.key(request, i))
        request.hash_to(blocks)

    def merge(self, request: Request, blocks: int) -> list[tuple[int, int]]:
        """As `publish`, but a block whose content is cached already is replaced by that one and freed.

        Returns (index in the table, block) of those that came in.
        """
        table = self.tables[request]
        named: list[int] = []
        replaced: list[tuple[int, int]] = []
        before_after: list[tuple[int, int]] = []
        for i in range(request.hashed, min(blocks, request.named)):
            key = self.key(request, i)
            existing = self._index.get(key)
            if existing is None:
                if self._register(table[i], key):
                    named.append(table[i])
                continue
            assert isinstance(existing, int)
            assert existing != table[i]
            self._acquire(existing)
            self._free.give([table[i]], 0)
            before_after.append((table[i], existing))
            table[i] = existing
            replaced.append((i, existing))
        request.hash_to(blocks)
        self._observer.merged(request, named, before_after)
        return replaced

    def release(self, request: Request, *, returns: bool = False) -> int:
        """Free a table; with `returns` the request will come back and may find its own blocks. Returns blocks held."""
        table = self.tables.pop(request, [])
        if returns:
            for i in range(request.spec.shared_blocks(self.block_size), request.hashed):
                self._register(table[i], self.key(request, i))
        blocks, hashed = table, request.hashed
        if self._refs:
            blocks = []
            for i, block in enumerate(table):
                if self._drop(block):
                    blocks.append(block)
                elif i < request.hashed:
                    hashed -= 1
        self._free.give(blocks, hashed)
        self._observer.released(request, table)
        return len(table)

    def hold(self, blocks: list[int]) -> None:
        """A move reads these cached blocks: they are not handed out until `let_go`, whoever frees them."""
        for block in blocks:
            self._acquire(block)
            self._holds[block] = self._holds.get(block, 0) + 1

    def let_go(self, blocks: list[int]) -> None:
        """The move is over. Those that nobody else has become free, in this order."""
        freed: list[int] = []
        for block in blocks:
            holds = self._holds.pop(block) - 1
            if holds:
                self._holds[block] = holds
            if self._drop(block):
                freed.append(block)
        freed.reverse()  # a free list takes tables, tail first
        self._free.give(freed, len(freed))

    def key_of(self, block: int) -> int | None:
        """The content key of a block, if it has one."""
        return self._key_of.get(block)

    def _register(self, block: int, key: int) -> bool:
        """Give a block its key. False if it has one: a private block adopted by its own request after a requeue."""
        if block in self._key_of:
            return False
        if key in self._last.read:
            self._last = NEVER_ASKED
        self._key_of[block], self._refs[block] = key, 1
        entry = self._index.setdefault(key, block)
        if isinstance(entry, dict):
            entry[block] = None
        elif entry != block:
            self._index[key] = {entry: None, block: None}
        return True

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is None:
            return
        if key in self._last.read:
            self._last = NEVER_ASKED
        self.cached -= not self._refs.pop(block)
        entry = self._index[key]
        if isinstance(entry, dict) and len(entry) > 1:
            del entry[block]
        else:
            del self._index[key]

    def _acquire(self, block: int) -> None:
        if not self._refs[block]:
            self._free.pick(block)
            self.cached -= 1
            self._last.idle -= block in self._last.blocks
        else:
            self.saved += 1
        self._refs[block] += 1

    def _drop(self, block: int) -> bool:
        """Give one reference up; is the block free now?"""
        refs = self._refs.get(block)
        if refs is None:
            return True
        self._refs[block] = refs - 1
        if refs != 1:
            self.saved -= 1
            return False
        self.cached += 1
        self._last.idle += block in self._last.blocks
        return True

    def free_order(self) -> list[int]:
        """The free blocks in the order of their list, for checks against a trace."""
        return self._free.order()

    def check(self) -> None:
        """Raise AssertionError unless every block is free or owned, exactly, and counts and index agree."""
        users = dict(self._holds)
        for table in self.tables.values():
            assert len(set(table)) == len(table), ("a table names a block twice", table)
            for block in table:
                users[block] = users.get(block, 0) + 1
        free = self._free.order()
        assert len(free) == len(set(free)) == self.free, ("free list", len(free), len(set(free)), self.free)
        assert not users.keys() & set(free), ("in use and free", users.keys() & set(free))
        assert len(users) + len(free) == self.num_blocks, ("blocks lost", len(users), len(free), self.num_blocks)
        for block, count in users.items():
            assert self._refs.get(block, 1) == count, ("references", block, self._refs.get(block), count)
        indexed = [b for e in self._index.values() for b in ([e] if isinstance(e, int) else e)]
        assert sorted(indexed) == sorted(self._key_of) == sorted(self._refs), "index and keys disagree"
        assert all(users.get(b, 0) == n for b, n in self._refs.items()), "references of cached blocks"
        assert self.saved == sum(users.values()) - len(users), ("blocks saved", self.saved, users)
        idle = sum(not n for n in self._refs.values())
        assert self.cached == idle, ("cached blocks", self.cached, idle)
        last = self._last
        if last.spec is not None:
            again = self._look_up(last.spec, last.most)
            assert (last.found, last.idle) == (again.found, again.idle), ("a lookup that was kept", last.spec.id)
