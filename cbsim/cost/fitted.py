"""`fitted`: step time as a linear form in what the step does, with coefficients measured on an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cbsim.cost.cpu import CpuCost
from cbsim.policy.plan import StepPlan


class Work(NamedTuple):
    """What a step does, as far as its time depends on it. A calibration fits one coefficient to each, and a constant.

    `pairs` are query tokens of the chunks times the KV tokens that each attends to, itself included; `context` are the
    KV tokens that decoding rows read, their own included. Padding of static batches counts.
    """

    chunks: int
    prefill_tokens: int
    pairs: float
    decodes: int
    context: int


def work(plan: StepPlan) -> Work:
    """What `plan` does."""
    prefill, pairs = 0, 0.0
    for c in plan.chunks:
        width = c.tokens + c.padding
        prefill += width
        pairs += width * c.start + width * (width + 1) / 2
    rows = plan.decodes + plan.padding_rows
    return Work(len(plan.chunks), prefill, pairs, rows, plan.decode_context + rows + plan.padding_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCost:
    """Coefficients in nanoseconds, one for each count in `Work`, and times that every step takes."""

    cpu_ns: CpuCost
    base: float
    per_chunk: float
    per_prefill_token: float
    per_prefill_pair: float
    per_decode_row: float
    per_context_token: float
    h2d: float
    d2h: float
    launch: float  # CPU time to launch the kernels of a step one by one

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        if not plan.rows:
            return 0, 0, 0
        chunks, prefill, pairs, rows, context = work(plan)
        linear = self.per_prefill_token * prefill + self.per_decode_row * rows + self.per_context_token * context
        kernels = self.base + self.per_chunk * chunks + linear + self.per_prefill_pair * pairs
        return round(self.h2d), round(kernels), round(self.d2h)

    def eager_launch_ns(self, plan: StepPlan) -> int:
        return round(self.launch) if plan.rows else 0
