"""The two tables of a run as columns: its steps and its requests, and the times of each request's tokens.

A run may have a million requests. As columns they take as many bytes as they have numbers; iteration gives rows. Those
of a run directory are in memory if they are short, else each column is read when it is used, and not kept: so a run of
millions of steps takes the memory of the few columns that are used together.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cbsim.errors import RunError
from cbsim.record import columns, parquet
from cbsim.record.parquet import TableError, TableFiles
from cbsim.record.record import STATUSES, STEP_BYTES, STEP_COLUMNS, Record, RequestRow, RequestRows, Take

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
TEXTS = ("id", "status", "reason")
RUNS = "token_runs"
NUMBERS = tuple(name for name in RequestRow._fields if name not in (*TEXTS, RUNS))
ENDED = ("length", "stop")  # statuses of requests that ended with their last token
AT_ONCE = 1 << 14  # rows made together


class Steps:
    """The step table as columns. `server` says whose each step is, all of one server behind those of the one before;
    None if there is one.
    """

    def __init__(self, table: Ints, server: Ints | None = None) -> None:
        self._table, self.server = table, server

    @classmethod
    def of(cls, record: Record) -> Steps:
        """Return the steps of a record until now, copied."""
        return cls(step_table(bytes(record.steps)))

    @property
    def table(self) -> Ints:
        """All columns in the order of STEP_COLUMNS."""
        return self._table

    def __getitem__(self, column: str) -> Ints:
        values: Ints = self._table[:, STEP_COLUMNS.index(column)]
        return values

    def __len__(self) -> int:
        return len(self._table)

    def window(self, low: int, high: int) -> Steps:
        return Steps(self._table[low:high], None if self.server is None else self.server[low:high])

    def ends(self, servers: int = 1) -> list[int]:
        """Return the end of the steps of each server, in order."""
        if self.server is None:
            return [len(self)] * servers
        ends: list[int] = np.searchsorted(self.server, np.arange(servers), "right").tolist()
        return ends

    def parts(self) -> list[Steps]:
        """Return the steps of each server that has any; if none has, those of one."""
        if self.server is None:
            return [self]
        ends = sorted(set(self.ends(int(self.server.max(initial=0)) + 1)))
        return [self.part(low, high) for low, high in pairwise([0, *ends]) if high > low] or [self]

    def part(self, low: int, high: int) -> Steps:
        """Return steps low:high as they are held: those on disk are not read."""
        return self.window(low, high)

    def lane(self, name: str) -> Ints:
        """Return the busy nanoseconds of a lane or phase, step by step."""
        return self[f"{name}_end_ns"] - self[f"{name}_start_ns"]


def step_table(steps: bytes | bytearray) -> Ints:
    """Return the packed steps of a record as a table, not copied."""
    return np.frombuffer(steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS))


class RequestTable(Sequence[RequestRow]):
    """The requests in order of index. `lengths` are the counts of numbers in `runs` that are a request's token runs."""

    def __init__(
        self, numbers: Callable[[str], Ints], texts: Callable[[str], pa.Array], lengths: Ints, runs: Ints
    ) -> None:
        """Take `numbers` and `texts`, functions from a name in NUMBERS or TEXTS to its column."""
        self.numbers, self.texts = numbers, texts
        self.lengths, self.runs = lengths, runs

    @classmethod
    def of(cls, rows: Sequence[RequestRow] | RequestRows) -> RequestTable:
        if isinstance(rows, RequestTable):
            return rows
        if isinstance(rows, RequestRows):
            packed = np.frombuffer(rows.numbers.getvalue(), np.int64).reshape(-1, len(NUMBERS) + 1).T.copy()
            numbers = dict(zip((*NUMBERS, RUNS), packed, strict=True))
            texts = {name: parquet.text_array(getattr(rows, name)) for name in TEXTS}
            delivered = np.frombuffer(rows.runs.getvalue(), np.int64)
            return cls(numbers.__getitem__, texts.__getitem__, numbers[RUNS], delivered)
        columns = zip(*rows, strict=True) if rows else ((),) * len(RequestRow._fields)
        values = dict(zip(RequestRow._fields, columns, strict=True))
        runs = values[RUNS]
        return cls(
            {name: np.array(values[name], dtype=np.int64) for name in NUMBERS}.__getitem__,
            {name: parquet.text_array(values[name]) for name in TEXTS}.__getitem__,
            np.array([len(numbers) for numbers in runs], dtype=np.int64),
            np.fromiter(chain.from_iterable(runs), dtype=np.int64),
        )

    def is_in(self, statuses: Sequence[str]) -> Mask:
        """Return the mask of requests that have one of these statuses."""
        return parquet.is_in(self.texts("status"), statuses)

    def rows(self, chosen: npt.NDArray[np.integer] | Mask) -> RequestTable:
        """Return the requests at these positions, in this order, or those that a mask selects."""
        at = np.flatnonzero(chosen) if chosen.dtype == bool else chosen
        indices = parquet.int_array(at)
        lengths = self.lengths[at]
        starts = (np.cumsum(self.lengths) - self.lengths)[at]
        inside = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return RequestTable(
            {name: self.numbers(name)[at] for name in NUMBERS}.__getitem__,
            {name: self.texts(name).take(indices) for name in TEXTS}.__getitem__,
            lengths,
            self.runs[np.repeat(starts, lengths) + inside],
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, at: int) -> RequestRow: ...
    @overload
    def __getitem__(self, at: slice) -> RequestTable: ...
    def __getitem__(self, at: int | slice) -> RequestRow | RequestTable:
        chosen = range(len(self))[at]
        if isinstance(chosen, range):
            return self.rows(np.array(chosen, dtype=np.int64))
        return next(iter(self.rows(np.array([chosen]))))

    def __iter__(self) -> Iterator[RequestRow]:
        ends = np.cumsum(self.lengths)
        for low in range(0, len(self), AT_ONCE):
            part = slice(low, low + AT_ONCE)
            columns: dict[str, Any] = {name: self.numbers(name)[part].tolist() for name in NUMBERS}
            columns |= {name: self.texts(name)[part].to_pylist() for name in TEXTS}
            spans = zip(ends[part].tolist(), self.lengths[part].tolist(), strict=True)
            columns[RUNS] = [self.runs[end - length : end].tolist() for end, length in spans]
            yield from map(RequestRow._make, zip(*(columns[name] for name in RequestRow._fields), strict=True))

    def __eq__(self, other: object) -> bool:
        """True for another table or sequence of the same rows."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def requests_of(record: Record) -> RequestTable:
    """Return the requests of a record until now."""
    return RequestTable.of(record.rows())


def joined_requests(tables: Sequence[RequestTable], firsts: Sequence[int]) -> RequestTable:
    """Return the requests of several servers in order of index. `firsts` are the numbers of the servers' first steps
    where their step tables are joined.
    """
    numbers = {name: np.concatenate([table.numbers(name) for table in tables]) for name in NUMBERS}
    numbers["server"] = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    texts = {name: pa.concat_arrays([table.texts(name) for table in tables]) for name in TEXTS}
    lengths = np.concatenate([table.lengths for table in tables])
    runs = np.concatenate([table.runs for table in tables])
    joined = shifted(RequestTable(numbers.__getitem__, texts.__getitem__, lengths, runs), firsts)
    return joined.rows(np.argsort(numbers["index"], kind="stable"))


def shifted(table: RequestTable, firsts: Sequence[int]) -> RequestTable:
    """Return requests whose servers number their own steps, with the numbers of the joined step table."""
    shift, own = np.asarray(firsts)[table.numbers("server")], table.numbers("first_step")
    numbers = {name: table.numbers(name) for name in NUMBERS} | {"first_step": own + np.where(own >= 0, shift, 0)}
    runs = table.runs.copy()
    runs[::2] += np.repeat(shift, table.lengths // 2)
    return RequestTable(numbers.__getitem__, table.texts, table.lengths, runs)


@dataclass
class FinishedRecord:
    """The record of a server that is over, as its tables, which take less memory: those that no sink has taken."""

    total_blocks: int
    steps: bytearray
    requests: RequestTable
    logs: dict[str, array[int]]
    step_count: int
    finished_count: int
    sampled_tokens: int
    digests: bool = True
    _take: Take | None = None

    @classmethod
    def of(cls, record: Record) -> FinishedRecord:
        counts = record.step_count, record.finished_count, record.sampled_tokens
        return cls(record.total_blocks, record.steps, requests_of(record), record.logs, *counts)

    def hand_to(self, take: Take, steps: int) -> None:
        self._take = take
        if len(self.steps) >= steps * STEP_BYTES:
            self.hand_over()

    def hand_over(self) -> None:
        assert self._take is not None
        self._take(self.steps, self.requests)
        self.steps, self.requests = bytearray(), RequestTable.of(())


@dataclass(frozen=True)
class Requests:
    """The request table with the times derived from the steps, in order of index; -1 for what never happened."""

    rows: RequestTable
    scheduled_ns: Ints
    first_token_ns: Ints
    last_token_ns: Ints
    generated: Ints
    ended_ns: Ints  # of every step

    @property
    def arrival_ns(self) -> Ints:
        return self.rows.numbers("arrival_ns")

    @property
    def queued_ns(self) -> Ints:
        return self.rows.numbers("queued_ns")

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """The requests that ended with their last token, and whose tokens are known."""
        return self.rows.is_in(ENDED) & (self.generated > 0)

    @property
    def gaps_s(self) -> tuple[Floats, Ints]:
        """The gaps between successive tokens of a request, and their counts: a gap a step within runs, single gaps
        between runs. They take much memory, and are not kept.
        """
        flat, ended = self.rows.runs.reshape(-1, 2), self.ended_ns
        first, last = flat[:, 0], flat.sum(axis=1) - 1
        owner = np.repeat(np.arange(len(self.rows)), self.rows.lengths // 2)
        weight = np.zeros(len(ended) + 1, dtype=np.int32)
        np.add.at(weight, first + 1, 1)
        np.add.at(weight, last + 1, -1)
        weight = np.cumsum(weight, out=weight)[: len(ended)]
        inside = weight > 0  # never at step 0
        same = np.flatnonzero(owner[1:] == owner[:-1])
        between = ended[first[same + 1]] - ended[last[same]]
        gaps_s = np.concatenate([np.diff(ended)[inside[1:]], between]) / columns.NS
        return gaps_s, np.concatenate([weight[inside], np.ones(len(between), dtype=np.int32)])


def token_times(rows: Sequence[RequestRow], steps: Steps) -> Requests:
    """Derive every time of a request from the steps whose tokens it received."""
    return times(RequestTable.of(rows), steps["schedule_start_ns"], steps["update_end_ns"])


def times(table: RequestTable, started: Ints, ended: Ints) -> Requests:
    """Derive the times of every request from the starts and ends of the steps."""
    lengths, flat = table.lengths // 2, table.runs.reshape(-1, 2)
    ends, has = np.cumsum(lengths), lengths > 0
    column = np.full(len(table), -1, dtype=np.int64)
    first, last, scheduled = column.copy(), column.copy(), column.copy()
    first[has] = ended[flat[(ends - lengths)[has], 0]]
    last[has] = ended[flat[ends[has] - 1].sum(axis=1) - 1]
    admitted = table.numbers("first_step")
    scheduled[admitted >= 0] = started[admitted[admitted >= 0]]
    came = has & ((scheduled < 0) | (scheduled > first))  # the first token came with KV from elsewhere, before any row
    scheduled[came] = first[came]
    owner = np.repeat(np.arange(len(table)), lengths)
    generated = np.bincount(owner, weights=flat[:, 1], minlength=len(table)).astype(np.int64)
    return Requests(table, scheduled, first, last, generated, ended)


LARGE = 1 << 19  # rows of a table, beyond which columns are read on access


class StepsOnDisk(Steps):
    """The step table of a long run, in one file or in pieces that follow one another, or a part of it: each column is
    read on access. Pieces of several servers have the numbers of each server's own steps, which count for nothing.
    """

    def __init__(self, files: TableFiles) -> None:
        self._files, self._low, self._high = files, 0, len(files)
        self.server = files["server"].to_numpy() if "server" in files else None

    def part(self, low: int, high: int) -> Steps:
        part, (low, high, _) = copy(self), slice(low, high).indices(len(self))
        part._low, part._high = self._low + low, self._low + max(low, high)
        part.server = None if self.server is None else self.server[low:high]
        return part

    @property
    def table(self) -> Ints:
        values = np.empty((len(self), len(STEP_COLUMNS)), dtype=np.int64, order="F")
        for i, name in enumerate(STEP_COLUMNS):
            values[:, i] = self[name]
        return values

    def __getitem__(self, column: str) -> Ints:
        if column == "step" and self.server is not None:
            return np.arange(self._low, self._high)
        if len(self) == len(self._files):
            return self._files[column].to_numpy()  # type: ignore[no-any-return]
        parts = [table[column].to_numpy() for table in self._files.rows(self._low, self._high, [column])]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    def __len__(self) -> int:
        return self._high - self._low

    def window(self, low: int, high: int) -> Steps:
        part = self.part(low, high)
        return Steps(part.table, part.server)


def request_table(table: TableFiles | pa.Table, *, lazy: bool = False) -> RequestTable:
    """Return a request table in memory; if `lazy` only its token runs are, and other columns are read on access."""

    def numbers(name: str) -> Ints:
        there = table if isinstance(table, TableFiles) else table.column_names
        alone = name in ("server", "leg") and name not in there
        values: Ints = np.zeros(len(table), dtype=np.int64) if alone else table[name].to_numpy()
        return values

    def strings(name: str) -> pa.Array:
        return table[name].combine_chunks()

    lists = table.lists(RUNS) if isinstance(table, TableFiles) else parquet.list_items(RUNS, table[RUNS])
    if lazy:
        return RequestTable(numbers, strings, *lists)
    values, labels = {name: numbers(name) for name in NUMBERS}, {name: strings(name) for name in TEXTS}
    return RequestTable(values.__getitem__, labels.__getitem__, *lists)


def read_steps(file: Path, *, check: bool = False) -> Steps:
    """Read a step table, into memory if it is not a long one. With `check` every column is read once, so that a damaged
    file is noticed now. Raises RunError.
    """
    steps = StepsOnDisk(TableFiles([file], columns.STEPS, columns.SERVER))
    if len(steps) <= LARGE:
        return Steps(steps.table, steps.server)
    if check:
        for name in STEP_COLUMNS:
            steps[name]
    return steps


def read_requests(file: Path, steps: int | None = None) -> RequestTable:
    """Read a request table, into memory unless it is long, and check it against so many steps. Raises RunError."""
    files = TableFiles([file], columns.REQUESTS, columns.SERVER, columns.LEG)
    requests = request_table(files, lazy=len(files) > LARGE)
    if steps is not None:
        try:
            _check_requests(requests, steps)
        except TableError as error:
            raise RunError(f"{file}: {error}", file=file) from error
    return requests


def _check_requests(requests: RequestTable, steps: int) -> None:
    """Raise TableError unless the requests agree with a step table of so many steps."""
    names, index, first = requests.texts("id"), requests.numbers("index"), requests.numbers("first_step")
    server = requests.numbers("server")  # a request may have a row at each
    later = (index[1:] > index[:-1]) | ((index[1:] == index[:-1]) & (server[1:] > server[:-1]))
    for at in np.flatnonzero(~later)[:1]:
        raise TableError(f"index of request {names[at + 1]} is {index[at + 1]}, expected more than {index[at]}")
    for at in np.flatnonzero((legs := requests.numbers("leg")) >> 2 | legs >> 1 & legs)[:1]:
        raise TableError(f"leg of request {names[at]} is {legs[at]}, expected 0 to 2")
    for at in np.flatnonzero((first < -1) | (first >= steps))[:1]:
        raise TableError(f"first_step of request {names[at]} is {first[at]}, expected -1 to {steps - 1}")
    for at in np.flatnonzero(~requests.is_in(STATUSES))[:1]:
        status = requests.texts("status")[at].as_py()
        raise TableError(f"status of request {names[at]} is {status!r}, expected one of {', '.join(STATUSES)}")
    for at in np.flatnonzero(requests.lengths % 2)[:1]:
        raise TableError(f"token_runs of request {names[at]} has {requests.lengths[at]} numbers, expected pairs")
    first, count = requests.runs[::2], requests.runs[1::2]  # ascending, each count >= 1, within the step table
    owner = np.repeat(np.arange(len(names)), requests.lengths // 2)
    same, least = owner[1:] == owner[:-1], np.zeros_like(first)
    least[1:][same] = (first + count)[:-1][same] - 1  # a step may deliver several tokens
    for at in np.flatnonzero((count < 1) | (first < least) | (count > steps - first))[:1]:
        raise TableError(
            f"token_runs of request {names[owner[at]]} has {count[at]} steps from step {first[at]} on, "
            f"expected 1 or more between {least[at]} and {steps - 1}"
        )
