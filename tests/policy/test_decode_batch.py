"""The decode batch against counting: what it derives and schedules must be what one increment a step would give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.policy.decode_batch import DecodeBatch
from cbsim.policy.request import Request, RequestSpec

SIZE = 4


class Member:
    """A request in the decode batch beside the same request counted by hand."""

    def __init__(self, index: int, prompt: int, outputs: int, size: int = SIZE, ahead: int = 0) -> None:
        """Beside the blocks that it needs it has so many `ahead`."""
        self.spec = RequestSpec(index, f"r{index}", 0, prompt, outputs, outputs)
        self.request = Request(self.spec, outputs, size)
        self.request.admit(index, 0)
        self.request.advance(prompt, outputs=1)
        self.computed, self.scheduled, self.seen, self.steps = prompt, 1, 0, [0]
        self.blocks = -(-prompt // size) + ahead

    def agrees(self) -> bool:
        request = self.request
        return (request.computed, request.scheduled, request.seen) == (self.computed, self.scheduled, self.seen)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(2, 9), st.integers(0, 6), st.integers(0, 12)), max_size=6),
    st.integers(1, 2),
    st.integers(0, 12),
    st.sets(st.integers(0, 24), max_size=8),
    st.sampled_from([1, SIZE]),
    st.integers(0, 3),
)
def test_progress_and_calendars(
    drawn: list[tuple[int, int, int, int]], depth: int, long_tokens: int, resting: set[int], size: int, ahead: int
) -> None:
    """Members of any length, joining and leaving at any step, with one or two steps in flight, some of which they sit
    out: counters, block growth, fillings, ends, running sums and steps with tokens equal those counted one by one."""
    batch = DecodeBatch(size, long_tokens=long_tokens)
    members = {i: Member(i, prompt, outputs, size, ahead) for i, (prompt, outputs, _, _) in enumerate(drawn)}
    inside: dict[int, Member] = {}
    for step in range(25):
        for i, (_, _, joins, stays) in enumerate(drawn):
            if i in inside and step == joins + stays:
                batch.leave(members[i].request, inside.pop(i).blocks)
            if step == joins and stays and members[i].scheduled < members[i].spec.output_tokens:
                inside[i] = members[i]
                batch.join(members[i].request, members[i].blocks, fills=True)
        over = [i for i, m in inside.items() if m.scheduled == m.spec.output_tokens]
        for i in over:
            batch.leave(members[i].request, inside.pop(i).blocks)
        if step in resting:
            batch.growing()  # asking changes nothing
            batch.commit(resting=True)
        else:
            plan(batch, inside)
        if step >= depth - 1:
            land(batch, members, batch.updated)
        batch.check({m.request: m.blocks for m in inside.values()})
        assert all(m.agrees() for m in members.values()), step
        for member in members.values():
            got = [first + i for first, count in member.request.delivered() for i in range(count)]
            assert got == [at for at in member.steps[1:] if at < batch.updated]


def plan(batch: DecodeBatch, inside: dict[int, Member]) -> None:
    """One step: what the decode batch schedules for it is what the counters say."""
    now = [inside[i] for i in sorted(inside)]
    assert batch.context == sum(m.computed for m in now)
    assert len(batch) == len(now)
    size = batch.block_size
    growing = [m for m in now if m.computed == m.blocks * size]
    assert batch.growing() == [m.request for m in growing]
    batch.grew()
    for member in growing:
        member.blocks += 1
    assert batch.filling() == [m.request for m in now if (m.computed + 1) % size == 0]
    ending = [m.request for m in now if m.scheduled + 1 == m.spec.output_tokens]
    assert batch.ending() == ending
    for member in now:
        member.computed += 1
        member.scheduled += 1
        member.steps.append(batch.planned)
    batch.commit()


def land(batch: DecodeBatch, members: dict[int, Member], step: int) -> None:
    """The oldest step comes back: members advance together, those who left since are delivered one by one."""
    completion = batch.completion(step)
    batch.applied()
    for row in completion:
        assert row.request.batch is None
        assert row.epoch == row.request.epoch
        row.request.receive(step)
    for member in members.values():
        member.seen += step in member.steps[1:]


def test_a_stale_calendar_entry_is_ignored() -> None:
    """Who has left and joined again is due by the new stay only."""
    batch, member = DecodeBatch(SIZE), Member(0, 4, 9)
    batch.join(member.request, 2, fills=True)
    batch.commit()
    batch.leave(member.request, 2)
    batch.join(member.request, 3, fills=True)
    due = []
    for step in range(1, 9):
        if batch.growing():
            due.append(step)
        batch.commit()
    assert due == [8]


def test_steps_that_no_member_has_seen_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step rests, and a request stays for 20 of 200 steps, one after the other: each gets the steps that
    went on in its stay, however few stretches are kept."""
    monkeypatch.setattr("cbsim.policy.request.MOST_STRETCHES", 3)
    batch = DecodeBatch(SIZE)
    for first in range(0, 200, 20):
        member = Member(first, 3, 90)
        batch.join(member.request, 1, fills=False)
        for step in range(first, first + 20):
            batch.commit(resting=step % 2 == 1)
            batch.applied()
        batch.leave(member.request, 1)
        assert member.request.runs == [[step, 1] for step in range(first, first + 20, 2)]
    assert len(batch._went) < 20
