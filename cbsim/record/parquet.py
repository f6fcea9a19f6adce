"""Parquet tables with declared columns: written with units and definitions, read one column at a time, checked.

Pages carry checksums, so a file that was damaged is noticed. The same values give the same bytes.

Arrow arrays are made from bytes and read as such: Arrow's own conversion loads pandas, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.errors import RunError
from cbsim.files import access
from cbsim.record.columns import Column

SCHEMA_VERSION = 4  # of the run directory: raised whenever a reader of the version before would misread it
_VERSION_KEY = b"schema_version"
COUNTED = ("tokens", "blocks", "rows", "requests")  # units of values that cannot be negative
BROKEN = (pa.ArrowException, OSError, ValueError)  # pyarrow's errors for a missing or damaged file
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
T = TypeVar("T")


class TableError(ValueError):
    """An error of a table that differs from its declaration; the message has both."""


def other_version(version: object) -> str:
    """Return the message for a run directory of another schema version, with its remedy."""
    again = "make the run again with the `command` in its env.json, or read it with the commit named there"
    return f"schema_version {version}, this version reads {SCHEMA_VERSION}: {again}"


def schema(columns: Sequence[Column]) -> pa.Schema:
    """Return the declared schema: unit and definition are metadata of each field, the version is that of the table."""
    fields = []
    for column in columns:
        about = {"unit": column.unit, "definition": column.definition}
        fields.append(pa.field(column.name, _arrow(column.type), column.nullable, about))
    return pa.schema(fields, metadata={_VERSION_KEY: str(SCHEMA_VERSION)})


def table(columns: Sequence[Column], values: Mapping[str, Any]) -> pa.Table:
    """Return `values`, a sequence or array for each column, as a table of Arrow."""
    made = {column.name: values[column.name] for column in columns}
    numbers = {name: int_array(part) for name, part in made.items() if getattr(part, "dtype", None) == np.int64}
    return pa.table(made | numbers, schema=schema(columns))


def encoded(columns: Sequence[Column], values: Mapping[str, Any], group: int = 1 << 20, **options: Any) -> bytes:
    """Return a parquet file of `values`, in row groups of `group` rows."""
    sink = pa.BufferOutputStream()
    made = table(columns, values)
    pq.write_table(made, sink, row_group_size=group, compression="zstd", write_page_checksum=True, **options)
    pa.default_memory_pool().release_unused()
    return bytes(sink.getvalue())


def write_groups(file: IO[bytes], columns: Sequence[Column], groups: Iterable[pa.Table], **options: Any) -> None:
    """Write the file that `encoded` would make of all tables together; they are given one by one, each a row group."""
    with pq.ParquetWriter(file, schema(columns), compression="zstd", write_page_checksum=True, **options) as out:
        for group in groups:
            out.write_table(group)


class TableFiles:
    """The declared columns of parquet files that follow one another, read on access, and those of `more` that the first
    file has; others are ignored. A file is a path, or its content. Raises RunError naming the file if it is not a
    parquet file, is damaged, has another version, or if a column is missing, has another type, nulls, or negative
    counts. A column with a default may be missing.
    """

    def __init__(self, files: Sequence[Path | bytes], columns: Sequence[Column], *more: Column) -> None:
        self._files, self._columns = files, {column.name: column for column in columns}
        self.counts: list[int] = [self._read(file, lambda table: table.metadata.num_rows) for file in files]
        has = self._read(files[0], lambda table: table.schema_arrow.names) if files and more else ()
        self._columns |= {column.name: column for column in more if column.name in has}

    def __len__(self) -> int:
        return sum(self.counts)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        parts = [self._read(file, lambda table: self._column(table, name)) for file in self._files]
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], type=parts[0].type)

    def lists(self, name: str) -> tuple[Ints, Ints]:
        """Return a column of lists of integers, as the length of each list and the items of all."""
        parts = [self._read(file, lambda table: list_items(name, self._column(table, name))) for file in self._files]
        lengths, items = zip(*parts, strict=True)
        return np.concatenate(lengths), np.concatenate(items)

    def rows(self, low: int, high: int, names: Sequence[str] = ()) -> Iterator[pa.Table]:
        """Yield rows low:high with these columns, every declared one by default, file by file."""
        for number, count in enumerate(self.counts):
            if low < count and high > 0:
                yield self.file(number, max(low, 0), min(high, count), names)
            low, high = low - count, high - count

    def file(self, number: int, low: int = 0, high: int | None = None, names: Sequence[str] = ()) -> pa.Table:
        """Return rows low:high of one of the files, all by default, with these columns or every declared one."""
        end = self.counts[number] if high is None else high
        return self._read(self._files[number], lambda table: self._rows(table, low, end, names or [*self._columns]))

    def _read(self, source: Path | bytes, make: Callable[[pq.ParquetFile], T]) -> T:
        path = source if isinstance(source, Path) else "a table in memory"
        with access(path, RunError), BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
            try:
                table = pq.ParquetFile(file, page_checksum_verification=True)
                self._check(table.schema_arrow)
                return make(table)
            except TableError as error:
                raise RunError(f"{path}: {error}", file=path) from error
            except BROKEN as error:
                problem = " ".join(str(error).split())  # some of Arrow's have several lines
                raise RunError(f"{path}: not a parquet table: {problem}", file=path) from error
            finally:
                pa.default_memory_pool().release_unused()  # by this thread alone: so it reads by itself

    def _column(self, table: pq.ParquetFile, name: str) -> pa.ChunkedArray:
        import pyarrow.compute as pc  # it loads slowly, and a run reads no table

        column, rows = self._columns[name], table.metadata.num_rows
        values = _with_defaults(table.read(columns=[name], use_threads=False), rows, [column]).column(name)
        if len(values) != rows:
            raise TableError(f"column {name} has {len(values)} values, expected {rows}")
        if values.null_count and not column.nullable:
            raise TableError(f"column {name} has {values.null_count} null values, and may have none")
        if column.unit in COUNTED and rows and (least := pc.min(values).as_py()) < 0:
            raise TableError(f"column {name} has {least}, expected 0 or more {column.unit}")
        return values

    def _rows(self, table: pq.ParquetFile, low: int, high: int, names: Sequence[str]) -> pa.Table:
        """Return rows low:high; only the row groups that contain them are read."""
        sizes = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
        ends = np.cumsum(sizes)
        groups = np.flatnonzero((ends > low) & (ends - sizes < high))
        read = table.read_row_groups(groups.tolist(), columns=list(names), use_threads=False)
        before = int(ends[groups[0]] - sizes[groups[0]]) if len(groups) else 0
        part, asked = read.slice(low - before, high - low), [self._columns[name] for name in names]
        return _with_defaults(part, max(high - low, 0), asked)

    def _check(self, schema: pa.Schema) -> None:
        version = (schema.metadata or {}).get(_VERSION_KEY, str(SCHEMA_VERSION).encode()).decode(errors="replace")
        if version != str(SCHEMA_VERSION):
            raise TableError(other_version(version))
        for column in self._columns.values():
            count = schema.names.count(column.name)
            if count == 0 and column.default is not None:
                continue
            if count != 1:
                raise TableError(f"column {column.name} is {'there twice' if count else 'missing'}")
            kind = _name(schema.field(column.name).type)
            if kind != column.type:
                raise TableError(f"column {column.name} is {kind}, expected {column.type}")


def list_items(name: str, values: pa.ChunkedArray) -> tuple[Ints, Ints]:
    """Return a column of lists as the length of each list and the items of all. Raises TableError for nulls."""
    import pyarrow.compute as pc

    items = pc.list_flatten(values)
    if items.null_count:
        raise TableError(f"column {name} has {items.null_count} null values in its lists, and may have none")
    return pc.list_value_length(values).to_numpy(), items.to_numpy()


def _with_defaults(table: pa.Table, rows: int, columns: Sequence[Column]) -> pa.Table:
    """Return a table of so many rows with those of the columns that it lacks."""
    for column in columns:
        if column.name not in table.column_names and column.default is not None:
            table = table.append_column(column.name, int_array(np.full(rows, column.default)))
    return table


def _arrow(name: str) -> pa.DataType:
    inner = name.removeprefix("list<").removesuffix(">")
    kind = pa.type_for_alias(inner)
    return kind if inner == name else pa.list_(kind)


def _name(kind: pa.DataType) -> str:
    """Return the name of a type as in `Column.type`: the name of a list's items does not matter."""
    return f"list<{_name(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def int_array(values: npt.NDArray[Any], missing: Mask | None = None, kind: type[Any] = np.int64) -> pa.Array:
    """Return numbers as an Arrow array, whole ones unless another `kind` is given; null where they are `missing`."""
    numbers: npt.NDArray[Any] = np.ascontiguousarray(values, dtype=kind)
    buffers = [_valid(missing), pa.py_buffer(numbers)]
    return pa.Array.from_buffers(pa.from_numpy_dtype(kind), len(numbers), buffers)


def text_array(values: Sequence[str], missing: Mask | None = None) -> pa.Array:
    parts = [value.encode() for value in values]
    buffers = [_valid(missing), _ends([len(part) for part in parts]), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(pa.string(), len(parts), buffers)


def _valid(missing: Mask | None) -> pa.Buffer | None:
    return None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little").tobytes())


def optional(values: Sequence[Any], kind: type[str | int | float]) -> pa.Array:
    """Return values of one kind as an Arrow array; null where they are None."""
    missing = np.array([value is None for value in values], dtype=bool)
    filled: list[Any] = [kind() if value is None else value for value in values]
    return text_array(filled, missing) if kind is str else int_array(np.array(filled, dtype=kind), missing, kind)


def list_array(lengths: npt.NDArray[np.int64], items: npt.NDArray[np.int64]) -> pa.Array:
    """Return lists of whole numbers, of these lengths, as an Arrow array."""
    inside = int_array(items)
    return pa.Array.from_buffers(pa.list_(pa.int64()), len(lengths), [None, _ends(lengths)], children=[inside])


def is_in(texts: pa.StringArray, words: Sequence[str]) -> Mask:
    """Return the mask of texts that are one of the words."""
    _, ends, content = texts.buffers()
    letters = np.frombuffer(content or b"", dtype=np.uint8)
    ends = np.frombuffer(ends or bytes(4), dtype=np.int32)[texts.offset : texts.offset + len(texts) + 1]
    mask = np.zeros(len(texts), dtype=bool)
    for word in map(str.encode, words):
        (alike,) = np.nonzero(np.diff(ends) == len(word))
        for at, letter in enumerate(word):
            alike = alike[letters[ends[alike] + at] == letter]
        mask[alike] = True
    return mask


def _ends(lengths: Sequence[int] | npt.NDArray[np.int64]) -> pa.Buffer:
    """Return the end of each item among the bytes or items of all."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    assert ends[-1] < 1 << 31, "too much for one Arrow array"
    return pa.py_buffer(ends.astype(np.int32))
