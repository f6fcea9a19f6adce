"""What holds for every workload, whatever the scheduler: random small runs through the loop, checked at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import DEPTHS, FAMILIES, MOST_TOKENS, Case, Watch, contiguous_cases, ran, table_of, vllm_cases
from support.examples import examples
from support.helpers import AnyScheduler, Ask, Drive, again

from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.schedulers.transformers.scheduler import TransformersScheduler
from cbsim.schedulers.transformers.settings import TransformersOptions
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VllmOptions


@FAMILIES
@DEPTHS
@given(data=st.data())
@examples(40)
def test_every_request_ends_once_and_nothing_is_left(
    cases: st.SearchStrategy[Case], depth: int, data: st.DataObject
) -> None:
    """Budgets and seats are kept, rows continue where the last one ended and read the tokens of their own requests,
    tokens come from the rows that sampled them, plans know their longest decoding row, and the cache is free in
    the end; whatever was shared, forked, preempted, stopped or cancelled on the way."""
    build, workload = data.draw(cases)
    drive = Drive(build(), workload, depth)
    ran(drive, Watch(drive).step)


@DEPTHS
def test_an_executor_learns_of_replaced_blocks(depth: int) -> None:
    """Two equal prompts read in the same step: one of the two first blocks is freed, so nobody may read it any more."""
    options = TransformersOptions(
        name="transformers_fifo",
        block_size=4,
        num_blocks=8,
        max_batch_tokens=32,
        max_requests_per_batch=4,
        max_blocks_per_request=0,
        safety_margin=0.0,
    )
    specs = [RequestSpec(i, f"r{i}", 0, 5, 6, 6, prefix=(7,), prefix_block_tokens=4, prefix_tokens=4) for i in range(2)]
    drive = Drive(TransformersScheduler(options), [Ask(spec, 0, None, None) for spec in specs], depth)
    tables: list[bool] = []
    drive.on_step = lambda plan, rows: tables.extend(
        drive.executor.tables[row.spec] == table_of(drive.scheduler, row.spec) for row in rows
    )
    drive.run()
    assert all(tables)


def state(scheduler: AnyScheduler) -> dict[str, Any]:
    """All that the pool knows, by request id."""
    pool = scheduler.pool
    return {
        "tables": {request.spec.id: list(pool.table(request)) for request in pool.tables},
        "free": pool.free_order(),
        "keys": dict(pool._key_of),
        "waiting": [r.spec.id for r in scheduler.waiting],
        "running": [r.spec.id for r in scheduler.running],
    }


def history(build: Callable[[], AnyScheduler], workload: list[Ask], depth: int, slow: bool) -> list[dict[str, Any]]:
    """Plans row by row, with the state after each."""
    steps: list[dict[str, Any]] = []
    drive = Drive(build(), workload, depth)
    scheduler, schedule = drive.scheduler, drive.scheduler.schedule

    def slowly() -> StepPlan | None:
        scheduler.decoding.split()  # so that each request is planned by the rules for one
        return schedule()

    def note(plan: StepPlan, rows: list[Row]) -> None:
        shown = [(r.spec.id, r.start, r.tokens, r.blocks, r.chunk is None or r.chunk.outputs) for r in rows]
        blocks = plan.counts.table_blocks, plan.counts.new_blocks
        ends = {*plan.changes.ends}, plan.changes.ended
        counts = plan.step, plan.work.tokens, *blocks, plan.work.fast_decode, *ends
        steps.append({"rows": shown, "counts": counts, "preempted": plan.changes.preempted, **state(scheduler)})

    drive.on_step = note
    if slow:
        drive.overridden["schedule"] = slowly
    drive.run()
    steps.append({"tokens": {s.id: r.runs for s, r in drive.requests.items()}, **state(scheduler)})
    return steps


@FAMILIES
@DEPTHS
@given(data=st.data())
@examples(30)
def test_the_decode_batch_changes_no_decision(cases: st.SearchStrategy[Case], depth: int, data: st.DataObject) -> None:
    """Decoding requests advanced all at once, or each by the general rules: the same plans, blocks and tokens."""
    build, workload = data.draw(cases)
    fast, slow = (history(build, workload, depth, slow) for slow in (False, True))
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours == theirs


@FAMILIES
@given(data=st.data())
@examples(12)
def test_same_workload_same_run(cases: st.SearchStrategy[Case], data: st.DataObject) -> None:
    """A run is a function of scheduler options and workload: specs compare by identity, and no order depends on it."""
    build, workload = data.draw(cases)
    first, second = (history(build, w, 2, slow=False) for w in (workload, again(workload)))
    for one, other in zip(first, second, strict=True):
        assert one | UNNAMED == other | UNNAMED


UNNAMED = {"counts": None, "preempted": None}  # of a step: name requests by their specs


@DEPTHS
@given(case=contiguous_cases())
def test_nobody_grows_out_of_a_reservation(depth: int, case: Case) -> None:
    """A request has one piece from its admission on, large enough by its rule to the end: no block is added, nobody is
    preempted, and the queue is taken in order."""
    build, workload = case
    drive = Drive(build(), workload, depth)
    pieces: dict[RequestSpec, tuple[int, ...]] = {}

    def look(plan: StepPlan, rows: list[Row]) -> None:
        assert not plan.changes.grown and not plan.changes.preempted
        for chunk in plan.work.chunks:
            assert chunk.admitted == bool(chunk.blocks)
            if chunk.admitted:
                assert chunk.spec not in pieces
                pieces[chunk.spec] = chunk.blocks
        for row in rows:
            assert row.start + row.tokens <= len(pieces[row.spec]) * drive.scheduler.pool.block_size

    ran(drive, look)
    came = [spec for spec in drive.requests if spec in pieces]
    assert [spec for spec in pieces if spec in came] == [*pieces]
    assert [*pieces] == came


@DEPTHS
@given(case=vllm_cases())
def test_with_outputs_reserved_nobody_is_preempted(depth: int, case: Case) -> None:
    """A request is admitted only if everybody who runs could reach its limit; whoever waits is admitted in the end,
    since an empty cache holds any request that was not refused."""
    build, workload = case
    options = replace(build().options, reserve_output=True)  # type: ignore[type-var]
    preempted: list[object] = []
    ran(
        Drive(VllmScheduler(options), workload, depth),  # type: ignore[arg-type]
        lambda plan, rows: preempted.extend(plan.changes.preempted),
    )
    assert not preempted


def reserving(blocks: int, *, reserve: bool) -> VllmScheduler:
    sizes = {"block_size": 4, "num_blocks": 1 + blocks, "max_model_len": MOST_TOKENS, "max_num_seqs": 8}
    return VllmScheduler(VllmOptions(**sizes, max_num_batched_tokens=64, reserve_output=reserve))


@pytest.mark.parametrize(("blocks", "most"), [(5, 1), (6, 2), (8, 2), (9, 3)])
def test_room_for_outputs_by_hand(blocks: int, most: int) -> None:
    """Prompts of 4 with 9 outputs need 12 tokens of cache at their ends (the last token is never computed): 3 blocks
    each. Without reservation all three run at once, and fewer than 9 blocks mean that somebody loses theirs."""
    specs = [RequestSpec(i, f"r{i}", i, 4, 9, 9) for i in range(3)]
    for reserve in (True, False):
        drive = Drive(reserving(blocks, reserve=reserve), [Ask(spec, 0, None, None) for spec in specs], 1)
        plans: list[StepPlan] = []
        ran(drive, lambda plan, rows, plans=plans: plans.append(plan))
        assert max(plan.counts.running for plan in plans) == (most if reserve else 3)
        assert any(plan.changes.preempted for plan in plans) == (not reserve and blocks < 9)


@pytest.mark.parametrize(("holds", "most"), [(True, 2), (False, 1)])
def test_shared_blocks_are_needed_once_and_idle_ones_are_taken_from_the_free(holds: bool, most: int) -> None:
    """Five blocks; a request needs 3, of a prompt whose two first ones are known. While the first request holds
    them the second adds one, and both run. When they lie idle beside a stranger with 3, they are the two free ones: to
    use them leaves none for the third, so it waits."""
    shared: dict[str, Any] = {"prefix": (7, 8), "prefix_block_tokens": 4, "prefix_tokens": 8}
    first, again = (RequestSpec(i, f"r{i}", i, 9, 4, 4, **shared) for i in range(2))
    stranger = RequestSpec(2, "r2", 0, 9, 4, 4)
    asks = [Ask(first, 0, None, None), *([] if holds else [Ask(stranger, 30, None, None)])]
    drive = Drive(reserving(5, reserve=True), [*asks, Ask(again, 2 if holds else 31, None, None)], 1)
    plans: list[StepPlan] = []
    ran(drive, lambda plan, rows: plans.append(plan))
    assert max(plan.counts.running for plan in plans) == most
    assert max(chunk.cached for plan in plans for chunk in plan.work.chunks) == 8
    assert not any(plan.changes.preempted for plan in plans)
