"""A sweep read from its table: the configurations that its axes span, each with the runs of its replicates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.errors import ScenarioError
from cbsim.metrics import catalogue, coverage
from cbsim.scenario.fields import near
from cbsim.sweeps.sweep import DONE

ABOUT = ("loop", "seed", "replicate", "key", "status", "reason")
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
    table = _opened(path)
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


def _opened(path: Path) -> pa.Table:
    if not path.is_file():
        raise _unfit(path, "is no file" if path.exists() else "no such file")
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise _unfit(path, getattr(error, "strerror", None) or "is no Parquet file") from None
    if reason := _mistake(table):
        raise _unfit(path, reason)
    return table


def _unfit(path: Path, reason: str) -> ScenarioError:
    bound = "expected the table of a sweep"
    return ScenarioError(f"{path}: {reason}, {bound}", file=path, bound=bound)


def _mistake(table: pa.Table) -> str | None:
    """Return why this is not the table of a sweep; None if it is."""
    names = table.column_names
    if missing := [name for name in ABOUT if name not in names]:
        return f"has no column {', '.join(missing)}"
    at = names.index("seed")
    if names[0] != "loop" or tuple(names[at : at + 5]) != ABOUT[1:]:
        return f"its columns are not {', '.join(ABOUT)} in this order"
    numbers = {"seed", *names[at + 5 :]}
    for name, kind in zip(names, table.schema.types, strict=True):
        real = pa.types.is_floating(kind) and name != "seed"
        if pa.types.is_nested(kind) or (
            name in numbers and not (real or kind == pa.null() or pa.types.is_integer(kind))
        ):
            return f"{name}: got a column of {kind}"
    return "seed: got a row without one" if table.column("seed").null_count else None


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
