"""Rows of text files, CSV and JSON lines. What cannot be used is an error that names file, line and field; none is
dropped and none repaired. Blank lines say nothing and are passed over.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from cbsim.scenario import memory
from cbsim.scenario.fields import ScenarioError, shown

MOST_LINE, MOST_DOCUMENT = 1_000_000, 64_000_000
"""Characters of a line, and of a file that is one document: a small gzipped file may hold more than memory does."""
LOOK_ROWS = 50_000  # so often it is asked whether so many still fit the memory
POSITIVE = "a whole number >= 1"


def bad(path: Path, line: int, field: str, value: object, expected: str) -> ScenarioError:
    """What is wrong with a field of a line."""
    message = f"{path}:{line}: {field}: got {shown(value)}, expected {expected}"
    return ScenarioError(message, file=path, line=line, field=field, value=value, bound=expected)


@contextmanager
def text(path: Path) -> Iterator[IO[str]]:
    """The file to read, perhaps gzipped. Raises ScenarioError for one that cannot be."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as file:
                yield file
        else:
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield file
    except UnicodeDecodeError:
        raise ScenarioError(f"{path}: is not UTF-8 text") from None
    except (csv.Error, RecursionError, EOFError, zlib.error) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from None
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None


def bounded(path: Path, file: IO[str]) -> Iterator[str]:
    """The lines of a file as they are. Raises ScenarioError for one that is too long, or if there are too many."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            raise ScenarioError(f"{path}:{number}: must have at most {MOST_LINE:,} characters", file=path, line=number)
        if number % LOOK_ROWS == 0:
            memory.check_rows(path, number)
        yield line


def document(path: Path, file: IO[str]) -> str:
    """All of a file that is not read line by line. Raises ScenarioError if it is too large."""
    content = file.read(MOST_DOCUMENT + 1)
    if len(content) > MOST_DOCUMENT:
        raise ScenarioError(f"{path}: must have at most {MOST_DOCUMENT:,} characters", file=path)
    return content


class CsvTable:
    """A CSV file with a header, by columns: those asked for, or picked once the header is known. `line` is the line of
    the row that was read last.
    """

    def __init__(self, path: Path, file: IO[str], columns: Sequence[str] = ()) -> None:
        self.path = path
        self._reader = csv.reader(bounded(path, file))
        self.header = [name.strip() for name in next(self._reader, [])]
        for column in columns:
            if column not in self.header:
                header = ", ".join(self.header) or "nothing"
                raise ScenarioError(f"{path}:1: no column {column}; expected {', '.join(columns)}, found {header}")
        self.pick(columns)

    def pick(self, columns: Iterable[str]) -> None:
        """Rows shall have these cells. All are columns of the header."""
        self.columns = tuple(columns)
        self._places = [self.header.index(column) for column in self.columns]

    @property
    def line(self) -> int:
        return self._reader.line_num

    def rows(self, limit: int | None) -> Iterator[list[str]]:
        """The wanted cells of each row, at most `limit` of them."""
        width, places = len(self.header), self._places
        for row in islice((row for row in self._reader if row), limit):
            if len(row) != width:
                raise ScenarioError(f"{self.path}:{self.line}: got {len(row)} cells, expected {width}")
            yield [row[place] for place in places]

    def bad(self, column: int, value: object, expected: str) -> ScenarioError:
        return bad(self.path, self.line, self.columns[column], value, expected)

    def count(self, column: int, cell: str) -> int:
        """A whole number >= 1."""
        cell = cell.strip()
        if not (cell.isascii() and cell.isdecimal()) or len(cell) > 12 or (value := int(cell)) < 1:
            raise self.bad(column, cell, POSITIVE)
        return value

    def whole(self, column: int, cell: str) -> int:
        """A whole number."""
        digits = cell.strip().removeprefix("-")
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > 12:
            raise self.bad(column, cell, "a whole number")
        return int(cell)

    def number(self, column: int, cell: str) -> float:
        """A finite number >= 0."""
        try:
            value = float(cell)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise self.bad(column, cell, "a number >= 0")
        return value


class JsonLine(NamedTuple):
    """One JSON object of a file, with its line, from 1."""

    path: Path
    number: int
    values: dict[str, Any]

    def bad(self, field: str, expected: str) -> ScenarioError:
        if field not in self.values:
            return ScenarioError(f"{self.path}:{self.number}: {field}: is missing, expected {expected}")
        return bad(self.path, self.number, field, self.values[field], expected)

    def count(self, field: str) -> int:
        value = self.values.get(field)
        if type(value) is not int or not 1 <= value < 10**12:
            raise self.bad(field, POSITIVE)
        return value

    def real(self, field: str) -> float:
        """A finite number >= 0."""
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self.bad(field, "a number >= 0")
        return float(value)

    def milliseconds(self, field: str) -> int:
        """The field's milliseconds as nanoseconds."""
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
            raise self.bad(field, "milliseconds >= 0, less than 30 years")
        return round(value * 1_000_000)


def lines(path: Path, file: IO[str]) -> Iterator[JsonLine]:
    """The JSON objects of a file, one a line."""
    for number, line in enumerate(bounded(path, file), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError as error:
            raise ScenarioError(f"{path}:{number}: not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise bad(path, number, "row", values, "a JSON object")
        yield JsonLine(path, number, values)
