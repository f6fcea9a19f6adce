"""What a run's KV cache held: of what was reserved, how much held tokens, would later, or never did.

No table of a run directory says that, so its plans are derived again (replan.py) and the scheduler's own tables are
looked at after each: exact for every scheduler, shared blocks counted once, and only plans that equal the recorded ones
are counted. A run pays nothing for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbsim.errors import RunError
from cbsim.kv.reservation import PiecePool
from cbsim.policy.loop import Scheduler
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import Request, Status
from cbsim.record.tables import Ints, token_times
from cbsim.runs import replan
from cbsim.runs.reading import Run
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

Mask = npt.NDArray[np.bool_]


class Shares(NamedTuple):
    """Means over time, of the whole cache; they add up to 1.

    `held`: tokens whose KV is written or promised by a planned step, each once. `later`: reserved by a request that
    will come to use it. `never`: reserved by one that will not. `rounded`: reserved beyond what was asked for, because
    pieces have sizes of their own. `scattered`: free, enough for the next request, but not in one piece. `free`: all
    else that is free.
    """

    held: float
    later: float
    never: float
    rounded: float
    scattered: float
    free: float

    @property
    def kv_used_share(self) -> float:
        """Of what is reserved, what holds something."""
        reserved = self.held + self.later + self.never + self.rounded
        return self.held / reserved if reserved else 0.0


class Occupancy(NamedTuple):
    """The cache of `tokens` tokens after planning each step: how many are what, as in `Shares`; of those free, how many
    lie in the largest piece; how many more blocks would take if none were in several tables; how long it stayed so; and
    whether requests waited.
    """

    tokens: int
    table: Ints  # a row a step, the columns of Shares
    largest: Ints
    saved: Ints
    lasted_ns: Ints
    waited: Mask

    def shares(self, chosen: Mask | None = None) -> Shares:
        """Over the steps chosen, or all; zeros if they lasted no time."""
        lasted = self.lasted_ns if chosen is None else self.lasted_ns * chosen
        whole = float(lasted.sum()) * self.tokens
        return Shares(*(float(column @ lasted) / whole if whole else 0.0 for column in self.table.T.astype(np.float64)))

    def saved_share(self, chosen: Mask | None = None) -> float:
        """What sharing saves: blocks that tables have in common over the blocks there would be if each had its own
        (Kwon et al., SOSP 2023, section 6.3), over time.
        """
        lasted = self.lasted_ns if chosen is None else self.lasted_ns * chosen
        apart = float((self.table[:, :4].sum(axis=1) + self.saved) @ lasted)
        return float(self.saved @ lasted) / apart if apart else 0.0

    def fragmentation(self, chosen: Mask | None = None) -> float:
        """1 - largest free piece / free tokens, over the time in which any are free."""
        lasted = self.lasted_ns if chosen is None else self.lasted_ns * chosen
        free = self.table[:, 4] + self.table[:, 5]
        lasted = lasted * (free > 0)
        apart = 1 - self.largest / np.maximum(free, 1)
        return float(apart @ lasted) / float(lasted.sum()) if lasted.any() else 0.0


def of(run: Run, scenario: Scenario, workload: Workload) -> Occupancy:
    """That of a run of this scenario. Raises RunError, also if its plans do not follow from its record."""
    watch = _Watch(run)
    verdict = replan.derived(run, scenario, workload, watch.look)
    if verdict.difference is not None:
        raise RunError(f"{run.path}: its plans do not follow from its record: {verdict.difference}")
    starts, ends = run.steps["schedule_start_ns"], run.steps["update_end_ns"]
    lasted = np.minimum(np.append(starts[1:], ends[-1:]), ends) - starts
    table = np.array(watch.rows, dtype=np.int64).reshape(-1, len(Shares._fields))
    largest, saved = (np.array(tokens, dtype=np.int64) for tokens in (watch.largest, watch.saved))
    return Occupancy(watch.tokens, table, largest, saved, lasted, run.steps["waiting"] > 0)


class _Watch:
    """Looks at the tables of a scheduler after each of its plans."""

    def __init__(self, run: Run) -> None:
        requests = token_times(run.requests, run.steps)
        longest = requests.rows.numbers("prompt_tokens") + np.maximum(requests.generated, 1) - 1
        self._longest = dict(zip(requests.rows.numbers("index").tolist(), longest.tolist(), strict=True))
        self.rows: list[tuple[int, ...]] = []
        self.largest: list[int] = []
        self.saved: list[int] = []
        self.tokens = 0

    def look(self, policy: Scheduler, plan: StepPlan) -> None:
        del plan
        pool, size = policy.pool, policy.pool.block_size
        self.tokens = pool.num_blocks * size
        unused = later = 0
        for request in pool.tables:
            written, longest = _written(request, size), self._longest[request.spec.index]
            for first, end in pool.spans(request):
                reached = max(first, min(written, end))
                unused += end - reached
                if request.status is not Status.FINISHED:
                    later += max(0, min(end, longest) - reached)
        spare, largest, apart = 0, pool.free, False
        if isinstance(pool, PiecePool):
            spare, largest = sum(pool.spare.values()) * size, pool.pieces.largest
            apart = largest < pool.sought <= pool.free
        free = pool.free * size
        held = self.tokens - free - unused  # what is unused is in nobody else's table
        self.rows.append((held, later, unused - later - spare, spare, free * apart, free * (not apart)))
        self.largest.append(largest * size)
        self.saved.append(pool.saved * size)


def _written(request: Request, block_size: int) -> int:
    """Tokens at the head of a table that hold something. What was found in the cache is whole blocks. The rows of a
    static batch that have ended hold nothing that anybody reads.
    """
    return 0 if request.status is Status.FINISHED else max(request.computed, request.hashed * block_size)
