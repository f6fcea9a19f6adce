"""KV transfers without hardware, in place or modelled by a cost; the rules are those of cbsim/policy/transfers.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cbengine.model.kvcache import Carrier
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer

CopyNs = Callable[[Direction, int], int]  # nanoseconds for this many blocks
NEVER_NS = 1 << 200


class Moved(NamedTuple):
    """A transfer that has ended: index `at` in the plan of `step`; times are those of the engine's clock. If `broken`
    its targets have not been filled.
    """

    step: int
    at: int
    start_ns: int
    end_ns: int
    broken: bool = False


class InPlace:
    """Transfers on the steps' processor: in order before a plan's rows, jobs after. `over`: not reported yet."""

    def __init__(self, carrier: Carrier) -> None:
        self.over: list[Moved] = []
        self._carrier = carrier

    def before_rows(self, step: int, transfers: Sequence[Transfer], awaited: Sequence[int]) -> None:
        del awaited  # no job outlasts the step that lists it
        for at, transfer in enumerate(transfers):
            if transfer.job == IN_ORDER:
                self.perform(step, at, transfer)

    def after_rows(self, step: int, transfers: Sequence[Transfer]) -> None:
        for at, transfer in enumerate(transfers):
            if transfer.job != IN_ORDER:
                self.perform(step, at, transfer)

    def perform(self, step: int, at: int, transfer: Transfer) -> None:
        start = time.perf_counter_ns()
        self._carrier.carry(transfer.direction, transfer.sources, transfer.targets)
        self.over.append(Moved(step, at, start, time.perf_counter_ns()))

    def finished(self) -> list[Moved]:
        """Return the transfers that have ended and were not returned before."""
        over, self.over = self.over, []
        return over


class ModelledMoves:
    """Transfers that take a cost's time, on a lane for each way of the host's link; copies take the compute lane's."""

    def __init__(self, copy_ns: CopyNs) -> None:
        self._copy_ns = copy_ns
        self._free = dict.fromkeys(Direction, 0)  # when each lane has finished its work
        self._moved: list[tuple[int, Moved]] = []  # with the job

    @property
    def next_ns(self) -> int:
        """The time at which the next transfer ends."""
        return min((moved.end_ns for _, moved in self._moved), default=NEVER_NS)

    def before_rows(self, plan: StepPlan, at_ns: int) -> int:
        """Book the transfers before the rows of a plan that could run at `at_ns`; return when the rows can."""
        ready = max([at_ns, *(moved.end_ns for job, moved in self._moved if job in plan.awaited)])
        for at, move in enumerate(plan.transfers):
            if move.job == IN_ORDER and move.direction is not Direction.COPY:
                ready = self._book(plan, at, ready)
        for at, move in enumerate(plan.transfers):
            if move.job != IN_ORDER and move.direction is Direction.IN:
                self._book(plan, at, ready)
        return ready

    def copying_ns(self, plan: StepPlan) -> int:
        """Return the time of the copies on the device, which come directly before the rows."""
        copies = (one for one in plan.transfers if one.direction is Direction.COPY)
        return sum(self._copy_ns(Direction.COPY, len(one.sources)) for one in copies)

    def after_rows(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        """Record that a plan's copies and rows have the compute lane from `start_ns` to `end_ns`."""
        for at, move in enumerate(plan.transfers):
            if move.direction is Direction.COPY:
                start_ns = self._book(plan, at, start_ns)
            elif move.direction is Direction.OUT and move.job != IN_ORDER:
                self._book(plan, at, end_ns)

    def finished(self, now_ns: int) -> list[Moved]:
        """Return the transfers that have ended by now and were not returned before."""
        over = [moved for _, moved in self._moved if moved.end_ns <= now_ns]
        self._moved = [entry for entry in self._moved if entry[1].end_ns > now_ns]
        return over

    def _book(self, plan: StepPlan, at: int, ready_ns: int) -> int:
        """Book a transfer on the lane of its direction; return when it ends."""
        move = plan.transfers[at]
        start = max(ready_ns, self._free[move.direction])
        end = self._free[move.direction] = start + self._copy_ns(move.direction, len(move.sources))
        self._moved.append((move.job, Moved(plan.step, at, start, end)))
        return end
