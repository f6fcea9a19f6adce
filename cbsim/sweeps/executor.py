"""Executors of tasks: this process, processes of this machine, or a Ray cluster; and retries when a worker dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from enum import Enum
from itertools import islice
from multiprocessing.connection import wait as wait_for
from typing import Protocol

from cbsim.errors import ScenarioError
from cbsim.scenario.fields import shown
from cbsim.sweeps.work import Made, Task, work

AHEAD = 2  # tasks submitted per process at most, so that no process waits for its next one
MOST_JOBS = 1024
MOST_LOST = 10
DIED = "the process that worked on it died, twice: killed, or out of memory"
GIVEN_UP = f"{MOST_LOST} machines that worked on it were lost"


class Executor(Protocol):
    """An executor completes tasks in any order and returns each exactly once, even if its worker process dies."""

    @property
    def about(self) -> str:
        """A short description of the processes or machines that it uses."""

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        """Yield each task's outcome on completion. A task is taken from `tasks` when a process is free."""

    def close(self) -> None:
        """Stop all workers at once; tasks under way are lost. A second call does nothing."""


class Gone(Enum):
    """The reason why a task was not completed: its process died, or its machine was lost."""

    PROCESS = "the process that worked on it died"
    MACHINE = "the machine did, or what it had made was lost with it"


class Workers(Protocol):
    """A pool of processes that work on tasks, one task per process at a time."""

    @property
    def room(self) -> int:
        """The number of tasks that may be under way now, at least 1. It may change at any time."""

    def give(self, task: Task) -> None: ...

    def take(self) -> tuple[str, Made | Gone]:
        """Wait for the next task that was completed or lost; return its key and its outcome."""


def each(tasks: Iterable[Task], workers: Workers) -> Iterator[Made]:
    """Yield each task's outcome on completion. A task whose process died is repeated while no other task is under way:
    after all others, or once `room` such tasks are waiting; if its process dies again, the task fails. A task whose
    machine was lost is not at fault: it is repeated at once, and fails after MOST_LOST lost machines.
    """
    waiting, suspects = iter(tasks), deque[Task]()
    flying, lost = dict[str, Task](), Counter[str]()
    while True:
        room = workers.room
        fresh = list(islice(waiting, max(0, room - len(flying)))) if len(suspects) < room else []
        alone = bool(suspects) and not (fresh or flying)
        for task in [suspects.popleft()] if alone else fresh:
            flying[task.key] = task
            workers.give(task)
        if not flying:
            return
        key, became = workers.take()
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
                workers.give(task)


class Here:
    """An executor that runs the tasks one after the other in this process."""

    about = "this process"

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        return map(work, tasks)

    def close(self) -> None:
        """Do nothing: no process is open."""


class Processes:
    """A pool of `jobs` processes, each a fresh interpreter. When one dies, the whole pool is lost, and every task under
    way is returned as not completed.
    """

    def __init__(self, jobs: int) -> None:
        self.about = f"{jobs} processes"
        self.room = jobs * AHEAD
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._flying: dict[Future[Made], tuple[str, ProcessPoolExecutor]] = {}

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        """Yield each task's outcome on completion, with the retries of the function `each`."""
        return each(tasks, self)

    def give(self, task: Task) -> None:
        """Submit a task, starting the pool if there is none."""
        if self._pool is None:
            spawned = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, spawned, initializer=_begin)
        try:
            future = self._pool.submit(work, task)
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
        """Terminate the processes without waiting for their tasks."""
        pool, self._pool = self._pool, None
        if pool is not None:
            working = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in working:
                process.terminate()


def _begin() -> None:
    """Initialise a worker process: it ignores SIGINT, which its parent handles, and exits when the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait_for([parent.sentinel]), os._exit(1)), daemon=True).start()


def executor(jobs: int, ray: str | None = None, *, apart: bool = False) -> Executor:
    """Return the executor for `jobs` processes, or for the Ray cluster at address `ray`. One job runs in this process,
    unless `apart` requires another. Raises ScenarioError, RunError.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= MOST_JOBS:
        bound = f"expected a whole number from 1 to {MOST_JOBS}"
        raise ScenarioError(f"jobs: got {shown(jobs)}, {bound}", field="jobs", value=jobs, bound=bound)
    if ray is not None:
        from cbsim.sweeps.ray_cluster import RayCluster

        return RayCluster(ray)
    return Processes(jobs) if apart or jobs > 1 else Here()
