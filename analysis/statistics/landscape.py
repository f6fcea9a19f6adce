"""A table of runs of one workload, best throughput first. Other code checks whether they may be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from analysis.statistics.loading import LoadedRun, flat
from cbsim.draw.report import Table
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.metrics.terminal import lookup, shown

COLUMNS = (  # header, metric, unit
    *(("makespan", "makespan_s", "s"), ("output tokens/s", "output_tokens_per_s", "number")),
    *(("GPU active", "gpu_active", "share"), ("padding", "padding_share", "share")),
    *((f"{name.upper()} {p}", f"{name}_s.{p}", "s") for name in ("ttft", "tpot") for p in ("p50", "p99")),
    *(("E2E p50", "e2e_s.p50", "s"), ("SLO met", "slo.attainment", "share"), ("preemptions", "preemptions", "count")),
    ("$/M output tokens", "cost.usd_per_million_output_tokens", "number"),
)
LOOPS = ("sync", "async")
NEARLY = 0.99  # share of the requests that counts as all, and of the best rate that counts as equal
FEW = 3  # at most this many runs are named
ASIDE = ("name", "question", "loop.mode")  # fields that do not belong to a run's configuration


def landscape(runs: Sequence[LoadedRun], *, by_rate: bool = False) -> Table:
    """Return a row a run, most output tokens/s first, with its factor over the slowest, and an async loop's gain in
    output tokens/s over the sync loop of the same configuration. Numbers equal for all are stated once.

    With `by_rate` the arrival rate was swept: runs stay in order, and a factor would be that of the traffic.
    """
    ordered = list(runs) if by_rate else sorted(runs, key=lambda run: -_rate(run))
    columns = _columns(ordered)
    same = {header: cells[0] for header, cells in columns.items() if len(runs) > 1 and len({*cells}) == 1}
    note = _note(columns, same, by_rate)
    columns = {"run": [run.label for run in ordered]} | {h: cells for h, cells in columns.items() if h not in same}
    if not by_rate:
        slowest, gains = min(map(_rate, runs), default=0.0), _gains(runs)
        columns["factor"] = [f"{_rate(run) / slowest:.2f}x" if slowest else "-" for run in ordered]
        columns["async gain"] = [f"{gains[run.label]:+.1%}" if run.label in gains else "" for run in ordered]
    return Table("Side by side", tuple(columns), list(zip(*columns.values(), strict=True)), note)


def _columns(runs: Sequence[LoadedRun]) -> dict[str, list[str]]:
    """Return the cells of each number that some run has."""
    columns = {header: [_cell(run, metric, unit) for run in runs] for header, metric, unit in COLUMNS}
    return {header: cells for header, cells in columns.items() if {*cells} - {"-"}}


def _note(columns: Mapping[str, Sequence[str]], same: Mapping[str, str], by_rate: bool) -> str:
    note = "Most output tokens/s first; the factor is against the slowest, the gain against the sync loop of "
    note = "Below the knee output tokens/s are those of the traffic." if by_rate else f"{note}the same run."
    if same:
        note += f" The same for all: {', '.join(f'{header} {cell}' for header, cell in same.items())}."
    if any("*" in cell for cells in columns.values() for cell in cells):
        note += f" * too few requests to quote it (p99 needs {SAMPLES_NEEDED['p99']})."
    return note


def _rate(run: LoadedRun) -> float:
    return float(run.summary["output_tokens_per_s"])


def _cell(run: LoadedRun, metric: str, unit: str) -> str:
    distribution, _, statistic = metric.partition(".")
    few = statistic in SAMPLES_NEEDED and statistic in (lookup(run.summary, f"{distribution}.too_few_for") or ())
    return shown(lookup(run.summary, metric), unit) + "*" * few


def configuration(run: LoadedRun) -> str:
    """Return a key of everything that is equal in two runs that differ in their loop only."""
    fields = flat(run.scenario)
    return repr((run.measured, sorted((name, repr(value)) for name, value in fields.items() if name not in ASIDE)))


def _gains(runs: Sequence[LoadedRun]) -> Mapping[str, float]:
    """Return the gain of each async run, by label, that has exactly one sync run to be compared with."""
    gains = {}
    for run in (run for run in runs if run.loop == "async"):
        same = [other for other in runs if other.loop == "sync" and configuration(other) == configuration(run)]
        if len(same) == 1 and _rate(same[0]):
            gains[run.label] = _rate(run) / _rate(same[0]) - 1
    return gains


def findings(runs: Sequence[LoadedRun]) -> list[str]:
    """Return sentences on the runs: which is best, what async gains, where the SLO holds."""
    sentences = [_most(runs), *(_least(runs, name, key) for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")))]
    gains = sorted(_gains(runs).values())
    if gains:
        reach = " to ".join(dict.fromkeys(f"{gain * 100:+.1f}" for gain in (gains[0], gains[-1])))
        reach = f"{reach} % output tokens/s, {len(gains)} times"
        sentences.append(f"Async against sync of the same configuration: {reach}.")
    met = {run.label: share for run in runs if (share := lookup(run.summary, "slo.attainment")) is not None}
    if met:
        enough = [label for label, share in met.items() if share >= NEARLY]
        sentences.append(f"SLO met by at least {NEARLY:.0%} of the requests in {_named(enough, len(met))}.")
    return [sentence for sentence in sentences if sentence]


def _most(runs: Sequence[LoadedRun]) -> str:
    best, worst = max(runs, key=_rate), min(runs, key=_rate)
    near = [run.label for run in runs if run is not best and _rate(run) >= NEARLY * _rate(best)]
    within = f"; within 1 %: {_named(near, len(runs) - 1)}" if near else ""
    sentence = f"Most output tokens/s: {best.label}, {_rate(best):,.4g}{within}."
    return f"{sentence} Fewest: {worst.label}, {_rate(worst):,.4g}." if _rate(best) else ""


def _least(runs: Sequence[LoadedRun], name: str, key: str) -> str:
    """Return a sentence on the least and the greatest of a latency: p99 if all runs have enough requests, else p50."""
    few = any("p99" in (lookup(run.summary, f"{key}.too_few_for") or ()) for run in runs)
    percentile = "p50" if few else "p99"
    values = {run.label: value for run in runs if (value := lookup(run.summary, f"{key}.{percentile}"))}
    if len(values) < 2:
        return ""
    least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    ends = (f"{label}, {shown(values[label], 's')}" for label in (least, most))
    return f"{name} {percentile} is least with {next(ends)}, and greatest with {next(ends)}."


def _named(labels: Sequence[str], of: int) -> str:
    """Return text for some of the runs, by name if they are few."""
    if len(labels) == of:
        return f"all {of} runs" if of > 1 else "the run"
    return f"{', '.join(labels) or 'none'}" if len(labels) <= FEW else f"{len(labels)} of {of} runs"
