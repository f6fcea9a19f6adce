"""CPU cost of a step, by phase: a constant plus terms in requests, tokens and blocks.

Requests are the rows of the step, tokens its query tokens, blocks those in the block tables of its rows, which is what
preparing a step has to lay out. Without a plan a phase costs its constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cbsim.policy.plan import StepPlan

PHASES = ("schedule", "prepare", "launch", "update")


class PhaseCost(NamedTuple):
    """Coefficients of one phase, in nanoseconds."""

    base: float = 0.0
    per_request: float = 0.0
    per_token: float = 0.0
    per_block: float = 0.0


class CpuCost:
    """`phases` maps a phase to its coefficients; a phase that is missing costs nothing."""

    def __init__(self, phases: Mapping[str, PhaseCost]) -> None:
        self._coefficients = [phases.get(name, PhaseCost()) for name in PHASES]
        schedule, prepare, launch, update = (round(c.base) for c in self._coefficients)
        self._base = schedule, prepare, launch, update
        self._linear = any(any(c[1:]) for c in self._coefficients)

    def __call__(self, plan: StepPlan | None) -> tuple[int, int, int, int]:
        if plan is None or not self._linear:
            return self._base
        rows = plan.decodes + len(plan.chunks)
        tokens, blocks = plan.prefill_tokens + plan.decodes, plan.table_blocks
        schedule, prepare, launch, update = [
            round(base + request * rows + token * tokens + block * blocks)
            for base, request, token, block in self._coefficients
        ]
        return schedule, prepare, launch, update
