"""Several runs: figures with a row a run and a panel a number, of the cost of tokens in money and in speed, and of
latency and throughput over one swept field; and a table of runs of one workload, best throughput first. Other code
checks whether they may be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from analysis.figures import axis
from analysis.figures.axis import spread
from analysis.statistics.loading import LoadedRun
from analysis.statistics.sweeps import Knee, Sweep, SweepGroup, knee, rates
from cbsim.draw.chart import GREY, Bars, Chart, Edge, Floats, Line, Mark, Panel, Points, Spans, Style, series, unit
from cbsim.draw.report import Table
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.metrics.terminal import flat, lookup, shown
from cbsim.record.tables import Ints

LOOPS = ("sync", "async")
TOTALS = (("output tokens/s", "output_tokens_per_s", "number"), ("GPU active", "gpu_active", "share"))
LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
PERCENTILES = ("p50", "p95", "p99")
SAME = 1.01  # a factor: numbers that differ by less are not drawn
Tail = tuple[float | None, float | None]


def side_by_side(runs: Sequence[LoadedRun]) -> Chart:
    """Draw output tokens/s, GPU active, and TTFT and TPOT from their p50 to their p99. Static batching comes first,
    both loops of a configuration are adjacent. Numbers that are equal in all runs are left out, except the tokens.
    """
    order = list(dict.fromkeys(map(configuration, runs)))
    ordered = sorted(runs, key=lambda run: (order.index(configuration(run)), LOOPS.index(run.loop)))
    ordered.sort(key=lambda run: lookup(run.scenario, "scheduler.name") != "static")
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
        low, high = low / scale.size, high / scale.size
        marks.append(Spans(LOOPS[index], at, low, high, series(index), texts=texts))
        marks.append(Points(LOOPS[index], low, at.astype(np.float64), series(index), texts=texts))
    return axis.with_slo(Panel(marks, scale.name, title=f"{title}, p50 and up", rows=rows), limit, most, scale.size)


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


DASHES = {"p50": "solid", "p95": "dashed", "p99": "dotted"}


def curves(swept: Sweep) -> Chart:
    """Draw p50 and p95 of TTFT and TPOT (p99 if all runs have enough samples), output tokens/s, and requests/s served
    (if a rate was swept, against it) or GPU active. One line a group joins the means of repetitions.
    """
    xs = {group.label: np.array(rates(swept, group) if swept.by_rate else group.values) for group in swept.groups}
    knees = {group.label: knee(group, list(xs[group.label])) for group in swept.groups} if swept.by_rate else {}
    last = ("Requests/s served", "requests_per_s") if swept.by_rate else ("GPU active", "gpu_active")
    panels = [_percentiles(swept, xs, name, key) for name, key in LATENCIES]
    panels += [_single(swept, xs, *what) for what in (("Output tokens/s", "output_tokens_per_s"), last)]
    if swept.by_rate:
        x = np.unique(np.concatenate(list(xs.values())))
        offered = Line("as many as offered", x, x, Style(GREY, "dotted"))
        panels[-1] = panels[-1]._replace(marks=[offered, *panels[-1].marks])
    edges = [
        Edge(f"{label}: knee", known.rate, Style(series(index).colour, "dashdot"))
        for index, (label, known) in enumerate(knees.items())
        if known.rate is not None
    ]
    common: Any = {"x": "requests/s offered" if swept.by_rate else swept.field, "x_log": spread(xs.values())}
    panels = [panel._replace(marks=[*edges, *panel.marks], **common) for panel in panels]
    return Chart("sweep", f"Sweep of {swept.field}", _caption(swept, knees), panels, columns=2)


def _caption(swept: Sweep, knees: Mapping[str, Knee]) -> str:
    caption = "Solid p50, dashed p95" + (", dotted p99." if _quotable(swept, "p99") else ".")
    if not _quotable(swept, "p95"):
        caption += " Some runs have too few requests for p95 to be quoted."
    if knees:
        caption += " Requests/s served are over the whole span, the time after the last arrival included. Knee: the "
        caption += "highest rate up to which requests end at least 95 % as fast as they arrive, from the middle "
        caption += "arrival to the last (rate stability), and the wait for a seat is at most half of TTFT at p95. "
        caption += " ".join(known.sentence for known in knees.values())
    return caption


def _quotable(swept: Sweep, percentile: str) -> bool:
    """Whether every run that has values has enough requests for this percentile."""
    few = [lookup(run.summary, f"{key}.too_few_for") for run in _runs(swept) for key in ("ttft_s", "tpot_s")]
    return all(percentile not in (names or ()) for names in few)


def _runs(swept: Sweep) -> list[Any]:
    return [run for group in swept.groups for run in group.runs]


def _percentiles(swept: Sweep, xs: Mapping[str, Floats], name: str, key: str) -> Panel:
    drawn = [percentile for percentile in DASHES if percentile != "p99" or _quotable(swept, percentile)]
    pairs = [*product(enumerate(swept.groups), drawn)]
    values = [_values(group, f"{key}.{percentile}") for (_, group), percentile in pairs]
    known = [part[np.isfinite(part)] for part in values]
    most = max((float(part.max()) for part in known if len(part)), default=0.0)
    scale = unit(most)
    marks: list[Mark] = []
    for ((index, group), percentile), y in zip(pairs, values, strict=True):
        style = series(index)._replace(dash=DASHES[percentile])
        marks += _curve(f"{group.label} {percentile}", xs[group.label], y / scale.size, style)
    panel = Panel(marks, "", scale.name, title=name, y_log=spread(known))
    limit = axis.slo_limits([run.scenario for run in _runs(swept)]).get(key)
    return axis.with_slo(panel, limit, most, scale.size, level=True)


def _single(swept: Sweep, xs: Mapping[str, Floats], title: str, metric: str) -> Panel:
    marks: list[Mark] = []
    for index, group in enumerate(swept.groups):
        style = series(index)._replace(dash="solid")  # dashes distinguish percentiles
        marks += _curve(group.label, xs[group.label], _values(group, metric), style)
    share = metric == "gpu_active"
    return Panel(marks, "", "share" if share else "", title=title, y_range=(0.0, 1.03) if share else None)


def _values(group: SweepGroup, metric: str) -> Floats:
    values = [lookup(run.summary, metric) for run in group.runs]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _curve(name: str, x: Floats, y: Floats, style: Style) -> list[Mark]:
    """Return a marker a run, and a line through the means of those at the same x."""
    there = np.isfinite(y)
    places, at = np.unique(x[there], return_inverse=True)
    means = np.bincount(at, weights=y[there], minlength=len(places)) / np.maximum(np.bincount(at), 1)
    return [Line(name, places, means, style), Points(name, x[there], y[there], style)]


COLUMNS = (  # header, metric, unit
    *(("makespan", "makespan_s", "s"), ("output tokens/s", "output_tokens_per_s", "number")),
    *(("GPU active", "gpu_active", "share"), ("padding", "padding_share", "share")),
    *((f"{name.upper()} {p}", f"{name}_s.{p}", "s") for name in ("ttft", "tpot") for p in ("p50", "p99")),
    *(("E2E p50", "e2e_s.p50", "s"), ("SLO met", "slo.attainment", "share"), ("preemptions", "preemptions", "count")),
    ("$/M output tokens", "cost.usd_per_million_output_tokens", "number"),
)
NEARLY = 0.99  # share of the requests that counts as all, and of the best rate that counts as equal
FEW = 3  # at most this many runs are named
ASIDE = ("name", "question", "loop.mode")  # fields that do not belong to a run's configuration


def table(runs: Sequence[LoadedRun], *, by_rate: bool = False) -> Table:
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
    """Return sentences on the runs: which is best, what async gains, where the SLO holds; none on a single run."""
    if len(runs) < 2:
        return []
    sentences = [_most(runs), *(_least(runs, name, key) for name, key in LATENCIES)]
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
