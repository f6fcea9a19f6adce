"""Requests that run and that wait, and those that lost their blocks."""

from __future__ import annotations

import numpy as np

from analysis.figures.axis import Frames, band, held, longest, over_time, seconds, thinned
from analysis.statistics.thin import chosen
from cbsim.draw.chart import BLUE, RED, Chart, Line, Mark, Panel, Style, series
from cbsim.draw.units import Columns, Unit, column, unit, without

LINES = (("running", Style(BLUE)), ("waiting", Style(RED, "dashed")))
MOST_POINTS = 800


def queues(steps: Frames) -> Chart:
    """One panel a run: running and waiting requests over time, each count from one planning to the next."""
    time, panels, drawn = unit(longest(steps)), [], []
    for label, frame in steps.items():
        marks: list[Mark] = []
        if len(frame):
            drawn += over_time(*held(frame), (column(frame, name) for name, _ in LINES), time)
            marks += [
                mark for (name, style), part in zip(LINES, drawn[-2:], strict=True) for mark in band(name, part, style)
            ]
        panels.append(Panel(marks, time.name, "requests", title=label))
    says = "Requests that run and that wait, as planning leaves them." + thinned(drawn) + without(steps)
    return Chart("queues", "Running and waiting requests", says, panels, share_x=True)


def preemptions(steps: Frames) -> Chart:
    """All runs in two panels: preemptions up to each moment, and tokens that were computed again for them."""
    time, panels, totals = unit(longest(steps)), [], {}
    for name, title in (("preempted", "Preemptions so far"), ("recomputed_tokens", "Recomputed tokens so far")):
        marks: list[Mark] = []
        for index, (label, frame) in enumerate(steps.items()):
            totals[label, name] = int(frame[name].sum())
            if len(frame):
                marks.append(_sum(label, frame, name, time, index))
        panels.append(Panel(marks, time.name, "requests" if name == "preempted" else "tokens", title=title))
    preempted = [f"{label}: {totals[label, 'preempted']:,}" for label in steps if totals[label, "preempted"]]
    others = " None in the others." if preempted and len(preempted) < len(steps) else ""
    says = f"Preemptions: {'; '.join(preempted)}.{others}" if preempted else "Preemptions: none."
    if preempted and any(len(frame) > MOST_POINTS for frame in steps.values()):
        says += f" Thinned for drawing to {MOST_POINTS} points, each of them exact."
    return Chart("preemptions", "Preemptions", says + without(steps), panels, share_x=True)


def _sum(label: str, steps: Columns, name: str, time: Unit, index: int) -> Line:
    """A running total at some of the steps, the first and the last among them."""
    shown = chosen(len(steps), MOST_POINTS)
    total = np.cumsum(np.asarray(steps[name]))[shown].astype(np.float64)
    return Line(label, seconds(steps, "schedule_start_ns")[shown] / time.seconds, total, series(index), step=True)
