"""Means over replicates: their intervals, conditions on them, and how sure each of several has to be."""

from __future__ import annotations

from collections.abc import Sequence

from cbsim.results.checks import OPERATORS, Check
from cbsim.sweeps.intervals import t_interval

Interval = tuple[float, float, float]  # mean, low, high


def interval(values: Sequence[float], confidence: float) -> Interval:
    """Of Student's t; a single value says nothing of its spread, and is all three."""
    return t_interval(values, confidence) if len(values) > 1 else (values[0],) * 3


def holds(check: Check, values: Sequence[float], confidence: float) -> bool | None:
    """Does a condition hold of the mean of its metric? None if the interval has both; without a value it fails."""
    if not values:
        return False
    _, low, high = interval(values, confidence)
    if check.compare == "==":
        return True if low == high == check.bound else None if low <= check.bound <= high else False
    of_low, of_high = (OPERATORS[check.compare](end, check.bound) for end in (low, high))
    return of_low if of_low == of_high else None


def each(confidence: float, count: int) -> float:
    """The confidence that each of so many intervals needs, so that all of them hold at once with `confidence`
    (Bonferroni: whatever they have to do with each other).
    """
    return 1 - (1 - confidence) / max(1, count)
