"""Runs of one workload side by side: a row a run, a panel a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.figures import slo
from analysis.statistics.landscape import LOOPS, configuration
from analysis.statistics.loading import LoadedRun
from cbsim.draw.chart import Chart, Mark, Panel, Points, Spans, series
from cbsim.draw.units import unit
from cbsim.results.terminal import lookup, shown

TOTALS = (("output tokens/s", "output_tokens_per_s", "number"), ("GPU active", "gpu_active", "share"))
LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
PERCENTILES = ("p50", "p95", "p99")
SAME = 1.01  # what differs by less is not drawn


def side_by_side(runs: Sequence[LoadedRun]) -> Chart:
    """Output tokens/s, GPU active, and TTFT and TPOT from their p50 to their p99. Static batching first, both loops of
    a configuration under each other. What is the same for all is left out, but for the tokens.
    """
    ordered = _ordered(runs)
    rows = [run.label for run in ordered]
    totals = {metric: [lookup(run.summary, metric) or 0.0 for run in ordered] for _, metric, _ in TOTALS}
    panels = [
        _total(ordered, rows, title, totals[metric], unit_)
        for title, metric, unit_ in TOTALS
        if metric == TOTALS[0][1] or _differ(totals[metric])
    ]
    tails = {key: [_tail(run, key) for run in ordered] for _, key in LATENCIES}
    limits = slo.limits([run.scenario for run in runs])
    panels += [
        _latency(ordered, rows, title, tails[key], limits.get(key))
        for title, key in LATENCIES
        if any(_differ([value for value in ends if value]) for ends in zip(*tails[key], strict=True))
    ]
    says = "A row a run. Latencies reach from p50, with a mark, to p99, or to the last percentile that the requests"
    says += " are enough for." + (" Black, dashed: the service level (SLO)." if limits else "")
    return Chart("landscape", "Runs side by side", says, panels, columns=2)


def _ordered(runs: Sequence[LoadedRun]) -> list[LoadedRun]:
    first: dict[str, int] = {}
    for place, run in enumerate(runs):
        first.setdefault(configuration(run), place)
    return sorted(
        runs,
        key=lambda run: (
            lookup(run.scenario, "scheduler.name") != "static",
            first[configuration(run)],
            LOOPS.index(run.loop),
        ),
    )


def _differ(values: Sequence[float]) -> bool:
    return bool(values) and max(values) > SAME * min(values)


def _tail(run: LoadedRun, key: str) -> tuple[float | None, float | None]:
    """p50, and the last percentile after it that may be quoted."""
    own: Mapping[str, Any] = run.summary.get(key) or {}
    few = own.get("too_few_for") or ()
    quoted = [own[name] for name in PERCENTILES if name in own and (name == "p50" or name not in few)]
    return (quoted[0], quoted[-1]) if quoted else (None, None)


def _total(runs: Sequence[LoadedRun], rows: Sequence[str], title: str, values: Sequence[float], of: str) -> Panel:
    marks: list[Mark] = []
    for index, loop in enumerate(LOOPS):
        at = np.array([i for i, run in enumerate(runs) if run.loop == loop], dtype=np.int64)
        ends = np.array([values[i] for i in at], dtype=np.float64)
        texts = [f"{rows[i]}: {shown(values[i], of)} {title}" for i in at]
        labels = [shown(value, of) for value in ends]
        if len(at):
            marks.append(Spans(loop, at, np.zeros(len(at)), ends, series(index), texts=texts, labels=labels))
    reach = (0.0, 1.0) if of == "share" else (0.0, 1.05 * max(values, default=0.0))
    return Panel(marks, "", title=title, rows=rows, x_range=reach)


def _latency(
    runs: Sequence[LoadedRun],
    rows: Sequence[str],
    title: str,
    tails: Sequence[tuple[float | None, float | None]],
    limit: float | None,
) -> Panel:
    scale = unit(max(high or 0.0 for _, high in tails))
    marks: list[Mark] = []
    for index, loop in enumerate(LOOPS):
        own = [(i, low, high) for i, (low, high) in enumerate(tails) if runs[i].loop == loop and low and high]
        if own:
            at = np.array([i for i, _, _ in own], dtype=np.int64)
            low, high = (np.array([ends[n] for ends in own]) / scale.seconds for n in (1, 2))
            texts = [f"{rows[i]}: {title} p50 {shown(a, 's')}, then up to {shown(b, 's')}" for i, a, b in own]
            marks.append(Spans(loop, at, low, high, series(index), texts=texts))
            marks.append(Points(loop, low, at.astype(np.float64), series(index), texts=texts))
    most = max(high or 0.0 for _, high in tails)
    return slo.across(Panel(marks, scale.name, title=f"{title}, p50 to p99", rows=rows), limit, most, scale.seconds)
