"""Moves of KV on the simulated machine. To and from the host they have a lane for each direction, beside those of the
steps' own small copies; a copy on the device takes its time on the compute lane, before the rows of its plan.
"""

from __future__ import annotations

from cbsim.cost.copies import Copies
from cbsim.machine.lanes import Lane
from cbsim.policy.moves import IN_ORDER, Move, Underway, Way
from cbsim.policy.plan import StepPlan
from cbsim.results.move_log import MoveLog
from cbsim.server.inbox import NEVER_NS


class Mover:
    """Books the moves of plans, and says which jobs are over. `ends` are those that nobody has been told of."""

    def __init__(self, copies: Copies, log: MoveLog, block_size: int, kv_in: Lane, kv_out: Lane) -> None:
        self.ends: dict[int, int] = {}  # job -> when its last move ends
        self._copies, self._log = copies, log
        self._underway = Underway(block_size)
        self._in, self._out = kv_in, kv_out

    @property
    def next_ns(self) -> int:
        """When the next job is over."""
        return min(self.ends.values(), default=NEVER_NS)

    def before(self, plan: StepPlan, at_ns: int) -> int:
        """Book what comes before the rows of a plan, not before `at_ns`, when those of the plans before have run.
        Returns when its own may begin.
        """
        self._underway.planned(plan)
        rows_ns = at_ns
        for job in plan.awaited:
            rows_ns = max(rows_ns, self.ends.get(job, 0))
        for move in plan.moves:
            if move.job == IN_ORDER and move.way is not Way.COPY:
                rows_ns = self._book(plan.step, move, rows_ns)
        for move in plan.moves:
            if move.job != IN_ORDER and move.way is Way.IN:  # into blocks that the others may just have left
                self._book(plan.step, move, rows_ns)
        return rows_ns

    def copying_ns(self, plan: StepPlan) -> int:
        """What the copies on the device take, before the rows of a plan."""
        return sum([self._copies.ns(move.way, len(move.sources)) for move in plan.moves if move.way is Way.COPY])

    def after(self, plan: StepPlan, start_ns: int, end_ns: int) -> None:
        """The compute lane has a plan's copies and rows from `start_ns` to `end_ns`: book what follows them."""
        for move in plan.moves:
            if move.way is Way.COPY:
                until_ns = start_ns + self._copies.ns(move.way, len(move.sources))
                self._log.moved(plan.step, move, start_ns, until_ns)
                start_ns = until_ns
            elif move.way is Way.OUT and move.job != IN_ORDER:
                self._book(plan.step, move, end_ns)

    def _book(self, step: int, move: Move, at_ns: int) -> int:
        """On the lane of its direction; returns when it ends."""
        lane = self._in if move.way is Way.IN else self._out
        start_ns, end_ns = lane.book(at_ns, self._copies.ns(move.way, len(move.sources)))
        self._log.moved(step, move, start_ns, end_ns)
        if move.job != IN_ORDER:
            self.ends[move.job] = max(end_ns, self.ends.get(move.job, 0))
        return end_ns

    def over(self, now_ns: int, step: int) -> tuple[int, ...]:
        """The jobs that are over by now, for the result of `step`: each is named once."""
        jobs = tuple(sorted([job for job, end_ns in self.ends.items() if end_ns <= now_ns]))
        for job in jobs:
            del self.ends[job]
        self._underway.landed(jobs)
        self._log.reported(jobs, step)
        return jobs
