# ruff: noqa: PLR0917 - a kernel takes what it needs one by one
"""The stand-in's attention on a GPU: torch's flash attention for ragged rows, our decode kernels over cached pages.

Grids depend on shapes only and nothing is read on the host, so calls can be captured in CUDA graphs. Kernels compile,
and scratch is allocated, on the first call of a shape, which the library makes before it captures.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbengine.model.kernels.triton_ops import TritonOps
from cbengine.model.ops import Rows


@triton.jit(do_not_specialize=["cached", "tables", "line", "slots", "kv_tokens"])
def _append(
    k,  # [rows, elements]
    v,
    keys,  # [blocks, block_size, elements]
    values,
    cached,
    tables,
    line,  # entries in a line of `tables`
    slots,  # [rows] int32: its own line of the tables
    kv_tokens,  # [rows] int32: cached tokens with the new one
    block_size: tl.constexpr,
    elements: tl.constexpr,
    span: tl.constexpr,
):
    """One row: its new key and value to their place, and what the decode kernel is told. Padding writes nothing."""
    row = tl.program_id(0).to(tl.int64)
    before = tl.load(cached + row)
    tl.store(slots + row, row.to(tl.int32))
    tl.store(kv_tokens + row, before + 1)
    if before < 0:
        return
    block = tl.load(tables + row * line + before // block_size).to(tl.int64)
    i = tl.arange(0, span)
    inside = i < elements
    place = (block * block_size + before % block_size) * elements + i
    new = row * elements + i
    tl.store(keys + place, tl.load(k + new, mask=inside), mask=inside)
    tl.store(values + place, tl.load(v + new, mask=inside), mask=inside)


def append(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cached: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Write the new keys and values; returns each row's line of `tables`, and its cached tokens, 0 for padding."""
    rows, elements = len(k), keys.shape[2] * keys.shape[3]
    slots, kv_tokens = torch.empty((2, rows), dtype=torch.int32, device=k.device)
    shape = (keys.shape[1], elements, triton.next_power_of_2(elements))
    _append[rows,](k, v, keys, values, cached, tables, tables.stride(0), slots, kv_tokens, *shape, num_warps=4)
    return slots, kv_tokens


class GpuAttention:
    """`Attention` on a GPU. `ops` computes decoding rows; its scratch lives as long as this does."""

    def __init__(self, ops: TritonOps | None = None) -> None:
        self._ops = TritonOps() if ops is None else ops

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, longest: tuple[int, int]
    ) -> Tensor:
        """`Attention.varlen`."""
        return torch.ops.aten._flash_attention_forward(q, k, v, q_starts, k_starts, *longest, 0.0, True, False)[0]

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cached: Tensor, tables: Tensor
    ) -> Tensor:
        """`Attention.decode`."""
        slots, kv_tokens = append(k, v, keys, values, cached, tables)
        unread = slots  # where rows begin and which positions they have does not matter to single queries
        rows = Rows(tables, slots, kv_tokens, unread, unread, unread, decodes=len(q), longest=1)
        return self._ops.attention(q, keys, values, rows)
