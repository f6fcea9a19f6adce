"""Blocks in sectors: the memory of transformers 5.23.

Memory is cut in sectors of equal size. A sector is claimed for one kind of layers, which cuts it in blocks of its own,
and comes free as a whole. Free sectors are a stack that all kinds share; each kind has a `Sectors`, its view of them.
Blocks are numbered through all sectors: block b of a kind lies in sector b // per.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbsim.kv.blocks import BlockPool, FreeList
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Listed
from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr


class Sectors(FreeList):
    """A free list that hands out blocks of the oldest claimed sector that has some.

    Cached blocks keep content that can be found. They are free, but not ready: none is handed out before `evict`. How
    many are free is counted by the pool, as sectors come and go with what other kinds claim.
    """

    def __init__(self, stack: list[int], per: int) -> None:
        self.stack = stack  # free sectors, the last one goes next
        self.per = per  # blocks in one
        self.trees: dict[int, list[int]] = {}  # sectors that are claimed -> their free blocks, if they have some
        self.cached: dict[int, None] = {}
        self.claimed_free = 0  # blocks in the trees, those of claimed sectors

    @property
    def ready(self) -> int:
        """The number of blocks that can be handed out without an eviction."""
        return self.claimed_free + len(self.stack) * self.per

    def short(self, count: int) -> int:
        """Return how many sectors have to be claimed before `count` blocks are there."""
        return max(0, -(-(count - self.claimed_free) // self.per))

    def take(self, count: int) -> list[int]:
        for _ in range(self.short(count)):
            self._claim()
        self.claimed_free -= count
        taken: list[int] = []
        used_up: list[int] = []
        for sector, blocks in self.trees.items():
            left = count - len(taken)
            if len(blocks) > left:
                taken += blocks[len(blocks) - left :]
                del blocks[len(blocks) - left :]
                break
            taken += blocks
            used_up.append(sector)
        for sector in used_up:
            del self.trees[sector]
        return taken

    def _claim(self) -> None:
        sector, per = self.stack.pop(), self.per
        self.trees[sector] = list(range((sector + 1) * per - 1, sector * per - 1, -1))
        self.claimed_free += per

    def give(self, blocks: list[int], hashed: int) -> None:
        """Free a table, its first `hashed` blocks cached. A sector that had no free blocks becomes the youngest."""
        self.cached.update(dict.fromkeys(blocks[:hashed]))
        self.claimed_free += len(blocks) - hashed
        for block in blocks[hashed:]:
            self.trees.setdefault(block // self.per, []).append(block)

    def pick(self, block: int) -> None:
        del self.cached[block]

    def evict(self) -> list[int]:
        """Evict every cached block. Return them, oldest first."""
        blocks = list(self.cached)
        self.cached = {}
        self.give(blocks, 0)
        return blocks

    def reclaim(self) -> None:
        """Return sectors that are wholly free to the stack, from which any kind can claim them."""
        if self.trees:
            whole = [sector for sector, blocks in self.trees.items() if len(blocks) == self.per]
            for sector in whole:
                del self.trees[sector]
            self.claimed_free -= len(whole) * self.per
            self.stack += whole

    def order(self) -> list[int]:
        claimed_free = [block for blocks in self.trees.values() for block in blocks]
        whole = [sector * self.per + i for sector in reversed(self.stack) for i in reversed(range(self.per))]
        return [*claimed_free, *whole, *self.cached]

    def check(self) -> None:
        """Raise AssertionError unless free sectors are whole and each free block is listed once, in its sector."""
        assert len(set(self.stack)) == len(self.stack), ("a sector is free twice", self.stack)
        assert not self.trees.keys() & set(self.stack), ("free and claimed", self.trees.keys() & set(self.stack))
        whole = [block for block in self.cached if block // self.per in self.stack]
        assert not whole, ("cached in a free sector", whole)
        for sector, blocks in self.trees.items():
            assert 0 < len(set(blocks)) == len(blocks) <= self.per, ("blocks of a sector", sector, blocks)
            assert all(block // self.per == sector for block in blocks), ("in another's list", sector, blocks)
            assert not self.cached.keys() & set(blocks), ("cached and ready", sector, blocks)
        claimed_free = sum([len(blocks) for blocks in self.trees.values()])
        assert claimed_free == self.claimed_free, ("blocks of claimed sectors", claimed_free, self.claimed_free)


class KindSectors:
    """The sectors of several kinds of layers over one stack. A block of kind k is `pages_of[k]` pages of the memory,
    and its number times that is the first of them; a sector has `per_sector`. Free pages are counted; none is cached.
    """

    def __init__(self, sectors: Iterable[int], pages: Sequence[int], per_sector: int) -> None:
        self.stack = list(sectors)
        self.pages_of = list(pages)
        self.per_sector = per_sector
        self.kinds = [Sectors(self.stack, per_sector // count) for count in pages]

    @property
    def free(self) -> int:
        claimed_free = [kind.claimed_free * self.pages_of[k] for k, kind in enumerate(self.kinds)]
        return len(self.stack) * self.per_sector + sum(claimed_free)

    def fits(self, counts: list[int]) -> bool:
        """True if `counts[k]` blocks of each kind k are there."""
        return sum([kind.short(counts[k]) for k, kind in enumerate(self.kinds)]) <= len(self.stack)

    def pages(self, kind: int, blocks: list[int]) -> list[int]:
        """Return the pages of these blocks of a kind, in the same order."""
        count = self.pages_of[kind]
        return blocks if count == 1 else [block * count + i for block in blocks for i in range(count)]

    def reclaim(self) -> None:
        for kind in self.kinds:
            kind.reclaim()

    def order(self) -> list[int]:
        """Return the free pages: those of claimed sectors, kind by kind; then the others."""
        claimed_free: list[int] = []
        for k, kind in enumerate(self.kinds):
            for blocks in kind.trees.values():
                claimed_free += self.pages(k, blocks)
        per = self.per_sector
        return [*claimed_free, *[sector * per + i for sector in reversed(self.stack) for i in reversed(range(per))]]

    def check(self) -> None:
        """Raise AssertionError unless every kind's counts agree and no sector is claimed by two."""
        claimed: set[int] = set()
        for kind in self.kinds:
            kind.check()
            assert not claimed & kind.trees.keys(), ("a sector of two kinds", claimed & kind.trees.keys())
            claimed |= kind.trees.keys()


@mypyc_attr(allow_interpreted_subclasses=True)
class SectorPool(BlockPool):
    """A pool whose cached blocks are evicted all at once or not at all. Blocks without keys may be shared, too."""

    def __init__(self, block_size: int, num_blocks: int, sectors: Sectors, observer: Observer = NULL_OBSERVER) -> None:
        super().__init__(block_size, num_blocks, sectors, observer)
        self.sectors = sectors

    @property
    def free(self) -> int:
        return self.sectors.ready + len(self.sectors.cached)

    @property
    def ready(self) -> int:
        return self.sectors.ready

    def evict_all(self) -> bool:
        """Remove the key of every cached block. Return False if there is none."""
        blocks = self.sectors.evict()
        for block in blocks:
            self._forget(block)
        if blocks:
            self._observer.evicted(blocks)
        return bool(blocks)

    def grow_each(self, requests: list[Request]) -> Listed:
        if self.sectors.per == 1:
            return super().grow_each(requests)
        return tuple([self.grow(request, 1)[0] for request in requests])  # several taken at once come in another order

    def share(self, request: Request, sample: Request, blocks: int) -> None:
        """Make the first `blocks` blocks of a request the head of the table of another of the same text, whether they
        have keys or not. Those that have none get them when a row of either completes.
        """
        table = self.tables[request][:blocks]
        if table:
            request.name_all()
            sample.name_all()
        for i, block in enumerate(table):
            if i < request.hashed:
                self._register(block, self.key(request, i))
            self._refs.setdefault(block, 1)
            self._acquire(block)
        self.tables[sample] = table
        sample.hash_to(min(blocks, request.hashed))

    def release(self, request: Request, *, returns: bool = False) -> int:
        """Free a table. A request that will come back does not find its own blocks: their keys are removed, but for
        those of blocks that other requests share.
        """
        table = self.tables.pop(request, [])
        reusable: list[int] = []
        plain: list[int] = []
        for i, block in enumerate(table):
            if self._drop(block):
                if returns:
                    self._forget(block)
                has_content = not returns and (i < request.hashed or block in self._key_of)
                (reusable if has_content else plain).append(block)
        self._free.give([*reusable, *plain], len(reusable))
        self._observer.released(request, table)
        return len(table)

    def check(self) -> None:
        super().check()
        self.sectors.check()


class HostSectors(KindSectors):
    """The sectors of the host's memory; `num_blocks` counts pages. Blocks of a table are in order of their numbers."""

    def __init__(self, num_pages: int, pages: Sequence[int], per_sector: int) -> None:
        super().__init__(range(num_pages // per_sector), pages, per_sector)
        self.num_blocks = num_pages

    def take(self, counts: list[int]) -> list[list[int]] | None:
        """Take blocks for each table, or return None. Sectors are reclaimed only if there are too few."""
        if not self.fits(counts):
            self.reclaim()
            if not self.fits(counts):
                return None
        return [sorted(self.kinds[k].take(count)) for k, count in enumerate(counts)]

    def give(self, tables: list[list[int]]) -> None:
        for k, blocks in enumerate(tables):
            self.kinds[k].give(blocks, 0)
