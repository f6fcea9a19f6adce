"""A cache of layer groups, told by plans as `cbsim/policy/groups.py` says: vLLM's rules, and blocks given up at once.

`Regrouped` plans with a plain cache, and keeps for every row a table a group in blocks of its own. What a group's
layers no longer see goes back with the very plan from which on nobody sees it, and is handed out next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

from cbsim.policy.groups import Attention, LayerGroup, TableChange
from cbsim.policy.plan import Batch, Chunk, Row, StepChanges, StepPlan, StepWork
from cbsim.policy.request import RequestSpec
from cbsim.runs import assemble
from cbsim.schedulers.vllm.scheduler import VllmScheduler

T = TypeVar("T")


def grouped(attention: Sequence[Attention], block_size: int, most: int = 99, ring: int = 0) -> tuple[LayerGroup, ...]:
    """Layers that see alike, at most so many in a group. `ring` is that of the groups that do not see all."""
    kinds: dict[Attention, list[int]] = {}
    for layer, sees in enumerate(attention):
        kinds.setdefault(sees, []).append(layer)
    return tuple(
        LayerGroup(sees, tuple(layers[at : at + most]), block_size, ring if sees.span else 0)
        for sees, layers in kinds.items()
        for at in range(0, len(layers), most)
    )


class Regrouped(VllmScheduler):
    """Prefix caching has to be off: nothing is found. `given_up` counts blocks that went back before their request."""

    def __init__(self, options: Any, groups: tuple[LayerGroup, ...]) -> None:
        super().__init__(replace(options, num_blocks=options.num_blocks // len(groups)))
        self.pool.groups = groups
        self.given_up = 0
        self.blocks = list(range(options.num_blocks))  # the free ones; the last one is taken next
        self._batch = Batch()
        self._tables: dict[RequestSpec, list[dict[int, int]]] = {}  # of every group: entry -> block
        self._lengths: dict[RequestSpec, list[int]] = {}

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        rows = self._batch.rows(plan)
        for spec in (*(one.spec for one in plan.changes.preempted), *plan.changes.ended):
            for table in self._tables.pop(spec, ()):
                self.blocks.extend(table.values())
        tables = [change for row in rows for change in self._changes_of(row)]
        return told(plan, tables)

    def _changes_of(self, row: Row) -> list[TableChange]:
        if row.chunk is not None and row.chunk.admitted:
            count = len(self.pool.groups)
            self._tables[row.spec], self._lengths[row.spec] = [{} for _ in range(count)], [0] * count
        found = []
        for number, group in enumerate(self.pool.groups):
            table, length = self._tables[row.spec][number], self._lengths[row.spec][number]
            needed, gone = -(-(row.start + row.tokens) // group.block_size), 0
            if group.ring:
                needed = min(needed, group.ring)
            else:
                gone = group.attention.gone(row.start) // group.block_size
            left = [table.pop(entry) for entry in [one for one in table if one < gone]]
            self.blocks.extend(left)
            self.given_up += len(left)
            added = {entry: self.blocks.pop() for entry in range(length, needed)}
            table |= added
            self._lengths[row.spec][number] = max(length, needed)
            if left or added or not length:
                found.append(TableChange(row.spec, number, gone, tuple(added.values())))
        return found


def told(plan: StepPlan, tables: list[TableChange]) -> StepPlan:
    """The plan with these tables, and no blocks in its rows."""
    work, changes = plan.work, plan.changes
    chunks = tuple(
        Chunk(
            *(c.spec, c.order, c.start, c.tokens, (), c.outputs),
            admitted=c.admitted,
            resumed=c.resumed,
            cached=c.cached,
            recomputed=c.recomputed,
        )
        for c in work.chunks
    )
    sums = (work.lead, work.decodes, work.decode_context, work.longest_context, work.prefill_tokens)
    unlisted = (changes.joined, changes.left, changes.ends, changes.ended, changes.preempted)
    return StepPlan(
        plan.step, StepWork(chunks, *sums), StepChanges((), (), *unlisted), plan.counts, tables=tuple(tables)
    )


def regrouped(act: Callable[[], T], groups: tuple[LayerGroup, ...]) -> tuple[T, Regrouped]:
    """What comes of `act` where every scheduler that is made is a `Regrouped`; and the last one of them."""
    made: list[Regrouped] = []

    def make(asked: Any, loop: str) -> Regrouped:
        seeing_all = asked.model.model_copy(update={"attention": ("full",)})
        plain = asked.model_copy(update={"model": seeing_all})
        made.append(Regrouped(plain.options(loop), groups))
        return made[-1]

    with mock.patch.object(assemble, "scheduler", make):
        result = act()
    held = [block for tables in made[-1]._tables.values() for table in tables for block in table.values()]
    assert not held, "blocks of requests that have ended"
    assert len(set(made[-1].blocks)) == len(made[-1].blocks)
    return result, made[-1]
