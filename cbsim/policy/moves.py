"""Moves of KV between places: blocks on the device, blocks of the host's tier.

A cache copies on write, swaps and offloads by the same means: its plan lists moves, an executor performs them. A move
without a job is in order with the steps: it comes after the rows of all plans before and before the rows of its own,
which may read its targets and write its sources; those of one plan follow each other as they are listed. A move with a
job goes on beside the steps: to the host it begins when the rows of its plan have run, to the device when those of the
plans before have. Until a result names the job (`StepResult.moved`), or a plan waits for it (`StepPlan.awaited`),
nobody reads its targets, and neither its sources nor its targets are handed out.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from cbsim.policy.value import value

if TYPE_CHECKING:
    from cbsim.policy.plan import StepPlan
    from cbsim.policy.request import RequestSpec

IN_ORDER = -1
Place = tuple[str, int]  # a tier, a block of it
DEVICE, HOST = "device", "host"


class Way(IntEnum):
    """From where to where."""

    COPY = 0  # a block on the device to another
    OUT = 1  # a block on the device to one of the host
    IN = 2  # a block of the host to one on the device


@value(init=False)
class Move:
    """The KV of whole blocks: `sources[i]` is copied to `targets[i]`. `spec` is the request whose KV it is, None where
    that is nobody's in particular. `job` is IN_ORDER, or a number: moves that have it are one job.
    """

    way: Final[Way]
    sources: Final[tuple[int, ...]]
    targets: Final[tuple[int, ...]]
    spec: Final[RequestSpec | None]
    job: Final[int]

    def __init__(
        self,
        way: Way,
        sources: tuple[int, ...],
        targets: tuple[int, ...],
        spec: RequestSpec | None = None,
        job: int = IN_ORDER,
    ) -> None:
        assert len(sources) == len(targets) > 0, (way, sources, targets)
        self.way = way
        self.sources = sources
        self.targets = targets
        self.spec = spec
        self.job = job

    @property
    def read(self) -> list[Place]:
        tier = HOST if self.way is Way.IN else DEVICE
        return [(tier, block) for block in self.sources]

    @property
    def written(self) -> list[Place]:
        tier = HOST if self.way is Way.OUT else DEVICE
        return [(tier, block) for block in self.targets]


def arriving(moves: tuple[Move, ...]) -> int:
    """Blocks on the device that moves in order fill. They were handed out for that."""
    return sum([len(move.targets) for move in moves if move.job == IN_ORDER and move.way is not Way.OUT])


class Underway:
    """The moves that go on beside the steps, as plans and results tell of them: an executor's side of the rule that a
    block is not handed out while a move reads or writes it. Call `planned` once for every plan, in order.
    """

    def __init__(self, block_size: int) -> None:
        self.jobs: dict[int, list[Move]] = {}
        self._block_size = block_size

    def planned(self, plan: StepPlan) -> None:
        """Raises AssertionError if the plan hands out a block of a move that is under way, or reads what one writes."""
        for job in plan.awaited:
            self.jobs.pop(job, None)
        if self.jobs:
            self._check(plan)
        for move in plan.moves:
            if move.job != IN_ORDER:
                self.jobs.setdefault(move.job, []).append(move)

    def landed(self, jobs: tuple[int, ...]) -> None:
        """These are over."""
        for job in jobs:
            self.jobs.pop(job, None)

    def _check(self, plan: StepPlan) -> None:
        read, written = self._blocks()
        wanted = {(DEVICE, block) for block in plan.changes.blocks}
        needed: set[Place] = set()
        for chunk in plan.work.chunks:
            found = chunk.cached // self._block_size if chunk.admitted else 0
            needed.update((DEVICE, block) for block in chunk.blocks[:found])
            wanted.update((DEVICE, block) for block in chunk.blocks[found:])
        for move in plan.moves:
            needed.update(move.read)
            wanted.update(move.written)
        assert not wanted & (read | written), (plan.step, "handed out under a move", wanted & (read | written))
        assert not needed & written, (plan.step, "read before a move has written them", needed & written)

    def _blocks(self) -> tuple[set[Place], set[Place]]:
        """What the moves under way read, and what they write."""
        moves = [move for group in self.jobs.values() for move in group]
        return {place for move in moves for place in move.read}, {place for move in moves for place in move.written}
