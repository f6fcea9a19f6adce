"""Blocks between the cache and the host: each arrives whole, bit by bit, nothing else changes, and a tier that does not
fit is refused in a line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import given
from hypothesis import strategies as st
from support.engine.peer_model import LLAMA
from support.engine.served import INLINE, asked, spec
from test_model import BLOCK, CPU

from cbengine import build
from cbengine.model.kvcache import Carrier, DeviceMemoryError, KvCache, host_tier, pinned_size
from cbsim.policy.transfers import Direction

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
