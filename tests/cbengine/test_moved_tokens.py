"""Moves of KV leave no trace: whatever is copied, sent to the host or swapped, and however late, every text is what it
would be alone. The scheduler moves blocks for no reason (restless.py); devices are the hash that checks every step
(oracle.py), this process, and a worker; and planted faults are found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine.oracle import Toy, check_toy_text, toy_run, toy_text
from support.engine.restless import Late, Restless
from support.engine.served import INLINE, LOOPS, MS, PROMPTS, Case, Run, check_texts, requests, server, spec

from cbengine import build
from cbengine.build import Setup
from cbengine.device.base import Inline, Modelled
from cbengine.device.moves import ModelledMoves, Moved
from cbengine.device.process import Process
from cbengine.model.kvcache import Carrier
from cbsim.cost.base import Copies
from cbsim.policy.plan import StepPlan
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer
from cbsim.record import invariants
from cbsim.runs import assemble
from cbsim.scenario.scenario import Scenario, depth
from cbsim.workload.requests import Workload

KINDS = ("COPY", "OUT", "IN", "OUT by job", "IN by job", "swapped", "awaited")
Served = tuple[Run, Restless]


def restless(act: Callable[[], Any], seed: int, **options: Any) -> tuple[Any, Restless]:
    """What `act` returns if schedulers are restless, and the one that it made."""
    made: list[Restless] = []

    def scheduler(scenario: Scenario, loop: str) -> Restless:
        made.append(Restless(scenario.options(loop), seed, **options))
        return made[-1]

    with mock.patch.object(assemble, "scheduler", scheduler):
        return act(), made[0]


def load(cancels: bool = False) -> Workload:
    specs = [spec(i, PROMPTS[i % 5], 20 - i, arrival_ns=i * 4 * MS, max_tokens=20) for i in range(7)]
    return Workload(specs, 7, [(90 * MS, specs[1]), (95 * MS, specs[5])] if cancels else [])


def case(blocks: int = 24, cancels: bool = False) -> Case:
    return Case(server("vllm", 4, blocks, 64, 4, sharing=False), load(cancels))


# -- nothing shows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@given(
    specs=requests(),
    blocks=st.sampled_from((12, 16, 40)),
    budget=st.sampled_from((7, 64)),
    seats=st.integers(1, 5),
    lag=st.integers(0, 6),
    seed=st.integers(0, 1 << 30),
    calm=st.sampled_from((0.2, 0.6, 0.9)),
    gone=st.booleans(),
)
@settings(max_examples=30)
def test_moves_leave_no_trace(
    loop: str, specs: Any, blocks: int, budget: int, seats: int, lag: int, seed: int, calm: float, gone: bool
) -> None:
    """Random loads and caches, jobs that take up to six steps: every step's arrays say what its plan says, no block of
    a move under way is touched, each job is named once, and every text is that of its request alone.
    """
    cancels = [(specs[0].arrival_ns + 40 * MS, specs[0])] if gone else []
    served = Case(server("vllm", 4, blocks, budget, seats, sharing=False), Workload(specs, len(specs), cancels))
    (run, _), scheduler = restless(lambda: toy_run(served, loop, lag=lag), seed, calm=calm)
    check_texts(run, check_toy_text)
    assert not scheduler._planned
    assert sorted(scheduler._places) == list(range(scheduler.pool.host_blocks))
    for what in scheduler.moved:
        event(what)
    event(f"latest job: {max(scheduler.late, default=0)} steps")


def inline(lag: int) -> Callable[..., Any]:
    return lambda _, loop, plan, *__: Inline(Late(plan, lag)(), plan.capacity, depth(loop))


def process(lag: int) -> Callable[..., Any]:
    return lambda _, loop, plan, *__: Process(Late(plan, lag), plan.capacity, depth(loop))


@pytest.mark.parametrize("lag", [None, 1, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_texts_are_those_of_generate(loop: str, lag: int | None) -> None:
    """A real model: at once, as the device itself does it, and later."""
    kinds: Counter[str] = Counter()
    for seed in range(3):
        device = None if lag is None else inline(lag)
        run, scheduler = restless(lambda: case(cancels=True).run(loop, device=device), seed)  # noqa: B023
        check_texts(run)
        kinds.update(scheduler.moved)
        assert max(scheduler.late) >= (lag or 0) - (loop == "async")  # the result before may name it
    assert all(kinds[kind] for kind in KINDS if lag or kind != "awaited"), kinds


@pytest.mark.parametrize("lag", [None, 4])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_worker_moves(loop: str, lag: int | None) -> None:
    """... in another process, on the real clock. Jobs are carried out behind their step: a later result names them."""
    device = process(lag) if lag else None
    setup = Setup(device="process")
    run, scheduler = restless(lambda: case().run(loop, setup, device=device, tick_ns=0), 2)
    check_texts(run)
    assert all(scheduler.moved[kind] for kind in KINDS), scheduler.moved
    assert min(scheduler.late) >= (1 if loop == "sync" else 0)
    assert max(scheduler.late) >= (lag or 1)


@pytest.mark.parametrize("loop", LOOPS)
def test_undisturbed_steps_ask_for_nothing(loop: str) -> None:
    """Without moves the device is never asked for them, and there is no host tier."""
    with (
        mock.patch.object(Inline, "moved", side_effect=AssertionError("asked")),
        mock.patch.object(Carrier, "carry", side_effect=AssertionError("carried")),
    ):
        run = case().run(loop)
    assert not run.device._executor.has_host_tier
    check_texts(run)


# -- planted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_a_block_that_is_taken_again_too_early_shows(loop: str) -> None:
    """An executor that is late and does not wait for what a plan awaits."""

    class Deaf(Toy):
        def launch(self, slot: int, header: Any, plan: Any, *excess: Any) -> None:
            super().launch(slot, header, replace(plan, awaited=()) if plan.awaited else plan, *excess)

    wrong = 0
    for seed in range(3):
        (run, _), _ = restless(lambda: toy_run(case(13), loop, lag=6, toy=Deaf), seed)
        wrong += sum(text.outputs != toy_text(text.prompt, len(text.outputs)) for text in run.engine.sequences.values())
    assert wrong > 0


def test_a_scheduler_that_does_not_wait_is_found() -> None:
    """It hands out blocks that a job still reads, and says nothing."""

    class Hasty(Restless):
        def _drop(self, request: Any) -> None:
            before = list(self.decoding.awaited)
            super()._drop(request)
            self.decoding.awaited[:] = before

    handed_out = pytest.raises(AssertionError, match="handed out under a transfer")
    with mock.patch("test_moved_tokens.Restless", Hasty), handed_out:
        restless(lambda: [toy_run(case(13, cancels=True), "sync", lag=6) for _ in range(20)], 0)


def test_a_job_of_several_moves_is_over_with_the_last() -> None:
    """Results name jobs, ascending; a move in order has none."""
    engine, device = build.engine(case().scenario, "sync", load(), INLINE)
    jobs = {(4, 0): 3, (4, 1): 3, (4, 2): IN_ORDER, (5, 0): 1, (5, 1): 2}
    engine._moving = {key: Transfer(Direction.COPY, (0,), (1,), None, job) for key, job in jobs.items()}
    told = []
    for over in ([(4, 1), (4, 2)], [], [(5, 0), (4, 0)], [(5, 1)]):
        device.moved = lambda _, over=over: [Moved(*key, 0, 1) for key in over]  # type: ignore[method-assign, misc]
        told.append(engine._moved(StepPlan(6)))
    assert told == [(), (), (1, 3), (2,)]
    assert not engine._moving
    engine.close()


# -- moves that take a cost's time, by hand ---------------------------------------------------------------------------


COPIES = Copies(10, 1e9, 20e9)  # of a block: 10 ns from and to the host, 1 ns on the device


def some(way: Direction, blocks: int, job: int = -1) -> Transfer:
    return Transfer(way, tuple(range(blocks)), tuple(range(50, 50 + blocks)), None, job)


def test_when_moves_happen() -> None:
    """In order: each after the other, before the rows; copies are the step's own time. Jobs: on the lane of their
    direction, to the host behind the rows, from it as soon as they could run.
    """
    moves = ModelledMoves(COPIES)
    first = StepPlan(
        0,
        transfers=(
            some(Direction.OUT, 2),
            some(Direction.COPY, 3),
            some(Direction.IN, 1),
            some(Direction.OUT, 4, job=7),
        ),
    )
    assert moves.before(first, 100) == 100 + 20 + 10
    assert moves.copying_ns(first) == 3
    moves.after(first, 130, 200)
    second = StepPlan(1, transfers=(some(Direction.IN, 5, job=8), some(Direction.OUT, 1, job=9)))
    assert moves.before(second, 200) == 200, "nobody waits for a job"
    moves.after(second, 200, 230)
    third = StepPlan(2, awaited=(9, 7))
    assert moves.before(third, 230) == 250, "the lane was busy with the job before"
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
    assert moves.before(StepPlan(3, awaited=(7,)), 240) == 240, "it is over"


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
        copies = Copies(3 * MS, 1e9, 2e9)  # 3 ms for each block, wherever it goes
        return Noted(assemble.cost_model(scenario), copies, plan.capacity, depth(loop), clock, graphs=False)

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
        half_a_second = Copies(500 * MS, 1e9, 1e9)  # for each block
        return Modelled(assemble.cost_model(scenario), half_a_second, plan.capacity, depth(loop), clock, graphs=False)

    run, scheduler = restless(
        lambda: case().run(loop, Setup(device="modelled"), device=device, tick_ns=0), 1, calm=0.3, haste=0
    )
    empty = int((run.steps["rows"] == 0).sum())
    jobs = sum(scheduler.moved[kind] for kind in ("OUT by job", "IN by job", "OUT", "IN", "COPY"))
    assert 0 < empty <= 2 * jobs
