"""Parquet tables with declared columns: written with units and definitions, read one column at a time, checked.

Pages carry checksums, so a file that was damaged is noticed. The same values give the same bytes.

Arrow arrays made of their bytes and read as such: Arrow's own way loads pandas, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cbsim.record.columns import Column

SCHEMA_VERSION = 4  # of the run directory: raised whenever a reader of the version before would misread it
_VERSION_KEY = b"schema_version"
COUNTED = ("tokens", "blocks", "rows", "requests")  # units of what cannot be less than nothing
BROKEN = (pa.ArrowException, OSError, ValueError)  # what pyarrow raises when it reads no or a damaged file
Ints = npt.NDArray[np.int64]


class TableError(ValueError):
    """A table that is not what was declared; the message says what was found and what was expected."""


def refused_version(version: object) -> str:
    """What is wrong with a run directory of this schema version, and what to do about it."""
    again = "make the run again with the `command` in its env.json, or read it with the commit named there"
    return f"schema_version {version}, this version reads {SCHEMA_VERSION}: {again}"


def schema(columns: Sequence[Column]) -> pa.Schema:
    """The declaration as a schema: unit and definition are metadata of the field, the version that of the table."""
    fields = [
        pa.field(
            column.name, _arrow(column.type), column.nullable, {"unit": column.unit, "definition": column.definition}
        )
        for column in columns
    ]
    return pa.schema(fields, metadata={_VERSION_KEY: str(SCHEMA_VERSION)})


def table(columns: Sequence[Column], values: Mapping[str, Any]) -> pa.Table:
    """`values`, a sequence or array for each column, as a table of Arrow."""
    made = {column.name: values[column.name] for column in columns}
    numbers = {name: int_array(part) for name, part in made.items() if getattr(part, "dtype", None) == np.int64}
    return pa.table(made | numbers, schema=schema(columns))


def encoded(columns: Sequence[Column], values: Mapping[str, Any], group: int = 1 << 20, **options: Any) -> bytes:
    """A parquet file of `values`, in groups of so many rows."""
    sink = pa.BufferOutputStream()
    made = table(columns, values)
    pq.write_table(made, sink, row_group_size=group, compression="zstd", write_page_checksum=True, **options)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def write_groups(file: IO[bytes], columns: Sequence[Column], groups: Iterable[pa.Table], **options: Any) -> None:
    """The file that `encoded` makes of the tables as one; they come one by one, each a group."""
    with pq.ParquetWriter(file, schema(columns), compression="zstd", write_page_checksum=True, **options) as out:
        for group in groups:
            out.write_table(group)


class ParquetTable:
    """A parquet file, column by column. Columns beside the declared ones are ignored.

    Raises TableError: not a parquet file, damaged, another version, a column missing, of another type, with nulls, or
    with numbers of things below 0.
    """

    def __init__(self, file: IO[bytes], columns: Sequence[Column]) -> None:
        self._columns = {column.name: column for column in columns}
        try:
            self._file = pq.ParquetFile(file, page_checksum_verification=True)
            self._rows: int = self._file.metadata.num_rows
            schema = self._file.schema_arrow
        except BROKEN as error:
            raise _broken(error) from error
        self._check(schema)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        try:
            values = self._file.read(columns=[name]).column(name)
        except BROKEN as error:
            raise _broken(error) from error
        if len(values) != self._rows:
            raise TableError(f"column {name} has {len(values)} values, expected {self._rows}")
        if values.null_count and not self._columns[name].nullable:
            raise TableError(f"column {name} has {values.null_count} nulls, expected none")
        if self._columns[name].unit in COUNTED and self._rows and (least := pc.min(values).as_py()) < 0:
            raise TableError(f"column {name} has {least}, expected 0 or more {self._columns[name].unit}")
        return values

    def rows(self, low: int, high: int) -> pa.Table:
        """Rows low:high, every declared column of them; only the groups that they lie in are read."""
        sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.metadata.num_row_groups)]
        ends = np.cumsum(sizes)
        groups = np.flatnonzero((ends > low) & (ends - sizes < high))
        try:
            read = self._file.read_row_groups(groups.tolist(), columns=list(self._columns))
        except BROKEN as error:
            raise _broken(error) from error
        before = int(ends[groups[0]] - sizes[groups[0]]) if len(groups) else 0
        return read.slice(low - before, high - low)

    def lists(self, name: str) -> tuple[Ints, Ints]:
        """A column of lists of integers, as the length of each list and the items of all."""
        lengths, items = list_items(values := self[name])
        if nulls := pc.list_flatten(values).null_count:
            raise TableError(f"column {name} has {nulls} nulls in its lists, expected none")
        return lengths, items

    def _check(self, schema: pa.Schema) -> None:
        version = (schema.metadata or {}).get(_VERSION_KEY, str(SCHEMA_VERSION).encode()).decode(errors="replace")
        if version != str(SCHEMA_VERSION):
            raise TableError(refused_version(version))
        names = schema.names
        for column in self._columns.values():
            count = names.count(column.name)
            if count != 1:
                raise TableError(f"column {column.name} is {'there twice' if count else 'missing'}")
            kind = _name(schema.field(column.name).type)
            if kind != column.type:
                raise TableError(f"column {column.name} is {kind}, expected {column.type}")


def list_items(values: pa.ChunkedArray) -> tuple[Ints, Ints]:
    """Lists of integers, as the length of each list and the items of all."""
    return pc.list_value_length(values).to_numpy(), pc.list_flatten(values).to_numpy()


def _broken(error: Exception) -> TableError:
    return TableError(f"not a parquet table: {' '.join(str(error).split())}")  # some of Arrow's have several lines


def _arrow(name: str) -> pa.DataType:
    inner = name.removeprefix("list<").removesuffix(">")
    kind = pa.type_for_alias(inner)
    return kind if inner == name else pa.list_(kind)


def _name(kind: pa.DataType) -> str:
    """As `Column.type` has it: what the items of a list are called does not matter."""
    return f"list<{_name(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def int_array(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Whole numbers; null where they are `missing`."""
    numbers = np.ascontiguousarray(values, dtype=np.int64)
    valid = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little").tobytes())
    return pa.Array.from_buffers(pa.int64(), len(numbers), [valid, pa.py_buffer(numbers)])


def text_array(values: Sequence[str]) -> pa.Array:
    encoded_values = [value.encode() for value in values]
    return pa.Array.from_buffers(
        pa.string(),
        len(encoded_values),
        [None, _ends([len(w) for w in encoded_values]), pa.py_buffer(b"".join(encoded_values))],
    )


def list_array(lengths: npt.NDArray[np.int64], items: npt.NDArray[np.int64]) -> pa.Array:
    """Lists of whole numbers, of these lengths."""
    inside = int_array(items)
    return pa.Array.from_buffers(pa.list_(pa.int64()), len(lengths), [None, _ends(lengths)], children=[inside])


def bool_mask(values: pa.BooleanArray) -> npt.NDArray[np.bool_]:
    """Booleans, none of them null."""
    bits = np.frombuffer(values.buffers()[1], dtype=np.uint8)
    first = values.offset
    return np.unpackbits(bits, bitorder="little")[first : first + len(values)].astype(bool)


def _ends(lengths: Sequence[int] | npt.NDArray[np.int64]) -> pa.Buffer:
    """Where each item ends among the bytes or items of all."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    assert ends[-1] < 1 << 31, "too much for one Arrow array"
    return pa.py_buffer(ends.astype(np.int32))
