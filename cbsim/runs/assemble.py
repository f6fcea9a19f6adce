"""The parts of a server that simulator and engine share, built from a scenario: scheduler and cost model.

Everything is built from the scenario, which alone has defaults; nothing is shared between two runs. A user's own
scheduler is checked: a broken rule or exception ends the run in one line with its name and step. Ours are tested and
compared with recorded traces, and run without these checks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar, cast

from cbsim.cost.base import Copies, Cost
from cbsim.errors import RunError
from cbsim.policy.groups import LayerGroup, page_layers
from cbsim.policy.loop import Scheduler
from cbsim.policy.plan import Batch, Outcome, StepPlan, StepResult
from cbsim.policy.request import RequestSpec
from cbsim.scenario.scenario import Scenario
from cbsim.schedulers import registry


def scheduler(scenario: Scenario, loop: str) -> Scheduler:
    """Build a fresh scheduler for one loop, `sync` or `async`. Raises ScenarioError if the model does not fit,
    PolicyError if the scheduler is not ours and cannot be made.
    """
    kind, options, name = scenario.kind, scenario.options(loop), scenario.scheduler.name
    if name in registry.OURS:
        return kind.make(options)
    try:
        return cast("Scheduler", Guarded(kind.make(options), name))
    except Exception as error:  # the plug-in's code may raise anything
        raise PolicyError(f"scheduler {name} cannot be made: {_error_line(error)}") from error


def cost_model(scenario: Scenario) -> Cost:
    """Build the scenario's cost model. Raises ScenarioError for tables that are missing, or of another GPU or model."""
    module, _, name = scenario.cost.builder.partition(":")
    cost: Cost = getattr(import_module(module), name)(scenario, scenario.cost)
    return cost


def copies(scenario: Scenario, groups: Sequence[LayerGroup] = ()) -> Copies:
    """Return the time of KV transfers by the GPU's data sheet: of blocks of all layers, or of pages of groups."""
    gpu, model = scenario.hardware, scenario.model
    layers = page_layers(groups) if groups else model.layers
    block_bytes = scenario.block_size * model.kv_bytes_per_token // model.layers * layers // scenario.gpus
    return Copies(block_bytes, gpu.pcie_bytes_s, gpu.memory_bandwidth_bytes_s)


T = TypeVar("T")


class PolicyError(RunError):
    """An error of a scheduler that is not ours. The message has its name, the step and the reason."""


class Guarded:
    """A scheduler whose every result is checked. Raises PolicyError."""

    def __init__(self, policy: Scheduler, name: str) -> None:
        self._policy, self._name = policy, name
        self._steps = 0
        self._batch = Batch()
        self._tables: dict[RequestSpec, list[int]] = {}  # block tables as an executor derives them from the plans
        self._open: dict[RequestSpec, None] = {}  # requests that were added and have not ended

    def __getattr__(self, name: str) -> Any:
        """Return the scheduler's own attribute: pool, limits, requests or queues."""
        return getattr(self._policy, name)

    @property
    def idle(self) -> bool:
        idle = self._call("idle", lambda: self._policy.idle)
        if idle and self._open:
            raise self._error("idle", f"it has nothing to do, but request {next(iter(self._open)).id} has not ended")
        return idle

    def refusal(self, spec: RequestSpec) -> str | None:
        return self._call("refusal", lambda: self._policy.refusal(spec))

    def add(self, spec: RequestSpec) -> None:
        self._call("add", lambda: self._policy.add(spec))
        self._open[spec] = None

    def cancel(self, spec: RequestSpec) -> None:
        self._call("cancel", lambda: self._policy.cancel(spec))
        self._open.pop(spec, None)

    def runs_ahead(self, plan: StepPlan) -> bool:
        return self._call("runs_ahead", lambda: self._policy.runs_ahead(plan))

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        outcome = self._call("update", lambda: self._policy.update(plan, result))
        for spec, _ in outcome.finished:
            self._open.pop(spec, None)
        return outcome

    def schedule(self) -> StepPlan | None:
        plan = self._call("schedule", self._policy.schedule)
        if plan is not None:
            try:
                self._check(plan)
            except AssertionError as broken:
                raise self._error("schedule", f"plan breaks a rule: {_message_of(broken)}") from broken
            self._steps += 1
        return plan

    def _call(self, method: str, act: Callable[[], T]) -> T:
        try:
            return act()
        except AssertionError as broken:
            raise self._error(method, f"breaks a rule: {_message_of(broken)}{_raised_at(broken)}") from broken
        except Exception as error:  # the plug-in's code may raise anything
            raise self._error(method, _error_line(error)) from error

    def _error(self, method: str, message: str) -> PolicyError:
        return PolicyError(f"scheduler {self._name}, step {self._steps}, {method}: {message}")

    def _check(self, plan: StepPlan) -> None:
        """Check that rows are of known requests, tables agree with the pool, and the step is within its limits."""
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
            capacity = len(self._tables[row.spec]) * self.pool.block_size
            assert row.start + row.tokens <= capacity, f"{row.spec.id} computes past its {capacity} tokens of cache"
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
        most_rows = min(value for value in (limits.rows, limits.slots, plan.work.rows) if value is not None)
        assert plan.work.rows <= most_rows, f"{plan.work.rows} rows, {most_rows} are allowed"
        assert limits.tokens is None or plan.work.tokens <= limits.tokens, (
            f"{plan.work.tokens} query tokens, {limits.tokens} are allowed"
        )


def _message_of(broken: AssertionError) -> str:
    """Return the message of an assertion in one line."""
    (message,) = broken.args or ("an assertion without a message",)
    return " ".join(str(part) for part in message) if isinstance(message, tuple) else str(message)


def _error_line(error: Exception) -> str:
    """Return an exception in one line, with its place."""
    message = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {message}{_raised_at(error)}"


def _raised_at(error: BaseException) -> str:
    """Return the place at which an error was raised: the last frame of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
