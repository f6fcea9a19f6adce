"""`fitted`: step time as a linear form in what the step does, with coefficients measured on an engine."""

from __future__ import annotations

from dataclasses import dataclass

from cbsim.cost.cpu import CpuCost
from cbsim.policy.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCost:
    """Coefficients in nanoseconds. `per_prefill_pair` is a query token of a chunk times a KV token it attends to.

    Copies are part of the step time that an engine measures, and cost nothing on their own.
    """

    cpu_ns: CpuCost
    base: float
    per_prefill_token: float
    per_prefill_pair: float
    per_decode_row: float
    per_context_token: float
    launch: float  # CPU time to launch the kernels of a step one by one

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        if not plan.rows:
            return 0, 0, 0
        prefill = pairs = 0.0
        for c in plan.chunks:
            width = c.tokens + c.padding
            prefill += width
            pairs += width * c.start + width * (width + 1) / 2
        rows = plan.decodes + plan.padding_rows
        context = plan.decode_context + rows + plan.padding_context
        linear = self.per_prefill_token * prefill + self.per_decode_row * rows + self.per_context_token * context
        return 0, round(self.base + linear + self.per_prefill_pair * pairs), 0

    def eager_launch_ns(self, plan: StepPlan) -> int:
        return round(self.launch) if plan.rows else 0
