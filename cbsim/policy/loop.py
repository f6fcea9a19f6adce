"""The serving loop, written once: synchronous at depth 1, asynchronous at depth 2.

It decides in plain code and asks for effects by yielding them; a driver supplies the answers, in simulated time, on a
device, or from a recording. The effects are also the span names of a trace.

    Poll      -> Polled        arrivals and cancellations until now
    Scheduled -> None          the work of planning a step has been done: account for its CPU time
    Launch    -> ticket        prepare the step and queue its copies and kernels; does not wait for them
    Await     -> StepResult    block until that step's outputs are on the host
    Applied   -> None          the result has been applied: account for its CPU time, tokens are visible from then on
    Refused   -> None          a request that can never be served, with the reason

With depth 2, step N+1 is planned and launched before step N is awaited, so a plan knows the results up to N-1 only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

from cbsim.policy.plan import Outcome, StepPlan, StepResult
from cbsim.policy.request import RequestSpec


class Polled(NamedTuple):
    """Answer to `Poll`. `closed`: nothing will ever arrive any more."""

    arrivals: Sequence[RequestSpec] = ()
    cancels: Sequence[RequestSpec] = ()
    closed: bool = False


class Poll(NamedTuple):
    """`wait`: there is nothing else to do, so block until something arrives. `arrivals` False: cancellations only."""

    wait: bool = False
    arrivals: bool = True


POLL, WAIT, POLL_CANCELS = Poll(), Poll(wait=True), Poll(arrivals=False)


class Scheduled(NamedTuple):
    plan: StepPlan | None


class Launch(NamedTuple):
    plan: StepPlan


class Await(NamedTuple):
    plan: StepPlan
    ticket: Any


class Applied(NamedTuple):
    plan: StepPlan
    outcome: Outcome


class Refused(NamedTuple):
    spec: RequestSpec
    reason: str


Effect = Poll | Scheduled | Launch | Await | Applied | Refused


class Stuck(RuntimeError):
    """The scheduler holds requests, can plan nothing, and nothing is in flight that could change that."""


class Scheduler(Protocol):
    """What the loop asks of a policy. `depth` steps may be in flight."""

    polls_before_update: bool  # are cancellations taken between a result's arrival and its application?
    awaits_when_idle: bool  # is a step in flight awaited when no request is left?

    @property
    def idle(self) -> bool:
        """There is nothing to plan, not even a last report."""

    def refusal(self, spec: RequestSpec) -> str | None:
        """Why this request can never be served, or None."""

    def add(self, spec: RequestSpec) -> None: ...

    def cancel(self, spec: RequestSpec) -> None:
        """End a request at once; nothing happens if it is unknown or over."""

    def schedule(self) -> StepPlan | None:
        """Plan a step and promise its outcome, or None when no row can be run."""

    def runs_ahead(self, plan: StepPlan) -> bool:
        """May another step be planned before this one's result is taken, as far as depth allows?"""

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        """Apply the result of the oldest step in flight."""


def serve(scheduler: Scheduler, depth: int) -> Generator[Effect, Any, None]:
    """Run `scheduler` until its arrivals are closed and everything has ended. Raises Stuck."""
    in_flight: deque[tuple[StepPlan, Any]] = deque()
    stalled = False
    while True:
        quiet = stalled or (scheduler.idle and not (in_flight and scheduler.awaits_when_idle))
        polled: Polled = yield WAIT if quiet else POLL
        if polled.arrivals or polled.cancels:
            yield from _admit(scheduler, polled)
        idle = scheduler.idle
        if idle and polled.closed and not (in_flight and scheduler.awaits_when_idle):
            break
        plan = None
        if not idle:
            plan = scheduler.schedule()
            yield Scheduled(plan)
        if plan:
            in_flight.append((plan, (yield Launch(plan))))
            if len(in_flight) < depth and scheduler.runs_ahead(plan):
                continue
        stalled = not in_flight and not idle
        if stalled and polled.closed:
            raise Stuck("no step can be planned for the requests that are left")
        if in_flight and (plan or scheduler.awaits_when_idle or not idle):
            yield from _land(scheduler, *in_flight.popleft())
    while in_flight:
        yield from _land(scheduler, *in_flight.popleft())


def _admit(scheduler: Scheduler, polled: Polled) -> Generator[Effect, Any, None]:
    for spec in polled.arrivals:
        reason = scheduler.refusal(spec)
        if reason:
            yield Refused(spec, reason)
        else:
            scheduler.add(spec)
    for spec in polled.cancels:
        scheduler.cancel(spec)


def _land(scheduler: Scheduler, plan: StepPlan, ticket: Any) -> Generator[Effect, Any, None]:
    result: StepResult = yield Await(plan, ticket)
    if scheduler.polls_before_update:
        polled: Polled = yield POLL_CANCELS
        for spec in polled.cancels:
            scheduler.cancel(spec)
    yield Applied(plan, scheduler.update(plan, result))
