"""The cores of this machine. A process that dies takes nothing with it but what it was working on."""

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

from cbsim.sweeps.work import Made, Task, work

AHEAD = 2  # tasks a process is given at most, so that none waits for its next
DIED = "the process that worked on it died, twice: killed, or out of memory"


class Processes:
    """So many processes, each a fresh interpreter."""

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
