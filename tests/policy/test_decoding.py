"""A policy that knows nothing of the fast path, every row listed: the one of docs/your_own_policy.md."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import own_policy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import Ask, Drive, token_steps

from cbsim.kv.blocks import BlockPool, FreeQueue
from cbsim.policy.decoding import Decoding
from cbsim.policy.loop import Scheduler
from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import Finish, RequestSpec

SIZE, BLOCKS, TOKENS, SEATS = 4, 10, 12, 3
Drawn = tuple[int, int, int, int, int | None]


SHORTEST = own_policy.module()


def shortest() -> Scheduler:
    """A small one; the protocol asks for nothing else."""
    sizes = {"block_size": SIZE, "num_blocks": BLOCKS, "seats": SEATS, "step_tokens": TOKENS}
    made: Scheduler = SHORTEST.Shortest(SHORTEST.ShortestOptions(name="shortest", **sizes))
    return made


def ask(index: int, drawn: Drawn) -> Ask:
    prompt, outputs, more, arrives, cancelled = drawn
    return Ask(RequestSpec(index, f"r{index}", 0, prompt, outputs, outputs + more), arrives, cancelled, None)


def driven(asks: list[Ask], depth: int) -> Drive:
    return Drive(shortest(), asks, depth)  # type: ignore[arg-type]  # all it asks of a scheduler is there


REQUEST = st.tuples(
    st.integers(1, 30), st.integers(1, 9), st.integers(0, 2), st.integers(0, 20), st.none() | st.integers(0, 30)
)


@pytest.mark.parametrize("depth", [1, 2])
@given(drawn=st.lists(REQUEST, max_size=12))
def test_rows_one_by_one_are_all_that_a_policy_needs(depth: int, drawn: list[Drawn]) -> None:
    """Everybody is served in full or was refused or cancelled, each token by the row that sampled it; the pool is
    consistent whenever the loop asks for something; nobody is ever a member."""
    asks = [ask(index, fields) for index, fields in enumerate(drawn)]
    drive = driven(asks, depth)
    drive.on_step = partial(check_step, drive)
    drive.run()
    assert {*(spec for spec, _ in drive.finished), *drive.refused, *drive.cancelled} == drive.asks.keys()
    assert all(spec.prompt_tokens + spec.max_tokens > SIZE * BLOCKS for spec in drive.refused)
    for spec, reason in drive.finished:
        sampled = drive.executor.sampled[spec]
        assert token_steps(drive.requests[spec]) == [sampled[n] for n in range(1, spec.output_tokens + 1)]
        assert reason is (Finish.LENGTH if spec.output_tokens == spec.max_tokens else Finish.STOP)
    assert drive.scheduler.pool.free == BLOCKS
    assert not drive.scheduler.decoding.unbatched


def check_step(drive: Drive, plan: StepPlan, rows: list[Row]) -> None:
    assert plan.work.decodes == 0
    assert plan.changes.joined == plan.changes.left == ()
    assert plan.work.tokens <= TOKENS
    assert plan.counts.running <= SEATS
    assert [drive.executor.tables[row.spec] for row in rows] == [
        drive.scheduler.pool.tables[drive.requests[row.spec]] for row in rows
    ]


def test_the_shortest_prompt_is_first() -> None:
    """Prompts of 9, 5 and 7 arrive together; the budget of 12 is filled from the shortest up."""
    drive = driven([ask(i, (prompt, 2, 0, 0, None)) for i, prompt in enumerate((9, 5, 7))], 1)
    plans: list[StepPlan] = []
    drive.on_step = lambda plan, rows: plans.append(plan)
    drive.run()
    assert [(c.spec.id, c.tokens) for c in plans[0].work.chunks] == [("r1", 5), ("r2", 7)]
    assert [(c.spec.id, c.tokens) for c in plans[1].work.chunks] == [("r1", 1), ("r2", 1), ("r0", 9)]


def test_members_may_not_be_forgotten() -> None:
    """A scheduler whose requests decode together has to say what becomes of them before it plans."""
    pool = BlockPool(SIZE, BLOCKS, FreeQueue(range(BLOCKS), unhashed_first=True))
    decoding = Decoding(pool, together=True)
    request = decoding.add(RequestSpec(0, "r0", 0, 3, 5, 5), 5)
    decoding.admit(request)
    decoding.plan({request: decoding.row(request, 3, pool.grow(request, 1))}, running=1, waiting=0)
    with pytest.raises(AssertionError, match="neither go on nor rest nor are split"):
        decoding.plan({}, running=1, waiting=0)


MISUSED = """
from cbsim.kv.blocks import BlockPool, FreeQueue
from cbsim.policy.decoding import Decoding
from cbsim.policy.plan import StepPlan, Underway
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import Direction, Transfer

pool = BlockPool(4, 10, FreeQueue(range(10), unhashed_first=True))
decoding = Decoding(pool, together=True)
one, other = (decoding.add(RequestSpec(i, f"r{i}", 0, 3, 5, 5), 5) for i in range(2))
decoding.admit(one)
decoding.plan({one: decoding.row(one, 3, pool.grow(one, 1))}, running=1, waiting=1)
loading, under = Transfer(Direction.IN, (0,), (1,), job=7), Underway(4)
under.planned(StepPlan(0, transfers=(loading,)))
for misuse in (
    lambda: decoding.admit(one),
    lambda: one.renew(7),
    lambda: one.advance(1, 1),
    lambda: other.advance(0, 0),
    lambda: other.advance(4, 0),
    lambda: other.advance(2, 1),
    lambda: one.join(one.batch),
    lambda: other.leave(),
    lambda: one.receive(9),
    lambda: one.reconcile(1),
    lambda: other.requeue(False),
    lambda: decoding.plan({}, running=1, waiting=1),
    lambda: Transfer(Direction.OUT, (1, 2), (3,)),
    lambda: under.planned(StepPlan(1, transfers=(Transfer(Direction.COPY, (2,), (1,)),))),
    lambda: under.planned(StepPlan(1, transfers=(Transfer(Direction.COPY, (1,), (2,)),))),
):
    try:
        misuse()
    except AssertionError as broken:
        print(broken)
"""


def test_a_misuse_of_ours_by_a_users_policy_is_an_error_under_o() -> None:
    """`python -O` drops assertions. A policy that breaks a rule of what it is composed of is stopped all the same."""
    plain, dropping = (
        subprocess.run([sys.executable, *words, "-c", MISUSED], capture_output=True, text=True, check=True).stdout
        for words in ([], ["-O"])
    )
    assert dropping == plain
    assert len(plain.splitlines()) == 15
    assert "request r1 has a row of 4 tokens for 0 outputs, and 3 to compute: it is in waiting" in plain
