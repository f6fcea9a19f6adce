"""Requests as CSV: files whose columns may have the names of other tools, and tables that a caller hands over. Those
become such a file in the run directory, so that the run's plans can be derived again from the directory alone.

A field is read from the column that the scenario names, else from the one of our own name, else from the only one with
a name that other tools use, whatever its case and separators, else from the only one with a word that may be a text's.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import lru_cache, partial
from math import isfinite
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cbsim.errors import ScenarioError
from cbsim.files import real
from cbsim.scenario import catalog
from cbsim.scenario.demand import Csv, CsvColumns, Served
from cbsim.scenario.fields import bare, either, near, shown
from cbsim.scenario.rows import CsvTable, check_not_empty, open_text, whole_numbers
from cbsim.scenario.scenario import Scenario
from cbsim.workload import served
from cbsim.workload.requests import Drawn, Ints, Workload

if TYPE_CHECKING:
    import pyarrow as pa

MOST_NS, MOST_YEARS = 10**18, "less than 30 years"  # of arrivals, from the first one on
LONG_GAP_NS = 100_000_000_000
"""Few servers wait longer for a request, and a log in milliseconds of one request in 0.1 s has such gaps."""
UNNAMED = CsvColumns()
NEEDED = ("arrival", "prompt", "output")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
NAMES = {
    "arrival": ("arrival_s", "arrival", "arrival_time", "arrival_time_s", "arrived_at", "timestamp", "time", "time_s"),
    "prompt": (
        *("prefill_tokens", "prompt_tokens", "input_tokens", "ContextTokens", "Request tokens"),
        *("num_prefill_tokens", "num_prompt_tokens", "prompt_len", "input_len", "input_length", "input_toks"),
    ),
    "output": (
        *("decode_tokens", "output_tokens", "completion_tokens", "GeneratedTokens", "Response tokens"),
        *("num_decode_tokens", "num_output_tokens", "output_len", "output_length", "output_toks"),
    ),
    "max_tokens": ("max_tokens",),
    "priority": ("priority",),
    "id": ("id", "request_id"),
}
"""Known column names by the field that they hold; our own name first."""
WORDS = {"prompt": ("prompt", "input"), "output": ("output", "completion", "response", "generated")}
"""Names of columns that hold lengths if none of NAMES is beside them: else they may hold the texts themselves."""


def workload(form: Csv) -> Workload:
    path = catalog.data(form.path)
    with open_text(path) as file:
        drawn, columns = plain(path, file, form.limit, form.columns)
    drawn = drawn.scaled(form.time_scale)
    notices = []
    if any(column != NAMES[role][0] for role, column in columns.items()):
        notices.append(", ".join(f"{role} from {column!r}" for role, column in columns.items()))
    gap_ns = float(np.median(np.diff(drawn.arrival_ns))) if len(drawn) > 1 else 0.0
    if gap_ns > LONG_GAP_NS:
        remedy = "if they are milliseconds, set workload.time_scale=0.001"
        notices.append(f"the median gap of arrivals is {gap_ns / 1e9:.6g} s; {remedy}")
    return Workload(drawn, len(drawn), notices=tuple(f"{path}: {notice}" for notice in notices))


def plain(
    path: Path, file: IO[str], limit: int | None = None, chosen: CsvColumns = UNNAMED
) -> tuple[Drawn, dict[str, str]]:
    """Return the requests of an open CSV file, and the columns that were read, by the field that they hold. Arrivals
    count from the start of the run; `path` is the file's name in messages.
    """
    table = CsvTable(path, file)
    columns = columns_of(path, table.header, chosen)
    table.pick(columns.values())
    try:
        return _by_columns(table, list(columns), limit), columns
    except (ValueError, csv.Error):  # something is wrong, which rows say, or not written plainly
        table.rewind()
        return _by_rows(table, list(columns), limit), columns


def _times(cells: Sequence[str]) -> Ints:
    seconds = np.array([*map(real, cells)])
    if not ((seconds >= 0) & (seconds < MOST_NS / 1e9)).all():
        raise ValueError
    return np.rint(seconds * 1e9).astype(np.int64)


LEAST_PRIORITY = 1 - 10**12
CONVERTED: dict[str, Callable[[Sequence[str]], Sequence[Any] | NDArray[Any]]] = {
    "arrival": _times,
    **dict.fromkeys(("prompt", "output", "max_tokens"), whole_numbers),
    "priority": partial(whole_numbers, least=LEAST_PRIORITY),
    "id": list,
}


def _by_columns(table: CsvTable, roles: Sequence[str], limit: int | None) -> Drawn:
    """Return what `_by_rows` returns, in a fifth of the time, if every cell is written plainly and nothing is wrong.
    Raises ValueError otherwise.
    """
    parts: dict[str, list[Any]] = {role: [] for role in roles}
    for part in table.parts(limit):
        for role, cells in zip(roles, part, strict=True):
            parts[role].append(CONVERTED[role](cells))
    names = [name for part in parts.pop("id") for name in part] if "id" in parts else None
    of = {role: np.concatenate(each) for role, each in parts.items()}
    times, output, most = of["arrival"], of["output"], of.get("max_tokens", of["output"])
    named = names is None or (len({*map(str.strip, names)} - {""}) == len(names) and "".join(names).isprintable())
    if not named or (np.diff(times) < 0).any() or (most < output).any():
        raise ValueError
    return Drawn(times, of["prompt"], output, most, of.get("priority", 0 * output), names=names)


OPTIONAL: dict[str, Callable[[CsvTable, int, str], Any]] = {
    "max_tokens": CsvTable.count,
    "priority": partial(CsvTable.count, least=LEAST_PRIORITY),
    "id": lambda _table, _column, cell: cell,
}


def _by_rows(table: CsvTable, roles: Sequence[str], limit: int | None) -> Drawn:
    """Return the requests of a table; `roles` are the fields that its columns hold, the three required ones first."""
    rows: list[tuple[int, ...]] = []
    names: dict[str, None] = {}
    start_ns: int | None = None  # of the first row, if it has a time of day
    for cells in table.rows(limit):
        arrival, prompt, output = cells[:3]
        start_ns = start_ns if rows else _stamp_ns(arrival)
        at_ns, tokens, least = _arrival_ns(table, arrival, start_ns), table.count(1, prompt), table.count(2, output)
        further = {role: OPTIONAL[role](table, at, cells[at]) for at, role in enumerate(roles[3:], 3)}
        if rows and at_ns < rows[-1][0]:
            above = f"seconds not before those of the row above ({rows[-1][0] / 1e9})"
            raise table.bad(0, arrival, above if start_ns is None else "a time not before the row above")
        if (most := further.get("max_tokens", least)) < least:
            raise table.bad(3, cells[3], f"at least {table.columns[2]} ({least})")
        if "id" in further:
            if (name := further["id"]) in names or not name.isprintable() or not name.strip():
                bound = "an id that no row above has" if name in names else "an id, a text that can be printed"
                raise table.bad(len(roles) - 1, name, bound)
            names[name] = None
        rows.append((at_ns, tokens, least, most, further.get("priority", 0)))
    check_not_empty(table.path, rows)
    at, prompts, outputs, limits, priorities = np.array(rows, dtype=np.int64).T
    return Drawn(at, prompts, outputs, limits, priorities, names=[*names] or None)


def _arrival_ns(table: CsvTable, cell: str, start_ns: int | None) -> int:
    """Return the arrival in a cell: seconds, or a time of day if the first row has one, `start_ns`."""
    if start_ns is not None:
        stamp_ns = _stamp_ns(cell)
        if stamp_ns is None:
            raise table.bad(0, cell, "a time such as 2023-11-16 18:17:03.9799600, as in the rows above")
        if stamp_ns - start_ns >= MOST_NS:
            raise table.bad(0, cell, f"a time {MOST_YEARS} after the first")
        return stamp_ns - start_ns
    if not 0 <= (value := real(cell)) < MOST_NS / 1e9:
        dated = _stamp_ns(cell) is not None  # only the first row decides which of both a file has
        bound = f"seconds >= 0, {MOST_YEARS}, or a time such as 2023-11-16 18:17:03.97"
        raise table.bad(0, cell, "seconds, as in the rows above, not a date" if dated else bound)
    return round(value * 1e9)


def _stamp_ns(cell: str) -> int | None:
    """Return a time of day such as 2023-11-16 18:17:03.9799600, exact; None if the cell holds none."""
    stamp = cell.strip().replace("T", " ").removesuffix("Z").removesuffix("+00:00")
    fraction = stamp[20:]
    if not stamp.isascii() or stamp[19:20] not in ("", ".") or (fraction and not fraction.isdecimal()):
        return None
    try:
        return _second(stamp[:19]) * 10**9 + int(fraction.ljust(9, "0")[:9])
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def _second(stamp: str) -> int:
    return int(datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp())


def azure(path: Path, limit: int | None = None) -> Drawn:
    """Read an LLM inference trace of Azure, 2023; arrivals count from the first one, exact to the file's 100 ns."""
    with open_text(path) as file:
        return _by_rows(CsvTable(path, file, AZURE_COLUMNS), NEEDED, limit)


def lengths(path: Path, limit: int | None = None, columns: Sequence[str] = LENGTH_COLUMNS) -> list[list[int]]:
    """Read columns of lengths from a file without times, by default those of prompts and outputs."""
    with open_text(path) as file:
        table = CsvTable(path, file, columns)
        rows = [[table.count(at, cell) for at, cell in enumerate(row)] for row in table.rows(limit)]
    check_not_empty(path, rows)
    return rows


def columns_of(path: Path, header: Sequence[str], chosen: CsvColumns) -> dict[str, str]:
    """Return the columns by the field that they hold, required fields first. Raises ScenarioError."""
    named = chosen.model_dump(exclude_none=True)
    columns: dict[str, str] = {}
    for role in NAMES:
        if (column := named.get(role)) is None:
            column = _known(path, header, role)
        elif column not in header:
            raise _wrong(path, header, f"no column {column!r}{near(column, header)}", role)
        if column is None:
            continue
        for other, name in columns.items():
            if name == column:
                raise _wrong(path, header, f"column {column!r} cannot be both {other} and {role}", role)
        columns[role] = column
    return columns


def _known(path: Path, header: Sequence[str], role: str) -> str | None:
    own, *_ = NAMES[role]
    tiers = (set(map(bare, names)) for names in (NAMES[role], WORDS.get(role, ())))
    found = ([name for name in dict.fromkeys(header) if bare(name) in tier] for tier in tiers)
    candidates = [own] if own in header else next(filter(None, found), [])
    if len(candidates) > 1:
        raise _wrong(path, header, f"may be {either([repr(name) for name in candidates])}; say which", role)
    if candidates or role not in NEEDED:
        return next(iter(candidates), None)
    known = ", ".join(NAMES[role])
    raise _wrong(path, header, f"no column with a known name ({known}); say which: columns: {{{role}: NAME}}", role)


def _wrong(path: Path, header: Sequence[str], reason: str, role: str) -> ScenarioError:
    field, there = f"workload.columns.{role}", ", ".join(header) or "nothing"
    return ScenarioError(f"{path}:1: {field}: {reason}; found {there}", file=path, line=1, field=field, bound=reason)


FILE = "workload.csv"  # of a run directory
SOURCE = "requests"  # the table's name in messages
WRITTEN = {"id": "id", "arrival_s": "arrival_s", "prompt_tokens": "prefill_tokens", "output_tokens": "decode_tokens"}
WRITTEN |= {"max_tokens": "max_tokens", "priority": "priority"}  # column of the table -> column of FILE
REQUIRED = ("arrival_s", "prompt_tokens", "output_tokens")


def scenario_of(scenario: Scenario) -> Scenario:
    """Return the scenario with its workload read from FILE, beside it in the run directory; a session keeps its log."""
    if isinstance(scenario.workload, Served):
        return scenario
    return scenario.model_copy(update={"workload": Csv(kind="csv", path=FILE)})


def file_of(scenario: Scenario) -> str:
    """Return the name that the file of the requests handed over has in the run directory."""
    return served.FILE if isinstance(scenario.workload, Served) else FILE


def table_text(requests: Any) -> str:
    """Return FILE's content for a data frame, a table of Arrow or a mapping of columns: arrival_s, prompt_tokens and
    output_tokens, and max_tokens, priority and id if present. Rows are numbered from 0 in messages. Raises
    ScenarioError.
    """
    table = _table(requests)
    names = _names(table)
    values = {name: table.column(name).to_pylist() for name in names}
    if not table.num_rows:
        raise ScenarioError(f"{SOURCE}: holds no requests", file=SOURCE)
    for row, name in enumerate(values.setdefault("id", list(range(table.num_rows)))):
        if not str(name).isprintable():
            raise _wrong_row(row, "id", name, "expected a text that can be printed")
    header = [name for name in WRITTEN if name in values]
    columns = [[_cell(name, value) for value in values[name]] for name in header]
    rows = io.StringIO()
    csv.writer(rows, lineterminator="\n").writerows(zip(*columns, strict=True))
    try:
        plain(Path(SOURCE), io.StringIO(f"{','.join(header)}\n{rows.getvalue()}", newline=""))
    except ScenarioError as error:
        if error.line is None or error.field is None:
            raise
        row = error.line - 2
        raise _wrong_row(row, error.field, values[error.field][row], str(error.bound)) from None
    return f"{','.join(map(WRITTEN.__getitem__, header))}\n{rows.getvalue()}"


def _table(requests: Any) -> pa.Table:
    import pyarrow as pa

    if isinstance(requests, pa.Table):
        return requests
    try:
        return pa.table(requests)
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ScenarioError(f"{SOURCE}: is no table: {reason}", file=SOURCE, bound="a table") from None


def _names(table: pa.Table) -> list[str]:
    """Return the columns of a table, without the index of a data frame. Raises ScenarioError."""
    names = [name for name in table.column_names if not name.startswith("__index_level_")]
    for name in names:
        if name not in WRITTEN:
            raise _wrong_column(name, f"unknown column, expected {', '.join(WRITTEN)}{near(name, WRITTEN)}")
        if names.count(name) > 1:
            raise _wrong_column(name, "is there twice")
    for name in REQUIRED:
        if name not in names:
            bound = f"no such column; expected {', '.join(REQUIRED)}, found {', '.join(names) or 'nothing'}"
            raise _wrong_column(name, bound)
    return names


def _cell(name: str, value: Any) -> Any:
    """Return a value as FILE has it: arrivals with a decimal point, other whole numbers without, since data frames give
    both. Empty if it is no finite number, unless it is an id.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return value if name == "id" and isinstance(value, str) else ""
    return float(value) if name == "arrival_s" else int(value) if value == int(value) else value


def _wrong_column(column: str, bound: str) -> ScenarioError:
    return ScenarioError(f"{SOURCE}: {column}: {bound}", file=SOURCE, field=column, bound=bound)


def _wrong_row(row: int, column: str, value: Any, bound: str) -> ScenarioError:
    message = f"{SOURCE}: row {row}: {column}: got {shown(value)}, {bound}"
    return ScenarioError(message, file=SOURCE, line=row, field=column, value=value, bound=bound)
