"""CUDA graphs: a step runs at the size of its bucket, and the first use of a bucket pays for its capture."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence

from cbsim.policy.captures import alike, captured, up_to_multiple, up_to_power
from cbsim.policy.plan import StepPlan
from cbsim.policy.value import value

Bucket = tuple[int, Hashable] | None  # (query tokens computed, key of the graph), None: no graph fits


@value(frozen=True)
class Shape:
    """The shape that a step runs at: query tokens, eager or as a graph, and the CPU time to capture the graph first."""

    tokens: int
    eager: bool
    capture_ns: int


class Graphs:
    """The graphs captured so far, of one machine. `bucket` maps a plan to its graph; None means always eager."""

    def __init__(self, bucket: Callable[[StepPlan], Bucket] | None, capture_ns: int) -> None:
        self._bucket = bucket
        self._capture_ns = capture_ns
        self._captured: dict[Hashable, Shape] = {}

    def shape(self, plan: StepPlan) -> Shape:
        work = plan.work
        rows = work.decodes + len(work.chunks)
        bucket = self._bucket(plan) if self._bucket and rows else None
        if bucket is None:
            return Shape(work.computed_tokens, eager=rows > 0, capture_ns=0)
        tokens, key = bucket
        shape = self._captured.get(key)
        if shape is None:
            self._captured[key] = Shape(tokens, eager=False, capture_ns=0)
            return Shape(tokens, eager=False, capture_ns=self._capture_ns)
        return shape


def unpadded(plan: StepPlan) -> Bucket:
    """Return a graph of the step's own size: nothing is padded."""
    tokens = plan.work.computed_tokens
    return tokens, tokens


def transformers_bucket(max_requests: int, max_tokens: int, cache_tokens: int, plan: StepPlan) -> Bucket:
    """Return transformers 5.17's graph: powers of two in fast decode, else queries to 64s and KV reads to 16,384s."""
    work = plan.work
    if work.fast_decode:
        tokens = up_to_power(work.tokens, max_requests)
        return tokens, ("decode", tokens)
    read = work.decode_context + sum([c.start for c in work.chunks])
    tokens = up_to_multiple(work.computed_tokens, 64, max_tokens)
    return tokens, (tokens, up_to_multiple(read, 16384, cache_tokens))


class VllmBuckets:
    """The rule of vLLM's graphs: the smallest of the ascending `sizes` that holds the tokens, of all steps, or only of
    those whose rows have `width` query tokens, if that is not 0.
    """

    def __init__(self, sizes: Sequence[int], width: int = 0) -> None:
        fitting = [sizes[bisect_left(sizes, tokens)] for tokens in range(max([0, *sizes]) + 1)] if sizes else []
        self._by_tokens: list[Bucket] = [(size, size) for size in fitting]
        self._width = width

    def __call__(self, plan: StepPlan) -> Bucket:
        tokens = plan.work.computed_tokens
        if tokens >= len(self._by_tokens) or (self._width and not alike(plan, self._width)):
            return None
        return self._by_tokens[tokens]


def engine_bucket(sizes: Sequence[int], width: int, plan: StepPlan) -> Bucket:
    """Return the graph by our engine's rule: steps of decoding rows, which have `width` query tokens with all their
    drafts, run at a captured batch size, others eagerly.
    """
    size = captured(plan, sizes, width)
    return None if size is None else (size, size)
