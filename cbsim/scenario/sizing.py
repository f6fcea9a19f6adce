"""The number of cache blocks that fit a GPU's memory by vLLM's rule, and the site that schedulers solve sizes on.

vLLM uses the memory that a trial run leaves free; the trial run is estimated here. Rules of other systems are with
their schedulers.
"""

from __future__ import annotations

from cbsim.errors import ScenarioError
from cbsim.scenario.shapes import Hardware, ModelShape

VLLM_RUNTIME_BYTES = 600_000_000
"""CUDA context, libraries, graphs and fragmentation: what a real vLLM 0.19 on an RTX 4090 with Llama-3.1-8B (2,588
blocks of 16 at fraction 0.9, 2,048 tokens, 256 requests) leaves unexplained by weights and activations."""
LOGIT_COPIES = 4  # float32 logits, their sorted copy, probabilities and their sum: the sampler's peak


def activation_bytes(model: ModelShape, tokens: int, requests: int) -> int:
    """Estimate the peak bytes of a step of so many query tokens and rows that sample: hidden states, queries, keys and
    values, the feed-forward's two inputs and its product; then the sampler's copies of the logits.
    """
    states = 2 * model.hidden + (model.heads + 2 * model.kv_heads) * model.head_dim + 3 * model.intermediate
    return tokens * states * model.dtype_bytes + LOGIT_COPIES * requests * model.vocab * 4


class Place:
    """The `policy.kind.Site` of a model on `gpus` GPUs, on which sizes are solved. `num_blocks`: as given."""

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        depth: int,
        block_size: int,
        memory_fraction: float,
        num_blocks: int | None,
        gpus: int = 1,
    ) -> None:
        self.model, self.hardware, self.depth, self.gpus = model, hardware, depth, gpus
        self.block_size, self.memory_fraction, self.num_blocks = block_size, memory_fraction, num_blocks
        self.block_bytes = block_size * model.kv_bytes_per_token // gpus
        self.max_position, self.layers, self.attention = model.max_position, model.layers, model.pattern
        self.gpu, self.memory_bytes = hardware.name, hardware.memory_bytes

    def blocks(self, tokens: int, requests: int, layers: int | None = None) -> int:
        """Return the blocks as given, else those of all layers, or of `layers`, in the fraction of the memory beside
        weights and the peak of a step, on GPUs that share weights and heads (activations are counted whole). Raises
        ScenarioError.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        peak = activation_bytes(self.model, tokens, requests) + VLLM_RUNTIME_BYTES
        left = int(self.memory_bytes * self.memory_fraction) - self.model.shard_bytes(self.gpus) - peak
        block_bytes = self.block_size * self.model.kv_bytes_per_token // self.layers * (layers or self.layers)
        blocks = left * self.gpus // block_bytes
        if blocks < 2:
            raise self.misfit(left)
        return blocks

    def misfit(self, left_bytes: int, needed_bytes: int | None = None) -> ScenarioError:
        sizes = (self.memory_bytes, self.model.weight_bytes, left_bytes, needed_bytes or 0)
        memory, weights, left, needed = (f"{size / 1e9:.2f} GB" for size in sizes)
        fraction = self.memory_fraction
        reason = (
            f"{self.gpu} has {memory} and {self.model.name} {weights} of weights; fraction {fraction} leaves {left}"
        )
        if self.num_blocks is None:
            return ScenarioError(f"kv_cache.memory_fraction: got {fraction}, too little for a cache: {reason}")
        return ScenarioError(f"kv_cache.num_blocks: got {self.num_blocks}, which need {needed}: {reason}")
