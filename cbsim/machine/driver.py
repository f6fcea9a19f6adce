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

CLOSED = Polled(closed=True)


class Client(Protocol):
    """Where requests come from. The workload of a scenario is one."""

    @property
    def open(self) -> list[RequestSpec]:
        """Requests whose arrival does not depend on the server."""

    @property
    def cancels(self) -> list[tuple[int, RequestSpec]]:
        """(time, request) of clients that give up, in order of time."""

    def on_finish(self, spec: RequestSpec, now_ns: int) -> list[RequestSpec]:
        """Requests that follow the end of `spec`, with arrivals at or after `now_ns`. Called once for each end."""


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
        self._cancels = client.cancels[::-1]
        self._h2d, self._compute, self._d2h = lanes(overlap=overlap)
        self._slots = Slots(depth)
        self._cpu_ns = 0
        self._times = StepTimes(0)  # of the step being planned
        self._landing = self._times  # of the step whose result is being applied

    @property
    def now_ns(self) -> int:
        """How far the CPU has come."""
        return self._cpu_ns

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
                if effect.wait and self._inbox:
                    self._cpu_ns = max(self._cpu_ns, self._inbox[0][0])
                if self._cpu_ns > env.now:
                    yield env.timeout(self._cpu_ns - env.now)
                answer = self._poll(effect.arrivals)
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
                assert kind is Refused, effect
                self.record.refused(effect.spec, effect.reason)
                answer = self._followed(effect.spec)

    def _poll(self, arrivals: bool) -> Polled:
        """What has come in until now. With `arrivals` a step may be planned next: its times start here."""
        self.record.polls += 1
        now, inbox = self._cpu_ns, self._inbox
        if arrivals:
            self._times = StepTimes(now)
        cancels = self._given_up() if self._cancels else ()
        if not arrivals or not inbox or inbox[0][0] > now:
            return Polled((), cancels, closed=False) if inbox or cancels else CLOSED
        arrived = []
        while inbox and inbox[0][0] <= now:
            spec = heappop(inbox)[2]
            self.record.queued(spec, now)
            arrived.append(spec)
        return Polled(arrived, cancels, closed=not inbox)

    def _given_up(self) -> list[RequestSpec]:
        """Requests cancelled until now, those that have not even arrived excepted."""
        due = []
        while self._cancels and self._cancels[-1][0] <= self._cpu_ns:
            spec = self._cancels.pop()[1]
            if self.record.cancelled(spec):
                due.append(spec)
                self._followed(spec)
        return due

    def _followed(self, spec: RequestSpec) -> None:
        """A request has ended, for whatever reason: queue those that its client sends next."""
        for follower in self._client.on_finish(spec, self._cpu_ns):
            heappush(self._inbox, (follower.arrival_ns, follower.index, follower))

    def _scheduled(self, plan: StepPlan | None) -> None:
        times = self._times
        times.cpu_ns = self._cost.cpu_ns(plan)
        self._cpu_ns += times.cpu_ns[0]
        if plan is None:
            return
        times.schedule_end_ns = self._cpu_ns
        for chunk in plan.chunks:
            if chunk.admitted:
                self.record.admitted(self.scheduler.requests[chunk.spec], plan.step)

    def _launch(self, plan: StepPlan) -> StepTimes:
        """CPU phases `prepare` and `launch`, then the copies and kernels on their lanes."""
        times, cost = self._times, self._cost
        _, prepare_ns, launch_ns, _ = times.cpu_ns
        shape = self._graphs.shape(plan)
        times.padded_tokens = shape.tokens
        times.prepare_start_ns = self._cpu_ns
        queued = times.prepare_end_ns = times.launch_start_ns = self._cpu_ns + prepare_ns
        h2d_ns, compute_ns, d2h_ns = cost.gpu_ns(plan, shape.tokens)
        if shape.eager:  # kernels run while the CPU launches them one by one
            kernels_ns = cost.eager_launch_ns(plan)
            launch_ns += kernels_ns
            compute_ns = max(compute_ns, kernels_ns)
        self._cpu_ns = times.launch_end_ns = queued + launch_ns + shape.capture_ns
        ready = max(queued if shape.eager else self._cpu_ns, self._slots.free_ns(plan.step))
        times.h2d_start_ns, times.h2d_end_ns = self._h2d.book(ready, h2d_ns)
        times.compute_start_ns, times.compute_end_ns = self._compute.book(times.h2d_end_ns, compute_ns)
        times.d2h_start_ns, times.d2h_end_ns = self._d2h.book(times.compute_end_ns, d2h_ns)
        self._slots.hold(plan.step, times.d2h_end_ns)
        return times

    def _await(self, effect: Await) -> StepResult:
        """The CPU blocks until the step's outputs are on the host. Declared ends short of the limit are stop tokens."""
        times: StepTimes = effect.ticket
        self._landing = times
        times.await_start_ns = self._cpu_ns
        times.await_end_ns = self._cpu_ns = max(self._cpu_ns, times.d2h_end_ns)
        return StepResult(tuple([s for s in effect.plan.ends if s.output_tokens < s.max_tokens]))

    def _applied(self, effect: Applied) -> None:
        plan, outcome = effect.plan, effect.outcome
        times = self._landing
        times.update_start_ns = self._cpu_ns
        times.update_end_ns = self._cpu_ns = self._cpu_ns + times.cpu_ns[3]
        self.record.applied(plan, outcome, times)
        for spec, _ in outcome.finished:
            self._followed(spec)
