"""KV transfers on a GPU: those in order on the compute stream, jobs on a stream for each direction, tied by events.

    compute   waits for the jobs that a plan awaits; its transfers in order; `ready`; then its rows, `end`
    out       waits for `end` of the plan that lists a job to the host; carries its blocks
    in        waits for `ready` of the plan that lists a job from the host: before it, its targets may be in use

A captured graph holds no transfer: they are queued before its replay. The CPU waits for none of them; their events are
queried for completion. Blocks that a job reads or writes have no other user until then, which policy guarantees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple

import torch

from cbengine.model.kvcache import Carrier
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer


@cache
def transfer_streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams for KV to and from the host, beside the steps': the same in every run of a process."""
    return torch.cuda.Stream(), torch.cuda.Stream()


class QueuedMove(NamedTuple):
    """A transfer queued on the GPU, and the events at its edges."""

    step: int
    at: int  # its index in its plan's transfers
    job: int
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaMoves:
    """A GPU's KV transfers. `carrier` makes a carrier for each stream; without `overlap` all use the compute stream."""

    def __init__(self, carrier: Callable[[], Carrier], compute: torch.cuda.Stream, *, overlap: bool) -> None:
        self._compute = compute
        self._out, self._in = transfer_streams() if overlap else (compute, compute)
        self._carriers = {stream: carrier() for stream in (self._compute, self._out, self._in)}
        self._queued: list[QueuedMove] = []  # not known to have ended
        self._ready = torch.cuda.Event()

    def warm_up(self, scratch: int, *, host_tier: bool) -> None:
        """Run every kind of copy once on every stream, on unused blocks, so that a run loads no kernel."""
        for stream, carrier in self._carriers.items():
            with torch.cuda.stream(stream):
                carrier.carry(Direction.COPY, (0,), (scratch,))
                if host_tier:
                    carrier.carry(Direction.OUT, (scratch,), (0,))
                    carrier.carry(Direction.IN, (0,), (scratch,))
            torch.cuda.synchronize()  # the next one uses the same blocks

    def before_rows(self, plan: StepPlan) -> None:
        """Queue the transfers before a plan's rows, but for the last device copies, which are left to `copies`."""
        for queued in self._queued:
            if queued.job in plan.awaited:
                self._compute.wait_event(queued.end)
        self._carry(plan.step, crossing(plan), self._compute)

    def copies(self, plan: StepPlan) -> None:
        """Queue the copies on the device, whose time counts as the step's."""
        self._carry(plan.step, list(numbered(plan, in_order=True))[len(crossing(plan)) :], self._compute)
        self._ready.record(self._compute)

    def after_rows(self, plan: StepPlan, end: torch.cuda.Event) -> None:
        """Queue the jobs of a plan whose rows have been queued, up to `end`."""
        for at, move in numbered(plan, in_order=False):
            stream, event = (self._out, end) if move.direction is Direction.OUT else (self._in, self._ready)
            stream.wait_event(event)
            self._carry(plan.step, [(at, move)], stream)

    def over(self) -> list[QueuedMove]:
        """Return the transfers that have ended and were not returned before."""
        over: list[QueuedMove] = []
        left: list[QueuedMove] = []
        for queued in self._queued:
            (over if queued.end.query() else left).append(queued)
        self._queued = left
        return over

    def _carry(self, step: int, transfers: Iterable[tuple[int, Transfer]], stream: torch.cuda.Stream) -> None:
        for at, move in transfers:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                start.record(stream)
                self._carriers[stream].carry(move.direction, move.sources, move.targets)
                end.record(stream)
            self._queued.append(QueuedMove(step, at, move.job, start, end))


def numbered(plan: StepPlan, *, in_order: bool) -> Iterable[tuple[int, Transfer]]:
    """Return a plan's transfers that are in order with the steps, or else the others, each with its index."""
    return ((at, move) for at, move in enumerate(plan.transfers) if (move.job == IN_ORDER) == in_order)


def crossing(plan: StepPlan) -> list[tuple[int, Transfer]]:
    """Return the in-order transfers up to the last one from or to the host; only device copies follow it."""
    listed = list(numbered(plan, in_order=True))
    while listed and listed[-1][1].direction is Direction.COPY:
        listed.pop()
    return listed
