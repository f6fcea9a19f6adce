"""What stands before several servers on one clock: the client that sends each request to one of them, and what a router
knows of them when it chooses.

A server's CPU may be ahead of the environment's clock by the phase it is in. So the news for a router, that a request
was answered or has ended, wait here until their time has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from types import SimpleNamespace
from typing import cast

import simpy
from simpy.events import URGENT

from cbsim.kv.blocks import BlockPool
from cbsim.machine.driver import Machine
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.record.columns import NS
from cbsim.routers.base import Router, View
from cbsim.runs.inbox import NEVER_NS, Arrivals, Inbox
from cbsim.scenario.fleet import Signals
from cbsim.workload.requests import Workload


class Front:
    """The client of several servers: `choose` returns who gets a request, those that follow others included, when it
    arrives. The inboxes, which take it for their client, close after the last request. Requests that arrive at the same
    time are sent in order of their index, before any server acts at that time.
    """

    open: Sequence[RequestSpec] = ()

    def __init__(self, env: simpy.Environment, client: Workload, inboxes: list[Inbox]) -> None:
        self.cancels = client.cancels
        self._env, self._client = env, client
        self.choose: Callable[[RequestSpec, int], int] | None = None
        self.ended: Callable[[RequestSpec, int], None] | None = None  # called with each request that ends, and when
        self.inboxes = inboxes
        self._left = len(client.open)  # requests that have not arrived, or not ended
        self._due = Arrivals(client.arriving())
        self._wakes_ns = NEVER_NS
        self._periodic = 0  # calls at a period
        self._arm()

    def is_open(self) -> bool:
        """Return whether a request may still be sent, or end."""
        return self._left > 0

    def every(self, period_ns: int, act: Callable[[int], None], first_ns: int = 0) -> None:
        """Call `act` with the time at every period as long as a request may be sent or end, and anything else is to
        happen by which one could.
        """
        self._periodic += 1

        def again(_: simpy.Event) -> None:
            act(now_ns := int(self._env.now))
            if self.is_open() and len(self._env._queue) >= self._periodic:
                at(self._env, now_ns + period_ns, again)

        at(self._env, first_ns, again)

    def arriving(self) -> Iterator[RequestSpec]:
        return iter(self.open)

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Send the requests that follow one that has ended; none is for the same server without a choice."""
        if self.ended is not None:
            self.ended(spec, now_ns)
        self._go_on(spec, now_ns)
        return []

    def _go_on(self, spec: RequestSpec, now_ns: int) -> None:
        following = self._client.on_finish(spec, now_ns)
        self._left += len(following) - 1
        for follower in following:
            self._due.put(follower)
        if following:
            self._arm()
        if not self._left:
            self.close()

    def _arm(self) -> None:
        """Wake when the next request is to be sent, unless that is planned already."""
        if self._due:
            at_ns = max(self._due.due_ns, int(self._env.now))
            if at_ns < self._wakes_ns:
                self._wakes_ns = at_ns
                at(self._env, at_ns, self._wake)

    def _wake(self, _: simpy.Event) -> None:
        now_ns = int(self._env.now)
        while self._due.due_ns <= now_ns:
            self._send(self._due.take(), now_ns)
        if now_ns >= self._wakes_ns:
            self._wakes_ns = NEVER_NS
        self._arm()

    def _send(self, spec: RequestSpec, now_ns: int) -> None:
        assert self.choose is not None
        self._put(self.inboxes[self.choose(spec, now_ns)], spec)

    def _put(self, inbox: Inbox, spec: RequestSpec) -> None:
        inbox.put(spec)
        news, inbox.news = inbox.news, self._env.event()
        news.succeed()

    def close(self) -> None:
        """Let the servers know that nothing arrives any more."""
        for inbox in self.inboxes:
            news, inbox.news = inbox.news, None
            if news is not None:
                news.succeed()


def at(env: simpy.Environment, at_ns: int, act: Callable[[simpy.Event], None]) -> simpy.Event:
    """Call `act` at a time, before the processes that wait for the same time."""
    event = simpy.Event(env)
    event._ok, event._value = True, None
    event.callbacks.append(act)
    env.schedule(event, URGENT, at_ns - int(env.now))
    return event


class Alarm:
    """A call at a time that may change. A run does not go on for one that is not needed any more."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env, self._at_ns = env, NEVER_NS
        self._event: simpy.Event | None = None

    def set(self, at_ns: int, act: Callable[[simpy.Event], None]) -> None:
        """Call `act` at this time and at no other; NEVER_NS: not at all."""
        rings, queue = self._event is not None and not self._event.processed, self._env._queue
        if rings and at_ns == self._at_ns:
            return
        if rings:
            queue[:] = [each for each in queue if each[-1] is not self._event]
            heapify(queue)
        self._at_ns, self._event = at_ns, None if at_ns == NEVER_NS else at(self._env, at_ns, act)

    def stop(self) -> None:
        self.set(NEVER_NS, lambda _: None)


class ServerView:
    """What a router sees of a server (routers.base.View) when it looks, which `choice` says."""

    def __init__(self, server: Machine | None, choice: Choice, delay_ns: int) -> None:
        self.ready = server is not None
        self.in_flight = self.sent = self.waiting = self.running = 0
        self.kv_use = 0.0
        self._scraped_ns = 0
        self._server, self._choice, self._delay_ns = server, choice, delay_ns
        self._cache: CacheEvents | None = None

    @property
    def age_ns(self) -> int:
        return self._choice.now_ns - self._scraped_ns

    def scrape(self, now_ns: int) -> None:
        """Take the server's metrics as they are."""
        if self._server is None:
            return
        scheduler = self._server.scheduler
        self.waiting, self.running, self._scraped_ns = len(scheduler.waiting), len(scheduler.running), now_ns
        self.kv_use = 1 - scheduler.pool.free / scheduler.pool.num_blocks

    def cached_tokens(self, request: RequestSpec) -> int:
        if self._server is None:
            return 0
        if self._cache is None:  # events count from the first lookup, which begins with what is cached
            self._cache = CacheEvents(self._server, self._delay_ns)
        return self._cache.tokens(request, self._choice.now_ns)


class CacheEvents:
    """The contents that a server's cache can find, as its KV events tell them, each `delay_ns` after it happened."""

    def __init__(self, server: Machine, delay_ns: int) -> None:
        self._server, self._delay_ns = server, delay_ns
        self._pool: BlockPool = server.scheduler.pool
        self._coming: deque[tuple[int, int, bool]] = deque()  # (time, key, whether it was cached or evicted)
        self._known: dict[int, None] = {}
        groups = self._pool.groups
        self._groups = len(groups)  # each has keys of its own
        self._group = next((at for at, group in enumerate(groups) if not group.ring), 0)  # whose count
        self._pool.watch(self._changed)

    def _changed(self, key: int, cached: bool) -> None:
        if self._groups:
            key, group = divmod(key, self._groups)
            if group != self._group:
                return
        if key >= 0:  # else no other request has it
            self._coming.append((self._server.now_ns + self._delay_ns, key, cached))

    def tokens(self, request: RequestSpec, now_ns: int) -> int:
        """Return how many tokens at the start of a prompt are cached, by what has come in until now."""
        coming, known, size = self._coming, self._known, self._pool.block_size
        while coming and coming[0][0] <= now_ns:
            _, key, cached = coming.popleft()
            if cached:
                known[key] = None
            else:
                known.pop(key, None)
        blocks = min(request.shared_blocks(size), (request.prompt_tokens - 1) // size)
        for block in range(blocks):
            if request.block_key(block, size) not in known:
                return block * size
        return blocks * size


class Choice:
    """A router's choice among servers, with its books and news of servers. All samples of a request are one to it. It
    numbers them by itself: `slots` are their indices in the fleet, if they are not all of it.
    """

    def __init__(
        self,
        router: Router,
        front: Front,
        machines: Sequence[Machine | None],
        signals: Signals,
        slots: Sequence[int] | None = None,
    ) -> None:
        self._router = router
        self.slots = range(len(machines)) if slots is None else slots
        self._legs: dict[RequestSpec, RequestSpec] = {}  # of requests that a server knows as another object: that one
        self._of_leg: dict[RequestSpec, RequestSpec] = {}
        self.now_ns, self._events_ns = 0, round(signals.events_s * NS)
        self._server: dict[RequestSpec, int] = {}  # of requests in flight
        self._silent: dict[RequestSpec, None] = {}  # of these, the ones without a token
        self._samples: dict[RequestSpec, int] = {}  # of these, the samples that have not ended, itself included
        self._news: list[tuple[int, int, bool, RequestSpec]] = []  # (time, number, whether it ended, request)
        self._number = 0
        self._sample: tuple[RequestSpec, int] | None = None  # the last request and its server
        self.views = [self.view(machine) for machine in machines]
        front.choose, front.ended = self, self.ended
        front.every(round(signals.metrics_s * NS), self._scrape)

    def _scrape(self, now_ns: int) -> None:
        """Take the metrics of all servers."""
        for view in self.views:
            view.scrape(now_ns)

    def __call__(self, spec: RequestSpec, now_ns: int) -> int:
        """Return the index of the server that gets a request now; samples of a request go where it went."""
        if self._sample is not None and spec.sample_of is self._sample[0]:
            self._samples[self._sample[0]] += 1
            return self.slots[self._sample[1]]
        self.deliver(now_ns)
        server = self._router.choose(spec, self.views, now_ns)
        self._sample, self._samples[spec] = (spec, server), 1
        self._server[spec], self._silent[spec] = server, None
        view = self.views[server]
        view.in_flight += 1
        view.sent += 1
        self._router.sent(spec, server, now_ns)
        return self.slots[server]

    def goes_as(self, leg: RequestSpec, spec: RequestSpec) -> RequestSpec:
        """Note that the server gets a leg of a request, and return it."""
        self._legs[spec], self._of_leg[leg] = leg, spec
        return leg

    def known_as(self, spec: RequestSpec) -> RequestSpec:
        """Return a request as the server knows it that has it."""
        return self._legs.get(spec, spec)

    def ended(self, spec: RequestSpec, now_ns: int) -> None:
        """Note that a request ends at a time, now or later, with the last of its samples. A step in flight may still
        compute a token of it.
        """
        self._silent.pop(spec, None)
        if (first := spec.sample_of or spec) not in self._samples:  # it has no part in it, or its server has gone
            return
        self._samples[first] -= 1
        if not self._samples[first]:
            del self._samples[first]
            self._of_leg.pop(self._legs.pop(spec, spec), None)
            self._note(now_ns, first, ended=True)

    def _applied(self, plan: StepPlan, now_ns: int) -> None:
        """Note the requests whose first token a step delivers at a time, now or later."""
        for chunk in plan.work.chunks:
            if chunk.outputs and (spec := self._of_leg.get(chunk.spec, chunk.spec)) in self._silent:
                del self._silent[spec]
                self._note(now_ns, spec, ended=False)

    def _note(self, at_ns: int, spec: RequestSpec, *, ended: bool) -> None:
        self._number += 1
        heappush(self._news, (at_ns, self._number, ended, spec))

    def view(self, machine: Machine | None) -> ServerView:
        """Return the view of a server that has an index from now on, or of none."""
        if machine is not None:
            machine.on_applied = partial(_both, machine.on_applied, self._applied)
        return ServerView(machine, self, self._events_ns)

    @property
    def ready(self) -> bool:
        """Whether any server takes requests."""
        return any(view.ready for view in self.views)

    def came(self, slot: int, machine: Machine) -> None:
        """Let a server take requests from now on, if it is one of these."""
        if slot in self.slots:
            self.views[self.slots.index(slot)] = self.view(machine)

    def drains(self, slot: int) -> None:
        if slot in self.slots:
            self.views[self.slots.index(slot)].ready = False

    def seen(self, slot: int) -> ServerView:
        return self.views[self.slots.index(slot)]

    def left(self, slot: int, now_ns: int) -> None:
        """End all requests of a server that goes, and forget it, if it is one of these."""
        if slot not in self.slots:
            return
        server = self.slots.index(slot)
        self.deliver(now_ns)
        for spec in [spec for spec, its in self._server.items() if its == server]:
            self._samples.pop(spec, None)
            self._silent.pop(spec, None)
            self._of_leg.pop(self._legs.pop(spec, spec), None)
            del self._server[spec]
            self._router.ended(spec, server, now_ns)
        self._router.left(server)
        self.views[server] = self.view(None)

    def deliver(self, now_ns: int) -> None:
        """Call the router with what has happened until now."""
        self.now_ns, news = now_ns, self._news
        while news and news[0][0] <= now_ns:
            at_ns, _, ended, spec = heappop(news)
            if (server := self._server.get(spec)) is None:  # its server has gone
                continue
            if not ended:
                self._router.answered(spec, server, at_ns)
                continue
            del self._server[spec]
            self.views[server].in_flight -= 1
            self._router.ended(spec, server, at_ns)


OnApplied = Callable[[StepPlan, int], None]


def _both(first: OnApplied | None, second: OnApplied, plan: StepPlan, now_ns: int) -> None:
    if first is not None:
        first(plan, now_ns)
    second(plan, now_ns)


class Blind:
    """The choice of a blind router: it gets no view of a server, and no news of one, so that its
    choices follow from the requests and their order alone.
    """

    def __init__(self, router: Router, servers: int) -> None:
        self._router, self._views = router, cast("Sequence[View]", [SimpleNamespace(ready=True)] * servers)
        self._sample: tuple[RequestSpec, int] | None = None

    def __call__(self, spec: RequestSpec, now_ns: int) -> int:
        """Return the index of the server that gets a request; samples of a request go where it went."""
        if self._sample is None or spec.sample_of is not self._sample[0]:
            self._sample = spec, self._router.choose(spec, self._views, now_ns)
            self._router.sent(spec, self._sample[1], now_ns)
        return self._sample[1]
