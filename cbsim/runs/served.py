"""What a session that clients talk to has in common in both worlds: its requests, their content, and its run.

A session is a run whose requests are not known before: its log is the workload (cbsim.workload.served), so the same
requests can be run again, and its plans derived again, from the run directory alone.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import RawIOBase
from pathlib import Path
from typing import Any

from cbsim.errors import RunError
from cbsim.files import access
from cbsim.policy.request import RequestSpec
from cbsim.record.directory import RunWriter
from cbsim.runs.result import TIMELINE, Result
from cbsim.runs.running import Maker, Session, Terms
from cbsim.scenario.demand import Served
from cbsim.scenario.scenario import Scenario
from cbsim.workload import served

LEAST_KNOWN = 1 << 16
TIMES_THE_POOL = 4


class Contents:
    """Texts as chained ids, one for every full block of `block_tokens` tokens: equal ids mean equal tokens up to and
    including that block. New ids follow each other. The blocks that were not seen for the longest time are forgotten;
    far more are known than a cache of `num_blocks` holds.
    """

    def __init__(self, block_tokens: int, num_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._most = max(LEAST_KNOWN, TIMES_THE_POOL * num_blocks)
        self._ids: OrderedDict[tuple[int | str, tuple[int, ...]], int] = OrderedDict()
        self._last = 0

    def prefix(self, tokens: Sequence[int], salt: str = "") -> tuple[int, ...]:
        """The ids of a text. Texts of different salts share none."""
        width, ids = self.block_tokens, list[int]()
        for end in range(width, len(tokens) + 1, width):
            parent = ids[-1] if ids else salt
            ids.append(self._id((parent, tuple(tokens[end - width : end]))))
        return tuple(ids)

    def forget(self) -> None:
        """No text from now on shares content with those before."""
        self._ids.clear()

    def _id(self, key: tuple[int | str, tuple[int, ...]]) -> int:
        known = self._ids.get(key)
        if known is not None:
            self._ids.move_to_end(key)
            return known
        self._last += 1
        self._ids[key] = self._last
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)
        return self._last


def _unheard(problem: str) -> None:
    del problem


class Log:
    """The requests of a session as they come, line by line; also in a file, at once, if there is one. A file that
    cannot be written any more ends with a whole line, `problem` says why, and `alarm` is called with it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.problem: str | None = None
        self.alarm: Callable[[str], None] = _unheard
        self._lines: list[str] = []
        self._path: Path | None = None
        self._file: RawIOBase | None = None
        self._bytes = 0  # of the file, whole lines

    def write_to(self, path: Path) -> None:
        """From now on. Raises RunError."""
        with access(path, RunError, "written"):
            self._path, self._file = path, path.open("wb", buffering=0)

    def came(self, spec: RequestSpec) -> None:
        assert spec.index == self.count, (spec.index, self.count)
        self.count += 1
        self._add(served.came(spec))

    def left(self, spec: RequestSpec, at_ns: int) -> None:
        self._add(served.left(spec, at_ns))

    def content(self) -> str:
        return "".join(self._lines)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what was written is written
                self._file.close()
            self._file = None

    def _add(self, line: str) -> None:
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
        self.problem = f"{self._path}: cannot be written: {error.strerror or error}: from request {self.count - 1} on"
        self.alarm(self.problem)


def with_one_loop(scenario: Scenario) -> Scenario:
    """The scenario with one loop: of both loops the asynchronous one."""
    if scenario.loop.mode != "both":
        return scenario
    return scenario.model_copy(update={"loop": scenario.loop.model_copy(update={"mode": "async"})})


def session_of(scenario: Scenario, loop: str, serve: Maker, command: str) -> Session:
    """A session without requests so far."""
    open_ended = scenario.model_copy(update={"workload": Served(kind="served", path=served.FILE)})
    return Session(open_ended, loop, serve, Terms(command, requests=""))


def result_of(session: Session, log: Log, facts: Mapping[str, Any], incomplete: str | None = None) -> Result:
    """What has happened in a session; `facts` go into its summary under `served`."""
    session.set_requests(log.content())
    result = session.result(incomplete)
    return replace(result, summary={**result.summary, "served": dict(facts)})


class SessionDirectory:
    """The run directory of a session: there from its first moment, complete when it was ended in order."""

    def __init__(self, session: Session, log: Log, out: Path) -> None:
        """Raises RunError."""
        digest = hashlib.sha256(session.resolved.encode()).hexdigest()
        self._session, self._log = session, log
        self._writer = RunWriter(out, f"{session.scenario.name}-{session.loop}-served", digest)
        self._writer.scenario(session.resolved)
        self._writer.environment(session.environment)
        log.write_to(self._writer.path / served.FILE)
        session.write_to(self._writer)

    @property
    def path(self) -> Path:
        return self._writer.path

    def write(self, facts: Mapping[str, Any], incomplete: str | None = None) -> Result:
        """The session is over. Raises RunError."""
        self._log.close()
        result = result_of(self._session, self._log, facts, incomplete)
        try:
            result.write(self._writer, TIMELINE)
        except RunError as error:
            if incomplete is None:
                with suppress(RunError):
                    self._writer.note(str(error))
            raise
        return replace(result, path=self.path)
