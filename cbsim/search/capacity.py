"""The capacity of a server: an interval of the largest load at which conditions hold, and what limits it.

A few requests one after the other come first: a latency that they exceed no load keeps. Else the load doubles or halves
from the scenario's, with two runs each, until means keep the conditions at one load and break them at another, and the
gap is divided where they are expected to cross. Two loads about that place get further runs, look by look. Between them
each run's metrics are interpolated: all loads have the same seeds, so a run changes smoothly from one to the other. The
answer reaches from the largest load where an interval says that all conditions hold to the least where one says that a
condition fails.

`cbsim capacity` prints each probe as it is made, then the answer.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.errors import OK, ScenarioError
from cbsim.metrics import catalogue, coverage
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.scenario.scenario import Scenario, drawn
from cbsim.search.probe import SHARE, Over, Probe, Prober, Terms, Value
from cbsim.stats import intervals
from cbsim.sweeps.store import Progress, Runs, Store
from cbsim.sweeps.work import Executor

SINKING = {SHARE, *(name for name in catalogue.METRICS if name.partition(".")[0] in catalogue.DISTRIBUTIONS)}
"""Metrics that one request alone has at their best."""
CAUSES = {"link": "link", "cache": "KV", "CPU": "CPU", "GPU bandwidth": "GPU", "GPU arithmetic": "GPU"}
"""A word for the subject of a sentence of a run's binding; any other cause of waiting is called the queue."""


class Limit(NamedTuple):
    """The reason why the least failing load fails: a word, and the sentences of its first run's binding."""

    word: str
    sentences: tuple[str, ...]


class Drawn(NamedTuple):
    """The ends of the answers with draws of calibrated terms, and with the terms' own values; and what part of the
    squared width is the terms', None where an end is missing.
    """

    draws: tuple[tuple[Value | None, Value | None], ...]
    fitted: tuple[Value | None, Value | None]
    seed: int
    share: float | None


@dataclass(frozen=True, eq=False, slots=True)
class Capacity:
    """The result of a search for a capacity. Its string is the last lines that the command prints. `holds` is the
    largest load that holds, `fails` the least that fails: with probability `terms.confidence` the load where the
    conditions cease to hold lies between them. Each is None if no load tried qualifies. `probes` are in order of load.
    """

    name: str
    loop: str
    field: str
    unit: str
    terms: Terms
    holds: Value | None
    fails: Value | None
    reason: str
    """The conditions that fail there."""
    width: float | None
    """The ratio of the load of `fails` to that of `holds`, less 1."""
    probes: tuple[Probe, ...]
    binds: Limit | None
    disorder: tuple[str, ...]
    """Pairs of loads of which the larger does better than the smaller: then there is no single capacity."""
    notices: tuple[str, ...]
    """Reasons why the answer is less than what was requested, and percentiles that runs are too short for."""
    drawn: Drawn | None = None
    """With draws of the terms, which the interval then counts: `probes` are those with the terms' own values."""

    @property
    def replicates(self) -> int:
        return sum(each.replicates for each in self.probes)

    @property
    def requests(self) -> int:
        """The number of requests of all probes whose latencies count."""
        return sum(each.requests for each in self.probes)

    def numbers(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("name", "loop", "field", "unit", "holds", "fails", "reason")},
            "width": self.width,
            "confidence": None if self.terms.still else self.terms.confidence,
            "replicates": self.replicates,
            "requests": self.requests,
            "conditions": [check.rule for check in self.terms.conditions],
            "binds": self.binds and self.binds._asdict(),
            "monotone": not self.disorder,
            "notices": [*self.disorder, *self.notices],
            **({"terms": self.drawn._asdict()} if self.drawn else {}),
            "probes": [each.numbers() for each in self.probes],
        }

    def __str__(self) -> str:
        lines = [self._end("holds", self.holds), self._end("fails", self.fails)]
        total = f"{self.replicates:,} runs, {self.requests:,} requests that count"
        if self.width is not None:
            sure = "each load run once" if self.terms.still else f"{100 * self.terms.confidence:g} % confidence"
            lines.append(f"between   {self.width:.1%} apart, {sure}; {total}")
        if self.drawn is not None:
            low, high = (f"{end:g}" if end else "none" for end in self.drawn.fitted)
            part = None if self.drawn.share is None else f"make {self.drawn.share:.0%} of the squared width"
            draws = (
                f"{len(self.drawn.draws)} draws by seed {self.drawn.seed} {part or 'lack an end: this is their range'}"
            )
            lines.append(f"terms     {draws}; with the terms' own values {low} to {high} {self.unit}")
        if self.binds is not None:
            lines += [f"binds     {self.binds.word}", *(f"          {sentence}" for sentence in self.binds.sentences)]
        lines += [f"WARNING   not monotone: {pair}" for pair in self.disorder]
        return "\n".join([*lines, *(f"note      {notice}" for notice in self.notices)])

    def _end(self, word: str, value: Value | None) -> str:
        least, most = self.probes[0].value, self.probes[-1].value
        if value is None:
            return f"{word:<10}none{f' of the loads from {least:g} to {most:g} {self.unit}' if most else ''}"
        load = f"{value:g} {self.unit}" if value else "one request alone"
        return f"{word:<10}{load}{f': {self.reason}' if word == 'fails' else ''}"

    def __repr__(self) -> str:
        return f"<Capacity {self.name} {self.loop}: {self.field} holds {self.holds}, fails {self.fails}>"


def limit(fails: Probe) -> Limit:
    if not fails.intervals:
        return Limit("refused", (str(fails.reason), *fails.limits))
    broken = fails.broken
    stepwise = all(check.metric.startswith(("tpot", "itl")) for check in broken)  # no wait in the queue makes it longer
    left_out = ("seats", "tokens", "cache", "batch", "arrivals") if broken and stepwise else ("arrivals",)
    limits = tuple(sentence for sentence in fails.limits if not sentence.startswith(left_out))
    return Limit(CAUSES.get(limits[0].partition(":")[0], "queue") if limits else "queue", limits)


def _disorder(probes: Sequence[Probe], terms: Terms) -> list[str]:
    """Return a sentence for each pair of loads of which the larger is decided to hold and the smaller to fail, or the
    larger is better by a metric's intervals. `probes` are in order of load.
    """
    pairs = [
        f"{less.value:g} fails and {more.value:g}, which is more load, holds"
        for less, more in combinations(probes, 2)
        if less.holds is False and more.holds
    ]
    for at, check in enumerate([] if terms.still else terms.conditions):
        for less, more in combinations([each for each in probes if each.intervals], 2):
            a, b = less.intervals[at], more.intervals[at]
            if (check.compare[0] == "<" and b.high < a.low) or (check.compare[0] == ">" and b.low > a.high):
                pairs.append(f"{check.spelled} is {a.mean:.4g} at {less.value:g} and {b.mean:.4g} at {more.value:g}")
                break
    return pairs


MOST_DOUBLINGS = 10
ROOM = 1.2  # the distance of the two loads from the expected capacity, in halves of the width
NEAR, FAR = 0.8, 2.0  # a load nearer or farther than so many halves is replaced by one with that distance
UNEVEN = 0.2  # of the rise from one load to another: metrics between them that are so far off are not interpolated
Hear = Callable[[Probe], object]


class Search:
    """The state of a search: the probes made so far, from which the next load follows. `ends` are the load that holds
    and the one that fails; `reason` is the condition that fails there; `above` is the probe next to it.
    """

    def __init__(self, over: Over, terms: Terms, runs: Runs, hear: Hear) -> None:
        self._over, self._terms, self._hear = over, terms, hear
        self._prober = Prober(over.scenario, over.unit, terms, runs)
        self._made: dict[Value, Probe] = {}
        self.ends: tuple[Value | None, Value | None] = None, None
        self.above: Probe | None = None
        self._smooth = False  # whether metrics between loads are about as they are interpolated
        self.reason = ""
        self.notices: list[str] = []

    @property
    def probes(self) -> tuple[Probe, ...]:
        """The last probe of each load, by load."""
        return tuple(sorted(self._made.values(), key=lambda each: each.value and self._over.load(each.value)))

    @property
    def width(self) -> float | None:
        """The ratio of the load that fails to the one that holds, less 1; None unless both are known."""
        holds, fails = self.ends
        return None if holds is None or fails is None else self._over.ratio(holds, fails) - 1

    def gap(self) -> tuple[Probe | None, Probe | None]:
        """Return the least load whose means break the conditions, after the largest one below whose means keep them."""
        probes = self.probes
        at = next((at for at, each in enumerate(probes) if each.excess > 0), len(probes))
        return (probes[at - 1] if at else None), (probes[at] if at < len(probes) else None)

    def impossible(self) -> bool:
        """Return whether one request alone breaks the conditions. Only latencies and attainment are best there."""
        alone = self._prober.alone(self._over.alone)
        sinking = SINKING.issuperset(check.metric for check in self._terms.conditions)
        if alone is None or alone.holds is not False or not sinking:
            return False
        self._add(alone)
        self.ends, self.above, self.reason = (None, 0.0), alone, str(alone.reason)
        return True

    def locate(self) -> tuple[Probe | None, Probe | None]:
        """Return two neighbouring loads of which the means of the first keep the conditions and those of the second do
        not; None for one that was not found. They are at most twice the width apart, or the width where the metrics
        jump. Raises what the probe of the scenario's own load raises.
        """
        self._pilot(self._over.start)
        self._scale(2.0)
        self._scale(0.5)
        low, high = self._closer((1 + self._terms.width) ** 2)
        self._smooth = low is not None and high is not None and self._even(low, high)
        return self.gap() if self._smooth else self._closer(1 + self._terms.width)

    def _closer(self, ratio: float) -> tuple[Probe | None, Probe | None]:
        """Divide the gap of the means until its ends have at most this ratio."""
        low, high = self.gap()
        while low and high and self._over.ratio(low.value, high.value) > ratio:
            middle = self._over.between(low.value, high.value, _crossing(low, high, 0.25))
            if middle is None:
                break
            self._pilot(middle)
            low, high = self.gap()
        return low, high

    def _even(self, low: Probe, high: Probe) -> bool:
        """Whether the metrics of a load between these are about as they are interpolated: without a jump."""
        part, rise = _crossing(low, high, 0.25), high.excess - low.excess
        middle = self._over.between(low.value, high.value, part)
        if self._terms.still or not rise < math.inf:
            return False
        return middle is None or abs(self._pilot(middle).excess - low.excess - part * rise) <= UNEVEN * rise

    def decide(self, low: Probe | None, high: Probe | None) -> None:
        """Find the ends of the answer by further runs of these loads, or of others beside the expected capacity, until
        they are the width apart or after the last look.
        """
        for look in range(len(self._terms.looks)):
            if self._smooth and low and high:
                low, high = self._beside(low, high)
            low, high = low and self._look(low, look), high and self._look(high, look)
            self.ends, self.above = self._ends(low, high, look), high
            if self._done():
                return
        more = f"more of them (--replicates {4 * self._terms.replicates}), or more requests a run, would narrow it"
        wide = f"not within {self._terms.width:.3g}: the {self._terms.replicates} runs of a load differ too much"
        self.notices.append(f"{wide}; {more}")

    def _done(self) -> bool:
        """Whether the ends are near enough, no load lies between them, or the only one there can be is decided."""
        holds, fails = self.ends
        if holds is None or fails is None:
            return (holds is None) != (fails is None) and None in self.gap()
        return self._over.ratio(holds, fails) - 1 <= self._terms.width or not self._over.between(holds, fails, 0.5)

    def _ends(self, low: Probe | None, high: Probe | None, look: int) -> tuple[Value | None, Value | None]:
        """Return the largest load that holds and the least that fails: these two, or others about them."""
        if not (self._smooth and low and high and low.intervals and high.intervals):
            self.reason = str(high.reason) if high else ""
            return low.value if low and low.holds else None, high.value if high and high.holds is False else None
        values = self._over.around(low.value, high.value)
        verdict = partial(self._prober.between, low.value, high.value, look)
        holding = bisect_left(values, True, key=lambda value: not verdict(value)[0])
        failing = bisect_left(values, True, key=lambda value: verdict(value)[0] is False)
        fails = values[failing] if failing < len(values) else None
        self.reason = "" if fails is None else str(verdict(fails)[1])
        return values[holding - 1] if holding else None, fails

    def _beside(self, low: Probe, high: Probe) -> tuple[Probe, Probe]:
        """Return two loads on both sides of the expected capacity, about half the width away from it."""
        half, span = math.log1p(self._terms.width) / 2, math.log(self._over.ratio(low.value, high.value))
        at = _crossing(low, high, -1.0) * span
        made = []
        for probe, distance, sign in ((low, at, -1), (high, span - at, 1)):
            value = probe.value
            if not NEAR * half <= distance <= FAR * half:
                with suppress(ScenarioError):  # it stays where no scenario has the other load
                    value = self._over.times(value, math.exp(sign * (ROOM * half - distance)))
            made.append(self._made.get(value) or self._pilot(value))
        return made[0], made[1]

    def _scale(self, factor: float) -> None:
        """Multiply the scenario's load by `factor` until that side of the gap is known or there is no further load."""
        value, problem = self._over.start, f"{MOST_DOUBLINGS + 1} loads were tried"
        for _ in range(MOST_DOUBLINGS):
            if self.gap()[factor > 1]:
                return
            try:
                value = self._over.times(value, factor)
            except ScenarioError as error:
                problem = str(error)
                break
            self._pilot(value)
        if not self.gap()[factor > 1]:
            beyond = "larger" if factor > 1 else "smaller"
            self.notices.append(f"no load {beyond} than {value:g} {self._over.unit} was tried: {problem}")

    def _pilot(self, value: Value) -> Probe:
        return self._add(self._prober.pilot(value))

    def _look(self, probe: Probe, look: int) -> Probe:
        return self._add(self._prober.look(probe.value, look))

    def _add(self, made: Probe) -> Probe:
        if made != self._made.get(made.value):
            self._hear(made)
        self._made[made.value] = made
        return made


def _crossing(low: Probe, high: Probe, least: float) -> float:
    """Return the part of the way between two loads where the excess should be 0, at least `least` from both."""
    rise = high.excess - low.excess
    return min(max(-low.excess / rise if 0 < rise < math.inf else 0.5, least), 1 - least)


def search(scenario: Scenario, field: str, terms: Terms, runs: Runs, hear: Hear = lambda _: None) -> Capacity:
    """Return the capacity of a scenario of one loop; draws of its terms are searched, too. `hear` is called with each
    probe of its own. Raises ScenarioError or CheckError for an unfit field or condition, RunError if a run fails.
    """
    over = Over(scenario, field)
    draws = drawn(scenario, terms.draws)
    answer = _search(scenario, over, terms, runs, hear)
    made = [_search(each, Over(each, field), terms, runs, lambda _: None) for each in draws]
    return _joint(answer, made, over, scenario.seed) if made else answer


def _joint(answer: Capacity, draws: Sequence[Capacity], over: Over, seed: int) -> Capacity:
    """Return the answer with the joint interval of runs and draws, by the ratio of loads."""
    ends, holds, fails, share = tuple((each.holds, each.fails) for each in draws), None, None, None
    known = [sorted(math.log(end) for end in each if end) for each in ends]
    holding, failing = zip(*ends, strict=True)
    if min(map(len, known)) == 2:
        (_, low, high), share = intervals.joint([(low, high) for low, high in known], answer.terms.confidence)
        outer = over.rounded(math.exp(low), math.floor), over.rounded(math.exp(high), math.ceil)
        holds, fails = sorted(outer, key=over.load)
    else:
        holds = None if None in holding else min(holding, key=over.load)
        fails = None if None in failing else max(failing, key=over.load)
    return replace(
        answer,
        terms=replace(answer.terms, still=False),
        holds=holds,
        fails=fails,
        width=over.ratio(holds, fails) - 1 if holds and fails else None,
        drawn=Drawn(ends, (answer.holds, answer.fails), seed, share),
    )


def _search(scenario: Scenario, over: Over, terms: Terms, runs: Runs, hear: Hear) -> Capacity:
    terms = replace(terms, still=over.still)
    steps = Search(over, terms, runs, hear)
    if not steps.impossible():
        steps.decide(*steps.locate())
    above, (holds, fails) = steps.above, steps.ends
    return Capacity(
        scenario.name,
        scenario.loop.mode,
        over.field,
        over.unit,
        terms,
        holds,
        fails,
        steps.reason,
        steps.width,
        steps.probes,
        None if fails is None or above is None else limit(above),
        tuple(_disorder(steps.probes, terms)),
        (*steps.notices, *_notices(steps.probes, terms, coverage.bases([scenario]))),
    )


def _notices(probes: Sequence[Probe], terms: Terms, rest: Sequence[str]) -> list[str]:
    """Return what the interval covers, what step times `rest` on, and a notice for each percentile that runs have too
    few requests for, and each bound that no load breaks and that may be meant in milliseconds.
    """
    least = min(each.requests // each.replicates for each in probes)
    needed = {check.spelled: SAMPLES_NEEDED.get(check.metric.rpartition(".")[2], 0) for check in terms.conditions}
    few = [
        f"{name} needs {count} requests that count, runs have {least:,}"
        for name, count in needed.items()
        if count > least
    ]
    light = probes[0].intervals if all(each.excess <= 0 for each in probes) else ()
    pairs = zip(terms.conditions, light, strict=False)
    doubts = [f"{check.rule}{doubt}" for check, at in pairs if (doubt := check.doubt(at.mean))]
    covers = intervals.COVERS_TERMS if terms.draws else intervals.STILL if terms.still else intervals.COVERS
    return [covers, *rest, *few, *doubts]


def run(scenario: Scenario, field: str, terms: Terms, store: Path, executor: Executor, *, as_json: bool) -> int:
    """Search for a capacity, printing each probe as it is made, then the answer. Return the exit status."""
    with closing(executor):
        over = Over(scenario, field)  # raise the errors of an unfit field before anything is printed
        runs = Runs(Store(store), executor, Progress(silent=as_json, brief=True))
        if not as_json:
            conditions = " and ".join(check.rule for check in terms.conditions)
            print(f"{scenario.name}, {scenario.loop.mode}: {over.unit} with {conditions}; {executor.about}\n")
        answer = search(scenario, field, terms, runs, (lambda _: None) if as_json else _printer(terms, over.unit))
    if as_json:
        print(json.dumps(answer.numbers(), indent=2, allow_nan=False))
    else:
        print(f"\n{answer}\nmade      {runs.made:,} of the runs; the others were in {store}")
    return OK


def _printer(terms: Terms, unit: str) -> Hear:
    """Return a function that prints a line per probe, and a header before the first one."""
    headers = [[unit, "runs", "requests", "", *(catalogue.metric(check.metric).label for check in terms.conditions)]]

    def show(made: Probe) -> None:
        load = f"{made.value:g}" if made.value else "alone"
        for cells in (*headers, [load, f"{made.replicates}", f"{made.requests:,}", made.verdict, *made.cells()]):
            aligned = [cells[0].rjust(12), cells[1].rjust(5), cells[2].rjust(9), cells[3].ljust(12)]
            print("  ".join([*aligned, *(cell.ljust(32) for cell in cells[4:])]).rstrip(), flush=True)
        headers.clear()

    return show
