"""vLLM as one side of a hand-off: what came from elsewhere is read where it was put, broken blocks are computed here,
who is fetched later keeps what it computed until it is; whatever is cancelled, preempted or late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import DEPTHS, MOST_TOKENS, asks, ran
from support.helpers import Ask, Drive
from support.wire import Wire

from cbsim.policy.plan import Row, StepPlan, StepResult
from cbsim.policy.request import RequestSpec
from cbsim.schedulers.hand_off import HandOff
from cbsim.schedulers.vllm.scheduler import VllmScheduler
from cbsim.schedulers.vllm.settings import VllmOptions

ROLES = ["kv_consumer", "kv_producer", "kv_both"]


class HandOffDrive(Drive):
    """A run whose transfers are checked after every effect."""

    def __init__(self, scheduler: VllmScheduler, workload: list[Ask], depth: int, data: st.DataObject) -> None:
        super().__init__(scheduler, workload, depth)
        self.wire = self.executor = Wire(workload, scheduler.pool.block_size, data)

    def check(self) -> None:
        super().check()
        assert isinstance(self.scheduler, VllmScheduler) and self.scheduler.transfers is not None
        self.scheduler.transfers.check()


@st.composite
def cases(draw: st.DrawFn, depth: int) -> tuple[VllmOptions, list[Ask]]:
    """Either side or both, on a cache that holds the longest request or little more."""
    size, role = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(ROLES))
    made = VllmOptions(
        kv_connector="hand_off",
        kv_role=role,
        async_scheduling=depth > 1,
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
        block_size=size,
        num_blocks=1 + draw(st.integers(MOST_TOKENS // size, 2 * MOST_TOKENS // size)),
        max_model_len=MOST_TOKENS,
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 8, 16, 30])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.2])),
    )
    workload = draw(asks(size))
    wishes = [(draw(st.sampled_from([True, True, False])), draw(st.booleans())) for _ in workload]
    specs: dict[RequestSpec | None, RequestSpec] = {}
    for ask, (elsewhere, later) in zip(workload, wishes, strict=True):
        specs[ask.spec] = replace(
            ask.spec,
            sample_of=specs.get(ask.spec.sample_of),
            computed_elsewhere=elsewhere and role != "kv_producer",
            fetched_later=later and role != "kv_consumer",
        )
    return made, [ask._replace(spec=specs[ask.spec]) for ask in workload]


@DEPTHS
@given(data=st.data())
def test_rows_read_what_came_and_fetches_what_was_computed(depth: int, data: st.DataObject) -> None:
    """Slow and broken transfers, cancellations at any moment, tiny caches: every row reads the tokens of its request,
    every request gets its tokens, who is to be fetched is, once, and all blocks come back."""
    made, workload = data.draw(cases(depth))
    scheduler = VllmScheduler(made)
    drive = HandOffDrive(scheduler, workload, depth, data)
    ran(drive)
    assert scheduler.transfers is not None and not scheduler.transfers.busy
    assert not drive.wire.underway.jobs
    assert all(count == 1 for count in drive.wire.loads.values()), "a request asks once"
    ended = [spec for spec, _ in drive.finished if spec.fetched_later]
    assert sorted(drive.wire.fetched, key=lambda s: s.index) == sorted(ended, key=lambda s: s.index)


def ask(index: int, prompt: int, outputs: int, arrives: int, cancelled: int | None = None, **wishes: bool) -> Ask:
    text = tuple(1000 * (1 + index) + i for i in range(prompt + outputs))
    spec = RequestSpec(index, f"r{index}", 0, prompt, outputs, outputs, 0, text, 1, prompt + outputs, **wishes)
    return Ask(spec, arrives, cancelled, None, text)


def options(depth: int, role: str, **given: Any) -> VllmOptions:
    usual = {"block_size": 4, "num_blocks": 17, "max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    return VllmOptions(**usual | {"async_scheduling": depth > 1, "kv_connector": "hand_off", "kv_role": role} | given)


def drawn(depth: int, role: str, workload: list[Ask], data: st.DataObject, *, slowest: int = 6, **given: Any) -> Any:
    drive = HandOffDrive(VllmScheduler(options(depth, role, **given)), workload, depth, data)
    drive.wire.slowest, drive.wire.faulty = slowest, False
    return drive


@DEPTHS
@given(data=st.data(), prompt=st.integers(1, 20))
def test_a_prompt_that_came_is_computed_but_for_its_last_token(depth: int, data: st.DataObject, prompt: int) -> None:
    """The first row of a request whose prompt was computed elsewhere is one token, and gives the first output."""
    drive = drawn(depth, "kv_consumer", [ask(0, prompt, 3, 0, computed_elsewhere=True)], data)
    rows: list[Row] = []
    ran(drive, lambda plan, made: rows.extend(made))
    assert [(row.start, row.tokens) for row in rows] == [(prompt - 1 + i, 1) for i in range(3)]
    assert rows[0].chunk is not None and rows[0].chunk.outputs == 1


@DEPTHS
@given(data=st.data(), first=st.integers(0, 4), others=st.sets(st.integers(0, 4)))
def test_a_broken_load_is_computed_from_the_first_broken_block_on(
    depth: int, data: st.DataObject, first: int, others: set[int]
) -> None:
    """Blocks before it are kept, also if later ones came whole; with none left the request starts over."""
    drive = drawn(depth, "kv_consumer", [ask(0, 18, 2, 0, computed_elsewhere=True)], data, slowest=0)
    wire, rows = drive.wire, []
    drive.on_step = lambda plan, made: (
        rows.extend(made),
        wire.broken.update(
            {m.job: tuple(m.targets[i] for i in {first, *others} if i >= first) for m in plan.transfers}
        ),
    )
    ran(drive)
    assert rows[0].start == 4 * first
    assert wire.loads == {rows[0].spec: 1}


@DEPTHS
@given(data=st.data())
def test_blocks_are_kept_until_they_are_fetched(depth: int, data: st.DataObject) -> None:
    """A request that nobody can serve before the blocks of the first one have been fetched waits for that."""
    workload = [ask(0, 40, 1, 0, fetched_later=True), ask(1, 30, 1, 1)]
    drive = drawn(depth, "kv_producer", workload, data, slowest=9)
    admitted: dict[RequestSpec, int] = {}

    def seen(plan: StepPlan, made: list[Row]) -> None:
        for row in made:
            if row.spec not in admitted:
                admitted[row.spec] = plan.step
                assert row.spec is workload[0].spec or drive.wire.fetched == [workload[0].spec]

    ran(drive, seen)
    assert len(admitted) == 2


@DEPTHS
@pytest.mark.parametrize("role", ROLES)
@given(data=st.data(), cancelled=st.integers(1, 12))
def test_who_is_given_up_is_not_fetched(depth: int, role: str, data: st.DataObject, cancelled: int) -> None:
    """Nor does its table outlive it, but for the load that it may have in flight."""
    wishes = {"computed_elsewhere": role != "kv_producer", "fetched_later": role != "kv_consumer"}
    drive = drawn(depth, role, [ask(0, 12, 20, 0, cancelled, **wishes)], data)
    ran(drive)
    assert not drive.wire.fetched
    assert drive.scheduler.pool.free == drive.scheduler.pool.num_blocks


def test_what_a_producer_has_in_flight_of_a_victim_is_computed_again() -> None:
    """A consumer waits for it instead, and preempts nobody in that step."""
    workload = [ask(0, 12, 12, 0), ask(1, 12, 12, 0)]
    for role, wasted in (("kv_producer", True), ("kv_consumer", False)):
        scheduler = VllmScheduler(options(2, role, num_blocks=9))
        drive = ran(Drive(scheduler, workload, 2))
        assert sum(request.preemptions for request in drive.requests.values()) > 0
        sampled = [spec for ask in workload for spec in [ask.spec] if drive.requests[spec].epoch]
        assert bool(sampled) is wasted


@pytest.mark.parametrize("found", ["kept", "loading"])
def test_the_check_finds_planted_faults(found: str) -> None:
    """A table given up too early is noticed."""
    role = "kv_producer" if found == "kept" else "kv_consumer"
    scheduler = VllmScheduler(options(1, role))
    wishes = {"fetched_later": found == "kept", "computed_elsewhere": found == "loading"}
    spec = ask(0, 12, 1, 0, **wishes).spec
    scheduler.add(spec)
    request = scheduler.requests[spec]
    scheduler.update(scheduler.schedule(), StepResult())
    assert scheduler.transfers is not None and isinstance(scheduler.transfers.connector, HandOff)
    scheduler.transfers.check()
    scheduler.pool.release(request)
    with pytest.raises(AssertionError, match=r"lost its blocks|blocks of nobody"):
        scheduler.transfers.check()
