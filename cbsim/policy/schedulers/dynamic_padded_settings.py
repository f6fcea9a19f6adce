"""What dynamic batching with padding may be told, and what it makes of it on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cbsim.policy.kind import Count, Settings, Site, resolved
from cbsim.policy.limits import Limits

PROFILE_TOKENS = 8192
"""Query tokens of the step that sizes a batch's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicPaddedSettings(Settings):
    """Dynamic batching: who waits takes the place of who has ended; all rows of a step are padded to the longest."""

    name: str = "dynamic_padded"
    batch_size: Count = 32
    """Requests in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicPaddedOptions(DynamicPaddedSettings):
    """`batch_size` rows at most, in a cache of `num_blocks` blocks."""

    block_size: int
    num_blocks: int

    @property
    def limits(self) -> Limits:
        return Limits(seats=self.batch_size, filled=True)


def resolve(settings: DynamicPaddedSettings, site: Site) -> DynamicPaddedOptions:
    """The cache beside a step of `batch_size` prompts."""
    blocks = site.blocks(PROFILE_TOKENS, settings.batch_size)
    return resolved(settings, DynamicPaddedOptions, block_size=site.block_size, num_blocks=blocks)


def widened(settings: DynamicPaddedSettings, seats: int, tokens: int) -> DynamicPaddedSettings:
    """A batch of another size, for a probe; its prompts decide how many tokens a step has."""
    del tokens
    return replace(settings, batch_size=seats)
