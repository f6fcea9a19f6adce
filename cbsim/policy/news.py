"""From a step's rows, and what has happened since the plan before, to the plan that tells an executor both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cbsim.policy.blocks import BlockPool
from cbsim.policy.cohort import Cohort
from cbsim.policy.plan import Chunk, Preempted, StepPlan
from cbsim.policy.request import Request, RequestSpec


class News:
    """What the next plan has to tell besides its rows. A scheduler adds to the lists; `plan` empties them."""

    def __init__(self, cohort: Cohort, pool: BlockPool, *, foresees: bool) -> None:
        """A scheduler that `foresees` ends known in advance lets no request go on whose last token is planned."""
        self._cohort, self._pool, self._foresees = cohort, pool, foresees
        self.left: list[RequestSpec] = []  # went out of the cohort
        self.ended: list[RequestSpec] = []
        self.preempted: list[Preempted] = []
        self.replaced: list[tuple[RequestSpec, int, int]] = []

    def plan(
        self,
        rows: Mapping[Request, Chunk],
        grown: Sequence[tuple[RequestSpec, int]],
        ending: Sequence[Request],
        decodes: int,
        running: int,
        waiting: int,
        *,
        lead: int = 0,
        fast_decode: bool = False,
    ) -> StepPlan:
        """Promise the listed rows and write the plan; `ending` members sample their declared last token in it."""
        cohort, pool = self._cohort, self._pool
        ends = [r.spec for r in ending]
        joined: list[RequestSpec] = []
        prefill_tokens, table_blocks, new_blocks = 0, cohort.held_blocks, len(grown)
        for request, row in rows.items():
            prefill_tokens += row.tokens
            table_blocks += pool.held(request)
            new_blocks += len(row.blocks) - pool.blocks_for(row.cached)
            request.advance(row.tokens, row.samples)
            if row.samples:
                if request.promised == request.last:
                    ends.append(request.spec)
                if not self._foresees or request.promised < request.limit:
                    joined.append(request.spec)
        plan = StepPlan(  # by position: this is built for every step
            cohort.planned,
            tuple(rows.values()),
            lead,
            decodes,
            cohort.context if decodes else 0,
            tuple(grown),
            tuple(joined),
            tuple(self.left),
            tuple(ends),
            tuple(self.ended),
            tuple(self.preempted),
            prefill_tokens,
            table_blocks,
            new_blocks,
            running,
            waiting,
            pool.free,
            0,
            0,
            fast_decode,
            tuple(self.replaced),
            pool.cached,
            cohort.longest if decodes else 0,
        )
        self.left, self.ended, self.preempted, self.replaced = [], [], [], []
        return plan
