"""Where a server ceases to hold its conditions: each one's metric over the load, and between which loads that is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.figures.axis import spread
from analysis.statistics.capacity import FAILS, HOLDS, UNDECIDED, Capacity, Probe
from analysis.statistics.quantity import quantity
from cbsim.draw.chart import (
    BLACK,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Area,
    Chart,
    Floats,
    Level,
    Line,
    Mark,
    Panel,
    Points,
    Style,
    Whiskers,
)
from cbsim.results.checks import Check
from cbsim.results.terminal import shown

LOOKS = {
    HOLDS: Style(GREEN, "solid", "circle"),
    FAILS: Style(RED, "solid", "cross"),
    UNDECIDED: Style(ORANGE, "solid", "diamond"),
}
FAR = 8  # from the least load to the greatest, as a factor: a logarithmic axis
AROUND = 1.1  # the capacity, as a factor, or three times as far as its ends are apart: what the second panel shows
ROOM = 1.08  # above the highest mark


def chart(found: Capacity) -> Chart:
    """A line of panels a condition: all loads, and if it is known those near the capacity."""
    panels = []
    near = [end for end in (found.holds, found.fails) if end is not None]
    close = len(near) == 2 and any(not _within(probe.value, near) for probe in found.probes)
    for check in found.conditions:
        panels.append(_panel(found, check, found.probes, near=False))
        if close:
            own = [probe for probe in found.probes if _within(probe.value, near)]
            panels.append(_panel(found, check, own, near=True))
    says = "Means of the replicates of a load, with the intervals that decide. Dashed: the limit."
    says += " Shaded: from the last load that holds to the first that fails." if len(near) == 2 else ""
    return Chart("capacity", f"{found.name}: capacity over {found.field}", says, panels, columns=2 if close else 1)


def _within(value: float, near: list[float]) -> bool:
    around = max((max(near) / min(near)) ** 3, AROUND) if min(near) > 0 else AROUND
    return min(near) / around <= value <= max(near) * around


def _panel(found: Capacity, check: Check, loads: Sequence[Probe], *, near: bool) -> Panel:
    probes, what = [probe for probe in loads if check.text in probe.intervals], quantity(check.metric)
    means, lows, highs = (np.array([probe.intervals[check.text][end] for probe in probes]) for end in range(3))
    lows = np.maximum(lows, 0.0)
    most = float(max(highs.max(initial=0.0), check.bound))
    scale = what.scale(most)
    x, bound = np.array([probe.value for probe in probes]), check.bound / scale.size
    y_log = spread([np.append(means, check.bound)])
    ends = _ends(means / scale.size, lows / scale.size, highs / scale.size, bound, log=y_log, near=near)
    marks: list[Mark] = []
    if found.holds is not None and found.fails is not None:
        band = np.array([found.holds, found.fails])
        marks.append(Area("capacity", np.sort(band), np.full(2, ends[0]), np.full(2, ends[1]), Style(GREY)))
    marks += [
        Level("limit", bound, Style(BLACK, "dashed")),
        Line("", x, means / scale.size, Style(GREY)),
    ]
    for verdict, style in LOOKS.items():
        own = np.array([probe.verdict == verdict for probe in probes], dtype=bool)
        if own.any():
            texts = [
                f"{found.field} = {probe.value:g}: {what.text(probe.intervals[check.text][0])}, {verdict}"
                for probe in probes
                if probe.verdict == verdict
            ]
            marks += [
                Whiskers("", x[own], lows[own] / scale.size, highs[own] / scale.size, style),
                Points(verdict, x[own], means[own] / scale.size, style, texts),
            ]
    x_log = len(x) > 1 and bool(x.min() > 0) and bool(x.max() >= FAR * x.min())
    where = "near the capacity" if near else "all loads"
    title = f"{what.label}, {where} (limit {shown(check.bound, what.unit)})"
    ticks = _doubled(float(x.min()), float(x.max())) if x_log else ()
    return Panel(marks, found.field, scale.name, title, x_log=x_log, y_log=y_log, y_range=ends, x_ticks=ticks)


def _ends(means: Floats, lows: Floats, highs: Floats, bound: float, *, log: bool, near: bool) -> tuple[float, float]:
    """What the y axis shows: all intervals and the limit, from 0 unless `near`; on a logarithmic axis as much below as
    means reach.
    """
    top = max(float(highs.max(initial=0.0)), bound) * ROOM or 1.0
    if near and not log:
        bottom, top = min(float(lows.min(initial=bound)), bound), top / ROOM
        room = (ROOM - 1) * ((top - bottom) or top or 1.0)
        return max(bottom - room, 0.0), top + room
    if not log:
        return 0.0, top
    least = min(float(means.min()), bound)
    return float(np.maximum(lows, least / 2).min(initial=least)) / ROOM, top * ROOM


def _doubled(low: float, high: float) -> list[float]:
    """The least load, twice it, and so on to the greatest: most searches have been there."""
    return [low * 2**k for k in range(int(np.log2(high / low) + 1e-9) + 1)]
