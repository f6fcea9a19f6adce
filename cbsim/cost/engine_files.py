"""The files of kernel tables as they lie in a card's folder: their engines and versions, and their rows by values of
columns. Errors of damaged tables name file, line and column.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce
from pathlib import Path

import numpy as np
import pyarrow as pa

from cbsim.cost.table import MOST_TIME_S
from cbsim.errors import ScenarioError

State = tuple[int, int, int]
Required = tuple[tuple[str, object], ...]
TIME = "latency_ms"
MOST = 1e12  # bound on the values of every other column
DROPPED = ("op_name",)  # columns that a table lacks if all its rows have the value
LINE = "line of the file"  # the column that is added to a table that was read


class DamagedError(ScenarioError):
    """An error for a table that cannot be read or holds an invalid value, or that lacks a column."""


class NoRowsError(ScenarioError):
    """An error for a table without a row of a required value."""


def engines(folder: Path, operation: str = "gemm") -> list[str]:
    """Return the engines that `folder` has tables of an operation of, such as vllm_0.14.0, in order."""
    start, end = f"{operation}__", ".csv.gz"
    names = [each.name for each in os.scandir(folder)] if folder.is_dir() else []
    return sorted(name[len(start) : -len(end)] for name in names if name.startswith(start) and name.endswith(end))


def nearest(folder: Path, engine: str, version: str | None, operation: str = "gemm") -> str | None:
    """Return the engine of that name with the version nearest to `version`, else the newest. None if there is none."""
    known = [each for each in engines(folder, operation) if each.partition("_")[0] == engine]
    if version is None:
        return max(known, key=number, default=None)
    required = number(f"{engine}_{version}")
    return min(known, key=lambda each: [abs(a - b) for a, b in zip(number(each), required, strict=True)], default=None)


def meant(folder: Path, engine: str) -> str:
    """Return the engine that a scenario names, its newest version if it names none. Raises ScenarioError."""
    name, _, version = engine.partition("_")
    if version and engine in engines(folder):
        return engine
    newest = None if version else nearest(folder, name, None)
    if newest is None:
        known = ", ".join(engines(folder))
        if not known:
            raise ScenarioError(f"cost.engine: got {engine}, but {folder} holds no tables of engines (gemm__*.csv.gz)")
        raise ScenarioError(f"cost.engine: got {engine}, expected one of those that {folder} has: {known}")
    return newest


def number(engine: str) -> tuple[int, int, int]:
    """Return the first three numbers of a version."""
    parts = [int(part) for part in re.findall(r"\d+", engine.partition("_")[2])[:3]]
    major, minor, patch = [*parts, 0, 0, 0][:3]
    return major, minor, patch


def kernels(path: Path, required: Mapping[str, object]) -> list[str]:
    """Return the kernels that rows with the `required` values were taken of; none where the table names none."""
    table = read_table(path, state_of(path))
    if "kernel_source" not in table.column_names:
        return []
    chosen = [pa.compute.equal(table[name], wanted) for name, wanted in required.items()]
    return sorted(pa.compute.unique(table.filter(reduce(pa.compute.and_, chosen))["kernel_source"]).to_pylist())


def select(path: Path, columns: Sequence[str], required: Mapping[str, object]) -> dict[tuple[float, ...], float]:
    """Return milliseconds by the values of `columns`, of rows with the `required` values. Raises ScenarioError."""
    return _select(path, state_of(path), tuple(columns), tuple(required.items()))


@lru_cache(maxsize=1024)
def _select(path: Path, state: State, columns: tuple[str, ...], required: Required) -> dict[tuple[float, ...], float]:
    times: dict[tuple[float, ...], float] = {}
    points, milliseconds = rows(path, columns, dict(required))
    for at, ms in zip(map(tuple, points.tolist()), milliseconds.tolist(), strict=True):
        times[at] = min(ms, times.get(at, ms))
    return times


def rows(
    path: Path, columns: Sequence[str], required: Mapping[str, object], time: str = TIME
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of `columns` and the `time` of rows with the `required` values. Raises ScenarioError."""
    table = read_table(path, state_of(path))
    required = {k: v for k, v in required.items() if k in table.column_names or k not in DROPPED}
    for name in (*columns, *required, time):
        if name not in table.column_names:
            raise DamagedError(f"{path}: no column {name!r} (columns: {', '.join(table.column_names[:-1])})")
    for name, wanted in required.items():
        chosen = table.filter(pa.compute.equal(table[name], wanted))
        if not chosen.num_rows:
            known = ", ".join(str(each) for each in sorted(pa.compute.unique(table[name]).to_pylist()))
            before = [f"{each} = {of}" for each, of in required.items()][: list(required).index(name)]
            where = f" where {', '.join(before)}" if before else ""
            raise NoRowsError(f"{path}: no rows with {name} = {wanted} (found: {known}){where}")
        table = chosen
    return np.column_stack([_numbers(path, table, name) for name in columns]), _numbers(path, table, time)


def _numbers(path: Path, table: pa.Table, name: str) -> np.ndarray:
    try:
        values: np.ndarray = table[name].cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise DamagedError(f"{path}: {name}: holds what is no number ({error})") from None
    most = MOST_TIME_S * 1e3 if name == TIME else MOST
    wrong = np.flatnonzero(~np.isfinite(values) | (values < 0) | (values > most) | ((name == TIME) & (values == 0)))
    if len(wrong):
        bound = f"> 0 and <= {most:g}, an hour" if name == TIME else f">= 0 and <= {most:g}"
        raise DamagedError(f"{path}:{table[LINE][int(wrong[0])]}: {name}: got {values[wrong[0]]:g}, must be {bound}")
    return values


def state_of(path: Path) -> State:
    """Return when a table changed, in ns, its size, and when its folder did: caches know it by these. Raises
    ScenarioError.
    """
    try:
        state, folder = path.stat(), path.parent.stat()
    except OSError:
        known = ", ".join(engines(path.parent))
        raise ScenarioError(f"{path}: no such table; cost.engine: the folder has {known}") from None
    return state.st_mtime_ns, state.st_size, folder.st_mtime_ns


@lru_cache(maxsize=64)
def read_table(path: Path, state: State) -> pa.Table:
    """Read the table at `path`, once for each state."""
    import pyarrow.compute  # pa.compute for all here: it loads slowly, and only tables need it
    import pyarrow.csv

    try:
        table = pyarrow.csv.read_csv(path)
        return table.append_column(LINE, pa.array(np.arange(2, len(table) + 2)))
    except (OSError, pa.ArrowInvalid) as error:
        raise DamagedError(f"{path}: cannot be read: {error}") from None
