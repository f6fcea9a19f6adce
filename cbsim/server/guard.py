"""A user's own scheduler, watched: what it breaks or raises ends the run in one line that names it and the step.

Ours are proven by tests and recorded traces, and run without this.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sized
from typing import TypeVar

from cbsim.policy.blocks import BlockPool
from cbsim.policy.kind import Options
from cbsim.policy.limits import Limits
from cbsim.policy.loop import Scheduler
from cbsim.policy.plan import Batch, Outcome, StepPlan, StepResult
from cbsim.policy.request import Request, RequestSpec
from cbsim.policy.schedulers.registry import Kind
from cbsim.results.directory import RunError

T = TypeVar("T")


class PolicyError(RunError):
    """A scheduler that is not ours has failed. The message names it, the step and what was wrong."""


class Guarded:
    """A scheduler whose every answer is checked: raises PolicyError."""

    def __init__(self, policy: Scheduler, name: str) -> None:
        self._policy, self._name = policy, name
        self._steps = 0
        self._batch = Batch()
        self._tables: dict[RequestSpec, list[int]] = {}  # as an executor knows them from the plans
        self._open: dict[RequestSpec, None] = {}  # have come and not ended
        self.polls_before_update = policy.polls_before_update
        self.awaits_when_idle = policy.awaits_when_idle

    @property
    def pool(self) -> BlockPool:
        return self._policy.pool

    @property
    def limits(self) -> Limits:
        return self._policy.limits

    @property
    def requests(self) -> Mapping[RequestSpec, Request]:
        return self._policy.requests

    @property
    def waiting(self) -> Sized:
        return self._policy.waiting

    @property
    def running(self) -> Sized:
        return self._policy.running

    @property
    def idle(self) -> bool:
        idle = self._ask("idle", lambda: self._policy.idle)
        if idle and self._open:
            raise self._error("idle", f"it has nothing to do, but request {next(iter(self._open)).id} has not ended")
        return idle

    def refusal(self, spec: RequestSpec) -> str | None:
        return self._ask("refusal", lambda: self._policy.refusal(spec))

    def add(self, spec: RequestSpec) -> None:
        self._ask("add", lambda: self._policy.add(spec))
        self._open[spec] = None

    def cancel(self, spec: RequestSpec) -> None:
        self._ask("cancel", lambda: self._policy.cancel(spec))
        self._open.pop(spec, None)

    def runs_ahead(self, plan: StepPlan) -> bool:
        return self._ask("runs_ahead", lambda: self._policy.runs_ahead(plan))

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        outcome = self._ask("update", lambda: self._policy.update(plan, result))
        for spec, _ in outcome.finished:
            self._open.pop(spec, None)
        return outcome

    def schedule(self) -> StepPlan | None:
        plan = self._ask("schedule", self._policy.schedule)
        if plan is not None:
            try:
                self._check(plan)
            except AssertionError as broken:
                raise self._error("schedule", f"plan breaks a rule: {_words(broken)}") from broken
            self._steps += 1
        return plan

    def _ask(self, method: str, act: Callable[[], T]) -> T:
        try:
            return act()
        except AssertionError as broken:
            raise self._error(method, f"breaks a rule: {_words(broken)}{_place(broken)}") from broken
        except Exception as error:  # it is somebody else's code
            raise self._error(method, _said(error)) from error

    def _error(self, method: str, text: str) -> PolicyError:
        return PolicyError(f"scheduler {self._name}, step {self._steps}, {method}: {text}")

    def _check(self, plan: StepPlan) -> None:
        """Rows belong to requests that are there, tables to the pool, and the step stays within its limits."""
        assert plan.step == self._steps, f"step is {plan.step}, expected {self._steps}"
        rows = self._batch.rows(plan)
        replaced = {(spec, index): block for spec, index, block in plan.changes.replaced}
        for spec in (*plan.changes.ended, *(lost.spec for lost in plan.changes.preempted)):
            self._tables.pop(spec, None)
        for (spec, index), block in replaced.items():
            if spec in self._tables:
                self._tables[spec][index] = block
        seen: set[RequestSpec] = set()
        for row in rows:
            assert row.spec in self.requests, f"a row of {row.spec.id}, which is not one of the requests"
            assert row.spec not in seen, f"two rows of {row.spec.id}"
            seen.add(row.spec)
            self._check_table(row.spec, row.blocks, whole=row.chunk is not None and row.chunk.admitted)
            held = len(self._tables[row.spec]) * self.pool.block_size
            assert row.start + row.tokens <= held, f"{row.spec.id} computes past its {held} tokens of cache"
            several = row.chunk is not None and row.chunk.outputs > 1
            assert not several, f"a row of {row.spec.id} may yield several tokens, which no run table can hold"
        self._check_limits(plan)
        self.pool.check()

    def _check_table(self, spec: RequestSpec, blocks: tuple[int, ...], *, whole: bool) -> None:
        table = self._tables.setdefault(spec, [])
        if whole:
            table.clear()
        table += blocks
        own = self.pool.table(self.requests[spec])
        assert table == own[: len(table)], f"{spec.id} has blocks {table} by its plans, {own} in the pool"

    def _check_limits(self, plan: StepPlan) -> None:
        limits = self.limits
        most_rows = min(value for value in (limits.rows, limits.seats, plan.work.rows) if value is not None)
        assert plan.work.rows <= most_rows, f"{plan.work.rows} rows, {most_rows} are allowed"
        assert limits.tokens is None or plan.work.tokens <= limits.tokens, (
            f"{plan.work.tokens} query tokens, {limits.tokens} are allowed"
        )


def _words(broken: AssertionError) -> str:
    """What an assertion says, in a line."""
    (said,) = broken.args or ("an assertion without a text",)
    return " ".join(str(part) for part in said) if isinstance(said, tuple) else str(said)


def _said(error: Exception) -> str:
    """An exception in one line, with its place."""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text}{_place(error)}"


def _place(error: BaseException) -> str:
    """Where it was raised: the last line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def guarded(kind: Kind, options: Options, name: str) -> Scheduler:
    """A scheduler of somebody else's kind, watched. Raises PolicyError if it cannot even be made."""
    try:
        return Guarded(kind.make(options), name)
    except Exception as error:  # it is somebody else's code
        raise PolicyError(f"scheduler {name} cannot be made: {_said(error)}") from error
