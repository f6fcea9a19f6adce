"""Prediction of points: those that can be built, the mean TTFT and TPOT of their runs, kept in a sweep's store, and
their errors by stratum: signed median, and mean and 90th percentile of the absolute errors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cbsim.cost.engine_tables import DamagedError
from cbsim.errors import ScenarioError
from cbsim.measured.points.build import CannotBuildError, build, check, model_of
from cbsim.measured.points.published import HOPPER, Means, Point, measured
from cbsim.runs.assemble import cost_model
from cbsim.scenario import terms
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.terms import FRONT, Interval, TermsFile
from cbsim.sweeps import identity
from cbsim.sweeps.store import SUMMARY, Progress, Runs, Store
from cbsim.sweeps.work import Executor, Made, Task

Value = Callable[[Means, Point], float]
RATE = "throughput"
METRICS: Mapping[str, Value] = {
    "ttft": lambda means, _: means.ttft_ms,
    "tpot": lambda means, _: means.tpot_ms,
    RATE: lambda means, point: means.tokens_s(point),
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
        return self._relative(self.means, metric)

    def peer_error(self, metric: str) -> float:
        """Return the relative error of the other tool, which has to predict this point."""
        assert self.point.peer is not None
        return self._relative(Means(*self.point.peer), metric)

    def _relative(self, means: Means, metric: str) -> float:
        value = METRICS[metric]
        return value(means, self.point) / value(measured(self.point), self.point) - 1


class Errors(NamedTuple):
    """Relative errors of several points: the signed median, and mean and 90th percentile of the absolute values."""

    points: int
    median: float
    mape: float
    p90: float


def _errors(values: Iterable[float]) -> Errors:
    array = np.array(list(values))
    sizes = np.abs(array)
    return Errors(len(array), float(np.median(array)), float(sizes.mean()), float(np.percentile(sizes, 90)))


class Group(NamedTuple):
    """A named group of points that share a row of a table."""

    name: str
    predicted: Sequence[Predicted]

    def errors(self, metric: str) -> Errors:
        return _errors(each.error(metric) for each in self.predicted)

    def beside_peer(self, metric: str) -> tuple[Errors, Errors] | None:
        """Return our errors and the other tool's on the points that it predicts; None if there are no such points."""
        both = [each for each in self.predicted if each.point.peer is not None]
        if not both:
            return None
        return _errors(each.error(metric) for each in both), _errors(each.peer_error(metric) for each in both)


def strata(predicted: Iterable[Predicted]) -> list[Group]:
    """Group points by system, engine, model, GPUs and lengths; points with unknown flags have groups of their own."""
    groups: dict[tuple[bool, str], list[Predicted]] = {}
    for each in sorted(predicted, key=lambda one: (not one.point.inferencex, one.point.stratum, one.point.concurrency)):
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
        (Bar("tpot", "mape", 0.035), Bar("tpot", "p90", 0.08), Bar("ttft", "mape", 0.15), Bar(RATE, "mape", 0.04)),
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
    medians = [(part.name, part.errors("tpot").median) for part in parts]
    return [f"{name}: {median:+.1%}" for name, median in medians if abs(median) > judged.stratum]


def predict(
    scenarios: Sequence[Scenario], executor: Executor, store: Store | None = None, progress: Progress | None = None
) -> list[Means | str]:
    """Return each scenario's means, or why its run failed; `store` keeps runs, and those in it are not repeated."""
    keys = [identity.key(each) for each in scenarios]
    tasks = {key: Task(key, each, "summary") for key, each in zip(keys, scenarios, strict=True)}
    means: dict[str, Means | str] = {}

    def hear(made: Made) -> None:
        means[made.key] = made.reason or _means(json.loads(made.files[SUMMARY]))

    if store:
        Runs(store, executor, progress).make(tasks.values(), hear=hear)
        means |= {key: _means(store.summary(key)) for key in tasks if key not in means}
    else:
        for made in executor.each(tasks.values()):
            hear(made)
    return [means[key] for key in keys]


def _means(summary: dict[str, dict[str, float]]) -> Means:
    return Means(1e3 * summary["ttft_s"]["mean"], 1e3 * summary["tpot_s"]["mean"])


class Buildable(NamedTuple):
    """A point that can be built, its scenario, and its terms."""

    point: Point
    scenario: Scenario
    file: TermsFile
    values: dict[str, float]


def sort(points: Sequence[Point]) -> tuple[list[Buildable], Counter[str]]:
    """Build what can be built, and count the rest by reason. Cost models are made first: they may lack a table."""
    buildable, reasons = list[Buildable](), Counter[str]()
    checked: dict[str, str | None] = {}
    for point in points:
        try:
            buildable.append(_built(point, checked))
        except CannotBuildError as error:
            reasons[str(error)] += 1
    return buildable, reasons


def _built(point: Point, checked: dict[str, str | None]) -> Buildable:
    check(point)
    file = _nearest(point, experts=model_of(point).experts > 0)
    values = file.resolved(point.tensor, point.system, point.version, point.curve)
    cost = {"fastest": file.fastest} | {field: value for field, value in values.items() if field != FRONT}
    scenario = build(point, cost)
    _check(scenario, checked)
    return Buildable(point, scenario, file, values)


def _nearest(point: Point, *, experts: bool) -> TermsFile:
    """Return the terms nearest to a point: of its kind of model, then its engine, then its card, where available."""

    def near(file: TermsFile) -> tuple[bool, bool, bool]:
        return file.experts == experts, file.backend == point.backend, point.system in file.systems

    file = max(terms.every(), key=near, default=None)
    if file is None:
        raise CannotBuildError("no calibrated terms")
    return file


def _check(scenario: Scenario, checked: dict[str, str | None]) -> None:
    kind = scenario.model.model_dump_json() + scenario.cost.model_dump_json(exclude={"cpu"}) + scenario.hardware.name
    if kind not in checked:
        try:
            cost_model(scenario)
            checked[kind] = None
        except DamagedError:
            raise  # damaged data is an error, not a reason why a point cannot be built
        except ScenarioError as error:
            checked[kind] = str(error)
    if (reason := checked[kind]) is not None:
        raise CannotBuildError(reason)


def score(
    buildable: Sequence[Buildable], executor: Executor, store: Store, progress: Progress
) -> tuple[list[Predicted], Counter[str]]:
    """Return the predictions, and the number of failed runs by reason."""
    predictions, failed = list[Predicted](), Counter[str]()
    outcomes = predict([each.scenario for each in buildable], executor, store, progress)
    for built, means in zip(buildable, outcomes, strict=True):
        if isinstance(means, str):
            failed[f"the run failed: {means}"] += 1
        else:
            predictions.append(predicted(built, means))
    return predictions, failed


def predicted(built: Buildable, means: Means) -> Predicted:
    """Return the prediction for a point from the means of its run."""
    point, file = built.point, built.file
    outside = file.outside(point.backend, point.system, point.model_name, point.tensor, point.concurrency)
    within = {
        metric: None if outside else terms.interval(file, metric, (point.prompt, point.output), point.curve)
        for metric in ("ttft", "tpot")
    }
    return Predicted(
        point,
        Means(means.ttft_ms + 1e3 * built.values.get(FRONT, 0.0), means.tpot_ms),
        within,
        file.name,
        left_out=point.curve in file.curves,
        outside=outside,
        experts=built.scenario.model.experts > 0,
    )
