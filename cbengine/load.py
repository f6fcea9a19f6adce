"""The load that a server has to be ready for, and the largest step and block table that it can lead to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from cbengine.batch import Capacity
from cbsim.policy.kind import Options
from cbsim.policy.request import RequestSpec


class Load(NamedTuple):
    """The maximum load of a server: requests at a time, tokens of a prompt, of an answer, and of both."""

    requests: int
    prompt: int
    answer: int
    longest: int

    @classmethod
    def of(cls, specs: Sequence[RequestSpec]) -> Self:
        """Return the load of these requests."""
        return cls(
            len(specs),
            max((spec.prompt_tokens for spec in specs), default=1),
            max((spec.max_tokens for spec in specs), default=1),
            max((spec.prompt_tokens + spec.max_tokens for spec in specs), default=1),
        )

    def capacity(self, options: Options) -> Capacity:
        """Return the largest step and block table of a scheduler with these options."""
        limits = options.limits
        longest = min(self.longest, limits.longest or self.longest)
        slots = max(1, min(self.requests, limits.slots or self.requests))
        rows = min(slots, limits.rows or slots)
        rows *= 1 + limits.filled  # the padding of a row is a row of its own
        budget = limits.tokens
        if budget is None:  # a prompt as long as the longest for every row, and as many outputs
            budget, longest = slots * self.prompt, self.prompt + self.answer
        budget = min(budget, rows * longest)  # a row computes no more tokens than its sequence has
        width = min(max(-(-longest // options.block_size) + 2, limits.table or 0), options.num_blocks)
        sizes = Capacity(slots=slots, width=width, rows=rows, tokens=budget)
        return sizes._replace(tokens=max(budget, sizes.sampling))
