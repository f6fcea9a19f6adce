"""Helpers that the figures share: columns as numbers, how long a step's numbers hold, drawing over time, and the
service level (SLO) in latency figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import BLACK, Area, Columns, Edge, Floats, Level, Line, Mark, Panel, Style, Unit, column
from cbsim.metrics.terminal import lookup, shown
from cbsim.record.columns import NS
from cbsim.record.tables import Ints, Mask

Frames = Mapping[str, Columns]
DECADES = 100.0  # a range of more than this factor is drawn on a log axis


def seconds(frame: Any, name: str) -> Floats:
    """Return a column of nanoseconds, in seconds."""
    return column(frame, name) / NS


def longest(frames: Frames, name: str = "update_end_ns") -> float:
    """Return the greatest time of a column in all frames, in seconds; 0 if there is none."""
    return max((int(frame[name].max()) / NS for frame in frames.values() if len(frame)), default=0.0)


def spread(values: Iterable[Floats]) -> bool:
    """Whether all these values, together, need a log axis."""
    parts = [part for part in values if len(part)]
    low, high = min((part.min() for part in parts), default=0.0), max((part.max() for part in parts), default=0.0)
    return bool(low > 0 and high / low > DECADES)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A selection of a table's rows, column by column."""

    table: Columns
    rows: Mask

    def __getitem__(self, name: str) -> Any:
        return np.asarray(self.table[name])[self.rows]

    def __len__(self) -> int:
        return int(self.rows.sum())


def ran(steps: Columns) -> Columns:
    """Return the steps with rows."""
    busy = np.asarray(steps["rows"]) > 0
    return steps if busy.all() else Chosen(steps, busy)


def valid(steps: Columns) -> tuple[Floats, Floats]:
    """Return from when to when (s) a step's numbers hold: to the next one's planning; the last one's to its end.

    The rule is that of `cbsim.metrics.metrics`, but a sync loop with requests left is not idle between two steps.
    """
    start, end = seconds(steps, "schedule_start_ns"), seconds(steps, "update_end_ns")
    following = np.append(start[1:], end[-1:])
    left = column(steps, "running") + column(steps, "waiting") > column(steps, "finished")
    alone = start >= np.append(start[:1], end[:-1])
    return start, np.where(left & alone, following, np.minimum(following, end))


def bubbles(steps: Columns) -> Floats:
    """Return the seconds that the compute lane idles before each step, less the time without requests."""
    begin, planned = seconds(steps, "compute_start_ns"), seconds(steps, "schedule_start_ns")
    before = np.append(planned[:1], seconds(steps, "compute_end_ns")[:-1])
    nothing = planned - np.append(planned[:1], valid(steps)[1][:-1])
    idle: Floats = np.maximum(begin - before - np.maximum(nothing, 0.0), 0.0)
    return idle


# -- thinning of what is drawn, never of statistics: a million steps become a few hundred representative points -------


class Binned(NamedTuple):
    """A series of values over time to draw: entry i holds from x[i] to x[i + 1], the last one repeats the one before.

    `exact`: whether every value is included, so that mean, low and high are the same.
    """

    x: Floats
    mean: Floats
    low: Floats
    high: Floats
    exact: bool


def filled(start: Floats, end: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return values that hold from start to end, ascending and disjoint, as (edges, values): 0 where none holds.

    There is one edge more than there are values; values that hold for no time are left out.
    """
    lasting = end > start
    if not lasting.all():
        start, end, y = start[lasting], end[lasting], y[lasting]
    gaps = np.flatnonzero(end[:-1] < start[1:]) + 1
    edges = np.append(np.insert(start, gaps, end[gaps - 1]) if len(gaps) else start, end[-1:])
    return edges, np.insert(y, gaps, 0.0) if len(gaps) else y


def binned(edges: Floats, y: Floats, bins: int = 800) -> Binned:
    """Bin `y`: mean over time, least, greatest in bins of equal width; y[i] holds from edges[i] to edges[i + 1].

    Means times widths add up to the integral of `y`. With no more values than bins nothing is thinned.
    """
    if len(y) <= bins:
        drawn = np.append(y, y[-1:])
        return Binned(edges, drawn, drawn, drawn, exact=True)
    cuts = np.linspace(edges[0], edges[-1], bins + 1)
    mean = np.diff(np.interp(cuts, edges, np.append(0.0, np.cumsum(y * np.diff(edges))))) / np.diff(cuts)
    first = np.searchsorted(edges, cuts[:-1], side="right") - 1
    beyond = np.searchsorted(edges, cuts[1:], side="left")
    ranges = np.stack([first, beyond], axis=1).ravel()
    padded = np.append(y, y[-1])  # reduceat requires every index to exist
    low, high = np.minimum.reduceat(padded, ranges)[::2], np.maximum.reduceat(padded, ranges)[::2]
    mean = np.clip(mean, low, high)  # sums are rounded
    mean, low, high = (np.append(part, part[-1]) for part in (mean, low, high))
    return Binned(cuts, mean, low, high, exact=False)


def chosen(n: int, most: int) -> Ints:
    """Return at most `most` (>= 2) of the indices 0 ... n - 1, evenly spaced, both ends among them, none twice."""
    indices: Ints = np.linspace(0, n - 1, min(n, most)).round().astype(np.int64)
    return indices


MOST_POINTS = 1000  # of a distribution


def cdf(values: Floats, counts: Ints | None = None, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Return (x, share of values <= x), each value occurring `counts` times: at most `most` points, all exact.

    They are evenly spaced in share; least and greatest value are among them.
    """
    counts = np.ones(len(values), dtype=np.int64) if counts is None else counts
    order = np.argsort(values)
    x, upto = values[order], np.cumsum(counts[order])
    last = np.append(x[1:] != x[:-1], True)[: len(x)]  # of equal values the last one counts them all
    x, upto = x[last], upto[last]
    if len(x) > most:
        shown = np.unique(np.searchsorted(upto, np.linspace(upto[0], upto[-1], most)))
        x, upto = x[shown], upto[shown]
    return x, upto / upto[-1:]


def cdf_line(name: str, values: Floats, counts: Ints | None, scale: Unit, style: Style) -> Line:
    """Return the line of `cdf`, from 0 at the least value on."""
    x, share = cdf(values, counts)
    return Line(name, np.append(x[:1], x) / scale.size, np.append(0.0, share), style, step=True)


def over_time(start: Floats, end: Floats, values: Iterable[Floats], time: Unit) -> list[Binned]:
    """Return each of the values, which hold from `start` to `end` (s), binned over time in a unit, to be drawn."""
    parts = [binned(*filled(start, end, y)) for y in values]
    return [part._replace(x=part.x / time.size) for part in parts]


def band(name: str, drawn: Binned, style: Style, *, shade: bool = True) -> list[Mark]:
    """Return the mean as a line and, if it was thinned, the range behind it."""
    line = Line(name, drawn.x, drawn.mean, style, step=True)
    if drawn.exact or not shade:
        return [line]
    return [Area(f"{name}: range", drawn.x, drawn.low, drawn.high, style, step=True), line]


def stack(parts: Sequence[tuple[str, Style, Binned]]) -> list[Mark]:
    """Return the means stacked; all parts have the same x."""
    marks: list[Mark] = []
    low = np.zeros(len(parts[0][2].x))
    for name, style, drawn in parts:
        marks.append(Area(name, drawn.x, low, low + drawn.mean, style, step=True))
        low = low + drawn.mean
    return marks


def thinned(drawn: Iterable[Binned], shaded: str = "the range is shaded") -> str:
    """Return a caption's sentence on thinning; "" if nothing was thinned."""
    bins = [len(mark.x) - 1 for mark in drawn if not mark.exact]
    return f" Thinned for drawing to means over time of {bins[0]} bins; {shaded}." if bins else ""


SLO_KEYS = ("ttft_s", "tpot_s", "e2e_s")
SLO_NEAR = 2.0  # a limit farther than this factor from all values would make them unreadable, and is stated in words
SLO_STYLE = Style(BLACK, "dashed")


def slo_limits(scenarios: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the limits (s) that all these scenarios have in common, by metric."""
    common = {key: {lookup(scenario, f"slo.{key}") for scenario in scenarios} for key in SLO_KEYS}
    return {key: float(next(iter(values))) for key, values in common.items() if len(values) == 1 and None not in values}


def with_slo(panel: Panel, limit: float | None, most: float, seconds: float, *, level: bool = False) -> Panel:
    """Add a limit (s) to a panel as an edge, or as a `level`. `most` (s) is its greatest value, `seconds` its unit."""
    if limit is None or not most:
        return panel
    if limit > SLO_NEAR * most:
        return panel._replace(title=f"{panel.title} (SLO {shown(limit, 's')}, beyond the edge)")
    mark = (Level if level else Edge)("SLO", limit / seconds, SLO_STYLE)
    return panel._replace(marks=[*panel.marks, mark])
