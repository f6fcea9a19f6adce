"""The run directory as it is written; cbsim.runs.reading reads it. docs/run_directory.md has the schema.

The marker is the first file written and the last one removed, so a run that dies at any moment, a full disk included,
leaves a directory marked as incomplete, with all files complete by then: a file is there whole or not at all. Tables of
the same scenario and seed are byte-identical.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa

from cbsim.errors import RunError
from cbsim.files import access
from cbsim.record import columns, parquet, tables
from cbsim.record.columns import Column
from cbsim.record.parquet import TableFiles
from cbsim.record.record import STEP_COLUMNS, Record, Records, RequestRows
from cbsim.record.tables import FinishedRecord, Ints, Requests, RequestTable, Steps, StepsOnDisk, times

SCHEMA_VERSION = parquet.SCHEMA_VERSION
MARKER = "INCOMPLETE"
MOST_INPUT_BYTES = 100_000_000  # of a file that a workload is read from and a run keeps
PART = ".part"  # a file that is being written
MOST_OF_NAME = 200  # letters of a run's name in that of its folder, which a system bounds at 255
PIECE = 1 << 17  # steps a piece, rows a group of a table: 36 MB of memory
STEP_PIECES, REQUEST_PIECES, TERMS = "steps", "requests", "pieces.json"  # of a run that is not over
COUNTERS: dict[str, Any] = {"use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"}  # most columns of steps
Content = bytes | Callable[[IO[bytes]], None]
"""The content of a file, or a function that writes it bit by bit."""


class RunWriter:
    """A writer of one run directory, which is marked as incomplete from its creation until `complete` is called.
    `group` is the number of rows in a row group. `joined`: whether the tables have been made of pieces.
    """

    group = PIECE
    joined = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note("the run is under way, or died without a word")

    @classmethod
    def new(cls, out: Path, name: str, digest: str, clock: datetime | None = None) -> RunWriter:
        """Return a writer of a new folder `out`/<UTC>-<name>-<hash8>, or with -2, -3 and so on. Raises RunError."""
        stamp = (clock or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
        path = out / f"{stamp}-{name[:MOST_OF_NAME]}-{digest[:8]}"
        for attempt in range(1, 1000):
            candidate = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
            try:
                candidate.mkdir(parents=True)
                return cls(candidate)
            except FileExistsError:
                if not candidate.is_dir():
                    raise RunError(f"{candidate}: is in the way") from None
            except OSError as error:
                raise RunError(f"{candidate}: cannot be created: {error.strerror or error}") from error
        raise RunError(f"{path}: too many runs of that name", file=path)

    @classmethod
    def at(cls, path: Path) -> RunWriter:
        """Return a writer to `path` itself, a new or an empty folder. Raises RunError if it is neither."""
        with access(path, RunError, "created"):
            path.mkdir(parents=True, exist_ok=True)
            present = sorted(entry.name for entry in path.iterdir())
        if present:
            raise RunError(f"{path}: holds {present[0]}; name a new or an empty folder", file=path)
        return cls(path)

    def note(self, reason: str) -> None:
        self.file(MARKER, (reason + "\n").encode())

    def scenario(self, resolved: str, inputs: Mapping[str, Path] | None = None) -> None:
        """Write the scenario and, gzipped, the files that its workload is read from; none above MOST_INPUT_BYTES."""
        self.file("scenario.resolved.yaml", resolved.encode())
        for name, source in (inputs or {}).items():
            with access(source, RunError):
                if source.stat().st_size <= MOST_INPUT_BYTES:
                    content = source.read_bytes()
                    self.file(name, content if source.suffix == ".gz" else gzip.compress(content, 6, mtime=0))

    def steps(self, steps: Steps, name: str = "steps.parquet") -> None:
        declared = step_declared(steps)
        if len(steps) <= self.group:
            self.file(name, parquet.encoded(declared, step_columns(steps), self.group, **COUNTERS))
            return
        parts = (steps.part(low, low + self.group) for low in range(0, len(steps), self.group))
        groups = (parquet.table(declared, step_columns(part)) for part in parts)
        self.file(name, partial(parquet.write_groups, columns=declared, groups=groups, **COUNTERS))

    @contextmanager
    def writing(self, steps: Steps, requests: Callable[[], Requests]) -> Iterator[None]:
        """Write both tables, unless they have been made of pieces. The step table is written in parallel to the body,
        as Arrow encodes it without Python. Raises RunError.
        """
        if self.joined:
            yield
            return
        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(self.steps, steps)
            try:
                values = requests()
                declared, made = request_declared(values.rows, steps.server is not None), request_columns(values)
                self.file("requests.parquet", parquet.encoded(declared, made, self.group))
                yield
            finally:
                written.result()

    def drop_pieces(self) -> None:
        """Remove the pieces, which are not needed once the tables and the summary are complete."""
        for name in (STEP_PIECES, REQUEST_PIECES):
            rmtree(self.path / name, ignore_errors=True)
        (self.path / TERMS).unlink(missing_ok=True)

    def complete(self) -> None:
        (self.path / MARKER).unlink(missing_ok=True)

    def json(self, name: str, value: Mapping[str, Any]) -> None:
        self.file(name, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

    def file(self, name: str, content: Content) -> Path:
        """Write a file of the directory, `figures/...` included. Raises RunError."""
        path = self.path / name
        with access(path, RunError, "written"):
            path.parent.mkdir(exist_ok=True)
            if name == MARKER:
                path.touch()  # an empty marker counts, too, if there is no space for a reason
            write_whole(path, content)
        return path


def write_whole(path: Path, content: Content) -> None:
    """Write a file under a temporary name, and rename it when it is complete. Raises OSError."""
    part = path.with_name(f".{path.name}{PART}")
    try:
        if isinstance(content, bytes):
            part.write_bytes(content)
        else:
            with part.open("wb") as file:
                content(file)
        part.replace(path)
    except BaseException:  # interrupted, too
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def contents(record: Record | Records) -> tuple[RequestTable, Steps]:
    """Return both tables of a record, not copied: nothing may be recorded afterwards. Those of several servers are
    joined.
    """
    if isinstance(record, Record):
        return tables.requests_of(record), Steps(tables.step_table(record.steps))
    parts = [
        each if isinstance(each, FinishedRecord) else FinishedRecord.of(cast("Record", each)) for each in record.records
    ]
    steps = [tables.step_table(part.steps) for part in parts]
    if len(parts) == 1:
        return parts[0].requests, Steps(steps[0])
    joined = np.concatenate(steps)
    joined[:, STEP_COLUMNS.index("step")] = np.arange(len(joined))
    requests = tables.joined_requests([part.requests for part in parts], record.firsts)
    return requests, Steps(joined, np.repeat(np.arange(len(parts)), [len(table) for table in steps]))


def step_declared(steps: Steps) -> Sequence[Column]:
    return columns.STEPS if steps.server is None else (*columns.STEPS, columns.SERVER)


def step_columns(steps: Steps) -> dict[str, Any]:
    return {name: steps[name] for name in STEP_COLUMNS} | {"server": steps.server}


def recorded_columns(requests: RequestTable) -> dict[str, Any]:
    """Return the values by column of the requests of a record."""
    values: dict[str, Any] = {name: requests.numbers(name) for name in tables.NUMBERS}
    values |= {name: requests.texts(name) for name in tables.TEXTS}
    return values | {tables.RUNS: parquet.list_array(requests.lengths, requests.runs)}


def request_declared(requests: RequestTable | TableFiles, several: bool) -> Sequence[Column]:
    """Return the columns of a request table, perhaps still in pieces. It has legs if any server did a part only."""
    if not several:
        return columns.REQUESTS
    legs = requests.numbers("leg") if isinstance(requests, RequestTable) else requests["leg"].to_numpy()
    return (*columns.REQUESTS, columns.SERVER, *([columns.LEG] if legs.any() else []))


def request_columns(requests: Requests) -> dict[str, Any]:
    """Return the request table's values by column; times of events that never happened are null."""
    values = recorded_columns(requests.rows)
    for name in ("scheduled_ns", "first_token_ns", "last_token_ns"):
        times = getattr(requests, name)
        values[name] = parquet.int_array(times, times < 0)
    return values | {"generated_tokens": requests.generated}


OnSteps = Callable[[int], None]


class Pieces:
    """A sink that takes the tables of a long run while it is under way, and joins them when it is over. Each piece is a
    whole file, steps/000000.parquet with columns.STEPS and requests/000000.parquet with columns.RECORDED: requests as
    they were after these steps, of which the last row of an index counts. So a run that is killed can be read up to its
    last piece. Pieces of several servers have a column `server`, the number of a server's own step, and names that
    begin with the server: steps/00003-000000.parquet. A run with fewer steps than a piece has no such files. `terms`
    are the inputs of the summary besides the tables (pieces.json). `early`, if given, is called after each piece with
    the number of steps so far; it writes files that can be written before the end.
    """

    def __init__(self, writer: RunWriter, terms: Mapping[str, Any], early: OnSteps | None = None) -> None:
        self._writer, self._terms, self._early = writer, terms, early
        self._count = self._steps = self._last = 0

    def take(self, steps: bytearray, rows: RequestRows | RequestTable, server: int | None = None) -> None:
        """Write a piece. Raises RunError if it cannot be written."""
        writer, name, table = self._writer, f"{self._count:06}.parquet", Steps(tables.step_table(steps))
        declared, values = columns.RECORDED, recorded_columns(RequestTable.of(rows))
        if server is not None:
            table.server, name = np.full(len(table), server), f"{server:05}-{name}"
            declared = (*declared, columns.SERVER, columns.LEG)
            values |= {"server": np.full(len(rows), server)}
        if not self._count or (server or 0) > self._last:  # another server has come
            writer.json(TERMS, self._terms)
        self._last = max(self._last, server or 0)
        if steps:
            writer.steps(table, f"{STEP_PIECES}/{name}")
            self._steps += len(table)
        writer.file(f"{REQUEST_PIECES}/{name}", parquet.encoded(declared, values, len(rows) or 1))
        self._count += 1
        if self._early is not None:
            self._early(self._steps)

    def tables(self, record: Record | Records) -> tuple[RequestTable, Steps]:
        """Return both tables of a finished record. Pieces, if there are any, are joined to files first."""
        if not self._count:
            return contents(record)
        record.hand_over()
        path = self._writer.path
        self._writer.steps(steps_so_far(path))
        steps = tables.read_steps(path / "steps.parquet")
        files = request_pieces(path)
        declared = request_declared(files, steps.server is not None)
        write = partial(parquet.write_groups, columns=declared, groups=self._requests(files, steps, declared))
        self._writer.file("requests.parquet", write)
        self._writer.joined = True
        return tables.read_requests(path / "requests.parquet"), steps

    def _requests(self, files: TableFiles, steps: Steps, declared: Sequence[Column]) -> Iterator[pa.Table]:
        """Yield the request table in groups in order of index, with the times that follow from the steps."""
        started, ended = steps["schedule_start_ns"], steps["update_end_ns"]
        group, last = self._writer.group, last_rows(files)
        for low in range(0, len(last), group):
            requests = times(_joined(_picked(files, last[low : low + group]), steps), started, ended)
            yield parquet.table(declared, request_columns(requests))


def _picked(files: TableFiles, at: Ints) -> RequestTable:
    """Return the rows at these positions of the pieces, in this order. One piece at a time is in memory."""
    ends = np.cumsum(files.counts)
    piece = np.searchsorted(ends, at, side="right")
    parts = [
        files.file(int(number)).take(at[piece == number] - (ends[number] - files.counts[number]))
        for number in np.unique(piece)
    ]
    order = np.argsort(np.argsort(piece, kind="stable"), kind="stable")
    return tables.request_table(pa.concat_tables(parts).take(order))


def any_piece(path: Path) -> bool:
    return any((path / REQUEST_PIECES).glob("[0-9]*.parquet"))


def step_pieces(path: Path) -> TableFiles:
    """Return the pieces of a step table for which the pieces of requests exist as well."""
    files = sorted((path / STEP_PIECES).glob("[0-9]*.parquet"))
    both = [file for file in files if (path / REQUEST_PIECES / file.name).exists()]
    return TableFiles(both, columns.STEPS, columns.SERVER)


def request_pieces(path: Path) -> TableFiles:
    files = sorted((path / REQUEST_PIECES).glob("[0-9]*.parquet"))
    return TableFiles(files, columns.RECORDED, columns.SERVER, columns.LEG)


def _joined(table: RequestTable, steps: Steps) -> RequestTable:
    """Return requests of pieces as they are beside the joined steps."""
    if steps.server is None:
        return table
    return tables.shifted(table, [0, *steps.ends(1 + int(table.numbers("server").max(initial=0)))])


def last_rows(files: TableFiles) -> Ints:
    """Return the positions of the rows that count, the last one of each request at each server, in order of index."""
    index = files["index"].to_numpy()
    server = files["server"].to_numpy() if "server" in files else np.zeros_like(index)
    order = np.lexsort((server, index))
    same = (np.diff(index[order]) == 0) & (np.diff(server[order]) == 0)
    last: Ints = order[np.append(~same, True)[: len(order)]]
    return last


def steps_so_far(path: Path) -> Steps:
    return StepsOnDisk(step_pieces(path))


def requests_so_far(path: Path) -> RequestTable:
    """Return the requests of a run that is under way, as they were after `steps_so_far`."""
    files = request_pieces(path)
    return _joined(tables.request_table(files).rows(last_rows(files)), steps_so_far(path))
