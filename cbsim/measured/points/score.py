"""Predicted against measured, a stratum at a time: signed median, mean and 90th percentile of the absolute errors."""

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
    """A point, what is predicted, how sure that is by metric, and how it differs from what was calibrated."""

    point: Point
    means: Means
    intervals: Mapping[str, Interval | None]
    terms: str
    left_out: bool  # was the point's curve there when its terms were calibrated, and left out?
    outside: Sequence[str]
    experts: bool

    def error(self, metric: str) -> float:
        """Relative to what was measured."""
        value = METRICS[metric]
        return value(self.means, self.point) / value(measured(self.point), self.point) - 1

    def peer_error(self, metric: str) -> float | None:
        """That of the other tool."""
        if self.point.peer is None:
            return None
        value = METRICS[metric]
        return value(Means(*self.point.peer), self.point) / value(measured(self.point), self.point) - 1


class Errors(NamedTuple):
    """Of several points, relative: the median with its sign, mean and 90th percentile without."""

    points: int
    median: float
    mape: float
    p90: float


def errors(values: Iterable[float | None]) -> Errors | None:
    """None if there are none."""
    array = np.array([value for value in values if value is not None])
    if not len(array):
        return None
    sizes = np.abs(array)
    return Errors(len(array), float(np.median(array)), float(sizes.mean()), float(np.percentile(sizes, 90)))


class Group(NamedTuple):
    """Points that are told together."""

    name: str
    predicted: Sequence[Predicted]

    def errors(self, metric: str) -> Errors:
        ours = errors(each.error(metric) for each in self.predicted)
        assert ours is not None, self.name
        return ours

    def beside_peer(self, metric: str) -> tuple[Errors, Errors] | None:
        """Ours and the other tool's, on the points that it predicts."""
        both = [each for each in self.predicted if each.point.peer is not None]
        ours, theirs = errors(each.error(metric) for each in both), errors(each.peer_error(metric) for each in both)
        return (ours, theirs) if ours and theirs else None


def strata(predicted: Iterable[Predicted]) -> list[Group]:
    """By system, engine, model, GPUs and lengths; a source whose flags are unknown apart."""
    groups: dict[tuple[bool, str], list[Predicted]] = {}
    for each in sorted(
        predicted, key=lambda each: (not each.point.inferencex, each.point.stratum, each.point.concurrency)
    ):
        groups.setdefault((each.point.inferencex, str(each.point.stratum)), []).append(each)
    return [Group(name if known else f"{name}, flags unknown", part) for (known, name), part in groups.items()]


class Bar(NamedTuple):
    """What is asked of a group of points: at most so much in `statistic` of `metric`."""

    metric: str
    statistic: str
    most: float


class Class(NamedTuple):
    """Points that have bars together."""

    name: str
    holds: Callable[[Predicted], bool]
    bars: Sequence[Bar]
    stratum: float  # no stratum of at least five points has a larger signed median of TPOT


def _known(each: Predicted, systems: Sequence[str], *, experts: bool, backend: str | None = None) -> bool:
    """Is it InferenceX's, on these cards, of this kind and engine?"""
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
LEAST = 5  # points of a stratum that is judged


def classes(predicted: Sequence[Predicted]) -> list[tuple[Class, Group]]:
    """Those that have points."""
    members = ((each, [p for p in predicted if each.holds(p)]) for each in CLASSES)
    return [(each, Group(each.name, points)) for each, points in members if points]


def misses(judged: Class, group: Group) -> list[str]:
    """Strata beyond what is asked of their signed median of TPOT."""
    parts = [part for part in strata(group.predicted) if len(part.predicted) >= LEAST]
    return [
        f"{part.name}: {part.errors('tpot').median:+.1%}"
        for part in parts
        if abs(part.errors("tpot").median) > judged.stratum
    ]
