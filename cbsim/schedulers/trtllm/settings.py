"""Settings of the TensorRT-LLM scheduler, and the sizes that follow from them on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cbsim.policy.kind import Count, Natural, Settings, Site, require, resolved
from cbsim.policy.loop import Limits
from cbsim.policy.marks import DEFAULT_IN_PROBE, SLOTS, STEP_TOKENS, AtLeast, InProbe, Solved


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmSettings(Settings):
    """TensorRT-LLM's Python scheduler, without block reuse. Defaults are those of its PyTorch backend."""

    name: str = "trtllm"
    capacity_scheduler_policy: Annotated[
        Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"], DEFAULT_IN_PROBE
    ] = "GUARANTEED_NO_EVICT"
    """Who gets cache. GUARANTEED_NO_EVICT: whoever can be kept to the end. MAX_UTILIZATION: whoever has room for a
    step; the last started is paused and computed again. STATIC_BATCH: nobody while somebody generates."""
    max_batch_size: Annotated[Count, SLOTS] = 2048  #: Requests in a step.
    max_num_tokens: Annotated[Count, STEP_TOKENS] = 8192  #: Query tokens in a step.
    max_num_requests: Annotated[Count | None, Solved("max_batch_size"), DEFAULT_IN_PROBE] = None
    """Requests that may have cache at a time; null: max_batch_size."""
    max_active_requests: Annotated[Count | None, Solved("max_num_requests"), DEFAULT_IN_PROBE] = None
    """Requests taken from the queue at a time, with cache or without; null: max_num_requests."""
    max_seq_len: Annotated[Count | None, Solved("the model's, or what the cache holds"), DEFAULT_IN_PROBE] = None
    """Longest sequence, tokens; null: the model's, capped by the cache."""
    enable_chunked_prefill: Annotated[bool, InProbe(True)] = False  #: May a prompt be prefilled over several steps?
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] = "FIRST_COME_FIRST_SERVED"
    """With chunks: the tokens of a step go to the prompts in order, or a unit to each in turn."""
    chunk_unit_size: Annotated[Count | None, Solved("kv_cache.block_size"), InProbe(1)] = None
    """With chunks: a part of a prompt that is not its last has a multiple of so many tokens; null: a block."""
    two_step_lookahead: Annotated[bool, DEFAULT_IN_PROBE] = False
    """MAX_UTILIZATION: a request that generates needs room for two tokens."""
    batch_wait_timeout_iters: Annotated[Natural, DEFAULT_IN_PROBE] = 0
    """Prompts wait for more of them at most so many steps while others generate; 0: they do not wait."""
    batch_wait_max_tokens_ratio: Annotated[float, AtLeast(0)] = 0.0
    """And only while the step would have fewer tokens than this share of max_num_tokens; 0: they do not wait."""
    attention_dp_timeout_iters: Annotated[Natural, DEFAULT_IN_PROBE] = 0
    """With cost.data_parallel (attention_dp_config with enable_balance): while all servers generate, prompts wait until
    every one has some, at most so many steps; 0: they do not wait."""
    attention_dp_batching_wait_iters: Annotated[Natural, DEFAULT_IN_PROBE] = 10
    """And then for more of them so many steps."""

    def __post_init__(self) -> None:
        ratio, policy = self.batch_wait_max_tokens_ratio, self.capacity_scheduler_policy
        require(ratio <= 1, "batch_wait_max_tokens_ratio", f"got {ratio:g}, must be <= 1")
        message = f"got true, must be false with capacity_scheduler_policy {policy}"
        require(not self.two_step_lookahead or policy == "MAX_UTILIZATION", "two_step_lookahead", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtllmOptions(TrtllmSettings):
    """The settings with all sizes solved."""

    block_size: int
    num_blocks: int
    max_num_requests: int
    max_active_requests: int
    max_seq_len: int
    chunk_unit_size: int

    @property
    def limits(self) -> Limits:
        return Limits(
            slots=self.max_num_requests, rows=self.max_batch_size, tokens=self.max_num_tokens, longest=self.max_seq_len
        )


def resolve(settings: TrtllmSettings, site: Site) -> TrtllmOptions:
    """Return the options: the cache beside a full step, and the longest sequence it holds. Raises SettingsError."""
    unit = settings.chunk_unit_size or site.block_size
    tokens = settings.max_num_tokens
    message = f"got {tokens}, must be >= {unit}, the least part of a prompt (chunk_unit_size or a block)"
    require(unit <= tokens or not settings.enable_chunked_prefill, "max_num_tokens", message)
    slots = settings.max_num_requests or settings.max_batch_size
    blocks = site.blocks(tokens, slots)
    return resolved(
        settings,
        TrtllmOptions,
        block_size=site.block_size,
        num_blocks=blocks,
        max_num_requests=slots,
        max_active_requests=settings.max_active_requests or slots,
        max_seq_len=settings.max_seq_len or min(site.max_position, blocks * site.block_size),
        chunk_unit_size=unit,
    )
