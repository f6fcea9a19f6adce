"""The table of a sweep: a row a point, what it set, what became of it, and every metric by its dotted name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.errors import RunError
from cbsim.metrics.catalogue import PER_GPU, PER_USER, quantities
from cbsim.record.directory import write_whole

if TYPE_CHECKING:
    from cbsim.sweeps.sweep import Point

DONE, FAILED, MISSING = "done", "failed", "missing"


class Row(NamedTuple):
    """A point and what became of it; a summary only if it is done, a reason only if it failed."""

    point: Point
    summary: Mapping[str, Any] | None
    reason: str | None

    @property
    def status(self) -> str:
        return DONE if self.summary is not None else FAILED if self.reason is not None else MISSING


def numbers(point: Point, summary: Mapping[str, Any]) -> dict[str, float]:
    """Every metric of a run, and two that belong to a whole system: its tokens/s a GPU, and a user's: 1 / mean TPOT."""
    found = quantities(summary)
    found[PER_GPU] = found["output_tokens_per_s"] / point.scenario.gpus
    if found.get("tpot_s.mean"):
        found[PER_USER] = 1 / found["tpot_s.mean"]
    return found


def table(rows: Sequence[Row]) -> pa.Table:
    """`loop`, the fields that axes set, `seed`, `replicate`, `key`, `status`, `reason`, then the metrics; null where a
    run has none.
    """
    points = [row.point for row in rows]
    fields = dict.fromkeys(name for point in points for name in point.settings if name != "loop.mode")
    about: dict[str, Any] = {"loop": [point.loop for point in points]}
    about |= {name: _column([point.settings.get(name) for point in points]) for name in fields if name != "seed"}
    about["seed"] = [point.scenario.seed for point in points]
    about["replicate"] = [point.replicate for point in points]
    about["key"] = [point.key for point in points]
    about["status"] = [row.status for row in rows]
    about["reason"] = pa.array([row.reason for row in rows], pa.string())
    found = [{} if row.summary is None else numbers(row.point, row.summary) for row in rows]
    names = dict.fromkeys(name for each in found for name in each)
    metrics = {name: pa.array([each.get(name) for each in found], pa.float64()) for name in names}
    return pa.table({**about, **metrics})


def _column(values: Sequence[Any]) -> pa.Array:
    """Values of one field: as they are if they are of one kind, else as JSON."""
    given = [value for value in values if value is not None]
    for kind in (bool, int, float, str):
        allowed = (int, float) if kind is float else (kind,)
        if all(isinstance(value, allowed) and (kind is bool or not isinstance(value, bool)) for value in given):
            return pa.array([None if value is None else kind(value) for value in values])
    return pa.array([None if value is None else json.dumps(value, sort_keys=True) for value in values])


def write(made: pa.Table, path: Path) -> None:
    """Write it, whole or not at all. Raises RunError."""
    content = BytesIO()
    pq.write_table(made, content, compression="zstd")
    try:
        write_whole(path, content.getvalue())
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}", file=path) from error
