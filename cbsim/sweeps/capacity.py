"""The most load that a server holds within conditions: an interval, and why it is not more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from cbsim.sweeps.over import Value
from cbsim.sweeps.probe import Probe
from cbsim.sweeps.terms import Terms

WORDS = {"cache": "KV", "CPU": "CPU", "GPU bandwidth": "compute", "GPU arithmetic": "compute"}
"""What a sentence of cbsim.server.binding is about, in a word; what else keeps requests waiting is the queue."""


class Binds(NamedTuple):
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
    binds: Binds | None
    disorder: tuple[str, ...]
    """Where a larger load does better than a smaller one: then there is no single capacity."""
    notices: tuple[str, ...]
    """Why the answer is less than was asked, and percentiles that runs are too short for."""

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
            "conditions": [check.text for check in self.terms.conditions],
            "binds": self.binds and {"word": self.binds.word, "sentences": list(self.binds.sentences)},
            "monotone": not self.disorder,
            "notices": [*self.disorder, *self.notices],
            "probes": [each.numbers(self.terms) for each in self.probes],
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return f"<Capacity {self.name} {self.loop}: {self.field} holds {self.holds}, fails {self.fails}>"


def binds(fails: Probe) -> Binds:
    """Of the first load that fails."""
    if not fails.intervals:
        return Binds("refused", (str(fails.reason), *fails.binds))
    causes = [cause for sentence in fails.binds if (cause := sentence.partition(":")[0]) != "arrivals"]
    return Binds(WORDS.get(causes[0], "queue") if causes else "queue", tuple(fails.binds))


def disorder(probes: Sequence[Probe], terms: Terms) -> list[str]:
    """Where a larger load is decided to hold and a smaller one to fail, or a metric's intervals say that a larger load
    does better. `probes` in order of load.
    """
    said = []
    for less, more in combinations(probes, 2):
        if less.holds is False and more.holds:
            said.append(f"{less.value:g} fails and {more.value:g}, which is more load, holds")
    for at, check in enumerate(terms.conditions):
        for less, more in combinations([each for each in probes if each.intervals], 2):
            a, b = less.intervals[at], more.intervals[at]
            if (check.compare[0] == "<" and b.high < a.low) or (check.compare[0] == ">" and b.low > a.high):
                said.append(f"{check.metric} is {a.mean:.4g} at {less.value:g} and {b.mean:.4g} at {more.value:g}")
                break
    return said


def _lines(found: Capacity) -> list[str]:
    said = [_end("holds", found.holds, found.probes), _end("fails", found.fails, found.probes)]
    rests = f"{found.replicates:,} runs, {found.requests:,} requests that count"
    if found.width is not None:
        said.append(f"between   {found.width:.1%} apart, {100 * found.terms.confidence:g} % sure; {rests}")
    if found.binds is not None:
        said += [f"binds     {found.binds.word}", *(f"          {text}" for text in found.binds.sentences)]
    said += [f"WARNING   not monotone: {text}" for text in found.disorder]
    return said + [f"note      {text}" for text in found.notices]


def _end(word: str, value: Value | None, probes: Sequence[Probe]) -> str:
    if value is None:
        return f"{word:<10}none of the loads that were tried, from {probes[0].value:g} to {probes[-1].value:g}"
    at = next(each for each in probes if each.value == value)
    why = f" {at.reason}" if at.reason else ""
    return f"{word:<10}{value:g}{why} ({at.replicates} runs, {at.requests:,} requests)"
