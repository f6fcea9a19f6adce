"""How busy the GPU is over the run, and what it waits for before each step."""

from __future__ import annotations

import numpy as np

from analysis.figures.axis import Frames, band, bubbles, longest, over_time, ran, seconds, thinned
from analysis.statistics.thin import Binned
from cbsim.draw.chart import Chart, Floats, Mark, Panel, series
from cbsim.draw.units import Columns, unit, without
from cbsim.results.columns import NS

AT_MOST_SHADED = 2  # runs; the ranges of more would hide each other


def gpu_active(steps: Frames) -> Chart:
    """All runs in two panels: share of time that the compute lane is busy, and the bubble before each step with rows.

    A step's share is that of the time from the end of the one before. Time with nothing to do counts as idle in the
    share and does not count in the bubble.
    """
    busy = {label: ran(frame) for label, frame in steps.items()}
    time = unit(longest(busy))
    gaps = {label: bubbles(frame) for label, frame in busy.items()}
    gap = unit(max((float(part.max()) for part in gaps.values() if len(part)), default=0.0))
    shares: list[Mark] = []
    waits: list[Mark] = []
    drawn: list[Binned] = []
    shade = len(steps) <= AT_MOST_SHADED
    for index, (label, frame) in enumerate(busy.items()):
        if len(frame):
            start, end, share = _shares(frame)
            active, waited = over_time(start, end, (share, gaps[label] / gap.seconds), time)
            shares += band(label, active, series(index), shade=shade)
            waits += band(label, waited, series(index), shade=shade)
            drawn.append(active)
    says = "Above: share of time that kernels run, from the end of one step to the end of the next. Below: how long the"
    says += " GPU waits before a step while there is something to do."
    says += thinned(drawn, "the range is shaded" if shade else "ranges of so many runs are not drawn")
    says += without(busy, "step with rows")
    panels = [
        Panel(shares, time.name, "share", title="GPU active", y_range=(0.0, 1.03)),
        Panel(waits, time.name, gap.name, title="Bubble before each step"),
    ]
    return Chart("gpu_active", "GPU active, and the bubbles between steps", says, panels, share_x=True)


def _shares(steps: Columns) -> tuple[Floats, Floats, Floats]:
    """From when to when (s) each step's period lasts, and its share of compute."""
    end, busy = seconds(steps, "compute_end_ns"), steps["compute_end_ns"] - steps["compute_start_ns"]
    start = np.append(seconds(steps, "schedule_start_ns")[:1], end[:-1])
    length = np.where(end > start, end - start, 1.0)
    return start, end, np.clip(np.asarray(busy) / NS / length, 0.0, 1.0)
