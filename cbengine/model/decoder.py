"""The transformer: embeddings, decoder layers and output layer of the Llama family. It handles rows, not requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from cbengine.model.kvcache import KvCache
from cbengine.model.ops import Rows, TorchOps
from cbengine.model.ranks import ALONE, Group
from cbengine.model.weights import Architecture, RopeScaling


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer; matrices with the same input are joined into one."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]: queries, keys, values
    qkv_bias: Tensor | None  # [(heads + 2 kv_heads) * head_dim]
    qk_norms: tuple[Tensor, Tensor] | None  # [head_dim] each
    o: Tensor  # [hidden, heads * head_dim]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


class Model:
    """A decoder with its weights. Sequences are at most `positions` tokens long. `tensors` has the names and shapes of
    `weights.expected` and is emptied, a layer at a time, so that the parts of a joined matrix are freed before the next
    is made. Nothing requires a gradient. With a `group` architecture and tensors are a rank's part of a model.
    """

    def __init__(
        self,
        architecture: Architecture,
        tensors: dict[str, Tensor],
        ops: TorchOps,
        positions: int,
        group: Group | None = None,
    ) -> None:
        self.architecture, self.ops, self._sees = architecture, ops, architecture.layer_attention
        self.group = group or Group(ALONE)
        self.embedding = tensors.pop("model.embed_tokens.weight")
        head = self.embedding if architecture.tied_embeddings else tensors.pop("lm_head.weight")
        self.head = self.group.share(head)
        self.layers = [_layer(tensors, f"model.layers.{i}", architecture) for i in range(architecture.layers)]
        self.norm = tensors.pop("model.norm.weight")
        assert not tensors, f"weights that no layer takes: {list(tensors)}"
        self.rotation = rotation(architecture, positions).to(self.embedding.device)

    def forward(self, tokens: Tensor, cache: KvCache, *by_group: Rows) -> Tensor:
        """Map ids [T] to normed hidden [T, hidden]; writes `cache`. Groups' rows differ in tables and slots."""
        eps, ops, residual = self.architecture.norm_eps, self.ops, embedding(tokens, self.embedding)
        reduce = self.group.reduce
        norms_after = (*(layer.input_norm for layer in self.layers[1:]), self.norm)
        x = ops.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, (layer, norm_after) in enumerate(zip(self.layers, norms_after, strict=True)):
            (keys, values), rows = cache.layer(i), by_group[cache.group(i)]
            qkv = linear(x, layer.qkv, layer.qkv_bias)
            queries = ops.rotate_and_cache(qkv, self.rotation, layer.qk_norms, eps, keys, values, rows)
            x = reduce(linear(ops.attention(queries, keys, values, rows, self._sees[i]).flatten(1), layer.o))
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = reduce(linear(ops.silu_mul(linear(x, layer.gate_up)), layer.down))
            x, residual = ops.add_rms_norm(x, residual, norm_after, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Map rows [S, hidden] of what `forward` returned to float32 [S, vocab]."""
        return self.group.gather(linear(hidden, self.head), self.architecture.vocab).float()


def rotation(architecture: Architecture, positions: int) -> Tensor:
    """Return cosines and sines of every position and pair of a head: float32 [positions, 2, head_dim / 2], on the CPU.
    They are computed in float32 as in transformers, because models are trained with its rounding of the angles.
    """
    exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents
    if architecture.rope_scaling is not None:
        frequencies = _stretched(frequencies, architecture.rope_scaling)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return Llama 3.1's frequencies (transformers, `_compute_llama3_parameters`). A wave that turns more than
    high_freq_factor times over the original context stays, one that turns less than low_freq_factor times is stretched
    by `factor`; in between the two are mixed, linearly in the number of turns.
    """
    turns = scaling.original_max_position / (2 * math.pi / frequencies)
    unscaled = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    unscaled = unscaled.clamp(0.0, 1.0)
    return unscaled * frequencies + (1.0 - unscaled) * frequencies / scaling.factor


def _layer(tensors: dict[str, Tensor], prefix: str, architecture: Architecture) -> Layer:
    def take(name: str, kind: str = "weight") -> Tensor:
        return tensors.pop(f"{prefix}.{name}.{kind}")

    biases = [take(f"self_attn.{part}_proj", "bias") for part in "qkv"] if architecture.qkv_bias else []
    return Layer(
        input_norm=take("input_layernorm"),
        qkv=torch.cat([take(f"self_attn.{part}_proj") for part in "qkv"]),
        qkv_bias=torch.cat(biases) if biases else None,
        qk_norms=(take("self_attn.q_norm"), take("self_attn.k_norm")) if architecture.qk_norm else None,
        o=take("self_attn.o_proj"),
        post_norm=take("post_attention_layernorm"),
        gate_up=torch.cat([take(f"mlp.{part}_proj") for part in ("gate", "up")]),
        down=take("mlp.down_proj"),
    )
