"""The most load that a server holds within conditions: an interval, and why it is not more.

The search for a capacity: which load is looked at next, and when it is enough.

Loads are doubled and halved from the scenario's until one is decided to hold and a larger one to fail; then the gap is
halved by ratio. Where its middle stays undecided the gaps beside what is undecided are halved, so that both ends of the
answer are decided probes.

`cbsim capacity`: what a person sees of a search while it works, and the answer.
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
from cbsim.stats.intervals import Interval
from cbsim.sweeps import identity
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.store import Runs, Store

CAUSES = {"cache": "KV", "CPU": "CPU", "GPU bandwidth": "compute", "GPU arithmetic": "compute"}
"""What a sentence of cbsim.runs.binding is about, in a word; what else keeps requests waiting is the queue."""


class Limit(NamedTuple):
    """Why the first load fails that does: a word, and what its first run says of itself."""

    word: str
    sentences: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Capacity:
    """What a search found. It prints as the lines that the command ends with.

    `holds` is the last load that holds, `fails` the first that does not: with probability `terms.confidence` the load
    where the conditions cease to hold lies between them. Either is None if no load that was tried does. `probes` stand
    in order of load.
    """

    name: str
    loop: str
    field: str
    terms: Terms
    holds: Value | None
    fails: Value | None
    width: float | None
    """How many times the load of `holds` that of `fails` is, less 1."""
    probes: tuple[Probe, ...]
    binds: Limit | None
    disorder: tuple[str, ...]
    """Where a larger load does better than a smaller one: then there is no single capacity."""
    notices: tuple[str, ...]
    """Why the answer is less than what was requested, and percentiles that runs are too short for."""

    @property
    def replicates(self) -> int:
        """Runs of all probes."""
        return sum(each.replicates for each in self.probes)

    @property
    def requests(self) -> int:
        """Requests of all probes that count."""
        return sum(each.requests for each in self.probes)

    def numbers(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "name": self.name,
            "loop": self.loop,
            "field": self.field,
            "holds": self.holds,
            "fails": self.fails,
            "width": self.width,
            "confidence": self.terms.confidence,
            "replicates": self.replicates,
            "requests": self.requests,
            "conditions": [check.rule for check in self.terms.conditions],
            "binds": self.binds and {"word": self.binds.word, "sentences": list(self.binds.sentences)},
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
    """Of the first load that fails."""
    if not fails.intervals:
        return Limit("refused", (str(fails.reason), *fails.limits))
    causes = [cause for sentence in fails.limits if (cause := sentence.partition(":")[0]) != "arrivals"]
    return Limit(CAUSES.get(causes[0], "queue") if causes else "queue", tuple(fails.limits))


def _disorder(probes: Sequence[Probe], terms: Terms) -> list[str]:
    """Where a larger load is decided to hold and a smaller one to fail, or a metric's intervals say that a larger load
    does better. `probes` in order of load.
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
SMALL = 4  # a gap beside what is undecided is small if it is so many times smaller than the width
Hear = Callable[[Probe], None]


class Search:
    """The probes made so far, and which is next."""

    def __init__(self, over: Over, terms: Terms, runs: Runs, hear: Hear) -> None:
        self._over, self._terms, self._runs, self._hear = over, terms, runs, hear
        self._made: dict[Value, Probe] = {}
        self.notices: list[str] = []

    @property
    def probes(self) -> tuple[Probe, ...]:
        """In order of load."""
        return tuple(sorted(self._made.values(), key=lambda each: self._over.load(each.value)))

    @property
    def fails(self) -> Probe | None:
        """The least load that is decided to fail."""
        return next((each for each in self.probes if each.holds is False), None)

    @property
    def holds(self) -> Probe | None:
        """The largest load below it that is decided to hold."""
        below = self.probes if self.fails is None else self.probes[: self.probes.index(self.fails)]
        return next((each for each in reversed(below) if each.holds), None)

    def bracket(self) -> None:
        """Find a load that fails and one that holds. Raises what a look at the scenario itself raises."""
        self._look(self._over.start)
        self._scale(2.0, lambda: self.fails)
        self._scale(0.5, lambda: self.holds)

    def _scale(self, factor: float, end: Callable[[], Probe | None]) -> None:
        """Multiply the load by `factor` until there is an `end`, or no further load."""
        value, times = self._over.start, 0
        while end() is None:
            scaled = self._over.times(value, factor)
            problem = "there is none" if scaled is None else self._problem(scaled)
            if times == MOST_DOUBLINGS or len(self._made) == MOST_PROBES:
                problem = f"{len(self._made)} loads were tried"
            if scaled is None or problem:
                more = "more" if factor > 1 else "less"
                self.notices.append(f"no {more} load than {value:g} was tried: {problem}")
                return
            self._look(scaled)
            value, times = scaled, times + 1

    def _problem(self, value: Value) -> str | None:
        """Why there is no scenario with such a load."""
        try:
            self._over.scenario(value, 0)
        except ScenarioError as error:
            return str(error)
        return None

    def narrow(self) -> None:
        """Bring both ends together until they are near enough, or nothing between them can be decided."""
        while (ends := self.ends) is not None and self._over.ratio(*ends) - 1 > self._terms.width:
            value = self._next(*ends)
            if value is None or len(self._made) == MOST_PROBES:
                self.notices.append(self._why_wide(value is None))
                return
            self._look(value)

    @property
    def ends(self) -> tuple[Value, Value] | None:
        """The loads that the answer lies between, when there are both."""
        holds, fails = self.holds, self.fails
        return None if holds is None or fails is None else (holds.value, fails.value)

    def beyond(self) -> None:
        """Look at half the least load and at twice the largest, once: it changes no answer, but may show a disorder."""
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
        """The middle of the gap, or of the larger one beside what is undecided in it; None if those are small."""
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
    """The capacity of a scenario of one loop. `hear` is called with each probe. Raises ScenarioError, CheckError for
    what cannot be searched, RunError for a run that failed.
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
        (*steps.notices, *_equal(steps.probes), *_few(steps.probes)),
    )


def _few(probes: Sequence[Probe]) -> list[str]:
    """Percentiles that runs are too short for."""
    names = dict.fromkeys(name for each in probes for name in each.few)
    least = min(each.requests // each.replicates for each in probes)
    needed = {name: SAMPLES_NEEDED[name.rpartition(".")[2]] for name in names}
    return [f"{name} needs {count} requests that count, runs have {least:,}" for name, count in needed.items()]


def _equal(probes: Sequence[Probe]) -> list[str]:
    """Whether replicates are all the same, so that the confidence says nothing."""
    known = [at for each in probes for at in each.intervals]
    still = known and all(at.low == at.high for at in known)
    return ["replicates are equal: nothing in them is random, another seed changes nothing"] if still else []


VERDICTS = {True: "holds", False: "fails", None: "undecided"}


def run(scenario: Scenario, field: str, terms: Terms, store: Path, executor: Executor, *, as_json: bool) -> int:
    """Search, print each probe as it is made, then the answer. The exit status."""
    with closing(executor):
        Over(scenario, field)  # what cannot be searched is told before anything is printed
        runs = Runs(Store(store, identity.code()), executor)
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
    """Prints a line a probe, before the first one a header."""
    metrics = [check.metric for check in terms.conditions]
    headers = [[field.rpartition(".")[2], "runs", "requests", "", *metrics]]

    def show(made: Probe) -> None:
        while headers:
            print(_aligned(headers.pop()))
        values = [_shown(at, metric) for metric, at in zip(metrics, made.intervals, strict=False)]
        counts = [f"{made.value:g}", f"{made.replicates}", f"{made.requests:,}"]
        print(_aligned([*counts, VERDICTS[made.holds], *(values or [str(made.reason)])]), flush=True)

    return show


def _aligned(cells: list[str]) -> str:
    widths = (12, 5, 9)
    numbers = [cell.rjust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*numbers, cells[3].ljust(9), *(cell.ljust(32) for cell in cells[4:])]).rstrip()


def _shown(at: Interval, metric: str) -> str:
    """A mean and its interval in the form of the metric."""
    mean, low, high = (catalogue.METRICS[metric].shown(value) for value in (at.mean, max(at.low, 0.0), at.high))
    return f"{mean} [{low}, {high}]"
