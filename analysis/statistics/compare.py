"""A comparison of two runs of one workload, metric by metric: how B differs from A, and whether beyond chance."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from analysis.statistics import intervals
from analysis.statistics.intervals import CONFIDENCE, SHARES, STATISTICS, Interval
from analysis.statistics.loading import LoadedRun
from cbsim.draw.report import Table
from cbsim.errors import CheckError, UserError
from cbsim.metrics.catalogue import METRICS, SINGLE
from cbsim.metrics.checks import METRIC, NUMBER, OPERATORS, TIMES, bounded, named
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.metrics.terminal import flat, lookup, shown

FEW = 30  # samples; with fewer no interval is reliable
ONE_VALUE, TOO_FEW = "one value a run", "too few samples"
NOT_SEEN, MARK = "no difference seen", "*"
LEVEL = f"{CONFIDENCE * 100:.0f} %"
COUNTED_ALIKE = ("schema_version", "percentile_method", "window_s")
RESAMPLED = {*SHARES, *(name for name in METRICS if name not in SINGLE and name.rpartition(".")[2] in STATISTICS)}
AT_MOST_NAMED = 5  # fields of a workload
ABSENT = object()


class Incomparable(UserError):  # noqa: N818  # the name states a property of the runs
    """An error for runs whose numbers must not be compared; the message names both and every reason, one a line."""


def check(runs: Sequence[LoadedRun], *, swept: bool = False) -> None:
    """Raise Incomparable unless all runs are complete, of one workload, and counted alike.

    The runs of a sweep may have been `swept` over their workloads.
    """
    reasons = [f"{run.label} ({run.path}): incomplete: {run.incomplete}" for run in runs if run.incomplete]
    for run in runs[1:]:
        reasons += [f"{runs[0].label} and {run.label}: {reason}" for reason in _differences(runs[0], run, swept)]
    if reasons:
        raise Incomparable("\n".join(["these runs cannot be compared:", *reasons]))


def _differences(a: LoadedRun, b: LoadedRun, swept: bool) -> Iterator[str]:
    hashes = [run.environment.get("workload_hash") for run in (a, b)]
    if not swept and (None in hashes or hashes[0] != hashes[1]):
        reason = "env.json has no workload_hash to tell by" if None in hashes else _changed(a, b)
        yield f"the workload differs: {reason}"
    for key in COUNTED_ALIKE:
        ours, theirs = a.summary.get(key), b.summary.get(key)
        if ours != theirs:
            yield f"{key} is {_said(ours)} and {_said(theirs)}"


def _changed(a: LoadedRun, b: LoadedRun) -> str:
    """Return the scenario's fields that make the workloads differ."""
    ours, theirs = (flat(run.scenario) for run in (a, b))
    both = {name: (ours.get(name, ABSENT), theirs.get(name, ABSENT)) for name in {**ours, **theirs}}
    both = {name: each for name, each in both.items() if name == "seed" or name.startswith("workload.")}
    texts = [f"{name} is {_said(own)} and {_said(other)}" for name, (own, other) in both.items() if own != other]
    more = [f"{len(texts) - AT_MOST_NAMED} more fields"] * (len(texts) > AT_MOST_NAMED)
    return ", ".join([*texts[:AT_MOST_NAMED], *more]) or (
        "no field of it does, so the data that it was made from or the code that made it"
    )


def _said(value: Any) -> str:
    return "not there" if value is ABSENT else "null" if value is None else str(value)


def _shown() -> Iterator[str]:
    """Yield the metrics of the terminal's table, with all percentiles of the main latencies and of ITL."""
    for metric in (name for name, each in METRICS.items() if each.listed):
        head, _, statistic = metric.partition(".")
        for name in ("itl_s", head) if head == "e2e_s" else (head,):
            if statistic == "p50":
                yield from (f"{name}.{part}" for part in STATISTICS[1:])
        if not statistic.startswith("p"):
            yield metric


SHOWN = tuple(_shown())


class MetricDifference(NamedTuple):
    """A metric of two runs. `metric` is its dotted key in summary.json, `unit` as `terminal.shown` takes it.

    `a` and `b` are those of the summaries: of all requests of each run, while the interval may be based on fewer, which
    `method` states. `n` is the smaller run's samples. `few`: too few of them for this percentile, or for any interval.
    """

    metric: str
    label: str
    unit: str
    a: float
    b: float
    interval: Interval | None
    n: int
    method: str
    few: bool

    @property
    def is_share(self) -> bool:
        return self.unit.endswith("share")

    @property
    def delta(self) -> float:
        """B - A, in the metric's unit; of shares, 0.02 is 2 points."""
        return self.b - self.a

    @property
    def relative(self) -> float | None:
        """B / A - 1; None if A is not above 0."""
        return 0.0 if self.a == self.b else self.b / self.a - 1 if self.a > 0 else None

    @property
    def change(self) -> float | None:
        """`delta` of a share, `relative` of any other metric."""
        return self.delta if self.is_share else self.relative

    @property
    def range(self) -> tuple[float, float] | None:
        """The interval of `change`, None without one."""
        return self.interval and (self.interval.delta if self.is_share else self.interval.relative)

    @property
    def seen(self) -> bool | None:
        """Whether 0 is outside the interval; None without one."""
        return self.interval.seen if self.interval else None


def differences(a: LoadedRun, b: LoadedRun) -> list[MetricDifference]:
    """Return every metric that `--check` supports and both runs have. Raises Incomparable if they are."""
    check((a, b))
    requests, steps = intervals.of_requests(a, b), intervals.of_steps(a, b)
    left_out = ", ".join(
        f"{count - requests.units:,} of {count:,} in {side}"
        for side, run in (("A", a), ("B", b))
        if (count := int(run.counted["done"].sum())) > requests.units
    )
    paired = f"paired bootstrap over {requests.units:,} requests, {requests.replicates:,} draws"
    paired += f"; without {left_out}" if left_out else ""
    in_blocks = f"block bootstrap over {steps.units:,} steps, {steps.replicates:,} draws"
    compared = []
    for metric, what in METRICS.items():
        before, after = (lookup(run.summary, metric) for run in (a, b))
        if before is not None and after is not None:
            of_requests = metric not in SINGLE and not metric.startswith("step_time_s")
            source, how = (requests, paired) if of_requests else (steps, in_blocks)
            interval = source.by_metric.get(metric)
            method = how if interval else TOO_FEW if metric in RESAMPLED else ONE_VALUE
            if metric in SINGLE:
                n, few = source.units if interval else 1, False
            else:  # gaps of few requests are few samples, however many they are
                distribution, _, statistic = metric.partition(".")
                n = min(int(lookup(run.summary, f"{distribution}.n")) for run in (a, b))
                few = min(n, source.units) < {"n": 0, **SAMPLES_NEEDED}.get(statistic, FEW)
            compared.append(MetricDifference(metric, what.label, what.form, before, after, interval, n, method, few))
    return compared


def table(differences: Sequence[MetricDifference], a: LoadedRun, b: LoadedRun, *, everything: bool = False) -> Table:
    """Return a row a metric that either run has; without `everything`, only the main metrics."""
    methods = sorted({difference.method for difference in differences if difference.interval}, reverse=True)
    note = (
        f"Change of B against A, with {LEVEL} intervals: {'; '.join(methods) or 'none, for want of samples'}. They "
        "know how much requests and steps vary within these runs, not another seed or another run of the same, and are "
        f"too narrow where requests share a queue. {MARK}: too few samples to rely on."
    )
    header = ("metric", a.label, b.label, "change", f"{LEVEL} interval")
    return Table("Differences", header, rows(differences, (a, b), everything=everything), note)


def rows(
    differences: Sequence[MetricDifference], runs: Sequence[LoadedRun], *, everything: bool
) -> list[tuple[str, ...]]:
    """Return the cells of each metric that A or B, the `runs`, has: its name, A, B, the change and its interval."""
    known, cells = {difference.metric: difference for difference in differences}, list[tuple[str, ...]]()
    for name in METRICS if everything else SHOWN:
        if d := known.get(name):
            label = f"{d.label} {MARK}" if d.few else d.label
            cells.append((label, shown(d.a, d.unit), shown(d.b, d.unit), change_text(d), range_text(d)))
            continue
        values = [lookup(run.summary, name) for run in runs]
        if any(value is not None for value in values):
            cells.append((METRICS[name].label, *map(METRICS[name].shown, values), "-", "one run has none"))
    return cells


def change_text(difference: MetricDifference) -> str:
    """Return text such as "+6.1 %" or "-2.0 pt"; "=" if nothing changed; in the metric's unit if A is 0."""
    if difference.a == difference.b:
        return "="
    if difference.change is None:
        return signed(difference.delta, difference.unit)
    return f"{difference.change * 100:+z.{_digits(difference.change)}f} {'pt' if difference.is_share else '%'}"


def range_text(difference: MetricDifference) -> str:
    """Return text such as "+5.2 .. +7.0 %", and what follows from it; or why there is none."""
    if not difference.interval:
        return difference.method
    if not any(difference.interval.delta):
        return NOT_SEEN
    if difference.range is None:
        ends = " .. ".join(signed(end, difference.unit) for end in difference.interval.delta)
    else:
        digits, unit = _digits(*difference.range), "pt" if difference.is_share else "%"
        ends = " .. ".join(f"{end * 100:+z.{digits}f}" for end in difference.range) + f" {unit}"
    return ends if difference.seen else f"{ends}: {NOT_SEEN}"


def _digits(*changes: float) -> int:
    return 1 if max(abs(change) for change in changes) >= 0.01 else 2


def signed(value: float, unit: str) -> str:
    """Return a difference in a metric's own unit; of shares, in points."""
    if unit.endswith("share"):
        return f"{value * 100:+z.{_digits(value)}f} pt"
    return f"{'-' if value < 0 else '+'}{shown(abs(value), unit)}"


def verdict(differences: Sequence[MetricDifference], *, everything: bool = False) -> list[str]:
    """Summarise the changes in two or three sentences: throughput and makespan, TTFT and TPOT, and the number of
    significant ones among the rows of the table or of `everything`.
    """
    known = {difference.metric: difference for difference in differences}
    totals = [known[name] for name in ("output_tokens_per_s", "makespan_s") if name in known]
    largest = [each for name in ("ttft_s", "tpot_s") if (each := _most(differences, name))]
    groups = [(totals, f" ({ONE_VALUE})."), (largest, ".")]
    sentences = ["; ".join(f"{d.label}: {_change(d)}" for d in group) + end for group, end in groups if group]
    seen = [d.seen for d in differences if d.interval and (everything or d.metric in SHOWN)]
    if seen:
        by_chance = f"one in {round(1 / (1 - CONFIDENCE))} does by chance alone, or more where requests share a queue"
        sentences.append(f"{sum(map(bool, seen))} of {len(seen)} intervals of the table leave out 0; {by_chance}.")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def _most(differences: Sequence[MetricDifference], name: str) -> MetricDifference | None:
    """Return a latency's percentile that changed most; those with enough samples come first."""
    own = [d for d in differences if d.metric in (f"{name}.p50", f"{name}.p99") and d.interval]
    return max(own, key=lambda difference: (not difference.few, abs(difference.change or 0.0)), default=None)


def _change(difference: MetricDifference) -> str:
    if difference.a == difference.b:
        return "no change"
    if not difference.interval:
        return change_text(difference)
    return f"{change_text(difference)} ({range_text(difference)}){' of few samples' * difference.few}"


# -- conditions on the change: `tpot.p50>+5%`, `ttft.p99>+20ms`, `gpu_active<-2pt`, `makespan>±1%` --------------------

OPTION = "--fail-if"
FORM = re.compile(rf"{METRIC}(\+-|±|[+-]?)\s*{NUMBER}")
RELATIVE, POINTS = "%", "pt"
Range = tuple[float, float]


class Condition(NamedTuple):
    """A condition on a change; `rule` is the user's text. `bound` is on B / A - 1 if `relative`, else on B - A.

    With `magnitude` it is on the absolute value of the change.
    """

    rule: str
    metric: str
    compare: str
    bound: float
    relative: bool
    magnitude: bool

    def change(self, difference: MetricDifference) -> float:
        """Return the value that is compared with the bound. A relative change from 0 to something is infinite."""
        value = difference.relative if self.relative else difference.delta
        value = math.copysign(math.inf, difference.delta) if value is None else value
        return abs(value) if self.magnitude else value

    def range(self, difference: MetricDifference) -> Range | None:
        """Return the interval of that value, None if there is none."""
        both = difference.interval
        interval = both and (both.relative if self.relative else both.delta)
        if not interval or not self.magnitude:
            return interval
        ends = sorted(abs(edge) for edge in interval)
        return (0.0 if interval[0] <= 0 <= interval[1] else ends[0]), ends[1]

    def meets(self, change: float) -> bool:
        """Whether a change is beyond the bound."""
        return OPERATORS[self.compare](change, self.bound)


def parse(rule: str) -> Condition:
    """Parse METRIC OPERATOR CHANGE, for example tpot.p50>+5%. Raises CheckError.

    `%` is relative to A, also for shares; `pt` are points of a share; seconds take ns, us, ms, s or min; other numbers
    none. +- or ± before the number bounds the size of the change in either direction. No sign is +.
    """
    match, source = FORM.fullmatch(rule), f"{OPTION} {rule!r}"
    if not match:
        raise CheckError(f"{source}: expected METRIC>CHANGE, for example tpot.p50>+5%", value=rule)
    name, compare, sign, number, unit = match.groups()
    metric = named(name, source)
    allowed = {RELATIVE: 0.01} | {"s": TIMES, "share": {POINTS: 0.01}}.get(METRICS[metric].unit, {"": 1.0})
    bound = bounded(metric, number, unit, allowed, source)  # a bare number is a unit only if unambiguous
    return Condition(rule, metric, compare, -bound if sign == "-" else bound, unit == RELATIVE, sign in ("+-", "±"))


def judged(condition: Condition, differences: Sequence[MetricDifference], *, sure: bool = False) -> tuple[bool, str]:
    """Return (failed, a line that states it). The change itself decides; a metric that either run lacks fails.

    With `sure` all of the interval must be beyond the bound; without an interval, the change decides.
    """
    difference = next((difference for difference in differences if difference.metric == condition.metric), None)
    if difference is None:
        return True, f"FAILED  {condition.rule}: not both runs have {METRICS[condition.metric].spelled}"
    change, interval = condition.change(difference), condition.range(difference)
    beyond = condition.meets(change)
    edges = [condition.meets(edge) for edge in interval or ()]
    failed = all([beyond, *edges]) if sure else beyond
    line = f"{'FAILED' if failed else 'ok    '}  {condition.rule}: {_facts(condition, difference, interval)}"
    if any(edge != beyond for edge in edges):
        line += f"; not certain: the interval reaches {'back over' if beyond else 'over'} the bound"
    return failed, line


def _facts(condition: Condition, difference: MetricDifference, interval: Range | None) -> str:
    a, b = (shown(value, difference.unit) for value in (difference.a, difference.b))
    if condition.relative and difference.relative is not None:
        change = f"{difference.relative:+z.2%}".replace("%", " %")
    else:
        change = change_text(difference) if condition.relative else signed(difference.delta, difference.unit)
    extent = "no relative interval: A may be 0" if difference.interval else difference.method
    if interval and condition.relative:
        extent = f"{LEVEL} interval {' .. '.join(f'{end * 100:+z.2f}' for end in interval)} %"
    elif interval:
        extent = f"{LEVEL} interval {' .. '.join(signed(end, difference.unit) for end in interval)}"
    return (
        f"{METRICS[difference.metric].spelled} is {a}, then {b}: {change} ({extent}{', few samples' * difference.few})"
    )
