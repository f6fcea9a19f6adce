"""The cost model `roofline` where no efficiency is given: kernels by the efficiency curves of cards, and a few terms.

What no kernel table holds is added as by engine_cost.py, with an engine's defaults. The engine is the scheduler's; for
schedulers of no such engine, vLLM.
"""

from __future__ import annotations

from typing import Any

from cbsim.cost.base import NS, Cost
from cbsim.cost.curves import CurveTimes, sources
from cbsim.cost.engine_cost import EngineCost, KernelTimes, captured_tokens
from cbsim.cost.roofline import check_listed, copy_ns, roofline_cost
from cbsim.cost.table import Attention as Work
from cbsim.cost.table import one_chunk
from cbsim.policy.groups import Attention
from cbsim.policy.plan import StepPlan
from cbsim.scenario.costs import RooflineSettings, TableSettings, untabulated
from cbsim.scenario.scenario import Scenario


class EfficiencyCost(EngineCost):
    """A cost model on efficiency curves. Layers that see different parts of the sequence have their own attention."""

    def __init__(self, kernels: KernelTimes, settings: TableSettings, scenario: Scenario) -> None:
        gpu, model = scenario.hardware, scenario.model
        bytes_ns = gpu.memory_bandwidth_bytes_s / NS
        super().__init__(kernels, settings, model, bytes_ns=bytes_ns, captured=captured_tokens(scenario))
        attention = model.layer_attention
        self._byte_ns = NS / gpu.pcie_bytes_s
        self._kinds = [(kind, attention.count(kind) / len(attention)) for kind in dict.fromkeys(attention)]
        self._whole = model.sees_all

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        _, kernels_ns, _ = super().gpu_ns(plan, tokens)
        h2d_ns, d2h_ns = copy_ns(plan, self._byte_ns)
        return h2d_ns, kernels_ns, d2h_ns

    def _of_attention(self, plan: StepPlan) -> float:
        if self._whole:
            return super()._of_attention(plan)
        check_listed(plan)
        return sum([share * self.attention_ns(seen(kind, plan)) for kind, share in self._kinds])


def seen(kind: Attention, plan: StepPlan) -> Work:
    """Return the attention work of layers that see `kind`: chunks as one of as many query-key pairs, and rows."""
    decodes = prefill = 0
    context, pairs = 0.0, 0.0
    for chunk in plan.work.chunks:
        tokens, start = chunk.tokens + chunk.padding, chunk.start
        if tokens == 1:
            decodes, context = decodes + 1, context + kind.seen(start, 1) - 1
        else:
            prefill, pairs = prefill + tokens, pairs + kind.pairs(start, tokens)
    mean = context / decodes if decodes else 0.0
    return one_chunk(prefill, pairs, Work(0.0, 0.0, decodes, mean, int(mean)))


def roofline(scenario: Scenario, settings: RooflineSettings) -> Cost:
    """Build the cost model `roofline`: on efficiency curves, or with the efficiencies that are given."""
    gpu, model = scenario.hardware, scenario.model
    known = sources(gpu)
    if settings.compute_efficiency or settings.memory_efficiency or not known:
        return roofline_cost(scenario, settings)
    engine, tensor = scenario.scheduler.name.partition("_")[0], settings.tensor_parallel
    terms: dict[str, Any] = {**untabulated(engine)}
    terms["step_s"] = terms.get("step_s", 0.0) + settings.step_overhead_s
    launch = {"launch_s_per_layer": settings.launch_s_per_layer, "cpu": settings.cpu}
    added = TableSettings.model_construct(kind="table", tensor_parallel=tensor, **terms | launch)
    return EfficiencyCost(CurveTimes(known, engine, gpu, model, tensor), added, scenario)
