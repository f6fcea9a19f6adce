"""The work of one point: a run, in any process of any machine, which returns the files of the run's directory; and
executors (this process, processes of this machine, or a Ray cluster) with their retries when a process or machine dies.

At the start of a run the server is still empty, so the latencies of the first requests can be left out (`warmup`).
"""

from __future__ import annotations

import json
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.errors import UserError, in_line
from cbsim.machine.repriced import REPRICED, Repriced
from cbsim.machine.simulate import Simulation
from cbsim.runs import progress, running
from cbsim.runs.result import Result
from cbsim.runs.running import Terms
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps.sweep_file import Keep

BINDS = "binds.json"
COMMAND = "python -m cbsim run scenario.resolved.yaml"  # to be run in the point's directory
MOST_JOBS = 1024
AHEAD = 2  # tasks submitted per process at most, so that no process waits for its next one
MOST_LOST = 10
DIED = "the process that worked on it died, twice: killed, or out of memory"
GIVEN_UP = f"{MOST_LOST} machines that worked on it were lost"


class Task(NamedTuple):
    """A run to be made, and which of its files to keep."""

    key: str
    scenario: Scenario
    keep: Keep
    warmup: float = 0.0  # the share of requests, in order of arrival, whose latencies do not count
    limits: bool = False  # whether to keep also what limits the run, as a list of sentences
    others: tuple[Scenario, ...] = ()  # whose costs price the steps of the run again; REPRICED is kept, too
    store: Callable[[str, Mapping[str, bytes]], object] | None = None  # takes key and files, where the run is made


class Made(NamedTuple):
    """The outcome of a task: the files of its run directory by name if nothing has stored them; or why it failed."""

    key: str
    files: Mapping[str, bytes]
    reason: str | None = None


class Gone(Enum):
    """The reason why a task was not completed: its process died, or its machine was lost."""

    PROCESS = "the process that worked on it died"
    MACHINE = "the machine did, or what it had made was lost with it"


class Executor(ABC):
    """A pool of processes that work on tasks, one task per process at a time. `about` describes them; `room`, which may
    change at any time, is the number of tasks that may be under way, at least 1.
    """

    about: str
    room: int

    @abstractmethod
    def give(self, task: Task) -> None:
        """Submit a task."""

    @abstractmethod
    def take(self) -> tuple[str, Made | Gone]:
        """Wait for the next task that was completed or lost; return its key and its outcome."""

    def close(self) -> None:  # noqa: B027
        """Stop all workers at once; tasks under way are lost. A second call does nothing."""

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        """Yield each task's outcome on completion. A task is taken from `tasks` when a process is free. One whose
        process died is repeated while no other task is under way: after all others, or once `room` such tasks are
        waiting; if its process dies again, the task fails. A task whose machine was lost is not at fault: it is
        repeated at once, and fails after MOST_LOST lost machines.
        """
        waiting, suspects = iter(tasks), deque[Task]()
        flying, lost = dict[str, Task](), Counter[str]()
        while True:
            room = self.room
            fresh = list(islice(waiting, max(0, room - len(flying)))) if len(suspects) < room else []
            alone = bool(suspects) and not (fresh or flying)
            for task in [suspects.popleft()] if alone else fresh:
                flying[task.key] = task
                self.give(task)
            if not flying:
                return
            key, became = self.take()
            task = flying.pop(key)
            if isinstance(became, Made):
                yield became
            elif became is Gone.PROCESS and alone:
                yield Made(key, {}, DIED)
            elif became is Gone.PROCESS:
                suspects.append(task)
            else:
                lost[key] += 1
                if lost[key] == MOST_LOST:
                    yield Made(key, {}, GIVEN_UP)
                else:
                    flying[key] = task
                    self.give(task)


def work(task: Task) -> Made:
    """Make the run. An exception of the run is not raised but returned as the reason of the failure."""
    try:
        scenario = task.scenario
        serve = partial(Repriced, others=task.others) if task.others else Simulation
        terms = Terms(COMMAND, digests=task.keep != "summary", warmup=task.warmup)
        result = running.one_loop(scenario, scenario.loop.mode, serve, terms)
        files = _files(result, task.keep) | ({BINDS: _json(result.binding)} if task.limits else {})
        files |= {REPRICED: result.files[REPRICED]} if task.others else {}
    except Exception as error:
        return Made(task.key, {}, _reason(error))
    if task.store:
        task.store(task.key, files)
    return Made(task.key, {} if task.store else files)


def _files(result: Result, keep: Keep) -> dict[str, bytes]:
    if keep == "summary":
        return {
            "scenario.resolved.yaml": result.resolved.encode(),
            "env.json": _json(result.environment),
            "summary.json": _json(result.summary),
        }
    with tempfile.TemporaryDirectory() as folder:
        saved = result.save(folder)
        files = {path.relative_to(saved).as_posix(): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    if keep == "tables":
        return {name: content for name, content in files.items() if not name.startswith(("figures/", "timeline"))}
    return files


def _json(value: Mapping[str, Any] | list[str]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _reason(error: Exception) -> str:
    """Return in one line why a run failed, with the place in the code if the cause is a bug of this project."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OverflowError):
        return f"a number is too large for a run: {error}"
    if isinstance(error, MemoryError):
        return "out of memory"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{in_line(error)} ({Path(frame.filename).name}:{frame.lineno}, {frame.name})"


class Here(Executor):
    """An executor that runs the tasks one after the other in this process."""

    about, room = "this process", 1

    def give(self, task: Task) -> None:
        self._task = task

    def take(self) -> tuple[str, Made | Gone]:
        return self._task.key, work(self._task)


class Processes(Executor):
    """A pool of `jobs` processes, each a fresh interpreter. When one dies, all tasks under way are not completed."""

    def __init__(self, jobs: int) -> None:
        self.about = f"{jobs} processes"
        self.room = jobs * AHEAD
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._flying: dict[Future[Made], tuple[str, ProcessPoolExecutor]] = {}

    def give(self, task: Task) -> None:
        """Submit a task, starting the pool if there is none."""
        if self._pool is None:
            self._pool = progress.worker_pool(self._jobs)
        try:
            future = progress.submitted(self._pool, work, task)
        except BrokenProcessPool as error:
            future = Future()
            future.set_exception(error)
        self._flying[future] = task.key, self._pool

    def take(self) -> tuple[str, Made | Gone]:
        """Wait for the next task that was completed or lost; close the pool if it is broken."""
        done, _ = wait(self._flying, return_when=FIRST_COMPLETED)
        future = done.pop()
        key, pool = self._flying.pop(future)
        try:
            return key, future.result()
        except BrokenProcessPool:
            if pool is self._pool:
                self.close()
            return key, Gone.PROCESS

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            progress.end_pool(pool)
