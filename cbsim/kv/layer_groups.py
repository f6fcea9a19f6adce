"""Layer groups as vLLM 0.33 plans its cache: layers that see alike share block tables, groups share blocks.

A block has one page for each layer of a group; every group has as many layers as the others, or fewer and then leaves
pages unused.

A group's `Rule` states which blocks it frees, counts and keeps for later prompts. A prefix lookup finds the longest
prefix that every group has: layers that see everything need all blocks of a prefix. Sliding ones need the last run of
it, chunked ones the part that its end lies in; what lies before is not looked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, lcm
from typing import NamedTuple

from cbsim.kv.group_tables import NULL_BLOCK
from cbsim.policy.groups import FULL, Attention, LayerGroup, Sight
from cbsim.policy.request import RequestSpec

NEAR = 1.5  # kinds of layer whose numbers differ by less make one group each


class LayerKind(NamedTuple):
    """The attention of a layer, and the bytes that it keeps of `block_size` tokens."""

    attention: Attention
    page_bytes: int


class Grouping(NamedTuple):
    """The groups in order, and the bytes of one block."""

    groups: tuple[LayerGroup, ...]
    block_bytes: int


class Units(NamedTuple):
    """A cache's units in tokens: a hit is a multiple of `prefix`; content is hashed in pieces of `hashed`."""

    prefix: int
    hashed: int


def units(groups: Sequence[LayerGroup], *, caching: bool = True) -> Units:
    """Return the units of a cache of these groups."""
    sizes = [group.block_size for group in groups]
    return Units(lcm(*sizes), gcd(*sizes) if caching else lcm(*sizes))


class States(NamedTuple):
    """How a cache keeps states: in blocks of so many tokens, so many for a request (`LayerGroup.states`)."""

    tokens: int
    blocks: int


def grouped(
    layers: Sequence[LayerKind],
    block_size: int,
    *,
    together: bool = False,
    outermost: bool = False,
    states: States | None = None,
) -> Grouping:
    """Return the groups of these layers. With `together`, beside layers that see all, the others are kept as if they
    did, too. `outermost`: the pages of a block lie side by side, so that their sizes may differ (`_packed`). Raises
    ValueError for page sizes that are no multiples of each other.
    """
    made = _grouped(layers, block_size, together=together, outermost=outermost)
    if states is None:
        return made
    groups = [g._replace(block_size=states.tokens, states=states.blocks) if keeps_state(g) else g for g in made.groups]
    return made._replace(groups=tuple(groups))


def keeps_state(group: LayerGroup) -> bool:
    """True for a group of layers that keep a state."""
    return group.attention.sight is Sight.STATE


def _grouped(layers: Sequence[LayerKind], block_size: int, *, together: bool, outermost: bool) -> Grouping:
    if together and any(layer.attention == FULL for layer in layers):
        layers = [LayerKind(FULL, layer.page_bytes) for layer in layers]
    if len({layer.attention for layer in layers}) == 1:
        whole = LayerGroup(layers[0].attention, tuple(range(len(layers))), block_size)
        return Grouping((whole,), sum(layer.page_bytes for layer in layers))
    page_bytes = max(layer.page_bytes for layer in layers)
    if outermost and any(layer.page_bytes != page_bytes for layer in layers):
        return _packed(layers, block_size)
    return _alike(layers, block_size, page_bytes)


def _alike(layers: Sequence[LayerKind], block_size: int, page_bytes: int) -> Grouping:
    """Return groups of as many layers each, whose blocks all take `page_bytes` a layer, with more tokens where a token
    takes less; a state is as large whatever the tokens, so its page is padded.
    """
    buckets: dict[tuple[Attention, int], list[int]] = {}
    for index, layer in enumerate(layers):
        state = layer.attention.sight is Sight.STATE
        if page_bytes % layer.page_bytes and not state:
            raise ValueError(f"pages of {layer.page_bytes} bytes beside pages of {page_bytes}: no multiple")
        tokens = block_size if state else block_size * page_bytes // layer.page_bytes
        buckets.setdefault((layer.attention, tokens), []).append(index)
    counts = sorted(map(len, buckets.values()))
    fewest, most = counts[0], counts[-1]
    size = most if most < NEAR * fewest else fewest
    groups: list[LayerGroup] = []
    for (attention, tokens), bucket in buckets.items():
        count = -(-len(bucket) // size)
        groups += [LayerGroup(attention, tuple(bucket[first::count]), tokens) for first in range(count)]
    return Grouping(tuple(groups), size * page_bytes)


def _packed(layers: Sequence[LayerKind], block_size: int) -> Grouping:
    """Return the groups of layers whose pages differ in size: one for layers that see alike. Where such layers have as
    many pages of each size, they repeat a pattern, and all groups get about as many of its repetitions. States, and
    without a pattern sliding layers, are split so that a block is no larger than other layers, or a page of theirs,
    need.
    """
    buckets: dict[Attention, dict[int, list[int]]] = {}
    for index, layer in enumerate(layers):
        buckets.setdefault(layer.attention, {}).setdefault(layer.page_bytes, []).append(index)
    splits = _split_apart(buckets, _repeated(buckets))
    groups: list[LayerGroup] = []
    for see, pages in buckets.items():
        count = splits.get(see, 1)
        rows = list(zip(*pages.values(), strict=True)) if count > 1 else []
        parts = [[layer for row in rows[first::count] for layer in row] for first in range(count)]
        if count == 1:
            parts = [sorted([layer for each in pages.values() for layer in each])]
        groups += [LayerGroup(see, tuple(part), block_size) for part in parts]
    return Grouping(tuple(groups), max([sum([layers[i].page_bytes for i in group.layers]) for group in groups]))


Pages = dict[int, list[int]]  # layers by the bytes of their pages


def _repeated(buckets: dict[Attention, Pages]) -> dict[Attention, int]:
    """Return into how many groups the layers of each attention are cut that repeat a pattern of pages of several sizes;
    none if there is no such pattern.
    """
    repeats = {see: len(next(iter(pages.values()))) for see, pages in buckets.items() if _balanced(pages)}
    least = max([repeats[see] for see in repeats if len(buckets[see]) > 1], default=0)
    if not least:
        return {}
    sizes = range(least, max(repeats.values()) + 1)
    size = min(sizes, key=lambda n: (sum([-count % n for count in repeats.values()]), -n))
    return {see: -(-count // size) for see, count in repeats.items()}


def _split_apart(buckets: dict[Attention, Pages], repeated: dict[Attention, int]) -> dict[Attention, int]:
    """Return into how many groups layers are cut, beside those that repeat a pattern: so that a block is no larger than
    others, or a page, need.
    """
    cut = (Sight.STATE,) if repeated else (Sight.STATE, Sight.SLIDING)
    layers = {see: sum(map(len, pages.values())) for see, pages in buckets.items() if see.sight in cut}
    splits = repeated | layers
    rooms = [
        sum([-(-len(each) // splits.get(see, 1)) * page for page, each in pages.items()])
        for see, pages in buckets.items()
    ]
    for see, count in layers.items():
        least = -(-count // max(1, max(rooms) // next(iter(buckets[see]))))
        splits[see] = max(repeated.get(see, 1), least)
    return splits


def _balanced(pages: dict[int, list[int]]) -> bool:
    return len({len(layers) for layers in pages.values()}) == 1


NEVER = 1 << 60
EVERY_HIT = None  # retention by which every possible prefix of a known prompt is found


class GroupRule:
    """The rule of a group in a cache whose hits are multiples of `unit` tokens. One request has at most `most` of its
    blocks, if it has `longest` tokens and steps in flight compute `in_flight` of them; a lookup needs a run of `run`
    cached blocks, if the group is a sliding one.

    A state is like a window of two tokens: the block with the last computed token holds it, and a lookup needs that one
    alone. But the blocks before it are never filled: a request's next tokens, however many, take one block for the
    state behind them, and if they can one more for the last boundary within; null blocks stand for the rest.
    """

    def __init__(self, group: LayerGroup, unit: int, retention: int | None, in_flight: int, longest: int) -> None:
        self.group = group
        self.attention = group.attention
        self.block_size = size = group.block_size
        self.unit = unit
        self.retention = retention
        sight = self.attention.sight
        self.state = sight is Sight.STATE
        self.sliding = sight is Sight.SLIDING or self.state
        self.span = span = 2 if self.state else self.attention.span
        self.full = sight is Sight.FULL
        self.run = self.blocks_for(span - 1) if self.sliding else 0
        if self.full:
            self.most = -(-longest // size)
        elif self.state:
            self.most = group.states
        elif self.sliding:
            self.most = self.blocks_for(min(span - 1 + in_flight, longest)) + 1
        else:
            self.most = self.blocks_for(min(span + in_flight, longest))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def lacking(self, tokens: int, have: int, start: int, prefill_end: int) -> int:
        """Return the blocks that `tokens` tokens need beside a table of `have` entries, if those from `start` on are to
        be computed.
        """
        count = max(0, self.blocks_for(tokens) - have)
        return min(count, 1 + self.exported(start, tokens, prefill_end)) if self.state else count

    def exported(self, start: int, end: int, prefill_end: int) -> bool:
        """True if the row of these tokens leaves a state at a boundary within. If only few stay cached, so does only
        the row that ends the prefill.
        """
        if self.group.states < 3 or start % self.block_size or (self.retention == 0 and end < prefill_end):
            return False
        return (end - 1) // self.unit * self.unit >= start + self.block_size

    def gone(self, computed: int) -> int:
        """Return how many leading blocks are no longer seen once `computed` tokens are computed."""
        return self.attention.gone(computed) // self.block_size

    def goes_at(self, block: int) -> int:
        """Return the number of computed tokens from which on a block is no longer seen."""
        end, span = (block + 1) * self.block_size, self.span
        if self.full:
            return NEVER
        return end + span - 1 if self.sliding else -(-end // span) * span

    def capped(self, tokens: int) -> int:
        """Return the most blocks that a request of `tokens` tokens has at a time. Of states: those of a step back, of
        one in flight and of the next.
        """
        return min(self.blocks_for(tokens), 1 + 2 * (self.most - 1) if self.state else self.most)

    def retains(self, block: int, prompt: int, junction: int) -> bool:
        """True if a full block stays cached for later prompts: of a sliding group only those that a lookup could end
        with, the run before the position where the same prompt would resume, and before a junction; and the runs before
        every `retention` tokens.
        """
        size, run, unit, retention = self.block_size, self.run, self.unit, self.retention
        if not self.sliding or (self.state and retention is EVERY_HIT):
            return True
        if retention is EVERY_HIT or retention > 0:
            segment = (unit if retention is EVERY_HIT else retention) // size
            if run >= segment or block % segment >= segment - run:
                return True
        if retention is EVERY_HIT:
            return False
        end = (prompt - 1) // unit * (unit // size)
        if end - run <= block < end:
            return True
        end = junction // unit * (unit // size)
        return junction > 0 and end - run <= block < end


def rules(groups: Sequence[LayerGroup], *, retention: int | None, in_flight: int, longest: int) -> list[GroupRule]:
    """Return the rules of all groups of a cache. Chunks are whole blocks: a hit begins with one."""
    unit = units(groups).prefix
    chunks = [group.attention.span for group in groups if group.attention.sight is Sight.CHUNKED]
    whole = units([group for group in groups if not keeps_state(group)]).prefix
    assert not any(chunk % whole for chunk in chunks), "chunks"
    return [GroupRule(group, unit, retention, in_flight, longest) for group in groups]


class GroupHit:
    """The result of a lookup: `tokens` of a prefix, per group the entries of a table for them, and the same in one
    list. `longest` is the longest of the prefixes that some groups have.
    """

    def __init__(self, tokens: int, longest: int, tables: list[list[int]]) -> None:
        self.tokens = tokens
        self.longest = longest
        self.tables = tables
        self.entries = [block for table in tables for block in table]


class Kind(NamedTuple):
    """A kind of groups that are looked up together: a block counts only if all of them have it."""

    rule: GroupRule
    groups: list[int]


class GroupIndex:
    """A lookup by content: `index` maps the keys that `key` makes to one block, or to several with the same content."""

    def __init__(self, rules: Sequence[GroupRule], index: Mapping[int, int | dict[int, None]]) -> None:
        self.count = len(rules)
        self._index = index
        kinds: dict[tuple[Attention, int], Kind] = {}
        for number, rule in enumerate(rules):
            kind = kinds.setdefault((rule.attention, rule.block_size), Kind(rule, []))
            kind.groups.append(number)
        self._kinds = sorted(kinds.values(), key=lambda kind: not kind.rule.full)

    def key(self, spec: RequestSpec, group: int, block: int, block_size: int) -> int:
        """Return the key under which a block of a group is found."""
        return spec.block_key(block, block_size) * self.count + group

    def find(self, spec: RequestSpec, most: int) -> GroupHit:
        """Return the longest prefix of at most `most` tokens that all groups have. Kinds shorten each other's until
        none does; those that see all are looked up once, because a shorter hit is a part of theirs.
        """
        kinds, hit, longest = self._kinds, most, 0
        runs: list[list[list[int]]] = [[] for _ in kinds]
        first = kinds[0].rule
        once = len(kinds) == 1 or (len(kinds) == 2 and first.full)
        while True:
            reach = hit
            for i, kind in enumerate(kinds):
                rule = kind.rule
                if rule.full and runs[i]:
                    reach = min(reach, len(runs[i][0]) * rule.block_size)
                else:
                    runs[i] = run = self._look(kind, spec, reach)
                    reach = len(run[0]) * rule.block_size
                longest = max(longest, reach)
            if once or reach >= hit:
                break
            hit = reach
        return GroupHit(reach, longest, self._tables(runs, reach))

    def _tables(self, runs: list[list[list[int]]], tokens: int) -> list[list[int]]:
        """Return, by group, the part of each kind's runs within `tokens` tokens."""
        tables: list[list[int]] = [[] for _ in range(self.count)]
        for i, kind in enumerate(self._kinds):
            for j, group in enumerate(kind.groups):
                tables[group] = runs[i][j][: tokens // kind.rule.block_size]
        return tables

    def _look(self, kind: Kind, spec: RequestSpec, top: int) -> list[list[int]]:
        """Return each group's table entries for the longest prefix of at most `top` tokens that the kind has."""
        if kind.rule.sliding:
            return self._sliding(kind, spec, top)
        rule = kind.rule
        size, unit = rule.block_size, rule.unit
        first = rule.attention.gone(top) // size
        tables = [[NULL_BLOCK] * first for _ in kind.groups]
        for i in range(first, top // size):
            blocks = self._blocks(kind, spec, i)
            if not blocks:
                break
            for j, block in enumerate(blocks):
                tables[j].append(block)
        whole = len(tables[0]) * size // unit * unit // size
        return [table[:whole] for table in tables]

    def _sliding(self, kind: Kind, spec: RequestSpec, top: int) -> list[list[int]]:
        """Search from the right for a run that ends on a multiple of the unit and is as long as what the layers see."""
        rule = kind.rule
        size, unit = rule.block_size, rule.unit
        tables = [[NULL_BLOCK] * (top // size) for _ in kind.groups]
        length = end = 0
        for i in range(top // size - 1, -1, -1):
            if not length and (i + 1) * size % unit:
                continue
            blocks = self._blocks(kind, spec, i)
            if not blocks:
                length = 0
                continue
            if not length:
                end = i + 1
            length += 1
            for j, block in enumerate(blocks):
                tables[j][i] = block
            if length >= rule.run:
                return [[NULL_BLOCK] * i + table[i:end] for table in tables]
        return [table[: end if length else 0] for table in tables]

    def _blocks(self, kind: Kind, spec: RequestSpec, block: int) -> list[int]:
        """Return the oldest block of this content in each group of a kind, or none if a group has none."""
        content = spec.block_key(block, kind.rule.block_size) * self.count
        blocks: list[int] = []
        for group in kind.groups:
            entry = self._index.get(content + group)
            if entry is None:
                return []
            blocks.append(entry if isinstance(entry, int) else next(iter(entry)))
        return blocks
