"""The cost models `table` with an engine's tables and `roofline` where no efficiency is given, by efficiency curves: a
step takes its kernels' measured times and a few named terms.

    step = products + attention + experts + head + all-reduces    measured
         + step_s + layers x layer_s + rows x row_s               what no table holds
         + all-reduces x reduce_s                                 ranks that wait for each other
         + elementwise x bytes / memory bandwidth                 norms, rope, activation, quantization

Attention of decoding rows, which with `skew` wait for the longest, is multiplied by `decode_attention`: a server reads
caches differently than the measurement.
Products, those of experts included, are multiplied by `products`, in steps too large for a graph by `large_products`:
a kernel that runs alone for a moment finds the GPU cooler than in a server. There are two all-reduces a layer and one
after the embedding. Ranks that step together exchange tokens before and after experts, and wait for each other there,
too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.cost import bundle, engine_files
from cbsim.cost.base import NS, Cost, cpu_cost, nanoseconds
from cbsim.cost.curves import CurveTimes, sources
from cbsim.cost.engine_tables import EngineTables, Share
from cbsim.cost.roofline import copy_ns, roofline_cost
from cbsim.cost.table import KernelTimes, attention_work
from cbsim.errors import ScenarioError
from cbsim.policy.captures import alike
from cbsim.policy.plan import StepPlan
from cbsim.scenario import catalog
from cbsim.scenario.costs import RooflineSettings, TableSettings, untabulated
from cbsim.scenario.fields import bare
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import DTYPE_BYTES, Hardware, ModelShape
from cbsim.scenario.speculation import row_tokens

LARGEST_CAPTURED = 512
"""Query tokens of the largest graph if the scenario names no size: vLLM's maximum, with which terms were calibrated.
With few slots vLLM captures less, as in simulate.graphs."""

MIB = 2.0**20
HOPPER = {2: 64 * MIB, 4: 2 * MIB, 8: MIB / 2}
BLACKWELL = {"b200": {2: 64 * MIB, 4: 32 * MIB, 8: MIB}, "b300": {2: 64 * MIB, 4: 64 * MIB, 8: 4 * MIB}}
FUSED = {"trtllm": {2: 16e6, 4: 8e6, 8: 8e6}, "h100": HOPPER, "h20": HOPPER} | BLACKWELL
"""The largest message that one kernel reduces, adds and norms, bytes, by engine, else card, and GPUs: the workspace of
TensorRT-LLM's CustomAllReduceHelper, and vLLM's FI_ALLREDUCE_FUSION_MAX_SIZE_MB (2026)."""


class Captured(NamedTuple):
    """The steps that run as a graph: of at most `tokens`; if only `decodes` do, of rows of `width` query tokens."""

    tokens: int
    decodes: bool = False
    width: int = 1

    def holds(self, plan: StepPlan, tokens: int) -> bool:
        return tokens <= self.tokens and (not self.decodes or alike(plan, self.width))


def elementwise_bytes(model: ModelShape, tensor: int, *, fused: bool = False, modules: bool = False) -> float:
    """Return the bytes that all layers' kernels between products read and write for a token, on one of `tensor` GPUs.

    Unless `fused` with all-reduces residual and norm of each part (read both, write both); rope (read and write queries
    and keys, write keys and values: a latent is normed and written likewise) and gates of attention; activation (read
    gate and up, write their product, of every expert that a token goes through). With `modules` the time of sparse
    attention has its own.
    """
    total, width, norms = 0.0, model.dtype_bytes, 0 if fused else 4 * model.hidden
    for layer, count in model.kinds:
        heads, of = layer.attention, layer.feed_forward
        inner = (of.inputs + 1) * (of.inner + of.chosen * of.expert_inner) / tensor
        written = heads.cached_bytes(tensor, DTYPE_BYTES[model.cache_dtype])
        moved = 0.0 if modules and heads.indexer else heads.moved(tensor) * width + written
        total += count * ((layer.parts * norms + inner) * width + moved)
    return total


class EngineCost:
    """A cost model on kernel times. Steps that are not `captured` have no graph and launch all-reduces one by one; a
    message of up to `fused_bytes` is reduced, added and normed at once. Memory moves `bytes_ns` bytes a nanosecond.
    Copies take `copied_ns` a byte. Layers that see different parts of the sequence have their own attention. Unless it
    is `whole`, a pass over the layers does not take what a step and its rows take beside kernels.
    """

    def __init__(
        self,
        kernels: KernelTimes,
        settings: TableSettings,
        model: ModelShape,
        *,
        bytes_ns: float,
        captured: Captured,
        copied_ns: float = 0.0,
        fused_bytes: float = 0.0,
        whole: bool = True,
    ) -> None:
        self.cpu_ns, self.launch_ns = cpu_cost(settings.cpu), round(settings.launch_s_per_layer * model.layers * NS)
        self._kernels, self._captured, self._copied_ns = kernels, captured, copied_ns
        self._settings, self._decode_attention = settings, settings.decode_attention
        step_ns, layer_ns, row_ns, reduce_ns = nanoseconds(settings, "step", "layer", "row", "reduce")
        step_ns, self._row_ns = (step_ns, row_ns) if whole else (0.0, 0.0)
        tensor = settings.tensor_parallel
        self._token_ns, self._fused_ns = (
            settings.elementwise * elementwise_bytes(model, tensor, fused=fused, modules=kernels.modules) / bytes_ns
            for fused in (False, True)
        )
        self._fused_tokens = fused_bytes // (model.hidden * model.dtype_bytes)
        self._reduces = model.parts + 1 if tensor > 1 else 0
        self._step_ns = step_ns + model.layers * layer_ns + (self._reduces + kernels.exchanges) * reduce_ns
        self._of_tokens, self._of_logits = cache(self._all_tokens), cache(kernels.head_ns)

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        if not plan.work.rows + plan.work.padding_rows:
            return 0, 0, 0
        h2d_ns, d2h_ns = copy_ns(plan, self._copied_ns)
        own_ns = self._own_ns(plan, tokens, tokens, graph=self._captured.holds(plan, tokens))
        return h2d_ns, round(own_ns), d2h_ns

    def lockstep_ns(self, plans: Sequence[StepPlan], tokens: Sequence[int]) -> int:
        """All ranks take as long as the slowest of those that run; experts compute the tokens of all (WaveCost)."""
        graph = all(self._captured.holds(plan, count) for plan, count in zip(plans, tokens, strict=False))
        own = [self._own_ns(*at, sum(tokens), graph=graph) for at in zip(plans, tokens, strict=False)]
        decode = all(alike(plan) for plan in plans)
        return round(max(own) + self._kernels.exchange_ns(tokens, decode=decode))

    def _own_ns(self, plan: StepPlan, tokens: int, of_all: int, *, graph: bool) -> float:
        """Return the ns of a rank's kernels for its own `tokens`, and for its share of the experts' work `of_all`."""
        attention = 0.0
        for of in self._kernels.attended:
            work = attention_work(plan, of.sees)
            attention += self._decode_attention * of.rows_ns(work, skew=self._settings.skew)
            attention += of.prompt_ns(work, tokens - plan.work.decodes - work.guesses, graph=graph)
        attention += self._kernels.states_ns(plan.work)
        rows = plan.work.rows + plan.work.padding_rows
        time = self._of_tokens(tokens, of_all, graph=graph) + self._of_logits(rows + plan.work.guesses)
        return time + rows * self._row_ns + attention

    def _all_tokens(self, tokens: int, of_all: int, *, graph: bool) -> float:
        kernels, settings = self._kernels, self._settings
        factor = settings.products if graph else settings.large_products
        time = factor * (kernels.linear_ns(tokens) + settings.experts * kernels.experts_ns(of_all))
        token_ns = self._fused_ns if tokens <= self._fused_tokens else self._token_ns
        return time + (self._reduces * kernels.reduce_ns(tokens, graph=graph) + tokens * token_ns + self._step_ns)


def captured(scenario: Scenario) -> Captured:
    """Return the steps that run as a graph."""
    graphs = scenario.loop.cuda_graphs
    if not graphs.enabled:
        return Captured(0)
    largest = getattr(scenario.scheduler, "max_cudagraph_capture_size", None) or LARGEST_CAPTURED
    only = graphs.vllm_cudagraph_mode == "FULL_DECODE_ONLY"
    return Captured((graphs.vllm_capture_sizes or [largest])[-1], only, row_tokens(scenario.speculation))


def fused_bytes(scenario: Scenario, settings: TableSettings) -> float:
    """Return the largest message of a fused all-reduce, 0 for none. Raises ScenarioError if no limit is known."""
    if settings.tensor_parallel == 1 or not settings.fused_all_reduce:
        return 0.0
    given, gpus, of = settings.fused_all_reduce_bytes, settings.tensor_parallel, scenario.hardware.name
    known = [sizes[gpus] for part, sizes in FUSED.items() if part in f"{settings.engine} {bare(of)}" and gpus in sizes]
    if given is None and not known:
        reason = f"no engine's limit is known for {gpus} of {of}"
        raise ScenarioError(f"cost.fused_all_reduce_bytes: is required with fused_all_reduce: {reason}")
    return float(given or known[0])


def table(scenario: Scenario, settings: TableSettings, *, whole: bool = True) -> Cost:
    """Build the cost model `table`, on an engine's tables of one card if it names an engine; unless `whole`, of passes
    of a drafter. Raises ScenarioError.
    """
    if not settings.engine:
        return bundle.table_cost(scenario, settings)
    model, folder = scenario.model, catalog.tables(settings.path)
    card = folder.name.partition("_")[0]
    if (folder / "system.yaml").is_file() and bare(card) not in bare(scenario.hardware.name):
        raise ScenarioError(f"cost.path: {folder} is of {card}, but hardware.name is {scenario.hardware.name!r}")
    among = settings.experts_engine, settings.data_parallel, settings.all_to_all
    share = Share(settings.tensor_parallel, settings.expert_parallel, settings.routing, *among)
    engine = engine_files.meant(folder, settings.engine)
    changed_ns = max(each.stat().st_mtime_ns for each in os.scandir(folder))
    return EngineCost(
        _kernels(folder, engine, model, share, settings.fastest, scenario.hardware, changed_ns),
        settings,
        model,
        bytes_ns=scenario.hardware.memory_bandwidth_bytes_s / NS,
        captured=captured(scenario),
        fused_bytes=fused_bytes(scenario, settings),
        whole=whole,
    )


@lru_cache(maxsize=16)
def _kernels(
    folder: Path, engine: str, model: ModelShape, share: Share, fastest: bool, gpu: Hardware, changed_ns: int
) -> EngineTables:
    """Read the tables once for all terms that are added to them, and again if a file has changed."""
    del changed_ns
    return EngineTables(folder, engine, model, share, fastest=fastest, gpu=gpu)


def roofline(scenario: Scenario, settings: RooflineSettings, *, whole: bool = True) -> Cost:
    """Build the cost model `roofline`: on efficiency curves of the scheduler's engine, vLLM's for schedulers of no such
    engine, with an engine's defaults for what no table holds; or with the efficiencies that are given. Unless `whole`,
    of passes of a drafter.
    """
    gpu, model, tensor = scenario.hardware, scenario.model, settings.tensor_parallel
    if settings.compute_efficiency or settings.memory_efficiency or not sources(gpu):
        if scenario.ranks > 1:
            bound = "must be 1 with constant efficiencies: what ranks exchange is known with curves or tables"
            raise ScenarioError(f"cost.data_parallel: got {scenario.ranks}, {bound}")
        return roofline_cost(scenario, settings, whole=whole)
    engine = scenario.scheduler.name.partition("_")[0]
    terms: dict[str, Any] = {**untabulated(engine)}
    terms["step_s"] = terms.get("step_s", 0.0) + settings.step_overhead_s
    terms |= {} if settings.reduce_s is None else {"reduce_s": settings.reduce_s}
    launch = {"launch_s_per_layer": settings.launch_s_per_layer, "cpu": settings.cpu}
    added = TableSettings.model_construct(kind="table", tensor_parallel=tensor, **terms | launch)
    bytes_ns, copied_ns = gpu.memory_bandwidth_bytes_s / NS, NS / gpu.pcie_bytes_s
    kernels = curve_times(engine, gpu, model, tensor, settings.data_parallel)
    graphs = captured(scenario)
    return EngineCost(kernels, added, model, bytes_ns=bytes_ns, captured=graphs, copied_ns=copied_ns, whole=whole)


@lru_cache(maxsize=16)
def curve_times(engine: str, gpu: Hardware, model: ModelShape, tensor: int, ranks: int) -> CurveTimes:
    return CurveTimes(sources(gpu), engine, gpu, model, tensor, ranks)
