"""The rules that every plan of a scheduler has to keep, checked from the plans and the pool.

In every step it is checked what costs as much as what the plan changes: the rows that are listed, the limits, the sums
of the decode batch, the number of blocks in use. What costs as much as the cache (each block and each table) is checked
in the first steps, then as often as the steps in between have paid for, once the number of blocks is not what the plans
make it, and at the end. Nothing here is an `assert`, which `python -O` drops.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from cbsim.kv.blocks import BlockPool
from cbsim.policy.digest import digest
from cbsim.policy.loop import Limits
from cbsim.policy.plan import UNDISTURBED, Batch, Chunk, StepChanges, StepPlan
from cbsim.policy.request import Request, RequestSpec

FIRST, STEP, ROW = 25_000, 40, 8  # what the start, a step and a listed row pay for, in blocks checked
IN_USE = 16  # blocks: what it takes to check a block in use
values = attrgetter(*[field.name for field in fields(RequestSpec)])


class Rules:
    """The plans so far. Methods raise AssertionError if one breaks a rule; `always`: each step checks all rules."""

    def __init__(self, pool: BlockPool, limits: Limits, always: bool) -> None:
        rows = [most for most in (limits.rows, limits.slots) if most is not None]
        self.steps = 0
        self.open: dict[RequestSpec, tuple[Request, Any]] = {}  # added and not ended: with the values of the spec
        self._pool, self._always, self._blocks = pool, always, pool.free_order()
        self._most_rows = min(rows, default=sys.maxsize)
        self._most_tokens = sys.maxsize if limits.tokens is None else limits.tokens
        self._batch = Batch()
        self._tables: dict[RequestSpec, list[int]] = {}  # block tables as an executor derives them from the plans
        self._held: dict[int, int] = {}  # the blocks in these tables, and in how many each is
        self._gone: deque[tuple[RequestSpec, Sequence[int]]] = deque(maxlen=4096)  # whose blocks have left tables
        self._beside = 0  # blocks in use beside those of the tables, when all was checked
        self._credit = FIRST

    def follow(self, plan: StepPlan, requests: Mapping[RequestSpec, Request]) -> None:
        """Check a plan as far as it changes something, and everything if that is due."""
        work, pool = plan.work, self._pool
        rows, tokens = len(work.chunks) + work.decodes, work.prefill_tokens + work.decodes
        if plan.step != self.steps:
            raise AssertionError(f"the step is {plan.step}, expected {self.steps}")
        if rows > self._most_rows or tokens > self._most_tokens:
            most = f"{self._most_rows} rows and {self._most_tokens} query tokens are allowed"
            raise AssertionError(f"{rows} rows and {tokens} query tokens, {most}")
        if plan.changes is not UNDISTURBED:
            self._change(plan.changes)
        self._batch.follow(plan)
        for chunk in work.chunks:
            self._row(chunk, requests)
        if len(requests) < len(self.open):
            gone = next(spec for spec in self.open if spec not in requests)
            raise AssertionError(f"request {gone.id} is no longer one of the requests, and has not ended")
        price = pool.num_blocks + IN_USE * len(self._held)
        self._credit += STEP + ROW * len(work.chunks)
        doubtful = self._credit > 0 and pool.num_blocks - pool.free - len(self._held) != self._beside
        if doubtful or self._credit > price or not self.steps or self._always:
            digest(plan)  # which needs every field of the plan to be of its type
            self.check(requests)
            self._credit -= price if self.steps else 0
        self.steps += 1

    def _change(self, changes: StepChanges) -> None:
        """Take in the changes of requests and their tables."""
        for spec in (*changes.ended, *[lost.spec for lost in changes.preempted]):
            self._drop(spec, self._tables.pop(spec, ()))
        for spec, index, block in changes.replaced:
            if (table := self._tables.get(spec)) is not None:
                self._drop(spec, (table[index],))
                self._take((block,))
                table[index] = block
        for spec, block in zip(changes.grown, changes.blocks, strict=True):
            self._tables[spec].append(block)
        self._take(changes.blocks)

    def _row(self, chunk: Chunk, requests: Mapping[RequestSpec, Request]) -> None:
        """Check a listed row, and take in its blocks."""
        spec, end, size = chunk.spec, chunk.start + chunk.tokens, self._pool.block_size
        request = requests.get(spec)
        if request is None:
            raise AssertionError(f"the plan has a row of request {spec.id}, which is not one of the requests")
        total = end + chunk.order + chunk.outputs + chunk.cached + chunk.recomputed + chunk.padding
        if type(total) is not int:
            raise AssertionError(f"the row of request {spec.id} has numbers that are no integers")
        if chunk.outputs > 1:
            raise AssertionError(f"the row of request {spec.id} has {chunk.outputs} output tokens; a run records one")
        if chunk.admitted or spec not in self._tables:
            self._drop(spec, self._tables.pop(spec, ()))
            self._tables[spec] = []
        table = self._tables[spec]
        if chunk.blocks:
            table += chunk.blocks
            self._take(chunk.blocks)
        if len(table) != self._pool.entries(request) and not self._pool.groups:
            self.check(requests)
            self._differ(spec, table, self._pool.table(request))
        if chunk.tokens < 1 or end != request.computed or end > request.target:
            known = f"then {request.computed} of its {request.target} tokens are computed"
            raise AssertionError(f"the row of request {spec.id} computes tokens {chunk.start} to {end}, but {known}")
        if end > len(table) * size and not self._pool.groups:
            raise AssertionError(_too_few_blocks(spec, end, len(table), size))

    def _take(self, blocks: Sequence[int]) -> None:
        """Take in that these blocks are in one more table."""
        for block in blocks:
            self._held[block] = self._held.get(block, 0) + 1

    def _drop(self, spec: RequestSpec, blocks: Sequence[int]) -> None:
        """Take in that a request has lost these blocks."""
        self._gone.append((spec, blocks))
        for block in blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]

    def check(self, requests: Mapping[RequestSpec, Request], over: bool = False) -> None:
        """Check every block, table and request; `over`: no request may have blocks any more."""
        pool = self._pool
        for request in pool.tables:
            if over or (request.finish is not None and not request.keeps_blocks):
                blocks = pool.table(request)[:8]
                raise AssertionError(f"request {request.spec.id} has ended, but KV blocks {blocks} are not freed")
        try:
            pool.check()
        except AssertionError as broken:
            raise AssertionError(self._misplaced() or message_of(broken)) from broken
        for spec, (_, before) in self.open.items():
            unchanged(spec, before)
        for spec, table in self._tables.items() if not pool.groups else ():
            if spec not in requests:
                continue
            own, computed = pool.table(requests[spec]), requests[spec].computed
            if table != own[: len(table)]:
                self._differ(spec, table, own)
            if computed > len(table) * pool.block_size:
                raise AssertionError(_too_few_blocks(spec, computed, len(table), pool.block_size))
        self._beside = pool.num_blocks - pool.free - len(self._held)

    def _differ(self, spec: RequestSpec, table: Sequence[int], own: Sequence[int]) -> None:
        at = next((i for i, (a, b) in enumerate(zip(table, own, strict=False)) if a != b), min(len(table), len(own)))
        by_plans, in_pool = (
            f"{len(each)} KV blocks, from number {at} on {[*each[at : at + 8]]}" for each in (table, own)
        )
        raise AssertionError(f"request {spec.id} has {by_plans}, by its plans; {in_pool} in the pool")

    def _misplaced(self) -> str:
        """Return which block is lost, or free though it has an owner, and whose it was; or an empty text."""
        free = Counter(self._pool.free_order())
        held = {block: request.spec for request in self._pool.tables for block in self._pool.table(request)}
        owners = {block: spec for spec, table in self._gone for block in table} | held
        for block in self._blocks:
            times = free[block] + (block in held)
            if times != 1:
                what = "was released twice" if times else "is lost, neither free nor in a table"
                owner = f"request {owners[block].id} had it last" if block in owners else "no plan has listed it"
                return f"block {block} {what}: {owner}"
        return ""


def unchanged(spec: RequestSpec, before: Any) -> None:
    """Raise AssertionError unless a request is as it was."""
    if (now := values(spec)) != before:
        pairs = zip(fields(RequestSpec), before, now, strict=True)
        name, old, new = next((field.name, old, new) for field, old, new in pairs if old != new)
        raise AssertionError(f"{name} of request {spec.id} was {old} and is {new}: nobody may change a request")


def message_of(broken: AssertionError) -> str:
    """Return the message of an assertion in one line."""
    (message,) = broken.args or ("an assertion without a message",)
    return " ".join(str(part) for part in message) if isinstance(message, tuple) else str(message)


def _too_few_blocks(spec: RequestSpec, tokens: int, blocks: int, size: int) -> str:
    """Return the message on a request without room in the KV cache for what it computes."""
    return f"request {spec.id} computes {tokens} tokens, but its {blocks} KV blocks of {size} hold {blocks * size}"
