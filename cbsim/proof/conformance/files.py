"""The files of recorded traces: where they are, what is in them, where their workloads lie.

A trace is a `.jsonl` or `.jsonl.gz` file whose first line, its header, names its family and version. Its workload lies
beside the version's folder (`../workloads/NAME.json`) or beside the trace, perhaps gzipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cbsim.scenario import rows
from cbsim.scenario.fields import ScenarioError

Line = dict[str, Any]
T = TypeVar("T")
TRACES, WORKLOADS = (".jsonl", ".jsonl.gz"), (".json", ".json.gz")
SHOWN = 192  # characters of a text in a message


class UnreadableError(ValueError):
    """A file that should be a trace or a workload and is not; the message says where and what was expected."""


def traces(path: Path) -> list[Path]:
    """The trace file `path`, or the traces anywhere below the directory `path`."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.name.endswith(TRACES) and p.is_file())
    if not path.is_file():
        raise UnreadableError(f"{path}: no such file or directory")
    if not path.name.endswith(TRACES):
        raise UnreadableError(f"{path}: expected a trace, named .jsonl or .jsonl.gz")
    return [path]


def stem(trace: Path) -> str:
    """The name of a trace."""
    return trace.name.removesuffix(".gz").removesuffix(".jsonl")


def workload(trace: Path, name: str) -> Line:
    """The workload of a trace, which is called `name`."""
    folders = [trace.parent.parent / "workloads", trace.parent]
    places = [folder / f"{name}{suffix}" for folder in folders for suffix in WORKLOADS]
    for place in places:
        if place.is_file():
            found = parsed(place, None, text(place))
            fields(place, found, requests=list)
            return found
    raise UnreadableError(f"{trace}: its workload is missing, expected {places[0]} (or .gz, or beside the trace)")


def text(path: Path) -> str:
    try:
        with rows.text(path) as file:
            return rows.document(path, file)
    except ScenarioError as error:
        raise UnreadableError(f"{error}; expected JSON text{', gzipped' * path.name.endswith('.gz')}") from error


def parsed(path: Path, number: int | None, text: str) -> Line:
    """The JSON object on one line of a file, or in all of it."""
    at = f"{path}" if number is None else f"{path}, line {number}"
    try:
        line = json.loads(text)
    except ValueError as error:
        raise UnreadableError(f"{at}: expected a JSON object: {error}") from error
    if not isinstance(line, dict):
        raise UnreadableError(f"{at}: expected a JSON object, got {short(text)}")
    return line


def fields(path: Path, line: Line, **kinds: type) -> list[Any]:
    """The named fields of a header or workload, each of its type."""
    for name, kind in kinds.items():
        value = line.get(name)
        if not isinstance(value, kind):
            raise UnreadableError(f"{path}: expected field {name} to be a {kind.__name__}, got {short(repr(value))}")
    return [line[name] for name in kinds]


def guarded(trace: Path, build: Callable[[], T]) -> T:
    """What `build` makes of header and workload; if it cannot, the files are at fault."""
    try:
        return build()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise UnreadableError(f"{trace}: expected header and workload to describe a run: {problem}") from error


def cut(text: str, start: int, end: int) -> str:
    """A part of a text, with dots where more of it is."""
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")


def short(text: str) -> str:
    return cut(text, 0, SHOWN)
