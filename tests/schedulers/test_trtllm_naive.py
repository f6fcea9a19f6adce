"""TensorRT-LLM's rules once more, as plainly as they can be written, against the policy: same rows, same pauses.

The model looks at every request in every step and counts blocks from scratch; it knows one step in flight."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.cases import ran, trtllm_cases
from support.examples import examples
from support.helpers import Drive

from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import Request, Status
from cbsim.schedulers.trtllm.scheduler import TrtllmScheduler
from cbsim.schedulers.trtllm.settings import TrtllmOptions

Rows = list[tuple[int, int]]  # request, tokens


@dataclass
class One:
    """An active request."""

    index: int
    generates: bool
    prompt: int  # with what was generated before a pause
    computed: int
    left: int  # tokens that it may still generate
    held: int


class Model:
    def __init__(self, options: TrtllmOptions) -> None:
        self.o = options
        self.waited = 0

    def step(self, active: list[One], free: int) -> tuple[Rows, list[int]]:
        fits, paused = self.capacity(active, free)
        contexts, generating = self.batch(fits)
        if contexts and generating and self.waits(contexts, generating):
            contexts = []
        return contexts + generating, [one.index for one in paused]

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.o.block_size)

    def to_completion(self, one: One) -> int:
        text = one.computed + 1 if one.generates else one.prompt
        return self.blocks(text + one.left) - one.held

    def one_step(self, one: One) -> int:
        if not one.generates:
            return 0 if one.computed else self.blocks(one.prompt)
        ahead = min(2 if self.o.two_step_lookahead else 1, one.left)
        return self.blocks(one.computed + ahead) - self.blocks(one.computed)

    def capacity(self, active: list[One], free: int) -> tuple[list[One], list[One]]:
        if self.o.capacity_scheduler_policy == "MAX_UTILIZATION":
            return self.max_utilization(active, free)
        fits = [one for one in active if one.generates][: self.o.max_num_requests]
        free -= sum(self.to_completion(one) for one in fits)
        if self.o.capacity_scheduler_policy == "STATIC_BATCH" and fits:
            return fits, []
        for one in active:
            if one.generates:
                continue
            if len(fits) == self.o.max_num_requests or self.to_completion(one) > free:
                break
            fits.append(one)
            free -= self.to_completion(one)
        return fits, []

    def max_utilization(self, active: list[One], free: int) -> tuple[list[One], list[One]]:
        fits: list[One] = []
        paused: list[One] = []
        line = list(active)
        while len(fits) < len(line):
            one = line[len(fits)]
            used = sum(self.one_step(other) for other in fits)
            if len(fits) < self.o.max_num_requests and used + self.one_step(one) <= free:
                fits.append(one)
                continue
            started = [i for i in range(len(fits), len(line)) if line[i].generates or line[i].computed]
            if not started:
                break
            last = line[started[-1]]
            free += last.held
            paused.append(last)
            line = line[: started[-1]]
        return fits, paused

    def batch(self, fits: list[One]) -> tuple[Rows, Rows]:
        contexts: list[One] = []
        generating: Rows = []
        for one in fits:
            if len(contexts) + len(generating) == self.o.max_batch_size:
                break
            whole = 0 if self.o.enable_chunked_prefill else sum(other.prompt for other in contexts)
            wanted = 1 if one.generates else 0 if self.o.enable_chunked_prefill else one.prompt
            if whole + len(generating) + wanted > self.o.max_num_tokens:
                break
            if one.generates:
                generating.append((one.index, 1))
            else:
                contexts.append(one)
        left = {one.index: one.prompt - one.computed for one in contexts}
        parts = self.parts(left, self.o.max_num_tokens - len(generating)) if self.o.enable_chunked_prefill else left
        going_on = [(i, n) for i, n in parts.items() if 0 < n < left[i]]
        return going_on + [(i, n) for i, n in parts.items() if n == left[i]], generating

    def parts(self, left: dict[int, int], capacity: int) -> dict[int, int]:
        unit, parts = self.o.chunk_unit_size, dict.fromkeys(left, 0)
        if sum(left.values()) <= capacity:
            return left
        if self.o.context_chunking_policy == "FIRST_COME_FIRST_SERVED":
            for i, wanted in left.items():
                n = min(wanted, capacity - sum(parts.values()))
                parts[i] = n if n == wanted else n - n % unit
            return parts
        before = None
        while before != parts:
            before = dict(parts)
            for i, wanted in left.items():
                grown = parts | {i: min(wanted, parts[i] + unit)}
                if sum(grown.values()) <= capacity:
                    parts = grown
        return parts

    def waits(self, contexts: Rows, generating: Rows) -> bool:
        tokens = sum(n for _, n in contexts + generating)
        short = tokens < self.o.batch_wait_max_tokens_ratio * self.o.max_num_tokens
        waits = short and self.waited < self.o.batch_wait_timeout_iters
        self.waited = self.waited + 1 if waits else 0
        return waits


def seen(scheduler: TrtllmScheduler, request: Request) -> One:
    generates = request.status is Status.DECODE
    left = request.limit - request.seen
    return One(request.spec.index, generates, request.known, request.computed, left, scheduler.pool.allocated(request))


@pytest.mark.parametrize(
    ("policy", "two_steps"),
    [("GUARANTEED_NO_EVICT", False), ("MAX_UTILIZATION", False), ("MAX_UTILIZATION", True), ("STATIC_BATCH", False)],
)
@given(data=st.data())
@examples(60)
def test_every_step_is_the_model_s(policy: str, two_steps: bool, data: st.DataObject) -> None:
    given = {"capacity_scheduler_policy": policy, "two_step_lookahead": two_steps}
    build, workload = data.draw(trtllm_cases(**given))
    drive = Drive(build(), workload, 1)
    scheduler = drive.scheduler
    assert isinstance(scheduler, TrtllmScheduler)
    model = Model(scheduler.options)
    wanted: list[tuple[Rows, list[int]]] = []

    def schedule() -> StepPlan | None:
        active = list(scheduler.requests.values())[: scheduler.options.max_active_requests]
        wanted.append(model.step([seen(scheduler, request) for request in active], scheduler.pool.free))
        return scheduler.schedule()

    def look(plan: StepPlan, rows: list[Row]) -> None:
        paused = [paused.spec.index for paused in plan.changes.preempted]
        assert ([(row.spec.index, row.tokens) for row in rows], paused) == wanted[-1]
        if paused:
            event("paused")
        if any(chunk.outputs == 0 for chunk in plan.work.chunks):
            event("a part of a prompt")

    ran(drive, look, schedule=schedule)
