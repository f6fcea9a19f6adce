"""What the scheduler with contiguous reservations may be told, and what it makes of it on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cbsim.policy.kind import Count, Settings, SettingsError, Site, resolved
from cbsim.policy.limits import Limits
from cbsim.policy.reservation import Placement, Reserve, free_pieces

DEFAULT_TOKENS = 2048  # query tokens in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousSettings(Settings):
    """Iteration-level batching on a cache of contiguous reservations, as in Orca and FasterTransformer."""

    name: str = "contiguous"
    reserve: Reserve = "max_tokens"
    """What a request reserves: max_model_len; max_tokens: prompt and limit; power_of_two: prompt and the least power of
    two not below its outputs; exact: prompt and outputs. The last two know outputs as no server can."""
    placement: Placement = "first_fit"
    """Where: in the first free run that is long enough, in the shortest such (best_fit), or in a power of two of blocks
    (buddy)."""
    max_num_seqs: Count = 256
    """Requests that may run."""
    max_num_batched_tokens: Count | None = None
    """Query tokens in a step; null: 2048, but at least max_num_seqs, and without chunks max_model_len."""
    max_model_len: Count | None = None
    """Longest sequence, tokens; null: the model's, capped by the largest piece of the cache."""
    enable_chunked_prefill: bool = True
    """May a prompt be prefilled over several steps? Orca's are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContiguousOptions(ContiguousSettings):
    """All resolved."""

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def limits(self) -> Limits:
        return Limits(
            seats=self.max_num_seqs,
            tokens=self.max_num_batched_tokens,
            longest=self.max_model_len,
            table=self._longest_table,
        )

    @property
    def _longest_table(self) -> int | None:
        if self.reserve in ("max_tokens", "exact") and self.placement != "buddy":
            return None  # no longer than the sequence
        return free_pieces(self.placement, self.num_blocks).granted(-(-self.max_model_len // self.block_size))


def resolve(settings: ContiguousSettings, site: Site) -> ContiguousOptions:
    """A cache beside a full step. Raises SettingsError for sizes with which a request or a prompt could never run."""
    seats, whole = settings.max_num_seqs, not settings.enable_chunked_prefill
    tokens = settings.max_num_batched_tokens
    if tokens is None:
        tokens = max(DEFAULT_TOKENS, seats, (settings.max_model_len or site.max_position) if whole else 0)
    if tokens < seats:
        text = f"got {tokens}, must be >= max_num_seqs ({seats}): all that run decode in every step"
        raise SettingsError("max_num_batched_tokens", text)
    blocks = site.blocks(tokens, seats)
    largest = free_pieces(settings.placement, blocks).most
    longest = settings.max_model_len or min(site.max_position, largest * site.block_size)
    if whole and tokens < longest:
        text = f"got {tokens}, must be >= max_model_len ({longest}) without chunked prefill"
        raise SettingsError("max_num_batched_tokens", text)
    needed = -(-longest // site.block_size)
    if settings.reserve == "max_model_len" and needed > largest:
        text = f"got {longest}, reserved by every request: {needed} blocks, the largest piece has {largest} of {blocks}"
        raise SettingsError("max_model_len", text)
    return resolved(
        settings,
        ContiguousOptions,
        block_size=site.block_size,
        num_blocks=blocks,
        max_num_batched_tokens=tokens,
        max_model_len=longest,
    )


def settled(settings: ContiguousSettings, options: ContiguousOptions) -> ContiguousSettings:
    """The step stays as it was solved, whatever the cache becomes."""
    return replace(settings, max_num_batched_tokens=options.max_num_batched_tokens)


def reasons(settings: ContiguousSettings, site: Site) -> dict[str, str]:
    """Where what the settings leave open comes from."""
    del settings, site
    return {
        "max_num_batched_tokens": "this scheduler's default",
        "max_model_len": "the model's, or the largest piece of the cache",
    }


def widened(settings: ContiguousSettings, seats: int, tokens: int) -> ContiguousSettings:
    """The same rules for a probe, which no prompt's length may disturb."""
    return replace(
        settings,
        reserve="max_tokens",
        max_num_seqs=seats,
        max_num_batched_tokens=max(tokens, seats),
        max_model_len=None,
        enable_chunked_prefill=True,
    )
