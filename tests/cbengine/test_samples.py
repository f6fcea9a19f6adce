"""Several samples of one request: each has a seed of its own, reads its parent's prompt from the cache, and says what a
request of its own with that prompt and seed would say. The plans are made by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from support.engine.served import INLINE, VOCAB, asked, spec

from cbengine import build
from cbengine.batch import Batcher, Capacity
from cbengine.device.base import Inline
from cbengine.sampling import Sampling, SamplingSettings
from cbengine.sequence import Prompts
from cbengine.sequence import Sequence as Text
from cbsim.policy.plan import Chunk, Preempted, StepChanges, StepPlan, StepWork
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import Direction, Transfer

SAMPLED = Sampling(temperature=1.0, top_k=50, seed=5)
SIZES = Capacity(slots=4, width=8, rows=4, tokens=80)
PROMPT, OUTPUTS, BLOCK = 14, 8, 4  # three blocks and a half


def samples(count: int) -> list[RequestSpec]:
    """A request and further samples of it."""
    first = spec(0, PROMPT, OUTPUTS)
    return [first, *(replace(spec(i, PROMPT, OUTPUTS), sample_of=first) for i in range(1, count))]


def texts_of(specs: Sequence[RequestSpec], prompts: Callable[[RequestSpec], Any]) -> dict[RequestSpec, Text]:
    return {one: Text(one, prompts(one), SAMPLED) for one in specs}


class Bench:
    """Runs plans made by hand on the tiny model, one after the other."""

    def __init__(self, texts: dict[RequestSpec, Text]) -> None:
        plan = build.executor_plan(asked("vllm"), "sync", [], INLINE)
        plan = replace(plan, num_blocks=40, block_size=BLOCK, positions=32, capacity=SIZES, random=True, host_blocks=8)
        self.device, self.texts = Inline(plan(), SIZES, 1), texts
        self._batcher = Batcher(SIZES, padded=False, random=True)
        self._batcher.sequences.update(texts)
        self._steps = 0

    def step(self, chunks: tuple[Chunk, ...], moves: tuple[Transfer, ...] = (), **changes: Any) -> None:
        work = StepWork(chunks, prefill_tokens=sum(chunk.tokens for chunk in chunks))
        made = StepPlan(self._steps, work, StepChanges(**changes), transfers=moves)
        self._steps += 1
        header, readers = self._batcher.build(made, self.device.staging[0], self.device.bucket)
        self.device.launch(0, header, made)
        for text, token in zip(readers, self.device.wait(0)[0].tolist(), strict=True):
            text.outputs.append(token)

    def decode(self, tables: dict[RequestSpec, list[int]], until: int, free: list[int]) -> None:
        """A row of a token for each, listed, until it has said so much."""
        while any(len(self.texts[one].outputs) < until for one in tables):
            chunks = []
            for one, table in tables.items():
                start = PROMPT + len(self.texts[one].outputs) - 1
                more = (free.pop(),) if start >= len(table) * BLOCK else ()
                table.extend(more)
                chunks.append(Chunk(one, one.index, start, 1, more, 1))
            self.step(tuple(chunks))


def alone(one: RequestSpec, prompt: Any) -> list[int]:
    """What a request says that is not a sample of any other, in the same place of the workload."""
    own = replace(one, sample_of=None)
    bench, table, free = Bench({own: Text(own, prompt, SAMPLED)}), [5, 6, 7, 8], list(range(12, 40))
    bench.step((Chunk(own, 0, 0, PROMPT, tuple(table), 1, admitted=True),))
    bench.decode({own: table}, OUTPUTS, free)
    return bench.texts[own].outputs


@pytest.mark.parametrize("how", ["copy of the last block", "copy of all blocks", "by the host"])
def test_samples_say_what_separate_requests_would(how: str) -> None:
    """Full blocks of the prompt are shared, or copied as well; the one that will be written is each sample's own."""
    specs = samples(3)
    texts = texts_of(specs, Prompts(0, VOCAB).of)
    bench, free = Bench(texts), list(range(12, 40))
    table = [0, 1, 2, 3]
    bench.step((Chunk(specs[0], 0, 0, PROMPT, tuple(table), 1, admitted=True),))
    bench.decode({specs[0]: table}, 3, free)  # the parent's last block holds tokens of its own by now
    tables, moves, chunks = {specs[0]: table}, [], []
    for child in specs[1:]:
        shared = [] if how == "copy of all blocks" else table[:3]
        own = [free.pop() for _ in range(4 - len(shared))]
        tables[child] = [*shared, *own]
        old = tuple(table[len(shared) : 4])
        if how == "by the host":
            moves += [
                Transfer(Direction.OUT, old, (child.index,), child),
                Transfer(Direction.IN, (child.index,), tuple(own), child),
            ]
        else:
            moves.append(Transfer(Direction.COPY, old, tuple(own), child))
        start = PROMPT - 1
        chunks.append(Chunk(child, child.index, start, 1, tuple(tables[child]), 1, admitted=True, cached=start))
    bench.step(tuple(chunks), tuple(moves))
    bench.decode({one: tables[one] for one in specs[1:]}, 3, free)
    bench.decode(tables, OUTPUTS, free)
    wanted = [alone(one, texts[specs[0]].prompt) for one in specs]
    assert [texts[one].outputs for one in specs] == wanted
    assert len({tuple(said) for said in wanted}) == 3, "seeds make a difference"


def test_a_sample_has_its_parents_prompt_and_settings() -> None:
    """... unless a line of the file is its own; what it says is no turn that a next one repeats."""
    first, second, third = samples(3)
    prompts = Prompts(3, VOCAB)
    assert np.array_equal(prompts.of(first), prompts.of(second))
    assert not np.array_equal(prompts.of(first), prompts.of(replace(second, sample_of=None)))
    own = SamplingSettings({first.id: SAMPLED, third.id: replace(SAMPLED, seed=9)})
    assert [own.of(one, Sampling()).seed for one in (first, second, third)] == [5, 5, 9]
    assert SamplingSettings().of(second, SAMPLED) is SAMPLED
    declared = {"prefix": tuple(range(8)), "prefix_block_tokens": 4, "prefix_tokens": 32}
    turn, other = replace(first, **declared), spec(7, 22, 1, **declared)
    prompts.answered(turn, [1] * OUTPUTS)
    prompts.answered(replace(second, sample_of=turn, **declared), [2] * OUTPUTS)
    assert prompts.of(other)[PROMPT:].tolist() == [1] * OUTPUTS


def test_a_token_in_flight_is_not_left_in_another_slot() -> None:
    """A slot holds the last token that the device sampled and the host has not seen: whoever gives it up before that
    cannot come back before that.
    """
    (one,) = samples(1)
    texts = texts_of([one], Prompts(0, VOCAB).of)
    bench = Bench(texts)
    bench.step((Chunk(one, 0, 0, PROMPT, (0, 1, 2, 3), 1, admitted=True),))
    texts[one].outputs.clear()  # it has not landed
    lost = (Preempted(one, PROMPT, 4),)
    back = Chunk(one, 1, PROMPT, 1, (4, 5, 6, 7), 1, admitted=True, resumed=True, cached=PROMPT)
    with pytest.raises(AssertionError, match="left in another slot"):
        bench.step((back,), preempted=lost)
