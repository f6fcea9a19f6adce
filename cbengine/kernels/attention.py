# ruff: noqa: PLR0917 - a kernel takes what it needs one by one
"""Attention over a paged cache: split decode with its reduction, and ragged prefill.

Caches are [blocks, block_size, Hk, D], queries and answers [T, Hq, D], all contiguous. What varies from step to step is
read from device tensors, and grids depend on shapes only, so launches can be captured in CUDA graphs. Softmax runs in
base 2 with a running maximum (Milakov and Gimelshein, arXiv:1805.02867); the parts of a split row are joined by their
log-sums (Flash-Decoding). Nothing beyond a row's cached tokens is ever read: it may be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor

from cbengine.ops import Rows

LOG2_E = 1.4426950408889634
LEAST_PART = 256  # cached tokens: a shorter part costs more in partial answers than it gains in parallel reads
LOWEST = tl.constexpr(-1.0e30)  # below every score, yet finite: a tile of masked scores folds in as zeros, not as NaN


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a program is cut: query rows (tokens times heads of a group), cached tokens an iteration, warps, stages."""

    queries: int
    cached: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Launch options; fused multiply-adds by name, since Triton's default differs between versions."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


# By (bytes an element, head_dim); narrower heads take the entry of 64. Loading the block table takes pipeline stages of
# its own, so 5 stages are two buffers of keys and values with a whole iteration to fill one, 3 or 4 stages none.
DECODE = {
    (2, 64): Tiles(16, 64, 4, 5),  # 38 KB shared: six programs a multiprocessor keep its memory queue full
    (2, 128): Tiles(16, 64, 4, 5),  # 73 KB shared: three programs
    (4, 64): Tiles(16, 16, 4, 2),  # exact float32 products have no tensor cores: small enough not to spill
    (4, 128): Tiles(16, 16, 4, 2),
}
PREFILL = {
    (2, 64): Tiles(128, 64, 8, 5),  # 128 registers a thread: two programs a multiprocessor; 4 warps spill
    (2, 128): Tiles(128, 64, 8, 5),  # three buffers, since keys are read while a product runs; 4 warps spill
    (4, 64): Tiles(32, 16, 8, 2),
    (4, 128): Tiles(32, 16, 8, 2),
}


@triton.jit
def _fold(
    q,  # [M, width]
    acc,  # [M, width] float32: answer so far, not yet divided by `total`
    top,  # [M] float32: running maximum, in base 2
    total,  # [M] float32: running sum
    keys,  # at the first key of this head
    values,
    table,  # at the line of this row
    at,  # [N]: positions of the tile
    end,  # from here on there is nothing
    sees,  # [M]: last position that each query sees
    first,  # positions before it are seen by themselves only
    scale,
    step: tl.constexpr,  # elements from one cached token to the next
    width: tl.constexpr,
    block_size: tl.constexpr,
    masked: tl.constexpr,
    padded: tl.constexpr,
):
    """(acc, top, total) with one tile of cached tokens folded into the running softmax."""
    d = tl.arange(0, width)
    inside = at < end
    if masked:
        block = tl.load(table + at // block_size, mask=inside, other=0)
    else:
        block = tl.load(table + at // block_size)
    place = (block * block_size + at % block_size).to(tl.int64) * step
    if masked:
        k = tl.load(keys + place[None, :] + d[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(values + place[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    else:
        k = tl.load(keys + place[None, :] + d[:, None])
        v = tl.load(values + place[:, None] + d[None, :])
    scores = tl.dot(q, k, input_precision="ieee")
    if masked:
        visible = inside[None, :] & (at[None, :] <= sees[:, None])
        if padded:
            visible = visible & ((at >= first)[None, :] | (at[None, :] == sees[:, None]))
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - higher[:, None])
    fade = tl.exp2(top - higher)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total * fade + tl.sum(p, 1)


@triton.jit
def _part(reach, splits, cached: tl.constexpr, least: tl.constexpr):
    """Cached tokens in one part of a row: whole tiles, and no more parts than pay."""
    return tl.maximum(tl.cdiv(tl.cdiv(reach, splits), cached) * cached, least)


@triton.jit(do_not_specialize=["tables", "slots", "kv_tokens", "first"])
def _decode(
    queries,
    keys,
    values,
    out,
    parts,  # [rows, Hk, splits, group, width] float32
    sums,  # [rows, Hk, splits, group] float32: log-sums, in base 2
    tables,
    line,  # entries in a line of `tables`
    slots,
    kv_tokens,
    first,
    scale,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    m: tl.constexpr,
    n: tl.constexpr,
    least: tl.constexpr,
    padded: tl.constexpr,
):
    """One part of a row's cached tokens, for a key-value head and the query heads that share it."""
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)  # a token's heads together
    splits = tl.num_programs(2)
    reach = tl.load(kv_tokens + row)
    part = _part(reach, splits, n, least)
    start = split * part
    if (split > 0) & (start >= reach):
        return
    end = tl.minimum(start + part, reach)
    g, d = tl.arange(0, m), tl.arange(0, width)
    real = g < group
    spots = ((row * kv_heads + head) * group + g)[:, None] * width + d[None, :]
    q = tl.load(queries + spots, mask=real[:, None], other=0.0)
    since = 0
    if padded:
        since = tl.load(first + row)
    k, v, table = keys + head * width, values + head * width, tables + tl.load(slots + row).to(tl.int64) * line
    sees = tl.zeros((m,), tl.int32) + (reach - 1)
    acc, top, total = tl.zeros((m, width), tl.float32), tl.full((m,), LOWEST, tl.float32), tl.zeros((m,), tl.float32)
    step: tl.constexpr = kv_heads * width
    for tile in range(start, end, n):
        at = tile + tl.arange(0, n)
        acc, top, total = _fold(
            q, acc, top, total, k, v, table, at, end, sees, since, scale, step, width, block_size, True, padded
        )
    total = tl.where(total > 0, total, 1.0)  # nothing seen: zeros, with a log-sum that weighs nothing
    if part >= reach:  # the only part is the answer, and the reduction skips the row
        tl.store(out + spots, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    else:
        place = ((row * kv_heads + head) * splits + split) * group + g
        tl.store(parts + place[:, None] * width + d[None, :], acc / total[:, None], mask=real[:, None])
        tl.store(sums + place, top + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["kv_tokens"])
def _join(
    parts,
    sums,
    kv_tokens,
    out,
    group: tl.constexpr,
    width: tl.constexpr,
    n: tl.constexpr,
    splits: tl.constexpr,
    least: tl.constexpr,
):
    """The parts of a row weighed by their sums into the answer of one query head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    reach = tl.load(kv_tokens + row)
    part = _part(reach, splits, n, least)
    if part >= reach:
        return
    s, d = tl.arange(0, splits), tl.arange(0, width)
    live = s * part < reach
    head_at = row * tl.num_programs(1) + head
    place = (head_at // group * splits + s) * group + head_at % group
    weight = tl.load(sums + place, mask=live, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    each = tl.load(parts + place[:, None] * width + d[None, :], mask=live[:, None], other=0.0)
    answer = tl.sum(each * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head_at * width + d, answer.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["tables", "slots", "kv_tokens", "starts", "first", "decodes"])
def _prefill(
    queries,
    keys,
    values,
    out,
    tables,
    line,
    slots,
    kv_tokens,
    starts,
    first,
    decodes,  # rows before the first one served here
    scale,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    m: tl.constexpr,
    n: tl.constexpr,
    padded: tl.constexpr,
):
    """Query tokens of a row, m // group of them, for a key-value head and the query heads that share it."""
    tokens: tl.constexpr = m // group
    row, head = decodes + tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    low = (tl.cdiv(count, tokens) - 1 - tl.program_id(0)) * tokens  # the longest tiles of a row start first
    if low < 0:
        return
    reach = tl.load(kv_tokens + row)
    i, d = tl.arange(0, m), tl.arange(0, width)
    token = low + i // group
    real = (i < tokens * group) & (token < count)
    spots = (((start + token).to(tl.int64) * kv_heads + head) * group + i % group)[:, None] * width + d[None, :]
    q = tl.load(queries + spots, mask=real[:, None], other=0.0)
    before = reach - count
    sees = before + token
    since = 0
    end = tl.minimum(before + low + tokens, reach)
    clear = (before + low + 1) // n * n  # every query of the tile sees everything below
    if padded:
        since = tl.load(first + row)
        clear = 0
    k, v, table = keys + head * width, values + head * width, tables + tl.load(slots + row).to(tl.int64) * line
    acc, top, total = tl.zeros((m, width), tl.float32), tl.full((m,), LOWEST, tl.float32), tl.zeros((m,), tl.float32)
    step: tl.constexpr = kv_heads * width
    for tile in range(0, clear, n):
        at = tile + tl.arange(0, n)
        acc, top, total = _fold(
            q, acc, top, total, k, v, table, at, end, sees, since, scale, step, width, block_size, False, padded
        )
    for tile in range(clear, end, n):
        at = tile + tl.arange(0, n)
        acc, top, total = _fold(
            q, acc, top, total, k, v, table, at, end, sees, since, scale, step, width, block_size, True, padded
        )
    answer = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + spots, answer.to(out.dtype.element_ty), mask=real[:, None])


def tiles(table: dict[tuple[int, int], Tiles], queries: Tensor, kv_heads: int) -> Tiles:
    """The entry of `table` for these queries; one token's heads of a group always fit into a program."""
    _, heads, width = queries.shape
    found = table[queries.element_size(), max(width, min(w for _, w in table))]
    return replace(found, queries=max(found.queries, triton.next_power_of_2(heads // kv_heads)))


def decode(
    queries: Tensor, keys: Tensor, values: Tensor, rows: Rows, out: Tensor, splits: int, scratch: tuple[Tensor, Tensor]
) -> None:
    """Write the answers of the first `rows.decodes` query tokens. `splits` is a power of two; where it is above one,
    the float32 scratch holds decodes * Hq * splits vectors of D, and as many numbers.
    """
    (_, heads, width), (_, block_size, kv_heads, _) = queries.shape, keys.shape
    group, cut = heads // kv_heads, tiles(DECODE, queries, kv_heads)
    first = rows.kv_tokens if rows.first is None else rows.first
    _decode[kv_heads, rows.decodes, splits](
        queries,
        keys,
        values,
        out,
        *scratch,
        *(rows.tables, rows.tables.stride(0), rows.slots, rows.kv_tokens, first),
        width**-0.5 * LOG2_E,
        *(kv_heads, group, width, block_size, cut.queries, cut.cached, LEAST_PART, rows.first is not None),
        **cut.options,
    )
    if splits > 1:
        _join[rows.decodes, heads](
            *scratch,
            rows.kv_tokens,
            out,
            group,
            width,
            cut.cached,
            splits,
            LEAST_PART,
            num_warps=4,
            enable_fp_fusion=True,
        )


def prefill(queries: Tensor, keys: Tensor, values: Tensor, rows: Rows, out: Tensor) -> None:
    """Write the answers of all rows after the first `rows.decodes`. Programs past the end of their row return."""
    (_, heads, width), (_, block_size, kv_heads, _) = queries.shape, keys.shape
    group, cut = heads // kv_heads, tiles(PREFILL, queries, kv_heads)
    first = rows.kv_tokens if rows.first is None else rows.first
    _prefill[triton.cdiv(rows.longest, cut.queries // group), len(rows.slots) - rows.decodes, kv_heads](
        queries,
        keys,
        values,
        out,
        *(rows.tables, rows.tables.stride(0), rows.slots, rows.kv_tokens, rows.starts, first, rows.decodes),
        width**-0.5 * LOG2_E,
        *(kv_heads, group, width, block_size, cut.queries, cut.cached, rows.first is not None),
        **cut.options,
    )
