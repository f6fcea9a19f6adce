"""Settings of vLLM V1, and its server's choices for those left open: by GPU, model, version and layer groups."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import lcm
from typing import Annotated, Literal, NamedTuple

from cbsim.kv.layer_groups import Grouping, LayerKind, States, grouped, rules
from cbsim.policy.groups import FULL, LayerGroup, Sight
from cbsim.policy.kind import Count, Natural, Settings, Share, Site, Speculation, require, resolved
from cbsim.policy.loop import Limits
from cbsim.policy.marks import DEFAULT_IN_PROBE, SLOTS, STEP_TOKENS, AsText, AtLeast, InProbe, Solved

VERSIONS = ("0.19", "0.33")  # the versions whose rules these are
CONNECTOR_OPTIONS = {  # each with the connectors that have it
    "cpu_bytes_to_use": ("simple_cpu", "offloading"),
    "lazy_offload": ("simple_cpu",),
    "blocks_per_chunk": ("offloading",),
    "eviction_policy": ("offloading",),
    "offload_prompt_only": ("offloading",),
}
SIMPLE_CPU_BYTES = 8 << 30
UNCHANGED = {"version": "0.33", "kv_connector": "none", "preemption_mode": "recompute", "reserve_output": False}
HANDS_OFF: Mapping[str, object] = UNCHANGED | {"enable_prefix_caching": True}
KV_ROLES: Mapping[str, Literal["kv_producer", "kv_consumer", "kv_both"]] = {
    "prefill": "kv_producer",
    "decode": "kv_consumer",
    "both": "kv_both",
}
NEW_OPTIONS = (  # since 0.19
    "adaptive_long_prefill_threshold",
    "watermark",
    "prefill_schedule_interval",
    "prefix_cache_retention_interval",
    "state_checkpoints",
)


def _server(settings: VllmSettings, site: Site) -> str:
    return f"vLLM {settings.version} on {tier(settings.version, site).gpus}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(Settings):
    """vLLM V1. Defaults are those of its server on the scenario's GPU."""

    name: str = "vllm"
    version: Annotated[Literal["0.33", "0.19"], AsText()] = "0.33"  #: Whose rules: 0.33 or 0.19.
    policy: Literal["fcfs", "priority"] = "fcfs"  #: Order of the queue.
    max_num_seqs: Annotated[Count | None, Solved(_server, pinned=True), SLOTS] = None
    """Requests that may run; null: 1024, or 256 on a GPU with less than 70 GiB and on an A100."""
    max_num_batched_tokens: Annotated[Count | None, Solved(_server, pinned=True), STEP_TOKENS] = None
    """Query tokens in a step; null: 8192, or 2048 on a GPU with less than 70 GiB and on an A100; 0.33: 16384 on one
    with 160 GiB or more."""
    max_model_len: Annotated[Count | None, Solved("the model's, or what the cache holds"), DEFAULT_IN_PROBE] = None
    """Longest sequence, tokens; null: the model's, capped by the cache."""
    enable_chunked_prefill: Annotated[bool, DEFAULT_IN_PROBE] = True  #: May a prompt be prefilled over several steps?
    enable_prefix_caching: Annotated[bool, InProbe(False)] = True  #: Reuse the blocks of known prefixes.
    long_prefill_token_threshold: Natural = 0  #: Most tokens of one prompt in a step; 0: no limit of its own.
    adaptive_long_prefill_threshold: bool = False  #: 0.33: raise that limit when few requests are present.
    scheduler_reserve_full_isl: bool = True  #: Admit a request only if its whole prompt fits the cache.
    watermark: Share = 0.0  #: 0.33: share of the blocks kept free when the queue is admitted from.
    prefill_schedule_interval: Count = 1
    """0.33: executed steps from one prefill to the next; with cost.data_parallel of all servers, at the same steps."""
    max_cudagraph_capture_size: Annotated[Count | None, Solved("twice the seats, up to vLLM's bound on this GPU")] = (
        None
    )
    """Query tokens of the largest CUDA graph; null: twice the seats, at most 512 (0.33 on a B200 or B300: 1024) and
    max_num_batched_tokens."""
    disable_hybrid_kv_cache_manager: bool = False
    """Keep what layers with windows no longer see as long as the rest, if other layers see everything."""
    prefix_cache_retention_interval: Natural | None = 0
    """0.33: which blocks of sliding layers, and states, later prompts may find. 0: those that the same prompt, or a
    known part of it, would resume from. N: also a window before every N tokens, a multiple of the block. null: all."""
    state_checkpoints: Annotated[bool | None, Solved("what vLLM's kernels for the model can on {gpu}")] = None
    """Can a row of a prompt leave a state within, so that it need not end there? null: with mamba2; with gated_delta on
    Hopper and Blackwell, where its keys are taken to be 128 wide."""
    kv_connector: Annotated[Literal["none", "simple_cpu", "offloading", "hand_off"], DEFAULT_IN_PROBE] = "none"
    """0.33: keep KV in the host's memory, too: by SimpleCPUOffloadConnector, or by OffloadingConnector. hand_off, from
    a server that prefills to one that decodes, comes with the roles of a fleet's pools and cannot be set."""
    cpu_bytes_to_use: Annotated[Count | None, Solved("SimpleCPUOffloadConnector"), DEFAULT_IN_PROBE] = None
    """Memory of the host for it, bytes, all GPUs together; null: 8 GiB with simple_cpu; offloading has to be told."""
    lazy_offload: Annotated[bool, DEFAULT_IN_PROBE] = False
    """simple_cpu: store blocks just before they are handed out."""
    blocks_per_chunk: Annotated[Count, DEFAULT_IN_PROBE] = 1  #: offloading: blocks stored, found and evicted together.
    eviction_policy: Annotated[Literal["lru", "arc"], DEFAULT_IN_PROBE] = "lru"  #: offloading: who leaves first.
    offload_prompt_only: Annotated[bool, DEFAULT_IN_PROBE] = True  #: offloading: outputs are not stored.
    reserve_output: bool = False
    """Not vLLM's: admit a request only if the cache could hold all outputs to their limits, so nobody is preempted."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """What becomes of a request that loses its blocks. swap: its KV waits on the host and comes back. V1 recomputes;
    the rule of swapping is vLLM V0's."""
    swap_space_gib: Annotated[float, AtLeast(0)] = 4.0
    """With swap: GiB of host memory for that, a GPU. A request that finds no room there is recomputed."""

    def __post_init__(self) -> None:
        usual = {field.name: field.default for field in fields(self)}
        self._check_connector({name for name in usual if getattr(self, name) != usual[name]})
        for name in NEW_OPTIONS:
            known = self.version != "0.19" or getattr(self, name) == usual[name]
            require(known, name, "vLLM 0.19 has no such option; use version 0.33 or leave it out")
        if self.max_num_batched_tokens is not None and self.max_num_seqs is not None:
            _check_budget(self.max_num_batched_tokens, self.max_num_seqs)
        threshold, longest = self.long_prefill_token_threshold, self.max_model_len
        message = f"got {threshold}, must be <= max_model_len ({longest})"
        require(longest is None or threshold <= longest, "long_prefill_token_threshold", message)

    def _check_connector(self, explicit: set[str]) -> None:
        """Check that a connector's options belong to it, and that its needs are met. `explicit` are no defaults."""
        connector = self.kv_connector
        for name, connectors in CONNECTOR_OPTIONS.items():
            message = f"got {getattr(self, name)}, must be left out unless kv_connector is {' or '.join(connectors)}"
            require(name not in explicit or connector in connectors, name, message)
        if connector == "none":
            return
        for holds, rule in (
            (self.version == "0.33", ": only vLLM 0.33's are followed"),
            (self.enable_prefix_caching, " without enable_prefix_caching"),
            (not self.reserve_output, " with reserve_output"),
            (self.preemption_mode != "swap", " with preemption_mode swap"),
        ):
            require(holds, "kv_connector", f"got {connector}, must be none{rule}")
        sized = connector != "offloading" or self.cpu_bytes_to_use is not None
        require(sized, "cpu_bytes_to_use", "got null, must be given with kv_connector offloading")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions(VllmSettings):
    """The options under vLLM's own names. `num_blocks` includes block 0, the null block, which is never handed out;
    `host_blocks` are the places of a connector's tier, with simple_cpu including its own block 0, or of the swap space.
    `groups`: those of the layers, none if all see everything.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    host_blocks: int = 0
    kv_role: Literal["kv_consumer", "kv_producer", "kv_both"] = "kv_both"
    async_scheduling: bool = True
    stages: int = 1
    speculation: Speculation | None = None
    groups: tuple[LayerGroup, ...] = ()

    def __post_init__(self) -> None:
        """Skip the checks of the settings: recorded schedulers have sizes that their command line refuses."""

    @property
    def most_in_flight(self) -> int:
        """The query tokens of all steps that may be in flight, and those that a drafter writes behind them."""
        return in_flight(self.max_num_batched_tokens, self.stages + self.async_scheduling, self.speculation)

    @property
    def hands_on(self) -> bool:
        """Whether another server continues the requests of this one."""
        return self.kv_connector == "hand_off" and self.kv_role != "kv_consumer"

    @property
    def limits(self) -> Limits:
        graphs = self.max_cudagraph_capture_size
        return Limits(self.max_num_seqs, tokens=self.max_num_batched_tokens, longest=self.max_model_len, graphs=graphs)


def may_pad(settings: VllmSettings, speculation: Speculation) -> bool:
    """Whether a request that is alone may be admitted with blank drafts: all but one of its tokens in the cache."""
    return settings.enable_prefix_caching and not speculation.by_rows


def in_flight(tokens: int, depth: int, speculation: Speculation | None) -> int:
    """Return the most query tokens of so many steps, and of what a drafter writes behind them."""
    return tokens * depth + (speculation.ahead if speculation else 0)


class Tier(NamedTuple):
    """The defaults of vLLM's server on a class of GPUs (`EngineArgs.get_batch_defaults`)."""

    slots: int
    tokens: int
    gpus: str


BLACKWELL = re.compile(r"\bG?B[23]00\b")  # of compute capability 10
SMALL = Tier(256, 2048, "a GPU with less than 70 GiB, or an A100")
LARGE = Tier(1024, 8192, "a GPU with 70 GiB or more that is no A100")
PREFILLS_GDN = re.compile(r"\b(G?H[12]00|H20|G?B[23]00|RTX (PRO|50))")  # of FlashInfer's kernel
KERNEL_BLOCK, LATENT_BLOCK, GDN_BLOCK = 16, 128, 64  # tokens of which a block of attention or a state is a multiple
LARGEST = Tier(1024, 16384, "a GPU with 160 GiB or more")


def tier(version: str, site: Site) -> Tier:
    """Return the defaults on a GPU. The 160 GiB tier came with vLLM 0.28; the A100 is known by name, as there."""
    memory_gib = site.memory_bytes / (1 << 30)
    if version == "0.33" and memory_gib >= 160:
        return LARGEST
    return LARGE if memory_gib >= 70 and "a100" not in site.gpu.lower() else SMALL


def _steps(settings: VllmSettings, site: Site) -> tuple[int, int]:
    """Return slots and tokens a step; a default gives way to what is given. Raises SettingsError."""
    default, longest = tier(settings.version, site), settings.max_model_len or site.max_position
    slots, tokens = settings.max_num_seqs or default.slots, settings.max_num_batched_tokens
    if tokens is None:
        tokens = default.tokens if settings.enable_chunked_prefill else max(default.tokens, longest)
        tokens = min(tokens, slots * longest)
    if settings.max_num_seqs is None:
        slots = min(slots, tokens)
    _check_budget(tokens, slots)
    return slots, tokens


def _check_budget(tokens: int, slots: int) -> None:
    require(tokens >= slots, "max_num_batched_tokens", f"got {tokens}, must be >= max_num_seqs ({slots})")


def balance(settings: VllmSettings) -> str | None:
    """Return the rule by which its client shares requests among servers that step together."""
    alone = settings.kv_connector != "none" or settings.preemption_mode == "swap"
    return None if alone else {"0.19": "waiting first", "0.33": "fewest by turns"}[settings.version]


def resolve(settings: VllmSettings, site: Site) -> VllmOptions:
    """Return the options: slots and tokens by the GPU, a cache beside a full step, the longest sequence it holds."""
    _check_servers(settings, site)
    slots, tokens = _steps(settings, site)
    _check_speculation(settings, site, tokens)
    exports = bool(site.state_rule) and exports_states(settings, site)
    size = block_size(settings, site, exports=exports)
    states = States(size, 3 if exports else 2)
    if not settings.enable_prefix_caching:
        states = States(max(size, settings.max_model_len or site.max_position), 1)
    grouping = layer_groups(site, size, states, together=settings.disable_hybrid_kv_cache_manager)
    blocks = site.blocks(tokens, slots, grouping.block_bytes, size * site.token_bytes if site.state_rule else 0)
    if grouping.groups:
        _check_groups(settings, site, size)
        most = in_flight(tokens, site.depth, site.speculation)
        longest = longest_sequence(grouping.groups, most, blocks - 1, settings.max_model_len, site.max_position)
    else:
        longest = settings.max_model_len or min(site.max_position, (blocks - 1) * site.block_size)
    message = f"got {tokens}, must be >= max_model_len ({longest}) without chunked prefill"
    require(settings.enable_chunked_prefill or tokens >= longest, "max_num_batched_tokens", message)
    host_bytes = settings.cpu_bytes_to_use or (SIMPLE_CPU_BYTES if settings.kv_connector == "simple_cpu" else None)
    return resolved(
        settings,
        VllmOptions,
        block_size=size,
        num_blocks=blocks,
        max_num_seqs=slots,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
        max_cudagraph_capture_size=settings.max_cudagraph_capture_size or _largest_graph(settings, site, slots, tokens),
        cpu_bytes_to_use=host_bytes,
        host_blocks=_host_blocks(settings, site, host_bytes or 0),
        async_scheduling=site.depth > site.stages,
        stages=site.stages,
        **({"kv_connector": "hand_off", "kv_role": KV_ROLES[site.role]} if site.role else {}),
        groups=grouping.groups,
        speculation=site.speculation,
        state_checkpoints=exports if site.state_rule else None,
    )


def exports_states(settings: VllmSettings, site: Site) -> bool:
    """Return whether rows can leave states within: as stated, or if the kernels of vLLM's choice can."""
    if settings.state_checkpoints is not None:
        return settings.state_checkpoints
    return site.state_rule == "mamba2" or (site.state_rule == "gated_delta" and bool(PREFILLS_GDN.search(site.gpu)))


def block_size(settings: VllmSettings, site: Site, *, exports: bool) -> int:
    """Return the tokens of a block, which becomes so large that a page of attention holds a state; the state's page is
    padded to it (`Platform.update_block_size_for_backend`).
    """
    size = site.block_size
    if not site.state_rule:
        return size
    unit = max(size, LATENT_BLOCK if site.model.latent else KERNEL_BLOCK)
    if exports and settings.enable_prefix_caching and site.state_rule == "gated_delta":
        unit = lcm(unit, GDN_BLOCK)
    least = unit * -(-site.state_bytes // (unit * site.token_bytes))
    return max(size, KERNEL_BLOCK * -(-least // KERNEL_BLOCK))


def _check(settings: VllmSettings, required: Mapping[str, object], when: str) -> None:
    """Raise SettingsError for the first setting that has another value than required."""
    for name, must in required.items():
        value = getattr(settings, name)
        got, bound = (str(one).lower() if isinstance(one, bool) else one for one in (value, must))
        require(value == must, name, f"got {got}, must be {bound} {when}")


def _check_groups(settings: VllmSettings, site: Site, size: int) -> None:
    """Raise SettingsError for settings that are not followed for layers that see less than everything."""
    required: dict[str, object] = dict(UNCHANGED)
    what = "states" if site.state_rule else "windows"
    if site.state_rule:  # vLLM itself refuses the others
        required["disable_hybrid_kv_cache_manager"] = False
        required["enable_chunked_prefill"] = settings.enable_prefix_caching or settings.enable_chunked_prefill
    _check(settings, required, f"if layers have {what} (model.attention)")
    interval = settings.prefix_cache_retention_interval
    for attention in site.attention:
        whole = attention.sight is not Sight.CHUNKED or not attention.span % size
        message = f"chunks of {attention.span} tokens (model.attention) must be whole blocks of {size}"
        require(whole, "name", f"got {settings.name}: {message}")
    message = (
        f"got {interval}, must be a multiple of {'the block' if site.state_rule else 'kv_cache.block_size'} ({size})"
    )
    require(not interval or not interval % size, "prefix_cache_retention_interval", message)


def _check_servers(settings: VllmSettings, site: Site) -> None:
    """Raise SettingsError for settings whose rules beside other servers, or with stages, are not followed."""
    servers = "got hand_off, which comes with fleet.pools.N.role and cannot be set"
    require(settings.kv_connector != "hand_off", "kv_connector", servers)
    if site.role:
        _check(settings, HANDS_OFF, "in a fleet whose pools have roles")
    if site.stages > 1:
        _check(settings, UNCHANGED, f"with cost.pipeline_parallel {site.stages}")


def _check_speculation(settings: VllmSettings, site: Site, tokens: int) -> None:
    """Raise SettingsError for settings whose rules with speculation are not followed, and steps of too few `tokens`."""
    if (drafts := site.speculation) is None:
        return
    known = {one.sight for one in site.attention} <= {Sight.FULL, Sight.SLIDING}
    require(
        known, "name", f"got {settings.name}, which does not speculate with chunked or linear layers (model.attention)"
    )
    required: dict[str, object] = dict(UNCHANGED)
    windows = "" if all(one == FULL for one in site.attention) else " and layers with windows"
    if windows:  # what vLLM's hashes cover then has not been recorded
        required["enable_prefix_caching"] = False
    _check(settings, required, f"with speculation{windows}")
    least = 1 + drafts.slots + drafts.k * may_pad(settings, drafts)
    message = f"got {tokens}, must be >= {least} with speculation.k {drafts.k} and method {drafts.method}"
    require(tokens >= least, "max_num_batched_tokens", message)


def _host_blocks(settings: VllmSettings, site: Site, size: int) -> int:
    """Return the host's blocks: of the swap space, or in the `size` bytes of a connector's tier: whole chunks, or
    blocks, of which simple_cpu never uses the first. Raises SettingsError if none fits.
    """
    if settings.preemption_mode == "swap":
        space, block_gib = settings.swap_space_gib, site.block_bytes / (1 << 30)
        blocks = int(space * (1 << 30)) // site.block_bytes
        require(blocks > 0, "swap_space_gib", f"got {space:g}, must be >= {block_gib:.6f}: one block")
        return blocks
    if settings.kv_connector == "none":
        return 0
    block_bytes = site.block_bytes * site.gpus
    unit = block_bytes * settings.blocks_per_chunk
    least = unit if settings.kv_connector == "offloading" else 2 * unit
    require(size >= least, "cpu_bytes_to_use", f"got {size:,}, must be >= {least:,}: a block has {block_bytes:,} bytes")
    return size // unit * settings.blocks_per_chunk


def _largest_graph(settings: VllmSettings, site: Site, slots: int, tokens: int) -> int:
    """Return what `VllmConfig._set_cudagraph_sizes` does; 0.28 raised the bound for compute capability 10."""
    raised = settings.version == "0.33" and BLACKWELL.search(site.gpu)
    width = 1 + site.speculation.k if site.speculation else 1
    return min(2 * slots * width, 1024 if raised else 512, tokens)


def sees_all(groups: Sequence[LayerGroup]) -> bool:
    """True for a plain cache: one group of layers that see the whole sequence, or no groups given."""
    return all(group.attention == FULL for group in groups) and len(groups) <= 1


def layer_groups(site: Site, size: int, states: States, *, together: bool) -> Grouping:
    """Return the groups of the site's model and the layers of a block; no groups if all layers see everything."""
    pattern = site.attention
    if all(one == FULL for one in pattern):
        return Grouping((), site.layers)
    layers = [LayerKind(pattern[layer % len(pattern)], 1) for layer in range(site.layers)]
    return grouped(layers, size, together=together, states=states)


def least_blocks(groups: Sequence[LayerGroup], in_flight: int, longest: int) -> int:
    """Return the blocks that a server needs to start: the most that one request of `longest` tokens has."""
    return sum([rule.most for rule in rules(groups, retention=0, in_flight=in_flight, longest=longest)])


def longest_sequence(groups: Sequence[LayerGroup], in_flight: int, blocks: int, stated: int | None, most: int) -> int:
    """Return the longest sequence: as stated, or what `blocks` blocks hold, at most `most`. Raises SettingsError."""
    if stated is not None:
        needed = least_blocks(groups, in_flight, stated)
        message = f"got {stated}, which needs {needed:,} blocks in {len(groups)} layer groups, the cache has {blocks:,}"
        require(needed <= blocks, "max_model_len", message)
        return stated
    needed = least_blocks(groups, in_flight, 1)
    require(needed <= blocks, "max_model_len", f"one token needs {needed:,} blocks, the cache has {blocks:,}")
    return bisect_right(range(1, most + 1), blocks, key=lambda tokens: least_blocks(groups, in_flight, tokens))
