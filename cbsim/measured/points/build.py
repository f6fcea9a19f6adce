"""Conversion of a published point into a scenario, or into the reason why that is impossible.

The flags of its server are those of InferenceX's scripts (SemiAnalysisAI/InferenceX, Apache-2.0, benchmarks/*.sh) at
the time when the points were measured. For other sources only model, card, version and parallelism are known: they get
the engines' defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.cost.engine_tables import nearest
from cbsim.errors import ScenarioError
from cbsim.measured.points.published import Point
from cbsim.measured.tables import TABLES
from cbsim.scenario import catalog, scenario, shapes
from cbsim.scenario.fields import bare
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import VLLM_RUNTIME_BYTES, Hardware, ModelShape, activation_bytes

REQUESTS_A_USER = 10
LEAST_SHARE = 0.8  # the least length as a share of the nominal one; lengths are uniform between the two
ROUTING = "power_law_1.01"  # the distribution of tokens over experts
NOTHING_ADDED = dict.fromkeys(("step_s", "layer_s", "row_s", "reduce_s"), 0.0)  # to the tables, but by terms
NOTHING_ADDED |= {"elementwise": 1.0, "decode_attention": 1.0}
BLOCK = 128  # the block size of block-quantised weights; an expert's shard has to be a multiple of it
ENGINES = {  # the kernel tables to use where those of the nearest version are unsuitable; see docs/fidelity.md
    ("h200_sxm", "vllm"): "vllm_0.18.0",
    ("h100_sxm", "vllm"): "vllm_0.19.0",
    ("h200_sxm", "trtllm"): "trtllm_1.2.0rc5",
}
ATTENTION = {  # the attention of models that ModelShape does not cover, by the prefix of their names
    "deepseek": "multi-head latent attention, of which there are no tables",
    "kimi": "multi-head latent attention, of which there are no tables",
    "glm5": "sparse latent attention, of which there are no tables",
    "qwen3.5": "linear attention, of which there are no tables",
    "gptoss": "heads of 64 and windows, of which there are no tables (heads of 128 that see everything)",
}


class CannotBuildError(Exception):
    """An error raised for a point that cannot be built; its message is the reason."""


def build(point: Point, terms: Mapping[str, Any], requests: int = REQUESTS_A_USER) -> Scenario:
    """Return a point's scenario with cost fields `terms` and `requests` requests a user. Raises CannotBuildError."""
    check(point)
    model, hardware, engine = model_of(point), _hardware(point), engine_of(point)
    tensor, expert_groups = _parallel(point, model)
    server = FLAGS[point.backend](point, model, hardware)
    shape = model.model_dump(mode="json") | {"kv_dtype": server.kv_dtype}
    low_prompt, low_output = (max(1, int(LEAST_SHARE * nominal)) for nominal in (point.prompt, point.output))
    fields = {
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
        "scheduler": server.scheduler,
        "kv_cache": server.kv_cache,
        "loop": {"mode": "async", "cuda_graphs": server.graphs},
        "cost": {
            "kind": "table",
            "path": f"{TABLES}/{point.system}",
            "engine": engine,
            "tensor_parallel": tensor,
            "expert_parallel": expert_groups,
            "routing": ROUTING,
            **NOTHING_ADDED,
            **terms,
        },
    }
    try:
        return scenario.parse(fields, point.where)
    except ScenarioError as error:
        raise CannotBuildError(str(error).removeprefix(f"{point.where}: ")) from None


def check(point: Point) -> None:
    """Check what does not depend on the content of tables. Raises CannotBuildError."""
    if point.mode == "disagg":
        raise CannotBuildError("prefill and decode are apart, on servers of their own")
    if point.stages > 1:
        raise CannotBuildError(f"a pipeline of {point.stages} stages")
    engine_of(point)


def engine_of(point: Point) -> str:
    """Return the engine and version whose tables are used. Raises CannotBuildError."""
    tables = tables_of(point.system)
    if tables is None:
        raise CannotBuildError(f"no kernel tables of {point.system}")
    known = ENGINES.get((point.system, point.backend)) or nearest(tables, point.backend, point.version or None)
    if known is None:
        raise CannotBuildError(f"no kernel tables of {point.backend} on {point.system}")
    return known


@lru_cache(maxsize=64)
def tables_of(system: str) -> Path | None:
    """Return the folder of a card's tables, None if there is none."""
    try:
        return catalog.tables(f"{TABLES}/{system}") if system else None
    except ScenarioError:
        return None


def model_of(point: Point) -> ModelShape:
    """Return the model whose name is a prefix of the point's, in the point's data types. Raises CannotBuildError."""
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
    """Return the weights' type: that of the point, else of its name, else of the model. FP8 experts are in blocks."""
    stated = point.precision or ("fp8" if "fp8" in bare(point.model_name) else "")
    if stated == "fp8":
        return "fp8_block" if model.experts else "fp8"
    return {"fp4": "nvfp4", "nvfp4": "nvfp4", "int4": "int4", "bf16": None}.get(stated, model.weights_dtype)


def _hardware(point: Point) -> Hardware:
    """Return the card named like the system or like the first part of its name. Raises CannotBuildError."""
    for name in (point.system, point.system.partition("_")[0]):
        for each in catalog.names("hardware"):
            if bare(each) == bare(name):
                return shapes.hardware(each)
    raise CannotBuildError(f"no hardware file of {point.system}")


def _parallel(point: Point, model: ModelShape) -> tuple[int, int]:
    """Return the GPUs that share every layer, and the groups of them that experts are spread over. Raises
    CannotBuildError.

    Sources write expert parallelism in several ways: groups, or groups times the GPUs (points measured twice show
    that the latter, with as many attention ranks as GPUs, means a tensor-parallel server too). If an expert's shard
    would not be a multiple of BLOCK, vLLM has to spread whole experts.
    """
    tensor, ranks, experts = max(1, point.tensor), point.attention_ranks, max(1, point.experts_ranks)
    doubled = ranks == tensor and experts == tensor * ranks
    if model.experts and not doubled:
        ranks = max(ranks, point.experts_tensor * experts // tensor)  # experts span more GPUs than attention does
    if ranks > 1 and not (doubled and point.system == "h100_sxm"):
        raise CannotBuildError(f"attention is data-parallel ({ranks} ranks), which is simulated for recorded runs only")
    if tensor > 8:
        raise CannotBuildError(f"{tensor} GPUs share a layer, more than a node has; tables go to 8")
    if not model.experts:
        return tensor, 1
    experts = tensor if doubled else min(experts, tensor)
    if model.weights_dtype == "fp8_block" and model.intermediate // (tensor // experts) % BLOCK:
        experts = tensor
    return tensor, experts


NEW_RULES = (0, 26)  # vLLM is simulated by the rules of 0.33 from this version on, by those of 0.19 before it
FREE_SHARE = 0.9  # the share of memory left free by weights and a step that TensorRT-LLM uses for the cache


class Flags(NamedTuple):
    """The fields of a scenario that a server's flags set. `kv_dtype` is the cache's type unless it is the model's."""

    scheduler: dict[str, Any]
    kv_cache: dict[str, Any]
    kv_dtype: str | None
    graphs: dict[str, Any]


def longest(point: Point) -> int:
    """Return InferenceX's limit of a sequence's length in tokens."""
    return point.prompt + point.output + (20 if point.prompt == point.output == 1024 else 200)


def _vllm(point: Point, model: ModelShape, hardware: Hardware) -> Flags:
    del hardware
    scheduler: dict[str, Any] = {
        "name": "vllm",
        "version": _rules(point.version),
        "max_num_batched_tokens": 8192,
        "max_model_len": longest(point),
        "enable_prefix_caching": False,  # no two prompts have a common prefix
    }
    if not point.inferencex:
        return Flags(scheduler, {"memory_fraction": 0.9}, None, {})
    if not model.experts:  # Llama-3.1-70B, October 2025
        return Flags(scheduler | {"max_num_seqs": point.concurrency}, {"memory_fraction": 0.9}, "fp8", {})
    if point.system == "h100_sxm":
        return Flags(scheduler | {"max_num_seqs": 256}, {"memory_fraction": 0.9}, None, {})
    if point.system == "h200_sxm":
        return Flags(scheduler, {"memory_fraction": 0.95}, None, {})
    blocks: dict[str, Any] = {"block_size": 32}
    if point.precision == "fp8" and point.measured < "2026-04":
        return Flags(scheduler, blocks | {"memory_fraction": 0.95}, None, {})
    newer = scheduler | {"max_num_batched_tokens": 2 * point.prompt, "max_cudagraph_capture_size": 2048}
    return Flags(newer | {"max_num_seqs": min(1024, 2 * point.prompt)}, blocks | {"memory_fraction": 0.9}, "fp8", {})


def _rules(version: str) -> str:
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return "0.33" if tuple(numbers) >= NEW_RULES else "0.19"


def _trtllm(point: Point, model: ModelShape, hardware: Hardware) -> Flags:
    scheduler: dict[str, Any] = {"name": "trtllm", "max_num_tokens": 16384 if point.inferencex else 8192}
    scheduler["max_seq_len"] = longest(point)
    if point.inferencex and point.prompt == point.output == 1024 and point.tensor < 8:
        scheduler |= {"batch_wait_timeout_iters": 20, "batch_wait_max_tokens_ratio": 0.9}
    fraction = _of_the_rest(model, hardware, point.tensor, scheduler["max_num_tokens"], 2048)
    kv_dtype = "fp8" if point.inferencex or point.precision in ("fp8", "fp4") else None
    return Flags(scheduler, {"memory_fraction": fraction}, kv_dtype, {"padding": "cbengine"})


def _of_the_rest(model: ModelShape, hardware: Hardware, tensor: int, tokens: int, requests: int) -> float:
    """Return the share of the memory that weights, a step, and FREE_SHARE of the rest take."""
    taken = model.shard_bytes(tensor) + activation_bytes(model, tokens, requests) + VLLM_RUNTIME_BYTES
    return min(1.0, FREE_SHARE + (1 - FREE_SHARE) * taken / hardware.memory_bytes)


def _sglang(point: Point, model: ModelShape, hardware: Hardware) -> Flags:
    del model, hardware
    return Flags({"name": "sglang", "context_length": longest(point)}, {}, None, {})


FLAGS = {"vllm": _vllm, "trtllm": _trtllm, "sglang": _sglang}
"""The flags with which a point's server was started, for its model and card, by engine."""
