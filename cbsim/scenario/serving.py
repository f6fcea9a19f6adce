"""The serving part of a scenario: scheduler, KV cache, loop, limits. Names are the originals' own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from cbsim.scenario.fields import By, Frozen, Real, Whole, Wholes, complaint

Count = Annotated[Whole, Field(ge=1)]
Seconds = Annotated[Real, Field(gt=0)]
VLLM_CAPTURE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


class StaticScheduler(Frozen):
    """Static batching: a batch is formed, padded and run until its last request has ended."""

    name: Literal["static"]
    """static"""
    batch_size: Count = 32
    """Requests in a batch."""


class TransformersScheduler(Frozen):
    """Hugging Face transformers 5.17, ContinuousBatchingConfig."""

    later: ClassVar[Mapping[str, str]] = {
        "num_return_sequences": "forking a request",
        "sliding_window": "sliding-window layers",
        "sliding": "sliding-window layers",
        "cpu_offload_gib": "offloading to the host",
        "cpu_offload_space": "offloading to the host",
    }
    name: Literal["transformers_fifo", "transformers_prefill_first"]
    """transformers_fifo or transformers_prefill_first"""
    max_batch_tokens: Count | None = None
    """Query tokens in a step; null: solved from memory, between 256 and 8192 if num_blocks is solved too."""
    max_requests_per_batch: Count = 1024
    """Requests in a step."""
    max_blocks_per_request: Annotated[Whole, Field(ge=0)] = 32
    """Blocks of a request up to which a decode step takes the fast path; 0: no fast path."""
    safety_margin: Annotated[Real, Field(ge=0, lt=1)] | None = None
    """Share of the blocks kept free from prefills; null: 0.15 for fifo, 0 for prefill_first."""
    allow_block_sharing: bool = True
    """Share the blocks of common prefixes."""

    @property
    def margin(self) -> float:
        default = 0.15 if self.name == "transformers_fifo" else 0.0
        return default if self.safety_margin is None else self.safety_margin


def _version(value: Any) -> Any:
    return str(value) if isinstance(value, float) else value


class VllmScheduler(Frozen):
    """vLLM V1. Defaults are those of its server on a GPU with 70 to 160 GB (H100, H200)."""

    name: Literal["vllm"]
    """vllm"""
    version: Annotated[Literal["0.33", "0.19"], BeforeValidator(_version)] = "0.33"
    """Whose rules: 0.33 or 0.19."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the queue."""
    max_num_seqs: Count = 1024
    """Requests that may run."""
    max_num_batched_tokens: Count = 8192
    """Query tokens in a step."""
    max_model_len: Count | None = None
    """Longest sequence, tokens; null: the model's, capped by the cache."""
    enable_chunked_prefill: bool = True
    """May a prompt be prefilled over several steps?"""
    enable_prefix_caching: bool = True
    """Reuse the blocks of known prefixes."""
    long_prefill_token_threshold: Annotated[Whole, Field(ge=0)] = 0
    """Most tokens of one prompt in a step; 0: no limit of its own."""
    adaptive_long_prefill_threshold: bool = False
    """0.33: raise that limit when few requests are present."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only if its whole prompt fits the cache."""
    watermark: Annotated[Real, Field(ge=0, lt=1)] = 0.0
    """0.33: share of the blocks kept free when the queue is admitted from."""
    prefill_schedule_interval: Count = 1
    """0.33: executed steps from one prefill to the next."""
    reserve_output: bool = False
    """Not vLLM's: admit a request only if the cache could hold all outputs to their limits, so nobody is preempted."""

    @model_validator(mode="after")
    def _consistent(self) -> VllmScheduler:
        if self.version == "0.19":
            for field in ("adaptive_long_prefill_threshold", "watermark", "prefill_schedule_interval"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise complaint("vLLM 0.19 has no such option; use version 0.33 or leave it out", field)
        if self.max_num_batched_tokens < self.max_num_seqs:
            text = f"got {self.max_num_batched_tokens}, must be >= max_num_seqs ({self.max_num_seqs})"
            raise complaint(text, "max_num_batched_tokens")
        if self.max_model_len is not None and self.long_prefill_token_threshold > self.max_model_len:
            text = f"got {self.long_prefill_token_threshold}, must be <= max_model_len ({self.max_model_len})"
            raise complaint(text, "long_prefill_token_threshold")
        return self


scheduler_by = By("name", StaticScheduler, TransformersScheduler, VllmScheduler)

Scheduler = Annotated[
    Annotated[StaticScheduler, Tag("<StaticScheduler>")]
    | Annotated[TransformersScheduler, Tag("<TransformersScheduler>")]
    | Annotated[VllmScheduler, Tag("<VllmScheduler>")],
    Discriminator(scheduler_by),
    BeforeValidator(scheduler_by.check),
]


class KvCache(Frozen):
    """Paged KV cache."""

    block_size: Count | None = None
    """Tokens in a block; null: 256 for transformers (which wants at least 4), else 16."""
    num_blocks: Annotated[Whole, Field(ge=2)] | None = None
    """Blocks; null: as many as fit the memory. vLLM's number includes its null block."""
    memory_fraction: Annotated[Real, Field(gt=0, le=1)] = 0.9
    """transformers: of what the weights leave free; vLLM and static: of all memory, weights included."""


class CudaGraphs(Frozen):
    """Shapes are padded to captured ones, and then a launch costs the CPU one call."""

    enabled: bool = True
    """Use graphs."""
    capture_s: Annotated[Real, Field(ge=0)] = 0.0
    """Seconds that the first use of a shape costs; 0: all were captured before the run."""
    padding: Literal["auto", "transformers", "vllm", "cbengine", "none"] = "auto"
    """Rule by which shapes are padded; auto: the scheduler's own, none for static; cbengine: as our engine pads."""
    vllm_capture_sizes: Annotated[Wholes, Field(min_length=1)] = VLLM_CAPTURE_SIZES
    """vLLM's captured batch sizes, tokens, increasing; larger steps run without a graph."""

    @model_validator(mode="after")
    def _increasing(self) -> CudaGraphs:
        sizes = self.vllm_capture_sizes
        if sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
            raise complaint("must be increasing and >= 1", "vllm_capture_sizes")
        return self


class Loop(Frozen):
    """The serving loop and its device queues."""

    mode: Literal["sync", "async", "both"] = "both"
    """sync: a step at a time; async: the next step is planned while one runs; both: compare them."""
    cuda_graphs: CudaGraphs = CudaGraphs()
    """CUDA graphs."""
    streams: bool = True
    """Copies to and from the device have streams of their own; false: one queue for copies and kernels."""


PRESETS: dict[str, tuple[float, float]] = {
    "llama3.1-8b-server": (2.0, 0.1),
    "llama3.1-8b-interactive": (0.5, 0.03),
    "llama2-70b-server": (2.0, 0.2),
    "llama2-70b-interactive": (0.45, 0.04),
    "llama3.1-405b-server": (6.0, 0.175),
    "llama3.1-405b-interactive": (4.5, 0.08),
    "deepseek-r1-server": (2.0, 0.08),
    "deepseek-r1-interactive": (1.5, 0.015),
}
"""MLPerf inference limits for the 99th percentile: (time to first token, time per output token), seconds."""

Preset = Literal[
    "llama3.1-8b-server",
    "llama3.1-8b-interactive",
    "llama2-70b-server",
    "llama2-70b-interactive",
    "llama3.1-405b-server",
    "llama3.1-405b-interactive",
    "deepseek-r1-server",
    "deepseek-r1-interactive",
]


class Slo(Frozen):
    """Limits that a request has to keep, all of them, to count as good. Null: no limit."""

    preset: Preset | None = None
    """MLPerf's limits for ttft_s and tpot_s, where they are not given."""
    ttft_s: Seconds | None = None
    """Time to first token, seconds."""
    tpot_s: Seconds | None = None
    """Time per output token after the first, seconds."""
    e2e_s: Seconds | None = None
    """Whole request, seconds."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        name = data.get("preset") if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in PRESETS:
            return data
        limits = dict(zip(("ttft_s", "tpot_s"), PRESETS[name], strict=True))
        return data | {field: limit for field, limit in limits.items() if data.get(field) is None}
