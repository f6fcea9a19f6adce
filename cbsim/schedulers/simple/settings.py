"""Settings of the schedulers without a real server's traces, and the sizes that follow from them on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cbsim.kv.reservation import Placement, Reserve, free_pieces
from cbsim.policy.kind import Count, Natural, Settings, Site, require, resolved
from cbsim.policy.loop import Limits
from cbsim.policy.marks import DEFAULT_IN_PROBE, PROMPT_TOKENS, SLOTS, STEP_TOKENS, AtLeast, InProbe, Solved

PROFILE_TOKENS = 8192  # query tokens of the step that sizes memory, where no option bounds a step
DEFAULT_TOKENS = 2048  # query tokens in a step of `contiguous`


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSettings(Settings):
    """Static batching: a batch is formed, padded and run until its last request has ended."""

    name: str = "static"
    batch_size: Annotated[Count, SLOTS] = 32  #: Requests in a batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicPaddedSettings(Settings):
    """Dynamic batching: who waits takes the place of who has ended; all rows of a step are padded to the longest."""

    name: str = "dynamic_padded"
    batch_size: Annotated[Count, SLOTS] = 32  #: Requests in the batch.


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedOptions:
    """The size of a padded batch, and the cache beside it. `filled`: padding lies in the rows, not in the cache."""

    name: str
    batch_size: int
    block_size: int
    num_blocks: int
    filled: bool = False

    @property
    def limits(self) -> Limits:
        return Limits(slots=self.batch_size, filled=self.filled)


def resolve_padded(settings: StaticSettings | DynamicPaddedSettings, site: Site) -> PaddedOptions:
    """Return the options: the cache beside a step of `batch_size` prompts."""
    return PaddedOptions(
        name=settings.name,
        batch_size=settings.batch_size,
        block_size=site.block_size,
        num_blocks=site.blocks(PROFILE_TOKENS, settings.batch_size),
        filled=isinstance(settings, DynamicPaddedSettings),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiSettings(Settings):
    """text-generation-inference v3: prompts are prefilled alone and joined to the batch, all tokens reserved."""

    name: str = "tgi"
    max_batch_prefill_tokens: Annotated[Count, PROMPT_TOKENS] = 4096  #: Prompt tokens a step; a longer one is refused.
    max_batch_total_tokens: Annotated[Count | None, Solved("tokens of the cache"), DEFAULT_IN_PROBE] = None
    """Tokens of all that run, prompts and limits together; null: as many as the cache holds."""
    waiting_served_ratio: Annotated[float, AtLeast(0), InProbe(0.0)] = 0.3
    """The batch stops for prompts if they are at least so many for each request in it, rounded down."""
    max_waiting_tokens: Natural = 20  #: Or for any, once it has taken so many steps since the last prompts.
    max_batch_size: Annotated[Count, SLOTS] = 256  #: Requests that may run.


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiOptions(TgiSettings):
    """The settings with all sizes solved."""

    block_size: int
    num_blocks: int
    max_batch_total_tokens: int

    @property
    def limits(self) -> Limits:
        return Limits(slots=self.max_batch_size, tokens=max(self.max_batch_prefill_tokens, self.max_batch_size))


def resolve_tgi(settings: TgiSettings, site: Site) -> TgiOptions:
    """Return the options: the cache beside a step of prompts, and as many tokens as it has. Raises SettingsError."""
    blocks = site.blocks(settings.max_batch_prefill_tokens, settings.max_batch_size)
    total = settings.max_batch_total_tokens or blocks * site.block_size
    prompts = settings.max_batch_prefill_tokens
    message = f"got {total}, must be >= max_batch_prefill_tokens ({prompts})"
    require(not settings.max_batch_total_tokens or total >= prompts, "max_batch_total_tokens", message)
    return resolved(settings, TgiOptions, block_size=site.block_size, num_blocks=blocks, max_batch_total_tokens=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings(Settings):
    """Beam search: every request is answered by the best of several texts that grow side by side."""

    name: str = "beam"
    num_beams: Annotated[Count, InProbe(1)] = 4  #: Texts of a request, each a request of the workload with its own row.
    max_num_seqs: Annotated[Count, SLOTS] = 256  #: Texts that may run, all beams counted.
    max_num_batched_tokens: Annotated[Count, STEP_TOKENS] = 2048  #: Query tokens in a step.

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, field)
            require(value >= self.num_beams, field, f"got {value}, must be >= num_beams ({self.num_beams})")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions(BeamSettings):
    """The settings with all sizes solved."""

    block_size: int
    num_blocks: int

    @property
    def limits(self) -> Limits:
        return Limits(slots=self.max_num_seqs, tokens=self.max_num_batched_tokens)


def resolve_beam(settings: BeamSettings, site: Site) -> BeamOptions:
    """Return the options: the cache beside a full step."""
    blocks = site.blocks(settings.max_num_batched_tokens, settings.max_num_seqs)
    return resolved(settings, BeamOptions, block_size=site.block_size, num_blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousSettings(Settings):
    """Iteration-level batching on a cache of contiguous reservations, as in Orca and FasterTransformer."""

    name: str = "contiguous"
    reserve: Annotated[Reserve, DEFAULT_IN_PROBE] = "max_tokens"
    """What a request reserves: max_model_len; max_tokens: prompt and limit; power_of_two: prompt and the least power of
    two not below its outputs; exact: prompt and outputs. The last two know outputs as no server can."""
    placement: Placement = "first_fit"
    """Where: in the first free run that is long enough, in the shortest such (best_fit), or in a power of two of blocks
    (buddy)."""
    max_num_seqs: Annotated[Count, SLOTS] = 256  #: Requests that may run.
    max_num_batched_tokens: Annotated[Count | None, Solved("this scheduler's default", pinned=True), STEP_TOKENS] = None
    """Query tokens in a step; null: 2048, but at least max_num_seqs, and without chunks max_model_len."""
    max_model_len: Annotated[
        Count | None, Solved("the model's, or the largest piece of the cache"), DEFAULT_IN_PROBE
    ] = None
    """Longest sequence, tokens; null: the model's, capped by the largest piece of the cache."""
    enable_chunked_prefill: Annotated[bool, DEFAULT_IN_PROBE] = True  #: May prompts take several steps? Orca's do not.


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousOptions(ContiguousSettings):
    """The settings with all sizes solved."""

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def limits(self) -> Limits:
        slots, tokens, longest, table = self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len, None
        if self.reserve not in ("max_tokens", "exact") or self.placement == "buddy":  # else no longer than the sequence
            table = free_pieces(self.placement, self.num_blocks).granted(-(-longest // self.block_size))
        return Limits(slots=slots, tokens=tokens, longest=longest, table=table)


def resolve_contiguous(settings: ContiguousSettings, site: Site) -> ContiguousOptions:
    """Return the options: a cache beside a full step. Raises SettingsError if a request or a prompt could never run."""
    slots, whole = settings.max_num_seqs, not settings.enable_chunked_prefill
    tokens = settings.max_num_batched_tokens
    if tokens is None:
        tokens = max(DEFAULT_TOKENS, slots, (settings.max_model_len or site.max_position) if whole else 0)
    message = f"got {tokens}, must be >= max_num_seqs ({slots}): all that run decode in every step"
    require(tokens >= slots, "max_num_batched_tokens", message)
    blocks = site.blocks(tokens, slots)
    largest = free_pieces(settings.placement, blocks).most
    longest = settings.max_model_len or min(site.max_position, largest * site.block_size)
    message = f"got {tokens}, must be >= max_model_len ({longest}) without chunked prefill"
    require(tokens >= longest or not whole, "max_num_batched_tokens", message)
    needed = -(-longest // site.block_size)
    message = f"got {longest}, reserved by every request: {needed} blocks, the largest piece has {largest} of {blocks}"
    require(needed <= largest or settings.reserve != "max_model_len", "max_model_len", message)
    return resolved(
        settings,
        ContiguousOptions,
        block_size=site.block_size,
        num_blocks=blocks,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
    )
