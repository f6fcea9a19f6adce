"""Helpers that the figures share: columns as numbers, how long a step's numbers hold, drawing over time, and the
service level (SLO) in latency figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.statistics.thin import Binned, binned, filled
from cbsim.draw.chart import BLACK, Area, Columns, Edge, Floats, Level, Line, Mark, Panel, Style, Unit, column
from cbsim.metrics.terminal import lookup, shown
from cbsim.record.columns import NS

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
    rows: npt.NDArray[np.bool_]

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


def over_time(start: Floats, end: Floats, values: Iterable[Floats], time: Unit) -> list[Binned]:
    """Return each of the values, which hold from `start` to `end` (s), binned over time in a unit, to be drawn."""
    parts = [binned(*filled(start, end, y)) for y in values]
    return [part._replace(x=part.x / time.seconds) for part in parts]


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
        return replace(panel, title=f"{panel.title} (SLO {shown(limit, 's')}, beyond the edge)")
    mark = (Level if level else Edge)("SLO", limit / seconds, SLO_STYLE)
    return replace(panel, marks=[*panel.marks, mark])
