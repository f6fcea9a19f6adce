"""Runs of one workload side by side: schedulers and loops, best throughput first. Whether they may be compared is
checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.statistics.loading import LoadedRun, flat
from cbsim.draw.chart import Bars, Chart, Panel, Style, series
from cbsim.draw.markdown import Table
from cbsim.results.metrics import SAMPLES_NEEDED
from cbsim.results.terminal import lookup, shown

COLUMNS = (  # header, metric, unit
    ("makespan", "makespan_s", "s"),
    ("output tokens/s", "output_tokens_per_s", "number"),
    ("GPU active", "gpu_active", "share"),
    ("padding", "padding_share", "share"),
    ("TTFT p50", "ttft_s.p50", "s"),
    ("TTFT p99", "ttft_s.p99", "s"),
    ("TPOT p50", "tpot_s.p50", "s"),
    ("TPOT p99", "tpot_s.p99", "s"),
    ("SLO met", "slo.attainment", "share"),
    ("preemptions", "preemptions", "count"),
    ("$/M output tokens", "cost.usd_per_million_output_tokens", "number"),
)
LOOPS = ("sync", "async")
ASIDE = ("name", "question", "loop.mode")  # do not make a run another configuration


def landscape(runs: Sequence[LoadedRun], *, by_rate: bool = False) -> Table:
    """A row a run, most output tokens/s first, with its factor over the slowest, and what an async loop gains in output
    tokens/s over the sync loop of the same configuration.

    With `by_rate` what arrives was swept: runs stay in order, and a factor would be that of the traffic.
    """
    ordered = list(runs) if by_rate else sorted(runs, key=lambda run: -_rate(run))
    slowest = min((_rate(run) for run in runs), default=0.0)
    gains = _gains(runs)
    kept = [column for column in COLUMNS if any(lookup(run.summary, column[1]) is not None for run in runs)]
    rows = [
        (run.label, *(_cell(run, *column[1:]) for column in kept))
        + (() if by_rate else (_factor(run, slowest), gains.get(run.label, "")))
        for run in ordered
    ]
    header = ("run", *(column[0] for column in kept), *(() if by_rate else ("factor", "async gain")))
    says = (
        "Most output tokens/s first; the factor is against the slowest, the gain against the sync loop of the same run."
    )
    if by_rate:
        says = "Below the knee output tokens/s are those of the traffic."
    if any("*" in cell for row in rows for cell in row[1:]):
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


def chart(runs: Sequence[LoadedRun]) -> Chart:
    """Output tokens/s and GPU active, the bars of both loops of a configuration side by side; static batching first."""
    groups: dict[Any, list[LoadedRun]] = {}
    for run in sorted(runs, key=lambda run: (_scheduler(run) != "static", LOOPS.index(run.loop))):
        groups.setdefault(_slot(run, groups), []).append(run)
    names = _names(list(groups.values()))
    panels = [
        _panel(list(groups.values()), names, "output tokens/s", "output_tokens_per_s", "number"),
        _panel(list(groups.values()), names, "GPU active", "gpu_active", "share"),
    ]
    says = "Throughput and GPU-active time over the whole run; sync and async loop of a configuration side by side."
    return Chart("landscape", "Schedulers and loops side by side", says, panels)


def _scheduler(run: LoadedRun) -> str:
    return str(lookup(run.scenario, "scheduler.name"))


def _slot(run: LoadedRun, groups: Mapping[Any, Sequence[LoadedRun]]) -> tuple[str, int]:
    """The bars that a run belongs to; repetitions get bars of their own."""
    number = 0
    while any(other.loop == run.loop for other in groups.get((configuration(run), number), ())):
        number += 1
    return configuration(run), number


def _names(groups: Sequence[Sequence[LoadedRun]]) -> list[str]:
    """Labels less the loop if that leaves them different, else of the first run of each."""
    short = [" ".join(word for word in group[0].label.split() if word not in LOOPS) for group in groups]
    return short if len(set(short)) == len(short) and all(short) else [group[0].label for group in groups]


def _panel(groups: Sequence[Sequence[LoadedRun]], names: Sequence[str], title: str, metric: str, unit: str) -> Panel:
    marks = []
    for index, loop in enumerate(LOOPS):
        kept = [(i, run) for i, group in enumerate(groups) for run in group if run.loop == loop]
        heights = [lookup(run.summary, metric) or 0.0 for _, run in kept]
        labels = [shown(height, unit) for height in heights]
        style: Style = series(index)
        if kept:
            places = np.array([i for i, _ in kept])
            marks.append(Bars(loop, places, np.array(heights, dtype=np.float64), style, labels))
    y_range = (0.0, 1.1) if unit == "share" else None
    return Panel(marks, "", "share" if unit == "share" else "tokens/s", title=title, categories=names, y_range=y_range)
