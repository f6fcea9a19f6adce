"""Whose text each beam took over in a run: the table, as a driver writes it and replan reads it."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cbsim.results import columns, parquet
from cbsim.results.on_disk import RunError
from cbsim.results.parquet import TableError

FILE = "parents.parquet"
NAMES = tuple(column.name for column in columns.PARENTS)


def files(log: array[int]) -> Mapping[str, bytes]:
    """What the run directory holds of it, by name."""
    table = np.array(log, dtype=np.int64).reshape(-1, len(NAMES))
    values = {name: np.ascontiguousarray(table[:, at]) for at, name in enumerate(NAMES)}
    return {FILE: parquet.encoded(columns.PARENTS, values)} if log else {}


def read(folder: Path) -> dict[int, list[tuple[int, int]]]:
    """(request, the one whose text it took over) by step, of the run in `folder`. Raises RunError."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        with path.open("rb") as file:
            table = parquet.ParquetTable(file, columns.PARENTS)
            rows = zip(*(table[name].to_pylist() for name in NAMES), strict=True)
    except (TableError, OSError) as error:
        raise RunError(f"{path}: {error}", file=path) from error
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for step, request, parent in rows:
        found[step].append((request, parent))
    return dict(found)
