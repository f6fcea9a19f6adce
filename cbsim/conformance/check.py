"""Comparison of recorded traces with this project's policies, line by line: the work of `cbsim conformance`.

Every line is compared, with every field. A trace outside what the policies model is listed with the reason and not
compared. `READERS` lists the families of traces that can be compared; another family needs another entry there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cbsim.conformance import reader as reading
from cbsim.conformance import sarathi_traces, sglang_traces, transformers_523_traces, trtllm_traces, vllm_traces
from cbsim.conformance.reader import Case, Line, Reader, Replay, UnreadableError, cut, parsed, stem, traces
from cbsim.metrics.terminal import aligned

ABSENT = "(absent)"
ENDS = ("summary", "footer")  # the last line of a trace
WINDOW = 48  # characters shown on each side of the first difference

READERS = (
    sarathi_traces.READER,
    sglang_traces.READER,
    trtllm_traces.READER,
    vllm_traces.READER,
    transformers_523_traces.READER,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line that differs. `fields` holds (place in the line, replayed, recorded), shortened."""

    line: int
    step: int | None
    fields: tuple[tuple[str, str, str], ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        at = f"line {self.line}" + ("" if self.step is None else f", step {self.step}")
        shown = [f"\n    {where}\n      ours   {ours}\n      theirs {theirs}" for where, ours, theirs in self.fields]
        return f"{at}: {self.problem or 'not the same'}{''.join(shown)}"


@dataclass(frozen=True, slots=True)
class TraceResult:
    """The result of comparing one trace, or the reason why it was skipped."""

    name: str
    scheduler: str
    version: str
    mode: str
    total: int
    matched: int = 0
    skipped: str | None = None
    difference: Difference | None = None

    def __str__(self) -> str:
        head = "  ".join(part for part in (self.name, f"{self.scheduler} {self.version}", self.mode) if part)
        if self.skipped is not None:
            return f"{head}  not compared: {self.skipped}"
        counts = f"{self.matched}/{self.total} lines"
        verdict = "ok" if self.difference is None else f"MISMATCH\n  {self.difference}"
        return f"{head}  {counts}  {verdict}"


def run(
    paths: Sequence[Path], out: Callable[[str], None], alarm: Callable[[str], None], *, invariants: bool = False
) -> int:
    """Compare every trace in `paths`. Return 0 if all matched, 1 on a mismatch, 2 if unreadable or nothing compared.
    Traces that cannot be read are told to `alarm`, all else to `out`.
    """
    results: list[TraceResult] = []
    unreadable = 0
    for path in paths:
        for trace in traces(path) if path.is_dir() else [path]:
            try:
                results.append(compare(trace, invariants=invariants))
                out(f"{results[-1]}")
            except UnreadableError as error:
                unreadable += 1
                alarm(f"{stem(trace)}  unreadable: {error}")
    compared = [r for r in results if r.skipped is None]
    if compared:
        out(_table(compared))
    elif not unreadable:
        alarm(f"no trace to compare in {', '.join(map(str, paths))}")
    return 1 if any(r.difference is not None for r in compared) else 2 if unreadable or not compared else 0


def _table(compared: Sequence[TraceResult]) -> str:
    """Return the table of compared traces by scheduler and version: the numbers of traces, lines and matched lines."""
    parts: dict[tuple[str, str], list[TraceResult]] = {}
    for result in compared:
        parts.setdefault((result.scheduler, result.version), []).append(result)
    rows = [[*version, *_sums(part)] for version, part in parts.items()]
    return aligned([["scheduler", "version", "traces", "lines", "matched"], *rows, ["all", "", *_sums(compared)]])


def _sums(results: Sequence[TraceResult]) -> list[str]:
    return [str(len(results)), str(sum(r.total for r in results)), str(sum(r.matched for r in results))]


def compare(
    trace: Path, *, invariants: bool = False, read_as: Callable[[Line], Line] = lambda header: header
) -> TraceResult:
    """Replay one trace's workload and compare. `invariants` checks pool and decode batch after every line; `read_as`
    may put another version in the header, by whose rules the trace is compared.
    """
    (trace,) = traces(trace)
    recorded = reading.content(trace).splitlines()
    header = read_as(parsed(trace, 1, recorded[0] if recorded else ""))
    reader = reader_of(header)
    if reader is None:
        raise UnreadableError(f"{trace}, line 1: expected a trace header that names its scheduler and version")
    case, total = reading.guarded(trace, lambda: reader.case(trace, header)), len(recorded) - 1
    replay = None if case.skipped else _replay(trace, header, case)
    reading.one_of(trace, "format", header.get("format"), reader.formats)
    end = parsed(trace, len(recorded), recorded[-1])
    if not total or not (end.get("footer") or end.get("ev") in ENDS):
        raise UnreadableError(f"{trace}, line {len(recorded)}: expected the summary of the run, the trace is cut off")
    result = TraceResult(stem(trace), case.scheduler, case.version, case.mode, total, skipped=case.skipped)
    if replay is None:
        return result
    matched, difference = _first_difference(trace, reader, replay, recorded, invariants)
    return replace(result, matched=matched, difference=difference)


def _replay(trace: Path, header: Line, case: Case) -> Replay:
    """Return the replay of a trace's workload, whose digest is checked if the header states it."""
    recorded = reading.workload(trace, stem(trace).removesuffix(f".{case.mode}"), header.get("workload_sha256"))
    return reading.guarded(trace, lambda: case.replay(recorded))


def reader_of(header: Line) -> Reader | None:
    """Return the reader of traces with this header, None if there is none."""
    return next((reader for reader in READERS if reader.reads(header)), None)


def _first_difference(
    trace: Path, reader: Reader, replay: Replay, recorded: list[str], invariants: bool
) -> tuple[int, Difference | None]:
    """Return the number of matching lines and the first difference, which is the header's if its fields differ."""
    header = _part(parsed(trace, 1, recorded[0]), replay.header)
    if header != replay.header:
        return 0, Difference(1, None, _differing(replay.header, header))
    pairs = zip_longest(recorded[1:], _lines(replay, invariants))
    for number, (line, ours) in enumerate(pairs, start=2):
        theirs = None if line is None else reader.comparable(parsed(trace, number, line))
        if isinstance(ours, Exception):
            problem = f"our replay failed: {type(ours).__name__}: {reading.short(str(ours))}"
            return number - 2, Difference(number, _step(theirs), problem=problem)
        if theirs is None or ours is None:
            problem = "the trace ends, our replay goes on" if ours else "our replay has ended, the trace goes on"
            return number - 2, Difference(number, _step(theirs or ours), problem=problem)
        if ours != theirs:
            return number - 2, Difference(number, _step(theirs), _differing(ours, theirs))
    return len(recorded) - 1, None


def _part(theirs: Line, ours: Line) -> Line:
    """Return the fields of the recorded header that the replayed one has, recursively in its dictionaries."""
    part: Line = {}
    for key, own in ours.items():
        value = theirs.get(key, ABSENT)
        part[key] = _part(value, own) if isinstance(value, dict) and isinstance(own, dict) else value
    return part


def _lines(replay: Replay, invariants: bool) -> Iterator[Line | Exception]:
    """Yield the replayed lines; an exception of the replay is yielded as the last one, since it is a finding, too."""
    try:
        for line in replay.lines():
            if invariants:
                replay.check()
            yield line
    except Exception as error:
        yield error


def _step(line: Line | None) -> int | None:
    return line.get("step") if line else None


def _differing(ours: Line, theirs: Line) -> tuple[tuple[str, str, str], ...]:
    """Return every field that differs, each at its innermost difference."""
    keys = [key for key in {**theirs, **ours} if ours.get(key, ABSENT) != theirs.get(key, ABSENT)]
    return tuple(_innermost(key, ours.get(key, ABSENT), theirs.get(key, ABSENT)) for key in keys)


def _innermost(where: str, ours: Any, theirs: Any) -> tuple[str, str, str]:
    """Return the first difference inside nested dictionaries and lists of dictionaries."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**theirs, **ours}:
            if ours.get(key, ABSENT) != theirs.get(key, ABSENT):
                return _innermost(f"{where}.{key}", ours.get(key, ABSENT), theirs.get(key, ABSENT))
    if isinstance(ours, list) and isinstance(theirs, list):
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
            if mine != other and isinstance(mine, dict):
                return _innermost(f"{where}[{i}]", mine, other)
    return where, *_around(json.dumps(ours), json.dumps(theirs))


def _around(ours: str, theirs: str) -> tuple[str, str]:
    """Return both texts cut to a window round their first difference."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - WINDOW)
    return cut(ours, start, at + WINDOW), cut(theirs, start, at + WINDOW)
