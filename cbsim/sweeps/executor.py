"""Executors of tasks: this process, processes of this machine, or a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for

from cbsim.errors import ScenarioError
from cbsim.scenario.fields import shown
from cbsim.sweeps.work import AHEAD, Executor, Gone, Made, Task, work

MOST_JOBS = 1024


class Here(Executor):
    """An executor that runs the tasks one after the other in this process."""

    about, room = "this process", 1

    def give(self, task: Task) -> None:
        self._task = task

    def take(self) -> tuple[str, Made | Gone]:
        return self._task.key, work(self._task)


class Processes(Executor):
    """A pool of `jobs` processes, each a fresh interpreter. When one dies, the whole pool is lost, and every task under
    way is returned as not completed.
    """

    def __init__(self, jobs: int) -> None:
        self.about = f"{jobs} processes"
        self.room = jobs * AHEAD
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._flying: dict[Future[Made], tuple[str, ProcessPoolExecutor]] = {}

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
