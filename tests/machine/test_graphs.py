"""CUDA graphs: the size at which a step runs, and who pays for a capture."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import step_plan

from cbsim.machine.graphs import Graphs, Shape, VllmBuckets, engine_bucket, transformers_bucket, unpadded
from cbsim.machine.simulate import graphs
from cbsim.policy.captures import captured_sizes, up_to_multiple, up_to_power, vllm_sizes
from cbsim.policy.plan import Chunk, StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.runs.assemble import scheduler
from cbsim.scenario.scenario import Scenario

SPEC = RequestSpec(0, "0", 0, 4096, 8, 8)


def plan(decodes: int = 0, chunks: tuple[tuple[int, int, int], ...] = (), outputs: int = 1, **more: Any) -> StepPlan:
    """A plan of decoding rows and of chunks, each (start, tokens, padding)."""
    listed = tuple(
        Chunk(SPEC, i, start, tokens, (), outputs, padding=pad) for i, (start, tokens, pad) in enumerate(chunks)
    )
    return step_plan(listed, decodes=decodes, **more)


@given(value=st.integers(1, 5000), interval=st.integers(1, 300))
def test_up_to_a_multiple(value: int, interval: int) -> None:
    """The least multiple that holds the value, and never more than the most there is."""
    size = up_to_multiple(value, interval, 10_000)
    assert size % interval == 0
    assert value <= size < value + interval
    assert up_to_multiple(value, interval, value) == value
    assert up_to_multiple(0, interval, 10_000) == interval


@given(value=st.integers(1, 5000))
def test_up_to_a_power_of_two(value: int) -> None:
    """The least power of two that holds the value, and never more than the most there is."""
    size = up_to_power(value, 1 << 20)
    assert size & (size - 1) == 0
    assert size // 2 < value <= size
    assert up_to_power(value, value) == value


def test_computed_tokens_count_all_padding() -> None:
    """Three decoding rows, two rows that have ended, a prompt of 5 padded by 4 and one of 9: 3 + 2 + 9 + 9."""
    assert plan(3, ((0, 5, 4), (0, 9, 0)), padding_rows=2).work.computed_tokens == 23


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (249, 256), (256, 256), (257, 272), (512, 512), (513, None)],
)
def test_vllm_pads_to_the_next_captured_size(tokens: int, bucket: int | None) -> None:
    """vLLM captures 1, 2, 4, then every 8 up to 256 and every 16 up to 512; larger steps run without a graph. Prefill
    and decode count alike."""
    rule = VllmBuckets(vllm_sizes(512))
    expected = None if bucket is None else (bucket, bucket)
    assert rule(plan(tokens)) == rule(plan(0, ((0, tokens, 0),))) == expected
    assert Graphs(rule, 7).shape(plan(tokens)) == Shape(
        bucket or tokens, eager=bucket is None, capture_ns=7 * bool(bucket)
    )


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (7, 8), (96, 96), (97, None)])
def test_decode_only_graphs_of_vllm_end_at_the_seats(rows: int, bucket: int | None) -> None:
    """CudagraphDispatcher with FULL_DECODE_ONLY: the captured sizes that are no more than max_num_seqs, here 100; a
    step with a row of two query tokens has none, one whose chunk is a single token has."""
    about = {"model": "llama-3.1-8b", "hardware": "a100-80gb", "kv_cache": {"num_blocks": 256}}
    workload = {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1}
    loop = {"cuda_graphs": {"vllm_cudagraph_mode": "FULL_DECODE_ONLY"}}
    fields = {"question": "?", "workload": workload, "scheduler": {"name": "vllm", "max_num_seqs": 100}, "loop": loop}
    asked = Scenario.model_validate(about | fields)
    known = graphs(asked, scheduler(asked, "async"))
    assert known.shape(plan(rows)) == Shape(bucket or rows, eager=bucket is None, capture_ns=0)
    assert known.shape(plan(3, ((8, 2, 0),))) == Shape(5, eager=True, capture_ns=0)
    assert known.shape(plan(3, ((8, 1, 0),))) == Shape(4, eager=False, capture_ns=0)


@pytest.mark.parametrize("limits", [{"max_requests_per_batch": 100}, {"max_batch_tokens": 100}])
@pytest.mark.parametrize(("tokens", "bucket"), [(1, 1), (3, 4), (33, 64), (65, 100)])
def test_transformers_decodes_in_powers_of_two(limits: dict[str, int], tokens: int, bucket: int) -> None:
    """The decode fast path: powers of two, at most the 100 requests, or tokens, that a batch may hold."""
    about = {"model": "llama-3.1-8b", "hardware": "a100-80gb", "cost": {"kind": "roofline"}}
    settings = {"scheduler": {"name": "transformers_fifo", **limits}, "kv_cache": {"num_blocks": 256}}
    workload = {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1}
    asked = Scenario.model_validate({"name": "graphs", "question": "?", "workload": workload, **about, **settings})
    shape = graphs(asked, scheduler(asked, "async")).shape(plan(tokens, fast_decode=True))
    assert (shape.tokens, shape.eager) == (bucket, False)


@pytest.mark.parametrize(
    ("chunks", "context", "bucket"),
    [
        (((0, 1, 0),), 0, (64, 16_384)),
        (((0, 64, 0),), 16_384, (64, 16_384)),
        (((0, 65, 0),), 16_385, (128, 32_768)),
        (((20_000, 65, 0), (4096, 100, 0)), 1000, (192, 32_768)),
        (((0, 4090, 0),), 64_000, (4090, 60_000)),
    ],
)
def test_transformers_pads_queries_and_reads(
    chunks: tuple[tuple[int, int, int], ...], context: int, bucket: tuple[int, int]
) -> None:
    """Other steps: queries to 64s, at most the 4,090 of a batch; KV reads, those of chunks included, to 16,384s, at
    most the 60,000 tokens of the cache. Only queries are computed at the padded size; both are the graph's key."""
    rule = partial(transformers_bucket, 100, 4090, 60_000)
    tokens, key = rule(plan(0, chunks, decode_context=context)) or (0, None)
    assert (tokens, key) == (bucket[0], bucket)


def test_decode_and_mixed_graphs_are_not_the_same() -> None:
    """64 tokens on the fast path and 64 tokens of a mixed step are two graphs in transformers, and so are two reads."""
    graphs = Graphs(partial(transformers_bucket, 64, 64, 65_536), 9)
    steps = [plan(64, fast_decode=True), plan(64), plan(64, decode_context=17_000), plan(64, fast_decode=True)]
    assert [graphs.shape(step).capture_ns for step in steps] == [9, 9, 9, 0]


def test_without_graphs_steps_run_eagerly_at_their_own_size() -> None:
    """A step of 5 tokens is computed at 5, one by one; an empty step launches nothing, with graphs or without."""
    assert Graphs(None, 50).shape(plan(5)) == Shape(5, eager=True, capture_ns=0)
    assert Graphs(None, 50).shape(plan(0)) == Shape(0, eager=False, capture_ns=0)
    assert Graphs(unpadded, 50).shape(plan(0)) == Shape(0, eager=False, capture_ns=0)


@given(decodes=st.integers(0, 40), pad=st.integers(0, 9), ended=st.integers(0, 9), rule=st.integers(0, 2))
def test_no_graph_is_smaller_than_its_step(decodes: int, pad: int, ended: int, rule: int) -> None:
    """Padding only adds: a static batch under any rule computes at least its own rectangle."""
    step = plan(decodes, ((0, 6, pad),), padding_rows=ended)
    vllm, transformers = VllmBuckets([1, 8, 16, 32, 64, 128]), partial(transformers_bucket, 64, 256, 4096)
    buckets = (unpadded, vllm, transformers)[rule]
    assert Graphs(buckets, 0).shape(step).tokens >= step.work.computed_tokens >= step.work.tokens


@pytest.mark.parametrize(("decodes", "bucket"), [(1, 1), (3, 4), (5, 8), (33, 40), (64, 64), (65, None)])
def test_the_engine_pads_decoding_steps_to_a_captured_size(decodes: int, bucket: int | None) -> None:
    """Sizes 1, 2, 4, then every 8: with 64 seats up to 64."""
    assert partial(engine_bucket, captured_sizes(64), 1)(plan(decodes)) == (bucket and (bucket, bucket))


def test_the_engine_launches_everything_else_kernel_by_kernel() -> None:
    """A chunk of more than one token, or one that yields none; a last chunk of one token is a row like any other."""
    rule = partial(engine_bucket, captured_sizes(64), 1)
    assert rule(plan(3, ((8, 1, 0),))) == (4, 4)
    assert rule(plan(3, ((8, 2, 0),))) is None
    assert rule(plan(3, ((8, 1, 0),), outputs=0)) is None
