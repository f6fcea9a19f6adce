"""A sweep read from its table: the configurations that its axes span, each with the runs of its replicates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cbsim.errors import ScenarioError
from cbsim.metrics import catalogue, coverage, swept
from cbsim.metrics.swept import DONE
from cbsim.scenario.fields import near

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Configuration:
    """A point of a sweep without its seed: its settings, and the metrics of its completed runs by seed."""

    settings: Mapping[str, Any]
    runs: Mapping[int, Numbers]

    def values(self, metric: str) -> dict[int, float]:
        return {seed: numbers[metric] for seed, numbers in self.runs.items() if metric in numbers}

    def label(self, fields: Sequence[str]) -> str:
        """Return the settings of these fields as a short label."""
        return label({name: self.settings[name] for name in fields}) or "all"


@dataclass(frozen=True, slots=True)
class Replicated:
    """A sweep's table. `fields` are those that axes set, `loop` among them; `metrics` those that at least one run has;
    `lacking` counts the points that are not done.
    """

    path: Path
    fields: Sequence[str]
    metrics: Sequence[str]
    configurations: Sequence[Configuration]
    lacking: int
    still: bool = False
    """Whether the seed changes nothing: all runs of a configuration were equal, and one of each is left."""
    step_times: Sequence[str] = ()
    """What the step times of its runs rest on, and how far off they are known to be."""

    @property
    def changing(self) -> list[str]:
        """The fields that are not the same in all configurations."""
        return [name for name in self.fields if len({each.settings[name] for each in self.configurations}) > 1]

    def check(self, metric: str) -> None:
        if metric not in self.metrics:
            raise ScenarioError(
                f"{self.path}: no run has {catalogue.metric(metric).spelled}", file=self.path, field=metric
            )

    def field(self, name: str) -> str:
        """Return the full name of a field that differs between configurations; `name` may be its last part, as labels
        have it, if no other field has the same. Raises ScenarioError.
        """
        changing = self.changing
        alike = [each for each in changing if each == name] or [each for each in changing if _last(each) == name]
        if len(alike) != 1:
            changing = alike or changing
            expected = f"expected one of {', '.join(changing)}"
            bound = expected if changing else "its points differ in nothing but the seed"
            message = f"{self.path}: {name!r} is no field that changes; {bound}{near(name, changing)}"
            raise ScenarioError(message, file=self.path, field=name, bound=bound)
        return alike[0]


def read(path: Path) -> Replicated:
    """Read the configurations of a table that `cbsim sweep` wrote. Raises ScenarioError if it is not such a table."""
    table = swept.read(path)
    names = table.column_names
    fields, metrics = names[: names.index("seed")], names[names.index("reason") + 1 :]
    rows = table.to_pylist()
    missing = sum(row["status"] != DONE for row in rows)
    if missing == len(rows):
        raise ScenarioError(f"{path}: not one of {len(rows)} points is done", file=path)
    rest = (table.schema.metadata or {}).get(coverage.STEP_TIMES, b"").decode().splitlines()
    configurations = _configurations(rows, fields, metrics)
    several = [[*each.runs.values()] for each in configurations if len(each.runs) > 1]
    still = bool(several) and all(numbers == runs[0] for runs in several for numbers in runs)
    if still:
        configurations = [replace(each, runs=dict([*each.runs.items()][:1])) for each in configurations]
    return Replicated(path, fields, metrics, configurations, missing, still, rest)


def _configurations(
    rows: Sequence[Mapping[str, Any]], fields: Sequence[str], metrics: Sequence[str]
) -> list[Configuration]:
    runs: dict[tuple[Any, ...], dict[int, Numbers]] = {}
    for row in rows:
        numbers = runs.setdefault(tuple(row[name] for name in fields), {})
        if row["status"] == DONE:
            known = {name: row[name] for name in metrics if row[name] is not None}
            numbers[row["seed"]] = {name: value for name, value in known.items() if math.isfinite(value)}
    return [Configuration(dict(zip(fields, settings, strict=True)), numbers) for settings, numbers in runs.items()]


def label(settings: Mapping[str, Any]) -> str:
    """Return settings as a short label: fields are named by the last part of their names where that is unique."""
    last = [_last(name) for name in settings]
    names = [part if last.count(part) == 1 else name for name, part in zip(settings, last, strict=True)]
    return ", ".join(f"{name}={shown(value)}" for name, value in zip(names, settings.values(), strict=True))


def _last(name: str) -> str:
    head, _, last = name.rpartition(".")
    return head if last in ("name", "kind", "mode") and head else last


def shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
