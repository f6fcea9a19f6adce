"""The router of real servers: its books, the log of what it was called with, and its choices derived again.

The log is the calls of `Books` in order, a line each. A router chooses by these and its seed alone, so the same calls
lead to the same choices.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cbsim.errors import RunError, ScenarioError, in_line
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

BLOCK_TOKENS = 16  # in which prompts are compared
FILE = "choices.jsonl"  # of a run directory
MOST_BLOCKS = 1 << 17  # of prompts sent, for each server
ENDS = ("finished", "refused", "cancelled", "failed")  # one of these ends a request
CALLS = ("scraped", "came", "choose", "news", "end")


class Head(Form):
    """The first line of a log: the servers' addresses, their router, and the seed of its random choices."""

    fleet: Fleet
    seed: Natural
    servers: list[str]


def head_of(servers: Sequence[str], name: str, changes: Sequence[str], seed: int) -> Head:
    """Return the head for a router of that name, with `changes` to it and to `signals.metrics_s` as `--set` has them.
    Raises ScenarioError.
    """
    if len({*servers}) < len(servers):
        raise ScenarioError(f"URL: got {', '.join(servers)}, expected each server once")
    for change in changes:
        if not change.startswith(("router.", "signals.metrics_s=")) or change.startswith("router.name="):
            bound = "expected router.FIELD=VALUE, but router.name by --router, or signals.metrics_s=SECONDS"
            raise ScenarioError(f"--set {change}: {bound}")
    plain = Document("route", None, {"pools": [{"count": len(servers)}], "router": {"name": name}})
    document = overrides.apply(plain, changes, Fleet, dict, Path())
    return Head(fleet=document.checked(Fleet), seed=seed, servers=list(servers))


class Upstream:
    """What the router sees of a server (routers.base.View). Without KV events the blocks that count as cached are those
    of prompts that the router sent to it, the last MOST_BLOCKS of them.
    """

    def __init__(self) -> None:
        self.in_flight = self.sent = self.waiting = self.running = self.scraped_ns = self.age_ns = 0
        self.kv_use = 0.0
        self.up = self.ready = True
        self._blocks: dict[int, None] = {}

    def cached_tokens(self, request: RequestSpec) -> int:
        known = next((at for at, block in enumerate(request.prefix) if block not in self._blocks), len(request.prefix))
        size = request.prefix_block_tokens
        return min(known, (request.prompt_tokens - 1) // size) * size

    def send(self, request: RequestSpec) -> None:
        """Count a request as sent, and the blocks of its prompt as cached."""
        self.in_flight += 1
        self.sent += 1
        for block in request.prefix:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]


class Books:
    """A router's books of requests and servers. `note` is called with each call as a line of the log. Every request
    that came ends once, in one of the ENDS, counted in `ends`.
    """

    def __init__(self, head: Head, note: Callable[[str], None] = lambda _: None) -> None:
        """Raises RouterError."""
        self._router, _ = router(head.fleet.router, head.fleet.room, head.seed)
        self.head, self._note = head, note
        self.views = [Upstream() for _ in head.servers]
        self.ends = Counter[str]()
        self.open: dict[int, tuple[RequestSpec, list[int]]] = {}  # by index, with the servers that had the request
        self.count = 0

    def scraped(self, at_ns: int, server: int, load: Sequence[float] | None) -> None:
        """Record a server's waiting and running requests and KV use; None of one that is down until the next ones."""
        view = self.views[server]
        if load is not None or view.up:
            self._log("scraped", at_ns, server=server, load=load)
        view.up = load is not None
        if load is not None:
            view.waiting, view.running, view.kv_use, view.scraped_ns = round(load[0]), round(load[1]), load[2], at_ns

    def came(self, spec: RequestSpec) -> None:
        """Record a request that has arrived."""
        self._log("came", spec.arrival_ns, request=json.loads(served.came(spec)))
        self.open[spec.index] = spec, []
        self.count += 1

    def choose(self, at_ns: int, index: int) -> int | None:
        """Return the router's choice among the servers that are up and did not have the request; None without any."""
        spec, had = self.open[index]
        for at, view in enumerate(self.views):
            view.ready, view.age_ns = view.up and at not in had, at_ns - view.scraped_ns
        if not ready(self.views):
            return None
        server = self._router.choose(spec, self.views, at_ns)
        self._log("choose", at_ns, index=index, server=server)
        self.views[server].send(spec)
        had.append(server)
        self._router.sent(spec, server, at_ns)
        return server

    def news(self, at_ns: int, index: int, *, ended: bool) -> None:
        """Record the first byte of an answer, or that its server has answered the request, or will not any more."""
        self._log("news", at_ns, index=index, ended=ended)
        spec, had = self.open[index]
        self.views[had[-1]].in_flight -= ended
        (self._router.ended if ended else self._router.answered)(spec, had[-1], at_ns)

    def end(self, at_ns: int, index: int, end: str) -> None:
        """Record the end of a request that no server has."""
        self._log("end", at_ns, index=index, end=end)
        del self.open[index]
        self.ends[end] += 1

    def _log(self, call: str, at_ns: int, **more: Any) -> None:
        self._note(json.dumps({"call": call, "at_ns": at_ns, **more}) + "\n")


def rederive(path: Path) -> Replanned:
    """Make the calls in the log of a run directory again, and compare the choices. Raises RunError, ScenarioError."""
    file, choices = path / FILE, list[tuple[int, int | None, int | None]]()
    with open_text(file) as lines:
        books = Books(json_line(file, 1, next(lines, "")).checked(Head))
        for number, line in enumerate(lines, 2):
            try:
                call = (document := json_line(file, number, line)).data
            except ScenarioError:
                if next(lines, None):
                    raise
                break  # the writing process was killed
            if call.get("server", 0) not in range(len(books.views)):
                raise document.bad("server", f"0 to {len(books.views) - 1}")
            try:
                if (name := call.pop("call")) not in CALLS:
                    raise ValueError(f"call: got {name!r}")
                if name == "came":
                    call = {"spec": served.Came.model_validate(call["request"]).spec()}
                before = call.pop("server") if name == "choose" else -1
                now = getattr(books, name)(**call)
            except (LookupError, TypeError, ValueError) as error:
                reason = f"{file}:{number}: is no call of a router's books: {in_line(error)}"
                raise RunError(reason, file=file) from error
            if name == "choose":
                choices.append((number, before, now))
    for at, (number, before, now) in enumerate(choices):
        if now != before:
            return Replanned(at, len(choices), f"line {number}: server {before} was chosen, now {now}")
    return Replanned(len(choices), len(choices), None)
