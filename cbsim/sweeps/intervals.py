"""Student's t: its quantiles, and the interval of a mean. No statistics package is needed for whole degrees of freedom.

The distribution function is the finite sum of Abramowitz and Stegun, 26.7.3 and 26.7.4; beyond MOST_SUMMED degrees
the quantile is their expansion from the normal one, 26.7.5, whose error is below 1e-8 of it there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

MOST_SUMMED = 200


def t_interval(values: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """(mean, low, high): with this confidence the mean of what the values are drawn from lies from low to high, if that
    is about normal. One value says nothing of it: its interval is endless.
    """
    assert values
    mean = fmean(values)
    if len(values) == 1:
        return mean, -math.inf, math.inf
    half = half_width(stdev(values), len(values), confidence)
    return mean, mean - half, mean + half


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
