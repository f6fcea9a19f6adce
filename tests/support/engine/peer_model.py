"""Architectures of all families, and transformers' own model of one, as reports/hardware/peer.py makes it."""

from __future__ import annotations

from typing import Any

from cbengine.model.weights import Architecture, RopeScaling
from support.scripts import script

LLAMA = Architecture(
    name="tiny", layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=199, max_position=256
)
NEAR, FAR = "sliding 6", "sliding 17"
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)


def to_transformers(architecture: Architecture, tensors: dict[str, Any]) -> Any:
    """transformers' model of these tensors; imported when it is needed, as not every environment has the library."""
    return script("hardware/peer").to_transformers(architecture, tensors)


def changed(architecture: Architecture = LLAMA, **fields: Any) -> Architecture:
    """The architecture with other fields."""
    return Architecture(**dict(architecture) | fields)


ARCHITECTURES = {
    "llama": LLAMA,
    "llama, no groups": changed(kv_heads=4),
    "llama, one kv head": changed(kv_heads=1),
    "llama, tied": changed(tied_embeddings=True, norm_eps=1e-6),
    "llama 3.1": changed(rope_scaling=SCALED, rope_theta=10_000.0, end_tokens=(3,)),
    "qwen2": changed(qkv_bias=True, rope_theta=1e6, norm_eps=1e-6, end_tokens=(2, 5)),
    "qwen2, tied": changed(qkv_bias=True, head_dim=32, kv_heads=1, tied_embeddings=True),
    "qwen3": changed(qk_norm=True, head_dim=32, rope_theta=1e6, norm_eps=1e-6),
    "qwen3, tied": changed(qk_norm=True, kv_heads=1, tied_embeddings=True),
    "mistral": changed(attention=(NEAR,), norm_eps=1e-6),
    "qwen2, the last layer slides": changed(qkv_bias=True, attention=("full", "full", NEAR)),
    "qwen3, all slide": changed(qk_norm=True, attention=(NEAR,)),
    "qwen3, five of six slide": changed(qk_norm=True, layers=6, attention=(*[NEAR] * 5, "full")),
}
