"""What lies in every block of a cache of layer groups, by plans alone: each row finds there what its layers see, or the
state behind the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

from cbsim.kv.group_tables import NULL_BLOCK, TablePool
from cbsim.kv.layer_groups import keeps_state
from cbsim.kv.table_pools import FilledPool
from cbsim.policy.groups import Attention, LayerGroup, Sight, pages_of
from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import DEVICE, Transfer
from support.contents import Token, said
from support.helpers import Ask, Drive, Executor


def sliding(span: int) -> Attention:
    return Attention(Sight.SLIDING, span)


class GroupExecutor(Executor):
    """An executor that knows pages and tables from plans. Rows write their tokens into every group, and find there what
    the group sees; with `rings`, they read what is before them first, for they write over the oldest. `groups` are the
    true ones, whatever a scheduler takes them for.
    """

    def __init__(self, workload: Sequence[Ask], groups: Sequence[LayerGroup], *, rings: bool) -> None:
        super().__init__(workload)
        self.groups, self.rings = groups, rings
        self.pages = pages_of(groups) if rings else [1] * len(groups)
        self.group_tables: dict[tuple[RequestSpec, int], list[int | None]] = {}
        self.asks = {ask.spec: ask for ask in workload}
        self.held: dict[tuple[str, int], dict[int, tuple[int, Token]]] = {}  # page -> place in it -> group and token
        self.states: dict[int, tuple[int, list[Token]]] = {}  # block -> group and tokens that its state stands for
        self.states_found = self.states_within = 0
        self.moves: list[Transfer] = []
        self.went_round = self.replaced = self.passed = 0

    def rows(self, plan: StepPlan) -> list[Row]:
        for spec in [*plan.changes.ended, *(lost.spec for lost in plan.changes.preempted)]:
            for group in range(len(self.groups)):
                self.group_tables.pop((spec, group), None)
        for change in plan.tables:
            table = self.group_tables.setdefault((change.spec, change.group), [None] * change.passed)
            table[: change.passed] = [None] * change.passed
            for index, block in change.replaced:
                table[index] = block
                self.replaced += 1
            table += change.blocks
            self.passed += change.passed
        for move in plan.transfers:
            self.moves.append(move)
            for source, target in zip(move.read, move.written, strict=True):
                self.held[target] = dict(self.held[source])
        rows = super().rows(plan)
        assert not any(row.blocks for row in rows), "rows list no blocks"
        with_state = [number for number, group in enumerate(self.groups) if keeps_state(group)]
        for look in (self._find_state, self._leave_states):  # rows of a step run side by side
            for row in rows:
                for number in with_state:
                    look(row, number)
        for act in (self._read, self._write) if self.rings else (self._write, self._read):
            for row in rows:
                for number, group in enumerate(self.groups):
                    if number not in with_state:
                        act(row, number, group)
        return rows

    def _state_at(self, row: Row, number: int, tokens: int) -> int:
        """The block that the table has for the state behind so many tokens; NULL_BLOCK if it has none."""
        return self.group_tables[row.spec, number][(tokens - 1) // self.groups[number].block_size] or NULL_BLOCK

    def _find_state(self, row: Row, number: int) -> None:
        if row.start:
            block = self._state_at(row, number, row.start)
            wanted = number, [said(self.asks, row.spec, at) for at in range(row.start)]
            assert self.states.get(block) == wanted, (row.spec.id, f"group {number}, state behind {row.start}")
            self.states_found += 1

    def _leave_states(self, row: Row, number: int) -> None:
        """A state behind the row, and if the table has another block for it, behind the last boundary within."""
        end, size = row.start + row.tokens, self.groups[number].block_size
        ends = [end, boundary] if (boundary := (end - 1) // size * size) >= row.start + size else [end]
        for tokens in ends:
            block = self._state_at(row, number, tokens)
            assert block != NULL_BLOCK or tokens < end, (row.spec.id, f"group {number}", "no block for its state")
            if block != NULL_BLOCK:
                self.states[block] = number, [said(self.asks, row.spec, at) for at in range(tokens)]
                self.states_within += tokens < end

    def _places(self, row: Row, number: int, at: int) -> list[dict[int, tuple[int, Token]]]:
        group, table = self.groups[number], self.group_tables[row.spec, number]
        index, count = at // group.block_size, self.pages[number]
        self.went_round += bool(group.ring and index >= group.ring)
        block = table[index % group.ring if group.ring else index]
        assert block is not None, (row.spec.id, f"group {number}, place {at}", "is no longer there")
        return [self.held.setdefault((DEVICE, block * count + i), {}) for i in range(count)]

    def _read(self, row: Row, number: int, group: LayerGroup) -> None:
        for at in range(group.attention.gone(row.start), row.start + (0 if self.rings else row.tokens)):
            for page in self._places(row, number, at):
                wanted = number, said(self.asks, row.spec, at)
                found = page.get(at % group.block_size)
                assert found == wanted, (row.spec.id, f"group {number}, place {at}", found, wanted)

    def _write(self, row: Row, number: int, group: LayerGroup) -> None:
        for at in range(row.start, row.start + row.tokens):
            for page in self._places(row, number, at):
                page[at % group.block_size] = number, said(self.asks, row.spec, at)


class GroupDrive(Drive):
    """A run whose rows look into the blocks; accounts are checked after every effect."""

    def __init__(
        self, scheduler: object, workload: Sequence[Ask], depth: int, groups: Sequence[LayerGroup] | None = None
    ) -> None:
        super().__init__(scheduler, workload, depth)
        pool = self.scheduler.pool
        self.inside = self.executor = GroupExecutor(workload, groups or pool.groups, rings=isinstance(pool, FilledPool))
        self.on_step = self._counted

    def _counted(self, plan: StepPlan, rows: list[Row]) -> None:
        pool, tables = self.scheduler.pool, self.inside.group_tables
        assert isinstance(pool, TablePool)
        requests = [self.scheduler.requests[row.spec] for row in rows]
        assert plan.counts.table_blocks == sum(pool.allocated(request) for request in requests)
        assert plan.counts.free_blocks == pool.free
        for request in requests:
            known = [[b for b in tables[request.spec, g] if b is not None] for g in range(len(pool.groups))]
            known = [[b for b in t if b or not keeps_state(g)] for t, g in zip(known, pool.groups, strict=True)]
            assert known == pool.tables_of(request)
            ends = [end for _, end in pool.spans(request)]
            rings = [
                group.ring
                for group, pages in zip(pool.groups, self.inside.pages, strict=True)
                for _ in range(0 if keeps_state(group) else pages)
            ]
            assert all(end >= request.computed or ring for end, ring in zip(ends, rings, strict=True))
