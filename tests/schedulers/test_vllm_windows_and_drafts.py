"""Speculation with layers that have windows, which no recording has: no row reads what its layers' tables have lost,
though drafts in flight are counted as accepted until their result is there. And what is refused, with and without
windows, because drafts would not fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.examples import examples

from cbsim.errors import ScenarioError
from cbsim.machine import simulate
from cbsim.machine.driver import Machine
from cbsim.policy.groups import FULL
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import Request, RequestSpec
from cbsim.record.tables import requests_of
from cbsim.runs import assemble
from cbsim.scenario import scenario
from cbsim.scenario.scenario import Scenario
from cbsim.workload.acceptance import Acceptance
from cbsim.workload.requests import Workload

MODEL = {
    "name": "windows",
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 16,
    "intermediate": 64,
    "vocab": 128,
    "max_position": 256,
    "attention": ["sliding 9", "full"],
}
LINEAR = "{rule: gated_delta, key_heads: 2, value_heads: 2, key_dim: 16, value_dim: 16}"


class Reads(Acceptance):
    """Acceptance that looks where each row really began, once that is known: at its request's last known token."""

    def __init__(self, inner: Acceptance, machine: Machine, ahead: int, wider: int) -> None:
        self._inner, self._machine, self._ahead, self._wider = inner, machine, ahead, wider
        self._spans: dict[int, dict[RequestSpec, list[tuple[int, int]]]] = {}  # by step: what is in each group's table
        self.corrected = self.passed = 0

    def planned(self, plan: StepPlan) -> None:
        """Note what the tables hold while a step runs."""
        pool, requests = self._machine.scheduler.pool, self._machine.scheduler.requests
        pool.check()
        self._spans[plan.step] = {c.spec: pool.spans(requests[c.spec]) for c in plan.work.chunks}

    def of(self, plan: StepPlan, ran: StepPlan, requests: Mapping[RequestSpec, Request]) -> Any:
        spans = self._spans.pop(plan.step)
        for chunk in plan.work.chunks:
            if chunk.outputs > 1 and chunk.spec in requests and not chunk.admitted:
                start = chunk.spec.prompt_tokens + requests[chunk.spec].seen - 1
                self.corrected += start < chunk.start
                for group, (low, high) in zip(self._machine.scheduler.pool.groups, spans[chunk.spec], strict=True):
                    sees = group.attention
                    sees = sees if sees == FULL else sees._replace(span=sees.span + self._wider)
                    gone = sees.gone(start)
                    assert low <= gone, (plan.step, chunk.spec.id, "freed what is seen", low)
                    assert high >= min(chunk.start + chunk.tokens + self._ahead, MODEL["max_position"]), "no room"
                    self.passed += low > 0
        return self._inner.of(plan, ran, requests)


def drive(
    loop: str, blocks: int, speculation: dict[str, Any], requests: list[tuple[int, int]], wider: int = 0
) -> Reads:
    """A run whose rows look into the tables. Its layers see `wider` tokens more than the scheduler takes them for."""
    fields: dict[str, Any] = {
        "question": "Does a row find what its layers see?",
        "model": MODEL,
        "hardware": "h100-sxm",
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        "scheduler": {
            "name": "vllm",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
            "enable_prefix_caching": False,
            "max_model_len": 96,
        },
        "kv_cache": {"block_size": 2, "num_blocks": blocks},
        "speculation": speculation,
    }
    made = scenario.parse(fields, "test")
    specs = [RequestSpec(at, str(at), 0, prompt, out, out) for at, (prompt, out) in enumerate(requests)]
    machine = simulate.machine(made, loop, Workload(specs, len(specs)))
    assert machine.acceptance is not None
    reads = Reads(machine.acceptance, machine, made.speculation.rule.ahead if made.speculation else 0, wider)
    machine.acceptance, machine.on_plan = reads, reads.planned
    simulate.run(machine)
    ended = requests_of(machine.record)
    assert [sum(row.token_runs[1::2]) for row in ended] == [out for _, out in requests]
    assert {row.status for row in ended} == {"length"}
    assert not machine.scheduler.pool.tables
    return reads


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_no_row_reads_what_its_window_has_lost(loop: str, method: str) -> None:
    """Any lengths, acceptance and drafts, caches in which requests preempt each other: accounts and contents hold."""

    @given(
        blocks=st.integers(90, 160),
        k=st.integers(1, 6),
        rate=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
        requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8),
    )
    def check(blocks: int, k: int, rate: float, requests: list[tuple[int, int]]) -> None:
        drive(loop, blocks, {"method": method, "k": k, "acceptance": {"rate": rate}}, requests)

    check()


def test_rows_behind_rejected_drafts_begin_earlier_than_planned() -> None:
    """The case that the rule is for does occur: in the asynchronous loop rows begin before where they were planned, and
    blocks have left the tables of windows by then."""
    reads = drive("async", 160, {"method": "eagle", "k": 4, "acceptance": {"rate": 0.4}}, [(5, 80)] * 3)
    assert reads.corrected > 20
    assert reads.passed > 20


def test_blocks_freed_as_if_drafts_in_flight_were_accepted_are_found() -> None:
    """That would free a block k tokens too early, as it is free to do if windows see k tokens less."""
    with pytest.raises(AssertionError, match="freed what is seen"):
        drive("async", 160, {"method": "eagle", "k": 6, "acceptance": {"rate": 0.0}}, [(5, 80)] * 3, wider=6)


@pytest.mark.parametrize(
    ("attention", "caching", "words"),
    [
        (
            ["sliding 9", "full"],
            True,
            "enable_prefix_caching: got true, must be false with speculation and layers",
        ),
        (["chunked 16", "full"], False, "does not speculate with chunked or linear layers"),
    ],
)
def test_what_is_not_followed_with_windows_is_refused(attention: list[str], caching: bool, words: str) -> None:
    fields: dict[str, Any] = {
        "question": "Is it refused?",
        "model": MODEL | {"attention": attention},
        "hardware": "h100-sxm",
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        "scheduler": {"name": "vllm", "enable_prefix_caching": caching},
        "speculation": {"method": "eagle", "k": 2, "acceptance": {"rate": 0.5}},
    }
    with pytest.raises(ScenarioError, match=words):
        scenario.parse(fields, "test")


@st.composite
def tiny_servers(draw: st.DrawFn) -> tuple[Scenario, str, Workload]:
    """Servers with drafts whose caches hold a request or two, with and without windows; prompts may begin alike."""
    method, k = draw(st.sampled_from(["ngram", "eagle", "draft_model"])), draw(st.integers(1, 6))
    windows, seats = draw(st.booleans()), draw(st.integers(1, 4))
    drafts: dict[str, Any] = {"method": method, "k": k, "acceptance": {"rate": draw(st.sampled_from([0.0, 0.5, 1.0]))}}
    drafts |= {"drafter": {"fraction": 0.1}} if method == "draft_model" else {}
    drafts |= {"by_rows": [[1, k], [3, k // 2]]} if draw(st.booleans()) else {}
    fields: dict[str, Any] = {
        "question": "Does it end?",
        "model": MODEL if windows else MODEL | {"attention": ["full"]},
        "hardware": "h100-sxm",
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        "scheduler": {
            "name": "vllm",
            "max_num_seqs": seats,
            "max_num_batched_tokens": max(seats, k + 2) + draw(st.integers(0, 20)),
            "enable_prefix_caching": not windows and draw(st.booleans()),
            "scheduler_reserve_full_isl": draw(st.booleans()),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
        },
        "kv_cache": {
            "block_size": draw(st.sampled_from([1, 2, 4])),
            "num_blocks": draw(st.integers(12, 24)) + 60 * windows,
        },
        "speculation": drafts,
    }
    if draw(st.booleans()):
        fields["scheduler"]["max_model_len"] = draw(st.integers(k + 1, 20))
    specs = []
    for at in range(draw(st.integers(1, 6))):
        prompt, out = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        alike = (tuple(range(1, prompt + 1)), 1, prompt) if draw(st.booleans()) else ()
        specs.append(RequestSpec(at, str(at), draw(st.sampled_from([0, at * 10**6])), prompt, out, out, at % 2, *alike))
    return scenario.parse(fields, "test"), draw(st.sampled_from(["sync", "async"])), Workload(specs, len(specs))


@given(case=tiny_servers())
@examples(150)
def test_no_run_of_speculation_is_stuck(case: tuple[Scenario, str, Workload]) -> None:
    """A request whose drafts, or the blanks with which it joins, never fit the cache is refused; all others end."""
    made, loop, workload = case
    machine = simulate.machine(made, loop, workload)
    simulate.run(machine)
    ended = Counter(row.status for row in requests_of(machine.record))
    assert ended.total() == workload.total
    assert ended.keys() <= {"length", "refused"}
    event(f"some refused: {ended['refused'] > 0}")


@pytest.mark.parametrize(
    ("caching", "needs"), [(False, "14 tokens and 6 drafts need 19"), (True, "and 12 drafts need 25")]
)
def test_a_refusal_counts_the_room_of_drafts(caching: bool, needs: str) -> None:
    """vLLM takes room for k tokens behind a row, and k blanks for a row whose prefix is cached but for one token: a
    request that lacks them would be preempted, or wait, for ever.
    """
    fields: dict[str, Any] = {
        "question": "Is it refused?",
        "model": MODEL | {"attention": ["full"]},
        "hardware": "h100-sxm",
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 4, "output_tokens": 10},
        "scheduler": {"name": "vllm", "enable_prefix_caching": caching, "max_model_len": 64},
        "kv_cache": {"block_size": 1, "num_blocks": 19},
        "speculation": {"method": "eagle", "k": 6, "acceptance": {"rate": 0.5}},
    }
    spec = RequestSpec(0, "0", 0, 4, 10, 10)
    policy = assemble.scheduler(scenario.parse(fields, "test"), "sync")
    assert needs in str(policy.refusal(spec))
    fields["kv_cache"]["num_blocks"] = 26
    assert assemble.scheduler(scenario.parse(fields, "test"), "sync").refusal(spec) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ["speculation.k=20", "scheduler.max_model_len=20"],
            "speculation.k: got 20, must be < 20, the longest sequence",
        ),
        (["scheduler.max_num_batched_tokens=2"], "max_num_batched_tokens: got 2, must be >= 4 with speculation.k 3"),
        (
            ["speculation.drafter.model=llama-3.1-70b", "speculation.method=draft_model"],
            "speculation.drafter.model: got Llama-3.1-70B, which leaves too little for a cache",
        ),
        (
            ["model.attention=[linear, full]", "model.linear=" + LINEAR],
            "scheduler.name: got vllm, which does not speculate with chunked or linear layers (model.attention)",
        ),
    ],
)
def test_what_speculation_does_not_fit_is_said(changes: list[str], words: str) -> None:
    fields: dict[str, Any] = {
        "question": "Is it refused?",
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm",
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        "scheduler": {"name": "vllm", "max_num_seqs": 2},
        "speculation": {"method": "eagle", "k": 3, "acceptance": {"rate": 0.5}},
    }
    with pytest.raises(ScenarioError, match=re.escape(words)):
        scenario.parse(fields, "test", changes)
