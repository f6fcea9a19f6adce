"""The use of a run's KV cache: the shares of reserved blocks that hold tokens, will hold some later, or never do.

No table of a run directory has these, so its plans are derived again (replan.py) and the scheduler's block tables are
read after each: exact for every scheduler, shared blocks counted once, and only plans that equal the recorded ones are
counted. The run itself has no cost from it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cbsim.errors import RunError
from cbsim.kv.reservation import PiecePool
from cbsim.policy.loop import Scheduler
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import Request, Status
from cbsim.record.tables import Ints, Mask, token_times
from cbsim.runs import replan
from cbsim.runs.reading import Run
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload


class Shares(NamedTuple):
    """The shares of the whole cache, as means over time; they add up to 1.

    `held`: tokens whose KV is written or promised by a planned step, each once. `later`: reserved by a request that
    will use it later. `never`: reserved by one that will not. `rounded`: reserved beyond the requested size, because
    pieces have fixed sizes. `scattered`: free, enough for the next request, but not in one piece. `free`: all else that
    is free.
    """

    held: float
    later: float
    never: float
    rounded: float
    scattered: float
    free: float

    @property
    def kv_used_share(self) -> float:
        """The share of reserved blocks that holds tokens."""
        reserved = self.held + self.later + self.never + self.rounded
        return self.held / reserved if reserved else 0.0


class Occupancy(NamedTuple):
    """The cache of `tokens` tokens after planning each step: tokens by the columns of `Shares`; free tokens in the
    largest piece; tokens saved by blocks that are in several tables; how long it stayed so; whether requests waited.
    """

    tokens: int
    table: Ints  # a row a step, the columns of Shares
    largest: Ints
    saved: Ints
    lasted_ns: Ints
    waited: Mask

    def shares(self, chosen: Mask | None = None) -> Shares:
        """Return the shares over the chosen steps, or all; zeros if they lasted no time."""
        lasted = self.lasted_ns if chosen is None else self.lasted_ns * chosen
        whole = float(lasted.sum()) * self.tokens
        columns = self.table.T.astype(float) * lasted
        return Shares(*(float(column.sum()) / whole if whole else 0.0 for column in columns))

    def saved_share(self, chosen: Mask | None = None) -> float:
        """Return the share saved by sharing: blocks that tables have in common over blocks if each table had its own
        (Kwon et al., SOSP 2023, section 6.3), over time.
        """
        lasted = self.lasted_ns if chosen is None else self.lasted_ns * chosen
        apart = float((self.table[:, :4].sum(axis=1) + self.saved) @ lasted)
        return float(self.saved @ lasted) / apart if apart else 0.0

    def fragmentation(self, chosen: Mask | None = None) -> float:
        """Return 1 - largest free piece / free tokens, averaged over the time in which any are free."""
        lasted = self.lasted_ns if chosen is None else self.lasted_ns * chosen
        free = self.table[:, 4] + self.table[:, 5]
        lasted = lasted * (free > 0)
        apart = 1 - self.largest / np.maximum(free, 1)
        return float(apart @ lasted) / float(lasted.sum()) if lasted.any() else 0.0


def of(run: Run, scenario: Scenario, workload: Workload) -> Occupancy:
    """Return the occupancy of a run of this scenario. Raises RunError, also if its plans cannot be derived again."""
    if (count := len(scenario.replicas(run.summary)) * scenario.ranks) > 1:
        raise RunError(f"{run.path}: has {count} servers; the use of a cache is derived of one only")
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
    """An observer of a scheduler's block tables after each plan."""

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
        held = self.tokens - free - unused  # unused tokens are in no other table
        self.rows.append((held, later, unused - later - spare, spare, free * apart, free * (not apart)))
        self.largest.append(largest * size)
        self.saved.append(pool.saved * size)


def _written(request: Request, block_size: int) -> int:
    """Return the number of tokens at the head of a table whose KV is written. Prefix hits are whole blocks. Ended rows
    of a static batch count 0: their KV is never read.
    """
    return 0 if request.status is Status.FINISHED else max(request.computed, request.hashed * block_size)
