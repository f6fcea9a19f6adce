"""The run directory as it is written; cbsim.runs.reading reads it. docs/run_directory.md has the schema.

    scenario.resolved.yaml   every field written out
    env.json                 command, git commit and dirty flag, package versions, device, workload hash
    steps.parquet            one row a step, columns.STEPS
    requests.parquet         one row a request, columns.REQUESTS
    summary.json             the metrics, with schema_version, percentile method and n
    timeline.json.gz         Chrome trace of a window of steps, one lane a tid
    figures/                 drawings
    INCOMPLETE               only while the run is under way or if it was cut short; holds the reason
    steps/, requests/        only while a long run is under way or if it was killed: its tables so far (pieces.py)

The marker is the first file written and the last one removed, so a run that dies at any moment, a full disk included,
leaves a directory marked as incomplete, with all files complete by then: a file is there whole or not at all. Tables of
the same scenario and seed are byte-identical.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import IO, Any

import numpy as np

from cbsim.errors import RunError
from cbsim.files import access
from cbsim.record import columns, parquet
from cbsim.record.record import STEP_COLUMNS, Record
from cbsim.record.tables import NUMBERS, RUNS, TEXTS, Requests, RequestTable, Steps

SCHEMA_VERSION = parquet.SCHEMA_VERSION
MARKER = "INCOMPLETE"
PART = ".part"  # a file that is being written
PIECE = 1 << 17  # steps a piece, rows a group of a table: 36 MB of memory
STEP_PIECES, REQUEST_PIECES, TERMS = "steps", "requests", "pieces.json"  # of a run that is not over (pieces.py)
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
        path = out / f"{stamp}-{name}-{digest[:8]}"
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

    def scenario(self, resolved: str) -> None:
        self.file("scenario.resolved.yaml", resolved.encode())

    def steps(self, steps: Steps, name: str = "steps.parquet") -> None:
        if len(steps) <= self.group:
            self.file(name, parquet.encoded(columns.STEPS, step_columns(steps), self.group, **COUNTERS))
            return
        parts = (steps.window(low, low + self.group) for low in range(0, len(steps), self.group))
        groups = (parquet.table(columns.STEPS, step_columns(part)) for part in parts)
        self.file(name, partial(parquet.write_groups, columns=columns.STEPS, groups=groups, **COUNTERS))

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
                values = request_columns(requests())
                self.file("requests.parquet", parquet.encoded(columns.REQUESTS, values, self.group))
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


def contents(record: Record) -> tuple[RequestTable, Steps]:
    """Return both tables of a record, not copied: nothing may be recorded afterwards."""
    steps = Steps(np.frombuffer(record.steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))
    return RequestTable.of(record.requests()), steps


def step_columns(steps: Steps) -> dict[str, Any]:
    return {name: steps[name] for name in STEP_COLUMNS}


def recorded_columns(requests: RequestTable) -> dict[str, Any]:
    """Return the values by column of the requests of a record."""
    values: dict[str, Any] = {name: requests.numbers(name) for name in NUMBERS}
    values |= {name: requests.texts(name) for name in TEXTS}
    return values | {RUNS: parquet.list_array(requests.lengths, requests.runs)}


def request_columns(requests: Requests) -> dict[str, Any]:
    """Return the request table's values by column; times of events that never happened are null."""
    values = recorded_columns(requests.rows)
    for name in ("scheduled_ns", "first_token_ns", "last_token_ns"):
        times = getattr(requests, name)
        values[name] = parquet.int_array(times, times < 0)
    return values | {"generated_tokens": requests.generated}
