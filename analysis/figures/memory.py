"""KV blocks over time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from analysis.figures.axis import Frames, held, longest, over_time, stack, thinned
from analysis.statistics.thin import Binned
from cbsim.draw.chart import BLACK, BLUE, ORANGE, PALE, Chart, Level, Line, Mark, Panel, Style
from cbsim.draw.units import Columns, Unit, column, unit, without

USED, CACHED, EMPTY = Style(BLUE), Style(ORANGE), Style(PALE)


def blocks(steps: Frames, totals: Mapping[str, int | None]) -> Chart:
    """One panel a run: blocks in use, free ones that still hold content, and empty ones upon each other.

    Where a run's total is not known, blocks in use and cached ones alone.
    """
    time, panels, drawn, peaks = unit(longest(steps)), [], [], []
    for label, frame in steps.items():
        marks: list[Mark] = []
        total = totals.get(label)
        if len(frame):
            parts = _parts(frame, time, total)
            marks += stack(parts)
            drawn.append(used := parts[0][1])
            if not used.exact:
                marks.append(Line("most used", used.x, used.high, Style(BLACK, "dotted"), step=True))
            most = int(frame["used_blocks"].max())
            peaks.append(f"{label}: {most:,}" + (f" of {total:,} ({most / total:.1%})" if total else ""))
        if total:
            marks.append(Level("total", total, Style(BLACK, "dashed")))
        panels.append(Panel(marks, time.name, "blocks", title=label, y_range=(0.0, 1.05 * total) if total else None))
    says = "KV blocks in use, free but still holding content (cached), and empty."
    says += (f" Most in use: {'; '.join(peaks)}." if peaks else "") + without(steps)
    says += thinned(drawn, "the dotted line is the most used in a bin")
    return Chart("blocks", "KV blocks", says, panels, share_x=True)


def _parts(steps: Columns, time: Unit, total: int | None) -> list[tuple[str, Binned, Style]]:
    used, cached = column(steps, "used_blocks"), column(steps, "cached_blocks")
    low, middle = over_time(*held(steps), (used, cached), time)
    parts = [("used", low, USED), ("cached", middle, CACHED)]
    if total:
        parts.append(("empty", low._replace(mean=np.maximum(total - low.mean - middle.mean, 0.0)), EMPTY))
    return parts
