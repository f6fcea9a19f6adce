"""The table that `cbsim sweep` writes, as a file: its columns, the status of a point, and what no run can give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.errors import ScenarioError
from cbsim.metrics.catalogue import METRICS, OF_SWEEPS

ABOUT = LOOP, SEED, _, _, STATUS, REASON = ("loop", "seed", "replicate", "key", "status", "reason")
DONE, FAILED, MISSING = STATUSES = ("done", "failed", "missing")


def read(path: Path) -> pa.Table:
    """Read the table in a Parquet file. Raises ScenarioError unless a sweep can have written it."""
    if not path.is_file():
        raise _unfit(path, "is no file" if path.exists() else "no such file")
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException, ValueError) as error:
        raise _unfit(path, getattr(error, "strerror", None) or "is no Parquet file") from None
    if reason := _mistake(table) or _impossible(table):
        raise _unfit(path, reason)
    return table


def _unfit(path: Path, reason: str) -> ScenarioError:
    bound = "expected the table of a sweep"
    return ScenarioError(f"{path}: {reason}, {bound}", file=path, bound=bound)


def _mistake(table: pa.Table) -> str | None:
    """Return why these are not the columns of a sweep's table; None if they are."""
    names = table.column_names
    if missing := [name for name in ABOUT if name not in names]:
        return f"has no column {', '.join(missing)}"
    at = names.index(SEED)
    if names[0] != LOOP or tuple(names[at : at + 5]) != ABOUT[1:]:
        return f"its columns are not {', '.join(ABOUT)} in this order"
    if len(set(names)) < len(names):
        return "two of its columns have one name"
    numbers = {SEED, *names[at + 5 :]}
    for name, kind in zip(names, table.schema.types, strict=True):
        real = pa.types.is_floating(kind) and name != SEED
        if pa.types.is_nested(kind) or (
            name in numbers and not (real or kind == pa.null() or pa.types.is_integer(kind))
        ):
            return f"{name}: got a column of {kind}"
    return f"{SEED}: got a row without one" if table.column(SEED).null_count else None


def _impossible(table: pa.Table) -> str | None:
    """Return what of these rows no run can give; None if there is nothing. No metric is negative or infinite."""
    names, statuses = table.column_names, table[STATUS].to_pylist()
    for status in statuses:
        if status not in STATUSES:
            return f"{STATUS}: got {status!r}, must be one of {', '.join(STATUSES)}"
    known, done = {**METRICS, **OF_SWEEPS}, np.array([status == DONE for status in statuses], dtype=bool)
    for name in filter(known.__contains__, names):
        values = table[name].cast(pa.float64()).to_numpy()
        wrong = np.flatnonzero(done & ((values < 0) | np.isinf(values)))
        if len(wrong):
            return f"row {wrong[0]}: {name}: got {values[wrong[0]]:g}, must be finite and >= 0"
    places: dict[tuple[object, ...], int] = {}
    columns = [table[name].to_pylist() for name in names[: names.index(SEED) + 1]]
    for row, place in enumerate(zip(*columns, strict=True)):
        if (first := places.setdefault(place, row)) != row:
            return f"row {row}: is the point and seed of row {first}"
    return None
