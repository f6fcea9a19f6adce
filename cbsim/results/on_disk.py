"""Tables of a run directory that stay on disk: a column is read when somebody asks for it, and not kept.

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

from cbsim.results import parquet
from cbsim.results.columns import Column
from cbsim.results.metrics import Steps
from cbsim.results.parquet import Ints, ParquetTable, TableError
from cbsim.results.record import STEP_COLUMNS
from cbsim.results.requests import NUMBERS, RUNS, TEXTS, RequestTable
from cbsim.scenario.errors import UserError

T = TypeVar("T")
V = TypeVar("V")
Place = Path | Mapping[str, bytes]
"""Where the files of a run are: a folder, or in memory, by name."""


class RunError(UserError):
    """A run directory that cannot be written or read; the message names file and reason."""


def unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path}: cannot be read: {error.strerror or error}", file=path)


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

    def wrong(self, error: TableError) -> RunError:
        """What is said of values that cannot be."""
        file = self._files[0] if len(self._files) == 1 else self._files[0].parent
        return RunError(f"{file}: {error}", file=file)

    def _read(self, path: Path, make: Callable[[ParquetTable], T]) -> T:
        try:
            with path.open("rb") as file:
                return make(ParquetTable(file, self._declared))
        except TableError as error:
            raise RunError(f"{path}: {error}", file=path) from error
        except OSError as error:
            raise unreadable(path, error) from error


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
    lists = table.lists(RUNS) if isinstance(table, TableFiles) else parquet.lists(table[RUNS])
    return RequestTable({name: numbers(name) for name in NUMBERS}, {name: texts(name) for name in TEXTS}, *lists)


def _numbers(table: TableFiles | pa.Table) -> Callable[[str], Ints]:
    return lambda name: table[name].to_numpy()


def _texts(table: TableFiles | pa.Table) -> Callable[[str], pa.Array]:
    return lambda name: table[name].combine_chunks()
