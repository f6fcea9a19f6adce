"""What beam search may be told, and what it makes of it on a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from cbsim.policy.kind import AtLeast, Count, Settings, SettingsError, Site, resolved
from cbsim.policy.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSettings(Settings):
    """Beam search: every request is answered by the best of several texts that grow side by side."""

    name: str = "beam"
    num_beams: Annotated[int, AtLeast(1)] = 4
    """Texts of a request; each is a request of the workload, with a row of its own."""
    max_num_seqs: Count = 256
    """Texts that may run, all beams counted."""
    max_num_batched_tokens: Count = 2048
    """Query tokens in a step."""

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, field) < self.num_beams:
                text = f"got {getattr(self, field)}, must be >= num_beams ({self.num_beams})"
                raise SettingsError(field, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions(BeamSettings):
    """All resolved."""

    block_size: int
    num_blocks: int

    @property
    def limits(self) -> Limits:
        return Limits(seats=self.max_num_seqs, tokens=self.max_num_batched_tokens)


def resolve(settings: BeamSettings, site: Site) -> BeamOptions:
    """The cache beside a full step."""
    blocks = site.blocks(settings.max_num_batched_tokens, settings.max_num_seqs)
    return resolved(settings, BeamOptions, block_size=site.block_size, num_blocks=blocks)


def widened(settings: BeamSettings, seats: int, tokens: int) -> BeamSettings:
    """One text a request, for a probe."""
    return replace(settings, num_beams=1, max_num_seqs=seats, max_num_batched_tokens=max(tokens, seats))
