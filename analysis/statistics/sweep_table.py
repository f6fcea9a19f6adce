"""The table that `cbsim sweep` writes, as axes and metrics: a row a point, replicates of a place beside each other.

A place is the points that differ in their seed alone. A metric of a place is the mean of its replicates, with an
interval of Student's t: replicates are independent runs of one system.

A view is what a figure shows at first: the axis on x, the axes that make the series, the fixed values of the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from analysis.statistics.labels import ending, is_number, labels, shortened, worded
from cbsim.errors import RunError
from cbsim.metrics import coverage, swept
from cbsim.metrics.checks import OPERATORS, Check
from cbsim.metrics.swept import ABOUT, DONE, LOOP, SEED, STATUSES
from cbsim.metrics.terminal import flat
from cbsim.record.tables import Floats, Ints, Mask
from cbsim.scenario.fields import near
from cbsim.stats.intervals import t_quantile

METADATA = (coverage.STEP_TIMES, b"subject", b"scenario", b"command")
UNSET = "not set"
POINT = "point"
MOST_NAMED, MOST_POINTS = 24, 100  # points in a legend, and with numbers along an axis
MOST_ALONG = 24  # characters of a value along an axis


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """An axis: fields that take their values together. `codes` are each row's index into `labels`, and into `values`,
    where numbers follow their fields' names.

    Values are in rising order if the first field is a number, and then `numbers` are its; else as they first appear.
    `short` are the ends of the fields' names, as much as distinguishes them. An axis equals itself alone.
    """

    fields: Sequence[str]
    labels: Sequence[str]
    values: Sequence[str]
    numbers: Floats | None
    codes: Ints
    short: str
    numbered: bool = False  #: Its values are explicit points, too many to be named in a figure.

    @property
    def name(self) -> str:
        """A field's whole name, or the short ones of several."""
        return self.fields[0] if len(self.fields) == 1 else shortened([self.short])[0]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def written(self) -> Sequence[str]:
        """What stands along it for each value."""
        return [f"{number}" for number in range(1, len(self) + 1)] if self.numbered else self.labels

    @property
    def long(self) -> bool:
        """Whether its values are names too long to stand along it."""
        names = self.short == POINT or max(map(len, self.labels)) > MOST_ALONG
        return self.numbers is None and names and not self.numbered


@dataclass(frozen=True, slots=True)
class SweepTable:
    """The table of a sweep's points. An axis has two values or more; `constants` are the fields that have one.

    `seeds` distinguish the replicates of a place. `reasons` are "" but for failed points. `metrics` are by dotted name,
    NaN if a point has none.
    """

    path: Path
    axes: Sequence[Axis]
    constants: Mapping[str, str]
    seeds: Ints
    status: Ints  # an index of STATUSES
    reasons: Sequence[str]
    metrics: Mapping[str, Floats]
    step_times: Sequence[str] = ()
    """What the step times of its runs rest on, and how far off they are known to be."""
    subject: str = ""  #: Models and GPUs.
    scenario: str = ""  #: YAML, that of the first point.
    command: str = ""  #: The command that makes the table.

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def undone(self) -> list[int]:
        """The rows of points that are not done."""
        return np.flatnonzero(self.status != STATUSES.index(DONE)).tolist()

    def count(self, status: str) -> int:
        return int((self.status == STATUSES.index(status)).sum())

    def axis(self, field: str) -> Axis:
        """Return the axis that sets this field. Raises RunError."""
        for axis in self.axes:
            if field == axis.name or field in axis.fields:
                return axis
        if field in self.constants:
            raise RunError(f"{self.path}: --x {field}: has one value, {self.constants[field]}, expected several")
        known = [name for axis in self.axes for name in axis.fields]
        raise RunError(f"{self.path}: --x {field!r}: no such field{near(field, known)}")

    def metric(self, name: str, source: str) -> str:
        """Return a metric's column; `_s` of a distribution may be left out. Raises RunError that names `source`."""
        head, dot, tail = name.partition(".")
        for candidate in (name, f"{head}_s{dot}{tail}"):
            if candidate in self.metrics:
                return candidate
        hints = [known.replace("_s.", ".") for known in self.metrics]
        raise RunError(f"{self.path}: {source}: no point has a metric {name!r}{near(name, hints)}")


def read(path: Path) -> SweepTable:
    """Read the table in a Parquet file. Raises ScenarioError if it is none, RunError if no point of it is done."""
    table = swept.read(path)
    names = table.column_names
    fields = [*names[1 : names.index(SEED)], LOOP]  # as in names of runs
    status = np.array([STATUSES.index(each) for each in table["status"].to_pylist()], dtype=np.int64)
    reasons = [reason or "" for reason in table["reason"].to_pylist()]
    if not (status == STATUSES.index(DONE)).any():
        first = next((f", the first because: {reason}" for reason in reasons if reason), "")
        raise RunError(f"{path}: none of its {len(status):,} points is done{first}")
    every = [_axis(name, table.column(name), ending(name, {*fields, "name"} - {name})) for name in fields]
    constants = {axis.name: axis.labels[0] for axis in every if len(axis) == 1}
    axes = _together([axis for axis in every if len(axis) > 1])
    columns = {name: table[name].cast(pa.float64()).to_numpy() for name in names[len(fields) + len(ABOUT) - 1 :]}
    metrics = {name: values for name, values in columns.items() if np.isfinite(values).any()}
    seeds = np.unique(table[SEED].to_numpy(), return_inverse=True)[1].astype(np.int64)
    about = _metadata(table)
    rest = about.pop(coverage.STEP_TIMES.decode(), "").splitlines()
    return SweepTable(path, axes, constants, seeds, status, reasons, metrics, rest, **about)


def _metadata(table: pa.Table) -> dict[str, str]:
    metadata = table.schema.metadata or {}
    return {key.decode(): text.decode(errors="replace") for key, text in metadata.items() if key in METADATA}


def _axis(name: str, column: pa.ChunkedArray, short: str) -> Axis:
    cells = [_plain(value) for value in column.to_pylist()]
    values = list(dict.fromkeys(cells))
    if numeric := all(map(is_number, values)):
        values.sort()
    order = {value: code for code, value in enumerate(values)}
    codes = np.array([order[value] for value in cells], dtype=np.int64)
    labels = shortened(_labels(name, values))
    if not numeric:
        return Axis((name,), labels, labels, None, codes, short)
    return Axis((name,), labels, [f"{short} = {label}" for label in labels], np.array(values, np.float64), codes, short)


def _plain(value: Any) -> Any:
    """Return a value that equals itself: anything but a finite number or a bool becomes a string."""
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if value is None or finite else str(value)


def _labels(name: str, values: Sequence[Any]) -> list[str]:
    """Return the values of a field as text: objects, which are JSON, by the fields of theirs that differ."""
    parsed = list(values)
    for at, value in enumerate(values):
        with suppress(TypeError, ValueError):  # no JSON
            parsed[at] = json.loads(value)
    if not any(isinstance(value, dict) for value in parsed):
        return [_label(value) for value in (parsed if all(isinstance(value, list) for value in parsed) else values)]
    return labels([flat({name: value}) for value in parsed], [_label(value) for value in parsed])


def _label(value: Any) -> str:
    if value is None:
        return UNSET
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else worded(value)


def _together(axes: Sequence[Axis]) -> list[Axis]:
    """Join fields that advance together into one axis, where each value of one goes with one value of the other, and
    those of explicit points, which are no grid.
    """
    groups: list[list[Axis]] = []
    for axis in axes:
        alike = (group for group in groups if _combinations([group[0], axis]) == len(axis) == len(group[0]))
        if (group := next(alike, None)) is None:
            groups.append(group := [])
        group.append(axis)
    made = [_joined(group) for group in groups]
    # As in a grid, all values of such an axis are beside all that the others have together.
    rest = [one for one in made if _combinations(made) == len(one) * _combinations([a for a in made if a is not one])]
    fields = [each for axis, group in zip(made, groups, strict=True) if axis not in rest for each in group]
    if not fields or _combinations(fields) > MOST_POINTS:
        return made
    return [_points(sorted(fields, key=len, reverse=True), math.prod(sorted(map(len, rest))[:-1])), *rest]


def _combinations(axes: Sequence[Axis]) -> int:
    return len({*zip(*(axis.codes.tolist() for axis in axes), strict=True)}) if axes else 1


def _joined(axes: Sequence[Axis]) -> Axis:
    rows = np.unique(axes[0].codes, return_index=True)[1]  # one of each value
    labels = [", ".join(axis.labels[axis.codes[row]] for axis in axes) for row in rows]
    values = [", ".join(axis.values[axis.codes[row]] for axis in axes) for row in rows]
    short = ", ".join(axis.short for axis in axes)
    return Axis(tuple(axis.name for axis in axes), labels, values, axes[0].numbers, axes[0].codes, short)


def _points(axes: Sequence[Axis], beside: int) -> Axis:
    """Join axes of explicit points: a value names the fields that its point sets. They are numbered if a legend cannot
    name all of them, each with so many series `beside` it.
    """
    rows = list(zip(*(axis.codes.tolist() for axis in axes), strict=True))
    codes = {row: code for code, row in enumerate(dict.fromkeys(rows))}
    numbered = len(codes) * beside > MOST_NAMED
    values: list[str] = []
    for row in codes:
        labels = [(axis.short, axis.labels[code]) for axis, code in zip(axes, row, strict=True)]
        value = ", ".join(f"{short} = {label}" for short, label in labels if label != UNSET) or "as it is"
        values.append(f"{len(values) + 1}: {value}" if numbered else value)
    fields, of = tuple(axis.name for axis in axes), np.array([codes[row] for row in rows])
    return Axis(fields, values, values, None, of, POINT, numbered)


CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Means:
    """A metric's means by place: the mean of `n` replicates, NaN if there is none, and the half width of its interval,
    NaN if there are not two.
    """

    mean: Floats
    half: Floats
    n: Ints

    @property
    def low(self) -> Floats:
        """The interval's lower end, but no less than 0, as no metric is; the mean if there is no interval."""
        return np.maximum(self.mean - np.nan_to_num(self.half), 0.0)

    @property
    def high(self) -> Floats:
        """The interval's upper end; the mean if there is no interval."""
        return self.mean + np.nan_to_num(self.half)


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a table. `codes` has a row a place, a column an axis; `of` is that of each point."""

    axes: Sequence[Axis]
    codes: Ints
    of: Ints

    def __len__(self) -> int:
        return len(self.codes)

    def means(self, values: Floats) -> Means:
        """Return a metric's means from its values at each point."""
        known = np.isfinite(values)
        at, own = self.of[known], values[known]
        n = np.bincount(at, minlength=len(self))
        mean = _divided(np.bincount(at, own, len(self)), n)
        variance = _divided(np.bincount(at, (own - mean[at]) ** 2, len(self)), n - 1)
        factor = np.array([student(int(count)) for count in n])
        return Means(mean, factor * np.sqrt(_divided(variance, n)), n)

    def label(self, at: int, axes: Sequence[Axis] | None = None) -> str:
        """Return a place's values as text, of these axes or of all."""
        codes = zip(self.axes, self.codes[at], strict=True)
        return ", ".join(axis.values[code] for axis, code in codes if axes is None or axis in axes)

    def columns(self, axes: Sequence[Axis]) -> list[int]:
        """Return the columns of these axes in `codes`."""
        return [at for at, axis in enumerate(self.axes) if axis in axes]


def places(table: SweepTable) -> Places:
    """Return the places of a table, in the order of its axes' values."""
    if not table.axes:
        return Places((), np.zeros((1, 0), dtype=np.int64), np.zeros(len(table), dtype=np.int64))
    codes, of = np.unique(np.stack([axis.codes for axis in table.axes], axis=1), axis=0, return_inverse=True)
    return Places(table.axes, codes, of.reshape(-1))


def meet(limit: Check, values: Floats) -> Mask:
    """Return which values meet a condition; NaN does not."""
    compare: Any = OPERATORS[limit.compare]
    made: Mask = compare(values, limit.bound)
    return made


@cache
def student(n: int) -> float:
    """Return the factor from the standard error of a mean of n values to its interval; NaN below 2."""
    return t_quantile((1 + CONFIDENCE) / 2, n - 1) if n > 1 else float("nan")


def _divided(above: Floats | Ints, below: Ints) -> Floats:
    made: Floats = np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
    return made


MOST_SERIES = 8  # lines of a figure


@dataclass(frozen=True, slots=True)
class View:
    """A table's view: an axis on x, those whose values make a series each, the one value of each other axis by name.

    Without an axis there is one place, and `x` is None; so it is with explicit points alone, a series each.
    """

    x: Axis | None
    series: Sequence[Axis]
    fixed: Mapping[str, int]

    def rows(self, places: Places) -> list[Ints]:
        """Return the places of each series, in the order of x; series without a place are left out."""
        shown = places_at(places, self.fixed)
        own = places.columns(self.series)
        groups: dict[tuple[int, ...], list[int]] = {}
        for at in np.flatnonzero(shown).tolist():
            groups.setdefault(tuple(places.codes[at, own].tolist()), []).append(at)
        return [np.array(groups[key], dtype=np.int64) for key in sorted(groups)]


def places_at(places: Places, fixed: Mapping[str, int]) -> Mask:
    """Return which places have these values on these axes."""
    shown = np.ones(len(places), dtype=bool)
    for at, axis in enumerate(places.axes):
        shown &= places.codes[:, at] == fixed.get(axis.name, places.codes[:, at])
    return shown


def part(places: Places, fixed: Mapping[str, int]) -> str:
    """Return a title's end on the places that a figure has room for; "" if it has all."""
    values = [f"{axis.name} = {axis.labels[fixed[axis.name]]}" for axis in places.axes if axis.name in fixed]
    drawn = f"; {places_at(places, fixed).sum():,} of {len(places):,} places fit, those with {', '.join(values)}"
    return drawn if values else ""


def view(table: SweepTable, x: str | None) -> View:
    """Put `x`, more points than a legend names or the longest numeric axis on x; as many others as make few series,
    those of few values first.
    """
    first = next(iter(ranked(table.axes)), None) if x is None else table.axis(x)
    if first is None or (x is None and first.long and len(first) <= MOST_NAMED):
        return View(None, *split(table.axes))
    return View(first, *split([axis for axis in table.axes if axis is not first]))


def ranked(axes: Sequence[Axis]) -> list[Axis]:
    """Return more points than a legend names, the axes of numbers, then the others, those of most values first and
    those of long names last.
    """
    rank = {axis: (axis.numbered, axis.numbers is not None, not axis.long, len(axis)) for axis in axes}
    return sorted(axes, key=rank.__getitem__, reverse=True)


def split(axes: Sequence[Axis]) -> tuple[Sequence[Axis], Mapping[str, int]]:
    """Return the axes that together make few series, in their order, and one value for each of the rest: the middle
    number, or the first value.
    """
    chosen: list[Axis] = []
    for axis in sorted(axes, key=len):
        if math.prod(map(len, [*chosen, axis])) <= (MOST_NAMED if axis.long else MOST_SERIES):
            chosen.append(axis)
    series = [axis for axis in axes if axis in chosen]
    return series, {axis.name: middle(axis) for axis in axes if axis not in chosen}


def middle(axis: Axis) -> int:
    """Return the code of the value that an axis is fixed at: its middle number, or its first value."""
    return 0 if axis.numbers is None else len(axis) // 2
