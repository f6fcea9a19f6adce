"""Random calls of the two functions of `flash_attn`, made of the steps of `ragged`, whose right answers are known."""

from __future__ import annotations

import math

import torch
from ragged import Step
from torch import Tensor

from cbengine.peer.standin.functions import FlashAttention

AS_THE_LIBRARY = {"causal": True, "window_size": (-1, -1)}


def varlen(flash: FlashAttention, of: Step, padding: int = 0) -> Tensor:
    """The step's queries over keys and values that lie one after the other. `padding` rows without tokens follow, as
    many query tokens that belong to none, and keys that nobody may read.
    """
    block_size, kv_tokens = of.keys.shape[1], of.rows.kv_tokens.tolist()
    packed = []
    for pages in (of.keys, of.values):
        rows = zip(of.rows.slots.tolist(), kv_tokens, strict=True)
        parts = [pages[of.rows.tables[slot, : -(-n // block_size)].long()].flatten(0, 1)[:n] for slot, n in rows]
        packed.append(torch.cat([*parts, pages.new_full((padding, *pages.shape[2:]), math.nan)]))
    queries = torch.cat([of.queries, of.queries.new_full((padding, *of.queries.shape[1:]), math.nan)])
    starts, k_starts = (
        torch.cat([at, at[-1:].expand(padding)])
        for at in (of.rows.starts, torch.tensor([0, *kv_tokens]).cumsum(0).int().to(queries.device))
    )
    longest = len(queries) if padding else int(of.rows.starts.diff().max())
    scale = of.queries.shape[-1] ** -0.5
    found = flash.flash_attn_varlen_func(
        queries, *packed, starts, k_starts, longest, max(kv_tokens), softmax_scale=scale, **AS_THE_LIBRARY
    )
    return found[: len(of.queries)]


def with_cache(flash: FlashAttention, of: Step, padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The decoding rows of a step, the last of their tokens not in the cache yet, and rows of padding after them, whose
    length is -1 as all entries of the table that stand for no block. Returns answers and caches.
    """
    keys, values, places = of.keys.clone(), of.values.clone(), of.rows.kv_places
    new = [pages.flatten(0, 1)[places] for pages in (keys, values)]  # [rows, Hk, D]
    for pages in (keys, values):
        pages.flatten(0, 1)[places] = math.nan
    cached = of.rows.kv_tokens - 1
    tables = of.rows.tables[of.rows.slots.long()].clone()
    tables[torch.arange(tables.shape[1], device=tables.device) > (cached // keys.shape[1])[:, None]] = -1
    q, k, v = (
        torch.cat([one, one.new_full((padding, *one.shape[1:]), math.nan)])[:, None] for one in (of.queries, *new)
    )
    answers = flash.flash_attn_with_kvcache(
        q=q,
        k_cache=keys,
        v_cache=values,
        k=k,
        v=v,
        cache_seqlens=torch.cat([cached, cached.new_full((padding,), -1)]),
        block_table=torch.cat([tables, tables.new_full((padding, tables.shape[1]), -1)]),
        softmax_scale=q.shape[-1] ** -0.5,
        **AS_THE_LIBRARY,
    )
    return answers.squeeze(1), keys, values
