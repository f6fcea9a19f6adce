"""What latency and throughput become as one field is swept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from analysis.figures.axis import spread
from analysis.statistics.sweeps import Group, Knee, Sweep, knee, rates
from cbsim.draw.chart import GREY, Chart, Edge, Floats, Line, Mark, Panel, Points, Style, series
from cbsim.draw.units import unit
from cbsim.results.terminal import lookup

DASHES = {"p50": "solid", "p95": "dashed", "p99": "dotted"}


def curves(found: Sweep) -> Chart:
    """p50 and p95 of TTFT and TPOT (p99 where all runs have enough samples), output tokens/s, and requests/s served
    (if a rate was swept, against it) or GPU active. One line a group through the means of repetitions.
    """
    xs = {group.label: np.array(rates(found, group) if found.by_rate else group.values) for group in found.groups}
    knees = {group.label: knee(group, list(xs[group.label])) for group in found.groups} if found.by_rate else {}
    axis = "requests/s offered" if found.by_rate else found.field
    log = spread(xs.values())
    last = ("Requests/s served", "requests_per_s") if found.by_rate else ("GPU active", "gpu_active")
    panels = [_latency(found, xs, name, key) for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))]
    panels += [_single(found, xs, *what) for what in (("Output tokens/s", "output_tokens_per_s"), last)]
    if found.by_rate:
        x = np.unique(np.concatenate(list(xs.values())))
        panels[-1] = _with(panels[-1], [Line("as many as offered", x, x, Style(GREY, "dotted"))])
    edges: list[Mark] = [
        Edge(f"{label}: knee", one.rate, Style(series(index).colour, "dotted"))
        for index, (label, one) in enumerate(knees.items())
        if one.rate is not None
    ]
    panels = [_with(panel, edges, x=axis, x_log=log) for panel in panels]
    return Chart("sweep", f"Sweep of {found.field}", _says(found, knees), panels, columns=2)


def _with(panel: Panel, marks: list[Mark], **changes: Any) -> Panel:
    return replace(panel, marks=[*marks, *panel.marks], **changes)


def _says(found: Sweep, knees: Mapping[str, Knee]) -> str:
    says = "Solid p50, dashed p95" + (", dotted p99." if _quotable(found, "p99") else ".")
    if not _quotable(found, "p95"):
        says += " Some runs have too few requests for p95 to be quoted."
    if knees:
        says += " Requests/s served are over the whole span, the time after the last arrival included."
        says += " Knee: the highest rate up to which requests end at least 95 % as fast as they arrive, from the middle"
        says += " arrival to the last (rate stability), and the wait for a seat is at most half of TTFT at p95."
        says += f" {' '.join(one.says for one in knees.values())}"
    return says


def _quotable(found: Sweep, percentile: str) -> bool:
    """Has every run, that has any, enough requests for this percentile?"""
    few = [lookup(run.summary, f"{key}.too_few_for") for run in _runs(found) for key in ("ttft_s", "tpot_s")]
    return all(percentile not in (names or ()) for names in few)


def _runs(found: Sweep) -> list[Any]:
    return [run for group in found.groups for run in group.runs]


def _latency(found: Sweep, xs: Mapping[str, Floats], name: str, key: str) -> Panel:
    drawn = [one for one in DASHES if one != "p99" or _quotable(found, one)]
    values = {(group.label, one): _values(group, f"{key}.{one}") for group in found.groups for one in drawn}
    known = [part[np.isfinite(part)] for part in values.values()]
    scale = unit(max((float(part.max()) for part in known if len(part)), default=0.0))
    marks: list[Mark] = []
    for index, group in enumerate(found.groups):
        for one in drawn:
            style = Style(series(index).colour, DASHES[one], series(index).marker)
            marks += _curve(f"{group.label} {one}", xs[group.label], values[group.label, one] / scale.seconds, style)
    return Panel(marks, "", scale.name, title=name, y_log=spread(known))


def _single(found: Sweep, xs: Mapping[str, Floats], title: str, metric: str) -> Panel:
    marks: list[Mark] = []
    for index, group in enumerate(found.groups):
        style = series(index)._replace(dash="solid")  # dashes tell percentiles apart
        marks += _curve(group.label, xs[group.label], _values(group, metric), style)
    share = metric == "gpu_active"
    return Panel(marks, "", "share" if share else "", title=title, y_range=(0.0, 1.03) if share else None)


def _values(group: Group, metric: str) -> Floats:
    found = [lookup(run.summary, metric) for run in group.runs]
    return np.array([np.nan if value is None else value for value in found], dtype=np.float64)


def _curve(name: str, x: Floats, y: Floats, style: Style) -> list[Mark]:
    """A marker a run, and a line through the means of those at the same x."""
    there = np.isfinite(y)
    places, at = np.unique(x[there], return_inverse=True)
    means = np.bincount(at, weights=y[there], minlength=len(places)) / np.maximum(np.bincount(at), 1)
    return [Line(name, places, means, style), Points(name, x[there], y[there], style)]
