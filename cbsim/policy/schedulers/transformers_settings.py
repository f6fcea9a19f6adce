"""What transformers' continuous batching may be told, and what it makes of it on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from cbsim.policy.kind import AtLeast, Below, Count, Natural, Settings, Share, Site, resolved
from cbsim.policy.limits import Limits

GIB = 1 << 30
VERSIONS = ("5.17",)  # whose rules these are
Gib = Annotated[float, AtLeast(0), Below(1e6)]
FIFO, PREFILL_FIRST = "transformers_fifo", "transformers_prefill_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSettings(Settings):
    """Hugging Face transformers 5.17, ContinuousBatchingConfig."""

    later: ClassVar[Mapping[str, str]] = {
        "sliding_window": "sliding-window layers",
        "sliding": "sliding-window layers",
    }
    max_batch_tokens: Count | None = None
    """Query tokens in a step; null: solved from memory, between 256 and 8192 if num_blocks is solved too."""
    max_requests_per_batch: Count = 1024
    """Requests in a step."""
    max_blocks_per_request: Natural = 32
    """Blocks of a request up to which a decode step takes the fast path; 0: no fast path."""
    safety_margin: Share | None = None
    """Share of the blocks kept free from prefills; null: 0.15 for fifo, 0 for prefill_first."""
    allow_block_sharing: bool = True
    """Share the blocks of common prefixes."""
    cpu_offload_gib: Gib = 0.0
    """Memory of the host for the KV of requests that lost their blocks, GiB; their cpu_offload_space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions(TransformersSettings):
    """ContinuousBatchingConfig's own names, all resolved."""

    block_size: int
    num_blocks: int
    max_batch_tokens: int
    safety_margin: float
    host_blocks: int = 0

    @property
    def scheduler_type(self) -> str:
        """`fifo` or `prefill_first`."""
        return self.name.removeprefix("transformers_")

    @property
    def limits(self) -> Limits:
        return Limits(rows=self.max_requests_per_batch, tokens=self.max_batch_tokens)


def resolve(settings: TransformersSettings, site: Site) -> TransformersOptions:
    """Step and cache as the library solves them."""
    size = site.transformers_size(settings.max_blocks_per_request, settings.max_batch_tokens)
    margin = 0.15 if settings.name == FIFO else 0.0
    return resolved(
        settings,
        TransformersOptions,
        block_size=site.block_size,
        num_blocks=size.num_blocks,
        max_batch_tokens=size.max_batch_tokens,
        safety_margin=margin if settings.safety_margin is None else settings.safety_margin,
        host_blocks=int(settings.cpu_offload_gib * GIB) // site.block_bytes,
    )


def settled(settings: TransformersSettings, options: TransformersOptions) -> TransformersSettings:
    """The step stays as it was solved, whatever the cache becomes."""
    return replace(settings, max_batch_tokens=options.max_batch_tokens)


def reasons(settings: TransformersSettings, site: Site) -> dict[str, str]:
    """Where what the settings leave open comes from."""
    equation = f"transformers' memory equation, on what the weights leave of {site.gpu}"
    return {"max_batch_tokens": equation, "num_blocks": equation, "safety_margin": f"that of {settings.name}"}


def widened(settings: TransformersSettings, seats: int, tokens: int) -> TransformersSettings:
    """The same rules with other sizes, for a probe."""
    return replace(settings, max_requests_per_batch=seats, max_batch_tokens=max(tokens, seats))
