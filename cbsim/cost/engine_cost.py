"""The cost models `table` with an engine's tables and `roofline` where no efficiency is given, by efficiency curves: a
step takes its kernels' measured times and a few named terms.

    step = products + attention + experts + head + all-reduces    measured
         + step_s + layers x layer_s + rows x row_s               what no table holds
         + all-reduces x reduce_s                                 ranks that wait for each other
         + elementwise x bytes / memory bandwidth                 norms, rope, activation, quantization

Attention of decoding rows is multiplied by `decode_attention`: a server reads caches differently than the measurement.
Products, those of experts included, are multiplied by `products`, in steps too large for a graph by `large_products`:
a kernel that runs alone for a moment finds the GPU cooler than in a server. There are two all-reduces a layer and one
after the embedding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from cbsim.cost import bundle, engine_tables
from cbsim.cost.base import NS, Cost, cpu_cost, nanoseconds
from cbsim.cost.curves import CurveTimes, sources
from cbsim.cost.engine_tables import EngineTables, Share
from cbsim.cost.roofline import check_listed, copy_ns, roofline_cost
from cbsim.cost.table import KernelTimes, attention_work
from cbsim.errors import ScenarioError
from cbsim.policy.plan import StepPlan
from cbsim.scenario import catalog
from cbsim.scenario.costs import RooflineSettings, TableSettings, untabulated
from cbsim.scenario.fields import bare
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import DTYPE_BYTES, ModelShape

LARGEST_CAPTURED = 512
"""Query tokens of the largest graph if the scenario names no size: vLLM's maximum, with which terms were calibrated.
With few slots vLLM captures less, as in simulate.graphs."""


def elementwise_bytes(model: ModelShape, tensor: int) -> float:
    """Return the bytes that all layers' kernels between products read and write for a token, on one of `tensor` GPUs.

    Twice residual and norm (read both, write both); rope (read and write queries and keys, write keys and values: a
    latent is normed and written likewise); activation (read gate and up, write their product, of every expert that a
    token goes through).
    """
    total, width = 0.0, model.dtype_bytes
    for layer, count in model.kinds:
        heads, of = layer.attention, layer.feed_forward
        keys = heads.cached(tensor)
        queries = (heads.query * heads.width if heads.latent is None else heads.query * heads.latent.rope) / tensor
        inner = 3 * (of.inner + of.chosen * of.expert_inner) / tensor
        written = keys * DTYPE_BYTES[model.cache_dtype]
        total += count * ((8 * layer.hidden + 2 * (queries + keys) + inner) * width + written)
    return total


class EngineCost:
    """A cost model on kernel times. Steps above `captured` tokens have no graph and launch all-reduces one by one;
    memory moves `bytes_ns` bytes a nanosecond. Copies take `copied_ns` a byte. Layers that see different parts of the
    sequence have their own attention.
    """

    def __init__(
        self,
        kernels: KernelTimes,
        settings: TableSettings,
        model: ModelShape,
        *,
        bytes_ns: float,
        captured: int,
        copied_ns: float = 0.0,
    ) -> None:
        self.cpu_ns, self.launch_ns = cpu_cost(settings.cpu), round(settings.launch_s_per_layer * model.layers * NS)
        self._kernels, self._captured, self._copied_ns = kernels, captured, copied_ns
        self._settings, self._decode_attention = settings, settings.decode_attention
        step_ns, layer_ns, self._row_ns, reduce_ns = nanoseconds(settings, "step", "layer", "row", "reduce")
        tensor = settings.tensor_parallel
        self._token_ns = settings.elementwise * elementwise_bytes(model, tensor) / bytes_ns
        self._reduces = 2 * model.layers + 1 if tensor > 1 else 0
        self._step_ns = step_ns + model.layers * layer_ns + self._reduces * reduce_ns
        self._of_tokens, self._of_rows = cache(self._all_tokens), cache(self._all_rows)
        self._windows = not model.sees_all

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        rows = plan.work.rows + plan.work.padding_rows
        if not rows:
            return 0, 0, 0
        if self._windows:
            check_listed(plan)
        attention = 0.0
        for of in self._kernels.attended:
            work = attention_work(plan, of.sees)
            attention += self._decode_attention * of.decode_ns(work.decodes, work.context + 1) + of.prompt_ns(work)
        h2d_ns, d2h_ns = copy_ns(plan, self._copied_ns)
        return h2d_ns, round(self._of_tokens(tokens) + self._of_rows(rows) + attention), d2h_ns

    def _all_tokens(self, tokens: int) -> float:
        kernels, settings, graph = self._kernels, self._settings, tokens <= self._captured
        factor = settings.products if graph else settings.large_products
        time = factor * (kernels.linear_ns(tokens) + settings.experts * kernels.experts_ns(tokens))
        return time + (self._reduces * kernels.reduce_ns(tokens, graph=graph) + tokens * self._token_ns + self._step_ns)

    def _all_rows(self, rows: int) -> float:
        return self._kernels.head_ns(rows) + rows * self._row_ns


def captured_tokens(scenario: Scenario) -> int:
    """Return the largest step that runs as a graph, tokens."""
    graphs = scenario.loop.cuda_graphs
    if not graphs.enabled:
        return 0
    if graphs.vllm_capture_sizes:
        return graphs.vllm_capture_sizes[-1]
    return getattr(scenario.scheduler, "max_cudagraph_capture_size", None) or LARGEST_CAPTURED


def table(scenario: Scenario, settings: TableSettings) -> Cost:
    """Build the cost model `table`, on an engine's tables of one card if it names an engine. Raises ScenarioError."""
    if not settings.engine:
        return bundle.table_cost(scenario, settings)
    model, folder = scenario.model, catalog.tables(settings.path)
    card = folder.name.partition("_")[0]
    if (folder / "system.yaml").is_file() and bare(card) not in bare(scenario.hardware.name):
        raise ScenarioError(f"cost.path: {folder} is of {card}, but hardware.name is {scenario.hardware.name!r}")
    share = Share(settings.tensor_parallel, settings.expert_parallel, settings.routing)
    engine = engine_tables.meant(folder, settings.engine)
    return EngineCost(
        EngineTables(folder, engine, model, share, fastest=settings.fastest),
        settings,
        model,
        bytes_ns=scenario.hardware.memory_bandwidth_bytes_s / NS,
        captured=captured_tokens(scenario),
    )


def roofline(scenario: Scenario, settings: RooflineSettings) -> Cost:
    """Build the cost model `roofline`: on efficiency curves of the scheduler's engine, vLLM's for schedulers of no such
    engine, with an engine's defaults for what no table holds; or with the efficiencies that are given.
    """
    gpu, model, tensor = scenario.hardware, scenario.model, settings.tensor_parallel
    known = sources(gpu)
    if settings.compute_efficiency or settings.memory_efficiency or not known:
        return roofline_cost(scenario, settings)
    engine = scenario.scheduler.name.partition("_")[0]
    terms: dict[str, Any] = {**untabulated(engine)}
    terms["step_s"] = terms.get("step_s", 0.0) + settings.step_overhead_s
    launch = {"launch_s_per_layer": settings.launch_s_per_layer, "cpu": settings.cpu}
    added = TableSettings.model_construct(kind="table", tensor_parallel=tensor, **terms | launch)
    bytes_ns, copied_ns = gpu.memory_bandwidth_bytes_s / NS, NS / gpu.pcie_bytes_s
    kernels, captured = CurveTimes(known, engine, gpu, model, tensor), captured_tokens(scenario)
    return EngineCost(kernels, added, model, bytes_ns=bytes_ns, captured=captured, copied_ns=copied_ns)
