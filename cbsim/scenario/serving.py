"""The serving parts of a scenario besides its scheduler: KV cache, loop, limits. Names are the originals' own."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from cbsim.scenario.fields import Frozen, Many, Number, Positive, Real, Seconds, Whole, complaint, one_of


class KvCache(Frozen):
    """Paged KV cache."""

    block_size: Number | None = None
    """Tokens in a block; null: 256 for transformers (which wants at least 4), 32 for trtllm, 1 for sglang, else 16."""
    num_blocks: Annotated[Whole, Field(ge=2)] | None = None
    """Blocks; null: as many as fit the memory. vLLM's number includes its null block."""
    memory_fraction: Annotated[Real, Field(gt=0, le=1)] = 0.9
    """transformers: of what the weights leave free; all others: of all memory, weights included."""


def _increasing(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise complaint("must be increasing and >= 1")
    return sizes


class CudaGraphs(Frozen):
    """Shapes are padded to captured ones, and then a launch costs the CPU one call."""

    enabled: bool = True  #: Use graphs.
    capture_s: Seconds = 0.0  #: Seconds that the first use of a shape costs; 0: all were captured before the run.
    padding: Literal["auto", "transformers", "vllm", "cbengine", "none"] = "auto"
    """Rule by which shapes are padded; auto: the scheduler's own, none for static; cbengine: as our engine pads."""
    vllm_capture_sizes: Annotated[Many[Whole], Field(min_length=1), AfterValidator(_increasing)] | None = None
    """vLLM's captured batch sizes, tokens, increasing; larger steps run without a graph. Null: vLLM's own list, up to
    the scheduler's max_cudagraph_capture_size, or 512."""


class Loop(Frozen):
    """The serving loop and its device queues."""

    mode: Literal["sync", "async", "both"] = "both"
    """sync: a step at a time; async: the next step is planned while one runs; both: compare them."""
    cuda_graphs: CudaGraphs = CudaGraphs()  #: CUDA graphs.
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

Preset = Annotated[str, one_of(lambda: PRESETS), Field(json_schema_extra={"enum": [*PRESETS]})]


class Slo(Frozen):
    """Limits that a request has to keep, all of them, to count as good. Null: no limit."""

    preset: Preset | None = None  #: MLPerf's limits for ttft_s and tpot_s, where they are not given.
    ttft_s: Positive | None = None  #: Time to first token, seconds.
    tpot_s: Positive | None = None  #: Time per output token after the first, seconds.
    e2e_s: Positive | None = None  #: Whole request, seconds.

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        name = data.get("preset") if isinstance(data, dict) else None
        if not isinstance(name, str) or name not in PRESETS:
            return data
        limits = dict(zip(("ttft_s", "tpot_s"), PRESETS[name], strict=True))
        return data | {field: limit for field, limit in limits.items() if data.get(field) is None}
