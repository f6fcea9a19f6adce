"""The interactive part of a sweep's page: every axis and metric can be chosen, and templates/charts.js draws.

All points are in the page once, as columns of 32-bit floats: the codes of their values on each axis, of the seed and of
the status, then the metrics. The page therefore shows seven digits of a number.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from statistics import NormalDist
from typing import Any

import numpy as np

from analysis.figures.sweeps import log_spaced, ticks
from analysis.page.sweep_report import Look
from analysis.statistics.sweep_table import CONFIDENCE, DONE, STATUSES, Axis, SweepTable, longest_two, middle, student
from cbsim.draw.chart import series
from cbsim.metrics import catalogue

SCRIPTS = ("points.js", "charts.js", "explorer.js")
MOST_DEGREES = 200  # degrees of freedom with a factor of Student's t in the page; beyond, it goes on to the normal one
STYLES = 28
MOST_LISTED = 500  # points that are not done
FIGURES = (
    ("curves", "Along an axis", "How a metric changes along an axis, a line for each value of another"),
    ("heat_map", "Over two axes", "A metric over two axes, as coloured cells"),
    ("pareto", "Two metrics against each other", "Two metrics against each other, a marker a place"),
)


@dataclass(frozen=True, slots=True)
class Explorer:
    """An explorer: its `section` in HTML; the `settings` and, packed, the `columns` that its script reads."""

    section: str
    settings: str
    columns: str


def explorer(table: SweepTable, shown: Look) -> Explorer:
    """Return the explorer of a table, with the choices that it opens with."""
    section = "".join(_figure(*figure, table) for figure in FIGURES if figure[0] != "heat_map" or len(table.axes) > 1)
    settings = json.dumps(_settings(table, shown), separators=(",", ":"), sort_keys=True, allow_nan=False)
    columns = np.stack([np.asarray(column, dtype="<f4") for column in _columns(table)])
    packed = base64.b64encode(gzip.compress(columns.tobytes(), 6, mtime=0)).decode()
    return Explorer(section + _undone(table), settings.replace("<", "\\u003c"), packed)


def _columns(table: SweepTable) -> Iterator[Any]:
    yield from (axis.codes for axis in table.axes)
    yield from (table.seeds, table.status)
    yield from table.metrics.values()


def _settings(table: SweepTable, shown: Look) -> dict[str, Any]:
    degrees = range(1, min(MOST_DEGREES, max(len(table) - 1, 1)) + 1)
    names = {axis.name: at for at, axis in enumerate(table.axes)}
    return {
        "rows": len(table),
        "axes": [_axis(axis) for axis in table.axes],
        "metrics": [_metric(name) for name in table.metrics],
        "main": list(dict.fromkeys((*shown.metrics, *shown.pareto))),
        "constants": [f"{name} = {value}" for name, value in table.constants.items()],
        "slo": [{"text": limit.rule, **asdict(limit)} for limit in shown.limits],
        "done": STATUSES.index(DONE),
        "student": [student(count + 1) for count in degrees],
        "normal": NormalDist().inv_cdf((1 + CONFIDENCE) / 2),
        "styles": [series(index) for index in range(STYLES)],
        "start": {
            "metric": shown.metrics[0],
            "x": names[shown.view.x.name] if shown.view.x else None,
            "series": [names[axis.name] for axis in shown.view.series],
            "cells": [table.axes.index(axis) for axis in longest_two(table.axes)],
            "pareto": shown.pareto,
        },
    }


def _axis(axis: Axis) -> dict[str, Any]:
    made = {"name": axis.name, "short": axis.short, "labels": axis.labels, "middle": middle(axis)}
    if axis.numbers is None:
        return made | {"numbers": None, "log": False, "ticks": []}
    return made | {"numbers": axis.numbers.tolist(), "log": log_spaced(axis.numbers), "ticks": ticks(axis.numbers)}


def _metric(name: str) -> dict[str, Any]:
    what = catalogue.metric(name)
    return {"name": name, "label": what.label, "unit": what.form, "sign": what.sign}


def _figure(key: str, title: str, caption: str, table: SweepTable) -> str:
    return f"""<figure id="chart-{key}" aria-labelledby="chart-{key}-title">
<div class="top"><h3 id="chart-{key}-title">{escape(title)}</h3></div>
<form class="controls" aria-label="{escape(title)}: what is shown"></form>
<div class="plot" tabindex="0" role="group" aria-roledescription="chart" aria-label="Chart: {escape(title)}"
 aria-describedby="chart-{key}-says" data-explore="{key}" data-file="figures/{key}.png"></div>
<noscript><p>This chart needs JavaScript. What it shows at first is figures/{key}.png.</p></noscript>
<figcaption id="chart-{key}-says" aria-live="polite">{escape(caption)} ({escape(table.name)}).</figcaption>
</figure>
"""


def _undone(table: SweepTable) -> str:
    """Return a folded list of every point that is not done."""
    rows = np.flatnonzero(table.status != STATUSES.index(DONE)).tolist()
    if not rows:
        return ""
    names = (*(axis.name for axis in table.axes), "status", "reason")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{_cells(table, row)}</tr>" for row in rows[:MOST_LISTED])
    more = f"<p>The first {MOST_LISTED:,} of {len(rows):,}.</p>" if len(rows) > MOST_LISTED else ""
    return f"""<details id="undone"><summary>{len(rows):,} points that are not done</summary>{more}
<div class="scroll" role="region" tabindex="0" aria-label="Points that are not done"><table>
<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>
"""


def _cells(table: SweepTable, row: int) -> str:
    values = (*(axis.labels[axis.codes[row]] for axis in table.axes), STATUSES[table.status[row]])
    cells = "".join(f"<td>{escape(value)}</td>" for value in values)
    return f'{cells}<td class="reason">{escape(table.reasons[row] or "not run yet")}</td>'
