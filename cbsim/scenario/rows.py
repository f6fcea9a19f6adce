"""Rows of text files, CSV and JSON lines. An invalid row is an error that names file, line and field; none is dropped
or repaired. Blank lines are skipped.

A workload must fit the memory of this machine: checked before it is taken; for a file's rows, while they are read.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from cbsim.errors import ScenarioError, UserError
from cbsim.files import lines_of, parsed_json, real
from cbsim.scenario.documents import Document

MOST_LINE, MOST_DOCUMENT = 1_000_000, 64_000_000
"""Most characters of a line, and of a file that is one document: a small gzipped file may not fit the memory."""
AT_ONCE = 1 << 13  # rows of a CSV file that are read as columns
LOOK_ROWS = 50_000  # rows between two checks that they still fit the memory


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a file, perhaps gzipped, to read. Raises ScenarioError if it cannot be read."""
    with lines_of(path) as file:
        try:
            yield file
        except (csv.Error, RecursionError) as error:
            raise ScenarioError(f"{path}: cannot be read: {error}") from None


def bounded(path: Path, file: IO[str]) -> Iterator[str]:
    """Yield the lines of a file unchanged. Raises ScenarioError if one is too long or if there are too many."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            raise ScenarioError(f"{path}:{number}: must have at most {MOST_LINE:,} characters", file=path, line=number)
        if number % LOOK_ROWS == 0:
            check_rows(path, number)
        yield line


def check_not_empty(path: Path, rows: Sized, noun: str = "requests") -> None:
    if not rows:
        raise ScenarioError(f"{path}: holds no {noun}")


def document(path: Path, file: IO[str]) -> str:
    """Return the content of a file that is not read line by line. Raises ScenarioError if it is too large."""
    content = file.read(MOST_DOCUMENT + 1)
    if len(content) > MOST_DOCUMENT:
        raise ScenarioError(f"{path}: must have at most {MOST_DOCUMENT:,} characters", file=path)
    return content


class CsvTable:
    """A CSV file with a header, by columns: those in `columns`, or picked once the header is known."""

    def __init__(self, path: Path, file: IO[str], columns: Sequence[str] = ()) -> None:
        self.path, self._file = path, file
        self.rewind()
        for column in columns:
            if column not in self.header:
                header = ", ".join(self.header) or "nothing"
                raise ScenarioError(f"{path}:1: no column {column}; expected {', '.join(columns)}, found {header}")
        self.pick(columns)

    def rewind(self) -> None:
        """Go back to the first row."""
        self._file.seek(0)
        self._reader = csv.reader(bounded(self.path, self._file), strict=True)
        self.header = [name.strip() for name in next(self._reader, [])]

    def pick(self, columns: Iterable[str]) -> None:
        """Select the cells that `rows` yields. All are columns of the header."""
        self.columns = tuple(columns)
        for column in self.columns:
            if (count := self.header.count(column)) > 1:
                raise ScenarioError(f"{self.path}:1: {column}: is the name of {count} columns", file=self.path, line=1)
        self._positions = [self.header.index(column) for column in self.columns]

    @property
    def line(self) -> int:
        """The line of the row that was read last."""
        return self._reader.line_num

    def rows(self, limit: int | None) -> Iterator[list[str]]:
        """Yield the selected cells of each row, for at most `limit` rows. Raises ScenarioError."""
        width, positions = len(self.header), self._positions
        for row in islice(filter(None, self._rows()), limit):
            if len(row) != width:
                raise ScenarioError(f"{self.path}:{self.line}: got {len(row)} cells, expected {width}")
            yield [row[position] for position in positions]

    def _rows(self) -> Iterator[list[str]]:
        line = self.line
        try:
            for row in self._reader:
                line = self.line
                yield row
        except csv.Error as error:  # the reader is at the end of the file if a quote is never closed
            message = f"{self.path}:{line + 1}: is not a row of CSV, or a quote in it is never closed: {error}"
            raise ScenarioError(message, file=self.path, line=line + 1) from None

    def parts(self, limit: int | None) -> Iterator[list[tuple[str, ...]]]:
        """Yield the selected columns of AT_ONCE rows at a time, for at most `limit` rows. Raises ValueError if a row
        has too few or too many cells: `rows` says which.
        """
        rows = islice(filter(None, self._reader), limit)
        while part := list(islice(rows, AT_ONCE)):
            columns = list(zip(*part, strict=True))
            if len(columns) != len(self.header):
                raise ValueError
            yield [columns[position] for position in self._positions]

    def bad(self, column: int, value: object, expected: str) -> UserError:
        field = self.columns[column]
        return Document(str(self.path), None, {field: value}, at=self.line).bad(field, expected)

    def count(self, column: int, cell: str, least: int = 1) -> int:
        """Return a cell as a whole number, at least `least`. Raises ScenarioError."""
        digits = cell.strip().removeprefix("-")
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > 12 or (value := int(cell)) < least:
            raise self.bad(column, cell.strip(), f"a whole number from {least:,} to {10**12 - 1:,}")
        return value

    def number(self, column: int, cell: str) -> float:
        """Return a cell as a finite number >= 0. Raises ScenarioError."""
        if not 0 <= (value := real(cell)) < math.inf:
            raise self.bad(column, cell, "a number >= 0")
        return value


def whole_numbers(cells: Sequence[str], least: int = 1) -> NDArray[np.int64]:
    """Return cells that are whole numbers of at most 12 characters and at least `least`, without anything around them.
    Raises ValueError otherwise.
    """
    letters = "".join(cells)
    if not letters.isascii() or not letters.replace("-", "").isdecimal() or max(map(len, cells)) > 12:
        raise ValueError
    values = np.array([*map(int, cells)], dtype=np.int64)
    if values.min() < least:
        raise ValueError
    return values


def lines(path: Path, file: IO[str]) -> Iterator[Document]:
    """Yield the JSON objects of a file, one a line. Raises ScenarioError."""
    for number, line in enumerate(bounded(path, file), 1):
        if line.strip():
            yield json_line(path, number, line)


def json_line(path: Path, number: int, line: str) -> Document:
    """Return the JSON object of a line. Raises ScenarioError."""
    values = parsed_json(line, f"{path}:{number}")
    if not isinstance(values, dict):
        raise Document(str(path), None, {"row": values}, at=number).bad("row", "a JSON object")
    return Document(str(path), None, values, at=number)


REQUEST_BYTES = 1300  # memory of a request in a run, about: its specification, its progress, its rows of the tables
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def check_memory(requests: int, samples: int = 1) -> None:
    """Raise ScenarioError if so many requests of so many samples need more memory than is free."""
    each, free = samples * REQUEST_BYTES, free_bytes()
    needed = requests * each
    if free is not None and needed > free:
        bound = f"must be <= {free // each:,}: {free / 1e9:.1f} GB of memory are free"
        sampled = f" of {samples:,} samples" if samples > 1 else ""
        message = f"workload.requests: got {requests:,}{sampled}, about {needed / 1e9:.1f} GB, {bound}"
        raise ScenarioError(message, field="workload.requests", value=requests, bound=bound)


def check_rows(path: Path, rows: int) -> None:
    """Raise ScenarioError if a run of the `rows` read from a file so far needs more memory than is free."""
    needed, free = rows * REQUEST_BYTES, free_bytes()
    if free is not None and needed > free:
        bound = f"must be <= {free // REQUEST_BYTES:,} at {REQUEST_BYTES:,} bytes each: {free / 1e9:.1f} GB are free"
        message = f"{path}: got {rows:,} rows or more, {bound}; workload.limit reads fewer"
        raise ScenarioError(message, file=path, value=rows, bound=bound)


def free_bytes() -> int | None:
    """Return the bytes that this process can still allocate, the least of the system's limits; None if unknown."""
    known = [host_memory(), _left_in_group()]
    return min((value for value in known if value is not None), default=None)


def host_memory() -> int | None:
    """Return the bytes that this machine can allocate without swapping; None if the system does not report them."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_group() -> int | None:
    """Return the free bytes of a container's share; None without a limit."""
    try:
        most, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # none, or `max`
        return None
    return max(most - used, 0)
