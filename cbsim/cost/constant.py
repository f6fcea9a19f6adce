"""`constant`: a step takes a fixed time plus linear terms. The textbook example, and the clock of the golden traces."""

from __future__ import annotations

from cbsim.cost.cpu import CpuCost
from cbsim.policy.plan import StepPlan
from cbsim.policy.value import value


@value(frozen=True)
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
        work = plan.work
        time = self.step + self.per_token * tokens
        if self.per_prefill_token:
            time += self.per_prefill_token * work.prefill_tokens
        if self.per_context:
            rows = work.decodes + work.padding_rows
            chunks = sum([c.start + c.tokens + c.padding for c in work.chunks])
            time += self.per_context * (work.decode_context + rows + work.padding_context + chunks)
        return 0, round(time), 0

    def eager_launch_ns(self, plan: StepPlan) -> int:
        return 0
