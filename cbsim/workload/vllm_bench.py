"""Readers of recorded vLLM runs, in the format that LLMServingSim's bench writes and our data pack keeps.

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
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from cbsim.errors import ScenarioError
from cbsim.scenario import catalog, demand
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Count, Form, Pair, complaint
from cbsim.scenario.rows import CsvTable, check_not_empty, lines, open_text
from cbsim.workload.requests import Workload
from cbsim.workload.traces import Arrival, timed

BLOCK_TOKENS = 16
TIMES = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
SERIES = ("t", "running", "waiting", "kv_cache_pct")


class Taken(NamedTuple):
    """The recorded times of a request, ns since the run's first one was queued. Its lengths were the requested ones."""

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
    """Read the first `limit` requests of the file, or all. Ids count from 0, in order. Raises ScenarioError."""
    rows: list[Arrival] = []
    with open_text(path) as file:
        for number, line in enumerate(islice(lines(path, file), limit)):
            sent = line.checked(BenchLine)
            if sent.id != number:
                raise line.bad("id", f"{number}, the number of the row")
            ids = tuple(block for first, count in sent.prompt_block_runs for block in range(first, first + count))
            sizes = round(sent.arrival_ns), sent.input_toks, sent.output_toks
            rows.append(Arrival(*sizes, ids, str(number), block_tokens=BLOCK_TOKENS))
    check_not_empty(path, rows)
    return rows


class BenchLine(Form):
    """A request of the workload."""

    id: int
    arrival_ns: Annotated[float, Field(ge=0)]
    input_toks: Count
    output_toks: Count
    prompt_block_runs: list[Pair]

    @model_validator(mode="after")
    def _id_for_each_block(self) -> Self:
        full, ids = self.input_toks // BLOCK_TOKENS, sum(count for _, count in self.prompt_block_runs)
        if ids != full:
            expected = f"those of {full} blocks, one for every {BLOCK_TOKENS} of {self.input_toks} tokens"
            raise complaint(f"got {ids:,} ids, expected {expected}", "prompt_block_runs")
        return self


class RecordedLine(Form):
    """A request of the run; times in seconds on the clock of the engine."""

    request_id: str
    input_toks: int
    output_toks: int
    queued_ts: Annotated[float, Field(ge=0)]
    scheduled_ts: Annotated[float, Field(ge=0)]
    first_token_ts: Annotated[float, Field(ge=0)]
    last_token_ts: Annotated[float, Field(ge=0)]


def recorded(path: Path, arrivals: Sequence[Arrival]) -> list[Taken]:
    """Read the recorded times of the requests `arrivals`, in their order. Raises ScenarioError for one that is missing,
    was never finished, or had other lengths.
    """
    by_name: dict[str, Document] = {}
    with open_text(path) as file:
        for line in lines(path, file):
            name = line.data.get("request_id")
            if not isinstance(name, str) or name in by_name:
                raise line.bad("request_id", "text, each once")
            by_name[name] = line
    for row in arrivals:
        if f"bench-{row.id}" not in by_name:
            raise ScenarioError(f"{path}: no request_id bench-{row.id}, which the workload has")
    rows = [_times(by_name[f"bench-{row.id}"], row) for row in arrivals]
    start = min(row[0] for row in rows)
    return [Taken(*(round((at - start) * 1e9) for at in row)) for row in rows]


def _times(line: Document, row: Arrival) -> list[float]:
    request = line.checked(RecordedLine)
    for field, tokens in (("input_toks", row.prompt_tokens), ("output_toks", row.output_tokens)):
        if getattr(request, field) != tokens:
            raise line.bad(field, f"{tokens}, as in the workload")
    times: list[float] = [getattr(request, field) for field in TIMES]
    for (before, start), (after, end) in pairwise(zip(TIMES, times, strict=True)):
        if end < start:
            raise line.bad(after, f"a time not before {before} ({start})")
    return times


def series(path: Path) -> list[Second]:
    """Read the recorded time series. Raises ScenarioError."""
    with open_text(path) as file:
        table = CsvTable(path, file, SERIES)
        rows = [[table.number(i, cell) for i, cell in enumerate(row)] for row in table.rows(None)]
    check_not_empty(path, rows, "rows")
    seconds = [Second(at, running, waiting, percent / 100) for at, running, waiting, percent in rows]
    if any(after.at_s < before.at_s for before, after in pairwise(seconds)):
        raise ScenarioError(f"{path}: t: goes back, expected rows in order of time")
    return seconds


def workload(form: demand.VllmBench) -> Workload:
    rows = requests(catalog.data(form.path), form.limit)
    if form.recorded is not None:
        taken = recorded(catalog.data(form.recorded, "workload.recorded"), rows)
        rows = [row._replace(arrival_ns=times.queued_ns) for row, times in zip(rows, taken, strict=True)]
    return timed(rows, form.time_scale)
