"""`cbsim pareto`: the points of a sweep that no other dominates in two metrics, with the confidence of each verdict.

A configuration is dominated if one on the frontier is better in both metrics, or better in one and the same in the
other. Means over replicates decide which are on the frontier. The others are dominated if the intervals of the paired
differences show it, and are perhaps on the frontier if not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import BLUE, GREY, ORANGE, SKY, Chart, Line, Panel, Points, Style
from cbsim.draw.report import Report, Table
from cbsim.metrics import catalogue
from cbsim.metrics.catalogue import COST, Metric
from cbsim.metrics.checks import Check
from cbsim.stats import intervals
from cbsim.stats.intervals import Interval
from cbsim.stats.replicated import Configuration, Replicated

FRONTIER, PERHAPS, DOMINATED, OUT, MISSING = "frontier", "perhaps", "dominated", "out", "no runs"
STYLES = {
    FRONTIER: Style(BLUE, "solid", "circle"),
    PERHAPS: Style(ORANGE, "solid", "diamond"),
    DOMINATED: Style(GREY, "solid", "square"),
    OUT: Style(SKY, "solid", "cross"),
}
UNKNOWN = Interval(math.nan, math.nan, math.nan)


class Question(NamedTuple):
    """A question: two metrics, the conditions that a configuration has to keep, and the confidence of each interval."""

    x: Metric
    y: Metric
    where: Sequence[Check]
    confidence: float


class Standing(NamedTuple):
    """The verdict on a configuration, with its intervals and mean cost."""

    configuration: Configuration
    verdict: str
    x: Interval = UNKNOWN
    y: Interval = UNKNOWN
    cost: float | None = None


def frontier(sweep: Replicated, question: Question) -> list[Standing]:
    """Return each configuration's standing, in the order of the sweep. Raises ScenarioError if no run has a metric."""
    for name in (question.x.name, question.y.name, *(check.metric for check in question.where)):
        sweep.check(name)
    standings = [_eligible(each, question) for each in sweep.configurations]
    best = _best([each for each in standings if each.verdict == FRONTIER], question)
    return [each if each.verdict in (OUT, MISSING) else _compared(each, best, question) for each in standings]


def _eligible(configuration: Configuration, question: Question) -> Standing:
    """Return a configuration's standing by the conditions alone: on the frontier, perhaps, out, or no runs."""
    values = [list(configuration.values(metric.name).values()) for metric in question[:2]]
    if not all(values):
        return Standing(configuration, MISSING)
    measured = [(check, list(configuration.values(check.metric).values())) for check in question.where]
    answers = [intervals.holds(check, of, question.confidence) for check, of in measured]
    verdict = OUT if False in answers else PERHAPS if None in answers else FRONTIER
    prices = list(configuration.values(COST).values())
    x, y = (intervals.shown_interval(of, question.confidence) for of in values)
    return Standing(configuration, verdict, x, y, float(np.mean(prices)) if prices else None)


def _best(standings: Sequence[Standing], question: Question) -> list[Standing]:
    """Return the standings that no other dominates by their means."""

    def good(each: Standing) -> tuple[float, float]:
        return question.x.sign * each.x[0], question.y.sign * each.y[0]

    best: list[Standing] = []
    for each in sorted(standings, key=good, reverse=True):
        if not best or good(each)[1] > good(best[-1])[1] or good(each) == good(best[-1]):
            best.append(each)
    return best


def _compared(standing: Standing, best: Sequence[Standing], question: Question) -> Standing:
    """Return the standing as dominated by one of the best, unchanged if it is or equals one of them, else perhaps."""
    for other in best:
        differences = [_difference(other, standing, metric, question) for metric in question[:2]]
        lows = [low for low, _ in differences]
        if min(lows) >= 0 and max(lows) > 0:
            return standing._replace(verdict=DOMINATED)
        if all(none for _, none in differences):
            return standing
    return standing if standing in best else standing._replace(verdict=PERHAPS)


def _difference(other: Standing, standing: Standing, metric: Metric, question: Question) -> tuple[float, bool]:
    """Return by how much the other is surely better (by its mean with a single pair), and whether they are the same."""
    ours, theirs = (each.configuration.values(metric.name) for each in (other, standing))
    difference = intervals.paired(ours, theirs, question.confidence)
    if difference is None:
        return -math.inf, False
    low = difference.low if metric.sign > 0 else -difference.high
    return low if difference.known else metric.sign * difference.mean, difference.none


def study(sweep: Replicated, question: Question, *, all_places: bool = False) -> Report:
    """Return the report of the frontier: a chart, and a table, best x first; `all_places` lists every configuration."""
    standings = frontier(sweep, question)
    standings.sort(key=lambda each: (each.verdict == MISSING, -question.x.sign * each.x[0]))
    listed = [each for each in standings if all_places or each.verdict in (FRONTIER, PERHAPS)]
    directions = [f"{'most' if metric.sign > 0 else 'least'} {metric.spelled}" for metric in question[:2]]
    conditions = f", with {' and '.join(check.rule for check in question.where)}" if question.where else ""
    return Report(
        title=f"{question.y.spelled} against {question.x.spelled}",
        question=f"Which points have {' and '.join(directions)}{conditions}?",
        findings=[*_findings(sweep, standings, question), *sweep.step_times],
        tables=[_table(listed, sweep.changing, question)],
        charts=[_chart(standings, sweep.changing, question)],
        data={
            "x": question.x.name,
            "y": question.y.name,
            "where": [check.rule for check in question.where],
            "confidence": question.confidence,
            "places": [_facts(each, sweep.changing) for each in standings],
        },
    )


def _table(listed: Sequence[Standing], fields: Sequence[str], question: Question) -> Table:
    priced, numbers, rows = any(each.cost is not None for each in listed), _numbers(listed), []
    for each in listed:
        cells = [*_cells(question.x, each.x), *_cells(question.y, each.y)]
        price = [catalogue.metric(COST).shown(each.cost)] * priced
        number = f"{numbers[id(each)]}: " if id(each) in numbers else ""
        one = each.configuration
        rows.append((f"{number}{one.label(fields)}", *cells, *price, each.verdict, str(len(one.runs))))
    costs = [catalogue.metric(COST).label] * priced
    return Table("frontier", ("", question.x.spelled, "±", question.y.spelled, "±", *costs, "", "runs"), rows)


def _numbers(standings: Sequence[Standing]) -> dict[int, int]:
    """Return the numbers of the frontier's points in table and figure, by the id of the standing."""
    return {id(each): n for n, each in enumerate((each for each in standings if each.verdict == FRONTIER), start=1)}


def _cells(metric: Metric, interval: Interval) -> tuple[str, str]:
    mean, low, high = interval
    if math.isnan(mean):
        return "-", "-"
    return metric.shown(mean), metric.shown((high - low) / 2) if high > low else "-"


def _findings(sweep: Replicated, standings: Sequence[Standing], question: Question) -> list[str]:
    counts = {verdict: sum(each.verdict == verdict for each in standings) for verdict in (*STYLES, MISSING)}
    total = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    findings = [f"{total} of {len(standings)} points."]
    if all(len(each.configuration.runs) < 2 for each in standings):
        findings.append(
            "One run a point: means decide, there are no intervals, so chance may decide between near points."
        )
    else:
        findings.append(
            f"Intervals of Student's t over paired replicates, each with a confidence of {question.confidence:g}; "
            "perhaps: neither on the frontier by its means nor dominated by these intervals."
        )
    if not counts[FRONTIER]:
        findings.append("No point keeps all conditions in its whole interval.")
    if sweep.lacking:
        findings.append(f"{sweep.lacking} runs of the sweep are not done and left out.")
    return findings


def _facts(standing: Standing, fields: Sequence[str]) -> dict[str, Any]:
    x, y = (None if math.isnan(of.mean) else of._asdict() for of in (standing.x, standing.y))
    settings, runs = standing.configuration.settings, standing.configuration.runs
    about = {"settings": {name: settings[name] for name in fields}, "verdict": standing.verdict, "runs": len(runs)}
    return {**about, "x": x, "y": y, COST: standing.cost}


def _chart(standings: Sequence[Standing], fields: Sequence[str], question: Question) -> Chart:
    marks: list[Line | Points] = []
    numbers = _numbers(standings)
    for verdict, style in STYLES.items():
        drawn = sorted([each for each in standings if each.verdict == verdict], key=lambda each: each.x)
        if not drawn:
            continue
        xs, ys = (np.array([getattr(each, axis) for each in drawn], dtype=float) for axis in "xy")
        for x, y in zip(xs, ys, strict=True):
            marks += [Line("", x[1:], np.full(2, y[0]), style), Line("", np.full(2, x[0]), y[1:], style)]
        hover = [each.configuration.label(fields) for each in drawn]
        labels = [str(numbers[id(each)]) for each in drawn if id(each) in numbers]
        marks.append(Points(verdict, xs[:, 0], ys[:, 0], style, hover, labels))
        if verdict == FRONTIER:
            marks.append(Line("", xs[:, 0], ys[:, 0], style))
    panel = Panel(marks, question.x.spelled, question.y.spelled)
    out = f"; out: breaks {', '.join(check.rule for check in question.where)}" if question.where else ""
    caption = f"Numbers are the table's. Bars are intervals with a confidence of {question.confidence:g}{out}."
    return Chart("pareto", f"{question.y.spelled} against {question.x.spelled}", caption, [panel])
