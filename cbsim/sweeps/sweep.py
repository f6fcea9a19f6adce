"""A sweep: its points are built, those that the store lacks are run, and a table of all of them is written.

A point is a resolved scenario of one loop. All are built before one runs. `Progress` and what follows it is what
`cbsim sweep` shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from cbsim.errors import ERROR, OK, ScenarioError
from cbsim.runs.progress import ProgressLine
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.documents import Document
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps import identity, store, sweep_file, table
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.store import SILENT, Runs, Store
from cbsim.sweeps.sweep_file import Keep, Settings, SweepFile, overrides
from cbsim.sweeps.table import Row
from cbsim.sweeps.work import Made, Task
from cbsim.workload import generators

LARGEST_SEED = 2**63 - 1  # that a table holds
MOST_TOLD = 20
"""Mistakes that are told at once; points that make the same one count as one."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run: what its axes set, its place among the replicates, and the scenario of one loop that follows."""

    settings: Settings
    replicate: int
    scenario: Scenario
    key: str

    @property
    def loop(self) -> str:
        return self.scenario.loop.mode


Variants = Callable[[Sequence[str]], Scenario]


def variants(source: str | Path | Mapping[str, Any], base: Path) -> Variants:
    """The scenarios that overrides make of one: of its fields, of a file from the folder `base`, or of a name."""
    if isinstance(source, Mapping):
        return scenarios.Variants(Document("scenario", None, dict(source)), base)
    beside = base / source
    return scenarios.variants(beside if beside.is_file() else source)


def of(sweep: SweepFile, base: Path) -> list[Point]:
    """All points of a sweep, in its order. Raises ScenarioError that tells of every point that cannot be built."""
    make, always = variants(sweep.scenario, base), overrides(sweep.set)
    points: list[Point] = []
    wrong: dict[str, list[str]] = {}
    for settings, replicate in sweep.settings():
        try:
            points += _built(make([*always, *overrides(settings)]), settings, replicate)
        except ScenarioError as error:
            said = ", ".join(f"{name}={settings[name]}" for name in sweep.names) or "the scenario"
            wrong.setdefault(str(error), []).append(said)
    if wrong:
        raise ScenarioError(_told(sweep.name, wrong))
    return points


def again(point: Point, replicate: int) -> Point:
    """A point of replicate 0 as another one: what differs is the seed."""
    scenario = point.scenario.model_copy(update={"seed": point.scenario.seed + replicate})
    return Point(point.settings, replicate, scenario, identity.key(scenario))


def _built(scenario: Scenario, settings: Settings, replicate: int) -> list[Point]:
    """The loops of one place."""
    if scenario.seed + replicate > LARGEST_SEED:
        bound = f"must be <= {LARGEST_SEED:,} with its replicates"
        raise ScenarioError(f"seed: got {scenario.seed:,}, {bound}", field="seed", value=scenario.seed, bound=bound)
    if replicate:
        scenario = scenario.model_copy(update={"seed": scenario.seed + replicate})
    made = []
    for mode in scenarios.loops(scenario):
        each = scenario.model_copy(update={"loop": scenario.loop.model_copy(update={"mode": mode})})
        made.append(Point(settings, replicate, each, identity.key(each)))
    return made


def _told(name: str, wrong: Mapping[str, Sequence[str]]) -> str:
    """Every mistake once, with the points that make it."""
    count = sum(map(len, wrong.values()))
    if count == 1:
        return f"sweep {name}: {next(iter(wrong.values()))[0]}: {next(iter(wrong))}"
    lines = [f"sweep {name}: {count} points cannot be built; nothing was run"]
    for error, places in list(wrong.items())[:MOST_TOLD]:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        lines.append(f"  {places[0]}{more}: {error}")
    if len(wrong) > MOST_TOLD:
        lines.append(f"  and {len(wrong) - MOST_TOLD} other mistakes")
    return "\n".join(lines)


def check_workload(point: Point) -> None:
    """Raises ScenarioError if its workload cannot be built, which reads its data."""
    generators.build(point.scenario)


FILES: dict[Keep, tuple[str, ...]] = {
    "summary": ("summary.json",),
    "tables": ("summary.json", "steps.parquet", "requests.parquet"),
    "all": ("summary.json", "steps.parquet", "requests.parquet", "timeline.json.gz"),
}


class Shard(NamedTuple):
    """Every `of`-th point from the `number`-th on, counted from 1: the part of a sweep that a machine does."""

    number: int = 1
    of: int = 1


WHOLE = Shard()


@dataclass(frozen=True, eq=False)
class Swept:
    """What a sweep gives. `table` has a row a point; `path` is its file."""

    name: str
    rows: Sequence[Row]
    path: Path

    @cached_property
    def table(self) -> pa.Table:
        return table.table(self.rows)

    @property
    def failed(self) -> dict[str, list[Point]]:
        """The points that failed, by the reason."""
        failed: dict[str, list[Point]] = {}
        for row in self.rows:
            if row.reason is not None:
                failed.setdefault(row.reason, []).append(row.point)
        return failed

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    def __repr__(self) -> str:
        return f"<Swept {self.name}: {self.count(table.DONE)} of {len(self.rows)} points done>"


class Sweep:
    """The points of a file, and the store that keeps their runs. Raises ScenarioError, RunError."""

    def __init__(self, file: SweepFile, base: Path, folder: Path, shard: Shard = WHOLE) -> None:
        self.file = file
        self.points = of(file, base)
        self.store = Store(folder, identity.code())
        there = self.store.keys()
        kept = {point.key for point in self.points if point.key in there and self._kept(point.key)}
        part = list({point.key: point for point in self.points}.values())[shard.number - 1 :: shard.of]
        self.missing = [point for point in part if point.key not in kept]
        for point in {point.scenario.workload: point for point in self.missing}.values():
            check_workload(point)

    def _kept(self, key: str) -> bool:
        return self.store.holds(key, FILES[self.file.keep])

    def run(
        self, executor: Executor, hear: Callable[[Made], None] = SILENT, progress: store.Progress = SILENT
    ) -> Swept:
        """Make the runs that are missing, and the table. `hear` is called with each when it is in the store; what it
        raises ends the sweep, which can go on later. The table is written then, too. Raises RunError, Interrupted.
        """
        tasks = (Task(point.key, point.scenario, self.file.keep) for point in self.missing)
        try:
            with closing(executor):
                Runs(self.store, executor, progress).make(tasks, FILES[self.file.keep], hear)
        finally:
            swept = self.now()
        return swept

    def now(self) -> Swept:
        """What there is of it: its table is written. Raises RunError."""
        there = self.store.keys()
        rows = [self._row(point, point.key in there) for point in self.points]
        swept = Swept(self.file.name, rows, self.store.path / f"{self.file.name}.parquet")
        table.write(swept.table, swept.path)
        return swept

    def _row(self, point: Point, there: bool) -> Row:
        if there:
            return Row(point, self.store.summary(point.key), None)
        return Row(point, None, self.store.reason(point.key))


MOST_REASONS = 10


class SweepOptions(NamedTuple):
    """What `cbsim sweep` was told, parsed."""

    file: Path
    store: Path
    shard: Shard
    as_json: bool
    quiet: bool


def run(options: SweepOptions, executor: Executor) -> int:
    """Do what is missing of a sweep, say what came out. The exit status: 1 if a point failed or none was made."""
    file, base = sweep_file.read(options.file)
    sweep = Sweep(file, base, options.store, options.shard)
    silent = options.quiet or options.as_json
    if not silent:
        _say_begun(sweep, options, executor)
    swept = sweep.run(executor, progress=SILENT if silent else Progress())
    if options.as_json:
        print(json.dumps(_numbers(swept), indent=2, allow_nan=False))
    elif options.quiet:
        print(swept.path)
    else:
        _say(swept)
    _say_failed(swept)
    return ERROR if swept.failed else OK


def _say_begun(sweep: Sweep, options: SweepOptions, executor: Executor) -> None:
    shard = f", shard {options.shard.number} of {options.shard.of}" if options.shard.of > 1 else ""
    print(f"{sweep.file.name}: {len(sweep.points):,} points, {len(sweep.missing):,} to be run{shard}; {executor.about}")
    for state, runs in sweep.store.others.items():
        print(f"{sweep.store.path}: {runs:,} runs of another state of the code ({state}) stay apart")


class Progress:
    """A line on stderr: points done and failed, points a second, the time left."""

    def begin(self, total: int) -> None:
        self._total, self._done, self._failed, self._written = total, 0, 0, 0
        self._line = ProgressLine(5.0)

    def __call__(self, made: Made) -> None:
        self._done += 1
        self._failed += made.reason is not None
        if self._line.due:
            self._write()

    def end(self) -> None:
        if self._done != self._written:
            self._write(last=True)

    def _write(self, *, last: bool = False) -> None:
        self._written = self._done
        message = f"{self._done:,} of {self._total:,} points, {self._done / max(self._line.spent_s, 1e-9):.3g} a second"
        message += f", {self._failed:,} failed" if self._failed else ""
        self._line.write(message, self._done, self._total, last=last)


def _say(swept: Swept) -> None:
    counts = {status: swept.count(status) for status in (table.DONE, table.FAILED, table.MISSING)}
    print(", ".join(f"{count:,} {status}" for status, count in counts.items() if count or status == table.DONE))
    print(f"table     {swept.path}")
    print(f"read it   pandas.read_parquet({str(swept.path)!r})")


def _say_failed(swept: Swept) -> None:
    for reason, points in list(swept.failed.items())[:MOST_REASONS]:
        where = ", ".join(f"{name}={value}" for name, value in points[0].settings.items()) or points[0].scenario.name
        more = f" and {len(points) - 1} more" if len(points) > 1 else ""
        print(f"failed    {where}{more}: {reason}", file=sys.stderr)


def _numbers(swept: Swept) -> dict[str, object]:
    rows: Sequence[dict[str, object]] = swept.table.to_pylist()
    return {"name": swept.name, "table": str(swept.path), "points": rows}
