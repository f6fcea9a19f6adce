"""What text-generation-inference may be told, and what it makes of it on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from cbsim.policy.kind import AtLeast, Count, Natural, Settings, SettingsError, Site, resolved
from cbsim.policy.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiSettings(Settings):
    """text-generation-inference v3: prompts are prefilled alone and joined to the batch, all tokens reserved."""

    name: str = "tgi"
    max_batch_prefill_tokens: Count = 4096
    """Query tokens in a step of prompts; a longer prompt is refused."""
    max_batch_total_tokens: Count | None = None
    """Tokens of all that run, prompts and limits together; null: as many as the cache holds."""
    waiting_served_ratio: Annotated[float, AtLeast(0)] = 0.3
    """The batch stops for prompts if they are at least so many for each request in it, rounded down."""
    max_waiting_tokens: Natural = 20
    """Or for any, once it has taken so many steps since the last prompts."""
    max_batch_size: Count = 256
    """Requests that may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiOptions(TgiSettings):
    """All resolved."""

    block_size: int
    num_blocks: int
    max_batch_total_tokens: int

    @property
    def limits(self) -> Limits:
        return Limits(seats=self.max_batch_size, tokens=max(self.max_batch_prefill_tokens, self.max_batch_size))


def resolve(settings: TgiSettings, site: Site) -> TgiOptions:
    """The cache beside a step of prompts, and as many tokens as it has. Raises SettingsError."""
    blocks = site.blocks(settings.max_batch_prefill_tokens, settings.max_batch_size)
    total = settings.max_batch_total_tokens or blocks * site.block_size
    if settings.max_batch_total_tokens and total < settings.max_batch_prefill_tokens:
        text = f"got {total}, must be >= max_batch_prefill_tokens ({settings.max_batch_prefill_tokens})"
        raise SettingsError("max_batch_total_tokens", text)
    return resolved(settings, TgiOptions, block_size=site.block_size, num_blocks=blocks, max_batch_total_tokens=total)


def reasons(settings: TgiSettings, site: Site) -> dict[str, str]:
    """Where what the settings leave open comes from."""
    del settings, site
    return {"max_batch_total_tokens": "tokens of the cache"}


def widened(settings: TgiSettings, seats: int, tokens: int) -> TgiSettings:
    """The same rules for a probe: whoever waits is let in."""
    return replace(
        settings,
        max_batch_size=seats,
        max_batch_prefill_tokens=max(tokens, 1),
        max_batch_total_tokens=None,
        waiting_served_ratio=0.0,
    )
