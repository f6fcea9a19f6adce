"""A GPU as the driver sees it: steps are launched in order, and each says when it will have landed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import simpy

from cbsim.cost.base import Cost
from cbsim.machine.graphs import Shape
from cbsim.machine.lanes import Lane, Slots, lanes
from cbsim.machine.mover import Mover
from cbsim.policy.plan import StepPlan
from cbsim.results.record import StepTimes


class Device(Protocol):
    """Where steps run. `times` are filled in as far as the device decides them: its lanes."""

    @property
    def mover(self) -> Mover | None:
        """What moves KV there."""

    def launch(self, plan: StepPlan, shape: Shape, times: StepTimes) -> None:
        """Queue a step whose CPU phases are over: its copies and kernels."""

    def landing(self, times: StepTimes) -> simpy.Event | None:
        """What to wait for before it is known when a launched step lands; None if it is."""

    def rest(self, until: simpy.Event | None) -> None:
        """The server has nothing to launch until this event, or ever."""


class OneGpu:
    """A GPU on its own: when a step lands is known as soon as it is launched. `depth` I/O slots; `overlap` runs copies
    beside kernels; `gap_ns` lie between the kernels of two steps at least. Plans that move KV need a `mover`, which is
    made on the lanes from and to the host.
    """

    def __init__(
        self,
        cost: Cost,
        *,
        depth: int,
        overlap: bool,
        gap_ns: int = 0,
        mover: Callable[[Lane, Lane], Mover] | None = None,
    ) -> None:
        self._cost, self._gap_ns = cost, gap_ns
        self._ready_ns = 0  # from when kernels can run after those of the last step
        self._h2d, self._compute, self._d2h, kv_in, kv_out = lanes(overlap=overlap)
        self.mover = None if mover is None else mover(kv_in, kv_out)
        self._slots = Slots(depth)

    def launch(self, plan: StepPlan, shape: Shape, times: StepTimes) -> None:
        h2d_ns, compute_ns, d2h_ns = self._cost.gpu_ns(plan, shape.tokens)
        launched = times.launch_end_ns
        ready = max(times.launch_start_ns if shape.eager else launched, self._slots.free_ns(plan.step))
        times.h2d_start_ns, times.h2d_end_ns = self._h2d.book(ready, h2d_ns)
        ready = max(times.h2d_end_ns, self._ready_ns)
        mover = self.mover
        if mover is not None and (plan.moves or plan.awaited or mover.ends):
            ready = mover.before(plan, ready)
            compute_ns += mover.copying_ns(plan)
        else:
            assert not plan.moves, (plan.step, "moves KV, which this device does not")
            mover = None
        if shape.eager:  # kernels run while the CPU launches them one by one, the last not before it is launched
            compute_ns = max(compute_ns, launched - self._compute.start_ns(ready))
        times.compute_start_ns, times.compute_end_ns = self._compute.book(ready, compute_ns)
        self._ready_ns = times.compute_end_ns + self._gap_ns
        if mover is not None:
            mover.after(plan, times.compute_start_ns, times.compute_end_ns)
        times.d2h_start_ns, times.d2h_end_ns = self._d2h.book(times.compute_end_ns, d2h_ns)
        self._slots.hold(plan.step, times.d2h_end_ns)

    def landing(self, times: StepTimes) -> simpy.Event | None:
        del times
        return None

    def rest(self, until: simpy.Event | None) -> None:
        del until
