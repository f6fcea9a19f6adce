"""The file that a client wrote of its measurements: its requests one by one, or their distributions.

A file is recognised by what is in it. aiperf writes a line a request (profile_export.jsonl) and statistics
(profile_export_aiperf.json); `vllm bench serve --save-result` one JSON object, with `--save-detailed` with
lists of an entry a request; GuideLLM one of benchmarks, each with its requests. All times are in the client's seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from pydantic import Field, ValidationError, create_model, model_validator

from cbsim.draw.chart import Floats
from cbsim.errors import RunError
from cbsim.files import read_text
from cbsim.metrics import metrics
from cbsim.record.tables import Ints
from cbsim.scenario.documents import wording
from cbsim.scenario.fields import Form, complaint

MEASURES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}
STATISTICS = ("mean", "p50", "p99")
KNOWN = "what aiperf (JSONL, JSON), vllm bench serve (JSON) or GuideLLM (JSON) writes"
MOST_BYTES = 1_000_000_000
MOST = 1e19  # the limit of any number: nanoseconds since 1970 stay below it for centuries
UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "sec": 1.0, "s": 1.0}

Distribution = Mapping[str, float]
"""A mapping from statistic to seconds; unknown statistics are absent."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A request that succeeded, in seconds of the client's clock, NaN for what the file lacks.

    `key` is its name at the server, "" if the client does not know; `number` its index among all that were issued.
    `gaps_s` are those between chunks.
    """

    key: str
    number: int
    start_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: float
    output_tokens: float
    gaps_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Client:
    """The content of one file. `requests` is None if it has `statistics` only.

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
    numbered: bool = False
    statistics: Mapping[str, Distribution] = field(default_factory=dict)

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


def client(path: Path) -> Client:
    """Read a client's file. Raises RunError naming file, field, value and what is allowed."""
    content = read_text(path, RunError, MOST_BYTES)
    value, first = _parsed(content), _parsed(content.lstrip().partition("\n")[0])
    if _has(first, "metadata", "metrics") and not _has(first["metadata"], "guidellm_version"):
        measured = _aiperf_lines(path, content)
    elif _has(value, "aiperf_version"):
        measured = _aiperf_statistics(path, value)
    elif _has(value, *VLLM_KEYS):
        measured = _vllm(path, value)
    elif _has(value, "metadata") and _has(value["metadata"], "guidellm_version"):
        measured = _guidellm(path, value)
    elif _has(first, *VLLM_KEYS):
        raise RunError(f"{path}: holds several results, must be 1: write without --append-result", file=path)
    else:
        raise RunError(f"{path}: expected {KNOWN}; it is none of these", file=path)
    if not measured.succeeded:
        raise RunError(f"{path}: no request in it has succeeded", file=path)
    return measured


def _parsed(content: str) -> Any:
    """Return the JSON value of the content; None if it is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _has(value: Any, *keys: str) -> bool:
    return isinstance(value, dict) and value.keys() >= {*keys}


def _listed(path: Path, tool: str, requests: Sequence[Measured], failed: int, *, numbered: bool = False) -> Client:
    """Return the client whose file lists these requests."""
    prompt, output = (sum(getattr(each, name) for each in requests) for name in ("prompt_tokens", "output_tokens"))
    return Client(path, tool, len(requests), failed, prompt, output, requests, numbered)


Number = Annotated[float, Field(ge=0, le=MOST)]
Whole = Annotated[float, Field(ge=0, le=MOST, multiple_of=1)]
Unit = Literal["ns", "us", "ms", "sec", "s"]
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


def _or_nan(value: float | None, scale: float = 1.0) -> float:
    return math.nan if value is None else value * scale


# Its `inter_token_latency` is TPOT here, its `inter_chunk_latency` ITL. Tokens are those that the server
# counted, if the client knows them, else its own count. Requests of a warm-up are left out.

AIPERF = {"ttft_s": "time_to_first_token", "tpot_s": "inter_token_latency"}
AIPERF |= {"itl_s": "inter_chunk_latency", "e2e_s": "request_latency"}
PROMPTS = ("usage_prompt_tokens", "input_sequence_length")
OUTPUTS = ("usage_completion_tokens", "output_sequence_length")
AIPERF_STATISTICS = {"mean": "avg", "p50": "p50", "p99": "p99"}


class _Time(Form):
    value: Number
    unit: Unit


class _Gaps(Form):
    value: list[Number]
    unit: Unit


class _Amount(Form):
    value: Number


def _metrics(name: str, time: type[Form], gaps: type[Form], tokens: type[Form]) -> type[Form]:
    """Return a form of all metrics that are read from aiperf; each is optional."""
    kinds = dict.fromkeys(AIPERF.values(), time) | {AIPERF["itl_s"]: gaps} | dict.fromkeys(PROMPTS + OUTPUTS, tokens)
    fields: dict[str, Any] = {field: (kind | None, None) for field, kind in kinds.items()}
    return create_model(name, __base__=Form, **fields)


_Metrics = _metrics("_Metrics", _Time, _Gaps, _Amount)


class _Metadata(Form):
    x_request_id: str | None = None
    request_start_ns: Number | None = None
    benchmark_phase: str = "profiling"
    was_cancelled: Any = None


class _Line(Form):
    metadata: _Metadata
    metrics: dict[str, Any]
    error: Any = None


def _aiperf_lines(path: Path, content: str) -> Client:
    measured: list[Measured] = []
    failed = 0
    for number, row in enumerate(content.splitlines(), 1):
        if not row.strip():
            continue
        line = checked(_Line, _parsed(row), path, f"line {number}: ")
        if line.metadata.benchmark_phase != "profiling":
            continue
        if line.error is not None or line.metadata.was_cancelled:
            failed += 1
        else:
            metrics = checked(_Metrics, line.metrics, path, f"line {number}: metrics.")
            measured.append(_aiperf_request(line.metadata, metrics, len(measured) + failed))
    return _listed(path, "aiperf", measured, failed)


def _aiperf_request(metadata: _Metadata, metrics: Any, number: int) -> Measured:
    times = (getattr(metrics, AIPERF[name]) for name in ("ttft_s", "tpot_s", "e2e_s"))
    ttft_s, tpot_s, e2e_s = (math.nan if time is None else time.value * UNITS_S[time.unit] for time in times)
    gaps = getattr(metrics, AIPERF["itl_s"])
    gaps_s = [gap * UNITS_S[gaps.unit] for gap in gaps.value] if gaps else ()
    prompt, output = (_first(metrics, names, "value") for names in (PROMPTS, OUTPUTS))
    key, start_s = metadata.x_request_id or "", _or_nan(metadata.request_start_ns, 1e-9)
    return Measured(key, number, start_s, ttft_s, tpot_s, e2e_s, prompt, output, gaps_s)


def _first(metrics: Any, names: Sequence[str], part: str) -> float:
    """Return a part of the first of these metrics that exists, else NaN."""
    return next((float(getattr(each, part)) for name in names if (each := getattr(metrics, name))), math.nan)


class _Statistics(Form):
    avg: Number
    p50: Number
    p99: Number
    unit: Unit


class _Total(Form):
    sum: Number


class _Count(Form):
    avg: Whole


class _Counts(Form):
    request_count: _Count
    completed_request_count: _Count | None = None


_Summary = _metrics("_Summary", _Statistics, _Statistics, _Total)


def _aiperf_statistics(path: Path, value: Mapping[str, Any]) -> Client:
    summary, counts = checked(_Summary, value, path), checked(_Counts, {"request_count": None} | dict(value), path)
    statistics = {
        measure: {ours: getattr(own, theirs) * UNITS_S[own.unit] for ours, theirs in AIPERF_STATISTICS.items()}
        for measure, name in AIPERF.items()
        if (own := getattr(summary, name))
    }
    prompt, output = (_first(summary, names, "sum") for names in (PROMPTS, OUTPUTS))
    count, ended = int(counts.request_count.avg), counts.completed_request_count
    failed = max(int(ended.avg) - count, 0) if ended else 0
    return Client(path, "aiperf", count, failed, prompt, output, statistics=statistics)


# Requests are in the order in which they were issued, the failed ones among them, whose error is not empty. They carry
# the header X-Request-Id: the value of `--request-id-prefix`, which the file does not have, and their number.

VLLM_KEYS = ("total_output_tokens", "completed", "request_throughput")
VLLM_TIMES = {"ttft_s": "ttft", "tpot_s": "tpot", "itl_s": "itl", "e2e_s": "e2el"}
VLLM_STATISTICS = {"mean": "mean", "p50": "median", "p99": "p99"}
LISTS = ("ttfts", "itls", "input_lens", "output_lens", "errors")


class _Sums(Form):
    completed: Whole
    failed: Whole = 0
    total_input_tokens: Number
    total_output_tokens: Number


class _Lists(Form):
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
        lists = checked(_Lists, value, path)
        measured = [_vllm_request(lists, number) for number, error in enumerate(lists.errors) if not error]
        return _listed(path, "vllm bench serve", measured, len(lists.errors) - len(measured), numbered=True)
    sums = checked(_Sums, value, path)
    statistics: dict[str, dict[str, float]] = {}
    for (measure, name), (ours, theirs) in product(VLLM_TIMES.items(), VLLM_STATISTICS.items()):
        key = f"{theirs}_{name}_ms"
        if key in value:
            time = checked(_Amount, {"value": value[key]}, path, f"{key}: ")
            statistics.setdefault(measure, {})[ours] = time.value / 1e3
    counts = int(sums.completed), int(sums.failed)
    tokens = sums.total_input_tokens, sums.total_output_tokens
    return Client(path, "vllm bench serve", *counts, *tokens, statistics=statistics)


def _vllm_request(lists: _Lists, number: int) -> Measured:
    first, gaps, tokens = lists.ttfts[number], lists.itls[number], lists.output_lens[number]
    e2e = first + sum(gaps) if lists.latencies is None else lists.latencies[number]
    tpot = (e2e - first) / (tokens - 1) if tokens > 1 else math.nan
    start = math.nan if lists.start_times is None else lists.start_times[number]
    return Measured("", number, start, first, tpot, e2e, lists.input_lens[number], tokens, gaps)


# `response_id` is the id of the response to a request. Its `inter_token_latency_ms` is TPOT here;
# its `time_per_output_token_ms` includes the first token and is not read. It records no times of single tokens.

GUIDELLM = {"start_s": ("request_start_time", 1.0), "ttft_s": ("time_to_first_token_ms", 1e-3)}
GUIDELLM |= {"tpot_s": ("inter_token_latency_ms", 1e-3), "e2e_s": ("request_latency", 1.0)}
GUIDELLM |= {"prompt_tokens": ("prompt_tokens", 1.0), "output_tokens": ("output_tokens", 1.0)}
"""The names and the units that it has for ours."""


_OPTIONAL: dict[str, Any] = {name: (Number | None, None) for name, _ in GUIDELLM.values()}
_OPTIONAL |= {"response_id": (str | None, None), "request_latency": (Number, ...)}
_Successful: Any = create_model("_Successful", __base__=Form, **_OPTIONAL)


class _Requests(Form):
    successful: list[_Successful]
    errored: list[Any] | None = None
    incomplete: list[Any] | None = None


class _Benchmark(Form):
    requests: _Requests


class _Benchmarks(Form):
    benchmarks: list[_Benchmark]


def _guidellm(path: Path, value: Any) -> Client:
    """Return all benchmarks of a file together."""
    measured: list[Measured] = []
    failed = 0
    for benchmark in checked(_Benchmarks, value, path).benchmarks:
        requests = benchmark.requests
        for number, each in enumerate(requests.successful, len(measured) + failed):
            values: Any = {ours: _or_nan(getattr(each, name), scale) for ours, (name, scale) in GUIDELLM.items()}
            measured.append(Measured(each.response_id or "", number, **values))
        failed += len(requests.errored or ()) + len(requests.incomplete or ())
    return _listed(path, "GuideLLM", measured, failed)
