"""The parts of a server that simulator and engine share, built from a scenario: scheduler and cost model.

Everything is built from the scenario, which alone has defaults; two runs share only what never changes. A user's own
scheduler is checked (guard.py). Ours are tested and compared with recorded traces, and run without these checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import cast

from cbsim.cost.base import NS, Copies, Cost, DraftingCost, StagedCost
from cbsim.policy.groups import LayerGroup, page_layers
from cbsim.policy.kind import Settings
from cbsim.policy.loop import Scheduler
from cbsim.routers import base
from cbsim.routers import registry as routers
from cbsim.routers.base import Router
from cbsim.routers.scaling import GuardedRule, Rule
from cbsim.scenario.costs import STAGE_LATENCY_S, LinkSettings
from cbsim.scenario.fleet import Autoscale
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import ModelShape
from cbsim.schedulers import registry
from cbsim.workload.acceptance import Acceptance


def scheduler(scenario: Scenario, loop: str) -> Scheduler:
    """Build a fresh scheduler for one loop, `sync` or `async`. Raises ScenarioError if the model does not fit,
    PolicyError if the scheduler is not ours and cannot be made.
    """
    kind, options, name = scenario.kind, scenario.options(loop), scenario.scheduler.name
    if name in registry.OURS:
        return kind.make(options)
    from cbsim.runs.guard import Guarded

    return cast("Scheduler", Guarded(lambda: kind.make(options), name))


def router(stated: Settings, servers: int, seed: int) -> tuple[Router, bool]:
    """Build a fresh router of so many servers, and say whether it is blind. Raises RouterError."""
    name = stated.name
    kind = routers.ROUTERS.find(name)
    make = partial(kind.make, stated, servers, seed)
    return make() if name in routers.OURS else base.Guarded(make, name), kind.blind


def rule(scaled: Autoscale) -> Rule:
    """Build a fresh rule of autoscaling. Raises RouterError."""
    kind, name = routers.RULES.find(scaled.rule.name), scaled.rule.name
    make = partial(kind.make, scaled.rule, scaled.least, scaled.most)
    return make() if name in routers.RULES_OURS else GuardedRule(make, name)


def cost_model(scenario: Scenario) -> Cost:
    """Build the scenario's cost model. Raises ScenarioError for tables that are missing, or of another GPU or model."""
    if scenario.stages > 1:
        return _staged_cost(scenario)
    cost, drafts = _cost_model(scenario), scenario.speculation
    if drafts is None or drafts.method == "ngram":
        return cost
    fraction, shape = drafts.drafter.fraction, drafts.drafts_with(scenario.model)
    if fraction is None and shape is not None:
        if scenario.cost.kind == "roofline" or getattr(scenario.cost, "engine", None):
            drafter = scenario.model_copy(update={"model": shape, "speculation": None})
            return DraftingCost(cost, _cost_model(drafter, whole=False), 1.0, drafts.k)
        fraction = shape.weight_bytes / scenario.model.weight_bytes
    return DraftingCost(cost, cost, fraction or 0.0, drafts.k)


def _cost_model(scenario: Scenario, **passes: bool) -> Cost:
    module, _, name = scenario.cost.builder.partition(":")
    cost: Cost = getattr(import_module(module), name)(scenario, scenario.cost, **passes)
    return cost


def _staged_cost(scenario: Scenario) -> StagedCost:
    """Build the cost model of a pipeline. What a step and its rows take beside kernels is with the last stage, which
    samples. vLLM sends the residual stream and what is to be added to it; each of the GPUs that share a layer sends its
    part, which they gather: as over one link.
    """
    model, parts = scenario.model, list(scenario.model.stages(scenario.stages))
    parts[:-1] = [part.model_copy(update={"vocab": 0}) for part in parts[:-1]]  # without an output layer
    alone, made = scenario.cost.model_copy(update={"pipeline_parallel": 1}), dict[ModelShape, Cost]()
    for part in parts:
        if part not in made:
            stage = scenario.model_copy(update={"model": part, "cost": alone})
            made[part] = _cost_model(stage, whole=part is parts[-1])
    gpu, given = scenario.hardware, getattr(scenario.cost, "stage_link", None)
    joined = gpu.link_bytes_s if scenario.own_gpus <= (gpu.link_gpus or scenario.own_gpus) else None
    link = given or LinkSettings(latency_s=STAGE_LATENCY_S, bytes_s=joined or gpu.pcie_bytes_s)
    token_ns = 2 * model.hidden * model.dtype_bytes / link.bytes_s * NS
    return StagedCost([made[part] for part in parts], link.latency_s * NS, token_ns)


def acceptance(scenario: Scenario) -> Acceptance | None:
    """Return how many drafts of a server come true; None without speculation. Raises ScenarioError."""
    if scenario.speculation is None:
        return None
    stated, drafts = scenario.speculation.acceptance, scenario.speculation.k
    return Acceptance(scenario.seed, stated.conditional_rates, stated.recorded(drafts))


def copies(scenario: Scenario, groups: Sequence[LayerGroup] = ()) -> Copies:
    """Return the time of KV transfers by the GPU's data sheet: of blocks of all layers, or of pages of groups."""
    gpu, model = scenario.hardware, scenario.model
    layers = page_layers(groups) if groups else model.layers
    block_bytes = scenario.block_size * model.kv_token_bytes(scenario.gpus) // model.layers * layers
    return Copies(block_bytes, gpu.pcie_bytes_s, gpu.memory_bandwidth_bytes_s)
