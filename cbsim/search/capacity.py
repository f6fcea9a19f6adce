"""The capacity of a server: an interval of the largest load at which conditions hold, and what limits it.

The search starts at the scenario's load. It doubles and halves the load until one load is decided to hold and a larger
one to fail; then it halves the gap by ratio. If the middle of the gap remains undecided, the gaps beside the undecided
loads are halved, so that both ends of the answer are decided probes.

`cbsim capacity` prints each probe as it is made, then the answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.errors import OK, ScenarioError
from cbsim.metrics import catalogue
from cbsim.metrics.metrics import SAMPLES_NEEDED
from cbsim.scenario.scenario import Scenario
from cbsim.search.probe import MOST_PROBES, Over, Probe, Terms, Value, looked_at, probe
from cbsim.sweeps.store import Runs, Store
from cbsim.sweeps.work import Executor

CAUSES = {"cache": "KV", "CPU": "CPU", "GPU bandwidth": "compute", "GPU arithmetic": "compute"}
"""A word for the subject of a sentence of a run's binding; any other cause of waiting is called the queue."""


class Limit(NamedTuple):
    """The reason why the least failing load fails: a word, and the sentences of its first run's binding."""

    word: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Capacity:
    """The result of a search for a capacity. Its string is the last lines that the command prints. `holds` is the
    largest load that holds, `fails` the least that fails: with probability `terms.confidence` the load where the
    conditions cease to hold lies between them. Each is None if no load tried qualifies. `probes` are in order of load.
    """

    name: str
    loop: str
    field: str
    terms: Terms
    holds: Value | None
    fails: Value | None
    width: float | None
    """The ratio of the load of `fails` to that of `holds`, less 1."""
    probes: tuple[Probe, ...]
    binds: Limit | None
    disorder: tuple[str, ...]
    """Pairs of loads of which the larger does better than the smaller: then there is no single capacity."""
    notices: tuple[str, ...]
    """Reasons why the answer is less than what was requested, and percentiles that runs are too short for."""

    @property
    def replicates(self) -> int:
        return sum(each.replicates for each in self.probes)

    @property
    def requests(self) -> int:
        """The number of requests of all probes whose latencies count."""
        return sum(each.requests for each in self.probes)

    def numbers(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("name", "loop", "field", "holds", "fails", "width")},
            "confidence": self.terms.confidence,
            "replicates": self.replicates,
            "requests": self.requests,
            "conditions": [check.rule for check in self.terms.conditions],
            "binds": self.binds and self.binds._asdict(),
            "monotone": not self.disorder,
            "notices": [*self.disorder, *self.notices],
            "probes": [each.numbers(self.terms) for each in self.probes],
        }

    def __str__(self) -> str:
        lines = [self._end("holds", self.holds), self._end("fails", self.fails)]
        if self.width is not None:
            total = f"{self.replicates:,} runs, {self.requests:,} requests that count"
            lines.append(f"between   {self.width:.1%} apart, {100 * self.terms.confidence:g} % sure; {total}")
        if self.binds is not None:
            lines += [f"binds     {self.binds.word}", *(f"          {sentence}" for sentence in self.binds.sentences)]
        lines += [f"WARNING   not monotone: {pair}" for pair in self.disorder]
        return "\n".join([*lines, *(f"note      {notice}" for notice in self.notices)])

    def _end(self, word: str, value: Value | None) -> str:
        if value is None:
            tried = f"from {self.probes[0].value:g} to {self.probes[-1].value:g}"
            return f"{word:<10}none of the loads that were tried, {tried}"
        at = next(each for each in self.probes if each.value == value)
        reason = f" {at.reason}" if at.reason else ""
        return f"{word:<10}{value:g}{reason} ({at.replicates} runs, {at.requests:,} requests)"

    def __repr__(self) -> str:
        return f"<Capacity {self.name} {self.loop}: {self.field} holds {self.holds}, fails {self.fails}>"


def _limit(fails: Probe) -> Limit:
    if not fails.intervals:
        return Limit("refused", (str(fails.reason), *fails.limits))
    causes = (cause for sentence in fails.limits if (cause := sentence.partition(":")[0]) != "arrivals")
    return Limit(CAUSES.get(next(causes, ""), "queue"), tuple(fails.limits))


def _disorder(probes: Sequence[Probe], terms: Terms) -> list[str]:
    """Return a sentence for each pair of loads of which the larger is decided to hold and the smaller to fail, or the
    larger is better by a metric's intervals. `probes` are in order of load.
    """
    pairs = [
        f"{less.value:g} fails and {more.value:g}, which is more load, holds"
        for less, more in combinations(probes, 2)
        if less.holds is False and more.holds
    ]
    for at, check in enumerate(terms.conditions):
        for less, more in combinations([each for each in probes if each.intervals], 2):
            a, b = less.intervals[at], more.intervals[at]
            if (check.compare[0] == "<" and b.high < a.low) or (check.compare[0] == ">" and b.low > a.high):
                pairs.append(f"{check.metric} is {a.mean:.4g} at {less.value:g} and {b.mean:.4g} at {more.value:g}")
                break
    return pairs


MOST_DOUBLINGS = 10
SMALL = 4  # a gap beside undecided loads is small if it is at most the width divided by this
Hear = Callable[[Probe], None]


class Search:
    """The state of a search: the probes made so far, from which the next load follows."""

    def __init__(self, over: Over, terms: Terms, runs: Runs, hear: Hear) -> None:
        self._over, self._terms, self._runs, self._hear = over, terms, runs, hear
        self._made: dict[Value, Probe] = {}
        self.notices: list[str] = []

    @property
    def probes(self) -> tuple[Probe, ...]:
        return tuple(sorted(self._made.values(), key=lambda each: self._over.load(each.value)))

    @property
    def fails(self) -> Probe | None:
        """The probe of the least load that is decided to fail."""
        return next((each for each in self.probes if each.holds is False), None)

    @property
    def holds(self) -> Probe | None:
        """The probe of the largest load below `fails` that is decided to hold."""
        below = self.probes if self.fails is None else self.probes[: self.probes.index(self.fails)]
        return next((each for each in reversed(below) if each.holds), None)

    def bracket(self) -> None:
        """Find a load that fails and one that holds. Raises what the probe of the scenario's own load raises."""
        self._look(self._over.start)
        self._scale(2.0, lambda: self.fails)
        self._scale(0.5, lambda: self.holds)

    def _scale(self, factor: float, end: Callable[[], Probe | None]) -> None:
        """Multiply the load by `factor` until `end` returns a probe, or there is no further load."""
        value, times = self._over.start, 0
        while end() is None:
            scaled = self._over.times(value, factor)
            problem = self._problem(scaled)
            if times == MOST_DOUBLINGS or len(self._made) == MOST_PROBES:
                problem = f"{len(self._made)} loads were tried"
            if scaled is None or problem:
                more = "more" if factor > 1 else "less"
                self.notices.append(f"no {more} load than {value:g} was tried: {problem}")
                return
            self._look(scaled)
            value, times = scaled, times + 1

    def _problem(self, value: Value | None) -> str | None:
        """Return why no scenario can have this load; None if one can."""
        if value is None:
            return "there is none"
        try:
            self._over.scenario(value, 0)
        except ScenarioError as error:
            return str(error)
        return None

    def narrow(self) -> None:
        """Narrow the gap until its ends are within the width, or no load between them can be decided."""
        while (ends := self.ends) is not None and self._over.ratio(*ends) - 1 > self._terms.width:
            value = self._next(*ends)
            if value is None or len(self._made) == MOST_PROBES:
                self.notices.append(self._why_wide(value is None))
                return
            self._look(value)

    @property
    def ends(self) -> tuple[Value, Value] | None:
        """The values that hold and fail, between which the answer lies; None unless both are known."""
        holds, fails = self.holds, self.fails
        return None if holds is None or fails is None else (holds.value, fails.value)

    def beyond(self) -> None:
        """Probe half the least load and twice the largest, one look each: the answer stays, but disorder may show."""
        if self.ends is None:
            return
        for outermost, factor in zip((self.probes[0], self.probes[-1]), (0.5, 2.0), strict=True):
            scaled = self._over.times(outermost.value, factor)
            if scaled is not None and self._problem(scaled) is None:
                self._add(next(looked_at(self._over, scaled, self._terms, self._runs)))

    def _look(self, value: Value) -> None:
        self._add(probe(self._over, value, self._terms, self._runs))

    def _add(self, made: Probe) -> None:
        self._made[made.value] = made
        self._hear(made)

    def _undecided(self, low: Value, high: Value) -> list[Value]:
        loads = self._over.load(low), self._over.load(high)
        return [each.value for each in self.probes if loads[0] < self._over.load(each.value) < loads[1]]

    def _next(self, low: Value, high: Value) -> Value | None:
        """Return the middle of the gap, or of the larger gap beside its undecided loads; None if those are small."""
        undecided = self._undecided(low, high)
        if not undecided:
            return self._over.between(low, high)
        gap = max((low, undecided[0]), (undecided[-1], high), key=lambda ends: self._over.ratio(*ends))
        small = math.log(self._over.ratio(*gap)) <= math.log1p(self._terms.width) / SMALL
        return None if small else self._over.between(*gap)

    def _why_wide(self, small: bool) -> str:
        ends = self.ends
        assert ends is not None
        undecided = self._undecided(*ends)
        if not small:
            return f"ended after {MOST_PROBES} probes"
        if not undecided:
            return f"no value lies between {ends[0]:g} and {ends[1]:g}"
        least, most = min(undecided), max(undecided)
        where = f"{least:g} is" if least == most else f"{least:g} to {most:g} are"
        return f"{where} undecided with {self._terms.replicates} replicates; more of them, or longer runs, would tell"


def search(scenario: Scenario, field: str, terms: Terms, runs: Runs, hear: Hear = lambda _: None) -> Capacity:
    """Return the capacity of a scenario of one loop. `hear` is called with each probe. Raises ScenarioError, CheckError
    if the field or a condition is unfit for a search, RunError if a run fails.
    """
    over = Over(scenario, field)
    steps = Search(over, terms, runs, hear)
    steps.bracket()
    steps.narrow()
    ends, holds, fails = steps.ends, steps.holds, steps.fails
    steps.beyond()
    return Capacity(
        scenario.name,
        scenario.loop.mode,
        field,
        terms,
        None if holds is None else holds.value,
        None if fails is None else fails.value,
        None if ends is None else over.ratio(*ends) - 1,
        steps.probes,
        None if fails is None else _limit(fails),
        tuple(_disorder(steps.probes, terms)),
        (*steps.notices, *_notices(steps.probes)),
    )


def _notices(probes: Sequence[Probe]) -> list[str]:
    """Return a notice if replicates are all the same, so that the confidence is meaningless, and one for each
    percentile that runs are too short for.
    """
    known = [at for each in probes for at in each.intervals]
    still = known and all(at.low == at.high for at in known)
    equal = ["replicates are equal: nothing in them is random, another seed changes nothing"] if still else []
    names = dict.fromkeys(name for each in probes for name in each.few)
    least = min(each.requests // each.replicates for each in probes)
    needed = {name: SAMPLES_NEEDED[name.rpartition(".")[2]] for name in names}
    few = [f"{name} needs {count} requests that count, runs have {least:,}" for name, count in needed.items()]
    return [*equal, *few]


VERDICTS = {True: "holds", False: "fails", None: "undecided"}


def run(scenario: Scenario, field: str, terms: Terms, store: Path, executor: Executor, *, as_json: bool) -> int:
    """Search for a capacity, printing each probe as it is made, then the answer. Return the exit status."""
    with closing(executor):
        Over(scenario, field)  # raise the errors of an unfit field before anything is printed
        runs = Runs(Store(store), executor)
        if not as_json:
            conditions = " and ".join(check.rule for check in terms.conditions)
            print(f"{scenario.name}, {scenario.loop.mode}: {field} with {conditions}; {executor.about}\n")
        answer = search(scenario, field, terms, runs, (lambda _: None) if as_json else _printer(terms, field))
    if as_json:
        print(json.dumps(answer.numbers(), indent=2, allow_nan=False))
    else:
        print(f"\n{answer}\nmade      {runs.made:,} of the runs; the others were in {store}")
    return OK


def _printer(terms: Terms, field: str) -> Hear:
    """Return a function that prints a line per probe, and a header before the first one."""
    metrics = [check.metric for check in terms.conditions]
    headers = [[field.rpartition(".")[2], "runs", "requests", "", *metrics]]

    def show(made: Probe) -> None:
        values = []
        for name, at in zip(metrics, made.intervals, strict=False):
            mean, low, high = map(catalogue.METRICS[name].shown, (at.mean, max(at.low, 0.0), at.high))
            values.append(f"{mean} [{low}, {high}]")
        counts = [f"{made.value:g}", f"{made.replicates}", f"{made.requests:,}"]
        for cells in (*headers, [*counts, VERDICTS[made.holds], *(values or [str(made.reason)])]):
            aligned = [cells[0].rjust(12), cells[1].rjust(5), cells[2].rjust(9), cells[3].ljust(9)]
            print("  ".join([*aligned, *(cell.ljust(32) for cell in cells[4:])]).rstrip(), flush=True)
        headers.clear()

    return show
