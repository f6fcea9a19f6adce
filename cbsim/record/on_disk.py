"""Tables of a run directory that stay on disk: a column is read when it is used, and not kept.

A table may be one file, or pieces that follow one another. So a run of millions of steps takes the memory of the few
columns that are looked at together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from cbsim.errors import RunError
from cbsim.files import access
from cbsim.record import columns, parquet
from cbsim.record.columns import Column
from cbsim.record.parquet import ParquetTable, TableError
from cbsim.record.record import STATUSES, STEP_COLUMNS
from cbsim.record.tables import NUMBERS, RUNS, TEXTS, Ints, RequestTable, Steps

T = TypeVar("T")
V = TypeVar("V")
LARGE = 1 << 19  # rows of a table, beyond which columns are read when they are asked for
Place = Path | Mapping[str, bytes]
"""Where the files of a run are: a folder, or in memory, by name."""


def numbers(place: Place, name: str, declared: Sequence[Column]) -> dict[str, Ints]:
    """The columns, all of integers, of a table that not every run has; without rows if this one has none. Raises
    RunError.
    """
    table: TableFiles | ParquetTable
    if isinstance(place, Path) and (place / name).exists():
        table = TableFiles([place / name], declared)
    elif not isinstance(place, Path) and name in place:
        table = ParquetTable(BytesIO(place[name]), declared)
    else:
        return {column.name: np.empty(0, dtype=np.int64) for column in declared}
    return {column.name: table[column.name].to_numpy() for column in declared}


class TableFiles:
    """The columns of parquet files that follow one another. Raises RunError naming the file that is broken."""

    def __init__(self, files: Sequence[Path], declared: Sequence[Column]) -> None:
        self._files, self._declared = files, declared
        self.counts = [self._read(file, len) for file in files]

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        parts = [self._read(file, _column(name)) for file in self._files]
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], type=parts[0].type)

    def lists(self, name: str) -> tuple[Ints, Ints]:
        """A column of lists of integers, as the length of each list and the items of all."""
        parts = [self._read(file, lambda table: table.lists(name)) for file in self._files]
        lengths, items = zip(*parts, strict=True)
        return np.concatenate(lengths), np.concatenate(items)

    def rows(self, low: int, high: int) -> Iterator[pa.Table]:
        """Rows low:high with every declared column, file by file."""
        for file, count in zip(self._files, self.counts, strict=True):
            if low < count and high > 0:
                yield self._read(file, _rows(max(low, 0), min(high, count)))
            low, high = low - count, high - count

    def file(self, number: int) -> pa.Table:
        """Every declared column of one of the files."""
        return self._read(self._files[number], _rows(0, self.counts[number]))

    def _read(self, path: Path, make: Callable[[ParquetTable], T]) -> T:
        try:
            with access(path, RunError), path.open("rb") as file:
                return make(ParquetTable(file, self._declared))
        except TableError as error:
            raise RunError(f"{path}: {error}", file=path) from error


def _column(name: str) -> Callable[[ParquetTable], pa.ChunkedArray]:
    return lambda table: table[name]


def _rows(low: int, high: int) -> Callable[[ParquetTable], pa.Table]:
    return lambda table: table.rows(low, high)


class StepsOnDisk(Steps):
    """The step table of a long run: each column is read when it is asked for."""

    def __init__(self, files: TableFiles) -> None:
        self._files = files

    @property
    def table(self) -> Ints:
        """All columns, one after the other, in one array."""
        values = np.empty((len(self), len(STEP_COLUMNS)), dtype=np.int64, order="F")
        for i, name in enumerate(STEP_COLUMNS):
            values[:, i] = self[name]
        return values

    def __getitem__(self, column: str) -> Ints:
        values: Ints = self._files[column].to_numpy()
        return values

    def __len__(self) -> int:
        return len(self._files)

    def window(self, low: int, high: int) -> Steps:
        low, high, _ = slice(low, high).indices(len(self))
        tables = list(self._files.rows(low, high))
        parts = [np.stack([table[name].to_numpy() for name in STEP_COLUMNS], axis=1) for table in tables]
        return Steps(np.concatenate([np.empty((0, len(STEP_COLUMNS)), dtype=np.int64), *parts]))


class _WhenAsked(Mapping[str, V]):
    """Columns by name; each is read when it is asked for."""

    def __init__(self, names: Sequence[str], read: Callable[[str], V]) -> None:
        self._names, self._of = names, read

    def __getitem__(self, name: str) -> V:
        return self._of(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def requests_on_disk(files: TableFiles) -> RequestTable:
    """The request table of a long run: token runs are in memory, every other column is read when it is asked for."""
    return RequestTable(_WhenAsked(NUMBERS, _numbers(files)), _WhenAsked(TEXTS, _texts(files)), *files.lists(RUNS))


def requests_of(table: TableFiles | pa.Table) -> RequestTable:
    """All of a request table, in memory."""
    numbers, texts = _numbers(table), _texts(table)
    lists = table.lists(RUNS) if isinstance(table, TableFiles) else parquet.list_items(table[RUNS])
    return RequestTable({name: numbers(name) for name in NUMBERS}, {name: texts(name) for name in TEXTS}, *lists)


def _numbers(table: TableFiles | pa.Table) -> Callable[[str], Ints]:
    return lambda name: table[name].to_numpy()


def _texts(table: TableFiles | pa.Table) -> Callable[[str], pa.Array]:
    return lambda name: table[name].combine_chunks()


def read_steps(file: Path, *, check: bool = False) -> Steps:
    """A step table, in memory if it is not a long one. With `check` every column is read once, so that a damaged file
    is noticed now.
    """
    steps = StepsOnDisk(TableFiles([file], columns.STEPS))
    if len(steps) <= LARGE:
        return Steps(steps.table)
    if check:
        for name in STEP_COLUMNS:
            steps[name]
    return steps


def read_requests(file: Path, steps: int | None = None) -> RequestTable:
    """A request table, in memory if it is not a long one; checked against a step table of so many steps."""
    files = TableFiles([file], columns.REQUESTS)
    requests = requests_on_disk(files) if len(files) > LARGE else requests_of(files)
    if steps is not None:
        try:
            _check_requests(requests, steps)
        except TableError as error:
            raise RunError(f"{file}: {error}", file=file) from error
    return requests


def _check_requests(requests: RequestTable, steps: int) -> None:
    """Raise TableError unless they agree with a step table of so many steps."""
    names, index, first = requests.texts("id"), requests.numbers("index"), requests.numbers("first_step")
    for at in np.flatnonzero(index[1:] <= index[:-1])[:1]:
        raise TableError(f"index of request {names[at + 1]} is {index[at + 1]}, expected more than {index[at]}")
    for at in np.flatnonzero((first < -1) | (first >= steps))[:1]:
        raise TableError(f"first_step of request {names[at]} is {first[at]}, expected -1 to {steps - 1}")
    for at in np.flatnonzero(~requests.is_in(STATUSES))[:1]:
        status = requests.texts("status")[at].as_py()
        raise TableError(f"status of request {names[at]} is {status!r}, expected one of {', '.join(STATUSES)}")
    _check_runs(names, requests.lengths, requests.runs, steps)


def _check_runs(names: pa.Array, lengths: Ints, flat: Ints, steps: int) -> None:
    """Token runs are pairs of a first step and a count, at least 1, one behind the other, inside the step table."""
    odd = np.flatnonzero(lengths % 2)
    if len(odd):
        raise TableError(f"token_runs of request {names[odd[0]]} has {lengths[odd[0]]} numbers, expected pairs")
    first, count, owner = flat[::2], flat[1::2], np.repeat(np.arange(len(names)), lengths // 2)
    same, least = owner[1:] == owner[:-1], np.zeros_like(first)
    least[1:][same] = (first + count)[:-1][same]
    wrong = np.flatnonzero((count < 1) | (first < least) | (count > steps - first))
    if len(wrong):
        at = wrong[0]
        raise TableError(
            f"token_runs of request {names[owner[at]]} has {count[at]} steps from step {first[at]} on, "
            f"expected 1 or more between {least[at]} and {steps - 1}"
        )
