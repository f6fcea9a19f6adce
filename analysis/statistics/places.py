"""Places of a sweep: points that differ in their seed alone. A metric of a place is the mean of its replicates, with an
interval of Student's t: replicates are independent runs of one system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from analysis.statistics.sweep_table import Axis, Ints, SweepTable
from cbsim.draw.chart import Floats
from cbsim.results.checks import OPERATORS, Check
from cbsim.sweeps.intervals import t_quantile

Bools = npt.NDArray[np.bool_]
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Means:
    """A metric by place: the mean of `n` replicates, NaN if there is none, and the half width of its interval, NaN if
    there are not two.
    """

    mean: Floats
    half: Floats
    n: Ints

    @property
    def low(self) -> Floats:
        """The lower end, but no less than 0, as no metric is; the mean where there is no interval."""
        return np.maximum(self.mean - np.nan_to_num(self.half), 0.0)

    @property
    def high(self) -> Floats:
        """The upper end, likewise."""
        return self.mean + np.nan_to_num(self.half)


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a table. `codes` has a row a place, a column an axis; `of` and `seeds` are those of each point."""

    axes: Sequence[Axis]
    codes: Ints
    of: Ints
    seeds: Ints

    def __len__(self) -> int:
        return len(self.codes)

    def means(self, values: Floats) -> Means:
        """Of a metric, given for each point. Points of one place and seed are one replicate."""
        known = np.isfinite(values)
        seeds = int(self.seeds.max()) + 1
        runs, which = np.unique(self.of[known] * seeds + self.seeds[known], return_inverse=True)
        at = runs // seeds
        kept = _divided(np.bincount(which, values[known], len(at)), np.bincount(which, minlength=len(at)))
        n = np.bincount(at, minlength=len(self))
        mean = _divided(np.bincount(at, kept, len(self)), n)
        variance = _divided(np.bincount(at, (kept - mean[at]) ** 2, len(self)), n - 1)
        factor = np.array([student(int(count)) for count in n])
        return Means(mean, factor * np.sqrt(_divided(variance, n)), n)

    def said(self, place: int, axes: Sequence[Axis] | None = None) -> str:
        """What a place sets, or of it what these axes set."""
        wanted = self.axes if axes is None else axes
        cells = [
            (axis, code)
            for axis, code in zip(self.axes, self.codes[place], strict=True)
            if any(axis is other for other in wanted)
        ]
        return ", ".join(axis.said(code) for axis, code in cells)


def places(table: SweepTable) -> Places:
    """The places of a table, in the order of its axes' values."""
    if not table.axes:
        return Places((), np.zeros((1, 0), dtype=np.int64), np.zeros(len(table), dtype=np.int64), table.seeds)
    codes, of = np.unique(np.stack([axis.codes for axis in table.axes], axis=1), axis=0, return_inverse=True)
    return Places(table.axes, codes, of.reshape(-1), table.seeds)


def held(limit: Check, values: Floats) -> Bools:
    """Which values a condition holds of; of NaN none does."""
    compare: Any = OPERATORS[limit.compare]
    made: Bools = compare(values, limit.bound)
    return made


@cache
def student(n: int) -> float:
    """What the standard error of a mean of n values is multiplied with; NaN below 2."""
    return t_quantile((1 + CONFIDENCE) / 2, n - 1) if n > 1 else float("nan")


def _divided(above: Floats | Ints, below: Ints) -> Floats:
    made: Floats = np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
    return made
