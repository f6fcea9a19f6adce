"""A figure of latency and throughput over one swept field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from analysis.figures import axis
from analysis.figures.axis import spread
from analysis.statistics.sweeps import Knee, Sweep, SweepGroup, knee, rates
from cbsim.draw.chart import GREY, Chart, Edge, Floats, Line, Mark, Panel, Points, Style, series, unit
from cbsim.metrics.terminal import lookup

DASHES = {"p50": "solid", "p95": "dashed", "p99": "dotted"}


def curves(swept: Sweep) -> Chart:
    """Draw p50 and p95 of TTFT and TPOT (p99 if all runs have enough samples), output tokens/s, and requests/s served
    (if a rate was swept, against it) or GPU active. One line a group joins the means of repetitions.
    """
    xs = {group.label: np.array(rates(swept, group) if swept.by_rate else group.values) for group in swept.groups}
    knees = {group.label: knee(group, list(xs[group.label])) for group in swept.groups} if swept.by_rate else {}
    axis = "requests/s offered" if swept.by_rate else swept.field
    log = spread(xs.values())
    last = ("Requests/s served", "requests_per_s") if swept.by_rate else ("GPU active", "gpu_active")
    panels = [_latency(swept, xs, name, key) for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))]
    panels += [_single(swept, xs, *what) for what in (("Output tokens/s", "output_tokens_per_s"), last)]
    if swept.by_rate:
        x = np.unique(np.concatenate(list(xs.values())))
        panels[-1] = _with(panels[-1], [Line("as many as offered", x, x, Style(GREY, "dotted"))])
    edges: list[Mark] = [
        Edge(f"{label}: knee", known.rate, Style(series(index).colour, "dashdot"))
        for index, (label, known) in enumerate(knees.items())
        if known.rate is not None
    ]
    panels = [_with(panel, edges, x=axis, x_log=log) for panel in panels]
    return Chart("sweep", f"Sweep of {swept.field}", _caption(swept, knees), panels, columns=2)


def _with(panel: Panel, marks: list[Mark], **changes: Any) -> Panel:
    return replace(panel, marks=[*marks, *panel.marks], **changes)


def _caption(swept: Sweep, knees: Mapping[str, Knee]) -> str:
    caption = "Solid p50, dashed p95" + (", dotted p99." if _quotable(swept, "p99") else ".")
    if not _quotable(swept, "p95"):
        caption += " Some runs have too few requests for p95 to be quoted."
    if knees:
        caption += " Requests/s served are over the whole span, the time after the last arrival included. Knee: the "
        caption += "highest rate up to which requests end at least 95 % as fast as they arrive, from the middle "
        caption += "arrival to the last (rate stability), and the wait for a seat is at most half of TTFT at p95. "
        caption += " ".join(known.sentence for known in knees.values())
    return caption


def _quotable(swept: Sweep, percentile: str) -> bool:
    """Whether every run that has values has enough requests for this percentile."""
    few = [lookup(run.summary, f"{key}.too_few_for") for run in _runs(swept) for key in ("ttft_s", "tpot_s")]
    return all(percentile not in (names or ()) for names in few)


def _runs(swept: Sweep) -> list[Any]:
    return [run for group in swept.groups for run in group.runs]


def _latency(swept: Sweep, xs: Mapping[str, Floats], name: str, key: str) -> Panel:
    drawn = [percentile for percentile in DASHES if percentile != "p99" or _quotable(swept, percentile)]
    pairs = [*product(enumerate(swept.groups), drawn)]
    values = [_values(group, f"{key}.{percentile}") for (_, group), percentile in pairs]
    known = [part[np.isfinite(part)] for part in values]
    most = max((float(part.max()) for part in known if len(part)), default=0.0)
    scale = unit(most)
    marks: list[Mark] = []
    for ((index, group), percentile), y in zip(pairs, values, strict=True):
        style = series(index)._replace(dash=DASHES[percentile])
        marks += _curve(f"{group.label} {percentile}", xs[group.label], y / scale.seconds, style)
    panel = Panel(marks, "", scale.name, title=name, y_log=spread(known))
    limit = axis.slo_limits([run.scenario for run in _runs(swept)]).get(key)
    return axis.with_slo(panel, limit, most, scale.seconds, level=True)


def _single(swept: Sweep, xs: Mapping[str, Floats], title: str, metric: str) -> Panel:
    marks: list[Mark] = []
    for index, group in enumerate(swept.groups):
        style = series(index)._replace(dash="solid")  # dashes distinguish percentiles
        marks += _curve(group.label, xs[group.label], _values(group, metric), style)
    share = metric == "gpu_active"
    return Panel(marks, "", "share" if share else "", title=title, y_range=(0.0, 1.03) if share else None)


def _values(group: SweepGroup, metric: str) -> Floats:
    values = [lookup(run.summary, metric) for run in group.runs]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _curve(name: str, x: Floats, y: Floats, style: Style) -> list[Mark]:
    """Return a marker a run, and a line through the means of those at the same x."""
    there = np.isfinite(y)
    places, at = np.unique(x[there], return_inverse=True)
    means = np.bincount(at, weights=y[there], minlength=len(places)) / np.maximum(np.bincount(at), 1)
    return [Line(name, places, means, style), Points(name, x[there], y[there], style)]
