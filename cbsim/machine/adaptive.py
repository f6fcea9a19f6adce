"""Adaptive verification: a step verifies as many drafts as give most tokens a second (`enable_adaptive_verification` of
vLLM's main branch, its rule for DSpark).

The scheduler plans all drafts of a row; the worker verifies B of those of the whole step, the most probable ones:

    B = argmax over B of (N + the sum of the B largest S) / (draft[N] + verify[T + B])

N rows sample, T tokens are no drafts, and S is the probability that a draft and all before it come true. Both times
come from a profile: steps of the sizes of graphs, and some larger ones, at a context of 8,192 tokens; no larger step
is taken to be faster. S is that of the acceptance that the scenario declares, the same for all requests, where vLLM has
a drafter's confidences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from cbsim.cost.base import Cost
from cbsim.policy.plan import Chunk, StepPlan, StepWork
from cbsim.policy.request import RequestSpec
from cbsim.record.tables import Floats

CONTEXT = 8192  # of the profile, tokens
ABOVE = 1.25  # each profiled step above the graphs has so many times the tokens of the one before
SPEC = RequestSpec(0, "profile", 0, 1, 1, 1)


def step_of(rows: int, tokens: int, context: int, drafts: int = 0) -> StepPlan:
    """Return a step of decoding rows that share so many query tokens, with a context each."""
    each, more = divmod(tokens, rows)
    shares = [each + (row < more) for row in range(rows)]
    chunks = tuple([Chunk(SPEC, row, context, share, (), share) for row, share in enumerate(shares)])
    return StepPlan(0, StepWork(chunks, prefill_tokens=tokens, drafts=drafts))


class Adaptive:
    """The rule of a server whose rows bring up to as many drafts as there are `rates`, their probabilities behind
    accepted ones. Its steps have `most` query tokens at most, its graphs those of `sizes`, in ascending order.
    """

    def __init__(self, cost: Cost, rates: Sequence[float], sizes: Sequence[int], most: int, longest: int) -> None:
        self._survival = np.array(list(accumulate(rates, mul)))
        drafts, context = len(rates), min(CONTEXT, longest - 1)
        points = [size for size in sizes if size <= most]
        while not points or points[-1] < most:
            points.append(min(most, max(1, int(ABOVE * points[-1]) + 1 if points else 1)))
        steps = [step_of(-(-size // (drafts + 1)), size, context) for size in points]
        times = np.maximum.accumulate([cost.gpu_ns(step, size)[1] for step, size in zip(steps, points, strict=True)])
        tokens = np.arange(most + 1)
        at = np.minimum(np.searchsorted(points, tokens), len(points) - 1)
        graphs = tokens <= (sizes[-1] if sizes else 0)
        self._verify: Floats = np.where(graphs, times[at], np.interp(tokens, points, times))
        self._cost, self._context, self._drafts = cost, context, drafts
        self._draft: dict[int, int] = {}  # by rows

    def _draft_ns(self, rows: int) -> int:
        if rows not in self._draft:
            drafting, not_drafting = (step_of(rows, rows, self._context, drafts) for drafts in (self._drafts, 0))
            self._draft[rows] = self._cost.gpu_ns(drafting, rows)[1] - self._cost.gpu_ns(not_drafting, rows)[1]
        return self._draft[rows]

    def verified(self, plan: StepPlan) -> StepPlan:
        """Return the step as it runs: with the drafts that it verifies."""
        work = plan.work
        drafts = [0 if chunk.admitted else max(0, chunk.outputs - 1) for chunk in work.chunks]
        if not (total := sum(drafts)):
            return plan
        slots = [sum([count > at for count in drafts]) for at in range(max(drafts))]  # by position
        gains = np.concatenate([[0.0], np.cumsum(np.repeat(self._survival[: len(slots)], slots))])
        sampling = work.decodes + sum([chunk.outputs > 0 for chunk in work.chunks])
        fixed = work.tokens - total
        times = self._draft_ns(sampling) + self._verify[fixed : fixed + total + 1]
        best = int(np.argmax((sampling + gains) / times))
        if best == total:
            return plan
        chunks = list[Chunk]()
        whole = int(np.searchsorted(np.cumsum(slots), best, side="right"))  # positions that all rows verify
        left = best - sum(slots[:whole])
        for chunk, count in zip(work.chunks, drafts, strict=True):
            share = min(count, whole)
            if count > whole and left:
                share, left = share + 1, left - 1
            chunks.append(chunk if share == count else shorter(chunk, count - share))
        shape = work.lead, work.decodes, work.decode_context, work.longest_context, work.prefill_tokens - total + best
        return StepPlan(plan.step, StepWork(tuple(chunks), *shape, drafts=work.drafts), plan.changes, plan.counts)


def shorter(chunk: Chunk, tokens: int) -> Chunk:
    """Return a row without its last `tokens` drafts."""
    count, outputs = chunk.tokens - tokens, chunk.outputs - tokens
    return Chunk(chunk.spec, chunk.order, chunk.start, count, chunk.blocks, outputs, recomputed=chunk.recomputed)
