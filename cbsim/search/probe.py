"""A probe of a capacity search: one load, with replicates until every condition is decided or their limit is reached.

Terms hold the conditions and the confidence that an answer needs; Over is the workload's field that sets the load.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbsim.errors import CheckError, ScenarioError
from cbsim.metrics.checks import Check, parse
from cbsim.record.record import FAILED
from cbsim.scenario.fields import cut, near, shown
from cbsim.scenario.scenario import Scenario, scenario_of
from cbsim.stats import intervals
from cbsim.stats.intervals import Interval, doublings
from cbsim.sweeps.store import Run, Runs

FIRST = 4
"""Replicates of the first interim analysis, called a look; each look has twice as many as the one before."""
MOST_PROBES = 20
"""The most loads that a search probes. The error probability is divided among them."""
SHARE = "slo.attainment"


@dataclass(frozen=True, slots=True)
class Terms:
    """The conditions and the precision of a search. `replicates` is the limit per load; `width` is the largest ratio,
    less 1, of the load that fails to the one that holds; `warmup` is that of Task. Raises ScenarioError.
    """

    conditions: tuple[Check, ...]
    confidence: float = 0.95
    width: float = 0.05
    replicates: int = 32
    warmup: float = 0.1

    def __post_init__(self) -> None:
        if not self.conditions:
            raise ScenarioError("capacity: no condition, expected --slo or --goodput")
        bounds = {"confidence": (0.5, 0.9999), "width": (0.001, 1), "replicates": (2, 10_000), "warmup": (0, 0.9)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                bound = f"must be from {least:g} to {most:g}"
                raise ScenarioError(f"{name}: got {value:g}, {bound}", field=name, value=value, bound=bound)

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of replicates after which a load is tested for a decision (interim analyses)."""
        return doublings(FIRST, self.replicates)

    @property
    def tail(self) -> float:
        """The probability, on either side, that an interval misses the true mean. The looks, conditions and loads of a
        search share the error, so that with probability `confidence` no decision of a search is wrong.
        """
        return (1 - self.confidence) / (MOST_PROBES * len(self.looks) * len(self.conditions))


def terms(scenario: Scenario, slo: Sequence[str], goodput: str | None, **precision: Any) -> Terms:
    """Return the terms for a scenario of one loop: `slo` are conditions on metrics, `goodput` the share of requests
    that must keep the scenario's `slo`, `precision` other fields of Terms. Raises CheckError, ScenarioError.
    """
    if isinstance(slo, str):
        raise ScenarioError(f"slo: got {shown(slo)}, expected a list of conditions", field="slo", value=slo)
    checks = [parse(condition, "--slo") for condition in slo]
    if goodput is not None:
        check = parse(f"{SHARE}>={goodput}", "--goodput")
        if not 0 < check.bound < 1:  # no sample can prove a share of 1
            bound = "must be > 0 and < 1, such as 99%"
            text = f"--goodput {goodput}: got {check.bound:g}, {bound}"
            raise CheckError(text, field=SHARE, value=goodput, bound=bound)
        checks.append(check)
    bounds = scenario.slo.model_dump(exclude={"preset"}, exclude_none=True)
    needing = [check.rule for check in checks if check.metric.startswith("slo.")]
    if needing and not bounds:
        expected = "expected its ttft_s, tpot_s, e2e_s or preset, such as --set slo.ttft_s=2"
        raise ScenarioError(f"{needing[0]}: the scenario {scenario.name} has no slo; {expected}", field="slo")
    if scenario.loop.mode == "both":
        bound = "a capacity is that of one loop, sync or async"
        raise ScenarioError(f"loop.mode: got both; {bound}", field="loop.mode", value="both", bound=bound)
    return Terms(tuple(checks), **precision)


RATE = "workload.arrivals.rate_per_s"
LESS_IS_MORE = ("workload.time_scale", "workload.arrivals.think_s", "workload.arrivals.burstiness")
"""Fields for which a larger value means less load. For all others it means more."""

Value = float  # a value of the searched field; an int if the field holds whole numbers


class Over:
    """The workload's field that a search varies. Raises ScenarioError if it is no number or not above 0."""

    def __init__(self, scenario: Scenario, field: str) -> None:
        self.field, self.falls, self._base = field, field in LESS_IS_MORE, scenario
        value = _value(scenario.model_dump(mode="json"), field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ScenarioError(f"--over {field}: got {shown(value)}, expected a number", field=field, value=value)
        if value <= 0:
            raise ScenarioError(f"--over {field}: got {value:g}, must be > 0", field=field, value=value, bound="> 0")
        self.start: Value = value

    @property
    def whole(self) -> bool:
        return isinstance(self.start, int)

    def scenario(self, value: Value, replicate: int) -> Scenario:
        """Return the scenario with this value, its seed increased by `replicate`. Raises ScenarioError."""
        changes = [f"{self.field}={json.dumps(value)}", f"seed={self._base.seed + replicate}"]
        return scenario_of(self._base, changes)

    def load(self, value: Value) -> float:
        """Return the load of a value: the value, or its inverse if a larger value means less load."""
        return 1 / value if self.falls else value

    def times(self, value: Value, factor: float) -> Value | None:
        """Return the value with `factor` times the load; None if there is none."""
        scaled = self._rounded(value / factor if self.falls else value * factor)
        return scaled if scaled > 0 and scaled != value else None

    def between(self, low: Value, high: Value) -> Value | None:
        """Return the geometric mean of two values; None if no value lies between them."""
        middle = self._rounded(math.sqrt(low * high))
        return middle if min(low, high) < middle < max(low, high) else None

    def ratio(self, low: Value, high: Value) -> float:
        return self.load(high) / self.load(low)

    def _rounded(self, value: float) -> Value:
        return round(value) if self.whole else float(f"{value:.6g}")


def _value(scenario: dict[str, Any], field: str) -> Any:
    """Return the value of a dotted field. Raises ScenarioError if it does not exist or is not part of the workload."""
    head, *rest = field.split(".")
    if head != "workload" or not rest:
        bound = f"expected a number of the workload, such as {RATE}"
        raise ScenarioError(f"--over {cut(field)}: {bound}", field=field, bound=bound)
    path, part = head, scenario[head]
    for name in rest:
        known = list(part) if isinstance(part, dict) else []
        if name not in known:
            hint = near(name, known) or (f"; it has {', '.join(known)}" if known else "")
            raise ScenarioError(f"--over {cut(field)}: {path} has no {cut(name, 60)}{hint}", field=field, value=name)
        path, part = f"{path}.{name}", part[name]
    return part


LOST = ("refused", FAILED, "unfinished", "waiting")


@dataclass(frozen=True, slots=True)
class Probe:
    """A load and its estimates. `holds` is None while undecided; `reason` states why it fails, or which conditions are
    undecided. `requests` counts those of all replicates whose latencies count. `limits` is what limits its first run.
    """

    value: Value
    replicates: int
    requests: int
    intervals: tuple[Interval, ...]
    holds: bool | None
    reason: str | None
    limits: Sequence[str]
    few: tuple[str, ...] = ()  # percentiles that its runs are too short for

    def undecided(self, terms: Terms) -> list[tuple[Check, Interval]]:
        """Return the conditions whose bound lies inside their metric's interval, with that interval."""
        pairs = zip(terms.conditions, self.intervals, strict=True)
        return [(check, at) for check, at in pairs if intervals.decided(check, at) is None]

    def numbers(self, terms: Terms) -> dict[str, Any]:
        values = [
            {"condition": check.rule, **interval._asdict()}
            for check, interval in zip(terms.conditions, self.intervals, strict=False)
        ]
        about = {name: getattr(self, name) for name in ("value", "replicates", "requests", "holds", "reason")}
        return {**about, "values": values}


def probe(over: Over, value: Value, terms: Terms, runs: Runs) -> Probe:
    """Probe one load. Replicate r has the scenario's seed plus r at all loads: common random numbers. Raises
    ScenarioError if there is no such load, CheckError if the runs lack a metric, RunError if a run fails.
    """
    for made in looked_at(over, value, terms, runs):
        undecided = [] if made.holds is not None else made.undecided(terms)
        if all(_hopeless(check, at, made.replicates, terms) for check, at in undecided):
            break
    return made


def _hopeless(check: Check, at: Interval, replicates: int, terms: Terms) -> bool:
    """True if the interval of all replicates would contain the bound even if the mean moved by two standard errors."""
    if not at.low < at.mean < at.high:
        return False
    most = terms.replicates
    now, then = (intervals.t_quantile(1 - terms.tail, count - 1) / math.sqrt(count) for count in (replicates, most))
    spread = (at.high - at.low) / 2 / now
    return then * spread - abs(at.mean - check.bound) > 2 * spread * math.sqrt(1 / replicates - 1 / most)


def looked_at(over: Over, value: Value, terms: Terms, runs: Runs) -> Iterator[Probe]:
    known: list[Run] = []
    for size in terms.looks:
        scenarios = [over.scenario(value, replicate) for replicate in range(len(known), size)]
        known += runs.of(scenarios, terms.warmup)
        yield _judged(value, known, terms)


def _judged(value: Value, runs: Sequence[Run], terms: Terms) -> Probe:
    summaries = [run.summary for run in runs]
    requests = sum(summary["e2e_s"]["n"] for summary in summaries)
    lost = _lost(summaries)
    if lost is not None:
        return Probe(value, len(runs), requests, (), False, lost, runs[0].limits)
    values = tuple(_interval(check, summaries, terms.tail) for check in terms.conditions)
    verdicts = {check.rule: intervals.decided(check, at) for check, at in zip(terms.conditions, values, strict=True)}
    missed = [check for check, holds in verdicts.items() if holds is False]
    undecided = [check for check, holds in verdicts.items() if holds is None]
    holds = False if missed else None if undecided else True
    reason = ", ".join(missed or undecided) or None
    return Probe(value, len(runs), requests, values, holds, reason, runs[0].limits, _few(terms, summaries))


def _interval(check: Check, summaries: Sequence[Mapping[str, Any]], tail: float) -> Interval:
    """Return the interval of a metric's mean over replicates. Raises CheckError if a run lacks the metric."""
    values = [value for summary in summaries if (value := check.value(summary)) is not None]
    if len(values) < len(summaries):
        raise CheckError(f"--slo {check.rule!r}: the runs have no {check.metric}", field=check.metric)
    if check.metric == SHARE and len(set(values)) == 1 and values[0] in (0, 1):
        requests = sum(summary["e2e_s"]["n"] for summary in summaries)
        sure = intervals.of_all(requests, tail)
        return sure if values[0] else Interval(0.0, 0.0, 1 - sure.low)
    return intervals.t_interval(values, 1 - 2 * tail)


def _lost(summaries: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the counts of requests that were not served, as text; cancelled ones are not included."""
    counts = {status: sum(summary["requests_by_status"][status] for summary in summaries) for status in LOST}
    sent = sum(summary["requests"] for summary in summaries)
    return ", ".join(f"{count:,} of {sent:,} requests {status}" for status, count in counts.items() if count) or None


def _few(terms: Terms, summaries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the percentiles among the conditions' metrics for which some run has too few values."""
    names = []
    for metric in dict.fromkeys(check.metric for check in terms.conditions):
        head, _, statistic = metric.partition(".")
        if any(statistic in summary[head].get("too_few_for", ()) for summary in summaries if statistic.startswith("p")):
            names.append(metric)
    return tuple(names)
