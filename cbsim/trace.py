"""The run directory: the schema of its files, the writer and the reader. Analysis reads nothing else.

    scenario.resolved.yaml   every field written out
    env.json                 command, git commit and dirty flag, package versions, device, workload hash
    steps.parquet            one row a step, columns of record.STEP_COLUMNS
    requests.parquet         one row a request
    summary.json             the metrics, with schema_version, percentile method and n
    timeline.json.gz         Chrome trace of a window of steps, one lane a tid
    figures/                 drawings
    INCOMPLETE               only while the run is under way or if it was cut short; says why

The marker is the first file written and the last one removed, so a run that dies at any moment, a full disk included,
leaves a directory that says so, with whatever was complete by then. Tables of the same scenario and seed are
byte-identical.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.metrics import Requests, Steps, token_times
from cbsim.record import STEP_COLUMNS, Record, RequestRow

SCHEMA_VERSION = 1
MARKER = "INCOMPLETE"
LISTED = pa.list_(pa.int64())


class RunError(ValueError):
    """A run directory that cannot be written or read; the message names file and reason."""


class RunWriter:
    """Writes one run directory. It is marked as incomplete from its first moment until `complete` is called."""

    def __init__(self, out: Path, name: str, digest: str, clock: datetime | None = None) -> None:
        """Creates `out`/<UTC>-<name>-<hash8>. Raises RunError if that cannot be done."""
        stamp = (clock or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
        self.path = _fresh(out / f"{stamp}-{name}-{digest[:8]}")
        self.note("the run is under way, or died without a word")

    def note(self, reason: str) -> None:
        """Mark the directory as incomplete, with the reason."""
        self._write(MARKER, (reason + "\n").encode())

    def scenario(self, text: str) -> None:
        self._write("scenario.resolved.yaml", text.encode())

    def environment(self, facts: Mapping[str, Any]) -> None:
        self._json("env.json", facts)

    def tables(self, record: Record) -> tuple[list[RequestRow], Steps]:
        """Write both tables; returns what was written."""
        steps = Steps(np.frombuffer(record.steps, dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))
        rows = record.requests()
        counters = {"use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"}  # most columns count upwards
        table = pa.table({name: pa.array(steps[name]) for name in STEP_COLUMNS})
        self._parquet("steps.parquet", table, **counters)
        self._parquet("requests.parquet", request_table(token_times(rows, steps)))
        return rows, steps

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
            path.write_bytes(content)
        except OSError as error:
            if name != MARKER:
                path.unlink(missing_ok=True)  # no half-written file passes for a whole one
            raise RunError(f"{path}: cannot be written: {error.strerror or error}") from error
        return path

    def _parquet(self, name: str, table: pa.Table, **options: Any) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", **options)
        self._write(name, sink.getvalue().to_pybytes())


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
    raise RunError(f"{path}: too many runs of that name")


def request_table(requests: Requests) -> pa.Table:
    """The request table; times that never happened are null."""
    rows = requests.rows
    columns: dict[str, Any] = {
        name: [getattr(row, name) for row in rows] for name in RequestRow._fields if name != "token_runs"
    }
    for name in ("scheduled_ns", "first_token_ns", "last_token_ns"):
        values = getattr(requests, name)
        columns[name] = pa.array(values, mask=values < 0)
    columns["generated_tokens"] = requests.generated
    columns["token_runs"] = pa.array([row.token_runs for row in rows], type=LISTED)
    return pa.table(columns)


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory that has been read. `incomplete` holds the marker's text."""

    path: Path
    scenario: str
    environment: dict[str, Any]
    summary: dict[str, Any]
    steps: Steps
    requests: list[RequestRow]
    incomplete: str | None


def load(path: Path) -> Run:
    """Read a run directory. Raises RunError naming the file that is missing or broken."""
    if not path.is_dir():
        raise RunError(f"{path}: no such run directory")
    summary = _read_json(path / "summary.json")
    version = summary.get("schema_version")
    if version != SCHEMA_VERSION:
        raise RunError(f"{path / 'summary.json'}: schema_version {version!r}, this version reads {SCHEMA_VERSION}")
    marker = path / MARKER
    return Run(
        path,
        _read_text(path / "scenario.resolved.yaml"),
        _read_json(path / "env.json"),
        summary,
        _read_steps(path / "steps.parquet"),
        _read_requests(path / "requests.parquet"),
        marker.read_text().strip() or "no reason was written" if marker.exists() else None,
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError:
        raise RunError(f"{path}: not UTF-8 text") from None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RunError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path}: not a JSON object")
    return value


def _read_table(path: Path, columns: tuple[str, ...]) -> pa.Table:
    content = _read(path)
    try:
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RunError(f"{path}: not a parquet table: {error}") from error
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise RunError(f"{path}: column {missing[0]} is missing")
    for name in columns:
        if (
            len(table)
            and name != "token_runs"
            and (table[name].null_count or str(table[name].type) not in ("int64", "string"))
        ):
            raise RunError(f"{path}: column {name} is not what it should be")
    return table


def _read_steps(path: Path) -> Steps:
    table = _read_table(path, STEP_COLUMNS)
    try:
        return Steps(np.stack([table[name].to_numpy() for name in STEP_COLUMNS], axis=1).astype(np.int64))
    except (TypeError, ValueError) as error:
        raise RunError(f"{path}: not a step table: {error}") from None


def _read_requests(path: Path) -> list[RequestRow]:
    table = _read_table(path, RequestRow._fields)
    columns = [table[name].to_pylist() for name in RequestRow._fields]
    return [RequestRow(*values) for values in zip(*columns, strict=True)]
