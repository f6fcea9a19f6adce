"""What charts share: units of time that are read easily, and columns by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from cbsim.draw.chart import Floats


class Columns(Protocol):
    """A table by columns: a step table, or a data frame of one."""

    def __getitem__(self, name: str, /) -> Any: ...

    def __len__(self) -> int: ...


class Unit(NamedTuple):
    """A unit of time and its length in seconds."""

    name: str
    seconds: float


UNITS = ((0.001, Unit("µs", 1e-6)), (1.0, Unit("ms", 1e-3)), (600.0, Unit("s", 1.0)), (10_800.0, Unit("min", 60.0)))


def unit(longest_s: float) -> Unit:
    """The unit in which times up to `longest_s` seconds are read easily."""
    return next((unit for below, unit in UNITS if longest_s < below), Unit("h", 3600.0))


def column(table: Columns, name: str) -> Floats:
    """A column as floats."""
    values: Floats = np.asarray(table[name], dtype=np.float64)
    return values


def pipelined(steps: Columns) -> bool:
    """Was ever a step planned before the one before it had been applied? So an async loop does, and a sync one not."""
    starts, ends = column(steps, "schedule_start_ns"), column(steps, "update_end_ns")
    return bool((starts[1:] < ends[:-1]).any())


def without(tables: Mapping[str, Columns], what: str = "step") -> str:
    """A sentence naming the runs whose table is empty, for a caption; "" if there are none."""
    names = [label for label, table in tables.items() if not len(table)]
    return f" No {what} in {', '.join(names)}." if names else ""
