"""Counts of values by size, as cheap to add to as a list."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.utils import floatToGoString

Buckets = list[tuple[str, float]]

TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))  # 1, 8, 16 ... 16384
COPIES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


def tokens_up_to(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to `most`."""
    bounds = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(bound) for bound in bounds if bound <= most)


class Histogram:
    """How many values lie at or below each of its bounds, which ascend, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # of each bucket alone; the last one is open
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> Buckets:
        """(upper bound as Prometheus writes it, values up to there), the last of them all."""
        sum_ = 0
        buckets: Buckets = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            sum_ += count
            buckets.append((floatToGoString(bound), sum_))
        return buckets
