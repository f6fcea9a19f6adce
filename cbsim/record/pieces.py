"""The tables of a long run, written while it goes on: pieces of so many steps, joined when it is over.

    steps/000000.parquet     steps, columns.STEPS
    requests/000000.parquet  requests as they were after these steps, columns.RECORDED: the last row of an index counts
    pieces.json              what the numbers of a summary are to be computed with

Each piece is a whole file, and those of steps and requests agree, so a run that is killed can be read up to its last
piece. A run with fewer steps than a piece writes none of this.
"""

from __future__ import annotations

import json
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
    """Takes the tables of a record piece by piece. `terms` are those of `summary`.

    `early`, if there is one, is called after each piece with the number of steps until then: what else can be written
    before the end is written by it.
    """

    def __init__(self, writer: RunWriter, terms: Mapping[str, Any], early: OnSteps | None = None) -> None:
        self._writer, self._terms, self._early = writer, terms, early
        self._count = self._steps = 0

    def take(self, steps: bytearray, rows: list[RequestRow]) -> None:
        """Write a piece. Raises RunError if that cannot be done."""
        writer, name = self._writer, name_of(self._count)
        if not self._count:
            writer.file(directory.TERMS, (json.dumps(self._terms, indent=2, allow_nan=False) + "\n").encode())
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
        """Both tables of a record that has come to its end. If there are pieces they are joined to files first."""
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
        """The request table, some at a time in order of index, with the times that follow from the steps."""
        started, ended = steps["schedule_start_ns"], steps["update_end_ns"]
        files, group = request_pieces(self._writer.path), self._writer.group
        last = last_rows(files)
        for low in range(0, len(last), group):
            requests = times(_picked(files, last[low : low + group]), started, ended)
            yield parquet.table(columns.REQUESTS, directory.request_columns(requests))

    def _join(self, name: str, declared: Sequence[Column], groups: Iterable[pa.Table], **options: Any) -> None:
        self._writer.stream(name, partial(parquet.write_groups, columns=declared, groups=groups, **options))


def _picked(files: TableFiles, at: Ints) -> RequestTable:
    """The rows at these positions of the pieces, in this order. Of pieces, one at a time is in memory."""
    ends = np.cumsum(files.counts)
    piece = np.searchsorted(ends, at, side="right")
    parts = [
        files.file(int(number)).take(at[piece == number] - (ends[number] - files.counts[number]))
        for number in np.unique(piece)
    ]
    order = np.argsort(np.argsort(piece, kind="stable"), kind="stable")
    return request_table(pa.concat_tables(parts).take(order))


def name_of(number: int) -> str:
    """The file of a piece."""
    return f"{number:06}.parquet"


def any_piece(path: Path) -> bool:
    """Is there anything to read?"""
    return (path / directory.REQUEST_PIECES / name_of(0)).exists()


def step_pieces(path: Path) -> TableFiles:
    """The pieces of a step table whose requests are there as well."""
    last = max(file.name for file in (path / directory.REQUEST_PIECES).glob("*.parquet"))
    return TableFiles([file for file in _pieces(path / directory.STEP_PIECES) if file.name <= last], columns.STEPS)


def request_pieces(path: Path) -> TableFiles:
    return TableFiles(_pieces(path / directory.REQUEST_PIECES), columns.RECORDED)


def _pieces(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.parquet"))


def last_rows(files: TableFiles) -> Ints:
    """Positions of the rows that count, in order of index: of several rows of a request the last one."""
    index = files["index"].to_numpy()
    order = np.argsort(index, kind="stable")
    last: Ints = order[np.append(index[order][1:] != index[order][:-1], True)[: len(order)]]
    return last


def steps_so_far(path: Path) -> Steps:
    """The steps until now of a run that is under way."""
    return StepsOnDisk(step_pieces(path))


def requests_so_far(path: Path) -> RequestTable:
    """Its requests, as they were after these steps."""
    files = request_pieces(path)
    return request_table(files).rows(last_rows(files))
