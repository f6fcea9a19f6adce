"""Runs that somebody needs one after the other: those that the store lacks are made, and kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cbsim.results.directory import RunError
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps import identity
from cbsim.sweeps.executor import Executor
from cbsim.sweeps.store import Store
from cbsim.sweeps.work import BINDS, Task

FILES = ("summary.json", BINDS)


class Run(NamedTuple):
    """What is known of a run: its summary, and what limits it."""

    summary: Mapping[str, Any]
    binds: Sequence[str]


class Runs:
    """The runs of a store, and who makes those that it lacks. `made` counts these."""

    def __init__(self, store: Store, executor: Executor) -> None:
        self._store, self._executor = store, executor
        self.made = 0

    @property
    def about(self) -> str:
        """Who makes them."""
        return self._executor.about

    def of(self, scenarios: Sequence[Scenario], warmup: float) -> list[Run]:
        """The runs of these scenarios, in their order; `warmup` as in Task. Raises RunError if one fails."""
        tasks = [Task(identity.key(each, warmup), each, "summary", warmup, binds=True) for each in scenarios]
        seeds = {task.key: task.scenario.seed for task in tasks}
        lacking = {task.key: task for task in tasks if not self._store.holds(task.key, FILES)}
        for made in self._executor.each(lacking.values()):
            self._store.keep(made)
            if made.reason is not None:
                raise RunError(f"{scenarios[0].name}: seed {seeds[made.key]}: {made.reason}")
            self.made += 1
        return [self._read(task.key) for task in tasks]

    def _read(self, key: str) -> Run:
        path = self._store.run(key) / BINDS
        try:
            return Run(self._store.summary(key), json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise RunError(f"{path}: cannot be read: {error}; remove {path.parent} to make it again") from error
