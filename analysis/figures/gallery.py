"""Every figure of runs, in the order in which practitioners look at them."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.figures import activity, cost, curves, latency, memory, queues, requests, side_by_side, slo, steps
from analysis.statistics.loading import LoadedRun
from analysis.statistics.sweeps import Sweep
from cbsim.draw import lane_chart
from cbsim.draw.chart import Chart
from cbsim.results.metrics import Requests, token_times


def latencies(runs: Sequence[LoadedRun]) -> Chart:
    """Distributions of the requests that count: those of each run's window."""
    times = {run.label: run.times if _all(run) else _counted(run) for run in runs}
    measured = {run.label: run.measured for run in runs}
    limits = slo.limits([run.scenario for run in runs])
    return latency.latency({run.label: run.counted for run in runs}, times, measured, limits)


def _all(run: LoadedRun) -> bool:
    return run.summary.get("window_s") is None


def _counted(run: LoadedRun) -> Requests:
    low, high = run.window_ns
    inside = (run.times.arrival_ns >= low) & (run.times.arrival_ns < high)
    return token_times(run.times.rows.rows(inside), run.table)


def details(runs: Sequence[LoadedRun]) -> list[Chart]:
    """What happened step by step and request by request, of runs few enough to be seen side by side."""
    frames = {run.label: run.table for run in runs}
    summaries = {run.label: run.summary for run in runs}
    charts = [
        latencies(runs),
        lane_chart.lanes(frames),
        activity.gpu_active(frames),
        steps.tokens(frames, {run.label: steps.budget(run.scenario) for run in runs}),
        queues.queues(frames),
        memory.blocks(frames, {run.label: run.summary.get("total_blocks") for run in runs}),
        *([queues.preemptions(frames)] if any(run.summary["preemptions"] for run in runs) else []),
        requests.timeline({run.label: run.requests for run in runs}),
        steps.step_time(frames),
    ]
    return [*charts, cost.cost(summaries)] if any("cost" in summary for summary in summaries.values()) else charts


def several(runs: Sequence[LoadedRun]) -> list[Chart]:
    """Of runs of one workload: their numbers side by side, and the trade-off between GPU and user."""
    return [side_by_side.side_by_side(runs), cost.pareto({run.label: {run.label: run.summary} for run in runs})]


def swept(sweep: Sweep) -> list[Chart]:
    """Of a sweep: trade-off, curves, and cost if there is a price."""
    groups = {}
    for group in sweep.groups:
        names = [f"{value:g}" for value in group.values]
        names = [f"{name} #{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names)]
        groups[group.label] = {name: run.summary for name, run in zip(names, group.runs, strict=True)}
    priced = {
        f"{label} {name}": summary
        for label, summaries in groups.items()
        for name, summary in summaries.items()
        if "cost" in summary
    }
    made = [curves.curves(sweep), cost.pareto(groups)]
    return [*made, cost.cost(priced)] if priced else made
