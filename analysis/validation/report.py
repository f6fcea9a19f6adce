"""The report of a validation folder: how accurate the simulator is on the hardware that was measured.

It compares simulated with measured runs over many workloads: speed-ups, requests, and the errors beside their bars.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.figures.axis import spread
from analysis.statistics import trust
from analysis.statistics.loading import LoadedRun
from analysis.validation import tally
from analysis.validation.cases import LOOPS, MEASURED, SIMULATED, DeviceCases, ValidationCase
from cbsim.draw import chart, lane_chart
from cbsim.draw.chart import Chart, Level, Line, Mark, Panel, Points, Style, column, series, unit
from cbsim.draw.lane_chart import STEPS_SHOWN
from cbsim.draw.report import Caveat, Report, Source
from cbsim.metrics import bars
from cbsim.metrics.bars import BARS, BOTH, Score
from cbsim.scenario import documents

DRAWN_IF_THERE = "8k_b32"  # the case whose lanes are drawn
MOST_NAMED = 3  # runs named in a caveat


def build(validation: DeviceCases, command: str) -> Report:
    """Return the report of the cases, in the order in which it is read."""
    cases = validation.cases
    return Report(
        title="Simulated against measured" + (f": {validation.device}" if validation.device else ""),
        question="How near are simulated runs to measured ones of the same workloads, and what are they off by?",
        sources=[source for case in cases for source in sources(case, validation)],
        caveats=[*validation.left_out, *caveats(cases)],
        findings=tally.findings(cases),
        tables=tally.tables(cases),
        charts=charts(cases),
        command=command,
        coloured=False,
        data={"scores": scores(cases), "replays": [asdict(replay) for replay in tally.replays(cases)]},
    )


def sources(case: ValidationCase, validation: DeviceCases) -> list[Source]:
    """Return every run's source entry; what a case's runs share is in its first simulated and first measured one."""
    first = [next(run for run in case.runs if run.measured is measured) for measured in (True, False)]
    return [_source(run, run.path.relative_to(validation.folder).as_posix(), whole=run in first) for run in case.runs]


def _source(run: LoadedRun, folder: str, *, whole: bool) -> Source:
    kind = f"measured on {run.environment.get('device')}" if run.measured else SIMULATED
    scenario = documents.write(dict(run.scenario)) if whole and not run.measured else ""
    environment = json.dumps(run.environment, indent=2) if whole and run.measured else ""
    return Source(run.label, folder, kind, (), scenario, environment, str(run.environment.get("command", "")))


def caveats(cases: Sequence[ValidationCase]) -> list[Caveat]:
    """Return a caveat on the packed cases without tables, of which only their numbers are known, and the caveats of the
    runs in tables and figures; of many runs only the first few are named.
    """
    packed = ", ".join(case.name for case in cases if not case.whole)
    reason = "packed without steps and requests: in the tables of errors only, and in no other caveat."
    pairs = [pair for case in cases for pair in case.loops.values() if pair.whole]
    runs = [run for pair in pairs for run in (pair.middle, pair.simulated)]
    labels = {run.label for run in runs}
    made = [Caveat("not kept", packed, reason)] if packed else []
    for caveat in trust.caveats(runs):
        names = [name for name in caveat.run.split(", ") if name in labels]
        more = f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED:,} more"
        made.append(caveat if len(names) <= MOST_NAMED else replace(caveat, run=more))
    return made


# -- figures ----------------------------------------------------------------------------------------------------------


def charts(cases: Sequence[ValidationCase]) -> list[Chart]:
    """Draw errors, the curves of speed-up if there are any, requests, and the lanes of one case."""
    curves = speed_ups(cases)
    whole = [case for case in cases if case.whole]

    def known(case: ValidationCase) -> tuple[bool, bool]:  # the lanes are of a well-known case, or of one on a curve
        return case.name != DRAWN_IF_THERE, case.curve is None

    pairs = {loop: [case.loops[loop] for case in whole if loop in case.loops] for loop in LOOPS}
    requests = {loop: [matched(p.middle.counted, p.simulated.counted) for p in own] for loop, own in pairs.items()}
    return [
        errors({case.name: case.scores for case in cases}),
        *([speed_up(curves)] if curves else []),
        scatter(requests),
        *([case_lanes(min(whole, key=known))] if whole else []),
    ]


def speed_ups(cases: Sequence[ValidationCase]) -> dict[str, list[SpeedUpPoint]]:
    """Return the points of every curve, of cases with both loops."""
    curves: dict[str, list[SpeedUpPoint]] = {}
    for case in cases:
        if case.curve is not None and set(LOOPS) <= case.loops.keys():
            measured = bars.speed_ups(case.measured_summaries)
            simulated = bars.speed_up(case.simulated_summaries)
            points = curves.setdefault(case.curve, [])
            points.append(SpeedUpPoint(case.name, case.injected_ms, simulated, measured))
            points += [SpeedUpPoint(case.name, float(at), gain, ()) for at, gain in case.predicted.items()]
    return curves


def case_lanes(case: ValidationCase) -> Chart:
    """Draw the lanes of the measured run above those of the simulated one, loop by loop, all from the same step on."""
    frames = {
        f"{loop} {kind}": run.table
        for loop, pair in case.loops.items()
        for kind, run in ((MEASURED, pair.middle), (SIMULATED, pair.simulated))
    }
    middle = min(map(len, frames.values())) // 2
    lanes = lane_chart.lanes(frames, (max(0, middle - STEPS_SHOWN // 2), STEPS_SHOWN), as_given=True)
    return replace(lanes, title=f"{case.name}: CPU and GPU, measured above simulated")


# -- facts ------------------------------------------------------------------------------------------------------------


def scores(cases: Sequence[ValidationCase]) -> list[dict[str, Any]]:
    """Return every score as plain values for other programs; what is no number is null."""
    made = []
    for case, score in ((each, score) for each in cases for score in each.scores):
        values = {name: getattr(score, name) for name in ("simulated", "measured", "error", "spread")}
        finite = {name: value if value is not None and isfinite(value) else None for name, value in values.items()}
        about = {"case": case.name, "loop": score.loop, "metric": score.bar.label}
        made.append({**about, **finite, "bound": score.bar.bound, "verdict": score.verdict})
    return made


MOST_POINTS = 3_000  # requests of the scatter
VERDICTS = {"met": Style(chart.GREEN, marker="circle"), "missed": Style(chart.RED, marker="cross")}  # of a score
VERDICTS |= {"undecided": Style(chart.ORANGE, marker="diamond")}
REACH = 0.4  # the farthest dot from the middle of a metric's space of width 1
LOOP_PLACES = {"sync": 0.25, BOTH: 0.5, "async": 0.75}  # position in the space of a case
EDGE = 5.0  # multiples of the bar; larger errors are drawn here
MARGIN = 1.08
CATEGORIES = [
    f"{bar.label.removeprefix('async ').removeprefix('output ')} ±{bar.bound * 100:g}{'pt' if bar.points else '%'}"
    for bar in BARS
]


class SpeedUpPoint(NamedTuple):
    """A case on a curve: the CPU work added to a step, the simulated speed-up, and that of each repeat, if any."""

    case: str
    injected_ms: float
    simulated: float
    measured: Sequence[float]


def speed_up(curves: Mapping[str, Sequence[SpeedUpPoint]]) -> Chart:
    """Draw the speed-up of async over sync by the CPU work added: simulated as lines, measured as points."""
    marks: list[Mark] = []
    for index, (name, points) in enumerate(curves.items()):
        marks += _curve(name, sorted(points, key=lambda point: point.injected_ms), series(index))
    caption = "How much faster the async loop is than the sync one, over the CPU work added to every step. Lines and "
    caption += "crosses are simulated, other markers measured, one for each pair of measured runs."
    caption += " Colours repeat." if len(curves) > len(chart.SERIES) else ""
    axes = Panel(marks, "CPU work added, ms a step", "async faster by, %")
    return Chart("speedup", "Speed-up of the async loop", caption, [axes])


def _curve(name: str, points: Sequence[SpeedUpPoint], style: Style) -> list[Mark]:
    x = np.array([point.injected_ms for point in points])
    y = np.array([point.simulated * 100 for point in points])
    pairs = [(point, value) for point in points for value in point.measured]
    texts = [f"{point.case}: {value:.1%} measured, {point.simulated:.1%} simulated" for point, value in pairs]
    at, values = np.array([point.injected_ms for point, _ in pairs]), np.array([value * 100 for _, value in pairs])
    marker = "circle" if style.marker == "cross" else style.marker
    return [
        Line(f"{name}: simulated", x, y, style),
        Points(f"{name}: simulated", x, y, Style(style.colour, marker="cross")),
        Points(f"{name}: measured", at, values, style._replace(marker=marker), texts=texts),
    ]


# -- requests ---------------------------------------------------------------------------------------------------------


def matched(measured: pd.DataFrame, simulated: pd.DataFrame) -> pd.DataFrame:
    """Return TTFT and TPOT of the requests that both runs have, by their index."""
    columns = ["index", "ttft_s", "tpot_s"]
    return measured[columns].merge(simulated[columns], on="index", suffixes=("_measured", "_simulated"))


def scatter(loops: Mapping[str, Sequence[pd.DataFrame]]) -> Chart:
    """Draw TTFT and TPOT of every request, simulated over measured: by loop, the `matched` frames of all cases."""
    frames = {loop: pd.concat(parts, ignore_index=True) for loop, parts in loops.items() if parts}
    total = sum(map(len, frames.values()))
    every = -(-total // MOST_POINTS) or 1
    drawn = {loop: frame.iloc[::every] for loop, frame in frames.items()}
    panels = [_fit(title, name, drawn) for title, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))]
    caption = "One point a request of any workload; on the line the simulated run is right. "
    caption += "TTFT counts from the arrival."
    caption += f" One in {every} of {total:,} requests is drawn." if every > 1 else ""
    return Chart("scatter", "Requests, simulated over measured", caption, panels, columns=2)


def _fit(title: str, name: str, frames: Mapping[str, pd.DataFrame]) -> Panel:
    pairs = {}
    for loop, frame in frames.items():
        both = np.stack([column(frame, f"{name}_{kind}") for kind in (MEASURED, SIMULATED)])
        pairs[loop] = both[:, np.isfinite(both).all(axis=0)]
    values = np.concatenate([np.empty(0), *(part for pair in pairs.values() for part in pair)])
    if not len(values):
        return Panel([], "", title=f"{title}: no request has one in both runs")
    log, scale = spread([values]), unit(float(values.max()))
    ends = np.array([values.min() / MARGIN if log else 0.0, max(values.max(), 1e-9) * MARGIN]) / scale.seconds
    marks: list[Mark] = [Line("simulated as measured", ends, ends, Style(chart.BLACK, "dashed"))]
    for index, (loop, (x, y)) in enumerate(pairs.items()):
        marks.append(Points(loop, x / scale.seconds, y / scale.seconds, series(index)))
    x_axis, y_axis = f"measured, {scale.name}", f"simulated, {scale.name}"
    whole = (float(ends[0]), float(ends[1]))
    return Panel(marks, x_axis, y_axis, title=title, x_log=log, y_log=log, x_range=whole, y_range=whole)


# -- errors -----------------------------------------------------------------------------------------------------------


def errors(cases: Mapping[str, Sequence[Score]]) -> Chart:
    """Draw the error of each metric in every case, as multiples of its bar: between the lines the bar is met."""
    bound = Style(chart.BLACK, "dashed")
    marks: list[Mark] = [Level("asked", 1.0, bound), Level("asked", -1.0, bound)]
    dots: list[tuple[str, float, float, str]] = []  # verdict, x, y, hover text
    for index, (case, scores) in enumerate(cases.items()):  # cases and loops are beside each other in a metric's space
        for score in (each for each in scores if each.counts and np.isfinite(each.error)):
            at = REACH * (2 * (index + LOOP_PLACES[score.loop]) / len(cases) - 1)
            simulated, measured, error = score.shown()
            text = f"{case}, {score.loop}: {score.bar.label} {error} ({simulated} simulated, {measured} measured)"
            dots.append((score.verdict, BARS.index(score.bar) + at, score.error / score.bar.bound, text))
    for verdict, style in VERDICTS.items():
        if own := [dot for dot in dots if dot[0] == verdict]:
            _, x, y, texts = zip(*own, strict=True)
            marks.append(Points(verdict, np.array(x), np.clip(y, -EDGE, EDGE), style, texts=texts))
    caption = "Error over what is asked of the metric, one point a workload and loop, in the order of the table. "
    caption += "1: as far above the measured run as the bar allows. "
    caption += "Where a bar is not asked nothing is drawn."
    beyond = sum(abs(y) > EDGE for _, _, y, _ in dots)
    caption += f" Drawn at the edge, as they lie beyond {EDGE:g}: {beyond:,}." if beyond else ""
    reach = max(1.5, *(min(EDGE, abs(y)) for _, _, y, _ in dots), 0.0) * MARGIN
    panel = Panel(marks, "", "error / asked", categories=CATEGORIES, y_range=(-reach, reach))
    return Chart("errors", "Errors, as multiples of what is asked", caption, [panel])
