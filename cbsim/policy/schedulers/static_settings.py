"""What static batching may be told, and what it makes of it on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cbsim.policy.kind import Count, Settings, Site, resolved
from cbsim.policy.limits import Limits

PROFILE_TOKENS = 8192
"""Query tokens of the step that sizes a batch's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticSettings(Settings):
    """Static batching: a batch is formed, padded and run until its last request has ended."""

    name: str = "static"
    batch_size: Count = 32
    """Requests in a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOptions(StaticSettings):
    """`batch_size` rows at most, in a cache of `num_blocks` blocks."""

    block_size: int
    num_blocks: int

    @property
    def limits(self) -> Limits:
        return Limits(seats=self.batch_size)


def resolve(settings: StaticSettings, site: Site) -> StaticOptions:
    """The cache beside a step of `batch_size` prompts."""
    blocks = site.blocks(PROFILE_TOKENS, settings.batch_size)
    return resolved(settings, StaticOptions, block_size=site.block_size, num_blocks=blocks)


def widened(settings: StaticSettings, seats: int, tokens: int) -> StaticSettings:
    """A batch of another size, for a probe; its prompts decide how many tokens a step has."""
    del tokens
    return replace(settings, batch_size=seats)
