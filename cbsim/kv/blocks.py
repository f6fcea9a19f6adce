"""The block pool: free list (free_lists.py), reference counts, block tables, and the index from content key to block.

A block with a content key may be shared; every other block has one owner. Keys of blocks that no other request can name
(`RequestSpec.block_key` below zero) enter the index only when their owner is requeued: before that no request could
find them, and afterwards only the owner can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from cbsim.kv.free_lists import CachedLast, FreeList, FreeQueue
from cbsim.policy.groups import LayerGroup, TableChange
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.request import Request, RequestSpec
from cbsim.policy.value import mypyc_attr

if TYPE_CHECKING:
    from cbsim.policy.plan import Chunk, Listed


__all__ = ["BlockPool", "CachedLast", "FreeList", "FreeQueue", "Replaced"]

Replaced = tuple[RequestSpec, int, int]  # a request, an index in its table, the block that is there now
OnCache = Callable[[int, bool], None]  # called with a content key, and whether it can be found now or no longer


class Lookup:
    """The last prefix lookup, kept until a key that it read changes: the head of a queue repeats it at every step.

    `read` are the keys of the blocks it found, and the one it stopped at; `idle` of those blocks are free.
    """

    def __init__(self, spec: RequestSpec | None, most: int, hits: list[int], read: set[int], idle: int) -> None:
        self.spec = spec
        self.most = most
        self.hits = hits
        self.blocks = set(hits)
        self.read = read
        self.idle = idle


NEVER_ASKED: Final = Lookup(None, 0, [], set(), 0)


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockPool:
    """The owner of every block of the KV cache. Only a scheduler writes it."""

    def __init__(self, block_size: int, num_blocks: int, free: FreeList, observer: Observer = NULL_OBSERVER) -> None:
        self.block_size = block_size
        self.hashed_ahead = 0  # tokens behind a block that its content key covers, too
        self.num_blocks = num_blocks
        self.host_blocks = 0  # blocks of a host tier that transfers name; set by a scheduler that has one
        self.cached = 0  # free blocks with a key: their content is found until they are handed out again
        self.tables: dict[Request, list[int]] = {}
        self.groups: tuple[LayerGroup, ...] = ()  # of layers with tables of their own; those that rows do not list
        self.fresh = 0  # with groups: blocks that the newest plan hands out
        self._free = free
        self._observer, self._observed = observer, observer is not NULL_OBSERVER
        self._index: dict[int, int | dict[int, None]] = {}  # key -> block, or the blocks that have it, oldest first
        self._key_of: dict[int, int] = {}
        self._refs: dict[int, int] = {}  # of blocks with a key, or several owners; any other block in use has one owner
        self._read: dict[int, None] = {}  # blocks with a key that a transfer reads
        self._last = NEVER_ASKED
        self._on_cache: OnCache | None = None

    @property
    def free(self) -> int:
        """The blocks that can be handed out; cached blocks without a user count as free."""
        return self._free.free

    @property
    def saved(self) -> int:
        """The blocks saved by sharing: table entries less the different blocks that they name. Counted when read."""
        named = [block for table in self.live_tables() for block in table]
        return len(named) - len(set(named))

    @property
    def ready(self) -> int:
        """The free blocks that can be handed out as they are: all, unless cached ones have to be evicted first."""
        return self._free.free

    @property
    def contents(self) -> int:
        """The number of different contents that a request could find; several blocks may have the same."""
        return len(self._index)

    @property
    def keyed(self) -> int:
        """The number of blocks whose content a request could find, in use or free."""
        return len(self._key_of)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocated(self, request: Request) -> int:
        return len(self.tables.get(request, ()))

    def table(self, request: Request) -> list[int]:
        """Return all blocks of a request, as far as rows list them."""
        return self.tables.get(request, [])

    def listed(self, request: Request) -> Listed:
        """Return a request's blocks for its first row."""
        return tuple(self.table(request))

    def tables_of(self, request: Request) -> list[list[int]]:
        """Return the tables of a request, one for each group of layers; a cache without groups has one."""
        return [self.table(request)]

    def entries(self, request: Request) -> int:
        """Return the number of entries of a request's longest table."""
        return self.allocated(request)

    def in_groups(self, count: int, have: int = 0) -> int:
        """Return the blocks that `count` further entries take, all groups together, where a request has `have`."""
        del have
        return count

    def pages(self, group: int, blocks: list[int]) -> list[int]:
        """Return the names that transfers use for these blocks of a group, in the same order."""
        del group
        return blocks

    def spans(self, request: Request) -> list[tuple[int, int]]:
        """Return, for each table of a request, (first, end) of the tokens of the sequence that its blocks hold."""
        return [(0, self.allocated(request) * self.block_size)]

    def missing(self, request: Request, tokens: int) -> int:
        """Return how many blocks a request lacks to hold its first `tokens` tokens."""
        lacking = self.blocks_for(tokens) - self.allocated(request)
        return lacking if lacking > 0 else 0

    def due(self, request: Request, tokens: int) -> int:
        """Return the blocks lacking for a request's next `tokens` tokens, after freeing those no longer needed."""
        return self.missing(request, request.computed + tokens)

    def needed(self, request: Request, tokens: int, whole: int, hits: list[int]) -> int:
        """Return the free blocks that the first `tokens` or `whole` tokens need, whatever is more, beside the hits."""
        return max(self.missing(request, max(whole, tokens)) - len(hits), 0) + self.idle(hits)

    def most_blocks(self, tokens: int) -> int:
        """Return the most blocks that a request of `tokens` tokens has at a time."""
        return self.blocks_for(tokens)

    def fill(self, request: Request, tokens: int, lacking: int) -> list[int]:
        """Add the blocks `lacking` for a request's first `tokens` tokens. Return those that its row is to list."""
        return self.grow(request, lacking)

    def grow(self, request: Request, count: int) -> list[int]:
        """Add `count` fresh blocks to a table; their former content is evicted."""
        if self._observed:
            self._observer.growing(request, count)
        blocks = self._free.take(count)
        if self._key_of:
            for block in blocks:
                self._forget(block)
        table = self.tables.setdefault(request, [])
        table += blocks
        if self._observed:
            self._observer.grew(request, blocks)
        return blocks

    def grow_each(self, requests: list[Request]) -> Listed:
        """Add a fresh block to the table of each of `requests`, in order; each has a table."""
        if self._observed:
            return tuple([self.grow(request, 1)[0] for request in requests])
        blocks = self._free.take(len(requests))
        tables = self.tables
        for i in range(len(blocks)):
            tables[requests[i]].append(blocks[i])
        if self._key_of:
            for block in blocks:
                self._forget(block)
        return tuple(blocks)

    def find(self, request: Request) -> list[int]:
        """Return the cached blocks for a waiting request; its last known token is computed in any case."""
        return self.longest_prefix(request.spec, (request.target - 1) // self.block_size)

    def tokens_in(self, hits: list[int]) -> int:
        """Return the tokens in the blocks that `find` has found."""
        return len(hits) * self.block_size

    def longest_prefix(self, spec: RequestSpec, blocks: int) -> list[int]:
        """Return the cached blocks that hold the first tokens of a request, at most `blocks` of them."""
        if not self._index:
            return []
        last = self._last
        if last.spec is not spec or last.most != blocks:
            last = self._last = self._look_up(spec, blocks)
        return last.hits

    def _look_up(self, spec: RequestSpec, blocks: int) -> Lookup:
        hits: list[int] = []
        read: set[int] = set()
        for i in range(blocks):
            key = spec.block_key(i, self.block_size, self.hashed_ahead)
            read.add(key)
            entry = self._index.get(key)
            if entry is None:
                break
            hits.append(entry if isinstance(entry, int) else next(iter(entry)))
        return Lookup(spec, blocks, hits, read, sum([not self._refs[block] for block in hits]))

    def idle(self, blocks: list[int]) -> int:
        """Return how many of these cached blocks are free at present, and so would leave the free list if adopted."""
        last = self._last
        return last.idle if blocks is last.hits else sum([not self._refs[block] for block in blocks])

    def adopt(self, request: Request, blocks: list[int]) -> None:
        """Share cached blocks: they become the head of the request's table."""
        for block in blocks:
            self._acquire(block)
        self.tables[request] = list(blocks)
        request.hash_to(len(blocks))

    def share(self, request: Request, sample: Request, blocks: int) -> None:
        """Make the first `blocks` blocks of a request, all hashed, the head of the table of a sample of the same text.
        Those that no other request could look up get their keys now.
        """
        assert blocks <= request.hashed
        table = self.tables[request][:blocks]
        for i, block in enumerate(table):
            self._register(block, self.key(request, i))
        self.adopt(sample, table)

    def fan_out(self, request: Request, samples: list[Request], whole: int) -> None:
        """Make tables for samples of a request, as long as its own: the first `whole` blocks shared, others fresh."""
        for sample in samples:
            self.share(request, sample, whole)
            self.grow(sample, self.allocated(request) - whole)

    def unshared(self, request: Request, whole: int) -> int:
        """Return how many blocks of its own a sample needs when it shares the first `whole`."""
        return self.allocated(request) - whole

    def key(self, request: Request, block: int) -> int:
        """Return the content key under which a block of `request` is registered."""
        return request.spec.block_key(block, self.block_size, self.hashed_ahead)

    def _key(self, request: Request, block: int, group: int) -> int:
        """Return the content key of a block in the table of a group."""
        del group
        return self.key(request, block)

    def publish(self, request: Request, blocks: int) -> None:
        """Give the new ones of a request's first `blocks` blocks, all full, their keys. Duplicates are kept."""
        if request.hashed < request.named:
            for i in range(request.hashed, min(blocks, request.named)):
                self._register(self.tables[request][i], self.key(request, i))
        request.hash_to(blocks)

    def merge(self, request: Request, blocks: int) -> list[tuple[int, int]]:
        """Publish the first `blocks` blocks, but replace a block whose content is cached already by that one and free
        it. Return (index in the table, block) of the replacements.
        """
        replaced = self._merge(request, self.tables[request], request.hashed, min(blocks, request.named))
        request.hash_to(blocks)
        return replaced

    def _merge(self, request: Request, table: list[int], first: int, end: int, group: int = 0) -> list[tuple[int, int]]:
        """Merge the blocks of a group's table from `first` to `end`."""
        named: list[int] = []
        replaced: list[tuple[int, int]] = []
        before_after: list[tuple[int, int]] = []
        for i in range(first, end):
            own = table[i]
            if own in self._key_of:
                continue  # it had its key before a requeue, or a request that shares it was faster
            key = self._key(request, i, group)
            existing = self._index.get(key)
            if existing is None:
                self._register(own, key)
                named.append(own)
                continue
            assert isinstance(existing, int)
            assert existing != own
            self._acquire(existing)
            if self._drop(own):
                self._free.give([own], 0)
            before_after.append((own, existing))
            table[i] = existing
            replaced.append((i, existing))
        self._observer.merged(request, named, before_after)
        return replaced

    def release(self, request: Request, *, returns: bool = False) -> int:
        """Free a table and return its length; with `returns` the request will come back and may find its own blocks."""
        table = self.tables.pop(request, [])
        if returns:
            for i in range(request.spec.shared_blocks(self.block_size, self.hashed_ahead), request.hashed):
                self._register(table[i], self.key(request, i))
        self._give_back(table, request.hashed)
        self._observer.released(request, table)
        return len(table)

    def _give_back(self, table: list[int], hashed: int) -> None:
        """Free the blocks of a table that have no other user; the first `hashed` entries hold reusable content."""
        blocks, reusable = table, hashed
        if self._refs:
            blocks = []
            for i, block in enumerate(table):
                if self._drop(block):
                    blocks.append(block)
                elif i < hashed:
                    reusable -= 1
        self._free.give(blocks, reusable)

    def hold(self, blocks: list[int]) -> None:
        """Keep cached blocks from being handed out until `let_go`: one transfer, and no other, reads them."""
        for block in blocks:
            assert block not in self._read, ("read by two transfers", block)
            self._acquire(block)
            self._read[block] = None

    def let_go(self, blocks: list[int]) -> None:
        """Record that a transfer is over. Blocks without another owner become free, in this order."""
        freed: list[int] = []
        for block in blocks:
            del self._read[block]
            if self._drop(block):
                freed.append(block)
        freed.reverse()  # a free list takes tables, tail first
        self._free.give(freed, len(freed))

    def key_of(self, block: int) -> int | None:
        """Return the content key of a block, or None if it has none."""
        return self._key_of.get(block)

    def table_changes(self, step: int, rows: Mapping[Request, Chunk]) -> tuple[TableChange, ...]:
        """Return the table changes that the plan of a step with these rows lists; none without groups."""
        return ()

    def aligned(self, request: Request, start: int, tokens: int, most: int) -> int:
        """Return how many of the next `tokens` tokens a row may have; all, unless the pool keeps states."""
        del request, start, most
        return tokens

    def begin(self) -> None:
        """Record that a step is about to be planned; used only with groups."""

    def completed(self, step: int) -> None:
        """Record that the rows of a step have come back; used only with groups."""

    def live_tables(self) -> list[list[int]]:
        """Return every table, without entries that are no blocks."""
        return [self.table(request) for request in self.tables]

    def _register(self, block: int, key: int) -> None:
        """Give a block its key, unless it has one: a private block adopted by its own request after a requeue."""
        if block in self._key_of:
            return
        if key in self._last.read:
            self._last = NEVER_ASKED
        self._key_of[block] = key
        self._refs.setdefault(block, 1)
        if self._on_cache is not None and key not in self._index:
            self._on_cache(key, True)
        entry = self._index.setdefault(key, block)
        if isinstance(entry, dict):
            entry[block] = None
        elif entry != block:
            self._index[key] = {entry: None, block: None}

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
            if self._on_cache is not None:
                self._on_cache(key, False)

    def _acquire(self, block: int) -> None:
        if not self._refs[block]:
            self._free.pick(block)
            self.cached -= 1
            self._last.idle -= block in self._last.blocks
        self._refs[block] += 1

    def _drop(self, block: int) -> bool:
        """Remove one reference. Return True if the block is free now."""
        refs = self._refs.get(block)
        if refs is None:
            return True
        self._refs[block] = refs - 1
        if refs != 1:
            if refs == 2 and block not in self._key_of:
                del self._refs[block]
            return False
        self.cached += 1
        self._last.idle += block in self._last.blocks
        return True

    def watch(self, on_cache: OnCache) -> None:
        """Call `on_cache` with every content key that can be found now, and with each change from now on."""
        for key in self._index:
            on_cache(key, True)
        self._on_cache = on_cache

    def free_order(self) -> list[int]:
        """Return the free blocks in the order of their list, for checks against a trace."""
        return self._free.order()

    def check(self) -> None:
        """Raise AssertionError unless every block is free or owned, exactly, and counts and index agree."""
        users = dict.fromkeys(self._read, 1)
        for table in self.live_tables():
            assert len(set(table)) == len(table), ("a table names a block twice", table)
            for block in table:
                users[block] = users.get(block, 0) + 1
        order = self._free.order()
        free, counts = set(order), (len(order), self.free, self.num_blocks - len(users))
        if {len(free)} != {*counts} or not free.isdisjoint(users):  # no assert: a user's own scheduler is checked by it
            raise AssertionError(("blocks lost, or in use and free: free are", len(free), *counts))
        for block, count in users.items():
            assert self._refs.get(block, 1) == count, ("references", block, self._refs.get(block), count)
        self._check_index(users)
        last = self._last
        if last.spec is not None:
            again = self._look_up(last.spec, last.most)
            assert (last.hits, last.idle) == (again.hits, again.idle), ("a stale lookup", last.spec.id)

    def _check_index(self, users: dict[int, int]) -> None:
        """Raise AssertionError unless keys, index and references agree; `users` counts the uses of each block."""
        indexed = [b for e in self._index.values() for b in ([e] if isinstance(e, int) else e)]
        assert sorted(indexed) == sorted(self._key_of), "index and keys disagree"
        assert self._key_of.keys() <= self._refs.keys(), "a block with a key is not counted"
        assert all(n > 1 or b in self._key_of for b, n in self._refs.items()), "one owner is not listed"
        assert all(users.get(b, 0) == n for b, n in self._refs.items()), "references of cached blocks"
        idle = sum(not n for n in self._refs.values())
        assert self.cached == idle, ("cached blocks", self.cached, idle)
