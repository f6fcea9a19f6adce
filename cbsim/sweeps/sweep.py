"""A sweep: its points are built, those that the store lacks are run, and a table of all of them is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from cbsim.sweeps import identity, points, table
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.points import Point
from cbsim.sweeps.store import Store
from cbsim.sweeps.sweep_file import Keep, SweepFile
from cbsim.sweeps.table import Row
from cbsim.sweeps.work import Made, Task

FILES: dict[Keep, tuple[str, ...]] = {
    "summary": ("summary.json",),
    "tables": ("summary.json", "steps.parquet", "requests.parquet"),
    "all": ("summary.json", "steps.parquet", "requests.parquet", "timeline.json.gz"),
}
Hear = Callable[[Made], None]


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

    def __init__(self, file: SweepFile, base: Path, store: Path, shard: Shard = WHOLE) -> None:
        self.file = file
        self.points = points.of(file, base)
        self.store = Store(store, identity.code())
        there = self.store.keys()
        kept = {point.key for point in self.points if point.key in there and self._kept(point.key)}
        part = list({point.key: point for point in self.points}.values())[shard.number - 1 :: shard.of]
        self.missing = [point for point in part if point.key not in kept]
        for point in {point.scenario.workload: point for point in self.missing}.values():
            points.check_workload(point)

    def _kept(self, key: str) -> bool:
        return self.store.holds(key, FILES[self.file.keep])

    def run(self, executor: Executor, hear: Hear = lambda _: None) -> Swept:
        """Make the runs that are missing, and the table. `hear` is told of each when it is in the store; what it
        raises ends the sweep, which can go on later. The table is written then, too.
        """
        try:
            with closing(executor):
                for made in executor.each(self._tasks()):
                    self.store.keep(made)
                    hear(made)
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

    def _tasks(self) -> Iterator[Task]:
        return (Task(point.key, point.scenario, self.file.keep) for point in self.missing)
