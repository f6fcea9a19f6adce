"""Beam search: whose blocks a text lies in, whatever the results say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbsim.policy.loop import Applied, Await, Completed, Launch, Poll, Polled, serve
from cbsim.policy.plan import StepPlan, StepResult, Underway
from cbsim.policy.request import Request, RequestSpec
from cbsim.policy.transfers import Direction
from cbsim.schedulers.simple.beam import BeamPool, BeamScheduler
from cbsim.schedulers.simple.settings import BeamOptions

SIZE = 4
Text = tuple[object, ...]


class Memory:
    """A device that holds texts: every place of a block says which token of which text lies there. Rows read all of
    their text through their tables, as attention does, and find it, or the test fails."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], Text] = {}  # (block, place) -> the text up to and with the token there
        self.tables: dict[RequestSpec, list[int]] = {}
        self.texts: dict[RequestSpec, Text] = {}  # prompt and outputs
        self.underway = Underway(SIZE)
        self.copies = 0

    def run(self, plan: StepPlan) -> None:
        self.underway.planned(plan)
        for spec, index, block in plan.changes.replaced:
            if spec in self.tables:
                self.tables[spec][index] = block
        for move in plan.transfers:
            assert move.direction is Direction.COPY
            self.copies += len(move.sources)
            for source, target in zip(move.sources, move.targets, strict=True):
                for place in range(SIZE):
                    self.places[target, place] = self.places.get((source, place), ())
        for chunk in plan.work.chunks:
            table = self.tables.setdefault(chunk.spec, [])
            if chunk.admitted:
                table.clear()
            table += chunk.blocks
            text = self.texts.setdefault(chunk.spec, _prompt(chunk.spec))
            for at in range(chunk.start, chunk.start + chunk.tokens):
                self.places[table[at // SIZE], at % SIZE] = text[: at + 1]
        for chunk in plan.work.chunks:
            text, table = self.texts[chunk.spec], self.tables[chunk.spec]
            for at in range(chunk.start + chunk.tokens):
                assert self.places[table[at // SIZE], at % SIZE] == text[: at + 1], (plan.step, chunk.spec.id, at)

    def land(self, plan: StepPlan, parents: dict[RequestSpec, RequestSpec]) -> None:
        """Every text goes on with the one that it is said to, and a token that no other has."""
        before = dict(self.texts)
        for group in plan.ranked:
            for spec in group:
                self.texts[spec] = (*before[parents.get(spec, spec)], (plan.step, spec.index))


def _prompt(spec: RequestSpec) -> Text:
    return tuple(((spec.sample_of or spec).index, i) for i in range(spec.prompt_tokens))


def scheduler(beams: int, blocks: int) -> BeamScheduler:
    sizes = {"block_size": SIZE, "num_blocks": blocks}
    return BeamScheduler(BeamOptions(num_beams=beams, max_num_seqs=3 * beams, max_num_batched_tokens=12, **sizes))


def requests(beams: int, sizes: list[tuple[int, int]]) -> list[list[RequestSpec]]:
    """Of each request its texts, the first of them first."""
    made: list[list[RequestSpec]] = []
    for number, (prompt, outputs) in enumerate(sizes):
        at = number * beams
        first = RequestSpec(at, f"0_{number}", 0, prompt, outputs, outputs)
        others = [
            RequestSpec(at + i, f"{i}_{number}", 0, prompt, outputs, outputs, sample_of=first) for i in range(1, beams)
        ]
        made.append([first, *others])
    return made


class Run:
    """A run of the loop. `draw` says whose text each goes on with; `gone` are given up, each at a poll."""

    def __init__(
        self,
        policy: BeamScheduler,
        asked: list[list[RequestSpec]],
        draw: Callable[[int], int],
        gone: dict[int, RequestSpec],
    ) -> None:
        self.policy, self.memory, self.tokens = policy, Memory(), dict.fromkeys((s for g in asked for s in g), 0)
        self.saved: list[int] = []  # blocks, after each plan
        self._coming, self._draw, self._gone, self._polls = list(asked), draw, gone, 0

    def serve(self, depth: int) -> None:
        loop = serve(self.policy, depth)
        answer = None
        while True:
            try:
                effect = loop.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(effect, Poll):
                answer = self._poll()
            elif isinstance(effect, Launch):
                self.memory.run(effect.plan)
                self.saved.append(self.policy.pool.saved)
                self.policy.decoding.check()
            elif isinstance(effect, Await):
                answer = Completed(StepResult(parents=self._parents(effect.plan)))
            elif isinstance(effect, Applied):
                for spec in effect.outcome.received:
                    self.tokens[spec] += 1
                self.policy.decoding.check()

    def _poll(self) -> Polled:
        self._polls += 1
        arrivals = self._coming.pop(0) if self._coming else []
        gone = self._gone.pop(self._polls, None)
        return Polled(arrivals, [gone] if gone else [], closed=not self._coming and not self._gone)

    def _parents(self, plan: StepPlan) -> tuple[tuple[RequestSpec, RequestSpec], ...]:
        drawn = {spec: group[self._draw(len(group))] for group in plan.ranked for spec in group}
        alike = {group for group in plan.ranked if len(self.memory.texts[group[0]]) == group[0].prompt_tokens}
        parents = {
            spec: parent
            for group in plan.ranked
            if group not in alike
            for spec, parent in drawn.items()
            if spec in group and parent is not spec
        }
        self.memory.land(plan, parents)
        return tuple(parents.items())


@given(
    beams=st.integers(1, 5),
    sizes=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 12)), min_size=1, max_size=5),
    depth=st.integers(1, 2),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_every_text_reads_itself(beams: int, sizes: list[tuple[int, int]], depth: int, data: st.DataObject) -> None:
    """Whoever takes over whose text, and whoever is given up: each row finds its own text in its table, tables and
    references agree after every step, everybody gets all tokens, and every block comes back."""
    policy = scheduler(beams, blocks=beams * 7 + 3)
    asked = requests(beams, sizes)
    gone = data.draw(st.dictionaries(st.integers(2, 20), st.sampled_from([s for g in asked for s in g]), max_size=2))
    given_up = {s for g in asked if not {*g}.isdisjoint(gone.values()) for s in g}
    run = Run(policy, asked, lambda count: data.draw(st.integers(0, count - 1)), gone)
    run.serve(depth)
    assert policy.pool.free == policy.pool.num_blocks
    assert all(run.tokens[spec] == spec.max_tokens for g in asked for spec in g if spec not in given_up)


@pytest.mark.parametrize("beams", [1, 2])
def test_no_more_texts_share_a_reservation_than_there_are_beams(beams: int) -> None:
    """Further samples of a request are searches of their own: each has room for all that it may write."""
    policy, (group,) = scheduler(beams, 7 * beams + 2), requests(3, [(15, 12)])  # 7 blocks a text at its end
    run = Run(policy, [group], lambda _: 0, {})
    run.serve(1)
    assert policy.pool.free == policy.pool.num_blocks
    assert set(run.tokens.values()) == {12}


def test_by_hand() -> None:
    """Two beams of a prompt of 6 tokens in blocks of 4. The fork shares the first block and copies the second, into
    which both write; to take over the other's text costs one copy."""
    policy, (group,) = scheduler(2, 20), requests(2, [(6, 3)])
    run = Run(policy, [group], lambda _: 0, {})
    run.serve(1)
    assert run.tokens == {group[0]: 3, group[1]: 3}
    assert run.saved == [0, 1, 1, 1]  # the prompt; then both texts share its first block
    assert run.memory.copies == 1 + 1  # the fork's, and that of the second token, when both go on with the first text


class Stingy(BeamPool):
    """The fault: a fork shares the last block as well, and writes into it."""

    def fork(self, request: Request, beam: Request, computed: int) -> int | None:
        self.tables[beam] = self._shared(list(self.tables[request]))
        return None


def test_a_last_block_that_is_shared_is_noticed() -> None:
    """Two texts write into one block: the second finds the first one's token in its text."""
    policy = scheduler(2, 20)
    policy.pool = Stingy(SIZE, 20)
    policy.decoding.pool = policy.pool
    turns = count()
    run = Run(policy, requests(2, [(6, 4)]), lambda texts: next(turns) % texts, {})
    with pytest.raises(AssertionError, match=r"0_0|1_0"):
        run.serve(1)
