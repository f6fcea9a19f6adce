"""A Ray cluster works on tasks. Its nodes need cbsim and the data, not the store: files come back as bytes.

What happens to a task when who works on it is gone: it is done again, and only a task that is to blame fails.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from importlib.util import find_spec
from itertools import islice
from typing import Any, Protocol

from cbsim.errors import RunError, ScenarioError
from cbsim.sweeps import identity
from cbsim.sweeps.executor import AHEAD, DIED
from cbsim.sweeps.work import Made, Task

CLIENT = "ray://"
REACHED_S = 3.0  # for a machine to answer
JOINED_S, CLIENT_S = 4.0, 60.0  # for its cluster to take us; with a client's address it starts a process for us first
SLOWER = 4  # or so many times what it took to load Ray, on a machine that has no time for us
PATIENCE = {f"RAY_CLIENT_{name}_CONNECTION_TIMEOUT_S": "1" for name in ("INITIAL", "MAX")}  # which is tried thrice
DRIVER = "cbsim.sweeps.ray_driver"
PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
NO_ANSWER = "no Ray cluster answers there"
NO_NODE = f"{NO_ANSWER}, or this machine is not one of its nodes; from others: {CLIENT}HOST:10001"
LOST = "the connection to the cluster is lost; the same command goes on where it stopped"


class RayCluster:
    """The nodes of the cluster at `address`: `auto`, HOST:PORT, or ray://HOST:PORT. They may come and go. Raises
    ScenarioError if there is none, RunError if it is lost or a node of it has other code or data.
    """

    def __init__(self, address: str) -> None:
        self._address, self._cpus = address, 0
        self._driver: subprocess.Popen[bytes] | None = None
        if find_spec("ray") is None:
            raise self._refused("ray is not installed: pip install -e '.[ray]'")
        self._join()

    @property
    def about(self) -> str:
        return f"Ray cluster of {self._cpus} CPUs at {self._address}"

    @property
    def room(self) -> int:
        """As Workers. A cluster without a CPU may get one, and has to hear that it is needed."""
        return AHEAD * max(1, self._cpus)

    def each(self, tasks: Iterable[Task]) -> Iterator[Made]:
        """As Executor, and as each."""
        return each(tasks, self)

    def give(self, task: Task) -> None:
        """As Workers."""
        stdin = self._join().stdin
        assert stdin is not None
        try:
            pickle.dump((task.key, pickle.dumps(task)), stdin)
            stdin.flush()
        except OSError as error:
            raise RunError(f"--ray {self._address}: {LOST}") from error

    def take(self) -> tuple[str, Made | Gone]:
        """As Workers."""
        while True:
            match self._heard(self._join()):
                case "cpus", cpus:
                    self._cpus = cpus
                case "made", key, packed:
                    return key, pickle.loads(packed)
                case "died", key:
                    return key, Gone.PROCESS
                case "lost", key:
                    return key, Gone.MACHINE
                case _, text:
                    raise RunError(f"--ray {self._address}: {text}")

    def close(self) -> None:
        """As Executor. The driver hears of it and ends by itself; with it ends what is under way."""
        driver, self._driver = self._driver, None
        if driver is None:
            return
        for pipe in (driver.stdin, driver.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        threading.Thread(target=driver.wait, daemon=True).start()

    def _join(self) -> subprocess.Popen[bytes]:
        """The process that speaks with the cluster."""
        if self._driver is not None:
            return self._driver
        self._reach()
        begun = time.monotonic()
        paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-m", DRIVER, self._address, identity.code()]
        self._driver = driver = subprocess.Popen(
            words, env={**PATIENCE, **os.environ, **paths}, start_new_session=True, **PIPES
        )
        self._heard(driver)  # its modules are loaded
        loading_s = time.monotonic() - begun
        limit_s = CLIENT_S if self._address.startswith(CLIENT) else max(JOINED_S - loading_s, SLOWER * loading_s)
        limit = threading.Timer(limit_s, driver.kill)
        limit.daemon = True
        limit.start()
        try:
            kind, said = self._heard(driver)
        except RunError:
            kind, said = "wrong", NO_ANSWER if self._address.startswith(CLIENT) else NO_NODE
        finally:
            limit.cancel()
        if kind == "wrong":
            self.close()
            raise self._refused(said)
        self._cpus = said
        return driver

    def _reach(self) -> None:
        """Does anybody listen at the address?"""
        if self._address != "auto":
            host, _, port = self._address.removeprefix(CLIENT).rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), REACHED_S).close()
            except OSError as error:
                raise self._refused(NO_ANSWER) from error

    def _heard(self, driver: subprocess.Popen[bytes]) -> tuple[Any, ...]:
        """What the driver says next."""
        assert driver.stdout is not None
        try:
            message: tuple[Any, ...] = pickle.load(driver.stdout)
        except EOFError:
            raise RunError(f"--ray {self._address}: {LOST}") from None
        return message

    def _refused(self, why: str) -> ScenarioError:
        return ScenarioError(f"--ray {self._address}: {why}")


MOST_LOST = 10
GIVEN_UP = f"{MOST_LOST} machines that worked on it were lost"


class Gone(Enum):
    """Why a task came back undone."""

    PROCESS = "the process that worked on it died"
    MACHINE = "the machine did, or what it had made was lost with it"


class Workers(Protocol):
    """Who works on tasks, one task a process."""

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
        elif became is Gone.PROCESS:
            if alone:
                yield Made(key, {}, DIED)
            else:
                suspects.append(task)
        else:
            lost[key] += 1
            if lost[key] == MOST_LOST:
                yield Made(key, {}, GIVEN_UP)
            else:
                flying[key] = task
                workers.give(task)
