"""Tasks on a Ray cluster. Its nodes need cbsim and the data but not the store: files are returned as bytes."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from cbsim.errors import RunError, ScenarioError
from cbsim.sweeps import identity
from cbsim.sweeps.work import AHEAD, Executor, Gone, Made, Task

CLIENT = "ray://"
REACHED_S = 3.0  # timeout for the machine to accept a connection
JOINED_S, CLIENT_S = 4.0, 60.0  # timeouts for joining; for a client address the cluster first starts a process
SLOWER = 4  # on a busy machine the joining timeout is this multiple of the time that loading Ray took
PATIENCE = {f"RAY_CLIENT_{name}_CONNECTION_TIMEOUT_S": "1" for name in ("INITIAL", "MAX")}  # Ray tries three times
DRIVER = "cbsim.sweeps.ray_driver"
NO_ANSWER = "no Ray cluster answers there"
NO_NODE = f"{NO_ANSWER}, or this machine is not one of its nodes; from others: {CLIENT}HOST:10001"
LOST = "the connection to the cluster is lost; the same command goes on where it stopped"


class RayCluster(Executor):
    """The executor on the cluster at `address`: `auto`, HOST:PORT, or ray://HOST:PORT. Nodes may join and leave.
    Raises ScenarioError if there is no cluster, RunError if it is lost or one of its nodes has other code or data.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._driver: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None
        if find_spec("ray") is None:
            raise self._error("ray is not installed: pip install -e '.[ray]'")
        self._join()

    def _count(self, cpus: int) -> None:
        self.about = f"Ray cluster of {cpus} CPUs at {self._address}"
        self.room = AHEAD * max(1, cpus)  # not 0 without CPUs, as pending tasks make a cluster add some

    def give(self, task: Task) -> None:
        """Send a task to the driver process. Raises RunError if the connection is lost."""
        try:
            self._join().send((task.key, pickle.dumps(task._replace(store=None))))
        except OSError as error:
            raise RunError(f"--ray {self._address}: {LOST}") from error

    def take(self) -> tuple[str, Made | Gone]:
        """Wait for the next task that was completed or lost; meanwhile keep the number of CPUs up to date."""
        while True:
            match self._receive(self._join()):
                case "cpus", cpus:
                    self._count(cpus)
                case "made", key, packed:
                    return key, pickle.loads(packed)
                case "died", key:
                    return key, Gone.PROCESS
                case "lost", key:
                    return key, Gone.MACHINE
                case _, problem:
                    raise RunError(f"--ray {self._address}: {problem}")

    def close(self) -> None:
        """Close the connection, upon which the driver process exits by itself and ends the tasks under way."""
        driver, pipe, self._driver, self._pipe = self._driver, self._pipe, None, None
        if driver is not None and pipe is not None:
            pipe.close()
            threading.Thread(target=driver.wait, daemon=True).start()

    def _join(self) -> Connection[Any, Any]:
        """Return the connection to the driver process, starting that process if there is none."""
        if self._pipe is not None:
            return self._pipe
        self._reach()
        begun = time.monotonic()
        self._pipe, theirs = Pipe()
        with theirs:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", DRIVER, self._address, identity.code(), str(theirs.fileno())],
                env={**PATIENCE, **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._receive(self._pipe)  # its modules are loaded
        loading_s = time.monotonic() - begun
        limit_s = CLIENT_S if self._address.startswith(CLIENT) else max(JOINED_S - loading_s, SLOWER * loading_s)
        kind: str = "wrong"
        answer: Any = NO_ANSWER if self._address.startswith(CLIENT) else NO_NODE
        if self._pipe.poll(limit_s):
            with suppress(RunError):  # Ray has ended the process
                kind, answer = self._receive(self._pipe)
        else:
            self._driver.kill()
        if kind == "wrong":
            self.close()
            raise self._error(answer)
        self._count(answer)
        return self._pipe

    def _reach(self) -> None:
        """Raise ScenarioError if nothing listens at the address."""
        if self._address != "auto":
            host, _, port = self._address.removeprefix(CLIENT).rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), REACHED_S).close()
            except OSError as error:
                raise self._error(NO_ANSWER) from error

    def _receive(self, pipe: Connection[Any, Any]) -> tuple[Any, ...]:
        """Return the next message of the driver. Raises RunError if the connection is lost."""
        try:
            message: tuple[Any, ...] = pipe.recv()
        except (EOFError, OSError):
            raise RunError(f"--ray {self._address}: {LOST}") from None
        return message

    def _error(self, problem: str) -> ScenarioError:
        return ScenarioError(f"--ray {self._address}: {problem}")
