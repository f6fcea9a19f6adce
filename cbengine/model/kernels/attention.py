# ruff: noqa: PLR0917 - a kernel takes what it needs one by one
"""Attention over a paged cache: split decode with its reduction, and ragged prefill.

Caches are [blocks, block_size, Hk, D], queries and answers [T, Hq, D], all contiguous. What varies from step to step is
read from device tensors, and grids depend on shapes only, so launches can be captured in CUDA graphs. Softmax runs in
base 2 with a running maximum (Milakov and Gimelshein, arXiv:1805.02867); the parts of a split row are joined by their
log-sums (Flash-Decoding). Nothing beyond a row's cached tokens, or before the first one that the layer sees, is ever
read: it may be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cbengine.model.ops import Rows
from cbsim.policy.groups import FULL, Attention, Sight

LOG2_E = 1.4426950408889634
LEAST_PART = 256  # cached tokens: a shorter part costs more in partial outputs than it gains in parallel reads
NARROW = (Sight.SLIDING, Sight.CHUNKED)
LOWEST = tl.constexpr(-1.0e30)  # below every score, yet finite: a tile of masked scores folds in as zeros, not as NaN


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of a kernel: query rows (tokens times heads of a group) of a program, cached tokens of an iteration,
    warps, stages; and the least number of programs that a multiprocessor must have registers for.
    """

    queries: int
    cached: int
    warps: int
    stages: int
    programs: int = 1

    @property
    def options(self) -> dict[str, int]:
        """The launch options; fused multiply-adds are explicit, since Triton's default differs between versions."""
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        if self.programs > 1:
            options["maxnreg"] = 65536 // (self.programs * self.warps * 32) // 8 * 8  # of a multiprocessor, in eights
        return options


# Keys: (bytes an element, head_dim); narrower heads take that of 64. Loading the block table takes pipeline stages of
# its own, so 5 stages are two buffers of keys and values with a whole iteration to fill one, 3 or 4 stages none.
DECODE = {
    (2, 64): Tiles(16, 64, 4, 5, 6),  # 38 KB shared: six programs keep a multiprocessor's memory queue full
    (2, 128): Tiles(16, 64, 4, 5, 3),  # 73 KB shared
    (4, 64): Tiles(16, 16, 4, 2),  # exact float32 products have no tensor cores: small enough not to spill
    (4, 128): Tiles(16, 16, 4, 2),
}
PREFILL = {
    (2, 64): Tiles(128, 64, 8, 5, 2),  # 4 warps spill
    (2, 128): Tiles(64, 64, 4, 5),  # on an H200 4 to 5 % faster than 128 queries with 8 warps, from 512 to 8,192 tokens
    (4, 64): Tiles(32, 16, 8, 2),
    (4, 128): Tiles(32, 16, 8, 2),
}


def fitted(cut: Tiles | None, table: Mapping[tuple[int, int], Tiles], queries: Tensor, kv_heads: int) -> Tiles:
    """Return `cut` or `table`'s entry for these queries; one token's heads of a group always fit into a program."""
    _, heads, width = queries.shape
    tiles = cut or table[queries.element_size(), max(width, min(w for _, w in table))]
    return replace(tiles, queries=max(tiles.queries, triton.next_power_of_2(heads // kv_heads)))


class Sizes(NamedTuple):
    """The compile-time constants of an attention kernel, passed as one value."""

    kv_heads: int
    group: int  # query heads that share a key-value head
    width: int  # elements of a head
    block_size: int  # cached tokens
    m: int  # query rows of a program
    n: int  # cached tokens of a tile
    padded: bool  # rows may begin with padding
    sliding: int = 0  # tokens that a query sees, its own the last; 0: all
    chunk: int = 0  # tokens of the chunks, of which a query sees its own; 0: all


@triton.jit
def _lowest(at, sliding: tl.constexpr, chunk: tl.constexpr):
    """Return the first position that a query at `at` sees, padding ignored."""
    if sliding > 0:
        return tl.maximum(at - sliding + 1, 0)
    elif chunk > 0:  # noqa: RET505 - one of them is compiled
        return at - at % chunk
    else:
        return 0


@triton.jit
def _fold(
    q,  # [m, width]
    state,  # answer so far, not yet divided by the sum [m, width]; running maximum in base 2 [m]; running sum [m]
    cache,  # keys and values, at the first one of this head; block table, at the line of this row
    tile,  # first position of the tile
    bounds,  # first position that any query sees; end of the row; last position that each query sees [m]; before
    # `first`, positions see themselves only
    scale,
    sizes: tl.constexpr,
    masked: tl.constexpr,  # some query may not see all of the tile
):
    """Return `state` with one tile of cached tokens folded into the running softmax."""
    acc, top, total = state
    keys, values, table = cache
    floor, end, sees, first = bounds
    step: tl.constexpr = sizes.kv_heads * sizes.width  # elements from one cached token to the next
    i, d = tl.arange(0, sizes.n), tl.arange(0, sizes.width)
    at = tile + i
    inside = at < end
    if sizes.sliding + sizes.chunk > 0:
        inside = inside & (at >= floor)
    if sizes.block_size % sizes.n == 0:  # tiles start at multiples of n, so the tile lies in one block
        block = tl.load(table + tile // sizes.block_size).to(tl.int64)
        begin = (block * sizes.block_size + tile % sizes.block_size) * step
        keys, values, offset = keys + begin, values + begin, i * step
    else:
        if masked:
            block = tl.load(table + at // sizes.block_size, mask=inside, other=0)
        else:
            block = tl.load(table + at // sizes.block_size)
        offset = (block * sizes.block_size + at % sizes.block_size).to(tl.int64) * step
    if masked:
        k = tl.load(keys + offset[None, :] + d[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(values + offset[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    else:
        k = tl.load(keys + offset[None, :] + d[:, None])
        v = tl.load(values + offset[:, None] + d[None, :])
    scores = tl.dot(q, k, input_precision="ieee")
    if masked:
        visible = inside[None, :] & (at[None, :] <= sees[:, None])
        if sizes.sliding + sizes.chunk > 0:
            visible = visible & (at[None, :] >= _lowest(sees, sizes.sliding, sizes.chunk)[:, None])
        if sizes.padded:
            visible = visible & ((at >= first)[None, :] | (at[None, :] == sees[:, None]))
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - higher[:, None])
    fade = tl.exp2(top - higher)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, higher, total * fade + tl.sum(p, 1)


@triton.jit
def _attend(q, cache, low, whole, clear, bounds, scale, sizes: tl.constexpr):
    """Compute (outputs [m, width], log-sums [m] in base 2) of the positions from `low` to the end of the bounds. `low`
    <= `whole` <= `clear` are multiples of n; every query sees everything from the second to the third.
    """
    m: tl.constexpr = sizes.m
    width: tl.constexpr = sizes.width
    state = (tl.zeros((m, width), tl.float32), tl.full((m,), LOWEST, tl.float32), tl.zeros((m,), tl.float32))
    if not sizes.padded:
        if sizes.sliding + sizes.chunk > 0:
            for tile in range(low, whole, sizes.n):
                state = _fold(q, state, cache, tile, bounds, scale, sizes, True)
            low = whole
        for tile in range(low, clear, sizes.n):
            state = _fold(q, state, cache, tile, bounds, scale, sizes, False)
        low = clear
    for tile in range(low, bounds[1], sizes.n):
        state = _fold(q, state, cache, tile, bounds, scale, sizes, True)
    acc, top, total = state
    total = tl.where(total > 0, total, 1.0)  # nothing seen: zeros, with a log-sum of no weight
    return acc / total[:, None], top + tl.log2(total)


@triton.jit
def _part(reach, splits, cached: tl.constexpr, least: tl.constexpr):
    """Return the cached tokens in one part of a row: whole tiles, and no more parts than pay off."""
    return tl.maximum(tl.cdiv(tl.cdiv(reach, splits), cached) * cached, least)


@triton.jit(do_not_specialize=["tables", "line", "slots", "kv_tokens", "first"])
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
    sizes: tl.constexpr,
    least: tl.constexpr,
):
    """Compute one part of a row's cached tokens, for a key-value head and the query heads that share it."""
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)  # a token's heads together
    splits = tl.num_programs(2)
    reach = tl.load(kv_tokens + row)
    floor = _lowest(tl.maximum(reach - 1, 0), sizes.sliding, sizes.chunk)
    begin = floor // sizes.n * sizes.n
    part = _part(reach - begin, splits, sizes.n, least)
    start = begin + split * part
    if (split > 0) & (start >= reach):
        return
    end = tl.minimum(start + part, reach)
    g, d = tl.arange(0, sizes.m), tl.arange(0, sizes.width)
    real = g < sizes.group
    spots = ((row * sizes.kv_heads + head) * sizes.group + g)[:, None] * sizes.width + d[None, :]
    q = tl.load(queries + spots, mask=real[:, None], other=0.0)
    table = tables + tl.load(slots + row).to(tl.int64) * line
    cache = (keys + head * sizes.width, values + head * sizes.width, table)
    bounds = (floor, end, g * 0 + (reach - 1), tl.load(first + row))
    clear = start + (end - start) // sizes.n * sizes.n
    whole = tl.minimum(tl.maximum(tl.cdiv(floor, sizes.n) * sizes.n, start), clear)
    answer, log_sum = _attend(q, cache, start, whole, clear, bounds, scale, sizes)
    if part >= reach - begin:  # the only part is the output, and the reduction skips the row
        tl.store(out + spots, answer.to(out.dtype.element_ty), mask=real[:, None])
    else:
        index = ((row * sizes.kv_heads + head) * splits + split) * sizes.group + g
        tl.store(parts + index[:, None] * sizes.width + d[None, :], answer, mask=real[:, None])
        tl.store(sums + index, log_sum, mask=real)


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
    sliding: tl.constexpr,
    chunk: tl.constexpr,
):
    """Combine the parts of a row, weighted by their sums, into the output of one query head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    reach = tl.load(kv_tokens + row)
    reach -= _lowest(tl.maximum(reach - 1, 0), sliding, chunk) // n * n  # the parts begin with a tile
    part = _part(reach, splits, n, least)
    if part >= reach:
        return
    s, d = tl.arange(0, splits), tl.arange(0, width)
    live = s * part < reach
    head_at = row * tl.num_programs(1) + head
    index = (head_at // group * splits + s) * group + head_at % group
    weight = tl.load(sums + index, mask=live, other=float("-inf"))
    weight = tl.exp2(weight - tl.max(weight, 0))
    each = tl.load(parts + index[:, None] * width + d[None, :], mask=live[:, None], other=0.0)
    answer = tl.sum(each * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + head_at * width + d, answer.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["tables", "line", "slots", "kv_tokens", "starts", "first", "decodes"])
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
    sizes: tl.constexpr,
):
    """Compute m // group query tokens of a row, for a key-value head and the query heads that share it."""
    tokens: tl.constexpr = sizes.m // sizes.group
    row, head = decodes + tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    low = (tl.cdiv(count, tokens) - 1 - tl.program_id(0)) * tokens  # the longest tiles of a row start first
    if low < 0:
        return
    reach = tl.load(kv_tokens + row)
    i, d = tl.arange(0, sizes.m), tl.arange(0, sizes.width)
    token = low + i // sizes.group
    real = (i < tokens * sizes.group) & (token < count)
    vector = ((start + token).to(tl.int64) * sizes.kv_heads + head) * sizes.group + i % sizes.group
    spots = vector[:, None] * sizes.width + d[None, :]
    q = tl.load(queries + spots, mask=real[:, None], other=0.0)
    before = reach - count
    table = tables + tl.load(slots + row).to(tl.int64) * line
    cache = (keys + head * sizes.width, values + head * sizes.width, table)
    end = tl.minimum(before + low + tokens, reach)
    floor = _lowest(before + low, sizes.sliding, sizes.chunk)
    bounds = (floor, end, before + token, tl.load(first + row))
    clear = (before + low + 1) // sizes.n * sizes.n  # no query of the tile is before the positions below
    whole = tl.minimum(tl.cdiv(_lowest(end - 1, sizes.sliding, sizes.chunk), sizes.n) * sizes.n, clear)
    answer, _ = _attend(q, cache, floor // sizes.n * sizes.n, whole, clear, bounds, scale, sizes)
    tl.store(out + spots, answer.to(out.dtype.element_ty), mask=real[:, None])


def decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    out: Tensor,
    cut: Tiles,
    splits: int,
    scratch: tuple[Tensor, Tensor],
    sees: Attention = FULL,
) -> object:
    """Write the outputs of the first `rows.decodes` query tokens. `splits` is a power of two; if it is above one, the
    float32 scratch holds decodes * Hq * splits vectors of D, and as many numbers. Returns the compiled kernel.
    """
    (_, heads, width), kv_heads = queries.shape, keys.shape[2]
    compiled_for = sizes(cut, queries, keys, rows, sees)
    launched = _decode[kv_heads, rows.decodes, splits](
        *(queries, keys, values, out, *scratch),
        *(rows.tables, rows.tables.stride(0), rows.slots, rows.kv_tokens, _first(rows)),
        *(width**-0.5 * LOG2_E, compiled_for, LEAST_PART),
        **cut.options,
    )
    if splits > 1:
        _join[rows.decodes, heads](
            *(*scratch, rows.kv_tokens, out, heads // kv_heads, width, cut.cached, splits, LEAST_PART),
            *(compiled_for.sliding, compiled_for.chunk),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return launched


def prefill(
    queries: Tensor, keys: Tensor, values: Tensor, rows: Rows, out: Tensor, cut: Tiles, sees: Attention = FULL
) -> object:
    """Write the outputs of all rows after the first `rows.decodes`; return the compiled kernel."""
    (_, heads, width), kv_heads = queries.shape, keys.shape[2]
    many = triton.cdiv(rows.longest, cut.queries // (heads // kv_heads))
    return _prefill[many, len(rows.slots) - rows.decodes, kv_heads](
        *(queries, keys, values, out),
        *(rows.tables, rows.tables.stride(0), rows.slots, rows.kv_tokens, rows.starts, _first(rows), rows.decodes),
        *(width**-0.5 * LOG2_E, sizes(cut, queries, keys, rows, sees)),
        **cut.options,
    )


def sizes(cut: Tiles, queries: Tensor, keys: Tensor, rows: Rows, sees: Attention = FULL) -> Sizes:
    """Return the compile-time constants of a kernel with these tiles."""
    (_, heads, width), (_, block_size, kv_heads, _) = queries.shape, keys.shape
    padded, sliding, chunk = rows.first is not None, *(sees.span * (sees.sight is kind) for kind in NARROW)
    assert not (padded and chunk), "parts are counted from the first cached token"
    return Sizes(kv_heads, heads // kv_heads, width, block_size, cut.queries, cut.cached, padded, sliding, chunk)


def _first(rows: Rows) -> Tensor:
    return rows.kv_tokens if rows.first is None else rows.first  # a kernel without padding ignores it
