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
        self._by_rows = not any(c.per_token or c.per_block for c in self._coefficients)
        self._known: dict[int, tuple[int, int, int, int]] = {}  # by rows, if nothing else matters

    def __call__(self, plan: StepPlan | None) -> tuple[int, int, int, int]:
        if plan is None:
            return self._base
        rows = plan.decodes + len(plan.chunks)
        if not self._by_rows:
            return self._evaluate(rows, plan.prefill_tokens + plan.decodes, plan.table_blocks)
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._evaluate(rows, 0, 0)
        return known

    def _evaluate(self, rows: int, tokens: int, blocks: int) -> tuple[int, int, int, int]:
        schedule, prepare, launch, update = [
            round(c.base + c.per_request * rows + c.per_token * tokens + c.per_block * blocks)
            for c in self._coefficients
        ]
        return schedule, prepare, launch, update
