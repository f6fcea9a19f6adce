"""Requests that a caller hands over as a table: checked, and written as the CSV file that a `csv` workload reads.

The run is served from that text and keeps it, so that its plans can be derived again from the directory alone.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from cbsim.scenario.demand import Csv, Served
from cbsim.scenario.fields import ScenarioError, near, shown
from cbsim.scenario.scenario import Scenario
from cbsim.workload import served

FILE = "workload.csv"  # of a run directory
SOURCE = "requests"  # what messages call the table
NEEDED, OPTIONAL = ("arrival_s", "prompt_tokens", "output_tokens"), ("max_tokens", "priority", "id")
LONGEST_S, MOST = 1e9, 10**12
WRITTEN = {"id": "id", "arrival_s": "arrival_s", "prefill_tokens": "prompt_tokens", "decode_tokens": "output_tokens"}
WRITTEN |= {"max_tokens": "max_tokens", "priority": "priority"}  # column of FILE -> column of the table
SECONDS, COUNT, WHOLE = "seconds >= 0, less than 30 years", "a whole number >= 1", "a whole number"


def scenario_of(scenario: Scenario) -> Scenario:
    """The scenario with its workload read from FILE, beside it in the run directory; a session's from its log."""
    if isinstance(scenario.workload, Served):
        return scenario
    return scenario.model_copy(update={"workload": Csv(kind="csv", path=FILE)})


def file_of(scenario: Scenario) -> str:
    """What the file with the requests that were handed over is called in the run directory."""
    return served.FILE if isinstance(scenario.workload, Served) else FILE


def text(requests: Any) -> str:
    """FILE's content for a data frame, a table of Arrow or a mapping of columns. Rows are numbered from 0 in messages.

    Columns: arrival_s, prompt_tokens, output_tokens, and if wanted max_tokens, priority and id. Raises ScenarioError.
    """
    columns = _columns(_table(requests))
    count = len(columns["arrival_s"])
    if not count:
        raise ScenarioError(f"{SOURCE}: holds no requests", file=SOURCE)
    _check_order(columns)
    columns.setdefault("id", list(map(str, range(count))))
    header = [name for name, column in WRITTEN.items() if column in columns]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*(columns[WRITTEN[name]] for name in header), strict=True))
    return out.getvalue()


def _table(requests: Any) -> pa.Table:
    if isinstance(requests, pa.Table):
        return requests
    try:
        return pa.table(requests)
    except (pa.ArrowException, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ScenarioError(f"{SOURCE}: is no table: {reason}", file=SOURCE, bound="a table") from None


def _columns(table: pa.Table) -> dict[str, list[Any]]:
    """Every column, each value checked on its own."""
    names = [name for name in table.column_names if not name.startswith("__index_level_")]
    for name in names:
        if name not in (*NEEDED, *OPTIONAL):
            raise _wrong(name, f"unknown column, expected {', '.join((*NEEDED, *OPTIONAL))}{near(name, CHECKED)}")
        if names.count(name) > 1:
            raise _wrong(name, "is there twice")
    for name in NEEDED:
        if name not in names:
            raise _wrong(name, f"no such column; expected {', '.join(NEEDED)}, found {', '.join(names) or 'nothing'}")
    return {name: _checked(name, table.column(name).to_pylist()) for name in names}


def _wrong(column: str, bound: str) -> ScenarioError:
    return ScenarioError(f"{SOURCE}: {column}: {bound}", file=SOURCE, field=column, bound=bound)


def _bad(row: int, column: str, value: Any, bound: str) -> ScenarioError:
    message = f"{SOURCE}: row {row}: {column}: got {shown(value)}, expected {bound}"
    return ScenarioError(message, file=SOURCE, line=row, field=column, value=value, bound=bound)


def _checked(name: str, values: Sequence[Any]) -> list[Any]:
    convert, bound = CHECKED[name]
    checked = []
    for row, value in enumerate(values):
        converted = convert(value)
        if converted is None:
            raise _bad(row, name, value, bound)
        checked.append(converted)
    return checked


def _check_order(columns: dict[str, list[Any]]) -> None:
    """Rows are in order of time, ids differ, and no output is longer than its limit."""
    times = columns["arrival_s"]
    for row in range(1, len(times)):
        if times[row] < times[row - 1]:
            raise _bad(row, "arrival_s", times[row], f"seconds not before those of the row above ({times[row - 1]})")
    ids: set[str] = set()
    for row, name in enumerate(columns.get("id", ())):
        if name in ids:
            raise _bad(row, "id", name, "an id that no row above has")
        ids.add(name)
    for row, most in enumerate(columns.get("max_tokens", ())):
        if most < columns["output_tokens"][row]:
            raise _bad(row, "max_tokens", most, f"at least output_tokens ({columns['output_tokens'][row]})")


def _seconds(value: Any) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and 0 <= value < LONGEST_S else None


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < MOST else None


def _count(value: Any) -> int | None:
    whole = _whole(value)
    return whole if whole is not None and whole >= 1 else None


def _name(value: Any) -> str | None:
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    return text if text and text.isprintable() else None


CHECKED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "arrival_s": (_seconds, SECONDS),
    "prompt_tokens": (_count, COUNT),
    "output_tokens": (_count, COUNT),
    "max_tokens": (_count, COUNT),
    "priority": (_whole, WHOLE),
    "id": (_name, "a text or a whole number"),
}
