"""A block pool of several groups of layers over one free queue, as vLLM 0.33 has it.

Every group has a table of its own for a request; a block belongs to the group that took it, and so does its key. What a
group no longer sees of a sequence leaves its table when the request is given its next blocks; in the place of such a
block stays none. Rows list no blocks: plans tell what changed of every table (`tell`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbsim.kv.blocks import BlockPool, FreeList
from cbsim.kv.layer_groups import NOBODYS, Found, GroupIndex, rules
from cbsim.policy.groups import LayerGroup, TableChange
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Chunk
from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr

NOTHING_FOUND = Found(0, 0, [])
UNTOLD = -1


class GroupTable:
    """The table of a request in a group: `passed` entries of nobody, then its blocks. Of the leading `named` ones it is
    decided whether they have a key. Plans have told of `told` entries, `told_passed` of them passed.
    """

    __slots__ = ("blocks", "fresh", "named", "passed", "told", "told_passed")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.passed = blocks.count(NOBODYS)
        self.named = len(blocks)
        self.told = UNTOLD
        self.told_passed = 0
        self.fresh = 0  # blocks handed out since plans have told last

    @property
    def live(self) -> list[int]:
        return self.blocks[self.passed :]


class Holding:
    """What a request holds: its `tables`, one a group, `count` blocks in all; and up to where nothing changes: tables
    have room for `room` tokens, a block leaves one when `leaves_at` are computed, keys are due at `named_at`.
    """

    __slots__ = ("count", "leaves_at", "named_at", "room", "tables")

    def __init__(self, tables: list[GroupTable]) -> None:
        self.tables = tables
        self.count = sum([len(table.blocks) - table.passed for table in tables])
        self.room = self.leaves_at = self.named_at = 0


NOTHING_HELD = Holding([])


@mypyc_attr(allow_interpreted_subclasses=True)
class GroupPool(BlockPool):
    """A pool of these groups. `retention`: which blocks of sliding groups stay findable (group_rules.py). A request has
    `longest` tokens at most, of which steps in flight compute `most_in_flight`.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        block_size: int,
        num_blocks: int,
        free: FreeList,
        observer: Observer = NULL_OBSERVER,
        *,
        retention: int | None = 0,
        most_in_flight: int,
        longest: int,
    ) -> None:
        super().__init__(block_size, num_blocks, free, observer)
        self.groups = tuple(groups)
        self.rules = rules(groups, retention=retention, in_flight=most_in_flight, longest=longest)
        self.junctions: dict[Request, int] = {}  # tokens of the longest prefix that only some groups had
        self._finder = GroupIndex(self.rules, self._index)
        self._found = NOTHING_FOUND
        self._holdings: dict[Request, Holding] = {}
        self._changed: dict[Request, None] = {}  # since plans have told last
        self._steps: dict[int, list[tuple[Request, int]]] = {}  # in flight, with the tokens of their rows
        self._in_flight: dict[Request, int] = {}  # tokens of rows whose result is not there

    # -- what is there ------------------------------------------------------------------------------------------------

    def holding(self, request: Request) -> list[GroupTable]:
        """The tables of a request, one a group; none if it holds nothing."""
        return self._holdings.get(request, NOTHING_HELD).tables

    def tables_of(self, request: Request) -> list[list[int]]:
        return [table.live for table in self.holding(request)]

    def allocated(self, request: Request) -> int:
        """Blocks of a request in all groups."""
        return self._holdings.get(request, NOTHING_HELD).count

    def spans(self, request: Request) -> list[tuple[int, int]]:
        tables = self.holding(request)
        sizes = [rule.block_size for rule in self.rules]
        return [(table.passed * sizes[g], len(table.blocks) * sizes[g]) for g, table in enumerate(tables)]

    def in_flight(self, request: Request) -> int:
        """Tokens of its rows whose result is not there, also of those that will be dropped."""
        return self._in_flight.get(request, 0)

    def keyed_in_groups(self) -> list[int]:
        """Blocks whose content a request could find, by group."""
        counts = [0] * len(self.groups)
        for key in self._key_of.values():
            counts[key % len(counts)] += 1
        return counts

    def live_tables(self) -> list[list[int]]:
        return [table.live for holding in self._holdings.values() for table in holding.tables]

    # -- what is needed -----------------------------------------------------------------------------------------------

    def most_blocks(self, tokens: int) -> int:
        """What a request of so many tokens holds at most at a time."""
        return sum([rule.capped(tokens) for rule in self.rules])

    def missing(self, request: Request, tokens: int) -> int:
        holding = self._holdings.get(request, NOTHING_HELD)
        if tokens <= holding.room:
            return 0
        lengths = [len(table.blocks) for table in holding.tables] or [0] * len(self.rules)
        return sum([max(0, rule.blocks_for(tokens) - lengths[g]) for g, rule in enumerate(self.rules)])

    def due(self, request: Request, tokens: int) -> int:
        computed, holding = request.computed, self._holdings[request]
        settled = computed - self._in_flight.get(request, 0)
        if settled >= holding.leaves_at:
            self._leave(request, settled)
        return self.missing(request, computed + tokens)

    def needed(self, request: Request, tokens: int, whole: int, found: list[int]) -> int:
        """For `tokens` behind what was found; and, capped by what it holds at a time, for the `whole` request."""
        got = self._found if found else NOTHING_FOUND
        now = at_most = idle = 0
        for g, rule in enumerate(self.rules):
            entries = got.tables[g] if got.tables else []
            gone = rule.gone(got.tokens)
            have = max(gone, len(entries))
            now += max(0, rule.blocks_for(tokens) - have)
            at_most += max(0, rule.capped(whole) - have)
            idle += sum([not self._refs[block] for block in entries[gone:] if block != NOBODYS])
        return (max(now, at_most) if whole else now) + idle

    # -- prefixes -----------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> list[int]:
        found = self._found = self._finder.find(request.spec, request.target - 1)
        self.junctions.pop(request, None)
        if found.longest > found.tokens and len(self.groups) > 1:
            self.junctions[request] = found.longest
        return found.entries

    def tokens_in(self, found: list[int]) -> int:
        return self._found.tokens if found else 0

    def adopt(self, request: Request, blocks: list[int]) -> None:
        """Share what the last lookup has found, as far as it is seen."""
        got = self._found if blocks else NOTHING_FOUND
        tables: list[GroupTable] = []
        for g, rule in enumerate(self.rules):
            entries = list(got.tables[g]) if got.tables else []
            gone = min(rule.gone(got.tokens), len(entries))
            entries[:gone] = [NOBODYS] * gone
            for block in entries[gone:]:
                assert block != NOBODYS, (request.spec.id, "a hit without a block that is seen", g)
                self._acquire(block)
            tables.append(GroupTable(entries))
        self._holdings[request] = Holding(tables)
        self.tables[request] = []  # rows list no blocks
        self._changed[request] = None

    def keep(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens of a request are known and computed: keys for the full blocks that are kept."""
        holding = self._holdings[request]
        if tokens < holding.named_at:
            return
        unit = self.rules[0].unit
        if len(self.groups) > 1:
            tokens = tokens // unit * unit
        for g, table in enumerate(holding.tables):
            self._name(request, g, table, tokens // self.rules[g].block_size)
        holding.named_at = min([(t.named + 1) * self.rules[g].block_size for g, t in enumerate(holding.tables)])

    def _name(self, request: Request, group: int, table: GroupTable, full: int) -> None:
        """It is decided of the first `full` blocks of a table whether they have a key."""
        rule, spec, junction = self.rules[group], request.spec, self.junctions.get(request, 0)
        for i in range(table.named, full):
            block = table.blocks[i]
            if block != NOBODYS and rule.keeps(i, spec.prompt_tokens, junction):
                self._register(block, self._finder.key(spec, group, i, rule.block_size))
        table.named = max(table.named, full)

    # -- blocks come and go -------------------------------------------------------------------------------------------

    def fill(self, request: Request, tokens: int) -> list[int]:
        holding = self._holdings[request]
        for g, rule in enumerate(self.rules):
            table = holding.tables[g]
            count = rule.blocks_for(tokens) - len(table.blocks)
            if count > 0:
                blocks = self._free.take(count)
                for block in blocks:
                    self._forget(block)
                table.blocks.extend(blocks)
                table.fresh += count
                holding.count += count
        holding.room = min([len(t.blocks) * self.rules[g].block_size for g, t in enumerate(holding.tables)])
        self._changed[request] = None
        return []

    def _leave(self, request: Request, settled: int) -> None:
        """What no token behind the `settled` ones sees, those in flight included, is given up: group by group, the last
        block first.
        """
        holding = self._holdings[request]
        for g, table in enumerate(holding.tables):
            gone = min(self.rules[g].gone(settled), len(table.blocks))
            if gone > table.passed:
                left = table.blocks[table.passed : gone]
                table.blocks[table.passed : gone] = [NOBODYS] * len(left)
                table.passed = gone
                holding.count -= len(left)
                self._let_go_of(left)
                self._changed[request] = None
                self._observer.left(request, g, left)
        holding.leaves_at = min([self.rules[g].goes_at(table.passed) for g, table in enumerate(holding.tables)])

    def release(self, request: Request, *, returns: bool = False) -> int:
        """Free all tables, group by group. Returns blocks held."""
        self.tables.pop(request, None)
        self._changed.pop(request, None)
        self.junctions.pop(request, None)
        holding = self._holdings.pop(request, NOTHING_HELD)
        for table in holding.tables:
            live = table.live
            self._let_go_of(live)
            self._observer.released(request, live)
        return holding.count

    def _let_go_of(self, blocks: list[int]) -> None:
        """Give up blocks of one table, in its order: those without a key are handed out next, the last one first."""
        keyed: list[int] = []
        plain: list[int] = []
        for block in blocks:
            if self._drop(block):
                (keyed if block in self._key_of else plain).append(block)
        self._free.give(keyed + plain, len(keyed))

    # -- steps --------------------------------------------------------------------------------------------------------

    def tell(self, step: int, rows: Mapping[Request, Chunk]) -> tuple[TableChange, ...]:
        """What changed of the tables since the step planned before; and these are the rows of this one."""
        flying = self._in_flight
        self._steps[step] = [(request, row.tokens) for request, row in rows.items()]
        for request, row in rows.items():
            flying[request] = flying.get(request, 0) + row.tokens
        changes: list[TableChange] = []
        self.fresh = 0
        for request in self._changed:
            for g, table in enumerate(self._holdings[request].tables):
                if change := _change(request, g, table):
                    changes.append(change)
                    self.fresh += table.fresh
                    table.fresh = 0
        self._changed = {}
        return tuple(changes)

    def completed(self, step: int) -> None:
        flying = self._in_flight
        for request, tokens in self._steps.pop(step):
            left = flying[request] - tokens
            if left:
                flying[request] = left
            else:
                del flying[request]

    def check(self) -> None:
        super().check()
        assert self.tables.keys() == self._holdings.keys(), "who rows and groups say holds something"
        for request, holding in self._holdings.items():
            assert holding.count == sum([len(table.live) for table in holding.tables]), (request.spec.id, holding.count)
            for g, table in enumerate(holding.tables):
                self._check_table(request, g, table)
        flying: dict[Request, int] = {}
        for rows in self._steps.values():
            for request, tokens in rows:
                flying[request] = flying.get(request, 0) + tokens
        assert flying == self._in_flight, ("tokens in flight", flying, self._in_flight)

    def _check_table(self, request: Request, group: int, table: GroupTable) -> None:
        """Placeholders lie where nobody sees anything, and keys are of the group."""
        at, rule, passed = (request.spec.id, group), self.rules[group], table.passed
        assert passed <= rule.gone(request.computed), (*at, "gave up what is seen", passed)
        assert table.blocks[:passed] == [NOBODYS] * passed, (*at, "placeholders", table.blocks)
        assert NOBODYS not in table.live, (*at, "a placeholder among blocks", table.blocks)
        assert len(table.blocks) >= rule.blocks_for(request.computed), (*at, "too short", len(table.blocks))
        keys = [self._key_of[block] for block in table.live if block in self._key_of]
        assert all(key % len(self.groups) == group for key in keys), (*at, "a key of another group")


def _change(request: Request, group: int, table: GroupTable) -> TableChange | None:
    """What plans have to tell of a table; from now on they have."""
    told, passed = table.told, table.passed
    if told == len(table.blocks) and table.told_passed == passed:
        return None
    first = passed if told == UNTOLD else told
    table.told, table.told_passed = len(table.blocks), passed
    return TableChange(request.spec, group, passed, tuple(table.blocks[first:]))
