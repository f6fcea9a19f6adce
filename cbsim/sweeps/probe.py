"""One load: replicates are run until every condition is decided, or there are as many as there may be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cbsim.results.checks import OPERATORS, Check, CheckError
from cbsim.results.record import FAILED
from cbsim.sweeps import intervals
from cbsim.sweeps.intervals import Interval
from cbsim.sweeps.over import Over, Value
from cbsim.sweeps.runs import Run, Runs
from cbsim.sweeps.terms import SHARE, Terms

LOST = ("refused", FAILED, "unfinished", "waiting")


@dataclass(frozen=True, slots=True)
class Probe:
    """A load and what is known of it. `holds` is None while nobody can say; `reason` says why it fails, or what is
    undecided. `requests` are those that count, of all replicates. `binds`: what limits its first run.
    """

    value: Value
    replicates: int
    requests: int
    intervals: tuple[Interval, ...]
    holds: bool | None
    reason: str | None
    binds: Sequence[str]
    few: tuple[str, ...] = ()  # percentiles that its runs are too short for

    def undecided(self, terms: Terms) -> list[tuple[Check, Interval]]:
        """The conditions whose bound lies in the interval."""
        pairs = zip(terms.conditions, self.intervals, strict=True)
        return [(check, at) for check, at in pairs if _decided(check, at) is None]

    def numbers(self, terms: Terms) -> dict[str, Any]:
        """As `--json` prints it."""
        values = [
            {"condition": check.text, **interval._asdict()}
            for check, interval in zip(terms.conditions, self.intervals, strict=False)
        ]
        about = {name: getattr(self, name) for name in ("value", "replicates", "requests", "holds", "reason")}
        return {**about, "values": values}


def probe(over: Over, value: Value, terms: Terms, runs: Runs) -> Probe:
    """Look at one load. Replicate r has the seed r after the scenario's, at all loads: common random numbers.

    Raises ScenarioError if there is no such load, CheckError if the runs lack a metric, RunError if one fails.
    """
    for found in looked_at(over, value, terms, runs):
        undecided = [] if found.holds is not None else found.undecided(terms)
        if all(_hopeless(check, at, found.replicates, terms) for check, at in undecided):
            break
    return found


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
        return Probe(value, len(runs), requests, (), False, lost, runs[0].binds)
    values = tuple(_interval(check, summaries, terms.tail) for check in terms.conditions)
    verdicts = {check.text: _decided(check, at) for check, at in zip(terms.conditions, values, strict=True)}
    missed = [text for text, holds in verdicts.items() if holds is False]
    undecided = [text for text, holds in verdicts.items() if holds is None]
    holds = False if missed else None if undecided else True
    reason = ", ".join(missed or undecided) or None
    return Probe(value, len(runs), requests, values, holds, reason, runs[0].binds, _few(terms, summaries))


def _interval(check: Check, summaries: Sequence[Mapping[str, Any]], tail: float) -> Interval:
    """Of the mean over replicates. Raises CheckError if a run has no such metric."""
    values = [value for summary in summaries if (value := check.value(summary)) is not None]
    if len(values) < len(summaries):
        raise CheckError(f"--slo {check.text!r}: the runs have no {check.metric}", field=check.metric)
    if check.metric == SHARE and len(set(values)) == 1 and values[0] in (0, 1):
        requests = sum(summary["e2e_s"]["n"] for summary in summaries)
        sure = intervals.of_all(requests, tail)
        return sure if values[0] else Interval(0.0, 0.0, 1 - sure.low)
    return intervals.of_mean(values, tail)


def _decided(check: Check, at: Interval) -> bool | None:
    """Does the condition hold? None if its bound lies in the interval, unless that is a point."""
    if at.low < at.high and at.low <= check.bound <= at.high:
        return None
    return OPERATORS[check.compare](at.mean, check.bound)


def _lost(summaries: Sequence[Mapping[str, Any]]) -> str | None:
    """Requests that were not served, in words; who gave up by himself is not meant."""
    counts = {status: sum(summary["requests_by_status"][status] for summary in summaries) for status in LOST}
    sent = sum(summary["requests"] for summary in summaries)
    said = ", ".join(f"{count:,} of {sent:,} requests {status}" for status, count in counts.items() if count)
    return said or None


def _few(terms: Terms, summaries: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Percentiles of conditions that a run has too few values for."""
    names = []
    for metric in dict.fromkeys(check.metric for check in terms.conditions):
        head, _, statistic = metric.partition(".")
        if any(statistic in summary[head].get("too_few_for", ()) for summary in summaries if statistic.startswith("p")):
            names.append(metric)
    return tuple(names)
