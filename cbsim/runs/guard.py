"""The guard of a user's own scheduler: a broken rule or exception ends the run in one line with its name and step.

It checks what the scheduler gives, and its plans by their rules (rules.py), everything in every step with
`--check-policy`. Nothing here is an `assert`, which `python -O` drops.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sized
from functools import wraps
from types import NoneType
from typing import Any, TypeVar, cast

from cbsim.errors import PolicyError
from cbsim.kv.blocks import BlockPool
from cbsim.policy.kind import CHECK_POLICY
from cbsim.policy.loop import Limits, Scheduler, Watched
from cbsim.policy.plan import Outcome, StepPlan, StepResult
from cbsim.policy.request import RequestSpec
from cbsim.runs.rules import Rules, message_of, unchanged, values

FLAGS = dict.fromkeys(("polls_before_update", "awaits_when_idle", "idle"), bool)
PROMISED = FLAGS | {"pool": BlockPool, "limits": Limits, "requests": Mapping, "waiting": Sized, "running": Sized}
F = TypeVar("F", bound=Callable[..., Any])
V = TypeVar("V")


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
        self.make(make)

    @_named
    def make(self, make: Callable[[], Scheduler]) -> None:
        """Make the scheduler."""
        policy = self._policy = make()
        for attribute, kind in PROMISED.items():
            _promised(attribute, getattr(policy, attribute), kind)
        self.polls_before_update, self.awaits_when_idle = policy.polls_before_update, policy.awaits_when_idle
        self.pool, self.limits = policy.pool, policy.limits
        self.refused = getattr(policy, "refused", [])
        self._rules = Rules(self.pool, self.limits, os.environ.get(CHECK_POLICY) == "1")
        self._open = self._rules.open

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
        before = values(spec)
        reason = _promised("refusal", self._policy.refusal(spec), str, NoneType)
        unchanged(spec, before)
        if reason == "":
            raise AssertionError("refusal is '', expected a reason, or None to take the request in")
        return reason

    @_named
    def add(self, spec: RequestSpec) -> None:
        before = values(spec)
        self._policy.add(spec)
        unchanged(spec, before)
        if spec not in self._policy.requests:
            raise AssertionError(f"request {spec.id} is not one of the requests once it was added")
        self._open[spec] = self._policy.requests[spec], before

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
            unchanged(spec, before)
            room = min(self.pool.num_blocks * self.pool.block_size, self.limits.longest or sys.maxsize) - 2
            if request.seen < min(spec.output_tokens, room - spec.prompt_tokens) and spec not in result.stopped:
                raise AssertionError(f"request {spec.id} ends after {request.seen} of {spec.output_tokens} tokens")
        return outcome

    @_named
    def schedule(self) -> StepPlan | None:
        plan = _promised("schedule", self._policy.schedule(), StepPlan, NoneType)
        for spec, _ in self.refused:
            self._open.pop(spec, None)
        if plan is not None:
            self._rules.follow(plan, self._policy.requests)
            self.steps += 1
        return plan

    @_named
    def over(self, stuck: str) -> None:
        """Check everything at the end of the run."""
        self._rules.check(self._policy.requests, not stuck)
        if stuck:
            raise AssertionError(stuck)


def _promised(name: str, value: V, *kinds: type) -> V:
    """Return a value if it is of one of the types that the Scheduler protocol promises. Raises AssertionError."""
    if not isinstance(value, kinds):
        allowed = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        raise AssertionError(f"{name} is {str(value)[:60]!r}, expected {allowed}")
    return value


def _error_line(error: BaseException) -> str:
    """Return an exception in one line, with its place if that is not here."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = "" if last.filename == __file__ else f" ({last.filename}:{last.lineno})"
    if isinstance(error, AssertionError):
        return f"breaks a rule: {message_of(error)}{at}"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{at}"
