"""The model computes what transformers' own does, whatever way its sequences are cut up and its pages lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the engine is compared with transformers")

from hypothesis import given
from hypothesis import strategies as st
from support.engine.peer_model import ARCHITECTURES, FAR, LLAMA, NEAR, changed, to_transformers
from support.engine.served import INLINE, asked, spec

from cbengine import build
from cbengine.model import kvcache, weights
from cbengine.model.decoder import Model, rotation
from cbengine.model.kvcache import Carrier, DeviceMemoryError, KvCache, host_tier, pinned_size
from cbengine.model.ops import Rows, TorchOps
from cbengine.model.weights import Architecture
from cbsim.policy.transfers import Direction
from cbsim.scenario.shapes import sight

torch.set_num_threads(1)
CPU, BLOCK, LONGEST, BOUND = torch.device("cpu"), 4, 64, 1e-5
MIXES = {"two windows": (NEAR, FAR, NEAR), "parts": ("chunked 7", "full"), "parts and a window": ("chunked 16", NEAR)}


class Cut:
    """A model with a cache, and sequences computed in it piece by piece."""

    def __init__(self, architecture: Architecture, blocks: int = 40) -> None:
        self.model = Model(architecture, weights.random(architecture, 1, torch.float32, CPU), TorchOps(), LONGEST)
        self.cache = KvCache(architecture, blocks, BLOCK, torch.float32, CPU)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(2)).tolist()
        self.tables = [order[i : i + LONGEST // BLOCK] for i in (0, LONGEST // BLOCK)]  # two sequences' pages

    @torch.inference_mode()
    def step(self, *pieces: tuple[int, Any, int, int]) -> list[Any]:
        """Compute tokens low to high of sequences, each (its table, its ids, low, high): their logits."""
        tokens = torch.cat([ids[low:high] for _, ids, low, high in pieces])
        hidden = self.model.forward(
            tokens, self.cache, rows(self.tables, [(t, low, high) for t, _, low, high in pieces])
        )
        return list(self.model.logits(hidden).split([high - low for *_, low, high in pieces]))


def rows(tables: list[list[int]], pieces: list[tuple[int, int, int]]) -> Rows:
    """What a step is told of rows that compute positions low to high - 1 of sequences: (table, low, high) each."""
    lengths = [high - low for _, low, high in pieces]
    positions = [(table, at) for table, low, high in pieces for at in range(low, high)]
    decodes = next((i for i, length in enumerate(lengths) if length > 1), len(lengths))
    return Rows(
        tables=torch.tensor(tables, dtype=torch.int32),
        slots=torch.tensor([table for table, *_ in pieces], dtype=torch.int32),
        kv_tokens=torch.tensor([high for *_, high in pieces], dtype=torch.int32),
        starts=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        positions=torch.tensor([at for _, at in positions]),
        kv_places=torch.tensor([tables[table][at // BLOCK] * BLOCK + at % BLOCK for table, at in positions]),
        decodes=decodes,
        longest=max(lengths),
    )


@cache
def ids(seed: int, count: int = 41) -> Any:
    return torch.randint(0, LLAMA.vocab, (count,), generator=torch.Generator().manual_seed(seed))


@cache
def reference(architecture: Architecture, tokens: Any) -> Any:
    """The logits that transformers computes for a whole sequence."""
    model = to_transformers(architecture, weights.random(architecture, 1, torch.float32, CPU))
    with torch.inference_mode():
        return model(tokens[None], use_cache=False).logits[0]


@cache
def mixed_reference(architecture: Architecture, tokens: Any) -> Any:
    """The logits that transformers' Qwen3 computes where its two types of layers are given masks of ours."""
    kinds = list(dict.fromkeys(architecture.attention))
    types = tuple(("full", NEAR)[kinds.index(one)] for one in architecture.attention)
    drawn = weights.random(architecture, 1, torch.float32, CPU)
    model = to_transformers(changed(architecture, attention=types), drawn)
    at = range(len(tokens))
    seen = [sight(kind) for kind in kinds]
    masks = [torch.tensor([[one.gone(query) <= key <= query for key in at] for query in at]) for one in seen]
    given = dict(zip(("full_attention", "sliding_attention"), (mask[None, None] for mask in masks), strict=True))
    with torch.inference_mode():
        return model(tokens[None], attention_mask=given, use_cache=False).logits[0]


def difference(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


# -- ways to cut up the same computation ------------------------------------------------------------------------------


def whole(cut: Cut) -> list[tuple[Any, Any]]:
    return [(ids(0), cut.step((0, ids(0), 0, 41))[0])]


def in_chunks(cut: Cut) -> list[tuple[Any, Any]]:
    pieces = [cut.step((0, ids(0), low, min(low + 7, 41)))[0] for low in range(0, 41, 7)]
    return [(ids(0), torch.cat(pieces))]


def one_by_one(cut: Cut) -> list[tuple[Any, Any]]:
    return [(ids(0), torch.cat([cut.step((0, ids(0), at, at + 1))[0] for at in range(41)]))]


def ragged_with_shared_pages(cut: Cut) -> list[tuple[Any, Any]]:
    """The second sequence begins as the first does, finds three full pages of it, and joins while the first decodes."""
    other = torch.cat((ids(0)[: 3 * BLOCK], ids(1)[3 * BLOCK : 30]))
    cut.tables[1][:3] = cut.tables[0][:3]
    first = [cut.step((0, ids(0), 0, 20))[0]]
    one, begun = cut.step((0, ids(0), 20, 21), (1, other, 12, 25))
    both = cut.step((0, ids(0), 21, 22), (1, other, 25, 26))
    turned = cut.step((1, other, 26, 27), (0, ids(0), 22, 41))
    rest = cut.step((1, other, 27, 30))
    found = torch.cat((*first, one, both[0], turned[1]))
    return [(ids(0), found), (other, torch.cat((first[0][:12], begun, both[1], turned[0], *rest)))]


@pytest.mark.parametrize("way", [whole, in_chunks, one_by_one, ragged_with_shared_pages])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers(name: str, way: Callable[[Cut], list[tuple[Any, Any]]]) -> None:
    for tokens, found in way(Cut(ARCHITECTURES[name])):
        assert found.dtype == torch.float32
        assert difference(found, reference(ARCHITECTURES[name], tokens)) < BOUND


@pytest.mark.parametrize("way", [whole, in_chunks, one_by_one, ragged_with_shared_pages])
@pytest.mark.parametrize("name", MIXES)
def test_logits_of_mixes_are_those_of_transformers_under_their_masks(
    name: str, way: Callable[[Cut], list[tuple[Any, Any]]]
) -> None:
    architecture = changed(qk_norm=True, attention=MIXES[name])
    for tokens, found in way(Cut(architecture)):
        assert difference(found, mixed_reference(architecture, tokens)) < BOUND


@pytest.mark.parametrize("name", ["llama", "llama 3.1", "qwen2", "qwen3"])
def test_rotation_is_that_of_transformers_to_the_bit(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model: Any = to_transformers(architecture, weights.random(architecture, 1, torch.float32, CPU))
    cosines, sines = model.model.rotary_emb(torch.zeros(1), torch.arange(9000)[None])
    table = rotation(architecture, 9000)
    half = architecture.head_dim // 2
    assert table.shape == (9000, 2, half)
    assert table.dtype == torch.float32
    assert table.is_contiguous()
    assert torch.equal(table[:, 0], cosines[0, :, :half])
    assert torch.equal(table[:, 1], sines[0, :, :half])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32_whatever_the_weights_are(dtype: Any) -> None:
    model = Model(LLAMA, weights.random(LLAMA, 1, dtype, CPU), TorchOps(), LONGEST)
    pages = KvCache(LLAMA, 16, BLOCK, dtype, CPU)
    hidden = model.forward(ids(0), pages, rows([list(range(16))], [(0, 0, 41)]))
    assert hidden.dtype == dtype
    assert model.logits(hidden[-2:]).dtype == torch.float32
    assert model.logits(hidden[-2:]).shape == (2, LLAMA.vocab)


def test_a_model_takes_its_tensors_and_requires_no_gradient() -> None:
    tied = changed(tied_embeddings=True)
    tensors = weights.random(tied, 1, torch.float32, CPU)
    model = Model(tied, tensors, TorchOps(), LONGEST)
    assert not tensors, "the parts of joined matrices would stay in memory"
    assert model.head is model.embedding
    kept = [model.embedding, model.norm, model.rotation, model.layers[0].qkv, model.layers[0].o]
    assert not any(tensor.requires_grad for tensor in kept)


# -- the cache --------------------------------------------------------------------------------------------------------


def test_a_cache_has_one_block_more_and_knows_its_size() -> None:
    pages = KvCache(LLAMA, 10, BLOCK, torch.bfloat16, CPU)
    assert pages.scratch == 10
    assert pages.keys.shape == pages.values.shape == (3, 11, BLOCK, 2, 16)
    assert pages.bytes == KvCache.bytes_for(LLAMA, 10, BLOCK, torch.bfloat16) == 2 * pages.keys.nbytes
    keys, values = pages.layer(2)
    keys[10], values[0] = 1, 2
    assert pages.keys[2, 10].eq(1).all()
    assert pages.values[2, 0].eq(2).all()
    assert pages.keys.count_nonzero() == pages.values.count_nonzero() == BLOCK * 2 * 16


@pytest.mark.parametrize("blocks", [10**11, 10**15])
def test_a_cache_that_the_host_cannot_hold_is_refused(blocks: int) -> None:
    with pytest.raises(DeviceMemoryError, match=r"^kv_cache.num_blocks: got 1[0,]+, which takes [\d,]+ bytes on cpu: "):
        KvCache(LLAMA, blocks, BLOCK, torch.float32, CPU)


def test_a_cache_that_a_gpu_cannot_hold_is_refused_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    a_block = 2 * 3 * BLOCK * 2 * 16 * 4
    monkeypatch.setattr(kvcache, "free_bytes", lambda device: 8 * a_block - 1)
    with pytest.raises(DeviceMemoryError) as raised:
        KvCache(LLAMA, 10, BLOCK, torch.float32, CPU)
    free = f"{8 * a_block - 1:,} bytes are free: 6 blocks would fit"
    assert str(raised.value) == f"kv_cache.num_blocks: got 10, which takes {11 * a_block:,} bytes on cpu, where {free}"
    assert KvCache(LLAMA, 6, BLOCK, torch.float32, CPU).bytes <= 8 * a_block - 1


# -- blocks between the cache and the host ----------------------------------------------------------------------------


BLOCKS, PLACES = 7, 4


@st.composite
def moves(draw: st.DrawFn) -> tuple[Direction, list[int], list[int]]:
    """Whole blocks, none of them read after it has been written."""
    way = draw(st.sampled_from(Direction))
    read, written = (
        (BLOCKS, PLACES) if way is Direction.OUT else (PLACES, BLOCKS) if way is Direction.IN else (BLOCKS, BLOCKS)
    )
    count = draw(st.integers(1, 3))
    sources = draw(st.lists(st.integers(0, read - 1), min_size=count, max_size=count))
    free = [at for at in range(written) if way is not Direction.COPY or at not in sources]
    return way, sources, draw(st.permutations(free))[:count]


@given(st.lists(moves(), max_size=6))
def test_blocks_arrive_whole(given: list[tuple[Direction, list[int], list[int]]]) -> None:
    """Keys and values of all layers, as in plain Python; what no move names stays as it was."""
    cache, host = (
        KvCache(LLAMA, BLOCKS, BLOCK, torch.bfloat16, CPU),
        host_tier(LLAMA, PLACES, BLOCK, torch.bfloat16, pinned=False),
    )
    for at, tensor in enumerate((cache.keys, cache.values, host)):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(at)))

    def blocks() -> dict[Direction, list[Any]]:
        on_device = [torch.stack((cache.keys[:, i], cache.values[:, i])) for i in range(BLOCKS + 1)]
        return {Direction.COPY: on_device, Direction.OUT: [block.clone() for block in host]}

    wanted, carrier = blocks(), Carrier(cache, host)
    for way, sources, targets in given:
        carrier.carry(way, sources, targets)
        read, written = (
            wanted[Direction.OUT if way is Direction.IN else Direction.COPY],
            wanted[Direction.OUT if way is Direction.OUT else Direction.COPY],
        )
        for source, target in zip(sources, targets, strict=True):
            written[target] = read[source]
    found = blocks()
    for tier in (Direction.COPY, Direction.OUT):
        assert all(torch.equal(one, other) for one, other in zip(found[tier], wanted[tier], strict=True))


def test_a_block_lies_in_one_piece() -> None:
    """So that a single copy takes it over the link."""
    host = host_tier(LLAMA, PLACES, BLOCK, torch.float16, pinned=False)
    assert all(block.is_contiguous() for block in host)
    cache = KvCache(LLAMA, PLACES - 1, BLOCK, torch.float16, CPU)
    assert host.nbytes == cache.bytes


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [10**11, 10**15])
def test_a_tier_that_the_host_cannot_hold_is_refused(blocks: int) -> None:
    with pytest.raises(
        DeviceMemoryError, match=r"^scheduler: got a host tier of 1[0,]+ blocks, which takes [\d,]+ bytes"
    ):
        host_tier(LLAMA, blocks, BLOCK, torch.float32, pinned=False)


@pytest.mark.parametrize(
    ("said", "raised"), [("CUDA error: out of memory", DeviceMemoryError), ("CUDA error: lost", RuntimeError)]
)
def test_memory_that_cannot_be_pinned_is_refused(said: str, raised: type[Exception]) -> None:
    """... and a GPU that has failed is no lack of memory."""
    with mock.patch.object(torch, "zeros", side_effect=RuntimeError(said)), pytest.raises(raised) as error:
        host_tier(LLAMA, 3, BLOCK, torch.float32, pinned=True)
    assert type(error.value) is raised


def plan(host_blocks: int, device: str = "cpu") -> build.ExecutorPlan:
    made = build.executor_plan(asked("vllm"), "sync", [spec(0, 10, 5)], INLINE)
    return replace(made, host_blocks=host_blocks, device=device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_would_fit_is_said(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated. A GPU's tier is pinned, and torch rounds that up to a power of two."""
    block = KvCache.bytes_for(plan(1).architecture, 0, plan(1).block_size, torch.float32)
    monkeypatch.setattr(build, "_needed_on_cpu", lambda plan, free: 0)
    monkeypatch.setattr(build, "host_memory", lambda: 8 * block)
    fits = 8 if pinned_size(8 * block) == 8 * block or device == "cpu" else pinned_size(8 * block) // 2 // block
    build._check_memory(plan(fits, device))
    with pytest.raises(DeviceMemoryError) as error:
        build._check_memory(plan(1000, device))
    size = 1000 * block if device == "cpu" else pinned_size(1000 * block)
    told = f"scheduler: got a host tier of 1,000 blocks, which takes {size:,} bytes of the host, where {8 * block:,}"
    assert str(error.value) == f"{told} are free: {fits:,} blocks would fit"


def test_what_model_and_cache_take_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = build._needed_on_cpu(plan(0), 1 << 60)
    block = KvCache.bytes_for(plan(1).architecture, 0, plan(1).block_size, torch.float32)
    monkeypatch.setattr(build, "host_memory", lambda: needed + 3 * block)
    plan(3).check()
    with pytest.raises(DeviceMemoryError, match=r"3 blocks would fit$"):
        plan(4).check()


def test_memory_is_rounded_as_torch_does() -> None:
    assert [pinned_size(size) for size in (0, 1, 2, 3, 4096, 4097)] == [0, 1, 2, 4, 4096, 8192]
