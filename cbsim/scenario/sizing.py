"""The number of cache blocks that fit a GPU's memory by vLLM's rule, and the site that schedulers solve sizes on.

vLLM uses the memory that a trial run leaves free; the trial run is estimated here. Rules of other systems are with
their schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cbsim.errors import ScenarioError
from cbsim.policy.groups import Attention
from cbsim.scenario.shapes import Hardware, ModelShape

VLLM_RUNTIME_BYTES = 600_000_000
"""CUDA context, libraries, graphs and fragmentation: what a real vLLM 0.19 on an RTX 4090 with Llama-3.1-8B (2,588
blocks of 16 at fraction 0.9, 2,048 tokens, 256 requests) leaves unexplained by weights and activations."""
LOGIT_COPIES = 4  # float32 logits, their sorted copy, probabilities and their sum: the sampler's peak


class Step(NamedTuple):
    """The largest step: query tokens, and rows that sample."""

    tokens: int
    requests: int


def activation_bytes(model: ModelShape, step: Step) -> int:
    """Estimate the peak bytes of a step: hidden states, queries, keys and values, the feed-forward's two inputs and its
    product; then the sampler's copies of the logits.
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
    """Return the blocks of all layers, or of `layers`, in `fraction` of the memory beside weights and a step's peak, on
    each of `tensor` GPUs that share weights and heads (activations are counted whole). Raises ScenarioError.
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
    """The `policy.kind.Site` of a model on `tensor` GPUs, on which sizes are solved. `num_blocks`: as given."""

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

    def misfit(self, left_bytes: int, needed_bytes: int | None = None) -> ScenarioError:
        return _misfit(self.model, self.hardware, self.memory_fraction, left_bytes, self.num_blocks, needed_bytes or 0)


def _misfit(
    model: ModelShape, hardware: Hardware, fraction: float, left_bytes: int, blocks: int | None = None, needed: int = 0
) -> ScenarioError:
    memory, weights, left = (_gb(size) for size in (hardware.memory_bytes, model.weight_bytes, left_bytes))
    reason = f"{hardware.name} has {memory} and {model.name} {weights} of weights; fraction {fraction} leaves {left}"
    if blocks is None:
        return ScenarioError(f"kv_cache.memory_fraction: got {fraction}, too little for a cache: {reason}")
    return ScenarioError(f"kv_cache.num_blocks: got {blocks}, which need {_gb(needed)}: {reason}")


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
