"""The serving loop, written once: synchronous at depth 1, asynchronous at depth 2.

It decides in plain code and asks for effects by yielding them; a driver supplies the answers, in simulated time, on a
device, or from a recording; and times what it does for each, under the same phase names in every world.

    Poll      -> Polled      arrivals and cancellations until now
    Launch    -> ticket      a step has been planned: account for that, prepare it, queue its copies and kernels
    Idle      -> None        planning found nothing to run: account for that
    Await     -> Completed   block until that step's outputs are on the host
    Applied   -> None        the result has been applied: account for that; its tokens are visible from then on
    Refused   -> None        a request that is not served, or no longer, with the reason

With depth 2, step N+1 is planned and launched before step N is awaited, so a plan knows the results up to N-1 only.

A run that makes no progress ends: nothing can be planned and nothing will arrive, or requests preempt each other for
ever (`Standstill`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence, Sized
from typing import Any, Final, NamedTuple, Protocol

from cbsim.errors import DeadlockError
from cbsim.kv.blocks import BlockPool
from cbsim.policy.plan import Outcome, StepPlan, StepResult
from cbsim.policy.request import Request, RequestSpec, Status
from cbsim.policy.value import mypyc_attr, value


@value(init=False)
class Polled:
    """The answer to `Poll`. `closed`: nothing will ever arrive any more."""

    def __init__(
        self, arrivals: Sequence[RequestSpec] = (), cancels: Sequence[RequestSpec] = (), closed: bool = False
    ) -> None:
        self.arrivals: Final = arrivals
        self.cancels: Final = cancels
        self.closed: Final = closed


@value(frozen=True)
class Poll:
    """The effect that polls for arrivals and cancellations. `wait`: nothing else to do, block until one arrives."""

    wait: bool = False


@value(init=False)
class Launch:
    def __init__(self, plan: StepPlan) -> None:
        self.plan: Final = plan


@value(frozen=True)
class Idle:
    pass


@value(init=False)
class Await:
    """The effect that awaits a step's result. `cancels`: with the cancellations received until it is there."""

    def __init__(self, plan: StepPlan, ticket: Any, cancels: bool) -> None:
        self.plan: Final = plan
        self.ticket: Final = ticket
        self.cancels: Final = cancels


@value(init=False)
class Completed:
    """The answer to `Await`."""

    def __init__(self, result: StepResult, cancels: Sequence[RequestSpec] = ()) -> None:
        self.result: Final = result
        self.cancels: Final = cancels


@value(init=False)
class Applied:
    def __init__(self, plan: StepPlan, outcome: Outcome) -> None:
        self.plan: Final = plan
        self.outcome: Final = outcome


@value(frozen=True)
class Refused:
    spec: RequestSpec
    reason: str


InFlight = deque[tuple[StepPlan, Any]]  # oldest first, each with its driver's ticket
Effect = Poll | Launch | Idle | Await | Applied | Refused
POLL: Final = Poll()
WAIT: Final = Poll(wait=True)
IDLE: Final = Idle()


class Limits(NamedTuple):
    """The largest steps and requests of a scheduler. None means that it has no limit of its own."""

    slots: int | None = None  # requests that run at a time
    rows: int | None = None  # requests in a step
    tokens: int | None = None  # query tokens in a step
    longest: int | None = None  # tokens of a sequence: a longer one is refused, or ends there
    graphs: int | None = None  # query tokens of the largest CUDA graph
    filled: bool = False  # whether all rows of a step are padded to its longest, by tokens that are not kept
    table: int | None = None  # blocks of the longest table, where it may have more room than its sequence needs


class Scheduler(Protocol):
    """A policy: all that the loop and its drivers use of it. `depth` steps may be in flight.

    Drivers read `requests`, those that have not ended, the KV cache `pool` and `limits`, and write none of them.
    `waiting` requests have not been admitted, or have to wait again; `running` ones are admitted and have not ended.
    It is `idle` when there is nothing to plan, not even a last report.
    """

    polls_before_update: bool  # whether cancellations are taken between a result's arrival and its application
    awaits_when_idle: bool  # whether a step in flight is awaited when no request is left
    refused: list[tuple[RequestSpec, str]]  # requests that it has refused since they were added, with the reasons

    @property
    def pool(self) -> BlockPool: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def requests(self) -> Mapping[RequestSpec, Request]: ...
    @property
    def waiting(self) -> Sized: ...
    @property
    def running(self) -> Sized: ...
    @property
    def idle(self) -> bool: ...

    def refusal(self, spec: RequestSpec) -> str | None:
        """Return why this request can never be served, or None."""

    def add(self, spec: RequestSpec) -> None:
        """Queue a request that has arrived and was not refused."""

    def cancel(self, spec: RequestSpec) -> None:
        """End a request at once; do nothing if it is unknown or over."""

    def schedule(self) -> StepPlan | None:
        """Plan a step and schedule its outputs, or return None when no row can be run."""

    def runs_ahead(self, plan: StepPlan) -> bool:
        """True if another step may be planned before this one's result is taken, as far as depth allows."""

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        """Apply the result of the oldest step in flight."""


LEAST_STEPS = 1000  # that a standstill lasts before it is looked at
MOST_NAMED = 3  # requests of a standstill that its message lists


class Standstill:
    """The steps since any request got further: delivered a token, or computed one for the first time.

    A request that is not preempted computes a token or more in each of its rows. So after as many steps as all requests
    together have tokens, one that keeps its blocks would have computed again all that it had lost, and got further. If
    none has, they take the blocks from each other, or wait for blocks that no request will free.
    """

    def __init__(self) -> None:
        self.steps = self.preemptions = 0
        self._limit = LEAST_STEPS

    def applied(self, scheduler: Scheduler, plan: StepPlan, result: StepResult, outcome: Outcome) -> None:
        """Note a step whose result has been applied. Raises DeadlockError."""
        work = plan.work
        if work.decodes > outcome.wasted_rows or outcome.received or outcome.finished or not scheduler.requests:
            self.steps = self.preemptions = 0
            return
        for chunk in work.chunks:
            if chunk.tokens > chunk.recomputed:
                self.steps = self.preemptions = 0
                return
        if result.moved and not work.chunks:
            return  # it waited for a transfer of KV
        self.steps += 1
        self.preemptions += len(plan.changes.preempted)
        if self.steps >= self._limit:
            self._limit = LEAST_STEPS + sum([request.target for request in scheduler.requests.values()])
            if self.steps >= self._limit:
                lost = f"{self.preemptions:,} preemptions, " if self.preemptions else ""
                since = f"in {self.steps:,} steps, from {plan.step - self.steps + 1:,} on"
                raise _over(scheduler, f"no request has got further {since}: {lost}{_held(scheduler)}")


def _held(scheduler: Scheduler) -> str:
    """Return which requests are left, with their progress, and how many blocks are free for them."""
    left = list(scheduler.requests.values())
    kinds = [("running", [r for r in left if r.status is not Status.WAITING])]
    kinds.append(("waiting", [r for r in left if r.status is Status.WAITING]))
    words = []
    for name, requests in kinds:
        named = [f"{r.spec.id} ({r.computed} of {r.target} tokens computed)" for r in requests[:MOST_NAMED]]
        more = [f"{len(requests) - MOST_NAMED} more"] if len(requests) > MOST_NAMED else []
        words += [f"{name}: {', '.join(named + more)}"] if named else []
    return "; ".join([*words, f"{scheduler.pool.free:,} of {scheduler.pool.num_blocks:,} blocks are free"])


@mypyc_attr(allow_interpreted_subclasses=True)
class Watched:
    """A scheduler that is told when its run is over, and `stuck`: why it cannot go on, or nothing."""

    def over(self, stuck: str) -> None:
        raise NotImplementedError


class Waves:
    """The waves, steps that several servers take together, as the scheduler of one sees them: `next` is the number of
    its next one. `prefills(wave, generates)`: may it compute prompts in that wave, or do they wait for other servers'?
    """

    def __init__(self, prefills: Callable[[int, bool], bool]) -> None:
        self.next = 0
        self.prefills = prefills


def _over(scheduler: object, stuck: str) -> DeadlockError:
    """Say that a run is over, and return the error of one that is stuck."""
    if isinstance(scheduler, Watched):
        scheduler.over(stuck)
    return DeadlockError(stuck)


def serve(scheduler: Scheduler, depth: int) -> Generator[Effect, Any, None]:
    """Run `scheduler` until its arrivals are closed and everything has ended. Raises DeadlockError."""
    in_flight: InFlight = deque()
    standstill, awaits_when_idle = Standstill(), scheduler.awaits_when_idle
    polls_before_update = scheduler.polls_before_update
    stalled = closed = False
    while in_flight or not closed:
        if not closed:  # else it stays idle, and what is in flight is awaited
            idle = scheduler.idle
            polled: Polled = yield _poll(in_flight, idle, awaits_when_idle, stalled)
            if polled.arrivals or polled.cancels:
                yield from _admit(scheduler, polled)
                idle = scheduler.idle
            closed = polled.closed and _must_wait(in_flight, idle, awaits_when_idle)
            awaits_when_idle |= closed
        plan = None if idle else scheduler.schedule()
        if getattr(scheduler, "refused", None):  # it may do without
            yield from _refusals(scheduler)
        if plan:
            in_flight.append((plan, (yield Launch(plan))))
            stalled = False
            if len(in_flight) < depth and scheduler.runs_ahead(plan):
                continue  # another step may be planned before this one's result is taken
        elif not idle:
            yield IDLE
        stalled = _stalls(scheduler, in_flight, idle, polled.closed)
        if in_flight and not _must_wait(in_flight, idle, awaits_when_idle):
            plan, ticket = in_flight.popleft()
            completed: Completed = yield Await(plan, ticket, polls_before_update)
            _cancel(scheduler, completed.cancels)
            outcome = scheduler.update(plan, completed.result)
            yield Applied(plan, outcome)
            standstill.applied(scheduler, plan, completed.result, outcome)
    _over(scheduler, "")


def _poll(in_flight: InFlight, idle: bool, awaits_when_idle: bool, stalled: bool) -> Poll:
    return WAIT if stalled or _must_wait(in_flight, idle, awaits_when_idle) else POLL


def _must_wait(in_flight: InFlight, idle: bool, awaits_when_idle: bool) -> bool:
    """True if there is nothing to plan and nothing to await until something arrives."""
    return idle and not (in_flight and awaits_when_idle)


def _stalls(scheduler: Scheduler, in_flight: InFlight, idle: bool, closed: bool) -> bool:
    """True if requests are left for which no step can be planned. Raises DeadlockError if no others will arrive."""
    if in_flight or idle:
        return False
    if closed:
        raise _over(scheduler, f"no step can be planned for the requests that are left: {_held(scheduler)}")
    return True


def _admit(scheduler: Scheduler, polled: Polled) -> Generator[Effect, Any, None]:
    for spec in polled.arrivals:
        reason = scheduler.refusal(spec)
        if reason:
            yield Refused(spec, reason)
        else:
            scheduler.add(spec)
    _cancel(scheduler, polled.cancels)
    if getattr(scheduler, "refused", None):
        yield from _refusals(scheduler)


def _cancel(scheduler: Scheduler, specs: Sequence[RequestSpec]) -> None:
    for spec in specs:
        scheduler.cancel(spec)


def _refusals(scheduler: Scheduler) -> list[Refused]:
    """Take the requests that a scheduler has refused since they were added."""
    taken = [Refused(*each) for each in scheduler.refused]
    scheduler.refused.clear()
    return taken
