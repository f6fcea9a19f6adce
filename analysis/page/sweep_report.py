"""The report of a sweep's table: completed and failed points, the best places, and the most useful figures. In its
page every axis and metric can be chosen, and templates/charts.js draws.

All points are in the page once, as columns of 32-bit floats: the codes of their values on each axis, of the seed and of
the status, then the metrics. The page therefore shows seven digits of a number.
"""

from __future__ import annotations

import base64
import gzip
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import NormalDist
from typing import Any

import numpy as np

from analysis.figures import sweeps
from analysis.page.webpage import Explorer, embedded, template
from analysis.statistics import sweep_table
from analysis.statistics.labels import shortened
from analysis.statistics.sweep_table import Axis, Means, Places, SweepTable, View
from cbsim.draw.chart import Chart, series
from cbsim.draw.report import Caveat, Report, Source, Table
from cbsim.errors import RunError
from cbsim.metrics import catalogue, checks, swept
from cbsim.metrics.catalogue import PER_GPU, PER_USER, Metric
from cbsim.metrics.checks import Check
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.metrics.terminal import flat, lookup
from cbsim.record.tables import Mask
from cbsim.scenario import documents

METRICS = ("ttft_s.p99", "tpot_s.p99", "output_tokens_per_s", "gpu_active")
WHOLE = 0.9995  # of a share, which is shown as 100 %
MOST_ROWS, MOST_REASONS, MOST_VALUES = 100, 50, 6


@dataclass(frozen=True, slots=True)
class Look:
    """The choices that a report opens with: `metrics` and `limits` are of columns that the table has."""

    places: Places
    view: View
    metrics: Sequence[str]
    limits: Sequence[Check]
    pareto: tuple[str, str]


def look(table: SweepTable, requested: Sequence[str] = (), slo: Sequence[str] = (), x: str | None = None) -> Look:
    """Look the command line's names up in the table; without metrics: the main ones. Raises RunError or CheckError."""
    limits = [checks.parse(condition) for condition in slo]
    for limit in limits:
        table.metric(limit.metric, f"--check {limit.rule!r}")
    requested = [table.metric(name, f"--metric {name}") for name in requested]
    main = [metric for metric in METRICS if metric in table.metrics and metric not in whole(table)]
    metrics = list(dict.fromkeys(requested or [*(limit.metric for limit in limits), *main] or [*table.metrics][:1]))
    return Look(sweep_table.places(table), sweep_table.view(table, x), metrics, limits, _pareto(table, metrics))


def whole(table: SweepTable) -> list[str]:
    """Return the main metrics that are 100 % at every point: their figures would be straight lines."""
    shares = [name for name in METRICS if name in table.metrics and catalogue.metric(name).unit == "share"]
    return [name for name in shares if float(np.nanmin(table.metrics[name])) >= WHOLE]


def _pareto(table: SweepTable, metrics: Sequence[str]) -> tuple[str, str]:
    """Return throughput and the speed of a user, or the first metrics of the table."""
    there = [metric for metric in (PER_USER, PER_GPU) if metric in table.metrics]
    if not metrics and len(there) < 2:
        raise RunError(f"{table.path}: no point has a metric")
    first, second = [*there, *(metric for metric in metrics if metric not in there), *metrics][:2] if metrics else there
    return first, second


def build(table: SweepTable, shown: Look, command: str) -> Report:
    """Return the report; its charts are the files beside report.md, a page has an explorer in their place."""
    return Report(
        title=f"Sweep {table.name}" + (f", {table.subject}" if table.subject else ""),
        question="",
        sources=sources(table),
        coloured=False,
        caveats=caveats(table, shown),
        findings=[*findings(table, shown), *(f"{line[0].upper()}{line[1:]}." for line in table.step_times)],
        tables=[*_undone(table), *_numbers(table, shown)],
        charts=charts(table, shown),
        command=command,
        data={"points": len(table), **{status: table.count(status) for status in swept.STATUSES}},
    )


def sources(table: SweepTable) -> list[Source]:
    """Return the sweep as the one source: its first point's scenario, and its command; none of tables without them."""
    fields = ", ".join(field for axis in table.axes for field in axis.fields)
    text = f"# that of the first point; the axes are {fields}\n{table.scenario}"
    return [Source(table.name, table.path.name, "a sweep", (), text, "", table.command)] if table.scenario else []


def charts(table: SweepTable, shown: Look) -> list[Chart]:
    """Draw curves along x, cells over two axes, and the trade-off of GPU and user."""
    bounds = {limit.metric: limit.bound for limit in shown.limits}
    limit = next((limit for limit in shown.limits if limit.metric == shown.metrics[0]), None)
    curves = sweeps.curves(table, shown.places, shown.view, shown.metrics, bounds)
    cells = sweeps.heat_map(table, shown.places, shown.metrics[0], limit)
    pareto = sweeps.pareto(table, shown.places, shown.pareto, shown.limits)
    return [curves, *([cells] if cells else []), pareto]


def findings(table: SweepTable, shown: Look) -> list[str]:
    """Return sentences on how much is done, which places are best, which meet the limits."""
    places, met = shown.places, sweeps.meets(table, shown.places, shown.limits)
    counts = ", ".join(f"{table.count(status):,} {status}" for status in swept.STATUSES if table.count(status))
    constants = ", ".join(f"{name} = {value}" for name, value in table.constants.items())
    limits = " and ".join(limit.rule for limit in shown.limits)
    left_out = ", ".join(catalogue.metric(metric).label for metric in whole(table) if metric not in shown.metrics)
    sentences = [
        f"{len(table):,} points at {len(places):,} places: {counts}.",
        _given(table),
        f"The same at all: {constants}." if constants else "",
        f"{int(met.sum()):,} of {len(places):,} places meet {limits} in the mean of their replicates."
        if limits
        else "",
        f"{left_out}: 100 % at every point, so there is no figure of it." if left_out else "",
    ]
    sentences += [
        _best(table, places, metric, met, bool(limits)) for metric in dict.fromkeys((*shown.metrics, *shown.pareto))
    ]
    return [sentence for sentence in sentences if sentence]


def _given(table: SweepTable) -> str:
    """Return a sentence on what is given at all points: model, GPU, the fields of the workload that no axis sets."""
    workload = lookup(documents.parse(table.scenario or "{}", str(table.path)), "workload") or {}
    varied = {field.removeprefix("workload.") for axis in table.axes for field in axis.fields}
    same = {name: value for name, value in flat(workload).items() if name not in varied}
    given = ", ".join(f"{name} {value}" for name, value in same.items() if value not in (None, [], False))
    return f"{table.subject}; workload: {given}." if given else ""


def _best(table: SweepTable, places: Places, metric: str, met: Mask, limited: bool) -> str:
    """Return the place of the best mean, if the metric has a direction and not all means are the same."""
    what, means = catalogue.metric(metric), places.means(table.metrics[metric])
    known = np.flatnonzero(np.isfinite(means.mean) & met)
    if not len(known) or not np.ptp(means.mean[known]) or not places.axes or not what.sign:
        return ""
    order = means.mean[known] * what.sign
    best = int(known[order.argmax()])
    most = "Most" if what.sign > 0 else "Least"
    within = " within the SLO" if limited else ""
    return f"{most} {what.label}{within}: {_cell(what, means, best)} at {places.label(best)}."


def _cell(metric: Metric, means: Means, at: int) -> str:
    """Return the mean of a place, and its interval in percent of it if there is one."""
    mean, half = means.mean[at], means.half[at]
    percent = 0.0 if math.isnan(half) or not mean else half / abs(mean) * 100
    interval = f" ± {percent:.0f} %" if percent >= 10 else f" ± {percent:.2g} %" if percent >= 0.01 else ""
    return f"{metric.shown(mean)}{interval}"


def caveats(table: SweepTable, shown: Look) -> list[Caveat]:
    """Return the reasons not to trust the numbers that the table itself shows."""
    made = []
    for status, verb in ((swept.FAILED, "failed"), (swept.MISSING, "are missing")):
        if count := table.count(status):
            made.append(Caveat(status, "", f"{count:,} of {len(table):,} points {verb}; means are over the others."))
    few = int((shown.places.means(table.metrics[shown.metrics[0]]).n == 1).sum())
    if few:
        made.append(Caveat("one run", "", f"{few:,} places have one run, no interval: differences may be chance."))
    for metric in shown.metrics:
        head, _, statistic = metric.partition(".")
        samples = table.metrics.get(f"{head}.n")
        if statistic in SAMPLES_NEEDED and samples is not None:
            least, needed = int(np.nanmin(samples)), SAMPLES_NEEDED[statistic]
            reason = f"{catalogue.metric(metric).label} is of only {least:,} requests at a place; it needs {needed}."
            made += [Caveat("few requests", "", reason)] if least < needed else []
    return made


def _undone(table: SweepTable) -> list[Table]:
    """Return the points that are not done, by reason: their number and places."""
    groups: dict[tuple[str, str], list[int]] = {}
    for row in table.undone:
        groups.setdefault((swept.STATUSES[table.status[row]], table.reasons[row]), []).append(row)
    if not groups:
        return []
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1])))
    rows = [(why or "not run yet", status, f"{len(own):,}", _where(table, own)) for (status, why), own in ordered]
    more = f" The {len(rows) - MOST_REASONS:,} rarest reasons are left out." if len(rows) > MOST_REASONS else ""
    note = f"What sets them apart is named; an axis is left out if all its values are among them.{more}"
    return [Table("Failed and missing points", ("reason", "status", "points", "where"), rows[:MOST_REASONS], note)]


def _where(table: SweepTable, rows: Sequence[int]) -> str:
    differing = []
    for axis in table.axes:
        codes = np.unique(axis.codes[rows])
        if len(codes) < len(axis):
            values = [axis.labels[code] for code in codes[:MOST_VALUES]]
            more = f" and {len(codes) - MOST_VALUES} more" if len(codes) > MOST_VALUES else ""
            differing.append(f"{axis.name} = {' | '.join(values)}{more}")
    return "; ".join(differing) or "everywhere"


def _numbers(table: SweepTable, shown: Look) -> list[Table]:
    """Return a table with a row a place."""
    places = shown.places
    if len(places) > MOST_ROWS:
        return [Table("Points", ("point",), [(value,) for value in x.values], "") for x in places.axes if x.numbered]
    metrics = {catalogue.metric(name): places.means(table.metrics[name]) for name in (*shown.metrics, *shown.pareto)}
    rows = []
    for at in range(len(places)):
        runs = max(means.n[at] for means in metrics.values())
        cells = (_cell(metric, means, at) for metric, means in metrics.items())
        rows.append((places.label(at) or table.name, f"{runs}", *cells))
    note = f"{sweeps.averaged(places)} Beside a mean: half its interval's width, in percent of the mean."
    return [Table("Places", ("place", "runs", *(metric.label for metric in metrics)), rows, note)]


MOST_DEGREES = 200  # degrees of freedom with a factor of Student's t in the page; beyond, it goes on to the normal one
STYLES = 28
MOST_LISTED = 500  # points that are not done
FIGURES = (
    ("curves", "Along an axis", "How a metric changes along an axis, a line for each value of another"),
    ("heat_map", "Over two axes", "A metric over two axes, as coloured cells"),
    ("pareto", "Two metrics against each other", "Two metrics against each other, a marker a place"),
)


def explorer(table: SweepTable, shown: Look) -> Explorer:
    """Return the explorer of a table, with the choices that it opens with."""
    figures = [figure for figure in FIGURES if figure[0] != "heat_map" or len(table.axes) > 1]
    section = ""
    for key, title, caption in figures:
        parts = {"key": key, "title": title, "caption": caption, "table": table.name}
        section += template("explored.html", {name: escape(part) for name, part in parts.items()})
    section += _listed(table)
    columns = [*(axis.codes for axis in table.axes), table.seeds, table.status, *table.metrics.values()]
    values = np.stack([np.asarray(column, dtype="<f4") for column in columns])
    packed = base64.b64encode(gzip.compress(values.tobytes(), 6, mtime=0)).decode()
    settings = _settings(table, shown)
    section += f'<script type="application/json" id="settings">{embedded(settings)}</script>'
    return Explorer(f'{section}<script type="application/octet-stream" id="columns">{packed}</script>', settings)


def _settings(table: SweepTable, shown: Look) -> dict[str, Any]:
    degrees = range(1, min(MOST_DEGREES, max(len(table) - 1, 1)) + 1)
    names = {axis.name: at for at, axis in enumerate(table.axes)}
    start: dict[str, Any] = {"metric": shown.metrics[0], "x": names[shown.view.x.name] if shown.view.x else None}
    start |= {"series": [names[axis.name] for axis in shown.view.series], "pareto": shown.pareto}
    start |= {"cells": [names[axis.name] for axis in sweep_table.ranked(table.axes)[:2]]}
    metrics = map(catalogue.metric, table.metrics)
    return {
        "rows": len(table),
        "axes": [_axis(axis) for axis in table.axes],
        "metrics": [{"name": m.name, "label": m.label, "unit": m.form, "sign": m.sign} for m in metrics],
        "main": list(dict.fromkeys((*shown.metrics, *shown.pareto))),
        "constants": [f"{name} = {value}" for name, value in table.constants.items()],
        "slo": [{"text": limit.rule, **asdict(limit)} for limit in shown.limits],
        "done": swept.STATUSES.index(swept.DONE),
        "student": [sweep_table.student(count + 1) for count in degrees],
        "normal": NormalDist().inv_cdf((1 + sweep_table.CONFIDENCE) / 2),
        "styles": [series(index) for index in range(STYLES)],
        "start": start,
    }


def _axis(axis: Axis) -> dict[str, Any]:
    made = {"name": axis.name, "labels": shortened(axis.labels), "log": False}
    made |= {"values": shortened(axis.values), "written": axis.written, "ticks": [], "middle": sweep_table.middle(axis)}
    if (numbers := axis.numbers) is None:
        return made | {"numbers": None}
    at, names = sweeps.ticks(axis, numbers)
    return made | {"numbers": numbers.tolist(), "log": sweeps.log_spaced(numbers), "ticks": at, "written": names}


def _listed(table: SweepTable) -> str:
    """Return a folded list of every point that is not done."""
    rows = table.undone
    if not rows:
        return ""
    names = (*(axis.name for axis in table.axes), "status", "reason")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = ""
    for row in rows[:MOST_LISTED]:
        values = (*(axis.labels[axis.codes[row]] for axis in table.axes), swept.STATUSES[table.status[row]])
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        body += f'<tr>{cells}<td class="reason">{escape(table.reasons[row] or "not run yet")}</td></tr>'
    more = f"<p>The first {MOST_LISTED:,} of {len(rows):,}.</p>" if len(rows) > MOST_LISTED else ""
    return f"""<details id="undone"><summary>{len(rows):,} points that are not done</summary>{more}
<div class="scroll" role="region" tabindex="0" aria-label="Points that are not done"><table>
<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>
"""
