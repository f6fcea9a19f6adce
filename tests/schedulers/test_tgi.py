"""text-generation-inference's batching against a plain model of its router, written as its two loops; and what its
bounds promise: nobody is passed over, nobody starves, all that runs has room to its end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import DEPTHS, MOST_TOKENS, asks, ran
from support.helpers import Ask, Drive, ask

from cbsim.policy.plan import Outcome, StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.schedulers.simple.fcfs import TGI, Fcfs
from cbsim.schedulers.simple.settings import TgiOptions

Said = tuple[str, list[RequestSpec]]


class Router:
    """The queue and the batching task. Whoever drives it adds to `queue`, and takes from `batch` who has ended."""

    def __init__(self, options: TgiOptions) -> None:
        self.o = options
        self.queue: list[RequestSpec] = []
        self.batch: list[RequestSpec] = []

    def next_batch(self, least: int | None, most: int, budget: int) -> list[RequestSpec]:
        """Entries for a prefill, none if they are fewer than `least`."""
        o, taken = self.o, list[RequestSpec]()
        if least is not None and len(self.queue) < least:
            return []
        held = sum(-(-(s.prompt_tokens + s.max_tokens - 1) // o.block_size) for s in self.batch)
        for spec in self.queue:
            tried = [*taken, spec]
            if sum(s.prompt_tokens for s in tried) > o.max_batch_prefill_tokens or len(tried) > most:
                break
            if sum(s.prompt_tokens + s.max_tokens for s in tried) > budget:
                break
            blocks = sum(-(-(s.prompt_tokens + s.max_tokens - 1) // o.block_size) for s in tried)
            if held + blocks > o.num_blocks:
                break
            taken = tried
        if least is not None and len(taken) < least:
            return []
        self.queue = self.queue[len(taken) :]
        return taken

    def steps(self) -> Iterator[Said | None]:
        o = self.o
        while True:
            new = self.next_batch(None, o.max_batch_size, o.max_batch_total_tokens)
            if not new:
                yield None
                continue
            self.batch += new
            yield "prefill", new
            waited = 1
            while self.batch:
                size = len(self.batch)
                budget = o.max_batch_total_tokens - sum(s.prompt_tokens + s.max_tokens for s in self.batch)
                least = None if waited >= o.max_waiting_tokens else int(size * o.waiting_served_ratio)
                new = self.next_batch(least, o.max_batch_size - size, budget)
                if new:
                    waited = 1
                    self.batch += new
                    yield "prefill", new
                if self.batch:
                    yield "decode", list(self.batch)
                    waited += 1


class Beside(Drive):
    """A run of the scheduler with the router beside it: every step is the same."""

    def __init__(self, scheduler: Fcfs, workload: list[Ask]) -> None:
        super().__init__(scheduler, workload, 1)
        self.router = Router(scheduler.options)
        self.steps = self.router.steps()
        self.said: list[Said | None] = []
        methods = ("add", "cancel", "schedule", "update")
        self.overridden |= {name: getattr(self, f"_{name}") for name in methods}

    def _add(self, spec: RequestSpec) -> None:
        self._adding(spec)
        self.router.queue.append(spec)

    def _cancel(self, spec: RequestSpec) -> None:
        self.scheduler.cancel(spec)
        for place in (self.router.queue, self.router.batch):
            if spec in place:
                place.remove(spec)

    def _schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.said.append(next(self.steps))
        if plan is None:
            assert self.said[-1] is None
        return plan

    def _update(self, plan: StepPlan, result: Any) -> Outcome:
        outcome: Outcome = self.scheduler.update(plan, result)
        for spec, _ in outcome.finished:
            self.router.batch.remove(spec)
        return outcome

    def _launch(self, plan: StepPlan) -> int:
        step = super()._launch(plan)
        ran = sorted((row.spec for row in self.rows), key=lambda spec: spec.index)
        kind = "prefill" if any(row.chunk and row.chunk.admitted for row in self.rows) else "decode"
        said = self.said[-1]
        assert said is not None
        assert (kind, ran) == (said[0], sorted(said[1], key=lambda spec: spec.index))
        return step


@st.composite
def cases(draw: st.DrawFn) -> tuple[TgiOptions, list[Ask]]:
    size = draw(st.sampled_from([1, 2, 4]))
    made = TgiOptions(
        block_size=size,
        num_blocks=draw(st.integers(MOST_TOKENS // size, 4 * MOST_TOKENS // size)),
        max_batch_size=draw(st.integers(1, 8)),
        max_batch_prefill_tokens=draw(st.sampled_from([8, 14, 20, 40])),
        max_batch_total_tokens=draw(st.sampled_from([MOST_TOKENS, 40, 200])),
        waiting_served_ratio=draw(st.sampled_from([0.0, 0.3, 0.5, 1.2, 3.0])),
        max_waiting_tokens=draw(st.sampled_from([0, 1, 3, 20])),
    )
    return made, draw(asks(size))


@given(case=cases())
def test_every_step_is_the_routers(case: tuple[TgiOptions, list[Ask]]) -> None:
    """Random requests, equal arrivals, cancels at any moment, bounds of every kind."""
    ran(Beside(TGI.make(case[0]), case[1]))


@DEPTHS
@given(case=cases())
def test_bounds_hold_and_nobody_is_passed_over(depth: int, case: tuple[TgiOptions, list[Ask]]) -> None:
    """In both loops: prompts run by themselves, within all bounds; in the order of arrival; tables never grow."""
    made, workload = case
    scheduler = TGI.make(made)
    admitted: list[RequestSpec] = []

    def seen(plan: StepPlan, rows: list[Any]) -> None:
        new = [row for row in rows if row.chunk is not None and row.chunk.admitted]
        assert not new or len(new) == len(rows), "prompts run by themselves"
        assert sum(row.tokens for row in new) <= made.max_batch_prefill_tokens
        assert not plan.changes.grown and not plan.changes.preempted
        held = sum(r.spec.prompt_tokens + r.spec.max_tokens for r in scheduler.running)
        assert held <= made.max_batch_total_tokens
        assert len(scheduler.running) <= made.max_batch_size
        admitted.extend(row.spec for row in new)

    drive = ran(Drive(scheduler, workload, depth), seen)
    assert admitted == [spec for spec in drive.requests if spec in {*admitted}], "first come, first served"


usual = partial(
    TgiOptions, block_size=4, num_blocks=100, max_batch_size=16, max_batch_prefill_tokens=64, max_batch_total_tokens=400
)


@pytest.mark.parametrize(("waits", "decodes"), [(1, 0), (4, 3), (8, 7), (40, 17)])
def test_a_single_request_waits_no_longer_than_said(waits: int, decodes: int) -> None:
    """Four run and one comes, fewer than the ratio wants: the batch goes on until `max_waiting_tokens` steps have gone
    since its last stop, that stop counted, or until it is over. So nobody starves."""
    workload = [*[ask(i, 4, 18, 0) for i in range(4)], ask(4, 4, 2, 2)]
    steps: list[str] = []  # p or d, and how many rows
    ran(
        Drive(TGI.make(usual(waiting_served_ratio=1.2, max_waiting_tokens=waits)), workload, 1),
        lambda plan, rows: steps.append(f"{'p' if plan.work.prefill_tokens else 'd'}{len(rows)}"),
    )
    assert steps[: decodes + 2] == ["p4", *["d4"] * decodes, "p1"]


@pytest.mark.parametrize(
    ("prompt", "most", "reason"),
    [
        (65, 1, "prompt of 65 tokens, max_batch_prefill_tokens is 64"),
        (64, 337, "401 tokens with its limit, max_batch_total_tokens is 400"),
        (64, 336, None),
    ],
)
def test_what_can_never_run_is_refused(prompt: int, most: int, reason: str | None) -> None:
    assert TGI.make(usual()).refusal(RequestSpec(0, "r0", 0, prompt, 1, most)) == reason
    tight = TGI.make(usual(num_blocks=99)).refusal(RequestSpec(0, "r0", 0, 64, 1, 336))
    assert tight == "400 tokens need 100 blocks, the cache has 99"
