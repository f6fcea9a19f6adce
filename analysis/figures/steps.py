"""Figures of a run's steps: GPU activity, content and time of steps, queues, KV blocks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np

from analysis.figures import axis
from analysis.figures.axis import Binned, Frames, band, chosen, longest, seconds, spread
from cbsim.draw import chart
from cbsim.draw.chart import Area, Chart, Columns, Level, Line, Mark, Panel, Points, Style, Unit, series, unit
from cbsim.errors import ScenarioError
from cbsim.record.columns import NS
from cbsim.scenario.scenario import parse

PARTS = {"prefill": Style(chart.BLUE), "decode": Style(chart.ORANGE), "accepted drafts": Style(chart.GREEN)}
PARTS |= {"rejected drafts": Style(chart.RED), "padding": Style(chart.GREY), "largest step": Style(chart.PALE)}
MOST_POINTS = 1000  # points of a run's steps with prefill, and as many of its others
SEEN = 0.25  # share of the budget that a step must reach for it to be drawn: its line would flatten smaller steps


def budget(scenario: Mapping[str, Any]) -> int | None:
    """Return the query tokens that a step may have, by a resolved scenario; None if unbounded or unreadable."""
    try:
        return parse(dict(scenario), "the scenario of a run").servers[0].options("async").limits.tokens
    except ScenarioError:
        return None


def tokens(steps: Frames, budgets: Mapping[str, int | None]) -> Chart:
    """Draw two panels a run: query tokens of a step over time, prefill, decode, drafts and padding stacked, with the
    budget; and decode rows alone, with their drafts, which prefill dwarfs. A step lasts from the end of the one before,
    bubble included.
    """
    time = unit(longest(steps))
    drawn = {label: _parts(frame, time) if len(frame) else {} for label, frame in steps.items()}
    panels, far = [], []
    for label, parts in drawn.items():
        bound, (marks, rows) = budgets.get(label), _stacked(parts)
        most = float(steps[label]["padded_tokens"].max()) if parts else 0.0
        if bound is not None and most >= SEEN * bound:
            marks.append(Level("budget", bound, Style(chart.BLACK, "dashed")))
            most = max(most, bound)
        elif bound is not None and parts:
            far.append(f"{label} never comes near its budget of {bound:,}.")
        panels.append(Panel(marks, time.name, "tokens", title=label, y_range=(0.0, 1.05 * most) if most else None))
        what = ("tokens", "decode rows and drafts") if "rejected drafts" in parts else ("rows", "decode rows")
        panels.append(Panel(rows, time.name, what[0], title=f"{label}: {what[1]}"))
    caption = "Query tokens computed in a step; a decode row has one, and drafts that it verifies. "
    caption += "A step lasts from the end of the one before."
    every = chain(*(each.values() for each in drawn.values()))
    caption += axis.thinned(every, "the largest step of a bin and the range of decode rows are shaded")
    caption = " ".join([caption, *far]) + chart.without(steps)
    return Chart("tokens", "Tokens a step", caption, panels, columns=2, share_x=True)


def _stacked(parts: Mapping[str, Binned]) -> tuple[list[Mark], list[Mark]]:
    """Return the parts of steps, stacked with the largest steps behind them, and decode rows with their drafts."""
    if not parts:
        return [], []
    *named, (behind, style, whole) = [(name, PARTS[name], part) for name, part in parts.items()]
    under = Area(behind, whole.x, np.zeros(len(whole.x)), whole.high, style, step=True)
    rows = axis.stack(named[1:-1]) if "rejected drafts" in parts else band(named[1][0], named[1][2], named[1][1])
    return [*([] if whole.exact else [under]), *axis.stack(named)], rows


def _parts(steps: Columns, time: Unit) -> dict[str, Binned]:
    """Return prefill, decode, drafts by what came of them if there are any, padding, and the sum."""
    start, end = seconds(steps, "compute_start_ns") - axis.bubbles(steps), seconds(steps, "compute_end_ns")
    names = ("prefill_tokens", "decode_rows", "draft_tokens", "padded_tokens")
    prefill, decode, drafts, total = (chart.column(steps, name) for name in names)
    values = {"prefill": prefill, "decode": decode}
    if drafts.any():
        values["accepted drafts"] = accepted = chart.column(steps, "accepted_tokens")
        values["rejected drafts"] = drafts - accepted
    values |= {"padding": total - prefill - decode - drafts, "largest step": total}
    return dict(zip(values, axis.over_time(start, end, values.values(), time), strict=True))


def step_time(steps: Frames) -> Chart:
    """Draw the time on the compute lane of steps with rows, against tokens and against context.

    A circle is a step of decode rows only, a cross one with prefill. If points are thinned, the remaining ones are
    evenly spaced in rank of step time, the shortest and the longest among them.
    """
    busy = {label: axis.ran(frame) for label, frame in steps.items()}
    spent = {
        label: seconds(frame, "compute_end_ns") - seconds(frame, "compute_start_ns") for label, frame in busy.items()
    }
    scale = unit(max((float(part.max()) for part in spent.values() if len(part)), default=0.0))
    panels, most = [], 0
    for name, x_name in (
        ("padded_tokens", "query tokens, padding included"),
        ("context_tokens", "context tokens read"),
    ):
        marks: list[Mark] = []
        for index, (label, frame) in enumerate(busy.items()):
            x, prefill = chart.column(frame, name), chart.column(frame, "prefill_tokens") > 0
            for kind, rows, marker in (("decode only", ~prefill, "circle"), ("mixed", prefill, "cross")):
                y = spent[label][rows]
                shown = np.argsort(y)[chosen(len(y), MOST_POINTS)]
                style = Style(series(index).colour, marker=marker)
                if len(y):
                    marks.append(Points(f"{label}, {kind}", x[rows][shown], y[shown] / scale.size, style))
                most = max(most, len(y))
        xs, ys = ([getattr(mark, letter) for mark in marks] for letter in "xy")
        panels.append(Panel(marks, x_name, scale.name, x_log=spread(xs), y_log=spread(ys)))
    caption = "Time on the compute lane of every step with rows."
    if most > MOST_POINTS:
        caption += f" At most {MOST_POINTS:,} steps of a kind are drawn, evenly chosen by time, the extremes"
        caption += " among them."
    return Chart("step_time", "Step time", caption + chart.without(busy, "step with rows"), panels, columns=2)


AT_MOST_SHADED = 2  # runs; the ranges of more would hide each other


def gpu_active(steps: Frames) -> Chart:
    """Draw all runs in two panels: the busy share of the compute lane, and the bubble before each step with rows.

    A step's share is that of the time from the end of the one before. Time without requests counts as idle in the share
    and does not count in the bubble.
    """
    busy = {label: axis.ran(frame) for label, frame in steps.items()}
    time = unit(longest(busy))
    gaps = {label: axis.bubbles(frame) for label, frame in busy.items()}
    gap = unit(max((float(part.max()) for part in gaps.values() if len(part)), default=0.0))
    shares, waits, drawn = [], [], []
    shade = len(steps) <= AT_MOST_SHADED
    for index, (label, frame) in enumerate(busy.items()):
        if len(frame):
            end, computed = seconds(frame, "compute_end_ns"), frame["compute_end_ns"] - frame["compute_start_ns"]
            start = np.append(seconds(frame, "schedule_start_ns")[:1], end[:-1])
            share = np.clip(np.asarray(computed) / NS / np.where(end > start, end - start, 1.0), 0.0, 1.0)
            active, waited = axis.over_time(start, end, (share, gaps[label] / gap.size), time)
            shares += band(label, active, series(index), shade=shade)
            waits += band(label, waited, series(index), shade=shade)
            drawn.append(active)
    caption = "Above: share of time that kernels run, from the end of one step to the end of the next. Below: how "
    caption += "long the GPU waits before a step while there is something to do."
    caption += axis.thinned(drawn, "the range is shaded" if shade else "ranges of so many runs are not drawn")
    caption += chart.without(busy, "step with rows")
    panels = [Panel(shares, time.name, "share", title="GPU active", y_range=(0.0, 1.03))]
    panels.append(Panel(waits, time.name, gap.name, title="Bubble before each step"))
    return Chart("gpu_active", "GPU active, and the bubbles between steps", caption, panels, share_x=True)


LINES = (("running", Style(chart.BLUE)), ("waiting", Style(chart.RED, "dashed")))
MOST_SUMS = 800


def queues(steps: Frames) -> Chart:
    """Draw one panel a run: running and waiting requests over time, each count from one planning to the next."""
    time, panels, drawn = unit(longest(steps)), [], []
    for label, frame in steps.items():
        marks: list[Mark] = []
        if len(frame):
            parts = axis.over_time(*axis.valid(frame), (chart.column(frame, name) for name, _ in LINES), time)
            for (name, style), part in zip(LINES, parts, strict=True):
                marks += band(name, part, style)
            drawn += parts
        panels.append(Panel(marks, time.name, "requests", title=label))
    caption = "Requests that run and that wait, as planning leaves them." + axis.thinned(drawn) + chart.without(steps)
    return Chart("queues", "Running and waiting requests", caption, panels, share_x=True)


def preemptions(steps: Frames) -> Chart:
    """Draw all runs in two panels: preemptions up to each moment, and tokens that were recomputed for them."""
    time, panels, totals = unit(longest(steps)), [], {}
    for name, title in (("preempted", "Preemptions so far"), ("recomputed_tokens", "Recomputed tokens so far")):
        marks: list[Mark] = []
        for index, (label, frame) in enumerate(steps.items()):
            totals[label, name] = int(frame[name].sum())
            if len(frame):  # at some of the steps, the first and the last among them
                shown = chosen(len(frame), MOST_SUMS)
                total = np.cumsum(np.asarray(frame[name]))[shown].astype(np.float64)
                x = seconds(frame, "schedule_start_ns")[shown] / time.size
                marks.append(Line(label, x, total, series(index), step=True))
        panels.append(Panel(marks, time.name, "requests" if name == "preempted" else "tokens", title=title))
    preempted = [f"{label}: {totals[label, 'preempted']:,}" for label in steps if totals[label, "preempted"]]
    none = " None in the others." if preempted and len(preempted) < len(steps) else ""
    caption = f"Preemptions: {'; '.join(preempted)}.{none}" if preempted else "Preemptions: none."
    if preempted and any(len(frame) > MOST_SUMS for frame in steps.values()):
        caption += f" Thinned for drawing to {MOST_SUMS} points, each of them exact."
    return Chart("preemptions", "Preemptions", caption + chart.without(steps), panels, share_x=True)


USED, CACHED, EMPTY = Style(chart.BLUE), Style(chart.ORANGE), Style(chart.PALE)


def blocks(steps: Frames, totals: Mapping[str, int | None]) -> Chart:
    """Draw one panel a run: blocks in use, free ones that still hold content, and empty ones, stacked.

    If a run's total is not known, empty blocks are left out.
    """
    time, panels, drawn, peaks = unit(longest(steps)), [], [], []
    for label, frame in steps.items():
        marks: list[Mark] = []
        total = totals.get(label)
        near = not total or not len(frame) or int(frame["used_blocks"].max()) >= SEEN * total
        shown = total if near else None
        if len(frame):
            columns = [chart.column(frame, name) for name in ("used_blocks", "cached_blocks")]
            used, cached = axis.over_time(*axis.valid(frame), columns, time)
            parts = [("used", USED, used), ("cached", CACHED, cached)]
            if shown:
                parts.append(("empty", EMPTY, used._replace(mean=np.maximum(shown - used.mean - cached.mean, 0.0))))
            marks += axis.stack(parts)
            drawn.append(used)
            if not used.exact:
                marks.append(Line("most used", used.x, used.high, Style(chart.BLACK, "dotted"), step=True))
            most = int(frame["used_blocks"].max())
            peaks.append(f"{label}: {most:,}" + (f" of {total:,} ({most / total:.1%})" if total else ""))
        marks += [Level("total", shown, Style(chart.BLACK, "dashed"))] if shown else []
        panels.append(Panel(marks, time.name, "blocks", title=label, y_range=(0.0, 1.05 * shown) if shown else None))
    caption = "KV blocks in use, free but still holding content (cached), and empty; of a run that never uses a quarter"
    caption += " of them no empty ones."
    caption += (f" Most in use: {'; '.join(peaks)}." if peaks else "") + chart.without(steps)
    caption += axis.thinned(drawn, "the dotted line is the most used in a bin")
    return Chart("blocks", "KV blocks", caption, panels, share_x=True)


def replicas(summaries: Mapping[str, Mapping[str, Any]]) -> Chart:
    """Draw the servers of each pool that take requests, by what happened to them, and deaths."""
    panels, time = [], unit(max(each["makespan_s"] for each in summaries.values()))
    for label, summary in summaries.items():
        marks, events = list[Mark](), summary["scaling"]["events"]
        for at, pool in enumerate(dict.fromkeys(each["pool"] for each in events)):
            mine = [each for each in events if each["pool"] == pool]
            mine.append({**mine[-1], "time_s": summary["makespan_s"], "event": "end"})
            x, ready = (np.array([each[name] for each in mine], float) for name in ("time_s", "ready"))
            died = np.array([each["event"] == "died" for each in mine])
            marks.append(Line(f"pool {pool}", x / time.size, ready, series(at), step=True))
            if died.any():
                style = Style(series(at).colour, marker="cross")
                marks.append(Points(f"pool {pool}, died", x[died] / time.size, ready[died], style))
        panels.append(Panel(marks, time.name, "servers", title=label))
    caption = "Servers of a pool that take requests; those that start or drain are not counted. Crosses: one has died."
    return Chart("replicas", "Servers over time", caption, panels, share_x=True)
