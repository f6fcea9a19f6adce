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
from cbsim.record.tables import NUMBERS, RUNS, TEXTS, Requests, RequestTable, Steps, token_times

SCHEMA_VERSION = parquet.SCHEMA_VERSION
MARKER = "INCOMPLETE"
PART = ".part"  # a file that is being written
PIECE = 1 << 17  # steps a piece, rows a group of a table: 36 MB of memory
STEP_PIECES, REQUEST_PIECES, TERMS = "steps", "requests", "pieces.json"  # of a run that is not over (pieces.py)
COUNTERS: dict[str, Any] = {"use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"}  # most columns of steps


class RunWriter:
    """A writer of one run directory, which is marked as incomplete from its creation until `complete` is called.

    `group` is the number of rows in a row group. `joined`: whether the tables have been made of pieces.
    """

    group = PIECE
    joined = False

    def __init__(self, out: Path, name: str, digest: str, clock: datetime | None = None) -> None:
        """Create `out`/<UTC>-<name>-<hash8>. Raises RunError if it cannot be created."""
        stamp = (clock or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
        self._begin(_fresh(out / f"{stamp}-{name}-{digest[:8]}"))

    @classmethod
    def at(cls, path: Path) -> RunWriter:
        """Return a writer to `path` itself, a new or an empty folder. Raises RunError if it is neither."""
        writer = cls.__new__(cls)
        writer._begin(_empty(path))
        return writer

    def _begin(self, path: Path) -> None:
        self.path = path
        self.note("the run is under way, or died without a word")

    def note(self, reason: str) -> None:
        self._write(MARKER, (reason + "\n").encode())

    def scenario(self, resolved: str) -> None:
        self._write("scenario.resolved.yaml", resolved.encode())

    def environment(self, facts: Mapping[str, Any]) -> None:
        self._json("env.json", facts)

    def tables(self, record: Record) -> tuple[RequestTable, Steps]:
        rows, steps = contents(record)
        with self.writing(steps, lambda: token_times(rows, steps)):
            return rows, steps

    def steps(self, steps: Steps, name: str = "steps.parquet") -> None:
        if len(steps) <= self.group:
            self._write(name, parquet.encoded(columns.STEPS, step_columns(steps), self.group, **COUNTERS))
            return
        parts = (steps.window(low, low + self.group) for low in range(0, len(steps), self.group))
        groups = (parquet.table(columns.STEPS, step_columns(part)) for part in parts)
        self.stream(name, partial(parquet.write_groups, columns=columns.STEPS, groups=groups, **COUNTERS))

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
                self.requests(requests())
                yield
            finally:
                written.result()

    def requests(self, requests: Requests) -> None:
        self._write("requests.parquet", parquet.encoded(columns.REQUESTS, request_columns(requests), self.group))

    def drop_pieces(self) -> None:
        """Remove the pieces, which are not needed once the tables and the summary are complete."""
        for name in (STEP_PIECES, REQUEST_PIECES):
            rmtree(self.path / name, ignore_errors=True)
        (self.path / TERMS).unlink(missing_ok=True)

    def summary(self, metrics: Mapping[str, Any]) -> None:
        self._json("summary.json", metrics)

    def file(self, name: str, content: bytes) -> Path:
        return self._write(name, content)

    def stream(self, name: str, write: Callable[[IO[bytes]], None]) -> None:
        self._whole(name, lambda part: _streamed(part, write))

    def complete(self) -> None:
        (self.path / MARKER).unlink(missing_ok=True)

    def _json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

    def _write(self, name: str, content: bytes) -> Path:
        return self._whole(name, lambda part: part.write_bytes(content))

    def _whole(self, name: str, write: Callable[[Path], object]) -> Path:
        path = self.path / name
        with access(path, RunError, "written"):
            path.parent.mkdir(exist_ok=True)
            if name == MARKER:
                path.touch()  # an empty marker counts, too, if there is no space for a reason
            _whole(path, write)
        return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, and rename it when it is complete. Raises OSError."""
    _whole(path, lambda part: part.write_bytes(content))


def _whole(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(f".{path.name}{PART}")
    try:
        write(part)
        part.replace(path)
    except BaseException:  # interrupted, too
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _streamed(part: Path, write: Callable[[IO[bytes]], None]) -> None:
    with part.open("wb") as file:
        write(file)


def _fresh(path: Path) -> Path:
    """Make and return a directory that did not exist: `path`, or `path`-2, -3 and so on. Raises RunError."""
    for attempt in range(1, 1000):
        candidate = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            if not candidate.is_dir():
                raise RunError(f"{candidate}: is in the way") from None
        except OSError as error:
            raise RunError(f"{candidate}: cannot be created: {error.strerror or error}") from error
        else:
            return candidate
    raise RunError(f"{path}: too many runs of that name", file=path)


def _empty(path: Path) -> Path:
    """Return `path`, created if it does not exist. Raises RunError unless it is empty."""
    with access(path, RunError, "created"):
        path.mkdir(parents=True, exist_ok=True)
        present = sorted(entry.name for entry in path.iterdir())
    if present:
        raise RunError(f"{path}: holds {present[0]}; name a new or an empty folder", file=path)
    return path


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
