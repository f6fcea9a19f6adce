"""llm-d's picker against a second implementation: scores one by one from lists, the filter by its text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.routed import SEEDS, Counting, Texts, steps

from cbsim.policy.request import RequestSpec
from cbsim.routers.base import blocks
from cbsim.routers.llmd import Llmd, LlmdSettings

SERVERS = 3
WEIGHTS = ("token_load", "prefix", "queue", "running", "kv_use", "load_aware", "active_requests", "no_hit_lru")
WEIGHTED = st.fixed_dictionaries({name: st.sampled_from([0.0, 1.0, 2.5]) for name in WEIGHTS})


class Plain:
    """What llm-d knows, as lists: prompts not answered, blocks sent, the order of cold prompts."""

    def __init__(self, form: LlmdSettings) -> None:
        self.form, self.loads, self.cold = form, dict[str, tuple[int, int]](), list[int]()
        self.blocks: list[list[str]] = [[] for _ in range(SERVERS)]  # oldest first

    def beginnings(self, text: str) -> list[str]:
        size = self.form.block_tokens
        longest = min(len(text), self.form.max_prefix_tokens)
        return [text[:end] for end in range(size, longest + 1, size)]

    def matched(self, text: str) -> list[int]:
        reach = 0
        for beginning in self.beginnings(text):
            if not any(beginning in sent for sent in self.blocks):
                break
            reach += 1
        return [sum(one in sent for one in self.beginnings(text)[:reach]) for sent in self.blocks]

    def in_flight(self, server: int) -> int:
        return sum(tokens for at, tokens in self.loads.values() if at == server)

    def uncached(self, text: str, server: int) -> int:
        return len(text) - self.matched(text)[server] * self.form.block_tokens

    def total(self, text: str, views: Any) -> list[float]:
        matched, count = self.matched(text), len(self.beginnings(text))
        totals = []
        for server in range(SERVERS):
            waiting, running = [view.waiting for view in views], [view.running for view in views]
            flying = [view.in_flight for view in views]
            most = self.form.queue_threshold_tokens
            order = [one for one in range(SERVERS) if one not in self.cold] + self.cold
            scores = {
                "token_load": max(0, 1 - (self.in_flight(server) + self.uncached(text, server)) / most),
                "prefix": matched[server] / count if count else 0,
                "queue": spread(waiting, server),
                "running": spread(running, server),
                "kv_use": 1 - views[server].kv_use,
                "load_aware": max(0, 0.5 * (1 - waiting[server] / 128)),
                "active_requests": 1 if not flying[server] else (max(flying) - flying[server]) / max(flying),
                "no_hit_lru": 0.5 if any(matched) else 1 - order.index(server) / (SERVERS - 1),
            }
            totals.append(sum(getattr(self.form, name) * score for name, score in scores.items()))
        return totals

    def kept(self, text: str) -> list[int]:
        matched, count = self.matched(text), len(self.beginnings(text))
        everyone = [*range(SERVERS)]
        if not self.form.affinity_threshold:
            return everyone
        sticky = [server for server in everyone if count and matched[server] / count >= self.form.affinity_threshold]
        rest = [server for server in everyone if server not in sticky]
        if sticky and rest and self.form.max_ttft_penalty_ms:
            wait_ms = [1000 * self.in_flight(server) / self.form.peak_prefill_tokens_s for server in everyone]
            if min(wait_ms[one] for one in sticky) - min(wait_ms[one] for one in rest) > self.form.max_ttft_penalty_ms:
                return everyone
        return sticky or everyone

    def send(self, spec: RequestSpec, text: str, server: int) -> None:
        self.loads[spec.id] = server, self.uncached(text, server)
        if not any(self.matched(text)):
            self.cold = [one for one in self.cold if one != server] + [server]
        for beginning in self.beginnings(text):
            sent = self.blocks[server]
            self.blocks[server] = [*(one for one in sent if one != beginning), beginning][-self.form.lru_blocks :]


def spread(counts: list[int], server: int) -> float:
    return 1.0 if max(counts) == min(counts) else (max(counts) - counts[server]) / (max(counts) - min(counts))


@given(SEEDS, WEIGHTED, st.sampled_from([0.0, 0.5, 0.8]), st.sampled_from([0.0, 3.0, 1e9]), st.sampled_from([2, 5, 99]))
def test_scores_and_filter_are_those_of_a_second_implementation(
    seed: int, weights: dict[str, float], affinity: float, penalty_ms: float, lru: int
) -> None:
    form = LlmdSettings(
        name="llmd",
        affinity_threshold=affinity,
        max_ttft_penalty_ms=penalty_ms,
        peak_prefill_tokens_s=1000,
        queue_threshold_tokens=20,
        block_tokens=2,
        lru_blocks=lru,
        max_prefix_tokens=7,
        **weights,
    )
    router, plain, texts = Llmd(form, SERVERS, 1), Plain(form), Texts()
    fleet = Counting(router, SERVERS)
    views: Any = fleet.views
    for what, value, *more in steps(seed):
        if what == "send" and value:
            for view, number in zip(fleet.views, more[0], strict=True):
                view.waiting, view.running, view.kv_use = number * 16, number * number % 7, number % 5 / 4
            totals, kept, spec = plain.total(value, views), plain.kept(value), texts.request(value)
            chosen = router.choose(spec, views, 0)
            event("kept", str(len(kept)))
            assert router._kept(list(range(SERVERS))) == kept
            assert router._totals(views) == pytest.approx(totals, abs=1e-9)
            assert totals[chosen] == pytest.approx(max(totals[server] for server in kept), abs=1e-9)
            fleet.take(spec, chosen)
            plain.send(spec, value, chosen)
            assert router.queued == [plain.in_flight(server) for server in range(SERVERS)]
        elif fleet.at and what in ("answer", "end"):
            name = sorted(fleet.at)[value % len(fleet.at)]
            (fleet.answer if what == "answer" else fleet.end)(name)
            plain.loads.pop(name, None)


def test_ties_go_to_all_servers() -> None:
    """Of 300 first prompts on idle servers each of three gets more than 60: the shuffle is uniform."""
    chosen = [Counting(Llmd(LlmdSettings(name="llmd"), 3, seed), 3).send(Texts().request("ab")) for seed in range(300)]
    assert min(chosen.count(server) for server in range(3)) > 60


def test_the_precise_index_is_what_kv_events_say() -> None:
    """Cached tokens count in whole blocks, and a prompt sent before counts for nothing."""
    form = LlmdSettings(name="llmd", index="precise", block_tokens=4, affinity_threshold=0.5)
    router, texts = Llmd(form, 2, 0), Texts()
    fleet, spec = Counting(router, 2), texts.request("abcdefgh")
    fleet.views[1].cached[spec.id] = 7
    assert fleet.send(spec) == 1
    assert router.queued == [0, 4]
    assert router.index.matched(blocks(spec, 4)) == [0, 0]


def test_stickiness_breaks_at_the_published_penalty() -> None:
    """18 s of prompts at 15,928 tokens/s are 286,704 tokens, which llm-d rounds to 286,720: up to there the prefix
    decides, beyond it the fewest tokens.
    """
    for tokens, server in ((286_704, 0), (286_705, 1)):
        router = Llmd(LlmdSettings(name="llmd"), 2, 0)
        fleet, prompt = Counting(router, 2), RequestSpec(0, "a", 0, 640, 1, 1, 0, (7,), 640, 640)
        router.index.add(blocks(prompt, 64), 0)
        router.queued[0] = tokens
        assert fleet.send(prompt) == server
