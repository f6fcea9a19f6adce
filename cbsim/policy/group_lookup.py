"""Prefix lookup in a cache of layer groups, as vLLM 0.33 does it: the longest prefix that every group has.

Layers that see everything need all blocks of a prefix. Sliding ones need the last run of it, chunked ones the part that
its end lies in; what lies before is not looked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbsim.policy.group_rules import GroupRule
from cbsim.policy.groups import Attention
from cbsim.policy.request import RequestSpec

NOBODYS = 0  # in a table: a block that nobody sees


class Found:
    """A lookup: `tokens` of a prefix, per group the entries of a table for them, and the same in one list. `longest`:
    of the prefixes that some groups have, the longest.
    """

    def __init__(self, tokens: int, longest: int, tables: list[list[int]]) -> None:
        self.tokens = tokens
        self.longest = longest
        self.tables = tables
        self.entries = [block for table in tables for block in table]


class Kind:
    """Groups that are looked up together: a block counts only if all of them have it."""

    def __init__(self, rule: GroupRule, groups: list[int]) -> None:
        self.rule = rule
        self.groups = groups


class GroupIndex:
    """Finds blocks by content: `index` gives them by the keys that `key` makes, one, or several that are the same."""

    def __init__(self, rules: Sequence[GroupRule], index: Mapping[int, int | dict[int, None]]) -> None:
        self.count = len(rules)
        self._index = index
        kinds: dict[tuple[Attention, int], Kind] = {}
        for number, rule in enumerate(rules):
            kind = kinds.setdefault((rule.attention, rule.block_size), Kind(rule, []))
            kind.groups.append(number)
        self._kinds = sorted(kinds.values(), key=_sees_all)

    def key(self, spec: RequestSpec, group: int, block: int, block_size: int) -> int:
        """Under which a block of a group is found."""
        return spec.block_key(block, block_size) * self.count + group

    def find(self, spec: RequestSpec, most: int) -> Found:
        """The longest prefix of at most `most` tokens that all groups have. Kinds shorten each other's until no one
        does; those that see all are looked up once, for what they have of less is a part of it.
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
        return Found(reach, longest, self._tables(runs, reach))

    def _tables(self, runs: list[list[list[int]]], tokens: int) -> list[list[int]]:
        """By group, what is left of the runs of each kind."""
        tables: list[list[int]] = [[] for _ in range(self.count)]
        for i, kind in enumerate(self._kinds):
            for j, group in enumerate(kind.groups):
                tables[group] = runs[i][j][: tokens // kind.rule.block_size]
        return tables

    def _look(self, kind: Kind, spec: RequestSpec, top: int) -> list[list[int]]:
        """Of the groups of a kind, the entries for the longest prefix of at most `top` tokens that they have."""
        if kind.rule.sliding:
            return self._sliding(kind, spec, top)
        rule = kind.rule
        size, unit = rule.block_size, rule.unit
        first = rule.attention.gone(top) // size
        tables = [[NOBODYS] * first for _ in kind.groups]
        for i in range(first, top // size):
            blocks = self._blocks(kind, spec, i)
            if not blocks:
                break
            for j, block in enumerate(blocks):
                tables[j].append(block)
        whole = len(tables[0]) * size // unit * unit // size
        return [table[:whole] for table in tables]

    def _sliding(self, kind: Kind, spec: RequestSpec, top: int) -> list[list[int]]:
        """From the right: a run that ends on a multiple of the unit and is as long as what the layers see."""
        rule = kind.rule
        size, unit = rule.block_size, rule.unit
        tables = [[NOBODYS] * (top // size) for _ in kind.groups]
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
                return [[NOBODYS] * i + table[i:end] for table in tables]
        return [table[: end if length else 0] for table in tables]

    def _blocks(self, kind: Kind, spec: RequestSpec, block: int) -> list[int]:
        """The oldest block of this content in each group of a kind; none if a group has none."""
        content = spec.block_key(block, kind.rule.block_size) * self.count
        found: list[int] = []
        for group in kind.groups:
            entry = self._index.get(content + group)
            if entry is None:
                return []
            found.append(entry if isinstance(entry, int) else next(iter(entry)))
        return found


def _sees_all(kind: Kind) -> bool:
    return not kind.rule.full
