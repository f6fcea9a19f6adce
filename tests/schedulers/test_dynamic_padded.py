"""Dynamic batching on padded tensors: what an insertion costs, in closed form; and what holds of any run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import DEPTHS, MOST_TOKENS, asks, ran
from support.helpers import Ask, Drive, ask

from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.schedulers.simple.fcfs import DYNAMIC_PADDED
from cbsim.schedulers.simple.settings import PaddedOptions


def padding(plan: StepPlan) -> int:
    return plan.work.computed_tokens - plan.work.tokens


def served(workload: list[Ask], seats: int, depth: int = 1, num_blocks: int = 1000) -> list[StepPlan]:
    options = PaddedOptions(name="dynamic_padded", filled=True, batch_size=seats, block_size=4, num_blocks=num_blocks)
    plans: list[StepPlan] = []
    ran(Drive(DYNAMIC_PADDED.make(options), workload, depth), lambda plan, rows: plans.append(plan))
    return plans


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("batch", "prompt", "cost"), [(8, 100, 693), (1, 100, 0), (8, 1, 0), (2, 3, 2), (33, 12, 352)])
def test_a_prompt_that_joins_costs_its_others_its_length(batch: int, prompt: int, cost: int, depth: int) -> None:
    """B rows with its own, n tokens: (n - 1)(B - 1) tokens of padding, and none in any step of decoding alone."""
    workload = [*[ask(i, 1, 40, 0) for i in range(batch - 1)], ask(batch - 1, prompt, 3, 9)]
    plans = served(workload, batch, depth)
    assert cost == (prompt - 1) * (batch - 1)
    assert [padding(plan) for plan in plans if padding(plan)] == [cost] * bool(cost)
    assert sum(padding(plan) for plan in plans) == cost


@DEPTHS
@given(data=st.data(), seats=st.integers(1, 8))
def test_any_run_is_a_rectangle_and_nobody_is_passed_over(depth: int, data: st.DataObject, seats: int) -> None:
    """Random requests, equal arrivals, cancels at any moment, tiny caches: all rows of a step have one width, places
    and cache are not exceeded, tables do not grow, and requests are let in in the order of their arrival: with room
    for the first of the queue it is let in at once, so nobody starves."""
    size = data.draw(st.sampled_from([1, 2, 4]))
    blocks = data.draw(st.integers(MOST_TOKENS // size, 3 * MOST_TOKENS // size))
    scheduler = DYNAMIC_PADDED.make(
        PaddedOptions(name="dynamic_padded", filled=True, batch_size=seats, block_size=size, num_blocks=blocks)
    )
    admitted: list[RequestSpec] = []

    def seen(plan: StepPlan, rows: list[Any]) -> None:
        width = max((row.tokens for row in rows), default=1)
        assert plan.work.computed_tokens == width * plan.work.rows
        assert not plan.changes.grown and not plan.changes.preempted
        assert len(scheduler.running) <= seats
        admitted.extend(row.spec for row in rows if row.chunk is not None and row.chunk.admitted)
        if scheduler.waiting and len(scheduler.running) < seats:
            spec = scheduler.waiting[0].spec
            assert -(-(spec.prompt_tokens + spec.max_tokens - 1) // size) > scheduler.pool.free

    drive = ran(Drive(scheduler, data.draw(asks(size)), depth), seen)
    assert admitted == [spec for spec in drive.requests if spec in {*admitted}]


def test_what_never_fits_is_refused() -> None:
    options = PaddedOptions(name="dynamic_padded", filled=True, batch_size=2, block_size=4, num_blocks=3)
    scheduler = DYNAMIC_PADDED.make(options)
    assert scheduler.refusal(RequestSpec(0, "r0", 0, 5, 1, 8)) is None
    assert scheduler.refusal(RequestSpec(0, "r0", 0, 6, 1, 8)) == "14 tokens need 4 blocks, the cache has 3"
