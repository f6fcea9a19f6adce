"""KV transfers without hardware, in place or modelled by a cost; the rules are those of cbsim/policy/transfers.py."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from cbengine.model.kvcache import Carrier
from cbsim.cost.base import Bookings, Copies, Lane
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import IN_ORDER, Transfer
from cbsim.runs.inbox import NEVER_NS


class Moved(NamedTuple):
    """A transfer that has ended: index `at` in the plan of `step`; times are those of the engine's clock. If `broken`
    its targets have not been filled.
    """

    step: int
    at: int
    start_ns: int
    end_ns: int
    broken: bool = False


def numbered(plan: StepPlan, *, in_order: bool) -> Iterable[tuple[int, Transfer]]:
    """Return a plan's transfers that are in order with the steps, or else the others, each with its index."""
    return ((at, move) for at, move in enumerate(plan.transfers) if (move.job == IN_ORDER) == in_order)


class InPlace:
    """Transfers on the steps' processor: in order before a plan's rows, jobs after. `over`: not reported yet."""

    def __init__(self, carrier: Carrier) -> None:
        self.over: list[Moved] = []
        self._carrier = carrier

    def carry(self, plan: StepPlan, *, in_order: bool) -> None:
        """Carry out a plan's transfers in order, or its jobs, none of which outlasts the step that lists it."""
        for at, transfer in numbered(plan, in_order=in_order):
            self.perform(plan.step, at, transfer)

    def perform(self, step: int, at: int, transfer: Transfer) -> None:
        start = time.perf_counter_ns()
        self._carrier.carry(transfer.direction, transfer.sources, transfer.targets)
        self.over.append(Moved(step, at, start, time.perf_counter_ns()))

    def finished(self) -> list[Moved]:
        """Return the transfers that have ended and were not returned before."""
        over, self.over = self.over, []
        return over


class ModelledMoves(Bookings):
    """Transfers that take a cost's time, on a lane for each way of the host's link; copies take the compute lane's."""

    def __init__(self, copies: Copies) -> None:
        super().__init__(copies, Lane(), Lane())
        self._moved: list[tuple[int, Moved]] = []  # with the job

    @property
    def next_ns(self) -> int:
        """The time at which the next transfer ends."""
        return min((moved.end_ns for _, moved in self._moved), default=NEVER_NS)

    def before(self, plan: StepPlan, at_ns: int) -> int:
        return super().before(plan, max([at_ns, *(moved.end_ns for job, moved in self._moved if job in plan.awaited)]))

    def booked(self, plan: StepPlan, at: int, start_ns: int, end_ns: int) -> None:
        self._moved.append((plan.transfers[at].job, Moved(plan.step, at, start_ns, end_ns)))

    def finished(self, now_ns: int) -> list[Moved]:
        """Return the transfers that have ended by now and were not returned before."""
        over = [moved for _, moved in self._moved if moved.end_ns <= now_ns]
        self._moved = [entry for entry in self._moved if entry[1].end_ns > now_ns]
        return over
