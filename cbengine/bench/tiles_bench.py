"""Attention with other tiles than those shipped: each variant timed and its answers held against the shipped one's.

A variant that does not fit the device is told and left behind. What is best here is a candidate, no more: it is one
model, one batch and one block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cbengine.bench.attention_bench import BATCH, BLOCK_TOKENS, SPAN_BYTES, AttentionCase, decode_case, prefill_case
from cbengine.bench.figures import Budget
from cbengine.bench.timing import Ceilings
from cbengine.model.kernels.tiles import DECODE, PREFILL, Tiles, fitted
from cbengine.model.kernels.triton_ops import TritonOps
from cbsim.scenario.shapes import ModelShape

CONTEXTS = (4096, 8192, 1024)
PREFILLS = ((8192, 0), (512, 7680))
SPLITS = (1, 2, 4, 8, 16)
DECODE_TILES = (
    Tiles(16, 64, 4, 4),
    Tiles(16, 64, 4, 6),
    Tiles(16, 64, 4, 7),
    Tiles(16, 32, 4, 5),
    Tiles(16, 32, 4, 7, 4),
    Tiles(16, 128, 4, 5),
    Tiles(16, 128, 8, 5),
    Tiles(16, 64, 2, 5),
    Tiles(16, 64, 8, 5),
)
PREFILL_TILES = (  # the most promising first: each takes seconds to compile
    Tiles(64, 64, 4, 4, 2),
    Tiles(64, 64, 4, 3),
    Tiles(128, 64, 8, 4),
    Tiles(128, 64, 8, 3),
    Tiles(64, 64, 4, 5),
    Tiles(128, 32, 8, 5),
    Tiles(64, 128, 4, 3),
    Tiles(128, 128, 8, 3),
)
WRONG = 2e-2  # relative to the shipped kernel's answer, of a whole tensor: bf16 in another order is well below


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel at one point: how long a layer takes, or why there is no answer."""

    point: str
    queries: int
    cached: int
    warps: int
    stages: int
    programs: int
    splits: int  # 0: as TritonOps chooses
    default: bool
    seconds: float | None = None
    share: float | None = None  # of the copy for decode, of the matrix product for prefill
    error: float | None = None
    registers: int | None = None
    spilt: int | None = None
    failed: str = ""

    def __str__(self) -> str:
        cut = f"({self.queries}, {self.cached}, {self.warps}, {self.stages}, {self.programs})"
        head = f"{self.point:<32} {cut:<20} splits {self.splits or 'auto':>4}"
        shipped = "  the default" if self.default else ""
        if self.seconds is None or self.error is None:
            return f"{head}  {self.failed}{shipped}"
        used = f"{self.registers} registers, {self.spilt} spilt" if self.registers else ""
        wrong = "  WRONG" if not self.error < WRONG else ""
        return (
            f"{head} {self.seconds * 1e6:>9,.1f} us {self.share:6.1%}  error {self.error:.0e}  {used}{wrong}{shipped}"
        )


def decodes(
    model: ModelShape,
    best: Ceilings,
    device: str = "cuda",
    *,
    rows: int = BATCH,
    contexts: Sequence[int] = CONTEXTS,
    tiles: Sequence[Tiles] = DECODE_TILES,
    splits: Sequence[int] = SPLITS,
    budget_s: float = 25.0,
    span: int = SPAN_BYTES,
    multiprocessors: int | None = None,
) -> Iterator[Variant]:
    """Best first at each context: other tiles, then other numbers of splits with the tiles that are shipped."""

    def made(cut: Tiles, parts: int) -> TritonOps:
        return TritonOps(multiprocessors, decode=cut, splits=parts or None)

    budget = Budget(budget_s)
    for context in budget.left(contexts, "decode tiles, tokens"):
        case = decode_case(model, rows, context, device, span=span, block_tokens=BLOCK_TOKENS)
        shipped = fitted(None, DECODE, case.queries, model.kv_heads)
        tried = [(shipped, 0), *((cut, 0) for cut in tiles), *((shipped, parts) for parts in splits)]
        floor = case.read_bytes / best.bandwidth
        yield from _sorted(f"decode, {rows} x {context:,}", case, floor, made, tried, budget)


def prefills(
    model: ModelShape,
    best: Ceilings,
    device: str = "cuda",
    *,
    points: Sequence[tuple[int, int]] = PREFILLS,
    tiles: Sequence[Tiles] = PREFILL_TILES,
    budget_s: float = 33.0,
) -> Iterator[Variant]:
    """Best first at each point: (query tokens, cached tokens before them)."""

    def made(cut: Tiles, _: int) -> TritonOps:
        return TritonOps(1, prefill=cut)

    budget = Budget(budget_s)
    for tokens, cached in budget.left(points, "prefill tiles, tokens"):
        case = prefill_case(model, tokens, cached, device, block_tokens=BLOCK_TOKENS)
        shipped = fitted(None, PREFILL, case.queries, model.kv_heads)
        tried = [(shipped, 0), *((cut, 0) for cut in tiles)]
        yield from _sorted(f"prefill, {tokens:,} over {cached:,}", case, case.flop / best.rate, made, tried, budget)


def _sorted(
    point: str,
    case: AttentionCase,
    floor_s: float,
    made: Callable[[Tiles, int], TritonOps],
    tried: Sequence[tuple[Tiles, int]],
    budget: Budget,
) -> list[Variant]:
    """The variants that were begun in time, fastest first, those without an answer last. The first one is the default:
    it must succeed, or there is nothing to hold the others against.
    """
    (shipped, parts), *others = tried
    right = case.answers(made(shipped, parts)).clone()
    variants = [_measured(point, case, floor_s, made(shipped, parts), (shipped, parts), right, default=True)]
    for cut, splits in budget.left(others, f"{point}: tiles and splits"):
        variants.append(_measured(point, case, floor_s, made(cut, splits), (cut, splits), right, default=False))
    return sorted(variants, key=lambda variant: float("inf") if variant.seconds is None else variant.seconds)


def _measured(
    point: str,
    case: AttentionCase,
    floor_s: float,
    ops: TritonOps,
    cut: tuple[Tiles, int],
    right: Tensor,
    *,
    default: bool,
) -> Variant:
    tiles, splits = cut
    variant = Variant(
        point, tiles.queries, tiles.cached, tiles.warps, tiles.stages, tiles.programs, splits, default=default
    )
    try:
        answers = case.answers(ops)
        error = float((answers.float() - right.float()).norm() / right.float().norm())
        seconds = case.seconds(ops)
    except Exception as failure:  # out of shared memory or registers, or not compiled: no answer of this variant alone
        first = next(iter(str(failure).splitlines()), "")
        return replace(variant, failed=f"{type(failure).__name__}: {first}")
    used = _used(ops)
    return replace(variant, seconds=seconds, share=floor_s / seconds, error=error, **used)


def _used(ops: TritonOps) -> dict[str, Any]:
    """Registers and spills of the kernel that ran, where it was compiled."""
    kernel = ops.launched
    return {"registers": getattr(kernel, "n_regs", None), "spilt": getattr(kernel, "n_spills", None)}
