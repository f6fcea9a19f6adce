"""SGLang's `cache_aware` (model gateway, src/policies/cache_aware.rs and tree.rs; now lightseekorg/smg).

Unequal load goes before the cache. Else a prompt whose beginning the router has sent somewhere follows it there. The
router knows prompts by what it sent; its tree never learns what a server evicted.

Where a node's first owner has lost it, the original takes any other: here it is the first by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Annotated, Literal, Self

from cbsim.policy.kind import Settings
from cbsim.policy.marks import AtLeast
from cbsim.policy.request import RequestSpec
from cbsim.routers.base import S_IN_NS, RouterBase, RouterKind, View, blocks, ready
from cbsim.routers.tree import Node, Tree

TOUCHES_EVERY = 8  # matches, by the clock of the tree


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAwareSettings(Settings):
    """The settings of SGLang's `cache_aware`, with the defaults of its command line."""

    cache_threshold: Annotated[float, AtLeast(0)] = 0.3  #: A larger share of the prompt in the tree decides.
    balance_abs_threshold: Annotated[int, AtLeast(0)] = 64  #: Load is unequal if servers differ by more requests,
    balance_rel_threshold: Annotated[float, AtLeast(0)] = 1.5  #: and if the most are more than this times the fewest.
    max_tree_blocks: Annotated[int, AtLeast(0)] = 1 << 20  #: Blocks of the tree for a server; its 2^26 characters.
    eviction_interval_s: Annotated[float, AtLeast(0)] = 60.0  #: Time between evictions from the tree; 0: none.
    block_tokens: Annotated[int, AtLeast(1)] = 16  #: Tokens of a block of the tree.
    ties: Literal["first", "fewest sent"] = "first"
    """Which of equally loaded servers: the first (sglang-router 0.3.2), that with the fewest requests ever sent (smg in
    August 2026, by its source)."""
    kv_events: bool = False  #: The cache is known from KV events (gRPC), not from the tree.


class Prefix(Node):
    """A node of the tree with the servers that have it, each with the time it was last used at, and its owner."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.used: dict[int, int] = {}
        self.owner = -1

    def split(self, upper: Self) -> None:
        upper.used, upper.owner = dict(self.used), self.owner

    def ends(self, server: int) -> bool:
        """True if the server has this node and none below it."""
        return server in self.used and not any(server in child.used for child in self.children.values())


class SentPrompts:
    """The tree of all prompts sent, with the servers they were sent to. Time is a counter of its calls."""

    def __init__(self, servers: int) -> None:
        self._tree = Tree(Prefix)
        self.sizes = [0] * servers  # blocks of each server
        self._time = 0
        for server in range(servers):
            self.insert((), server)

    def match(self, keys: tuple[int, ...]) -> tuple[int, int]:
        """Return how many blocks of the prompt are in the tree, and the server that owns the last node of them."""
        node, matched = self._tree.match(keys)
        if node.used and node.owner not in node.used:
            node.owner = min(node.used)
        time = self._tick()
        if time % TOUCHES_EVERY == 0 and node.owner in node.used:
            node.used[node.owner] = time
        return matched, node.owner

    def insert(self, keys: tuple[int, ...], server: int) -> None:
        """Put in a prompt that is sent to a server. Only its last node counts as used now."""
        path = self._tree.insert(keys)
        for node in path:
            if not node.used:
                node.owner = server
            if server not in node.used:
                node.used[server] = 0
                self.sizes[server] += len(node.keys)
        time = self._tick()
        if path:
            path[-1].used[server] = time

    def evict(self, most: int, only: int | None = None) -> None:
        """Take the least recently used last nodes from every server, or one, that has more than `most` blocks."""
        if max(self.sizes) <= most:
            return
        heap = [
            (time, node.number, server, node)
            for node in self._tree.nodes()
            for server, time in node.used.items()
            if only in (None, server) and node.ends(server)
        ]
        heapify(heap)
        while heap:
            _, _, server, node = heappop(heap)
            if self.sizes[server] <= most:
                continue
            self.sizes[server] -= len(node.keys)
            del node.used[server]
            parent = node.parent
            assert parent is not None
            if not node.used and not node.children:
                del parent.children[node.keys[0]]
            if parent.ends(server):
                heappush(heap, (parent.used[server], parent.number, server, parent))

    def _tick(self) -> int:
        self._time += 1
        return self._time - 1


class CacheAware(RouterBase):
    """SGLang's rule."""

    def __init__(self, settings: CacheAwareSettings, servers: int) -> None:
        self._settings, self.tree = settings, SentPrompts(servers)
        self._interval_ns = round(settings.eviction_interval_s * S_IN_NS)
        self._evicts_ns = self._interval_ns

    def choose(self, request: RequestSpec, views: Sequence[View], now_ns: int) -> int:
        settings, keys = self._settings, blocks(request, self._settings.block_tokens)
        if self._interval_ns and now_ns >= self._evicts_ns:
            self.tree.evict(settings.max_tree_blocks)
            self._evicts_ns = (now_ns // self._interval_ns + 1) * self._interval_ns
        servers = ready(views)
        loads = [views[server].in_flight for server in servers]
        apart = max(loads) - min(loads) > settings.balance_abs_threshold
        if apart and max(loads) > min(loads) * settings.balance_rel_threshold:
            return self._least(views)
        if settings.kv_events:
            cached = [views[server].cached_tokens(request) // settings.block_tokens for server in servers]
            best = [server for server, count in zip(servers, cached, strict=True) if count == max(cached)]
            return self._least(views) if not max(cached) else min(best, key=lambda server: views[server].in_flight)
        matched, owner = self.tree.match(keys)
        if not keys or matched / len(keys) <= settings.cache_threshold:
            return self._least(views)
        return owner if views[owner].ready else servers[0]

    def sent(self, request: RequestSpec, server: int, now_ns: int) -> None:
        if not self._settings.kv_events:
            self.tree.insert(blocks(request, self._settings.block_tokens), server)

    def left(self, server: int) -> None:
        self.tree.evict(0, server)

    def _least(self, views: Sequence[View]) -> int:
        fewest = self._settings.ties == "fewest sent"
        return min(ready(views), key=lambda server: (views[server].in_flight, fewest and views[server].sent))


CACHE_AWARE = RouterKind(
    name="sglang_cache_aware",
    about="SGLang's cache_aware: a tree of prompts sent, unless load is unequal",
    settings=CacheAwareSettings,
    make=lambda settings, servers, _: CacheAware(settings, servers),
)
