"""Two points of a sweep compared by the replicates that have the same random numbers.

What a seed does to both goes out of their difference, so its interval is narrower than that of two runs that have
nothing in common: by the gain, the variance that unpaired runs would have over that of the pairs. A difference of less
than a millionth counts as none: runs of equal decisions differ by nanoseconds.
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
    """The first against the second: mean of their differences, and its interval, endless with a single pair."""

    pairs: int
    first: float
    second: float
    mean: float
    low: float
    high: float
    deviation: float | None

    @property
    def sign(self) -> int:
        """1 if the interval is above zero, -1 if it is below, 0 if that cannot be told."""
        return (self.low > 0) - (self.high < 0)

    @property
    def none(self) -> bool:
        """Is every difference none?"""
        return self.deviation == self.mean == 0

    @property
    def known(self) -> bool:
        """Has it an interval?"""
        return isfinite(self.high - self.low)

    def needed(self, precision: float, confidence: float) -> int | None:
        """The pairs after which half the interval is no wider than this share of the second one's mean, if differences
        go on to vary as they do; None if no number is known that is enough.
        """
        if self.deviation is None or not self.second:
            return None
        return enough(self.deviation, precision * abs(self.second), confidence)


def paired(first: Mapping[int, float], second: Mapping[int, float], confidence: float) -> Paired | None:
    """Compare the values of two points, by seed; None if they have no seed in common."""
    ours, theirs, differences = _pairs(first, second)
    if not ours:
        return None
    deviation = stdev(differences) if len(ours) > 1 else None
    return Paired(len(ours), fmean(ours), fmean(theirs), *t_interval(differences, confidence), deviation)


def gain(first: Mapping[int, float], second: Mapping[int, float]) -> float | None:
    """The variance of differences of unpaired runs over that of the pairs; None if that is unknown or 0."""
    ours, theirs, differences = _pairs(first, second)
    if len(ours) < 2 or not (of_pairs := variance(differences)):
        return None
    return (variance(ours) + variance(theirs)) / of_pairs


def _pairs(first: Mapping[int, float], second: Mapping[int, float]) -> tuple[list[float], list[float], list[float]]:
    """The values of the seeds that both have, in order, and their differences."""
    seeds = sorted(first.keys() & second.keys())
    ours, theirs = [first[seed] for seed in seeds], [second[seed] for seed in seeds]
    return ours, theirs, [0.0 if isclose(a, b, rel_tol=NOTHING) else a - b for a, b in zip(ours, theirs, strict=True)]


def enough(deviation: float, half: float, confidence: float) -> int | None:
    """The fewest values with this deviation whose mean has an interval no wider than twice `half`; None if more than
    MOST_NEEDED.
    """
    counts = range(2, MOST_NEEDED + 1)
    at = bisect_left(counts, True, key=lambda count: half_width(deviation, count, confidence) <= half)
    return counts[at] if at < len(counts) else None
