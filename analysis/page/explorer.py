"""The interactive part of a sweep's page: every axis and metric can be chosen, and templates/charts.js draws.

All points are in the page once, as columns of 32-bit floats: the codes of their values on each axis, of the seed and of
the status, then the metrics. The page therefore shows seven digits of a number.
"""

from __future__ import annotations

import base64
import gzip
import json
import string
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from importlib import resources
from statistics import NormalDist
from typing import Any, NamedTuple

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


class Explorer(NamedTuple):
    """An explorer: its figures in `html`, with the `settings` and, packed, the columns that its script reads."""

    html: str
    settings: dict[str, Any]


def file(name: str) -> str:
    """Return the text of a file of templates/."""
    return (resources.files("analysis.page") / "templates" / name).read_text(encoding="utf-8")


def template(name: str, parts: Mapping[str, str]) -> str:
    """Return a file of templates/ with these parts, which are HTML, in their places."""
    return string.Template(file(name)).substitute(parts)


def embedded(value: Any) -> str:
    """Return JSON that neither ends the script element that it stands in nor starts a comment."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False).replace("<", "\\u003c")


def explorer(table: SweepTable, shown: Look) -> Explorer:
    """Return the explorer of a table, with the choices that it opens with."""
    figures = [figure for figure in FIGURES if figure[0] != "heat_map" or len(table.axes) > 1]
    section = "".join(_figure(*figure, table) for figure in figures) + _undone(table)
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
    start |= {"cells": [names[axis.name] for axis in longest_two(table.axes)]}
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
        "start": start,
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
    parts = {"key": key, "title": title, "caption": caption, "table": table.name}
    return template("explored.html", {name: escape(part) for name, part in parts.items()})


def _undone(table: SweepTable) -> str:
    """Return a folded list of every point that is not done."""
    rows = table.undone
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
