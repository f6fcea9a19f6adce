"""What the device and the attention kernels do, size by size: the measured roofline that everything else is a share of.

Copies to and from the host; decode attention by batch and context against the bandwidth of a copy on the device;
prefill attention by length, whole and in chunks over a cache, against the rate of a matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cbengine import bench, build
from cbengine.architecture import from_shape
from cbengine.bench import BLOCK_TOKENS, Figure, Serve, timed
from cbengine.ops import Ops, Rows
from cbsim import scenario
from cbsim.shapes import ModelShape

BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (128, 512, 2048, 4096, 8192, 32768)
PREFILLS = ((512, 0), (1024, 0), (2048, 0), (4096, 0), (8192, 0), (512, 7680), (2048, 6144), (4096, 4096))
MOST_BYTES = 24 << 30
"""Cache that a point of the grid may take: two copies of it take turns."""
BAR_PREFILL = 0.5
LARGE, SMALL = 1 << 28, 4


def figures(out: Path, serve: Serve, quick: bool, device: str = "cuda") -> Iterator[Figure]:
    """All of it, as `bench` wants it: nothing is written or served.

    `quick` leaves out all but 32 requests and the longest prefill.
    """
    del out, serve
    yield from host_copies(device)
    bandwidth, rate = bench.copy_bandwidth(device=device), bench.matrix_rate(device=device)
    yield Figure("device copy, read and write", bandwidth / 1e12, "TB/s")
    yield Figure("matrix product, bf16, 8192^3", rate / 1e12, "TFLOP/s")
    model, ops = scenario.load("8k_b32").model, build.ops(device)
    yield from decodes(ops, model, bandwidth, (32,) if quick else BATCHES, CONTEXTS, device)
    yield from prefills(ops, model, rate, PREFILLS[4:5] if quick else PREFILLS, device)


def host_copies(device: str = "cuda", size: int = LARGE) -> Iterator[Figure]:
    """Latency of a few bytes and bandwidth of many, from and to pinned memory where there is a GPU."""
    pinned = device == "cuda"
    for name, to_device in (("host to device", True), ("device to host", False)):
        for count, unit in ((SMALL, "us"), (size, "GB/s")):
            host = torch.zeros(count, dtype=torch.uint8, pin_memory=pinned)
            there = torch.zeros(count, dtype=torch.uint8, device=device)
            target, source = (there, host) if to_device else (host, there)
            seconds = _copied(target, source, device)
            yield Figure(f"{name}, {count:,} bytes", seconds * 1e6 if unit == "us" else count / seconds / 1e9, unit)


def _copied(target: Tensor, source: Tensor, device: str) -> float:
    """Seconds of a copy, from its launch until the host knows."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return timed(copy, "cpu")


def decodes(
    ops: Ops, model: ModelShape, bandwidth: float, batches: Sequence[int], contexts: Sequence[int], device: str = "cuda"
) -> Iterator[Figure]:
    """Bytes of cache read a second, of what a copy moves. Points whose cache is too large are left out."""
    for rows in batches:
        for context in contexts:
            held = 2 * rows * context * model.kv_bytes_per_token // model.layers
            if held > MOST_BYTES:
                continue
            read, seconds = bench.decode_attention(ops, model, rows, context, device)
            yield bench.attention_share(context, read / seconds / bandwidth, rows)


def prefills(
    ops: Ops, model: ModelShape, rate: float, points: Sequence[tuple[int, int]], device: str = "cuda"
) -> Iterator[Figure]:
    """FLOP/s of causal attention, of what a matrix product reaches: 4 x heads x width a query-key pair."""
    for tokens, cached in points:
        flop, seconds = prefill_attention(ops, model, tokens, cached, device)
        share = flop / seconds / rate
        over = f" over {cached:,} cached" if cached else ""
        barred = (tokens, cached) == (8192, 0)
        bar = f">= {BAR_PREFILL:.0%}" if barred else ""
        name = f"prefill attention, {tokens:,} tokens{over}, of the matrix product"
        yield Figure(name, share * 100, "%", bar, share >= BAR_PREFILL if barred else None)


def prefill_attention(
    ops: Ops, model: ModelShape, tokens: int, cached: int, device: str = "cuda"
) -> tuple[float, float]:
    """(FLOP, seconds) of one layer's attention of one prompt's chunk, its cache in scattered blocks."""
    shape, blocks = from_shape(model), -(-(tokens + cached) // BLOCK_TOKENS)
    cache = torch.randn((2, blocks, BLOCK_TOKENS, shape.kv_heads, shape.head_dim), dtype=torch.bfloat16, device=device)
    queries = torch.randn(tokens, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    rows = chunk(torch.randperm(blocks, device=device), tokens, cached)
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    seconds = timed(lambda: ops.attention(queries, cache[0], cache[1], rows), device)
    return 4.0 * shape.heads * shape.head_dim * pairs, seconds


def chunk(table: Tensor, tokens: int, cached: int) -> Rows:
    """One row of `tokens` query tokens behind `cached` ones, its blocks those of `table`."""
    device = table.device
    at = torch.arange(cached, cached + tokens, dtype=torch.int64, device=device)
    return Rows(
        tables=table.int().view(1, -1),
        slots=torch.zeros(1, dtype=torch.int32, device=device),
        kv_tokens=torch.full((1,), cached + tokens, dtype=torch.int32, device=device),
        starts=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        positions=at,
        kv_places=table.long()[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS,
        decodes=0,
        longest=tokens,
    )
