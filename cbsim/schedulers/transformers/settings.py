"""Settings of transformers' continuous batching, and the sizes that it derives from them on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, gcd, lcm
from typing import Annotated, Literal, NamedTuple

from cbsim.errors import ScenarioError
from cbsim.policy.groups import FULL, Attention, LayerGroup, pages_of
from cbsim.policy.kind import Count, Model, Natural, Settings, Share, Site, require, resolved
from cbsim.policy.loop import Limits
from cbsim.policy.marks import SLOTS, STEP_TOKENS, AsText, AtLeast, Below, Solved

GIB = 1 << 30
VERSIONS = ("5.17", "5.23")  # the versions whose rules these are
BATCH_TOKENS = 8192  # of 5.23, unless given
INDEX_BYTES = 4  # int32
LEAST_BATCH_TOKENS, MOST_BATCH_TOKENS = 256, 8192  # of 5.17, unless given
SECTOR_BYTES = 128  # a sector has a multiple of them
Gib = Annotated[float, AtLeast(0), Below(1e6)]
FIFO, PREFILL_FIRST = "transformers_fifo", "transformers_prefill_first"
MEMORY = "transformers' memory equation, on what the weights leave of {gpu}"


def _tokens_source(settings: TransformersSettings, site: Site) -> str:
    return "transformers 5.23's" if settings.version == "5.23" else MEMORY.format(gpu=site.gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSettings(Settings):
    """Hugging Face transformers' ContinuousBatchingConfig."""

    version: Annotated[Literal["5.17", "5.23"], AsText()] = "5.17"  #: Whose rules: 5.17 or 5.23.
    max_batch_tokens: Annotated[Count | None, Solved(_tokens_source, pinned=True), STEP_TOKENS] = None
    """Query tokens in a step; null: 5.17 solves them from memory, between 256 and 8192 if num_blocks is solved too;
    5.23: 8192."""
    max_requests_per_batch: Annotated[Count, SLOTS] = 1024  #: Requests in a step.
    max_blocks_per_request: Natural = 32
    """Blocks of a request up to which a decode step takes the fast path; 0: no fast path, as with any window."""
    safety_margin: Annotated[Share | None, Solved("that of {name}")] = None
    """Share of the blocks kept free from prefills; null: 0.15 for fifo, 0 for prefill_first."""
    allow_block_sharing: bool = True  #: Share the blocks of common prefixes.
    cpu_offload_gib: Gib = 0.0  #: Host memory, GiB, for KV of requests that lost their blocks; their cpu_offload_space.


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions(TransformersSettings):
    """The options of ContinuousBatchingConfig, all resolved. In 5.23 both numbers of blocks are those of whole sectors.
    `groups`: those of layers, if some have windows; then 5.23's blocks are counted as pages, of which theirs are made.
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
        """The pages of a block, by group."""
        return pages_of(self.groups)

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts are looked up in the cache."""
        return self.allow_block_sharing and not self.groups

    @property
    def window(self) -> int:
        """The tokens that any layer sees at most; 0 if one sees all."""
        spans = [group.attention.span for group in self.groups]
        return max(spans) if spans and all(spans) else 0

    @property
    def limits(self) -> Limits:
        return Limits(rows=self.max_requests_per_batch, tokens=self.max_batch_tokens)


class Cut(NamedTuple):
    """The layers' shares of a cache: a page has `layers` layers. No groups if all layers see everything."""

    layers: int
    groups: tuple[LayerGroup, ...] = ()

    def per_sector(self, page_bytes: int) -> int:
        """Return the pages of a sector: a multiple of every group's blocks, and of SECTOR_BYTES."""
        return lcm(*[count * page_bytes for count in pages_of(self.groups)], SECTOR_BYTES) // page_bytes


def cut(layers: Sequence[Attention], block_size: int, version: str) -> Cut:
    """Return how the layers share a cache. 5.23: a group for each kind of layers, in order of appearance. 5.17: groups
    of as many layers each, the most that every kind can be cut into. No groups if all layers see everything.
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
    """Return the groups of the site's model. Raises SettingsError for windows that transformers does not have."""
    pattern = site.attention
    windows = sorted({attention.span for attention in pattern if attention != FULL})
    message = f"windows of {windows} tokens (model.attention): transformers has one for all layers"
    require(len(windows) <= 1, "name", message)
    return cut([pattern[layer % len(pattern)] for layer in range(site.layers)], site.block_size, version)


def resolve(settings: TransformersSettings, site: Site) -> TransformersOptions:
    """Return the options, with step and cache as the library solves them."""
    made = layer_groups(site, settings.version)
    most, stated = 0 if made.groups else settings.max_blocks_per_request, settings.max_batch_tokens
    unit = site.block_bytes * made.layers // site.layers
    if settings.version == "5.23":
        per, least = made.per_sector(unit), min(pages_of(made.groups))
        sectors = Sectors(per, made.layers, per // least * site.block_size, max(1, len(made.groups)))
        sizes = {"max_blocks_per_request": most, "max_requests": settings.max_requests_per_batch}
        costs = sector_costs(site.model, sectors, site.block_size, depth=site.depth, **sizes)
        size = fit_5_23(site, costs, sectors, stated or BATCH_TOKENS)
    else:
        per, size = 1, fit_5_17(site, most, stated, made.layers, max(1, len(made.groups)))
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


class Size(NamedTuple):
    """A solution of the memory equation: query tokens in a step, cache blocks."""

    max_batch_tokens: int
    num_blocks: int


class Peak(NamedTuple):
    """The bytes for a batch token and for a cache token, at one of the peaks of a step."""

    per_batch_token: int
    per_cache_token: int


def transformers_peaks(
    model: Model, depth: int, max_blocks_per_request: int, layers: int | None = None, groups: int = 1
) -> tuple[Peak, Peak]:
    """Return the equation's coefficients at the output layer and in attention; inputs and outputs exist `depth` times.
    A token of the cache lies in `layers` layers, those of one of `groups`; by default in all.
    """
    width, page = model.dtype_bytes, model.kv_heads * model.head_dim
    per_batch = _input_bytes(depth, max_blocks_per_request, groups)
    per_cache = model.kv_bytes_per_token // model.layers * (layers or model.layers) + depth * 8 * groups
    logits = model.hidden * width + model.vocab * 4
    states = width * (model.hidden + model.heads * model.head_dim + 2 * page)
    return Peak(logits + per_batch, per_cache), Peak(states + per_batch, per_cache + 2 * page * width)


def _input_bytes(depth: int, max_blocks_per_request: int, groups: int = 1) -> int:
    """Return the bytes of inputs and outputs of a batch token; each of the groups of layers has its own indices."""
    indices = groups * (max_blocks_per_request * INDEX_BYTES + 8 + 8)
    return depth * (7 * INDEX_BYTES + INDEX_BYTES + indices)


def footprint_bytes(size: Size, block_size: int, peaks: tuple[Peak, ...]) -> int:
    """Return the memory, bytes, that a solution takes at its worse peak."""
    tokens = size.num_blocks * block_size
    return max(p.per_batch_token * size.max_batch_tokens + p.per_cache_token * tokens for p in peaks)


def fit_5_17(
    site: Site, max_blocks_per_request: int, max_batch_tokens: int | None, layers: int | None = None, groups: int = 1
) -> Size:
    """Return transformers 5.17's choice if only the weights are allocated before, with `layers` layers in a group.

    It solves an equation: M query tokens in a step and N tokens of cache cost

        memory = cm * M + cn * N + cmn * M * N + cmm * M^2  bytes

    at each of two peaks of a step (output layer, attention), and the smaller solution counts. With flash attention
    there are no masks and cmn = cmm = 0. One number is found from the other, or both if neither is given. Raises
    ScenarioError.
    """
    available, num_blocks, block_size = _available_bytes(site), site.num_blocks, site.block_size
    peaks = transformers_peaks(site.model, site.depth, max_blocks_per_request, layers, groups)
    if max_batch_tokens is None and num_blocks is None:
        tenth = min(int(int(available / (p.per_cache_token + 0.1 * p.per_batch_token)) * 0.1) for p in peaks)
        max_batch_tokens = max(min(MOST_BATCH_TOKENS, tenth), LEAST_BATCH_TOKENS)
    if num_blocks is None:
        assert max_batch_tokens is not None
        left = [(available - p.per_batch_token * max_batch_tokens) / p.per_cache_token for p in peaks]
        num_blocks = min(floor(tokens) // block_size for tokens in left)
    if max_batch_tokens is None:
        tokens = num_blocks * block_size
        max_batch_tokens = min(int((available - p.per_cache_token * tokens) / p.per_batch_token) for p in peaks)
    size = Size(max_batch_tokens, num_blocks)
    needed = footprint_bytes(size, site.block_size, peaks)
    if min(size) < 1 or needed > available:
        raise site.misfit(available, needed)
    return size


def _available_bytes(site: Site) -> int:
    """Return the bytes left beside the weights. Raises ScenarioError for what transformers does not support."""
    if site.gpus > 1:
        raise ScenarioError(f"cost.tensor_parallel: got {site.gpus}, must be 1: transformers' sizes are of one GPU")
    if site.model.kv_dtype:
        raise ScenarioError(
            f"model.kv_dtype: got {site.model.kv_dtype}, must be null: transformers' cache has the model's"
        )
    return int((site.memory_bytes - site.model.weight_bytes) * site.memory_fraction)


class Sectors(NamedTuple):
    """The sectors of transformers 5.23's cache: each of `pages` pages, which are blocks of `layers` layers; at most
    `tokens` tokens lie in one, those of the smallest blocks; `kinds` of layers share them.
    """

    pages: int
    layers: int
    tokens: int
    kinds: int


class SectorCosts(NamedTuple):
    """The bytes that 5.23 counts: fixed, per batch token, per sector of the cache with what steps take for it."""

    fixed: int
    per_batch_token: int
    per_sector: int

    def needed(self, tokens: int, sectors: int) -> int:
        return self.fixed + tokens * self.per_batch_token + sectors * self.per_sector


def sector_costs(
    model: Model, sectors: Sectors, block_size: int, *, depth: int, max_blocks_per_request: int, max_requests: int
) -> SectorCosts:
    """Return the costs with flash attention. Logits are computed only of rows that sample."""
    width, page = model.dtype_bytes, model.kv_heads * model.head_dim
    logits = model.hidden * width + model.vocab * 4
    states = width * (model.hidden + model.heads * model.head_dim + 4 * page)
    tokens, kinds = sectors.tokens, sectors.kinds
    sector = sectors.pages * block_size * model.kv_bytes_per_token // model.layers * sectors.layers
    return SectorCosts(
        2 * sector + max_requests * logits,
        states + _input_bytes(depth, max_blocks_per_request, kinds),
        sector + tokens * (2 * page * width + 8 * depth * kinds),
    )


def fit_5_23(site: Site, costs: SectorCosts, sectors_of: Sectors, max_batch_tokens: int) -> Size:
    """Return transformers 5.23's choice for `max_batch_tokens`, the weights being all that is allocated before: the
    sectors that fit, or those of the blocks given; the cache is counted in pages. Raises ScenarioError.
    """
    available = _available_bytes(site)
    sectors = (available - costs.needed(max_batch_tokens, 0)) // costs.per_sector
    if site.num_blocks is not None:
        sectors = -(-site.num_blocks * site.model.layers // (sectors_of.pages * sectors_of.layers))
    needed = costs.needed(max_batch_tokens, sectors)
    if sectors < 1 or needed > available:
        raise site.misfit(available, needed)
    return Size(max_batch_tokens, sectors * sectors_of.pages)
