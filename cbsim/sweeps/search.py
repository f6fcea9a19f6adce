"""The search for a capacity: which load is looked at next, and when it is enough.

Loads are doubled and halved from the scenario's until one is decided to hold and a larger one to fail; then the gap is
halved by ratio. Where its middle stays undecided the gaps beside what is undecided are halved, so that both ends of the
answer are decided probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cbsim.results.metrics import SAMPLES_NEEDED
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps import probe as probes_of
from cbsim.sweeps.capacity import Capacity, binds, disorder
from cbsim.sweeps.over import Over, Value
from cbsim.sweeps.probe import Probe
from cbsim.sweeps.runs import Runs
from cbsim.sweeps.terms import MOST_PROBES, Terms

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

    def _scale(self, factor: float, wanted: Callable[[], Probe | None]) -> None:
        """Multiply the load by `factor` until there is the probe that is wanted, or no further load."""
        value, times = self._over.start, 0
        while wanted() is None:
            scaled = self._over.times(value, factor)
            refused = "there is none" if scaled is None else self._refused(scaled)
            if times == MOST_DOUBLINGS or len(self._made) == MOST_PROBES:
                refused = f"{len(self._made)} loads were tried"
            if scaled is None or refused:
                more = "more" if factor > 1 else "less"
                self.notices.append(f"no {more} load than {value:g} was tried: {refused}")
                return
            self._look(scaled)
            value, times = scaled, times + 1

    def _refused(self, value: Value) -> str | None:
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
            if scaled is not None and self._refused(scaled) is None:
                self._keep(next(probes_of.looked_at(self._over, scaled, self._terms, self._runs)))

    def _look(self, value: Value) -> None:
        self._keep(probes_of.probe(self._over, value, self._terms, self._runs))

    def _keep(self, found: Probe) -> None:
        self._made[found.value] = found
        self._hear(found)

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
    """The capacity of a scenario of one loop. `hear` is told of each probe. Raises ScenarioError, CheckError for what
    cannot be searched, RunError for a run that failed.
    """
    over = Over(scenario, field)
    found = Search(over, terms, runs, hear)
    found.bracket()
    found.narrow()
    ends = found.ends
    holds, fails = found.holds, found.fails
    found.beyond()
    return Capacity(
        scenario.name,
        scenario.loop.mode,
        field,
        terms,
        None if holds is None else holds.value,
        None if fails is None else fails.value,
        None if ends is None else over.ratio(*ends) - 1,
        found.probes,
        None if fails is None else binds(fails),
        tuple(disorder(found.probes, terms)),
        (*found.notices, *_equal(found.probes), *_few(found.probes)),
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
