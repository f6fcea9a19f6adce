"""Bounds on the error of a simulated run against a measured one: metrics, bounds, and the verdict on each.

A bound is a share of the measured value, or points of a share. Several measured runs of one workload differ by
themselves: `spread` is their range, and an error that misses a bound by no more than that is undecided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Any, NamedTuple

from cbsim.metrics.terminal import lookup, shown

SATURATED = 0.95  # of the capacity: above it the queue's length, and so TTFT, depends on what cannot be predicted
SPEED_UP = "async speed-up"
BOTH = "both"

Summary = Mapping[str, Any]


class Bar(NamedTuple):
    """A bound on a metric's error: a share of the measured value, or points (0.01 is one) if the metric is a share.
    `metric` is its dotted name in summary.json; None: the speed-up of the asynchronous loop.
    """

    label: str
    metric: str | None
    unit: str
    bound: float
    unsaturated: bool = False  # counts only for arrivals below saturation

    @property
    def points(self) -> bool:
        return self.unit.endswith("share")

    def error(self, simulated: float, measured: float) -> float:
        """Return the error in the unit of the bound; NaN if the measured value is 0."""
        if self.points:
            return simulated - measured
        return simulated / measured - 1 if measured else float("nan")


BARS = (
    Bar(SPEED_UP, None, "fine share", 0.02),
    Bar("makespan", "makespan_s", "s", 0.03),
    Bar("output tokens/s", "output_tokens_per_s", "number", 0.03),
    Bar("TPOT p50", "tpot_s.p50", "s", 0.05),
    Bar("TPOT p99", "tpot_s.p99", "s", 0.05),
    Bar("TTFT p50", "ttft_s.p50", "s", 0.10, unsaturated=True),
    Bar("GPU active", "gpu_active", "fine share", 0.01),
)


class Score(NamedTuple):
    """The score of one metric of one workload and loop (`both` for the speed-up). `counts`: whether the bar applies
    here. `spread`: the range of the measured runs, in the unit of the error; None if there is only one.
    """

    loop: str
    bar: Bar
    simulated: float
    measured: float
    error: float
    spread: float | None
    counts: bool

    @property
    def met(self) -> bool:
        return isfinite(self.error) and abs(self.error) <= self.bar.bound

    @property
    def verdict(self) -> str:
        """The verdict: `met`, `missed`, `undecided` (missed by no more than the spread) or `not asked`."""
        if not self.counts:
            return "not asked"
        undecided = self.spread is not None and abs(self.error) <= self.bar.bound + self.spread
        return "met" if self.met else "undecided" if undecided else "missed"

    def shown(self) -> tuple[str, str, str]:
        error = f"{self.error * 100:+z.2f} pt" if self.bar.points else f"{self.error:+z.1%}"
        return shown(self.simulated, self.bar.unit), shown(self.measured, self.bar.unit), error


def scores(
    simulated: Mapping[str, Summary], measured: Mapping[str, Sequence[Summary]], load: float | None
) -> list[Score]:
    """Return a score for every bar and loop of a workload. `simulated` and `measured` are summaries by loop; the median
    of several measured runs counts; a loop that was not simulated is left out. `load` is the rate of arrivals as a
    share of the capacity; None: all requests arrive at once.
    """
    results = []
    for bar in BARS:
        counts = not bar.unsaturated or (load is not None and load < SATURATED)
        if bar.metric is None:
            if {"sync", "async"} <= measured.keys() & simulated.keys():
                results.append(_score(BOTH, bar, speed_up(simulated), speed_ups(measured), counts=counts))
            continue
        for loop in sorted(measured.keys() & simulated.keys(), reverse=True):
            runs = measured[loop]
            ours, theirs = lookup(simulated[loop], bar.metric), [lookup(run, bar.metric) for run in runs]
            if ours is not None and None not in theirs:
                results.append(_score(loop, bar, float(ours), [float(value) for value in theirs], counts=counts))
    return results


def _score(loop: str, bar: Bar, simulated: float, measured: Sequence[float], *, counts: bool) -> Score:
    middle, reach = median(measured), max(measured) - min(measured)
    spread = None if len(measured) < 2 else reach if bar.points else reach / middle if middle else float("inf")
    return Score(loop, bar, simulated, middle, bar.error(simulated, middle), spread, counts)


def speed_up(summaries: Mapping[str, Summary]) -> float:
    """Return the speed-up of the asynchronous loop over the synchronous one: 0.22 is 22 %."""
    return float(summaries["sync"]["makespan_s"]) / float(summaries["async"]["makespan_s"]) - 1


def speed_ups(measured: Mapping[str, Sequence[Summary]]) -> list[float]:
    """Return a speed-up for each pair of measured runs, in the order of measurement."""
    pairs = zip(measured["sync"], measured["async"], strict=False)
    return [speed_up({"sync": sync, "async": overlapped}) for sync, overlapped in pairs]
