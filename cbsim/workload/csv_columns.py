"""Which column of a CSV file of requests holds what: the one that the scenario names, else the one of our own name,
else the only one with a name that other tools use, whatever its case and separators.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cbsim.scenario.demand import CsvColumns
from cbsim.scenario.fields import ScenarioError, bare, either, near

UNNAMED = CsvColumns()
NEEDED = ("arrival", "prompt", "output")
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
"""By what the column holds; our own name first."""


def found(path: Path, header: Sequence[str], wanted: CsvColumns) -> dict[str, str]:
    """Column by what it holds, those that are needed first. Raises ScenarioError."""
    named = wanted.model_dump(exclude_none=True)
    columns: dict[str, str] = {}
    for role in NAMES:
        column = _named(path, header, role, named[role]) if role in named else _known(path, header, role)
        if column is None:
            continue
        for other, name in columns.items():
            if name == column:
                raise _wrong(path, header, f"column {column!r} cannot be both {other} and {role}", role)
        columns[role] = column
    return columns


def said(columns: dict[str, str]) -> str | None:
    """What is read as what, or None if all columns have our own names."""
    if all(column == NAMES[role][0] for role, column in columns.items()):
        return None
    return ", ".join(f"{role} from {column!r}" for role, column in columns.items())


def _named(path: Path, header: Sequence[str], role: str, column: str) -> str:
    if column not in header:
        raise _wrong(path, header, f"no column {column!r}{near(column, header)}", role)
    if header.count(column) > 1:
        raise _wrong(path, header, f"there are {header.count(column)} columns {column!r}", role)
    return column


def _known(path: Path, header: Sequence[str], role: str) -> str | None:
    own, *_ = NAMES[role]
    names = {bare(name) for name in NAMES[role]}
    candidates = [own] if own in header else [name for name in header if bare(name) in names]
    if len(candidates) > 1:
        raise _wrong(path, header, f"may be {either([repr(name) for name in candidates])}; say which", role)
    if candidates or role not in NEEDED:
        return next(iter(candidates), None)
    raise _wrong(path, header, f"no column with a known name ({', '.join(NAMES[role])}); say which", role)


def _wrong(path: Path, header: Sequence[str], text: str, role: str) -> ScenarioError:
    field, there = f"workload.columns.{role}", ", ".join(header) or "nothing"
    return ScenarioError(f"{path}:1: {field}: {text}; found {there}", file=path, line=1, field=field, bound=text)
