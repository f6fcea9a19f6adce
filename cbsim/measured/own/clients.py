"""The file that a client wrote of its measurements: its requests one by one, or their distributions.

A file is recognised by what is in it. aiperf writes a line a request (profile_export.jsonl) and statistics
(profile_export_aiperf.json); `vllm bench serve --save-result` one JSON object, with `--save-detailed` with
lists of an entry a request; GuideLLM one of benchmarks, each with its requests; inference-perf a list of requests
(per_request_lifecycle_metrics.json). A CSV file has a row a request. All times are in the client's seconds.

A folder is that of `vllm bench sweep`, with a file of vllm bench a run (BENCH--NAME/run=0.json), or of inference-perf,
whose files of stages say how many of the requests belong to each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import AfterValidator, AliasChoices, AliasPath, Field, ValidationError, model_validator

from cbsim.draw.chart import Floats
from cbsim.errors import RunError
from cbsim.files import read_json, read_text
from cbsim.measured.own import iterations
from cbsim.metrics import metrics
from cbsim.record.tables import Ints
from cbsim.scenario.documents import wording
from cbsim.scenario.fields import Form, complaint
from cbsim.scenario.rows import CsvTable, open_text

MEASURES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}
STATISTICS = ("mean", "p50", "p99")
KNOWN = "what aiperf, vllm bench serve, GuideLLM or inference-perf writes, a CSV of requests, or vLLM's iterations"
MOST_BYTES = 1_000_000_000
LONGEST = 1_000_000_000  # tokens of a prompt or an output
MOST = 1e19  # the limit of any number: nanoseconds since 1970 stay below it for centuries
UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0}

Distribution = Mapping[str, float]
"""A mapping from statistic to seconds; unknown statistics are absent."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A request, in seconds of the client's clock, NaN for what is not known.

    `key` is its name at the server, "" if the client does not know; `number` its index among all that were issued;
    `load` the name of the benchmark that it is part of, "" if there is one only, which may be repeated. `gaps_s` are
    those between chunks. `failed` is why it did not succeed, "" if it did.
    """

    key: str = ""
    number: int = 0
    start_s: float = math.nan
    ttft_s: float = math.nan
    tpot_s: float = math.nan
    e2e_s: float = math.nan
    prompt_tokens: float = math.nan
    output_tokens: float = math.nan
    gaps_s: Sequence[float] = ()
    load: str = ""
    cached_tokens: float = math.nan  # of the prompt, found in a prefix cache
    repeat: int = 0
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Client:
    """The content of one file. `requests` are those that succeeded, None if it has `statistics` only; `lost` those that
    did not, as far as it lists them. `model` is "" if it names none; `users` are the numbers of users of closed loops
    by load, as far as it states them.

    `numbered`: whether the server knows requests by a prefix of the client's and their `number`. Tokens are sums over
    requests that succeeded, NaN if they are not known.
    """

    path: Path
    tool: str
    succeeded: int
    failed: int
    prompt_tokens: float
    output_tokens: float
    requests: Sequence[Measured] | None = None
    lost: Sequence[Measured] = ()
    numbered: bool = False
    statistics: Mapping[str, Distribution] = field(default_factory=dict)
    model: str = ""
    users: Mapping[str, int] = field(default_factory=dict)

    @property
    def issued(self) -> int:
        return self.succeeded + self.failed

    def values(self, measure: str) -> Floats:
        """Return a measure's values of all requests that succeeded; none if the file does not list them."""
        requests = self.requests or ()
        if measure == "itl_s":
            return np.array([gap for request in requests for gap in request.gaps_s], dtype=np.float64)
        values = np.array([getattr(request, measure) for request in requests], dtype=np.float64)
        return values[np.isfinite(values)]

    def distribution(self, measure: str) -> Distribution:
        """Return a measure's distribution over all requests that succeeded; {} if it is not known."""
        return self.statistics.get(measure, {}) if self.requests is None else distribution(self.values(measure))


def distribution(values: Floats, counts: Ints | None = None) -> Distribution:
    """Return mean and percentiles of values, each occurring `counts` times (None: once); {} without values."""
    whole = metrics.distribution(values, counts)
    return {name: whole[name] for name in STATISTICS} if whole["n"] else {}


def client(path: Path, where: Mapping[str, str] = MappingProxyType({})) -> Client:
    """Read a client's file; `where` chooses rows of a CSV file by its columns. Raises RunError."""
    tabled = path.suffix in (".csv", ".gz")
    if where and not tabled:
        raise RunError(f"--where: chooses rows of CSV files; {path} is none", file=path)
    made = _csv(path, where) if tabled else _recognised(path)
    if not made.succeeded and not made.lost:
        raise RunError(f"{path}: no request in it has succeeded, or is chosen by --where", file=path)
    return made


def _recognised(path: Path) -> Client:
    content = read_text(path, RunError, MOST_BYTES)
    value, first = _parsed(content), _parsed(content.lstrip().partition("\n")[0])
    if _has(first, "metadata", "metrics") and not _has(first["metadata"], "guidellm_version"):
        return _aiperf_lines(path, content)
    if _has(value, "aiperf_version"):
        return _aiperf_statistics(path, value)
    if _has(value, *VLLM_KEYS):
        return _vllm(path, value)
    if _has(value, "metadata") and _has(value["metadata"], "guidellm_version"):
        return _guidellm(path, value)
    if isinstance(value, list) and value and _has(value[0], "start_time", "end_time"):
        return _inference_perf(path, value)
    if iterations.ITERATION.search(content):
        return _listed(path, "vLLM's log", [_timed(**each) for each in iterations.requests(path, content)], 0)
    if _has(first, *VLLM_KEYS):
        raise RunError(f"{path}: holds several results, must be 1: write without --append-result", file=path)
    if value is None and content.lstrip()[:1] in ("{", "["):
        raise RunError(f"{path}: is not whole: it begins as JSON and does not end so; was it cut off?", file=path)
    raise RunError(f"{path}: expected {KNOWN}; it is none of these", file=path)


def clients(path: Path, where: Mapping[str, str] = MappingProxyType({})) -> list[Client]:
    """Read a client's file, or all files of a folder that one wrote, with their requests one by one and on one clock.
    Raises RunError, also if they are of several servers or models.
    """
    files = [path]
    if path.is_dir():
        files = sorted([*path.rglob("run=*.json"), *path.glob("per_request_lifecycle_metrics.json")])
        names = [each.parent.name.partition("-BENCH-")[0] for each in files if "SERVE-" in each.parent.name]
        _only(path, "server", names, "name one of its folders")
        if not files:
            raise RunError(f"{path}: holds no run=0.json of `vllm bench sweep`, nor what inference-perf writes")
    read = [client(each, where) for each in files]
    for each in read:
        _check_times(each.path, each.requests)
    _only(path, "model", [each.model for each in read])
    return read


def _only(path: Path, noun: str, names: Iterable[str], remedy: str = "must be 1") -> str:
    """Return the only one of these names, "" for none. Raises RunError if there are several."""
    known = sorted({*names} - {""})
    if len(known) > 1:
        shown = f"{', '.join(known[:4])}{', ...' if len(known) > 4 else ''}"
        raise RunError(f"{path}: is of {len(known)} {noun}s ({shown}); {remedy}", file=path)
    return "".join(known)


SLOWEST_S, APART_S, FACTOR = 10.0, 1e6, 300.0
"""The most seconds a token, the longest pause, and how much slower than the median a twentieth of requests may be."""


def _check_times(path: Path, requests: Sequence[Measured] | None) -> None:
    """Raise RunError unless a file lists its requests with times of one clock and one unit."""
    if requests is None:
        hint = " (vllm bench: --save-detailed; aiperf: profile_export.jsonl)"
        raise RunError(f"{path}: has statistics only, expected its requests one by one{hint}", file=path)
    names = ("start_s", "ttft_s", "e2e_s", "prompt_tokens", "output_tokens")
    known = {name: np.array([getattr(each, name) for each in requests], dtype=np.float64) for name in names}
    start, ttft, e2e, _, tokens = known.values()
    counts = {name: known[name] for name in names[3:]}
    rules = [(name, np.isfinite(values), "known") for name, values in known.items()]
    rules += [
        ("ttft_s", ttft > 0, "> 0"),
        ("e2e_s", e2e >= ttft * (1 - 1e-9), "at least ttft_s: times of two clocks or units"),
    ]
    whole = f"a whole number from 1 to {LONGEST:,}"
    rules += [(name, (values >= 1) & (values <= LONGEST) & (values % 1 == 0), whole) for name, values in counts.items()]
    for name, right, bound in rules:
        if (wrong := np.flatnonzero(~right)).size:
            got = f"got {known[name][wrong[0]]:g} of request {requests[wrong[0]].number}"
            raise RunError(f"{path}: {name}: {got}, must be {bound}", file=path)
    if (gaps := np.diff(np.sort(start))).max(initial=0.0) > APART_S:
        raise RunError(f"{path}: start_s: two requests are {gaps.max():.3g} s apart: times of two clocks", file=path)
    each = ((e2e - ttft) / np.maximum(tokens - 1, 1))[tokens > 1]
    if each.size and not 0 < np.median(each) <= SLOWEST_S:
        hint = "are these milliseconds?" if np.median(each) else "was nothing streamed?"
        raise RunError(f"{path}: got {np.median(each):.3g} s a token in the median: {hint}", file=path)
    if each.size and np.quantile(each, 0.95) > FACTOR * np.median(each) > 0:
        slow = f"a twentieth of the requests takes {np.quantile(each, 0.95):.3g} s a token or more"
        raise RunError(f"{path}: {slow}, the median {np.median(each):.3g} s: times of two units", file=path)


def _parsed(content: str) -> Any:
    """Return the JSON value of the content, without fields that are null; None if it is none."""
    try:
        return json.loads(content, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})
    except (ValueError, RecursionError):
        return None


def _has(value: Any, *keys: str) -> bool:
    return isinstance(value, dict) and value.keys() >= {*keys}


def _listed(path: Path, tool: str, requests: Sequence[Measured], failed: int, **known: Any) -> Client:
    """Return the client whose file lists these requests."""
    prompt, output = (sum(getattr(each, name) for each in requests) for name in ("prompt_tokens", "output_tokens"))
    return Client(path, tool, len(requests), failed, prompt, output, requests, **known)


F = TypeVar("F", bound=Form)


def checked(form: type[F], value: Any, path: Path, where: str = "") -> F:
    """Return an object as declared; `where` is its path in the file. Raises RunError."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        entry: dict[str, Any] = dict(error.errors(include_url=False)[0])
        names = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in entry["loc"])
        names += "." + entry.get("ctx", {}).get("field", "")
        raise RunError(f"{path}: {(where + names.strip('.')).rstrip('.')}: {wording(entry)}", file=path) from None


def _at(*paths: str, default: Any = math.nan) -> Any:
    """Declare what an object has at the first of these paths, such as `info.times.0`; `...`: it must have one."""
    parts = [[int(name) if name.lstrip("-").isdecimal() else name for name in path.split(".")] for path in paths]
    return Field(default, validation_alias=AliasChoices(*(AliasPath(str(first), *rest) for first, *rest in parts)))


def _timed(*, ttft_s: float, e2e_s: float, output_tokens: float, **known: Any) -> Measured:
    """Return a request whose TPOT follows from its other times."""
    tpot_s = (e2e_s - ttft_s) / (output_tokens - 1) if output_tokens > 1 else math.nan
    return Measured(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s, output_tokens=output_tokens, **known)


Number = Annotated[float, Field(ge=0, le=MOST)]
Whole = Annotated[float, Field(ge=0, le=MOST, multiple_of=1)]
Unit = Literal["ns", "us", "ms", "sec", "s"]
Nanoseconds = Annotated[Number, AfterValidator(lambda value: value * UNITS_S["ns"])]
Milliseconds = Annotated[Number, AfterValidator(lambda value: value * UNITS_S["ms"])]

# aiperf: its `inter_token_latency` is TPOT here, its `inter_chunk_latency` ITL. Tokens are those that the server
# counted, if the client knows them, else its own count. Requests of a warm-up are left out.


class _Amount(Form):
    value: Number
    unit: Unit


class _Amounts(Form):
    value: list[Number]
    unit: Unit


class _Quantiles(Form):
    avg: Number
    p50: Number
    p99: Number
    unit: Unit

    def seconds(self) -> Distribution:
        of = zip(STATISTICS, (self.avg, self.p50, self.p99), strict=True)
        return {name: value * UNITS_S[self.unit] for name, value in of}


Time = Annotated[_Amount, AfterValidator(lambda of: of.value * UNITS_S[of.unit])]
Times = Annotated[_Amounts, AfterValidator(lambda of: [value * UNITS_S[of.unit] for value in of.value])]
Summary = Annotated[_Quantiles, AfterValidator(_Quantiles.seconds)]


class _AiperfLine(Form):
    phase: str = _at("metadata.benchmark_phase", default="profiling")
    cancelled: Any = _at("metadata.was_cancelled", default=None)
    error: Any = None
    metrics: dict[str, Any]
    key: str = _at("metadata.x_request_id", default="")
    start_s: Nanoseconds = _at("metadata.request_start_ns")
    ttft_s: Time = _at("metrics.time_to_first_token")
    tpot_s: Time = _at("metrics.inter_token_latency")
    e2e_s: Time = _at("metrics.request_latency")
    prompt_tokens: Number = _at("metrics.usage_prompt_tokens.value", "metrics.input_sequence_length.value")
    output_tokens: Number = _at("metrics.usage_completion_tokens.value", "metrics.output_sequence_length.value")
    gaps_s: Times = _at("metrics.inter_chunk_latency", default=())


class _AiperfSummary(Form):
    succeeded: Whole = _at("request_count.avg", default=...)
    ended: Whole = _at("completed_request_count.avg", default=0)
    prompt_tokens: Number = _at("usage_prompt_tokens.sum", "input_sequence_length.sum")
    output_tokens: Number = _at("usage_completion_tokens.sum", "output_sequence_length.sum")
    ttft_s: Summary = _at("time_to_first_token", default=None)
    tpot_s: Summary = _at("inter_token_latency", default=None)
    itl_s: Summary = _at("inter_chunk_latency", default=None)
    e2e_s: Summary = _at("request_latency", default=None)


def _aiperf_lines(path: Path, content: str) -> Client:
    rows = [(f"line {at}: ", _parsed(row)) for at, row in enumerate(content.splitlines(), 1) if row.strip()]
    lines = [checked(_AiperfLine, value, path, where) for where, value in rows]
    issued = [line for line in lines if line.phase == "profiling"]
    measured = [
        Measured(number=at, **{name: value for name, value in line if name in Measured.__dataclass_fields__})
        for at, line in enumerate(issued)
        if line.error is None and not line.cancelled
    ]
    return _listed(path, "aiperf", measured, len(issued) - len(measured))


def _aiperf_statistics(path: Path, value: Mapping[str, Any]) -> Client:
    of = checked(_AiperfSummary, value, path)
    statistics = {name: values for name in MEASURES if (values := getattr(of, name)) is not None}
    counts = int(of.succeeded), max(int(of.ended - of.succeeded), 0)
    return Client(path, "aiperf", *counts, of.prompt_tokens, of.output_tokens, statistics=statistics)


# vllm bench serve: requests are in the order in which they were issued, the failed ones among them, whose error is not
# empty. They carry the header X-Request-Id: the value of `--request-id-prefix`, which the file does not have, and their
# number.

VLLM_KEYS = ("total_output_tokens", "completed", "request_throughput")
VLLM_TIMES = {"ttft_s": "ttft", "tpot_s": "tpot", "itl_s": "itl", "e2e_s": "e2el"}
VLLM_STATISTICS = {"mean": "mean", "p50": "median", "p99": "p99"}
LISTS = ("ttfts", "itls", "input_lens", "output_lens", "errors")


class _VllmSums(Form):
    completed: Whole
    failed: Whole = 0
    total_input_tokens: Number
    total_output_tokens: Number


class _VllmLists(Form):
    model_id: str = ""
    max_concurrency: Whole = 0
    request_rate: Any = "inf"
    errors: list[Any]
    ttfts: list[Number]
    itls: list[list[Number]]
    input_lens: list[Number]
    output_lens: list[Number]
    start_times: list[Number] | None = None
    latencies: list[Number] | None = None

    @model_validator(mode="after")
    def _as_long(self) -> Self:
        for name in (*LISTS, "start_times", "latencies"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.errors):
                raise complaint(f"got {len(values):,} entries, expected {len(self.errors):,}, as in errors", name)
        return self


def _vllm(path: Path, value: Mapping[str, Any]) -> Client:
    if any(name in value for name in LISTS):
        return _vllm_requests(path, checked(_VllmLists, value, path))
    sums = checked(_VllmSums, value, path)
    statistics: dict[str, dict[str, float]] = {}
    for (measure, name), (ours, theirs) in product(VLLM_TIMES.items(), VLLM_STATISTICS.items()):
        key = f"{theirs}_{name}_ms"
        if key in value:
            time = checked(_Amount, {"value": value[key], "unit": "ms"}, path, f"{key}: ")
            statistics.setdefault(measure, {})[ours] = time.value / 1e3
    counts = int(sums.completed), int(sums.failed)
    tokens = sums.total_input_tokens, sums.total_output_tokens
    return Client(path, "vllm bench serve", *counts, *tokens, statistics=statistics)


def _vllm_requests(path: Path, of: _VllmLists) -> Client:
    starts = of.start_times or [math.nan] * len(of.errors)
    ends = of.latencies or [first + sum(gaps) for first, gaps in zip(of.ttfts, of.itls, strict=True)]
    names = ("start_s", "ttft_s", "e2e_s", "gaps_s", "prompt_tokens", "output_tokens")
    rows = enumerate(zip(starts, of.ttfts, ends, of.itls, of.input_lens, of.output_lens, strict=True))
    measured = [_timed(number=at, **dict(zip(names, row, strict=True))) for at, row in rows if not of.errors[at]]
    users = {"": int(of.max_concurrency)} if of.max_concurrency and of.request_rate == "inf" else {}
    more: Any = {"numbered": True, "model": of.model_id, "users": users}
    return _listed(path, "vllm bench serve", measured, len(of.errors) - len(measured), **more)


# GuideLLM: `response_id` is the id of the response to a request. Its `inter_token_latency_ms` is TPOT here; its
# `time_per_output_token_ms` includes the first token and is not read. It records no times of single tokens.


class _GuidellmRequest(Form):
    key: str = _at("response_id", default="")
    start_s: Number = _at("request_start_time")
    ttft_s: Milliseconds = _at("time_to_first_token_ms")
    tpot_s: Milliseconds = _at("inter_token_latency_ms")
    e2e_s: Number = _at("request_latency", default=...)
    prompt_tokens: Number = math.nan
    output_tokens: Number = math.nan


class _GuidellmRun(Form):
    successful: list[_GuidellmRequest] = _at("requests.successful", default=...)
    errored: list[Any] = _at("requests.errored", default=())
    incomplete: list[Any] = _at("requests.incomplete", default=())


class _Guidellm(Form):
    benchmarks: list[_GuidellmRun]


def _guidellm(path: Path, value: Any) -> Client:
    """Return all benchmarks of a file together."""
    measured: list[Measured] = []
    failed, benchmarks = 0, checked(_Guidellm, value, path).benchmarks
    for at, run in enumerate(benchmarks):
        load = f"benchmark {at}" if len(benchmarks) > 1 else ""
        for number, each in enumerate(run.successful, len(measured) + failed):
            measured.append(Measured(number=number, load=load, **dict(each)))
        failed += len(run.errored) + len(run.incomplete)
    return _listed(path, "GuideLLM", measured, failed)


# inference-perf: times of the clock that its requests share. Newer versions have what is known of the answer in
# `response_metrics`, with the server's own count of tokens. Stages follow each other, and each file of one counts its.

STAGES = "stage_*_lifecycle_metrics.json"


def _answered(*names: str) -> list[str]:
    return [f"info.{part}{name}" for name in names for part in ("response_metrics.", "")]


class _Lifecycle(Form):
    start_s: Number = _at("start_time", default=...)
    first_s: Number = _at(*_answered("output_token_times.0"))
    last_s: Number = _at(*_answered("output_token_times.-1"), "end_time", default=...)
    prompt_tokens: Number = _at(*_answered("server_usage.prompt_tokens", "input_tokens"))
    output_tokens: Number = _at(*_answered("server_usage.completion_tokens", "output_tokens"))
    request: Any = None
    info: Any = None
    error: Any = None


class _Stage(Form):
    count: Whole = _at("load_summary.count", default=...)


def _inference_perf(path: Path, rows: Sequence[Any]) -> Client:
    """Return the requests in order of start, by stages if the files of these beside it count as many."""
    each = [checked(_Lifecycle, row, path, f"[{at}].") for at, row in enumerate(rows)]
    each.sort(key=lambda row: row.start_s)
    stages = sorted(path.parent.glob(STAGES), key=lambda file: (len(file.name), file.name))
    counts = [int(checked(_Stage, read_json(file, RunError), file).count) for file in stages]
    names = [f"stage {at}" for at, count in enumerate(counts) for _ in range(count)]
    names = names if len(names) == len(each) else [""] * len(each)
    bodies = [_parsed(str(row.request)) for row in each]
    model = _only(path, "model", (str(body["model"]) for body in bodies if _has(body, "model")))
    measured = [
        _timed(
            ttft_s=row.first_s - row.start_s,
            e2e_s=row.last_s - row.start_s,
            load=names[at],
            **row.model_dump(include={"start_s", "prompt_tokens", "output_tokens"}),
            number=at,
        )
        for at, row in enumerate(each)
        if row.error is None and row.info
    ]
    return _listed(path, "inference-perf", measured, len(each) - len(measured), model=model)


# A CSV file: a column of each time in seconds (start_s, ttft_s, e2e_s, or generation_s from the first token to the
# last), or with _ms, _us or _ns. Columns that name a server have one value; those that name a load are its name.

TIMES = {"start_s": ("start", "launch", "arrival"), "ttft_s": ("ttft",), "e2e_s": ("e2e", "latency")}
TIMES |= {"generation_s": ("generation",)}
COUNTS = {"prompt_tokens": ("prompt_tokens", "input_tokens"), "cached_tokens": ("cached_tokens",)}
COUNTS |= {"output_tokens": ("output_tokens", "generation_tokens", "completion_tokens"), "repeat": ("repeat",)}
COLUMNS = {f"{n}_{u}": (field, s) for field, names in TIMES.items() for n in names for u, s in UNITS_S.items()}
COLUMNS |= {name: (field, 1) for field, names in COUNTS.items() for name in names}
OPTIONAL = {"cached_tokens", "repeat"}
SERVERS, LOADS = ("run", "server", "url", "host", "model"), ("load", "scenario", "qps", "rate_per_s", "users")
FAILED, NOT_FAILED = ("failed", "error"), ("", "0", "false")


def _csv(path: Path, where: Mapping[str, str]) -> Client:
    """Return the requests of the rows that `where` chooses, in order of start. Raises ScenarioError or RunError."""
    with open_text(path) as file:
        table = CsvTable(path, file)
        columns = _columns(path, table.header)
        names = [name for name in (*SERVERS, *LOADS, *FAILED) if name in table.header]
        if unknown := where.keys() - names:
            raise RunError(f"{path}: --where: no column {min(unknown)!r}; expected one of {', '.join(names)}")
        table.pick([*columns, *names])
        chosen, rows = list[Mapping[str, str]](), list[Measured]()
        for cells in table.rows(None):
            labels = dict(zip(names, cells[len(columns) :], strict=True))
            if all(f"/{labels[column]}".endswith(f"/{value}") for column, value in where.items()):
                chosen.append(labels)
                rows.append(_row(table, cells, [*columns.values()], labels))
    for name in SERVERS:  # the last one is the model
        model = _only(path, name, (of.get(name, "") for of in chosen), f"choose one with --where {name}=")
    lost = [each for each in rows if each.failed]
    measured = sorted((each for each in rows if not each.failed), key=lambda each: each.start_s)
    users = {_load(of): int(of["users"]) for of in chosen if re.fullmatch(r"[1-9]\d{0,8}", of.get("users", ""))}
    return _listed(path, "CSV", measured, len(lost), model=model, users=users, lost=lost)


def _columns(path: Path, header: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Return the field that each column is, and what its numbers are multiplied by. Raises RunError."""
    columns: dict[str, tuple[str, float]] = {}
    for name in header:
        role, scale = COLUMNS.get(name, ("", 0))
        if both := [each for each, (of, _) in columns.items() if of == role]:
            raise RunError(f"{path}:1: {role} is in 2 columns ({both[0]}, {name}), must be in 1", file=path)
        if role:
            columns[name] = role, scale
    known = {field for field, _ in columns.values()} | OPTIONAL
    either = known | ({"e2e_s"} if "generation_s" in known else {"generation_s"})
    if lacking := [field for field in (*TIMES, *COUNTS) if field not in either]:
        raise RunError(f"{path}:1: no column {', '.join(lacking)}; it has {', '.join(header) or 'none'}", file=path)
    return columns


def _load(labels: Mapping[str, str]) -> str:
    return labels.get("load") or " ".join(labels[name] for name in LOADS if name in labels)


def _row(
    table: CsvTable, cells: Sequence[str], fields: Sequence[tuple[str, float]], labels: Mapping[str, str]
) -> Measured:
    """Return the request of a row; a cell may be empty if it failed, or where the file need not have the column."""
    failed = next((labels[name] for name in FAILED if labels.get(name, "").strip().lower() not in NOT_FAILED), "")
    of: dict[str, Any] = dict.fromkeys(("start_s", "ttft_s", "prompt_tokens", "output_tokens"), math.nan)
    for at, (name, scale) in enumerate(fields):
        if cells[at] or not (failed or name in OPTIONAL):
            of[name] = table.number(at, cells[at]) * scale
    after_s = of.pop("generation_s", math.nan)
    return _timed(**{"e2e_s": of["ttft_s"] + after_s} | of, number=table.line, load=_load(labels), failed=failed)
