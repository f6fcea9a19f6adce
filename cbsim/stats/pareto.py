"""`cbsim pareto`: which points of a sweep nobody beats in two metrics at once, and how sure that is.

A place is beaten if one on the frontier is better in both metrics, or better in one and the same in the other. Means
over replicates decide who is on the frontier; who is not is beaten for sure only if the intervals of the paired
differences say so, and otherwise perhaps on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import BLUE, GREY, ORANGE, SKY, Chart, Line, Panel, Points, Style
from cbsim.draw.markdown import Table
from cbsim.draw.report import Report
from cbsim.metrics import catalogue
from cbsim.metrics.checks import Check, Objective
from cbsim.stats import intervals, paired
from cbsim.stats.intervals import Interval
from cbsim.stats.replicated import Place, Replicated

FRONTIER, PERHAPS, BEATEN, OUT, MISSING = "frontier", "perhaps", "beaten", "out", "no runs"
COST = "cost.usd_per_million_output_tokens"
STYLES = {
    FRONTIER: Style(BLUE, "solid", "circle"),
    PERHAPS: Style(ORANGE, "solid", "diamond"),
    BEATEN: Style(GREY, "solid", "square"),
    OUT: Style(SKY, "solid", "cross"),
}


UNKNOWN = Interval(math.nan, math.nan, math.nan)


class Question(NamedTuple):
    """Two metrics, the conditions that a place has to keep, and the confidence of each interval."""

    x: Objective
    y: Objective
    where: Sequence[Check]
    confidence: float


class Stood(NamedTuple):
    """Where a place stands."""

    place: Place
    verdict: str
    x: Interval = UNKNOWN
    y: Interval = UNKNOWN
    cost: float | None = None


def frontier(sweep: Replicated, question: Question) -> list[Stood]:
    """Where each place stands, in the order of the sweep. Raises ScenarioError if no run has a metric."""
    for name in (question.x.name, question.y.name, *(check.metric for check in question.where)):
        sweep.check(name)
    kept = [_kept(place, question) for place in sweep.places]
    best = _best([stood for stood in kept if stood.verdict == FRONTIER], question)
    return [stood if stood.verdict in (OUT, MISSING) else _compared(stood, best, question) for stood in kept]


def _kept(place: Place, question: Question) -> Stood:
    """A place that may be on the frontier, for all that the conditions say."""
    values = [list(place.values(metric.name).values()) for metric in question[:2]]
    if not all(values):
        return Stood(place, MISSING)
    keeps = _keeps(place, question)
    verdict = OUT if keeps is False else PERHAPS if keeps is None else FRONTIER
    prices = list(place.values(COST).values())
    x, y = (intervals.shown_interval(of, question.confidence) for of in values)
    return Stood(place, verdict, x, y, float(np.mean(prices)) if prices else None)


def _best(stood: Sequence[Stood], question: Question) -> list[Stood]:
    """Those that nobody beats by means."""

    def good(each: Stood) -> tuple[float, float]:
        return question.x.sign * each.x[0], question.y.sign * each.y[0]

    best: list[Stood] = []
    for each in sorted(stood, key=good, reverse=True):
        if not best or good(each)[1] > good(best[-1])[1] or good(each) == good(best[-1]):
            best.append(each)
    return best


def _compared(stood: Stood, best: Sequence[Stood], question: Question) -> Stood:
    """Beaten by one of the best, the same as one of them, one of them, or none of these."""
    for other in best:
        differences = [_difference(other, stood, metric, question) for metric in question[:2]]
        lows = [low for low, _ in differences]
        if min(lows) >= 0 and max(lows) > 0:
            return stood._replace(verdict=BEATEN)
        if all(none for _, none in differences):
            return stood
    return stood if stood in best else stood._replace(verdict=PERHAPS)


def _difference(other: Stood, stood: Stood, metric: Objective, question: Question) -> tuple[float, bool]:
    """How much better the other one is for sure, by its mean if there is a single pair; and if they are the same."""
    ours, theirs = (each.place.values(metric.name) for each in (other, stood))
    difference = paired.paired(ours, theirs, question.confidence)
    if difference is None:
        return -math.inf, False
    low = difference.low if metric.sign > 0 else -difference.high
    return low if difference.known else metric.sign * difference.mean, difference.mean == 0 and not difference.deviation


def _keeps(place: Place, question: Question) -> bool | None:
    """Does a place keep all conditions? None if that cannot be told."""
    answers = [
        intervals.holds(check, list(place.values(check.metric).values()), question.confidence)
        for check in question.where
    ]
    return False if False in answers else None if None in answers else True


# -- what is said of it -----------------------------------------------------------------------------------------------


def study(sweep: Replicated, question: Question, *, all_places: bool = False) -> Report:
    """The frontier as a table, best x first, and drawn; with `all_places` the table has those that are beaten, too."""
    stood = frontier(sweep, question)
    stood.sort(key=lambda each: (each.verdict == MISSING, -question.x.sign * each.x[0]))
    listed = [each for each in stood if all_places or each.verdict in (FRONTIER, PERHAPS)]
    fields = sweep.changing
    return Report(
        title=f"{question.y.name} against {question.x.name}",
        question=_question(question),
        findings=_findings(sweep, stood, question),
        tables=[_table(listed, fields, question)],
        charts=[_chart(stood, fields, question)],
        data={
            "x": question.x.name,
            "y": question.y.name,
            "where": [check.text for check in question.where],
            "confidence": question.confidence,
            "places": list(starmap(_facts, ((each, fields) for each in stood))),
        },
    )


def _question(question: Question) -> str:
    ways = [f"{'most' if metric.sign > 0 else 'least'} {metric.name}" for metric in question[:2]]
    kept = f", with {' and '.join(check.text for check in question.where)}" if question.where else ""
    return f"Which points have {' and '.join(ways)}{kept}?"


def _table(listed: Sequence[Stood], fields: Sequence[str], question: Question) -> Table:
    priced = any(each.cost is not None for each in listed)
    numbers = _numbers(listed)
    header = ("", question.x.name, "±", question.y.name, "±", *(["$ a million output tokens"] * priced), "", "runs")
    rows = []
    for each in listed:
        cells = [*_cells(question.x, each.x), *_cells(question.y, each.y)]
        price = [catalogue.metric(COST).shown(each.cost)] * priced
        number = f"{numbers[id(each)]}: " if id(each) in numbers else ""
        rows.append((f"{number}{each.place.called(fields)}", *cells, *price, each.verdict, str(len(each.place.runs))))
    return Table("frontier", header, rows)


def _numbers(stood: Sequence[Stood]) -> dict[int, int]:
    """Of the points of the frontier in table and figure, by their id."""
    return {id(each): n for n, each in enumerate((each for each in stood if each.verdict == FRONTIER), start=1)}


def _cells(metric: Objective, interval: Interval) -> tuple[str, str]:
    mean, low, high = interval
    if math.isnan(mean):
        return "-", "-"
    return metric.shown(mean), metric.shown((high - low) / 2) if high > low else "-"


def _findings(sweep: Replicated, stood: Sequence[Stood], question: Question) -> list[str]:
    counts = {verdict: sum(each.verdict == verdict for each in stood) for verdict in (*STYLES, MISSING)}
    said = [", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) + f" of {len(stood)} points."]
    if all(len(each.place.runs) < 2 for each in stood):
        said.append("One run a point: there are no intervals, and nobody is perhaps on the frontier.")
    else:
        said.append(
            f"Intervals of Student's t over paired replicates, each with a confidence of {question.confidence:g}; "
            "perhaps: not beaten for sure."
        )
    if not counts[FRONTIER]:
        said.append("No point keeps all conditions for sure.")
    if sweep.lacking:
        said.append(f"{sweep.lacking} runs of the sweep are not done and left out.")
    return said


def _facts(stood: Stood, fields: Sequence[str]) -> dict[str, Any]:
    def interval(of: Interval) -> dict[str, float] | None:
        return None if math.isnan(of[0]) else dict(zip(("mean", "low", "high"), of, strict=True))

    return {
        "settings": {name: stood.place.settings[name] for name in fields},
        "verdict": stood.verdict,
        "runs": len(stood.place.runs),
        "x": interval(stood.x),
        "y": interval(stood.y),
        COST: stood.cost,
    }


def _chart(stood: Sequence[Stood], fields: Sequence[str], question: Question) -> Chart:
    marks: list[Line | Points] = []
    numbers = _numbers(stood)
    for verdict, style in STYLES.items():
        drawn = [each for each in stood if each.verdict == verdict]
        drawn.sort(key=lambda each: each.x)
        if not drawn:
            continue
        xs, ys = (np.array([getattr(each, axis) for each in drawn], dtype=float) for axis in "xy")
        for x, y in zip(xs, ys, strict=True):
            marks += [Line("", x[1:], np.full(2, y[0]), style), Line("", np.full(2, x[0]), y[1:], style)]
        called = [each.place.called(fields) for each in drawn]
        labels = [str(numbers[id(each)]) for each in drawn if id(each) in numbers]
        marks.append(Points(verdict, xs[:, 0], ys[:, 0], style, called, labels))
        if verdict == FRONTIER:
            marks.append(Line("", xs[:, 0], ys[:, 0], style))
    panel = Panel(marks, question.x.name, question.y.name)
    kept = f"; out: breaks {', '.join(check.text for check in question.where)}" if question.where else ""
    says = f"Numbers are the table's. Bars are intervals with a confidence of {question.confidence:g}{kept}."
    return Chart("pareto", f"{question.y.name} against {question.x.name}", says, [panel])
