"""Figures of several runs: a row a run and a panel a number; the cost of tokens in money and in speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from analysis.figures import axis
from analysis.statistics.landscape import LOOPS, configuration
from analysis.statistics.loading import LoadedRun
from analysis.statistics.thin import Ints
from cbsim.draw.chart import GREY, Bars, Chart, Floats, Line, Mark, Panel, Points, Spans, Style, series, unit
from cbsim.metrics.terminal import lookup, shown

TOTALS = (("output tokens/s", "output_tokens_per_s", "number"), ("GPU active", "gpu_active", "share"))
LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
PERCENTILES = ("p50", "p95", "p99")
SAME = 1.01  # a factor: numbers that differ by less are not drawn
Tail = tuple[float | None, float | None]


def side_by_side(runs: Sequence[LoadedRun]) -> Chart:
    """Draw output tokens/s, GPU active, and TTFT and TPOT from their p50 to their p99. Static batching comes first,
    both loops of a configuration are adjacent. Numbers that are equal in all runs are left out, except the tokens.
    """
    ordered = _ordered(runs)
    rows = [run.label for run in ordered]
    limits = axis.slo_limits([run.scenario for run in runs])
    panels = []
    for title, metric, unit_ in TOTALS:
        values = [lookup(run.summary, metric) or 0.0 for run in ordered]
        if metric == TOTALS[0][1] or _differ(values):
            panels.append(_total(ordered, rows, title, values, unit_))
    for title, key in LATENCIES:
        tails = [_tail(run, key) for run in ordered]
        if any(_differ([value for value in ends if value]) for ends in zip(*tails, strict=True)):
            panels.append(_latency(ordered, rows, title, tails, limits.get(key)))
    caption = "A row a run. Latencies reach from p50, with a mark, to p99, or to the last percentile that the requests"
    caption += " are enough for." + (" Black, dashed: the service level (SLO)." if limits else "")
    return Chart("landscape", "Runs side by side", caption, panels, columns=2)


def _ordered(runs: Sequence[LoadedRun]) -> list[LoadedRun]:
    order = list(dict.fromkeys(map(configuration, runs)))
    ordered = sorted(runs, key=lambda run: (order.index(configuration(run)), LOOPS.index(run.loop)))
    return sorted(ordered, key=lambda run: lookup(run.scenario, "scheduler.name") != "static")


def _differ(values: Sequence[float]) -> bool:
    return bool(values) and max(values) > SAME * min(values)


def _tail(run: LoadedRun, key: str) -> Tail:
    """Return p50, and the last percentile after it that may be quoted."""
    own: Mapping[str, Any] = run.summary.get(key) or {}
    few = own.get("too_few_for") or ()
    quoted = [own[name] for name in PERCENTILES if name in own and (name == "p50" or name not in few)]
    return (quoted[0], quoted[-1]) if quoted else (None, None)


def _total(runs: Sequence[LoadedRun], rows: Sequence[str], title: str, values: Sequence[float], form: str) -> Panel:
    marks: list[Mark] = []
    for index, at in _by_loop(runs):
        ends = np.array(values, dtype=np.float64)[at]
        labels = [shown(value, form) for value in ends]
        texts = [f"{rows[i]}: {label} {title}" for i, label in zip(at, labels, strict=True)]
        marks.append(Spans(LOOPS[index], at, np.zeros(len(at)), ends, series(index), texts=texts, labels=labels))
    reach = (0.0, 1.0) if form == "share" else (0.0, 1.05 * max(values, default=0.0))
    return Panel(marks, "", title=title, rows=rows, x_range=reach)


def _by_loop(runs: Sequence[LoadedRun], known: Sequence[bool] = ()) -> Iterator[tuple[int, Ints]]:
    """Return the index of each loop that has runs, and its rows; only those that are `known`, if that is given."""
    for index, loop in enumerate(LOOPS):
        rows = [i for i, run in enumerate(runs) if run.loop == loop and (not known or known[i])]
        if rows:
            yield index, np.array(rows, dtype=np.int64)


def _latency(
    runs: Sequence[LoadedRun], rows: Sequence[str], title: str, tails: Sequence[Tail], limit: float | None
) -> Panel:
    most = max(high or 0.0 for _, high in tails)
    scale = unit(most)
    marks: list[Mark] = []
    for index, at in _by_loop(runs, [all(ends) for ends in tails]):
        low, high = (np.array([tails[i][end] for i in at], dtype=np.float64) for end in (0, 1))
        ends = zip(at, low, high, strict=True)
        texts = [f"{rows[i]}: {title} p50 {shown(a, 's')}, then up to {shown(b, 's')}" for i, a, b in ends]
        low, high = low / scale.seconds, high / scale.seconds
        marks.append(Spans(LOOPS[index], at, low, high, series(index), texts=texts))
        marks.append(Points(LOOPS[index], low, at.astype(np.float64), series(index), texts=texts))
    return axis.with_slo(Panel(marks, scale.name, title=f"{title}, p50 to p99", rows=rows), limit, most, scale.seconds)


Summaries = Mapping[str, Mapping[str, Any]]
COSTS = (("usd_per_million_output_tokens", "output tokens"), ("usd_per_million_tokens", "input and output tokens"))
MOST_LABELLED = 8  # runs; numbers above more bars would overlap


def cost(summaries: Summaries) -> Chart:
    """Draw the price of a million tokens by run, of those whose GPU has a price and that emitted any."""
    priced = {
        label: summary["cost"]
        for label, summary in summaries.items()
        if all(lookup(summary, f"cost.{key}") is not None for key, _ in COSTS)
    }
    marks: list[Mark] = []
    for index, (key, name) in enumerate(COSTS if priced else ()):
        height = np.array([float(costs[key]) for costs in priced.values()])
        labels = [f"{value:,.3g}" for value in height] if len(priced) <= MOST_LABELLED else ()
        marks.append(Bars(name, np.arange(len(priced)), height, series(index + 2), labels))
    prices = ", ".join(f"{price:g}" for price in sorted({float(costs["price_usd_hour"]) for costs in priced.values()}))
    caption = "What the GPU costs over the whole run, divided by its tokens."
    caption += f" Price of an hour: {prices} USD." if prices else " No run has a price."
    panel = Panel(marks, "", "USD", title="a million tokens", categories=list(priced))
    return Chart("cost", "Cost of a million tokens", caption, [panel])


def pareto(groups: Mapping[str, Summaries]) -> Chart:
    """Draw tokens/s of the GPU against tokens/s of a user (1 / TPOT p50), one marker a run, one style a group. Runs of
    a group have their labels beside them.

    A line joins the runs that no other one dominates. A run without TPOT is left out, and the caption names it.
    """
    marks: list[Mark] = []
    users, gpus, left = [np.empty(0)], [np.empty(0)], []
    for index, (group, summaries) in enumerate(groups.items()):
        speed = {label: 1 / tpot for label, run in summaries.items() if (tpot := lookup(run, "tpot_s.p50"))}
        left += [label for label in summaries if label not in speed]
        x = np.array(list(speed.values()), dtype=np.float64)
        y = np.array([summaries[label]["output_tokens_per_s"] for label in speed], dtype=np.float64)
        values = zip(speed, x, y, strict=True)
        texts = [f"{label}: {b:,.0f} tokens/s, {a:,.1f} tokens/s a user" for label, a, b in values]
        labels = () if [*speed] == [group] else [*speed]
        marks.append(Points(group, x, y, series(index), texts=texts, labels=labels))
        users.append(x)
        gpus.append(y)
    x, y = np.concatenate(users), np.concatenate(gpus)
    best = frontier(x, y)
    marks.insert(0, Line("not dominated", x[best], y[best], Style(GREY)))
    caption = "Right is faster for a user (1 / TPOT p50), up is more from the GPU."
    caption += " The line joins the runs that no other one dominates."
    caption += f" Without TPOT: {', '.join(left)}." if left else ""
    y_range = (0.9 * float(y.min()), 1.1 * float(y.max())) if len(y) else None
    panel = Panel(marks, "output tokens/s of a user", "output tokens/s of the GPU", y_range=y_range)
    return Chart("pareto", "Throughput against speed for a user", caption, [panel])


def frontier(x: Floats, y: Floats) -> Ints:
    """Return indices of the points that no other one dominates: at least as great in both and greater in one. They are
    sorted by ascending x.
    """
    order = np.lexsort((-y, -x))  # greatest x first, of equal ones the greatest y
    best = np.maximum.accumulate(np.append(-np.inf, y[order]))[:-1]
    indices: Ints = order[y[order] > best][::-1]
    return indices
