"""The parts of a server that simulator and engine share, built from a scenario: scheduler and cost model.

Everything is built from the scenario, which alone has defaults; nothing is shared between two runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cbsim.cost.base import PHASES, Copies, Cost, CpuCost, PhaseCost
from cbsim.cost.engine_cost import EngineCost, Terms
from cbsim.cost.fitted import ConstantCost, Curve, FittedCost
from cbsim.cost.roofline import AllReduces, Experts, Rates, RooflineCost, Weights, WindowedRoofline
from cbsim.cost.table import Added, Group, Link, TableCost, Tables
from cbsim.errors import ScenarioError
from cbsim.policy.groups import LayerGroup, page_layers
from cbsim.policy.loop import Scheduler
from cbsim.record.columns import NS
from cbsim.runs.guard import guarded
from cbsim.scenario import catalog, documents
from cbsim.scenario.costs import ConstantSettings, CpuSettings, CurvePoint, RooflineSettings, TableSettings
from cbsim.scenario.fields import bare
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import ModelShape
from cbsim.schedulers import registry

FITTED = (  # in the order of FittedCost
    *("per_chunk", "per_prefill_token", "per_cached_token", "per_prefill_attention"),
    *("per_decode_row", "per_context_token", "h2d", "d2h"),
)
FACTORS = ("elementwise", "decode_attention", "products", "large_products", "experts")  # of Terms
LARGEST_CAPTURED = 512
"""Query tokens of the largest graph if the scenario names no size: vLLM's maximum, with which terms were calibrated.
With few slots vLLM captures less, as in simulate.graphs."""


def scheduler(scenario: Scenario, loop: str) -> Scheduler:
    """Build a fresh scheduler for one loop, `sync` or `async`. Raises ScenarioError if the model does not fit,
    PolicyError if the scheduler is not ours and cannot be made.
    """
    options, name = scenario.options(loop), scenario.scheduler.name
    return scenario.kind.make(options) if name in registry.OURS else guarded(scenario.kind, options, name)


def cost_model(scenario: Scenario) -> Cost:
    """Build the scenario's cost model, with seconds converted to nanoseconds."""
    settings, cpu = scenario.cost, cpu_cost(scenario.cost.cpu)
    if isinstance(settings, ConstantSettings):
        return ConstantCost(cpu, *_ns(settings, "step", "per_token", "per_prefill_token", "per_context_token"))
    if isinstance(settings, RooflineSettings):
        return _roofline(scenario, settings, cpu)
    if isinstance(settings, TableSettings):
        if settings.engine:
            return engine_cost(scenario, settings)
        _check_profiled(scenario, settings)
        return table_cost(scenario.model, settings)
    curves = _curve(settings.query_tokens), _curve(settings.context_tokens)
    launch_ns = settings.launch_s_per_layer * scenario.model.layers * NS
    return FittedCost(cpu, settings.base_s * NS, *curves, *[*_ns(settings, *FITTED), launch_ns])


def _ns(settings: object, *terms: str) -> list[float]:
    """Return terms of a cost model, declared in seconds, in nanoseconds."""
    return [getattr(settings, f"{term}_s") * NS for term in terms]


def copies(scenario: Scenario, groups: Sequence[LayerGroup] = ()) -> Copies:
    """Return the time of KV transfers by the GPU's data sheet: of blocks of all layers, or of pages of groups."""
    gpu, model = scenario.hardware, scenario.model
    layers = page_layers(groups) if groups else model.layers
    block_bytes = scenario.block_size * model.kv_bytes_per_token // model.layers * layers // scenario.gpus
    return Copies(block_bytes, gpu.pcie_bytes_s, gpu.memory_bandwidth_bytes_s)


def _curve(points: Sequence[CurvePoint]) -> Curve:
    return Curve([point.tokens for point in points], [point.s * NS for point in points])


def cpu_cost(settings: CpuSettings) -> CpuCost:
    """Return CPU coefficients in nanoseconds."""
    return CpuCost({name: PhaseCost(*_ns(getattr(settings, name), *PhaseCost._fields)) for name in PHASES})


def table_cost(model: ModelShape, settings: TableSettings) -> TableCost:
    """Build a cost model from the measured tables that `settings` name. Raises ScenarioError."""
    link = settings.link
    group = Group(
        tensor=settings.tensor_parallel,
        layers=model.layers,
        row_bytes=model.hidden * model.dtype_bytes,
        link=Link(link.latency_s * NS, link.bytes_s / NS) if link else None,
    )
    return TableCost(
        cpu_cost(settings.cpu),
        _tables(model, settings),
        group,
        Added((settings.step_s + settings.layer_s * model.layers) * NS, settings.row_s * NS),
        skew=settings.skew,
        launch_ns=settings.launch_s_per_layer * model.layers * NS,
    )


def engine_cost(scenario: Scenario, settings: TableSettings) -> EngineCost:
    """Build a cost model from the tables of an engine, of one card. Raises ScenarioError."""
    from cbsim.cost import engine_tables
    from cbsim.cost.engine_tables import EngineTables, Share

    model, folder = scenario.model, catalog.tables(settings.path)
    card = folder.name.partition("_")[0]
    if (folder / "system.yaml").is_file() and bare(card) not in bare(scenario.hardware.name):
        raise ScenarioError(f"cost.path: {folder} is of {card}, but hardware.name is {scenario.hardware.name!r}")
    share = Share(settings.tensor_parallel, settings.expert_parallel, settings.routing)
    engine = engine_tables.meant(folder, settings.engine or "")
    return EngineCost(
        cpu_cost(settings.cpu),
        EngineTables(folder, engine, model, share, fastest=settings.fastest),
        Terms(*_ns(settings, "step", "layer", "row", "reduce"), *(getattr(settings, name) for name in FACTORS)),
        model,
        tensor=share.tensor,
        bytes_ns=scenario.hardware.memory_bandwidth_bytes_s / NS,
        captured=_captured(scenario),
        launch_ns=settings.launch_s_per_layer * model.layers * NS,
    )


def _captured(scenario: Scenario) -> int:
    """Return the largest step that runs as a graph, tokens."""
    graphs = scenario.loop.cuda_graphs
    if not graphs.enabled:
        return 0
    if graphs.vllm_capture_sizes:
        return graphs.vllm_capture_sizes[-1]
    return getattr(scenario.scheduler, "max_cudagraph_capture_size", None) or LARGEST_CAPTURED


def _check_profiled(scenario: Scenario, settings: TableSettings) -> None:
    """Raise ScenarioError if the tables are of another model or GPU than the scenario's."""
    meta = catalog.tables(settings.path) / "meta.yaml"
    if not meta.is_file():
        return
    source = documents.read(meta).data
    for field, of, name in (("model", "model", scenario.model.name), ("hardware", "hardware", scenario.hardware.name)):
        profiled = str(source.get(field, "")).rsplit("/", maxsplit=1)[-1]
        if bare(profiled) not in bare(name):
            raise ScenarioError(f"cost.path: {meta} is of {profiled}, but {of}.name is {name!r}")


def _tables(model: ModelShape, settings: TableSettings) -> Tables:
    """Read layer profiles if the path is a folder, else tables of single kernels whose names begin with it."""
    from cbsim.cost import bundle, kernels

    folder = catalog.tables(settings.path)
    if next(folder.glob("gemm__*.csv.gz"), None) is not None:
        raise ScenarioError(f"cost.engine: is required: {folder} holds tables of several engines")
    if not folder.is_dir():
        return kernels.Kernels(folder, settings.tensor_parallel, model)
    experts = None
    if model.experts:
        experts = bundle.Experts(model.experts, model.experts_per_token, model.hidden, model.intermediate)
    ranks = settings.tensor_parallel
    return bundle.Bundle(folder, ranks, model.layers, experts, max(1, model.kv_heads // ranks))


def _roofline(scenario: Scenario, settings: RooflineSettings, cpu: CpuCost) -> RooflineCost:
    model, gpu = scenario.model, scenario.hardware
    flops = getattr(gpu.flops, model.dtype)
    linear_flops = gpu.flops.float8 if model.weights_dtype in ("fp8", "fp8_block") else None
    compute, memory, bandwidth = settings.compute_efficiency, settings.memory_efficiency, gpu.memory_bandwidth_bytes_s
    rates = Rates(
        flops_prefill=flops * compute.prefill,
        flops_decode=flops * compute.decode,
        bytes_weights=bandwidth * memory.weights,
        bytes_kv=bandwidth * memory.kv,
        bytes_pcie=gpu.pcie_bytes_s,
        linear=(linear_flops or flops) / flops,
    )
    ranks, experts = settings.tensor_parallel, model.layers * model.expert_parameters
    share = model.experts_per_token / model.experts if model.experts else 0.0
    router = model.layers * model.hidden * model.experts
    dense = model.layers * model.layer_parameters - experts
    weights = Weights(
        linear=(dense + round(experts * share)) // ranks,
        head=model.vocab * model.hidden // ranks,
        hidden=model.hidden,
        attention_flop=4 * model.layers * model.heads * model.head_dim // ranks,
        bytes=model.dtype_bytes,
        kv_bytes=model.kv_bytes_per_token // ranks,
        linear_bytes=(model.matrix_bytes(dense - router) + router * model.dtype_bytes) // ranks,
    )
    make = RooflineCost if model.sees_all else partial(WindowedRoofline, model.layer_attention)
    return make(
        cpu,
        rates,
        weights,
        settings.step_overhead_s,
        settings.launch_s_per_layer * model.layers,
        experts=Experts(share, model.expert_bytes / ranks) if experts else None,
        reduces=_all_reduces(scenario, settings) if ranks > 1 else None,
    )


def _all_reduces(scenario: Scenario, settings: RooflineSettings) -> AllReduces:
    """Return the all-reduces of a step: two a layer, each of the residual stream of the step's tokens."""
    model, gpu, ranks = scenario.model, scenario.hardware, settings.tensor_parallel
    token_s = 2 * (ranks - 1) / ranks * model.hidden * model.dtype_bytes / (gpu.link_bytes_s or gpu.pcie_bytes_s)
    return AllReduces(2 * model.layers * settings.all_reduce_latency_s, 2 * model.layers * token_s)
