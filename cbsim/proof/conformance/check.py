"""Recorded traces against our policies, line by line: what `cbsim conformance` does.

A trace is a `.jsonl` or `.jsonl.gz` file whose first line names its family and version. Its workload lies beside the
version's folder (`../workloads/NAME.json`) or beside the trace, perhaps gzipped. Every line counts, with every field.
A trace outside what the policies model is listed with the reason and compared with nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from cbsim.policy.schedulers import transformers_settings, vllm_settings
from cbsim.proof.conformance import offload_traces, transformers_traces, vllm_traces
from cbsim.scenario import rows
from cbsim.scenario.fields import ScenarioError
from cbsim.workload.scheduler_tests import unsupported

Line = dict[str, Any]
T = TypeVar("T")
Replay = vllm_traces.VllmReplay | transformers_traces.TransformersReplay
TRACES, WORKLOADS = (".jsonl", ".jsonl.gz"), (".json", ".json.gz")
VLLM_CONFIG = frozenset(
    [
        "block_size",
        "num_blocks",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "policy",
        "timing",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "enable_prefix_caching",
        "watermark",
        "prefill_schedule_interval",
        "scheduler_reserve_full_isl",
        "connector",
        "stop_when_done",
    ]
)
TRANSFORMERS_CB = frozenset(
    [
        "block_size",
        "num_blocks",
        "max_batch_tokens",
        "scheduler_type",
        "allow_block_sharing",
        "max_blocks_per_request",
        "safety_margin",
        "max_requests_per_batch",
        "cpu_offload_space",
    ]
)
ABSENT = "(absent)"
WINDOW = 48  # characters shown on each side of the first difference


class UnreadableError(ValueError):
    """A file that should be a trace or a workload and is not; the message says where and what was expected."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line that is not the same. `fields` holds (where in the line, ours, theirs), shortened."""

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
    """One trace compared, or the reason why it was not."""

    name: str
    version: str
    mode: str
    total: int
    matched: int = 0
    skipped: str | None = None
    difference: Difference | None = None

    def __str__(self) -> str:
        head = f"{self.name}  {self.version}  {self.mode}"
        if self.skipped is not None:
            return f"{head}  not compared: {self.skipped}"
        counts = f"{self.matched}/{self.total} lines"
        verdict = "ok" if self.difference is None else f"MISMATCH\n  {self.difference}"
        return f"{head}  {counts}  {verdict}"


@dataclass(frozen=True, slots=True)
class _Case:
    """What a header says, and the replay of its workload unless there is a reason to skip it."""

    name: str
    version: str
    mode: str
    replay: Replay | None = None
    skipped: str | None = None


def run(paths: Sequence[Path], out: Callable[[str], None], *, invariants: bool = False) -> int:
    """Compare every trace in `paths`. Status 0: all matched, 1: a mismatch, 2: unreadable input or nothing compared."""
    results: list[TraceResult] = []
    unreadable = 0
    for path in paths:
        try:
            listed = traces(path)
        except UnreadableError as error:
            unreadable += 1
            out(f"{error}")
            continue
        for trace in listed:
            try:
                results.append(compare(trace, invariants=invariants))
                out(f"{results[-1]}")
            except UnreadableError as error:
                unreadable += 1
                out(f"{error}")
    compared = [r for r in results if r.skipped is None]
    wrong = sum(r.difference is not None for r in compared)
    out(_footer(results, len(compared), wrong, unreadable))
    return 1 if wrong else 2 if unreadable or not compared else 0


def _footer(results: Sequence[TraceResult], compared: int, wrong: int, unreadable: int) -> str:
    lines = sum(r.matched for r in results)
    text = f"{compared} traces compared: {compared - wrong} ok ({lines} lines matched), {wrong} mismatched"
    for count, what in ((len(results) - compared, "not compared"), (unreadable, "unreadable")):
        text += f", {count} {what}" if count else ""
    return text


def traces(path: Path) -> list[Path]:
    """The trace file `path`, or the traces anywhere below the directory `path`."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.name.endswith(TRACES) and p.is_file())
    if not path.is_file():
        raise UnreadableError(f"{path}: no such file or directory")
    if not path.name.endswith(TRACES):
        raise UnreadableError(f"{path}: expected a trace, named .jsonl or .jsonl.gz")
    return [path]


def compare(trace: Path, *, invariants: bool = False) -> TraceResult:
    """Replay one trace's workload and compare. With `invariants`, pool and cohort are checked after every line."""
    recorded = _text(trace).splitlines()
    header = _parsed(trace, 1, recorded[0] if recorded else "")
    if header.get("ev") == "header":
        case = _vllm(trace, header)
    elif header.get("header") is True:
        case = _transformers(trace, header)
    else:
        raise UnreadableError(
            f'{trace}, line 1: expected a trace header, an object with "ev": "header" or "header": true'
        )
    total = len(recorded) - 1
    if case.replay is None:
        return TraceResult(case.name, case.version, case.mode, total, skipped=case.skipped)
    matched, difference = _first_difference(trace, case.replay, recorded, invariants)
    return TraceResult(case.name, case.version, case.mode, total, matched, difference=difference)


def _vllm(trace: Path, header: Line) -> _Case:
    version, mode, config = _fields(trace, header, vllm=str, mode=str, config=dict)
    name = _stem(trace).removesuffix(f".{mode}")
    skipped = _version(version, vllm_settings.VERSIONS) or _unknown(config, VLLM_CONFIG)
    skipped = skipped or _guarded(trace, lambda: offload_traces.unsupported(config))
    if skipped:
        return _Case(name, f"vllm {version}", mode, skipped=skipped)
    workload = _workload(trace, name)
    return _Case(name, f"vllm {version}", mode, _replay(trace, vllm_traces.VllmReplay, header, workload))


def _transformers(trace: Path, header: Line) -> _Case:
    (resolved,) = _fields(trace, header, resolved=dict)
    (version,) = _fields(trace, resolved, transformers=str)
    name, version_name, mode = _stem(trace), f"transformers {version}", "async" if resolved.get("async") else "sync"
    skipped = _version(version, transformers_settings.VERSIONS)
    if skipped:
        return _Case(name, version_name, mode, skipped=skipped)
    workload = _workload(trace, name)
    (cb,) = _fields(trace, workload, cb=dict)
    skipped = _unknown(cb, TRANSFORMERS_CB) or _outside(trace, workload)
    if skipped:
        return _Case(name, version_name, mode, skipped=skipped)
    return _Case(name, version_name, mode, _replay(trace, transformers_traces.TransformersReplay, header, workload))


def _version(version: str, followed: Sequence[str]) -> str | None:
    """Why this version is not one that the policies follow, or None."""
    if ".".join(version.split(".")[:2]) in followed:
        return None
    return f"version {version} is not followed, only {', '.join(followed)}"


def _unknown(config: Line, keys: frozenset[str]) -> str | None:
    """Why this configuration is not one that the policies follow, or None."""
    unknown = [key for key in config if key not in keys]
    return f"option {', '.join(unknown)} is not modelled" if unknown else None


def _outside(trace: Path, workload: Line) -> str | None:
    return _guarded(trace, lambda: unsupported(workload))


def _replay(trace: Path, kind: Callable[[Line, Line], Replay], header: Line, workload: Line) -> Replay:
    return _guarded(trace, lambda: kind(header, workload))


def _guarded(trace: Path, build: Callable[[], T]) -> T:
    """What `build` makes of header and workload; if it cannot, the files are at fault."""
    try:
        return build()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise UnreadableError(f"{trace}: expected header and workload to describe a run: {problem}") from error


def _first_difference(
    trace: Path, replay: Replay, recorded: list[str], invariants: bool
) -> tuple[int, Difference | None]:
    """How many lines are the same, and the first that is not."""
    pairs = zip_longest(recorded[1:], _lines(replay, invariants))
    for number, (text, got) in enumerate(pairs, start=2):
        theirs = None if text is None else _comparable(_parsed(trace, number, text))
        if isinstance(got, Exception):
            problem = f"our replay failed: {type(got).__name__}: {_short(str(got))}"
            return number - 2, Difference(number, _step(theirs), problem=problem)
        if theirs is None or got is None:
            problem = "the trace ends, our replay goes on" if got else "our replay has ended, the trace goes on"
            return number - 2, Difference(number, _step(theirs or got), problem=problem)
        if got != theirs:
            return number - 2, Difference(number, _step(theirs), _differing(got, theirs))
    return len(recorded) - 1, None


def _lines(replay: Replay, invariants: bool) -> Iterator[Line | Exception]:
    """Our lines; an exception out of the replay becomes the last of them, for it is a finding like any other."""
    lines = replay.lines()
    while True:
        try:
            line = next(lines)
            if invariants:
                replay.check()
        except StopIteration:
            return
        except Exception as error:
            yield error
            return
        yield line


def _comparable(line: Line) -> Line:
    """A recorded line without what two recorders may write differently: order of a set, null for absent."""
    if line.get("ev") == "schedule" and isinstance(line.get("finished"), list):
        line["finished"] = sorted(line["finished"])
    if line.get("ev") == "summary" and isinstance(line.get("requests"), dict):
        given = line["requests"].items()
        line["requests"] = {request: {k: v for k, v in stats.items() if v is not None} for request, stats in given}
    return line


def _step(line: Line | None) -> int | None:
    return line.get("step") if line else None


def _differing(ours: Line, theirs: Line) -> tuple[tuple[str, str, str], ...]:
    """Every field that differs, at the innermost place where it does."""
    keys = [key for key in {**theirs, **ours} if ours.get(key, ABSENT) != theirs.get(key, ABSENT)]
    return tuple(_innermost(key, ours.get(key, ABSENT), theirs.get(key, ABSENT)) for key in keys)


def _innermost(where: str, ours: Any, theirs: Any) -> tuple[str, str, str]:
    """Go down to the first difference as long as it is a dictionary, or a list of them."""
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
    """Both texts, cut to a window round their first difference."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - WINDOW)
    return _cut(ours, start, at + WINDOW), _cut(theirs, start, at + WINDOW)


def _cut(text: str, start: int, end: int) -> str:
    return ("..." if start else "") + text[start:end] + ("..." if end < len(text) else "")


def _short(text: str) -> str:
    return _cut(text, 0, 4 * WINDOW)


# -- files ------------------------------------------------------------------------------------------------------------


def _stem(trace: Path) -> str:
    return trace.name.removesuffix(".gz").removesuffix(".jsonl")


def _workload(trace: Path, name: str) -> Line:
    folders = [trace.parent.parent / "workloads", trace.parent]
    places = [folder / f"{name}{suffix}" for folder in folders for suffix in WORKLOADS]
    for place in places:
        if place.is_file():
            workload = _parsed(place, None, _text(place))
            _fields(place, workload, requests=list)
            return workload
    raise UnreadableError(f"{trace}: its workload is missing, expected {places[0]} (or .gz, or beside the trace)")


def _text(path: Path) -> str:
    try:
        with rows.text(path) as file:
            return rows.document(path, file)
    except ScenarioError as error:
        raise UnreadableError(f"{error}; expected JSON text{', gzipped' * path.name.endswith('.gz')}") from error


def _parsed(path: Path, number: int | None, text: str) -> Line:
    """The JSON object on one line of a file, or in all of it."""
    at = f"{path}" if number is None else f"{path}, line {number}"
    try:
        line = json.loads(text)
    except ValueError as error:
        raise UnreadableError(f"{at}: expected a JSON object: {error}") from error
    if not isinstance(line, dict):
        raise UnreadableError(f"{at}: expected a JSON object, got {_short(text)}")
    return line


def _fields(path: Path, line: Line, **kinds: type) -> list[Any]:
    """The named fields of a header or workload, each of its type."""
    for name, kind in kinds.items():
        value = line.get(name)
        if not isinstance(value, kind):
            raise UnreadableError(f"{path}: expected field {name} to be a {kind.__name__}, got {_short(repr(value))}")
    return [line[name] for name in kinds]
