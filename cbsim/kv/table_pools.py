"""Block tables of layer groups as transformers fills them: from the front, and no block leaves one.

Tables of layers that see all grow with the sequence. Those of layers with windows are rings: they stop growing where a
window is covered, and further tokens overwrite the oldest.

`RingPool` is 5.17's: groups of as many layers each, over one free list. `KindPool` is 5.23's: a group for each kind of
layers, over sectors that every kind cuts in blocks of its own size.
"""

from __future__ import annotations

from collections.abc import Sequence

from cbsim.kv.blocks import FreeList, FreeQueue
from cbsim.kv.group_tables import Table, TablePool, Tables
from cbsim.kv.sectors import KindSectors
from cbsim.policy.groups import LayerGroup, pages_of
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class FilledPool(TablePool):
    """The common part of both pools. There are `num_pages` pages, of which blocks of all groups are made."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        num_pages: int,
        free: FreeList,
        observer: Observer = NULL_OBSERVER,
    ) -> None:
        super().__init__(groups, block_size, num_pages, free, observer)
        self.pages_of = pages_of(groups)
        self._full = [g for g, group in enumerate(groups) if not group.ring]

    def entries(self, request: Request) -> int:
        return max([len(table.blocks) for table in self.group_tables(request)])

    def pages(self, group: int, blocks: list[int]) -> list[int]:
        count = self.pages_of[group]
        return blocks if count == 1 else [block * count + i for block in blocks for i in range(count)]

    def spans(self, request: Request) -> list[tuple[int, int]]:
        """Return the span of each table; a ring reaches as far back as it is long."""
        size, spans = self.block_size, list[tuple[int, int]]()
        for g, table in enumerate(self.group_tables(request)):
            end = len(table.blocks) * size
            behind = max(0, request.computed - end) if self.groups[g].ring else 0
            spans += [(behind, behind + end)] * self.pages_of[g]
        return spans

    def live_tables(self) -> list[list[int]]:
        tables = self._tables.values()
        return [self.pages(g, table.blocks) for each in tables for g, table in enumerate(each.groups)]

    def _growing(self, request: Request) -> Tables:
        """Return the tables of a request that is about to get blocks, opening them if it has none."""
        self._changed[request] = None
        return self._tables.get(request) or self._open(request, [Table([]) for _ in self.groups])

    def _add(self, request: Request, tables: Tables, group: int, blocks: list[int], *, fresh: bool) -> None:
        pages, table = len(blocks) * self.pages_of[group], tables.groups[group]
        table.blocks += blocks
        tables.count += pages
        if fresh:
            table.fresh += pages
            self._observer.grew(request, blocks)

    def _check_tables(self) -> None:
        super()._check_tables()
        for request, tables in self._tables.items():
            lengths = [len(table.blocks) for table in tables.groups]
            for g, group in enumerate(self.groups):
                most = min(max(lengths), group.ring) if group.ring else max(lengths)
                assert lengths[g] == most, (request.spec.id, "tables of other lengths than their groups'", lengths)


@mypyc_attr(allow_interpreted_subclasses=True)
class RingPool(FilledPool):
    """A pool in which full blocks of layers that see all get keys, group by group: never found, but merged."""

    def in_groups(self, count: int, have: int = 0) -> int:
        return sum([_added(group, count, have) for group in self.groups])

    def grow(self, request: Request, count: int) -> list[int]:
        tables, have = self._growing(request), self.entries(request)
        self._observer.growing(request, self.in_groups(count, have))
        for g, group in enumerate(self.groups):
            self._lengthen(request, tables, g, _added(group, count, have))
        return []

    def _lengthen(self, request: Request, tables: Tables, group: int, count: int) -> None:
        blocks = self._free.take(count)
        for block in blocks:
            self._forget(block)
        self._add(request, tables, group, blocks, fresh=True)

    def fan_out(self, request: Request, samples: list[Request], whole: int) -> None:
        """Fill the samples' tables group by group, and in each group sample by sample. Rings are not shared."""
        own = self.group_tables(request)
        opened = [self._growing(sample) for sample in samples]
        for g, group in enumerate(self.groups):
            head = [] if group.ring else own[g].blocks[:whole]
            for i, block in enumerate(head):
                self._register(block, self._key(request, i, g))
            for i, sample in enumerate(samples):
                for block in head:
                    self._acquire(block)
                self._add(sample, opened[i], g, head, fresh=False)
            for i, sample in enumerate(samples):
                self._lengthen(sample, opened[i], g, len(own[g].blocks) - len(head))
        for sample in samples:
            sample.hash_to(whole)

    def unshared(self, request: Request, whole: int) -> int:
        return self.allocated(request) - whole * len(self._full)

    def _key(self, request: Request, block: int, group: int) -> int:
        return self.key(request, block) * len(self.groups) + group

    def merge(self, request: Request, blocks: int) -> list[tuple[int, int]]:
        """Merge as in `BlockPool`, but report replaced blocks with the tables and return none."""
        for g in self._full:
            table = self.group_tables(request)[g]
            replaced = self._merge(request, table.blocks, request.hashed, min(blocks, request.named), g)
            table.replaced += [(i, block) for i, block in replaced if i < table.reported]
            if replaced:
                self._changed[request] = None
        request.hash_to(blocks)
        return []

    def release(self, request: Request, *, returns: bool = False) -> int:
        """Free the tables group by group. A request that returns recomputes all, and finds its blocks as it does."""
        tables = self._close(request)
        for g, table in enumerate(tables.groups):
            hashed = 0 if self.groups[g].ring else request.hashed
            if returns:
                for i in range(hashed):
                    self._register(table.blocks[i], self._key(request, i, g))
            self._give_back(table.blocks, hashed)
            self._observer.released(request, table.blocks)
        if returns:
            request.name_all()
        return tables.count


def _added(group: LayerGroup, count: int, have: int) -> int:
    """Return how many blocks a table of `have` entries gets when the sequence gets `count` more."""
    return max(0, min(have + count, group.ring) - have) if group.ring else count


@mypyc_attr(allow_interpreted_subclasses=True)
class KindPool(FilledPool):
    """A pool without keys. Blocks of layers that see all may be shared, rings never."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        num_pages: int,
        sectors: KindSectors,
        observer: Observer = NULL_OBSERVER,
    ) -> None:
        super().__init__(groups, block_size, num_pages, FreeQueue((), unhashed_first=True), observer)
        self.sectors = sectors

    @property
    def free(self) -> int:
        return self.sectors.free

    @property
    def ready(self) -> int:
        return self.sectors.free

    def evict_all(self) -> bool:
        """Return False: nothing is cached."""
        return False

    def lacks(self, request: Request, tokens: int) -> list[int]:
        """Return the blocks of each group that a request lacks for its first `tokens` tokens, up to its ring."""
        tables = self.group_tables(request)
        return [max(0, count - len(tables[g].blocks)) for g, count in enumerate(self.counts(tokens))]

    def counts(self, tokens: int) -> list[int]:
        """Return the blocks of each group of a request of `tokens` tokens."""
        blocks = self.blocks_for(tokens)
        return [min(blocks, group.ring) if group.ring else blocks for group in self.groups]

    def store(self, request: Request, counts: list[int]) -> bool:
        """Add `counts[g]` blocks to the table of each group g; or none, and return False, if there are not enough."""
        if not self.sectors.fits(counts):
            return False
        if any(counts):
            self._lengthen(request, counts)
        return True

    def _lengthen(self, request: Request, counts: list[int]) -> None:
        tables = self._growing(request)
        for g, count in enumerate(counts):
            self._observer.growing(request, count)
            self._add(request, tables, g, self.sectors.kinds[g].take(count), fresh=True)

    def own_blocks(self, request: Request, whole: int) -> list[int]:
        """Return each group's blocks for a sample, beside the first `whole` shared in groups that see all."""
        lengths = [len(table.blocks) for table in self.group_tables(request)]
        return [count if self.groups[g].ring else count - whole for g, count in enumerate(lengths)]

    def fan_out(self, request: Request, samples: list[Request], whole: int) -> None:
        """Fill the samples' tables sample by sample; there is room for each."""
        for sample in samples:
            tables = self._growing(sample)
            for g in self._full:
                head = self.group_tables(request)[g].blocks[:whole]
                for block in head:
                    self._refs[block] = self._refs.get(block, 1) + 1
                self._add(sample, tables, g, head, fresh=False)
            self._lengthen(sample, self.own_blocks(request, whole))

    def release(self, request: Request, *, returns: bool = False) -> int:
        tables = self._close(request)
        for g, table in enumerate(tables.groups):
            ring = self.groups[g].ring > 0
            self.sectors.kinds[g].give(table.blocks if ring else [b for b in table.blocks if self._drop(b)], 0)
            self._observer.released(request, table.blocks)
        return tables.count

    def check(self) -> None:
        self.sectors.check()
        self._check_tables()
        users: dict[int, int] = {}
        for tables in self._tables.values():
            for g in self._full:
                for block in tables.groups[g].blocks:
                    users[block] = users.get(block, 0) + 1
        shared = {block: count for block, count in users.items() if count > 1}
        assert shared == self._refs, ("references", shared, self._refs)
        used = {page for table in self.live_tables() for page in table}
        free = self.sectors.order()
        assert not used & {*free}, ("in use and free", used & {*free})
        assert len(used) + len(free) == self.num_blocks, ("pages lost", len(used), len(free), self.num_blocks)
        assert self.free == len(free), ("free pages", self.free, len(free))
