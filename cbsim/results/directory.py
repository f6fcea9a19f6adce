"""The run directory: its writer and its reader. Analysis reads nothing else. docs/run_directory.md has the schema.

    scenario.resolved.yaml   every field written out
    env.json                 command, git commit and dirty flag, package versions, device, workload hash
    steps.parquet            one row a step, columns.STEPS
    requests.parquet         one row a request, columns.REQUESTS
    summary.json             the metrics, with schema_version, percentile method and n
    timeline.json.gz         Chrome trace of a window of steps, one lane a tid
    figures/                 drawings
    INCOMPLETE               only while the run is under way or if it was cut short; says why

The marker is the first file written and the last one removed, so a run that dies at any moment, a full disk included,
leaves a directory that says so, with whatever was complete by then: a file is there whole or not at all. Tables of the
same scenario and seed are byte-identical.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from cbsim.results import columns, parquet
from cbsim.results.columns import Column
from cbsim.results.metrics import Requests, Steps, token_times
from cbsim.results.parquet import Ints, ParquetTable, TableError
from cbsim.results.record import STATUSES, STEP_COLUMNS, Record
from cbsim.results.requests import NUMBERS, RUNS, TEXTS, RequestTable
from cbsim.scenario.errors import UserError

SCHEMA_VERSION = parquet.SCHEMA_VERSION
MARKER = "INCOMPLETE"
PART = ".part"  # a file that is being written
T = TypeVar("T")


class RunError(UserError):
    """A run directory that cannot be written or read; the message names file and reason."""


class RunWriter:
    """Writes one run directory. It is marked as incomplete from its first moment until `complete` is called."""

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
        self.steps(steps)
        self.requests(token_times(rows, steps))
        return rows, steps

    def steps(self, steps: Steps) -> None:
        counters = {"use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"}  # most columns count upwards
        self._write("steps.parquet", parquet.encoded(columns.STEPS, step_columns(steps), **counters))

    def requests(self, requests: Requests) -> None:
        self._write("requests.parquet", parquet.encoded(columns.REQUESTS, request_columns(requests)))

    def summary(self, metrics: Mapping[str, Any]) -> None:
        self._json("summary.json", metrics)

    def file(self, name: str, content: bytes) -> Path:
        """Write any other file of the directory, `figures/...` included."""
        return self._write(name, content)

    def complete(self) -> None:
        (self.path / MARKER).unlink(missing_ok=True)

    def _json(self, name: str, value: Mapping[str, Any]) -> None:
        self._write(name, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

    def _write(self, name: str, content: bytes) -> Path:
        path = self.path / name
        try:
            path.parent.mkdir(exist_ok=True)
            if name == MARKER:
                path.touch()  # an empty marker is one, too, where there is no room for a reason
            write_whole(path, content)
        except OSError as error:
            raise RunError(f"{path}: cannot be written: {error.strerror or error}", file=path) from error
        return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name and give it its own when all of it is there. Raises OSError."""
    part = path.with_name(f".{path.name}{PART}")
    try:
        part.write_bytes(content)
        part.replace(path)
    except BaseException:  # interrupted, too
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


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


def request_columns(requests: Requests) -> dict[str, Any]:
    """The request table's values by column; times that never happened are null."""
    table = requests.rows
    values: dict[str, Any] = {name: table.numbers(name) for name in NUMBERS}
    values |= {name: table.texts(name) for name in TEXTS}
    offsets = np.concatenate([[0], np.cumsum(table.lengths)]).astype(np.int32)
    values[RUNS] = pa.ListArray.from_arrays(offsets, table.runs)
    for name in ("scheduled_ns", "first_token_ns", "last_token_ns"):
        times = getattr(requests, name)
        values[name] = pa.array(times, mask=times < 0)
    return values | {"generated_tokens": requests.generated}


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory that has been read. `incomplete` holds the marker's text."""

    path: Path
    scenario: str
    environment: dict[str, Any]
    summary: dict[str, Any]
    steps: Steps
    requests: RequestTable
    incomplete: str | None


def load(path: Path, *, whole: bool = True) -> Run:
    """Read a run directory; if not `whole`, its documents only. Raises RunError naming the file that is missing or
    broken, and what is wrong with it.
    """
    if not path.is_dir():
        raise RunError(f"{path}: no such run directory", file=path)
    marker = path / MARKER
    if marker.exists() and not (path / "summary.json").exists():
        raise RunError(f"{path}: incomplete, nothing to read yet: {_reason(marker)}", file=path)
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
    steps, requests = (
        _tables(path) if whole else (Steps(np.empty((0, len(STEP_COLUMNS)), dtype=np.int64)), RequestTable.of(()))
    )
    return Run(
        path,
        _read_text(path / "scenario.resolved.yaml"),
        _read_json(path / "env.json"),
        summary,
        steps,
        requests,
        _reason(marker) if marker.exists() else None,
    )


def _tables(path: Path) -> tuple[Steps, RequestTable]:
    steps = _read_table(path / "steps.parquet", columns.STEPS, _steps)
    return steps, _read_table(path / "requests.parquet", columns.REQUESTS, lambda table: _requests(table, len(steps)))


def _reason(marker: Path) -> str:
    return _read_text(marker).strip() or "no reason was written"


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"{path}: cannot be read: {error.strerror or error}", file=path)


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise _unreadable(path, error) from error
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


def _read_table(path: Path, declared: Sequence[Column], make: Callable[[ParquetTable], T]) -> T:
    """What `make` makes of a table."""
    try:
        with path.open("rb") as file:
            return make(ParquetTable(file, declared))
    except TableError as error:
        raise RunError(f"{path}: {error}", file=path) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _steps(table: ParquetTable) -> Steps:
    """Column by column into one array, so that a long run is in memory once."""
    values = np.empty((len(table["step"]), len(STEP_COLUMNS)), dtype=np.int64, order="F")
    for i, name in enumerate(STEP_COLUMNS):
        values[:, i] = table[name].to_numpy()
    return Steps(values)


def _requests(table: ParquetTable, steps: int) -> RequestTable:
    """Requests that agree with a step table of so many steps."""
    numbers = {name: table[name].to_numpy() for name in NUMBERS}
    texts = {name: table[name].combine_chunks() for name in TEXTS}
    lengths, flat = table.lists(RUNS)
    requests = RequestTable(numbers, texts, lengths, flat)
    names, index, first = texts["id"], numbers["index"], numbers["first_step"]
    for at in np.flatnonzero(index[1:] <= index[:-1])[:1]:
        raise TableError(f"index of request {names[at + 1]} is {index[at + 1]}, expected more than {index[at]}")
    for at in np.flatnonzero((first < -1) | (first >= steps))[:1]:
        raise TableError(f"first_step of request {names[at]} is {first[at]}, expected -1 to {steps - 1}")
    for at in np.flatnonzero(~requests.is_in(STATUSES))[:1]:
        status = texts["status"][at].as_py()
        raise TableError(f"status of request {names[at]} is {status!r}, expected one of {', '.join(STATUSES)}")
    _check_runs(names, lengths, flat, steps)
    return requests


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
