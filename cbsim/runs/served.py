"""The common part of simulated and real sessions with clients: their requests, the contents, and the run.

A session is a run whose requests are not known before: its log is the workload (cbsim.workload.served), so the same
requests can be run again, and its plans derived again, from the run directory alone.
"""

from __future__ import annotations

import errno
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import RawIOBase
from pathlib import Path
from typing import Any

from cbsim.errors import RunError, ScenarioError
from cbsim.files import access
from cbsim.policy.request import RequestSpec
from cbsim.runs.result import TIMELINE, Result
from cbsim.runs.running import Maker, Session, Terms
from cbsim.scenario.demand import Served
from cbsim.scenario.scenario import Scenario
from cbsim.workload import served

LEAST_KNOWN = 1 << 16
TIMES_THE_POOL = 4


class Contents:
    """A map from texts to chained ids, one for every full block of `block_tokens` tokens: equal ids mean equal tokens
    up to and including that block. New ids are consecutive. The least recently used blocks are dropped; far more are
    kept than a cache of `num_blocks` holds.
    """

    def __init__(self, block_tokens: int, num_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._most = max(LEAST_KNOWN, TIMES_THE_POOL * num_blocks)
        self._ids: OrderedDict[tuple[int | str, tuple[int, ...]], int] = OrderedDict()
        self.blocks: dict[int, tuple[int | str, tuple[int, ...]]] = {}  # after which id or salt, and its tokens
        self._last = 0
        self.forgotten: Callable[[], None] = lambda: None  # called when all blocks were dropped

    def prefix(self, tokens: Sequence[int], salt: str = "") -> tuple[int, ...]:
        """Return the ids of a text. Texts of different salts share none."""
        width, ids = self.block_tokens, list[int]()
        for end in range(width, len(tokens) + 1, width):
            parent = ids[-1] if ids else salt
            ids.append(self._id((parent, tuple(tokens[end - width : end]))))
        return tuple(ids)

    def forget(self) -> None:
        """Drop all blocks: no later text shares content with earlier ones."""
        self._ids.clear()
        self.blocks.clear()
        self.forgotten()

    def _id(self, key: tuple[int | str, tuple[int, ...]]) -> int:
        known = self._ids.get(key)
        if known is not None:
            self._ids.move_to_end(key)
            return known
        self._last += 1
        self._ids[key], self.blocks[self._last] = self._last, key
        if len(self._ids) > self._most:
            del self.blocks[self._ids.popitem(last=False)[1]]
        return self._last


class Log:
    """The log of a session's requests in order of arrival, line by line `in_memory`, and in a file, at once. If
    the file can no longer be written it ends with a whole line; `alarm` is called with the reason, `problem`.
    """

    def __init__(self, *, in_memory: bool = True) -> None:
        self._in_memory = in_memory
        self.count = 0
        self.problem: str | None = None
        self.alarm: Callable[[str], None] = partial(print, file=sys.stderr, flush=True)
        self._lines: list[str] = []
        self._path: Path | None = None
        self._file: RawIOBase | None = None
        self._bytes = 0  # of the file, whole lines

    def write_to(self, path: Path) -> None:
        """Write the lines from now on to a file as well. Raises RunError."""
        with access(path, RunError, "written"):
            self._path, self._file = path, path.open("wb", buffering=0)

    def came(self, spec: RequestSpec) -> None:
        assert spec.index == self.count, (spec.index, self.count)
        self.count += 1
        self.add(served.came(spec))

    def left(self, spec: RequestSpec, at_ns: int) -> None:
        self.add(served.left(spec, at_ns))

    def content(self) -> str:
        return "".join(self._lines)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # the lines written so far are kept
                self._file.close()
            self._file = None

    def add(self, line: str) -> None:
        if self._in_memory:
            self._lines.append(line)
        if self._file is None:
            return
        data = line.encode()
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._bytes += len(data)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        assert self._file is not None
        with suppress(OSError):
            self._file.truncate(self._bytes)
        self.close()
        rest = "in memory only" if self._in_memory else "lost"
        self.problem = f"{self._path}: cannot be written: {error.strerror or error}: what follows is {rest}"
        self.alarm(self.problem)


def with_one_loop(scenario: Scenario, *, several: bool = False) -> Scenario:
    """Return the scenario with one loop: the asynchronous one if it has both. `several` servers may serve a session.
    Raises ScenarioError.
    """
    if scenario.fleet is not None and not several:
        bound = "must be null: a session is served by one server"
        raise ScenarioError(f"fleet: got {scenario.fleet.count} servers, {bound}", field="fleet")
    if scenario.ranks > 1:
        bound = "must be 1: a session is served by one server"
        raise ScenarioError(f"cost.data_parallel: got {scenario.ranks}, {bound}", field="cost.data_parallel")
    if scenario.loop.mode != "both":
        return scenario
    return scenario.model_copy(update={"loop": scenario.loop.model_copy(update={"mode": "async"})})


def session_of(scenario: Scenario, loop: str, serve: Maker, command: str) -> Session:
    """Make a session, without requests so far."""
    open_ended = scenario.model_copy(update={"workload": Served(kind="served", path=served.FILE)})
    return Session(open_ended, loop, serve, Terms(command, requests=""))


def result_of(session: Session, log: Log, facts: Mapping[str, Any], incomplete: str | None = None) -> Result:
    """Return the result of a session; `facts` go into its summary under `served`."""
    session.set_requests(log.content())
    result = session.result(incomplete)
    return replace(result, summary={**result.summary, "served": dict(facts)})


class SessionDirectory:
    """The run directory of a session: made at its start, complete when the session has ended in order."""

    def __init__(self, session: Session, log: Log, out: Path) -> None:
        """Raises RunError."""
        self._session, self._log, self._writer = session, log, session.open(out, "served")
        log.write_to(self._writer.path / served.FILE)

    @property
    def path(self) -> Path:
        return self._writer.path

    def write(self, facts: Mapping[str, Any], incomplete: str | None = None) -> Result:
        """Write the results of a session that is over. Raises RunError."""
        self._log.close()
        return result_of(self._session, self._log, facts, incomplete).write(self._writer, TIMELINE)
