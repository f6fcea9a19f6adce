"""Runs of one workload side by side: schedulers and loops, best throughput first. Whether they may be compared is
checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.statistics.loading import LoadedRun, flat
from cbsim.draw.markdown import Table
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.metrics.terminal import lookup, shown

COLUMNS = (  # header, metric, unit
    ("makespan", "makespan_s", "s"),
    ("output tokens/s", "output_tokens_per_s", "number"),
    ("GPU active", "gpu_active", "share"),
    ("padding", "padding_share", "share"),
    ("TTFT p50", "ttft_s.p50", "s"),
    ("TTFT p99", "ttft_s.p99", "s"),
    ("TPOT p50", "tpot_s.p50", "s"),
    ("TPOT p99", "tpot_s.p99", "s"),
    ("E2E p50", "e2e_s.p50", "s"),
    ("SLO met", "slo.attainment", "share"),
    ("preemptions", "preemptions", "count"),
    ("$/M output tokens", "cost.usd_per_million_output_tokens", "number"),
)
LOOPS = ("sync", "async")
KEPT = 0.99  # of the requests
NEAR = 0.99  # of the most is as good
FEW = 3  # are named
ASIDE = ("name", "question", "loop.mode")  # do not make a run another configuration


def landscape(runs: Sequence[LoadedRun], *, by_rate: bool = False) -> Table:
    """A row a run, most output tokens/s first, with its factor over the slowest, and what an async loop gains in output
    tokens/s over the sync loop of the same configuration. What is the same for all is said once.

    With `by_rate` what arrives was swept: runs stay in order, and a factor would be that of the traffic.
    """
    ordered = list(runs) if by_rate else sorted(runs, key=lambda run: -_rate(run))
    slowest = min((_rate(run) for run in runs), default=0.0)
    gains = _gains(runs)
    there = [column for column in COLUMNS if any(lookup(run.summary, column[1]) is not None for run in runs)]
    cells = {column: [_cell(run, *column[1:]) for run in ordered] for column in there}
    same = [column for column in there if len(runs) > 1 and len(set(cells[column])) == 1]
    kept = [column for column in there if column not in same]
    rows = [
        (run.label, *(cells[column][i] for column in kept))
        + (() if by_rate else (_factor(run, slowest), gains.get(run.label, "")))
        for i, run in enumerate(ordered)
    ]
    header = ("run", *(column[0] for column in kept), *(() if by_rate else ("factor", "async gain")))
    says = (
        "Most output tokens/s first; the factor is against the slowest, the gain against the sync loop of the same run."
    )
    if by_rate:
        says = "Below the knee output tokens/s are those of the traffic."
    if same:
        says += f" The same for all: {', '.join(f'{column[0]} {cells[column][0]}' for column in same)}."
    if any("*" in cell for column in there for cell in cells[column]):
        says += f" * too few requests to quote it (p99 needs {SAMPLES_NEEDED['p99']})."
    return Table("Side by side", header, rows, says)


def _rate(run: LoadedRun) -> float:
    return float(run.summary["output_tokens_per_s"])


def _factor(run: LoadedRun, slowest: float) -> str:
    return f"{_rate(run) / slowest:.2f}x" if slowest else "-"


def _cell(run: LoadedRun, metric: str, unit: str) -> str:
    distribution, _, statistic = metric.partition(".")
    few = statistic in SAMPLES_NEEDED and statistic in (lookup(run.summary, f"{distribution}.too_few_for") or ())
    return shown(lookup(run.summary, metric), unit) + "*" * few


def configuration(run: LoadedRun) -> str:
    """What has to be equal for two runs to differ in their loop only."""
    fields = flat(run.scenario)
    return repr((run.measured, sorted((name, repr(value)) for name, value in fields.items() if name not in ASIDE)))


def _gains(runs: Sequence[LoadedRun]) -> Mapping[str, str]:
    """By label of each async run that has exactly one sync run to be compared with."""
    gains = {}
    for run in runs if len(runs) > 1 else ():
        same = [other for other in runs if other.loop == "sync" and configuration(other) == configuration(run)]
        if run.loop == "async" and len(same) == 1 and _rate(same[0]):
            gains[run.label] = f"{_rate(run) / _rate(same[0]) - 1:+.1%}"
    return gains


def findings(runs: Sequence[LoadedRun]) -> list[str]:
    """What the runs say side by side, in sentences: who is best, what async gains, where the SLO holds."""
    sentences = [_most(runs), *(_least(runs, name, key) for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")))]
    gains = [float(gain.rstrip("%")) for gain in _gains(runs).values()]
    if gains:
        reach = f"{min(gains):+.1f}" if min(gains) == max(gains) else f"{min(gains):+.1f} to {max(gains):+.1f}"
        sentences.append(
            f"Async against sync of the same configuration: {reach} % output tokens/s, {len(gains)} times."
        )
    met = {run.label: share for run in runs if (share := lookup(run.summary, "slo.attainment")) is not None}
    if met:
        kept = [label for label, share in met.items() if share >= KEPT]
        sentences.append(f"SLO met by at least {KEPT:.0%} of the requests in {_named(kept, len(met))}.")
    return [sentence for sentence in sentences if sentence]


def _most(runs: Sequence[LoadedRun]) -> str:
    best, worst = max(runs, key=_rate), min(runs, key=_rate)
    near = [run.label for run in runs if run is not best and _rate(run) >= NEAR * _rate(best)]
    said = f"Most output tokens/s: {best.label}, {_rate(best):,.4g}"
    said += f"; within 1 %: {_named(near, len(runs) - 1)}" if near else ""
    return f"{said}. Fewest: {worst.label}, {_rate(worst):,.4g}." if _rate(best) else ""


def _least(runs: Sequence[LoadedRun], name: str, key: str) -> str:
    """The least and the greatest of a latency: its p99 if all runs may be quoted on it, else its p50."""
    few = any("p99" in (lookup(run.summary, f"{key}.too_few_for") or ()) for run in runs)
    percentile = "p50" if few else "p99"
    values = {run.label: value for run in runs if (value := lookup(run.summary, f"{key}.{percentile}"))}
    if len(values) < 2:
        return ""
    least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    ends = (f"{label}, {shown(values[label], 's')}" for label in (least, most))
    return f"{name} {percentile} is least with {next(ends)}, and greatest with {next(ends)}."


def _named(labels: Sequence[str], of: int) -> str:
    """Some of the runs, by name if they are few."""
    if len(labels) == of:
        return f"all {of} runs" if of > 1 else "the run"
    return f"{', '.join(labels) or 'none'}" if len(labels) <= FEW else f"{len(labels)} of {of} runs"
