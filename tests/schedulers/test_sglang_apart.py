"""SGLang's servers that prefill or decode for others: no row reads what has not come, each prefill is sent once, and
nothing is left behind, whatever is cancelled, retracted, late or lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import DEPTHS, MOST_TOKENS, asks, check_ends
from support.helpers import Ask, Drive, token_steps
from support.wire import Wire

from cbsim.policy.plan import Row, StepPlan, StepResult
from cbsim.policy.request import DECODE, PREFILL, RequestSpec, leg
from cbsim.policy.transfers import IN_ORDER
from cbsim.schedulers.sglang.scheduler import SglangScheduler
from cbsim.schedulers.sglang.settings import SglangOptions


def options(role: str, **given: Any) -> SglangOptions:
    usual = {"block_size": 4, "num_blocks": 16, "max_running_requests": 4, "chunked_prefill_size": 8}
    usual |= {"context_length": 64, "num_reserved_decode_tokens": 2, "disaggregation_decode_extra_slots": 4}
    usual |= {"host_blocks": 64, "disaggregation_mode": role, "disable_radix_cache": role == "decode"}
    return SglangOptions(**usual | given)


def driven(made: SglangOptions, workload: list[Ask], depth: int, data: st.DataObject) -> tuple[Drive, Wire]:
    """A run to its end. First outputs come with the KV: no row samples them."""
    drive = Drive(SglangScheduler(made), workload, depth)
    drive.executor = wire = Wire(workload, made.block_size, data)
    drive.run()
    for spec, request in drive.requests.items():
        if made.decodes and request.seen:
            wire.sampled.setdefault(spec, {})[1] = token_steps(request)[0]
    check_ends(drive)
    assert not wire.underway.jobs
    return drive, wire


def ask(index: int, prompt: int, outputs: int, arrives: int = 0, cancelled: int | None = None, which: int = 2) -> Ask:
    text = tuple(1000 * (1 + index) + i for i in range(prompt + outputs))
    spec = RequestSpec(index, f"r{index}", 0, prompt, outputs, outputs, 0, text, 1, prompt + outputs)
    return Ask(leg(spec, which), arrives, cancelled, None, text)


@DEPTHS
@pytest.mark.parametrize("role", ["prefill", "decode"])
@given(data=st.data())
def test_rows_read_what_came_and_every_prefill_is_sent_once(role: str, depth: int, data: st.DataObject) -> None:
    """Tiny caches, slow and broken transfers, cancellations at any moment."""
    draw, size = data.draw, data.draw(st.sampled_from([1, 2, 4]))
    cached, seats = draw(st.booleans()), draw(st.integers(1, 6))
    given = {"disable_radix_cache": not cached, "max_running_requests": seats, "block_size": size}
    given |= {"num_blocks": draw(st.integers(MOST_TOKENS // size + 8, 2 * MOST_TOKENS // size + 8))}
    given |= {"chunked_prefill_size": draw(st.sampled_from([-1, size, 4 * size]))}
    given |= {"num_reserved_decode_tokens": draw(st.integers(0, 6))}
    given |= {"disaggregation_decode_extra_slots": draw(st.integers(0, 3))}
    workload = [each for each in draw(asks(size)) if each.spec.sample_of is None]
    which = PREFILL if role == "prefill" else DECODE
    workload = [each._replace(spec=leg(each.spec, which), stops_at=None) for each in workload]
    drive, wire = driven(options(role, **given), workload, depth, data)
    if role == "prefill":
        ended = sorted(spec.index for spec, _ in drive.finished)
        assert sorted(spec.index for spec in wire.fetched) == ended
    else:
        assert all(count == 1 for count in wire.loads.values()), "a request fetches once"


@DEPTHS
@given(data=st.data(), prompt=st.integers(1, 20))
def test_a_first_output_comes_with_the_kv(depth: int, data: st.DataObject, prompt: int) -> None:
    """The first row of a request is that of its first output, behind the whole prompt; it gives the second one."""
    rows: list[Row] = []
    drive = Drive(SglangScheduler(options("decode")), [ask(0, prompt, 3)], depth)
    drive.executor = wire = Wire(list(drive.asks.values()), 4, data)
    wire.faulty = False
    drive.on_step = lambda plan, made: rows.extend(made)
    drive.run()
    [request] = drive.requests.values()
    read = [(row.start, row.tokens) for row in rows]
    assert read == [(prompt, 1), (prompt + 1, 1), (prompt + 2, 1)][: len(read)]
    assert len(read) == 2 + (depth - 1), "in the overlap loop the last one decodes once more, for nothing"
    assert request.seen == 3


def test_a_request_of_one_output_ends_without_a_row() -> None:
    scheduler = SglangScheduler(options("decode"))
    spec = ask(0, 8, 1).spec
    scheduler.add(spec)
    plan = scheduler.schedule()
    assert plan is not None and [move.job for move in plan.transfers] == [0]
    scheduler.update(plan, StepResult(moved=(0,)))
    plan = scheduler.schedule()
    assert plan is not None and not plan.work.rows
    assert [spec for spec, _ in scheduler.update(plan, StepResult()).finished] == [spec]
    assert scheduler.idle


def test_blocks_are_taken_only_if_enough_stays_free_for_others() -> None:
    """14 blocks hold two prompts of 5 with 8 tokens kept free for each, and not a third; without that they hold it."""
    for kept, taken in ((8, 2), (0, 3)):
        scheduler = SglangScheduler(options("decode", num_blocks=16, num_reserved_decode_tokens=kept))
        for i in range(3):
            scheduler.add(ask(i, 20, 4).spec)
        plan = scheduler.schedule()
        assert plan is not None and len(plan.transfers) == taken


def test_who_is_retracted_comes_back_from_the_host_before_others_get_blocks() -> None:
    """Nothing is computed twice: its KV goes to the host and back in order with the steps."""
    workload = [ask(i, 12, 30) for i in range(3)]
    scheduler = SglangScheduler(options("decode", num_blocks=18, num_reserved_decode_tokens=0))
    moves: list[StepPlan] = []
    drive = Drive(scheduler, workload, 1)
    data: Any = type("Never", (), {"draw": staticmethod(lambda strategy: 0)})
    drive.executor = wire = Wire(workload, 4, data)
    wire.faulty = False
    drive.on_step = lambda plan, rows: moves.extend([plan] * any(t.job == IN_ORDER for t in plan.transfers))
    drive.run()
    assert moves and all(request.seen == 30 for request in drive.requests.values())
    assert all(chunk.recomputed == 0 for plan in moves for chunk in plan.work.chunks)


@pytest.mark.parametrize(
    ("role", "which", "reason"),
    [
        ("prefill", DECODE, "a prefill server takes requests whose KV is fetched"),
        ("decode", PREFILL, "a decode server takes requests whose prompt was computed elsewhere"),
        ("decode", DECODE, "prompt of 50 tokens, num_reserved_decode_tokens is 20, the cache holds 64"),
    ],
)
def test_what_a_server_can_never_serve_is_refused(role: str, which: int, reason: str) -> None:
    assert (
        SglangScheduler(options(role, num_reserved_decode_tokens=20)).refusal(ask(0, 50, 4, which=which).spec) == reason
    )
