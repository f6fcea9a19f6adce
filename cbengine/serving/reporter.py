"""Reports of the engine's thread to the event loop: tokens and ends of requests, all of a step at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cbengine.build import Setup, any_load, assembled, executor_plan
from cbengine.device.base import Clock, EngineDevice
from cbengine.driver import Engine, Hooks
from cbengine.sequence import Prompts, Sequence
from cbengine.servers import Measured
from cbsim.errors import ServerError
from cbsim.http.backend import ABORT, ERROR, NS, Load
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.runs.inbox import NEVER_NS, Inbox
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload


class Left(NamedTuple):
    """A client's cancellation of its request, and its time (ns since the start)."""

    spec: RequestSpec
    at_ns: int


class Post:
    """A queue from one thread to another, in order, without a lock; a reader that waits sleeps until then."""

    def __init__(self) -> None:
        self.closed = False  # no request follows the messages in the queue
        self.stopped = False  # the reader is to end at once
        self._letters: deque[Sequence | Left] = deque()
        self._news = threading.Event()

    def send(self, letter: Sequence | Left) -> None:
        self._letters.append(letter)
        self.wake()

    def wake(self) -> None:
        """End a wait: something else has happened."""
        self._news.set()

    def close(self) -> None:
        self.closed = True
        self.wake()

    def stop(self) -> None:
        self.stopped = True
        self.wake()

    def take(self) -> list[Sequence | Left]:
        """Return and remove the messages in the queue."""
        return [self._letters.popleft() for _ in range(len(self._letters))]

    def wait(self, seconds: float | None) -> None:
        """Wait until something is sent since the last wait, or the time is over; None: without a limit."""
        self._news.wait(seconds)
        self._news.clear()


class WokenClock(Clock):
    """A wall clock for an engine whose waits end when its post receives a message."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def wait_until(self, at_ns: int) -> None:
        self._post.wait(None if at_ns >= NEVER_NS else max(0, at_ns - self.now_ns()) / NS)


class Planned(NamedTuple):
    """A launched step: its query tokens, the requests preempted, and those admitted with their cached tokens."""

    tokens: int
    preempted: int
    at_ns: int
    admitted: list[tuple[RequestSpec, int]]


class Ended(NamedTuple):
    """A request that has ended: the reason (Stream.finish), its error if any, and its number of preemptions."""

    spec: RequestSpec
    finish: str
    error: str | None = None
    preemptions: int = 0


class Happened(NamedTuple):
    """A report at `at_ns`: steps that have ended, the tokens that they emitted, requests that have ended."""

    at_ns: int
    steps: list[Planned]
    tokens: list[tuple[RequestSpec, list[int]]]
    ended: list[Ended]


class Reporter:
    """A link between engine and post, in the engine's thread: it feeds the inbox, receives plans and tokens, and is the
    client whose requests end. `report` is called once a step, and once for requests that polls ended.
    """

    def __init__(self, post: Post, report: Callable[[Happened], None]) -> None:
        self.open: list[RequestSpec] = []  # no request is known before it arrives
        self.cancels: list[tuple[int, RequestSpec]] = []
        self._post, self._report = post, report
        self._coming: dict[RequestSpec, Sequence] = {}  # on their way to the engine
        self._emitted: dict[RequestSpec, int] = {}  # tokens reported, by request that has not ended
        self._planned: deque[Planned] = deque()
        self._landed: list[RequestSpec] = []
        self._ended: list[RequestSpec] = []
        self._texts: list[RequestSpec] = []  # that have ended: a scheduler may go on with a cancelled one for a while
        self._steps = 0

    def serve(self, engine: Engine) -> None:
        """Attach the engine to report on. Its own thread updates `load`, for others to read."""
        self._engine = engine
        self.load = Load.of(engine.scheduler)

    def begin(self, spec: RequestSpec) -> Sequence:
        """Return the sequence of a request that arrives."""
        return self._coming.pop(spec)

    def feed(self, inbox: Inbox) -> None:
        """Put arrivals, and cancellations of requests that have not ended, into the inbox. Raises ServerError."""
        self.load = Load.of(self._engine.scheduler)
        if ended := self._ends():
            self._report(Happened(self._engine.now_ns, [], [], ended))
        if self._post.stopped:
            raise ServerError("interrupted")
        closed = self._post.closed  # read before the messages are taken: all of them have arrived by then
        for letter in self._post.take():
            if isinstance(letter, Sequence):
                self._coming[letter.spec], self._emitted[letter.spec] = letter, 0
                inbox.put(letter.spec)
            elif letter.spec in self._emitted:
                inbox.give_up(letter.at_ns, letter.spec)
        if closed:
            inbox.news = None

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Note that a request has ended, for whatever reason; none follows it."""
        del now_ns
        self._ended.append(spec)
        return []

    def on_plan(self, plan: StepPlan) -> None:
        requests = self._engine.scheduler.requests
        admitted = [(c.spec, requests[c.spec].cached or 0) for c in plan.work.chunks if c.admitted]
        preempted = len(plan.changes.preempted)
        self._planned.append(Planned(plan.work.tokens, preempted, self._engine.now_ns, admitted))

    def on_token(self, spec: RequestSpec, token: int) -> None:
        """Note that a token has arrived; whether it is emitted is known when its step has been applied."""
        del token
        self._landed.append(spec)

    def on_step(self, now_ns: int) -> None:
        """Report the steps that have ended; called after every step, and while the engine waits."""
        steps, self._steps = self._engine.record.step_count - self._steps, self._engine.record.step_count
        if steps:
            over = [self._planned.popleft() for _ in range(steps)]
            tokens = [(spec, ids) for spec in self._landed if (ids := self._new(spec))]
            self._landed = []
            self._report(Happened(now_ns, over, tokens, self._ends()))

    def _new(self, spec: RequestSpec) -> list[int]:
        """Return a request's new tokens: until its end only those that policy has seen; a cancelled one has no more."""
        if spec not in self._emitted:
            return []
        request, outputs = self._engine.scheduler.requests.get(spec), self._engine.sequences[spec].outputs
        first, self._emitted[spec] = self._emitted[spec], len(outputs) if request is None else request.seen
        return outputs[first : self._emitted[spec]]

    def _ends(self) -> list[Ended]:
        ended, requests = [self._end(spec) for spec in self._ended], self._engine.scheduler.requests
        self._texts, self._ended = self._texts + self._ended, []
        for spec in [spec for spec in self._texts if spec not in requests]:
            self._texts.remove(spec)
            self._engine.sequences[spec].forget()
        return ended

    def _end(self, spec: RequestSpec) -> Ended:
        """Return how a request ended."""
        record = self._engine.record
        del self._emitted[spec]
        for problems in (record.refusals, record.failures):
            if spec in problems:
                return Ended(spec, ERROR, problems[spec])
        if spec in record.cancels:
            return Ended(spec, ABORT)
        request = record.request(spec)
        assert request.finish is not None, spec.id
        return Ended(spec, request.finish.value, preemptions=request.preemptions)


class EngineServer(Measured):
    """An engine that serves the requests of its post until that is closed, behind a session's server interface. It
    keeps no text of requests; `workload` is empty. `handing` puts something around a device, given it and its cache.
    Raises the errors of `cbengine.build.assembled`.
    """

    def __init__(
        self,
        setup: Setup,
        post: Post,
        reporter: Reporter,
        scenario: Scenario,
        loop: str,
        workload: Workload,
        handing: Callable[..., EngineDevice] | None = None,
    ) -> None:
        assert not workload.total
        plan = executor_plan(scenario, loop, [], setup, any_load(scenario, loop))
        if handing is not None:
            plan = plan.sharing()
            handing = partial(handing, cache=plan.cache())
        prompts = Prompts(scenario.seed, plan.architecture.vocab)
        hooks = Hooks(reporter.begin, reporter.on_plan, reporter.on_token, reporter.feed)
        self.clock = WokenClock(post)
        parts = scenario, loop, plan, setup, reporter, prompts, hooks
        engine, device = assembled(*parts, clock=self.clock, around=handing)
        reporter.serve(engine)
        self._reporter = reporter
        super().__init__(engine, device, setup, scenario, {"sampling": "as requests ask"})

    @property
    def load(self) -> Load:
        return self._reporter.load

    def run(self, on_step: Callable[[int], None]) -> None:
        del on_step  # the reporter hears of every step
        self.device.settle()
        super().run(self._reporter.on_step)

    def close(self) -> None:
        """Free the device's memory."""
        self.engine.close()
