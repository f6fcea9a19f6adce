"""Moves that take a cost's time: when each begins and ends, what waits for it, and when it is told; by hand."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from support.engine.served import LOOPS, MS
from test_moved_tokens import KINDS, case, restless

from cbengine.build import Setup
from cbengine.device.base import Modelled
from cbengine.device.moves import ModelledMoves, Moved
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import Direction, Transfer
from cbsim.record import invariants
from cbsim.runs import assemble
from cbsim.scenario.scenario import depth


def cost(way: Direction, blocks: int) -> int:
    return blocks * (1 if way is Direction.COPY else 10)


def some(way: Direction, blocks: int, job: int = -1) -> Transfer:
    return Transfer(way, tuple(range(blocks)), tuple(range(50, 50 + blocks)), None, job)


def test_when_moves_happen() -> None:
    """In order: each after the other, before the rows; copies are the step's own time. Jobs: on the lane of their
    direction, to the host behind the rows, from it as soon as they could run.
    """
    moves = ModelledMoves(cost)
    first = StepPlan(
        0,
        transfers=(
            some(Direction.OUT, 2),
            some(Direction.COPY, 3),
            some(Direction.IN, 1),
            some(Direction.OUT, 4, job=7),
        ),
    )
    assert moves.before_rows(first, 100) == 100 + 20 + 10
    assert moves.copying_ns(first) == 3
    moves.after_rows(first, 130, 200)
    second = StepPlan(1, transfers=(some(Direction.IN, 5, job=8), some(Direction.OUT, 1, job=9)))
    assert moves.before_rows(second, 200) == 200, "nobody waits for a job"
    moves.after_rows(second, 200, 230)
    third = StepPlan(2, awaited=(9, 7))
    assert moves.before_rows(third, 230) == 250, "the lane was busy with the job before"
    assert moves.next_ns == 120
    assert moves.finished(130) == [Moved(0, 0, 100, 120), Moved(0, 2, 120, 130)]
    assert moves.finished(130) == []
    assert moves.next_ns == 133
    assert sorted(moves.finished(250)) == [
        Moved(0, 1, 130, 133),
        Moved(0, 3, 200, 240),
        Moved(1, 0, 200, 250),
        Moved(1, 1, 240, 250),
    ]
    assert moves.before_rows(StepPlan(3, awaited=(7,)), 240) == 240, "it is over"


@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_on_modelled_lanes(loop: str) -> None:
    """Every move has its time and is told once; the step table is that of a machine."""
    told: list[Moved] = []

    class Noted(Modelled):
        def moved(self, until_ns: int | None) -> list[Moved]:
            found = super().moved(until_ns)
            told.extend(found)
            return found

    def device(scenario: Any, loop: str, plan: Any, setup: Any, clock: Any) -> Modelled:
        return Noted(
            assemble.cost_model(scenario), lambda way, n: n * 3 * MS, plan.capacity, depth(loop), clock, graphs=False
        )

    run, scheduler = restless(lambda: case().run(loop, Setup(device="modelled"), device=device, tick_ns=0), 4)
    assert all(scheduler.moved[kind] for kind in KINDS), scheduler.moved
    assert len({moved[:2] for moved in told}) == len(told) == sum(scheduler.moved[kind] for kind in KINDS[:5])
    assert {moved.end_ns - moved.start_ns for moved in told} <= {n * 3 * MS for n in range(1, 25)}
    assert max(scheduler.late) > 1
    invariants.check(run.steps, depth=depth(loop), overlap=True, total_blocks=run.engine.scheduler.pool.num_blocks)


def test_the_data_sheet_says_how_long_a_move_takes() -> None:
    """Bytes of the blocks over the link, or twice through the GPU's memory."""
    given = case().scenario
    block, gpu = given.block_size * given.model.kv_bytes_per_token, given.hardware
    copies = assemble.copies(given)
    assert copies.ns(Direction.OUT, 3) == copies.ns(Direction.IN, 3) == round(3 * block / gpu.pcie_bytes_s * 1e9)
    assert copies.ns(Direction.COPY, 3) == round(6 * block / gpu.memory_bandwidth_bytes_s * 1e9)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_without_rows_waits_for_a_move(loop: str) -> None:
    """Everybody is out, and the link takes its time: two empty steps for a move at most, not a thousand."""

    def device(scenario: Any, loop: str, plan: Any, setup: Any, clock: Any) -> Modelled:
        return Modelled(
            assemble.cost_model(scenario), lambda way, n: 500 * MS, plan.capacity, depth(loop), clock, graphs=False
        )

    run, scheduler = restless(
        lambda: case().run(loop, Setup(device="modelled"), device=device, tick_ns=0), 1, calm=0.3, haste=0
    )
    empty = int((run.steps["rows"] == 0).sum())
    jobs = sum(scheduler.moved[kind] for kind in ("OUT by job", "IN by job", "OUT", "IN", "COPY"))
    assert 0 < empty <= 2 * jobs
