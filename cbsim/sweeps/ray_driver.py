"""The driver process of a Ray cluster: `python -m cbsim.sweeps.ray_driver ADDRESS CODE FD`. Ray has a process of its
own because it prints, waits long for a missing cluster, and ends its process when the cluster's head node is gone.
Tasks arrive over the connection FD as (key, pickled Task) until it is closed; these messages are sent back:

    ("begun",)                        Ray is loaded
    ("cpus", n)                       the cluster's CPUs, once at the start and whenever they change
    ("made", key, pickled Made)       a task was completed
    ("died" | "lost", key)            the process or the machine that worked on the task is gone
    ("wrong", problem)                there is no cluster, or it cannot work on these tasks
"""

from __future__ import annotations

import logging
import pickle
import platform
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import ray
from ray import exceptions as gone

ASK_S = 1.0  # the shortest time between two queries of the cluster's size
DIED = (gone.WorkerCrashedError, gone.OutOfMemoryError)
LOST = (gone.NodeDiedError, gone.LocalRayletDiedError, gone.ObjectLostError)


def work_there(code: str, key: str, packed: bytes) -> tuple[bool, Any]:
    """Run a task in a process of the cluster; return (True, pickled Made), or (False, why this node cannot run it)."""
    try:
        from cbsim.sweeps import identity, work

        if identity.code() != code:
            return False, f"{platform.node()} has state {identity.code()} of cbsim, expected {code}: install the same"
        task = pickle.loads(packed)
        if identity.key(task.scenario) != key:
            return False, f"{platform.node()} has other data files, or another module of the scheduler"
    except Exception as error:
        return False, f"{platform.node()}: {type(error).__name__}: {error}"
    return True, pickle.dumps(work.work(task))


class Driver:
    """A bridge that submits tasks from the pipe to the cluster and queues the messages to send back; None ends them."""

    def __init__(self, code: str, pipe: Connection[Any, Any]) -> None:
        self.out: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._code, self._pipe = code, pipe
        self._work = ray.remote(max_retries=0, num_cpus=1)(work_there)
        self._cpus, self._asked_s = -1, -ASK_S
        self._count()

    def read(self) -> None:
        try:
            while True:
                key, packed = self._pipe.recv()
                task = self._work.remote(self._code, key, packed)
                task.future().add_done_callback(partial(self._done, key))
                self._count()
        except (EOFError, ConnectionError):
            self.out.put(None)
        except Exception as error:
            self.out.put(("wrong", _line(error)))

    def _count(self) -> None:
        if time.monotonic() - self._asked_s < ASK_S:
            return
        self._asked_s = time.monotonic()
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if cpus != self._cpus:
            self._cpus = cpus
            self.out.put(("cpus", cpus))

    def _done(self, key: str, future: Future[tuple[bool, Any]]) -> None:
        try:
            fit, content = future.result()
            self.out.put(("made", key, content) if fit else ("wrong", _line(content)))
        except DIED:
            self.out.put(("died", key))
        except LOST:
            self.out.put(("lost", key))
        except Exception as error:
            self.out.put(("wrong", _line(error)))


def _line(problem: object) -> str:
    return " ".join(str(problem).split())


def main(address: str, code: str, descriptor: str) -> None:
    """Serve the connection until it is closed; then shut Ray down, which ends the tasks under way."""
    pipe: Connection[Any, Any] = Connection(int(descriptor))
    pipe.send(("begun",))
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL)
    except Exception as error:
        pipe.send(("wrong", "no Ray cluster answers there" if isinstance(error, ConnectionError) else _line(error)))
        return
    driver = Driver(code, pipe)
    threading.Thread(target=driver.read, daemon=True).start()
    try:
        with suppress(ConnectionError):
            for message in iter(driver.out.get, None):
                pipe.send(message)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
