"""Speculation with layers that have windows, which no recording has: no row reads what its layers' tables have lost,
though drafts in flight are counted as accepted until their result is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.errors import ScenarioError
from cbsim.machine import simulate
from cbsim.machine.driver import Machine
from cbsim.policy.groups import FULL
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import Request, RequestSpec
from cbsim.scenario import scenario
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
    ended = machine.record.requests()
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
        (["chunked 16", "full"], False, "does not speculate with layers that have chunks or states"),
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
