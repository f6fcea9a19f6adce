"""CPU cost of a step, by phase: a constant plus terms in requests, tokens and blocks.

Requests are the rows of the step, tokens its query tokens, blocks those in the block tables of its rows, which is what
preparing a step has to lay out. A phase without a plan costs its constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cbsim.cost.base import Phase
from cbsim.policy.plan import StepPlan


class PhaseCost(NamedTuple):
    """Coefficients of one phase, in nanoseconds."""

    base: float = 0.0
    per_request: float = 0.0
    per_token: float = 0.0
    per_block: float = 0.0


class CpuCost:
    """`phases` maps a phase to its coefficients; a phase that is missing costs nothing."""

    def __init__(self, phases: Mapping[str, PhaseCost]) -> None:
        self._constant = {name: round(c.base) for name, c in phases.items() if not any(c[1:])}
        self._linear = {name: c for name, c in phases.items() if any(c[1:])}

    def __call__(self, phase: Phase, plan: StepPlan | None) -> int:
        linear = self._linear.get(phase)
        if linear is None:
            return self._constant.get(phase, 0)
        if plan is None:
            return round(linear.base)
        rows = plan.decodes + len(plan.chunks)
        tokens = plan.prefill_tokens + plan.decodes
        terms = linear.per_request * rows + linear.per_token * tokens + linear.per_block * plan.table_blocks
        return round(linear.base + terms)
