"""The model's operations on a device: norms, rotation with the cache write, paged attention, the gate; and the rows of
a step as they see them. `TorchOps` is the plain reference, right everywhere; GPU kernels replace its methods.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cbsim.policy.groups import FULL, Attention, Sight

PARTS_PER_MULTIPROCESSOR = 2  # decode programs to aim for: on an H200 more of them, or a second wave, were slower


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's ragged batch. Query tokens of all rows lie one after the other, T in all, R rows. The first `decodes`
    rows have one query token each; the others have `longest` at most. Integer tensors are int32 on the device unless
    noted. A row's query tokens are the last ones of its `kv_tokens` cached tokens, their own keys and values included,
    so its query token i sees the cache up to position kv_tokens - queries + i. Entries of a table that no query token
    of the layer sees may name any block.
    """

    tables: Tensor  # [slots, width]: block table of every slot
    slots: Tensor  # [R]: each row's line of `tables`
    kv_tokens: Tensor  # [R]
    starts: Tensor  # [R + 1]: first query token of each row; the last entry is T
    positions: Tensor  # [T] int64: rotary position of every query token
    kv_places: Tensor  # [T] int64: block * block_size + offset where its key and value go
    decodes: int
    longest: int
    first: Tensor | None = None  # [R]: cached tokens before it are padding, each seen by itself only


class TorchOps:
    """The operations but matrix products, in plain torch on any device. T query tokens, Hq query heads, Hk key-value
    heads, D width of a head. Attention gathers each row's pages: right, and slow on a GPU.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the RMS norm over the last dimension, computed in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (norm of x + residual, x + residual). `residual` may be overwritten."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotate_and_cache(
        self,
        qkv: Tensor,  # [T, (Hq + 2 Hk) * D]
        rotation: Tensor,  # [positions, 2, D / 2] float32: cosines, sines
        norms: tuple[Tensor, Tensor] | None,  # weights [D] of the queries' and keys' norms
        eps: float,
        keys: Tensor,  # [blocks, block_size, Hk, D]: one layer's cache, written in place
        values: Tensor,
        rows: Rows,
    ) -> Tensor:
        """Norm and rotate queries and keys by halves, write KV to the cache; return the queries [T, Hq, D]."""
        kv_heads, width = keys.shape[2], keys.shape[3]
        heads = qkv.shape[1] // width - 2 * kv_heads
        q, k, v = qkv.view(len(qkv), -1, width).split((heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], eps), self.rms_norm(k, norms[1], eps)
        cos, sin = rotation[rows.positions].to(qkv.dtype).unsqueeze(2).unbind(1)
        keys.view(-1, kv_heads, width)[rows.kv_places] = _rotated(k, cos, sin)
        values.view(-1, kv_heads, width)[rows.kv_places] = v
        return _rotated(q, cos, sin)

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, rows: Rows, sees: Attention = FULL) -> Tensor:
        """Compute causal attention over what a layer sees of the paged cache, scaled by D^-0.5: [T, Hq, D]."""
        block_size, group = keys.shape[1], queries.shape[1] // keys.shape[2]
        out = torch.empty_like(queries)
        firsts = [0] * len(rows.slots) if rows.first is None else rows.first.tolist()
        starts = rows.starts.tolist()
        described = zip(rows.slots.tolist(), rows.kv_tokens.tolist(), starts[:-1], starts[1:], firsts, strict=True)
        for slot, reach, low, high, first in described:
            at = torch.arange(reach - (high - low), reach, device=queries.device)
            assert not first or sees.sight is not Sight.CHUNKED, "parts are counted from the first cached token"
            lowest = _lowest(at, sees)
            begin = int(lowest[0]) if high > low else 0  # no query sees what is before it: it may be NaN
            seen = torch.arange(begin, reach, device=queries.device)
            block, offset = rows.tables[slot, seen // block_size].long(), seen % block_size
            k = keys[block, offset].repeat_interleave(group, dim=1).transpose(0, 1)
            v = values[block, offset].repeat_interleave(group, dim=1).transpose(0, 1)
            mask = (seen <= at[:, None]) & (seen >= lowest[:, None])
            mask &= (seen >= first) | (seen == at[:, None])  # padding sees itself, so that its outputs are finite
            q = queries[low:high].transpose(0, 1)
            out[low:high] = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Map [T, 2 I] to [T, I]: silu of the first half times the second."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def _lowest(at: Tensor, sees: Attention) -> Tensor:
    """Return the first position that a query token at each of these sees, padding ignored."""
    if sees.sight is Sight.SLIDING:
        return (at - sees.span + 1).clamp(min=0)
    return at - at % sees.span if sees.sight is Sight.CHUNKED else torch.zeros_like(at)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with the halves of each head rotated: x [T, heads, D], cos and sin [T, 1, D / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
