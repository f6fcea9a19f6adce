"""The stand-in's attention in plain torch, on any device: row by row. It reads lengths on the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def varlen(q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest: tuple[int, int]) -> Tensor:
    """`Attention.varlen`, with zeros where there is padding."""
    del longest
    out = torch.zeros_like(q)
    q_at, k_at = q_starts.tolist(), k_starts.tolist()
    for low, high, first, last in zip(q_at, q_at[1:], k_at, k_at[1:], strict=False):
        if high > low:
            out[low:high] = _attended(q[low:high], k[first:last], v[first:last])
    return out


def decode(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cached: Tensor, tables: Tensor) -> Tensor:
    """`Attention.decode`."""
    out, block_size = torch.zeros_like(q), keys.shape[1]
    for row, before in enumerate(cached.tolist()):
        if before < 0:
            continue
        blocks = tables[row, : before // block_size + 1].long()
        keys[blocks[-1], before % block_size] = k[row]
        values[blocks[-1], before % block_size] = v[row]
        seen = (pages[blocks].flatten(0, 1)[: before + 1] for pages in (keys, values))
        out[row] = _attended(q[row : row + 1], *seen)[0]
    return out


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one row: q [queries, H, D] are the last of its tokens, k and v [tokens, Hk, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1).transpose(0, 1) for each in (k, v))
    visible = torch.ones(len(q), k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - len(q))
    return scaled_dot_product_attention(q.transpose(0, 1), k, v, visible).transpose(0, 1)
