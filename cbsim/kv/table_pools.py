"""Block tables of layer groups as transformers keeps them: they are filled from the front, and nothing leaves one.

Tables of layers that see all grow with the sequence. Those of layers with windows are rings: they stop growing where a
window is covered, and further tokens overwrite the oldest. Rows list no blocks: plans tell what changed.

`RingPool` is 5.17's: groups of as many layers each, over one free list. `KindPool` is 5.23's: a group for each kind of
layers, over sectors that every kind cuts in blocks of its own size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbsim.kv.blocks import BlockPool, FreeList
from cbsim.kv.sectors import KindSectors
from cbsim.policy.groups import LayerGroup, TableChange, pages_of
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Chunk
from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr


class GroupTables:
    """The tables of a request, one a group, and what plans have told of them."""

    __slots__ = ("blocks", "fresh", "new", "replaced", "told")

    def __init__(self, groups: int) -> None:
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.new = True  # no plan has told of them
        self.told = [0] * groups  # entries
        self.replaced: list[list[tuple[int, int]]] = [[] for _ in range(groups)]  # among those told
        self.fresh = 0  # blocks handed out since

    def tell(self, request: Request) -> list[TableChange]:
        """What plans have to tell; from now on they have."""
        changes: list[TableChange] = []
        for g, table in enumerate(self.blocks):
            added, replaced = table[self.told[g] :], self.replaced[g]
            if added or replaced or self.new:
                changes.append(TableChange(request.spec, g, 0, tuple(added), tuple(replaced)))
                self.told[g] = len(table)
                self.replaced[g] = []
        self.new = False
        self.fresh = 0
        return changes


@mypyc_attr(allow_interpreted_subclasses=True)
class TablePool(BlockPool):
    """What both have in common. `num_pages` are there, of which blocks of all groups are made."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        num_pages: int,
        free: FreeList,
        observer: Observer,
    ) -> None:
        super().__init__(block_size, num_pages, free, observer)
        self.groups = tuple(groups)
        self.pages_of = pages_of(groups)
        self._full = [g for g, group in enumerate(groups) if not group.ring]
        self._held: dict[Request, GroupTables] = {}
        self._changed: dict[Request, None] = {}  # since plans have told last

    def tables_of(self, request: Request) -> list[list[int]]:
        held = self._held.get(request)
        return held.blocks if held else [[] for _ in self.groups]

    def allocated(self, request: Request) -> int:
        return sum([len(table) * self.pages_of[g] for g, table in enumerate(self.tables_of(request))])

    def entries(self, request: Request) -> int:
        return max([len(table) for table in self.tables_of(request)])

    def pages(self, group: int, blocks: list[int]) -> list[int]:
        count = self.pages_of[group]
        return blocks if count == 1 else [block * count + i for block in blocks for i in range(count)]

    def spans(self, request: Request) -> list[tuple[int, int]]:
        """A ring reaches as far back as it is long."""
        size, spans = self.block_size, list[tuple[int, int]]()
        for g, table in enumerate(self.tables_of(request)):
            end = len(table) * size
            behind = max(0, request.computed - end) if self.groups[g].ring else 0
            spans += [(behind, behind + end)] * self.pages_of[g]
        return spans

    def live_tables(self) -> list[list[int]]:
        return [self.pages(g, table) for held in self._held.values() for g, table in enumerate(held.blocks)]

    def _open(self, request: Request) -> GroupTables:
        """The tables of a request, which is about to be given something."""
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = GroupTables(len(self.groups))
            self.tables[request] = []  # rows list no blocks
        self._changed[request] = None
        return held

    def _close(self, request: Request) -> list[list[int]]:
        """It has no tables any more. Returns those that it had."""
        self.tables.pop(request, None)
        self._changed.pop(request, None)
        held = self._held.pop(request, None)
        return held.blocks if held else [[] for _ in self.groups]

    def tell(self, step: int, rows: Mapping[Request, Chunk]) -> tuple[TableChange, ...]:
        del step, rows
        changes: list[TableChange] = []
        self.fresh = 0
        for request in self._changed:
            held = self._held[request]
            self.fresh += held.fresh
            changes += held.tell(request)
        self._changed = {}
        return tuple(changes)

    def check(self) -> None:
        super().check()
        assert self.tables.keys() == self._held.keys(), "who rows and groups say holds something"
        for request, held in self._held.items():
            lengths = [len(table) for table in held.blocks]
            for g, group in enumerate(self.groups):
                most = min(max(lengths), group.ring) if group.ring else max(lengths)
                assert lengths[g] == most, (request.spec.id, "tables of other lengths than their groups'", lengths)
                assert held.told[g] <= lengths[g], (request.spec.id, "told of more than there is", held.told, lengths)


@mypyc_attr(allow_interpreted_subclasses=True)
class RingPool(TablePool):
    """Full blocks of layers that see all get keys, group by group; no lookup finds them, but duplicates are merged."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        num_blocks: int,
        free: FreeList,
        observer: Observer = NULL_OBSERVER,
    ) -> None:
        super().__init__(groups, block_size, num_blocks, free, observer)

    def in_groups(self, count: int, have: int = 0) -> int:
        return sum([max(0, min(have + count, g.ring) - have) if g.ring else count for g in self.groups])

    def grow(self, request: Request, count: int) -> list[int]:
        held, have = self._open(request), self.entries(request)
        self._observer.growing(request, self.in_groups(count, have))
        for g, group in enumerate(self.groups):
            added = max(0, min(have + count, group.ring) - have) if group.ring else count
            self._lengthen(request, held, g, added)
        return []

    def _lengthen(self, request: Request, held: GroupTables, group: int, count: int) -> None:
        blocks = self._free.take(count)
        for block in blocks:
            self._forget(block)
        held.blocks[group] += blocks
        held.fresh += count
        self._observer.grew(request, blocks)

    def fan_out(self, request: Request, samples: list[Request], whole: int) -> None:
        """Group by group, in each sample by sample. Rings are not shared."""
        tables = self.tables_of(request)
        helds = [self._open(sample) for sample in samples]
        for g, group in enumerate(self.groups):
            head = [] if group.ring else tables[g][:whole]
            for i, block in enumerate(head):
                self._register(block, self._key(request, i, g))
            for held in helds:
                for block in head:
                    self._acquire(block)
                held.blocks[g] += head
            for i, sample in enumerate(samples):
                self._lengthen(sample, helds[i], g, len(tables[g]) - len(head))
        for sample in samples:
            sample.hash_to(whole)

    def unshared(self, request: Request, whole: int) -> int:
        return self.allocated(request) - whole * len(self._full)

    def _key(self, request: Request, block: int, group: int) -> int:
        return self.key(request, block) * len(self.groups) + group

    def merge(self, request: Request, blocks: int) -> list[tuple[int, int]]:
        """What is replaced is told with the tables."""
        held = self._held[request]
        for g in self._full:
            replaced = self._merge(request, held.blocks[g], request.hashed, min(blocks, request.named), g)
            told = held.told[g]
            held.replaced[g] += [(i, block) for i, block in replaced if i < told]
            if replaced:
                self._changed[request] = None
        request.hash_to(blocks)
        return []

    def release(self, request: Request, *, returns: bool = False) -> int:
        """Group by group. Who returns recomputes everything, and finds its blocks when theirs fill again."""
        held, tables = self.allocated(request), self._close(request)
        for g, table in enumerate(tables):
            hashed = 0 if self.groups[g].ring else request.hashed
            if returns:
                for i in range(hashed):
                    self._register(table[i], self._key(request, i, g))
            self._give_back(table, hashed)
            self._observer.released(request, table)
        if returns:
            request.name_all()
        return held


@mypyc_attr(allow_interpreted_subclasses=True)
class KindPool(TablePool):
    """Nothing has a key. Blocks of layers that see all may be shared, rings never."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        num_pages: int,
        sectors: KindSectors,
        observer: Observer = NULL_OBSERVER,
    ) -> None:
        super().__init__(groups, block_size, num_pages, sectors, observer)
        self.sectors = sectors

    @property
    def ready(self) -> int:
        return self.sectors.free

    def reclaim(self) -> None:
        self.sectors.reclaim()

    def evict_all(self) -> bool:
        """Nothing is cached."""
        return False

    def lacks(self, request: Request, tokens: int) -> list[int]:
        """Blocks of each group that a request lacks to hold its first `tokens` tokens, or as many as the group sees."""
        lengths = [len(table) for table in self.tables_of(request)]
        return [max(0, count - lengths[g]) for g, count in enumerate(self.counts(tokens))]

    def counts(self, tokens: int) -> list[int]:
        """Blocks of each group of a request of so many tokens."""
        blocks = self.blocks_for(tokens)
        return [min(blocks, group.ring) if group.ring else blocks for group in self.groups]

    def store(self, request: Request, counts: list[int]) -> bool:
        """Add so many blocks to its tables, or none if there are not enough."""
        if not self.sectors.fits(counts):
            return False
        if any(counts):
            self._lengthen(request, counts)
        return True

    def _lengthen(self, request: Request, counts: list[int]) -> None:
        held = self._open(request)
        for g, count in enumerate(counts):
            self._observer.growing(request, count)
            blocks = self.sectors.take_of(g, count)
            held.blocks[g] += blocks
            held.fresh += count * self.pages_of[g]
            self._observer.grew(request, blocks)

    def forks(self, request: Request, whole: int) -> list[int]:
        """Blocks of each group that a sample needs of its own, beside the first `whole` of groups that see all."""
        tables = self.tables_of(request)
        return [len(table) if self.groups[g].ring else len(table) - whole for g, table in enumerate(tables)]

    def fan_out(self, request: Request, samples: list[Request], whole: int) -> None:
        """Sample by sample, for each of which there is room."""
        for sample in samples:
            held = self._open(sample)
            for g in self._full:
                head = self.tables_of(request)[g][:whole]
                for block in head:
                    self._refs[block] = self._refs.get(block, 1) + 1
                held.blocks[g] += head
            self._lengthen(sample, self.forks(request, whole))

    def release(self, request: Request, *, returns: bool = False) -> int:
        del returns
        held = self.allocated(request)
        for g, table in enumerate(self._close(request)):
            self.sectors.give_to(g, table if self.groups[g].ring else [b for b in table if self._drop(b)])
            self._observer.released(request, table)
        return held

    def _drop(self, block: int) -> bool:
        refs = self._refs.pop(block, 1) - 1
        if refs > 1:
            self._refs[block] = refs
        return not refs

    def check(self) -> None:
        self.sectors.check()
        users: dict[int, int] = {}
        for held in self._held.values():
            for g in self._full:
                for block in held.blocks[g]:
                    users[block] = users.get(block, 0) + 1
        shared = {block: count for block, count in users.items() if count > 1}
        assert shared == self._refs, ("references", shared, self._refs)
        used = {page for table in self.live_tables() for page in table}
        free = self.sectors.order()
        assert not used & {*free}, ("in use and free", used & {*free})
        assert len(used) + len(free) == self.num_blocks, ("pages lost", len(used), len(free), self.num_blocks)
        assert self.free == len(free), ("free pages", self.free, len(free))
