"""A machine that the engine has not met: packages, one kernel, one capture, streams and events, blocks of KV that move,
kernels at the shapes of real models against float64, and a cache that 32 bits cannot address.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from support.engine.ragged import step

from cbengine import build
from cbengine.device import gpu
from cbengine.device.cuda import CudaMoves, captured, streams
from cbengine.model.kvcache import Carrier, KvCache, host_tier
from cbengine.model.ops import TorchOps
from cbengine.model.weights import Architecture
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import Direction, Transfer
from cbsim.scenario import scenario

NEEDED = ("numpy", "pydantic", "ruamel.yaml", "librt", "simpy", "pyarrow", "pandas", "safetensors", "transformers")
BOUND = 1e-2  # bfloat16: of the relative error of every vector
BEYOND_32_BITS = (1 << 31) + (1 << 24)  # elements of one layer's keys
STEPS = {
    "decode, edges": [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 255, 256, 257)],
    "decode, long": [(1, 4096 + i) for i in range(8)],
    "one alone": [(1, 8000)],
    "prefill": [(300, 300), (129, 1500), (40, 41), (2048, 2048)],
    "mixed": [(1, 3001), (1, 64), (33, 97), (2, 500)],
}


def drawn(device: str, *shape: int, seed: int = 1) -> Any:
    """Random numbers, bfloat16."""
    draw = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=draw, device=device).bfloat16()


def rotation(device: str, positions: int, pairs: int) -> Any:
    angles = drawn(device, positions, pairs, seed=6).float()
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def close(answer: Any, right: Any) -> bool:
    """Is every vector within BOUND of the right one, and a number?"""
    return bool(((answer.double() - right).norm(dim=-1) / right.norm(dim=-1)).max() < BOUND)


@pytest.mark.parametrize("package", NEEDED)
def test_a_package_is_there(package: str) -> None:
    import_module(package)


@pytest.mark.gpu
def test_the_gpu_says_what_it_is(cuda: str) -> None:
    """Name, driver and memory; clocks and power while products are computed."""
    x = drawn(cuda, 8192, 8192)
    for _ in range(1000):  # over a second of work, which nvidia-smi sees
        _ = x @ x
    state = gpu.state()
    torch.cuda.synchronize()
    print({**gpu.facts(), "free_bytes": torch.cuda.mem_get_info()[0], "state": state})
    assert state is not None, "nvidia-smi does not answer"
    assert gpu.facts()["multiprocessors"] > 0


def test_one_kernel(device: str) -> None:
    x, weight = drawn(device, 33, 4096), drawn(device, 4096, seed=2)
    assert close(build.ops(device).rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.gpu
def test_one_capture(cuda: str) -> None:
    """A captured product is computed again from what its input holds at the replay."""
    x, weight = drawn(cuda, 32, 512), drawn(cuda, 512, 512)
    graph, y = captured(lambda: x @ weight, streams()[0])
    torch.cuda.synchronize()
    x.copy_(drawn(cuda, 32, 512, seed=2))
    torch.cuda.synchronize()
    with torch.cuda.stream(streams()[0]):
        graph.replay()
    torch.cuda.synchronize()
    assert close(y, x.double() @ weight.double())


@pytest.mark.gpu
def test_streams_and_events(cuda: str) -> None:
    """A copy on one stream goes by beside work on another, ordered by events."""
    compute, h2d, *_ = streams()
    host, on_gpu = gpu.pinned(1 << 26), torch.zeros(1 << 26, dtype=torch.int32, device=cuda)
    host.fill_(7)
    copy_start, copy_end, start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(5))
    a = drawn(cuda, 4096, 4096)
    torch.cuda.synchronize()
    with torch.cuda.stream(h2d):
        copy_start.record(h2d)
        on_gpu.copy_(host, non_blocking=True)
        copy_end.record(h2d)
    with torch.cuda.stream(compute):
        start.record(compute)
        for _ in range(40):
            b = a @ a
        end.record(compute)
        compute.wait_event(copy_end)
        total = on_gpu.sum(dtype=torch.int64) + b.isnan().sum()
        last.record(compute)
    torch.cuda.synchronize()
    assert int(total) == 7 << 26, "what came after the copy did not see it"
    copy_ms, compute_ms = copy_start.elapsed_time(copy_end), start.elapsed_time(end)
    overlap_ms = copy_ms + compute_ms - max(copy_start.elapsed_time(end), copy_ms)
    print(f"h2d {on_gpu.nbytes / copy_ms / 1e6:.1f} GB/s, {overlap_ms / min(copy_ms, compute_ms):.0%} beside products")
    assert 0 < copy_ms <= copy_start.elapsed_time(last)


def test_blocks_move_to_the_host_and_back(device: str) -> None:
    """Blocks of the 8B cache go out beside products and come back elsewhere, bit by bit what they were."""
    on_gpu = device == "cuda"
    shape, count = Architecture(**dict(scenario.load("8k_b32").model)), 128 if on_gpu else 4
    shape = shape if on_gpu else shape.model_copy(update={"layers": 2})
    cache = KvCache(shape, 2 * count, 16, torch.bfloat16, torch.device(device))
    host = host_tier(shape, count, 16, torch.bfloat16, pinned=on_gpu)
    first, second = tuple(range(count)), tuple(range(count, 2 * count))
    for seed, tensor in enumerate((cache.keys, cache.values)):
        tensor[:, :count] = drawn(device, *tensor[:, :count].shape, seed=seed)
    if on_gpu:
        move_beside_products(partial(Carrier, cache, host), first, second)
    else:
        Carrier(cache, host).carry(Direction.OUT, first, first)
        Carrier(cache, host).carry(Direction.IN, first, second)
    for tensor in (cache.keys, cache.values):
        assert torch.equal(tensor[:, :count], tensor[:, count:-1])


def move_beside_products(carrier: Any, out: tuple[int, ...], back: tuple[int, ...]) -> None:
    """Two jobs, the second behind the first, with the streams and events of a run; prints what each took."""
    compute, a = streams()[0], drawn("cuda", 4096, 4096)
    moves = CudaMoves(carrier, compute, overlap=True)
    torch.cuda.synchronize()  # what has been drawn, on another stream
    moves.warm_up(len(out) + len(back), host_tier=True)
    jobs = (
        StepPlan(0, transfers=(Transfer(Direction.OUT, out, out, None, 0),)),
        StepPlan(1, transfers=(Transfer(Direction.IN, out, back, None, 1),), awaited=(0,)),
    )
    for plan in jobs:
        moves.before_rows(plan)
        start = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(compute):
            moves.copies(plan)
            start.record(compute)
            for _ in range(40):
                _ = a @ a
        moves.after_rows(plan, start)
    torch.cuda.synchronize()
    over = moves.over()
    print({move.job: f"{move.start.elapsed_time(move.end):.3f} ms" for move in over})
    assert [move.job for move in over] == [0, 1]


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("shape", [(4, 128, 256), (4, 128, 16), (4, 64, 16), (2, 128, 16)], ids=str)
def test_attention_at_real_shapes(device: str, shape: tuple[int, int, int], rows: str) -> None:
    """(query heads a group, width, block) of 8B, 1B and Qwen3, against float64."""
    (group, width, block), kv_heads = shape, 8 if device == "cuda" else 1
    sizes = {"group": group, "kv_heads": kv_heads, "width": width, "block_size": block, "dtype": torch.bfloat16}
    one = step(1, STEPS[rows] if device == "cuda" else STEPS[rows][:2], **sizes)
    right = TorchOps().attention(one.queries.double(), one.keys.double(), one.values.double(), one.rows)
    assert close(build.ops(device).attention(one.queries, one.keys, one.values, one.rows), right)


@pytest.mark.parametrize("tokens", [32, 2048])
def test_small_kernels_at_the_widths_of_8b(device: str, tokens: int) -> None:
    """Norms and rotation as torch rounds them, bit by bit where no sum is involved; the gate against float64."""
    tokens = tokens if device == "cuda" else min(tokens, 40)
    ours, plain = build.ops(device), TorchOps()
    x, residual, weight = drawn(device, tokens, 4096), drawn(device, tokens, 4096, seed=2), drawn(device, 4096, seed=3)
    right, total = plain.add_rms_norm(x, residual, weight, 1e-5)
    normed, summed = ours.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert close(normed, right.double()) and close(summed, total.double())
    gate_up = drawn(device, tokens, 2 * 14336, seed=4)
    assert close(ours.silu_mul(gate_up), plain.silu_mul(gate_up.double()))
    cached = step(1, [(1, 100 + i) for i in range(31)] + [(tokens - 31, tokens)])
    rows, blocks = cached.rows, len(cached.keys)
    qkv, angles = drawn(device, tokens, 48 * 128, seed=5), rotation(device, 8192, 64)
    written = []
    for ops in (ours, plain):
        keys, values = (torch.zeros(blocks, 16, 8, 128, device=device).bfloat16() for _ in range(2))
        written.append((ops.rotate_and_cache(qkv, angles, None, 1e-5, keys, values, rows), keys, values))
    assert all(torch.equal(first, second) for first, second in zip(*written, strict=True))


@pytest.mark.gpu
def test_a_cache_beyond_32_bits(cuda: str) -> None:
    """Rows whose blocks lie at the end of a cache that 32 bits cannot address are written and read there."""
    block, kv_heads, width = 256, 8, 128
    near = step(1, [(1, 700), (1, 300), (90, 1000)], block_size=block)
    rows, few = near.rows, len(near.keys)
    blocks = BEYOND_32_BITS // (block * kv_heads * width)
    keys, values = (torch.zeros(blocks, block, kv_heads, width, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    near_keys, near_values = (drawn(cuda, few, block, kv_heads, width, seed=seed) for seed in (1, 2))
    keys[-few:], values[-few:] = near_keys, near_values
    far = replace(rows, tables=rows.tables + (blocks - few), kv_places=rows.kv_places + (blocks - few) * block)
    queries = drawn(cuda, len(rows.positions), 4 * kv_heads, width)
    qkv, angles = drawn(cuda, len(rows.positions), 6 * kv_heads * width, seed=3), rotation(cuda, 2048, width // 2)
    build.ops(cuda).rotate_and_cache(qkv, angles, None, 1e-5, keys, values, far)
    TorchOps().rotate_and_cache(qkv, angles, None, 1e-5, near_keys, near_values, rows)
    assert torch.equal(keys[-few:], near_keys) and torch.equal(values[-few:], near_values)
    right = TorchOps().attention(queries.double(), keys[-few:].double(), values[-few:].double(), rows)
    assert close(build.ops(cuda).attention(queries, keys, values, far), right)
