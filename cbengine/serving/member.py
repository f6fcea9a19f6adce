"""A server of a fleet in a process of its own: it is sent requests, and reports what becomes of them once a step.

Tuples of plain values cross, the first of which is the kind: from the front `came`, `left`, `begin`, `drop`, `close`
and `stop`; back `ready`, `ordered`, `moved`, `news` and `over`. If the front dies, a server ends after the step under
way.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cbengine.build import Setup
from cbengine.device.base import EngineDevice
from cbengine.device.hand_over import Channel, HandOver, joined
from cbengine.device.moves import Moved
from cbengine.model.kvcache import KvCache
from cbengine.sequence import Sequence
from cbengine.serving.reporter import EngineServer, Happened, Left, Post, Reporter, WokenClock
from cbsim.errors import ServerError, UserError
from cbsim.policy.request import RequestSpec
from cbsim.record.record import HANDED_OFF, Record, RequestRow
from cbsim.record.tables import FinishedRecord, RequestTable, requests_of
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

LOOK_S = 0.05  # the longest wait for news, so that an interrupt is noticed
END_S = 10.0  # the longest that a server may take to stop after the step under way
FIELDS = tuple(field.name for field in fields(RequestSpec))


class Place(NamedTuple):
    """A server's number in its fleet, the servers that it exchanges KV with, and the folder where they meet."""

    number: int
    peers: tuple[int, ...]
    folder: Path


def crossing(text: Sequence, spec: RequestSpec, *, further: bool) -> tuple[Any, ...]:
    """Return a leg of a request as values that cross to another process, whether the core is compiled or not."""
    values = tuple([getattr(spec, name) for name in FIELDS])
    return values, further, text.prompt, text.sampling, text.stops, text.least, text.seed


class Member:
    """A server and its end of the connection. Raises the errors of building an engine, ServerError."""

    def __init__(self, pipe: Connection, scenario: Scenario, setup: Setup, place: Place) -> None:
        self._pipe, self._place, self._post = pipe, place, Post()
        if setup.device == "cuda":
            torch.cuda.set_device(place.number % torch.cuda.device_count())
        reporter, handing = Reporter(self._post, self._report), self._handing if place.peers else None
        work = reporter, scenario, scenario.loop.mode, Workload([], 0), handing
        self.server = EngineServer(setup, self._post, *work)
        self._device: Any = self.server.device
        self._specs = dict[int, RequestSpec]()

    def _handing(self, device: EngineDevice, cache: KvCache) -> EngineDevice:
        """Return a device that hands KV over, once all peers are there."""
        number, peers, folder = self._place
        over, several = deque[Moved](), cache.keys.is_cuda and torch.cuda.device_count() > max(number, *peers)

        def ended(moved: Moved) -> None:
            over.append(moved)
            self._post.wake()

        join = partial(joined, folder, number, backend="nccl" if several else "gloo")
        channels = {peer: Channel(cache, int(number < peer), partial(join, peer), ended) for peer in peers}
        for peer, channel in channels.items():
            if not channel.meet():
                raise ServerError(f"cannot reach server {peer}")
        return HandOver(device, channels, over, lambda *told: self._pipe.send(told), WokenClock(self._post).wait_until)

    def _report(self, happened: Happened) -> None:
        load, record = self.server.load, self.server.engine.record
        tokens = [(spec.index, ids) for spec, ids in happened.tokens]
        ended = [(end.spec.index, end.finish, end.error or "") for end in happened.ended]
        self._pipe.send(("news", happened.at_ns, load, record.step_count, tokens, ended))

    def receive(self) -> None:
        """Do what the front says, until it closes the connection; the body of a thread."""
        by: dict[str, Any] = {"begin": self._device, "drop": self._device, "close": self._post, "stop": self._post}
        with suppress(EOFError, OSError):
            while True:
                kind, *values = self._pipe.recv()
                getattr(by.get(kind, self), kind)(*values)
                self._post.wake()
        self._post.stop()

    def came(self, fields: tuple[Any, ...], further: bool, *text: Any) -> None:
        """Take a request; it is a `further` leg of one that another server has, too."""
        spec = self._specs[fields[0]] = RequestSpec(*fields)
        if further:
            self.server.engine.record.goes_on(spec, HANDED_OFF)
        self._post.send(Sequence(spec, *text))

    def left(self, index: int, at_ns: int) -> None:
        self._post.send(Left(self._specs[index], at_ns))


def run(*work: Any) -> None:
    """Serve, with the arguments of `serve`; the body of a server's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when to stop
    torch.set_num_threads(1)
    serve(*work)
    os._exit(0)  # a channel may still wait for its peer, and must not be taken apart meanwhile


def serve(pipe: Connection, scenario: Scenario, setup: Setup, place: Place) -> None:
    """Serve until the front has no more requests, or has died; say at the end what was recorded."""
    problem, server = "", None
    with suppress(OSError):  # the front has gone
        try:
            member = Member(pipe, scenario, setup, place)
            server = member.server
            pipe.send(("ready", server.engine.record.total_blocks, dict(server.facts)))
            server.start_ns = pipe.recv()
            threading.Thread(target=member.receive, name="receiver", daemon=True).start()
            server.run(lambda _: None)
        except EOFError:
            return
        except (ServerError, UserError) as stop:
            problem = str(stop)
        except Exception as defect:  # any error is reported by the front
            problem = f"{type(defect).__name__}: {defect}"
        made: tuple[FinishedRecord | None, dict[str, Any]] = None, {}
        if server is not None:
            made = FinishedRecord.of(server.engine.record), dict(server.facts)
        pipe.send(("over", *made, problem))


# -- the front's end ---------------------------------------------------------------------------------------------------


class Server:
    """A server's process as this one sees it."""

    def __init__(self, name: str, pipe: Connection, process: SpawnProcess) -> None:
        self.name, self.pipe, self.process = name, pipe, process
        self.record = nothing(0)
        self._ends: dict[int, tuple[RequestRow, bool]] = {}  # of requests, in case that it cannot say so itself
        self.facts: dict[str, Any] = {}
        self.problem, self.ready, self.over, self.heard_s = "", False, False, time.monotonic()

    @property
    def silent_s(self) -> float:
        """The seconds since it last said anything."""
        return time.monotonic() - self.heard_s

    def send(self, message: Any) -> None:
        """Send a message, unless it has died: then its end of the pipe will say so."""
        with suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> tuple[Any, ...]:
        """Return its next message; of one that has died the last."""
        self.heard_s = time.monotonic()
        try:
            kind, *values = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(END_S)
            code = self.process.exitcode
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            kind, values = "over", [None, {}, f"{how}: what it recorded is lost"]
        if kind == "over":
            record, facts, self.problem = values
            self.over, self.facts = True, self.facts | facts
            self.record = record or nothing(self.record.total_blocks)
        return kind, *values

    def note(self, spec: RequestSpec, now_ns: int, status: str, reason: str, *, died: bool) -> None:
        """Note how a request ended here, or as the server `died`."""
        record = Record(0)
        record.queued(spec, now_ns)
        [row] = requests_of(record)
        self._ends[spec.index] = row._replace(queued_poll=-1, status=status, reason=reason), died

    def end(self) -> None:
        """End the process, unless it has ended, and let it give its record if it can."""
        if self.pipe.closed:
            return
        self.send(("stop",))
        until = time.monotonic() + END_S
        while self.ready and not self.over and time.monotonic() < until:
            if self.pipe.poll(LOOK_S):
                self.receive()
        self.pipe.close()
        if not self.over:
            self.process.kill()
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        rows = {row.index: row for row in self.record.requests}
        for index, (row, died) in self._ends.items():
            if died or index not in rows:
                rows[index] = rows.get(index, row)._replace(status=row.status, reason=row.reason)
        self.record.requests = RequestTable.of([rows[index] for index in sorted(rows)])


def nothing(total_blocks: int) -> FinishedRecord:
    """Return the record of a server of which nothing is known."""
    return FinishedRecord.of(Record(total_blocks))
