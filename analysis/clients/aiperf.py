"""What aiperf writes: a line a request (profile_export.jsonl), and statistics (profile_export_aiperf.json and .csv).

Its `inter_token_latency` is what is called TPOT here, its `inter_chunk_latency` ITL. Tokens are those that the server
counted, if the client was told, else its own count. Requests of a warm-up are left out.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from analysis.clients.content import Client, Distribution, Measured, listed
from analysis.clients.fields import UNITS_S, Fields, parsed

TOOL = "aiperf"
NAMES = {
    "ttft_s": "time_to_first_token",
    "tpot_s": "inter_token_latency",
    "itl_s": "inter_chunk_latency",
    "e2e_s": "request_latency",
}
STATISTICS = {"mean": "avg", "p50": "p50", "p99": "p99"}
PROMPT, OUTPUT = (
    ("usage_prompt_tokens", "input_sequence_length"),
    ("usage_completion_tokens", "output_sequence_length"),
)
HEAD = "Metric,avg,"


def recognised(value: object) -> bool:
    """Is this the object with statistics?"""
    return isinstance(value, dict) and "aiperf_version" in value


def is_line(value: object) -> bool:
    """Is this a line of a request?"""
    return isinstance(value, dict) and {"metadata", "metrics"} <= value.keys() and "guidellm_version" not in str(value)


# -- a line a request


def lines(path: Path, text: str) -> Client:
    """Raises RunError."""
    measured: list[Measured] = []
    failed = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        value = parsed(line)
        row = Fields(path, f"line {number}: ", value if isinstance(value, dict) else {})
        if not isinstance(value, dict):
            row.bad("", line, "a JSON object")
        about = row.object("metadata")
        if about.values.get("benchmark_phase", "profiling") != "profiling":
            continue
        if value.get("error") is not None or about.values.get("was_cancelled"):
            failed += 1
        else:
            measured.append(_measured(about, row.object("metrics"), len(measured) + failed))
    return listed(path, TOOL, measured, failed)


def _measured(about: Fields, numbers: Fields, number: int) -> Measured:
    return Measured(
        key=about.text("x_request_id"),
        number=number,
        start_s=about.number("request_start_ns") / 1e9 if "request_start_ns" in about.values else math.nan,
        ttft_s=_seconds(numbers, NAMES["ttft_s"]),
        tpot_s=_seconds(numbers, NAMES["tpot_s"]),
        e2e_s=_seconds(numbers, NAMES["e2e_s"]),
        prompt_tokens=_tokens(numbers, PROMPT),
        output_tokens=_tokens(numbers, OUTPUT),
        gaps_s=_gaps(numbers),
    )


def _seconds(numbers: Fields, name: str) -> float:
    if name not in numbers.values:
        return math.nan
    number = numbers.object(name)
    return number.number("value") * _unit_s(number)


def _gaps(numbers: Fields) -> list[float]:
    name = NAMES["itl_s"]
    if name not in numbers.values:
        return []
    number = numbers.object(name)
    unit_s = _unit_s(number)
    return [gap * unit_s for gap in number.numbers("value", len(number.entries("value")))]


def _tokens(numbers: Fields, names: Iterable[str]) -> float:
    return next((numbers.object(name).number("value") for name in names if name in numbers.values), math.nan)


def _unit_s(number: Fields) -> float:
    unit = number.values.get("unit")
    if not isinstance(unit, str) or unit not in UNITS_S:
        number.bad("unit", unit, f"one of {', '.join(UNITS_S)}")
    return UNITS_S[unit]


# -- statistics


def statistics(fields: Fields) -> Client:
    """The object with statistics. Raises RunError."""
    told = {}
    for measure, name in NAMES.items():
        if name in fields.values:
            number = fields.object(name)
            unit_s = _unit_s(number)
            told[measure] = {ours: number.number(theirs) * unit_s for ours, theirs in STATISTICS.items()}

    def sum_of(names: Iterable[str]) -> float:
        return next((fields.object(name).number("sum") for name in names if name in fields.values), math.nan)

    count = fields.object("request_count").whole("avg")
    ended = (
        fields.object("completed_request_count").whole("avg") if "completed_request_count" in fields.values else count
    )
    return Client(fields.path, TOOL, count, max(ended - count, 0), sum_of(PROMPT), sum_of(OUTPUT), told=told)


def table(path: Path, text: str) -> Client:
    """The same as CSV: a table with a line a metric, then one of single numbers. Raises RunError."""
    values: dict[str, Mapping[str, str]] = {}
    header: list[str] = []
    for row in csv.reader(text.splitlines()):
        if row[:1] == ["Metric"]:
            header = row
        elif len(row) > 1 and header:
            values[row[0]] = dict(zip(header[1:], row[1:], strict=False))
    cells = _Cells(path, values)
    told = {measure: cells.distribution(name) for measure, name in NAMES.items()}
    prompt, output = (cells.sum_of(names) for names in (PROMPT, OUTPUT))
    count, ended = cells.count("Request Count"), cells.count("Completed Requests (Success + Error)")
    if count is None:
        Fields(path, "", {}).bad("Request Count", None, "a whole number")
    failed = 0 if ended is None else max(ended - count, 0)
    return Client(path, TOOL, count, failed, prompt, output, told={name: each for name, each in told.items() if each})


class _Cells:
    """The numbers of a CSV file by `Metric Name (unit)` and column."""

    def __init__(self, path: Path, values: Mapping[str, Mapping[str, str]]) -> None:
        self._path, self._values = path, values

    def distribution(self, name: str) -> Distribution:
        title = name.replace("_", " ").title()
        for unit, unit_s in UNITS_S.items():
            key = next((key for key in self._values if key.lower() == f"{title} ({unit})".lower()), None)
            if key is not None:
                return {ours: self._number(key, theirs) * unit_s for ours, theirs in STATISTICS.items()}
        return {}

    def sum_of(self, names: Iterable[str]) -> float:
        keys = (f"{name.replace('_', ' ').title()} (tokens)" for name in names)
        return next((self._number(key, "sum") for key in keys if key in self._values), math.nan)

    def count(self, key: str) -> int | None:
        if key not in self._values:
            return None
        number = self._number(key, "Value")
        return int(number)

    def _number(self, key: str, column: str) -> float:
        cell = self._values[key].get(column)
        try:
            value: object = float(cell or "")
        except ValueError:
            value = cell
        return Fields(self._path, f"{key}: ", {column: value}).number(column)
