"""Block tables by layer group, shared by the pools of vLLM (group_pool.py) and transformers (table_pools.py).

A request has a table for each group. Rows list no blocks: plans report what changed of every table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbsim.kv.blocks import BlockPool, FreeList
from cbsim.policy.groups import LayerGroup, TableChange
from cbsim.policy.observer import Observer
from cbsim.policy.plan import Chunk
from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr

NULL_BLOCK = 0  # in a table: a block that no later token sees
UNREPORTED = -1


class Table:
    """The table of a request in a group: `passed` null blocks, then its own. The leading `named` entries have a key, if
    they get any. Plans have reported `reported` entries, `reported_passed` of them passed; since then `fresh` pages
    were handed out for it, and the entries in `replaced` became other blocks.
    """

    __slots__ = ("blocks", "fresh", "named", "passed", "replaced", "reported", "reported_passed")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.passed = blocks.count(NULL_BLOCK)
        self.named = len(blocks)
        self.reported = UNREPORTED
        self.reported_passed = self.fresh = 0
        self.replaced: list[tuple[int, int]] = []  # (entry, block)

    @property
    def live(self) -> list[int]:
        return self.blocks[self.passed :]

    def change(self, request: Request, group: int) -> TableChange | None:
        """Return what plans have not reported yet, and mark it as reported; None if there is nothing."""
        first, passed = self.reported, self.passed
        if first == len(self.blocks) and self.reported_passed == passed and not self.replaced:
            return None
        blocks = self.blocks[passed if first == UNREPORTED else first :]
        change = TableChange(request.spec, group, passed, tuple(blocks), tuple(self.replaced))
        self.reported, self.reported_passed = len(self.blocks), passed
        self.fresh = 0
        if self.replaced:
            self.replaced = []
        return change


class StateTable(Table):
    """The table of a request in a group of states. Null blocks are also between its own."""

    __slots__ = ()

    @property
    def live(self) -> list[int]:
        return [block for block in self.blocks[self.passed :] if block != NULL_BLOCK]


class Tables:
    """The tables of a request, one a group, with `count` pages in all. Windows keep bounds up to which nothing changes:
    there is `room` for so many tokens, a block passes when `passes_at` are computed, keys are due at `named_at`.
    """

    __slots__ = ("count", "groups", "named_at", "passes_at", "room")

    def __init__(self, groups: list[Table]) -> None:
        self.groups = groups
        self.count = sum([len(table.live) for table in groups])
        self.room = self.passes_at = self.named_at = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class TablePool(BlockPool):
    """A pool whose requests have a table in each group."""

    def __init__(
        self, groups: Sequence[LayerGroup], block_size: int, num_blocks: int, free: FreeList, observer: Observer
    ) -> None:
        super().__init__(block_size, num_blocks, free, observer)
        self.groups = tuple(groups)
        self._none = Tables([Table([]) for _ in groups])
        self._tables: dict[Request, Tables] = {}
        self._changed: dict[Request, None] = {}  # since the plan before

    def group_tables(self, request: Request) -> list[Table]:
        """Return the tables of a request; empty ones if it has no blocks."""
        return self._tables.get(request, self._none).groups

    def tables_of(self, request: Request) -> list[list[int]]:
        return [table.live for table in self.group_tables(request)]

    def allocated(self, request: Request) -> int:
        """Return the pages of a request in all groups."""
        return self._tables.get(request, self._none).count

    def live_tables(self) -> list[list[int]]:
        return [table.live for tables in self._tables.values() for table in tables.groups]

    def _open(self, request: Request, groups: list[Table]) -> Tables:
        """Give a request these tables."""
        self.tables[request] = []  # rows list no blocks
        self._changed[request] = None
        tables = self._tables[request] = Tables(groups)
        return tables

    def _close(self, request: Request) -> Tables:
        """Remove the tables of a request and return them."""
        self.tables.pop(request, None)
        self._changed.pop(request, None)
        return self._tables.pop(request, self._none)

    def table_changes(self, step: int, rows: Mapping[Request, Chunk]) -> tuple[TableChange, ...]:
        changes: list[TableChange] = []
        self.fresh = 0
        for request in self._changed:
            for g, table in enumerate(self._tables[request].groups):
                fresh = table.fresh
                if change := table.change(request, g):
                    changes.append(change)
                    self.fresh += fresh
        self._changed = {}
        return tuple(changes)

    def check(self) -> None:
        super().check()
        self._check_tables()

    def _check_tables(self) -> None:
        assert self.tables.keys() == self._tables.keys(), "requests with tables for rows and for groups"
        for request, tables in self._tables.items():
            for g, table in enumerate(tables.groups):
                at = request.spec.id, g
                assert table.blocks[: table.passed] == [NULL_BLOCK] * table.passed, (*at, "null blocks", table.blocks)
                assert table.reported <= len(table.blocks), (*at, "more reported than there is", table.reported)
