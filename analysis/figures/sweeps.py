"""Figures of a sweep's table: metrics along an axis, a metric over two axes, two metrics against each other. All show
means of replicates with their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.figures import axis
from analysis.figures.axis import spread
from analysis.figures.side_by_side import frontier
from analysis.statistics import sweep_table
from analysis.statistics.labels import shortened
from analysis.statistics.sweep_table import MOST_ALONG, Axis, Means, Places, SweepTable, View
from cbsim.draw import chart
from cbsim.draw.chart import Cells, Chart, Floats, Line, Mark, Panel, Points, Style, Unit, Whiskers, scale_of, series
from cbsim.metrics import catalogue
from cbsim.metrics.catalogue import Metric
from cbsim.metrics.checks import Check
from cbsim.record.tables import Ints, Mask

FAR = 8  # the least ratio of an axis's last number to its first for a logarithmic axis
MOST_LETTERS = 36  # characters of the numbers written along an axis


def curves(table: SweepTable, places: Places, view: View, metrics: Sequence[str], limits: Mapping[str, float]) -> Chart:
    """Draw a panel a metric, a style a series, with lines along numbers, and limits (in the metric's unit) across."""
    rows = view.rows(places)
    names = shortened([places.label(int(own[0]), view.series) or table.name for own in rows])
    series = dict(zip(names, rows, strict=True))
    panels = [_panel(table, places, view, catalogue.metric(name), series, limits.get(name)) for name in metrics]
    title = (f"{table.name}: over {view.x.name}" if view.x else table.name) + sweep_table.part(places, view.fixed)
    caption = averaged(places) + (" Dashed: the limit (SLO)." if limits else "")
    caption += " Points are numbered as in the table." if view.x and view.x.numbered else ""
    return Chart("curves", title, caption, panels, columns=2)


def averaged(places: Places) -> str:
    """Return what the numbers of the places are: means with intervals, or single runs, which have none."""
    if not np.bincount(places.of).max(initial=0) > 1:
        return "One run a place: there are no intervals."
    return "Means of the replicates of a place, with 95 % intervals (Student's t) where there are two or more."


def log_spaced(numbers: Floats) -> bool:
    """Whether rising numbers are better drawn at the distances of their logarithms: they are all positive and wide
    apart, and their ratios are more alike than their differences.
    """
    if numbers[0] <= 0 or numbers[-1] < FAR * numbers[0] or len(numbers) < 3:
        return False
    uneven, alike = (float(gaps.std() / gaps.mean()) for gaps in (np.diff(numbers), np.diff(np.log(numbers))))
    return alike < uneven


def ticks(x: Axis, numbers: Floats) -> tuple[Sequence[float], Sequence[str]]:
    """Return the numbers that are written on an axis, and how: each, or every second, third, ... one, as space is."""
    several = len(x.fields) > 1
    names = shortened(x.labels, MOST_ALONG) if several else [f"{number:.4g}" for number in numbers]
    every = -(-sum(len(name) + 1 for name in names) // (LETTERS if several else MOST_LETTERS))
    return numbers[::every].tolist(), names[::every]


def _panel(
    table: SweepTable, places: Places, view: View, metric: Metric, series_rows: Mapping[str, Ints], limit: float | None
) -> Panel:
    means = places.means(table.metrics[metric.name])
    shown = means.mean[np.concatenate(list(series_rows.values()))]
    known = shown[np.isfinite(shown)]
    most = float(known.max(initial=0.0))
    scale = scale_of(metric.unit, most)
    marks: list[Mark] = []
    numbers = view.x.numbers if view.x else None
    codes = places.codes[:, places.axes.index(view.x)] if view.x else np.arange(len(places))
    positions: Floats = codes.astype(np.float64) if numbers is None else numbers[codes]
    for index, (name, rows) in enumerate(series_rows.items()):
        x, y, style = positions[rows], means.mean[rows] / scale.size, series(index)
        sure = np.isfinite(means.half[rows])
        low, high = (ends[rows][sure] / scale.size for ends in (means.low, means.high))
        line = [] if numbers is None else [Line(name, x, y, style)]  # there is no way between names
        marks += [Whiskers("", x[sure], low, high, style), *line, Points(name, x, y, style)]
    x_name, labels = (view.x.name, _along(view.x)) if view.x else ("", [""] * len(places))
    panel = Panel(marks, x_name, scale.name, title=metric.label, y_log=spread([known]), categories=labels)
    if view.x and numbers is not None:
        at, names = ticks(view.x, numbers)
        panel = panel._replace(x_log=log_spaced(numbers), x_ticks=at, categories=names)
    return axis.with_slo(panel, limit, most, scale.size, level=True)


MOST_PANELS, MOST_WRITTEN = 4, 14  # panels of a figure; columns whose cells have their number written in
LETTERS, MOST_ROWS = 60, 24  # characters written below a panel, and rows beside it
CORNER = 0.37  # offset of a cell's cross from its middle, as a share of the cell


def heat_map(table: SweepTable, places: Places, metric: str, limit: Check | None) -> Chart | None:
    """Draw the two longest axes, a panel for each value of a third, short one; None if there are no two axes.

    Cells that miss the limit have a cross.
    """
    pair = sweep_table.ranked(places.axes)[:2]
    if len(pair) < 2:
        return None
    rest = [axis for axis in places.axes if axis not in pair]
    facet = next((axis for axis in rest[::-1] if len(axis) <= MOST_PANELS), None)
    fixed = {axis.name: sweep_table.middle(axis) for axis in rest if axis is not facet}
    facets = {value: {facet.name: code} for code, value in enumerate(facet.values)} if facet else {"": {}}
    what, mean = catalogue.metric(metric), places.means(table.metrics[metric]).mean
    cells = {title: _cells(places, mean, pair, fixed | codes) for title, codes in facets.items()}
    known = np.concatenate([values[np.isfinite(values)] for values in cells.values()])
    if not len(known):
        return None
    panels = [_cell_panel(what, values, known, pair, limit, title) for title, values in cells.items()]
    caption = "Means of replicates. A cell without a number has no point that is done."
    caption += f" Crossed: misses {limit.rule}." if limit else ""
    title = f"{table.name}: {_named(what, scale_of(what.unit, float(known.max())))}"
    return Chart("heat_map", title + sweep_table.part(places, fixed), caption, panels, columns=min(2, len(panels)))


def _cells(places: Places, mean: Floats, axes: Sequence[Axis], fixed: Mapping[str, int]) -> Floats:
    """Return the means of the places with these fixed values: a row a value of y, a column a value of x."""
    chosen = sweep_table.places_at(places, fixed)
    column, row = (places.codes[chosen, places.axes.index(axis)] for axis in axes)
    values = np.full((len(axes[1]), len(axes[0])), np.nan)
    values[row, column] = mean[chosen]
    return values


def _cell_panel(
    what: Metric, values: Floats, known: Floats, axes: Sequence[Axis], limit: Check | None, title: str
) -> Panel:
    """Return a panel of cells. `known` are all panels' values, for one colour scale. Numbers on y rise upwards."""
    (x, y), scale = axes, scale_of(what.unit, float(known.max()))
    order = list(range(len(y)))[:: 1 if y.numbers is None else -1]
    values, names, columns = values[order], shortened(y.labels), shortened(x.written, MOST_ALONG)
    rows = [names[code] for code in order]
    texts = []
    for b, row in zip(rows, values.tolist(), strict=True):
        cells = zip(x.labels, row, strict=True)
        texts.append([f"{x.name} = {a}, {y.name} = {b}: {what.shown(value)}" for a, value in cells])
    room = LETTERS // (max(map(len, columns)) + 2)
    labels = [list(map(_number, row)) for row in (values / scale.size).tolist()] if len(x) <= MOST_WRITTEN else ()
    low, high, style = float(known.min()) / scale.size, float(known.max()) / scale.size, Style(chart.BLACK)
    log = spread([known])
    marks: list[Mark] = [Cells("", values / scale.size, low, high, style, texts, labels, scale.name, log)]
    if limit is not None:
        missed = np.argwhere(np.isfinite(values) & ~sweep_table.meet(limit, values)).astype(np.float64)
        cross = Style(chart.RED, "solid", "cross")
        marks.append(Points("misses the SLO", missed[:, 1] + CORNER, missed[:, 0] - CORNER + 0.1, cross))
    return Panel(marks, x.name, y.short, title=title, rows=_some(rows, MOST_ROWS), categories=_some(columns, room))


def _along(x: Axis) -> Sequence[str]:
    """Return what is written along an axis of names: of numbered points as many as fit."""
    labels = shortened(x.written, LETTERS // len(x) if x.long else MOST_ALONG)
    return _some(labels, LETTERS // (max(map(len, labels)) + 2)) if x.numbered else labels


def _some(labels: Sequence[str], room: int) -> list[str]:
    """Return the labels that fit: each, or every second, third, ... one; the rest is empty."""
    every = -(-len(labels) // max(room, 1))
    return [label if at % every == 0 else "" for at, label in enumerate(labels)]


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


MOST_LABELLED = 24  # places; labels of more would overlap
MOST_WHISKERS = 60  # places; of more only the best ones' intervals are drawn
PALE = 0.7  # share of white in the colour of dominated places
MISSED = Style("#BBBBBB", "solid", "cross")
Scales = Sequence[Unit]


@dataclass(frozen=True, slots=True)
class TradeOff:
    """A comparison of places by two metrics. `best` are those that no other one dominates in the means, by rising x;
    `dominated` are those that another one dominates with intervals apart. Only places that meet every limit count, and
    none does if a metric has no direction. `good` are those that meet every limit and are not dominated.
    """

    x: Means
    y: Means
    known: Mask
    met: Mask
    best: Ints
    dominated: Mask
    good: Mask


def trade_off(table: SweepTable, places: Places, metrics: tuple[str, str], limits: Sequence[Check]) -> TradeOff:
    """Determine which places are not dominated."""
    x, y = (places.means(table.metrics[metric]) for metric in metrics)
    up = [catalogue.metric(metric).sign for metric in metrics]
    met = meets(table, places, limits)
    known = np.isfinite(x.mean) & np.isfinite(y.mean)
    counted = np.flatnonzero(known & met & all(up))
    best = counted[frontier(up[0] * x.mean[counted], up[1] * y.mean[counted])]
    dominated = _dominated((x, y), up, counted)
    return TradeOff(x, y, known, met, best[np.argsort(x.mean[best])], dominated, known & met & ~dominated)


def meets(table: SweepTable, places: Places, limits: Sequence[Check]) -> Mask:
    """Return which places meet every limit, in the mean of their replicates."""
    met = np.ones(len(places), dtype=bool)
    for limit in limits:
        met &= sweep_table.meet(limit, places.means(table.metrics[limit.metric]).mean)
    return met


def _dominated(means: tuple[Means, Means], up: Sequence[float], counted: Ints) -> Mask:
    """Mark, among all places, the counted ones whose better ends are worse than another counted one's worse ends."""
    ends = [(m.low, m.high) if sign > 0 else (-m.high, -m.low) for m, sign in zip(means, up, strict=True)]
    worse, better = zip(*ends, strict=True)
    front = counted[frontier(worse[0][counted], worse[1][counted])]  # the others dominate no further place
    dominated = np.zeros(len(means[0].mean), dtype=bool)
    for at in front:
        dominated[counted] |= (worse[0][at] > better[0][counted]) & (worse[1][at] > better[1][counted])
    return dominated


def pareto(table: SweepTable, places: Places, metrics: tuple[str, str], limits: Sequence[Check]) -> Chart:
    """Draw a marker a place, a style for each combination of names; places dominated with intervals apart are pale."""
    compared = trade_off(table, places, metrics, limits)
    across, up = (catalogue.metric(metric) for metric in metrics)
    means = ((across, compared.x.mean), (up, compared.y.mean))
    scales = [scale_of(what.unit, float(mean[compared.known].max(initial=0.0))) for what, mean in means]
    coloured = sweep_table.split([axis for axis in places.axes if axis.numbers is None])[0]
    beside = _beside(compared, places, coloured)
    marks: list[Mark] = [Line("not dominated", *_at(compared, compared.best, scales), Style(chart.GREY))]
    _, first, of = np.unique(places.codes[:, places.columns(coloured)], axis=0, return_index=True, return_inverse=True)
    names = shortened([places.label(at, coloured) or table.name for at in first.tolist()])
    for index, name in enumerate(names):
        own = (of.reshape(-1) == index) & compared.known
        marks += _markers(compared, places, name, own, scales, series(index), beside)
    out = compared.known & ~compared.met
    if out.any():
        marks.insert(0, Points("misses the SLO", *_at(compared, out, scales), MISSED))
    caption = f"{_better(across, up)} A marker a place. {averaged(places)}"
    caption += f" Beside a marker: its {beside.name}." if beside else ""
    caption += f" Limits (SLO): {', '.join(limit.rule for limit in limits)}." if limits else ""
    x, y = (_named(what, scale) for what, scale in zip((across, up), scales, strict=True))
    return Chart("pareto", f"{table.name}: {up.label} against {across.label}", caption, [Panel(marks, x, y, tall=True)])


def _better(across: Metric, up: Metric) -> str:
    """Return the caption's sentences on the good corner and the marks, or on a metric without a direction."""
    if not (across.sign and up.sign):
        neutral = " and ".join(what.label for what in (across, up) if not what.sign)
        return f"Neither more nor less is better of {neutral}: no place is best."
    sides = "right" if across.sign > 0 else "left", "up" if up.sign > 0 else "down"
    marked = "The line joins the places that no other one dominates; pale ones are dominated: another one is better"
    return f"Better is {sides[0]} and {sides[1]}. {marked} in both by its interval, or its run where it has only one."


def _named(what: Metric, scale: Unit) -> str:
    return f"{what.label} ({scale.name})" if scale.name else what.label


def _at(compared: TradeOff, chosen: Mask | Ints, scales: Sequence[Unit]) -> tuple[Floats, Floats]:
    return compared.x.mean[chosen] / scales[0].size, compared.y.mean[chosen] / scales[1].size


def _beside(compared: TradeOff, places: Places, coloured: Sequence[Axis]) -> Axis | None:
    """Return the axis whose values stand beside markers: the only one that colours do not tell, if places are few."""
    rest = [axis for axis in places.axes if axis not in coloured]
    return rest[0] if len(rest) == 1 and compared.good.sum() <= MOST_LABELLED else None


def _markers(
    compared: TradeOff, places: Places, name: str, own: Mask, scales: Scales, style: Style, beside: Axis | None
) -> list[Mark]:
    good, pale = own & compared.good, own & compared.dominated
    labels = [beside.written[code] for code in places.codes[good, places.axes.index(beside)]] if beside else ()
    x, y = _at(compared, good, scales)
    sure = good.copy()
    if compared.good.sum() > MOST_WHISKERS:
        sure &= np.isin(np.arange(len(good)), compared.best)
    wide, high = (np.isfinite(means.half) & sure for means in (compared.x, compared.y))
    mixed = (round(part + (255 - part) * PALE) for part in style.rgb)  # with white
    faint = style._replace(colour="#" + "".join(f"{part:02X}" for part in mixed))
    return [
        Points("" if good.any() else name, *_at(compared, pale, scales), faint),
        Whiskers("", *_reach(compared.y, compared.x, wide, scales[::-1]), style, level=True),
        Whiskers("", *_reach(compared.x, compared.y, high, scales), style),
        Points(name, x, y, style, labels=labels),
    ]


def _reach(at: Means, of: Means, chosen: Mask, scales: Sequence[Unit]) -> tuple[Floats, Floats, Floats]:
    return at.mean[chosen] / scales[0].size, of.low[chosen] / scales[1].size, of.high[chosen] / scales[1].size
