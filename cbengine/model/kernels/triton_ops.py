# ruff: noqa: PLR0917 - a kernel takes what it needs one by one
"""The operations of `model.ops` as Triton kernels, for CUDA devices (and for Triton's interpreter, slowly).

The kernels here are the small operations of a decoder, each in one pass: norms, rotation with the cache write, the
gate. Arithmetic is float32; values are rounded to the tensors' type exactly where `TorchOps` (and transformers) rounds
them, so that both give the same tokens; hence no fused multiply-adds either. All tensors are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbengine.errors import UsageError
from cbengine.model.kernels import attention
from cbengine.model.kernels.attention import DECODE, PREFILL, Tiles, fitted
from cbengine.model.ops import PARTS_PER_MULTIPROCESSOR, Rows, TorchOps
from cbsim.cost.fitted import splits as nearest_splits
from cbsim.policy.groups import FULL, Attention

WIDTHS = (16, 32, 64, 128)
TYPES = (torch.float32, torch.bfloat16, torch.float16)
NORM_ELEMENTS = 512  # elements of a warp: 16 a thread, two loads of 16 bytes in bf16
HEADS = 8  # heads of a token in one program: enough programs for a batch of 32, two warps with 16-byte loads at D = 128
GATE_ELEMENTS = 1024  # elements of a program of four warps: one 16-byte load a thread in bf16


class UnsupportedShapeError(UsageError):
    """A head width or a type that the kernels do not support; `TorchOps` supports them all."""


def check(keys: Tensor) -> None:
    """Raise UnsupportedShapeError for a cache that the kernels cannot read or write."""
    if keys.shape[3] not in WIDTHS:
        raise UnsupportedShapeError(f"head_dim: {keys.shape[3]}, where the kernels take {WIDTHS}; TorchOps takes any")
    if keys.dtype not in TYPES:
        raise UnsupportedShapeError(f"keys: of {keys.dtype}, where the kernels take {TYPES}; TorchOps takes any")


@triton.jit
def _normed(wide, mean, weight, eps, dtype: tl.constexpr):
    """Return `wide` times the inverse root of its mean square, rounded, then times `weight`."""
    return ((wide * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _rms_norm(x, residual, weight, out, eps, hidden: tl.constexpr, span: tl.constexpr, added: tl.constexpr):
    """Normalise one vector of `hidden` elements: out = norm(x), or residual += x and out = norm(residual)."""
    i = tl.arange(0, span)
    inside = i < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + i
    value = tl.load(x + at, mask=inside, other=0.0)
    if added:
        value = (value.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(residual + at, value, mask=inside)
    wide = value.to(tl.float32)
    w = tl.load(weight + i, mask=inside, other=0.0)
    tl.store(out + at, _normed(wide, tl.sum(wide * wide, 0) / hidden, w, eps, value.dtype), mask=inside)


@triton.jit(do_not_specialize=["positions", "kv_places"])
def _rotate_and_cache(
    qkv,
    rotation,
    query_norm,
    key_norm,
    eps,
    queries,
    keys,
    values,
    positions,
    kv_places,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    many: tl.constexpr,  # heads in a program
    normed: tl.constexpr,
):
    """Rotate some heads of one token, as pairs of halves: queries to `queries`, keys and values to the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * many + tl.arange(0, many)
    i = tl.arange(0, half)
    every: tl.constexpr = heads + 2 * kv_heads
    real = (head < every)[:, None]
    at = (token * every + head)[:, None] * (2 * half) + i[None, :]
    low = tl.load(qkv + at, mask=real, other=0.0)
    high = tl.load(qkv + at + half, mask=real, other=0.0)
    dtype: tl.constexpr = low.dtype
    is_query, is_value = (head < heads)[:, None], (head >= heads + kv_heads)[:, None]
    a, b = low.to(tl.float32), high.to(tl.float32)
    if normed:
        mean = ((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half))[:, None]
        w_low = tl.where(is_query, tl.load(query_norm + i)[None, :], tl.load(key_norm + i)[None, :])
        w_high = tl.where(is_query, tl.load(query_norm + half + i)[None, :], tl.load(key_norm + half + i)[None, :])
        a, b = _normed(a, mean, w_low, eps, dtype).to(tl.float32), _normed(b, mean, w_high, eps, dtype).to(tl.float32)
    turn = rotation + tl.load(positions + token) * (2 * half) + i
    cos, sin = tl.load(turn).to(dtype).to(tl.float32)[None, :], tl.load(turn + half).to(dtype).to(tl.float32)[None, :]
    turned_low = (a * cos).to(dtype).to(tl.float32) - (b * sin).to(dtype).to(tl.float32)
    turned_high = (b * cos).to(dtype).to(tl.float32) + (a * sin).to(dtype).to(tl.float32)
    low, high = tl.where(is_value, low, turned_low.to(dtype)), tl.where(is_value, high, turned_high.to(dtype))
    q_at = (token * heads + head)[:, None] * (2 * half) + i[None, :]
    tl.store(queries + q_at, low, mask=is_query)
    tl.store(queries + q_at + half, high, mask=is_query)
    cached = tl.load(kv_places + token) * kv_heads
    k_at = (cached + head - heads)[:, None] * (2 * half) + i[None, :]
    is_key = real & (head >= heads)[:, None] & (head < heads + kv_heads)[:, None]
    tl.store(keys + k_at, low, mask=is_key)
    tl.store(keys + k_at + half, high, mask=is_key)
    v_at = k_at - kv_heads * (2 * half)
    tl.store(values + v_at, low, mask=real & is_value)
    tl.store(values + v_at + half, high, mask=real & is_value)


@triton.jit
def _silu_mul(gate_up, out, inner: tl.constexpr, span: tl.constexpr):
    """Compute a span of one vector: silu of its first half, rounded, times its second half."""
    i = tl.program_id(1) * span + tl.arange(0, span)
    inside = i < inner
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(gate_up + row * (2 * inner) + i, mask=inside, other=0.0)
    up = tl.load(gate_up + row * (2 * inner) + inner + i, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * inner + i, (silu * up).to(gate.dtype), mask=inside)


class TritonOps(TorchOps):
    """The operations as Triton kernels, for one stream: its scratch memory is shared by all calls. A row of few heads
    is split over its cached tokens until the `multiprocessors` (None: the current CUDA device's) are busy. Kernels
    compile, and scratch is allocated, on the first call of a shape: call once before capturing a graph. Explicit tiles
    and numbers of splits, a power of two, are for measuring alternatives to the defaults.
    """

    def __init__(
        self,
        multiprocessors: int | None = None,
        *,
        decode: Tiles | None = None,
        prefill: Tiles | None = None,
        splits: int | None = None,
    ) -> None:
        if multiprocessors is None and torch.cuda.is_available():
            multiprocessors = torch.cuda.get_device_properties().multi_processor_count
        self._parts = PARTS_PER_MULTIPROCESSOR * (multiprocessors or 1)
        self._decode, self._prefill, self._given_splits = decode, prefill, splits
        self.launched: object = None  # attention's last kernel as Triton compiled it, for measuring its registers
        self._scratch: dict[tuple[torch.device, int, int, int], tuple[Tensor, Tensor]] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normed(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._normed(x, residual, weight, eps), residual

    def _normed(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Return the norm of x over its last dimension, or of x + residual, which then replaces `residual`."""
        hidden = x.shape[-1]
        span = triton.next_power_of_2(hidden)
        assert all(t.is_contiguous() for t in (x, residual) if t is not None)
        out = torch.empty_like(x)
        _rms_norm[(x.numel() // hidden,)](
            *(x, x if residual is None else residual, weight, out, eps, hidden, span, residual is not None),
            num_warps=min(max(span // NORM_ELEMENTS, 1), 16),
            enable_fp_fusion=False,
        )
        return out

    def rotate_and_cache(
        self,
        qkv: Tensor,
        rotation: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
    ) -> Tensor:
        check(keys)
        kv_heads, width = keys.shape[2:]
        every = qkv.shape[1] // width
        assert all(t.is_contiguous() for t in (qkv, rotation, keys, values))
        queries = torch.empty((len(qkv), every - 2 * kv_heads, width), dtype=qkv.dtype, device=qkv.device)
        _rotate_and_cache[len(qkv), triton.cdiv(every, HEADS)](
            *(qkv, rotation, *(norms or (qkv, qkv)), eps, queries, keys, values, rows.positions, rows.kv_places),
            *(every - 2 * kv_heads, kv_heads, width // 2, HEADS, norms is not None),
            num_warps=2,
            enable_fp_fusion=False,
        )
        return queries

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        inner = gate_up.shape[-1] // 2
        assert gate_up.is_contiguous()
        out = torch.empty((len(gate_up), inner), dtype=gate_up.dtype, device=gate_up.device)
        grid = len(gate_up), triton.cdiv(inner, GATE_ELEMENTS)
        _silu_mul[grid](gate_up, out, inner, GATE_ELEMENTS, num_warps=4, enable_fp_fusion=False)
        return out

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
        """Return the power of two that brings `programs` nearest to the number that the device is to run, in ratio."""
        return self._given_splits or nearest_splits(self._parts / programs)

    def _scratch_for(self, queries: Tensor, kv_heads: int, programs: int) -> tuple[Tensor, Tensor]:
        """Return outputs and log-sums for any split batch of this shape, never freed: captured graphs write to them."""
        _, heads, width = queries.shape
        vectors = max(2 * self._parts, programs) * (heads // kv_heads)
        key = (queries.device, heads // kv_heads, width, vectors)
        if key not in self._scratch:
            parts = torch.empty((vectors, width), dtype=torch.float32, device=queries.device)
            self._scratch[key] = parts, torch.empty(vectors, dtype=torch.float32, device=queries.device)
        return self._scratch[key]
