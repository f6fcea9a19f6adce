"""SGLang's `cache_aware` against a second, flat implementation, and against choices that its gateway made."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flat_tree import Flat
from support.routed import SEEDS, Counting, Texts, steps

from cbsim.policy.request import RequestSpec
from cbsim.routers.base import blocks
from cbsim.routers.sglang import CacheAware, CacheAwareSettings

GOLDEN = sorted((Path(__file__).parent / "golden").glob("sglang-router-*.jsonl.gz"))


class Owned:
    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        self.owner = -1


class Plain:
    """The rule once more: nodes in a table, every sum from scratch."""

    def __init__(self, servers: int, threshold: float, apart: int, times: float, fewest: bool) -> None:
        self.tree: Flat[Owned] = Flat(Owned, self._copy)
        self.servers, self.threshold, self.apart, self.times, self.fewest = servers, threshold, apart, times, fewest
        self.time = servers

    def _copy(self, end: str, node: Owned, common: str) -> Owned:
        made = Owned()
        made.used, made.owner = dict(node.used), node.owner
        return made

    def size(self, server: int) -> int:
        return sum(self.tree.tokens(end) for end, node in self.tree.nodes.items() if server in node.used)

    def choose(self, text: str, loads: list[int], sent: list[int]) -> int:
        least = min(range(self.servers), key=lambda at: (loads[at], sent[at] if self.fewest else 0, at))
        if max(loads) - min(loads) > self.apart and max(loads) > self.times * min(loads):
            return least
        matched, end = self.tree.match(text)
        node = self.tree.nodes.get(end, Owned())
        if node.used and node.owner not in node.used:
            node.owner = min(node.used)
        if self.time % 8 == 0 and node.used:
            node.used[node.owner] = self.time
        self.time += 1
        return node.owner if text and matched / len(text) > self.threshold else least

    def sent(self, text: str, server: int) -> None:
        before = {*self.tree.nodes}
        path = self.tree.insert(text)
        for end in path:
            node = self.tree.nodes[end]
            if end not in before and not node.used:
                node.owner = server
            node.used.setdefault(server, 0)
        if path:
            self.tree.nodes[path[-1]].used[server] = self.time
        self.time += 1

    def evict(self, most: int) -> None:
        made = {end: number for number, end in enumerate(self.tree.nodes)}
        for server in range(self.servers):
            while self.size(server) > most:
                ends = [
                    (node.used[server], made[end], end)
                    for end, node in self.tree.nodes.items()
                    if server in node.used
                    and not any(server in self.tree.nodes[below].used for below in self.tree.children(end))
                ]
                _, _, end = min(ends)
                del self.tree.nodes[end].used[server]
        for end in sorted(self.tree.nodes, key=len, reverse=True):
            if not self.tree.nodes[end].used:
                del self.tree.nodes[end]


def settings(**fields: Any) -> CacheAwareSettings:
    return CacheAwareSettings(name="sglang_cache_aware", block_tokens=1, eviction_interval_s=1, **fields)


@given(SEEDS, st.integers(2, 3), st.sampled_from([0.0, 0.5]), st.integers(0, 3), st.booleans(), st.integers(0, 20))
def test_choices_are_those_of_a_second_implementation(
    seed: int, servers: int, threshold: float, apart: int, fewest: bool, most: int
) -> None:
    """And so is the tree, with all times, after prompts, ends in any order, and evictions to a few blocks a server."""
    form = settings(
        cache_threshold=threshold,
        balance_abs_threshold=apart,
        max_tree_blocks=most,
        ties="fewest sent" if fewest else "first",
    )
    router = CacheAware(form, servers)
    fleet, plain, texts = Counting(router, servers), Plain(servers, threshold, apart, 1.5, fewest), Texts()
    for what, value, *_ in steps(seed):
        if what == "send":
            loads, sent = [view.in_flight for view in fleet.views], [view.sent for view in fleet.views]
            spec = texts.request(value)
            text = value or chr(0x1000 + spec.index)  # a prompt has a token at least; this one is its own
            chosen = fleet.send(spec)
            assert chosen == plain.choose(text, loads, sent)
            plain.sent(text, chosen)
        elif what == "end" and fleet.at:
            fleet.end(sorted(fleet.at)[value % len(fleet.at)])
        elif what == "evict":
            router.tree.evict(most)
            plain.evict(most)
        assert router.tree.sizes == [plain.size(server) for server in range(servers)]
        assert contents(router, texts) == {end: (node.used, node.owner) for end, node in plain.tree.nodes.items()}


def contents(router: CacheAware, texts: Texts) -> dict[str, tuple[dict[int, int], int]]:
    """Return servers with their times, and owner, of every node, by the text that ends with it."""
    named = {number: text for text, number in texts.ids.items()}
    nodes = ((node.keys[-1], node) for node in router.tree._tree.nodes())
    return {
        named[key >> 24] if key >= 0 else chr(0x1000 + (-key >> 24)): (node.used, node.owner) for key, node in nodes
    }


def test_evictions_come_at_their_interval() -> None:
    """The tree is cut down before the first choice at or after each multiple of the interval, however late that is."""
    router = CacheAware(settings(max_tree_blocks=2), 1)
    fleet, texts, sizes = Counting(router, 1), Texts(), list[int]()
    for text, at_s in (("aaaa", 0), ("bbbb", 0.999), ("c", 1), ("dddd", 1.999), ("e", 7.5), ("ffff", 7.999), ("g", 8)):
        fleet.send(texts.request(text), round(at_s * 1e9))
        sizes += router.tree.sizes
    assert sizes == [4, 8, 1, 5, 1, 5, 1]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_with_kv_events_the_most_cached_blocks_decide(servers: list[tuple[int, int, int]]) -> None:
    """Then the fewest requests in flight; where nothing is cached, these and the fewest ever sent."""
    router = CacheAware(settings(kv_events=True, balance_abs_threshold=99), len(servers))
    fleet, request = Counting(router, len(servers)), Texts().request("a" * 9)
    for view, (cached, load, sent) in zip(fleet.views, servers, strict=True):
        view.cached[request.id], view.in_flight, view.sent = cached, load, sent
    best = max(cached for cached, _, _ in servers)
    keys = [(load, 0 if best else sent, at) for at, (cached, load, sent) in enumerate(servers) if cached == best]
    assert fleet.send(request) == min(keys)[2]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_every_choice_is_that_of_the_gateway(path: Path) -> None:
    """Recorded from sglang-router 0.3.2 with three loopback workers that answer when they are told to. `clock` is the
    time of its tree before the first prompt. Where a node's owner was evicted, the gateway takes any server that has
    the node, which the recording then names.
    """
    head, *lines = (json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())
    order = [line[2] for line in lines[:3]]  # idle servers in the order of the gateway's list
    names = ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold")
    router = CacheAware(settings(ties="first", **{name: head[name] for name in names}), head["servers"])
    for _ in range(head["clock"] - head["servers"]):
        router.tree.insert((), 0)
    fleet, texts = Counting(router, head["servers"]), Texts()
    for at, line in enumerate(lines):
        if line[0] == "sent":
            spec, chosen = texts.request(line[1], name=line[1]), order.index(line[2])
            with owner_known(router, fleet, spec, chosen):
                assert (at, fleet.send(spec)) == (at, chosen)
        elif line[0] == "ended":
            fleet.end(line[1])
        else:
            router.tree.evict(head["max_tree_size"])


@contextmanager
def owner_known(router: CacheAware, fleet: Counting, spec: RequestSpec, chosen: int) -> Iterator[None]:
    """Let the tree know the owner of a node that lost it where the choice depends on it, else keep it unknown."""
    keys, loads, form = blocks(spec, 1), [view.in_flight for view in fleet.views], router._settings
    node, matched = router.tree._tree.match(keys)
    lost, before = bool(node.used) and node.owner not in node.used, node.owner
    unequal = max(loads) - min(loads) > form.balance_abs_threshold
    unequal = unequal and max(loads) > form.balance_rel_threshold * min(loads)
    decides = matched / len(keys) > form.cache_threshold and not unequal
    if lost and decides:
        assert chosen in node.used
        node.owner = chosen
    yield
    if lost and not decides:
        node.owner = before


def test_recorded_choices_are_there() -> None:
    """Five recordings, three of them with evictions."""
    heads = [json.loads(gzip.decompress(path.read_bytes()).splitlines()[0]) for path in GOLDEN]
    assert [head["evicts"] for head in heads] == [False, False, True, True, True]
