"""What a step is made of, and how long it takes for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from analysis.figures.axis import Frames, band, bubbles, longest, over_time, ran, seconds, spread, stack, thinned
from analysis.statistics.thin import Binned, chosen
from cbsim.draw.chart import BLACK, BLUE, GREY, ORANGE, PALE, Area, Chart, Level, Mark, Panel, Points, Style, series
from cbsim.draw.units import Columns, Unit, column, unit, without
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.scenario import depth, parse, scheduler_options

PARTS = (("prefill", Style(BLUE)), ("decode", Style(ORANGE)), ("padding", Style(GREY)))
MOST_POINTS = 1000  # of a run's steps with prefill, and likewise of its others
SEEN = 0.25  # share of the budget that a step must reach for it to be drawn: else it would flatten all the rest


def budget(scenario: Mapping[str, Any]) -> int | None:
    """Query tokens that a step may have, by a resolved scenario; None if it has no bound or cannot be read."""
    try:
        return scheduler_options(parse(dict(scenario), "the scenario of a run"), depth("async")).limits.tokens
    except ScenarioError:
        return None


def tokens(steps: Frames, budgets: Mapping[str, int | None]) -> Chart:
    """Two panels a run: query tokens of a step over time, prefill, decode and padding upon each other, with the budget;
    and decode rows alone, which prefill dwarfs. A step lasts from the end of the one before, bubble included.
    """
    time = unit(longest(steps))
    drawn = {label: _parts(frame, time) if len(frame) else [] for label, frame in steps.items()}
    panels, far = [], []
    for label, parts in drawn.items():
        bound, marks = budgets.get(label), _stacked(parts)
        most = float(steps[label]["padded_tokens"].max()) if parts else 0.0
        if bound is not None and most >= SEEN * bound:
            marks.append(Level("budget", bound, Style(BLACK, "dashed")))
            most = max(most, bound)
        elif bound is not None and parts:
            far.append(f"{label} never comes near its budget of {bound:,}.")
        panels.append(Panel(marks, time.name, "tokens", title=label, y_range=(0.0, 1.05 * most) if most else None))
        rows = band("decode", parts[1], PARTS[1][1]) if parts else []
        panels.append(Panel(rows, time.name, "rows", title=f"{label}: decode rows"))
    says = "Query tokens computed in a step; a decode row has one. A step lasts from the end of the one before."
    says += thinned(chain(*drawn.values()), "the largest step of a bin and the range of decode rows are shaded")
    return Chart("tokens", "Tokens a step", " ".join([says, *far]) + without(steps), panels, columns=2, share_x=True)


def _stacked(parts: Sequence[Binned]) -> list[Mark]:
    """Parts upon each other, the largest steps behind them."""
    if not parts:
        return []
    whole, marks = (
        parts[-1],
        stack([(name, part, style) for (name, style), part in zip(PARTS, parts[:-1], strict=True)]),
    )
    behind = Area("largest step", whole.x, np.zeros(len(whole.x)), whole.high, Style(PALE), step=True)
    return marks if whole.exact else [behind, *marks]


def _parts(steps: Columns, time: Unit) -> list[Binned]:
    """Prefill, decode, padding, and all of them."""
    prefill, decode, total = (column(steps, name) for name in ("prefill_tokens", "decode_rows", "padded_tokens"))
    start, end = seconds(steps, "compute_start_ns") - bubbles(steps), seconds(steps, "compute_end_ns")
    return over_time(start, end, (prefill, decode, total - prefill - decode, total), time)


def step_time(steps: Frames) -> Chart:
    """Time on the compute lane of steps with rows, against tokens and against context.

    A circle is a step of decode rows only, a cross one with prefill. Where points are thinned, those left are
    evenly spaced in rank of step time, the shortest and the longest among them.
    """
    busy = {label: ran(frame) for label, frame in steps.items()}
    spent = {
        label: seconds(frame, "compute_end_ns") - seconds(frame, "compute_start_ns") for label, frame in busy.items()
    }
    scale = unit(max((float(part.max()) for part in spent.values() if len(part)), default=0.0))
    panels, most = [], 0
    for name, axis in (("padded_tokens", "query tokens, padding included"), ("context_tokens", "context tokens read")):
        marks: list[Mark] = []
        for index, (label, frame) in enumerate(busy.items()):
            x, prefill = column(frame, name), column(frame, "prefill_tokens") > 0
            for kind, rows, marker in (("decode only", ~prefill, "circle"), ("mixed", prefill, "cross")):
                y = spent[label][rows]
                shown = np.argsort(y)[chosen(len(y), MOST_POINTS)]
                style = Style(series(index).colour, marker=marker)
                if len(y):
                    marks.append(Points(f"{label}, {kind}", x[rows][shown], y[shown] / scale.seconds, style))
                most = max(most, len(y))
        panels.append(Panel(marks, axis, scale.name, x_log=spread(_xs(marks)), y_log=spread(_ys(marks))))
    says = "Time on the compute lane of every step with rows."
    if most > MOST_POINTS:
        says += f" At most {MOST_POINTS:,} steps of a kind are drawn, evenly chosen by time, the extremes among them."
    return Chart("step_time", "Step time", says + without(busy, "step with rows"), panels, columns=2)


def _xs(marks: list[Mark]) -> list[Any]:
    return [mark.x for mark in marks if isinstance(mark, Points)]


def _ys(marks: list[Mark]) -> list[Any]:
    return [mark.y for mark in marks if isinstance(mark, Points)]
