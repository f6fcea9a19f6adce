"""Runs that differ in one swept field: how to find it, and the load that they sustain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis.statistics import labels
from analysis.statistics.loading import LoadedRun
from cbsim.metrics.terminal import lookup

RATES = ("workload.arrivals.rate_per_s", "workload.time_scale")
IGNORED = ("name", "question", "seed")  # seeds make repetitions
FEWEST = 3  # values; two make no curve
KEPT_UP = 0.95
NEARLY = 0.99  # share of the best rate that counts as equal


class SweepGroup(NamedTuple):
    """A group of runs that differ in nothing but the swept field (and the seed), by ascending value."""

    label: str
    values: Sequence[float]
    runs: Sequence[LoadedRun]


class Sweep(NamedTuple):
    """A sweep: `field` is the dotted name of what was swept, `values` are all its values, ascending."""

    field: str
    values: Sequence[float]
    groups: Sequence[SweepGroup]

    @property
    def by_rate(self) -> bool:
        """Whether the arrival rate, requests a second, was swept."""
        return self.field in RATES


def sweep(runs: Sequence[LoadedRun]) -> Sweep | None:
    """Return the sweep that the runs form, or None. It has at least three values of the field, and two in each group.

    If several fields were swept, the groups are those of one of them: of a rate if there is one, else of the one that
    leaves the fewest groups.
    """
    flats = [{name: value for name, value in run.facts.items() if name not in IGNORED} for run in runs]
    names = {name: None for facts in flats for name in facts}
    differing = [name for name in names if len({repr(facts.get(name)) for facts in flats}) > 1]
    found = [made for name in differing if (made := _by(name, differing, runs, flats)) is not None]
    return min(found, key=lambda own: (not own.by_rate, len(own.groups), -len(own.values), own.field), default=None)


def _by(
    field: str, differing: Sequence[str], runs: Sequence[LoadedRun], flats: Sequence[Mapping[str, Any]]
) -> Sweep | None:
    """Return the sweep of this field, if it is one."""
    values: list[Any] = [facts.get(field) for facts in flats]
    if not all(map(labels.is_number, values)):
        return None
    rest = [name for name in differing if name != field]
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, facts in enumerate(flats):
        groups.setdefault(tuple(repr(facts.get(name)) for name in rest), []).append(i)
    distinct = [len({values[i] for i in rows}) for rows in groups.values()]
    if min(distinct) < 2 or max(distinct) < FEWEST:
        return None
    first = next(zip(*groups.values(), strict=False))
    names = labels.labels([{name: flats[i].get(name) for name in rest} for i in first], [runs[i].loop for i in first])
    made = [_group(*named, values, runs) for named in zip(names, groups.values(), strict=True)]
    return Sweep(field, sorted(set(values)), made)


def _group(label: str, rows: Sequence[int], values: Sequence[Any], runs: Sequence[LoadedRun]) -> SweepGroup:
    ordered = sorted(rows, key=values.__getitem__)
    return SweepGroup(label, [values[i] for i in ordered], [runs[i] for i in ordered])


def offered(run: LoadedRun) -> float | None:
    """Return the requests a second that arrive from the first to the last arrival; None if that takes no time."""
    arrival = run.times.arrival_ns
    span = int(np.ptp(arrival)) if len(arrival) else 0
    return (len(arrival) - 1) / (span / 1e9) if span else None


def keeps_up(run: LoadedRun) -> bool | None:
    """Whether requests end as fast as they arrive, from the middle arrival to the last: at least 95 % as many.

    A queue is stable if departures keep up with arrivals (rate stability: El-Taha and Stidham, Sample-Path Analysis of
    Queueing Systems, 1999). The first half is start-up; after the last arrival the queue empties at any rate. None if
    all arrive at once.
    """
    gone = run.requests["status"].isin(("refused", "aborted", "failed")).to_numpy()
    arrival = np.sort(run.times.arrival_ns[~gone])
    if not len(arrival) or arrival[0] == arrival[-1]:
        return None
    middle, last = arrival[len(arrival) // 2], arrival[-1]
    ended = run.times.last_token_ns[run.times.done]
    arrived = int(((arrival > middle) & (arrival <= last)).sum())
    return int(((ended > middle) & (ended <= last)).sum()) >= KEPT_UP * arrived if arrived else None


def waits(run: LoadedRun) -> bool:
    """Whether the wait for admission dominates TTFT: at p95, `queue_s` is over half of `ttft_s`."""
    queue, ttft = (lookup(run.summary, f"{name}.p95") or 0.0 for name in ("queue_s", "ttft_s"))
    return bool(queue > ttft / 2)


class Knee(NamedTuple):
    """A knee of a group's latency: `rate` is the highest rate (requests/s) up to which all keep up and none waits, or
    None if the range does not show it. `sentence` is always given.

    Keeping up alone would not detect it in short runs: a queue that grows slowly is long before 5 % are missing.
    """

    rate: float | None
    sentence: str


def knee(group: SweepGroup, rates: Sequence[float]) -> Knee:
    """Return the knee of a group whose runs have these rates. Between repetitions of a rate the majority decides."""
    votes: dict[float, list[bool]] = {}
    for rate, run in zip(rates, group.runs, strict=True):
        if (stable := keeps_up(run)) is not None:
            votes.setdefault(rate, []).append(stable and not waits(run))
    borne = [rate for rate, ballots in sorted(votes.items()) if 2 * sum(ballots) > len(ballots)]
    too_much = min((rate for rate in votes if rate not in borne), default=None)
    if too_much is None:
        most = f"{max(borne):.4g}/s is sustained" if borne else "no run has a rate"
        return Knee(None, f"{group.label}: no knee in this range, {most}.")
    below = [rate for rate in borne if rate < too_much]
    if not below:
        return Knee(None, f"{group.label}: no knee in this range, {too_much:.4g}/s is too much already.")
    return Knee(max(below), f"{group.label}: sustains {max(below):.4g}/s, not {too_much:.4g}/s.")


def rates(swept: Sweep, group: SweepGroup) -> list[float]:
    """Return the rate of each run of a group, requests/s: the configured one, or that of the trace."""
    if swept.field == RATES[0]:
        return [float(value) for value in group.values]
    return [offered(run) or 0.0 for run in group.runs]


def findings(swept: Sweep) -> list[str]:
    """Return a sentence a group on what the sweep shows."""
    if swept.by_rate:
        knees = [knee(group, rates(swept, group)).sentence for group in swept.groups]
        shares = [[lookup(run.summary, "slo.attainment") for run in group.runs] for group in swept.groups]
        bound = [group for group, known in zip(swept.groups, shares, strict=True) if None not in known]
        return [*knees, *(_slo(group, rates(swept, group)) for group in bound)]
    return [_best(swept.field, group) for group in swept.groups]


def _slo(group: SweepGroup, rates: Sequence[float]) -> str:
    """State up to which rate the scenario's service level holds; it may allow a long wait, which a knee does not."""
    runs = sorted(zip(rates, group.runs, strict=True), key=lambda pair: pair[0])
    met = {rate: run.summary["slo"]["attainment"] for rate, run in runs}
    missed = [rate for rate, share in met.items() if share < NEARLY]
    sustained = [rate for rate in met if not missed or rate < min(missed)]
    until = f"up to {max(sustained):.4g}/s" if sustained else "at none of these rates"
    return f"{group.label}: SLO met by at least {NEARLY:.0%} of the requests {until}."


def _best(field: str, group: SweepGroup) -> str:
    rates = [run.summary["output_tokens_per_s"] for run in group.runs]
    least = min(value for value, rate in zip(group.values, rates, strict=True) if rate >= NEARLY * max(rates))
    return f"{group.label}: most output tokens/s ({max(rates):,.4g}), within 1 %, from {field} = {least:g} on."
