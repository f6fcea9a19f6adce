"""What transformers' continuous batching may be told, and what it makes of it on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Annotated, Literal, NamedTuple

from cbsim.policy.groups import FULL, Attention, LayerGroup, Sight, pages_of
from cbsim.policy.kind import (
    AsText,
    AtLeast,
    Below,
    Count,
    Natural,
    Sectors,
    Settings,
    SettingsError,
    Share,
    Site,
    resolved,
)
from cbsim.policy.limits import Limits

GIB = 1 << 30
VERSIONS = ("5.17", "5.23")  # whose rules these are
BATCH_TOKENS = 8192  # of 5.23, unless given
SECTOR_BYTES = 128  # a sector has a multiple of them
Gib = Annotated[float, AtLeast(0), Below(1e6)]
FIFO, PREFILL_FIRST = "transformers_fifo", "transformers_prefill_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSettings(Settings):
    """Hugging Face transformers' ContinuousBatchingConfig."""

    version: Annotated[Literal["5.17", "5.23"], AsText()] = "5.17"
    """Whose rules: 5.17 or 5.23."""
    max_batch_tokens: Count | None = None
    """Query tokens in a step; null: 5.17 solves them from memory, between 256 and 8192 if num_blocks is solved too;
    5.23: 8192."""
    max_requests_per_batch: Count = 1024
    """Requests in a step."""
    max_blocks_per_request: Natural = 32
    """Blocks of a request up to which a decode step takes the fast path; 0: no fast path, as with any window."""
    safety_margin: Share | None = None
    """Share of the blocks kept free from prefills; null: 0.15 for fifo, 0 for prefill_first."""
    allow_block_sharing: bool = True
    """Share the blocks of common prefixes."""
    cpu_offload_gib: Gib = 0.0
    """Memory of the host for the KV of requests that lost their blocks, GiB; their cpu_offload_space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions(TransformersSettings):
    """ContinuousBatchingConfig's own names, all resolved. In 5.23 both numbers of blocks are those of whole sectors.
    `groups`: those of layers, if some have windows; then blocks are counted in 5.23 as pages, of which theirs are made.
    """

    block_size: int
    num_blocks: int
    max_batch_tokens: int
    safety_margin: float
    host_blocks: int = 0
    blocks_per_sector: int = 1
    groups: tuple[LayerGroup, ...] = ()

    @property
    def pages(self) -> list[int]:
        """Of a block, by group."""
        return pages_of(self.groups)

    @property
    def shares_prefixes(self) -> bool:
        """Are prompts looked up?"""
        return self.allow_block_sharing and not self.groups

    @property
    def window(self) -> int:
        """Tokens that any layer sees at most; 0 if one sees all."""
        spans = [group.attention.span for group in self.groups]
        return max(spans) if spans and all(spans) else 0

    @property
    def scheduler_type(self) -> str:
        """`fifo` or `prefill_first`."""
        return self.name.removeprefix("transformers_")

    @property
    def limits(self) -> Limits:
        return Limits(rows=self.max_requests_per_batch, tokens=self.max_batch_tokens)


class Cut(NamedTuple):
    """How the layers of a model share a cache: a page is of so many `layers`. No groups if all see everything."""

    layers: int
    groups: tuple[LayerGroup, ...] = ()

    @property
    def pages(self) -> list[int]:
        """Of a block of each group."""
        return pages_of(self.groups) if self.groups else [1]

    def per_sector(self, page_bytes: int) -> int:
        """Pages of a sector: a multiple of every group's blocks, and of SECTOR_BYTES."""
        return lcm(*[count * page_bytes for count in self.pages], SECTOR_BYTES) // page_bytes


def cut(layers: Sequence[Attention], block_size: int, version: str) -> Cut:
    """5.23: a group for each kind of layers, in order of appearance. 5.17: groups of as many layers each, the most that
    every kind can be cut into. No groups if all layers see everything.
    """
    kinds: dict[Attention, list[int]] = {}
    for layer, attention in enumerate(layers):
        kinds.setdefault(attention, []).append(layer)
    if kinds.keys() == {FULL}:
        return Cut(len(layers))
    size = gcd(*[len(members) for members in kinds.values()])
    groups: list[LayerGroup] = []
    for attention, members in kinds.items():
        step, ring = size if version == "5.17" else len(members), -(-attention.span // block_size)
        parts = [tuple(members[first : first + step]) for first in range(0, len(members), step)]
        groups += [LayerGroup(attention, part, block_size, ring) for part in parts]
    return Cut(size, tuple(groups))


def layer_groups(site: Site, version: str) -> Cut:
    """Those of the site's model. Raises SettingsError for layers that transformers has not."""
    pattern = site.attention
    windows = sorted({attention.span for attention in pattern if attention != FULL})
    if any(attention.sight is Sight.CHUNKED for attention in pattern):
        raise SettingsError(
            "name", "chunked layers (model.attention) are not for transformers: it has full and sliding"
        )
    if len(windows) > 1:
        raise SettingsError(
            "name", f"windows of {windows} tokens (model.attention): transformers has one for all layers"
        )
    return cut([pattern[layer % len(pattern)] for layer in range(site.layers)], site.block_size, version)


def resolve(settings: TransformersSettings, site: Site) -> TransformersOptions:
    """Step and cache as the library solves them."""
    made = layer_groups(site, settings.version)
    most, given = 0 if made.groups else settings.max_blocks_per_request, settings.max_batch_tokens
    unit = site.block_bytes * made.layers // site.layers
    if settings.version == "5.23":
        per = made.per_sector(unit)
        sectors = Sectors(per, made.layers, per // min(made.pages) * site.block_size, max(1, len(made.groups)))
        size = site.transformers_sectors(sectors, most, given or BATCH_TOKENS, settings.max_requests_per_batch)
    else:
        per, size = 1, site.transformers_size(most, given, made.layers, max(1, len(made.groups)))
    margin = 0.15 if settings.name == FIFO else 0.0
    return resolved(
        settings,
        TransformersOptions,
        block_size=site.block_size,
        num_blocks=size.num_blocks,
        max_batch_tokens=size.max_batch_tokens,
        max_blocks_per_request=most,
        safety_margin=margin if settings.safety_margin is None else settings.safety_margin,
        host_blocks=int(settings.cpu_offload_gib * GIB) // (per * unit) * per,
        blocks_per_sector=per,
        groups=made.groups,
    )


def settled(settings: TransformersSettings, options: TransformersOptions) -> TransformersSettings:
    """The step stays as it was solved, whatever the cache becomes."""
    return replace(settings, max_batch_tokens=options.max_batch_tokens)


def reasons(settings: TransformersSettings, site: Site) -> dict[str, str]:
    """Where what the settings leave open comes from."""
    equation = f"transformers' memory equation, on what the weights leave of {site.gpu}"
    tokens = "transformers 5.23's" if settings.version == "5.23" else equation
    return {"max_batch_tokens": tokens, "num_blocks": equation, "safety_margin": f"that of {settings.name}"}


def widened(settings: TransformersSettings, seats: int, tokens: int) -> TransformersSettings:
    """The same rules with other sizes, for a probe."""
    return replace(settings, max_requests_per_batch=seats, max_batch_tokens=max(tokens, seats))
