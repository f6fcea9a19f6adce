"""Published servers and recorded runs by the default cost model alone: `python -m reports.fidelity.default.make`.

Nothing of a server is calibrated here and no kernel table is read: step times are those of a scenario that names no
cost model. Dense models on Hopper only; what the flags of a server are is known of InferenceX's points.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from cbsim.draw.report import Table
from cbsim.measured.points import published, score
from cbsim.measured.points.build import CannotBuildError, build, check, model_of
from cbsim.measured.points.published import HOPPER, Means, Point
from cbsim.measured.recorded import verdict
from cbsim.scenario import catalog, scenario
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps.work import Processes
from reports import page

RUNS = ("RTX4090__Llama-3.1-8B", "RTXPRO6000__Llama-3.1-8B")
STATISTICS = ("mean", "median", "p90", "p95", "p99")


def by_default(point: Point) -> Scenario:
    """Return the scenario of a point with the default cost model in place of tables. Raises CannotBuildError."""
    check(point)
    if model_of(point).experts:
        raise CannotBuildError("a mixture of experts")
    fields = build(point, {}).model_dump(mode="json")
    fields["cost"] = {"kind": "roofline", "tensor_parallel": max(1, point.tensor)}
    return scenario.scenario_of(fields)


def servers() -> list[tuple[Point, Means]]:
    """Return InferenceX's points of dense models on Hopper, predicted."""
    found: list[tuple[Point, Scenario]] = []
    for point in published.read(published.folder(None)):
        if point.inferencex and point.system in HOPPER:
            try:
                found.append((point, by_default(point)))
            except CannotBuildError:
                continue
    with closing(Processes(2)) as workers:
        means = score.predict([each for _, each in found], workers)
    return [(point, each) for (point, _), each in zip(found, means, strict=True) if isinstance(each, Means)]


def relative(found: Sequence[tuple[Point, Means]], metric: str) -> np.ndarray:
    """Return the errors of a metric relative to the measurement."""
    value = score.METRICS[metric]
    return np.array([value(means, point) / value(published.measured(point), point) - 1 for point, means in found])


def off(found: Sequence[tuple[Point, Means]], metric: str) -> float:
    """Return the mean size of the errors of a metric."""
    return float(abs(relative(found, metric)).mean())


def errors(found: Sequence[tuple[Point, Means]]) -> tuple[str, ...]:
    """Return the cells of a set of points: the mean, 90th percentile and signed median of the error, by metric."""
    cells = [f"{len(found)}"]
    for metric in ("ttft", "tpot"):
        values = relative(found, metric)
        cells += [f"{off(found, metric):.1%}", f"{np.percentile(abs(values), 90):.1%}", f"{np.median(values):+.1%}"]
    return tuple(cells)


def recorded(name: str) -> dict[tuple[str, str], float]:
    """Return the errors of a recorded run, by metric and statistic."""
    case = catalog.data(f"measured_vllm/cases/{name}/config.json").parent
    made = verdict.study(case, pack=None, hardware=None, overrides=["cost={kind: roofline}"], ablate=False)
    return {(each["metric"], each["statistic"]): each["error"] for each in made.data["errors"]}


def main() -> None:
    found = servers()
    groups = {
        f"{backend}, {system}": [each for each in found if (each[0].backend, each[0].system) == (backend, system)]
        for backend in ("vllm", "trtllm")
        for system in HOPPER
    }
    rows = [(name, *errors(part)) for name, part in groups.items() if part]
    rows.append(("all", *errors(found)))
    metrics = [f"{metric}: {what}" for metric in ("TTFT", "TPOT") for what in ("mean", "90 % within", "median")]
    known = {name: recorded(name) for name in RUNS}
    lines = [
        (name, metric.upper(), *(f"{scores[metric, statistic]:+.1%}" for statistic in STATISTICS))
        for name, scores in known.items()
        for metric in ("ttft", "tpot", "e2e")
    ]
    tables = {
        "servers": Table("", ("engine, card", "points", *metrics), rows),
        "recorded": Table("", ("run", "", *STATISTICS), lines),
    }
    data: dict[str, Any] = {
        "servers": {"points": len(found), **{metric: off(found, metric) for metric in ("ttft", "tpot")}},
        "points": [
            {"id": point.id, "curve": point.curve, "ttft_ms": means.ttft_ms, "tpot_ms": means.tpot_ms}
            for point, means in found
        ],
        "recorded": {name: {" ".join(key): error for key, error in each.items()} for name, each in known.items()},
    }
    page.write(__file__, tables, [], data)


if __name__ == "__main__":
    main()
