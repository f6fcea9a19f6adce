"""The points of a sweep: a resolved scenario each, one loop, a key. All are built before one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbsim.scenario import scenario as scenarios
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps import identity
from cbsim.sweeps.axes import Settings
from cbsim.sweeps.sweep_file import SweepFile, overrides
from cbsim.workload import generators

LARGEST_SEED = 2**63 - 1  # that a table holds
MOST_TOLD = 20
"""Mistakes that are told at once; points that make the same one count as one."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run: what its axes set, its place among the replicates, and the scenario of one loop that follows."""

    settings: Settings
    replicate: int
    scenario: Scenario
    key: str

    @property
    def loop(self) -> str:
        return self.scenario.loop.mode


Variants = Callable[[Sequence[str]], Scenario]


def variants(source: str | Path | Mapping[str, Any], base: Path) -> Variants:
    """The scenarios that overrides make of one: of its fields, of a file from the folder `base`, or of a name."""
    if isinstance(source, Mapping):
        return scenarios.Variants(Document("scenario", None, dict(source)), base)
    beside = base / source
    return scenarios.variants(beside if beside.is_file() else source)


def of(sweep: SweepFile, base: Path) -> list[Point]:
    """All points of a sweep, in its order. Raises ScenarioError that tells of every point that cannot be built."""
    make, always = variants(sweep.scenario, base), overrides(sweep.set)
    points: list[Point] = []
    wrong: dict[str, list[str]] = {}
    for settings, replicate in sweep.settings():
        try:
            points += _built(make([*always, *overrides(settings)]), settings, replicate)
        except ScenarioError as error:
            said = ", ".join(f"{name}={settings[name]}" for name in sweep.names) or "the scenario"
            wrong.setdefault(str(error), []).append(said)
    if wrong:
        raise ScenarioError(_told(sweep.name, wrong))
    return points


def again(point: Point, replicate: int) -> Point:
    """A point of replicate 0 as another one: what differs is the seed."""
    scenario = point.scenario.model_copy(update={"seed": point.scenario.seed + replicate})
    return Point(point.settings, replicate, scenario, identity.key(scenario))


def _built(scenario: Scenario, settings: Settings, replicate: int) -> list[Point]:
    """The loops of one place."""
    if scenario.seed + replicate > LARGEST_SEED:
        bound = f"must be <= {LARGEST_SEED:,} with its replicates"
        raise ScenarioError(f"seed: got {scenario.seed:,}, {bound}", field="seed", value=scenario.seed, bound=bound)
    if replicate:
        scenario = scenario.model_copy(update={"seed": scenario.seed + replicate})
    made = []
    for mode in scenarios.loops(scenario):
        each = scenario.model_copy(update={"loop": scenario.loop.model_copy(update={"mode": mode})})
        made.append(Point(settings, replicate, each, identity.key(each)))
    return made


def _told(name: str, wrong: Mapping[str, Sequence[str]]) -> str:
    """Every mistake once, with the points that make it."""
    count = sum(map(len, wrong.values()))
    if count == 1:
        return f"sweep {name}: {next(iter(wrong.values()))[0]}: {next(iter(wrong))}"
    lines = [f"sweep {name}: {count} points cannot be built; nothing was run"]
    for error, places in list(wrong.items())[:MOST_TOLD]:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        lines.append(f"  {places[0]}{more}: {error}")
    if len(wrong) > MOST_TOLD:
        lines.append(f"  and {len(wrong) - MOST_TOLD} other mistakes")
    return "\n".join(lines)


def check_workload(point: Point) -> None:
    """Raises ScenarioError if its workload cannot be built, which reads its data."""
    generators.build(point.scenario)
