"""A metric over two axes of a sweep, as coloured cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from analysis.figures.axis import spread
from analysis.statistics.places import Places, held
from analysis.statistics.quantity import Quantity, quantity
from analysis.statistics.sweep_table import Axis, SweepTable
from analysis.statistics.view import longest, middle
from cbsim.draw.chart import BLACK, RED, Cells, Chart, Floats, Mark, Panel, Points, Style
from cbsim.results.checks import Check

MOST_PANELS, MOST_WRITTEN = 4, 14  # panels of a figure; columns whose cells have their number written in
LETTERS, MOST_ROWS = 60, 24  # that are written below a panel, and beside it
CORNER = 0.37  # of a cell, from its middle


def heat_map(table: SweepTable, places: Places, metric: str, limit: Check | None) -> Chart | None:
    """The two longest axes, a panel for each value of a third one of few; None if there are no two axes.

    Cells that miss the limit have a cross.
    """
    if len(places.axes) < 2:
        return None
    x = longest(places.axes)
    y = longest([axis for axis in places.axes if axis is not x])
    others = [axis for axis in places.axes if axis is not x and axis is not y]
    facet = next((axis for axis in others[::-1] if len(axis) <= MOST_PANELS), None)
    fixed = {axis.name: middle(axis) for axis in others if axis is not facet}
    what, mean = quantity(metric), places.means(table.metrics[metric]).mean
    titles = [facet.said(code) for code in range(len(facet))] if facet else [""]
    cells = [_cells(places, mean, x, y, fixed | ({facet.name: code} if facet else {})) for code in range(len(titles))]
    known = np.concatenate([values[np.isfinite(values)] for values in cells])
    if not len(known):
        return None
    panels = [_panel(what, values, known, (x, y), limit, title) for values, title in zip(cells, titles, strict=True)]
    told = ", ".join(f"{axis.name} = {axis.labels[fixed[axis.name]]}" for axis in others if axis.name in fixed)
    says = "Means of replicates. A cell without a number has no point that is done."
    says += f" Of the others: {told}." if told else ""
    says += f" Crossed: misses {limit.text}." if limit else ""
    scale = what.scale(float(known.max())).name
    title = f"{table.name}: {what.label}{f' ({scale})' if scale else ''}"
    return Chart("heat_map", title, says, panels, columns=min(2, len(panels)))


def _cells(places: Places, mean: Floats, x: Axis, y: Axis, fixed: dict[str, int]) -> Floats:
    """The means of the places that are fixed so: a row a value of y, a column a value of x."""
    at = {axis.name: number for number, axis in enumerate(places.axes)}
    chosen = np.ones(len(places), dtype=bool)
    for name, code in fixed.items():
        chosen &= places.codes[:, at[name]] == code
    values = np.full((len(y), len(x)), np.nan)
    values[places.codes[chosen, at[y.name]], places.codes[chosen, at[x.name]]] = mean[chosen]
    return values


def _panel(
    what: Quantity, values: Floats, known: Floats, axes: tuple[Axis, Axis], limit: Check | None, title: str
) -> Panel:
    """`known` are the values of all panels, which have one scale of colours. Numbers on y rise upwards."""
    (x, y), scale = axes, what.scale(float(known.max()))
    order = list(range(len(y)))[:: 1 if y.numbers is None else -1]
    values, rows = values[order], [y.labels[place] for place in order]
    texts = [
        [f"{x.name} = {a}, {y.name} = {b}: {what.text(value)}" for a, value in zip(x.labels, row, strict=True)]
        for b, row in zip(rows, values.tolist(), strict=True)
    ]
    room = LETTERS // (max(map(len, x.labels)) + 2)
    labels = _written(values / scale.size) if len(x) <= MOST_WRITTEN else ()
    low, high = float(known.min()) / scale.size, float(known.max()) / scale.size
    cells = Cells("", values / scale.size, low, high, Style(BLACK), texts, labels, scale.name, log=spread([known]))
    marks: list[Mark] = [cells]
    if limit is not None:
        missed = np.argwhere(np.isfinite(values) & ~held(limit, values)).astype(np.float64)
        cross = Style(RED, "solid", "cross")
        marks.append(Points("misses the SLO", missed[:, 1] + CORNER, missed[:, 0] - CORNER + 0.1, cross))
    return Panel(marks, x.name, y.short, title=title, rows=_some(rows, MOST_ROWS), categories=_some(x.labels, room))


def _some(labels: Sequence[str], room: int) -> list[str]:
    """Labels that have room: each, or every second, third, ... one; the others are empty."""
    every = -(-len(labels) // max(room, 1))
    return [label if place % every == 0 else "" for place, label in enumerate(labels)]


def _written(values: Floats) -> Sequence[Sequence[str]]:
    return [[_number(value) for value in row] for row in values.tolist()]


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
