"""Fleets of small engines whose servers are threads of this process: what crosses between them does so as ever."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cbengine.build import Setup
from cbengine.serving import fleet, member
from cbengine.serving.fleet import Fleet
from cbsim.errors import ServerError
from cbsim.record import directory, optional_tables
from cbsim.record.record import RequestRow
from cbsim.runs import reading, replan
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload
from support.engine.served import INLINE, check_text

LINK = {"bandwidth_gb_s": 1}


class Killed(BaseException):
    """Raised in a server's thread, it ends there, as if its process were killed."""


def _serve(*args: Any) -> None:
    try:
        member.serve(*args)
    except Killed:
        with socket.socket(fileno=os.dup(args[0].pipe.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)


class Thread:
    """A server's process as far as a fleet uses one, in a thread. It cannot be killed from outside."""

    exitcode = 0

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        assert target is member.run
        name = f"server {args[3].number}"
        self._thread = threading.Thread(target=_serve, args=args, name=name, daemon=True)
        self._pipe = args[0]
        self.start, self.is_alive = self._thread.start, self._thread.is_alive

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        raise AssertionError("a server did not end by itself")


class Far:
    """The far end of a pipe, which the thread keeps."""

    def __init__(self, pipe: Any) -> None:
        self.send, self.recv, self.pipe = pipe.send, pipe.recv, pipe

    def close(self) -> None:
        pass


def _pipe() -> tuple[Any, Any]:
    near, far = multiprocessing.Pipe()
    return near, Far(far)


@contextmanager
def threads() -> Iterator[None]:
    """Servers of fleets are threads."""
    spawning = SimpleNamespace(Pipe=_pipe, Process=Thread, RawArray=multiprocessing.RawArray)
    with mock.patch.object(fleet.multiprocessing, "get_context", return_value=spawning):
        yield


def apart(sizes: Scenario, prefill: int = 1, decode: int = 1, **more: Any) -> Scenario:
    """A fleet of servers that prefill and servers that decode, each like the given one."""
    pools = [{"name": role, "role": role, "count": count} for role, count in (("prefill", prefill), ("decode", decode))]
    router = "least_in_flight" if more.get("prefill_queue") == "global" else "round_robin"
    parts = {"pools": pools, "router": {"name": router}, "hand_off": {"link": LINK, **more}}
    return Scenario.model_validate(sizes.model_dump(mode="json") | {"fleet": parts})


class Served:
    """A fleet that has served its workload. `problem` is what it said if a server failed."""

    def __init__(
        self, scenario: Scenario, loop: str, load: Workload, setup: Setup = INLINE, *, fails: bool = False
    ) -> None:
        data = scenario.model_dump(mode="json")
        data["loop"]["mode"] = loop
        self.scenario, self.load, self.problem = fleet.adapted(Scenario.model_validate(data), setup), load, ""
        with threads():
            self.fleet = Fleet(replace(setup, saves_tokens=True), self.scenario, loop, load)
            try:
                self.fleet.run(lambda _: None)
            except ServerError as error:
                if not fails:
                    raise
                self.problem = str(error)
        self.rows: list[list[RequestRow]] = [list(each.requests) for each in self.fleet.record.records]
        self.texts = {text.spec.index: text for text in self.fleet._texts}

    @property
    def statuses(self) -> list[Counter[str]]:
        """How requests ended, by server."""
        return [Counter(row.status for row in rows) for rows in self.rows]

    def check(self) -> None:
        """Every request has ended, those that nobody cancelled with all their tokens, and everybody's are right; the
        plans of all servers follow from what they recorded.
        """
        requests, steps = directory.contents(self.fleet.record)
        files, problem = optional_tables.files_of(self.fleet.record), self.problem or None
        recorded = reading.Run(Path(), "", {}, {}, steps, requests, problem, files)
        assert replan.derived(recorded, self.scenario, self.load) == (len(steps), len(steps), None)
        assert sorted(self.texts) == list(range(self.load.total))
        gone = {spec.index for _, spec in self.load.cancels}
        for index, text in self.texts.items():
            assert index in gone or len(text.outputs) == text.spec.output_tokens, (index, len(text.outputs))
            check_text(text)
