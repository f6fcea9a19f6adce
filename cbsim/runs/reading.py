"""Reading a run directory, with checks that its files have the keys and columns that are read, and agree.

Keys that are not read here may hold anything: a later version has more of them, and an engine has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from cbsim.errors import RunError
from cbsim.files import read_json, read_text
from cbsim.metrics import metrics
from cbsim.metrics.catalogue import DISTRIBUTIONS, METRICS, SINGLE, quantities
from cbsim.metrics.terminal import lookup
from cbsim.record import directory, invariants, optional_tables, parquet, tables
from cbsim.record.directory import MARKER, SCHEMA_VERSION, TERMS
from cbsim.record.environment import SIMULATED
from cbsim.record.optional_tables import HAND_OFFS, TRANSFERS, Files
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import RequestTable, Steps
from cbsim.scenario import documents
from cbsim.scenario.fields import LARGEST_REAL, LARGEST_WHOLE, Form, shown


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory that has been read. `incomplete` holds the marker's text. The files that only some runs have are
    under `path`, or in `files` for a run in memory.
    """

    path: Path
    scenario: str
    environment: dict[str, Any]
    summary: dict[str, Any]
    steps: Steps
    requests: RequestTable
    incomplete: str | None
    files: Mapping[str, bytes] | None = None

    @property
    def source(self) -> Files:
        """The place of the run's further files."""
        return self.path if self.files is None else self.files


def servers(run: Run, count: int) -> Iterator[Run]:
    """Yield the run of each of `count` servers by itself, as if it had been alone. Raises RunError if the tables are
    those of others.
    """
    check_servers(run, count)
    if count == 1:
        yield run
        return
    numbers, low = RequestTable.of(run.requests), 0
    of = numbers.numbers("server")
    for server, high in enumerate(run.steps.ends(count)):
        steps = run.steps.window(low, high)
        rows = [
            row._replace(token_runs=[number - low * (at % 2 == 0) for at, number in enumerate(row.token_runs)])
            for row in numbers.rows(of == server)
        ]
        yield replace(run, steps=Steps(steps.table), requests=RequestTable.of(rows))
        low = high


def check_servers(run: Run, count: int) -> None:
    """Raise RunError unless the tables are those of so many servers, the steps of one behind those of another."""
    file, of_steps = run.path / "steps.parquet", run.steps.server
    if of_steps is None if count > 1 else of_steps is not None and of_steps.any():
        raise RunError(f"{file}: server: must be a column of the runs of several servers, and of no others", file=file)
    after = np.zeros(0, np.int64) if of_steps is None else of_steps
    of_requests = RequestTable.of(run.requests).numbers("server")
    for name, numbers, least in (
        ("steps", after, np.maximum.accumulate(np.maximum(after, 0))),
        ("requests", of_requests, np.zeros_like(of_requests)),
    ):
        wrong = np.flatnonzero((numbers < least) | (numbers >= count))
        if len(wrong):
            row, file = int(wrong[0]), run.path / f"{name}.parquet"
            bound = f"expected {least[row]} to {count - 1}"
            raise RunError(f"{file}: server: row {row}: got {numbers[row]}, {bound}", file=file)


def load(path: Path, *, whole: bool = True) -> Run:
    """Read a run directory; if not `whole`, its documents only. Raises RunError naming the file that is missing or
    broken, and the reason.
    """
    if not path.is_dir():
        wrong = "is a file, expected a run directory" if path.exists() else "no such run directory"
        raise RunError(f"{path}: {wrong}", file=path)
    marker = path / MARKER
    killed = marker.exists() and not (path / "summary.json").exists()
    if killed and not directory.any_piece(path):
        raise RunError(f"{path}: incomplete, nothing to read yet: {incomplete(path)}", file=path)
    steps, requests = Steps(np.empty((0, len(STEP_COLUMNS)), dtype=np.int64)), RequestTable.of(())
    if killed:
        steps, requests, terms = directory.steps_so_far(path), directory.requests_so_far(path), path / TERMS
        summary = _summary_so_far(terms, read_json(terms, RunError), requests, steps)
    else:
        summary = read_json(path / "summary.json", RunError)
    version = summary.get("schema_version")
    if version != SCHEMA_VERSION:
        file, bound = path / "summary.json", str(SCHEMA_VERSION)
        other = parquet.other_version(shown(version))
        if version is None:
            other = "schema_version: is missing: it is not that of a run; beside that of a router is choices.jsonl"
        raise RunError(f"{file}: {other}", file=file, field="schema_version", value=version, bound=bound)
    if whole and not killed:
        if not any((path / name).exists() for name in ("steps.parquet", "requests.parquet")):
            bound = "expected its tables, which a sweep keeps with `keep: tables`"
            raise RunError(f"{path}: holds the summary of the run only, {bound}", file=path, field="keep", bound=bound)
        steps = tables.read_steps(path / "steps.parquet", check=True)
        requests = tables.read_requests(path / "requests.parquet", len(steps))
    scenario = read_text(path / "scenario.resolved.yaml", RunError)
    environment = read_json(path / "env.json", RunError)
    return Run(path, scenario, environment, summary, steps, requests, incomplete(path))


def incomplete(path: Path) -> str | None:
    """Return the reason why a directory is incomplete; None if it is not. Raises RunError."""
    marker = path / MARKER
    return (read_text(marker, RunError).strip() or "no reason was written") if marker.exists() else None


def _summary_so_far(file: Path, terms: Mapping[str, Any], requests: RequestTable, steps: Steps) -> dict[str, Any]:
    """Return the summary.json of these tables as if the run had been interrupted here. `terms` is the content of
    `file`, TERMS. Raises RunError if it is not what a run writes.
    """
    try:
        counted = terms["counted"]
        return {**terms["about"], **metrics.summarise(requests, steps, **counted | _window(counted["window_s"]))}
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file}: not what a run writes: {type(error).__name__}: {error}", file=file) from error


def _window(written: Sequence[float | None] | None) -> dict[str, Any]:
    """Return the window of `metrics.summarise` from a file, where null is an open end."""
    low, high = written or (None, None)
    return {"window_s": written and (-np.inf if low is None else low, np.inf if high is None else high)}


def _check_numbers(file: Path, run: Run) -> None:
    """Raise RunError unless every metric of a summary, in `file`, is that of the tables beside it, but for rounding."""
    summary = run.summary
    bounds, price = lookup(summary, "slo.bounds"), lookup(summary, "cost.price_usd_hour")
    counted = {
        "total_blocks": summary["total_blocks"],
        **({"fleet": summary["per_server"]} if "per_server" in summary else {"servers": summary.get("servers", 1)}),
        "slo": bounds,
        "price_usd_hour": price,
    }
    derived = metrics.summarise(run.requests, run.steps, **counted | _window(summary.get("window_s")))
    pairs = [("", summary, derived)]
    for number, server in enumerate(derived.get("per_server", ())):
        pairs.append((f"per_server.{number}.", summary["per_server"][number], server))
    for where, written, right in pairs:
        _check_alike(file, written, right, "the tables beside it", where)


def _check_alike(
    file: Path, written: Mapping[str, Any], derived: Mapping[str, Any], source: str, where: str = ""
) -> None:
    """Raise RunError unless the metrics of a file are those derived from a `source`, but for rounding."""
    for name, value in quantities(derived).items():
        is_now = lookup(written, name)
        if not isinstance(is_now, int | float) or not isclose(is_now, value, rel_tol=1e-9, abs_tol=1e-12):
            raise RunError(f"{file}: {where}{name} is {shown(is_now)}, that of {source} is {value:.12g}", file=file)


def check_run(run: Run, loop: str, *, fleet: bool = False, whole: bool = True) -> None:
    """Raise RunError if env.json or summary.json lack keys that are read, if the summary is not that of a scenario with
    this loop, with or without a `fleet`, and, if `whole`, of the tables beside it, or if no server, on whatever clock,
    can have run these steps.
    """
    file = run.path / "summary.json"
    check(run.path / "env.json", run.environment, ENVIRONMENT)
    check(file, run.summary, SUMMARY)
    beside = (
        ("steps", len(run.steps), "steps.parquet"),
        ("requests", metrics.request_count(RequestTable.of(run.requests)), "requests.parquet"),
    )
    for key, value, other in (*(beside if whole else ()), ("loop", loop, "scenario.resolved.yaml")):
        if run.summary[key] != value:
            raise RunError(f"{file}: {key} is {run.summary[key]}, that of {other} is {value}")
    per_server = run.summary.get("per_server")
    if (per_server is not None) != fleet:
        raise RunError(f"{file}: per_server: must be there if the scenario has a fleet, and only then", file=file)
    count = run.summary.get("servers", 1) if per_server is None else len(per_server)
    if whole:
        check_servers(run, count)
    with refusing(run.path / "steps.parquet"):
        invariants.check_read(run.steps, int(run.summary["total_blocks"]))
    if whole:
        _check_numbers(file, run)
        check_tables(run, apart="hand_off" in run.summary)


@contextmanager
def refusing(file: Path) -> Iterator[None]:
    """Let a table that breaks an invariant be a RunError that names the file."""
    try:
        yield
    except AssertionError as error:
        raise RunError(f"{file}: {error}", file=file) from None


def check_tables(run: Run, *, apart: bool) -> None:
    """Raise RunError unless transfers and hand-offs, if prefill and decode are `apart`, can be those of the steps, and
    give the numbers of the summary.
    """
    transfers, hand_offs = (optional_tables.read(run.source, name) for name in (TRANSFERS, HAND_OFFS))
    summary = run.summary
    timed = run.environment.get("device") == SIMULATED  # the clocks of real servers and GPUs differ
    with refusing(run.path / TRANSFERS):
        if timed:
            invariants.check_transfers(run.steps, transfers)
        if apart:
            invariants.check_hand_offs(run.steps, transfers, hand_offs, timed=timed)
    if apart:  # the rate of the link is not in the summary
        of = metrics.hand_offs(hand_offs, RequestTable.of(run.requests), 1.0, summary["makespan_s"])
        derived, name = {"hand_off": of | {"link_busy": None}}, HAND_OFFS
    else:
        of = optional_tables.summarise_transfers(transfers, summary["makespan_s"] * summary.get("servers", 1))
        derived, name = {"kv_moves": of} if "kv_moves" in summary else {}, TRANSFERS
    _check_alike(run.path / "summary.json", summary, derived, name)


def fields(run: Run) -> dict[str, Any]:
    """Return the fields of a run's scenario. Raises RunError if it lacks some that a run of one loop has."""
    file = run.path / "scenario.resolved.yaml"
    scenario = documents.parse(run.scenario, str(file))
    if not isinstance(scenario, dict):
        raise RunError(f"{file}: not a scenario")
    check(file, scenario, SCENARIO)
    return scenario


AT_MOST_NAMED = 3  # errors of a document that a message lists


class Kind(NamedTuple):
    """A required type of a value: in words, and for pydantic. The value may be missing or null unless `needed`.

    Nothing is needed inside a value that is missing.
    """

    expected: str
    type: Any
    needed: bool = True

    def complaint(self, value: Any) -> str | None:
        if value is None:
            return f"is missing or null, expected {self.expected}" if self.needed else None
        try:
            TypeAdapter(self.type).validate_python(value, strict=True)
        except ValidationError:
            return f"is {shown(value)}, expected {self.expected}"
        return None


def optional(kind: Kind) -> Kind:
    return kind._replace(needed=False)


class _Server(Form):
    """A server of a fleet, as far as its summary is computed with it."""

    pool: str
    gpus: Annotated[int, Field(ge=1, le=LARGEST_WHOLE)]
    total_blocks: Annotated[int, Field(ge=0, le=LARGEST_WHOLE)]


_Number = Annotated[float, Field(ge=-LARGEST_REAL, le=LARGEST_REAL)]
TEXT, FLAG = Kind("text", str), Kind("true or false", bool)
WHOLE = Kind(f"a whole number from 0 to {LARGEST_WHOLE:,}", Annotated[int, Field(ge=0, le=LARGEST_WHOLE)])
NUMBER = Kind(f"a number up to {LARGEST_REAL:g}", _Number)
AMOUNT = Kind(f"a number from 0 to {LARGEST_REAL:g}", Annotated[float, Field(ge=0, le=LARGEST_REAL)])
NUMBERS = Kind(f"names with numbers up to {LARGEST_REAL:g}", dict[str, _Number])
FIELDS, LIST = Kind("fields", dict[str, Any]), Kind("a list", list[Any])
SLO_BOUNDS = Kind("bounds of ttft_s, tpot_s or e2e_s", dict[Literal["ttft_s", "tpot_s", "e2e_s"], _Number])
LOOP = Kind("sync or async", Literal["sync", "async"])
SERVERS = Kind("a list of servers with pool, gpus and total_blocks", list[_Server])
WINDOW = Kind("a list of two numbers or nulls", Annotated[list[_Number | None], Field(min_length=2, max_length=2)])
SUMMARY = (
    {metric: optional(AMOUNT) for metric in METRICS}
    | {"makespan_s": AMOUNT, "gpu_active": AMOUNT, "preemptions": WHOLE, "servers": optional(WHOLE)}
    | {"per_server": optional(SERVERS)}
    | {"name": TEXT, "question": TEXT, "loop": LOOP, "complete": FLAG, "percentile_method": TEXT, "total_blocks": WHOLE}
    | {"window_s": optional(WINDOW), "requests": WHOLE, "steps": WHOLE, "requests_by_status": NUMBERS}
    | {metric: AMOUNT for metric in SINGLE if "." not in metric and metric.endswith("_per_s")}
    | dict.fromkeys(DISTRIBUTIONS, FIELDS)
    | {"step_time_s": optional(FIELDS)}  # a run without a step has none
    | {f"{name}.n": WHOLE for name in DISTRIBUTIONS}
    | {f"{name}.too_few_for": optional(LIST) for name in DISTRIBUTIONS}
    | {"slo": optional(FIELDS), "cost": optional(FIELDS), "cost.price_usd_hour": NUMBER}
    | {"slo.bounds": SLO_BOUNDS}
)
ENVIRONMENT = (
    {"device": TEXT, "git": optional(FIELDS), "packages": optional(FIELDS), "injected_ms": optional(NUMBERS)}
    | {name: optional(TEXT) for name in ("command", "workload_hash", "engine", "git.commit", "step_times")}
    | {"notes": optional(LIST)}
)
SCENARIO = (
    {"name": TEXT, "loop.mode": LOOP, "scheduler.name": TEXT, "workload.kind": TEXT, "hardware.name": TEXT}
    | dict.fromkeys(("loop", "scheduler", "workload", "hardware", "cost"), FIELDS)
    | {"cost.kind": TEXT, "workload.arrivals": optional(FIELDS), "workload.arrivals.kind": TEXT}
    | {f"scheduler.{name}": optional(WHOLE) for name in ("max_num_batched_tokens", "max_batch_tokens")}
)


def check(file: object, document: Mapping[str, Any], declared: Mapping[str, Kind]) -> None:
    """Raise RunError if keys have other types than declared, naming the file, the keys, their values and the types."""
    wrong = list(_complaints(document, declared))
    if wrong:
        more = [f"{len(wrong) - AT_MOST_NAMED} more"] if len(wrong) > AT_MOST_NAMED else []
        raise RunError(f"{file}: {'; '.join([*wrong[:AT_MOST_NAMED], *more])}")


def _complaints(document: Mapping[str, Any], declared: Mapping[str, Kind]) -> Iterator[str]:
    for key, kind in declared.items():
        inside = key.rpartition(".")[0]
        complaint = None if inside and lookup(document, inside) is None else kind.complaint(lookup(document, key))
        if complaint:
            yield f"{key} {complaint}"
