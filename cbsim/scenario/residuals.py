"""How sure a prediction is: the residuals of predictions that were made without the point's own curve.

The interval of a prediction is its value times the exponentials of two order statistics of residuals: those of curves
of as long prompts in proportion to outputs, if there are enough, else of all. With n residuals the ends are the k-th
smallest and largest, k = floor(0.1 (n + 1)): a new residual that is like these falls beyond each with probability
k / (n + 1), 10 % at most.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from cbsim.scenario.terms import Residual, TermsFile

TAIL = 0.1  # beyond each end of an 80 % interval
ENOUGH = 15  # residuals


class Interval(NamedTuple):
    """A factor of the prediction from `low` to `high`, by so many residuals."""

    low: float
    high: float
    residuals: int

    def holds(self, factor: float) -> bool:
        return self.low <= factor <= self.high


def interval(
    file: TermsFile, metric: str, lengths: tuple[int, int] | None = None, without: str | None = None
) -> Interval | None:
    """80 % of measured over predicted `metric`, ttft or tpot, by all curves but `without`; by those alike if there are
    enough, for requests of known `lengths`, of prompt and output. None with too few.
    """
    others = [curve for hash_, curve in file.curves.items() if hash_ != without]
    alike = [curve for curve in others if lengths and _kind(curve.prompt, curve.output) == _kind(*lengths)]
    enough = sum(len(curve.residuals) for curve in alike) >= ENOUGH
    return _ends([_value(residual, metric) for curve in (alike if enough else others) for residual in curve.residuals])


def coverage(file: TermsFile, metric: str) -> tuple[int, int]:
    """Left-out points within the interval that the other curves give, and all of them."""
    within = total = 0
    for hash_, curve in file.curves.items():
        known = interval(file, metric, (curve.prompt, curve.output), hash_)
        if known is not None:
            total += len(curve.residuals)
            within += sum(known.holds(exp(_value(residual, metric))) for residual in curve.residuals)
    return within, total


def _kind(prompt: int, output: int) -> int:
    """-1: outputs are much longer, 0: alike, 1: prompts are."""
    return (prompt >= 4 * output) - (output >= 4 * prompt)


def _value(residual: Residual, metric: str) -> float:
    return residual.ttft if metric == "ttft" else residual.tpot


def _ends(values: list[float]) -> Interval | None:
    place = int(TAIL * (len(values) + 1))
    if place < 1:
        return None
    ordered = sorted(values)
    return Interval(exp(ordered[place - 1]), exp(ordered[-place]), len(values))
