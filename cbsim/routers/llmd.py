"""llm-d's endpoint picker (llm-d-router, pkg/epp/framework/plugins/scheduling): a filter, weighted scores, the largest.

The defaults are those of its optimized baseline: servers that have cached most of the prompt, unless their prompts in
flight would take too long, and of these the one with the fewest tokens to prefill. Earlier releases weigh scores of
prefix, queue and KV use and filter nothing (`affinity_threshold: 0`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add
from random import Random
from typing import Annotated, Literal

from cbsim.policy.kind import Settings
from cbsim.policy.marks import AtLeast
from cbsim.policy.request import RequestSpec
from cbsim.routers.base import Queues, RouterKind, View, blocks, ready

Weight = Annotated[float, AtLeast(0)]
MANY_WAIT = 128  # waiting requests from which a server scores 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmdSettings(Settings):
    """The settings of llm-d's picker: a weight for each of its scores, and its filter."""

    token_load: Weight = 1.0  #: Weight of few tokens to prefill, those of the request included.
    prefix: Weight = 0.0  #: Weight of the share of the prompt that is cached.
    queue: Weight = 0.0  #: Weight of few waiting requests.
    running: Weight = 0.0  #: Weight of few running requests.
    kv_use: Weight = 0.0  #: Weight of a KV cache that is little used.
    load_aware: Weight = 0.0  #: Weight of fewer than 128 waiting requests.
    active_requests: Weight = 0.0  #: Weight of few requests in flight.
    no_hit_lru: Weight = 0.0  #: Weight, for prompts cached nowhere, of the server least recently sent such a prompt.
    affinity_threshold: Annotated[float, AtLeast(0)] = 0.8
    """Share of the prompt from which a server that has cached it is kept before all others; 0: none is."""
    max_ttft_penalty_ms: Annotated[float, AtLeast(0)] = 18_000.0
    """Time that prompts in flight may take longer on the servers kept; 0: any."""
    peak_prefill_tokens_s: Annotated[float, AtLeast(1)] = 15_928.0  #: Rate at which prompts in flight are computed.
    queue_threshold_tokens: Annotated[int, AtLeast(1)] = 4_194_304  #: Tokens from which `token_load` scores 0.
    index: Literal["approximate", "precise"] = "approximate"
    """How the cached part of a prompt is known: by prompts sent (an LRU list a server), by KV events."""
    block_tokens: Annotated[int, AtLeast(1)] = 64  #: Tokens of a block of the index.
    lru_blocks: Annotated[int, AtLeast(1)] = 31_250  #: Blocks of the approximate index a server.
    max_prefix_tokens: Annotated[int, AtLeast(1)] = 131_072  #: Tokens of a prompt that are looked up.


class SentBlocks:
    """The approximate index: for each server the blocks sent to it most recently."""

    def __init__(self, servers: int, most: int) -> None:
        self._most = most
        self._sent = [OrderedDict[int, None]() for _ in range(servers)]
        self._holders: dict[int, dict[int, None]] = {}  # servers by block

    def matched(self, keys: Sequence[int]) -> list[int]:
        """Return how many blocks of the prompt each server has, up to the first that none has."""
        found = [0] * len(self._sent)
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                break
            for server in holders:
                found[server] += 1
        return found

    def trim(self, server: int, most: int) -> None:
        """Forget the oldest blocks of a server until there are at most so many."""
        while len(self._sent[server]) > most:
            oldest, _ = self._sent[server].popitem(last=False)
            del self._holders[oldest][server]
            if not self._holders[oldest]:
                del self._holders[oldest]

    def add(self, keys: Sequence[int], server: int) -> None:
        blocks = self._sent[server]
        for key in keys:
            if key in blocks:
                blocks.move_to_end(key)
                continue
            blocks[key] = None
            self._holders.setdefault(key, {})[server] = None
        self.trim(server, self._most)


class Llmd(Queues):
    """llm-d's rule. Of servers with equal scores any is taken. Its queues are uncached tokens of prompts."""

    def __init__(self, settings: LlmdSettings, servers: int, seed: int) -> None:
        super().__init__(servers)
        self._settings, self._random = settings, Random(seed)
        self.index = SentBlocks(servers, settings.lru_blocks)
        self._cold = OrderedDict[int, None]()  # servers that were sent a prompt cached nowhere, the latest last
        self._keys: Sequence[int] = ()  # blocks of the latest prompt
        self._matched: Sequence[int] = ()  # how many of them each server has cached

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        settings, size = self._settings, self._settings.block_tokens
        keys = self._keys = blocks(request, size)[: settings.max_prefix_tokens // size]
        if settings.index == "approximate":
            self._matched = self.index.matched(keys)
        else:
            self._matched = [min(len(keys), view.cached_tokens(request) // size) for view in views]
        self.amounts = [request.prompt_tokens - count * size for count in self._matched]
        servers = ready(views)
        views = [view if view.ready else views[servers[0]] for view in views]  # the others take no part in the scores
        totals, kept = self._totals(views), self._kept(servers)
        self._random.shuffle(kept)
        return max(kept, key=totals.__getitem__)

    def sent(self, request: RequestSpec, server: int, now_ns: int) -> None:
        super().sent(request, server, now_ns)
        if not any(self._matched):
            self._cold[server] = None
            self._cold.move_to_end(server)
        if self._settings.index == "approximate":
            self.index.add(self._keys, server)

    def left(self, server: int) -> None:
        self.index.trim(server, 0)
        self._cold.pop(server, None)

    def _kept(self, servers: list[int]) -> list[int]:
        """Return the servers that the filter keeps: those with most of the prompt, unless all are much busier."""
        settings = self._settings
        cached = [count / max(1, len(self._keys)) for count in self._matched]
        sticky = [server for server in servers if cached[server] >= settings.affinity_threshold]
        others = [server for server in servers if cached[server] < settings.affinity_threshold]
        if not sticky or not others:
            return servers
        first, second = (min(self.queued[server] for server in those) for those in (sticky, others))
        penalty_ms = (first - second) / settings.peak_prefill_tokens_s * 1000
        return servers if 0 < settings.max_ttft_penalty_ms < penalty_ms else sticky

    def _totals(self, views: Sequence[View]) -> list[float]:
        """Return the weighted sum of the scores of each server, each score between 0 and 1."""
        most = self._settings.queue_threshold_tokens
        scores: dict[str, Callable[[], Sequence[float]]] = {
            "token_load": lambda: [1 - min(load, most) / most for load in map(add, self.queued, self.amounts)],
            "prefix": lambda: [count / max(1, len(self._keys)) for count in self._matched],
            "queue": lambda: _fewest([view.waiting for view in views]),
            "running": lambda: _fewest([view.running for view in views]),
            "kv_use": lambda: [1 - view.kv_use for view in views],
            "load_aware": lambda: [0.5 * (1 - min(view.waiting, MANY_WAIT) / MANY_WAIT) for view in views],
            "active_requests": lambda: _idlest([view.in_flight for view in views]),
            "no_hit_lru": self._no_hit_lru,
        }
        totals = [0.0] * len(views)
        for name, score in scores.items():
            if weight := getattr(self._settings, name):
                for server, value in enumerate(score()):
                    totals[server] += weight * min(1.0, max(0.0, value))
        return totals

    def _no_hit_lru(self) -> Sequence[float]:
        servers = range(len(self.queued))
        if any(self._matched):
            return [0.5] * len(servers)
        order = [server for server in servers if server not in self._cold] + list(self._cold)
        ranks = {server: rank for rank, server in enumerate(order)}
        return [1 - ranks[server] / max(1, len(servers) - 1) for server in servers]


def _fewest(counts: Sequence[int]) -> Sequence[float]:
    """Return 1 for the fewest and 0 for the most; 1 for all if they are equal."""
    most, least = max(counts), min(counts)
    return [(most - count) / (most - least) if most > least else 1.0 for count in counts]


def _idlest(counts: Sequence[int]) -> Sequence[float]:
    return [(max(counts) - count) / max(counts) if count else 1.0 for count in counts]


LLMD = RouterKind(
    name="llmd", about="llm-d's picker: prefix affinity, then weighted scores", settings=LlmdSettings, make=Llmd
)
