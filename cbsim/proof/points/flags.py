"""How the servers of published points were started: what is known of their flags, as fields of a scenario.

From InferenceX's scripts (SemiAnalysisAI/InferenceX, Apache-2.0, benchmarks/*.sh) as they were when the points were
measured. Of other sources nothing is known but model, card, version and parallelism: they get the engines' defaults.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cbsim.proof.points.published import Point
from cbsim.scenario.shapes import Hardware, ModelShape
from cbsim.scenario.sizing import VLLM_RUNTIME_BYTES, Step, activation_bytes

NEW_RULES = (0, 26)  # vLLM from this version on is simulated by the rules of 0.33, before by those of 0.19
FREE_SHARE = 0.9  # of what weights and a step leave free, TensorRT-LLM gives to the cache


class Flags(NamedTuple):
    """Fields of a scenario. `kv_dtype`: of the cache, if not the model's own."""

    scheduler: dict[str, Any]
    kv_cache: dict[str, Any]
    kv_dtype: str | None
    graphs: dict[str, Any]


def flags(point: Point, model: ModelShape, hardware: Hardware) -> Flags:
    """What the server was told, for the model and card as they lie on its GPUs."""
    return {"vllm": _vllm, "trtllm": _trtllm, "sglang": _sglang}[point.backend](point, model, hardware)


def longest(point: Point) -> int:
    """InferenceX's limit of a sequence."""
    return point.prompt + point.output + (20 if point.prompt == point.output == 1024 else 200)


# -- vLLM -------------------------------------------------------------------------------------------------------------


def _vllm(point: Point, model: ModelShape, hardware: Hardware) -> Flags:
    del hardware
    scheduler: dict[str, Any] = {
        "name": "vllm",
        "version": _rules(point.version),
        "max_num_batched_tokens": 8192,
        "max_model_len": longest(point),
        "enable_prefix_caching": False,  # no two prompts begin alike
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


# -- TensorRT-LLM -----------------------------------------------------------------------------------------------------


def _trtllm(point: Point, model: ModelShape, hardware: Hardware) -> Flags:
    scheduler: dict[str, Any] = {"name": "trtllm", "max_num_tokens": 16384 if point.inferencex else 8192}
    scheduler["max_seq_len"] = longest(point)
    if point.inferencex and point.prompt == point.output == 1024 and point.tensor < 8:
        scheduler |= {"batch_wait_timeout_iters": 20, "batch_wait_max_tokens_ratio": 0.9}
    fraction = _of_the_rest(model, hardware, point.tensor, Step(scheduler["max_num_tokens"], 2048))
    kv_dtype = "fp8" if point.inferencex or point.precision in ("fp8", "fp4") else None
    return Flags(scheduler, {"memory_fraction": fraction}, kv_dtype, {"padding": "cbengine"})


def _of_the_rest(model: ModelShape, hardware: Hardware, tensor: int, step: Step) -> float:
    """The share of all memory that is weights, a step, and FREE_SHARE of what they leave."""
    taken = model.shard_bytes(tensor) + activation_bytes(model, step) + VLLM_RUNTIME_BYTES
    return min(1.0, FREE_SHARE + (1 - FREE_SHARE) * taken / hardware.memory_bytes)


# -- SGLang -----------------------------------------------------------------------------------------------------------


def _sglang(point: Point, model: ModelShape, hardware: Hardware) -> Flags:
    del model, hardware
    return Flags({"name": "sglang", "context_length": longest(point)}, {}, None, {})
