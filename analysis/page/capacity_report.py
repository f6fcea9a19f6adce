"""The report of a capacity: the answer, what binds, every load that was probed, and each condition's metric over the
load.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from analysis.figures.axis import spread
from analysis.statistics.capacity import FAILS, HOLDS, UNDECIDED, Capacity, Probe
from cbsim.draw.chart import (
    BLACK,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Area,
    Chart,
    Level,
    Line,
    Mark,
    Panel,
    Points,
    Style,
    Whiskers,
    scale_of,
)
from cbsim.draw.markdown import Table
from cbsim.draw.report import Caveat, Report
from cbsim.metrics import catalogue
from cbsim.metrics.checks import Check
from cbsim.metrics.terminal import shown
from cbsim.record.tables import Floats


def build(capacity: Capacity, command: str) -> Report:
    """The report of one search."""
    return Report(
        title=f"Capacity of {capacity.name}",
        question=f"Up to which {capacity.field} does {' and '.join(check.rule for check in capacity.conditions)} hold?",
        sources=(),
        caveats=_caveats(capacity),
        findings=_findings(capacity),
        tables=[_table(capacity)],
        charts=[chart(capacity)],
        command=command,
        data={"points": len(capacity.probes), "holds": capacity.holds, "fails": capacity.fails},
    )


def _findings(capacity: Capacity) -> list[str]:
    answer = {
        (True, True): f"{capacity.field} holds at {capacity.holds:g} and fails at {capacity.fails:g}"
        if capacity.holds is not None and capacity.fails is not None
        else "",
        (True, False): f"{capacity.field} holds at {capacity.holds or 0:g}; no load that was tried fails",
        (False, True): f"{capacity.field} fails at {capacity.fails or 0:g}; no load that was tried holds",
        (False, False): "No load that was tried is decided",
    }[capacity.holds is not None, capacity.fails is not None]
    sentences = [f"{answer} (confidence {capacity.confidence:.4g})."]
    if capacity.replicates:
        sentences.append(f"{len(capacity.probes)} loads, {capacity.replicates:,} runs, {capacity.requests:,} requests.")
    return [*sentences, *([f"What binds: {'; '.join(capacity.binds)}."] if capacity.binds else [])]


def _caveats(capacity: Capacity) -> list[Caveat]:
    made = [Caveat("search", "", text) for text in capacity.notices]
    if not capacity.monotone:
        reason = "A larger load does better than a smaller one: there is no single capacity."
        made.insert(0, Caveat("not monotone", "", reason))
    return made


def _table(capacity: Capacity) -> Table:
    header = (capacity.field, "verdict", "runs", "requests", *(check.rule for check in capacity.conditions), "why")
    rows = [
        (
            f"{probe.value:g}",
            probe.verdict,
            f"{probe.replicates:,}",
            f"{probe.requests:,}",
            *_cells(probe, capacity.conditions),
            probe.reason,
        )
        for probe in capacity.probes
    ]
    return Table("Loads", header, rows, "Mean over the runs of a load, and the interval that decides.")


def _cells(probe: Probe, conditions: Sequence[Check]) -> list[str]:
    cells = []
    for check in conditions:
        text, interval = catalogue.metric(check.metric).shown, probe.intervals.get(check.rule)
        cells.append("-" if interval is None else f"{text(interval[0])} [{text(interval[1])}, {text(interval[2])}]")
    return cells


LOOKS = {
    HOLDS: Style(GREEN, "solid", "circle"),
    FAILS: Style(RED, "solid", "cross"),
    UNDECIDED: Style(ORANGE, "solid", "diamond"),
}
FAR = 8  # from the least load to the greatest, as a factor: a logarithmic axis
AROUND = 1.1  # the capacity, as a factor, or three times as far as its ends are apart: what the second panel shows
ROOM = 1.08  # above the highest mark


def chart(capacity: Capacity) -> Chart:
    """A line of panels a condition: all loads, and if it is known those near the capacity."""
    panels = []
    near = [end for end in (capacity.holds, capacity.fails) if end is not None]
    close = len(near) == 2 and any(not _within(probe.value, near) for probe in capacity.probes)
    for check in capacity.conditions:
        panels.append(_panel(capacity, check, capacity.probes, near=False))
        if close:
            own = [probe for probe in capacity.probes if _within(probe.value, near)]
            panels.append(_panel(capacity, check, own, near=True))
    caption = "Means of the replicates of a load, with the intervals that decide. Dashed: the limit."
    caption += " Shaded: from the last load that holds to the first that fails." if len(near) == 2 else ""
    return Chart(
        "capacity", f"{capacity.name}: capacity over {capacity.field}", caption, panels, columns=2 if close else 1
    )


def _within(value: float, near: list[float]) -> bool:
    around = max((max(near) / min(near)) ** 3, AROUND) if min(near) > 0 else AROUND
    return min(near) / around <= value <= max(near) * around


def _panel(capacity: Capacity, check: Check, loads: Sequence[Probe], *, near: bool) -> Panel:
    probes, what = [probe for probe in loads if check.rule in probe.intervals], catalogue.metric(check.metric)
    means, lows, highs = np.array([probe.intervals[check.rule] for probe in probes]).reshape(-1, 3).T
    lows = np.maximum(lows, 0.0)
    most = float(max(highs.max(initial=0.0), check.bound))
    scale = scale_of(what.unit, most)
    x, bound = np.array([probe.value for probe in probes]), check.bound / scale.size
    y_log = spread([np.append(means, check.bound)])
    ends = _ends(means / scale.size, lows / scale.size, highs / scale.size, bound, log=y_log, near=near)
    marks: list[Mark] = []
    if capacity.holds is not None and capacity.fails is not None:
        band = np.array([capacity.holds, capacity.fails])
        marks.append(Area("capacity", np.sort(band), np.full(2, ends[0]), np.full(2, ends[1]), Style(GREY)))
    marks += [
        Level("limit", bound, Style(BLACK, "dashed")),
        Line("", x, means / scale.size, Style(GREY)),
    ]
    for verdict, style in LOOKS.items():
        own = np.array([probe.verdict == verdict for probe in probes], dtype=bool)
        if own.any():
            texts = [
                f"{capacity.field} = {probe.value:g}: {what.shown(probe.intervals[check.rule][0])}, {verdict}"
                for probe in probes
                if probe.verdict == verdict
            ]
            marks += [
                Whiskers("", x[own], lows[own] / scale.size, highs[own] / scale.size, style),
                Points(verdict, x[own], means[own] / scale.size, style, texts),
            ]
    x_log = len(x) > 1 and bool(x.min() > 0) and bool(x.max() >= FAR * x.min())
    where = "near the capacity" if near else "all loads"
    title = f"{what.label}, {where} (limit {shown(check.bound, what.form)})"
    ticks = _doubled(float(x.min()), float(x.max())) if x_log else ()
    return Panel(marks, capacity.field, scale.name, title, x_log=x_log, y_log=y_log, y_range=ends, x_ticks=ticks)


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
