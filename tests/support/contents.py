"""What lies in every place of the cache: an executor that performs rows and moves, and looks at what rows read.

It knows plans alone. Whatever a policy does with blocks, the context of each row has to be its own tokens, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cbsim.policy.plan import Row, StepPlan, StepResult, Underway
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import DEVICE, HOST, IN_ORDER, Direction, Place, Transfer
from support.helpers import Ask, Drive, Executor

Token = tuple[int, ...]  # a token, and all before it
OWN = 1000  # and the index of a request: what it says where its text has ended


def said(asks: Mapping[RequestSpec, Ask], spec: RequestSpec, position: int) -> Token:
    """What the KV at a position of a request is of."""
    text = asks[spec].text[: position + 1]
    return (*text, *[OWN + spec.index] * (position + 1 - len(text)))


class Contents:
    """The tokens in every place. Moves in order are performed before the rows of their plan.

    A move with a job may happen at any time until it is over. It writes as early as it may, so that its targets hold
    nothing until then, and reads as late as it may, so that it copies what its sources hold in the end.
    """

    def __init__(self, asks: Mapping[RequestSpec, Ask], block_size: int) -> None:
        self.moved = {DEVICE: 0, HOST: 0}  # blocks, by where they went
        self._asks = asks
        self._size = block_size
        self._held: dict[Place, list[Token | None]] = {}
        self._jobs: dict[int, list[Transfer]] = {}

    def step(self, plan: StepPlan, rows: Sequence[Row], tables: Mapping[RequestSpec, Sequence[int]]) -> None:
        """Perform a plan, whose rows have these tables. Raises AssertionError if a row reads what is not its own."""
        self.completed(plan.awaited)
        for move in plan.transfers:
            if move.job == IN_ORDER:
                self._copy(move)
            elif move.direction is not Direction.OUT:
                self._begin(move)
        for row in rows:
            self._write(row, tables[row.spec])
        for row in rows:
            self._read(plan.step, row, tables[row.spec])
        for move in plan.transfers:
            if move.job != IN_ORDER and move.direction is Direction.OUT:
                self._begin(move)

    def held(self, place: Place) -> list[Token | None]:
        """What a place holds."""
        return list(self._held.get(place, self._nothing()))

    def completed(self, jobs: Sequence[int]) -> None:
        """These are over."""
        for job in jobs:
            for move in self._jobs.pop(job, ()):
                self._copy(move)

    def _begin(self, move: Transfer) -> None:
        self._jobs.setdefault(move.job, []).append(move)
        for place in move.written:
            self._held[place] = self._nothing()

    def _copy(self, move: Transfer) -> None:
        for place, source in zip(move.written, [self.held(place) for place in move.read], strict=True):
            self.put(place, source)

    def put(self, place: Place, tokens: list[Token | None]) -> None:
        """A move has filled a place."""
        self.moved[place[0]] += 1
        self._held[place] = tokens

    def _nothing(self) -> list[Token | None]:
        return [None] * self._size

    def _write(self, row: Row, table: Sequence[int]) -> None:
        for position in range(row.start, row.start + row.tokens):
            held = self._held.setdefault((DEVICE, table[position // self._size]), self._nothing())
            held[position % self._size] = said(self._asks, row.spec, position)

    def _read(self, step: int, row: Row, table: Sequence[int]) -> None:
        for position in range(row.start + row.tokens):
            block = table[position // self._size]
            found = self._held.get((DEVICE, block), self._nothing())[position % self._size]
            wanted = said(self._asks, row.spec, position)
            assert found == wanted, (step, row.spec.id, f"position {position}, block {block}", found, wanted)


class Mover(Executor):
    """An executor whose jobs are over so many results after the step that ordered them."""

    def __init__(self, asks: Sequence[Ask], block_size: int, latency: Callable[[], int]) -> None:
        super().__init__(asks)
        self.asks = {ask.spec: ask for ask in asks}
        self.contents = Contents(self.asks, block_size)
        self.underway = Underway(block_size)
        self.latency = latency
        self._due: dict[int, tuple[int, int]] = {}  # job -> results until it is over, the step that ordered it

    def rows(self, plan: StepPlan) -> list[Row]:
        self.underway.planned(plan)
        for move in plan.transfers:
            if move.job != IN_ORDER and move.job not in self._due:
                self._due[move.job] = self.latency(), plan.step
        for job in plan.awaited:
            if job in self._due:
                self._due[job] = 0, self._due[job][1]
        rows = super().rows(plan)
        self.contents.step(plan, rows, self.tables)
        return rows

    def result(self, step: int) -> StepResult:
        over = [job for job, (left, ordered) in self._due.items() if left <= 0 and ordered <= step]
        self.contents.completed(over)
        for job in over:
            del self._due[job]
        self._due = {job: (left - 1, ordered) for job, (left, ordered) in self._due.items()}
        self.underway.completed(tuple(over))
        return StepResult(super().result(step).stopped, moved=tuple(over))


class Memory:
    """Blocks of device and host, and what was written in each of their places. Its steps come from plans alone."""

    def __init__(self, drive: Drive) -> None:
        self.drive, size = drive, drive.scheduler.pool.block_size
        self.contents, self.underway = Contents(drive.asks, size), Underway(size)
        self.moves: list[Transfer] = []

    def step(self, plan: StepPlan, rows: list[Row]) -> None:
        pool = self.drive.scheduler.pool
        self.underway.planned(plan)
        self.moves += plan.transfers
        for tier, block in (place for move in plan.transfers for place in (*move.read, *move.written)):
            assert 0 <= block <= (pool.num_blocks if tier == DEVICE else pool.host_blocks - 1)
        self.contents.step(plan, rows, self.drive.executor.tables)
