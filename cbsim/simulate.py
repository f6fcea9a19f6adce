"""A scenario and a loop in, a record out: a run is a pure function of the two.

Everything a run needs is built here from the scenario, which alone has defaults; nothing is shared between two runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import simpy

from cbsim.cost.base import Cost
from cbsim.cost.constant import ConstantCost
from cbsim.cost.cpu import CpuCost, PhaseCost
from cbsim.cost.fitted import FittedCost
from cbsim.cost.roofline import Rates, RooflineCost, Weights
from cbsim.machine.driver import Machine
from cbsim.machine.graphs import Graphs, transformers_buckets, unpadded, vllm_buckets
from cbsim.policy.schedulers.registry import SCHEDULERS
from cbsim.record import Record
from cbsim.scenario import Scenario, depth, scheduler_options
from cbsim.timing import ConstantCost as ConstantSettings
from cbsim.timing import Cpu
from cbsim.timing import RooflineCost as RooflineSettings
from cbsim.workload import Workload

NS = 1e9


def scheduler(scenario: Scenario, loop: str) -> Any:
    """A fresh scheduler for one loop, `sync` or `async`. Raises ScenarioError if the model does not fit."""
    make, _ = SCHEDULERS[scenario.scheduler.name]
    return make(scheduler_options(scenario, depth(loop)))


def machine(scenario: Scenario, loop: str, workload: Workload) -> Machine:
    """The simulated server. Its record is empty."""
    policy = scheduler(scenario, loop)
    return Machine(
        policy,
        cost_model(scenario),
        graphs(scenario, loop),
        workload,
        Record(policy.pool.num_blocks),
        depth=depth(loop),
        overlap=scenario.loop.streams,
    )


def run(server: Machine, on_step: Callable[[int], None] | None = None) -> None:
    """Run a server to the end of its workload. Interrupted, its record holds what happened until then."""
    env = simpy.Environment()
    env.process(server.run(env, on_step))
    with _no_collections():
        env.run()


@contextmanager
def _no_collections() -> Iterator[None]:
    """A run makes millions of small objects and no cycles: looking for cycles would take a sixth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def graphs(scenario: Scenario, loop: str) -> Graphs:
    """The CUDA graphs of a fresh server."""
    settings, options = scenario.loop.cuda_graphs, scheduler_options(scenario, depth(loop))
    capture_ns = round(settings.capture_s * NS)
    if not settings.enabled:
        return Graphs(None, 0)
    if scenario.graph_padding == "vllm":
        return Graphs(vllm_buckets(settings.vllm_capture_sizes), capture_ns)
    if scenario.graph_padding == "transformers":
        rows = getattr(options, "max_requests_per_batch", 1024)
        tokens = getattr(options, "max_batch_tokens", getattr(options, "max_num_batched_tokens", 1 << 30))
        cache_tokens = options.num_blocks * options.block_size
        return Graphs(transformers_buckets(min(rows, tokens), tokens, cache_tokens), capture_ns)
    return Graphs(unpadded, capture_ns)


def cost_model(scenario: Scenario) -> Cost:
    """The scenario's cost model, seconds turned into the clock's nanoseconds."""
    settings, layers = scenario.cost, scenario.model.layers
    cpu = cpu_cost(settings.cpu)
    if isinstance(settings, ConstantSettings):
        return ConstantCost(
            cpu,
            step=settings.step_s * NS,
            per_token=settings.per_token_s * NS,
            per_prefill_token=settings.per_prefill_token_s * NS,
            per_context=settings.per_context_token_s * NS,
        )
    if isinstance(settings, RooflineSettings):
        return _roofline(scenario, settings, cpu)
    return FittedCost(
        cpu_ns=cpu,
        base=settings.base_s * NS,
        per_prefill_token=settings.per_prefill_token_s * NS,
        per_prefill_pair=settings.per_prefill_attention_s * NS,
        per_decode_row=settings.per_decode_row_s * NS,
        per_context_token=settings.per_context_token_s * NS,
        launch=settings.launch_s_per_layer * layers * NS,
    )


def cpu_cost(settings: Cpu) -> CpuCost:
    """CPU coefficients in nanoseconds."""
    phases = {}
    for name in ("schedule", "prepare", "launch", "update"):
        phase = getattr(settings, name)
        terms = (phase.base_s, phase.per_request_s, phase.per_token_s, phase.per_block_s)
        phases[name] = PhaseCost(*(term * NS for term in terms))
    return CpuCost(phases)


def _roofline(scenario: Scenario, settings: RooflineSettings, cpu: CpuCost) -> RooflineCost:
    model, gpu = scenario.model, scenario.hardware
    flops = getattr(gpu.flops, model.dtype)
    compute, memory, bandwidth = settings.compute_efficiency, settings.memory_efficiency, gpu.memory_bandwidth_bytes_s
    rates = Rates(
        flops_prefill=flops * compute.prefill,
        flops_decode=flops * compute.decode,
        bytes_weights=bandwidth * memory.weights,
        bytes_kv=bandwidth * memory.kv,
        bytes_pcie=gpu.pcie_bytes_s,
    )
    weights = Weights(
        linear=model.layers * model.layer_parameters,
        head=model.vocab * model.hidden,
        hidden=model.hidden,
        attention_flop=4 * model.layers * model.heads * model.head_dim,
        bytes=model.dtype_bytes,
        kv_bytes=model.kv_bytes_per_token,
    )
    return RooflineCost(cpu, rates, weights, settings.step_overhead_s, settings.launch_s_per_layer * model.layers)
