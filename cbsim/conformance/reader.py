"""Reading of recorded traces: the files, the workload of a trace, and a reader for each family of traces.

A trace is a `.jsonl` or `.jsonl.gz` file whose first line, its header, names its family and version. Its workload lies
beside the version's folder (`../workloads/NAME.json`) or beside the trace, perhaps gzipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cbsim.errors import ScenarioError, UserError
from cbsim.files import parsed_json
from cbsim.policy.loop import Applied, Await, Completed, Effect, Idle, Launch, Poll, Polled, serve
from cbsim.policy.plan import Batch
from cbsim.policy.request import RequestSpec
from cbsim.scenario import rows

Line = dict[str, Any]
T = TypeVar("T")
TRACES, WORKLOADS = (".jsonl", ".jsonl.gz"), (".json", ".json.gz")
SHOWN = 192  # the most characters of a text in a message


class UnreadableError(UserError):
    """An error raised for a file that is no trace or workload; the message states the place and what was expected."""


def traces(path: Path) -> list[Path]:
    """Return the trace file `path`, or all traces below the directory `path`."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.name.endswith(TRACES) and p.is_file())
    if not path.is_file():
        raise UnreadableError(f"{path}: no such file or directory")
    if not path.name.endswith(TRACES):
        raise UnreadableError(f"{path}: expected a trace, named .jsonl or .jsonl.gz")
    return [path]


def stem(trace: Path) -> str:
    """Return the name of a trace without its suffixes."""
    return trace.name.removesuffix(".gz").removesuffix(".jsonl")


def workload(trace: Path, name: str, sha256: Any = None) -> Line:
    """Read the workload of a trace, which is called `name`, and whose digest the trace may state."""
    folders = [trace.parent.parent / "workloads", trace.parent]
    paths = [folder / f"{name}{suffix}" for folder in folders for suffix in WORKLOADS]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UnreadableError(f"{trace}: its workload is missing, expected {paths[0]} (or .gz, or beside the trace)")
    document = content(path)
    if sha256 not in (None, hashlib.sha256(document.encode()).hexdigest()):
        raise UnreadableError(f"{path}: expected the workload of {trace.name}, whose SHA-256 is {short(repr(sha256))}")
    recorded = parsed(path, None, document)
    header_fields(path, recorded, requests=list)
    return recorded


def by_arrival(workload: Line) -> list[RequestSpec]:
    """Return requests with lengths but no content, in order of arrival, then of the file; each ends at its limit."""
    specs = [
        RequestSpec(i, str(r["id"]), r["arrival_us"], r["prompt"], r["output"], r["output"])
        for i, r in enumerate(workload["requests"])
    ]
    return sorted(specs, key=lambda spec: spec.arrival_ns)


def content(path: Path) -> str:
    try:
        with rows.open_text(path) as file:
            return rows.document(path, file)
    except ScenarioError as error:
        raise UnreadableError(f"{error}; expected JSON text{', gzipped' * path.name.endswith('.gz')}") from error


def parsed(path: Path, number: int | None, document: str) -> Line:
    """Parse the JSON object on line `number` of a file, or that of the whole file if None."""
    at = f"{path}" if number is None else f"{path}, line {number}"
    line = parsed_json(document, at, UnreadableError)
    if not isinstance(line, dict):
        raise UnreadableError(f"{at}: got {short(document)}, expected a JSON object")
    return line


def header_fields(path: Path, line: Line, **kinds: type) -> list[Any]:
    """Return the named fields of a header or workload, each checked for its type."""
    for name, kind in kinds.items():
        value = line.get(name)
        if not isinstance(value, kind):
            raise UnreadableError(f"{path}: expected field {name} to be a {kind.__name__}, got {short(repr(value))}")
    return [line[name] for name in kinds]


def one_of(trace: Path, field: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raise UnreadableError unless a header's field has one of these values."""
    if value not in allowed:
        expected = ", ".join(map(repr, allowed))
        raise UnreadableError(f"{trace}, line 1: {field}: got {short(repr(value))}, expected one of {expected}")


def guarded(trace: Path, build: Callable[[], T]) -> T:
    """Return the result of `build`; an error in it means that header or workload is wrong: raises UnreadableError."""
    try:
        return build()
    except UnreadableError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise UnreadableError(f"{trace}: expected header and workload to describe a run: {problem}") from error


def cut(line: str, start: int, end: int) -> str:
    """Return a part of a line, with dots where text is left out."""
    return ("..." if start else "") + line[start:end] + ("..." if end < len(line) else "")


def short(line: str) -> str:
    return cut(line, 0, SHOWN)


class Replay:
    """A replay of a workload by this project's policy. A subclass answers the effects of the policy's loop as the
    recorder did, a poll with None at the end, and appends trace lines to `_written`. `header`: fields that it makes.
    """

    scheduler: Any
    _poll: Callable[[Poll], Polled | None]
    _launch: Callable[[Launch], Any]
    _await: Callable[[Await], Completed]
    _applied: Callable[[Applied], None]
    _end: Callable[[], None]

    def __init__(self, scheduler: Any, depth: int = 1) -> None:
        self.scheduler, self._depth = scheduler, depth
        self.header: Line = {}
        self._written: list[Line] = []
        self._batch = Batch()
        self._now = self._steps = 0

    def check(self) -> None:
        """Raise AssertionError unless the policy's invariants hold at this moment."""
        self.scheduler.decoding.check()

    def lines(self) -> Iterator[Line]:
        """Yield the replayed trace lines in order, without the header."""
        loop, answer = serve(self.scheduler, self._depth), None
        answers: dict[type[Effect], Callable[[Any], Any]] = {
            Poll: self._poll,
            Launch: self._launch,
            Idle: self._idle,
            Await: self._await,
            Applied: self._applied,
        }
        while True:
            try:
                effect = loop.send(answer)
            except StopIteration:
                break
            assert type(effect) in answers, effect
            answer = answers[type(effect)](effect)
            yield from self._take()
            if answer is None and isinstance(effect, Poll):
                break
        self._end()
        yield from self._take()

    def _idle(self, effect: Idle) -> None:
        """Handle planning that found nothing to run."""

    def _take(self) -> list[Line]:
        taken, self._written = self._written, []
        return taken


def due(coming: list[T], now: int, at: Callable[[T], int]) -> list[T]:
    """Remove and return the entries due by now from a list in which the next one is last; `at` gives their times."""
    taken = []
    while coming and at(coming[-1]) <= now:
        taken.append(coming.pop())
    return taken


@dataclass(frozen=True, slots=True)
class Case:
    """What a header says of its trace: the scheduler, its version, which may say how it was made, and mode; the reason
    to skip the trace, if there is one; and what makes the replay of its workload.
    """

    scheduler: str
    version: str
    mode: str
    skipped: str | None
    replay: Callable[[Line], Replay]


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader of a family of traces: `case` raises UnreadableError, or what `guarded` takes for an error of a header;
    `comparable` drops what recorders vary.
    """

    reads: Callable[[Line], bool]
    case: Callable[[Path, Line], Case]
    comparable: Callable[[Line], Line] = lambda line: line
    formats: Sequence[int | None] = (1,)


def not_followed(version: str, followed: Sequence[str]) -> str | None:
    """Return why the policies do not model this version, None if they do."""
    if any(f"{version}.".startswith(f"{each}.") for each in followed):
        return None
    return f"version {version} is not followed, only {', '.join(followed)}"


def not_modelled(config: Line, options: frozenset[str]) -> str | None:
    """Return why the policies do not model this configuration, None if they do."""
    unknown = [key for key in config if key not in options]
    return f"option {', '.join(unknown)} is not modelled" if unknown else None
