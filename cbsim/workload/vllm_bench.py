"""Readers of recorded vLLM runs, in the form that LLMServingSim's bench writes and our data pack keeps.

<workload>.lengths.jsonl   id, arrival_ns, input_toks, output_toks, prompt_block_runs: [[first id, how many], ...] of
the prompt's full blocks of 16 tokens; equal ids have equal text before and in them
requests.jsonl             request_id "bench-<id>", input_toks, output_toks, queued_ts, scheduled_ts,
first_token_ts, last_token_ts: seconds on the clock of the engine
timeseries.csv             t, running, waiting, kv_cache_pct: one row a second
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.rows import CsvTable, JsonLine, lines, text
from cbsim.workload.traces import Arrival

BLOCK_TOKENS = 16
TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
SERIES = ("t", "running", "waiting", "kv_cache_pct")


class Taken(NamedTuple):
    """What the run recorded of a request, ns since its first request was queued. Tokens were those asked for."""

    queued_ns: int
    scheduled_ns: int
    first_token_ns: int
    last_token_ns: int


class Second(NamedTuple):
    """A row of the time series: seconds since the engine's first record, requests, share of the KV cache in use."""

    at_s: float
    running: float
    waiting: float
    kv_use: float


def requests(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests of the file, or all. Ids count from 0, in order. Raises ScenarioError."""
    with text(path) as file:
        rows = [_arrival(line, number) for number, line in enumerate(islice(lines(path, file), limit))]
    if not rows:
        raise ScenarioError(f"{path}: holds no requests")
    return rows


def _arrival(line: JsonLine, number: int) -> Arrival:
    if line.values.get("id") != number:
        raise line.bad("id", f"{number}, the number of the row")
    prompt = line.count("input_toks")
    arrival = round(line.real("arrival_ns"))
    return Arrival(arrival, prompt, line.count("output_toks"), _blocks(line, prompt), str(number))


def _blocks(line: JsonLine, prompt_tokens: int) -> tuple[int, ...]:
    runs, full = line.values.get("prompt_block_runs"), prompt_tokens // BLOCK_TOKENS
    try:
        pairs = [(first, count) for first, count in runs]  # type: ignore[union-attr]
        fits = sum(count for _, count in pairs) == full and all(min(pair) >= 0 for pair in pairs)
        ids = tuple(block for first, count in pairs for block in range(first, first + count)) if fits else ()
    except (TypeError, ValueError):
        raise line.bad("prompt_block_runs", "pairs of whole numbers") from None
    if not fits:
        expected = f"ids >= 0 of {full} blocks, one for every {BLOCK_TOKENS} of {prompt_tokens} tokens"
        raise line.bad("prompt_block_runs", expected)
    return ids


def recorded(path: Path, arrivals: Sequence[Arrival]) -> list[Taken]:
    """What a run recorded of the requests `arrivals`, in their order. Raises ScenarioError for one that is missing, was
    never finished, or had other lengths.
    """
    by_name: dict[str, JsonLine] = {}
    with text(path) as file:
        for line in lines(path, file):
            name = line.values.get("request_id")
            if not isinstance(name, str) or name in by_name:
                raise line.bad("request_id", "text, each once")
            by_name[name] = line
    rows = []
    for row in arrivals:
        name = f"bench-{row.id}"
        if name not in by_name:
            raise ScenarioError(f"{path}: no request_id {name}, which the workload has")
        rows.append(_times(by_name[name], row))
    start = min(row[0] for row in rows)
    return [Taken(*(round((at - start) * 1e9) for at in row)) for row in rows]


def _times(line: JsonLine, row: Arrival) -> list[float]:
    for field, wanted in (("input_toks", row.prompt_tokens), ("output_toks", row.output_tokens)):
        if line.values.get(field) != wanted:
            raise line.bad(field, f"{wanted}, as in the workload")
    times = [line.real(field) for field in TIMES]
    for (before, start), (after, end) in pairwise(zip(TIMES, times, strict=True)):
        if end < start:
            raise line.bad(after, f"a time not before {before} ({start})")
    return times


def series(path: Path) -> list[Second]:
    """The recorded time series. Raises ScenarioError."""
    with text(path) as file:
        table = CsvTable(path, file, SERIES)
        rows = [[table.number(i, cell) for i, cell in enumerate(row)] for row in table.rows(None)]
    if not rows:
        raise ScenarioError(f"{path}: holds no rows")
    seconds = [Second(at, running, waiting, percent / 100) for at, running, waiting, percent in rows]
    if any(after.at_s < before.at_s for before, after in pairwise(seconds)):
        raise ScenarioError(f"{path}: t: goes back, expected rows in order of time")
    return seconds
