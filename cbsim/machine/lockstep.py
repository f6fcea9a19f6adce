"""Data-parallel servers whose GPUs exchange tokens in every layer: they step together.

Every rank is a server of its own, with its queue, its cache and its loop. A wave is one step of all of them: it starts
when every rank that has something to run has launched it, takes what the slowest takes, and ends for all at once. A
rank without requests takes part with an empty step. Requests go to the rank with the lowest 4 x waiting + running, as
vLLM's client balances (it knows the counts of up to 0.1 s before; here they are those of the moment).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

import simpy

from cbsim.inbox import Inbox
from cbsim.machine.graphs import Shape
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.record import StepTimes

WAITING_WEIGHT = 4


class WaveCost(Protocol):
    """What a wave takes."""

    def lockstep_ns(self, plans: Sequence[StepPlan], tokens: int, ranks: int) -> int:
        """Kernels of a step of `ranks` ranks, those of `plans` with work of their own, padded to `tokens` tokens."""


class _Launched(NamedTuple):
    plan: StepPlan
    tokens: int
    times: StepTimes
    event: simpy.Event


class Lockstep:
    """`ranks` GPUs in step. Copies to and from the device take no time."""

    def __init__(self, env: simpy.Environment, cost: WaveCost, ranks: int) -> None:
        self.env = env
        self.ranks = [Rank(self) for _ in range(ranks)]
        self._cost = cost
        self._free_ns = 0

    def advance(self) -> None:
        """Run every wave that can no longer change."""
        while any(rank.launched for rank in self.ranks):
            if not all(rank.launched or rank.resting for rank in self.ranks):
                return
            self._wave([rank.launched.popleft() for rank in self.ranks if rank.launched])

    def _wave(self, steps: Sequence[_Launched]) -> None:
        start = max(self._free_ns, *(step.times.launch_end_ns for step in steps))
        plans, tokens = [step.plan for step in steps], max(step.tokens for step in steps)
        self._free_ns = end = start + self._cost.lockstep_ns(plans, tokens, len(self.ranks))
        for step in steps:
            times = step.times
            times.h2d_start_ns = times.h2d_end_ns = times.compute_start_ns = start
            times.compute_end_ns = times.d2h_start_ns = times.d2h_end_ns = end
            step.event.succeed()


class Rank:
    """One GPU of the group, as its server's device."""

    def __init__(self, group: Lockstep) -> None:
        self._group = group
        self.launched: deque[_Launched] = deque()  # not part of a wave yet
        self.resting = False
        self._pending: dict[int, simpy.Event] = {}  # by identity of the step's times

    def launch(self, plan: StepPlan, shape: Shape, times: StepTimes) -> None:
        self.resting = False
        if not plan.rows:  # nothing runs on the device
            at = times.launch_end_ns
            times.h2d_start_ns = times.h2d_end_ns = times.compute_start_ns = at
            times.compute_end_ns = times.d2h_start_ns = times.d2h_end_ns = at
            return
        event = self._group.env.event()
        self._pending[id(times)] = event
        self.launched.append(_Launched(plan, shape.tokens, times, event))
        self._group.advance()

    def landing(self, times: StepTimes) -> simpy.Event | None:
        event = self._pending.get(id(times))
        if event is not None and event.triggered:
            del self._pending[id(times)]
            return None
        return event

    def rest(self) -> None:
        self.resting = True
        self._group.advance()


class Server(Protocol):
    """What balancing looks at."""

    @property
    def waiting(self) -> Any: ...

    @property
    def running(self) -> Any: ...


def balance(
    env: simpy.Environment, specs: Sequence[RequestSpec], inboxes: Sequence[Inbox], servers: Sequence[Server]
) -> Generator[Any, Any, None]:
    """The SimPy process of the client: every request goes to a rank when it arrives. Servers take up work again by it.

    `specs` are in order of arrival; the inboxes are empty, and end with the last request.
    """
    for spec in specs:
        if spec.arrival_ns > env.now:
            yield env.timeout(spec.arrival_ns - env.now)
        scores = [_score(server, inbox) for server, inbox in zip(servers, inboxes, strict=True)]
        inbox = inboxes[scores.index(min(scores))]
        inbox.put(spec)
        _wake(env, inbox)
    for inbox in inboxes:
        news, inbox.news = inbox.news, None
        news.succeed()


def _score(server: Server, inbox: Inbox) -> int:
    return WAITING_WEIGHT * (len(server.waiting) + len(inbox)) + len(server.running)


def _wake(env: simpy.Environment, inbox: Inbox) -> None:
    news, inbox.news = inbox.news, env.event()
    news.succeed()
