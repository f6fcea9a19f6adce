"""The flags of published servers: a table by engine, family of models, card, precision and date, in the order in which
they apply. They are those of InferenceX's scripts (SemiAnalysisAI/InferenceX, Apache-2.0, benchmarks/*.sh) at the time
when the points were measured. Of other sources only model, card, version and parallelism are known: they get the
engines' defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from cbsim.measured.points.published import BLACKWELL, FIRST_DUMP, HOPPER, Point
from cbsim.scenario.shapes import VLLM_RUNTIME_BYTES, Hardware, ModelShape, activation_bytes
from cbsim.scenario.terms import Family

NEW_RULES = (0, 26)  # vLLM is simulated by the rules of 0.33 from this version on, by those of 0.19 before it
FREE_SHARE, STATIC_SHARE = "free share", "static share"
"""TensorRT-LLM gives the cache a share of what weights and a step leave free; SGLang one of all, less the weights."""
FUSED = {"cost.fused_all_reduce": True}
FLASHINFER = {"cost.experts_engine": "sglang_0.5.14"}  # the tables that have experts of flashinfer's trtllm kernels
MIB = 1 << 20


def family(model: ModelShape) -> Family:
    """Return the kind of model by which flags and calibrated terms are chosen."""
    if model.latent:
        return "latent"
    if not model.sees_all:
        return "windows"
    return "experts" if model.experts else "dense"


class Row(NamedTuple):
    """Fields of the scenario, by path, of servers of an engine; those that are functions follow from the point.
    `families`, `cards` and `precision`: empty for any. Measured `since` and before `until`, which are ISO dates.
    """

    backend: str
    sets: Mapping[str, Any]
    families: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()
    precision: str = ""
    since: str = ""
    until: str = "9999"
    holds: Callable[[Point], bool] = lambda point: point.inferencex

    def of(self, point: Point, kind: str) -> bool:
        """True if the row is about the server of a point, whose model is of the family `kind`."""
        return (
            self.backend == point.backend
            and (not self.families or kind in self.families)
            and (not self.cards or point.system in self.cards)
            and self.precision in ("", point.precision)
            and self.since <= point.measured < self.until
            and self.holds(point)
        )


def _rules(point: Point) -> str:
    numbers = [int(part) for part in point.version.split(".")[:2] if part.isdigit()]
    return "0.33" if tuple(numbers) >= NEW_RULES else "0.19"


def longest(point: Point) -> int:
    """Return InferenceX's limit of a sequence's length in tokens."""
    return point.prompt + point.output + (20 if point.prompt == point.output == 1024 else 200)


def _users(point: Point) -> int:
    return point.concurrency


def _one_prompt(point: Point) -> int:
    """Return the tokens of a prompt and of everyone's next token, a multiple of 64."""
    return -(-(point.concurrency + point.prompt + 64) // 64) * 64


def _short(point: Point) -> bool:
    return point.inferencex and point.prompt == point.output == 1024


def _any(point: Point) -> bool:
    del point
    return True


VLLM_USERS = {"scheduler.max_num_seqs": _users}
MORE_A_STEP = {  # of MiniMax-M2.5 on Blackwell since April 2026
    "scheduler.max_num_batched_tokens": lambda point: 2 * point.prompt,
    "scheduler.max_num_seqs": lambda point: min(1024, 2 * point.prompt),
    "scheduler.max_cudagraph_capture_size": 2048,
    "kv_cache.memory_fraction": 0.9,
    "model.kv_dtype": "fp8",
}
SGLANG_B200 = {
    "model.kv_dtype": "fp8",
    "scheduler.scheduler_recv_interval": lambda point: 30 if point.concurrency >= 16 else 10,
    "scheduler.disable_radix_cache": True,
    **FUSED,
    **FLASHINFER,
}


def _prefill(tokens: int) -> dict[str, int]:
    return {"scheduler.chunked_prefill_size": tokens, "scheduler.max_prefill_tokens": max(16384, tokens)}


ROWS = (
    Row(
        "vllm",
        {
            "scheduler.name": "vllm",
            "scheduler.version": _rules,
            "scheduler.max_num_batched_tokens": 8192,
            "scheduler.max_model_len": longest,
            "scheduler.enable_prefix_caching": False,  # no two prompts have a common prefix
            "kv_cache.memory_fraction": 0.9,
        },
        holds=_any,
    ),
    Row("vllm", {**VLLM_USERS, "model.kv_dtype": "fp8"}, ("dense",), HOPPER),  # Llama-3.1-70B, October 2025
    Row(
        "vllm",
        {
            "scheduler.max_num_seqs": 512,
            "model.kv_dtype": "fp8",
            "loop.cuda_graphs.vllm_cudagraph_mode": "FULL_DECODE_ONLY",
            **FUSED,
            "cost.fused_all_reduce_bytes": lambda point: (8 if point.gpus == 8 else 32) * MIB,
        },
        ("dense",),
        ("b200_sxm",),
    ),
    Row("vllm", {"scheduler.max_num_seqs": 256}, ("experts",), ("h100_sxm",)),
    Row("vllm", {"kv_cache.memory_fraction": 0.95}, ("experts",), ("h200_sxm",)),
    Row("vllm", {"kv_cache.block_size": 32}, ("experts",), BLACKWELL),
    Row("vllm", {"kv_cache.memory_fraction": 0.95}, ("experts",), BLACKWELL, "fp8", until="2026-04"),
    Row("vllm", MORE_A_STEP, ("experts",), BLACKWELL, "fp8", since="2026-04"),
    Row("vllm", MORE_A_STEP, ("experts",), BLACKWELL, "fp4"),
    Row(  # windows are known to the rules of 0.33 alone; the cache is never short
        "vllm",
        {"scheduler.version": "0.33", "scheduler.disable_hybrid_kv_cache_manager": True},
        ("windows",),
        holds=_any,
    ),
    Row("vllm", {**VLLM_USERS, "scheduler.max_cudagraph_capture_size": 2048}, ("windows",)),
    Row(
        "vllm", {"scheduler.max_num_seqs": 512, "model.kv_dtype": "fp8", **FUSED, **FLASHINFER}, ("windows",), BLACKWELL
    ),
    Row("vllm", {**VLLM_USERS, "kv_cache.block_size": 64, **FUSED}, ("latent",)),
    Row("vllm", {"cost.experts_engine": "vllm_0.24.0"}, ("latent",)),  # in int4 those of 0.18 take twice as long
    Row("vllm", {"kv_cache.memory_fraction": 0.95}, ("latent",), HOPPER),
    Row("vllm", {"model.kv_dtype": "fp8"}, ("latent",), precision="fp4"),  # as NVIDIA's checkpoint has it
    Row(
        "vllm",
        {"kv_cache.memory_fraction": 0.97, "scheduler.max_num_seqs": 1024},
        ("latent",),
        BLACKWELL,
        "int4",
    ),
    Row(
        "trtllm",
        {
            "scheduler.name": "trtllm",
            "scheduler.max_num_tokens": 8192,
            "scheduler.max_seq_len": longest,
            "loop.cuda_graphs.padding": "cbengine",
            FREE_SHARE: 0.9,
        },
        holds=_any,
    ),
    Row("trtllm", {"model.kv_dtype": "fp8"}, precision="fp8", holds=_any),
    Row("trtllm", {"model.kv_dtype": "fp8"}, ("dense", "experts", "latent"), precision="fp4", holds=_any),
    Row("trtllm", {"scheduler.max_num_tokens": 16384, "model.kv_dtype": "fp8"}, ("dense", "experts")),
    Row(
        "trtllm",
        {"scheduler.batch_wait_timeout_iters": 20, "scheduler.batch_wait_max_tokens_ratio": 0.9},
        ("dense",),
        holds=lambda point: _short(point) and point.gpus < 8,
    ),
    Row("trtllm", {"scheduler.max_num_tokens": 20000, FREE_SHARE: 0.85}, ("windows",)),
    Row("trtllm", {"scheduler.max_batch_size": _users}, ("windows",), HOPPER),
    Row("trtllm", {"scheduler.max_batch_size": 512, "model.kv_dtype": "fp8"}, ("windows",), BLACKWELL),
    Row("trtllm", {"scheduler.max_num_tokens": _one_prompt, FREE_SHARE: 0.8}, ("latent",)),
    Row("trtllm", {"scheduler.max_batch_size": _users, FREE_SHARE: 0.75}, ("latent",), HOPPER),
    Row("trtllm", {"cost.expert_parallel": lambda point: point.gpus}, ("latent",), HOPPER, until="2025-12"),
    Row("trtllm", {"scheduler.max_num_tokens": lambda p: max(8192, _one_prompt(p))}, ("latent",), since="2026"),
    Row("trtllm", FLASHINFER, ("latent",), BLACKWELL, "fp8", since="2026"),  # moe_config.backend TRTLLM, not DEEPGEMM
    Row(
        "trtllm",
        {"scheduler.batch_wait_timeout_iters": 40, "scheduler.batch_wait_max_tokens_ratio": 0.8},
        ("latent",),
        BLACKWELL,
        "fp8",
        since="2026",
        holds=lambda point: _short(point) and 64 <= point.concurrency < 256,
    ),
    Row("sglang", {"scheduler.name": "sglang", "scheduler.context_length": longest}, holds=_any),
    Row(
        "sglang",
        {
            **_prefill(32768),
            "scheduler.disable_radix_cache": True,
            "scheduler.max_running_requests": lambda point: 512 if _short(point) else 256,
            STATIC_SHARE: 0.82,
        },
        ("latent",),
        HOPPER,
    ),
    Row(
        "sglang",
        {**SGLANG_B200, **_prefill(32768), "scheduler.max_running_requests": 128, STATIC_SHARE: 0.82},
        ("latent",),
        BLACKWELL,
        "fp8",
    ),
    Row(
        "sglang",
        {**_prefill(8192), "scheduler.max_running_requests": 32, STATIC_SHARE: 0.95},
        ("latent",),
        BLACKWELL,
        "fp8",
        holds=lambda point: point.inferencex and point.gpus == 4,
    ),
    Row(
        "sglang",
        {**SGLANG_B200, **_prefill(16384), "scheduler.max_running_requests": 256, STATIC_SHARE: 0.85},
        ("latent",),
        BLACKWELL,
        "fp4",
    ),
)

DRAFTED = (
    *(Row("trtllm", {}, ("latent",), since=day, until=f"{day}~") for day in ("2026-01-14", "2026-02-05", "2026-02-06")),
    Row("sglang", {}, ("latent",), BLACKWELL, "fp8", holds=lambda point: point.source == FIRST_DUMP),
)
"""Servers of InferenceX's scripts with drafts (MTP), which the measurements do not tell from those without: they were
taken on days of their own, and have half the TPOT.
"""
ODD = (
    (
        "no warm-up requests yet, so that kernels are compiled during the run: TTFT of 5 to 9 s",
        Row("sglang", {}, ("latent",), until="2025-12"),
    ),
    (
        "other scripts than a B200's, with drafts or one request a user: faster with 4 users, slower with 64",
        Row("sglang", {}, ("latent",), ("b300_sxm",)),
    ),
    (
        "seats other than those of the scripts: 512 users have the TPOT of a few, and TTFT of minutes",
        Row("vllm", {}, ("windows",), ("h100_sxm",), until="2026"),
    ),
)
"""Servers of InferenceX that did not run as its scripts say, and why that is seen."""
UNPUBLISHED = "max_num_tokens of TensorRT-LLM is not published: 8,192 is assumed"


def drafts(point: Point, kind: str) -> bool:
    """True if a point's server computed drafts of several tokens a step."""
    return point.mode == "agg" and any(row.of(point, kind) for row in DRAFTED)


def doubts(point: Point, kind: str) -> list[str]:
    """Return why a point's prediction is of another server than the measured one may have been."""
    if not point.inferencex:
        unknown = ["flags are not published: engine defaults"]
        return [*unknown, UNPUBLISHED] if point.backend == "trtllm" else unknown
    return [why for why, row in ODD if row.of(point, kind)]


def fields(point: Point, model: ModelShape, hardware: Hardware) -> dict[str, dict[str, Any]]:
    """Return the fields of a scenario that a server's flags set, by part."""
    flat = _flat(point, [row for row in ROWS if row.of(point, family(model))])
    flat |= _cache(flat, point, model, hardware)
    parts: dict[str, dict[str, Any]] = {part: {} for part in ("scheduler", "kv_cache", "model", "loop", "cost")}
    for path, value in flat.items():
        first, *middle, last = path.split(".")
        at = parts[first]
        for name in middle:
            at = at.setdefault(name, {})
        at[last] = value
    return parts


def _flat(point: Point, rows: Iterable[Row]) -> dict[str, Any]:
    return {path: value(point) if callable(value) else value for row in rows for path, value in row.sets.items()}


def _cache(flat: dict[str, Any], point: Point, model: ModelShape, hardware: Hardware) -> dict[str, Any]:
    """Return the size of the cache: as given, else the share of the memory that weights, a step and the cache take."""
    free, static = flat.pop(FREE_SHARE, None), flat.pop(STATIC_SHARE, None)
    if point.kv_blocks:
        return {"kv_cache.num_blocks": point.kv_blocks}
    tokens = flat.get("scheduler.max_num_tokens") or flat.get("scheduler.chunked_prefill_size") or 8192
    step = activation_bytes(model, tokens, 2048) + VLLM_RUNTIME_BYTES
    if free is not None:
        taken = (model.shard_bytes(point.gpus) + step) / hardware.memory_bytes
        return {"kv_cache.memory_fraction": min(1.0, free + (1 - free) * taken)}
    if static is not None:
        requests = flat["scheduler.max_running_requests"]
        step = activation_bytes(model, tokens, requests) + VLLM_RUNTIME_BYTES
        return {"kv_cache.memory_fraction": min(1.0, static + step / hardware.memory_bytes)}
    return {}
