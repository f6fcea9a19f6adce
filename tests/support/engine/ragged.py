"""Random steps for tests of `Ops`, and what attention over them is, in float64 and one query token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from cbengine.model.ops import Rows
from cbsim.policy.groups import FULL, Attention, Sight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the relative error of every vector


@dataclass(frozen=True)
class Step:
    queries: Tensor
    keys: Tensor
    values: Tensor
    rows: Rows
    sees: Attention = FULL


def step(
    seed: int,
    lengths: list[tuple[int, int]],  # (query tokens, cached tokens) of each row
    *,
    decodes: int | None = None,  # None: as many rows of one query token as come first
    group: int = 1,
    kv_heads: int = 1,
    width: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    first: list[int] | None = None,
    longest: int | None = None,
    sees: Attention = FULL,
) -> Step:
    """A step whose rows' blocks are scattered, in lines of the table out of order. Everything else is NaN: the rest of
    the caches, what no query sees, and block 0, to which every unused entry of the table points.
    """
    draw = torch.Generator().manual_seed(seed)
    needed = [-(-cached // block_size) for _, cached in lengths]
    tables = torch.zeros(len(lengths) + 3, max(needed) + 2, dtype=torch.int32)
    slots = torch.randperm(len(tables), generator=draw)[: len(lengths)]
    blocks = (1 + torch.randperm(sum(needed) + 4, generator=draw)).split([*needed, 4])
    keys = torch.full((sum(needed) + 5, block_size, kv_heads, width), math.nan)
    values, places, positions = keys.clone(), [], []
    for (count, cached), slot, own in zip(lengths, slots, blocks, strict=False):
        gone = sees.gone(cached - count)
        tables[slot, gone // block_size : len(own)] = own[gone // block_size :]
        held = (own[:, None] * block_size + torch.arange(block_size)).flatten()[:cached]
        keys.flatten(0, 1)[held[gone:]] = torch.randn(cached, kv_heads, width, generator=draw)[gone:]
        values.flatten(0, 1)[held[gone:]] = torch.randn(cached, kv_heads, width, generator=draw)[gone:]
        places.append(held[cached - count :])
        positions.append(torch.arange(cached - count, cached))
    counts = [count for count, _ in lengths]
    singles = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    decodes = singles if decodes is None else decodes
    rows = Rows(
        tables=tables.to(DEVICE),
        slots=slots.int().to(DEVICE),
        kv_tokens=torch.tensor([cached for _, cached in lengths]).int().to(DEVICE),
        starts=torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE),
        positions=torch.cat(positions).to(DEVICE),
        kv_places=torch.cat(places).to(DEVICE),
        decodes=decodes,
        longest=max(counts[decodes:], default=1) if longest is None else longest,
        first=None if first is None else torch.tensor(first).int().to(DEVICE),
    )
    queries = torch.randn(sum(counts), group * kv_heads, width, generator=draw)
    return Step(*(t.to(DEVICE, dtype) for t in (queries, keys, values)), rows, sees)


def attended(given: Step) -> Tensor:
    """softmax(q k / sqrt(D)) v of every query token and head, float64 on the CPU."""
    queries, keys, values = (t.cpu().double() for t in (given.queries, given.keys, given.values))
    _, block_size, kv_heads, width = keys.shape
    starts, answers = given.rows.starts.tolist(), torch.full_like(queries, math.nan)
    for row, (slot, cached) in enumerate(zip(given.rows.slots.tolist(), given.rows.kv_tokens.tolist(), strict=True)):
        first = 0 if given.rows.first is None else int(given.rows.first[row])
        for token in range(starts[row], starts[row + 1]):
            last = cached - (starts[row + 1] - token)
            seen = torch.arange(max(min(first, last), given.sees.gone(last)), last + 1)
            blocks = given.rows.tables.cpu()[slot, seen // block_size].long()
            k, v = keys[blocks, seen % block_size], values[blocks, seen % block_size]  # [seen, Hk, D]
            grouped = queries[token].view(kv_heads, -1, width)
            weights = torch.einsum("hgd,shd->hgs", grouped, k).div(math.sqrt(width)).softmax(-1)
            answers[token] = torch.einsum("hgs,shd->hgd", weights, v).flatten(0, 1)
    return answers


def worst(found: Tensor, right: Tensor) -> float:
    """The largest relative error, as a norm, of all vectors of the last dimension; NaN where any is."""
    found = found.cpu().double()
    return float(((found - right).norm(dim=-1) / right.norm(dim=-1)).max())


def sights() -> st.SearchStrategy[Attention]:
    """Whatever a layer may see: spans below a block's tokens and far above all that is cached."""
    narrow = st.builds(Attention, st.sampled_from((Sight.SLIDING, Sight.CHUNKED)), st.integers(1, 300))
    return st.just(FULL) | narrow


def lengths_of(most_rows: int, most_queries: int, most_cached: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Rows of a step: some decodes, then some chunks of prefill, each over what earlier chunks cached."""
    decodes = st.lists(st.integers(1, most_cached), max_size=most_rows).map(lambda cached: [(1, c) for c in cached])
    chunk = st.tuples(st.integers(1, most_queries), st.integers(0, most_cached)).map(lambda row: (row[0], sum(row)))
    return st.tuples(decodes, st.lists(chunk, max_size=most_rows)).map(lambda parts: parts[0] + parts[1]).filter(len)
