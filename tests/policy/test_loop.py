"""The serving loop against a scripted scheduler: which effects are asked for, and in which order."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from cbsim.errors import DeadlockError
from cbsim.kv.blocks import BlockPool, FreeQueue
from cbsim.policy.loop import Await, Completed, Effect, Idle, Launch, Poll, Polled, Refused, serve
from cbsim.policy.plan import UNCHANGED, Chunk, Outcome, StepPlan, StepResult, StepWork
from cbsim.policy.request import Request, RequestSpec


def spec(index: int, prompt: int = 1) -> RequestSpec:
    return RequestSpec(index, f"r{index}", 0, prompt, 1, 1)


class Scripted:
    """Every request needs `steps` steps of its own; prompts over 10 are refused; `stalls` plans come to nothing."""

    def __init__(self, steps: int, *, before_update: bool = False, when_idle: bool = False, stalls: int = 0) -> None:
        self.polls_before_update, self.awaits_when_idle = before_update, when_idle
        self.steps, self.stalls, self.planned = steps, stalls, 0
        self.stalls_at = -1  # the plan that comes to nothing once
        self.pool = BlockPool(1, 1, FreeQueue(range(1), unhashed_first=True))
        self.requests: dict[RequestSpec, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.left: list[RequestSpec] = []
        self.calls: list[str] = []
        self.refused: list[tuple[RequestSpec, str]] = []

    @property
    def idle(self) -> bool:
        return not self.left

    def refusal(self, spec: RequestSpec) -> str | None:
        return "too long" if spec.prompt_tokens > 10 else None

    def add(self, spec: RequestSpec) -> None:
        self.left += [spec] * self.steps
        self.calls.append(f"add {spec.id}")

    def cancel(self, spec: RequestSpec) -> None:
        self.left = [other for other in self.left if other is not spec]
        self.calls.append(f"cancel {spec.id}")

    def schedule(self) -> StepPlan | None:
        if self.stalls or self.stalls_at == self.planned:
            self.stalls, self.stalls_at = max(0, self.stalls - 1), -1
            return None
        self.left.pop(0)
        self.planned += 1
        return StepPlan(self.planned - 1)

    def runs_ahead(self, plan: StepPlan) -> bool:
        return True

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        self.calls.append(f"update {plan.step}")
        return Outcome((), (), 0)


def effects(scheduler: Scripted, depth: int, polls: list[Polled], cancels: tuple[RequestSpec, ...] = ()) -> list[str]:
    """The effects of a run, a word each; `polls` are answered in order, the last one for ever; `cancels` come with
    every result that is asked for them."""
    seen: list[str] = []
    loop = serve(scheduler, depth)
    answer: Any = None
    try:
        while len(seen) < 200:
            effect = loop.send(answer)
            seen.append(word(effect))
            answer = None
            if isinstance(effect, Poll):
                answer = polls.pop(0) if len(polls) > 1 else polls[0]
            elif isinstance(effect, Launch):
                answer = f"ticket {effect.plan.step}"
            elif isinstance(effect, Await):
                assert effect.ticket == f"ticket {effect.plan.step}", "a step is awaited with its own ticket"
                answer = Completed(StepResult(), cancels if effect.cancels else ())
    except StopIteration:
        return seen
    raise AssertionError("the loop does not end")


def word(effect: Effect) -> str:
    if isinstance(effect, Poll):
        return "wait" if effect.wait else "poll"
    if isinstance(effect, Idle):
        return "idle"
    if isinstance(effect, Refused):
        return f"refused {effect.spec.id}: {effect.reason}"
    return f"{type(effect).__name__.lower()} {effect.plan.step}"


CLOSED = Polled(closed=True)


def test_depth_one_takes_each_result_before_the_next_plan() -> None:
    """Synchronous batching: plan and launch, await, apply, and only then the next step."""
    assert effects(Scripted(2), 1, [Polled([spec(0)], closed=True), CLOSED]) == [
        *("wait", "launch 0", "await 0", "applied 0"),
        *("poll", "launch 1", "await 1", "applied 1"),
        "wait",
    ]


def test_depth_two_plans_one_step_ahead() -> None:
    """Asynchronous batching: step N+1 is planned and launched before step N is awaited; the last ones come in order."""
    assert effects(Scripted(3), 2, [Polled([spec(0)], closed=True), CLOSED]) == [
        *("wait", "launch 0"),
        *("poll", "launch 1", "await 0", "applied 0"),
        *("poll", "launch 2", "await 1", "applied 1"),
        *("wait", "await 2", "applied 2"),
    ]


def test_cancellations_can_be_taken_between_a_result_and_its_application() -> None:
    """A scheduler that polls before the update hears of a cancellation before the result; the others do not."""
    request = spec(0)
    for before_update, calls in ((True, ["add r0", "cancel r0", "update 0"]), (False, ["add r0", "update 0"])):
        scheduler = Scripted(1, before_update=before_update)
        effects(scheduler, 1, [Polled([request], closed=True), CLOSED], cancels=(request,))
        assert scheduler.calls == calls


def test_a_step_in_flight_is_awaited_when_idle_if_the_scheduler_says_so() -> None:
    """vLLM takes a wasted step's result at once; transformers leaves it until there is something to plan."""
    polls = [Polled([spec(0)]), Polled(), Polled([spec(1)], closed=True), CLOSED]
    prompt = effects(Scripted(1, when_idle=True), 2, list(polls))
    assert prompt[:5] == ["wait", "launch 0", "poll", "await 0", "applied 0"]
    late = effects(Scripted(1), 2, list(polls))
    assert late[:6] == ["wait", "launch 0", "wait", "wait", "launch 1", "await 0"]


def test_a_request_that_can_never_be_served_is_refused() -> None:
    """It is reported with the reason, never added, and the others are served."""
    scheduler = Scripted(1)
    seen = effects(scheduler, 1, [Polled([spec(0, prompt=11), spec(1)], closed=True), CLOSED])
    assert seen[:2] == ["wait", "refused r0: too long"]
    assert scheduler.calls == ["add r1", "update 0"]


def test_arrivals_come_before_cancellations_of_the_same_poll() -> None:
    """A request may be cancelled in the poll in which it arrives."""
    scheduler, request = Scripted(1), spec(0)
    assert effects(scheduler, 1, [Polled([request], [request], closed=True)]) == ["wait"]
    assert scheduler.calls == ["add r0", "cancel r0"]


def test_a_stall_waits_for_arrivals() -> None:
    """With nothing in flight and nothing to plan the loop blocks, for only an arrival can help."""
    polls = [Polled([spec(0)]), Polled([spec(1)], closed=True), CLOSED]
    assert effects(Scripted(1, stalls=1), 1, list(polls))[:4] == ["wait", "idle", "wait", "launch 0"]
    ahead = ["wait", "idle", "wait", "launch 0", "poll", "launch 1", "await 0"]
    assert effects(Scripted(1, stalls=1), 2, polls)[:7] == ahead, "the stall is over once a step is in flight"


def test_a_stall_with_a_step_in_flight_takes_its_result() -> None:
    """The result may free what the plan lacked, so nobody waits for arrivals."""
    scheduler = Scripted(2)
    scheduler.stalls_at = 1
    seen = effects(scheduler, 2, [Polled([spec(0)], closed=True), CLOSED])
    assert seen[:8] == ["wait", "launch 0", "poll", "idle", "await 0", "applied 0", "poll", "launch 1"]


def test_stuck_is_an_error() -> None:
    """When no arrival can come any more, a stall is reported instead of waiting for ever."""
    with pytest.raises(DeadlockError, match="no step can be planned"):
        effects(Scripted(1, stalls=99), 1, [Polled([spec(0)], closed=True)])


class Prompt(Scripted):
    """One request with a prompt of 3,000 tokens, of which each step computes one. A step computes `again` tokens that
    were computed before, or nothing at all but waits for a transfer. The first `alone` steps have no request."""

    def __init__(self, *, again: int = 0, rows: bool = True, alone: int = 0) -> None:
        super().__init__(10_000)
        self.again, self.rows, self.alone = again, rows, alone

    def add(self, spec: RequestSpec) -> None:
        super().add(spec)
        self.request = self.requests[spec] = Request(spec, 1, 1)

    def refusal(self, spec: RequestSpec) -> str | None:
        return None

    def schedule(self) -> StepPlan | None:
        spec = self.request.spec
        self.requests = {} if self.planned < self.alone else {spec: self.request}
        chunk = Chunk(spec, 0, self.planned % 3000, 1, (), 0, recomputed=self.again)
        self.planned += 1
        return StepPlan(self.planned - 1, StepWork((chunk,), prefill_tokens=1) if self.rows else StepWork())

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        return UNCHANGED


def planned(scheduler: Prompt, steps: int, moved: tuple[int, ...] = ()) -> int:
    """How many steps are planned, of at most `steps`, each with a result that reports these jobs."""
    loop, answer = serve(scheduler, 2), None
    while scheduler.planned < steps:
        effect = loop.send(answer)
        answer = None
        if isinstance(effect, Poll):
            answer = Polled([spec(0, 3000)]) if effect.wait else Polled()
        elif isinstance(effect, Await):
            answer = Completed(StepResult(moved=moved))
    return scheduler.planned


def test_steps_that_bring_no_request_further_end_the_run() -> None:
    """Computing again what was lost, or nothing: as many steps as there are tokens, and a thousand, are enough."""
    for scheduler in (Prompt(again=1), Prompt(rows=False)):
        with pytest.raises(DeadlockError, match=r"no request has got further in 4,000 steps, from 0 on: waiting: r0"):
            planned(scheduler, 5000)


def test_a_long_prompt_or_a_long_transfer_is_no_standstill() -> None:
    """A prompt may take any number of steps, and so may loads that end one after the other, and stores that go on when
    no request is left."""
    assert planned(Prompt(), 5000) == 5000
    assert planned(Prompt(rows=False), 5000, moved=(1,)) == 5000
    assert planned(Prompt(rows=False, alone=4500), 5000) == 5000


def test_refusals_of_those_that_were_added_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether others' arrival or a plan makes a scheduler refuse a request, drivers hear of it before what follows."""
    scheduler = Scripted(steps=1)
    plan, scheduler.refused = scheduler.schedule, [(spec(1), "too many wait")]

    def schedule() -> StepPlan | None:
        scheduler.refused.append((spec(2), "it has come back, and too many wait"))
        return plan()

    monkeypatch.setattr(scheduler, "schedule", schedule)
    told = ["refused r1: too many wait", "refused r2: it has come back, and too many wait"]
    assert effects(scheduler, 1, [Polled([spec(0)]), CLOSED])[:4] == ["wait", *told, "launch 0"]


def test_a_deadlock_in_another_process_is_said_as_in_this_one() -> None:
    """It comes back pickled, which makes it anew from its message."""
    error = DeadlockError("no step can be planned")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "stuck: no step can be planned"
