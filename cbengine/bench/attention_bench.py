"""Attention by size: decode against the bandwidth of a copy, prefill against the rate of a matrix product.

Caches lie in scattered blocks. Those of several layers take turns, so that none is found in the GPU's own cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cbengine.bench import timing
from cbengine.bench.figures import Figure
from cbengine.model.ops import Ops, Rows
from cbsim.scenario.shapes import ModelShape

BATCH = 32
BATCHES = (1, 8, BATCH, 128, 256)
CONTEXTS = (128, 512, 2048, 4096, 8192, 32768)
PREFILLS = ((512, 0), (1024, 0), (2048, 0), (4096, 0), (8192, 0), (512, 7680), (2048, 6144), (4096, 4096))
BLOCK_TOKENS = 256  # as 8k_b32 has them
MOST_BYTES = 24 << 30
"""Cache that a point of the grid may take: two copies of it take turns."""
SPAN_BYTES = 1 << 28
BARRED = (4096, 8192)
BAR_DECODE_SHARE = 0.85
BAR_PREFILL = 0.5


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Attention of one step, layer by layer, and the least that one layer has to do."""

    queries: Tensor
    cache: Tensor  # [layers, 2, blocks, block_size, Hk, D]
    rows: Rows
    read_bytes: int  # keys and values that some query sees
    flop: float  # 4 x heads x width for each query and token that it sees

    def answers(self, ops: Ops) -> Tensor:
        """Attention of the last layer, after all others were computed."""
        for keys, values in self.cache:
            out = ops.attention(self.queries, keys, values, self.rows)
        return out

    def seconds(self, ops: Ops) -> float:
        """Seconds that one layer takes."""
        return timing.timed(lambda: self.answers(ops), self.queries.device.type) / len(self.cache)


def decode_case(
    model: ModelShape,
    rows: int,
    context: int,
    device: str = "cuda",
    *,
    span: int = SPAN_BYTES,
    block_tokens: int = BLOCK_TOKENS,
) -> AttentionCase:
    """`rows` requests that decode with `context` cached tokens each; the caches are `span` bytes or more together."""
    step, blocks = ragged([(1, context)] * rows, block_tokens, device)
    read = 2 * rows * context * model.kv_heads * model.head_dim * 2
    cached = (max(2, -(-span // read)), 2, blocks, block_tokens, model.kv_heads, model.head_dim)
    return AttentionCase(
        queries=torch.randn(rows, model.heads, model.head_dim, dtype=torch.bfloat16, device=device),
        cache=torch.randn(cached, dtype=torch.bfloat16, device=device),
        rows=step,
        read_bytes=read,
        flop=4.0 * model.heads * model.head_dim * rows * context,
    )


def prefill_case(
    model: ModelShape, tokens: int, cached: int, device: str = "cuda", *, block_tokens: int = BLOCK_TOKENS
) -> AttentionCase:
    """One prompt's chunk of `tokens` behind `cached` ones."""
    step, blocks = ragged([(tokens, cached + tokens)], block_tokens, device)
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    held = (1, 2, blocks, block_tokens, model.kv_heads, model.head_dim)
    return AttentionCase(
        queries=torch.randn(tokens, model.heads, model.head_dim, dtype=torch.bfloat16, device=device),
        cache=torch.randn(held, dtype=torch.bfloat16, device=device),
        rows=step,
        read_bytes=2 * (tokens + cached) * model.kv_heads * model.head_dim * 2,
        flop=4.0 * model.heads * model.head_dim * pairs,
    )


def decodes(
    ops: Ops, model: ModelShape, bandwidth: float, batches: Sequence[int], contexts: Sequence[int], device: str = "cuda"
) -> Iterator[Figure]:
    """Bytes of cache read a second, of what a copy moves. Points whose cache is too large are left out."""
    for rows in batches:
        for context in contexts:
            if 2 * rows * context * model.kv_bytes_per_token // model.layers > MOST_BYTES:
                continue
            case = decode_case(model, rows, context, device)
            yield decode_share(context, case.read_bytes / case.seconds(ops) / bandwidth, rows)


def decode_share(context: int, share: float, rows: int = BATCH) -> Figure:
    """Decode attention's bandwidth. The bar is for 8k_b32's batch where its contexts are long enough to be work."""
    name = f"decode attention, {rows} requests, {context:,} tokens, of the copy"
    if rows != BATCH or context not in BARRED:
        return Figure(name, share * 100, "%")
    return Figure(name, share * 100, "%", f">= {BAR_DECODE_SHARE:.0%}", share >= BAR_DECODE_SHARE)


def prefills(
    ops: Ops, model: ModelShape, rate: float, points: Sequence[tuple[int, int]], device: str = "cuda"
) -> Iterator[Figure]:
    """FLOP/s of causal attention, of what a matrix product reaches."""
    for tokens, cached in points:
        case = prefill_case(model, tokens, cached, device)
        share = case.flop / case.seconds(ops) / rate
        over = f" over {cached:,} cached" if cached else ""
        barred = (tokens, cached) == (8192, 0)
        bar = f">= {BAR_PREFILL:.0%}" if barred else ""
        name = f"prefill attention, {tokens:,} tokens{over}, of the matrix product"
        yield Figure(name, share * 100, "%", bar, share >= BAR_PREFILL if barred else None)


def ragged(lengths: Sequence[tuple[int, int]], block_tokens: int, device: str) -> tuple[Rows, int]:
    """Rows of (query tokens, cached tokens with those), decodes first, in scattered blocks; and how many blocks."""
    needed, counts = [-(-cached // block_tokens) for _, cached in lengths], [tokens for tokens, _ in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)).split(needed)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for line, own in zip(tables, order, strict=True):
        line[: len(own)] = own
    at = [torch.arange(cached - tokens, cached) for tokens, cached in lengths]
    places = [own[i // block_tokens] * block_tokens + i % block_tokens for own, i in zip(order, at, strict=True)]
    decodes = next((row for row, tokens in enumerate(counts) if tokens > 1), len(counts))
    rows = Rows(
        tables=tables.to(device),
        slots=torch.arange(len(lengths), device=device).int(),
        kv_tokens=torch.tensor([cached for _, cached in lengths], device=device).int(),
        starts=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        positions=torch.cat(at).to(device),
        kv_places=torch.cat(places).to(device),
        decodes=decodes,
        longest=max(counts[decodes:], default=1),
    )
    return rows, sum(needed)
