"""Reports of the engine's thread to the event loop: tokens and ends of requests, all of a step at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cbengine.driver import Engine
from cbengine.sequence import Sequence
from cbengine.serving.post import Post
from cbsim.errors import ServerError
from cbsim.http.backend import ABORT, ERROR, Load
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.runs.inbox import Inbox


class Planned(NamedTuple):
    """A step that has been launched: its query tokens, requests that its plan preempted, and those that it admitted,
    with the tokens that the cache had.
    """

    tokens: int
    preempted: int
    at_ns: int
    admitted: list[tuple[RequestSpec, int]]


class Ended(NamedTuple):
    """A request that is over, why (Stream.finish), its error if there was one, and how often it was preempted."""

    spec: RequestSpec
    finish: str
    error: str | None = None
    preemptions: int = 0


class Happened(NamedTuple):
    """The news at `at_ns`: steps that are over, tokens that they brought, requests that have ended."""

    at_ns: int
    steps: list[Planned]
    tokens: list[tuple[RequestSpec, list[int]]]
    ended: list[Ended]


class Reporter:
    """Stands between the engine and its post, in the engine's thread: feeds the inbox, hears of plans and tokens, and
    is the client whose requests end. `report` is called once a step, and once for what polls have ended.
    """

    def __init__(self, post: Post, report: Callable[[Happened], None]) -> None:
        self.open: list[RequestSpec] = []  # no request is known before it comes
        self.cancels: list[tuple[int, RequestSpec]] = []
        self._post, self._report = post, report
        self._coming: dict[RequestSpec, Sequence] = {}  # on their way to the engine
        self._emitted: dict[RequestSpec, int] = {}  # of requests that are not over: tokens that were reported
        self._planned: deque[Planned] = deque()
        self._landed: list[RequestSpec] = []
        self._ended: list[RequestSpec] = []
        self._steps = 0

    def serve(self, engine: Engine) -> None:
        """Report of this engine from now on. Its load is seen by its own thread, for others to read."""
        self._engine = engine
        self.load = Load.of(engine.scheduler)

    # -- called by the engine

    def begin(self, spec: RequestSpec) -> Sequence:
        """The text of a request that arrives."""
        return self._coming.pop(spec)

    def feed(self, inbox: Inbox) -> None:
        """Put into the inbox what has come. Requests that are over cannot be given up. ServerError ends a run."""
        self.load = Load.of(self._engine.scheduler)
        if self._ended:
            self._report(Happened(self._engine.now_ns, [], [], self._ends()))
        if self._post.stopped:
            raise ServerError("interrupted")
        closed = self._post.closed  # before the letters are taken: all of them have come by then
        for letter in self._post.take():
            if isinstance(letter, Sequence):
                self._coming[letter.spec], self._emitted[letter.spec] = letter, 0
                inbox.put(letter.spec)
            elif letter.spec in self._emitted:
                inbox.give_up(letter.at_ns, letter.spec)
        if closed:
            inbox.news = None

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """A request is over, for whatever reason; none follows it."""
        del now_ns
        self._ended.append(spec)
        return []

    def on_plan(self, plan: StepPlan) -> None:
        requests = self._engine.scheduler.requests
        admitted = [(c.spec, requests[c.spec].cached or 0) for c in plan.work.chunks if c.admitted]
        preempted = len(plan.changes.preempted)
        self._planned.append(Planned(plan.work.tokens, preempted, self._engine.now_ns, admitted))

    def on_token(self, spec: RequestSpec, token: int) -> None:
        """It has come back; whether it counts is known when its step has been applied."""
        del token
        self._landed.append(spec)

    def on_step(self, now_ns: int) -> None:
        """Called after every step, and while the engine waits."""
        steps, self._steps = self._engine.record.step_count - self._steps, self._engine.record.step_count
        if steps:
            over = [self._planned.popleft() for _ in range(steps)]
            tokens = [(spec, ids) for spec in self._landed if (ids := self._new(spec))]
            self._landed = []
            self._report(Happened(now_ns, over, tokens, self._ends()))

    # -- reports

    def _new(self, spec: RequestSpec) -> list[int]:
        """Its tokens that count and were not reported. Of a request that runs those after the last one seen may be
        dropped; of one that was given up no more are reported.
        """
        if spec not in self._emitted:
            return []
        request, outputs = self._engine.scheduler.requests.get(spec), self._engine.sequences[spec].outputs
        first, self._emitted[spec] = self._emitted[spec], len(outputs) if request is None else request.seen
        return outputs[first : self._emitted[spec]]

    def _ends(self) -> list[Ended]:
        ended, self._ended = [self._end(spec) for spec in self._ended], []
        return ended

    def _end(self, spec: RequestSpec) -> Ended:
        """Why it ended. Its text is not kept."""
        record, sequence = self._engine.record, self._engine.sequences[spec]
        del self._emitted[spec]
        sequence.forget()
        for problems in (record.refusals, record.failures):
            if spec in problems:
                return Ended(spec, ERROR, problems[spec])
        if spec in record.cancels:
            return Ended(spec, ABORT)
        request = record.request(spec)
        assert request.finish is not None, spec.id
        return Ended(spec, request.finish.value, preemptions=request.preemptions)
