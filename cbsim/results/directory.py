"""The run directory: its writer and its reader. Analysis reads nothing else. docs/run_directory.md has the schema.

    scenario.resolved.yaml   every field written out
    env.json                 command, git commit and dirty flag, package versions, device, workload hash
    steps.parquet            one row a step, columns.STEPS
    requests.parquet         one row a request, columns.REQUESTS
    summary.json             the metrics, with schema_version, percentile method and n
    timeline.json.gz         Chrome trace of a window of steps, one lane a tid
    figures/                 drawings
    INCOMPLETE               only while the run is under way or if it was cut short; says why
    steps/, requests/        only while a long run is under way or if it was killed: its tables so far (pieces.py)

The marker is the first file written and the last one removed, so a run that dies at any moment, a full disk included,
leaves a directory that says so, with whatever was complete by then: a file is there whole or not at all. Tables of the
same scenario and seed are byte-identical.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import IO, Any

import numpy as np
import pyarrow as pa

from cbsim.results import arrow, columns, on_disk, parquet, so_far
from cbsim.results.metrics import Requests, Steps, token_times
from cbsim.results.on_disk import Place, StepsOnDisk, TableFiles, unreadable
from cbsim.results.parquet import Ints, TableError
from cbsim.results.record import STATUSES, STEP_COLUMNS, Record
from cbsim.results.requests import NUMBERS, RUNS, TEXTS, RequestTable

SCHEMA_VERSION = parquet.SCHEMA_VERSION
MARKER = "INCOMPLETE"
PART = ".part"  # a file that is being written
PIECE = 1 << 17  # steps a piece, rows a group of a table: 36 MB of memory
LARGE = 1 << 19  # rows of a table, beyond which columns are read when they are asked for
COUNTERS: dict[str, Any] = {"use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"}  # most columns of steps
RunError = on_disk.RunError


class RunWriter:
    """Writes one run directory. It is marked as incomplete from its first moment until `complete` is called.

    `group` rows of a table lie together. `joined`: the tables have been made of pieces.
    """

    group = PIECE
    joined = False

    def __init__(self, out: Path, name: str, digest: str, clock: datetime | None = None) -> None:
        """Creates `out`/<UTC>-<name>-<hash8>. Raises RunError if that cannot be done."""
        stamp = (clock or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
        self._begin(_fresh(out / f"{stamp}-{name}-{digest[:8]}"))

    @classmethod
    def at(cls, path: Path) -> RunWriter:
        """Writes to `path` itself, a new or an empty folder. Raises RunError if it is neither."""
        writer = cls.__new__(cls)
        writer._begin(_empty(path))
        return writer

    def _begin(self, path: Path) -> None:
        self.path = path
        self.note("the run is under way, or died without a word")

    def note(self, reason: str) -> None:
        """Mark the directory as incomplete, with the reason."""
        self._write(MARKER, (reason + "\n").encode())

    def scenario(self, text: str) -> None:
        self._write("scenario.resolved.yaml", text.encode())

    def environment(self, facts: Mapping[str, Any]) -> None:
        self._json("env.json", facts)

    def tables(self, record: Record) -> tuple[RequestTable, Steps]:
        """Write both tables of a record; returns what was written."""
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
        """Write both tables, unless they have been made of pieces; the step table beside what is done meanwhile, as
        Arrow encodes it without Python. Raises RunError.
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
        """The tables are whole, and the summary is there: what they were made of is not wanted any more."""
        for name in (so_far.STEP_PIECES, so_far.REQUEST_PIECES):
            rmtree(self.path / name, ignore_errors=True)
        (self.path / so_far.TERMS).unlink(missing_ok=True)

    def summary(self, metrics: Mapping[str, Any]) -> None:
        self._json("summary.json", metrics)

    def file(self, name: str, content: bytes) -> Path:
        """Write any other file of the directory, `figures/...` included."""
        return self._write(name, content)

    def stream(self, name: str, write: Callable[[IO[bytes]], None]) -> None:
        """A file that `write` writes bit by bit."""
        self._whole(name, lambda part: _streamed(part, write))

    def complete(self) -> None:
        (self.path / MARKER).unlink(missing_ok=True)

    def _json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

    def _write(self, name: str, content: bytes) -> Path:
        return self._whole(name, lambda part: part.write_bytes(content))

    def _whole(self, name: str, write: Callable[[Path], object]) -> Path:
        path = self.path / name
        try:
            path.parent.mkdir(exist_ok=True)
            if name == MARKER:
                path.touch()  # an empty marker is one, too, where there is no room for a reason
            _whole(path, write)
        except OSError as error:
            raise RunError(f"{path}: cannot be written: {error.strerror or error}", file=path) from error
        return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name and give it its own when all of it is there. Raises OSError."""
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
    """Make a directory that did not exist: `path`, or `path`-2, -3 and so on."""
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
    """`path`, made if need be, if nothing is in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        present = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise RunError(f"{path}: cannot be created: {error.strerror or error}", file=path) from error
    if present:
        raise RunError(f"{path}: holds {present[0]}; name a new or an empty folder", file=path)
    return path


def contents(record: Record) -> tuple[RequestTable, Steps]:
    """Both tables of a record, not copied: nothing may be recorded any more."""
    steps = Steps(np.frombuffer(record.steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))
    return RequestTable.of(record.requests()), steps


def step_columns(steps: Steps) -> dict[str, Any]:
    """The step table's values by column."""
    return {name: steps[name] for name in STEP_COLUMNS}


def recorded_columns(requests: RequestTable) -> dict[str, Any]:
    """The values by column of what a record says of requests."""
    values: dict[str, Any] = {name: requests.numbers(name) for name in NUMBERS}
    values |= {name: requests.texts(name) for name in TEXTS}
    return values | {RUNS: arrow.lists(requests.lengths, requests.runs)}


def request_columns(requests: Requests) -> dict[str, Any]:
    """The request table's values by column; times that never happened are null."""
    values = recorded_columns(requests.rows)
    for name in ("scheduled_ns", "first_token_ns", "last_token_ns"):
        times = getattr(requests, name)
        values[name] = arrow.whole(times, times < 0)
    return values | {"generated_tokens": requests.generated}


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory that has been read. `incomplete` holds the marker's text. The files that only some runs have are
    under `path`, or in `files` if the run is in none.
    """

    path: Path
    scenario: str
    environment: dict[str, Any]
    summary: dict[str, Any]
    steps: Steps
    requests: RequestTable
    incomplete: str | None
    files: Mapping[str, bytes] | None = None

    @property
    def place(self) -> Place:
        """Where its further files are."""
        return self.path if self.files is None else self.files


def load(path: Path, *, whole: bool = True) -> Run:
    """Read a run directory; if not `whole`, its documents only. Raises RunError naming the file that is missing or
    broken, and what is wrong with it.
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such run directory", file=path)
    marker = path / MARKER
    killed = marker.exists() and not (path / "summary.json").exists()
    if killed and not so_far.any_piece(path):
        raise RunError(f"{path}: incomplete, nothing to read yet: {_reason(marker)}", file=path)
    steps, requests = Steps(np.empty((0, len(STEP_COLUMNS)), dtype=np.int64)), RequestTable.of(())
    if killed:
        steps, requests, terms = so_far.steps(path), so_far.requests(path), path / so_far.TERMS
        summary = so_far.summary(terms, _read_json(terms), requests, steps)
    else:
        summary = _read_json(path / "summary.json")
    version = summary.get("schema_version")
    if version != SCHEMA_VERSION:
        raise RunError(
            f"{path / 'summary.json'}: {parquet.refused_version(version)}",
            file=path / "summary.json",
            field="schema_version",
            value=version,
            bound=str(SCHEMA_VERSION),
        )
    if whole and not killed:
        steps = _checked(read_steps([path / "steps.parquet"]))
        requests = read_requests(path / "requests.parquet", len(steps))
    return Run(
        path,
        _read_text(path / "scenario.resolved.yaml"),
        _read_json(path / "env.json"),
        summary,
        steps,
        requests,
        _reason(marker) if marker.exists() else None,
    )


def _reason(marker: Path) -> str:
    return _read_text(marker).strip() or "no reason was written"


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError:
        raise RunError(f"{path}: not UTF-8 text", file=path) from None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path}: not JSON: {error}", file=path) from error
    if not isinstance(value, dict):
        raise RunError(f"{path}: not a JSON object", file=path)
    return value


# -- tables -----------------------------------------------------------------------------------------------------------


def read_steps(files: Sequence[Path]) -> Steps:
    """A step table, in memory if it is not a long one."""
    steps = StepsOnDisk(TableFiles(files, columns.STEPS))
    return steps if len(steps) > LARGE else Steps(steps.table)


def _checked(steps: Steps) -> Steps:
    """What is read later has been read once: a damaged file is refused now."""
    if isinstance(steps, StepsOnDisk):
        for name in STEP_COLUMNS:
            steps[name]
    return steps


def read_requests(file: Path, steps: int | None = None) -> RequestTable:
    """A request table, in memory if it is not a long one; checked against a step table of so many steps."""
    files = TableFiles([file], columns.REQUESTS)
    requests = on_disk.requests_on_disk(files) if len(files) > LARGE else on_disk.requests_of(files)
    if steps is not None:
        try:
            _check_requests(requests, steps)
        except TableError as error:
            raise RunError(f"{file}: {error}", file=file) from error
    return requests


def _check_requests(requests: RequestTable, steps: int) -> None:
    """Raise TableError unless they agree with a step table of so many steps."""
    names, index, first = requests.texts("id"), requests.numbers("index"), requests.numbers("first_step")
    for at in np.flatnonzero(index[1:] <= index[:-1])[:1]:
        raise TableError(f"index of request {names[at + 1]} is {index[at + 1]}, expected more than {index[at]}")
    for at in np.flatnonzero((first < -1) | (first >= steps))[:1]:
        raise TableError(f"first_step of request {names[at]} is {first[at]}, expected -1 to {steps - 1}")
    for at in np.flatnonzero(~requests.is_in(STATUSES))[:1]:
        status = requests.texts("status")[at].as_py()
        raise TableError(f"status of request {names[at]} is {status!r}, expected one of {', '.join(STATUSES)}")
    _check_runs(names, requests.lengths, requests.runs, steps)


def _check_runs(names: pa.Array, lengths: Ints, flat: Ints, steps: int) -> None:
    """Token runs are pairs of a first step and a count, at least 1, one behind the other, inside the step table."""
    odd = np.flatnonzero(lengths % 2)
    if len(odd):
        raise TableError(f"token_runs of request {names[odd[0]]} has {lengths[odd[0]]} numbers, expected pairs")
    first, count, owner = flat[::2], flat[1::2], np.repeat(np.arange(len(names)), lengths // 2)
    same, least = owner[1:] == owner[:-1], np.zeros_like(first)
    least[1:][same] = (first + count)[:-1][same]
    wrong = np.flatnonzero((count < 1) | (first < least) | (count > steps - first))
    if len(wrong):
        at = wrong[0]
        raise TableError(
            f"token_runs of request {names[owner[at]]} has {count[at]} steps from step {first[at]} on, "
            f"expected 1 or more between {least[at]} and {steps - 1}"
        )
