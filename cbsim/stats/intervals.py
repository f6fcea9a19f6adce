"""Intervals of means over replicates, by Student's t, conditions on them, and the confidence that each interval needs;
and two points of a sweep compared by paired replicates, which have the same random numbers.

The effect that a seed has on both points cancels in their difference, so its interval is narrower than that of
independent runs. The gain is the variance of unpaired differences over that of the pairs. A relative difference below
a millionth counts as none: runs of equal decisions differ by nanoseconds.

The distribution function is the finite sum of Abramowitz and Stegun, 26.7.3 and 26.7.4; beyond MOST_SUMMED degrees
the quantile is their expansion from the normal one, 26.7.5, whose error is below 1e-8 of it there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist, fmean, stdev, variance
from typing import NamedTuple

from cbsim.metrics.checks import OPERATORS, Check

MOST_SUMMED = 200
MOST_NEEDED = 10_000_000
NOTHING = 1e-6
STILL = (
    "the seed changes nothing, so there is one run of each: the answer is that of these requests, without an interval"
)
COVERS = "the confidence covers the draw of the requests, not the error of the cost model"
"""What an interval over replicates says, and what it does not."""
COVERS_TERMS = (
    "the confidence covers the draw of the terms, and of the requests if the seed draws any, not the cost model's form"
)


class Interval(NamedTuple):
    """A sample mean and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.6g} [{self.low:.6g}, {self.high:.6g}]"


def t_interval(values: Sequence[float], confidence: float) -> Interval:
    """Return the interval that contains the mean of the values' distribution, about normal, with this confidence. A
    single value gives no spread: its interval is infinite.
    """
    assert values
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = half_width(stdev(values), len(values), confidence)
    return Interval(mean, mean - half, mean + half)


def joint(answers: Sequence[tuple[float, float]], confidence: float) -> tuple[Interval, float]:
    """Return the interval of an answer that rests on uncertain terms, by those of the answers with draws of the terms;
    and the part of its squared width that is the terms'. It is Student's for one more draw, with the half-widths of the
    draws' own, added as independent errors are.
    """
    middles, own = [(low + high) / 2 for low, high in answers], fmean(((high - low) / 2) ** 2 for low, high in answers)
    spread = half_width(stdev(middles), len(middles), confidence) ** 2 * (len(middles) + 1)
    mean, half = fmean(middles), math.sqrt(spread + own)
    return Interval(mean, mean - half, mean + half), spread / (spread + own) if half else 0.0


def shown_interval(values: Sequence[float], confidence: float) -> Interval:
    """Return the interval of a mean; that of a single value is the value itself."""
    return t_interval(values, confidence) if len(values) > 1 else Interval(values[0], values[0], values[0])


def holds(check: Check, values: Sequence[float], confidence: float) -> bool | None:
    """Return whether a condition holds for its metric's mean; None if the interval contains both, False if no value."""
    return decided(check, shown_interval(values, confidence)) if values else False


def decided(check: Check, at: Interval) -> bool | None:
    """Return whether a condition holds in the whole interval; None if it holds only in a part of it."""
    _, low, high = at
    if check.compare == "==":
        return True if low == high == check.bound else None if low <= check.bound <= high else False
    of_low, of_high = (OPERATORS[check.compare](end, check.bound) for end in (low, high))
    return of_low if of_low == of_high else None


def each(confidence: float, count: int) -> float:
    """Return the confidence that each of `count` intervals needs so that all of them hold at once with `confidence`
    (Bonferroni: however they depend on each other).
    """
    return 1 - (1 - confidence) / max(1, count)


def doublings(first: int, most: int, growth: float = 2) -> tuple[int, ...]:
    """Return the numbers of replicates after each look: `first`, `growth` times as many each time, finally `most`."""
    sizes = [first]
    while sizes[-1] < most:
        sizes.append(math.ceil(growth * sizes[-1]))
    return (*sizes[:-1], most)


def of_all(count: int, tail: float) -> Interval:
    """Return the interval of a share that all of `count` trials met: Clopper and Pearson's, one-sided."""
    return Interval(1.0, tail ** (1 / count) if count else 0.0, 1.0)


def half_width(deviation: float, count: int, confidence: float) -> float:
    """Return half the width of the interval of a mean of `count` values with this standard deviation."""
    return t_quantile((1 + confidence) / 2, count - 1) * deviation / math.sqrt(count)


@lru_cache(maxsize=4096)
def t_quantile(probability: float, degrees: int) -> float:
    assert 0 < probability < 1, probability
    assert degrees >= 1, degrees
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    if degrees > MOST_SUMMED:
        return _expanded(NormalDist().inv_cdf(probability), degrees)
    low, high = 0.0, math.pi / 2  # bounds of the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 2 * probability - 1 else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(degrees)


def _within(angle: float, degrees: int) -> float:
    """Return the probability that |t| is below tan(angle) sqrt(degrees)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(odd, degrees - 1, 2):
        total += term
        term *= (k + 1) / (k + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _expanded(x: float, degrees: int) -> float:
    """Return a quantile of Student's t expanded from `x`, the quantile of the normal distribution."""
    terms: tuple[float, ...] = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / float(degrees) ** power for power, term in enumerate(terms, start=1))


class Paired(NamedTuple):
    """The first point minus the second: the mean of their differences, and its interval, infinite for a single pair."""

    pairs: int
    first: float
    second: float
    mean: float
    low: float
    high: float
    deviation: float | None
    gain: float | None
    """The variance of unpaired differences over that of the pairs; None if the latter is unknown or 0."""

    @property
    def sign(self) -> int:
        """The sign of the difference: 1 if the interval is above zero, -1 if it is below, 0 if it contains zero."""
        return (self.low > 0) - (self.high < 0)

    @property
    def none(self) -> bool:
        return self.deviation == self.mean == 0

    @property
    def known(self) -> bool:
        return math.isfinite(self.high - self.low)

    def needed(self, precision: float, confidence: float) -> int | None:
        """Return the number of pairs after which half the interval is at most this share of the second point's mean,
        if differences keep their deviation; None if no sufficient number is known.
        """
        if self.deviation is None or not self.second:
            return None
        return enough(self.deviation, precision * abs(self.second), confidence)


def paired(first: Mapping[int, float], second: Mapping[int, float], confidence: float) -> Paired | None:
    """Compare the values of two points, by seed; None if they have no seed in common."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    ours, theirs = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
    differences = [0.0 if math.isclose(a, b, rel_tol=NOTHING) else a - b for a, b in zip(ours, theirs, strict=True)]
    deviation = gain = None
    if len(seeds) > 1:
        deviation = stdev(differences)
        gain = (variance(ours) + variance(theirs)) / variance(differences) if deviation else None
    return Paired(len(ours), fmean(ours), fmean(theirs), *t_interval(differences, confidence), deviation, gain)


def enough(deviation: float, half: float, confidence: float) -> int | None:
    """Return the smallest number of values with this deviation whose mean has an interval no wider than twice `half`;
    None if it is above MOST_NEEDED.
    """
    counts = range(2, MOST_NEEDED + 1)
    at = bisect_left(counts, True, key=lambda count: half_width(deviation, count, confidence) <= half)
    return counts[at] if at < len(counts) else None
