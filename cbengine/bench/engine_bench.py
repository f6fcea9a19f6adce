"""How fast the engine is, against what the device could do, measured in the same call.

On a GPU: copy bandwidth and matrix rate first; decode attention against the bandwidth; then 8k_b32, its floor (every
step reads the weights and the cache once) and Hugging Face's own batching on the same device. Without one: the CPU's
work a step, on a device that only takes time. Every figure is printed as soon as it is known.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import torch

from cbengine import build
from cbengine.bench import attention_bench, timing
from cbengine.bench.attention_bench import BATCH
from cbengine.bench.figures import Figure, FindingGroup, say, shown
from cbengine.bench.timing import give_back
from cbengine.build import Setup
from cbengine.errors import MissingError
from cbsim.policy.phases import WORKED
from cbsim.results.metrics import Steps
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import ModelShape
from cbsim.server import run_command
from cbsim.server.run_command import RunOptions
from cbsim.server.running import Maker
from cbsim.server.status import ERROR, OK

CONTEXTS = (1024, 2048, 4096, 8192)
LENGTH = 8192
BAR_CPU_S = {32: 0.5e-3, 256: 1.5e-3}
BAR_RUN_S = {"H100": 110.0, "H200": 82.0}
BAR_ACTIVE = 99.4
Serve = Callable[[Setup, bool], Maker]


def bench(device: str, out: Path, serve: Serve, *, quick: bool, as_json: bool) -> int:
    """Measure, print; 1 if something failed. `serve` makes servers of a setup: ours, or the peer's. Raises
    MissingError.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingError("--device cuda: torch finds no CUDA device here")
    groups = (on_gpu if device == "cuda" else on_cpu)(out, serve, quick)
    return OK if shown(groups, as_json=as_json) else ERROR


# -- without a GPU ----------------------------------------------------------------------------------------------------


def on_cpu(out: Path, serve: Serve, quick: bool) -> list[FindingGroup]:
    """The CPU's work a step by batch size, policy and loop; medians, since other processes only ever add time."""
    return [
        FindingGroup(f"{policy}, {rows} requests", partial(_loops, out, serve, rows, policy, 200 if quick else 1000))
        for rows in BAR_CPU_S
        for policy in ("vllm", "transformers_fifo")
    ]


def _loops(out: Path, serve: Serve, rows: int, policy: str, steps: int) -> Iterator[Figure]:
    scenario = _steady(rows, policy, steps)
    for loop in scenarios.loops(scenario):
        done = run_command.one_loop(scenario, loop, _options(scenario, out), serve(Setup(device="modelled"), False))
        yield cpu_work(f"CPU a step, {rows} requests, {policy}, {loop}", done.step_numbers, rows)


def _steady(rows: int, policy: str, steps: int) -> Scenario:
    """`rows` requests that decode together."""
    cache = {"vllm": (16, rows * (steps // 16 + 4) + 1)}.get(policy, (256, rows * (steps // 256 + 3)))
    return scenarios.load(
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
    work = sum(steps.lane(phase)[full] for phase in WORKED)
    value = statistics.median(work.tolist()) / 1e9
    bar = BAR_CPU_S.get(rows)
    return Figure(name, value * 1e3, "ms", f"<= {bar * 1e3:g}" if bar else "", None if bar is None else value <= bar)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


def on_gpu(out: Path, serve: Serve, quick: bool) -> list[FindingGroup]:
    """Device, kernel, engine, peer; what takes longest comes last."""
    setup, bandwidth = Setup(device="cuda"), cache(timing.copy_bandwidth)
    length = 512 if quick else LENGTH
    groups = [
        FindingGroup("device", partial(_device, bandwidth)),
        FindingGroup("decode attention", partial(_attention, bandwidth)),
        FindingGroup("engine, async", partial(engine, out, serve, setup, "async", length, bandwidth)),
        FindingGroup("peer", partial(against_peer, out, serve, setup, 128 if quick else 512)),
    ]
    if not quick:
        groups.append(FindingGroup("engine, sync", partial(engine, out, serve, setup, "sync", length, bandwidth)))
    return groups


def _device(bandwidth: Callable[[], float]) -> Iterator[Figure]:
    yield Figure("device copy, read and write", bandwidth() / 1e12, "TB/s")
    yield Figure("matrix product, bf16, 8192^3", timing.matrix_rate() / 1e12, "TFLOP/s")
    yield Figure("launch to result of an empty kernel", timing.launch_latency() * 1e6, "us")
    for how, blocking in (("asleep", True), ("busy", False)):
        beside = timing.launch_and_wake(blocking=blocking)
        yield Figure(f"launch and wake-up beside a kernel, waiting {how}", beside * 1e6, "us")


def _attention(bandwidth: Callable[[], float]) -> Iterator[Figure]:
    ops, model = build.ops("cuda"), scenarios.load("8k_b32").model
    yield from attention_bench.decodes(ops, model, bandwidth(), (BATCH,), CONTEXTS)


def engine(
    out: Path, serve: Serve, setup: Setup, loop: str, length: int, bandwidth: Callable[[], float]
) -> Iterator[Figure]:
    """8k_b32 with outputs of `length` tokens, and what the device's `bandwidth` in bytes/s would allow."""
    give_back()
    name = f"8k_b32, {length:,} tokens, {loop}"
    say(f"{name} ...")
    scenario = build.adapted(scenarios.load("8k_b32", [f"workload.output_tokens={length}"]), setup)
    done = run_command.one_loop(scenario, loop, _options(scenario, out), serve(setup, False))
    seconds, active = done.summary["makespan_s"], done.summary["gpu_active"] * 100
    bar_s = bar_seconds() if loop == "async" and length == LENGTH else None
    held = None if bar_s is None else seconds <= bar_s
    yield Figure(f"{name}: seconds", seconds, "s", "" if bar_s is None else f"<= {bar_s:g}", held)
    held = None if bar_s is None else active >= BAR_ACTIVE
    yield Figure(f"{name}: GPU active", active, "%", "" if bar_s is None else f">= {BAR_ACTIVE}", held)
    yield cpu_work(f"{name}: CPU a step", done.step_numbers, BATCH)
    floor_s = least_bytes(scenario.model, done.step_numbers) / bandwidth()
    yield Figure(f"{name}: floor at the copy's bandwidth", floor_s, "s")


def least_bytes(model: ModelShape, steps: Steps) -> int:
    """What steps have to read: each every weight, but for an embedding that is no output layer, and what is cached."""
    table = 0 if model.tied_embeddings else model.vocab * model.hidden * model.dtype_bytes
    return len(steps) * (model.weight_bytes - table) + int(steps["context_tokens"].sum()) * model.kv_bytes_per_token


def bar_seconds() -> float | None:
    """The bar of this GPU, if it has one."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((seconds for part, seconds in BAR_RUN_S.items() if part in name), None)


def against_peer(out: Path, serve: Serve, setup: Setup, length: int) -> Iterator[Figure]:
    """Both engines at the same output length, a short one, since the peer is slow. Where the peer cannot run, its
    complaint is printed and the rest goes on.
    """
    for loop in ("async", "sync"):
        rates = []
        for peer in (False, True):
            give_back()
            name = f"{'transformers' if peer else 'cbengine'}, {length} tokens, {loop}"
            say(f"{name} ...")
            scenario = build.adapted(scenarios.load("8k_b32", [f"workload.output_tokens={length}"]), setup)
            try:
                done = run_command.one_loop(scenario, loop, _options(scenario, out), serve(setup, peer))
            except (ValueError, RuntimeError, ImportError) as error:
                if not peer:
                    raise
                say(f"{name}: {error}")
                continue
            rates.append(done.summary["output_tokens_per_s"])
            yield Figure(f"{name}: tokens/s", rates[-1], "")
        if len(rates) == 2:
            ratio, name = rates[0] / rates[1], f"cbengine over transformers, {loop}"
            yield Figure(name, ratio, "x", ">= 2", ratio >= 2) if loop == "async" else Figure(name, ratio, "x")


def _options(scenario: Scenario, out: Path) -> RunOptions:
    overrides = [f"workload.output_tokens={getattr(scenario.workload, 'output_tokens', 0)}"]
    return RunOptions(
        scenario=scenario.name,
        overrides=overrides,
        out=out,
        window=(0, 2000),
        span_s=None,
        conditions=(),
        as_json=False,
        quiet=True,
        command=("cbengine", "replay"),
    )
