"""The terms of a capacity: conditions, and how sure an answer has to be.

The field of a workload that a capacity is sought over: its values, from less load to more.

One load: replicates are run until every condition is decided, or there are as many as there may be.
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
"""Replicates of the first look; each look has twice as many as the one before."""
MOST_PROBES = 20
"""Loads that a search looks at. The error is spread over them."""
SHARE = "slo.attainment"


@dataclass(frozen=True, slots=True)
class Terms:
    """What has to hold, and how sure that has to be. `replicates` of a load are the most; `width` is how far apart, by
    ratio less 1, the loads that hold and fail may be; `warmup` as in Task. Raises ScenarioError.
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
        """After how many replicates it is looked whether a load is decided."""
        return doublings(FIRST, self.replicates)

    @property
    def tail(self) -> float:
        """How often an interval may lie wholly beside what is meant, on either side: looks, conditions and loads that
        a search can have share the error, so that no decision of a search is wrong with probability `confidence`.
        """
        return (1 - self.confidence) / (MOST_PROBES * len(self.looks) * len(self.conditions))


def terms(scenario: Scenario, slo: Sequence[str], goodput: str | None, **precision: Any) -> Terms:
    """The terms for a scenario of one loop: conditions on metrics, the share of requests that keep its `slo`, and
    `precision` as in Terms. Raises CheckError, ScenarioError.
    """
    if isinstance(slo, str):
        raise ScenarioError(f"slo: got {shown(slo)}, expected a list of conditions", field="slo", value=slo)
    checks = [parse(condition, "--slo") for condition in slo]
    if goodput is not None:
        checks.append(_goodput(goodput))
    bounds = scenario.slo.model_dump(exclude={"preset"}, exclude_none=True)
    needing = [check.rule for check in checks if check.metric.startswith("slo.")]
    if needing and not bounds:
        expected = "expected its ttft_s, tpot_s, e2e_s or preset, such as --set slo.ttft_s=2"
        raise ScenarioError(f"{needing[0]}: the scenario {scenario.name} has no slo; {expected}", field="slo")
    if scenario.loop.mode == "both":
        bound = "a capacity is that of one loop, sync or async"
        raise ScenarioError(f"loop.mode: got both; {bound}", field="loop.mode", value="both", bound=bound)
    return Terms(tuple(checks), **precision)


def _goodput(share: str) -> Check:
    """A share of requests as a condition. That all of them do can never be sure."""
    check = parse(f"{SHARE}>={share}", "--goodput")
    if not 0 < check.bound < 1:
        bound = "must be > 0 and < 1, such as 99%"
        raise CheckError(f"--goodput {share}: got {check.bound:g}, {bound}", field=SHARE, value=share, bound=bound)
    return check


RATE = "workload.arrivals.rate_per_s"
LESS_IS_MORE = ("workload.time_scale", "workload.arrivals.think_s", "workload.arrivals.burstiness")
"""Fields that mean less load when they grow. With all others load rises."""

Value = float  # of the field; whole ones are ints


class Over:
    """A number of a scenario's workload. Raises ScenarioError if it is none, or none that can be doubled."""

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
        """Are its values whole numbers?"""
        return isinstance(self.start, int)

    def scenario(self, value: Value, replicate: int) -> Scenario:
        """The one with that value and that seed after the scenario's own. Raises ScenarioError."""
        changes = [f"{self.field}={json.dumps(value)}", f"seed={self._base.seed + replicate}"]
        return scenario_of(self._base, changes)

    def load(self, value: Value) -> float:
        """Larger where there is more to do."""
        return 1 / value if self.falls else value

    def times(self, value: Value, factor: float) -> Value | None:
        """The value with `factor` times the load; None if there is none."""
        scaled = self._rounded(value / factor if self.falls else value * factor)
        return scaled if scaled > 0 and scaled != value else None

    def between(self, low: Value, high: Value) -> Value | None:
        """The middle of the two by ratio; None if nothing lies between."""
        middle = self._rounded(math.sqrt(low * high))
        return middle if min(low, high) < middle < max(low, high) else None

    def ratio(self, low: Value, high: Value) -> float:
        """How many times the load of `low` that of `high` is."""
        return self.load(high) / self.load(low)

    def _rounded(self, value: float) -> Value:
        return round(value) if self.whole else float(f"{value:.6g}")


def _value(scenario: dict[str, Any], field: str) -> Any:
    """The value of a dotted field. Raises ScenarioError if there is none or it is no load."""
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
    """A load and what is known of it. `holds` is None while that is undecided; `reason` says why it fails, or what is
    undecided. `requests` are those that count, of all replicates. `limits`: what limits its first run.
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
        """The conditions whose bound lies in the interval."""
        pairs = zip(terms.conditions, self.intervals, strict=True)
        return [(check, at) for check, at in pairs if intervals.decided(check, at) is None]

    def numbers(self, terms: Terms) -> dict[str, Any]:
        """As `--json` prints it."""
        values = [
            {"condition": check.rule, **interval._asdict()}
            for check, interval in zip(terms.conditions, self.intervals, strict=False)
        ]
        about = {name: getattr(self, name) for name in ("value", "replicates", "requests", "holds", "reason")}
        return {**about, "values": values}


def probe(over: Over, value: Value, terms: Terms, runs: Runs) -> Probe:
    """Look at one load. Replicate r has the seed r after the scenario's, at all loads: common random numbers.

    Raises ScenarioError if there is no such load, CheckError if the runs lack a metric, RunError if one fails.
    """
    for made in looked_at(over, value, terms, runs):
        undecided = [] if made.holds is not None else made.undecided(terms)
        if all(_hopeless(check, at, made.replicates, terms) for check, at in undecided):
            break
    return made


def _hopeless(check: Check, at: Interval, replicates: int, terms: Terms) -> bool:
    """Would the bound still lie in the interval of all replicates if the mean moved by two of its standard errors?"""
    if not at.low < at.mean < at.high:
        return False
    most = terms.replicates
    now, then = (intervals.t_quantile(1 - terms.tail, count - 1) / math.sqrt(count) for count in (replicates, most))
    spread = (at.high - at.low) / 2 / now
    return then * spread - abs(at.mean - check.bound) > 2 * spread * math.sqrt(1 / replicates - 1 / most)


def looked_at(over: Over, value: Value, terms: Terms, runs: Runs) -> Iterator[Probe]:
    """What is known after each look."""
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
    """Of the mean over replicates. Raises CheckError if a run has no such metric."""
    values = [value for summary in summaries if (value := check.value(summary)) is not None]
    if len(values) < len(summaries):
        raise CheckError(f"--slo {check.rule!r}: the runs have no {check.metric}", field=check.metric)
    if check.metric == SHARE and len(set(values)) == 1 and values[0] in (0, 1):
        requests = sum(summary["e2e_s"]["n"] for summary in summaries)
        sure = intervals.of_all(requests, tail)
        return sure if values[0] else Interval(0.0, 0.0, 1 - sure.low)
    return intervals.t_interval(values, 1 - 2 * tail)


def _lost(summaries: Sequence[Mapping[str, Any]]) -> str | None:
    """Requests that were not served, in words; those that a client gave up are not meant."""
    counts = {status: sum(summary["requests_by_status"][status] for summary in summaries) for status in LOST}
    sent = sum(summary["requests"] for summary in summaries)
    return ", ".join(f"{count:,} of {sent:,} requests {status}" for status, count in counts.items() if count) or None


def _few(terms: Terms, summaries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Percentiles of conditions that a run has too few values for."""
    names = []
    for metric in dict.fromkeys(check.metric for check in terms.conditions):
        head, _, statistic = metric.partition(".")
        if any(statistic in summary[head].get("too_few_for", ()) for summary in summaries if statistic.startswith("p")):
            names.append(metric)
    return tuple(names)
