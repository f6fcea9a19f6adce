"""How fast the engine is, against what the device could do, measured in the same call.

On a GPU: copy bandwidth and matrix rate first; decode attention against the bandwidth; then 8k_b32 on both loops, its
floor (every step reads the weights and the cache once) and Hugging Face's own batching on the same device. Without one:
the CPU's work a step, on a device that only takes time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbengine import build
from cbengine.architecture import from_shape
from cbengine.build import Setup
from cbengine.ops import Ops, Rows
from cbsim import runs, scenario
from cbsim.metrics import Steps
from cbsim.record import PHASES
from cbsim.runs import Maker, RunOptions
from cbsim.scenario import Scenario

CONTEXTS = (1024, 2048, 4096, 8192)
BATCH = 32
BAR_DECODE_SHARE = 0.85
BAR_CPU_S = {32: 0.5e-3, 256: 1.5e-3}
WORK = tuple(phase for phase in PHASES if phase != "await")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit, and the bar it is held to, or None."""

    name: str
    value: float
    unit: str
    bar: str = ""
    holds: bool | None = None


def bench(device: str, out: Path, serve: Callable[[Setup, bool], Maker], *, quick: bool, as_json: bool) -> int:
    """Measure, print. `serve` makes servers of a setup: ours, or the peer's."""
    figures = on_cpu(out, serve, quick) if device != "cuda" else on_gpu(out, serve, quick)
    if as_json:
        print(json.dumps([{"name": f.name, "value": f.value, "unit": f.unit, "bar": f.bar} for f in figures], indent=2))
        return runs.OK
    width = max(len(figure.name) for figure in figures)
    for figure in figures:
        verdict = {None: "", True: "  ok", False: "  MISSED"}[figure.holds]
        bar = f"  bar {figure.bar}" if figure.bar else ""
        print(f"{figure.name:<{width}}  {figure.value:>12,.4g} {figure.unit:<10}{bar}{verdict}")
    return runs.OK


# -- without a GPU ----------------------------------------------------------------------------------------------------


def on_cpu(out: Path, serve: Callable[[Setup, bool], Maker], quick: bool) -> list[Figure]:
    """The CPU's work a step by batch size, policy and loop; medians, since other processes only ever add time."""
    figures = []
    for rows in BAR_CPU_S:
        for policy in ("vllm", "transformers_fifo"):
            asked = _steady(rows, policy, 200 if quick else 1000)
            for loop in scenario.loops(asked):
                steps = runs.one_loop(asked, loop, _options(asked, out), serve(Setup(device="modelled"), False)).steps
                figures.append(_cpu_work(f"CPU a step, {rows} requests, {policy}, {loop}", steps, rows))
    return figures


def _steady(rows: int, policy: str, steps: int) -> Scenario:
    """`rows` requests that decode together."""
    cache = {"vllm": (16, rows * (steps // 16 + 4) + 1)}.get(policy, (256, rows * (steps // 256 + 3)))
    return scenario.load(
        "8k_b32",
        [
            *(f"workload.requests={rows}", f"workload.output_tokens={steps}", f"scheduler={{name: {policy}}}"),
            *(f"kv_cache.block_size={cache[0]}", f"kv_cache.num_blocks={cache[1]}"),
            "cost={kind: constant, step_s: 0.002}",
        ],
    )


def _cpu_work(name: str, steps: Steps, rows: int) -> Figure:
    full = steps["decode_rows"] == rows
    work = sum(steps.lane(phase)[full] for phase in WORK)
    value = statistics.median(work.tolist()) / 1e9
    bar = BAR_CPU_S.get(rows)
    return Figure(name, value * 1e3, "ms", f"<= {bar * 1e3:g}" if bar else "", None if bar is None else value <= bar)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(out: Path, serve: Callable[[Setup, bool], Maker], quick: bool) -> list[Figure]:
    """Device, kernel, engine, peer."""
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    figures = [
        Figure("device copy, read and write", bandwidth / 1e12, "TB/s"),
        Figure("matrix product, bf16, 8192^3", rate / 1e12, "TFLOP/s"),
        Figure("launch to result of an empty kernel", launch_latency() * 1e6, "us"),
    ]
    model = scenario.load("8k_b32").model
    for context in CONTEXTS:
        read, seconds = decode_attention(build.ops("cuda"), model, BATCH, context)
        share = read / seconds / bandwidth
        held = share >= BAR_DECODE_SHARE if context >= 4096 else None
        name = f"decode attention, {BATCH} requests, {context:,} tokens, of the copy"
        bar = f">= {BAR_DECODE_SHARE:.0%}" if held is not None else ""
        figures.append(Figure(name, share * 100, "%", bar, held))
    length = 512 if quick else 8192
    for loop in ("async",) if quick else ("async", "sync"):
        figures += _engine(out, serve, loop, length, bandwidth)
    figures += _against_peer(out, serve, 128 if quick else 512)
    return figures


def _engine(out: Path, serve: Callable[[Setup, bool], Maker], loop: str, length: int, bandwidth: float) -> list[Figure]:
    setup = Setup(device="cuda")
    asked = build.adapted(scenario.load("8k_b32", [f"workload.output_tokens={length}"]), setup)
    done = runs.one_loop(asked, loop, _options(asked, out), serve(setup, False))
    seconds, active = done.summary["makespan_s"], done.summary["gpu_active"] * 100
    steps, name = done.steps, f"8k_b32, {length:,} tokens, {loop}"
    weights = len(steps) * asked.model.weight_bytes
    cache = int(steps["context_tokens"].sum()) * asked.model.kv_bytes_per_token
    bars = loop == "async" and length == 8192
    return [
        Figure(f"{name}: seconds", seconds, "s", "<= 110 (H100), 82 (H200)" if bars else ""),
        Figure(f"{name}: floor at the copy's bandwidth", (weights + cache) / bandwidth, "s"),
        Figure(f"{name}: GPU active", active, "%", ">= 99.4" if bars else "", active >= 99.4 if bars else None),
        _cpu_work(f"{name}: CPU a step", steps, BATCH),
    ]


def _against_peer(out: Path, serve: Callable[[Setup, bool], Maker], length: int) -> list[Figure]:
    """Both engines at the same length, which is shorter, since the peer is slower."""
    setup = Setup(device="cuda")
    asked = build.adapted(scenario.load("8k_b32", [f"workload.output_tokens={length}"]), setup)
    figures, rates = [], {}
    for peer in (False, True):
        for loop in ("sync", "async"):
            name = f"{'transformers' if peer else 'cbengine'}, {length} tokens, {loop}: tokens/s"
            try:
                done = runs.one_loop(asked, loop, _options(asked, out), serve(setup, peer))
            except ValueError as error:  # the peer needs more than every machine has
                print(f"{name}: {error}")
                continue
            rates[peer, loop] = done.summary["output_tokens_per_s"]
            figures.append(Figure(name, rates[peer, loop], ""))
            torch.cuda.empty_cache()
    if (True, "async") in rates:
        ratio = rates[False, "async"] / rates[True, "async"]
        figures.append(Figure("cbengine over transformers, async", ratio, "x", ">= 2", ratio >= 2))
    return figures


def timed(act: Callable[[], Any], repeats: int = 20) -> float:
    """Median seconds of `act` on the GPU, by events, after a warm-up."""
    for _ in range(3):
        act()
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        act()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(samples))


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy on the device, far larger than its cache."""
    size = 1 << 31
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source))


def matrix_rate(n: int = 8192) -> float:
    """FLOP/s of a bf16 matrix product of random numbers."""
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b)


def launch_latency() -> float:
    """Seconds from a launch until the host knows that it is over."""
    x = torch.zeros(1, device="cuda")
    samples = []
    for _ in range(200):
        start = time.perf_counter()
        x.add_(1)
        torch.cuda.synchronize()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def decode_attention(ops: Ops, model: Any, rows: int, context: int, device: str = "cuda") -> tuple[int, float]:
    """(bytes of cache that must be read, seconds) of one layer's decode attention over scattered blocks of 16. Several
    layers' caches take turns, so that none is found in the GPU's cache.
    """
    shape, size = from_shape(model), 16
    blocks = rows * context // size
    layers = max(2, (1 << 28) // (2 * blocks * size * shape.kv_heads * shape.head_dim * 2))
    cached = (layers, 2, blocks, size, shape.kv_heads, shape.head_dim)
    cache = torch.randn(cached, device=device).to(torch.bfloat16)
    queries = torch.randn(rows, shape.heads, shape.head_dim, device=device).to(torch.bfloat16)
    batch = _decoding(torch.randperm(blocks, device=device).view(rows, -1), context)

    def layer_after_layer() -> Tensor:
        for keys, values in cache:
            out = ops.attention(queries, keys, values, batch)
        return out

    seconds = timed(layer_after_layer) / layers
    return 2 * blocks * size * shape.kv_heads * shape.head_dim * 2, seconds


def _decoding(tables: Tensor, context: int) -> Rows:
    """Rows that have `context` tokens each, their own included."""
    count, device = len(tables), tables.device
    every = torch.arange(count + 1, dtype=torch.int32, device=device)
    at = torch.full((count,), context - 1, dtype=torch.int64, device=device)
    return Rows(
        tables=tables.int(),
        slots=every[:count],
        kv_tokens=torch.full((count,), context, dtype=torch.int32, device=device),
        starts=every,
        positions=at,
        kv_places=tables[:, -1].long() * 16 + 15,
        decodes=count,
        longest=1,
    )


def _options(asked: Scenario, out: Path) -> RunOptions:
    overrides = [f"workload.output_tokens={getattr(asked.workload, 'output_tokens', 0)}"]
    return RunOptions(
        scenario=asked.name,
        overrides=overrides,
        out=out,
        window=(0, 2000),
        span_s=None,
        conditions=(),
        as_json=False,
        quiet=True,
        command=("cbengine", "replay"),
    )
