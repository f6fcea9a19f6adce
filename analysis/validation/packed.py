"""The packed form of a validation folder: three Parquet files a device in place of a folder a run. Git keeps these.

    runs.parquet       a row a run: which it is, and its documents as they were written
    steps.parquet      a row a step of the runs whose tables are kept
    requests.parquet   a row a request of these

The columns are those of the run directory, behind `case`, `loop`, `repeat` and `world`. Times of a step are kept as
what they lie behind an earlier one (BEHIND), in half the room. Unpacked they are the run directories that they were
made of; a measured run whose tables are not kept has in replay.json what deriving its plans again came to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from analysis.statistics.loading import VERDICT, LoadedRun
from cbsim.draw import folder
from cbsim.results import columns, directory, parquet
from cbsim.results.columns import Column
from cbsim.results.directory import RunError
from cbsim.results.parquet import ParquetTable, TableError

RUNS, STEPS, REQUESTS = FILES = ("runs.parquet", "steps.parquet", "requests.parquet")
WORLDS = ("measured", "simulated")
KEYS = (
    Column("case", "text", "the workload", "string"),
    Column("loop", "text", "`sync` or `async`", "string"),
    Column("repeat", "count", "1, 2 ...: which run of this case, loop and world"),
    Column("world", "text", "`measured` or `simulated`", "string"),
)
DOCUMENTS = {"scenario": "scenario.resolved.yaml", "environment": "env.json", "summary": "summary.json"}
RUN_COLUMNS = (
    *KEYS,
    Column("folder", "text", "name of the run directory", "string"),
    Column("about", "text", "case.json of the case", "string"),
    *(Column(name, "text", f"{file} of the run", "string") for name, file in DOCUMENTS.items()),
    Column("replay", "text", f"{VERDICT} of a run whose tables are not kept, else null", "string", nullable=True),
)
CPU_TIMES = [f"{phase}_{edge}_ns" for phase in columns.PHASES for edge in ("start", "end")]
DEVICE_TIMES = [f"{lane}_{edge}_ns" for lane in columns.LANES for edge in ("start", "end")]
BEHIND = {
    **{later: earlier for earlier, later in pairwise(CPU_TIMES)},
    **{later: earlier for earlier, later in pairwise(["launch_end_ns", *DEVICE_TIMES, "await_end_ns"])},
}
"""The time of a step that another one is kept behind: on the CPU the one before, on the device likewise."""
STEP_COLUMNS = (
    *KEYS,
    *(
        column._replace(name=f"{column.name}_behind", definition=f"{column.definition}; less `{BEHIND[column.name]}`")
        if column.name in BEHIND
        else column
        for column in columns.STEPS
    ),
)
REQUEST_COLUMNS = (*KEYS, *columns.REQUESTS)
SMALL: dict[str, Any] = {"compression_level": 19}
COUNTERS: dict[str, Any] = {"use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"}


class Key(NamedTuple):
    """Which run it is."""

    case: str
    loop: str
    repeat: int
    world: str


class Packed(NamedTuple):
    """A run to be packed: its documents as text, its tables if they are kept, else what its replay came to."""

    key: Key
    folder: str
    about: str
    documents: Mapping[str, str]
    tables: LoadedRun | None
    replay: Mapping[str, Any] | None


# -- packing ----------------------------------------------------------------------------------------------------------


def packed(runs: Sequence[Packed]) -> dict[str, bytes]:
    """The three files."""
    whole = [(run.key, run.tables) for run in runs if run.tables is not None]
    return {
        RUNS: parquet.encoded(RUN_COLUMNS, _documents(runs), **SMALL),
        STEPS: parquet.encoded(STEP_COLUMNS, _steps(whole), **SMALL, **_counters(STEP_COLUMNS)),
        REQUESTS: parquet.encoded(REQUEST_COLUMNS, _requests(whole), **SMALL),
    }


def _documents(runs: Sequence[Packed]) -> dict[str, list[Any]]:
    return {
        **_keys([(run.key, 1) for run in runs]),
        "folder": [run.folder for run in runs],
        "about": [run.about for run in runs],
        **{name: [run.documents[name] for run in runs] for name in DOCUMENTS},
        "replay": [None if run.tables is not None else json.dumps(run.replay) for run in runs],
    }


def _keys(counts: Sequence[tuple[Key, int]]) -> dict[str, list[Any]]:
    """The columns that say which run a row is of."""
    return {name: [getattr(key, name) for key, count in counts for _ in range(count)] for name in Key._fields}


def _steps(runs: Sequence[tuple[Key, LoadedRun]]) -> dict[str, Any]:
    made: dict[str, Any] = _keys([(key, len(run.table)) for key, run in runs])
    for column in columns.STEPS:
        name, earlier = column.name, BEHIND.get(column.name)
        parts = [run.table[name] - (run.table[earlier] if earlier else 0) for _, run in runs]
        made[f"{name}_behind" if earlier else name] = pa.chunked_array(parts, pa.int64())
    return made


def _requests(runs: Sequence[tuple[Key, LoadedRun]]) -> dict[str, Any]:
    made: dict[str, Any] = _keys([(key, len(run.requests)) for key, run in runs])
    values = [directory.request_columns(run.times) for _, run in runs]
    for column in columns.REQUESTS:
        kind = parquet.schema([column]).field(0).type
        made[column.name] = pa.chunked_array([pa.array(table[column.name], kind) for table in values], kind)
    return made


def _counters(declared: Sequence[Column]) -> dict[str, Any]:
    """Numbers as differences, texts as a dictionary."""
    texts = [column.name for column in declared if column.type == "string"]
    numbers = {column.name: "DELTA_BINARY_PACKED" for column in declared if column.type == "int64"}
    return {"use_dictionary": texts, "column_encoding": numbers}


# -- unpacking --------------------------------------------------------------------------------------------------------


def there(place: Path) -> bool:
    """Does the folder hold packed runs?"""
    return (place / RUNS).exists()


def unpack(place: Path, out: Path) -> None:
    """Write the run directories of the packed runs in `place` below `out`. Raises RunError naming a file that is
    missing or damaged.
    """
    runs = _read(place / RUNS, RUN_COLUMNS)
    steps = _Rows(_read(place / STEPS, STEP_COLUMNS))
    requests = _Rows(_read(place / REQUESTS, REQUEST_COLUMNS))
    for row in runs.to_pylist():
        key = Key(*(row[name] for name in Key._fields))
        _check_names(place / RUNS, row)
        files = {file: row[name].encode() for name, file in DOCUMENTS.items()}
        if row["replay"] is not None:
            files[VERDICT] = row["replay"].encode()
        else:
            files[STEPS] = parquet.encoded(columns.STEPS, _added_up(steps.of(key)), **COUNTERS)
            files[REQUESTS] = parquet.encoded(columns.REQUESTS, _values(requests.of(key)))
        folder.write(out / row["case"], {"case.json": row["about"].encode()})
        folder.write(out / row["case"] / key.world / row["folder"], files)


def _read(file: Path, declared: Sequence[Column]) -> pa.Table:
    try:
        with file.open("rb") as opened:
            table = ParquetTable(opened, declared)
            return pa.table({column.name: table[column.name] for column in declared})
    except TableError as error:
        raise RunError(f"{file}: {error}") from None
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error.strerror or error}") from None


def _check_names(file: Path, row: Mapping[str, Any]) -> None:
    """No row may lead out of the folder."""
    if row["world"] not in WORLDS:
        raise RunError(f"{file}: world is {row['world']!r}, expected {' or '.join(WORLDS)}")
    for name in ("case", "folder"):
        if row[name] in ("", ".", "..") or Path(row[name]).name != row[name]:
            raise RunError(f"{file}: {name} is {row[name]!r}, expected the name of a folder")


class _Rows:
    """The rows of each run, which stand together. A run that has none has no steps or no requests; whoever reads it
    holds that against its summary.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._places: dict[Key, tuple[int, int]] = {}
        start = 0
        for key, rows in groupby(zip(*(table[name].to_pylist() for name in Key._fields), strict=True)):
            count = sum(1 for _ in rows)
            self._places[Key(*key)] = (start, count)
            start += count

    def of(self, key: Key) -> pa.Table:
        return self._table.slice(*self._places.get(key, (0, 0)))


def _values(table: pa.Table) -> dict[str, Any]:
    return {column.name: table[column.name].combine_chunks() for column in columns.REQUESTS}


def _added_up(table: pa.Table) -> dict[str, Any]:
    """The columns of a run's own table; each time behind one that is there before it."""
    made: dict[str, Any] = {c.name: table[c.name].to_numpy() for c in columns.STEPS if c.name not in BEHIND}
    for name in sorted(BEHIND, key=_depth):
        made[name] = made[BEHIND[name]] + table[f"{name}_behind"].to_numpy()
    return made


def _depth(name: str) -> int:
    return 1 + _depth(BEHIND[name]) if name in BEHIND else 0
