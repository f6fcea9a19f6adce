"""Routers by cost or prefix: Dynamo, production-stack, Mooncake's Conductor and Preble, each against a second, naive
implementation that adds up everything from scratch.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flat_tree import Flat
from support.routed import SEEDS, Counting, Texts, steps

from cbsim.policy.request import RequestSpec
from cbsim.routers.base import shared_blocks
from cbsim.routers.dynamo import Dynamo, DynamoSettings
from cbsim.routers.mooncake import Conductor, ConductorSettings
from cbsim.routers.preble import Preble, PrebleSettings
from cbsim.routers.production_stack import PrefixAware, PrefixAwareSettings

SERVERS = 3


class Open:
    """A request sent: its text, server, cached tokens there, and whether it was answered."""

    def __init__(self, text: str, server: int, cached: int) -> None:
        self.text, self.server, self.cached, self.answered = text, server, cached, False


@given(SEEDS, st.integers(1, 3), st.sampled_from([0.0, 1.0, 1.5]), st.sampled_from([0.0, 2.0]), st.integers(0, 2))
def test_dynamo_takes_the_least_cost(seed: int, size: int, credit: float, decay: float, weight: int) -> None:
    form = DynamoSettings(
        name="dynamo",
        overlap_score_credit=credit,
        overlap_score_credit_decay=decay,
        prefill_load_scale=1.25,
        decode_active_request_weight=weight,
        block_tokens=size,
    )
    router, texts, sent = Dynamo(form, SERVERS, 1), Texts(), dict[str, Open]()
    fleet = Counting(router, SERVERS)
    views: Any = fleet.views

    def costs(text: str, cached: list[int]) -> list[float]:
        costs = []
        computing = [
            sum(len(one.text) - one.cached for one in sent.values() if one.server == at and not one.answered)
            for at in range(SERVERS)
        ]
        for at in range(SERVERS):
            active = [one.text for one in sent.values() if one.server == at]
            blocks = {one[:end] for one in [*active, text] for end in range(size, len(one) + 1, size)}
            full = -(-len(text) // size)
            faded = credit / (1 + decay * ((computing[at] - min(computing)) / size / full))
            prefill = max(0.0, (computing[at] + len(text)) / size - faded * (cached[at] // size))
            costs.append(1.25 * prefill + len(blocks) + weight * len(active))
        return costs

    for what, value, *more in steps(seed):
        if what == "send" and value:
            cached = [min(one, len(value)) for one in more[0]]
            spec = texts.request(value)
            for view, tokens in zip(fleet.views, cached, strict=True):
                view.cached = {spec.id: tokens}
            wanted = costs(value, cached)
            chosen = router.choose(spec, views, 0)
            shared = shared_blocks(spec, size)
            assert [router._cost(spec, shared, at, cached[at], views[at]) for at in range(SERVERS)] == wanted
            assert wanted[chosen] == min(wanted)
            fleet.take(spec, chosen)
            sent[spec.id] = Open(value, chosen, cached[chosen])
        elif fleet.at and what in ("answer", "end"):
            name = sorted(fleet.at)[value % len(fleet.at)]
            if what == "answer":
                fleet.answer(name)
                sent[name].answered = True
            else:
                fleet.end(name)
                del sent[name]


def test_dynamo_draws_equal_costs_uniformly_and_by_temperature() -> None:
    """Equal costs: each of three servers gets over 60 of 300. With a temperature, a cost at the top of the range e
    times less often than the least: 73 % of 2,000 draws within five standard deviations.
    """
    router = Dynamo(DynamoSettings(name="dynamo"), 3, 5)
    views: Any = Counting(router, 3).views
    chosen = [router.choose(Texts().request("a" * 16), views, 0) for _ in range(300)]
    assert min(chosen.count(server) for server in range(3)) > 60
    drawn = Dynamo(DynamoSettings(name="dynamo", router_temperature=1.0), 2, 5)
    counts = [drawn._drawn([1.0, 4.0]) for _ in range(2000)]
    assert abs(counts.count(0) / 2000 - 0.731) < 5 * (0.731 * 0.269 / 2000) ** 0.5


@given(SEEDS, st.integers(1, 3), st.integers(0, 6))
def test_production_stack_takes_any_server_of_the_longest_prefix(seed: int, size: int, least: int) -> None:
    form = PrefixAwareSettings(name="production_stack_prefixaware", min_match_tokens=least, block_tokens=size)
    router, texts, sent = PrefixAware(form, seed), Texts(), list[tuple[str, int]]()
    fleet, draws = Counting(router, SERVERS), Random(seed)
    for what, value, *_ in steps(seed):
        if what == "send" and value:
            longest, servers = 0, {*range(SERVERS)}
            for end in range(size, len(value) + 1, size):
                having = {at for text, at in sent if text[:end] == value[:end] and len(text) >= end}
                if not having:
                    break
                longest, servers = end, having
            if longest < least:
                loads = [view.in_flight for view in fleet.views]
                wanted = loads.index(min(loads))
            else:
                wanted = draws.choice(sorted(servers))
            chosen = fleet.send(texts.request(value))
            assert chosen == wanted
            sent.append((value, chosen))
        elif what == "end" and fleet.at:
            fleet.end(sorted(fleet.at)[value % len(fleet.at)])


def test_every_match_is_that_of_the_hash_trie() -> None:
    """Recorded from production-stack's HashTrie, with prompts of whole chunks of 4 characters."""
    path = Path(__file__).parent / "golden" / "production-stack-hashtrie.jsonl.gz"
    head, *lines = (json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())
    size, texts = head["chunk_size"], Texts()
    router = PrefixAware(PrefixAwareSettings(name="production_stack_prefixaware", block_tokens=size), 0)
    for text, length, servers, chosen in lines:
        spec = texts.request(text)
        matched, found = router.match(spec, range(head["servers"]))
        assert (matched * size, found) == (length, servers)
        router.sent(spec, chosen, 0)
    assert len(lines) == 400


@given(SEEDS, st.sampled_from([None, 10.0, 1000.0]), st.sampled_from([1.0, 2.0, 4.0]))
def test_the_conductor_takes_the_least_expected_ttft(seed: int, rate: float | None, threshold: float) -> None:
    form = ConductorSettings(
        name="mooncake_conductor",
        prefill_tokens_s=100,
        transfer_tokens_s=rate,
        kvcache_balancing_threshold=threshold,
    )
    router, texts, queued = Conductor(form, SERVERS), Texts(), dict[str, tuple[int, float]]()
    fleet = Counting(router, SERVERS)
    for what, value, *more in steps(seed):
        if what == "send" and value:
            spec, cached, times = texts.request(value), [min(one, len(value)) for one in more[0]], list[float]()
            for view, tokens in zip(fleet.views, cached, strict=True):
                view.cached = {spec.id: tokens}
            for own in cached:
                fetches = rate and max(cached) > 0 and (own == 0 or max(cached) / own > threshold)
                behind = max(cached) if fetches else own
                times.append((behind - own) / (rate or 1) + (len(value) - behind) / 100)
            ttft = [sum(s for one, s in queued.values() if one == at) + times[at] for at in range(SERVERS)]
            chosen = fleet.send(spec)
            assert router.amounts == [round(time * 1e9) for time in times]
            assert ttft[chosen] == pytest.approx(min(ttft), abs=1e-6)
            queued[spec.id] = chosen, times[chosen]
        elif fleet.at and what in ("answer", "end"):
            name = sorted(fleet.at)[value % len(fleet.at)]
            (fleet.answer if what == "answer" else fleet.end)(name)
            queued.pop(name, None)


class Part:
    def __init__(self) -> None:
        self.servers: set[int] = set()
        self.active = [0] * SERVERS
        self.outputs: list[int] = []
        self.window: list[tuple[int, int, int]] = []  # time in s, tokens, tokens of the last node
        self.miss = 0.0
        self.expected = 0


class PlainPreble:
    """Preble once more, with its nodes in a table and its window as a list a node."""

    def __init__(self, window_s: int, rate: float) -> None:
        self.tree: Flat[Part] = Flat(Part, self.split)
        self.tree.nodes[""] = Part()
        self.window_s, self.rate, self.tpots = window_s, rate, [[0.15] for _ in range(SERVERS)]

    def large(self, end: str) -> bool:
        return self.tree.tokens(end) > len(self.tree.parent(end))

    def split(self, end: str, node: Part, common: str) -> Part:
        made = Part()
        made.servers, made.active, made.outputs = {*node.servers}, [*node.active], [*node.outputs]
        above = len(self.tree.parent(end))
        if len(common) - above > above and len(end) - len(common) <= len(common):
            made.window, made.miss, made.expected = node.window, node.miss, node.expected
            node.window = []
        return made

    def line(self, text: str) -> list[str]:
        return ["", *self.tree.path(text)][::-1]

    def loads(self) -> list[float]:
        loads = [0.0] * SERVERS
        for end, node in self.tree.nodes.items():
            if node.window:
                for at in node.servers:
                    prefill = node.miss * len(node.window) * self.tree.tokens(end) / self.rate / len(node.servers)
                    outputs = fmean(node.outputs) if node.outputs else node.expected
                    loads[at] += prefill + node.active[at] * outputs * median(self.tpots[at])
        return loads

    def choices(self, text: str) -> tuple[set[int], bool]:
        """Return the servers among which the load decides, and whether they have the prefix."""
        self.tree.insert(text)
        if self.tree.tokens(text) < len(self.tree.parent(text)):
            having = [self.tree.nodes[end].servers for end in self.line(text) if self.tree.nodes[end].servers]
            return (having[0] if having else {*range(SERVERS)}), True
        return {*range(SERVERS)}, False

    def send(self, text: str, servers: set[int], chosen: int, now_s: int, expected: int) -> None:
        large = [end for end in self.line(text) if end and self.large(end)]
        if large:
            node = self.tree.nodes[large[0]]
            node.window.append((now_s, len(text), self.tree.tokens(text)))
            node.miss = sum(last for _, _, last in node.window) / sum(tokens for _, tokens, _ in node.window)
            node.expected = expected
        for node in self.tree.nodes.values():
            kept = [one for one in node.window if one[0] >= now_s - self.window_s]
            if node.window and not kept:
                node.servers = set()
            node.window = kept
        for end in self.line(text):
            self.tree.nodes[end].servers = self.tree.nodes[end].servers | servers
            self.tree.nodes[end].active[chosen] += 1

    def end(self, text: str, server: int, outputs: int, answer_s: float | None) -> None:
        for end in self.line(text):
            self.tree.nodes[end].active[server] -= 1
        if answer_s is not None and outputs > 1:
            large = [end for end in self.line(text) if end and self.large(end)]
            self.tree.nodes[large[0] if large else ""].outputs.append(outputs)
            self.tpots[server].append(answer_s / (outputs - 1))


@given(SEEDS, st.integers(0, 8))
def test_preble_follows_the_prefix_or_the_least_load(seed: int, window_s: int) -> None:
    router = Preble(PrebleSettings(name="preble", window_s=window_s, prefill_tokens_s=100, block_tokens=1), SERVERS)
    fleet, plain, texts = Counting(router, SERVERS), PlainPreble(window_s, 100), Texts()
    sent, answered = dict[str, tuple[str, RequestSpec]](), dict[str, int]()
    for now_s, (what, value, *more) in enumerate(steps(seed)):
        if what == "send" and value:
            spec = texts.request(value, outputs=more[1])
            servers, follows = plain.choices(value)
            loads = plain.loads()
            chosen = fleet.send(spec, now_s * 10**9)
            assert chosen in servers
            assert loads[chosen] == pytest.approx(min(loads[at] for at in servers))
            plain.send(value, servers if follows else {chosen}, chosen, now_s, more[1])
            assert router.loads() == pytest.approx(plain.loads())
            sent[spec.id] = value, spec
        elif fleet.at and what in ("answer", "end"):
            name = sorted(fleet.at)[value % len(fleet.at)]
            if what == "answer":
                fleet.answer(name, now_s * 10**9)
                answered[name] = now_s
            else:
                server = fleet.at[name][1]
                fleet.end(name, now_s * 10**9)
                text, spec = sent[name]
                took = now_s - answered[name] if name in answered else None
                plain.end(text, server, spec.output_tokens, took)
