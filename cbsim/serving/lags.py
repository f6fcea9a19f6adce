"""How late things were, and how far apart: a distribution of durations, whatever their number, within 2 %."""

from __future__ import annotations

import math

LEAST_S, STEP = 1e-7, math.log(1.02)


class Durations:
    """Counts of durations in classes 2 % wide from 0.1 us on; shorter ones are 0."""

    def __init__(self) -> None:
        self.most_s = self.last_s = 0.0
        self.count = 0
        self._counts: dict[int, int] = {}

    def add(self, seconds: float, times: int = 1) -> None:
        self.last_s = seconds
        self.most_s = max(self.most_s, seconds)
        self.count += times
        at = int(math.log(seconds / LEAST_S) / STEP) if seconds > LEAST_S else -1
        self._counts[at] = self._counts.get(at, 0) + times

    def quantile(self, share: float) -> float:
        """The upper edge of the class that the least duration is in which `share` of all do not exceed; 0 of none."""
        wanted, passed = math.ceil(share * self.count), 0
        for at in sorted(self._counts):
            passed += self._counts[at]
            if passed >= wanted:
                return min(self.most_s, LEAST_S * math.exp((at + 1) * STEP)) if at >= 0 else 0.0
        return 0.0

    def beyond(self, seconds: float) -> int:
        """How many are longer, by classes that begin there or later."""
        edge = math.ceil(math.log(seconds / LEAST_S) / STEP) if seconds > LEAST_S else 0
        return sum(number for at, number in self._counts.items() if at >= edge)
