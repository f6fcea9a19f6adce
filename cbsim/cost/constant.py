"""`constant`: a step takes a fixed time plus linear terms. The textbook example, and the clock of the golden traces."""

from __future__ import annotations

from dataclasses import dataclass

from cbsim.cost.cpu import CpuCost
from cbsim.policy.plan import StepPlan


@dataclass(frozen=True, slots=True)
class ConstantCost:
    """All coefficients in nanoseconds. `per_context` counts KV tokens after the step; an empty step takes no time."""

    cpu_ns: CpuCost
    step: float
    per_token: float = 0.0
    per_prefill_token: float = 0.0
    per_context: float = 0.0

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        if not tokens:
            return 0, 0, 0
        time = self.step + self.per_token * tokens
        if self.per_prefill_token:
            time += self.per_prefill_token * plan.prefill_tokens
        if self.per_context:
            rows = plan.decodes + plan.padding_rows
            chunks = sum([c.start + c.tokens + c.padding for c in plan.chunks])
            time += self.per_context * (plan.decode_context + rows + plan.padding_context + chunks)
        return 0, round(time), 0

    def eager_launch_ns(self, plan: StepPlan) -> int:
        return 0
