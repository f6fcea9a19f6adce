"""A GPU as the driver sees it: steps are launched in order, and the completion time of each is computed at launch.

Its lanes each do one thing at a time, in the order of submission. A CUDA stream runs its work in order of submission,
so the start of a piece of work is known when it is submitted: the later of its dependencies and the end of the work
before it. `Lane.book` computes just that; no event is needed for it. Times are integer nanoseconds since the start of
the run.

KV transfers to and from the host have a lane for each direction, beside those of the steps' own small copies; a copy
on the device takes its time on the compute lane, before the rows of its plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple

import simpy

from cbsim.cost.base import Bookings, Copies, Cost, Lane, StagedCost, nearest
from cbsim.machine.graphs import Shape
from cbsim.policy.plan import StepPlan, Underway
from cbsim.policy.transfers import IN_ORDER
from cbsim.record.record import StepTimes, TransferLog
from cbsim.runs.inbox import NEVER_NS


class Device:
    """The device that runs steps. It fills in the `times` of its lanes. Its `mover`, if any, makes KV transfers. A CPU
    that waits for it goes on `wake_ns` after results are on the host.
    """

    def __init__(self, mover: Mover | None, wake_ns: int = 0) -> None:
        self.mover, self.wake_ns = mover, wake_ns
        self.kernels_end_ns = 0  # of the steps launched so far
        self.cpu_share = self.gpu_share = 0.0  # by which CPU phases and kernels take longer beside each other

    def contended_phase_ns(self, begin_ns: int, cpu_ns: int) -> int:
        """Return the time of a CPU phase, longer if it begins while kernels run."""
        return cpu_ns + nearest(self.cpu_share * cpu_ns) if begin_ns < self.kernels_end_ns else cpu_ns

    def contended_kernels_ns(self, launched_ns: int, kernels_ns: int) -> int:
        """Return the time of kernels, longer if they are launched while others run."""
        return kernels_ns + nearest(self.gpu_share * kernels_ns) if launched_ns < self.kernels_end_ns else kernels_ns

    def launch(self, plan: StepPlan, shape: Shape, times: StepTimes) -> None:
        """Queue the copies and kernels of a step whose CPU phases are over."""
        raise NotImplementedError

    def completion(self, times: StepTimes) -> simpy.Event | None:
        """Return the event after which a launched step's completion time is known; None if it is known already."""
        del times
        return None

    def rest(self, until: simpy.Event | None) -> None:
        """Note that the server has nothing to launch until this event, or ever again for None."""


class Timing(NamedTuple):
    """How steps follow each other on a device. It has `depth` I/O slots, whose pinned buffers are reused only after the
    last step's outputs are copied; `overlap` runs copies beside kernels, else all share one in-order stream; `gap_ns`
    is the least time between the kernels of two steps; those of a replayed one may begin `early_ns` before its launch
    ends; `wake_ns` is that of Device.
    """

    depth: int
    overlap: bool
    gap_ns: int = 0
    early_ns: int = 0
    wake_ns: int = 0


class OneGpu(Device):
    """A GPU on its own: the completion time of a step is known at launch. Plans with KV transfers need a `mover`, which
    is made on the lanes from and to the host.
    """

    def __init__(self, cost: Cost, timing: Timing, mover: Callable[[Lane, Lane], Mover] | None = None) -> None:
        depth, overlap, gap_ns, self._early_ns, wake_ns = timing
        self._cost, self._gap_ns = cost, gap_ns
        lanes = [Lane() for _ in range(5)] if overlap else [Lane()] * 5
        self._h2d, self._compute, self._d2h, kv_in, kv_out = lanes
        super().__init__(None if mover is None else mover(kv_in, kv_out), wake_ns)
        self.kernels_end_ns = -gap_ns  # the first ones wait for none
        self._slots_ns = [0] * depth  # the time from which the slot of a step may be written, by its number

    def launch(self, plan: StepPlan, shape: Shape, times: StepTimes) -> None:
        h2d_ns, compute_ns, d2h_ns = self._cost.gpu_ns(plan, shape.tokens)
        launched, slot = times.launch_end_ns, plan.step % len(self._slots_ns)
        if self.gpu_share:
            compute_ns = self.contended_kernels_ns(launched, compute_ns)
        begins, after = times.launch_start_ns, self.kernels_end_ns + self._gap_ns
        if not shape.eager and launched - self._early_ns > begins:  # eager kernels run while the CPU launches each
            begins = launched - self._early_ns
        ready = begins if begins > self._slots_ns[slot] else self._slots_ns[slot]
        times.h2d_start_ns, times.h2d_end_ns = self._h2d.book(ready, h2d_ns)
        ready = times.h2d_end_ns if times.h2d_end_ns > after else after
        mover = self.mover
        if mover is not None and (plan.transfers or plan.awaited or mover.ends):
            ready = mover.before(plan, ready)
            compute_ns += mover.copying_ns(plan)
        else:
            assert not plan.transfers, (plan.step, "moves KV, which this device does not")
            mover = None
        if begins < launched:  # the last kernel does not end before it is launched
            compute_ns = max(compute_ns, launched - max(ready, self._compute.free_ns))
        times.compute_start_ns, times.compute_end_ns = self._compute.book(ready, compute_ns)
        self.kernels_end_ns = times.compute_end_ns
        if mover is not None:
            mover.after(plan, times.compute_start_ns, times.compute_end_ns)
        times.d2h_start_ns, times.d2h_end_ns = self._d2h.book(times.compute_end_ns, d2h_ns)
        self._slots_ns[slot] = times.d2h_end_ns


class Pipeline(Device):
    """GPUs in stages, each with a lane of its own for its layers. A step goes from stage to stage, and the next one is
    on a stage as soon as that is free. Of its times `compute` is that of the last stage; those of all are in the `log`.
    If more steps are in flight than there are stages, one begins when the tokens are sent back to the first stage that
    the step as many before it as there are stages has sampled; else tokens come from the CPU.
    """

    def __init__(self, cost: StagedCost, log: array[int], timing: Timing) -> None:
        depth, overlap, self._gap_ns, self._early_ns, wake_ns = timing
        super().__init__(None, wake_ns)
        self._cost, self._log = cost, log
        self._stages = [Lane() for _ in cost.stages]
        self._h2d, self._d2h = (Lane(), Lane()) if overlap else (self._stages[0], self._stages[-1])
        self._slots_ns, self._ahead = [0] * depth, depth > len(self._stages)
        self._sampled_ns = [0] * len(self._stages)  # when the first stage has the tokens of a step, by its number

    def launch(self, plan: StepPlan, shape: Shape, times: StepTimes) -> None:
        assert not plan.transfers, (plan.step, "moves KV, which no pipeline does")
        h2d_ns, stages_ns, d2h_ns = self._cost.stages_ns(plan, shape.tokens)
        launched, slot, turn = times.launch_end_ns, plan.step % len(self._slots_ns), plan.step % len(self._stages)
        begins = times.launch_start_ns
        if not shape.eager:
            begins = max(begins, launched - self._early_ns)
        times.h2d_start_ns, times.h2d_end_ns = self._h2d.book(max(begins, self._slots_ns[slot]), h2d_ns)
        ready, send_ns = max(times.h2d_end_ns, self._sampled_ns[turn]), self._cost.send_ns(shape.tokens)
        for stage, (lane, kernels_ns) in enumerate(zip(self._stages, stages_ns, strict=True)):
            took_ns = self.contended_kernels_ns(launched, kernels_ns)
            if not stage and begins < launched:  # the last kernel does not end before it is launched
                took_ns = max(took_ns, launched - max(ready, lane.free_ns))
            start_ns, end_ns = lane.book(ready, took_ns)
            if plan.work.rows:
                lane.free_ns += self._gap_ns
                self._log.extend((plan.step, stage, start_ns, end_ns))
                ready = end_ns + send_ns
        times.compute_start_ns, times.compute_end_ns = start_ns, end_ns
        self.kernels_end_ns = end_ns
        if self._ahead:
            sampled = plan.work.decodes + sum([chunk.outputs for chunk in plan.work.chunks])
            self._sampled_ns[turn] = end_ns + self._cost.send_ns(0) if sampled else 0
        times.d2h_start_ns, times.d2h_end_ns = self._d2h.book(end_ns, d2h_ns)
        self._slots_ns[slot] = times.d2h_end_ns


class Mover(Bookings):
    """A scheduler of KV transfers: books those of plans, reports finished jobs. `ends` has jobs not yet reported."""

    news: simpy.Event | None = None  # event of the next end, where others say when a job is over

    def __init__(self, copies: Copies, log: TransferLog, block_size: int, kv_in: Lane, kv_out: Lane) -> None:
        super().__init__(copies, kv_in, kv_out)
        self.ends: dict[int, int] = {}  # job -> end of its last transfer
        self._log = log
        self._underway = Underway(block_size)

    @property
    def next_ns(self) -> int:
        """The end of the next job to finish."""
        return min(self.ends.values(), default=NEVER_NS)

    def before(self, plan: StepPlan, at_ns: int) -> int:
        self._underway.planned(plan)
        for job in plan.awaited:
            at_ns = max(at_ns, self.ends.get(job, 0))
        return super().before(plan, at_ns)

    def booked(self, plan: StepPlan, at: int, start_ns: int, end_ns: int) -> None:
        transfer = plan.transfers[at]
        self._log.moved(plan.step, transfer, start_ns, end_ns)
        if transfer.job != IN_ORDER:
            self.ends[transfer.job] = max(end_ns, self.ends.get(transfer.job, 0))

    def over(self, now_ns: int, step: int) -> tuple[int, ...]:
        """Return the jobs that have finished by now, for the result of `step`; each is reported once."""
        jobs = tuple(sorted([job for job, end_ns in self.ends.items() if end_ns <= now_ns]))
        for job in jobs:
            del self.ends[job]
        self._underway.completed(jobs)
        self._log.reported(jobs, step)
        return jobs

    def broken(self, jobs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the blocks that these jobs, which are over, should have filled and have not."""
        del jobs
        return ()
