"""A sweep: builds its points, runs those that the store lacks, and writes a table of all of them: a row per point, with
its settings, its status, and every metric by its dotted name.

A point is a resolved scenario of one loop. All points are built before the first one runs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cbsim.errors import ERROR, OK, RunError, ScenarioError, UserError, beginning
from cbsim.files import access
from cbsim.metrics import coverage
from cbsim.metrics.catalogue import PER_GPU, PER_USER, quantities
from cbsim.metrics.swept import DONE, FAILED, MISSING
from cbsim.record.directory import write_whole
from cbsim.record.parquet import optional
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import cut, shown
from cbsim.scenario.overrides import Changes, written
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps import identity, sweep_file
from cbsim.sweeps.ray_cluster import RayCluster
from cbsim.sweeps.store import Progress, Runs, Store, first_of
from cbsim.sweeps.sweep_file import Keep, Settings, SweepFile
from cbsim.sweeps.work import MOST_JOBS, Executor, Here, Made, Processes, Task
from cbsim.workload import generators

LARGEST_SEED = 2**63 - 1  # the largest integer that a column of the table holds
MOST_LISTED, MOST_REASONS = 20, 10
"""The largest number of mistakes and of failures listed; points with the same one count once."""
VALUES = re.compile(r"(?<=got )[^,]+|\([^)]*\)")  # in which points differ that make one mistake
FILES: dict[Keep, tuple[str, ...]] = {
    "summary": ("summary.json",),
    "tables": ("summary.json", "steps.parquet", "requests.parquet"),
    "all": ("summary.json", "steps.parquet", "requests.parquet", "timeline.json.gz"),
}
Shard = tuple[int, int]
"""(i, n): the part of a sweep that one machine runs: every n-th point from the i-th on, counted from 1."""


@dataclass(frozen=True, slots=True)
class Point:
    """A run of a sweep: the fields that its axes set, its replicate's index, its scenario of one loop, and its key."""

    settings: Settings
    replicate: int
    scenario: Scenario
    key: str

    @property
    def loop(self) -> str:
        return self.scenario.loop.mode


def variants(source: str | Path | Mapping[str, Any], base: Path) -> scenarios.Variants:
    """Return the scenarios under different overrides; `source` has fields, a file relative to `base`, or a name."""
    if isinstance(source, Mapping):
        return scenarios.Variants(Document("scenario", None, dict(source)), base)
    beside = base / source
    return scenarios.variants(beside if beside.is_file() else source)


def of(sweep: SweepFile, base: Path, option: str = "") -> list[Point]:
    """Return all points of a sweep in order; their data are read. Raises a ScenarioError that lists every point that
    cannot be built, and names the `option` of a command line that has the axes.
    """
    make, always = variants(sweep.scenario, base), written(sweep.set)
    points, workloads = list[Point](), set[Any]()
    mistakes: dict[str, tuple[str, dict[str, None]]] = {}  # the first, the points that make it but for its value
    for number, (settings, replicate) in enumerate(sweep.settings()):
        overrides = list[str]()
        try:
            overrides = _wholes_first([*always, *written(settings)])
            points += _built(scenario := make(overrides), settings, replicate)
            if scenario.workload not in workloads:
                generators.build(scenario)
                workloads.add(scenario.workload)
        except ScenarioError as error:
            label = f"point {number // sweep.replicates} ({_fields(settings)})" if settings else "the scenario"
            given, reason = [f"--set {cut(each)}" for each in overrides if not (option and each in always)], str(error)
            for said in (f" with {', '.join(given)}", *(f"{each}: " for each in given)):
                reason = reason.replace(said, "")  # the label has it
            for line in reason.splitlines():
                mistakes.setdefault(VALUES.sub("", line), (line, {}))[1][label] = None
    if mistakes:
        raise ScenarioError(_summary_of(list(mistakes.values()), option or f"sweep {sweep.name}"))
    return points


def _wholes_first(overrides: Sequence[str]) -> list[str]:
    """Return overrides in an order in which none undoes another: a whole part before its fields."""
    ordered = list[str]()
    for override in overrides:
        fields = f"{override.partition('=')[0]}."
        at = next((at for at, other in enumerate(ordered) if other.startswith(fields)), len(ordered))
        ordered.insert(at, override)
    return ordered


def _fields(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def again(point: Point, replicate: int) -> Point:
    """Return another replicate of a point of replicate 0; only the seed differs."""
    return _built(point.scenario, point.settings, replicate)[0]


def _built(scenario: Scenario, settings: Settings, replicate: int) -> list[Point]:
    """Return one point per loop of a scenario. Raises ScenarioError if the seed is above LARGEST_SEED."""
    seed = scenario.seed + replicate
    if seed > LARGEST_SEED:
        bound = f"must be <= {LARGEST_SEED:,} with its replicates"
        raise ScenarioError(f"seed: got {scenario.seed:,}, {bound}", field="seed", value=scenario.seed, bound=bound)
    loops = (scenario.loop.model_copy(update={"mode": mode}) for mode in scenarios.loops(scenario))
    runs = [scenario.model_copy(update={"loop": loop, "seed": seed}) for loop in loops]
    return [Point(settings, replicate, each, identity.key(each)) for each in runs]


def _summary_of(mistakes: Sequence[tuple[str, Iterable[str]]], head: str) -> str:
    """Return a message that lists every mistake once, with the points that make it."""
    count = len({label for _, labels in mistakes for label in labels})
    lines = [f"{first_of(labels)}: {error}" for error, labels in mistakes]
    if count == 1:
        return "\n".join(f"{head}: {line}" for line in lines)
    more = [f"and {len(lines) - MOST_LISTED} other mistakes"] if len(lines) > MOST_LISTED else []
    return "\n  ".join([f"{head}: {count} points cannot be built; nothing was run", *lines[:MOST_LISTED], *more])


class Row(NamedTuple):
    """A point and its outcome: a summary only if it is done, a reason only if it failed."""

    point: Point
    summary: Mapping[str, Any] | None
    reason: str | None

    @property
    def status(self) -> str:
        return DONE if self.summary is not None else FAILED if self.reason is not None else MISSING

    @property
    def numbers(self) -> dict[str, float]:
        return {} if self.summary is None else numbers(self.point, self.summary)


def numbers(point: Point, summary: Mapping[str, Any]) -> dict[str, float]:
    """Return every metric of a run, and two of the whole system: tokens/s per GPU, and per user, 1 / mean TPOT."""
    metrics = quantities(summary)
    metrics[PER_GPU] = metrics["output_tokens_per_s"] / point.scenario.all_gpus
    if metrics.get("tpot_s.mean"):
        metrics[PER_USER] = 1 / metrics["tpot_s.mean"]
    return metrics


def table_of(rows: Sequence[Row], command: str = "") -> pa.Table:
    """Return the columns `loop`, the fields that axes set, `seed`, `replicate`, `key`, `status`, `reason`, then the
    metrics; a value that a run does not have is null. The metadata says of what the sweep is, and its command.
    """
    points = [row.point for row in rows]
    columns = {"loop": optional([point.loop for point in points], str)}
    axes = [{name: value for name, value in of.settings.items() if name not in ("loop.mode", "seed")} for of in points]
    columns |= _columns(axes, _typed)
    columns["seed"] = optional([point.scenario.seed for point in points], int)
    columns["replicate"] = optional([point.replicate for point in points], int)
    columns["key"] = optional([point.key for point in points], str)
    columns |= {name: optional([getattr(row, name) for row in rows], str) for name in ("status", "reason")}
    table = pa.table(columns | _columns([row.numbers for row in rows], partial(optional, kind=float)))
    rest = "\n".join(coverage.bases(point.scenario for point in points))
    subjects = dict.fromkeys(f"{each.scenario.model.name} on {each.scenario.hardware.name}" for each in points)
    about = {"subject": ", ".join(subjects), "command": command}
    about |= {"scenario": scenarios.dump(points[0].scenario)} if points else {}
    return table.replace_schema_metadata({coverage.STEP_TIMES: rest.encode()} | about)


def _columns(rows: Sequence[Mapping[str, Any]], array: Callable[[list[Any]], pa.Array]) -> dict[str, pa.Array]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: array([row.get(name) for row in rows]) for name in names}


def _typed(values: Sequence[Any]) -> pa.Array:
    """Return the values of one field as a column: unchanged if of one type, mixed numbers as floats, else as JSON."""
    types = {type(value) for value in values if value is not None}
    if types <= {bool}:
        return pa.array(values)
    for kind, taken in ((str, {str}), (int, {int}), (float, {int, float})):
        if types <= taken:
            return optional(values, kind)
    return optional([None if value is None else json.dumps(value, sort_keys=True) for value in values], str)


@dataclass(frozen=True, eq=False)
class Swept:
    """The outcome of a sweep. `table` has a row per point; `path` is its file."""

    name: str
    rows: Sequence[Row]
    path: Path
    command: str = ""

    @cached_property
    def table(self) -> pa.Table:
        return table_of(self.rows, self.command)

    @property
    def failed(self) -> dict[str, list[Point]]:
        failed: dict[str, list[Point]] = {}
        for row in self.rows:
            if row.reason is not None:
                failed.setdefault(row.reason, []).append(row.point)
        return failed

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    def __str__(self) -> str:
        counts = {status: self.count(status) for status in (DONE, FAILED, MISSING)}
        line = ", ".join(f"{count:,} {status}" for status, count in counts.items() if count or status == DONE)
        rest = "".join(f"note      {each}\n" for each in coverage.bases(row.point.scenario for row in self.rows))
        return f"{line}\n{rest}table     {self.path}\nread it   pandas.read_parquet({str(self.path)!r})"

    def __repr__(self) -> str:
        return f"<Swept {self.name}: {self.count(DONE)} of {len(self.rows)} points done>"


class Sweep:
    """A sweep: the points of a file, and the store of their runs. Raises ScenarioError, RunError."""

    def __init__(self, file: SweepFile, base: Path, folder: Path, shard: Shard = (1, 1), command: str = "") -> None:
        self.file, self.command = file, command
        self.points = of(file, base)
        self.store, self.path = Store(folder), folder / f"{file.name}.parquet"
        with access(self.path, UserError, "written"), TemporaryDirectory(dir=folder):  # tried before any run
            if self.path.is_dir():
                raise IsADirectoryError("it is a folder")
        number, parts = shard
        part = list({point.key: point for point in self.points}.values())[number - 1 :: parts]
        self.missing = [point for point in part if not self.store.holds(point.key, FILES[file.keep])]

    def run(
        self, executor: Executor, hear: Callable[[Made], object] = lambda _: None, progress: Progress | None = None
    ) -> Swept:
        """Make the missing runs, and the table. `hear` is called with each outcome once it is stored; an exception that
        it raises ends the sweep, after the table is written; the sweep can be resumed. Raises RunError, Interrupted.
        """
        tasks = (Task(point.key, point.scenario, self.file.keep) for point in self.missing)
        try:
            with closing(executor):
                Runs(self.store, executor, progress).make(tasks, FILES[self.file.keep], hear)
        finally:
            self.store.tidy()
            swept = self.now()
        return swept

    def now(self) -> Swept:
        """Write the table of the runs that the store has now, and return the sweep's outcome. Raises RunError."""
        rows = [Row(point, *self.store.outcome(point.key, FILES[self.file.keep])) for point in self.points]
        swept = Swept(self.file.name, rows, self.path, self.command)
        with access(self.path, RunError, "written"):
            write_whole(self.path, partial(pq.write_table, swept.table, compression="zstd"))
        return swept


def opened(source: Any, changes: Changes, store: Path, shard: Shard = (1, 1), command: str = "") -> Sweep:
    """Return the sweep of a file, or of its fields, with changes of its scenario. Raises ScenarioError, RunError."""
    file, base = sweep_file.read(source, changes)
    with nullcontext() if isinstance(source, Mapping) else beginning(source, file=str(source)):
        return Sweep(file, base, store, shard, command)


def run(
    path: Path, store: Path, executor: Executor, *, shard: Shard, as_json: bool, quiet: bool, command: str = ""
) -> int:
    """Make the missing runs of a sweep and print its outcome. Return the exit status: 1 if a point failed, else 0."""
    sweep = opened(path, (), store, shard, command)
    silent, file = quiet or as_json, sweep.file
    if not silent:
        part = f", shard {shard[0]} of {shard[1]}" if shard[1] > 1 else ""
        print(f"{file.name}: {len(sweep.points):,} points, {len(sweep.missing):,} to be run{part}; {executor.about}")
        for state, runs in sweep.store.other_states.items():
            print(f"{store}: {runs:,} runs of another state of the code ({state}) stay apart")
    swept = sweep.run(executor, progress=Progress(silent=silent))
    if as_json:
        answer = {"name": swept.name, "table": str(swept.path), "points": swept.table.to_pylist()}
        print(json.dumps(answer, indent=2, allow_nan=False))
    else:
        print(swept.path if quiet else swept)
    for reason, points in list(swept.failed.items())[:MOST_REASONS]:
        labels = (_fields(each.settings) for each in points)
        print(f"failed    {first_of(label or file.name for label in labels)}: {reason}", file=sys.stderr)
    return ERROR if swept.failed else OK


def executor(jobs: int, ray: str | None = None, *, apart: bool = False) -> Executor:
    """Return the executor for `jobs` processes, or for the Ray cluster at address `ray`. One job runs in this process,
    unless `apart` requires another. Raises ScenarioError, RunError.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= MOST_JOBS:
        bound = f"expected a whole number from 1 to {MOST_JOBS}"
        raise ScenarioError(f"jobs: got {shown(jobs)}, {bound}", field="jobs", value=jobs, bound=bound)
    if ray is not None:
        return RayCluster(ray)
    return Processes(jobs) if apart or jobs > 1 else Here()
