"""A probe of a capacity search: one load and its runs. A few runs show on which side of the capacity it seems to lie;
where the answer is sought between two loads, they get further runs, look by look.

Terms hold the conditions and the confidence that an answer needs; Over is the load that is varied, a rate by default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cbsim.errors import CheckError, ScenarioError
from cbsim.files import share
from cbsim.metrics import catalogue
from cbsim.metrics.checks import OPERATORS, Check, parse, parse_all
from cbsim.metrics.terminal import flat
from cbsim.record.record import FAILED
from cbsim.scenario import demand
from cbsim.scenario.fields import cut, near, shown
from cbsim.scenario.scenario import Scenario, drawn, scenario_of
from cbsim.stats import intervals
from cbsim.stats.intervals import Interval, doublings
from cbsim.sweeps.store import Run, Runs
from cbsim.workload import generators

PILOTS = 2
"""Runs of a load that only locate the capacity."""
FIRST, GROWTH = 4, 1.5
"""Replicates of the first interim analysis, called a look, and how many times as many the next one has."""
SHARE = "slo.attainment"


@dataclass(frozen=True, slots=True)
class Terms:
    """The conditions and the precision of a search. `replicates` is the limit per load; `width` is the largest ratio,
    less 1, of the load that fails to the one that holds; `warmup` is that of Task; `draws` of calibrated terms are each
    searched, too. `still`: the seed changes nothing, so a load has one run, which decides it. `parts`: so many answers
    hold at once with the confidence. Raises ScenarioError.
    """

    conditions: tuple[Check, ...]
    confidence: float = 0.95
    width: float = 0.05
    replicates: int = 32
    warmup: float = 0.1
    draws: int = 0
    still: bool = False
    parts: int = 1

    def __post_init__(self) -> None:
        if not self.conditions:
            raise ScenarioError("no condition, expected some such as ttft.p99<=2s, or a goodput")
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                bound = f"must be from {least:g} to {most:g}"
                raise ScenarioError(f"{name}: got {value:g}, {bound}", field=name, value=value, bound=bound)

    @property
    def looks(self) -> tuple[int, ...]:
        """The numbers of replicates after which a load is tested for a decision (interim analyses)."""
        return (1,) if self.still else doublings(FIRST, self.replicates, GROWTH)

    def tail(self, look: int) -> float:
        """Return the probability, on either side, that an interval of this look misses the true mean: half the error,
        shared by looks in proportion to their replicates, and by conditions.
        """
        error = (1 - self.confidence) / self.parts
        return error / 2 * self.looks[look] / sum(self.looks) / len(self.conditions)


BOUNDS = {"confidence": (0.5, 0.9999), "width": (0.001, 1), "replicates": (2, 10_000), "warmup": (0, 0.9)}


def terms(
    scenario: Scenario, slo: Sequence[str], goodput: str | None, option: str = "--check", /, **precision: Any
) -> Terms:
    """Return the terms for a scenario of one loop: `slo` are conditions on metrics that `option` has, `goodput` the
    share of requests that must keep its `slo`, `precision` fields of Terms. Raises CheckError, ScenarioError.
    """
    if isinstance(slo, str):
        raise ScenarioError(f"slo: got {shown(slo)}, expected a list of conditions", field="slo", value=slo)
    checks = parse_all(slo, option)
    if goodput is not None:
        if not 0 < share(str(goodput)) < 1:  # no sample can prove a share of 1
            bound = "must be > 0 and < 1, such as 99%"
            raise CheckError(f"--goodput: got {goodput}, {bound}", field=SHARE, value=goodput, bound=bound)
        checks.append(parse(f"{SHARE}>={goodput}", "--goodput"))
    bounds = scenario.slo.model_dump(exclude={"preset"}, exclude_none=True)
    needing = [check.rule for check in checks if check.metric.startswith("slo.")]
    if needing and not bounds:
        expected = "expected its ttft_s, tpot_s, e2e_s or preset, such as --set slo.ttft_s=2"
        raise ScenarioError(f"{needing[0]}: the scenario {scenario.name} has no slo; {expected}", field="slo")
    if scenario.loop.mode == "both":
        bound = "a capacity is that of one loop, sync or async"
        raise ScenarioError(f"loop.mode: got both; {bound}", field="loop.mode", value="both", bound=bound)
    drawn(scenario, precision.get("draws", 0))  # there are terms to draw
    return Terms(tuple(checks), **precision)


RATE = "workload.arrivals.rate_per_s"
ANY_RATE, USERS, SCALE = "rate_per_s", "workload.arrivals.users", "workload.time_scale"
LESS_IS_MORE = (SCALE, "workload.arrivals.think_s", "workload.arrivals.burstiness")
"""Fields for which a larger value means less load. For all others it means more."""
WAVES = 5  # the least requests of a user in a closed loop, of which the first is part of the burst at its start
UNITS = {RATE: "requests/s", ANY_RATE: "requests/s", USERS: "users"}

Value = float  # a value of the searched field; an int if the field holds whole numbers


class Over:
    """The load that a search varies: a number of the workload by its field, or `rate_per_s`, which is the arrivals'
    rate, their users, or the requests a second of a trace, whose times are divided. Raises ScenarioError if it is no
    number or not above 0.
    """

    def __init__(self, scenario: Scenario, field: str) -> None:
        arrivals = getattr(scenario.workload, "arrivals", None)
        self._trace = isinstance(scenario.workload, demand.Timed)
        if field == ANY_RATE and not self._trace:
            field = USERS if isinstance(arrivals, demand.ClosedLoop) else RATE
        self.field, self.falls, self._base = field, field in LESS_IS_MORE, scenario
        self._trace &= field == ANY_RATE
        dumped = scenario.model_dump(mode="json")
        value = self._rate() if self._trace else _value(dumped, field)
        if isinstance(value, bool) or not isinstance(value, int | float):
            fields = flat({"workload": dumped["workload"]})
            numbers = [ANY_RATE, *(name for name, each in fields.items() if type(each) in (int, float))]
            bound = f"expected a number of the workload: {', '.join(numbers)}"
            raise ScenarioError(f"--over {field}: got {shown(value)}, {bound}", field=field, value=value, bound=bound)
        if value <= 0:
            raise ScenarioError(f"--over {field}: got {value:g}, must be > 0", field=field, value=value, bound="> 0")
        self.start: Value = value
        self.whole = isinstance(value, int)

    def _rate(self) -> float:
        """Return the requests (or sessions) a second of a trace, from its first to its last arrival."""
        arrivals = [spec.arrival_ns for spec in generators.build(self._base).open]
        span_s = (max(arrivals) - min(arrivals)) / 1e9
        if not span_s:
            bound = "all its requests arrive at once, so it has no rate"
            raise ScenarioError(f"--over {ANY_RATE}: {self._base.workload.kind}: {bound}", field=SCALE, bound=bound)
        return float(f"{len(arrivals) / span_s:.4g}")

    @property
    def unit(self) -> str:
        """What is counted, such as requests/s; the field's name if that is no rate."""
        sessions = self._trace and isinstance(self._base.workload, demand.Agentic)
        return "sessions/s" if sessions else UNITS.get(self.field, self.field.rpartition(".")[2])

    @cached_property
    def still(self) -> bool:
        return generators.still(self.scenario(self.start, 0))

    def scenario(self, value: Value, replicate: int) -> Scenario:
        """Return the scenario with this value, its seed increased by `replicate`. Raises ScenarioError."""
        field, number, more = self.field, value, []
        if self._trace:
            field, number = SCALE, getattr(self._base.workload, "time_scale", 1.0) * self.start / value
        elif field == USERS and (needed := math.ceil(WAVES * value)) > getattr(self._base.workload, "requests", needed):
            more = [f"workload.requests={needed}"]  # the first of every user do not count
        changes = [f"{field}={json.dumps(number)}", *more, f"seed={self._base.seed + replicate}"]
        return scenario_of(self._base, changes)

    def alone(self, replicate: int) -> Scenario | None:
        """Return the scenario of a few requests, one after the other; None if the load is no rate, or requests of a
        trace share prefixes: then the first ones find less in the cache than those of the whole trace.
        """
        form, field = self._base.workload, "workload.limit"
        plain = isinstance(form, demand.Synthetic | demand.Lengths | demand.Azure | demand.Csv)
        if self.field not in UNITS or not plain:
            return None
        least, changes = getattr(form, "limit", None) or FEW, [f"seed={self._base.seed + replicate}"]
        if isinstance(form, demand.Synthetic):
            field, least = "workload.requests", form.requests
        slowly = f"{SCALE}={SCALE_ALONE}" if self._trace else "workload.arrivals={kind: closed_loop, users: 1}"
        return scenario_of(self._base, [*changes, slowly, f"{field}={min(FEW, least)}"])

    def load(self, value: Value) -> float:
        """Return the load of a value: the value, or its inverse if a larger value means less load."""
        return 1 / value if self.falls else value

    def times(self, value: Value, factor: float) -> Value:
        """Return the value of `factor` times the load, whole ones rounded outwards. Raises ScenarioError for none."""
        exact = value / factor if self.falls else value * factor
        scaled = self.rounded(exact, (math.ceil if exact > value else math.floor) if self.whole else round)
        if scaled <= 0 or scaled == value:
            raise ScenarioError("there is none", field=self.field, value=scaled)
        self.scenario(scaled, 0)
        return scaled

    def between(self, low: Value, high: Value, part: float) -> Value | None:
        """Return the value this part of the way from one to the other, by ratio; None if no value lies between."""
        middle = self.rounded(low * (high / low) ** part)
        return middle if min(low, high) < middle < max(low, high) else None

    def around(self, low: Value, high: Value) -> list[Value]:
        """Return values from one to the other and as far again beyond both, in order of their load."""
        values = {self.rounded(low * (high / low) ** (part / PARTS)) for part in range(-PARTS, 2 * PARTS + 1)}
        return sorted(values - {0}, key=self.load)

    def rounded(self, value: float, by: Callable[[float], int] = round) -> Value:
        """Return a value with as many digits as a load has, a whole one if the field holds these."""
        unit = 10.0 ** (math.floor(math.log10(value)) - DIGITS + 1)
        return by(value) if self.whole else float(f"{by(value / unit) * unit:.{DIGITS}g}")

    def ratio(self, low: Value, high: Value) -> float:
        return self.load(high) / self.load(low)


DIGITS = 4  # of a load
FEW = 32  # requests that are served one after the other, to see the latency without load
SCALE_ALONE = 1e5  # a trace's times are multiplied by it: its requests hardly overlap
PARTS = 128  # of the gap between two loads, at which an end of the answer may lie


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
VERDICTS = {True: "holds", False: "fails", None: "undecided"}


@dataclass(frozen=True, slots=True)
class Probe:
    """A load and its estimates. `holds` is None while undecided; `likely` is set where only pilots ran, whose means
    decide nothing. `reason` states why it fails, or which conditions are undecided. `requests` counts those of all
    replicates whose latencies count. `limits` is what limits its first run. Its string is a line of progress.
    """

    value: Value
    unit: str
    conditions: Sequence[Check]
    replicates: int
    requests: int
    intervals: tuple[Interval, ...]
    holds: bool | None
    reason: str | None
    limits: Sequence[str]
    likely: bool | None = None

    @property
    def verdict(self) -> str:
        return VERDICTS[self.holds] if self.likely is None else f"likely {VERDICTS[self.likely]}"

    @property
    def estimates(self) -> list[tuple[Check, Interval]]:
        """The conditions with the intervals of their metrics; none if requests were lost."""
        return list(zip(self.conditions, self.intervals, strict=False))

    @property
    def excess(self) -> float:
        """By how much a mean is beyond its bound, as the largest logarithm of their ratio; 0 or less if all hold."""
        return max((_beyond(check, at) for check, at in self.estimates), default=math.inf)

    @property
    def broken(self) -> list[Check]:
        """The conditions that a mean breaks."""
        return [check for check, at in self.estimates if not OPERATORS[check.compare](at.mean, check.bound)]

    def cells(self) -> list[str]:
        """Return the metrics' means with their intervals, as text."""
        cells = []
        for check, (mean, low, high) in self.estimates:
            text, *ends = map(check.shown, (mean, low, high))
            cells.append(f"{text} [{', '.join(ends)}]" if math.isfinite(high) and low < high else text)
        return cells or [str(self.reason)]

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}: {self.verdict} after {self.replicates} runs, {', '.join(self.cells())}"

    def numbers(self) -> dict[str, Any]:
        values = [{"condition": check.rule, **at._asdict()} for check, at in self.estimates]
        names = ("value", "replicates", "requests", "holds", "likely", "reason")
        return {**{name: getattr(self, name) for name in names}, "values": values}


def _beyond(check: Check, at: Interval) -> float:
    mean, bound = at.mean, check.bound
    ratio = (mean / bound if check.compare[0] == "<" else bound / mean) if mean * bound else 0
    size = abs(math.log(ratio)) if ratio > 0 and check.compare != "==" else math.inf
    return -size if OPERATORS[check.compare](mean, bound) else max(size, 1e-9)


class Prober:
    """The runs of a search by load, in `known`, and what they say. `make` returns the scenario of a load, its seed
    increased by a replicate's number: common random numbers at all loads. Raises ScenarioError if there is no such
    load, CheckError if the runs lack a metric, RunError if one fails.
    """

    def __init__(self, make: Callable[[Value, int], Scenario], unit: str, terms: Terms, runs: Runs) -> None:
        self._make, self._unit, self._terms, self._runs = make, unit, terms, runs
        self.known: dict[Value, list[Run]] = {}

    def alone(self, make: Callable[[int], Scenario | None]) -> Probe | None:
        """Probe a few requests one after the other, at the load 0; None if it would say nothing of other loads."""
        scenarios = [made for seed in range(self._terms.looks[0]) if (made := make(seed))]
        runs = self._runs.of(scenarios, self._terms.warmup) if scenarios else []
        return self._judged(0.0, runs, self._terms.tail(0)) if runs else None

    def pilot(self, value: Value) -> Probe:
        """Probe a load by its means, or decide it at once if the seed changes nothing."""
        still = self._terms.still
        made = self._judged(value, self._of(value, 1 if still else PILOTS), (1 - self._terms.confidence) / 2)
        return made if still else replace(made, holds=None, likely=made.excess <= 0)

    def look(self, value: Value, look: int) -> Probe:
        """Probe a load after all replicates of a look."""
        return self._judged(value, self._of(value, self._terms.looks[look]), self._terms.tail(look))

    def between(self, low: Value, high: Value, look: int, value: Value) -> tuple[bool | None, str | None]:
        """Return the verdict on a value and its reason, of metrics that are interpolated, run by run, from those of two
        loads that have the runs of this look (beyond them, extrapolated).
        """
        first, last = (self._of(each, self._terms.looks[look]) for each in (low, high))
        part, estimates = math.log(value / low) / math.log(high / low), []
        for check in self._terms.conditions:
            pairs = zip(_values(check, first), _values(check, last), strict=True)
            values = [a * (b / a) ** part if a > 0 and b > 0 else a + part * (b - a) for a, b in pairs]
            estimates.append(_interval(check, values, sum(map(_counted, first)), self._terms.tail(look)))
        return self._verdict(estimates)

    def _of(self, value: Value, count: int) -> list[Run]:
        known = self.known.setdefault(value, [])
        known += self._runs.of([self._make(value, seed) for seed in range(len(known), count)], self._terms.warmup)
        return known[:count]

    def _judged(self, value: Value, runs: Sequence[Run], tail: float) -> Probe:
        conditions, requests = self._terms.conditions, sum(map(_counted, runs))
        about = value, self._unit, conditions, len(runs), requests
        lost = _lost(runs)
        if lost is not None:
            return Probe(*about, (), False, lost, runs[0].limits)
        values = tuple(_interval(check, _values(check, runs), requests, tail) for check in conditions)
        return Probe(*about, values, *self._verdict(values), runs[0].limits)

    def _verdict(self, values: Sequence[Interval]) -> tuple[bool | None, str | None]:
        """Return whether the conditions hold, and which fail, or else which are undecided."""
        pairs = [
            (check, at, intervals.decided(check, at)) for check, at in zip(self._terms.conditions, values, strict=True)
        ]
        missed = [f"{check.broken} ({check.shown(at.mean)})" for check, at, holds in pairs if holds is False]
        undecided = [check.rule for check, _, holds in pairs if holds is None]
        return (False if missed else None if undecided else True), ", ".join(missed or undecided) or None


def _counted(run: Run) -> int:
    return int(run.summary["e2e_s"]["n"])


def _values(check: Check, runs: Sequence[Run]) -> list[float]:
    """Return a condition's metric of each run. Raises CheckError if a run lacks it."""
    values = [value for run in runs if (value := check.value(run.summary)) is not None]
    if len(values) < len(runs):
        raise CheckError(f"{check.option} {check.rule!r}: the runs have no {check.spelled}", field=check.metric)
    return values


def _interval(check: Check, values: Sequence[float], requests: int, tail: float) -> Interval:
    """Return the interval of a metric's mean, within what it can be; that of a single value is the value itself."""
    if check.metric == SHARE and len(values) > 1 and len(set(values)) == 1 and values[0] in (0, 1):
        sure = intervals.of_all(requests, tail)
        return sure if values[0] else Interval(0.0, 0.0, 1 - sure.low)
    mean, low, high = intervals.shown_interval(values, 1 - 2 * tail)
    most = 1.0 if catalogue.metric(check.metric).unit == "share" else math.inf
    return Interval(mean, max(low, 0.0), min(high, most))


def _lost(runs: Sequence[Run]) -> str | None:
    """Return the counts of requests that were not served, as text; cancelled ones are not included."""
    counts = {status: sum(run.summary["requests_by_status"][status] for run in runs) for status in LOST}
    sent = sum(run.summary["requests"] for run in runs)
    return ", ".join(f"{count:,} of {sent:,} requests {status}" for status, count in counts.items() if count) or None
