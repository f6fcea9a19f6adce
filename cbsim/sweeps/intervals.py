"""Student's intervals of means of replicates, without a library of statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean, stdev
from typing import NamedTuple


class Interval(NamedTuple):
    """A mean, and how far it may lie from the one that is meant."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.6g} [{self.low:.6g}, {self.high:.6g}]"


def of_mean(values: Sequence[float], tail: float) -> Interval:
    """Of independent values, two at least: the mean that they are drawn from lies below it, and above it, with
    probability `tail` each if the values are normal.
    """
    mean = fmean(values)
    half = quantile(tail, len(values) - 1) * stdev(values, mean) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def of_all(count: int, tail: float) -> Interval:
    """Of a share when all of `count` trials met it: Clopper and Pearson's, one-sided."""
    return Interval(1.0, tail ** (1 / count) if count else 0.0, 1.0)


@lru_cache(maxsize=4096)
def quantile(tail: float, freedom: int) -> float:
    """What Student's t exceeds with probability `tail` < 1/2. Found by halving the angle atan(t / sqrt(freedom))."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 1 - 2 * tail else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _within(angle: float, freedom: int) -> float:
    """P(|T| < t) for that angle: the finite sums 26.7.3 and 26.7.4 of Abramowitz and Stegun."""
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
