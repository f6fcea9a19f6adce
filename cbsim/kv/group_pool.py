"""A block pool of several groups of layers over one free queue, as in vLLM 0.33.

A block belongs to the group that took it, and so does its key. Blocks of a sequence that a group no longer sees leave
its table when the request gets its next blocks; null blocks take their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbsim.kv.blocks import FreeList
from cbsim.kv.group_tables import NULL_BLOCK, StateTable, Table, TablePool
from cbsim.kv.layer_groups import GroupHit, GroupIndex, GroupRule, rules
from cbsim.policy.groups import LayerGroup, TableChange
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Chunk
from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr

NO_HIT = GroupHit(0, 0, [])


def prefilled_at(request: Request) -> int:
    """Return where a request's prefill ends: with its prompt, or with the last but one of the tokens known."""
    return max(request.spec.prompt_tokens, request.known - 1)


@mypyc_attr(allow_interpreted_subclasses=True)
class GroupPool(TablePool):
    """A pool of these groups. `retention`: which blocks of sliding groups stay cached (`GroupRule.retains`). A request
    has `longest` tokens at most, of which steps in flight compute `most_in_flight`.
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
        super().__init__(groups, block_size, num_blocks, free, observer)
        self.rules = rules(groups, retention=retention, in_flight=most_in_flight, longest=longest)
        self.junctions: dict[Request, int] = {}  # tokens of the longest prefix that only some groups had
        self._finder = GroupIndex(self.rules, self._index)
        self._hit = NO_HIT
        self._steps: dict[int, list[tuple[Request, int]]] = {}  # in flight, with the tokens of their rows
        self._in_flight: dict[Request, int] = {}  # tokens of rows in flight
        self._states = [g for g, rule in enumerate(self.rules) if rule.state]
        self._just_named: dict[int, None] = {}  # keys of states that only the step being planned computes

    def spans(self, request: Request) -> list[tuple[int, int]]:
        sizes = [rule.block_size for rule in self.rules]
        tables = self.group_tables(request)
        tokens = [g for g, rule in enumerate(self.rules) if not rule.state]
        return [(tables[g].passed * sizes[g], len(tables[g].blocks) * sizes[g]) for g in tokens]

    def in_flight(self, request: Request) -> int:
        """Return the tokens of a request's rows in flight, also of those that will be dropped."""
        return self._in_flight.get(request, 0)

    def keyed_in_groups(self) -> list[int]:
        """Return the number of blocks whose content a request could find, by group."""
        counts = [0] * len(self.groups)
        for key in self._key_of.values():
            counts[key % len(counts)] += 1
        return counts

    def most_blocks(self, tokens: int) -> int:
        return sum([rule.capped(tokens) for rule in self.rules])

    def missing(self, request: Request, tokens: int) -> int:
        tables = self._tables.get(request, self._none)
        if tokens <= tables.room:
            return 0
        start, prefill_end = request.computed, prefilled_at(request)
        lengths = [len(table.blocks) for table in tables.groups]
        return sum([rule.lacking(tokens, lengths[g], start, prefill_end) for g, rule in enumerate(self.rules)])

    def due(self, request: Request, tokens: int) -> int:
        computed = request.computed
        completed = computed - self._in_flight.get(request, 0)
        if completed >= self._tables[request].passes_at:
            self._pass(request, completed)
        return self.missing(request, computed + tokens)

    def needed(self, request: Request, tokens: int, whole: int, hits: list[int]) -> int:
        """Return the free blocks needed for `tokens` tokens behind the hit, or at a time for the `whole` request."""
        hit = self._hit if hits else NO_HIT
        if any(hit.tables and self._key_of[hit.tables[g][-1]] in self._just_named for g in self._states):
            return self.num_blocks + 1  # for rows of one step run beside each other
        prefill_end = prefilled_at(request)
        now = at_most = idle = 0
        for g, rule in enumerate(self.rules):
            entries = hit.tables[g] if hit.tables else []
            gone = rule.gone(hit.tokens)
            have = max(gone, len(entries))
            now += rule.lacking(tokens, have, hit.tokens, prefill_end)
            if rule.state:
                at_most += rule.lacking(whole, have, hit.tokens, prefill_end)
            else:
                at_most += max(0, rule.capped(whole) - have)
            idle += sum([not self._refs[block] for block in entries[gone:] if block != NULL_BLOCK])
        return (max(now, at_most) if whole else now) + idle

    def aligned(self, request: Request, start: int, tokens: int, most: int) -> int:
        """Return how many of the next `tokens` tokens a row may have so that a state that is to stay cached is behind
        its last one; 0 if it has to wait for a larger budget. Rows that prefill have at most `most` tokens. Such states
        are at multiples of the block, the last one below the end of what is known, unless the row can export that one,
        and at the junction's.
        """
        size, end, prefill_end = self.block_size, start + tokens, prefilled_at(request)
        if not self._states or start >= prefill_end:
            return tokens
        exports = end >= prefill_end and all(self.rules[g].exported(start, prefill_end, 0) for g in self._states)
        if end < prefill_end:
            aligned = end // size * size
            if aligned > start or size <= most:
                end = aligned
        stops = [self.junctions.get(request, 0)]
        if not exports:
            stops.append((request.known - 1) // size * size)
            if start % size:
                stops.append(start // size * size + size)
        return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)

    def find(self, request: Request) -> list[int]:
        hit = self._hit = self._finder.find(request.spec, request.target - 1)
        self.junctions.pop(request, None)
        if hit.longest > hit.tokens and len(self.groups) > 1:
            self.junctions[request] = hit.longest
        return hit.entries

    def tokens_in(self, hits: list[int]) -> int:
        return self._hit.tokens if hits else 0

    def adopt(self, request: Request, blocks: list[int]) -> None:
        """Share the blocks of the last lookup, as far as they are still seen."""
        hit = self._hit if blocks else NO_HIT
        tables: list[Table] = []
        for g, rule in enumerate(self.rules):
            entries = list(hit.tables[g]) if hit.tables else []
            gone = min(rule.gone(hit.tokens), len(entries))
            entries[:gone] = [NULL_BLOCK] * gone
            for block in entries[gone:]:
                assert block != NULL_BLOCK, (request.spec.id, "a hit without a block that is seen", g)
                self._acquire(block)
            tables.append(StateTable(entries) if rule.state else Table(entries))
        self._open(request, tables)

    def name_full(self, request: Request, tokens: int) -> None:
        """Give keys to the full blocks of the first `tokens` tokens, known and computed, that stay cached."""
        tables = self._tables[request]
        if tokens < tables.named_at:
            return
        unit = self.rules[0].unit
        if len(self.groups) > 1:
            tokens = tokens // unit * unit
        for g, table in enumerate(tables.groups):
            self._name(request, g, table, tokens // self.rules[g].block_size)
        tables.named_at = min([(t.named + 1) * self.rules[g].block_size for g, t in enumerate(tables.groups)])

    def _name(self, request: Request, group: int, table: Table, full: int) -> None:
        """Give the first `full` blocks of a table their keys, as far as they stay cached."""
        rule, spec, junction = self.rules[group], request.spec, self.junctions.get(request, 0)
        for i in range(table.named, full):
            block = table.blocks[i]
            if block != NULL_BLOCK and rule.retains(i, spec.prompt_tokens, junction):
                key = self._finder.key(spec, group, i, rule.block_size)
                self._register(block, key)
                if rule.state:
                    self._just_named[key] = None
        table.named = max(table.named, full)

    def fill(self, request: Request, tokens: int, lacking: int) -> list[int]:
        tables = self._tables[request]
        for g, rule in enumerate(self.rules):
            table = tables.groups[g]
            if rule.state:
                self._skip(request, tokens, rule, table)
            count = rule.blocks_for(tokens) - len(table.blocks)
            if count > 0:
                blocks = self._free.take(count)
                for block in blocks:
                    self._forget(block)
                table.blocks.extend(blocks)
                table.fresh += count
                tables.count += count
        tables.room = min([len(t.blocks) * self.rules[g].block_size for g, t in enumerate(tables.groups)])
        self._changed[request] = None
        return []

    def _skip(self, request: Request, tokens: int, rule: GroupRule, table: Table) -> None:
        """Put null blocks for the boundaries at which a row up to `tokens` tokens leaves no state."""
        have = len(table.blocks)
        taken = rule.lacking(tokens, have, request.computed, prefilled_at(request))
        table.blocks.extend([NULL_BLOCK] * (rule.blocks_for(tokens) - have - taken))

    def _pass(self, request: Request, completed: int) -> None:
        """Free the blocks that no token behind the `completed` ones sees, group by group, the last block first."""
        tables = self._tables[request]
        for g, table in enumerate(tables.groups):
            gone = min(self.rules[g].gone(completed), len(table.blocks))
            if gone > table.passed:
                passed = [block for block in table.blocks[table.passed : gone] if block != NULL_BLOCK]
                table.blocks[table.passed : gone] = [NULL_BLOCK] * (gone - table.passed)
                table.passed = gone
                tables.count -= len(passed)
                self._drop_all(passed)
                self._changed[request] = None
                if passed:
                    self._observer.left(request, g, passed)
        tables.passes_at = min([self.rules[g].goes_at(table.passed) for g, table in enumerate(tables.groups)])

    def release(self, request: Request, *, returns: bool = False) -> int:
        self.junctions.pop(request, None)
        tables = self._close(request)
        if tables is not self._none:
            for table in tables.groups:
                live = table.live
                self._drop_all(live)
                self._observer.released(request, live)
        return tables.count

    def _drop_all(self, blocks: list[int]) -> None:
        """Drop blocks of one table, in its order: those without a key are handed out next, the last one first."""
        keyed: list[int] = []
        plain: list[int] = []
        for block in blocks:
            if self._drop(block):
                (keyed if block in self._key_of else plain).append(block)
        self._free.give(keyed + plain, len(keyed))

    def begin(self) -> None:
        """Record that a step is about to be planned."""
        self._just_named = {}

    def table_changes(self, step: int, rows: Mapping[Request, Chunk]) -> tuple[TableChange, ...]:
        in_flight = self._in_flight
        self._steps[step] = [(request, row.tokens) for request, row in rows.items()]
        for request, row in rows.items():
            in_flight[request] = in_flight.get(request, 0) + row.tokens
        return super().table_changes(step, rows)

    def completed(self, step: int) -> None:
        in_flight = self._in_flight
        for request, tokens in self._steps.pop(step):
            left = in_flight[request] - tokens
            if left:
                in_flight[request] = left
            else:
                del in_flight[request]

    def check(self) -> None:
        super().check()
        for request, tables in self._tables.items():
            assert tables.count == sum([len(table.live) for table in tables.groups]), (request.spec.id, tables.count)
            for g, table in enumerate(tables.groups):
                self._check_table(request, g, table)
        in_flight: dict[Request, int] = {}
        for rows in self._steps.values():
            for request, tokens in rows:
                in_flight[request] = in_flight.get(request, 0) + tokens
        assert in_flight == self._in_flight, ("tokens in flight", in_flight, self._in_flight)

    def _check_table(self, request: Request, group: int, table: Table) -> None:
        """Raise AssertionError unless every block still seen is in the table and keys are of the group."""
        at, rule = (request.spec.id, group), self.rules[group]
        assert table.passed <= rule.gone(request.computed), (*at, "freed what is seen", table.passed)
        assert NULL_BLOCK not in table.live, (*at, "a null block among others", table.blocks)
        assert len(table.blocks) >= rule.blocks_for(request.computed), (*at, "too short", len(table.blocks))
        keys = [self._key_of[block] for block in table.live if block in self._key_of]
        assert all(key % len(self.groups) == group for key in keys), (*at, "a key of another group")
