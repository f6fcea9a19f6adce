"""Published servers and recorded runs by the default cost model alone: `python -m reports.fidelity.default.make`.

Nothing of a server is calibrated here and no kernel table is read: step times are those of a scenario that names no
cost model. Dense models on H100, H200 and B200; what the flags of a server are is known of InferenceX's points. A part
of the points is predicted again by what other cards say: how far off a card is of which there is a data sheet alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from cbsim.cost import curves, engine_cost
from cbsim.draw.report import Table
from cbsim.measured.points import published, score
from cbsim.measured.points.build import CannotBuildError, build, check, model_of
from cbsim.measured.points.published import Means, Point
from cbsim.measured.recorded import verdict
from cbsim.scenario import catalog, scenario, shapes
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps.work import Here
from reports import page

RUNS = ("RTX4090__Llama-3.1-8B", "RTXPRO6000__Llama-3.1-8B")
STATISTICS = ("mean", "median", "p90", "p95", "p99")
CARDS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "b200_sxm": "b200"}
HOPPER, BLACKWELL = ("NVIDIA H100", "NVIDIA H200"), ("NVIDIA B200", "NVIDIA B300", "NVIDIA GB200")
USERS = (4, 16, 64)  # of the points that are predicted by data sheets alone
CONSTANT: dict[str, Any] = {"compute_efficiency": {}}


def by_default(point: Point, efficiencies: Mapping[str, Any] | None = None) -> Scenario:
    """Return the scenario of a point with the default cost model in place of tables, or with constant shares of the
    data sheet. Raises CannotBuildError.
    """
    check(point)
    if model_of(point).experts:
        raise CannotBuildError("a mixture of experts")
    fields = build(point, {}).model_dump(mode="json")
    fields["cost"] = {"kind": "roofline", "tensor_parallel": max(1, point.tensor), **(efficiencies or {})}
    return scenario.scenario_of(fields)


def servers() -> list[Point]:
    """Return InferenceX's points of dense models that can be built."""
    found = []
    for point in published.read(published.folder(None)):
        if point.inferencex and point.system in CARDS:
            try:
                by_default(point)
            except CannotBuildError:
                continue
            found.append(point)
    return found


def predicted(points: Sequence[Point], efficiencies: Mapping[str, Any] | None = None) -> list[tuple[Point, Means]]:
    """Return points with the means of their runs."""
    means = score.predict([by_default(point, efficiencies) for point in points], Here())
    return [(point, each) for point, each in zip(points, means, strict=True) if isinstance(each, Means)]


def by_others(points: Sequence[Point], *, generation: bool) -> list[tuple[Point, Means]]:
    """Return points predicted by the curves of other cards; `generation`: of cards of other generations alone."""
    found = []
    for system in {point.system: None for point in points}:
        own = shapes.hardware(CARDS[system]).name
        kin = next(names for names in (HOPPER, BLACKWELL) if own.startswith(names))
        cards = [each["hardware"]["name"] for each in curves.every()]
        left_out = tuple(name for name in cards if (name.startswith(kin) if generation else name == own))
        others, times = partial(curves.sources, without=left_out), engine_cost.curve_times.__wrapped__
        with mock.patch.multiple(engine_cost, sources=others, curve_times=times):  # curve_times knows one set alone
            found += predicted([point for point in points if point.system == system])
    return found


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


METRICS = ("ttft", "tpot")
Errors = dict[str, dict[str, float]]  # means, by system and metric


def by_card(found: Sequence[tuple[Point, Means]]) -> Errors:
    """Return the mean errors of the points of each card."""
    parts = {system: [each for each in found if each[0].system == system] for system in CARDS}
    return {system: {metric: off(part, metric) for metric in METRICS} for system, part in parts.items()}


NAMES = {
    "own": "its own curves",
    "left_out": "curves of all other cards",
    "alone": "curves of other generations",
    "constant": "constant shares",
}


def sheets(own: Sequence[tuple[Point, Means]]) -> dict[str, Errors]:
    """Return the errors of points as predicted by the card's own curves, and by less and less; by the names above."""
    points = [point for point, _ in own]
    return {
        "own": by_card(own),
        "left_out": by_card(by_others(points, generation=False)),
        "alone": by_card(by_others(points, generation=True)),
        "constant": by_card(predicted(points, CONSTANT)),
    }


def keep(known: Mapping[str, Errors], points: Mapping[str, int]) -> None:
    """Write the errors of each card into the file of its curves, where runs read them."""
    for system, name in CARDS.items():
        file = catalog.SCENARIOS / curves.FOLDER / f"{name}.json"
        rounded = {kind: {metric: round(of[system][metric], 4) for metric in METRICS} for kind, of in known.items()}
        content = json.loads(file.read_text()) | {"servers": {"points": points[system], **rounded}}
        file.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def main() -> None:
    found = predicted(servers())
    groups = {
        f"{backend}, {system}": [each for each in found if (each[0].backend, each[0].system) == (backend, system)]
        for backend in ("vllm", "trtllm")
        for system in CARDS
    }
    rows = [(name, *errors(part)) for name, part in groups.items() if part]
    rows.append(("all", *errors(found)))
    metrics = [f"{metric}: {what}" for metric in ("TTFT", "TPOT") for what in ("mean", "90 % within", "median")]
    part = [each for each in found if each[0].concurrency in USERS]
    counts = {system: sum(point.system == system for point, _ in part) for system in CARDS}
    by_less = sheets(part)
    keep(by_less, counts)
    compared = [
        (system, f"{counts[system]}", *(f"{by_less[kind][system][metric]:.1%}" for metric in METRICS for kind in NAMES))
        for system in CARDS
    ]
    known = {name: recorded(name) for name in RUNS}
    lines = [
        (name, metric.upper(), *(f"{scores[metric, statistic]:+.1%}" for statistic in STATISTICS))
        for name, scores in known.items()
        for metric in ("ttft", "tpot", "e2e")
    ]
    columns = [f"{metric.upper()}: {what}" for metric in METRICS for what in NAMES.values()]
    tables = {
        "servers": Table("", ("engine, card", "points", *metrics), rows),
        "sheets": Table("", ("card", "points", *columns), compared),
        "recorded": Table("", ("run", "", *STATISTICS), lines),
    }
    data: dict[str, Any] = {
        "servers": {"points": len(found), **{metric: off(found, metric) for metric in METRICS}},
        "cards": by_card(found),
        "sheets": by_less,
        "points": [
            {"id": point.id, "curve": point.curve, "ttft_ms": means.ttft_ms, "tpot_ms": means.tpot_ms}
            for point, means in found
        ],
        "recorded": {name: {" ".join(key): error for key, error in each.items()} for name, each in known.items()},
    }
    page.write(__file__, tables, [], data)


if __name__ == "__main__":
    main()
