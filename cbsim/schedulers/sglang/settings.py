"""Settings of SGLang's server, and its choices for those left open."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from cbsim.policy.groups import Sight
from cbsim.policy.kind import Count, Natural, Settings, Site, require, resolved
from cbsim.policy.loop import Limits
from cbsim.policy.marks import DEFAULT_IN_PROBE, SLOTS, STEP_TOKENS, AtLeast, InProbe, Solved

FIRST_RATIO, LEAST_RATIO, DECAY_STEPS = 0.7, 0.14, 600  # SGLANG_INIT_NEW_TOKEN_RATIO and its kin
TOO_LONG = 5  # a prompt has to leave more of the longest sequence than this
GIB = 1 << 30
CHUNKS = ((20, 2048), (60, 4096), (160, 8192))  # (GiB, chunk): the chunk on a GPU with less memory
LARGEST_CHUNK = 16384
MANY = 32  # requests that may run, of a decode server that has no more slots than these
TENSORS = 8  # caches on the host, more than requests that once fitted in one are likely to take


@dataclass(frozen=True, kw_only=True)  # no slots: it remembers what follows from the settings
class SglangSettings(Settings):
    """SGLang 0.5.23. Names and defaults are those of its server's arguments."""

    name: str = "sglang"
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "shortest-prefill-first", "hrrn"] = "fcfs"
    """Order of the queue: first come, longest cached prefix, most requests under a cached prefix, longest output
    allowed, shortest prefill, highest response ratio."""
    schedule_conservativeness: Annotated[float, AtLeast(0)] = 1.0
    """How much of what running requests may still write is kept free for them; 1: 0.7 of it at first, at least 0.098
    after 600 decode steps."""
    max_running_requests: Annotated[
        Count | None, Solved("SGLang 0.5.23, from the size of the cache", pinned=True), SLOTS
    ] = None
    """Requests that may run; null: 2048, up to 4096 if the cache holds more than 4 of the longest sequences, never
    more than half the tokens of the cache."""
    max_prefill_tokens: Annotated[Count, STEP_TOKENS] = 16384
    """Query tokens in a prefill batch; a first request may have more."""
    chunked_prefill_size: Annotated[
        Annotated[int, AtLeast(-1)] | None, Solved("SGLang 0.5.23 on {gpu}, by its memory", pinned=True), InProbe(-1)
    ] = None
    """Query tokens in a prefill batch beyond which a prompt is cut; -1: prompts are not cut; null: by the GPU's memory,
    2048 to 16384."""
    enable_mixed_chunk: bool = False  #: With chunks: decoding requests ride with prefill batches.
    context_length: Annotated[Count | None, Solved("the model's"), DEFAULT_IN_PROBE] = None
    """Longest sequence, tokens; null: the model's."""
    disable_radix_cache: Annotated[bool, InProbe(True)] = False  #: Keep nothing of requests that are over.
    radix_eviction_policy: Literal["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"] = "lru"  #: Eviction order.
    enable_priority_scheduling: bool = False  #: Requests have priorities; with fcfs and lof only.
    disable_priority_preemption: bool = False  #: With priorities: nobody loses its place to a more urgent request.
    schedule_low_priority_values_first: bool = False  #: With priorities: low values are urgent; else high ones.
    priority_scheduling_preemption_threshold: Natural = 10
    """With priorities: by how much a request must be more urgent than those that it preempts."""
    retraction_policy: Literal["length", "priority"] = "length"
    """Who keeps its place when decoding runs out of memory: those with most outputs, or the most urgent before them."""
    prefill_max_requests: Annotated[Count | None, DEFAULT_IN_PROBE] = None  #: Requests in a prefill batch; null: any.
    prefill_decode_interval: Annotated[Natural, DEFAULT_IN_PROBE] = 0  #: Passes without a prefill after each prefill.
    scheduler_recv_interval: Annotated[Count, DEFAULT_IN_PROBE] = 1
    """Passes from one look at what has arrived to the next, while requests decode; a prefill is followed by one."""
    max_queued_requests: Annotated[Count | None, DEFAULT_IN_PROBE] = None
    """Requests that may wait; whoever comes or comes back then is refused, with priorities the least urgent. null: no
    limit."""
    max_mamba_cache_size: Annotated[
        Count | None, Solved("SGLang 0.5.23, from memory and max_running_requests", pinned=True), DEFAULT_IN_PROBE
    ] = None
    """States of requests, in layers that keep one; null: as many as max_running_requests, or if that is null by
    mamba_full_memory_ratio."""
    mamba_full_memory_ratio: Annotated[float, AtLeast(0.01)] = 0.9
    """Bytes of states for a byte of the cache of tokens, if neither max_mamba_cache_size nor max_running_requests says
    how many there are."""
    ignore_eos: bool = False
    """Requests ask for their outputs to the limit (`ignore_eos`), so all of it is kept free for them. What the workload
    declares does not change."""
    num_reserved_decode_tokens: Annotated[Natural, DEFAULT_IN_PROBE] = 512
    """Of a server that decodes for others: tokens kept free for each request that runs or is about to, when blocks are
    taken for a further one."""
    disaggregation_decode_extra_slots: Annotated[Natural | None, DEFAULT_IN_PROBE] = None
    """Of such a server: requests beside those that run which may have blocks; null: 2 max_running_requests, none where
    max_running_requests is not given or above 32."""
    disaggregation_decode_enable_radix_cache: Annotated[bool, DEFAULT_IN_PROBE] = False
    """Of such a server: prefixes are cached, and not fetched again."""

    def __post_init__(self) -> None:
        policy, chunk = self.schedule_policy, self.chunked_prefill_size
        message = f"got {policy}, must be fcfs or lof with enable_priority_scheduling"
        require(not self.enable_priority_scheduling or policy in ("fcfs", "lof"), "schedule_policy", message)
        message = f"got {policy}, which SGLang refuses with disable_radix_cache"
        require(policy != "shortest-prefill-first" or not self.disable_radix_cache, "schedule_policy", message)
        require(chunk != 0, "chunked_prefill_size", "got 0, must be >= 1, or -1 for prompts that are not cut")

    @cached_property
    def preempts(self) -> bool:
        return self.enable_priority_scheduling and not self.disable_priority_preemption


@dataclass(frozen=True, kw_only=True)
class SglangOptions(SglangSettings):
    """The settings with all sizes solved. A block is a page; every one of `num_blocks` can be used."""

    block_size: int
    num_blocks: int
    max_running_requests: int
    chunked_prefill_size: int
    context_length: int
    disaggregation_mode: Literal["null", "prefill", "decode"] = "null"
    host_blocks: int = 0  # of the memory for retracted requests

    def __post_init__(self) -> None:
        """Skip the checks of the settings: recorded schedulers have settings of their own."""

    @cached_property
    def pool_tokens(self) -> int:
        return self.block_size * self.num_blocks

    @cached_property
    def longest(self) -> int:
        """The tokens of a sequence, the last one not counted."""
        return min(self.context_length, self.pool_tokens) - 1

    @cached_property
    def prefills(self) -> bool:
        """Whether others decode what it prefills."""
        return self.disaggregation_mode == "prefill"

    @cached_property
    def decodes(self) -> bool:
        """Whether others prefill what it decodes."""
        return self.disaggregation_mode == "decode"

    @cached_property
    def chunks(self) -> bool:
        return self.chunked_prefill_size > 0

    @cached_property
    def mixes(self) -> bool:
        return self.chunks and self.enable_mixed_chunk

    @property
    def first_ratio(self) -> float:
        return min(FIRST_RATIO * self.schedule_conservativeness, 1.0)

    @property
    def limits(self) -> Limits:
        most = self.chunked_prefill_size if self.chunks else max(self.max_prefill_tokens, self.longest)
        if self.ignore_eos and self.disable_radix_cache:
            most = self.max_prefill_tokens + self.longest
        slots = self.max_running_requests
        return Limits(slots, tokens=max(most, slots), longest=self.longest + 1)


def resolve(settings: SglangSettings, site: Site) -> SglangOptions:
    """Return the options: chunk by the GPU, the cache beside a full step, slots by the cache. The cache is sized by
    vLLM's rule in place of mem_fraction_static, for a step of the largest prefill batch.
    """
    chunk, size = settings.chunked_prefill_size, site.block_size
    if chunk is None:
        chunk = next((chunk for gib, chunk in CHUNKS if site.memory_bytes < gib * GIB), LARGEST_CHUNK)
    message = f"got {chunk}, must be a multiple of the page, kv_cache.block_size ({size})"
    require(chunk < 0 or not chunk % size, "chunked_prefill_size", message)
    context = settings.context_length or site.max_position
    step = chunk if chunk > 0 else max(settings.max_prefill_tokens, context)
    blocks, states = _beside_states(settings, site, step)
    tokens = blocks * size
    slots = settings.max_running_requests or max(min(int(tokens / context * 512), 4096), 2048)
    slots = max(1, min(slots, tokens // 2, states or slots))
    return resolved(
        settings,
        SglangOptions,
        block_size=size,
        num_blocks=blocks,
        max_running_requests=slots,
        max_mamba_cache_size=states,
        chunked_prefill_size=chunk,
        context_length=context,
        **_apart(settings, site, tokens, context, slots),
    )


def _apart(settings: SglangSettings, site: Site, tokens: int, context: int, slots: int) -> dict[str, Any]:
    """Return the options of a server that prefills or decodes for others. Retracted requests have a fifth of the cache
    on the host, or room for one of any length; where SGLang keeps them in tensors of their own, as much as they need.
    """
    role, stated = site.role, settings.max_running_requests
    if role is None:
        return {}
    require(role != "both", "name", "got sglang, whose servers prefill or decode for others, and do not do both")
    require(not site.state_rule, "name", "got sglang, which hands off no states of linear layers (model.attention)")
    if role == "prefill":
        return {"disaggregation_mode": role}
    cached = settings.disaggregation_decode_enable_radix_cache
    host = TENSORS * tokens if cached or settings.preempts else max(tokens // 5, min(context, tokens))
    more = settings.disaggregation_decode_extra_slots
    if more is None:
        more = 2 * slots if stated is not None and stated <= MANY else 0
    return {
        "disaggregation_mode": role,
        "disable_radix_cache": not cached,
        "disaggregation_decode_extra_slots": more,
        "host_blocks": -(-host // site.block_size),
    }


def _beside_states(settings: SglangSettings, site: Site, step: int) -> tuple[int, int | None]:
    """Return the blocks of the cache, and how many states fit beside it; one more, of padded rows, takes memory too."""
    slots, ratio, stated = settings.max_running_requests, settings.mamba_full_memory_ratio, site.num_blocks
    if not site.state_rule:
        message = f"got {settings.max_mamba_cache_size}, must be null: no layer (model.attention) keeps a state"
        require(settings.max_mamba_cache_size is None, "max_mamba_cache_size", message)
        return site.blocks(step, slots or 256), None
    message = "got false, must be true with linear layers (model.attention): a tree of states is not modelled"
    require(settings.disable_radix_cache, "disable_radix_cache", message)
    layers = [site.attention[layer % len(site.attention)].sight for layer in range(site.layers)]
    each = layers.count(Sight.STATE) * site.state_bytes
    left = site.blocks(step, slots or 256, 1, 1) if stated is None else stated * site.block_bytes * (1 + ratio)  # bytes
    states = settings.max_mamba_cache_size or slots or max(0, int((left * ratio / (1 + ratio) - each) // each))
    blocks = int(left - (states + 1) * each) // site.block_bytes if stated is None else stated
    name = "max_running_requests" if settings.max_mamba_cache_size is None else "max_mamba_cache_size"
    name = name if settings.max_mamba_cache_size or slots else "mamba_full_memory_ratio"
    message = (
        f"got {getattr(settings, name)}: {states} states of {each / 1e6:,.1f} MB beside tokens in {left / 1e9:,.2f} GB"
    )
    require(states > 0 and blocks > 1, name, message)
    return blocks, states
