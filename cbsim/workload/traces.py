"""Readers of recorded workloads. A row that cannot be used is an error that names file, line and field; none is dropped
and none repaired. Blank lines say nothing and are passed over. Rows must be in order of time.

A request that generated nothing (0 output tokens) is refused too: it would have no first token to wait for. The public
traces that we know have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import IO, Any, NamedTuple

from cbsim.scenario.demand import CsvColumns
from cbsim.scenario.fields import ScenarioError, shown
from cbsim.scenario.rows import CsvTable, JsonLine, lines, text
from cbsim.workload import csv_columns

BLOCK_TOKENS = 512
"""Tokens that one hash id stands for, in Mooncake's and aiperf's files."""
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


class Arrival(NamedTuple):
    """One row: when, how long, and for traces that say so the ids of its prefix's blocks of 512 tokens."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    id: str = ""
    max_tokens: int | None = None  # None: output_tokens
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a session: tokens new to the conversation, and how long after the end of the turn before it comes."""

    new_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    delay_ns: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation. Its first turn arrives at `arrival_ns`."""

    id: str
    arrival_ns: int
    turns: tuple[Turn, ...]


def _not_empty(path: Path, rows: list[Any]) -> None:
    if not rows:
        raise ScenarioError(f"{path}: holds no requests")


# -- CSV --------------------------------------------------------------------------------------------------------------


def azure(path: Path, limit: int | None = None) -> list[Arrival]:
    """Azure's LLM inference traces of 2023; arrivals count from the first request, exact to the 100 ns given."""
    rows: list[Arrival] = []
    with text(path) as file:
        table = CsvTable(path, file, AZURE_COLUMNS)
        first = last = None
        for stamp, prompt, output in table.rows(limit):
            try:
                now = _stamp_ns(stamp)
            except ValueError:
                raise table.bad(0, stamp, "a time such as 2023-11-16 18:17:03.9799600") from None
            first = now if first is None else first
            if last is not None and now < last:
                raise table.bad(0, stamp, "a time not before the row above")
            last = now
            rows.append(Arrival(now - first, table.count(1, prompt), table.count(2, output)))
    _not_empty(path, rows)
    return rows


def _stamp_ns(stamp: str) -> int:
    fraction = stamp[20:]
    if stamp[19:20] not in ("", ".") or (fraction and not fraction.isdecimal()):
        raise ValueError(stamp)
    return _second(stamp[:19]) * 10**9 + int(fraction.ljust(9, "0")[:9])


@lru_cache(maxsize=4096)
def _second(stamp: str) -> int:
    return int(datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp())


def plain(path: Path, limit: int | None = None, wanted: CsvColumns = csv_columns.UNNAMED) -> list[Arrival]:
    """When and how long, and if there max_tokens, priority and id; seconds count from the start of the run."""
    with text(path) as file:
        return plain_rows(path, file, limit, wanted)


def plain_columns(path: Path, wanted: CsvColumns) -> dict[str, str]:
    """The columns that `plain` reads, by what they hold."""
    with text(path) as file:
        return csv_columns.found(path, CsvTable(path, file).header, wanted)


def plain_rows(
    path: Path, file: IO[str], limit: int | None = None, wanted: CsvColumns = csv_columns.UNNAMED
) -> list[Arrival]:
    """The rows of an open file of that kind; `path` is what messages call it."""
    rows: list[Arrival] = []
    ids: set[str] = set()
    table = CsvTable(path, file)
    columns = csv_columns.found(path, table.header, wanted)
    table.pick(columns.values())
    optional = list(columns)[3:]
    clock = _Clock(table)
    for arrival, prompt, output, *more in table.rows(limit):
        at_ns, prompts, outputs = clock.ns(arrival), table.count(1, prompt), table.count(2, output)
        row = Arrival(at_ns, prompts, outputs, **_optional(table, outputs, optional, more))
        if row.id in ids or ("id" in columns and not row.id):
            raise table.bad(len(columns) - 1, row.id, "an id that no row above has" if row.id else "an id")
        if row.id:
            ids.add(row.id)
        rows.append(row)
    _not_empty(path, rows)
    return rows


def _optional(table: CsvTable, outputs: int, roles: Sequence[str], cells: Sequence[str]) -> dict[str, Any]:
    """A row's max_tokens, priority and id, as far as the table has them."""
    values: dict[str, Any] = {}
    for place, (role, cell) in enumerate(zip(roles, cells, strict=True), 3):
        if role == "max_tokens":
            most = values[role] = table.count(place, cell)
            if most < outputs:
                raise table.bad(place, cell, f"at least {table.columns[2]} ({outputs})")
        elif role == "priority":
            values[role] = table.whole(place, cell)
        else:
            values[role] = cell
    return values


class _Clock:
    """Reads arrivals, the first column of a table: seconds, or, if the first row has one, times of day."""

    def __init__(self, table: CsvTable) -> None:
        self._table = table
        self._start_ns: int | None = None  # of times of day: the first
        self._last_ns: int | None = None

    def ns(self, cell: str) -> int:
        """Time of the next row. Raises ScenarioError if it lies before the one above."""
        if self._last_ns is None and _is_stamp(stamp := _plain_stamp(cell)):
            self._start_ns = _stamp_ns(stamp)
        if self._start_ns is None:
            now, unit = round(_seconds(self._table, cell) * 1e9), "seconds"
        elif _is_stamp(stamp := _plain_stamp(cell)):
            now, unit = _stamp_ns(stamp) - self._start_ns, "a time"
        else:
            raise self._table.bad(0, cell, "a time such as 2023-11-16 18:17:03.9799600, as in the rows above")
        if self._last_ns is not None and now < self._last_ns:
            above = f"those of the row above ({self._last_ns / 1e9})" if unit == "seconds" else "the row above"
            raise self._table.bad(0, cell, f"{unit} not before {above}")
        self._last_ns = now
        return now


def _plain_stamp(cell: str) -> str:
    return cell.strip().replace("T", " ").removesuffix("Z").removesuffix("+00:00")


def _is_stamp(cell: str) -> bool:
    try:
        _stamp_ns(cell)
    except ValueError:
        return False
    return True


def _seconds(table: CsvTable, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or not 0 <= value < 1e9:
        raise table.bad(0, cell, "seconds >= 0, less than 30 years, or a time such as 2023-11-16 18:17:03.97")
    return value


def lengths(path: Path, limit: int | None = None) -> list[tuple[int, int]]:
    """num_prefill_tokens, num_decode_tokens: prompt and output lengths without times."""
    with text(path) as file:
        table = CsvTable(path, file, LENGTH_COLUMNS)
        rows = [(table.count(0, prompt), table.count(1, output)) for prompt, output in table.rows(limit)]
    _not_empty(path, rows)
    return rows


def column(path: Path, name: str) -> list[int]:
    """One column of lengths."""
    with text(path) as file:
        table = CsvTable(path, file, (name,))
        rows = [table.count(0, cell) for (cell,) in table.rows(None)]
    _not_empty(path, rows)
    return rows


# -- JSON lines -------------------------------------------------------------------------------------------------------


def _hash_ids(line: JsonLine, tokens: int) -> tuple[int, ...]:
    """Ids of the 512-token blocks of `tokens` tokens, the last block perhaps short."""
    ids, blocks = line.values.get("hash_ids"), -(-tokens // BLOCK_TOKENS)
    if not isinstance(ids, list) or len(ids) != blocks:
        got = f"{len(ids)} ids" if isinstance(ids, list) else shown(ids)
        text = f"expected {blocks} whole numbers, one for every {BLOCK_TOKENS} of {tokens} tokens"
        raise ScenarioError(f"{line.path}:{line.number}: hash_ids: got {got}, {text}")
    if not all(type(i) is int and i >= 0 for i in ids):
        raise line.bad("hash_ids", "whole numbers >= 0")
    return tuple(ids)


def mooncake(path: Path, limit: int | None = None) -> list[Arrival]:
    """Mooncake's traces. A hash id stands for a 512-token block of the prompt and everything before it."""
    rows: list[Arrival] = []
    with text(path) as file:
        for line in islice(lines(path, file), limit):
            now, prompt = line.milliseconds("timestamp"), line.count("input_length")
            if rows and now < rows[-1].arrival_ns:
                raise line.bad("timestamp", f"not less than in the row above ({rows[-1].arrival_ns // 1_000_000})")
            rows.append(Arrival(now, prompt, line.count("output_length"), _hash_ids(line, prompt)))
    _not_empty(path, rows)
    return rows


def agentic(path: Path, limit: int | None = None) -> list[Conversation]:
    """Sessions of aiperf's agentic traces, at most `limit`, in order of their first lines.

    `input_length` counts the tokens that a turn adds to the conversation, and `hash_ids` names the 512-token blocks of
    these new tokens, the last one short. A first turn (it has `timestamp`, in ms, and `group_id`) is chained from the
    start of the prompt: all sessions share their first blocks (tools and system prompt), sessions of one `group_id`
    the next ones (a repository), and the rest is the session's own. Later turns (they have `delay`, in ms after the
    turn before has ended) share no id with anything.
    """
    firsts: dict[str, int] = {}
    turns: dict[str, list[Turn]] = {}
    with text(path) as file:
        for line in lines(path, file):
            name = line.values.get("session_id")
            if not isinstance(name, str) or not name:
                raise line.bad("session_id", "text")
            if name not in firsts:
                if len(firsts) == limit:
                    continue
                firsts[name], turns[name] = line.milliseconds("timestamp"), []
            turns[name].append(_turn(line, first=not turns[name]))
    sessions = [Conversation(name, arrival, tuple(turns[name])) for name, arrival in firsts.items()]
    _not_empty(path, sessions)
    return sessions


def _turn(line: JsonLine, first: bool) -> Turn:
    new = line.count("input_length")
    delay = 0 if first else line.milliseconds("delay")
    return Turn(new, line.count("output_length"), _hash_ids(line, new), delay)
