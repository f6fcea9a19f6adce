"""Two metrics of a sweep against each other: what no place beats in both, and what may be as good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.figures.cost import frontier
from analysis.statistics.places import Bools, Means, Places, held
from analysis.statistics.quantity import Quantity, Scale, quantity
from analysis.statistics.sweep_table import Axis, SweepTable
from analysis.statistics.thin import Ints
from analysis.statistics.view import split
from cbsim.draw.chart import GREY, Chart, Floats, Line, Mark, Panel, Points, Style, Whiskers, series
from cbsim.results.checks import Check

MOST_LABELLED = 24  # places; labels of more would overlap
MOST_WHISKERS = 60  # places with their intervals
PALE = 0.7  # of white in the colour of what is beaten
MISSED = Style("#BBBBBB", "solid", "cross")


@dataclass(frozen=True, slots=True)
class TradeOff:
    """Places against two metrics. `best` are those that no other one beats in both means, by rising x; `beaten` are
    those that another one beats in both for sure: the intervals are apart. Only those that meet every limit count.
    """

    x: Means
    y: Means
    known: Bools
    met: Bools
    best: Ints
    beaten: Bools


def trade_off(table: SweepTable, places: Places, metrics: tuple[str, str], limits: Sequence[Check]) -> TradeOff:
    """Which places are not beaten in both metrics."""
    x, y = (places.means(table.metrics[metric]) for metric in metrics)
    up = [1.0 if quantity(metric).more_is_better else -1.0 for metric in metrics]
    met = meets(table, places, limits)
    known = np.isfinite(x.mean) & np.isfinite(y.mean)
    counted = np.flatnonzero(known & met)
    best = counted[frontier(up[0] * x.mean[counted], up[1] * y.mean[counted])]
    return TradeOff(x, y, known, met, best[np.argsort(x.mean[best])], _beaten((x, y), up, counted))


def meets(table: SweepTable, places: Places, limits: Sequence[Check]) -> Bools:
    """Which places meet every limit, in the mean of their replicates."""
    met = np.ones(len(places), dtype=bool)
    for limit in limits:
        met &= held(limit, places.means(table.metrics[limit.metric]).mean)
    return met


def _beaten(means: tuple[Means, Means], up: Sequence[float], counted: Ints) -> Bools:
    """Of all places, those of the counted ones whose better ends another counted one's worse ends are beyond."""
    ends = [(m.low, m.high) if sign > 0 else (-m.high, -m.low) for m, sign in zip(means, up, strict=True)]
    worse, better = zip(*ends, strict=True)
    front = counted[frontier(worse[0][counted], worse[1][counted])]  # no other one beats more for sure
    beaten = np.zeros(len(means[0].mean), dtype=bool)
    for place in front:
        beaten[counted] |= (worse[0][place] > better[0][counted]) & (worse[1][place] > better[1][counted])
    return beaten


def pareto(table: SweepTable, places: Places, metrics: tuple[str, str], limits: Sequence[Check]) -> Chart:
    """A marker a place, a style for the values of names together, places beaten for sure pale."""
    found = trade_off(table, places, metrics, limits)
    across, up = (quantity(metric) for metric in metrics)
    scales = tuple(
        what.scale(float(means.mean[found.known].max(initial=0.0)))
        for what, means in ((across, found.x), (up, found.y))
    )
    coloured = split([axis for axis in places.axes if axis.numbers is None])[0]
    marks: list[Mark] = [_line(found, scales)]
    for index, (name, own) in enumerate(_groups(places, coloured)):
        marks += _markers(found, places, (name or table.name, own & found.known), scales, series(index), coloured)
    out = found.known & ~found.met
    if out.any():
        marks.insert(0, Points("misses the SLO", *_at(found, out, scales), MISSED))
    sides = "right" if across.more_is_better else "left", "up" if up.more_is_better else "down"
    says = f"Better is {sides[0]} and {sides[1]}. A marker a place, with 95 % intervals. The line joins the places that"
    says += " no other one beats in both; pale ones are beaten for sure: the intervals of another one lie beyond."
    says += f" Limits (SLO): {', '.join(limit.text for limit in limits)}." if limits else ""
    names = [_named(what, scale) for what, scale in zip((across, up), scales, strict=True)]
    panel = Panel(marks, names[0], names[1], tall=True)
    return Chart("pareto", f"{table.name}: {up.label} against {across.label}", says, [panel])


def _named(what: Quantity, scale: Scale) -> str:
    return f"{what.label} ({scale.name})" if scale.name else what.label


def _groups(places: Places, axes: Sequence[Axis]) -> list[tuple[str, Bools]]:
    """The places by what these axes set."""
    own = [at for at, axis in enumerate(places.axes) if any(axis is other for other in axes)]
    keys, first, of = np.unique(places.codes[:, own], axis=0, return_index=True, return_inverse=True)
    return [(places.said(int(first[i]), axes), of.reshape(-1) == i) for i in range(len(keys))]


def _at(found: TradeOff, chosen: Bools | Ints, scales: Sequence[Scale]) -> tuple[Floats, Floats]:
    return found.x.mean[chosen] / scales[0].size, found.y.mean[chosen] / scales[1].size


def _line(found: TradeOff, scales: Sequence[Scale]) -> Mark:
    return Line("not beaten in both", *_at(found, found.best, scales), Style(GREY))


def _markers(
    found: TradeOff,
    places: Places,
    group: tuple[str, Bools],
    scales: Sequence[Scale],
    style: Style,
    coloured: Sequence[Axis],
) -> list[Mark]:
    name, own = group
    good, pale = own & found.met & ~found.beaten, own & found.beaten
    others = [axis for axis in places.axes if not any(axis is other for other in coloured)]
    few = len(places) <= MOST_LABELLED and len(others) == 1
    labels = [places.said(int(place), others).rpartition(" = ")[2] for place in np.flatnonzero(good)] if few else ()
    x, y = _at(found, good, scales)
    sure = _uncertain(found)
    wide, high = np.isfinite(found.x.half) & good & sure, np.isfinite(found.y.half) & good & sure
    faint = style._replace(colour=_mixed(style.colour))
    return [
        Points("", *_at(found, pale, scales), faint),
        Whiskers("", *_reach(found.y, found.x, wide, scales[::-1]), style, level=True),
        Whiskers("", *_reach(found.x, found.y, high, scales), style),
        Points(name, x, y, style, labels=labels),
    ]


def _uncertain(found: TradeOff) -> Bools:
    """The places whose intervals are drawn: if they are many, only the best ones'."""
    shown = found.known & found.met & ~found.beaten
    if int(shown.sum()) <= MOST_WHISKERS:
        return shown
    best = np.zeros(len(shown), dtype=bool)
    best[found.best] = True
    return best


def _reach(at: Means, of: Means, chosen: Bools, scales: Sequence[Scale]) -> tuple[Floats, Floats, Floats]:
    return at.mean[chosen] / scales[0].size, of.low[chosen] / scales[1].size, of.high[chosen] / scales[1].size


def _mixed(colour: str) -> str:
    """A colour with white in it."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * PALE):02X}" for part in parts)
