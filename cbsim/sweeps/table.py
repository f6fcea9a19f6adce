"""The table of a sweep: a row per point, with its settings, its status, and every metric by its dotted name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.errors import RunError
from cbsim.files import access
from cbsim.metrics.catalogue import PER_GPU, PER_USER, quantities
from cbsim.record.directory import write_whole

if TYPE_CHECKING:
    from cbsim.sweeps.sweep import Point

DONE, FAILED, MISSING = "done", "failed", "missing"


class Row(NamedTuple):
    """A point and its outcome: a summary only if it is done, a reason only if it failed."""

    point: Point
    summary: Mapping[str, Any] | None
    reason: str | None

    @property
    def status(self) -> str:
        return DONE if self.summary is not None else FAILED if self.reason is not None else MISSING


def numbers(point: Point, summary: Mapping[str, Any]) -> dict[str, float]:
    """Return every metric of a run, and two of the whole system: tokens/s per GPU, and per user, 1 / mean TPOT."""
    metrics = quantities(summary)
    metrics[PER_GPU] = metrics["output_tokens_per_s"] / point.scenario.gpus
    if metrics.get("tpot_s.mean"):
        metrics[PER_USER] = 1 / metrics["tpot_s.mean"]
    return metrics


def table(rows: Sequence[Row]) -> pa.Table:
    """Return the columns `loop`, the fields that axes set, `seed`, `replicate`, `key`, `status`, `reason`, then the
    metrics; a value that a run does not have is null.
    """
    points = [row.point for row in rows]
    columns: dict[str, Any] = {"loop": [point.loop for point in points]}
    columns |= _columns([_axes(point) for point in points], _typed)
    columns["seed"] = [point.scenario.seed for point in points]
    columns["replicate"] = [point.replicate for point in points]
    columns["key"] = [point.key for point in points]
    columns["status"] = [row.status for row in rows]
    columns["reason"] = pa.array([row.reason for row in rows], pa.string())
    metrics = [{} if row.summary is None else numbers(row.point, row.summary) for row in rows]
    return pa.table(columns | _columns(metrics, lambda values: pa.array(values, pa.float64())))


def _axes(point: Point) -> dict[str, Any]:
    """Return the settings of a point without loop and seed, which have columns of their own."""
    return {name: value for name, value in point.settings.items() if name not in ("loop.mode", "seed")}


def _columns(rows: Sequence[Mapping[str, Any]], array: Callable[[list[Any]], pa.Array]) -> dict[str, pa.Array]:
    """Return a column per name, null in a row without that name."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: array([row.get(name) for row in rows]) for name in names}


def _typed(values: Sequence[Any]) -> pa.Array:
    """Return the values of one field as a column: unchanged if of one type, mixed numbers as floats, else as JSON."""
    types = {type(value) for value in values if value is not None}
    if types == {int, float}:
        return pa.array([None if value is None else float(value) for value in values])
    if len(types) < 2 and types <= {bool, int, float, str}:
        return pa.array(values)
    return pa.array([None if value is None else json.dumps(value, sort_keys=True) for value in values])


def write(made: pa.Table, path: Path) -> None:
    """Write a table atomically. Raises RunError."""
    content = BytesIO()
    pq.write_table(made, content, compression="zstd")
    with access(path, RunError, "written"):
        write_whole(path, content.getvalue())
