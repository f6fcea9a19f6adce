"""The guard of a user's own scheduler: a broken rule or exception ends the run in one line with its name and step.

In every step it checks what costs as much as what the plan changes: the rows that are listed, the limits, the sums of
the decode batch, the number of blocks in use. What costs as much as the cache (each block and each table) is checked in
the first steps, then as often as the steps in between have paid for, once the number of blocks is not what the plans
make it, and at the end; or in every step with `--check-policy`. Nothing here is an `assert`, which `python -O` drops.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import fields
from functools import wraps
from operator import attrgetter
from struct import Struct
from types import NoneType
from typing import Any, TypeVar, cast

from cbsim.errors import RunError
from cbsim.kv.blocks import BlockPool
from cbsim.policy.digest import digest
from cbsim.policy.kind import CHECK_POLICY
from cbsim.policy.loop import Limits, Scheduler, Watched
from cbsim.policy.plan import UNDISTURBED, Batch, Chunk, Outcome, StepChanges, StepPlan, StepResult
from cbsim.policy.request import Request, RequestSpec

FLAGS = dict.fromkeys(("polls_before_update", "awaits_when_idle", "idle"), bool)
PROMISED = FLAGS | {"pool": BlockPool, "limits": Limits, "requests": Mapping, "waiting": Sized, "running": Sized}
FIRST, STEP, ROW = 25_000, 40, 8  # what the start, a step and a listed row pay for, in blocks checked
IN_USE = 16  # blocks: what it takes to check a block in use
_numbers = Struct("7q")  # to pack what is no number raises
_values = attrgetter(*(field.name for field in fields(RequestSpec)))
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")


class PolicyError(RunError):
    """An error of a scheduler that is not ours. The message has its name, the step and the reason."""


def _named(act: F) -> F:
    """Return a method that raises a PolicyError with its name, whatever it meets in the scheduler or its plans."""

    @wraps(act)
    def named(self: Guarded, *arguments: Any) -> Any:
        try:
            return act(self, *arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            place = f"scheduler {self.name}, step {self.steps}, {act.__name__}"
            raise PolicyError(f"{place}: {_error_line(error)}") from error

    return cast("F", named)


class Guarded(Watched):
    """A scheduler whose every result is checked. Raises PolicyError."""

    def __init__(self, make: Callable[[], Scheduler], name: str) -> None:
        self.name, self.steps = name, 0
        self._batch = Batch()
        self._tables: dict[RequestSpec, list[int]] = {}  # block tables as an executor derives them from the plans
        self._held: set[int] = set()  # the blocks in these tables
        self._shared: dict[int, int] = {}  # of them, those in several: in how many more than one
        self._gone: deque[tuple[RequestSpec, Sequence[int]]] = deque(maxlen=4096)  # whose blocks have left tables
        self._open: dict[RequestSpec, tuple[Request, Any]] = {}  # added and not ended: with the values of the spec
        self._beside = 0  # blocks in use beside those of the tables, when all was checked
        self._credit, self._always = FIRST, os.environ.get(CHECK_POLICY) == "1"
        self.make(make)

    @_named
    def make(self, make: Callable[[], Scheduler]) -> None:
        """Make the scheduler."""
        policy = self._policy = make()
        for attribute, kind in PROMISED.items():
            _promised(attribute, getattr(policy, attribute), kind)
        self.polls_before_update, self.awaits_when_idle = policy.polls_before_update, policy.awaits_when_idle
        self.pool, self.limits, self._blocks = policy.pool, policy.limits, policy.pool.free_order()
        rows, tokens = (self.limits.rows, self.limits.slots), self.limits.tokens
        self._most_rows = min([most for most in rows if most is not None], default=sys.maxsize)
        self._most_tokens = sys.maxsize if tokens is None else tokens

    def __getattr__(self, name: str) -> Any:
        """Return the scheduler's own attribute: requests or queues."""
        return getattr(self.__dict__["_policy"], name)

    @property
    @_named
    def idle(self) -> bool:
        idle = _promised("idle", self._policy.idle, bool)
        if idle and self._open:
            raise AssertionError(f"it is True, but request {next(iter(self._open)).id} has not ended")
        return idle

    @_named
    def refusal(self, spec: RequestSpec) -> str | None:
        before = _values(spec)
        reason = _promised("refusal", self._policy.refusal(spec), str, NoneType)
        _unchanged(spec, before)
        return reason

    @_named
    def add(self, spec: RequestSpec) -> None:
        before = _values(spec)
        self._policy.add(spec)
        _unchanged(spec, before)
        if spec not in self.requests:
            raise AssertionError(f"request {spec.id} is not one of the requests once it was added")
        self._open[spec] = self.requests[spec], before

    @_named
    def cancel(self, spec: RequestSpec) -> None:
        self._policy.cancel(spec)
        self._open.pop(spec, None)

    @_named
    def runs_ahead(self, plan: StepPlan) -> bool:
        return _promised("runs_ahead", self._policy.runs_ahead(plan), bool)

    @_named
    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        """Check that requests end with their last token, a stop token, or where no longer sequence has room."""
        outcome = _promised("update", self._policy.update(plan, result), Outcome)
        for spec, _ in outcome.finished:
            if spec not in self._open:
                raise AssertionError(f"request {spec.id} ends, which is not one of the requests")
            request, before = self._open.pop(spec)
            _unchanged(spec, before)
            room = min(self.pool.num_blocks * self.pool.block_size, self.limits.longest or sys.maxsize) - 2
            if request.seen < min(spec.output_tokens, room - spec.prompt_tokens) and spec not in result.stopped:
                raise AssertionError(f"request {spec.id} ends after {request.seen} of {spec.output_tokens} tokens")
        return outcome

    @_named
    def schedule(self) -> StepPlan | None:
        plan = _promised("schedule", self._policy.schedule(), StepPlan, NoneType)
        if plan is not None:
            self._follow(plan)
            self.steps += 1
        return plan

    @_named
    def over(self, stuck: str) -> None:
        """Check everything at the end of the run."""
        self._check(over=not stuck)
        if stuck:
            raise AssertionError(stuck)

    def _follow(self, plan: StepPlan) -> None:
        """Check a plan as far as it changes something, and everything if that is due."""
        work, pool, requests = plan.work, self.pool, self.requests
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
        if len(requests) < len(self._open):
            gone = next(spec for spec in self._open if spec not in requests)
            raise AssertionError(f"request {gone.id} is no longer one of the requests, and has not ended")
        price = pool.num_blocks + IN_USE * len(self._held)
        self._credit += STEP + ROW * len(work.chunks)
        doubtful = self._credit > 0 and pool.num_blocks - pool.free - len(self._held) != self._beside
        if doubtful or self._credit > price or not self.steps or self._always:
            digest(plan)  # which needs every field of the plan to be of its type
            self._check()
            self._credit -= price if self.steps else 0

    def _change(self, changes: StepChanges) -> None:
        """Take in the changes of requests and their tables."""
        for spec in changes.ended:
            self._drop(spec, self._tables.pop(spec, ()))
        for lost in changes.preempted:
            self._drop(lost.spec, self._tables.pop(lost.spec, ()))
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
        spec, end, size = chunk.spec, chunk.start + chunk.tokens, self.pool.block_size
        request = requests.get(spec)
        if request is None:
            raise AssertionError(f"a row of {spec.id}, which is not one of the requests")
        _numbers.pack(end, chunk.tokens, chunk.order, chunk.outputs, chunk.cached, chunk.recomputed, chunk.padding)
        if chunk.outputs > 1:
            raise AssertionError(f"a row of {spec.id} may yield several tokens, which no run table can hold")
        if chunk.admitted or spec not in self._tables:
            self._drop(spec, self._tables.pop(spec, ()))
            self._tables[spec] = []
        table = self._tables[spec]
        if chunk.blocks:
            table += chunk.blocks
            self._take(chunk.blocks)
        if len(table) > self.pool.entries(request):
            self._check()
        if chunk.tokens < 1 or end != request.computed or end > request.target:
            known = f"{request.computed} are computed then, of {request.target}"
            raise AssertionError(f"a row of {spec.id} has tokens {chunk.start} to {end}, but {known}")
        if end > len(table) * size and not self.pool.groups:
            raise AssertionError(f"{spec.id} computes past its {len(table) * size} tokens of cache")

    def _take(self, blocks: Sequence[int]) -> None:
        """Take in that these blocks are in one more table."""
        if not self._held.isdisjoint(blocks):
            for block in self._held.intersection(blocks):
                self._shared[block] = self._shared.get(block, 0) + 1
        self._held.update(blocks)

    def _drop(self, spec: RequestSpec, blocks: Sequence[int]) -> None:
        """Take in that a request has lost these blocks."""
        self._gone.append((spec, blocks))
        if not self._shared:
            self._held.difference_update(blocks)
            return
        for block in blocks:
            if self._shared.get(block):
                self._shared[block] -= 1
            else:
                self._held.discard(block)

    def _check(self, *, over: bool = False) -> None:
        """Check every block, table and request; `over`: no request may have blocks any more."""
        pool = self.pool
        for request in pool.tables:
            if over or (request.finish is not None and not request.keeps_blocks):
                blocks = pool.table(request)[:8]
                raise AssertionError(f"request {request.spec.id} has ended and still has blocks: {blocks}")
        try:
            pool.check()
        except AssertionError as broken:
            raise AssertionError(self._misplaced() or _message_of(broken)) from broken
        for spec, (_, before) in self._open.items():
            _unchanged(spec, before)
        for spec, table in self._tables.items() if not pool.groups else ():
            if (request := self.requests.get(spec)) is None:
                continue
            if table != (own := pool.table(request))[: len(table)]:
                raise AssertionError(f"{spec.id} has blocks {table[:8]} by its plans, {own[:8]} in the pool")
            if request.computed > len(table) * pool.block_size:
                raise AssertionError(f"{spec.id} computes past its {len(table) * pool.block_size} tokens of cache")
        self._beside = pool.num_blocks - pool.free - len(self._held)

    def _misplaced(self) -> str:
        """Return which block is lost, or free though it has an owner, and whose it was; or an empty text."""
        free = Counter(self.pool.free_order())
        held = {block: request.spec for request in self.pool.tables for block in self.pool.table(request)}
        owners = {block: spec for spec, table in self._gone for block in table} | held
        for block in self._blocks:
            times = free[block] + (block in held)
            if times != 1:
                what = "was released twice" if times else "is lost, neither free nor in a table"
                owner = f"request {owners[block].id} had it last" if block in owners else "no plan has listed it"
                return f"block {block} {what}: {owner}"
        return ""


def _promised(name: str, value: V, *kinds: type) -> V:
    """Return a value if it is of one of the types that the Scheduler protocol promises. Raises AssertionError."""
    if not isinstance(value, kinds):
        allowed = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        raise AssertionError(f"{name} is {str(value)[:60]!r}, expected {allowed}")
    return value


def _unchanged(spec: RequestSpec, before: Any) -> None:
    if (now := _values(spec)) != before:
        pairs = zip(fields(RequestSpec), before, now, strict=True)
        name, old, new = next((field.name, old, new) for field, old, new in pairs if old != new)
        raise AssertionError(f"{name} of request {spec.id} was {old} and is {new}: nobody may change a request")


def _message_of(broken: AssertionError) -> str:
    """Return the message of an assertion in one line."""
    (message,) = broken.args or ("an assertion without a message",)
    return " ".join(str(part) for part in message) if isinstance(message, tuple) else str(message)


def _error_line(error: BaseException) -> str:
    """Return an exception in one line, with its place if that is not here."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = "" if last.filename == __file__ else f" ({last.filename}:{last.lineno})"
    if isinstance(error, AssertionError):
        return f"breaks a rule: {_message_of(error)}{at}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{at}"
