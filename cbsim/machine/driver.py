"""The simulated machine as a driver of the serving loop: a SimPy process that performs its effects in simulated time.

The CPU is the process itself: it does one thing at a time. It keeps its own clock, and lets the environment's catch up
when it polls and before it applies a result, if anything else is due by then: only another process could see the
difference, so phases and steps in between cost no event. Launching books the step's copies and kernels on the lanes of
the device: the H2D copy waits for its lane and slot, compute for the copy and for the step before, the D2H copy for
compute; awaiting blocks the CPU until that copy has ended, and for the time it takes to wake up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

import simpy

from cbsim.cost.base import Cost
from cbsim.machine.adaptive import Adaptive
from cbsim.machine.device import Device, Mover
from cbsim.machine.graphs import Graphs
from cbsim.policy.loop import Applied, Await, Completed, Idle, Launch, Poll, Polled, Refused, Scheduler, serve
from cbsim.policy.plan import NOTHING_STOPPED, StepPlan, StepResult
from cbsim.policy.request import RequestSpec
from cbsim.record.record import Record, StepTimes
from cbsim.runs.inbox import CLOSED, NEVER_NS, OPEN, Inbox, note_admissions
from cbsim.workload import requests
from cbsim.workload.acceptance import Acceptance
from cbsim.workload.requests import Parents

LONGEST_NS: Final = requests.LONGEST_NS
NO_NEWS: Final = Completed(NOTHING_STOPPED)


class Machine:
    """A server with `depth` steps in flight on its device. Its requests come from its inbox."""

    def __init__(
        self, scheduler: Scheduler, cost: Cost, graphs: Graphs, device: Device, inbox: Inbox, record: Record, depth: int
    ) -> None:
        self.scheduler = scheduler
        self.record = record
        self.acceptance: Acceptance | None = None  # of drafts, with speculation
        self.adaptive: Adaptive | None = None  # how many of them a step verifies; None: all
        self.on_plan: Callable[[StepPlan], None] | None = None  # called with each plan after its launch
        self.on_applied: Callable[[StepPlan, int], None] | None = None  # called with each plan applied, and when
        self._cost = cost
        self._graphs = graphs
        self._depth = depth
        self._device = device
        self.mover = device.mover
        self.inbox = inbox
        self.now_ns = 0  # the time of the CPU's clock
        self.times = StepTimes(0)  # of the step being planned
        self.completion = self.times  # of the step whose result is being applied

    def run(
        self, env: simpy.Environment, on_step: Callable[[int], None] | None = None, *, alone: bool = False
    ) -> Generator[Any, Any, None]:
        """Run the loop as a SimPy process. `on_step` is called with the simulated time after every step. `alone`: the
        environment has no other events, so that none is looked for.
        """
        loop = serve(self.scheduler, self._depth)
        answer: Any = None
        while True:
            try:
                effect = loop.send(answer)
            except StopIteration:
                self._device.rest(None)
                yield env.timeout(max(0, self.now_ns - env.now))
                return
            answer = None
            if isinstance(effect, Poll):
                if effect.wait:
                    yield from self._wait(env)
                if not alone and env.peek() <= self.now_ns:
                    yield env.timeout(max(0, self.now_ns - env.now))
                answer = self._poll()
            elif isinstance(effect, Launch):
                answer = self._launch(effect)
            elif isinstance(effect, Await):
                times: StepTimes = effect.ticket
                while (completion := self._device.completion(times)) is not None:
                    yield completion
                completed_ns = self._completed_ns(effect)
                if completed_ns >= NEVER_NS or (not alone and env.peek() <= completed_ns):
                    completed_ns = yield from self._until_completed(env, effect, completed_ns)
                answer = self._await(effect, completed_ns)
            elif isinstance(effect, Applied):
                self._applied(effect)
                if on_step:
                    on_step(self.now_ns)
            else:
                self._other(effect)

    def _wait(self, env: simpy.Environment) -> Generator[Any, Any, None]:
        """Wait until a request arrives. The end of arrivals does not advance the CPU's clock."""
        inbox = self.inbox
        while inbox and inbox.due_ns == NEVER_NS:
            self._device.rest(inbox.news)
            yield inbox.news
            if inbox:
                self.now_ns = max(self.now_ns, int(env.now))
        if inbox:
            self.now_ns = max(self.now_ns, inbox.due_ns)

    def _poll(self) -> Polled:
        """Return arrivals and cancellations until now. A step may be planned next: its times start here."""
        self.record.polls += 1
        now, inbox = self.now_ns, self.inbox
        self.times = StepTimes(now)
        arrived = inbox.arrived(now) if inbox.due_ns <= now else ()
        cancels = inbox.given_up(now) if inbox.quits else ()
        if arrived or cancels:
            return Polled(arrived, cancels)  # not closed yet: a rejected request may be followed by others
        return OPEN if inbox else CLOSED

    def _launch(self, effect: Launch) -> StepTimes:
        """Advance the CPU by the phases `schedule`, `prepare` and `launch`, and queue the step on the device."""
        plan, times, cost = effect.plan, self.times, self._cost
        if plan.work.chunks or plan.transfers:
            note_admissions(self.record, self.scheduler, plan)
        schedule_ns, prepare_ns, launch_ns, times.update_ns = cost.cpu_ns(plan)
        ran = plan
        if self.adaptive is not None:
            ran = times.ran = self.adaptive.verified(plan)
        shape, device, now = self._graphs.shape(ran), self._device, self.now_ns
        if shape.eager:
            launch_ns += cost.launch_ns
        if device.cpu_share:
            schedule_ns = device.contended_phase_ns(now, schedule_ns)
            prepare_ns = device.contended_phase_ns(now + schedule_ns, prepare_ns)
            launch_ns = device.contended_phase_ns(now + schedule_ns + prepare_ns, launch_ns)
        times.padded_tokens = shape.tokens
        times.schedule_end_ns = times.prepare_start_ns = now + schedule_ns
        times.prepare_end_ns = times.launch_start_ns = times.schedule_end_ns + prepare_ns
        self.now_ns = times.launch_end_ns = times.launch_start_ns + launch_ns + shape.capture_ns
        device.launch(ran, shape, times)
        if self.on_plan is not None:
            self.on_plan(plan)
        return times

    def _await(self, effect: Await, completed_ns: int) -> Completed:
        """Block the CPU until the step's outputs are on the host. Declared ends below the limit are stop tokens."""
        times: StepTimes = effect.ticket
        times.await_start_ns = self.now_ns
        times.await_end_ns = self.now_ns = completed_ns
        self.completion = times
        cancels: Sequence[RequestSpec] = ()
        if effect.cancels:
            self.record.polls += 1
            cancels = self.inbox.given_up(self.now_ns) if self.inbox.quits else ()
        moved: tuple[int, ...] = ()
        broken: tuple[int, ...] = ()
        if self.mover is not None and self.mover.ends:
            moved = self.mover.over(completed_ns, effect.plan.step)
            broken = self.mover.broken(moved)
        ends = effect.plan.changes.ends
        parents: Parents = ()
        if effect.plan.ranked:
            parents = requests.parents(effect.plan)
            self.record.took_over(effect.plan.step, parents)
        if self.acceptance is not None:
            alive = self.scheduler.requests
            ran = times.ran or effect.plan
            result = StepResult(accepted=self.acceptance.of(effect.plan, ran, alive), moved=moved)
            self.record.verified(ran, result, alive)
            return Completed(result, cancels)
        if not (ends or cancels or moved or parents):
            return NO_NEWS
        stopped = tuple([s for s in ends if s.output_tokens < s.max_tokens])
        return Completed(StepResult(stopped, moved=moved, parents=parents, broken=broken), cancels)

    def _completed_ns(self, effect: Await) -> int:
        """Return the time of a step's result. A step without rows completes at once, unless transfers are under way:
        then it waits for the first of them to end, or for a request.
        """
        times: StepTimes = effect.ticket
        waits = times.d2h_end_ns > self.now_ns
        completed_ns = times.d2h_end_ns + self._device.wake_ns if waits else self.now_ns
        if self.mover is None or not self._waits(effect):
            return completed_ns
        return max(completed_ns, min(self.mover.next_ns, self.inbox.due_ns))

    def _until_completed(self, env: simpy.Environment, effect: Await, completed_ns: int) -> Generator[Any, Any, int]:
        """Let the environment's clock catch up; returns the time of completion. An arrival that was not known before
        may end the wait of a step without rows.
        """
        if self.mover is not None and self.mover.news is not None and self._waits(effect):
            return (yield from self._until_known(env, effect, self.mover))
        until = env.timeout(max(0, completed_ns - env.now))
        if self.inbox.news is not None and self._waits(effect):
            yield until | self.inbox.news
            completed_ns = self._completed_ns(effect)
            until = env.timeout(max(0, completed_ns - env.now))
        yield until
        return completed_ns

    def _until_known(self, env: simpy.Environment, effect: Await, mover: Mover) -> Generator[Any, Any, int]:
        """Wait as above where others say when transfers end, and a leg may arrive later than its request did."""
        while (completed_ns := self._completed_ns(effect)) > env.now:
            events = [each for each in (mover.news, self.inbox.news) if each is not None]
            if completed_ns < NEVER_NS:
                events.append(env.timeout(completed_ns - env.now))
            yield env.any_of(events)
        return max(completed_ns, int(env.now))

    def _waits(self, effect: Await) -> bool:
        """True if a step computes nothing while transfers are under way."""
        return self.mover is not None and bool(self.mover.ends) and not effect.plan.work.rows

    def _applied(self, effect: Applied) -> None:
        times = self.completion
        if self._device.cpu_share:
            times.update_ns = self._device.contended_phase_ns(self.now_ns, times.update_ns)
        times.update_start_ns = self.now_ns
        times.update_end_ns = self.now_ns = self.now_ns + times.update_ns
        if self.now_ns > LONGEST_NS:
            bound = f"must be <= {LONGEST_NS / 1e9:.3g} s, 73 years"
            raise OverflowError(f"simulated time came to {self.now_ns / 1e9:.3g} s, {bound}")
        self.record.applied(effect.plan, effect.outcome, times)
        if self.on_applied is not None:
            self.on_applied(effect.plan, self.now_ns)
        for spec, _ in effect.outcome.finished:
            self.inbox.ended(spec, self.now_ns)

    def _other(self, effect: Idle | Refused) -> None:
        """Handle a poll without a plan, or the rejection of a request that can never be served."""
        if isinstance(effect, Idle):
            self.now_ns += self._cost.cpu_ns(None)[0]
            return
        self.record.refused(effect.spec, effect.reason)
        if effect.spec not in self.record.cancels:
            self.inbox.ended(effect.spec, self.now_ns)
