"""The tables of a long run, written while it is under way: pieces of so many steps, joined when it is over.

    steps/000000.parquet     steps, columns.STEPS
    requests/000000.parquet  requests as they were after these steps, columns.RECORDED: the last row of an index counts
    pieces.json              the inputs of a summary besides the tables

Each piece is a whole file, and those of steps and requests agree, so a run that is killed can be read up to its last
piece. A run with fewer steps than a piece has no such files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cbsim.record import columns, directory, parquet
from cbsim.record.columns import Column
from cbsim.record.directory import RunWriter
from cbsim.record.on_disk import StepsOnDisk, read_requests, read_steps, request_table
from cbsim.record.parquet import TableFiles
from cbsim.record.record import STEP_COLUMNS, Record, RequestRow
from cbsim.record.tables import Ints, RequestTable, Steps, times

OnSteps = Callable[[int], None]


class Pieces:
    """A sink that takes the tables of a record piece by piece. `terms` are the inputs of the summary (pieces.json).
    `early`, if given, is called after each piece with the number of steps so far; it writes files that can be written
    before the end.
    """

    def __init__(self, writer: RunWriter, terms: Mapping[str, Any], early: OnSteps | None = None) -> None:
        self._writer, self._terms, self._early = writer, terms, early
        self._count = self._steps = 0

    def take(self, steps: bytearray, rows: list[RequestRow]) -> None:
        """Write a piece. Raises RunError if it cannot be written."""
        writer, name = self._writer, name_of(self._count)
        if not self._count:
            writer.json(directory.TERMS, self._terms)
        if steps:
            table = Steps(np.frombuffer(steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))
            writer.steps(table, f"{directory.STEP_PIECES}/{name}")
            self._steps += len(table)
        values = directory.recorded_columns(RequestTable.of(rows))
        writer.file(f"{directory.REQUEST_PIECES}/{name}", parquet.encoded(columns.RECORDED, values, len(rows) or 1))
        self._count += 1
        if self._early is not None:
            self._early(self._steps)

    def tables(self, record: Record) -> tuple[RequestTable, Steps]:
        """Return both tables of a finished record. Pieces, if there are any, are joined to files first."""
        if not self._count:
            return directory.contents(record)
        record.hand_over()
        path = self._writer.path
        files = step_pieces(path)
        self._join("steps.parquet", columns.STEPS, files.rows(0, len(files)), **directory.COUNTERS)
        steps = read_steps(path / "steps.parquet")
        self._join("requests.parquet", columns.REQUESTS, self._requests(steps))
        self._writer.joined = True
        return read_requests(path / "requests.parquet"), steps

    def _requests(self, steps: Steps) -> Iterator[pa.Table]:
        """Yield the request table in groups in order of index, with the times that follow from the steps."""
        started, ended = steps["schedule_start_ns"], steps["update_end_ns"]
        files, group = request_pieces(self._writer.path), self._writer.group
        last = last_rows(files)
        for low in range(0, len(last), group):
            requests = times(_picked(files, last[low : low + group]), started, ended)
            yield parquet.table(columns.REQUESTS, directory.request_columns(requests))

    def _join(self, name: str, declared: Sequence[Column], groups: Iterable[pa.Table], **options: Any) -> None:
        self._writer.file(name, partial(parquet.write_groups, columns=declared, groups=groups, **options))


def _picked(files: TableFiles, at: Ints) -> RequestTable:
    """Return the rows at these positions of the pieces, in this order. One piece at a time is in memory."""
    ends = np.cumsum(files.counts)
    piece = np.searchsorted(ends, at, side="right")
    parts = [
        files.file(int(number)).take(at[piece == number] - (ends[number] - files.counts[number]))
        for number in np.unique(piece)
    ]
    order = np.argsort(np.argsort(piece, kind="stable"), kind="stable")
    return request_table(pa.concat_tables(parts).take(order))


def name_of(number: int) -> str:
    return f"{number:06}.parquet"


def any_piece(path: Path) -> bool:
    return (path / directory.REQUEST_PIECES / name_of(0)).exists()


def step_pieces(path: Path) -> TableFiles:
    """Return the pieces of a step table for which the pieces of requests exist as well."""
    last = max(file.name for file in (path / directory.REQUEST_PIECES).glob("*.parquet"))
    files = sorted((path / directory.STEP_PIECES).glob("[0-9]*.parquet"))
    return TableFiles([file for file in files if file.name <= last], columns.STEPS)


def request_pieces(path: Path) -> TableFiles:
    return TableFiles(sorted((path / directory.REQUEST_PIECES).glob("[0-9]*.parquet")), columns.RECORDED)


def last_rows(files: TableFiles) -> Ints:
    """Return the positions of the rows that count, the last one of each request, in order of index."""
    index = files["index"].to_numpy()
    order = np.argsort(index, kind="stable")
    last: Ints = order[np.append(index[order][1:] != index[order][:-1], True)[: len(order)]]
    return last


def steps_so_far(path: Path) -> Steps:
    return StepsOnDisk(step_pieces(path))


def requests_so_far(path: Path) -> RequestTable:
    """Return the requests of a run that is under way, as they were after `steps_so_far`."""
    files = request_pieces(path)
    return request_table(files).rows(last_rows(files))
