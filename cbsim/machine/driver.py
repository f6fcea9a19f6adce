"""The simulated machine as a driver of the serving loop: a SimPy process that answers its effects in simulated time.

The CPU is the process itself: it does one thing at a time. It keeps its own clock and meets the environment's only
where it can be observed, when it polls and when it blocks, so phases in between cost no event. Launching books the
step's copies and kernels on their lanes: the H2D copy waits for its lane and slot, compute for the copy and for the
step before, the D2H copy for compute; awaiting blocks the CPU until that copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import Any, Protocol

import simpy

from cbsim.cost.base import Cost
from cbsim.machine.graphs import Graphs
from cbsim.machine.lanes import Slots, lanes
from cbsim.policy.loop import Applied, Await, Launch, Poll, Polled, Refused, Scheduled, Scheduler, serve
from cbsim.policy.plan import StepPlan, StepResult
from cbsim.policy.request import RequestSpec
from cbsim.record import Record, StepTimes


NOTHING = Polled()


class Client(Protocol):
    """Where requests come from. The workload of a scenario is one."""

    @property
    def open(self) -> list[RequestSpec]:
        """Requests whose arrival does not depend on the server."""

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Requests that follow the end of `spec`, with arrivals at or after `now_ns`."""


class Machine:
    """One server with one GPU. `depth` steps may be in flight; `slots` I/O buffers, `overlap` of copies and compute."""

    def __init__(
        self,
        scheduler: Scheduler,
        cost: Cost,
        graphs: Graphs,
        client: Client,
        record: Record,
        *,
        depth: int,
        overlap: bool,
    ) -> None:
        self.scheduler = scheduler
        self.record = record
        self._cost = cost
        self._graphs = graphs
        self._client = client
        self._depth = depth
        self._inbox = [(s.arrival_ns, s.index, s) for s in client.open]
        self._h2d, self._compute, self._d2h = lanes(overlap=overlap)
        self._slots = Slots(depth)
        self._cpu_ns = 0
        self._times = StepTimes(0)  # of the step being planned
        self._landing = self._times  # of the step whose result is being applied

    def run(self, env: simpy.Environment, on_step: Callable[[int], None] | None = None) -> Generator[Any, Any, None]:
        """The SimPy process. `on_step` is told the simulated time now and then."""
        loop = serve(self.scheduler, self._depth)
        answer: Any = None
        while True:
            try:
                effect = loop.send(answer)
            except StopIteration:
                return
            kind = type(effect)
            if kind is Poll:
                yield from self._meet(env, effect)
                answer = self._poll(effect)
            elif kind is Scheduled:
                answer = self._scheduled(effect.plan)
            elif kind is Launch:
                answer = self._launch(effect.plan)
            elif kind is Await:
                answer = self._await(effect)
            elif kind is Applied:
                answer = self._applied(effect)
                if on_step and not effect.plan.step % 256:
                    on_step(self._cpu_ns)
            else:
                assert isinstance(effect, Refused), effect
                self.record.refused(effect.spec, effect.reason, self._cpu_ns)
                answer = None

    def _meet(self, env: simpy.Environment, effect: Poll) -> Generator[Any, Any, None]:
        """Let simulated time catch up with the CPU; if it waits, up to the next arrival."""
        if effect.wait and self._inbox:
            self._cpu_ns = max(self._cpu_ns, self._inbox[0][0])
        if self._cpu_ns > env.now:
            yield env.timeout(self._cpu_ns - env.now)

    def _poll(self, effect: Poll) -> Polled:
        self.record.polls += 1
        if not effect.arrivals:
            return NOTHING
        now, inbox, arrivals = self._cpu_ns, self._inbox, []
        while inbox and inbox[0][0] <= now:
            spec = heappop(inbox)[2]
            self.record.queued(spec, now)
            arrivals.append(spec)
        self._times = StepTimes(now)
        return Polled(arrivals, (), closed=not inbox)

    def _scheduled(self, plan: StepPlan | None) -> None:
        if plan is None:
            self._cpu_ns += self._cost.cpu_ns("schedule", None)
            return
        for chunk in plan.chunks:
            if chunk.admitted:
                self.record.admitted(self.scheduler.requests[chunk.spec], plan.step)
        self._cpu_ns += self._cost.cpu_ns("schedule", plan)
        self._times.schedule_end_ns = self._cpu_ns

    def _launch(self, plan: StepPlan) -> StepTimes:
        """CPU phases `prepare` and `launch`, then the copies and kernels on their lanes."""
        times, cost = self._times, self._cost
        shape = self._graphs.shape(plan)
        times.padded_tokens = shape.tokens
        times.prepare_start_ns = self._cpu_ns
        times.prepare_end_ns = times.launch_start_ns = self._cpu_ns + cost.cpu_ns("prepare", plan)
        kernels_ns = cost.eager_launch_ns(plan) if shape.eager else 0
        launch_ns = cost.cpu_ns("launch", plan) + kernels_ns + shape.capture_ns
        times.launch_end_ns = self._cpu_ns = times.launch_start_ns + launch_ns
        queued = times.launch_start_ns if shape.eager else times.launch_end_ns
        h2d_ns, d2h_ns = cost.copies_ns(plan)
        h2d = self._h2d.book(max(queued, self._slots.free_ns(plan.step)), h2d_ns)
        compute = self._compute.book(h2d[1], max(cost.compute_ns(plan, shape.tokens), kernels_ns))
        d2h = self._d2h.book(compute[1], d2h_ns)
        times.h2d_start_ns, times.h2d_end_ns = h2d
        times.compute_start_ns, times.compute_end_ns = compute
        times.d2h_start_ns, times.d2h_end_ns = d2h
        self._slots.hold(plan.step, d2h[1])
        return times

    def _await(self, effect: Await) -> StepResult:
        """The CPU blocks until the step's outputs are on the host. Declared ends short of the limit are stop tokens."""
        times = self._landing = effect.ticket
        times.await_start_ns = self._cpu_ns
        times.await_end_ns = self._cpu_ns = max(self._cpu_ns, times.d2h_end_ns)
        return StepResult(tuple([s for s in effect.plan.ends if s.output_tokens < s.max_tokens]))

    def _applied(self, effect: Applied) -> None:
        plan, outcome = effect.plan, effect.outcome
        times = self._landing
        times.update_start_ns = self._cpu_ns
        times.update_end_ns = self._cpu_ns = self._cpu_ns + self._cost.cpu_ns("update", plan)
        self.record.applied(plan, outcome, times)
        for spec, _ in outcome.finished:
            for follower in self._client.on_finish(spec, self._cpu_ns):
                heappush(self._inbox, (follower.arrival_ns, follower.index, follower))
