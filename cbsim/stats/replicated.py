"""A sweep read from its table: the places that its axes span, each with the runs of its replicates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.errors import ScenarioError
from cbsim.scenario.fields import near
from cbsim.sweeps.table import DONE

ABOUT = ("loop", "seed", "replicate", "key", "status", "reason")
Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """A point of a sweep without its seed: what it sets, and the metrics of its runs that are done, by seed."""

    settings: Mapping[str, Any]
    runs: Mapping[int, Numbers]

    def values(self, metric: str) -> dict[int, float]:
        """Of a metric, by seed, where a run has it."""
        return {seed: numbers[metric] for seed, numbers in self.runs.items() if metric in numbers}

    def called(self, fields: Sequence[str]) -> str:
        """What it sets of these fields, in a few words."""
        return called({name: self.settings[name] for name in fields}) or "all"


@dataclass(frozen=True, slots=True)
class Replicated:
    """`fields` are what axes set, `loop` among them; `metrics` what at least one run has; `lacking` counts the points
    that are not done.
    """

    path: Path
    fields: Sequence[str]
    metrics: Sequence[str]
    places: Sequence[Place]
    lacking: int

    @property
    def changing(self) -> list[str]:
        """The fields that are not the same at all places."""
        return [name for name in self.fields if len({place.settings[name] for place in self.places}) > 1]

    def check(self, metric: str) -> None:
        """Raises ScenarioError if no run has the metric."""
        if metric not in self.metrics:
            raise ScenarioError(f"{self.path}: no run has {metric}", file=self.path, field=metric)

    def check_field(self, name: str) -> None:
        """Raises ScenarioError unless the field changes."""
        changing = self.changing
        if name not in changing:
            bound = (
                f"expected one of {', '.join(changing)}" if changing else "its points differ in nothing but the seed"
            )
            raise ScenarioError(
                f"{self.path}: {name!r} is no field that changes; {bound}{near(name, changing)}",
                file=self.path,
                field=name,
                bound=bound,
            )


def read(path: Path) -> Replicated:
    """The places of a table that `cbsim sweep` wrote. Raises ScenarioError if it is none."""
    table = _opened(path)
    names = table.column_names
    fields, metrics = names[: names.index("seed")], names[names.index("reason") + 1 :]
    rows = table.to_pylist()
    if not any(row["status"] == DONE for row in rows):
        raise ScenarioError(f"{path}: not one of {len(rows)} points is done", file=path)
    return Replicated(path, fields, metrics, _places(rows, fields, metrics), sum(row["status"] != DONE for row in rows))


def _opened(path: Path) -> pa.Table:
    bound = "expected the table of a sweep"

    def refused(why: str) -> ScenarioError:
        return ScenarioError(f"{path}: {why}, {bound}", file=path, bound=bound)

    if not path.is_file():
        raise refused("is no file" if path.exists() else "no such file")
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise refused(getattr(error, "strerror", None) or "is no Parquet file") from None
    names = table.column_names
    if missing := [name for name in ABOUT if name not in names]:
        raise refused(f"has no column {', '.join(missing)}")
    at = names.index("seed")
    if names[0] != "loop" or tuple(names[at : at + 5]) != ABOUT[1:]:
        raise refused(f"its columns are not {', '.join(ABOUT)} in this order")
    for name, kind in zip(names, table.schema.types, strict=True):
        number = pa.types.is_integer(kind) or (pa.types.is_floating(kind) and name != "seed") or pa.types.is_null(kind)
        if (name == "seed" or names.index(name) >= at + 5) and not number:
            raise refused(f"{name}: got a column of {kind}")
        if pa.types.is_nested(kind):
            raise refused(f"{name}: got a column of {kind}")
    if table.column("seed").null_count:
        raise refused("seed: got a row without one")
    return table


def _places(rows: Sequence[Mapping[str, Any]], fields: Sequence[str], metrics: Sequence[str]) -> list[Place]:
    runs: dict[tuple[Any, ...], dict[int, Numbers]] = {}
    for row in rows:
        numbers = runs.setdefault(tuple(row[name] for name in fields), {})
        if row["status"] == DONE:
            numbers[row["seed"]] = {
                name: row[name] for name in metrics if row[name] is not None and math.isfinite(row[name])
            }
    return [Place(dict(zip(fields, settings, strict=True)), numbers) for settings, numbers in runs.items()]


def called(settings: Mapping[str, Any]) -> str:
    """Settings in a few words: fields by the last part of their names where that tells them apart."""
    last = [_last(name) for name in settings]
    names = [part if last.count(part) == 1 else name for name, part in zip(settings, last, strict=True)]
    return ", ".join(f"{name}={text(value)}" for name, value in zip(names, settings.values(), strict=True))


def _last(name: str) -> str:
    head, _, last = name.rpartition(".")
    return head if last in ("name", "kind", "mode") and head else last


def text(value: Any) -> str:
    """A value of a field."""
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
