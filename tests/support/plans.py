"""Plans as tests of cost models make them: decoding rows, chunks, and the padding of a static batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cbsim.policy.plan import Chunk, StepPlan
from cbsim.policy.request import RequestSpec
from support.helpers import step_plan

SPEC = RequestSpec(0, "0", 0, 4096, 8, 8)
Chunks = tuple[tuple[int, int], ...]


def plan(decodes: int = 0, context: int = 0, chunks: Chunks = (), *, outputs: int = 1, **more: Any) -> StepPlan:
    """A plan of decoding rows that read `context` tokens together, and of chunks, each (start, tokens)."""
    listed = tuple(Chunk(SPEC, i, start, tokens, (), outputs) for i, (start, tokens) in enumerate(chunks))
    return step_plan(listed, decodes=decodes, decode_context=context, **more)


def padded(step: StepPlan, padding: int) -> StepPlan:
    work = step.work
    return replace(step, work=replace(work, chunks=tuple(replace(c, padding=padding) for c in work.chunks)))
