"""A scheduler that moves KV about for no reason, by every rule of policy/transfers.py, and executors that are late.

`Restless` is vLLM's rules; between its plans it copies blocks of running requests to others, sends them to the host and
back, in order with the steps or by jobs beside them, and swaps whole requests, whose seat and slot others may have
meanwhile. Nobody's text may show it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from cbengine.build import ExecutorPlan
from cbengine.device.executor import Executor
from cbengine.device.moves import InPlace, numbered
from cbsim.policy.plan import Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer
from cbsim.schedulers.vllm.scheduler import VllmScheduler

HOST_BLOCKS = 24


class Trip:
    """Blocks of a request on their way to the host and back. `indices` are their places in its table, None for a
    request that is out as a whole, with `computed` tokens. `job` is the one under way.
    """

    def __init__(self, request: Request, indices: list[int] | None, places: list[int], computed: int) -> None:
        self.request, self.indices, self.places, self.computed = request, indices, places, computed
        self.job: int | None = None
        self.held: list[int] = []  # blocks that are in nobody's table
        self.back = False  # on the way in, or there


class Restless(VllmScheduler):
    """Prefix caching has to be off: blocks have one owner. `moved` counts moves by kind. `calm` is how likely a request
    is left alone in a step, `haste` how likely a plan waits for a job.
    """

    def __init__(self, options: Any, seed: int, *, calm: float = 0.5, haste: float = 0.2) -> None:
        super().__init__(options)
        self.pool.host_blocks = HOST_BLOCKS
        self.moved: dict[str, int] = {}
        self.late: list[int] = []  # for each job that a result named: steps since it was planned
        self._rng, self._calm, self._haste = random.Random(seed), calm, haste
        self._places = list(range(HOST_BLOCKS))
        self._trips: list[Trip] = []
        self._jobs = 0
        self._planned: dict[int, int] = {}  # job -> the step that lists it
        self._waited: set[int] = set()  # jobs that a plan waits for, and no result has named

    @property
    def idle(self) -> bool:
        return super().idle and not self._trips and not self._planned

    def schedule(self) -> StepPlan:
        away = {trip.request for trip in self._trips}
        self._go_on()
        self.decoding.split()
        for request in list(self.decoding.unbatched):
            if self._rng.random() > self._calm and not request.fresh and request not in away:
                self._disturb(request)
        plan = super().schedule()
        for move in plan.transfers:
            self._count(f"{move.direction.name}{'' if move.job == IN_ORDER else ' by job'}")
            if move.job != IN_ORDER:
                self._planned[move.job] = plan.step
        self._waited.update(plan.awaited)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        for job in result.moved:
            self.late.append(plan.step - self._planned.pop(job))  # once, or this is a KeyError
            self._waited.discard(job)
            for trip in self._trips:
                if trip.job == job:
                    trip.job = None
        return super().update(plan, result)

    def _count(self, what: str) -> None:
        self.moved[what] = self.moved.get(what, 0) + 1

    # -- what it does for no reason -----------------------------------------------------------------------------------

    def _disturb(self, request: Request) -> None:
        table, full = self.pool.tables[request], request.computed // self.pool.block_size
        held = -(-request.computed // self.pool.block_size)
        what = self._rng.choice(("copy", "round trip", "job", "job", "swap", "swap by job"))
        if what.startswith("swap"):
            if 0 < held <= len(self._places):
                self._swap(request, by_job=what.endswith("job"))
        elif what == "job":
            indices = self._rng.sample(range(full), min(full, 2))
            if indices and len(indices) <= len(self._places):
                self._send(request, indices)
        elif held and (moved := self._rng.sample(range(held), min(held, 3, self.pool.free))):
            if what == "round trip" and len(moved) > len(self._places):
                return
            old, new = [table[i] for i in moved], self.pool._free.take(len(moved))
            if what == "copy":
                self._move(Direction.COPY, old, new, request)
            else:
                places = self._take_places(len(moved))
                self._move(Direction.OUT, old, places, request)
                self._move(Direction.IN, places, new, request)
                self._places += places
            self._replace(request, moved, old, new)

    def _send(self, request: Request, indices: list[int]) -> None:
        """Full blocks: nobody writes them any more, and their owner goes on reading them."""
        trip = Trip(request, indices, self._take_places(len(indices)), 0)
        self._trips.append(trip)
        table = self.pool.tables[request]
        trip.job = self._move(Direction.OUT, [table[i] for i in indices], trip.places, request, by_job=True)

    def _swap(self, request: Request, *, by_job: bool) -> None:
        """Out as a whole: its seat is free at once, its blocks when they have been read."""
        computed, pool = request.computed, self.pool
        blocks = pool.tables[request][: pool.blocks_for(computed)]
        trip = Trip(request, None, self._take_places(len(blocks)), computed)
        trip.job = self._move(Direction.OUT, blocks, trip.places, request, by_job=by_job)
        if by_job:
            self._hold(trip, blocks)
            del pool.tables[request][: len(blocks)]
        self._trips.append(trip)
        del self.running[request]
        self.decoding.preempt(request, drop_in_flight=False)
        self._count("swapped")

    # -- on the way ---------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Whose job is over, or who does not want to wait for it, goes on."""
        for trip in list(self._trips):
            if trip.job is not None and self._rng.random() < self._haste:
                self.decoding.awaited.append(trip.job)
                self._count("awaited")
                trip.job = None
            if trip.job is not None:
                continue
            if trip.indices is None:
                self._bring_back(trip)
            elif not trip.back:
                if self.pool.free >= len(trip.places):
                    self._hold(trip, self.pool._free.take(len(trip.places)))
                    trip.job = self._move(Direction.IN, trip.places, trip.held, trip.request, by_job=True)
                    trip.back = True
            else:
                table = self.pool.tables[trip.request]
                self._replace(trip.request, trip.indices, [table[i] for i in trip.indices], self._let_go(trip))
                self._trip_over(trip)

    def _bring_back(self, trip: Trip) -> None:
        """A swapped request, if there is room: its blocks first, a row when they are there."""
        request, pool = trip.request, self.pool
        if not trip.back:
            pool._free.give(self._let_go(trip), 0)
            needed = pool.blocks_for(trip.computed)
            if len(self.running) >= self.options.max_num_seqs or pool.free < min(needed + 1, pool.num_blocks):
                return
            by_job, trip.back = self._rng.random() < 0.5, True
            self._hold(trip, pool._free.take(needed))
            trip.job = self._move(Direction.IN, trip.places, trip.held, request, by_job=by_job)
            if by_job:
                return
        if len(self.running) < self.options.max_num_seqs:
            self.decoding.admit(request, trip.computed)
            self.running[request] = None
            pool.tables[request] = self._let_go(trip)
            self._trip_over(trip)

    def _drop(self, request: Request) -> None:
        """It has ended or has to be computed again: what moves is nobody's; the next plan waits for it."""
        for trip in [trip for trip in self._trips if trip.request is request]:
            listed = [move for move in self.decoding.transfers if move.job == trip.job]
            for move in listed:  # not even planned
                self.decoding.transfers.remove(move)
            if trip.job is not None and not listed:
                self.decoding.awaited.append(trip.job)
                self._count("awaited")
            self.pool._free.give(self._let_go(trip), 0)
            self._trip_over(trip)

    def _finish(self, request: Request, reason: Finish) -> None:
        parked = any(trip.request is request and trip.indices is None for trip in self._trips)
        self._drop(request)
        if parked:
            self.decoding.end(request, reason)
        else:
            super()._finish(request, reason)

    def _preempt(self, victim: Request, line: list[Request], index: int, step: Any) -> int:
        moved = super()._preempt(victim, line, index, step)
        self._drop(victim)
        return moved

    # -- blocks and places --------------------------------------------------------------------------------------------

    def _move(
        self, way: Direction, sources: Sequence[int], targets: Sequence[int], of: Request, *, by_job: bool = False
    ) -> int | None:
        job = IN_ORDER
        if by_job:
            self._jobs, job = self._jobs + 1, self._jobs
        self.decoding.transfers.append(Transfer(way, tuple(sources), tuple(targets), of.spec, job))
        return job if by_job else None

    def _replace(self, request: Request, indices: Sequence[int], old: list[int], new: list[int]) -> None:
        table = self.pool.tables[request]
        for i, block in zip(indices, new, strict=True):
            table[i] = block
            self.decoding._replaced.append((request.spec, i, block))
        self.pool._free.give(old, 0)

    def _hold(self, trip: Trip, blocks: Sequence[int]) -> None:
        trip.held = list(blocks)
        self.pool.tables[trip] = trip.held  # type: ignore[index]  # so that every block has an owner

    def _let_go(self, trip: Trip) -> list[int]:
        return self.pool.tables.pop(trip, [])  # type: ignore[call-overload, no-any-return]

    def _take_places(self, count: int) -> list[int]:
        self._rng.shuffle(self._places)
        return [self._places.pop() for _ in range(count)]

    def _trip_over(self, trip: Trip) -> None:
        self._trips.remove(trip)
        self._places += trip.places


# -- executors that are late ------------------------------------------------------------------------------------------


class LateMover(InPlace):
    """A job is carried out `lag` steps after the one that lists it, unless a plan waits for it. Until then there is
    nothing to be read where it writes.
    """

    def __init__(self, executor: Executor, lag: int) -> None:
        super().__init__(executor.carrier())
        self._lag, self._steps = lag, 0
        self._waiting: list[tuple[int, int, int, Transfer]] = []  # due at, step, number, move

    def carry(self, plan: StepPlan, *, in_order: bool) -> None:
        if in_order:
            self._perform(lambda due, job: job in plan.awaited)
            super().carry(plan, in_order=True)
            return
        due = self._steps + self._lag
        self._waiting += [(due, plan.step, at, move) for at, move in numbered(plan, in_order=False)]

    def tick(self) -> None:
        """Another step is computed now."""
        self._steps += 1
        self._perform(lambda due, job: due <= self._steps)

    def _perform(self, chosen: Any) -> None:
        for entry in list(self._waiting):
            due, step, at, move = entry
            if chosen(due, move.job):
                self._waiting.remove(entry)
                self.perform(step, at, move)


class Late:
    """Makes the executor of a plan, with a late mover. Can be sent to a worker process."""

    def __init__(self, plan: ExecutorPlan, lag: int) -> None:
        self.plan, self.lag = plan, lag

    def __call__(self) -> Executor:
        executor = self.plan()
        mover, update_tables = LateMover(executor, self.lag), executor.update_tables

        def ticking(*step: Any) -> None:
            mover.tick()
            update_tables(*step)

        executor.mover = lambda: mover  # type: ignore[method-assign]
        executor.update_tables = ticking  # type: ignore[method-assign]
        return executor
