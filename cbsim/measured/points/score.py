"""Prediction of points: those that can be built, the mean TTFT and TPOT of their runs, kept in a sweep's store, and
their errors by stratum: signed median, and mean and 90th percentile of the absolute errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cbsim.cost.engine_files import DamagedError
from cbsim.errors import ScenarioError
from cbsim.measured.points import flags
from cbsim.measured.points.build import CannotBuildError, build, build_apart, check, model_of
from cbsim.measured.points.published import BLACKWELL, HOPPER, OUTPUT_SHARE, Means, Point, measured
from cbsim.runs.assemble import cost_model
from cbsim.scenario import catalog, terms
from cbsim.scenario.costs import TableSettings
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.terms import FRONT, Interval, Like, TermsFile
from cbsim.sweeps import identity
from cbsim.sweeps.store import SUMMARY, Progress, Runs, Store
from cbsim.sweeps.work import Executor, Task

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
    family: str
    doubts: Sequence[str] = ()  # why the server may have been another than the simulated one

    @property
    def known(self) -> bool:
        """True if the server's flags are known and simulated."""
        return not self.doubts

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
    for each in sorted(predicted, key=lambda one: (not one.known, one.point.stratum, one.point.concurrency)):
        groups.setdefault((each.known, str(each.point.stratum)), []).append(each)
    return [Group(name if known else f"{name}, flags unknown", part) for (known, name), part in groups.items()]


class Bar(NamedTuple):
    """A bar for a group of points: `statistic` of the error of `metric` is at most `most`."""

    metric: str
    statistic: str
    most: float


class Class(NamedTuple):
    """A class of points for which the same bars hold: those with known flags on these cards (empty: any), of these
    families and this engine, or those whose flags are unknown.
    """

    name: str
    bars: Sequence[Bar] = ()
    stratum: float | None = None  # bound of the absolute signed median of TPOT in every stratum of at least LEAST
    families: Sequence[str] = ()
    systems: Sequence[str] = ()
    backend: str | None = None
    known: bool = True

    def holds(self, each: Predicted) -> bool:
        point = each.point
        placed = not self.systems or point.system in self.systems
        kind = not self.families or each.family in self.families
        return each.known == self.known and placed and kind and self.backend in (None, point.backend)


def _bars(tpot: float, ttft: float) -> tuple[Bar, Bar]:
    return Bar("tpot", "mape", tpot), Bar("ttft", "mape", ttft)


APART = "apart"  # stands for the family of servers whose prefill and decode are apart
HOPPER_VLLM = (Bar("tpot", "mape", 0.035), Bar("tpot", "p90", 0.08), Bar("ttft", "mape", 0.15), Bar(RATE, "mape", 0.04))
CLASSES = (
    Class("dense, vLLM, H100 and H200", HOPPER_VLLM, 0.08, ("dense",), HOPPER, "vllm"),
    Class("dense, TensorRT-LLM, H200", _bars(0.06, 0.20), 0.12, ("dense",), ("h200_sxm",), "trtllm"),
    Class("dense, B200", _bars(0.06, 0.20), 0.12, ("dense",), ("b200_sxm",)),
    Class("experts, H100 and H200", _bars(0.10, 0.25), 0.12, ("experts",), HOPPER),
    Class("experts, B200 and B300", _bars(0.10, 0.25), 0.12, ("experts",), BLACKWELL),
    Class("latent attention with experts", _bars(0.10, 0.25), 0.12, ("latent",)),
    Class("gpt-oss", _bars(0.08, 0.20), 0.12, ("windows",)),
    Class("linear attention", _bars(0.12, 0.25), families=("linear",)),
    Class("sparse latent attention", families=("sparse",)),
    Class("data-parallel attention", _bars(0.12, 0.30), families=("ranks",)),
    Class("prefill and decode apart", _bars(0.15, 0.30), families=(APART,)),
    Class("flags unknown, no bars", known=False),
)


LEAST = 5  # the fewest points of a stratum to which the bar applies


def classes(predicted: Sequence[Predicted]) -> list[tuple[Class, Group]]:
    """Return the classes that have points, with these points."""
    members = ((each, [p for p in predicted if each.holds(p)]) for each in CLASSES)
    return [(each, Group(each.name, points)) for each, points in members if points]


def misses(judged: Class, group: Group) -> list[str]:
    """Return the strata whose signed median of TPOT is beyond the class's bound, if it has one."""
    if judged.stratum is None:
        return []
    parts = [part for part in strata(group.predicted) if len(part.predicted) >= LEAST]
    medians = [(part.name, part.errors("tpot").median) for part in parts]
    return [f"{name}: {median:+.1%}" for name, median in medians if abs(median) > judged.stratum]


def predict(
    scenarios: Sequence[Scenario], executor: Executor, store: Store | None = None, progress: Progress | None = None
) -> list[Means | str]:
    """Return each scenario's means, or why its run failed; `store` keeps runs, and those in it are not repeated."""
    keys = [identity.key(each) for each in scenarios]
    tasks = {key: Task(key, each, "summary") for key, each in zip(keys, scenarios, strict=True)}
    if store:
        runs = Runs(store, executor, progress)
        runs.make(tasks.values())
        means = {key: made if isinstance(made := runs.outcome(key), str) else means_of(made) for key in tasks}
    else:
        outcomes = executor.each(tasks.values())
        means = {made.key: made.reason or means_of(json.loads(made.files[SUMMARY])) for made in outcomes}
    return [means[key] for key in keys]


UNSERVED = "no request got two tokens: all were refused, or did not fit the cache"


def means_of(summary: Mapping[str, Mapping[str, float]]) -> Means | str:
    """Return the means of a run, without the time that terms add in front of it; UNSERVED if it has none."""
    if not all("mean" in summary[metric] for metric in ("ttft_s", "tpot_s")):
        return UNSERVED
    return Means(1e3 * summary["ttft_s"]["mean"], 1e3 * summary["tpot_s"]["mean"])


class Buildable(NamedTuple):
    """A point that can be built, its scenario, and its terms."""

    point: Point
    scenario: Scenario
    file: TermsFile
    values: dict[str, float]


class Refused(NamedTuple):
    """A point that has no prediction, and all known reasons."""

    point: Point
    reasons: tuple[str, ...]


def sort(points: Sequence[Point]) -> tuple[list[Buildable], list[Refused]]:
    """Build what can be built; the rest has reasons. Cost models are made first: they may lack a table."""
    buildable, refused = list[Buildable](), list[Refused]()
    checked: dict[str, str | None] = {}
    for point in points:
        try:
            buildable.append(_built(point, checked))
        except CannotBuildError as error:
            refused.append(Refused(point, error.reasons))
    return buildable, refused


def _built(point: Point, checked: dict[str, str | None]) -> Buildable:
    check(point)
    if point.mode == "agg":
        return _server(point, checked)
    prefill, decode = (_server(point.of(side), checked) for side in ("prefill", "decode"))
    return decode._replace(point=point, scenario=build_apart(point, prefill.scenario, decode.scenario))


def _server(point: Point, checked: dict[str, str | None]) -> Buildable:
    file = _nearest(point)
    values = file.resolved(point.gpus, point.system, point.version, point.curve)
    cost = {"fastest": file.fastest} | {field: value for field, value in values.items() if field != FRONT}
    scenario = build(point, cost)
    _check(scenario, checked)
    return Buildable(point, scenario, file, values)


def _nearest(point: Point) -> TermsFile:
    """Return the terms nearest to a point: of its kind of server and engine, else of its family of models or another
    one with experts or without, then of its engine, then of its card, where available.
    """
    model = model_of(point)
    server, family = flags.family(model, point.ranks), flags.family(model)

    def near(file: TermsFile) -> tuple[bool, ...]:
        alike, same = (file.family == "dense") == (family == "dense"), file.backend == point.backend
        return alike, same and file.family == server, file.family == family, same, point.system in file.systems

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
            assert isinstance(scenario.cost, TableSettings), scenario.cost  # as `build` makes it
            path = scenario.cost.path
            checked[kind] = str(error).replace(str(catalog.tables(path)), path)
    if (reason := checked[kind]) is not None:
        raise CannotBuildError(reason)


def score(
    buildable: Sequence[Buildable], executor: Executor, store: Store, progress: Progress
) -> tuple[list[Predicted], list[Refused]]:
    """Return the predictions, and the points whose runs failed or served nobody."""
    predictions, failed = list[Predicted](), list[Refused]()
    outcomes = predict([each.scenario for each in buildable], executor, store, progress)
    for built, means in zip(buildable, outcomes, strict=True):
        if isinstance(means, str):
            failed.append(Refused(built.point, (means if means == UNSERVED else f"the run failed: {means}",)))
        else:
            predictions.append(predicted(built, means))
    return predictions, failed


def predicted(built: Buildable, means: Means) -> Predicted:
    """Return the prediction for a point from the means of its run."""
    point, file = built.point, built.file
    outside = file.outside(point.backend, point.system, point.model_name, point.gpus, point.concurrency)
    like = Like(point.prompt, point.output, point.system, point.concurrency)
    within = {
        metric: None if outside else terms.interval(file, metric, like, point.curve) for metric in ("ttft", "tpot")
    }
    model = built.scenario.model
    return Predicted(
        point,
        Means(means.ttft_ms + 1e3 * built.values.get(FRONT, 0.0), means.tpot_ms),
        within,
        file.name,
        left_out=point.curve in file.curves,
        outside=outside,
        family=APART if point.mode == "disagg" else flags.family(model, point.ranks),
        doubts=flags.doubts(point, flags.family(model)) if point.mode == "agg" else (),
    )


NEAR = 0.15  # a load so close to the size of the cache hangs on what that is derived from
WAITS, FLAT, GROWS = 3.0, 1.1, 1.3  # factors of TTFT and of tokens/s from one number of users to the next


def doubts(buildable: Sequence[Buildable]) -> list[str]:
    """Return servers whose derived cache decides the prediction, or contradicts what was measured; a size that is given
    (kv_blocks) is beyond doubt. Also servers of TensorRT-LLM whose largest step is unknown.
    """
    found, curves = list[str](), dict[tuple[str, str, str], list[Buildable]]()
    for built in buildable:
        point = built.point
        if not point.kv_blocks and abs(_load(built) - 1) <= NEAR:
            found.append(f"{point.where}: sequences of all users take {_load(built):.0%} of the derived cache")
        curves.setdefault((point.curve, point.measured, point.version), []).append(built)
    for curve in curves.values():
        curve.sort(key=lambda built: built.point.concurrency)
        found += [why for pair in pairwise(curve) if not pair[1].point.kv_blocks and (why := _contradiction(*pair))]
    unpublished = [built for built in buildable if flags.UNPUBLISHED in flags.doubts(built.point, "")]
    return [*found, *([f"{len(unpublished)} points: {flags.UNPUBLISHED}"] if unpublished else [])]


def _load(built: Buildable) -> float:
    """Return the tokens of the longest sequences of all users that have a seat, over those that the cache holds."""
    options, point = built.scenario.options("async"), built.point
    users = min(point.concurrency, options.limits.slots or point.concurrency)
    return users * OUTPUT_SHARE * (point.prompt + point.output) / (options.num_blocks * built.scenario.block_size)


def _contradiction(few: Buildable, many: Buildable) -> str | None:
    """Return why the derived cache contradicts the measurements with few and with many users, None if it does not."""
    before, after = (measured(built.point) for built in (few, many))
    more, waits = after.tokens_s(many.point) / before.tokens_s(few.point), after.ttft_ms > WAITS * before.ttft_ms
    load, seats = _load(many), many.scenario.options("async").limits.slots or many.point.concurrency
    if few.point.concurrency == many.point.concurrency:
        return None
    name = f"{many.point.where}, {more:.2f} times the tokens/s of {few.point.concurrency} users"
    if waits and more < FLAT and load < 1 - NEAR and many.point.concurrency <= seats:
        return f"{name}: requests wait, though sequences take {load:.0%} of the derived cache"
    if not waits and more > GROWS and load > 1 + NEAR:
        return f"{name}: none waits, though sequences take {load:.0%} of the derived cache"
    return None
