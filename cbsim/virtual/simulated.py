"""The simulated machine behind the endpoint: a task steps its environment in the clock's time.

The machine is that of `cbsim run`. Its environment reports that an event is always due, so at every poll and await it
waits for the clock; then the task accepts the requests that have arrived, and steps it. Requests enter the inbox at
the clock's time, but after the machine's last poll: so the same requests, known beforehand, lead to the same steps,
whatever the clock was.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import Future, get_running_loop
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import simpy

from cbsim.errors import DeadlockError, PolicyError, ScenarioError
from cbsim.http.backend import ERROR, NS, Backend, Generation, Load, Stream, Timing
from cbsim.http.tokenizer import Tokenizer
from cbsim.machine.simulate import Simulation
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import Request, RequestSpec
from cbsim.runs.served import Contents, session_of, with_one_loop
from cbsim.scenario.scenario import Scenario
from cbsim.virtual.clocks import Clock, resolve
from cbsim.workload import generators
from cbsim.workload.requests import Workload

NEVER = float("inf")


class Live(simpy.Environment):
    """An environment in which something may happen at any time before the next event."""

    def peek(self) -> float:
        return -1.0

    @property
    def due_ns(self) -> float:
        """The time of the next event in ns; infinite if there is none."""
        return super().peek()


class Unknown(Workload):
    """A workload of clients not known before a run: the end of a request is reported, and no request follows it."""

    def __init__(self, over: Callable[[RequestSpec], None]) -> None:
        super().__init__([], 0)
        self._over = over

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        del now_ns
        self._over(spec)
        return []


class Answer:
    """A running request, with the number of tokens that its stream has or will have with the next delivery."""

    __slots__ = ("emitted", "request", "stream")

    def __init__(self, stream: Stream, request: Request) -> None:
        self.stream, self.request, self.emitted = stream, request, 0


class SimulatedBackend(Backend):
    """A session of a simulated server, which becomes a run."""

    def __init__(self, scenario: Scenario, clock: Clock, tokenizer: Tokenizer, model: str | None, command: str) -> None:
        """Build the machine of the session; a scenario with both loops gets the asynchronous one. The model is named
        after the scenario if `model` is None. Raises ScenarioError.
        """
        scenario = with_one_loop(scenario)
        if scenario.kind.samples(scenario.scheduler) > 1:
            raise ScenarioError("scheduler: searches with several texts a request cannot be served", field="scheduler")
        loop = scenario.loop.mode
        super().__init__(model or scenario.name, tokenizer, scenario, loop)
        self._clock, self._speech, self._env = clock, Speech(scenario, tokenizer), Live()
        self._running: dict[RequestSpec, Answer] = {}
        self._plans: deque[tuple[int, int]] = deque()  # (query tokens, preempted) of the steps in flight
        self._ended: list[RequestSpec] = []  # requests that ended since the last step
        # (stream, first token, end of its tokens, finish if it ends, message of an error)
        self._pending: list[tuple[Stream, int, int, str | None, str | None]] = []
        self._pending_ns = NEVER  # the time at which the pending tokens are visible
        self._acted_ns = -1  # the time at which the machine was stepped last
        self._last_ns = 0  # the time at which tokens were visible last
        self._news: Future[None] | None = None
        self._lags, self._gaps = Durations(), Durations()
        self.session = session_of(scenario, loop, self._server, command)
        self._inbox = self.machine.inbox
        self._inbox.news = self._env.event()
        pool = self.machine.scheduler.pool
        self.contents = Contents(pool.block_size, pool.num_blocks)

    def _server(self, scenario: Scenario, loop: str, workload: Workload) -> Simulation:
        """Return the server of a scenario, with the session in place of its workload."""
        del workload
        server = Simulation(scenario, loop, Unknown(self._over))
        server.facts = {**server.facts, "time_scale": self._clock.scale}
        self.machine = server.machine
        self.machine.on_plan = self._planned
        return server

    @property
    def load(self) -> Load:
        load = Load.of(self.machine.scheduler)
        return replace(load, waiting=load.waiting + len(self._inbox))

    @property
    def timing(self) -> Timing:
        lags, itl_s = self._lags, self._gaps.quantile(0.5) / self._clock.scale
        timing = Timing(self._clock.scale, lags.last_s, lags.most_s, lags.quantile(0.99), lags.count, 0, itl_s)
        return replace(timing, late_steps=lags.beyond(timing.bound_s))

    def submit(self, stream: Stream) -> None:
        at_ns, generation = self._stamp(), stream.generation
        stream.arrive(at_ns / NS)
        if self.dead is not None or self._inbox.news is None:
            stream.end(ERROR, at_ns / NS, self.dead or "the server takes nothing more in")
            return
        output = self._speech.tokens(self.log.count, generation)
        self._inbox.put(self._enter(stream, at_ns, output, self._speech.ids(0, output)))
        self._announce(at_ns)

    def _withdraw(self, spec: RequestSpec, at_ns: int) -> None:
        self._inbox.give_up(at_ns, spec)

    def abandon(self) -> None:
        """Cancel every request under way."""
        for stream in [*self._specs]:
            self.cancel(stream)

    def close(self) -> None:
        if self._inbox.news is not None:
            self._announce(self._stamp(), last=True)

    async def run(self) -> None:
        self._clock.start()
        over = self._env.process(self.machine.run(self._env, self._stepped))
        try:
            while over.is_alive or self._pending_ns < NEVER:
                await self._next()
        except (DeadlockError, PolicyError, OverflowError) as error:
            self._fail(str(error), self._clock.now_ns())

    async def _next(self) -> None:
        """Wait for the next event and perform it: tokens become visible, or the machine is stepped."""
        due = min(self._env.due_ns, self._pending_ns)
        self._news = get_running_loop().create_future()
        if due == NEVER:
            await self._news
            return
        at_ns = int(due)
        if self._clock.now_ns() <= at_ns:
            await self._clock.until(at_ns, self._news)
        else:
            await asyncio.sleep(0)
        if self._clock.now_ns() < at_ns or min(self._env.due_ns, self._pending_ns) < due:
            return
        if self._pending_ns <= due:
            self._deliver(at_ns)
        else:
            self._acted_ns = max(self._acted_ns, at_ns)
            self._env.step()

    def _stamp(self) -> int:
        """Return the clock's time, but at least 1 ns after the machine was stepped last."""
        return max(self._clock.now_ns(), self._acted_ns + 1)

    def _announce(self, at_ns: int, *, last: bool = False) -> None:
        """Notify the machine that a request has arrived, or that no request will arrive any more (`last`)."""
        news, env = self._inbox.news, self._env
        self._inbox.news = None if last else env.event()
        news._ok, news._value = True, None
        env.schedule(news, delay=max(0, at_ns - env.now))
        if self._news is not None:
            resolve(self._news)

    def _planned(self, plan: StepPlan) -> None:
        self._plans.append((plan.work.tokens, len(plan.changes.preempted)))
        requests, now_s = self.machine.scheduler.requests, self.machine.now_ns / NS
        for chunk in plan.work.chunks:
            stream = self._streams.get(chunk.spec) if chunk.admitted else None
            if stream is not None and stream.scheduled_s is None:
                answer = self._running[chunk.spec] = Answer(stream, requests[chunk.spec])
                stream.schedule(now_s, answer.request.cached or 0)

    def _stepped(self, cpu_ns: int) -> None:
        """Queue the tokens of an applied step, which are visible from `cpu_ns` on."""
        pending, going = self._pending, 0
        for answer in self._running.values():
            emitted = answer.emitted
            if (seen := answer.request.seen) > emitted:
                pending.append((answer.stream, emitted, seen, None, None))
                answer.emitted = seen
                going += emitted > 0
        self._queue_ends()
        if going:
            self._gaps.add((cpu_ns - self._last_ns) / NS, going)
        self._pending_ns = self._last_ns = cpu_ns
        self.meter.stepped(*self._plans.popleft())

    def _queue_ends(self) -> None:
        refusals = self.machine.record.refusals
        for spec in self._ended:
            if (stream := self._streams.get(spec)) is None:
                continue
            if (reason := refusals.get(spec)) is not None:
                self._pending.append((stream, 0, 0, ERROR, reason))
            elif (answer := self._running.get(spec)) is not None and answer.request.finish is not None:
                stream.preemptions = answer.request.preemptions
                self._pending.append((stream, 0, 0, answer.request.finish.value, None))
        self._ended.clear()

    def _over(self, spec: RequestSpec) -> None:
        """Record that a request has ended. A rejected one is in no step, so its end is queued at once."""
        self._ended.append(spec)
        if spec in self.machine.record.refusals:
            self._queue_ends()
            self._pending_ns = min(self._pending_ns, self.machine.now_ns)

    def _deliver(self, at_ns: int) -> None:
        """Deliver the pending tokens and ends to their streams."""
        pending, self._pending, self._pending_ns = self._pending, [], NEVER
        at_s, ids = at_ns / NS, self._speech.ids
        self._lags.add(self._clock.lag_s(at_ns))
        for stream, first, end, finish, error in pending:
            if stream.finish is not None:
                continue
            if finish is None:
                stream.put(ids(first, end), at_s)
            else:
                self._end(stream, finish, at_ns, error)

    def _end(self, stream: Stream, finish: str, at_ns: int, error: str | None = None) -> None:
        if (spec := self._specs.get(stream)) is not None:
            self._running.pop(spec, None)
        super()._end(stream, finish, at_ns, error)


LEAST_S, STEP = 1e-7, math.log(1.02)


class Durations:
    """A histogram of durations in classes 2 % wide from 0.1 us on; shorter durations count as 0."""

    def __init__(self) -> None:
        self.most_s = self.last_s = 0.0
        self.count = 0
        self._counts: dict[int, int] = {}

    def add(self, seconds: float, times: int = 1) -> None:
        self.last_s = seconds
        self.most_s = max(self.most_s, seconds)
        self.count += times
        at = int(math.log(seconds / LEAST_S) / STEP) if seconds > LEAST_S else -1
        self._counts[at] = self._counts.get(at, 0) + times

    def quantile(self, share: float) -> float:
        """Return the upper edge of the class of the quantile `share`; 0 if there are no durations."""
        rank, passed = math.ceil(share * self.count), 0
        for at in sorted(self._counts):
            passed += self._counts[at]
            if passed >= rank:
                return min(self.most_s, LEAST_S * math.exp((at + 1) * STEP)) if at >= 0 else 0.0
        return 0.0

    def beyond(self, seconds: float) -> int:
        """Return the number of longer durations, counted in the classes that begin at `seconds` or later."""
        edge = math.ceil(math.log(seconds / LEAST_S) / STEP) if seconds > LEAST_S else 0
        return sum(number for at, number in self._counts.items() if at >= edge)


SPEECH = (
    " No model has read your prompt, and none has written this answer. Its words are always the same; what is computed"
    " is the time at which each of them would have come from the server that the scenario describes, with its"
    " scheduler, its cache, its CPU and its GPU, beside the requests of everybody else. Please do not mind the words."
)


class Speech:
    """The answers: one text, repeated, of a length drawn from the workload's by the request's number and the seed."""

    def __init__(self, scenario: Scenario, tokenizer: Tokenizer) -> None:
        self._lengths = [spec.output_tokens for spec in islice(generators.build(scenario).arriving(), 10_000)]
        self._seed = scenario.seed
        self._ids = tokenizer.encode(SPEECH)
        self._alone = [(token,) for token in self._ids]

    def tokens(self, index: int, generation: Generation) -> int:
        """Return the number of tokens of the answer to this request."""
        if generation.ignore_eos or not self._lengths:
            return generation.max_tokens
        rng = np.random.default_rng((self._seed, index))
        drawn = self._lengths[int(rng.integers(len(self._lengths)))]
        return min(generation.max_tokens, max(generation.min_tokens, drawn, 1))

    def ids(self, first: int, end: int) -> Sequence[int]:
        """Return tokens `first` to `end` of any answer."""
        ids = self._ids
        if end - first == 1:
            return self._alone[first % len(ids)]
        return [ids[at % len(ids)] for at in range(first, end)]
