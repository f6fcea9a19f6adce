"""Where tasks are done: here, in processes of this machine or on a Ray cluster; what follows when a worker dies."""

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

AHEAD = 2  # tasks a process is given at most, so that none waits for its next
MOST_JOBS = 1024
MOST_LOST = 10
DIED = "the process that worked on it died, twice: killed, or out of memory"
GIVEN_UP = f"{MOST_LOST} machines that worked on it were lost"


class Executor(Protocol):
    """Does tasks in any order. Each comes back once, whatever happens to the process that works on it."""

    @property
    def about(self) -> str:
        """Where it works, in a few words."""

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        """What became of the tasks, as they are done. They are taken from `tasks` when a process is free."""

    def close(self) -> None:
        """End everything at once; what is under way is lost. May be called twice."""


class Gone(Enum):
    """Why a task came back undone."""

    PROCESS = "the process that worked on it died"
    MACHINE = "the machine did, or what it had made was lost with it"


class Workers(Protocol):
    """Processes that work on tasks, one task a process."""

    @property
    def room(self) -> int:
        """So many tasks may be under way now, at least 1. It may change at any time."""

    def give(self, task: Task) -> None: ...

    def take(self) -> tuple[str, Made | Gone]:
        """The key of a task that is done or came back, and what became of it. Waits for it."""


def each(tasks: Iterable[Task], workers: Workers) -> Iterator[Made]:
    """What became of the tasks, as they are done. One whose process dies is done again when nothing else is under way:
    after all others, or when there are as many of its kind as there is room; it fails if its process dies again. One
    whose machine is lost is not to blame, and is done again at once, but not for ever.
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
    """One after the other, in this process."""

    about = "this process"

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        return map(work, tasks)

    def close(self) -> None:
        """Nothing is open."""


class Processes:
    """So many processes, each a fresh interpreter. When one dies the whole pool does, and all that was under way comes
    back undone.
    """

    def __init__(self, jobs: int) -> None:
        self.about = f"{jobs} processes"
        self.room = jobs * AHEAD
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._flying: dict[Future[Made], tuple[str, ProcessPoolExecutor]] = {}

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        """As Executor, and as each."""
        return each(tasks, self)

    def give(self, task: Task) -> None:
        """As Workers."""
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
        """As Workers."""
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
        """As Executor: the processes are ended, not waited for."""
        pool, self._pool = self._pool, None
        if pool is not None:
            working = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in working:
                process.terminate()


def _begin() -> None:
    """In a new process: its parent decides on its end, and it ends with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait_for([parent.sentinel]), os._exit(1)), daemon=True).start()


def executor(jobs: int, ray: str | None = None, *, apart: bool = False) -> Executor:
    """One job is this process unless it is to be `apart`, several are others; `ray` is a cluster's address. Raises
    ScenarioError, RunError.
    """
    if isinstance(jobs, bool) or not isinstance(jobs, int) or not 1 <= jobs <= MOST_JOBS:
        bound = f"expected a whole number from 1 to {MOST_JOBS}"
        raise ScenarioError(f"jobs: got {shown(jobs)}, {bound}", field="jobs", value=jobs, bound=bound)
    if ray is not None:
        from cbsim.sweeps.ray_cluster import RayCluster

        return RayCluster(ray)
    return Processes(jobs) if apart or jobs > 1 else Here()
