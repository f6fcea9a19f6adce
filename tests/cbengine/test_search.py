"""Beam search on the engine: the texts of `generate(num_beams=k)`, whatever else is in a batch, and parents that are
recorded so that the plans can be derived again. Devices are the hash that checks every step (oracle.py), this process,
a worker, and the one that computes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbsim.runs import reading

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine.oracle import toy_run, toy_search
from support.engine.served import (
    INLINE,
    LOOPS,
    MS,
    VOCAB,
    Case,
    Run,
    asked,
    check_texts,
    server,
    spec,
    transformers_model,
)

from cbengine import build
from cbengine.batch import Batcher, Capacity
from cbengine.build import Setup
from cbengine.driver import choices
from cbengine.errors import UsageError
from cbengine.sampling import Sampling, SamplingSettings, rank
from cbengine.sequence import Prompts
from cbengine.sequence import Sequence as Text
from cbsim.machine import simulate
from cbsim.policy.plan import Chunk, Preempted, StepChanges, StepPlan, StepWork
from cbsim.policy.request import RequestSpec
from cbsim.record import optional_tables
from cbsim.runs import assemble, replan
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

NEAR = 1e-3  # of two sums of log probabilities: how far the order in which a device adds can move them


def searching(beams: int, blocks: int, *, block_size: int = 4, budget: int = 64, texts: int = 64) -> Scenario:
    """A server that searches."""
    plain = asked("beam", "loop.mode=sync", f"scheduler.num_beams={beams}")
    rules = replace(plain.scheduler, max_num_seqs=max(texts, beams), max_num_batched_tokens=max(budget, beams))
    cache = plain.kv_cache.model_copy(update={"block_size": block_size, "num_blocks": blocks})
    return plain.model_copy(update={"scheduler": rules, "kv_cache": cache})


def requests(beams: int, *sizes: tuple[int, int, int]) -> list[RequestSpec]:
    """So many texts of each (prompt tokens, outputs, time of arrival in ms)."""
    specs: list[RequestSpec] = []
    for prompt, outputs, at in sizes:
        first = spec(len(specs), prompt, outputs, arrival_ns=at * MS)
        specs += [
            first,
            *(replace(first, index=first.index + i, id=f"{first.id}.{i}", sample_of=first) for i in range(1, beams)),
        ]
    return specs


def groups(run: Run, beams: int) -> list[list[Text]]:
    texts = sorted(run.engine.sequences.values(), key=lambda text: text.spec.index)
    return [texts[at : at + beams] for at in range(0, len(texts), beams)]


def load(specs: list[RequestSpec], *cancels: tuple[int, RequestSpec]) -> Workload:
    return Workload(specs, len(specs), list(cancels))


# -- the ranking alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [1, 2, 5])
def test_the_best_continuations_of_all_texts(beams: int) -> None:
    """Against every continuation of every text, sorted."""
    torch.manual_seed(beams)
    logits, scores = torch.randn(3 * beams, 11), -10 * torch.rand(3 * beams)
    logits[0] *= 50  # one text is sure of itself
    for at, (tokens, parents, found) in enumerate(choices(rank(logits, scores, beams).numpy(), beams)):
        group = slice(at * beams, (at + 1) * beams)
        values = logits[group].double()
        continued = scores[group].double()[:, None] + values - values.exp().sum(-1, keepdim=True).log()
        best = sorted(np.ndindex(*continued.shape), key=lambda place: -continued[place].item())[:beams]
        assert [*zip(parents, tokens, strict=True)] == best
        assert found == pytest.approx([continued[place].item() for place in best], abs=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_text_of_a_search_without_numbers_goes_on(value: float) -> None:
    """... and those of another one do."""
    logits = torch.randn(4, 7)
    logits[1, 3] = value
    (broken, *_), (whole, *_) = choices(rank(logits, torch.zeros(4), 2).numpy(), 2)
    assert broken == [-1, -1]
    assert min(whole) >= 0


# -- steps and tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@given(
    beams=st.integers(2, 5),
    sizes=st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 9), st.sampled_from((0, 0, 3, 20))), min_size=1, max_size=4
    ),
    block_size=st.integers(1, 6),
    budget=st.sampled_from((5, 9, 64)),
    tight=st.booleans(),
    gone=st.booleans(),
)
@settings(max_examples=40)
def test_every_text_is_that_of_its_search_alone(
    loop: str, beams: int, sizes: Any, block_size: int, budget: int, tight: bool, gone: bool
) -> None:
    """Random searches side by side, in caches that hold one or all of them: the arrays of every step say what its plan
    says, copies and shared blocks included, and no search shows that there are others.
    """
    specs = requests(beams, *sizes)
    whole = [beams * -(-(one.prompt_tokens + one.max_tokens) // block_size) for one in specs]
    blocks = max(2, max(whole) if tight else sum(whole))
    cancels = [(specs[0].arrival_ns + 12 * MS, one) for one in specs[: beams * gone]]
    case = Case(searching(beams, blocks, block_size=block_size, budget=budget), load(specs, *cancels))
    run, checked = toy_run(case, loop)
    assert checked.searches or gone
    for texts in groups(run, beams):
        [status] = {run.rows[text.spec.index].status for text in texts}
        event(status)
        if not gone or texts[0].spec is not specs[0]:
            assert status == "length"
            assert {len(text.outputs) for text in texts} == {texts[0].spec.output_tokens}
        wanted = toy_search(texts[0].prompt, len(texts[0].outputs), beams)
        assert [text.outputs for text in texts] == wanted


def test_a_search_without_numbers_fails_as_a_whole() -> None:
    """All its texts fail, others go on, and nothing is lost."""
    specs = requests(2, (5, 6, 0), (6, 6, 0))
    clean, _ = toy_run(Case(searching(2, 40), load(specs)), "sync")
    broken = groups(clean, 2)[0][0].outputs[2]
    assert not any(broken in text.outputs for text in groups(clean, 2)[1])
    run, _ = toy_run(Case(searching(2, 40), load(specs)), "sync", broken=broken)
    assert [run.rows[i].status for i in range(4)] == ["failed", "failed", "length", "length"]
    assert [text.outputs for text in groups(run, 2)[1]] == [text.outputs for text in groups(clean, 2)[1]]


def check_derived(run: Run, folder: Path) -> dict[int, list[tuple[int, int]]]:
    """The recorded parents, which lead to the recorded plans again."""
    recorded = replace(reading.load(run.written(folder)), files=optional_tables.files_of(run.engine.record))
    known = {one.index: one for one in run.engine.sequences}
    verdict = replan._compare(recorded, assemble.scheduler(run.scenario, "sync"), 1, known.get)
    assert verdict == (len(run.steps), len(run.steps), None)
    return optional_tables.by_step(recorded.source, optional_tables.PARENTS)


# -- a real model -----------------------------------------------------------------------------------------------------

SEARCHES = ((13, 24, 0), (1, 20, 0), (30, 12, 5), (8, 24, 30), (12, 1, 31))


@cache
def generated(prompt: tuple[int, ...], outputs: int, beams: int) -> tuple[list[list[int]], list[float]]:
    """The texts of transformers' `generate(num_beams=k)`, best first, and their scores."""
    ids = torch.tensor([prompt])
    said = transformers_model().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=beams,
        num_return_sequences=beams,
        min_new_tokens=outputs,
        max_new_tokens=outputs,
        length_penalty=0.0,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return said.sequences[:, len(prompt) :].tolist(), said.sequences_scores.tolist()


def check_search(texts: list[Text]) -> int:
    """Texts and scores are those of `generate`. Returns how many texts differ: two that are nearly as likely may change
    places, and then they are others, with the same score.
    """
    prompt, outputs = tuple(texts[0].prompt.tolist()), len(texts[0].outputs)
    wanted, scores = generated(prompt, outputs, len(texts))
    assert [text.score for text in texts] == pytest.approx(scores, abs=NEAR)
    return sum(text.outputs != other for text, other in zip(texts, wanted, strict=True))


@pytest.mark.parametrize(("beams", "device"), [(2, "inline"), (3, "inline"), (5, "inline"), (3, "process")])
@pytest.mark.parametrize("loop", LOOPS)
def test_texts_are_those_of_generate(loop: str, beams: int, device: Any, tmp_path: Path) -> None:
    """Searches that come and go, in one batch, in pieces of a prompt, on shared and copied blocks. Every text took over
    another's at some time, and the recorded parents lead to the recorded plans.
    """
    specs = requests(beams, *SEARCHES)
    case = Case(searching(beams, 300, budget=20, texts=3 * beams), load(specs))
    run = case.run(loop, Setup(device=device), tick_ns=MS if device == "inline" else 0)
    assert sum(check_search(texts) for texts in groups(run, beams)) <= 1
    assert {row.status for row in run.rows.values()} == {"length"}
    assert sum(map(len, check_derived(run, tmp_path).values())) > 10 * beams


def test_one_text_is_the_greedy_one() -> None:
    """A search of one ranks nothing."""
    run = Case(searching(1, 60), load(requests(1, (13, 24, 0)))).run("sync")
    check_texts(run)
    assert not run.engine.record.parents


def test_a_modelled_device_declares_parents_as_the_simulator(tmp_path: Path) -> None:
    """Nothing is computed, and the plans are those of the simulated run."""
    specs = requests(3, (13, 24, 0), (30, 12, 0))
    run = Case(searching(3, 300), load(specs)).run("sync", Setup(device="modelled"), tick_ns=0)
    simulated = simulate.machine(run.scenario, "sync", load(specs))
    simulate.run(simulated)
    assert run.engine.record.parents == simulated.record.parents
    assert check_derived(run, tmp_path)


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (Setup("inline", sampling=Sampling(temperature=0.7)), "sampling.temperature: must be 0"),
        (Setup("inline", requests=SamplingSettings({"r0": Sampling(temperature=1.0)})), "sampling.temperature"),
        (Setup("inline", end_tokens=True), "--stop-at-end-tokens: must be left out"),
    ],
)
def test_what_a_search_does_not_do_is_refused(setup: Setup, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build.adapted(searching(2, 40), setup)
    build.adapted(searching(1, 40), setup)


# -- several samples of one request ----------------------------------------------------------------------------------


SAMPLED = Sampling(temperature=1.0, top_k=50, seed=5)
PROMPT, OUTPUTS = 14, 8  # three blocks and a half


def samples(count: int) -> list[RequestSpec]:
    """A request and further samples of it."""
    first = spec(0, PROMPT, OUTPUTS)
    return [first, *(replace(spec(i, PROMPT, OUTPUTS), sample_of=first) for i in range(1, count))]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", ["transformers_fifo", "transformers_fifo 5.23"])
@pytest.mark.parametrize("sharing", [True, False])
def test_samples_say_what_separate_requests_would(sharing: bool, scheduler: str, loop: str) -> None:
    """Full blocks of the prompt are shared, or copied as well; the one that will be written is each sample's own."""
    setup, sizes = replace(INLINE, sampling=SAMPLED), server(scheduler, 4, 60, 64, 4, sharing=sharing)
    run = Case(sizes, load(samples(3))).run(loop, setup)
    separate = Case(server("vllm", 4, 60, 64, 1, sharing=False), load(samples(3))).run("sync", setup)
    assert run.texts == separate.texts
    assert len({tuple(said) for said in run.texts.values()}) == 3, "seeds make a difference"
    blocks = run.engine.record.transfers.rows[4::8]
    assert sum(blocks) == 2 * (1 if sharing else 4), "copied, not computed again"


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
    sizes = Capacity(slots=4, width=8, rows=4, tokens=80)
    batcher, into = Batcher(sizes, padded=False), np.zeros(sizes.staging, dtype=np.int32)
    batcher.sequences[one] = Text(one, Prompts(0, VOCAB).of(one), Sampling())
    begun = Chunk(one, 0, 0, PROMPT, (0, 1, 2, 3), 1, admitted=True)
    batcher.build(StepPlan(0, StepWork((begun,), prefill_tokens=PROMPT)), into, int)
    back = Chunk(one, 1, PROMPT, 1, (4, 5, 6, 7), 1, admitted=True, resumed=True, cached=PROMPT)
    changes = StepChanges(preempted=(Preempted(one, PROMPT, 4),))
    with pytest.raises(AssertionError, match="left in another slot"):
        batcher.build(StepPlan(1, StepWork((back,), prefill_tokens=1), changes), into, int)
