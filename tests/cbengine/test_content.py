"""Equal declared content is equal tokens, and nothing else is; what a request really said, its next turn repeats."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")

from support.engine.oracle import check_toy_text, toy_run
from support.engine.served import (
    LOOPS,
    MS,
    SCHEDULERS,
    WITHOUT_CACHE,
    Case,
    check_texts,
    server,
    shared,
    spec,
    with_load,
)

from cbengine.sequence import Prompts
from cbsim.policy.request import RequestSpec
from cbsim.workload import generators
from cbsim.workload.requests import Sessions, Workload

VOCAB = 100_000  # large, so that a few equal tokens are no accident


@st.composite
def families(draw: st.DrawFn) -> list[RequestSpec]:
    """Requests whose prefixes come from two chains of ids, with blocks of one width; some declare outputs, too."""
    width = draw(st.integers(1, 9))
    specs = []
    for index in range(draw(st.integers(2, 5))):
        prompt, outputs = draw(st.integers(1, 40)), draw(st.integers(1, 20))
        declared = draw(st.integers(0, prompt + outputs))
        fields = shared(draw(st.integers(0, 1)), declared, width) if declared else {}
        specs.append(spec(index, prompt, outputs, **fields))
    return specs


@given(specs=families(), seed=st.integers(0, 3))
def test_equal_ids_are_equal_tokens(specs: list[RequestSpec], seed: int) -> None:
    """Two prompts are equal exactly as far as both declare the same ids, whatever order they are asked for in."""
    prompts = Prompts(seed, VOCAB)
    texts = {one: prompts.of(one) for one in specs}
    again = Prompts(seed, VOCAB)
    for one in reversed(specs):
        assert len(texts[one]) == one.prompt_tokens
        assert texts[one].dtype == np.int32
        assert texts[one].min() >= 0
        assert texts[one].max() < VOCAB
        assert np.array_equal(texts[one], again.of(one))
    for a, b in combinations(specs, 2):
        ids = zip(a.prefix, b.prefix, strict=False)
        same = next((i for i, (x, y) in enumerate(ids) if x != y), min(len(a.prefix), len(b.prefix)))
        common = min(same * a.prefix_block_tokens, *(min(s.prefix_tokens, s.prompt_tokens) for s in (a, b)))
        assert np.array_equal(texts[a][:common], texts[b][:common])
        beyond = min(len(texts[a]), len(texts[b])) - common
        assert beyond < 3 or not np.array_equal(texts[a][common:][:beyond], texts[b][common:][:beyond])


def test_other_seeds_are_other_texts() -> None:
    one = spec(0, 30, 1, **shared(0, 15))
    texts = [Prompts(seed, VOCAB).of(one) for seed in range(3)]
    for a, b in combinations(texts, 2):
        assert not np.array_equal(a[:15], b[:15])
        assert not np.array_equal(a[15:], b[15:])


def conversation(width: int, lengths: list[tuple[int, int]]) -> list[RequestSpec]:
    """Turns of one session: (new tokens, outputs) each; every prompt repeats all that was said before."""
    specs, said = [], 0
    for index, (new, outputs) in enumerate(lengths):
        prompt = said + new
        said = prompt + outputs
        specs.append(spec(index, prompt, outputs, **shared(3, said, width)))
    return specs


@given(
    width=st.integers(1, 9),
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=2, max_size=4),
    cut=st.integers(0, 3),
)
def test_a_turn_repeats_what_was_said(width: int, lengths: list[tuple[int, int]], cut: int) -> None:
    """... token by token, wherever the blocks of the declared content end; also after a turn that was cut short, whose
    missing words are the declared ones. The other tokens stay those that were declared.
    """
    specs = conversation(width, lengths)
    prompts, declared = Prompts(0, VOCAB), Prompts(0, VOCAB)
    text: list[int] = []
    for one in specs:
        prompt = prompts.of(one).tolist()
        assert prompt[: len(text)] == text
        assert prompt[len(text) :] == declared.of(one).tolist()[len(text) :]
        outputs = list(range(one.output_tokens))[: max(one.output_tokens - cut, 0)]
        prompts.answered(one, outputs)
        text = [*prompt, *outputs]


def test_undeclared_outputs_are_nobodys_prompt() -> None:
    """What a request said stays its own if its workload declared no content for it, or only some."""
    private, partly = spec(0, 10, 8), spec(1, 10, 8, **shared(0, 13))
    other = spec(2, 20, 1, **shared(0, 20))
    prompts = Prompts(0, VOCAB)
    before = prompts.of(other)
    prompts.answered(private, [1] * 8)
    assert np.array_equal(prompts.of(other), before)
    prompts.answered(partly, [2] * 8)
    assert prompts.of(other)[10:13].tolist() == [2, 2, 2]
    assert np.array_equal(prompts.of(other)[13:], before[13:])


# -- served -----------------------------------------------------------------------------------------------------------


TURNS = [
    {"session_id": "a", "timestamp": 0, "input_length": 520, "output_length": 40, "hash_ids": [0, 1]},
    {"session_id": "b", "timestamp": 3, "input_length": 530, "output_length": 30, "hash_ids": [0, 2]},
    {"session_id": "a", "delay": 5, "input_length": 17, "output_length": 20, "hash_ids": [3]},
    {"session_id": "b", "delay": 2, "input_length": 500, "output_length": 9, "hash_ids": [4]},
    {"session_id": "a", "delay": 0, "input_length": 1, "output_length": 30, "hash_ids": [6]},
]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_sessions_in_a_tight_cache(scheduler: str, loop: str, tmp_path: Path) -> None:
    """Two conversations that begin alike and evict each other: every turn's text follows from what was said."""
    file = tmp_path / "sessions.jsonl"
    file.write_text("".join(f"{json.dumps(turn)}\n" for turn in TURNS))
    whole = {"max_batch_prefill_tokens": 8 * 150} if scheduler == "tgi" else {}  # a prompt is a conversation by then
    given = with_load(server(scheduler, 8, 150, 300, 4, sharing=True, **whole), kind="agentic", path=str(file))
    run, _ = toy_run(Case(given, generators.build(given)), loop)
    check_texts(run, check_toy_text)
    texts = {one.id: text for one, text in run.engine.sequences.items()}
    for before, after in (("a/0", "a/1"), ("a/1", "a/2"), ("b/0", "b/1")):
        said = [*texts[before].prompt.tolist(), *texts[before].outputs]
        assert texts[after].prompt[: len(said)].tolist() == said
    assert run.total("cached_tokens") > 512 or scheduler in WITHOUT_CACHE


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_turn_after_one_that_was_given_up(scheduler: str, loop: str) -> None:
    """A client gives up a turn and goes on: the cache holds what the turn had said, so the next one repeats that."""
    first, second = conversation(4, [(12, 40), (6, 10)])
    load = Workload([first], 2, [(100 * MS, first)], follow=Sessions({0: (second, 0)}))
    run, _ = toy_run(Case(server(scheduler, 4, 100, 64, 4, sharing=True), load), loop)
    check_texts(run, check_toy_text)
    assert run.statuses == {"aborted": 1, "length": 1}
    texts = run.texts
    assert 4 < len(texts[0]) < 40
    follower = next(text for one, text in run.engine.sequences.items() if one.index == 1)
    assert follower.prompt[12 : 12 + len(texts[0])].tolist() == texts[0]
    if scheduler not in WITHOUT_CACHE:
        assert run.total("cached_tokens") > 12
