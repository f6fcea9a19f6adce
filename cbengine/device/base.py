"""The interface between driver and device, and the two devices that need no hardware.

A device has a staging buffer for each step in flight. The driver writes a step into it, launches it, and later waits
for its tokens, in order. Times are those of the engine's clock: `perf_counter_ns` if a device is real.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from cbengine.batch import Capacity
from cbengine.device.executor import Executor
from cbengine.device.layout import Header, Ints, Ranked, arrays
from cbengine.device.moves import ModelledMoves, Moved
from cbsim.cost.base import Copies, Cost
from cbsim.errors import ServerError
from cbsim.policy.captures import bucket, captured_sizes
from cbsim.policy.plan import StepPlan
from cbsim.workload import requests


class Clock:
    """The machine's clock, in nanoseconds. `wait_until` may return early; `work_until` keeps the CPU busy till then."""

    now_ns = staticmethod(time.perf_counter_ns)

    def wait_until(self, at_ns: int) -> None:
        left = min(at_ns - time.perf_counter_ns(), 20_000_000)  # in naps, so that an interrupt is noticed
        if left > 0:
            time.sleep(left / 1e9)

    def work_until(self, at_ns: int) -> None:
        while time.perf_counter_ns() < at_ns:
            pass


class CpuClock(Clock):
    """A clock that advances only while this thread computes, and jumps over waits: other processes do not show."""

    def __init__(self) -> None:
        self._skipped_ns = 0

    def now_ns(self) -> int:
        return time.thread_time_ns() + self._skipped_ns

    def wait_until(self, at_ns: int) -> None:
        self._skipped_ns += max(0, at_ns - self.now_ns())

    work_until = wait_until  # the work is synthetic: only the time it takes matters


COMPUTE = 1  # index among the lanes H2D, kernels, D2H


class DeviceError(ServerError):
    """An error of a device during a run: out of memory, or a worker that died."""


class Lanes(NamedTuple):
    """The times at which a step's copies and kernels ran."""

    h2d_start_ns: int
    h2d_end_ns: int
    compute_start_ns: int
    compute_end_ns: int
    d2h_start_ns: int
    d2h_end_ns: int


class EngineDevice(Protocol):
    """A device made for one run."""

    staging: list[Ints]  # one buffer for each step in flight
    facts: dict[str, Any]  # the device's entries in env.json; more of them once it is closed
    _sizes: Sequence[int] = ()  # of captured steps, rising

    def bucket(self, rows: int) -> int:
        """Return the size at which a step of this many decode rows is computed."""
        return bucket(self._sizes, rows)

    def launch(self, slot: int, header: Header, plan: StepPlan, excess: Ints | None = None) -> None:
        """Start the step in staging buffer `slot`, after those launched before, and its plan's transfers. `excess` are
        the table updates that the buffer lacks.
        """

    def settle(self) -> None:
        """Get ready for the calling thread; called before the first launch if another thread has made the device."""
        return

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        """Block until that step is done and return its results as `Executor.run` does. Raises DeviceError."""

    def moved(self, until_ns: int | None) -> list[Moved]:
        """Return the transfers that have ended and were not returned before; called after `wait` while any are in
        flight. With a time it may block until then or until a transfer ends, whichever is first. Raises DeviceError.
        """

    def close(self) -> None:
        """Free what outlives the device. It may be called twice."""
        return


def staging(capacity: Capacity, depth: int) -> list[Ints]:
    """Return buffers in ordinary memory."""
    return [np.zeros(capacity.staging, dtype=np.int32) for _ in range(depth)]


class Inline(EngineDevice):
    """A device that computes a step while it is launched, in order: deterministic, without overlap."""

    def __init__(self, executor: Executor, capacity: Capacity, depth: int) -> None:
        torch.set_num_threads(1)  # makes the order of sums, and so every last bit, independent of the machine
        self.staging = staging(capacity, depth)
        self.facts: dict[str, Any] = {"device": "cpu, inline", "threads": 1}
        self._executor = executor
        self._mover = executor.mover()
        self._done: dict[int, tuple[Ints, Lanes]] = {}

    def launch(self, slot: int, header: Header, plan: StepPlan, excess: Ints | None = None) -> None:
        self._mover.carry(plan, in_order=True)
        start = time.perf_counter_ns()
        step = arrays(torch.from_numpy(self.staging[slot]), header)
        self._executor.update_tables(step, excess)
        tokens = self._executor.run(step, header).numpy().copy()
        end = time.perf_counter_ns()
        self._done[slot] = tokens, Lanes(start, start, start, end, end, end)
        self._mover.carry(plan, in_order=False)

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        return self._done.pop(slot)

    def moved(self, until_ns: int | None) -> list[Moved]:
        del until_ns  # everything launched has ended
        return self._mover.finished()


class Modelled(EngineDevice):
    """A device that computes nothing: a step takes the nanoseconds of a cost model, on lanes as a GPU's. Every token is
    0, and the beams of a search replace each other as the workload declares. It times the loop and the CPU's work
    without hardware: what the loop does is real, and on a `CpuClock` the time it takes is the CPU's own. With `graphs`
    decode steps are padded to a captured size, and the CPU launches all others kernel by kernel, as `Cuda` does;
    otherwise every step is launched in one go, at its own size.
    """

    def __init__(
        self, cost: Cost, copies: Copies, capacity: Capacity, depth: int, clock: Clock, *, graphs: bool
    ) -> None:
        self.staging = staging(capacity, depth)
        self.facts: dict[str, Any] = {"device": "modelled", "clock": "CPU time of the loop, waiting skipped"}
        self._cost, self._clock = cost, clock
        self._sizes = captured_sizes(capacity.rows) if graphs else []
        self._free = [0, 0, 0]  # when each lane has finished its work
        self._moves = ModelledMoves(copies)
        self._done: dict[int, tuple[Ints, Lanes]] = {}

    def launch(self, slot: int, header: Header, plan: StepPlan, excess: Ints | None = None) -> None:
        del excess  # there are no tables
        begun = at = self._clock.now_ns()
        captured = header.decodes == header.rows <= max(self._sizes, default=header.rows)
        if self._sizes and not captured:
            self._clock.work_until(begun + self._cost.launch_ns)
        launched, edges = self._clock.now_ns(), []
        for lane, duration in enumerate(self._cost.gpu_ns(plan, header.tokens)):
            start = max(at, self._free[lane])
            if lane == COMPUTE and (plan.transfers or plan.awaited):
                start = self._moves.before(plan, start)
            end = start + duration + (self._moves.copying_ns(plan) if lane == COMPUTE and plan.transfers else 0)
            at = self._free[lane] = max(end, launched) if lane == COMPUTE else end
            edges += [start, at]
        if plan.transfers:
            self._moves.after(plan, *edges[2 * COMPUTE : 2 * COMPUTE + 2])
        self._done[slot] = _declared(header, plan), Lanes(*edges)

    def wait(self, slot: int) -> tuple[Ints, Lanes]:
        tokens, lanes = self._done.pop(slot)
        while self._clock.now_ns() < lanes.d2h_end_ns:
            self._clock.wait_until(lanes.d2h_end_ns)
        return tokens, lanes

    def moved(self, until_ns: int | None) -> list[Moved]:
        next_ns = 0 if until_ns is None else min(self._moves.next_ns, until_ns)
        while self._clock.now_ns() < next_ns:
            self._clock.wait_until(next_ns)
        return self._moves.finished(self._clock.now_ns())


def _declared(header: Header, plan: StepPlan) -> Ints:
    """Return the declared results of a step, since nothing is computed."""
    results: Ints = np.zeros(header.results, dtype=np.int32)
    if plan.ranked:
        declared = dict(requests.parents(plan))
        Ranked.of(results).parents[:] = [group.index(declared.get(s, s)) for group in plan.ranked for s in group]
    return results
