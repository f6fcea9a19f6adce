"""Data-parallel servers whose GPUs exchange tokens in every layer, so that they step together.

Every rank is a server of its own, with its queue, its cache and its loop. A wave is one step of all of them: it starts
when every rank that has something to run has launched it, takes as long as the slowest, and ends for all at once. A
rank without requests takes part with a dummy token; one that gets its first request after the others have planned their
step waits for the next wave. Where all steps have a CUDA graph, all ranks are padded to the largest, else none is.
Requests go to the rank with the lowest 4 x waiting + running, as vLLM's client balances (its counts are up to 0.1 s
old; here they are current).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import simpy

from cbsim.machine.device import Device
from cbsim.machine.graphs import Shape
from cbsim.policy.loop import Scheduler
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.record.record import StepTimes
from cbsim.runs.inbox import Inbox

WAITING_WEIGHT = 4


class WaveCost(Protocol):
    """The time that a step of all ranks takes on the GPUs."""

    def lockstep_ns(self, plans: Sequence[StepPlan], tokens: Sequence[int]) -> int:
        """Return the kernels' ns: of the query tokens that each rank computes, those of `plans` first."""


class _Launched(NamedTuple):
    plan: StepPlan
    shape: Shape
    ready_ns: int
    times: StepTimes
    event: simpy.Event


class Lockstep:
    """A group of `ranks` GPUs that step together. Copies to and from the device take no time."""

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
        start = max(self._free_ns, *(step.ready_ns for step in steps))
        end = start + self._cost.lockstep_ns([step.plan for step in steps], self._tokens(steps))
        self._free_ns = end = max(end, *(step.times.launch_end_ns for step in steps))  # the last kernel is launched
        for step in steps:
            _fill(step.times, start, end)
            step.event.succeed()

    def _tokens(self, steps: Sequence[_Launched]) -> list[int]:
        """Return the query tokens that every rank computes, those of `steps` first."""
        tokens = [step.shape.tokens for step in steps] + [1] * (len(self.ranks) - len(steps))
        return tokens if any(step.shape.eager for step in steps) else [max(tokens)] * len(tokens)


def _fill(times: StepTimes, start_ns: int, end_ns: int) -> None:
    times.h2d_start_ns = times.h2d_end_ns = times.compute_start_ns = start_ns
    times.compute_end_ns = times.d2h_start_ns = times.d2h_end_ns = end_ns


class Rank(Device):
    """A GPU of the group, as its server's device."""

    def __init__(self, group: Lockstep) -> None:
        super().__init__(None)
        self._group = group
        self.launched: deque[_Launched] = deque()  # not part of a wave yet
        self._rests = False
        self._until: simpy.Event | None = None
        self._pending: dict[int, simpy.Event | None] = {}  # by identity of the step's times; None: of an empty step
        self._completed_ns = 0

    def launch(self, plan: StepPlan, shape: Shape, times: StepTimes) -> None:
        self._rests = False
        if not plan.work.rows:  # nothing runs on the device: it is over with the step before it
            self._pending[id(times)] = None
            return
        event = self._pending[id(times)] = self._group.env.event()
        ready_ns = times.launch_start_ns if shape.eager else times.launch_end_ns
        self.launched.append(_Launched(plan, shape, ready_ns, times, event))
        self._group.advance()

    def completion(self, times: StepTimes) -> simpy.Event | None:
        event = self._pending[id(times)]
        if event is not None and not event.triggered:
            return event
        del self._pending[id(times)]
        if event is None:
            at_ns = max(times.launch_end_ns, self._completed_ns)
            _fill(times, at_ns, at_ns)
        self._completed_ns = times.d2h_end_ns
        return None

    def rest(self, until: simpy.Event | None) -> None:
        self._rests, self._until = True, until
        self._group.advance()

    @property
    def resting(self) -> bool:
        """Whether no request has arrived since the last one ended."""
        return self._rests and not (self._until and self._until.triggered)


def balance(
    env: simpy.Environment, specs: Sequence[RequestSpec], inboxes: Sequence[Inbox], servers: Sequence[Scheduler]
) -> Generator[Any, Any, None]:
    """Run the SimPy process of a client that sends every request to the rank with the lowest load when it arrives."""
    return feed(env, specs, inboxes, partial(_lowest, inboxes, servers))


def _lowest(inboxes: Sequence[Inbox], servers: Sequence[Scheduler], spec: RequestSpec, now_ns: int) -> int:
    del spec, now_ns
    loads = [
        WAITING_WEIGHT * (len(server.waiting) + len(inbox)) + len(server.running)
        for server, inbox in zip(servers, inboxes, strict=True)
    ]
    return loads.index(min(loads))


def feed(
    env: simpy.Environment,
    specs: Sequence[RequestSpec],
    inboxes: Sequence[Inbox],
    choose: Callable[[RequestSpec, int], int],
    ahead_ns: int = 0,
) -> Generator[Any, Any, None]:
    """Run the SimPy process of a client: every request is sent `ahead_ns` before it arrives, to the server of the index
    that `choose` returns for it and that time, and wakes it.

    `specs` are in order of arrival; the inboxes are empty, and close after the last request.
    """
    sent = [env.timeout(spec.arrival_ns - ahead_ns) for spec in specs]  # first at a tie: before any event of a server
    for spec, event in zip(specs, sent, strict=True):
        yield event
        inbox = inboxes[choose(spec, int(env.now))]
        inbox.put(spec)
        news, inbox.news = inbox.news, env.event()
        news.succeed()
    for inbox in inboxes:
        news, inbox.news = inbox.news, None
        news.succeed()
