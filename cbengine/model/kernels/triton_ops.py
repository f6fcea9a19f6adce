"""The operations of `model.ops.Ops` as Triton kernels, for CUDA devices (and for Triton's interpreter, slowly)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cbengine.model.kernels import attention, fused
from cbengine.model.kernels.attention import DECODE, PREFILL, Tiles, fitted
from cbengine.model.kernels.fused import check
from cbengine.model.ops import Rows
from cbsim.policy.groups import FULL, Attention

PARTS_PER_MULTIPROCESSOR = 6  # decode programs to aim for: two waves at head_dim 128, of which three fit at a time
MOST_SPLITS = 64  # the reduction holds this many partial outputs of a head in registers


class TritonOps:
    """A Triton implementation of the protocol `Ops`, for one stream: its scratch memory is shared by all calls.

    A row of few heads is split over its cached tokens until the `multiprocessors` (None: the current CUDA device's) are
    busy. Kernels compile, and scratch is allocated, on the first call of a shape: call once before capturing a graph.
    Explicit tiles and numbers of splits, a power of two, are for measuring alternatives to the defaults.
    """

    rotate_and_cache = staticmethod(fused.rotate_and_cache)
    silu_mul = staticmethod(fused.silu_mul)

    def __init__(
        self,
        multiprocessors: int | None = None,
        *,
        decode: Tiles | None = None,
        prefill: Tiles | None = None,
        splits: int | None = None,
    ) -> None:
        if multiprocessors is None:
            multiprocessors = (
                torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1
            )
        self._parts = PARTS_PER_MULTIPROCESSOR * multiprocessors
        self._decode, self._prefill, self._given_splits = decode, prefill, splits
        self.launched: object = None  # attention's last kernel as Triton compiled it, for measuring its registers
        self._scratch: dict[tuple[torch.device, int, int, int], tuple[Tensor, Tensor]] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return fused.rms_norm(x, residual, weight, eps), residual

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, rows: Rows, sees: Attention = FULL) -> Tensor:
        check(keys)
        assert all(t.is_contiguous() for t in (queries, keys, values))
        out, kv_heads = torch.empty_like(queries), keys.shape[2]
        if rows.decodes > 0:
            cut = fitted(self._decode, DECODE, queries, kv_heads)
            splits = self._splits(rows.decodes * kv_heads)
            scratch = self._scratch_for(queries, kv_heads, rows.decodes * kv_heads * splits if splits > 1 else 0)
            self.launched = attention.decode(queries, keys, values, rows, out, cut, splits, scratch, sees)
        if rows.decodes < len(rows.slots):
            cut = fitted(self._prefill, PREFILL, queries, kv_heads)
            self.launched = attention.prefill(queries, keys, values, rows, out, cut, sees)
        return out

    def _splits(self, programs: int) -> int:
        """Return the least power of two that makes `programs` fill the device, hence under twice as many."""
        return self._given_splits or min(triton.next_power_of_2(triton.cdiv(self._parts, programs)), MOST_SPLITS)

    def _scratch_for(self, queries: Tensor, kv_heads: int, programs: int) -> tuple[Tensor, Tensor]:
        """Return partial outputs and log-sums for any split batch of this group and head width, never freed since
        captured graphs write to them. Only an explicit number of splits needs more `programs` than twice the target.
        """
        _, heads, width = queries.shape
        vectors = max(2 * self._parts, programs) * (heads // kv_heads)
        key = (queries.device, heads // kv_heads, width, vectors)
        if key not in self._scratch:
            parts = torch.empty((vectors, width), dtype=torch.float32, device=queries.device)
            self._scratch[key] = parts, torch.empty(vectors, dtype=torch.float32, device=queries.device)
        return self._scratch[key]
