"""Rows that may yield several tokens: a policy that guesses, and results that say how much came true."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.helpers import Ask, Drive, Executor

from cbsim.kv.blocks import BlockPool, FreeQueue
from cbsim.kv.keys import KeysWhenKnown
from cbsim.policy.decoding import Decoding
from cbsim.policy.plan import Chunk, Outcome, Row, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.record.record import STEP_TIMES, Record, StepTimes
from cbsim.schedulers.base import SchedulerBase, plain_pool
from cbsim.schedulers.simple.settings import PaddedOptions

SIZE, BLOCKS, SEATS = 4, 14, 3


class Guessing(SchedulerBase):
    """First come, first served. Rows bring `guesses[step]` guesses each; with none, everybody decodes together.

    A request that finds no block takes those of the request admitted last."""

    def __init__(self, guesses: list[int]) -> None:
        options = PaddedOptions(name="guessing", batch_size=SEATS, block_size=SIZE, num_blocks=BLOCKS)
        self.pool = plain_pool(options)
        super().__init__(options, Decoding(self.pool, KeysWhenKnown(self.pool), together=True))
        self.waiting: list[Request] = []
        self.preempted = 0
        self._guesses = guesses

    @property
    def running(self) -> list[Request]:
        return [*self.decoding.batched, *self.decoding.unbatched]

    def refusal(self, spec: RequestSpec) -> str | None:
        return None if self.pool.blocks_for(spec.prompt_tokens + spec.max_tokens) <= BLOCKS else "too long"

    def add(self, spec: RequestSpec) -> None:
        self.waiting.append(self.decoding.add(spec, spec.max_tokens))

    def schedule(self) -> StepPlan | None:
        decoding, rows = self.decoding, dict[Request, Chunk]()
        guesses = self._guesses[decoding.batched.planned % len(self._guesses)]
        if guesses or not decoding.has_blocks():
            decoding.split()
        else:
            decoding.go_on()
        for request in sorted(decoding.unbatched, key=lambda request: request.order):
            if request.status is not Status.WAITING:
                self._row(request, guesses, rows)
        while self.waiting and len(self.running) < SEATS and self._admit(self.waiting[0], rows):
            self.waiting.pop(0)
        if not rows and not decoding.batched:
            return None
        return decoding.plan(rows, running=len(self.running), waiting=len(self.waiting))

    def _row(self, request: Request, guesses: int, rows: dict[Request, Chunk]) -> None:
        guesses = min(guesses, request.limit - request.scheduled - 1)
        tokens = request.uncomputed + guesses
        while (missing := self.pool.missing(request, request.computed + tokens)) > self.pool.free:
            last = max(self.decoding.unbatched, key=lambda other: other.order)
            rows.pop(last, None)
            self.decoding.preempt(last, drop_in_flight=False)
            self.waiting.insert(0, last)
            self.preempted += 1
            if last is request:
                return
        blocks = self.pool.grow(request, missing) if missing else ()
        rows[request] = self.decoding.row(request, tokens, blocks, guesses=guesses)

    def _admit(self, request: Request, rows: dict[Request, Chunk]) -> bool:
        cached = self.pool.longest_prefix(request.spec, (request.target - 1) // SIZE)
        wanted = self.pool.blocks_for(request.target) - len(cached)
        if wanted + self.pool.idle(cached) > self.pool.free:
            return False
        self.pool.adopt(request, cached)
        self.decoding.admit(request, len(cached) * SIZE)
        rows[request] = self.decoding.row(request, request.uncomputed, self.pool.grow(request, wanted))
        return True

    def _finish(self, request: Request, reason: Finish) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        self.decoding.end(request, reason)


class Verifier(Executor):
    """Of the guesses of row number so-and-so, `true[row]` come true at most. Says so only where the plan does not."""

    def __init__(self, asks: list[Ask], true: list[int]) -> None:
        super().__init__(asks)
        self.tokens: dict[RequestSpec, list[int]] = {ask.spec: [] for ask in asks}  # the step of each
        self.most = 0
        self._true, self._rows = true, 0
        self._yielded: dict[int, list[tuple[Row, int]]] = {}  # by step: rows and the first output of each

    def _sample(self, step: int, row: Row) -> None:
        outputs = 1 if row.chunk is None else row.chunk.outputs
        if outputs:
            first = row.start + row.tokens - outputs + 1 - row.spec.prompt_tokens
            self._yielded.setdefault(step, []).append((row, first))

    def result(self, step: int) -> StepResult:
        accepted, stopped = [], []
        for row, first in self._yielded.pop(step, []):
            outputs = 1 if row.chunk is None else row.chunk.outputs
            assert first == len(self.tokens[row.spec]), "outputs follow each other"
            self._rows += 1
            most = min(outputs, row.spec.output_tokens - first)
            tokens = min(most, 1 + self._true[self._rows % len(self._true)])
            self.tokens[row.spec] += [step] * tokens
            self.most = max(self.most, tokens)
            self.computed[row.spec] -= outputs - tokens
            if tokens != most:
                accepted.append((row.spec, tokens - 1))
            if first + tokens == row.spec.output_tokens < row.spec.max_tokens:
                stopped.append(row.spec)
        return StepResult(tuple(stopped), accepted=tuple(accepted))


REQUEST = st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 2), st.integers(0, 12))
FEW = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(drawn=st.lists(REQUEST, min_size=1, max_size=8), guesses=FEW, true=FEW)
def test_guesses_are_settled(drawn: list[tuple[int, int, int, int]], guesses: list[int], true: list[int]) -> None:
    """Whatever comes true, everybody gets each of its tokens once and no other, rows start where the tokens before
    end, tables are as the plans say, blocks of guesses have no key, and the pool is consistent all along."""
    asks = [
        Ask(RequestSpec(i, f"r{i}", 0, prompt, outputs, outputs + more), arrives, None, None)
        for i, (prompt, outputs, more, arrives) in enumerate(drawn)
    ]
    policy = Guessing(guesses)
    drive = Drive(policy, asks, 1)  # type: ignore[arg-type]  # all it asks of a scheduler is there
    drive.executor = verifier = Verifier(asks, true)
    drive.on_step = partial(check_step, drive)
    drive.run()
    assert {spec for spec, _ in drive.finished} == {ask.spec for ask in asks} - set(drive.refused)
    for spec, reason in drive.finished:
        steps, request = verifier.tokens[spec], drive.requests[spec]
        assert len(steps) == request.seen == spec.output_tokens
        assert [first + i for first, count in request.delivered() for i in range(count)] == steps
        assert reason is (Finish.LENGTH if spec.output_tokens == spec.max_tokens else Finish.STOP)
    assert policy.pool.free == BLOCKS
    event(f"several tokens at once: {verifier.most > 1}")
    event(f"preempted: {policy.preempted > 0}")


def check_step(drive: Drive, plan: StepPlan, rows: list[Row]) -> None:
    for row in rows:
        request = drive.requests[row.spec]
        assert drive.executor.tables[row.spec] == drive.scheduler.pool.tables[request]
        assert request.hashed * SIZE <= request.known
        assert row.chunk is None or row.start + row.chunk.recomputed <= row.spec.prompt_tokens + request.seen
    assert all(chunk.outputs == 1 for chunk in plan.work.chunks if chunk.spec in plan.changes.joined)


def decoding_request() -> tuple[Decoding, Request]:
    pool = BlockPool(SIZE, BLOCKS, FreeQueue(range(BLOCKS), unhashed_first=True))
    decoding = Decoding(pool)
    request = decoding.add(RequestSpec(0, "r0", 0, 5, 8, 9), 9)
    decoding.admit(request)
    pool.grow(request, 4)
    return decoding, request


def step(decoding: Decoding, request: Request, tokens: int, guesses: int = 0) -> StepPlan:
    row = decoding.row(request, tokens, (), guesses=guesses)
    return decoding.plan({request: row}, running=1, waiting=0)


def land(decoding: Decoding, plan: StepPlan, *accepted: tuple[RequestSpec, int]) -> Outcome:
    return decoding.complete(plan, StepResult(accepted=accepted), decoding.end)


def test_what_did_not_come_is_given_back() -> None:
    """The prompt of 5 with 3 guesses promises 4 tokens and computes 8; two come, so 6 are computed and 2 promised. The
    declared eighth token is among those that the next row may yield; all that are left come unless said otherwise."""
    decoding, request = decoding_request()
    plan = step(decoding, request, 8, guesses=3)
    assert (plan.work.chunks[0].outputs, request.computed, request.scheduled) == (4, 8, 4)
    assert land(decoding, plan, (request.spec, 1)).received == (request.spec,)
    assert (request.computed, request.scheduled, request.seen, request.uncomputed) == (6, 2, 2, 1)
    plan = step(decoding, request, 7, guesses=6)
    assert plan.changes.ends == (request.spec,)
    assert land(decoding, plan).finished == ((request.spec, Finish.STOP),)
    assert request.seen == 8


def test_rows_behind_guesses_begin_as_if_all_came_true() -> None:
    """A row behind guesses in flight is planned as if they came true. If two of four tokens come it begins two tokens
    earlier, and what is computed and scheduled is so much less; if all come nothing changes. No row owes more than is
    in flight."""
    decoding, request = decoding_request()
    first, second = step(decoding, request, 8, guesses=3), step(decoding, request, 1)
    assert second.work.chunks[0].start == 8
    land(decoding, first, (request.spec, 1))
    assert (request.seen, request.scheduled, request.computed) == (2, 3, 7)
    land(decoding, second)
    assert (request.seen, request.scheduled, request.computed) == (3, 3, 7)
    with pytest.raises(AssertionError, match="owes 1 tokens of 0 in flight"):
        request.reconcile(1)
    decoding, request = decoding_request()
    first, _ = step(decoding, request, 8, guesses=3), step(decoding, request, 1)
    land(decoding, first)
    assert (request.seen, request.scheduled, request.computed) == (4, 5, 9)


def test_accepted_guesses_bring_one_more_token() -> None:
    """Of three guesses one came true: two tokens. All that came true are delivered up to the request's end alone."""
    decoding, request = decoding_request()
    plan = step(decoding, request, 8, guesses=3)
    land(decoding, plan, (request.spec, 1))
    assert (request.seen, request.scheduled, request.computed) == (2, 2, 6)
    plan = step(decoding, request, 9, guesses=8)
    assert land(decoding, plan, (request.spec, 7)).finished == ((request.spec, Finish.STOP),)
    assert request.seen == 8


def test_after_blocks_are_lost_nothing_is_owed() -> None:
    """Preempted with guesses in flight, whose tokens still come: the promise went with the blocks."""
    decoding, request = decoding_request()
    plan = step(decoding, request, 8, guesses=3)
    decoding.preempt(request, drop_in_flight=False)
    land(decoding, plan, (request.spec, 1))
    assert (request.seen, request.scheduled, request.computed) == (2, 2, 0)


@pytest.mark.parametrize("true", [4, -1])
def test_no_more_guesses_come_true_than_there_are(true: int) -> None:
    decoding, request = decoding_request()
    plan = step(decoding, request, 8, guesses=3)
    with pytest.raises(AssertionError):
        land(decoding, plan, (request.spec, true))


def test_tokens_that_nobody_knows_are_called_guesses() -> None:
    decoding, request = decoding_request()
    with pytest.raises(AssertionError):
        step(decoding, request, 6)


def test_a_record_counts_all_tokens_of_a_row() -> None:
    """A row of three guesses, of which two came true, has sampled three tokens; drafts.parquet says why."""
    decoding, request = decoding_request()
    plan, record = step(decoding, request, 5), Record(BLOCKS)
    land(decoding, plan)
    plan = step(decoding, request, 4, guesses=3)
    record.verified(plan, StepResult(accepted=((request.spec, 2),)), decoding.requests)
    times = StepTimes(0)
    for name in (*STEP_TIMES, "padded_tokens"):
        setattr(times, name, 0)
    record.applied(plan, Outcome((), (), 0), times)
    assert record.sampled_tokens == 3
    assert [*record.drafts] == [plan.step, 0, 3, 2, 0]
