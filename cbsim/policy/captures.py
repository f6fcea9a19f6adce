"""Shapes that CUDA graphs are captured for, and the one that a step is padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from cbsim.policy.plan import StepPlan

CAPTURED = (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 32))
"""Batch sizes with a CUDA graph in our engine; others are padded up to the next. Padding is nearly free: a matrix
product over 128 rows takes as long as over one."""


def vllm_sizes(largest: int) -> list[int]:
    """Return the batch sizes that vLLM captures, tokens: `VllmConfig._set_cudagraph_sizes` up to `largest`."""
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if size <= largest]


def multiples(sizes: Sequence[int], width: int) -> list[int]:
    """Return the sizes as vLLM rounds them up for rows of `width` query tokens, up to the largest
    (`CompilationConfig.adjust_cudagraph_sizes_for_spec_decode`).
    """
    rounded = {-(-size // width) * width for size in sizes}
    return sorted(size for size in rounded if size <= sizes[-1])


def up_to_multiple(value: int, interval: int, most: int) -> int:
    """Return `value` rounded up to a multiple of `interval`, at least one interval, at most `most`."""
    return min(max(interval, -(-value // interval) * interval), most)


def up_to_power(value: int, most: int) -> int:
    """Return `value` rounded up to a power of two, at most `most`."""
    return min(1 << max(0, value - 1).bit_length(), most)


def captured_sizes(rows: int) -> list[int]:
    """Return the sizes for batches of up to `rows`; the last holds all, unless that is too many for a graph."""
    return list(CAPTURED[: bisect_left(CAPTURED, rows) + 1])


def alike(plan: StepPlan, width: int = 1) -> bool:
    """Return whether every row of a step has `width` query tokens: one, as decoding rows have, or with its guesses."""
    work = plan.work
    return not (any(c.tokens != width or c.padding for c in work.chunks) or (work.decodes and width > 1))


def captured(plan: StepPlan, sizes: Sequence[int], width: int = 1) -> int | None:
    """Return the query tokens at which our engine runs a step on a GPU, or None if it runs kernel by kernel. Steps in
    which every row has one query token and samples have a graph, up to the largest size; with speculation those in
    which every row verifies as many drafts as it may and gets as many, `width` - 1.
    """
    work = plan.work
    if work.rows > sizes[-1] or not alike(plan, width) or any(c.outputs < width for c in work.chunks):
        return None
    return None if width > 1 and work.drafts < width - 1 else bucket(sizes, work.rows) * width


def bucket(sizes: Sequence[int], rows: int) -> int:
    """Return the captured size that holds `rows`, or `rows` itself beyond the largest size."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else rows
