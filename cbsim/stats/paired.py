"""Two points of a sweep compared by paired replicates, which have the same random numbers.

The effect that a seed has on both points cancels in their difference, so its interval is narrower than that of
independent runs. The gain is the variance of unpaired differences over that of the pairs. A relative difference below
a millionth counts as none: runs of equal decisions differ by nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from math import isclose, isfinite
from statistics import fmean, stdev, variance
from typing import NamedTuple

from cbsim.stats.intervals import half_width, t_interval

MOST_NEEDED = 10_000_000
NOTHING = 1e-6


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
        return isfinite(self.high - self.low)

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
    differences = [0.0 if isclose(a, b, rel_tol=NOTHING) else a - b for a, b in zip(ours, theirs, strict=True)]
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
