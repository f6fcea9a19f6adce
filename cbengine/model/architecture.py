"""What a decoder of the Llama family is made of: the shape a scenario gives, and what only its weights' config says."""

from __future__ import annotations

from dataclasses import dataclass

from cbsim.policy.groups import FULL, Attention
from cbsim.scenario.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's stretched rotary frequencies (`rope_type: llama3` in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A dense decoder: grouped-query attention with rotary positions, RMS norms, gated SiLU feed-forward.

    `qk_norm`: queries and keys are RMS-normed a head before the rotation (Qwen3). `qkv_bias`: queries, keys and values
    have biases (Qwen2.5); nothing else has. `attention`: what layers see, layer by layer, and again from the first.
    `end_tokens`: ids that end a text.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool
    max_position: int
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    attention: tuple[Attention, ...] = (FULL,)
    end_tokens: tuple[int, ...] = ()

    def sees(self, layer: int) -> Attention:
        """What a layer sees of a sequence."""
        return self.attention[layer % len(self.attention)]


def from_shape(shape: ModelShape) -> Architecture:
    """The architecture that a scenario's model means when no weights are given; unscaled rotary positions."""
    return Architecture(
        name=shape.name,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate,
        vocab=shape.vocab,
        tied_embeddings=shape.tied_embeddings,
        max_position=shape.max_position,
        qk_norm=shape.qk_norm,
        qkv_bias=shape.qkv_bias,
        attention=shape.pattern,
    )
