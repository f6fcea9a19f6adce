"""The router of real servers: its books, the log of what it was called with, and its choices derived again.

The log is the calls of `Books` in order, a line each. A router chooses by these and its seed alone, so the same calls
lead to the same choices.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cbsim.errors import RunError, ScenarioError
from cbsim.policy.request import RequestSpec
from cbsim.routers.base import ready
from cbsim.runs.assemble import router
from cbsim.runs.replan import Replanned
from cbsim.scenario import overrides
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Form, Natural
from cbsim.scenario.fleet import Fleet
from cbsim.scenario.rows import json_line, open_text
from cbsim.workload import served

FILE = "choices.jsonl"  # of a run directory
MOST_BLOCKS = 1 << 17  # of prompts sent, for each server
ENDS = ("finished", "refused", "cancelled", "failed")  # one of these ends a request


def fleet_of(servers: int, name: str, changes: Sequence[str]) -> Fleet:
    """Return so many servers behind a router of that name, with `changes` to `router` and `signals` as `--set` has
    them. Raises ScenarioError.
    """
    plain = {"pools": [{"count": servers}], "router": {"name": name}}
    document = overrides.apply(Document("route", None, plain), changes, Fleet, dict, Path())
    return document.checked(Fleet)


class Upstream:
    """What the router sees of a server (routers.base.View). Without KV events the blocks that count as cached are those
    of prompts that the router sent to it, the last MOST_BLOCKS of them. A server that is not `up` gets no request.
    """

    def __init__(self, books: Books) -> None:
        self.in_flight = self.sent = self.waiting = self.running = 0
        self.kv_use = 0.0
        self.up = self.ready = True
        self.scraped_ns = 0
        self._books = books
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def age_ns(self) -> int:
        return self._books.now_ns - self.scraped_ns

    def cached_tokens(self, request: RequestSpec) -> int:
        known = next((at for at, block in enumerate(request.prefix) if block not in self._blocks), len(request.prefix))
        size = request.prefix_block_tokens
        return min(known, (request.prompt_tokens - 1) // size) * size

    def insert(self, prefix: Sequence[int]) -> None:
        """Count the blocks of a prompt as cached."""
        for block in prefix:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > MOST_BLOCKS:
            self._blocks.popitem(last=False)


class Books:
    """A router's books of requests and servers. `note` is called with each call as a line of the log. Every request
    that came ends once, in one of the ENDS, counted in `ends`; `choices` counts the servers chosen.
    """

    def __init__(self, fleet: Fleet, seed: int, note: Callable[[str], None] = lambda _: None) -> None:
        """Raises RouterError."""
        self._router, _ = router(fleet, seed)
        self._note = note
        self.now_ns = 0
        self.views = [Upstream(self) for _ in range(fleet.count)]
        self.ends, self.choices = Counter[str](), Counter[int]()
        self.open: dict[int, RequestSpec] = {}  # by index, until their end
        self._tried: dict[int, list[int]] = {}  # servers that they were sent to
        self.count = 0

    def scraped(self, at_ns: int, server: int, waiting: int, running: int, kv_use: float) -> None:
        """Record a server's metrics. It is up."""
        self._log("scraped", at_ns, server=server, waiting=waiting, running=running, kv_use=kv_use)
        view = self.views[server]
        view.waiting, view.running, view.kv_use, view.scraped_ns, view.up = waiting, running, kv_use, at_ns, True

    def lost(self, at_ns: int, server: int) -> None:
        """Record that a server cannot be reached: it is down until it is scraped."""
        if self.views[server].up:
            self._log("lost", at_ns, server=server)
            self.views[server].up = False

    def came(self, spec: RequestSpec) -> None:
        """Record a request that has arrived."""
        self._log("came", spec.arrival_ns, request=json.loads(served.came(spec)))
        self.open[spec.index], self._tried[spec.index] = spec, []
        self.count += 1

    def choose(self, at_ns: int, index: int) -> int | None:
        """Return the router's choice among the servers that are up and did not have the request; None without any."""
        spec, tried = self.open[index], self._tried[index]
        for at, view in enumerate(self.views):
            view.ready = view.up and at not in tried
        if not ready(self.views):
            return None
        self.now_ns = at_ns
        server = self._router.choose(spec, self.views, at_ns)
        self._log("choose", at_ns, index=index, server=server)
        view = self.views[server]
        view.in_flight += 1
        view.sent += 1
        view.insert(spec.prefix)
        tried.append(server)
        self.choices[server] += 1
        self._router.sent(spec, server, at_ns)
        return server

    def answered(self, at_ns: int, index: int) -> None:
        """Record the first byte of an answer."""
        self._log("answered", at_ns, index=index)
        self._router.answered(self.open[index], self._tried[index][-1], at_ns)

    def returned(self, at_ns: int, index: int) -> None:
        """Record that the server that has the request will not answer it any more, or has answered it."""
        self._log("returned", at_ns, index=index)
        server = self._tried[index][-1]
        self.views[server].in_flight -= 1
        self._router.ended(self.open[index], server, at_ns)

    def ended(self, at_ns: int, index: int, end: str) -> None:
        """Record the end of a request that no server has."""
        self._log("ended", at_ns, index=index, end=end)
        del self.open[index], self._tried[index]
        self.ends[end] += 1

    def _log(self, call: str, at_ns: int, **more: Any) -> None:
        self._note(json.dumps({"call": call, "at_ns": at_ns, **more}) + "\n")


class Head(Form):
    """The first line of a log."""

    fleet: Fleet
    seed: Natural
    servers: list[str]

    def line(self) -> str:
        return self.model_dump_json() + "\n"


def rederive(path: Path) -> Replanned:
    """Make the calls in the log of a run directory again, and compare the choices. Raises RunError, ScenarioError."""
    file, matched, total = path / FILE, 0, 0
    difference: str | None = None
    with open_text(file) as lines:
        first = json_line(file, 1, next(lines, "")).checked(Head)
        books = Books(first.fleet, first.seed)
        for number, line in enumerate(lines, 2):
            if not line.endswith("\n"):  # the writing process was killed
                break
            try:
                chosen = _call(books, json_line(file, number, line).data)
            except (LookupError, TypeError, ValueError) as error:
                if isinstance(error, ScenarioError):
                    raise
                raise RunError(f"{file}:{number}: is no call of a router's books: {error!r}", file=file) from error
            if chosen is None:
                continue
            total += 1
            matched += difference is None and chosen[0] == chosen[1]
            if difference is None and chosen[0] != chosen[1]:
                difference = f"line {number}: server {chosen[0]} was chosen, now {chosen[1]}"
    return Replanned(matched, total, difference)


def _call(books: Books, line: dict[str, Any]) -> tuple[int, int | None] | None:
    """Make the call of a line; return the servers of a choice, recorded and derived."""
    call = line.pop("call")
    if call == "came":
        books.came(served.Came.model_validate(line["request"]).spec())
    elif call == "choose":
        return line["server"], books.choose(line["at_ns"], line["index"])
    elif call in ("scraped", "lost", "answered", "returned", "ended"):
        getattr(books, call)(**line)
    else:
        raise ValueError(f"call: got {call!r}")
    return None
