"""Whose text each beam goes on with, where no model says so: declared by request and place, whatever the server does.

Any of the texts, all equally likely: a real search, whose texts differ in probability, agrees more often. The first
output is drawn by texts that are all the same, the prompt, so nobody takes over anything there.
"""

from __future__ import annotations

from hashlib import blake2b

from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec

Parents = tuple[tuple[RequestSpec, RequestSpec], ...]


def parents(plan: StepPlan) -> Parents:
    """The declared answer to the ranked rows of a plan."""
    starts = {chunk.spec: chunk.start for chunk in plan.work.chunks}
    found: list[tuple[RequestSpec, RequestSpec]] = []
    for group in plan.ranked:
        start = starts[group[0]]
        if start < group[0].prompt_tokens:
            continue
        drawn = [(spec, group[_draw(spec.index, start, len(group))]) for spec in group]
        found += [(spec, parent) for spec, parent in drawn if parent is not spec]
    return tuple(found)


def _draw(index: int, start: int, count: int) -> int:
    said = index.to_bytes(8, "little") + start.to_bytes(8, "little")
    return int.from_bytes(blake2b(said, digest_size=8).digest(), "little") % count
