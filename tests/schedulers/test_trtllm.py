"""TensorRT-LLM's rules on their own: who is paused, who waits, who is passed over, and how a step is shared out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from support.cases import DEPTHS, MOST_TOKENS, Case, ran, trtllm_cases
from support.helpers import Ask, Drive, ask

from cbsim.policy.kind import SettingsError, for_probe
from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import Request, Status
from cbsim.scenario import shapes
from cbsim.scenario.shapes import Place
from cbsim.schedulers.trtllm.scheduler import TrtllmScheduler
from cbsim.schedulers.trtllm.settings import TrtllmOptions, TrtllmSettings, resolve

NO_EVICT, MAX_UTILIZATION, STATIC = POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH")
PAUSES = {"capacity_scheduler_policy": MAX_UTILIZATION}
PLAIN = TrtllmOptions(
    block_size=4,
    num_blocks=64,
    max_seq_len=256,
    max_batch_size=8,
    max_num_requests=8,
    max_active_requests=8,
    max_num_tokens=64,
    chunk_unit_size=4,
)


class Told:
    """A run: of each step who read a part of its prompt, who generated, and who was paused, by number."""

    def __init__(self, options: TrtllmOptions, asks: Sequence[Ask], depth: int = 1) -> None:
        self.reads: list[dict[int, int]] = []  # tokens of each
        self.generates: list[list[int]] = []
        self.paused: list[list[int]] = []
        ran(Drive(TrtllmScheduler(options), asks, depth), self._step)

    def _step(self, plan: StepPlan, rows: list[Row]) -> None:
        self.reads.append({row.spec.index: row.tokens for row in rows[: plan.work.lead]})
        self.generates.append([row.spec.index for row in rows[plan.work.lead :]])
        self.paused.append([paused.spec.index for paused in plan.changes.preempted])


def test_who_lacks_a_block_may_have_to_go_himself() -> None:
    """The second needs a block that only he could give up."""
    options = replace(PLAIN, capacity_scheduler_policy=MAX_UTILIZATION, num_blocks=3)
    told = Told(options, [ask(0, 4, 8), ask(1, 2, 8)])
    assert [i for i, who in enumerate(told.paused) if who] == [3]
    assert told.paused[3] == [1]
    assert told.generates[3] == [0]


def fair(case: Case) -> Case:
    """The same with settings under which a prompt always finds a unit of a step, and none waits for others."""
    build, workload = case
    o = build().options
    assert isinstance(o, TrtllmOptions)
    unit = min(o.chunk_unit_size, max(1, o.max_num_tokens - o.max_batch_size + 1))
    seats = min(o.max_batch_size, o.max_num_tokens)
    return partial(TrtllmScheduler, replace(o, chunk_unit_size=unit, max_batch_size=seats)), workload


@DEPTHS
@given(case=trtllm_cases(batch_wait_timeout_iters=0).map(fair))
@settings(max_examples=60)
def test_nobody_passes_the_first_in_line(depth: int, case: Case) -> None:
    """If anybody's prompt is read in a step, so is that of the first whose prompt is not; and the first of all has a
    row in every step, unless those that generate go before him, or blocks of one whose last token is in flight are not
    free yet. So everybody's turn comes, whoever arrives behind."""
    build, workload = case
    drive = Drive(build(), workload, depth)
    scheduler = drive.scheduler
    assert isinstance(scheduler, TrtllmScheduler)
    line: list[Request] = []
    generating: list[Request] = []
    ending: list[Request] = []

    def schedule() -> StepPlan | None:
        ending[:] = [r for r in scheduler.running if r.scheduled >= r.limit]
        line[:] = [r for r in scheduler.requests.values() if r.status in (Status.WAITING, Status.PREFILL)]
        generating[:] = [r for r in scheduler.generating if r.scheduled < r.limit]
        plan = scheduler.schedule()
        assert plan is not None or not (line or generating) or depth == 2
        return plan

    def look(plan: StepPlan, rows: list[Row]) -> None:
        ran = [row.spec for row in rows]
        if plan.work.lead:
            assert line[0].spec in ran[: plan.work.lead]
        utilizes = scheduler.options.capacity_scheduler_policy == MAX_UTILIZATION
        if line and not (generating or ending):
            assert line[0].spec in ran
        if generating and not (utilizes and (ending or (line and line[0].order < generating[0].order))):
            assert generating[0].spec in ran

    ran(drive, look, schedule=schedule)


@pytest.mark.parametrize("chunking", ["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"])
@pytest.mark.parametrize("policy", [NO_EVICT, MAX_UTILIZATION])
def test_a_long_prompt_starves_if_a_unit_is_never_left(policy: str, chunking: str) -> None:
    """By design: 8 tokens a step, of which one or two generate, are never a unit of 8, so a prompt of 12 tokens waits
    while short ones pass, as long as such come. With a unit of 4 it is begun at once."""
    options = replace(
        PLAIN,
        capacity_scheduler_policy=policy,
        enable_chunked_prefill=True,
        context_chunking_policy=chunking,
        max_num_tokens=8,
        chunk_unit_size=8,
    )
    stream = [ask(0, 3, 6), ask(1, 12, 2), *[ask(i, 3, 6, arrives=4 * i) for i in range(2, 60)]]
    for unit, begun in ((8, 100), (4, 3)):
        told = Told(replace(options, chunk_unit_size=unit), stream)
        first = next(i for i, reads in enumerate(told.reads) if 1 in reads)
        passed = {one for reads in told.reads[:first] for one in reads if one > 1}
        assert (first > begun, len(passed) > 50) == ((True, True) if unit == 8 else (False, False))


@pytest.mark.parametrize(
    ("iterations", "ratio", "read_at"),
    [(0, 1.0, [2, 4]), (5, 0.0, [2, 4]), (5, 1.0, [7, 7]), (5, 0.3, [2, 4]), (5, 0.5, [4, 4]), (1, 1.0, [3, 5])],
)
def test_prompts_wait_for_more_of_them(iterations: int, ratio: float, read_at: list[int]) -> None:
    """One generates; prompts of 8 tokens come in steps 2 and 4. They wait while a step of 20 tokens would have fewer
    than the share asked for, so many steps at most; both of them together have 17."""
    options = replace(PLAIN, max_num_tokens=20, batch_wait_timeout_iters=iterations, batch_wait_max_tokens_ratio=ratio)
    told = Told(options, [ask(0, 4, 30), ask(1, 8, 2, arrives=5), ask(2, 8, 2, arrives=9)])
    assert [next(i for i, reads in enumerate(told.reads) if who in reads) for who in (1, 2)] == read_at


def test_a_last_token_in_flight_takes_no_place_in_the_batch() -> None:
    """Two places, three requests that may have cache: when the last token of the first is out, the third has its place,
    a step before the first has ended."""
    options = replace(PLAIN, max_batch_size=2, max_num_requests=3, max_active_requests=3)
    told = Told(options, [ask(0, 4, 3), ask(1, 4, 6), ask(2, 4, 2)], depth=2)
    assert told.reads[3] == {2: 4}
    assert told.generates[:4] == [[], [0, 1], [0, 1], [1]]


@pytest.mark.parametrize(
    ("prompt", "outputs", "changes", "reason"),
    [
        (256, 1, {}, "prompt of 256 tokens, max_seq_len is 256"),
        (60, 9, {"num_blocks": 17}, "69 tokens need 18 blocks, the cache has 17"),
        (65, 9, {}, "prompt of 65 tokens, max_num_tokens is 64"),
        (65, 9, {"enable_chunked_prefill": True}, None),
        (64, 9, {}, None),
        (56, 9, PAUSES, None),
        (57, 9, PAUSES, "up to 65 tokens to read after a pause, max_num_tokens is 64"),
    ],
)
def test_what_could_never_run_is_refused(
    prompt: int, outputs: int, changes: dict[str, Any], reason: str | None
) -> None:
    scheduler = TrtllmScheduler(replace(PLAIN, **changes))
    assert scheduler.refusal(ask(0, prompt, outputs).spec) == reason


@pytest.mark.parametrize(
    ("field", "text", "given"),
    [
        ("batch_wait_max_tokens_ratio", "got 1.5, must be <= 1", {"batch_wait_max_tokens_ratio": 1.5}),
        (
            "two_step_lookahead",
            "got true, must be false with capacity_scheduler_policy STATIC_BATCH",
            {"two_step_lookahead": True, "capacity_scheduler_policy": STATIC},
        ),
        (
            "max_num_tokens",
            "got 8, must be >= 16, the least part of a prompt (chunk_unit_size or a block)",
            {"enable_chunked_prefill": True, "max_num_tokens": 8},
        ),
    ],
)
def test_settings_that_contradict_each_other(field: str, text: str, given: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as refused:
        resolve(TrtllmSettings(**given), place())
    assert (refused.value.field, str(refused.value)) == (field, text)


def place() -> Place:
    return Place(shapes.model("llama-3.1-8b"), shapes.hardware("h200-sxm"), 1, 16, 0.9, 600)


def test_sizes_that_are_left_open() -> None:
    """Seats follow from the batch, the unit from the block, the longest sequence from the cache."""
    options = resolve(TrtllmSettings(max_batch_size=40), place())
    assert (options.max_num_requests, options.max_active_requests) == (40, 40)
    assert (options.chunk_unit_size, options.max_seq_len, options.num_blocks) == (16, 9600, 600)
    assert (options.limits.slots, options.limits.rows, options.limits.tokens) == (40, 40, 8192)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_probe_is_not_disturbed(policy: str) -> None:
    """A step of all seats, and one of as many tokens as asked for, whatever the settings say."""
    asked = TrtllmSettings(
        capacity_scheduler_policy=policy,  # type: ignore[arg-type]
        batch_wait_timeout_iters=5,
        batch_wait_max_tokens_ratio=1.0,
        max_num_requests=1,
        max_seq_len=9,
    )
    options = resolve(for_probe(asked, 6, 50), place())
    told = Told(replace(options, num_blocks=64), [ask(i, 25, MOST_TOKENS) for i in range(6)])
    assert max(sum(reads.values()) + len(who) for reads, who in zip(told.reads, told.generates, strict=True)) == 50
    assert max(map(len, told.generates)) == 6
