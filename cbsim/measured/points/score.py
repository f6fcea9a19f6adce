"""Errors of predictions by stratum: signed median, and mean and 90th percentile of the absolute errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cbsim.measured.points.published import HOPPER, Means, Point, measured
from cbsim.scenario.terms import Interval

Value = Callable[[Means, Point], float]
METRICS: Mapping[str, Value] = {
    "ttft": lambda means, _: means.ttft_ms,
    "tpot": lambda means, _: means.tpot_ms,
    "throughput": lambda means, point: means.tokens_s(point),
}


class Predicted(NamedTuple):
    """A point, its prediction, the interval of each metric, and how the point differs from those of the calibration."""

    point: Point
    means: Means
    intervals: Mapping[str, Interval | None]
    terms: str
    left_out: bool  # whether the calibration knew the point's curve and left it out
    outside: Sequence[str]
    experts: bool

    def error(self, metric: str) -> float:
        """Return the prediction's error relative to the measurement."""
        value = METRICS[metric]
        return value(self.means, self.point) / value(measured(self.point), self.point) - 1

    def peer_error(self, metric: str) -> float | None:
        """Return the relative error of the other tool; None if it does not predict this point."""
        if self.point.peer is None:
            return None
        value = METRICS[metric]
        return value(Means(*self.point.peer), self.point) / value(measured(self.point), self.point) - 1


class Errors(NamedTuple):
    """Relative errors of several points: the signed median, and mean and 90th percentile of the absolute values."""

    points: int
    median: float
    mape: float
    p90: float


def errors(values: Iterable[float | None]) -> Errors | None:
    """Return the statistics of errors; None if there are none."""
    array = np.array([value for value in values if value is not None])
    if not len(array):
        return None
    sizes = np.abs(array)
    return Errors(len(array), float(np.median(array)), float(sizes.mean()), float(np.percentile(sizes, 90)))


class Group(NamedTuple):
    """A named group of points that share a row of a table."""

    name: str
    predicted: Sequence[Predicted]

    def errors(self, metric: str) -> Errors:
        ours = errors(each.error(metric) for each in self.predicted)
        assert ours is not None, self.name
        return ours

    def beside_peer(self, metric: str) -> tuple[Errors, Errors] | None:
        """Return our errors and the other tool's on the points that it predicts; None if there are no such points."""
        both = [each for each in self.predicted if each.point.peer is not None]
        ours, theirs = errors(each.error(metric) for each in both), errors(each.peer_error(metric) for each in both)
        return (ours, theirs) if ours and theirs else None


def strata(predicted: Iterable[Predicted]) -> list[Group]:
    """Group points by system, engine, model, GPUs and lengths; points with unknown flags have groups of their own."""
    groups: dict[tuple[bool, str], list[Predicted]] = {}
    for each in sorted(
        predicted, key=lambda each: (not each.point.inferencex, each.point.stratum, each.point.concurrency)
    ):
        groups.setdefault((each.point.inferencex, str(each.point.stratum)), []).append(each)
    return [Group(name if known else f"{name}, flags unknown", part) for (known, name), part in groups.items()]


class Bar(NamedTuple):
    """A bar for a group of points: `statistic` of the error of `metric` is at most `most`."""

    metric: str
    statistic: str
    most: float


class Class(NamedTuple):
    """A class of points for which the same bars hold."""

    name: str
    holds: Callable[[Predicted], bool]
    bars: Sequence[Bar]
    stratum: float  # bound of the absolute signed median of TPOT in every stratum of at least five points


def _known(each: Predicted, systems: Sequence[str], *, experts: bool, backend: str | None = None) -> bool:
    """True if a point is InferenceX's, on one of these cards, of this kind of model and this engine."""
    point = each.point
    engine = backend is None or point.backend == backend
    return point.inferencex and engine and point.system in systems and each.experts == experts


CLASSES = (
    Class(
        "dense, vLLM, H100 and H200",
        lambda each: _known(each, HOPPER, experts=False, backend="vllm"),
        (
            Bar("tpot", "mape", 0.035),
            Bar("tpot", "p90", 0.08),
            Bar("ttft", "mape", 0.15),
            Bar("throughput", "mape", 0.04),
        ),
        0.08,
    ),
    Class(
        "dense, TensorRT-LLM, H200",
        lambda each: _known(each, ("h200_sxm",), experts=False, backend="trtllm"),
        (Bar("tpot", "mape", 0.06), Bar("ttft", "mape", 0.20)),
        0.12,
    ),
    Class(
        "experts, H100 and H200",
        lambda each: _known(each, HOPPER, experts=True),
        (Bar("tpot", "mape", 0.10), Bar("ttft", "mape", 0.25)),
        0.12,
    ),
    Class("B200, no bars", lambda each: each.point.inferencex and each.point.system == "b200_sxm", (), float("inf")),
    Class("flags unknown, no bars", lambda each: not each.point.inferencex, (), float("inf")),
)
LEAST = 5  # the fewest points of a stratum to which the bar applies


def classes(predicted: Sequence[Predicted]) -> list[tuple[Class, Group]]:
    """Return the classes that have points, with these points."""
    members = ((each, [p for p in predicted if each.holds(p)]) for each in CLASSES)
    return [(each, Group(each.name, points)) for each, points in members if points]


def misses(judged: Class, group: Group) -> list[str]:
    """Return the strata whose signed median of TPOT is beyond the class's bound."""
    parts = [part for part in strata(group.predicted) if len(part.predicted) >= LEAST]
    return [
        f"{part.name}: {part.errors('tpot').median:+.1%}"
        for part in parts
        if abs(part.errors("tpot").median) > judged.stratum
    ]
