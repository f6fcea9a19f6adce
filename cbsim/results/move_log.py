"""The moves of KV in a run as its driver tells of them: a row each, in the order in which plans list them."""

from __future__ import annotations

from array import array

from cbsim.policy.moves import IN_ORDER, Move
from cbsim.results import columns

NAMES = tuple(column.name for column in columns.MOVES)
UNREPORTED = -1


class MoveLog:
    """`rows` are the columns of columns.MOVES, row after row."""

    def __init__(self) -> None:
        self.rows = array("q")
        self._of_job: dict[int, list[int]] = {}  # where the step is noted whose result names it

    def moved(self, step: int, move: Move, start_ns: int, end_ns: int) -> None:
        """A move that the plan of `step` lists, and when it began and ended, or will."""
        index = -1 if move.spec is None else move.spec.index
        row = (step, index, move.job, int(move.way), len(move.sources), start_ns, end_ns, UNREPORTED)
        self.rows.extend(row)
        if move.job != IN_ORDER:
            self._of_job.setdefault(move.job, []).append(len(self.rows) - 1)

    def reported(self, jobs: tuple[int, ...], step: int) -> None:
        """The result of `step` named these jobs."""
        for job in jobs:
            for at in self._of_job.pop(job, ()):
                self.rows[at] = step
