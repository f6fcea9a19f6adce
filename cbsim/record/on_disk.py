"""The tables of a run directory: in memory if they are short, else each column is read when it is used, and not kept.

A table may be one file, or pieces that follow one another. So a run of millions of steps takes the memory of the few
columns that are used together.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from cbsim.errors import RunError
from cbsim.record import columns, parquet
from cbsim.record.parquet import TableError, TableFiles
from cbsim.record.record import STATUSES, STEP_COLUMNS
from cbsim.record.tables import NUMBERS, RUNS, TEXTS, Ints, RequestTable, Steps

LARGE = 1 << 19  # rows of a table, beyond which columns are read on access


class StepsOnDisk(Steps):
    """The step table of a long run: each column is read on access."""

    def __init__(self, files: TableFiles) -> None:
        self._files = files

    @property
    def table(self) -> Ints:
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


def request_table(table: TableFiles | pa.Table, *, lazy: bool = False) -> RequestTable:
    """Return a request table in memory; if `lazy` only its token runs are, and other columns are read on access."""

    def numbers(name: str) -> Ints:
        values: Ints = table[name].to_numpy()
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
    steps = StepsOnDisk(TableFiles([file], columns.STEPS))
    if len(steps) <= LARGE:
        return Steps(steps.table)
    if check:
        for name in STEP_COLUMNS:
            steps[name]
    return steps


def read_requests(file: Path, steps: int | None = None) -> RequestTable:
    """Read a request table, into memory unless it is long, and check it against so many steps. Raises RunError."""
    files = TableFiles([file], columns.REQUESTS)
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
    for at in np.flatnonzero(index[1:] <= index[:-1])[:1]:
        raise TableError(f"index of request {names[at + 1]} is {index[at + 1]}, expected more than {index[at]}")
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
    least[1:][same] = (first + count)[:-1][same]
    for at in np.flatnonzero((count < 1) | (first < least) | (count > steps - first))[:1]:
        raise TableError(
            f"token_runs of request {names[owner[at]]} has {count[at]} steps from step {first[at]} on, "
            f"expected 1 or more between {least[at]} and {steps - 1}"
        )
