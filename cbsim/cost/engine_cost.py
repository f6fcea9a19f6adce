"""The cost model `table` with an engine's tables: a step takes its kernels' measured times and a few named terms.

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
from typing import Protocol

from cbsim.cost import bundle, engine_tables, kernels
from cbsim.cost.base import NS, Cost, cpu_cost, nanoseconds
from cbsim.cost.engine_tables import EngineTables, Share
from cbsim.cost.table import Attention, TableCost, Tables, attention_work
from cbsim.errors import ScenarioError
from cbsim.policy.plan import StepPlan
from cbsim.scenario import catalog, documents
from cbsim.scenario.costs import TableSettings
from cbsim.scenario.fields import bare
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import DTYPE_BYTES, ModelShape

LARGEST_CAPTURED = 512
"""Query tokens of the largest graph if the scenario names no size: vLLM's maximum, with which terms were calibrated.
With few slots vLLM captures less, as in simulate.graphs."""


def elementwise_bytes(model: ModelShape, tensor: int) -> float:
    """Return the bytes that a layer's kernels between products read and write for a token, on one of `tensor` GPUs.

    Twice residual and norm (read both, write both); rope (read and write queries and keys, write keys and values);
    activation (read gate and up, write their product, of every expert that a token goes through).
    """
    width, heads = model.dtype_bytes, (model.heads + 2 * max(tensor, model.kv_heads)) / tensor
    kv = 2 * max(tensor, model.kv_heads) / tensor * model.head_dim * DTYPE_BYTES[model.kv_dtype or model.dtype]
    inner = 3 * model.intermediate * max(1, model.experts_per_token) / tensor
    return (8 * model.hidden + 2 * heads * model.head_dim + inner) * width + kv


class KernelTimes(Protocol):
    """What `EngineTables` says, whichever way it is known: nanoseconds on one of the GPUs that share a model."""

    def linear_ns(self, tokens: int) -> float: ...
    def experts_ns(self, tokens: int) -> float: ...
    def head_ns(self, rows: int) -> float: ...
    def reduce_ns(self, tokens: int, *, graph: bool) -> float: ...
    def decode_ns(self, rows: int, context: float) -> float: ...
    def prompt_ns(self, work: Attention) -> float: ...


class EngineCost:
    """A cost model on engine tables. Steps above `captured` tokens have no graph and launch all-reduces one by one;
    memory moves `bytes_ns` bytes a nanosecond.
    """

    def __init__(
        self, tables: KernelTimes, settings: TableSettings, model: ModelShape, *, bytes_ns: float, captured: int
    ) -> None:
        self.cpu_ns, self.launch_ns = cpu_cost(settings.cpu), round(settings.launch_s_per_layer * model.layers * NS)
        self._tables, self._captured = tables, captured
        self._products, self._large_products = settings.products, settings.large_products
        self._experts, self._decode_attention = settings.experts, settings.decode_attention
        step_ns, layer_ns, self._row_ns, reduce_ns = nanoseconds(settings, "step", "layer", "row", "reduce")
        tensor = settings.tensor_parallel
        self._token_ns = settings.elementwise * model.layers * elementwise_bytes(model, tensor) / bytes_ns
        self._reduces = 2 * model.layers + 1 if tensor > 1 else 0
        self._step_ns = step_ns + model.layers * layer_ns + self._reduces * reduce_ns
        self._of_tokens, self._of_rows = cache(self._all_tokens), cache(self._all_rows)

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        rows = plan.work.rows + plan.work.padding_rows
        if not rows:
            return 0, 0, 0
        return 0, round(self._of_tokens(tokens) + self._of_rows(rows) + self._of_attention(plan)), 0

    def _of_attention(self, plan: StepPlan) -> float:
        return self.attention_ns(attention_work(plan))

    def attention_ns(self, work: Attention) -> float:
        """Return the ns of attention in all layers."""
        time = self._decode_attention * self._tables.decode_ns(work.decodes, work.context + 1) if work.decodes else 0.0
        return time + self._tables.prompt_ns(work) if work.prefill else time

    def _all_tokens(self, tokens: int) -> float:
        tables, graph = self._tables, tokens <= self._captured
        factor = self._products if graph else self._large_products
        time = factor * (tables.linear_ns(tokens) + self._experts * tables.experts_ns(tokens))
        return time + (self._reduces * tables.reduce_ns(tokens, graph=graph) + tokens * self._token_ns + self._step_ns)

    def _all_rows(self, rows: int) -> float:
        return self._tables.head_ns(rows) + rows * self._row_ns


def engine_cost(scenario: Scenario, settings: TableSettings) -> EngineCost:
    """Build a cost model from the tables of an engine, of one card. Raises ScenarioError."""
    model, folder = scenario.model, catalog.tables(settings.path)
    card = folder.name.partition("_")[0]
    if (folder / "system.yaml").is_file() and bare(card) not in bare(scenario.hardware.name):
        raise ScenarioError(f"cost.path: {folder} is of {card}, but hardware.name is {scenario.hardware.name!r}")
    share = Share(settings.tensor_parallel, settings.expert_parallel, settings.routing)
    engine = engine_tables.meant(folder, settings.engine or "")
    return EngineCost(
        EngineTables(folder, engine, model, share, fastest=settings.fastest),
        settings,
        model,
        bytes_ns=scenario.hardware.memory_bandwidth_bytes_s / NS,
        captured=captured_tokens(scenario),
    )


def captured_tokens(scenario: Scenario) -> int:
    """Return the largest step that runs as a graph, tokens."""
    graphs = scenario.loop.cuda_graphs
    if not graphs.enabled:
        return 0
    if graphs.vllm_capture_sizes:
        return graphs.vllm_capture_sizes[-1]
    return getattr(scenario.scheduler, "max_cudagraph_capture_size", None) or LARGEST_CAPTURED


def table(scenario: Scenario, settings: TableSettings) -> Cost:
    """Build the cost model `table`, on an engine's tables if it names one. Raises ScenarioError."""
    if settings.engine:
        return engine_cost(scenario, settings)
    _check_profiled(scenario, settings)
    return table_cost(scenario.model, settings)


def table_cost(model: ModelShape, settings: TableSettings) -> TableCost:
    """Build a cost model from the measured tables that `settings` name. Raises ScenarioError."""
    return TableCost(_tables(model, settings), settings, model.layers, model.hidden * model.dtype_bytes)


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
