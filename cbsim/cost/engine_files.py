"""Kernel tables of serving engines as aiconfigurator publishes them: one folder a card, one file an operation.

    gemm__vllm_0.14.0         gemm_dtype, m, n, k
    context_attention__...    batch_size, isl, num_heads, num_key_value_heads, attn_dtype, kv_cache_dtype, step
    generation_attention__... the same: rows that read isl + step tokens each
    moe__...                  moe_dtype, num_tokens, hidden_size, inter_size, topk, num_experts, moe_tp_size,
                              moe_ep_size, distribution
    custom_allreduce__...     num_gpus, message_size (elements); backend, where graph and eager were told apart
    nccl__nccl_<version>      op_name, nccl_dtype, num_gpus, message_size (elements)

All end in .csv.gz and have a column latency_ms.

An engine is a name and a version, as in the names of the files. Where one row was measured several times, or with
several kernels, the fastest counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from cbsim.scenario.fields import ScenarioError

TIME = "latency_ms"
MOST = 1e12  # of any column


class DamagedError(ScenarioError):
    """A table cannot be read, or holds what is no time."""


class NoColumnError(DamagedError):
    """A table has no such column."""


class NoRowsError(ScenarioError):
    """A table has no row with such a value."""


def engines(folder: Path) -> list[str]:
    """The engines that `folder` has GEMM tables of, such as vllm_0.14.0, in order."""
    return sorted(path.name.partition("__")[2].removesuffix(".csv.gz") for path in folder.glob("gemm__*.csv.gz"))


def nearest(folder: Path, engine: str, version: str | None) -> str | None:
    """The engine of that name whose version is next to `version`; without one the newest. None if there is none."""
    known = [each for each in engines(folder) if each.partition("_")[0] == engine]
    if version is None:
        return max(known, key=_number, default=None)
    wanted = _number(f"{engine}_{version}")
    return min(known, key=lambda each: [abs(a - b) for a, b in zip(_number(each), wanted, strict=True)], default=None)


def meant(folder: Path, engine: str) -> str:
    """The engine that a scenario names; without a version its newest. Raises ScenarioError."""
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


def _number(engine: str) -> tuple[int, int, int]:
    """The first three numbers of a version."""
    parts = [int(part) for part in re.findall(r"\d+", engine.partition("_")[2])[:3]]
    major, minor, patch = [*parts, 0, 0, 0][:3]
    return major, minor, patch


def select(path: Path, columns: Sequence[str], wanted: Mapping[str, object]) -> dict[tuple[float, ...], float]:
    """Milliseconds by the values of `columns`, of the rows that have the `wanted` values. Raises ScenarioError."""
    table = _read(path)
    for name in (*columns, *wanted, TIME):
        if name not in table.column_names:
            raise NoColumnError(f"{path}: no column {name!r} (columns: {', '.join(table.column_names)})")
    for name, value in wanted.items():
        chosen = table.filter(pc.equal(table[name], value))
        if not chosen.num_rows:
            known = ", ".join(str(each) for each in sorted(pc.unique(table[name]).to_pylist()))
            raise NoRowsError(f"{path}: no rows with {name} = {value} (found: {known}){_said(wanted, name)}")
        table = chosen
    points = np.column_stack([_numbers(path, table, name) for name in columns])
    times: dict[tuple[float, ...], float] = {}
    for at, ms in zip(map(tuple, points.tolist()), _numbers(path, table, TIME).tolist(), strict=True):
        times[at] = min(ms, times.get(at, ms))
    return times


def _said(wanted: Mapping[str, object], last: str) -> str:
    before = [f"{name} = {value}" for name, value in wanted.items()]
    before = before[: list(wanted).index(last)]
    return f" where {', '.join(before)}" if before else ""


def _numbers(path: Path, table: pa.Table, name: str) -> np.ndarray:
    try:
        values = table[name].cast(pa.float64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise DamagedError(f"{path}: {name}: holds what is no number ({error})") from None
    wrong = np.flatnonzero(~np.isfinite(values) | (values < 0) | (values > MOST) | ((name == TIME) & (values == 0)))
    if len(wrong):
        bound = f"{'> 0' if name == TIME else '>= 0'} and <= {MOST:g}"
        raise DamagedError(f"{path}: {name}: holds {values[wrong[0]]:g}, must be {bound}")
    numbers: np.ndarray = values
    return numbers


def _read(path: Path) -> pa.Table:
    if not path.is_file():
        raise ScenarioError(f"{path}: no such table; cost.engine: the folder has {', '.join(engines(path.parent))}")
    state = path.stat()
    return _table(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=12)
def _table(path: Path, changed_ns: int, size: int) -> pa.Table:
    """Of a file in one state."""
    del changed_ns, size
    try:
        return pyarrow.csv.read_csv(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DamagedError(f"{path}: cannot be read: {error}") from None
