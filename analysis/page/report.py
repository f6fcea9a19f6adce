"""A report of one or more runs: its sentences and figures, in the order in which they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.figures import axis, requests, side_by_side, steps
from analysis.statistics import compare, pairing, sweeps, trust
from analysis.statistics.compare import MetricDifference
from analysis.statistics.labels import numbered
from analysis.statistics.loading import LoadedRun
from analysis.statistics.sweeps import Sweep
from cbsim.draw import lane_chart
from cbsim.draw.chart import Chart
from cbsim.draw.report import Report, Source, Table, Tile
from cbsim.metrics.catalogue import METRICS, servers
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.metrics.terminal import lookup
from cbsim.record.tables import Requests, Steps, token_times
from cbsim.scenario import documents

MOST_IN_DETAIL = 4  # runs whose steps and requests are drawn; figures of more would be unreadable
ACTIVE = 0.9995  # share of the time, which is shown as 100 %
ALWAYS_ACTIVE = "The GPU is active 100 % of the time, so there is no figure of it."
MOST_LINES = 16  # runs whose distributions are overlaid
TILES = (
    *("makespan_s", "output_tokens_per_s", "gpu_active", "ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99"),
    *("e2e_s.p50", "preemptions", "slo.attainment", "cost.usd_per_million_output_tokens"),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison of two runs: how B differs from A, or the errors of a simulated run against a measured one. `named`
    are both runs by their names in the tables.
    """

    named: Mapping[str, LoadedRun]
    differences: Sequence[MetricDifference]
    tables: Sequence[Table]
    findings: Sequence[str]


def compared(runs: Sequence[LoadedRun], *, everything: bool = False) -> Compared:
    """Compare two runs; a simulated and a measured one, in either order, by errors. Raises Incomparable."""
    a, b = runs
    if a.measured == b.measured:
        differences = compare.differences(a, b)
        table = compare.table(differences, a, b, everything=everything)
        return Compared({"A": a, "B": b}, differences, [table], compare.verdict(differences, everything=everything))
    sim, measured = (b, a) if a.measured else (a, b)
    errors = pairing.errors(sim, measured)
    tables = pairing.tables(sim, measured, errors, everything=everything)
    named = {"simulated": sim, "measured": measured}
    return Compared(named, errors, tables, [pairing.summary_line(errors)])


def build(runs: Sequence[LoadedRun], command: str, *, draw: bool = True) -> Report:
    """Return the report of runs of one workload, or of a sweep; without figures unless `draw`. Raises Incomparable."""
    swept = sweeps.sweep(runs)
    if len(runs) > 1:
        compare.check(runs, swept=swept is not None)
    both = compared(runs) if len(runs) == 2 else None
    subjects = [f"{lookup(run.scenario, 'model.name')} on {lookup(run.scenario, 'hardware.name')}" for run in runs]
    title = ", ".join(dict.fromkeys([*(run.name for run in runs), *subjects]))
    questions = list(dict.fromkeys(str(run.summary.get("question", "")) for run in runs))
    findings = sweeps.findings(swept) if swept else both.findings if both else side_by_side.findings(runs)
    return Report(
        title=f"{title}: {swept.field} from {swept.values[0]:g} to {swept.values[-1]:g}" if swept else title,
        question=questions[0] if len(questions) == 1 else "",
        sources=[source(run, runs[0]) for run in runs],
        caveats=trust.caveats(runs),
        findings=[*findings, *([ALWAYS_ACTIVE] if draw and always_active(runs) else [])],
        tables=both.tables if both else tables(runs, swept),
        charts=charts(runs, swept) if draw else (),
        command=command,
    )


def always_active(runs: Sequence[LoadedRun]) -> bool:
    """Whether the GPU never waits in any of these runs, whose figure would be a straight line."""
    return len(runs) <= MOST_IN_DETAIL and all(run.summary["gpu_active"] >= ACTIVE for run in runs)


def source(run: LoadedRun, first: LoadedRun) -> Source:
    """Return a run's source entry. The first has its whole scenario and environment, others what differs in theirs."""
    kind = f"measured on {run.environment.get('device')}" if run.measured else "simulated"
    alone = run is first
    scenario = run.scenario if alone else difference(run.scenario, first.scenario)
    environment = run.environment if alone else difference(run.environment, first.environment)
    tiles = [tile for metric in TILES if (tile := _tile(run, metric)) is not None]
    text = f"# as {first.label} but for\n" * (not alone) + documents.write(dict(scenario))
    command = str(run.environment.get("command", ""))
    return Source(run.label, run.path.name, kind, tiles, text, json.dumps(environment, indent=2), command)


def difference(document: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a document that differ from the first; null for those that it lacks."""
    changed: dict[str, Any] = {}
    for key in {**document, **first}:
        own, other = document.get(key), first.get(key)
        if isinstance(own, Mapping) and isinstance(other, Mapping):
            changed |= {key: inner} if (inner := difference(own, other)) else {}
        elif own != other:
            changed[key] = own
    return changed


def _tile(run: LoadedRun, metric: str) -> Tile | None:
    value = lookup(run.summary, metric)
    if value is None:
        return None
    distribution, _, statistic = metric.partition(".")
    few = statistic in SAMPLES_NEEDED and statistic in (run.summary[distribution].get("too_few_for") or ())
    note = f"of {run.summary[distribution]['n']}, needs {SAMPLES_NEEDED[statistic]}" if few else ""
    return Tile(metric, METRICS[metric].label, METRICS[metric].shown(value), note)


def tables(runs: Sequence[LoadedRun], swept: Sweep | None) -> list[Table]:
    """Return a table of the runs, best first; the main numbers of few."""
    made = [side_by_side.table(runs, by_rate=swept is not None and swept.by_rate)] if len(runs) > 2 else []
    if len(runs) > MOST_IN_DETAIL:
        return made
    rows = []
    for metric in METRICS.values():
        values = [lookup(run.summary, metric.name) for run in runs] if metric.listed else []
        if any(value is not None for value in values):
            rows.append((metric.label, *map(metric.shown, values)))
    header = ("", *(run.label for run in runs))
    made.append(Table("All numbers", header, rows, "As summary.json of each run has them."))
    for run in runs:
        if "per_server" in run.summary:
            header, *rows = map(tuple, servers(run.summary))
            of = "time that a server was there" if "scaling" in run.summary else "span of all"
            made.append(Table(f"Servers: {run.label}", header, rows, f"Shares are of the {of}."))
    return made


def charts(runs: Sequence[LoadedRun], swept: Sweep | None) -> list[Chart]:
    """Return the figures in the order in which practitioners look at them: those of a sweep, or of runs side by side
    and the trade-off between GPU and user; then those of steps and requests.
    """
    made = sweep_charts(swept) if swept is not None else []
    if swept is None and len(runs) > 2:
        summaries = {run.label: {run.label: run.summary} for run in runs}
        made = [side_by_side.side_by_side(runs), side_by_side.pareto(summaries)]
    if len(runs) > MOST_LINES:
        return made
    if swept is not None or len(runs) > MOST_IN_DETAIL:
        return [*made, latencies(runs)]
    return [*made, *details(runs)]


def latencies(runs: Sequence[LoadedRun]) -> Chart:
    """Draw the distributions of the requests that count: those of each run's window."""
    times = {run.label: _counted(run) if run.summary.get("window_s") else run.times for run in runs}
    measured = {run.label: run.measured for run in runs}
    limits = axis.slo_limits([run.scenario for run in runs])
    return requests.latency({run.label: run.counted for run in runs}, times, measured, limits)


def _counted(run: LoadedRun) -> Requests:
    low, high = run.window_ns
    inside = (run.times.arrival_ns >= low) & (run.times.arrival_ns < high)
    return token_times(run.times.rows.rows(inside), run.table)


def _total_blocks(run: LoadedRun, steps: Steps) -> int | None:
    """Return the blocks of the server of these steps."""
    fleet = run.summary.get("per_server")
    facts = fleet[steps.server[0]] if fleet and steps.server is not None and len(steps) else run.summary
    return facts.get("total_blocks")


def details(runs: Sequence[LoadedRun]) -> list[Chart]:
    """Draw the steps and requests of runs few enough to be compared side by side."""
    firsts = [run.table.parts()[0] for run in runs]
    labels = [
        run.label if first.server is None else f"{run.label}, server {first.server[0]}"
        for run, first in zip(runs, firsts, strict=True)
    ]
    frames = dict(zip(labels, firsts, strict=True))
    parts = runs[0].table.parts()
    several = lane_chart.of_servers(parts) if len(runs) == 1 and len(parts) > 1 else {}
    summaries = {run.label: run.summary for run in runs}
    return [
        latencies(runs),
        lane_chart.lanes(several, at_one_time=True) if several else lane_chart.lanes(frames),
        *([] if always_active(runs) else [steps.gpu_active(frames)]),
        steps.tokens(frames, {label: steps.budget(run.scenario) for label, run in zip(labels, runs, strict=True)}),
        steps.queues(frames),
        steps.blocks(frames, dict(zip(labels, map(_total_blocks, runs, firsts), strict=True))),
        *([steps.preemptions(frames)] if any(run.summary["preemptions"] for run in runs) else []),
        requests.timeline({run.label: run.requests for run in runs}),
        steps.step_time(frames),
        *_servers_and_cost(summaries),
    ]


def _servers_and_cost(summaries: Mapping[str, Mapping[str, Any]]) -> list[Chart]:
    scaled = {label: each for label, each in summaries.items() if "scaling" in each}
    priced = any("cost" in summary for summary in summaries.values())
    return [*([steps.replicas(scaled)] if scaled else []), *([side_by_side.cost(summaries)] if priced else [])]


def sweep_charts(sweep: Sweep) -> list[Chart]:
    """Draw a sweep: trade-off, curves, and cost if there is a price."""
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    priced: dict[str, Mapping[str, Any]] = {}
    for group in sweep.groups:
        names = numbered([f"{value:g}" for value in group.values])
        groups[group.label] = {name: run.summary for name, run in zip(names, group.runs, strict=True)}
        priced |= {f"{group.label} {name}": each for name, each in groups[group.label].items() if "cost" in each}
    made = [side_by_side.curves(sweep), side_by_side.pareto(groups)]
    return [*made, side_by_side.cost(priced)] if priced else made
