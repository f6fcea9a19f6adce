"""`python -m cbsim score CASE`: a recorded run replayed and scored, as tables, figures and data."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import BLUE, RED, Bars, Chart, Line, Panel, Style
from cbsim.draw.chart import series as style
from cbsim.draw.report import Report, Table
from cbsim.measured.recorded import case, score
from cbsim.measured.recorded.case import Case
from cbsim.measured.recorded.score import Ablated, MetricScore, Replayed, Series, Served, recorded, replay
from cbsim.scenario.costs import TableSettings
from cbsim.scenario.scenario import Scenario
from cbsim.schedulers.vllm.settings import VllmSettings

NEAR_LIMIT = 0.9  # the share of the KV cache above which the number of blocks determines which requests wait
ADDED = "Added: {row_us:g} us a request and step, and the CPU cost of vLLM's loop; both are priors (docs/fidelity.md)."
SCORED = ("", "simulated", "measured", "error")
UNITS = {name: (name.upper(), "ms", 1e3) for name in score.METRICS} | {name: (name, "ms", 1e3) for name in score.PARTS}
UNITS |= {"makespan": ("makespan", "s", 1.0)}


class Validation(NamedTuple):
    """The replay, scores, series and ablations of one case."""

    case: Case
    scenario: Scenario
    replayed: Replayed
    scores: Sequence[MetricScore]
    parts: Sequence[MetricScore]
    series: Series
    ablated: Sequence[Ablated]

    @property
    def blocks(self) -> int:
        """The number of KV blocks of a server, as its scheduler counts them."""
        return self.scenario.options(self.scenario.loop.mode).num_blocks

    @property
    def source(self) -> str:
        """The source of the number of blocks: given, recorded or derived."""
        if self.scenario.kv_cache.num_blocks != self.case.settings["kv_cache"]["num_blocks"]:
            return "given"
        return "recorded" if self.case.blocks_measured else "derived"


def study(folder: Path, *, pack: Path | None, hardware: str | None, overrides: Sequence[str], ablate: bool) -> Report:
    """Replay and score a case. Return its report: findings, tables, charts and data. Raises ScenarioError."""
    recording = case.read(folder, pack, hardware, overrides)
    scenario, measured = recording.scenario(), recorded(recording)
    done = replay(recording, scenario)
    scores, parts = score.scores(done.served, measured), score.latencies(done.served, measured, score.PARTS)
    ablated = score.ablate(recording) if ablate else []
    validation = Validation(recording, scenario, done, scores, parts, score.series(recording, done), ablated)
    charts = [series_chart(recording.name, validation.series), latency_chart(recording.name, done.served, measured)]
    return Report(
        title=f"{recording.name} against a recorded vLLM run",
        question=str(recording.settings["question"]),
        findings=_findings(validation),
        tables=[*_errors(validation), _run(validation), *([_ablation(ablated)] if ablated else [])],
        charts=[*charts, *([ablation_chart(recording.name, ablated)] if ablated else [])],
        data=data(validation),
    )


def data(validation: Validation) -> dict[str, Any]:
    """Return the numbers as plain values: seconds, and errors relative to the measurement."""
    series = validation.series
    return {
        "case": validation.case.name,
        "errors": [entry.facts() for entry in validation.scores],
        "parts_of_ttft": [entry.facts() for entry in validation.parts],
        "steps": validation.replayed.step_count,
        "preemptions": validation.replayed.preemptions,
        "recomputed_tokens": validation.replayed.recomputed_tokens,
        "kv_blocks": validation.blocks,
        "kv_blocks_source": validation.source,
        "kv_use_peak": validation.replayed.kv_use_peak,
        "mean_absolute_difference": {name: series.difference(name) for name in series.measured},
        "scenario": validation.case.settings,
        "set": list(validation.case.overrides),
        "ablation": [
            each._asdict() | {"errors": [part.facts() for part in each.errors]} for each in validation.ablated
        ],
    }


def _errors(validation: Validation) -> list[Table]:
    taken = f"{len(validation.case.arrivals)} requests. TTFT and E2E count from when the engine took a request in."
    queued = "In the queue, and from the first step that has the request to its first token."
    latencies = Table("Latencies", SCORED, [_row(scored) for scored in validation.scores], taken)
    return [latencies, Table("The two parts of TTFT", SCORED, [_row(scored) for scored in validation.parts], queued)]


def _row(scored: MetricScore) -> tuple[str, ...]:
    name, unit, factor = UNITS[scored.metric]
    shown = [f"{value * factor:,.2f}" for value in (scored.simulated_s, scored.measured_s)]
    return (f"{name} {scored.statistic}".strip() + f", {unit}", *shown, scored.shown)


def _run(validation: Validation) -> Table:
    done, series = validation.replayed, validation.series
    rows = []
    for name, (label, _) in TITLES.items():
        if name in series.measured:
            means = [float(part[name].mean()) for part in (series.simulated, series.measured)]
            form = "{:.1%}" if name == "kv_use" else "{:.2f}"
            shown = map(form.format, (*means, series.difference(name)))
            rows.append((f"{label.removesuffix(', %')}, mean", *shown))
    rows.append(("KV blocks a server", f"{validation.blocks:,}", validation.source, ""))
    rows.append(("KV cache in use, peak", f"{done.kv_use_peak:.1%}", "", ""))
    counts = {"preemptions": done.preemptions, "recomputed tokens": done.recomputed_tokens, "steps": done.step_count}
    rows += [(name, f"{count:,}", "not recorded", "") for name, count in counts.items()]
    return Table("The run", ("once a second", "simulated", "measured", "mean difference"), rows)


def _ablation(ablated: Sequence[Ablated]) -> Table:
    rows = []
    for entry in ablated:
        means = [part.shown for part in entry.errors if part.statistic in ("mean", "")]
        largest = abs(_worst(entry.errors).error)
        rows.append((entry.name, *means, f"{largest:.2%}", str(entry.preemptions)))
    header = ("replayed with", "TTFT mean", "TPOT mean", "E2E mean", "makespan", "largest", "preemptions")
    caption = "Errors with one part changed at a time; `largest` is over all means and percentiles."
    return Table("What carries the result", header, rows, caption)


def _findings(validation: Validation) -> list[str]:
    means, worst = [each for each in validation.scores if each.statistic == "mean"], _worst(validation.scores)
    errors = ", ".join(f"{UNITS[each.metric][0]} {each.shown}" for each in means)
    name = f"{UNITS[worst.metric][0]} {worst.statistic}"
    return [
        f"Errors of the means: {errors}; the largest of all is that of {name}, {worst.shown}.",
        *_caveats(validation),
        _basis(validation),
    ]


def _worst(scores: Sequence[MetricScore]) -> MetricScore:
    """Return the largest error of a statistic, of those that are finite if any is."""
    return max((each for each in scores if each.statistic), key=lambda each: (isfinite(each.error), abs(each.error)))


def _basis(validation: Validation) -> str:
    """Return a sentence on the sources of the replay's times, and on the fields changed by the user."""
    cost, workload = validation.scenario.cost, validation.scenario.workload
    times, added = f"the cost model {cost.kind}'s", ""
    if isinstance(cost, TableSettings):
        times, added = f"those of {'/'.join(Path(cost.path).parts[-4:])}", f" {ADDED.format(row_us=cost.row_s * 1e6)}"
    taken = ["when its engine took each request in"] if getattr(workload, "recorded", None) else []
    taken += ["the number of cache blocks"] if validation.source == "recorded" else []
    basis = f"Kernel times are {times}. Of the run itself: {' and '.join(taken) or 'nothing'}.{added}"
    changed = ", ".join(validation.case.overrides)
    return f"{basis} Changed: {changed}." if changed else basis


def _caveats(validation: Validation) -> list[str]:
    caveats = []
    share = validation.replayed.kv_use_peak
    if share >= NEAR_LIMIT and validation.source == "derived":
        caveats.append(
            f"Capacity: KV use reaches {share:.0%} of {validation.blocks:,} blocks, which are "
            "derived from the memory and not measured. vLLM finds fewer: then more requests wait or are preempted."
        )
    if validation.case.link_assumed:
        rate, latency = case.LINK["bytes_s"] / case.GIB, case.LINK["latency_s"] * 1e6
        caveats.append(
            f"config.json names no link between the GPUs: {rate:g} GiB/s and {latency:g} us a message are assumed."
        )
    version, scheduler = validation.case.version, validation.scenario.scheduler
    rules = scheduler.version if isinstance(scheduler, VllmSettings) else scheduler.name
    if not version.startswith(rules):
        caveats.append(f"The run is of vLLM {version}; it was replayed by the rules of {rules}.")
    return caveats


SIMULATED, MEASURED = Style(BLUE, "solid"), Style(RED, "dashed")
TITLES = {
    "running": ("requests running", 1.0),
    "waiting": ("requests waiting", 1.0),
    "kv_use": ("KV cache in use, %", 100.0),
}
MOST_SHOWN = 30.0  # the largest error drawn, in percent


def series_chart(case: str, logged: Series) -> Chart:
    """Draw running requests, waiting requests and KV use once a second."""
    panels = []
    for name in logged.measured:
        title, factor = TITLES[name]
        both = ("measured", logged.measured, MEASURED), ("simulated", logged.simulated, SIMULATED)
        marks = [Line(whose, logged.at_s, of[name] * factor, look) for whose, of, look in both]
        panels.append(Panel(marks, x="seconds", y=title))
    caption = "Once a second, as the engine logged it, beside the replay at the same times."
    if "kv_use" not in logged.measured:
        caption += " The run did not record how much of its cache was in use."
    return Chart("series", f"{case}: the run over time", caption, panels, share_x=True)


def latency_chart(case: str, simulated: Served, measured: Served) -> Chart:
    """Draw the share of requests within a latency, for TTFT, TPOT and E2E."""
    panels, both = [], (("measured", measured, MEASURED), ("simulated", simulated, SIMULATED))
    for metric, title in (("ttft_s", "TTFT, s"), ("tpot_s", "TPOT, ms"), ("e2e_s", "E2E, s")):
        factor = 1000.0 if metric == "tpot_s" else 1.0
        ordered = [(whose, np.sort(getattr(of, metric) * factor), look) for whose, of, look in both]
        marks = [Line(whose, x, np.arange(1, len(x) + 1) / len(x), look, step=True) for whose, x, look in ordered]
        panels.append(Panel(marks, x=title, y="share of requests"))
    caption = "Share of the requests that took at most so long."
    return Chart("latencies", f"{case}: latencies", caption, panels, columns=3)


def ablation_chart(case: str, ablated: Sequence[Ablated]) -> Chart:
    """Draw the errors of the means with one part of the model changed at a time."""
    errors = {
        metric: 100 * np.array([s.error for e in ablated for s in e.errors if s[:2] == (metric, "mean")])
        for metric in ("ttft", "tpot", "e2e")
    }
    reach = max(5.0, min(MOST_SHOWN, 1.2 * max(float(np.abs(values).max()) for values in errors.values())))
    cut, bars = 0.85 * reach, list[Bars]()
    for index, (metric, values) in enumerate(errors.items()):
        labels = [f"{value:+.1f}" for value in values]
        bars.append(Bars(metric.upper(), np.arange(len(ablated)), np.clip(values, -cut, cut), style(index), labels))
    caption = "Error of the mean latency against the recorded run, with one part of the model changed at a time. "
    caption += f"Bars are cut at {cut:.0f} %; their labels are the errors."
    names = [entry.name for entry in ablated]
    panel = Panel(bars, x="", y="error of the mean, %", categories=names, y_range=(-reach, reach))
    return Chart("ablation", f"{case}: what carries the result", caption, [panel])
