"""Requests that have not reached the server yet, and cancellations, in order of time.

Every driver takes its polls from here, so arrivals follow one rule on simulated and real clocks.
"""

from __future__ import annotations

from bisect import insort_left
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Final, Protocol

from cbsim.policy.loop import Polled, Scheduler
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import IN_ORDER
from cbsim.record.record import Record

NEVER_NS: Final = (1 << 62) - 1  # later than any time, and quick to compare: a compiled integer of one word


class Client(Protocol):
    """A source of requests, such as the workload of a scenario."""

    @property
    def open(self) -> Sequence[RequestSpec]:
        """The requests whose arrival does not depend on the server, in order of (arrival, index)."""

    @property
    def cancels(self) -> list[tuple[int, RequestSpec]]:
        """The cancellations as (time, request), in order of time."""

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Return the requests that follow the end of `spec`, arriving at `now_ns` or later; called once an end."""


class Arrivals:
    """Requests in order of arrival: `coming` ones, one by one, so that they need not all be in memory, and others."""

    def __init__(self, coming: Iterator[RequestSpec]) -> None:
        self._coming = coming
        self._up: RequestSpec | None = None  # the last one of `coming`
        self._waiting: list[tuple[int, int, RequestSpec]] = []
        self.came_up = 0  # of `coming`
        self.due_ns = NEVER_NS  # earliest arrival
        self._come_up()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def _come_up(self) -> None:
        self._up = next(self._coming, None)
        if self._up is not None:
            self.came_up += 1
            self.put(self._up)

    def put(self, spec: RequestSpec, at_ns: int | None = None) -> None:
        """Add a request that arrives at a time, that of the request if there is none."""
        heappush(self._waiting, (spec.arrival_ns if at_ns is None else at_ns, spec.index, spec))
        self.due_ns = self._waiting[0][0]

    def take(self) -> RequestSpec:
        """Return and remove the next request."""
        spec = heappop(self._waiting)[2]
        self.due_ns = self._waiting[0][0] if self._waiting else NEVER_NS
        if spec is self._up:
            self._come_up()
        return spec


class Inbox(Arrivals):
    """The requests and cancellations of one run. Those handed out are noted in the record with their poll number.

    `coming` yields the requests of `client.open`.
    """

    def __init__(self, client: Client, record: Record, coming: Iterator[RequestSpec] | None = None) -> None:
        super().__init__(iter(client.open) if coming is None else coming)
        self._client, self._record, self._open = client, record, len(client.open)
        self._cancels = client.cancels[::-1]
        self.quits = bool(self._cancels)  # whether a cancellation may still come
        self.news: Any = None  # event of the next request or the end, for an inbox fed while the server runs

    def __bool__(self) -> bool:
        """True if a request may still arrive."""
        return bool(self._waiting) or self.news is not None

    def __len__(self) -> int:
        """Return the number of requests that are sent and not yet queued, or will be sent at a known time."""
        return len(self._waiting) + self._open - self.came_up

    def arrived(self, now_ns: int) -> list[RequestSpec]:
        """Take the requests that have arrived until now, and record them as queued."""
        arrived = []
        while self.due_ns <= now_ns:
            spec = self.take()
            self._record.queued(spec, now_ns)
            arrived.append(spec)
        return arrived

    def given_up(self, now_ns: int) -> list[RequestSpec]:
        """Take the requests cancelled until now. A request that has arrived and is not queued yet is cancelled by the
        poll that queues it; a cancellation before the arrival has no effect.
        """
        due: list[RequestSpec] = []
        early: list[tuple[int, RequestSpec]] = []
        while self._cancels and self._cancels[-1][0] <= now_ns:
            at_ns, spec = self._cancels.pop()
            if self._record.cancelled(spec):
                due.append(spec)
                self.ended(spec, now_ns)
            elif at_ns >= spec.arrival_ns >= self.due_ns:  # it has arrived and is not queued yet
                early.append((at_ns, spec))
        self._cancels += reversed(early)
        self.quits = bool(self._cancels)
        return sorted(due, key=lambda spec: (spec.arrival_ns, spec.index))  # the order that a replay can derive

    def give_up(self, at_ns: int, spec: RequestSpec) -> None:
        """Add a cancellation while the server runs, after others of the same time."""
        insort_left(self._cancels, (at_ns, spec), key=lambda each: -each[0])
        self.quits = True

    def ended(self, spec: RequestSpec, now_ns: int) -> None:
        """Add the requests that follow one that has ended, for whatever reason."""
        for follower in self._client.on_finish(spec, now_ns):
            self.put(follower)


OPEN: Final = Polled()
CLOSED: Final = Polled(closed=True)


def note_admissions(record: Record, scheduler: Scheduler, plan: StepPlan) -> None:
    """Record the requests that a step admits, and whose KV it begins to fetch: one may end as soon as it is there. They
    are among its chunks and transfers: a plan without any needs no call.
    """
    for chunk in plan.work.chunks:
        if chunk.admitted:
            record.admitted(scheduler.requests[chunk.spec], plan.step)
    for transfer in plan.transfers:
        if transfer.job != IN_ORDER and transfer.spec is not None and transfer.spec in scheduler.requests:
            record.fetching(scheduler.requests[transfer.spec], plan.step)
