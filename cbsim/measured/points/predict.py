"""Prediction of points: those that can be built, and the mean TTFT and TPOT of their runs, kept in a sweep's store."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from cbsim.cost.engine_tables import DamagedError
from cbsim.errors import ScenarioError
from cbsim.measured.points.build import CannotBuildError, build, check, model_of
from cbsim.measured.points.published import Means, Point
from cbsim.measured.points.score import Predicted
from cbsim.runs.assemble import cost_model
from cbsim.scenario import terms
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.terms import FRONT, TermsFile
from cbsim.sweeps import identity
from cbsim.sweeps.store import SUMMARY, Progress, Runs, Store
from cbsim.sweeps.work import Executor, Made, Task


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


class Sorted(NamedTuple):
    """The points that can be built, and the number of the others by reason."""

    buildable: Sequence[Buildable]
    reasons: Counter[str]


def sort(points: Sequence[Point]) -> Sorted:
    """Build the points that can be built. The cost model of each kind of server is made once, so that a missing table
    is known before anything runs.
    """
    buildable, reasons = [], Counter[str]()
    checked: dict[str, str | None] = {}
    for point in points:
        try:
            built = _built(point)
            _check(built, checked)
        except CannotBuildError as error:
            reasons[str(error)] += 1
        else:
            buildable.append(built)
    return Sorted(buildable, reasons)


def _built(point: Point) -> Buildable:
    check(point)
    file = _nearest(point, experts=model_of(point).experts > 0)
    values = file.resolved(point.tensor, point.system, point.version, point.curve)
    cost = {"fastest": file.fastest} | {field: value for field, value in values.items() if field != FRONT}
    return Buildable(point, build(point, cost), file, values)


def _nearest(point: Point, *, experts: bool) -> TermsFile:
    """Return the terms nearest to a point: of its kind of model, then its engine, then its card, where available."""

    def near(file: TermsFile) -> tuple[bool, bool, bool]:
        return file.experts == experts, file.backend == point.backend, point.system in file.systems

    file = max(terms.every(), key=near, default=None)
    if file is None:
        raise CannotBuildError("no calibrated terms")
    return file


def _check(built: Buildable, checked: dict[str, str | None]) -> None:
    scenario = built.scenario
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
    for built, means in zip(
        buildable, predict([each.scenario for each in buildable], executor, store, progress), strict=True
    ):
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
