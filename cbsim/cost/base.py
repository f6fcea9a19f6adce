"""What a cost model answers."""

from __future__ import annotations

from typing import Protocol

from cbsim.cost.cpu import CpuCost
from cbsim.policy.plan import StepPlan


class Cost(Protocol):
    """A plan in, integer nanoseconds out, and nothing else: no state, no clock."""

    @property
    def cpu_ns(self) -> CpuCost:
        """CPU time of the phases of a plan."""

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        """(H2D copy, kernels, D2H copy) when `tokens` query tokens are computed, padding included."""

    def eager_launch_ns(self, plan: StepPlan) -> int:
        """CPU time to launch the step's kernels one by one, without a CUDA graph."""
