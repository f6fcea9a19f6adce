"""Whose text each beam took over in a run: the table, as a driver writes it and replan reads it."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from cbsim.results import columns, parquet
from cbsim.results.on_disk import Place, numbers

FILE = "parents.parquet"
NAMES = tuple(column.name for column in columns.PARENTS)


def files(log: array[int]) -> Mapping[str, bytes]:
    """What the run directory holds of it, by name."""
    table = np.array(log, dtype=np.int64).reshape(-1, len(NAMES))
    values = {name: np.ascontiguousarray(table[:, at]) for at, name in enumerate(NAMES)}
    return {FILE: parquet.encoded(columns.PARENTS, values)} if log else {}


def read(place: Place) -> dict[int, list[tuple[int, int]]]:
    """(request, the one whose text it took over) by step. Raises RunError."""
    table = numbers(place, FILE, columns.PARENTS)
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for step, request, parent in zip(*(table[name].tolist() for name in NAMES), strict=True):
        found[step].append((request, parent))
    return dict(found)
