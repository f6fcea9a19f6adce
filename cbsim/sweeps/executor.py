"""Where tasks are done: here, in processes of this machine, or elsewhere. What differs is who calls `work`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.connection import wait as wait_for
from typing import Protocol

from cbsim.errors import ScenarioError
from cbsim.scenario.fields import shown
from cbsim.sweeps.work import Made, Task, work

AHEAD = 2  # tasks a process is given at most, so that none waits for its next
DIED = "the process that worked on it died, twice: killed, or out of memory"
MOST_JOBS = 1024


class Executor(Protocol):
    """Does tasks in any order. Each comes back once, whatever happens to who works on it."""

    @property
    def about(self) -> str:
        """Where it works, in a few words."""

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        """What became of the tasks, as they are done. They are taken from `tasks` when there is a hand free."""

    def close(self) -> None:
        """Let go of everything at once; what is under way is lost. May be called twice."""


class Here:
    """One after the other, in this process."""

    about = "this process"

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        return map(work, tasks)

    def close(self) -> None:
        """Nothing is held."""


class Processes:
    """So many processes, each a fresh interpreter. One that dies takes nothing with it but what it was working on."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    @property
    def about(self) -> str:
        return f"{self._jobs} processes"

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        """As Executor. When a process dies, all that was under way is done again, one at a time: who is the only one
        under way when a process dies is to blame, and has failed.
        """
        waiting = iter(tasks)
        flying: dict[Future[Made], Task] = {}
        suspects: deque[Task] = deque()
        while True:
            tried = bool(suspects)
            fresh = [suspects.popleft()] if tried else islice(waiting, self._jobs * AHEAD - len(flying))
            flying |= {self._submit(task): task for task in fresh}
            if not flying:
                return
            done, _ = wait(flying, return_when=FIRST_COMPLETED)
            for future in done:
                task = flying.pop(future)
                try:
                    yield future.result()
                except BrokenProcessPool:
                    lost = [task, *flying.values()]
                    flying.clear()
                    self.close()
                    if tried:
                        yield Made(task.key, {}, DIED)
                    else:
                        suspects.extend(lost)
                    break

    def _submit(self, task: Task) -> Future[Made]:
        if self._pool is None:
            spawned = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._jobs, spawned, initializer=_begin)
        return self._pool.submit(work, task)

    def close(self) -> None:
        """As Executor: the processes are ended, not waited for."""
        pool, self._pool = self._pool, None
        if pool is not None:
            working = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in working:
                process.terminate()


def _begin() -> None:
    """In a new process: whoever started it decides on its end, and it ends with him."""
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
