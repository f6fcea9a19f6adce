"""The table that `cbsim sweep` writes, as axes and metrics: a row a point, replicates of a place beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.draw.chart import Floats
from cbsim.results.directory import RunError
from cbsim.scenario.fields import near

Ints = npt.NDArray[np.int64]
LOOP, SEED = "loop", "seed"
ABOUT = (LOOP, SEED, "replicate", "key", "status", "reason")
DONE, FAILED, MISSING = STATUSES = ("done", "failed", "missing")
MOST_LETTERS = 60  # of a value


@dataclass(frozen=True, slots=True)
class Axis:
    """Fields that take their values together. `codes` say for each row which of the `labels` it has.

    Values are in rising order if the first field is a number, and then `numbers` are its; else as they first appear.
    `short` is the end of the first field's name, as much as tells it from other axes.
    """

    fields: Sequence[str]
    labels: Sequence[str]
    numbers: Floats | None
    codes: Ints
    short: str = ""

    @property
    def name(self) -> str:
        return ", ".join(self.fields)

    def __len__(self) -> int:
        return len(self.labels)

    def said(self, code: int) -> str:
        """A value as a name says it: a number has its field's."""
        return self.labels[code] if self.numbers is None else f"{self.short} = {self.labels[code]}"


@dataclass(frozen=True, slots=True)
class SweepTable:
    """Every point of a sweep. An axis has two values or more; `constants` are the fields that have one.

    `seeds` tell the replicates of a place apart. `reasons` are "" but for failed points. `metrics` are by dotted name,
    NaN where a point has none.
    """

    path: Path
    axes: Sequence[Axis]
    constants: Mapping[str, str]
    seeds: Ints
    status: Ints  # an index of STATUSES
    reasons: Sequence[str]
    metrics: Mapping[str, Floats]

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def name(self) -> str:
        return self.path.stem

    def count(self, status: str) -> int:
        return int((self.status == STATUSES.index(status)).sum())

    def axis(self, field: str) -> Axis:
        """The axis that sets this field. Raises RunError."""
        for axis in self.axes:
            if field == axis.name or field in axis.fields:
                return axis
        if field in self.constants:
            raise RunError(f"{self.path}: --x {field}: has one value, {self.constants[field]}, expected several")
        known = [name for axis in self.axes for name in axis.fields]
        raise RunError(f"{self.path}: --x {field!r}: no such field{near(field, known)}")

    def metric(self, name: str, source: str) -> str:
        """The column of a metric; of a distribution `_s` may be left out. Raises RunError, its text led by `source`."""
        head, dot, tail = name.partition(".")
        for candidate in (name, f"{head}_s{dot}{tail}"):
            if candidate in self.metrics:
                return candidate
        hints = [known.replace("_s.", ".") for known in self.metrics]
        raise RunError(f"{self.path}: {source}: no point has a metric {name!r}{near(name, hints)}")


def read(path: Path) -> SweepTable:
    """The table in a Parquet file. Raises RunError if it is none, or if no point of it is done."""
    table = _checked(path)
    names = table.column_names
    fields = [*names[1 : names.index(SEED)], LOOP]  # as in names of runs
    status = np.array([STATUSES.index(text) for text in _texts(path, table, "status", STATUSES)], dtype=np.int64)
    reasons = _texts(path, table, "reason")
    if not (status == STATUSES.index(DONE)).any():
        first = next((f", the first because: {reason}" for reason in reasons if reason), "")
        raise RunError(f"{path}: none of its {len(status):,} points is done{first}")
    axes = [_axis(name, table.column(name)) for name in fields]
    metrics = {name: _numbers(path, table, name) for name in names[len(fields) + len(ABOUT) - 1 :]}
    return SweepTable(
        path=path,
        axes=_shortened(_together([axis for axis in axes if len(axis) > 1])),
        constants={axis.name: axis.labels[0] for axis in axes if len(axis) == 1},
        seeds=np.unique(_numbers(path, table, SEED), return_inverse=True)[1].astype(np.int64),
        status=status,
        reasons=reasons,
        metrics={name: values for name, values in metrics.items() if np.isfinite(values).any()},
    )


def _checked(path: Path) -> pa.Table:
    if not path.is_file():
        raise RunError(f"{path}: no table of a sweep: {'no file' if path.exists() else 'no such file'}")
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException, ValueError) as error:
        said = getattr(error, "strerror", None) or "no Parquet file"
        raise RunError(f"{path}: no table of a sweep: {said}") from None
    names = table.column_names
    missing = [name for name in ABOUT if name not in names]
    if missing or names[0] != LOOP or names[(at := names.index(SEED)) : at + len(ABOUT) - 1] != list(ABOUT[1:]):
        what = f"it has no column {missing[0]}" if missing else f"its columns are not {', '.join(ABOUT)} in this order"
        raise RunError(f"{path}: no table of a sweep: {what}")
    if len(set(names)) < len(names):
        raise RunError(f"{path}: no table of a sweep: two of its columns have one name")
    return table


def _texts(path: Path, table: pa.Table, name: str, allowed: Sequence[str] = ()) -> list[str]:
    values = ["" if value is None else str(value) for value in table.column(name).to_pylist()]
    if allowed and (wrong := set(values).difference(allowed)):
        raise RunError(f"{path}: {name}: got {min(wrong)!r}, expected one of {', '.join(allowed)}")
    return values


def _numbers(path: Path, table: pa.Table, name: str) -> Floats:
    kind = table.schema.field(name).type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise RunError(f"{path}: {name}: got a column of {kind}, expected numbers")
    values: Floats = table.column(name).cast(pa.float64()).to_numpy()
    return values


def _axis(name: str, column: pa.ChunkedArray) -> Axis:
    given = [_plain(value) for value in column.to_pylist()]
    values = list(dict.fromkeys(given))
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if numeric:
        values.sort()
    place = {value: code for code, value in enumerate(values)}
    codes = np.array([place[value] for value in given], dtype=np.int64)
    return Axis((name,), _labels(values), np.array(values, dtype=np.float64) if numeric else None, codes)


def _plain(value: Any) -> Any:
    """A value that equals itself: what is neither a finite number nor a truth value is a text."""
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if value is None or finite else str(value)


def _labels(values: Sequence[Any]) -> list[str]:
    """How values are shown: a cut one keeps apart from others by its number."""
    texts = [_label(value) for value in values]
    cut = [text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 4]}..." for text in texts]
    return [f"{text} #{i + 1}" if cut.count(text) > 1 else text for i, text in enumerate(cut)]


def _label(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _together(axes: Sequence[Axis]) -> list[Axis]:
    """Fields that advance together are one axis: each value of one goes with one value of the other."""
    made: list[Axis] = []
    for axis in axes:
        pairs = (np.unique(np.stack([other.codes, axis.codes]), axis=1) for other in made)
        at = next((i for i, pair in enumerate(pairs) if pair.shape[1] == len(axis) == len(made[i])), None)
        if at is None:
            made.append(axis)
        else:
            first = made[at]
            own = axis.codes[np.unique(first.codes, return_index=True)[1]]
            labels = [f"{label}, {axis.labels[code]}" for label, code in zip(first.labels, own, strict=True)]
            made[at] = Axis((*first.fields, *axis.fields), labels, first.numbers, first.codes)
    return made


def _shortened(axes: Sequence[Axis]) -> list[Axis]:
    names = [axis.fields[0] for axis in axes]
    endings = [_ending(name, [other for other in names if other != name]) for name in names]
    return [replace(axis, short=ending) for axis, ending in zip(axes, endings, strict=True)]


def _ending(name: str, others: Sequence[str]) -> str:
    """The last words of a dotted name that none of the others ends with."""
    words = name.split(".")
    endings = (".".join(words[-count:]) for count in range(1, len(words)))
    return next((end for end in endings if not any(f".{other}".endswith(f".{end}") for other in others)), name)
