"""What has not reached the server yet: requests that will arrive and clients that will give up, in order of time.

Every driver takes its polls from here, so what arrives when is decided once for simulated and real clocks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, Protocol

from cbsim.policy.loop import Polled, Scheduler
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.record.record import Record

NEVER_NS = 1 << 200


class Client(Protocol):
    """Where requests come from. The workload of a scenario is one."""

    @property
    def open(self) -> Sequence[RequestSpec]:
        """Requests whose arrival does not depend on the server, in order of (arrival, index)."""

    @property
    def cancels(self) -> list[tuple[int, RequestSpec]]:
        """(time, request) of clients that give up, in order of time."""

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Requests that follow the end of `spec`, with arrivals at or after `now_ns`. Called once for each end."""


class Inbox:
    """The requests and cancellations of one run. What is handed out is noted in the record, under its poll number.

    `coming` yields the requests of `client.open` one by one, so that they need not all be in memory.
    """

    def __init__(self, client: Client, record: Record, coming: Iterator[RequestSpec] | None = None) -> None:
        self._client, self._record = client, record
        self._coming = iter(client.open) if coming is None else coming
        self._left = len(client.open)  # of those, how many have not come up yet
        self._up: RequestSpec | None = None  # the one that has come up last
        self._waiting: list[tuple[int, int, RequestSpec]] = []  # that one, and follow-up requests
        self._cancels = client.cancels[::-1]
        self.due_ns = NEVER_NS  # earliest arrival
        self._come_up()
        self.quits = bool(self._cancels)  # may anybody still give up?
        self.news: Any = None  # of an inbox that is fed while the server runs: an event, the next request or the end

    def __bool__(self) -> bool:
        """May anybody still arrive?"""
        return bool(self._waiting) or self.news is not None

    def __len__(self) -> int:
        """Requests that have been sent and not taken in, or will be sent at a known time."""
        return len(self._waiting) + self._left

    def _come_up(self) -> None:
        """The next request of `client.open` waits with the rest: they are in order."""
        self._up = next(self._coming, None)
        if self._up is not None:
            self._left -= 1
            heappush(self._waiting, (self._up.arrival_ns, self._up.index, self._up))
        self.due_ns = self._waiting[0][0] if self._waiting else NEVER_NS

    def put(self, spec: RequestSpec) -> None:
        """A request that arrives at its `arrival_ns`."""
        heappush(self._waiting, (spec.arrival_ns, spec.index, spec))
        self.due_ns = self._waiting[0][0]

    def arrived(self, now_ns: int) -> list[RequestSpec]:
        """Requests that have arrived until now."""
        arrived = []
        while self.due_ns <= now_ns:
            spec = heappop(self._waiting)[2]
            if spec is self._up:
                self._come_up()
            else:
                self.due_ns = self._waiting[0][0] if self._waiting else NEVER_NS
            self._record.queued(spec, now_ns)
            arrived.append(spec)
        return arrived

    def given_up(self, now_ns: int) -> list[RequestSpec]:
        """Requests cancelled until now. One that waits to be taken in is given up by the poll that does; one that was
        cancelled before it arrived is not: its client had nothing to give up.
        """
        due: list[RequestSpec] = []
        early: list[tuple[int, RequestSpec]] = []
        while self._cancels and self._cancels[-1][0] <= now_ns:
            at_ns, spec = self._cancels.pop()
            if self._record.cancelled(spec):
                due.append(spec)
                self.ended(spec, now_ns)
            elif at_ns >= spec.arrival_ns >= self.due_ns:  # it has been sent and not been taken in
                early.append((at_ns, spec))
        self._cancels += reversed(early)
        self.quits = bool(self._cancels)
        return sorted(due, key=lambda spec: (spec.arrival_ns, spec.index))  # the order that a replay can derive

    def give_up(self, at_ns: int, spec: RequestSpec) -> None:
        """A client gives up while the server runs, no earlier than any other has."""
        self._cancels.insert(0, (at_ns, spec))
        self.quits = True

    def ended(self, spec: RequestSpec, now_ns: int) -> None:
        """A request has ended, for whatever reason: queue those that its client sends next."""
        for follower in self._client.on_finish(spec, now_ns):
            self.put(follower)


OPEN, CLOSED = Polled(), Polled(closed=True)


def note_admissions(record: Record, scheduler: Scheduler, plan: StepPlan) -> None:
    """Record the requests that a step takes in. They are among its chunks: a plan without any needs no call."""
    for chunk in plan.work.chunks:
        if chunk.admitted:
            record.admitted(scheduler.requests[chunk.spec], plan.step)


@contextmanager
def no_collections() -> Iterator[None]:
    """A run makes millions of small objects and no cycles: looking for cycles would take a sixth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
