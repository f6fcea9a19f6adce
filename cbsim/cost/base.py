"""What a cost model answers."""

from __future__ import annotations

from typing import Literal, Protocol

from cbsim.policy.plan import StepPlan

Phase = Literal["schedule", "prepare", "launch", "update"]


class Cost(Protocol):
    """A plan in, integer nanoseconds out, and nothing else: no state, no clock."""

    def cpu_ns(self, phase: Phase, plan: StepPlan | None) -> int:
        """CPU time of a phase. Without a plan: the scheduler found nothing to run."""

    def compute_ns(self, plan: StepPlan, tokens: int) -> int:
        """Kernel time of the step when `tokens` query tokens are computed, padding included."""

    def copies_ns(self, plan: StepPlan) -> tuple[int, int]:
        """(H2D, D2H) copy times of the step's inputs and outputs."""

    def eager_launch_ns(self, plan: StepPlan) -> int:
        """CPU time to launch the step's kernels one by one, without a CUDA graph."""


def to_ns(seconds: float) -> int:
    """Seconds to the clock's integer nanoseconds, rounded to nearest."""
    return round(seconds * 1e9)
