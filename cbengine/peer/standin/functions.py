"""`flash_attn` as transformers' continuous batching calls it: the names, arguments and meaning of version 2.8.3.

What that caller never asks for is no argument here, or is refused, so nothing is computed silently otherwise than asked
for. Shapes: H query heads, Hk key-value heads, D width of a head.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from cbengine.errors import UsageError
from cbengine.peer.standin import plain


class UnsupportedCallError(UsageError):
    """A call that continuous batching never makes: the stand-in is for nothing else."""


class StandInAttention(Protocol):
    """What computes; softmax of scores times D^-0.5."""

    def varlen(
        self,
        q: Tensor,  # [queries, H, D], rows one after the other
        k: Tensor,  # [tokens, Hk, D]
        v: Tensor,
        q_starts: Tensor,  # [rows + 1] int32: where each row begins in `q`; all after the last is padding
        k_starts: Tensor,
        longest: tuple[int, int],  # bounds of a row's queries and tokens
    ) -> Tensor:
        """Causal attention: a row's queries are the last ones of its tokens. [queries, H, D], padding is undefined."""

    def decode(
        self,
        q: Tensor,  # [rows, H, D]
        k: Tensor,  # [rows, Hk, D]: of the new token
        v: Tensor,
        keys: Tensor,  # [blocks, block_size, Hk, D], written in place
        values: Tensor,
        cached: Tensor,  # [rows] int32: tokens in the cache before the new one; -1: the row is padding
        tables: Tensor,  # [rows, width] int32: a row's blocks in order; nothing is read beyond those it needs
    ) -> Tensor:
        """Append the new token, attend to all cached ones. [rows, H, D], zeros for padding, which writes nothing."""


class FlashAttention:
    """The functions of the package, on one device. Good for one stream, since its scratch memory is shared by calls."""

    def __init__(self, attention: StandInAttention) -> None:
        self._attention = attention

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """Attention over rows that lie one after the other, without padding between them."""
        _check(q, softmax_scale, causal, window_size)
        return self._attention.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))

    def flash_attn_with_kvcache(
        self,
        q: Tensor,  # [rows, 1, H, D]
        k_cache: Tensor,  # [blocks, block_size, Hk, D]
        v_cache: Tensor,
        k: Tensor,  # [rows, 1, Hk, D]
        v: Tensor,
        *,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        """One new token a row: its key and value go to the cache, its query sees all that is there. [rows, 1, H, D]."""
        _check(q, softmax_scale, causal, window_size)
        if q.shape[1] != 1:
            raise UnsupportedCallError(f"the stand-in for flash_attn appends one token a row, not {q.shape[1]}")
        q, k, v = (new.squeeze(1).contiguous() for new in (q, k, v))
        return self._attention.decode(q, k, v, k_cache, v_cache, cache_seqlens, block_table).unsqueeze(1)


def for_device(device: torch.device) -> FlashAttention:
    """Kernels on a GPU; plain torch elsewhere, right and slow."""
    if device.type != "cuda":
        return FlashAttention(plain)
    from cbengine.peer.standin.append import GpuAttention

    return FlashAttention(GpuAttention())


def missing(*_: Any, **__: Any) -> NoReturn:
    """In place of the functions that transformers imports and continuous batching never calls."""
    raise UnsupportedCallError("the stand-in for flash_attn serves transformers' continuous batching only")


def _check(q: Tensor, scale: float | None, causal: bool, window: tuple[int, int]) -> None:
    usual = q.shape[-1] ** -0.5
    if not causal or tuple(window) != (-1, -1) or not math.isclose(usual if scale is None else scale, usual):
        given = f"causal={causal}, window_size={tuple(window)}, softmax_scale={scale}"
        raise UnsupportedCallError(
            f"the stand-in for flash_attn is causal, without a window, scaled by D^-0.5: {given}"
        )
