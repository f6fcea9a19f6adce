"""Intervals of means over replicates, by Student's t, conditions on them, and how sure each of several has to be.

The distribution function is the finite sum of Abramowitz and Stegun, 26.7.3 and 26.7.4; beyond MOST_SUMMED degrees
the quantile is their expansion from the normal one, 26.7.5, whose error is below 1e-8 of it there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from cbsim.metrics.checks import OPERATORS, Check

MOST_SUMMED = 200


class Interval(NamedTuple):
    """A mean, and how far it may lie from the one that is meant."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.6g} [{self.low:.6g}, {self.high:.6g}]"


def t_interval(values: Sequence[float], confidence: float) -> Interval:
    """With this confidence the mean of what the values are drawn from lies in the interval, if that is about normal.

    One value says nothing of its spread: its interval is endless.
    """
    assert values
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = half_width(stdev(values), len(values), confidence)
    return Interval(mean, mean - half, mean + half)


def shown_interval(values: Sequence[float], confidence: float) -> Interval:
    """The interval of a mean where one value is shown as a point."""
    return t_interval(values, confidence) if len(values) > 1 else Interval(values[0], values[0], values[0])


def holds(check: Check, values: Sequence[float], confidence: float) -> bool | None:
    """Does a condition hold of the mean of its metric? None if the interval has both; without a value it fails."""
    return decided(check, shown_interval(values, confidence)) if values else False


def decided(check: Check, at: Interval) -> bool | None:
    """Does a condition hold wherever in the interval the mean lies? None if it does so in a part of it."""
    _, low, high = at
    if check.compare == "==":
        return True if low == high == check.bound else None if low <= check.bound <= high else False
    of_low, of_high = (OPERATORS[check.compare](end, check.bound) for end in (low, high))
    return of_low if of_low == of_high else None


def each(confidence: float, count: int) -> float:
    """The confidence that each of so many intervals needs, so that all of them hold at once with `confidence`
    (Bonferroni: whatever they have to do with each other).
    """
    return 1 - (1 - confidence) / max(1, count)


def doublings(first: int, most: int) -> tuple[int, ...]:
    """Replicates after each look at them: `first`, twice as many each time, at last `most`."""
    sizes = [first]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return (*sizes[:-1], most)


def of_all(count: int, tail: float) -> Interval:
    """Of a share when all of `count` trials met it: Clopper and Pearson's, one-sided."""
    return Interval(1.0, tail ** (1 / count) if count else 0.0, 1.0)


def half_width(deviation: float, count: int, confidence: float) -> float:
    """Of the interval of a mean of `count` values with this standard deviation."""
    return t_quantile((1 + confidence) / 2, count - 1) * deviation / math.sqrt(count)


@lru_cache(maxsize=4096)
def t_quantile(probability: float, degrees: int) -> float:
    """What Student's t with so many degrees of freedom stays below with this probability, which is between 0 and 1."""
    assert 0 < probability < 1, probability
    assert degrees >= 1, degrees
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    if degrees > MOST_SUMMED:
        return _expanded(NormalDist().inv_cdf(probability), degrees)
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 2 * probability - 1 else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """The probability that |t| is below tan(angle) sqrt(degrees)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(odd, degrees - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _expanded(x: float, degrees: int) -> float:
    """From a quantile of the normal distribution."""
    terms: tuple[float, ...] = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))
