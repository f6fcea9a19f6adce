"""What is looked at on a device that the engine has not met: from the environment to a step of an 8B model.

The first four say within a minute whether the machine can be used: packages, one kernel, one capture, the tokens of a
tiny model (`smoke_models`). Nothing heavy is imported before a check needs it. On a CPU what can be checked is checked
on plain torch; the rest says that it needs a GPU.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING

from cbengine.first import smoke_models
from cbengine.first.smoke import CheckPlace, Found, SmokeCheck

if TYPE_CHECKING:
    from torch import Tensor

    from cbengine.bench.timing import Ceilings
    from cbengine.model.host_tier import Carrier

NEEDED = ("torch", "numpy", "pydantic", "ruamel.yaml", "librt", "pyarrow", "safetensors", "transformers")
FURTHER = ("triton", "simpy", "pandas", "matplotlib", "pytest", "hypothesis", "pytest_timeout", "flash_attn")
BOUND = 1e-2  # bfloat16: of the relative error of every vector
BIG_ELEMENTS = (1 << 31) + (1 << 24)  # of one layer's keys: their places do not fit 32 bits


def checks() -> list[SmokeCheck]:
    """In the order in which they are run: what decides whether to go on, then what would be missed most."""
    return [
        SmokeCheck("environment", 60, environment),
        SmokeCheck("one kernel", 30, one_kernel),
        SmokeCheck("one capture", 15, one_capture),
        SmokeCheck("tokens of a tiny model", 60, smoke_models.tiny_tokens),
        SmokeCheck("attention, 8B, block 256", 25, partial(attention, shape=(4, 128, 256))),
        SmokeCheck("small kernels", 20, small_kernels),
        SmokeCheck("8B shape, one layer", 30, smoke_models.one_layer),
        SmokeCheck("8B, random weights", 60, smoke_models.whole_model),
        SmokeCheck("ceilings", 15, ceilings),
        SmokeCheck("matrix products", 20, matrix_products),
        SmokeCheck("8B, kernels of a step", 50, smoke_models.kernels_of_a_step),
        SmokeCheck("streams and events", 15, streams_and_events),
        SmokeCheck("moves of KV", 20, moves_of_kv),
        SmokeCheck("attention, 8B, block 16", 20, partial(attention, shape=(4, 128, 16))),
        SmokeCheck("attention, 1B, block 16", 20, partial(attention, shape=(4, 64, 16))),
        SmokeCheck("attention, qwen3, block 16", 20, partial(attention, shape=(2, 128, 16))),
        SmokeCheck("a cache beyond 2^31 elements", 20, big_cache),
        SmokeCheck("state under load", 10, state),
    ]


# -- the machine ------------------------------------------------------------------------------------------------------


def environment(place: CheckPlace) -> Found:
    """Versions, and the GPU as the system describes it. A package that the engine needs and is missing is a failure."""
    versions: Found = {"python": platform.python_version()}
    missing = []
    for name in (*NEEDED, *FURTHER):
        try:
            versions[name] = getattr(import_module(name), "__version__", "there")
        except Exception as error:  # a package may break in any way
            versions[name] = f"missing: {type(error).__name__}: {error}"
            missing += [name] * (name in NEEDED)
    if missing:
        raise RuntimeError(f"cannot be imported: {', '.join(missing)}; found {versions}")
    if place.device == "cuda":
        import torch

        from cbengine.device import gpu

        if not torch.cuda.is_available():
            raise RuntimeError(f"torch finds no CUDA device; found {versions}")
        versions |= gpu.facts() | {"free_bytes": torch.cuda.mem_get_info()[0], "state": gpu.state()}
    return versions


def state(place: CheckPlace) -> Found:
    """Clocks, power and throttling, while products are computed."""
    place.only_on_gpu()
    import torch

    from cbengine.device import gpu

    x = drawn(place, 8192, 8192)
    for _ in range(1000):  # over a second of work, which nvidia-smi sees
        _ = x @ x
    gpu_state = gpu.state()
    torch.cuda.synchronize()
    if gpu_state is None:
        raise RuntimeError("nvidia-smi does not say")
    return dict(gpu_state)


def ceilings(place: CheckPlace) -> Found:
    """The device's ceilings: what else is measured is given as a share of them."""
    place.only_on_gpu()
    from cbengine.bench import timing

    return {
        "copy_tb_s": best().bandwidth / 1e12,
        "matmul_tflop_s": best().rate / 1e12,
        "launch_us": timing.launch_latency() * 1e6,
    }


@cache
def best() -> Ceilings:
    """Measured once a process."""
    from cbengine.bench import timing

    return timing.ceilings()


def matrix_products(place: CheckPlace) -> Found:
    """Those of a decode step of the 8B model, by rows: milliseconds, and the share of the copy's bandwidth. All of them
    go to gemms.json.
    """
    place.only_on_gpu()
    from dataclasses import asdict

    from cbengine.bench import gemm_bench
    from cbsim.scenario import scenario

    model = scenario.load("8k_b32").model
    lines = list(gemm_bench.table(model, best(), decodes=(1, 8, 32, 128, 256), prefills=(512, 8192), budget_s=30))
    (place.out / "gemms.json").write_text(json.dumps([asdict(line) for line in lines], indent=1), encoding="utf-8")
    steps = [line for line in lines if isinstance(line, gemm_bench.StepProducts)]
    return {f"{step.rows} rows": f"{step.seconds * 1e3:.3f} ms, {step.of_copy:.0%} of the copy" for step in steps}


def one_kernel(place: CheckPlace) -> Found:
    """The smallest kernel, compiled and right."""
    from cbengine import build
    from cbengine.model.ops import TorchOps

    x, weight = drawn(place, 33, 4096), drawn(place, 4096, seed=2)
    right = TorchOps().rms_norm(x.double(), weight.double(), 1e-5)
    return {"error": worst(build.ops(place.device).rms_norm(x, weight, 1e-5), right), "on": str(x.device)}


def one_capture(place: CheckPlace) -> Found:
    """A captured product is computed again from what its input holds at the replay."""
    place.only_on_gpu()
    import torch

    from cbengine.device.graphs import captured, streams

    x, weight = drawn(place, 32, 512), drawn(place, 512, 512)
    graph, y = captured(lambda: x @ weight, streams()[0])
    torch.cuda.synchronize()
    x.copy_(drawn(place, 32, 512, seed=2))
    torch.cuda.synchronize()
    with torch.cuda.stream(streams()[0]):
        graph.replay()
    torch.cuda.synchronize()
    return {"error": worst(y, x.double() @ weight.double())}


def streams_and_events(place: CheckPlace) -> Found:
    """A copy on one stream beside work on another, ordered by events; how long the CPU takes to hear of an end."""
    place.only_on_gpu()
    import torch

    from cbengine.bench import timing
    from cbengine.device import gpu
    from cbengine.device.graphs import streams

    compute, h2d, _ = streams()
    host, there = gpu.pinned(1 << 26), torch.zeros(1 << 26, dtype=torch.int32, device="cuda")
    host.fill_(7)
    copy_start, copy_end, start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(5))
    a = drawn(place, 4096, 4096)
    torch.cuda.synchronize()
    with torch.cuda.stream(h2d):
        copy_start.record(h2d)
        there.copy_(host, non_blocking=True)
        copy_end.record(h2d)
    with torch.cuda.stream(compute):
        start.record(compute)
        for _ in range(40):
            b = a @ a
        end.record(compute)
        compute.wait_event(copy_end)
        total = there.sum(dtype=torch.int64) + b.isnan().sum()
        last.record(compute)
    torch.cuda.synchronize()
    if int(total) != 7 << 26:
        raise AssertionError(f"the sum behind the copy is {int(total)}, expected {7 << 26}")
    copy_ms, compute_ms = copy_start.elapsed_time(copy_end), start.elapsed_time(end)
    whole_ms = max(copy_start.elapsed_time(end), copy_ms)
    if not 0 < copy_ms <= copy_start.elapsed_time(last):
        raise AssertionError(f"the copy took {copy_ms} ms of {copy_start.elapsed_time(last)}")
    return {
        "h2d_gb_s": there.nbytes / copy_ms / 1e6,
        "overlap": (copy_ms + compute_ms - whole_ms) / min(copy_ms, compute_ms),
        "launch_and_wake_asleep_us": timing.launch_and_wake(blocking=True) * 1e6,
        "launch_and_wake_busy_us": timing.launch_and_wake(blocking=False) * 1e6,
    }


MOVED = 128  # blocks; of the 8B model they fill 256 MiB, a size that pinned memory has anyway


def moves_of_kv(place: CheckPlace) -> Found:
    """Blocks of the 8B cache go to the host beside products, and come back elsewhere, bit by bit what they were. On a
    GPU with the streams and events of a run: what each way takes, which share of it goes by beside the products, and
    how long the CPU queues a block.
    """
    import torch

    from cbengine.model.architecture import from_shape
    from cbengine.model.host_tier import Carrier, HostTier
    from cbengine.model.kvcache import KvCache
    from cbsim.policy.moves import Way
    from cbsim.scenario import scenario

    on_gpu = place.device == "cuda"
    shape, count = from_shape(scenario.load("8k_b32").model), MOVED if on_gpu else 4
    shape = shape if on_gpu else replace(shape, layers=2)
    cache = KvCache(shape, 2 * count, 16, torch.bfloat16, torch.device(place.device))
    host = HostTier(shape, count, 16, torch.bfloat16, pinned=on_gpu)
    first, second = list(range(count)), list(range(count, 2 * count))
    for seed, tensor in enumerate((cache.keys, cache.values)):
        tensor[:, :count] = drawn(place, *tensor[:, :count].shape, seed=seed)
    findings: Found = {"blocks": count, "block_bytes": host.blocks[0].nbytes}
    if on_gpu:
        findings |= _moved_beside(place, partial(Carrier, cache, host), first, second)
    else:
        Carrier(cache, host).carry(Way.OUT, first, first)
        Carrier(cache, host).carry(Way.IN, first, second)
    for tensor in (cache.keys, cache.values):
        if not torch.equal(tensor[:, :count], tensor[:, count:-1]):
            raise AssertionError("blocks are not what they were")
    return findings


def _moved_beside(place: CheckPlace, carrier: Callable[[], Carrier], out: list[int], back: list[int]) -> Found:
    """Two jobs, the second behind the first, each beside products."""
    import torch

    from cbengine.device.cuda_moves import CudaMoves
    from cbengine.device.graphs import streams
    from cbsim.policy.moves import Move, Way
    from cbsim.policy.plan import StepPlan

    compute, a = streams()[0], drawn(place, 4096, 4096)
    moves = CudaMoves(carrier, compute, overlap=True)
    torch.cuda.synchronize()  # what has been drawn, on another stream
    moves.warm_up(len(out) + len(back), host_tier=True)
    jobs = (
        StepPlan(0, moves=(Move(Way.OUT, tuple(out), tuple(out), None, 0),)),
        StepPlan(1, moves=(Move(Way.IN, tuple(out), tuple(back), None, 1),), awaited=(0,)),
    )
    edges = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in jobs]
    began = time.perf_counter()
    for plan, (start, end) in zip(jobs, edges, strict=True):
        moves.before_rows(plan)
        with torch.cuda.stream(compute):
            moves.copies(plan)
            start.record(compute)
            for _ in range(40):
                _ = a @ a
            end.record(compute)
        moves.after_rows(plan, start)
    queueing_s = time.perf_counter() - began
    torch.cuda.synchronize()
    over = moves.over()
    if [one.job for one in over] != [0, 1]:
        raise AssertionError(f"jobs that are over: {[one.job for one in over]}, expected [0, 1]")
    findings: Found = {"queueing_us_a_block": queueing_s * 1e6 / (len(out) + len(back))}
    for name, one, (start, end) in zip(("out", "in"), over, edges, strict=True):
        copy_ms, products_ms = one.start.elapsed_time(one.end), start.elapsed_time(end)
        whole_ms = max(start.elapsed_time(one.end), products_ms)
        findings[f"{name}_ms"] = copy_ms
        findings[f"{name}_overlap"] = (copy_ms + products_ms - whole_ms) / min(copy_ms, products_ms)
    return findings


# -- kernels ----------------------------------------------------------------------------------------------------------


def drawn(place: CheckPlace, *shape: int, seed: int = 1) -> Tensor:
    """Random numbers, bfloat16."""
    import torch

    draw = torch.Generator(place.device).manual_seed(seed)
    return torch.randn(shape, generator=draw, device=place.device).bfloat16()


def worst(answer: Tensor, right: Tensor) -> float:
    """The largest relative error of a vector; raises AssertionError if it is above BOUND or no number."""
    error = (answer.double() - right).norm(dim=-1) / right.norm(dim=-1)
    most = float(error.max())
    if not most < BOUND:
        raise AssertionError(f"relative error {most:.3g}, bound {BOUND:g}")
    return most


STEPS = {
    "decode, edges": [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 255, 256, 257)],
    "decode, long": [(1, 4096 + i) for i in range(8)],
    "one alone": [(1, 8000)],
    "prefill": [(300, 300), (129, 1500), (40, 41), (2048, 2048)],
    "mixed": [(1, 3001), (1, 64), (33, 97), (2, 500)],
}


def attention(place: CheckPlace, shape: tuple[int, int, int]) -> Found:
    """Decode, prefill and both in one step, against float64."""
    from cbengine import build
    from cbengine.bench.attention_bench import ragged
    from cbengine.model.ops import TorchOps

    (group, width, block), kv_heads = shape, 8 if place.device == "cuda" else 1
    errors: Found = {}
    for name, lengths in STEPS.items():
        rows, blocks = ragged(lengths if place.device == "cuda" else lengths[:3], block, place.device)
        queries = drawn(place, len(rows.positions), group * kv_heads, width)
        keys, values = (drawn(place, blocks, block, kv_heads, width, seed=seed) for seed in (4, 5))
        answer = build.ops(place.device).attention(queries, keys, values, rows)
        errors[name] = worst(answer, TorchOps().attention(queries.double(), keys.double(), values.double(), rows))
    return errors


def small_kernels(place: CheckPlace) -> Found:
    """Norms, rotation with the cache write, and the gate, at the widths of 8B, for a decode step and a chunk of 2,048.
    The gate is held to float64; the others to torch's own roundings, bit by bit where no sum is involved.
    """
    import torch

    from cbengine import build
    from cbengine.bench.attention_bench import ragged
    from cbengine.model.ops import TorchOps

    ours, plain, errors = build.ops(place.device), TorchOps(), {}
    for tokens in (32, 2048 if place.device == "cuda" else 40):
        x, residual, weight = drawn(place, tokens, 4096), drawn(place, tokens, 4096, seed=2), drawn(place, 4096, seed=3)
        right, total = plain.add_rms_norm(x, residual, weight, 1e-5)
        normed, kept = ours.add_rms_norm(x, residual.clone(), weight, 1e-5)
        errors[f"add_rms_norm, {tokens}"] = worst(normed, right.double())
        worst(kept, total.double())
        gate_up = drawn(place, tokens, 2 * 14336, seed=4)
        errors[f"silu_mul, {tokens}"] = worst(ours.silu_mul(gate_up), plain.silu_mul(gate_up.double()))
        rows, blocks = ragged([(1, 100 + i) for i in range(31)] + [(tokens - 31, tokens)], 16, place.device)
        qkv = drawn(place, tokens, 48 * 128, seed=5)
        angles = drawn(place, 8192, 64, seed=6).float()
        rotation = torch.stack((angles.cos(), angles.sin()), dim=1)
        written = []
        for ops in (ours, plain):
            keys, values = (torch.zeros(blocks, 16, 8, 128, device=place.device).bfloat16() for _ in range(2))
            written.append((ops.rotate_and_cache(qkv, rotation, None, 1e-5, keys, values, rows), keys, values))
        if not all(torch.equal(first, second) for first, second in zip(*written, strict=True)):
            raise AssertionError(f"rotate_and_cache of {tokens} tokens differs from torch's")
    return errors


def big_cache(place: CheckPlace) -> Found:
    """Rows whose blocks lie at the end of a cache that 32 bits cannot address: written and read there."""
    place.only_on_gpu()
    import torch

    from cbengine import build
    from cbengine.bench.attention_bench import ragged
    from cbengine.model.ops import TorchOps

    block, kv_heads, width = 256, 8, 128
    rows, few = ragged([(1, 700), (1, 300), (90, 1000)], block, place.device)
    blocks = BIG_ELEMENTS // (block * kv_heads * width)
    keys, values = (torch.zeros(blocks, block, kv_heads, width, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    near_keys, near_values = (drawn(place, few, block, kv_heads, width, seed=seed) for seed in (1, 2))
    keys[-few:], values[-few:] = near_keys, near_values
    far = replace(rows, tables=rows.tables + (blocks - few), kv_places=rows.kv_places + (blocks - few) * block)
    queries = drawn(place, len(rows.positions), 4 * kv_heads, width)
    qkv = drawn(place, len(rows.positions), 6 * kv_heads * width, seed=3)
    angles = drawn(place, 2048, width // 2, seed=4).float()
    rotation = torch.stack((angles.cos(), angles.sin()), dim=1)
    ours = build.ops("cuda")
    ours.rotate_and_cache(qkv, rotation, None, 1e-5, keys, values, far)
    TorchOps().rotate_and_cache(qkv, rotation, None, 1e-5, near_keys, near_values, rows)
    if not (torch.equal(keys[-few:], near_keys) and torch.equal(values[-few:], near_values)):
        raise AssertionError("keys or values were not written where they belong")
    answer = ours.attention(queries, keys, values, far)
    right = TorchOps().attention(queries.double(), keys[-few:].double(), values[-few:].double(), rows)
    return {"elements": keys.numel(), "error": worst(answer, right)}
