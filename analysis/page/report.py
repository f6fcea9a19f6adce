"""A report of one or more runs: what to say and what to draw, in the order in which it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.figures import gallery
from analysis.statistics import comparable, compare, landscape, pairing, sweeps, trust
from analysis.statistics.compare import MetricDifference
from analysis.statistics.content import Report, Source, Tile
from analysis.statistics.loading import LoadedRun
from analysis.statistics.pairing import Error
from cbsim.draw.chart import Chart
from cbsim.draw.markdown import Table
from cbsim.results.metrics import SAMPLES_NEEDED
from cbsim.results.terminal import QUANTITIES, lookup, shown
from cbsim.scenario import documents

Pair = tuple[LoadedRun, LoadedRun]
MOST_IN_DETAIL = 4  # runs whose steps and requests are drawn; the figures of more could not be read
MOST_LINES = 16  # runs whose distributions are drawn over each other
TILES = (
    *("makespan_s", "output_tokens_per_s", "gpu_active", "ttft_s.p50", "ttft_s.p99", "tpot_s.p50", "tpot_s.p99"),
    *("e2e_s.p50", "preemptions", "slo.attainment", "cost.usd_per_million_output_tokens"),
)
UNITS = {metric: (label, unit) for label, metric, unit in QUANTITIES}


def build(runs: Sequence[LoadedRun], command: str) -> Report:
    """The report of runs of one workload, or of a sweep. Raises Incomparable for any others."""
    swept, pair = checked(runs), _pair(runs)
    errors = pairing.errors(*pair) if pair else []
    differences = compare.differences(*runs) if len(runs) == 2 and not pair else []
    title = ", ".join(dict.fromkeys(run.name for run in runs))
    questions = list(dict.fromkeys(str(run.summary.get("question", "")) for run in runs))
    return Report(
        title=f"{title}: {swept.field} from {swept.values[0]:g} to {swept.values[-1]:g}" if swept else title,
        question=questions[0] if len(questions) == 1 else "",
        sources=[source(run, runs[0]) for run in runs],
        caveats=trust.caveats(runs),
        findings=findings(runs, swept, errors, differences),
        tables=tables(runs, pair, errors, differences, by_rate=swept is not None and swept.by_rate),
        charts=charts(runs, swept),
        command=command,
    )


def checked(runs: Sequence[LoadedRun]) -> sweeps.Sweep | None:
    """The sweep that the runs are, if they are one. Raises Incomparable if their numbers must not stand together."""
    if len(runs) == 1:
        return None
    swept = sweeps.sweep(runs)
    comparable.check(runs, swept=swept is not None)
    return swept


def source(run: LoadedRun, first: LoadedRun) -> Source:
    """A run as the report names it. The first has its whole scenario and environment, others what differs in theirs."""
    kind = f"measured on {run.environment.get('device')}" if run.measured else "simulated"
    alone = run is first
    scenario = run.scenario if alone else difference(run.scenario, first.scenario)
    environment = run.environment if alone else difference(run.environment, first.environment)
    return Source(
        label=run.label,
        folder=run.path.name,
        kind=kind,
        tiles=[tile for metric in TILES if (tile := _tile(run, metric)) is not None],
        scenario=f"# as {first.label} but for\n" * (not alone) + documents.write(dict(scenario)),
        environment=json.dumps(environment, indent=2),
        command=str(run.environment.get("command", "")),
    )


def difference(document: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    """What of a document is not as in the first; null for what it lacks."""
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
    label, unit = UNITS[metric]
    distribution, _, statistic = metric.partition(".")
    few = statistic in SAMPLES_NEEDED and statistic in run.summary[distribution].get("too_few_for", ())
    note = f"of {run.summary[distribution]['n']}, needs {SAMPLES_NEEDED[statistic]}" if few else ""
    return Tile(metric, label, shown(value, unit), note)


def findings(
    runs: Sequence[LoadedRun],
    swept: sweeps.Sweep | None,
    errors: Sequence[Error],
    differences: Sequence[MetricDifference],
) -> list[str]:
    """What the runs say together, in sentences."""
    if swept is not None:
        return sweeps.findings(swept)
    if len(runs) > 2:
        return landscape.findings(runs)
    return [pairing.summary_line(errors)] if errors else compare.verdict(differences) if differences else []


def tables(
    runs: Sequence[LoadedRun],
    pair: Pair | None,
    errors: Sequence[Error],
    differences: Sequence[MetricDifference],
    *,
    by_rate: bool,
) -> list[Table]:
    """Errors if one of two runs was measured, else how they differ; others side by side."""
    if pair:
        return pairing.tables(*pair, metric_errors=errors)
    if differences:
        return [compare.table(differences, runs[0].label, runs[1].label)]
    several = [landscape.landscape(runs, by_rate=by_rate)] if len(runs) > 2 else []
    return [*several, side_by_side(runs)] if len(runs) <= MOST_IN_DETAIL else several


def _pair(runs: Sequence[LoadedRun]) -> Pair | None:
    """(simulated, measured), if that is what the two runs are."""
    if len(runs) != 2 or runs[0].measured == runs[1].measured:
        return None
    return (runs[1], runs[0]) if runs[0].measured else (runs[0], runs[1])


def side_by_side(runs: Sequence[LoadedRun]) -> Table:
    """The main numbers of every run."""
    rows = []
    for label, metric, unit in QUANTITIES:
        values = [lookup(run.summary, metric) for run in runs]
        if any(value is not None for value in values):
            rows.append((label, *(shown(value, unit) for value in values)))
    return Table("All numbers", ("", *(run.label for run in runs)), rows, "As summary.json of each run has them.")


def charts(runs: Sequence[LoadedRun], swept: sweeps.Sweep | None) -> list[Chart]:
    """Figures in the order in which practitioners look at them."""
    several = gallery.swept(swept) if swept is not None else gallery.several(runs) if len(runs) > 2 else []
    if len(runs) > MOST_LINES:
        return several
    if swept is not None or len(runs) > MOST_IN_DETAIL:
        return [*several, gallery.latencies(runs)]
    return [*several, *gallery.details(runs)]


def facts(report: Report) -> bytes:
    """report.json: what the index says of the report, its tiles, the keys of its figures, its own facts."""
    runs = [
        {
            "label": source.label,
            "kind": source.kind,
            "folder": source.folder,
            "tiles": {t.metric: t.value for t in source.tiles},
        }
        for source in report.sources
    ]
    about = {"title": report.title, "question": report.question, "command": report.command}
    everything = {**about, "runs": runs, "figures": [chart.key for chart in report.charts], **report.facts}
    return (json.dumps(everything, indent=2, allow_nan=False) + "\n").encode()
