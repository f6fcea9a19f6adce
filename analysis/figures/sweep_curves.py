"""What metrics become along an axis of a sweep: means of replicates with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis.figures import slo
from analysis.figures.axis import spread
from analysis.statistics.places import Places
from analysis.statistics.quantity import Quantity, quantity
from analysis.statistics.sweep_table import Axis, Ints, SweepTable
from analysis.statistics.view import View
from cbsim.draw.chart import Chart, Floats, Line, Mark, Panel, Points, Whiskers, series

FAR = 8  # from the first number of a logarithmic axis to its last, as a factor
MOST_LETTERS = 36  # of the numbers written along an axis
INTERVALS = "Means of the replicates of a place, with 95 % intervals (Student's t) where there are two or more."


def curves(table: SweepTable, places: Places, view: View, metrics: Sequence[str], limits: Mapping[str, float]) -> Chart:
    """A panel a metric, a line a series, limits (in the metric's own unit) across."""
    rows = view.rows(places)
    names = [places.said(int(own[0]), view.series) or table.name for own in rows]
    panels = [_panel(table, places, view, quantity(metric), rows, names, limits.get(metric)) for metric in metrics]
    title = f"{table.name}: over {view.x.name}" if view.x else table.name
    says = f"{INTERVALS}{view.says(places.axes)}{' Dashed: the limit (SLO).' if limits else ''}"
    return Chart("curves", title, says, panels, columns=2)


def positions(axis: Axis | None, codes: Ints) -> Floats:
    """Where values of an axis lie: at their numbers, or at 0, 1, ... if they are names."""
    if axis is None:
        return np.zeros(len(codes))
    return axis.numbers[codes] if axis.numbers is not None else codes.astype(np.float64)


def log_spaced(numbers: Floats) -> bool:
    """Are rising numbers better shown at the distances of their logarithms? They are all positive and reach far, and
    their ratios are more alike than their differences.
    """
    if numbers[0] <= 0 or numbers[-1] < FAR * numbers[0] or len(numbers) < 3:
        return False
    uneven, alike = (float(gaps.std() / gaps.mean()) for gaps in (np.diff(numbers), np.diff(np.log(numbers))))
    return alike < uneven


def ticks(numbers: Floats) -> Sequence[float]:
    """The numbers of an axis that are written: each, or every second, third, ... one, as there is room."""
    letters = sum(len(f"{number:.4g} ") for number in numbers)
    chosen: list[float] = numbers[:: -(-letters // MOST_LETTERS)].tolist()
    return chosen


def _panel(
    table: SweepTable,
    places: Places,
    view: View,
    what: Quantity,
    rows: Sequence[Ints],
    names: Sequence[str],
    limit: float | None,
) -> Panel:
    means = places.means(table.metrics[what.metric])
    shown = np.concatenate([means.mean[own] for own in rows])
    known = shown[np.isfinite(shown)]
    most = float(known.max(initial=0.0))
    scale = what.scale(most)
    at = next((i for i, axis in enumerate(places.axes) if axis is view.x), None)
    marks: list[Mark] = []
    for index, (name, own) in enumerate(zip(names, rows, strict=True)):
        x = positions(view.x, places.codes[own, at] if at is not None else np.zeros(len(own), dtype=np.int64))
        y, style = means.mean[own] / scale.size, series(index)
        sure = np.isfinite(means.half[own])
        low, high = (ends[own][sure] / scale.size for ends in (means.low, means.high))
        marks += [Whiskers("", x[sure], low, high, style), Line(name, x, y, style), Points(name, x, y, style)]
    numbers = view.x.numbers if view.x else None
    panel = Panel(
        marks,
        view.x.name if view.x else "",
        scale.name,
        title=what.label,
        categories=() if numbers is not None or view.x is None else view.x.labels,
        x_log=numbers is not None and log_spaced(numbers),
        x_ticks=() if numbers is None else ticks(numbers),
        y_log=spread([known]),
    )
    return slo.across(panel, limit, most, scale.size, level=True)
