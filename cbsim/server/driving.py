"""What every driver of the serving loop does alike, on a simulated clock or a real one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from cbsim.policy.loop import Polled, Scheduler
from cbsim.policy.plan import StepPlan
from cbsim.results.record import Record

OPEN, CLOSED = Polled(), Polled(closed=True)


def note_admissions(record: Record, scheduler: Scheduler, plan: StepPlan) -> None:
    """Record the requests that a step takes in. They are among its chunks: a plan without any needs no call."""
    for chunk in plan.work.chunks:
        if chunk.admitted:
            record.admitted(scheduler.requests[chunk.spec], plan.step)


@contextmanager
def no_collections() -> Iterator[None]:
    """A run makes millions of small objects and no cycles: looking for cycles would take a sixth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
