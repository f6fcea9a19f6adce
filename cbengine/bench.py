"""How fast the engine is, against what the device could do, measured in the same call.

On a GPU: copy bandwidth and matrix rate first; decode attention against the bandwidth; then 8k_b32, its floor (every
step reads the weights and the cache once) and Hugging Face's own batching on the same device. Without one: the CPU's
work a step, on a device that only takes time. Every figure is printed as soon as it is known.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbengine import build
from cbengine.architecture import from_shape
from cbengine.build import Setup
from cbengine.errors import MissingError
from cbengine.graphs import captured, streams
from cbengine.ops import Ops, Rows
from cbsim import runs, scenario
from cbsim.metrics import Steps
from cbsim.record import PHASES
from cbsim.runs import Maker, RunOptions
from cbsim.scenario import Scenario
from cbsim.shapes import ModelShape

CONTEXTS = (1024, 2048, 4096, 8192)
BARRED = CONTEXTS[2:]
BATCH = 32
BLOCK_TOKENS = 16
LENGTH = 8192
BAR_DECODE_SHARE = 0.85
BAR_CPU_S = {32: 0.5e-3, 256: 1.5e-3}
BAR_RUN_S = {"H100": 110.0, "H200": 82.0}
BAR_ACTIVE = 99.4
WORK = tuple(phase for phase in PHASES if phase != "await")
Serve = Callable[[Setup, bool], Maker]
Measure = Callable[[Path, Serve, bool], "Iterator[Figure]"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its unit, and the bar it is held to, or None."""

    name: str
    value: float
    unit: str
    bar: str = ""
    holds: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "", True: "  ok", False: "  MISSED"}[self.holds]
        bar = f"  bar {self.bar}" if self.bar else ""
        return f"{self.name:<58} {self.value:>10,.4g} {self.unit:<8}{bar}{verdict}".rstrip()


def bench(device: str, out: Path, serve: Serve, *, quick: bool, as_json: bool, measure: Measure | None = None) -> int:
    """Measure, print; `measure` instead of the bench of the device. `serve` makes servers of a setup: ours, or the
    peer's. Raises MissingError.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch finds no CUDA device here")
    found = []
    for figure in (measure or (on_gpu if device == "cuda" else on_cpu))(out, serve, quick):
        found.append(figure)
        print(figure, file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        print(json.dumps([asdict(figure) for figure in found], indent=2))
    return runs.OK


# -- without a GPU ----------------------------------------------------------------------------------------------------


def on_cpu(out: Path, serve: Serve, quick: bool) -> Iterator[Figure]:
    """The CPU's work a step by batch size, policy and loop; medians, since other processes only ever add time."""
    for rows in BAR_CPU_S:
        for policy in ("vllm", "transformers_fifo"):
            asked = _steady(rows, policy, 200 if quick else 1000)
            for loop in scenario.loops(asked):
                steps = runs.one_loop(asked, loop, _options(asked, out), serve(Setup(device="modelled"), False)).steps
                yield cpu_work(f"CPU a step, {rows} requests, {policy}, {loop}", steps, rows)


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


def cpu_work(name: str, steps: Steps, rows: int) -> Figure:
    """The median step of `rows` requests that decode together."""
    full = steps["decode_rows"] == rows
    work = sum(steps.lane(phase)[full] for phase in WORK)
    value = statistics.median(work.tolist()) / 1e9
    bar = BAR_CPU_S.get(rows)
    return Figure(name, value * 1e3, "ms", f"<= {bar * 1e3:g}" if bar else "", None if bar is None else value <= bar)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(out: Path, serve: Serve, quick: bool) -> Iterator[Figure]:
    """Device, kernel, engine, peer; what takes longest comes last."""
    setup, bandwidth = Setup(device="cuda"), copy_bandwidth()
    yield Figure("device copy, read and write", bandwidth / 1e12, "TB/s")
    yield Figure("matrix product, bf16, 8192^3", matrix_rate() / 1e12, "TFLOP/s")
    yield Figure("launch to result of an empty kernel", launch_latency() * 1e6, "us")
    for context in CONTEXTS:
        read, seconds = decode_attention(build.ops("cuda"), scenario.load("8k_b32").model, BATCH, context)
        yield attention_share(context, read / seconds / bandwidth)
    length = 512 if quick else LENGTH
    yield from engine(out, serve, setup, "async", length, bandwidth)
    yield from against_peer(out, serve, setup, 128 if quick else 512)
    if not quick:
        yield from engine(out, serve, setup, "sync", length, bandwidth)


def attention_share(context: int, share: float, rows: int = BATCH) -> Figure:
    """Decode attention's bandwidth. The bar is for 8k_b32's batch where its contexts are long enough to be work."""
    name = f"decode attention, {rows} requests, {context:,} tokens, of the copy"
    if rows != BATCH or context not in BARRED:
        return Figure(name, share * 100, "%")
    return Figure(name, share * 100, "%", f">= {BAR_DECODE_SHARE:.0%}", share >= BAR_DECODE_SHARE)


def engine(out: Path, serve: Serve, setup: Setup, loop: str, length: int, bandwidth: float) -> Iterator[Figure]:
    """8k_b32 with outputs of `length` tokens, and what the device's `bandwidth` in bytes/s would allow."""
    give_back()
    name = f"8k_b32, {length:,} tokens, {loop}"
    _say(f"{name} ...")
    asked = build.adapted(scenario.load("8k_b32", [f"workload.output_tokens={length}"]), setup)
    done = runs.one_loop(asked, loop, _options(asked, out), serve(setup, False))
    seconds, active = done.summary["makespan_s"], done.summary["gpu_active"] * 100
    bar_s = bar_seconds() if loop == "async" and length == LENGTH else None
    held = None if bar_s is None else seconds <= bar_s
    yield Figure(f"{name}: seconds", seconds, "s", "" if bar_s is None else f"<= {bar_s:g}", held)
    yield Figure(f"{name}: floor at the copy's bandwidth", least_bytes(asked.model, done.steps) / bandwidth, "s")
    held = None if bar_s is None else active >= BAR_ACTIVE
    yield Figure(f"{name}: GPU active", active, "%", "" if bar_s is None else f">= {BAR_ACTIVE}", held)
    yield cpu_work(f"{name}: CPU a step", done.steps, BATCH)


def least_bytes(model: ModelShape, steps: Steps) -> int:
    """What steps have to read: each every weight, but for an embedding that is no output layer, and what is cached."""
    table = 0 if model.tied_embeddings else model.vocab * model.hidden * model.dtype_bytes
    return len(steps) * (model.weight_bytes - table) + int(steps["context_tokens"].sum()) * model.kv_bytes_per_token


def bar_seconds() -> float | None:
    """The bar of this GPU, if it has one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((seconds for part, seconds in BAR_RUN_S.items() if part in name), None)


def against_peer(out: Path, serve: Serve, setup: Setup, length: int) -> Iterator[Figure]:
    """Both engines at the same length, which is shorter, since the peer is slower. The peer needs more than every
    machine has: what it cannot do is said, and the rest goes on.
    """
    for loop in ("async", "sync"):
        rates = []
        for peer in (False, True):
            give_back()
            name = f"{'transformers' if peer else 'cbengine'}, {length} tokens, {loop}"
            _say(f"{name} ...")
            asked = build.adapted(scenario.load("8k_b32", [f"workload.output_tokens={length}"]), setup)
            try:
                done = runs.one_loop(asked, loop, _options(asked, out), serve(setup, peer))
            except (ValueError, RuntimeError, ImportError) as error:
                if not peer:
                    raise
                _say(f"{name}: {error}")
                continue
            rates.append(done.summary["output_tokens_per_s"])
            yield Figure(f"{name}: tokens/s", rates[-1], "")
        if len(rates) == 2:
            ratio, name = rates[0] / rates[1], f"cbengine over transformers, {loop}"
            yield Figure(name, ratio, "x", ">= 2", ratio >= 2) if loop == "async" else Figure(name, ratio, "x")


def give_back() -> None:
    """The memory of a run before, also where a failure's traceback held it in a circle."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- device and kernel ------------------------------------------------------------------------------------------------


def timed(act: Callable[[], Any], device: str = "cuda", repeats: int = 20) -> float:
    """Median seconds of `act`, warm. On a GPU between events round a replayed graph: launching costs nothing."""
    if device == "cpu":
        act()
        return statistics.median(_clocked(act) for _ in range(repeats))
    stream = streams()[0]
    graph, _ = captured(act, stream)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    with torch.cuda.stream(stream):
        for _ in range(3 + repeats):
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(samples[3:]))


def _clocked(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def copy_bandwidth(size: int = 1 << 31, device: str = "cuda") -> float:
    """Bytes read and written a second by a copy on the device, far larger than its cache."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device)


def matrix_rate(n: int = 8192, device: str = "cuda") -> float:
    """FLOP/s of a bf16 matrix product of random numbers."""
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b, device)


def launch_latency(repeats: int = 200) -> float:
    """Seconds from a launch until the host knows that it is over."""
    x = torch.zeros(1, device="cuda")

    def there_and_back() -> None:
        x.add_(1)
        torch.cuda.synchronize()

    there_and_back()
    return statistics.median(_clocked(there_and_back) for _ in range(repeats))


def decode_attention(
    ops: Ops, model: ModelShape, rows: int, context: int, device: str = "cuda", span: int = 1 << 28
) -> tuple[int, float]:
    """(bytes of cache that must be read, seconds) of one layer's decode attention over scattered blocks. The caches of
    two layers or more, at least `span` bytes, take turns, so that none is found in the GPU's cache.
    """
    shape, blocks = from_shape(model), rows * context // BLOCK_TOKENS
    read = 2 * blocks * BLOCK_TOKENS * shape.kv_heads * shape.head_dim * 2
    cached = (max(2, -(-span // read)), 2, blocks, BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
    cache = torch.randn(cached, dtype=torch.bfloat16, device=device)
    queries = torch.randn(rows, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    batch = decoding(torch.randperm(blocks, device=device).view(rows, -1), context)

    def layer_after_layer() -> Tensor:
        for keys, values in cache:
            out = ops.attention(queries, keys, values, batch)
        return out

    return read, timed(layer_after_layer, device) / len(cache)


def decoding(tables: Tensor, context: int) -> Rows:
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
        kv_places=tables[:, -1].long() * BLOCK_TOKENS + (context - 1) % BLOCK_TOKENS,
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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
