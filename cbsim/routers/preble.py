"""Preble (multi_node/global_scheduler_with_time.py): a prompt follows its prefix, unless most of it is new.

A prompt of which more than half was sent before goes to a server of that part; another one, exploring, to the server
with the least load. Load is the work of the last minutes: prompts by the time to compute what they missed, and active
requests by the time of their outputs. Prompts take time in proportion to their tokens; the published code has a curve
of one model on one card. Where several servers have the prefix, that code takes a wrong index, which is not followed;
its rebalancing and its evictions are switched off by default, and not here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated, Self

from cbsim.policy.kind import Settings
from cbsim.policy.marks import AtLeast
from cbsim.policy.request import RequestSpec
from cbsim.routers.base import S_IN_NS, RouterKind, View, blocks, ready
from cbsim.routers.tree import Node, Tree

FIRST_TPOT_S, TPOTS = 0.15, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PrebleSettings(Settings):
    """The settings of Preble's global scheduler."""

    window_s: Annotated[float, AtLeast(0)] = 180.0  #: Time for which prompts count as load.
    prefill_tokens_s: Annotated[float, AtLeast(1)] = 15_928.0  #: Rate at which a server computes prompts.
    block_tokens: Annotated[int, AtLeast(1)] = 16  #: Tokens of a block of the tree.


class Part(Node):
    """A node: the servers it is assigned to, its active requests on each, and its window."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.servers: frozenset[int] = frozenset()
        self.active = Counter[int]()
        self.answers = self.output_tokens = 0  # of requests that have ended
        self.window: Window | None = None
        self.depth = 0  # blocks to its end

    def split(self, upper: Self) -> None:
        upper.depth = self.depth - len(self.keys)
        upper.servers, upper.active = self.servers, self.active.copy()
        upper.answers, upper.output_tokens = self.answers, self.output_tokens
        if (window := self.window) and upper.large and not self.large:
            upper.window, self.window, window.part = window, None, upper

    @property
    def large(self) -> bool:
        """Whether it is more than half of the prompt that ends with it."""
        return 2 * len(self.keys) > self.depth


@dataclass(slots=True)
class Window:
    """The latest prompts whose last large part is this: how many, their blocks, those of their last nodes."""

    part: Part
    prompts: int = 0
    blocks: int = 0
    missed: int = 0
    miss_rate: float = 0.0
    output_tokens: int = 0  # expected


class Preble:
    """Preble's rule; the first of several servers."""

    def __init__(self, settings: PrebleSettings, servers: int) -> None:
        self._settings, self.tree = settings, Tree(Part)
        self._tpots = [deque([FIRST_TPOT_S], TPOTS) for _ in range(servers)]
        self._tpot_s = [FIRST_TPOT_S] * servers  # their medians
        self._sent = deque[tuple[int, Window, int, int]]()  # time in ns, window, blocks, those of the last node
        self._windows: dict[int, Window] = {}  # by identity
        self._first_ns: dict[RequestSpec, int] = {}
        self._choice: tuple[Part, frozenset[int]] | None = None

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        path = self.tree.insert(self._keys(request))
        for before, node in pairwise([self.tree.root, *path]):
            node.depth = before.depth + len(node.keys)
        last, servers = path[-1] if path else self.tree.root, frozenset(ready(views))
        if follows := 2 * len(last.keys) < last.depth:
            servers = next((part.servers & servers for part in last.line() if part.servers & servers), servers)
        best = min(sorted(servers), key=self.loads().__getitem__)
        self._choice = (last, servers if follows else frozenset([best]))
        return best

    def sent(self, request: RequestSpec, server: int, now_ns: int) -> None:
        assert self._choice is not None
        last, servers = self._choice
        part = next((part for part in last.line() if part.large), None)
        if part:
            window = part.window = part.window or Window(part)
            self._windows.setdefault(id(window), window)
            window.prompts, window.output_tokens = window.prompts + 1, request.max_tokens
            window.blocks, window.missed = window.blocks + last.depth, window.missed + len(last.keys)
            window.miss_rate = window.missed / window.blocks
            self._sent.append((now_ns, window, last.depth, len(last.keys)))
        self._forget(now_ns)
        for node in last.line():
            node.servers |= servers
            node.active[server] += 1

    def answered(self, request: RequestSpec, server: int, now_ns: int) -> None:
        self._first_ns[request] = now_ns

    def ended(self, request: RequestSpec, server: int, now_ns: int) -> None:
        last, _ = self.tree.match(self._keys(request))
        for node in last.line():
            node.active[server] -= 1
        first_ns, others = self._first_ns.pop(request, None), request.output_tokens - 1
        if first_ns is not None and others:
            part = next(part for part in last.line() if part.large or not part.parent)
            part.answers, part.output_tokens = part.answers + 1, part.output_tokens + request.output_tokens
            self._tpots[server].append((now_ns - first_ns) / S_IN_NS / others)
            self._tpot_s[server] = median(self._tpots[server])

    def left(self, server: int) -> None:
        for node in (self.tree.root, *self.tree.nodes()):
            node.servers -= {server}
        self._tpots[server] = deque([FIRST_TPOT_S], TPOTS)
        self._tpot_s[server] = FIRST_TPOT_S

    def loads(self) -> list[float]:
        """Return the work of each server, in seconds."""
        loads = [0.0] * len(self._tpots)
        for window in self._windows.values():
            part = window.part
            tokens = window.miss_rate * window.prompts * len(part.keys) * self._settings.block_tokens
            output_tokens = part.output_tokens / part.answers if part.answers else window.output_tokens
            for server in part.servers:
                loads[server] += tokens / self._settings.prefill_tokens_s / len(part.servers)
                loads[server] += part.active[server] * output_tokens * self._tpot_s[server]
        return loads

    def _forget(self, now_ns: int) -> None:
        """Take the prompts that are too old out of the window; a part without any is assigned to no server."""
        while self._sent and self._sent[0][0] < now_ns - self._settings.window_s * S_IN_NS:
            _, window, blocks, missed = self._sent.popleft()
            window.prompts, window.blocks = window.prompts - 1, window.blocks - blocks
            window.missed -= missed
            if not window.prompts:
                window.part.servers, window.part.window = frozenset(), None
                del self._windows[id(window)]

    def _keys(self, request: RequestSpec) -> tuple[int, ...]:
        return blocks(request, self._settings.block_tokens)


PREBLE = RouterKind(
    name="preble",
    about="Preble: a prompt follows its prefix, unless most of it is new",
    settings=PrebleSettings,
    make=lambda settings, servers, _: Preble(settings, servers),
)
