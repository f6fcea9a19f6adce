"""The stand-in's kernels for `flash_attn`: decoding in Triton's interpreter where there is no GPU, all of it on one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import interpreted  # noqa: F401 - skips this module where triton cannot run
from flash_calls import varlen, with_cache
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import BOUND, DEVICE, attended, lengths_of, step, worst

from cbengine.model.kernels import attention
from cbengine.model.kernels.triton_ops import TritonOps
from cbengine.peer.standin.append import GpuAttention
from cbengine.peer.standin.functions import FlashAttention

ON_GPU = DEVICE == "cuda"
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def poison() -> Iterator[None]:
    """Fresh floats are NaN, so what a kernel leaves unwritten shows."""
    patch, empty_like = pytest.MonkeyPatch(), torch.empty_like
    patch.setattr(torch, "empty_like", lambda other: empty_like(other).fill_(math.nan))
    patch.setattr(attention, "LEAST_PART", 32)  # short rows are split too
    yield
    patch.undo()


@settings(max_examples=40 if ON_GPU else 10)
@given(
    cached=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    shape=st.fixed_dictionaries(
        {
            "group": st.sampled_from((1, 4, 7)),
            "kv_heads": st.integers(1, 3),
            "width": st.sampled_from((16, 64, 128)),
            "block_size": st.sampled_from((1, 8, 12, 256)),
            "dtype": st.sampled_from((torch.float32, torch.bfloat16)),
        }
    ),
    padding=st.integers(0, 3),
    multiprocessors=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_a_new_token_is_cached_and_sees_itself(cached, shape, padding, multiprocessors, seed):
    """However rows are split: keys and values go to their place and nowhere else; padding answers zeros."""
    of = step(seed, [(1, tokens) for tokens in cached], **shape)
    answers, keys, values = with_cache(FlashAttention(GpuAttention(TritonOps(multiprocessors))), of, padding)
    assert worst(answers[: len(cached)], attended(of)) < BOUND[shape["dtype"]]
    assert answers[len(cached) :].count_nonzero() == 0
    torch.testing.assert_close(keys, of.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, of.values, rtol=0, atol=0, equal_nan=True)


def test_the_call_is_one_that_this_torch_takes():
    """Its operator is private and has grown arguments: here without data, and hence with no look at any value."""
    q, k = (torch.empty(tokens, heads, 64, dtype=torch.bfloat16, device="meta") for tokens, heads in ((7, 8), (30, 2)))
    at = torch.empty(3, dtype=torch.int32, device="meta")
    assert GpuAttention(TritonOps(1)).varlen(q, k, k, at, at, (5, 20)).shape == q.shape


def test_the_append_compiles_for_hopper_without_spilling(tmp_path):
    """The interpreter takes what the compiler may not."""
    script = Path(__file__).with_name("compile_append.py")
    settled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settled |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=settled, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"bf16": 0, "fp16": 0, "fp32": 0}


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
@settings(max_examples=40)
@given(
    lengths=lengths_of(4, 200, 600),
    group=st.sampled_from((1, 4, 7)),
    width=st.sampled_from((64, 128)),
    dtype=st.sampled_from(HALF),
    padding=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_ragged_rows_see_what_lies_before_them(lengths, group, width, dtype, padding, seed):
    """torch's flash attention is aligned to the last token, as the package's is, and does not read padding."""
    of = step(seed, lengths, group=group, kv_heads=2, width=width, dtype=dtype)
    assert worst(varlen(FlashAttention(GpuAttention()), of, padding), attended(of)) < BOUND[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_calls_can_be_captured_and_replayed(rows):
    """Lengths, tables and tokens change between replays of one graph; both functions read them on the device."""
    kernels = GpuAttention()
    first, second = (
        step(1, [(1, tokens + 7 * row) for row in range(rows)], group=4, kv_heads=2, width=64, dtype=torch.bfloat16)
        for tokens in (500, 900)
    )
    keys, values = second.keys.clone(), second.values.clone()
    tables = second.rows.tables[second.rows.slots.long()].clone()
    queries, cached = second.queries.clone(), second.rows.kv_tokens - 1
    k, v = (pages.flatten(0, 1)[second.rows.kv_places].clone() for pages in (keys, values))
    at = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.decode(queries, k, v, keys, values, cached, tables), kernels.varlen(
            queries, k, v, at, at, (1, 1)
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        answers, alone = call()
    for of in (first, second):
        queries.copy_(of.queries)
        for pages, new, right in ((keys, k, of.keys), (values, v, of.values)):
            pages[: len(right)].copy_(right)
            new.copy_(right.flatten(0, 1)[of.rows.kv_places])
            pages.flatten(0, 1)[of.rows.kv_places] = math.nan
        cached.copy_(of.rows.kv_tokens - 1)
        tables[:, : of.rows.tables.shape[1]].copy_(of.rows.tables[of.rows.slots.long()])
        graph.replay()
        assert worst(answers, attended(of)) < BOUND[torch.bfloat16]
        assert worst(alone, v.repeat_interleave(4, dim=1).cpu().double()) < BOUND[torch.bfloat16]
        torch.testing.assert_close(keys[: len(of.keys)], of.keys, rtol=0, atol=0, equal_nan=True)
