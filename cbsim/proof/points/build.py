"""A published point as a scenario, or the reason why it cannot be one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.cost.engine_files import nearest
from cbsim.proof.points.flags import flags
from cbsim.proof.points.published import Point
from cbsim.scenario import catalog, scenario, shapes
from cbsim.scenario.fields import ScenarioError, bare
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import Hardware, ModelShape

TABLES = "public_measured/aiconfigurator"
REQUESTS_A_USER = 10
LEAST_SHARE = 0.8  # of the nominal length; lengths are uniform from there on
ROUTING = "power_law_1.01"  # of tokens to experts
BLOCK = 128  # of block-quantised weights: a share of an expert that is no multiple of it cannot be computed
ENGINES = {  # whose kernels, where the nearest version's tables are not the ones to take; see docs/fidelity.md
    ("h200_sxm", "vllm"): "vllm_0.18.0",
    ("h100_sxm", "vllm"): "vllm_0.19.0",
    ("h200_sxm", "trtllm"): "trtllm_1.2.0rc5",
}
ATTENTION = {  # of models that are no ModelShape, by how their names begin
    "deepseek": "multi-head latent attention, of which there are no tables",
    "kimi": "multi-head latent attention, of which there are no tables",
    "glm5": "sparse latent attention, of which there are no tables",
    "qwen3.5": "linear attention, of which there are no tables",
    "gptoss": "heads of 64 and windows, of which there are no tables (heads of 128 that see everything)",
}


class CannotBuildError(Exception):
    """The message is the reason."""


class Parallel(NamedTuple):
    """GPUs that share every layer, and groups of them that experts are spread over."""

    tensor: int
    experts: int


def build(point: Point, terms: Mapping[str, Any], requests: int = REQUESTS_A_USER) -> Scenario:
    """The scenario of a point, with these fields of its cost and so many requests a user. Raises CannotBuildError."""
    try:
        return scenario.parse(fields(point, terms, requests), point.where)
    except ScenarioError as error:
        raise CannotBuildError(str(error).removeprefix(f"{point.where}: ")) from None


def fields(point: Point, terms: Mapping[str, Any], requests: int = REQUESTS_A_USER) -> dict[str, Any]:
    """The fields of the scenario. Raises CannotBuildError."""
    check(point)
    model, hardware, engine = model_of(point), _hardware(point), engine_of(point)
    parallel = _parallel(point, model)
    told = flags(point, model, hardware)
    shape = model.model_dump(mode="json") | {"kv_dtype": told.kv_dtype}
    low_prompt, low_output = (max(1, int(LEAST_SHARE * nominal)) for nominal in (point.prompt, point.output))
    return {
        "name": "point",
        "question": f"How fast is {point.where}?",
        "model": shape,
        "hardware": hardware.model_dump(mode="json"),
        "workload": {
            "kind": "synthetic",
            "requests": requests * point.concurrency,
            "prompt_tokens": {"uniform": {"low": low_prompt, "high": point.prompt}},
            "output_tokens": {"uniform": {"low": low_output, "high": point.output}},
            "arrivals": {"kind": "closed_loop", "users": point.concurrency},
        },
        "scheduler": told.scheduler,
        "kv_cache": told.kv_cache,
        "loop": {"mode": "async", "cuda_graphs": told.graphs},
        "cost": {
            "kind": "table",
            "path": f"{TABLES}/{point.system}",
            "engine": engine,
            "tensor_parallel": parallel.tensor,
            "expert_parallel": parallel.experts,
            "routing": ROUTING,
            **terms,
        },
    }


def check(point: Point) -> None:
    """What can be told without tables. Raises CannotBuildError."""
    if point.disaggregated:
        raise CannotBuildError("prefill and decode are apart, on servers of their own")
    if point.stages > 1:
        raise CannotBuildError(f"a pipeline of {point.stages} stages")
    engine_of(point)


def engine_of(point: Point) -> str:
    """Whose tables are taken. Raises CannotBuildError."""
    place = tables_of(point.system)
    if place is None:
        raise CannotBuildError(f"no kernel tables of {point.system}")
    known = ENGINES.get((point.system, point.backend)) or nearest(place, point.backend, point.version or None)
    if known is None:
        raise CannotBuildError(f"no kernel tables of {point.backend} on {point.system}")
    return known


@lru_cache(maxsize=64)
def tables_of(system: str) -> Path | None:
    """The folder of a card's tables, None if there is none."""
    try:
        return catalog.tables(f"{TABLES}/{system}") if system else None
    except ScenarioError:
        return None


def model_of(point: Point) -> ModelShape:
    """The model whose name the point's begins with, in the types of the point. Raises CannotBuildError."""
    name = bare(point.model_name)
    for begin, attention in ATTENTION.items():
        if name.startswith(begin):
            raise CannotBuildError(f"{point.model_name} has {attention}")
    known = [each for each in catalog.names("models") if name.startswith(bare(each))]
    if not known:
        raise CannotBuildError(f"no model file of {point.model_name}: scenarios/models describes none of that name")
    model = shapes.model(max(known, key=len))
    return model.model_copy(update={"weights_dtype": _weights(point, model)})


def _weights(point: Point, model: ModelShape) -> str | None:
    """Their type: as the point says, else its name, else the model. Experts in FP8 are quantised in blocks."""
    said = point.precision or ("fp8" if "fp8" in bare(point.model_name) else "")
    if said == "fp8":
        return "fp8_block" if model.experts else "fp8"
    return {"fp4": "nvfp4", "nvfp4": "nvfp4", "int4": "int4", "bf16": None}.get(said, model.weights_dtype)


def _hardware(point: Point) -> Hardware:
    """The card whose name the system's begins with, or that begins with its first part. Raises CannotBuildError."""
    for name in (point.system, point.system.partition("_")[0]):
        for each in catalog.names("hardware"):
            if bare(each) == bare(name):
                return shapes.hardware(each)
    raise CannotBuildError(f"no hardware file of {point.system}")


def _parallel(point: Point, model: ModelShape) -> Parallel:
    """How the model lies on the GPUs. Raises CannotBuildError.

    Sources write expert parallelism in several ways: groups, or groups times the GPUs (points measured twice show
    that the latter, with as many attention ranks as GPUs, means a tensor-parallel server too). Where a share of an
    expert would be no multiple of BLOCK, vLLM has to spread experts.
    """
    tensor, ranks, experts = max(1, point.tensor), point.attention_ranks, max(1, point.experts_ranks)
    doubled = ranks == tensor and experts == tensor * ranks
    if model.experts and not doubled:
        ranks = max(ranks, point.experts_tensor * experts // tensor)  # more GPUs share experts than share attention
    if ranks > 1 and not (doubled and point.system == "h100_sxm"):
        raise CannotBuildError(f"attention is data-parallel ({ranks} ranks), which is simulated for recorded runs only")
    if tensor > 8:
        raise CannotBuildError(f"{tensor} GPUs share a layer, more than a node has; tables go to 8")
    if not model.experts:
        return Parallel(tensor, 1)
    experts = tensor if doubled else min(experts, tensor)
    if model.weights_dtype == "fp8_block" and model.intermediate // (tensor // experts) % BLOCK:
        experts = tensor
    return Parallel(tensor, experts)
