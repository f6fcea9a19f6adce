"""The roofline of layers that see less than the whole sequence, against one that sees all and sums written out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.cost.base import CpuCost
from cbsim.cost.roofline import Rates, RooflineCost, Weights
from cbsim.cost.table import attention_work
from cbsim.errors import RunError
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.policy.plan import Chunk, StepPlan, StepWork
from cbsim.policy.request import RequestSpec

RATES = Rates(flops_prefill=4e12, flops_decode=1e12, bytes_weights=1e10, bytes_kv=2e10, bytes_pcie=1e9)
WEIGHTS = Weights(
    linear=1000, head=0, hidden=0, attention_flop=4 * 10**6, decode_flop=4 * 10**6, bytes=2, kv_bytes=100_000
)
PARTS: tuple[Any, ...] = (CpuCost({}), RATES, WEIGHTS, 0.0, 0.0)
SPEC = RequestSpec(index=0, id="0", arrival_ns=0, prompt_tokens=1, output_tokens=1, max_tokens=1)
sizes = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), min_size=1, max_size=4)


def plan(rows: list[tuple[int, int]]) -> StepPlan:
    """Rows of (tokens before, query tokens); those of one token sample."""
    chunks = tuple(Chunk(SPEC, 0, start, tokens, (), int(tokens == 1)) for start, tokens in rows)
    return StepPlan(0, StepWork(chunks, prefill_tokens=sum(tokens for _, tokens in rows)))


@given(rows=sizes)
def test_layers_that_see_all_cost_what_they_did(rows: list[tuple[int, int]]) -> None:
    """... by rows of several tokens. A window longer than the sequence is none."""
    rows = [(start, tokens + 1) for start, tokens in rows]
    step, tokens = plan(rows), sum(tokens for _, tokens in rows)
    usual = RooflineCost(*PARTS).gpu_ns(step, tokens)
    for attention in (FULL, Attention(Sight.SLIDING, 10_000), Attention(Sight.CHUNKED, 10_000)):
        assert RooflineCost(*PARTS, attention=[attention] * 3).gpu_ns(step, tokens) == pytest.approx(usual, abs=2)


@given(rows=sizes)
def test_kinds_of_layers_add_up_by_their_shares(rows: list[tuple[int, int]]) -> None:
    """Two sliding layers and a full one: a third and two thirds of what a model of one kind takes."""
    step, tokens = plan(rows), sum(tokens for _, tokens in rows)
    window = Attention(Sight.SLIDING, 64)
    full, sliding, mixed = (
        RooflineCost(*PARTS, attention=layers).gpu_ns(step, tokens)[1]
        for layers in ([FULL], [window], [window, window, FULL])
    )
    assert mixed == pytest.approx(full / 3 + 2 * sliding / 3, abs=2)


def test_decoding_rows_read_their_window() -> None:
    """Four rows behind 10,000 tokens with a window of 100: 400 tokens of 100,000 bytes at 20 GB/s is 2 ms, and the
    linear layers are read once."""
    ns = RooflineCost(*PARTS, attention=[Attention(Sight.SLIDING, 100)]).gpu_ns(plan([(10_000, 1)] * 4), 4)[1]
    assert ns == pytest.approx(2_000_000 + 2000 / 10, abs=1)


def test_rows_of_a_decode_batch_read_their_window() -> None:
    """... as rows that are listed do, if they are longer than it, or all shorter. Of chunks their sum says nothing."""
    for start, tokens in ((10_000, 64), (40, 64)):
        counted = StepPlan(0, StepWork(decodes=4, decode_context=4 * start, longest_context=start))
        cost = RooflineCost(*PARTS, attention=[FULL, Attention(Sight.SLIDING, tokens)])
        assert cost.gpu_ns(counted, 4) == cost.gpu_ns(plan([(start, 1)] * 4), 4)
        window, listed = attention_work(counted, Attention(Sight.SLIDING, tokens)), plan([(start, 1)] * 4)
        assert window == attention_work(listed, Attention(Sight.SLIDING, tokens))
    with pytest.raises(RunError, match="list them one by one"):
        RooflineCost(*PARTS, attention=[Attention(Sight.CHUNKED, 64)]).gpu_ns(counted, 4)
