"""How many cache blocks fit a GPU's memory, by the rules of the system that is simulated.

transformers 5.17 solves an equation: M query tokens in a step and N tokens of cache cost

    memory = cm * M + cn * N + cmn * M * N + cmm * M^2  bytes

at each of two peaks of a step (output layer, attention), and the smaller solution counts. With flash attention there
are no masks and cmn = cmm = 0. 5.23 is given M, and counts the sectors of the cache that fit beside it. vLLM takes what
a trial run leaves free; the trial run is estimated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import NamedTuple

from cbsim.policy.groups import Attention
from cbsim.policy.kind import Sectors, Size
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.shapes import Hardware, ModelShape

INDEX_BYTES = 4  # int32
LEAST_BATCH_TOKENS, MOST_BATCH_TOKENS = 256, 8192
VLLM_RUNTIME_BYTES = 600_000_000
"""CUDA context, libraries, graphs and fragmentation: what a real vLLM 0.19 on an RTX 4090 with Llama-3.1-8B (2,588
blocks of 16 at fraction 0.9, 2,048 tokens, 256 requests) leaves unexplained by weights and activations."""
LOGIT_COPIES = 4  # float32 logits, their sorted copy, probabilities and their sum: the sampler's peak


class Peak(NamedTuple):
    """Bytes a batch token and bytes a cache token, at one of the peaks of a step."""

    per_batch_token: int
    per_cache_token: int


def transformers_peaks(
    model: ModelShape, depth: int, max_blocks_per_request: int, layers: int | None = None, groups: int = 1
) -> tuple[Peak, Peak]:
    """The equation's coefficients at the output layer and in attention; inputs and outputs exist `depth` times. A token
    of the cache lies in so many layers, those of one of `groups`; by default in all.
    """
    width, page = model.dtype_bytes, model.kv_heads * model.head_dim
    per_batch = _input_bytes(depth, max_blocks_per_request, groups)
    per_cache = model.kv_bytes_per_token // model.layers * (layers or model.layers) + depth * 8 * groups
    logits = model.hidden * width + model.vocab * 4
    states = width * (model.hidden + model.heads * model.head_dim + 2 * page)
    return Peak(logits + per_batch, per_cache), Peak(states + per_batch, per_cache + 2 * page * width)


def _input_bytes(depth: int, max_blocks_per_request: int, groups: int = 1) -> int:
    """Inputs and outputs of a batch token; each of the groups of layers has its own indices."""
    indices = groups * (max_blocks_per_request * INDEX_BYTES + 8 + 8)
    return depth * (7 * INDEX_BYTES + INDEX_BYTES + indices)


def transformers_size(
    available_bytes: int, block_size: int, peaks: tuple[Peak, ...], max_batch_tokens: int | None, num_blocks: int | None
) -> Size:
    """Transformers' solution: one number is found from the other, or both if neither is given."""
    if max_batch_tokens is None and num_blocks is None:
        tenth = min(int(int(available_bytes / (p.per_cache_token + 0.1 * p.per_batch_token)) * 0.1) for p in peaks)
        max_batch_tokens = max(min(MOST_BATCH_TOKENS, tenth), LEAST_BATCH_TOKENS)
    if num_blocks is None:
        assert max_batch_tokens is not None
        left = [(available_bytes - p.per_batch_token * max_batch_tokens) / p.per_cache_token for p in peaks]
        num_blocks = min(floor(tokens) // block_size for tokens in left)
    if max_batch_tokens is None:
        tokens = num_blocks * block_size
        max_batch_tokens = min(int((available_bytes - p.per_cache_token * tokens) / p.per_batch_token) for p in peaks)
    return Size(max_batch_tokens, num_blocks)


def footprint_bytes(size: Size, block_size: int, peaks: tuple[Peak, ...]) -> int:
    """Memory that a solution takes at its worse peak."""
    tokens = size.num_blocks * block_size
    return max(p.per_batch_token * size.max_batch_tokens + p.per_cache_token * tokens for p in peaks)


def fit_transformers(
    model: ModelShape,
    hardware: Hardware,
    *,
    fraction: float,
    block_size: int,
    depth: int,
    max_blocks_per_request: int,
    max_batch_tokens: int | None,
    num_blocks: int | None,
    layers: int | None = None,
    groups: int = 1,
) -> Size:
    """What transformers 5.17 would choose, the weights being all that is allocated before. Raises ScenarioError."""
    _refuse_kv_dtype(model)
    free = hardware.memory_bytes - model.weight_bytes
    available = int(free * fraction)
    peaks = transformers_peaks(model, depth, max_blocks_per_request, layers, groups)
    size = transformers_size(available, block_size, peaks, max_batch_tokens, num_blocks)
    needed = footprint_bytes(size, block_size, peaks)
    if min(size) < 1 or needed > available:
        raise _misfit(model, hardware, fraction, available, num_blocks, needed)
    return size


class SectorCosts(NamedTuple):
    """Bytes that 5.23 counts: in any case, a batch token, and a sector of the cache with what steps take for it."""

    fixed: int
    per_batch_token: int
    per_sector: int

    def needed(self, tokens: int, sectors: int) -> int:
        return self.fixed + tokens * self.per_batch_token + sectors * self.per_sector


def sector_costs(
    model: ModelShape,
    sectors: Sectors,
    block_size: int,
    *,
    depth: int,
    max_blocks_per_request: int,
    max_requests: int,
    logits_to_keep: bool = True,
) -> SectorCosts:
    """With flash attention. `logits_to_keep`: the model computes the logits of rows that sample, and no others."""
    width, page = model.dtype_bytes, model.kv_heads * model.head_dim
    logits = model.hidden * width + model.vocab * 4
    states = width * (model.hidden + model.heads * model.head_dim + 4 * page)
    tokens, kinds = sectors.tokens, sectors.kinds
    sector = sectors.pages * block_size * model.kv_bytes_per_token // model.layers * sectors.layers
    return SectorCosts(
        2 * sector + (max_requests * logits if logits_to_keep else 0),
        max(0 if logits_to_keep else logits, states) + _input_bytes(depth, max_blocks_per_request, kinds),
        sector + tokens * (2 * page * width + 8 * depth * kinds),
    )


def fit_sectors(
    model: ModelShape,
    hardware: Hardware,
    costs: SectorCosts,
    *,
    fraction: float,
    sectors_of: Sectors,
    max_batch_tokens: int,
    num_blocks: int | None,
) -> Size:
    """What transformers 5.23 would choose, the weights being all that is allocated before; the cache is counted in
    pages. Raises ScenarioError.
    """
    _refuse_kv_dtype(model)
    available = int((hardware.memory_bytes - model.weight_bytes) * fraction)
    sectors = (available - costs.needed(max_batch_tokens, 0)) // costs.per_sector
    if num_blocks is not None:
        sectors = -(-num_blocks * model.layers // (sectors_of.pages * sectors_of.layers))
    needed = costs.needed(max_batch_tokens, sectors)
    if sectors < 1 or needed > available:
        raise _misfit(model, hardware, fraction, available, num_blocks, needed)
    return Size(max_batch_tokens, sectors * sectors_of.pages)


def _refuse_kv_dtype(model: ModelShape) -> None:
    if model.kv_dtype:
        raise ScenarioError(f"model.kv_dtype: got {model.kv_dtype}, must be null: transformers' cache has the model's")


class Step(NamedTuple):
    """The largest step: query tokens, and rows that sample."""

    tokens: int
    requests: int


def activation_bytes(model: ModelShape, step: Step) -> int:
    """Estimated peak of a step: hidden states, queries, keys and values, the feed-forward's two inputs and its product;
    then the sampler's copies of the logits.
    """
    states = 2 * model.hidden + (model.heads + 2 * model.kv_heads) * model.head_dim + 3 * model.intermediate
    return step.tokens * states * model.dtype_bytes + LOGIT_COPIES * step.requests * model.vocab * 4


def fit_vllm(
    model: ModelShape,
    hardware: Hardware,
    *,
    fraction: float,
    block_size: int,
    step: Step,
    tensor: int = 1,
    layers: int | None = None,
) -> int:
    """Blocks of all layers, or of so many, in `fraction` of the memory beside weights and a step's peak, on each of
    `tensor` GPUs that share weights and heads (activations are counted whole). Raises ScenarioError.
    """
    peak = activation_bytes(model, step) + VLLM_RUNTIME_BYTES
    left = int(hardware.memory_bytes * fraction) - model.shard_bytes(tensor) - peak
    block_bytes = block_size * model.kv_bytes_per_token // model.layers * (layers or model.layers)
    blocks = left * tensor // block_bytes
    if blocks < 2:
        raise _misfit(model, hardware, fraction, left)
    return blocks


@dataclass(frozen=True, slots=True)
class Place:
    """Where a scheduler's sizes come from: `policy.kind.Site` for a model on `tensor` GPUs. `num_blocks`: as given."""

    model: ModelShape
    hardware: Hardware
    depth: int
    block_size: int
    memory_fraction: float
    num_blocks: int | None
    tensor: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.model.kv_bytes_per_token // self.tensor

    @property
    def max_position(self) -> int:
        return self.model.max_position

    @property
    def layers(self) -> int:
        return self.model.layers

    @property
    def attention(self) -> Sequence[Attention]:
        return self.model.pattern

    @property
    def gpu(self) -> str:
        return self.hardware.name

    @property
    def memory_bytes(self) -> int:
        return self.hardware.memory_bytes

    def blocks(self, tokens: int, requests: int, layers: int | None = None) -> int:
        if self.num_blocks is not None:
            return self.num_blocks
        return fit_vllm(
            self.model,
            self.hardware,
            fraction=self.memory_fraction,
            block_size=self.block_size,
            step=Step(tokens, requests),
            tensor=self.tensor,
            layers=layers,
        )

    def transformers_size(
        self, max_blocks_per_request: int, max_batch_tokens: int | None, layers: int, groups: int
    ) -> Size:
        self._refuse_tensor()
        return fit_transformers(
            self.model,
            self.hardware,
            fraction=self.memory_fraction,
            block_size=self.block_size,
            depth=self.depth,
            max_blocks_per_request=max_blocks_per_request,
            max_batch_tokens=max_batch_tokens,
            num_blocks=self.num_blocks,
            layers=layers,
            groups=groups,
        )

    def transformers_sectors(
        self, sectors: Sectors, max_blocks_per_request: int, max_batch_tokens: int, max_requests: int
    ) -> Size:
        self._refuse_tensor()
        costs = sector_costs(
            self.model,
            sectors,
            self.block_size,
            depth=self.depth,
            max_blocks_per_request=max_blocks_per_request,
            max_requests=max_requests,
        )
        return fit_sectors(
            self.model,
            self.hardware,
            costs,
            fraction=self.memory_fraction,
            sectors_of=sectors,
            max_batch_tokens=max_batch_tokens,
            num_blocks=self.num_blocks,
        )

    def _refuse_tensor(self) -> None:
        if self.tensor > 1:
            raise ScenarioError(
                f"cost.tensor_parallel: got {self.tensor}, must be 1: transformers' sizes are of one GPU"
            )


def _misfit(
    model: ModelShape, hardware: Hardware, fraction: float, left_bytes: int, blocks: int | None = None, needed: int = 0
) -> ScenarioError:
    memory, weights, left = (_gb(size) for size in (hardware.memory_bytes, model.weight_bytes, left_bytes))
    text = f"{hardware.name} has {memory} and {model.name} {weights} of weights; fraction {fraction} leaves {left}"
    if blocks is None:
        return ScenarioError(f"kv_cache.memory_fraction: got {fraction}, too little for a cache: {text}")
    return ScenarioError(f"kv_cache.num_blocks: got {blocks}, which need {_gb(needed)}: {text}")


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
