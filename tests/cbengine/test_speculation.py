"""Speculation changes how many tokens a step gives a request, never which: every text is what it would be without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine.served import (
    DRAFTERS,
    INLINE,
    LOOPS,
    MS,
    Case,
    Run,
    cases,
    check_derived,
    check_texts,
    drawn_weights,
    server,
    shared,
    spec,
    speculating,
    with_load,
)
from support.engine.tiny_runs import MIXED, SAMPLED

import cbengine
import cbsim
from cbengine import build
from cbengine.build import Setup
from cbengine.device.base import EngineDevice
from cbengine.device.drafts import BLANK, LEAST_NGRAM, MOST_NGRAM, Drafts, Lookup, looked_up
from cbengine.device.layout import Arrays, Header, arrays
from cbengine.errors import UsageError
from cbengine.model import weights
from cbengine.model.ops import Rows
from cbengine.sampling import Draws, Sampling, request_seed, sample, uniforms, uniforms_on_device
from cbengine.sequence import Sequence
from cbsim.policy.plan import StepPlan
from cbsim.record import optional_tables
from cbsim.runs import replan
from cbsim.workload.requests import Workload


def some(count: int = 6) -> Workload:
    """Requests of two lengths, some of which begin alike, and some of which end before their limit."""
    lengths = ((13, 9), (12, 20), (1, 14), (30, 5))
    sizes = [(*lengths[i % 4], shared(0, 8) if i % 4 < 2 else {}) for i in range(count)]
    specs = [spec(i, a, b, arrival_ns=4 * MS * i, max_tokens=b + i % 3, **more) for i, (a, b, more) in enumerate(sizes)]
    return Workload(specs, count)


def summary(run: Run) -> dict[str, float]:
    return optional_tables.summarise_drafts(run.engine.record.drafts)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@given(data=st.data(), k=st.integers(1, 5))
@settings(max_examples=8)
def test_every_text_is_what_it_would_be_without(drafter: str, loop: str, data: st.DataObject, k: int) -> None:
    """... with caches that are too small, cancellations, shared prefixes, budgets that cut drafts, and ends that nobody
    foresees; and its plans follow from the recorded polls and drafts.
    """
    sizes, load = data.draw(cases("vllm 0.33"))
    by_rows = data.draw(st.sampled_from([(), ((1, k), (3, k // 2))]))
    run = Case(speculating(sizes, drafter, k, by_rows=by_rows), load).run(loop)
    check_texts(run)
    check_derived(run, loop)
    rows = optional_tables.values_of(optional_tables.DRAFTS, run.engine.record.drafts)
    assert (rows["accepted"] <= rows["drafts"]).all()
    for column in ("preempted", "cached_tokens", "wasted_rows"):
        if run.total(column):
            event(column)
    event(f"some came true: {summary(run)['accepted_tokens'] > 0}")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_target_that_drafts_for_itself_is_always_right(loop: str) -> None:
    """All drafts come true, the prefix that another request has computed included: so steps are few."""
    sizes = server("vllm 0.33", 4, 90, 64, 4, sharing=True)
    run, plain = Run(speculating(sizes, "own"), loop, some()), Run(sizes, loop, some())
    check_texts(run)
    assert run.total("cached_tokens") > 0
    assert summary(run)["acceptance_rate"] == 1.0
    assert len(run.steps) < len(plain.steps) / 2
    assert run.texts == plain.texts


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_behind_the_longest_text_go_nowhere(drafter: str, loop: str) -> None:
    """Texts end at the longest that the scheduler takes, where a table has no room for more drafts."""
    specs = [spec(i, (13, 12, 8)[i % 3], 24, arrival_ns=3 * MS * i) for i in range(9)]
    sizes = server("vllm 0.33", 2, 40, 64, 3, sharing=False, max_model_len=22)
    run = Run(speculating(sizes, drafter, 6), loop, Workload(specs, len(specs)))
    check_texts(run)
    assert {len(text.outputs) + len(text.prompt) for text in run.engine.sequences.values()} == {22}
    if drafter == "own":
        assert summary(run)["acceptance_by_position"]["1"] == 1.0


@pytest.mark.parametrize("loop", LOOPS)
def test_another_drafter_is_right_now_and_then(loop: str) -> None:
    run = Run(speculating(server("vllm 0.33", 4, 90, 64, 4, sharing=True), "other"), loop, some())
    check_texts(run)
    assert 0 < summary(run)["accepted_tokens"] < summary(run)["verified_tokens"]


def test_the_weights_of_a_drafter_are_read_from_a_folder(tmp_path: Path) -> None:
    """... here those of the target; with another vocabulary than it has they are refused, and so is what the engine
    cannot compute.
    """
    sizes = server("vllm 0.33", 4, 90, 64, 4, sharing=True)
    setup = Setup(device="inline", draft_weights=drawn_weights(tmp_path))
    run = Run(build.adapted(speculating(sizes, "other"), setup), "async", some(), setup)
    assert summary(run)["acceptance_rate"] == 1.0
    wider = sizes.model_copy(update={"model": sizes.model.model_copy(update={"vocab": 200})})
    with pytest.raises(UsageError, match=r"vocab: got 199, must be the target's, 200"):
        build.adapted(speculating(wider, "own"), setup)
    for field, value in {"gated": False, "attention": ("sliding 8",)}.items():
        odd = speculating(sizes, "own", drafter={"model": sizes.model.model_dump(mode="json") | {field: value}})
        with pytest.raises(UsageError, match=rf"speculation.drafter.model.{field}: "):
            build.adapted(odd, INLINE)
    short = {"model": sizes.model.model_dump(mode="json") | {"max_position": 8}}
    with pytest.raises(UsageError, match=r"speculation.drafter.model.max_position: got 8, must be >= \d+, the longest"):
        Run(speculating(sizes, "own", drafter=short), "sync", some())


def test_an_admitted_row_has_blanks_that_nothing_equals() -> None:
    """A row of one token that joins rows with drafts has their width; the drafts of its slot are another request's."""
    admitted: list[int] = []

    def device(*of: Any) -> EngineDevice:
        made: EngineDevice = whole(*of)
        launch = made.launch

        def launched(slot: int, header: Header, plan: StepPlan, excess: Any = None) -> None:
            step = arrays(made.staging[slot], header)
            for start, chunk in zip(step.starts.tolist(), plan.work.chunks, strict=False):
                ids = step.tokens[start + chunk.tokens - max(0, chunk.outputs - 1) : start + chunk.tokens].tolist()
                assert ids == ([-5] * 3 if chunk.admitted else [-2, -3, -4])[: len(ids)]
                admitted.append(chunk.admitted and len(ids))
            launch(slot, header, plan, excess)

        made.launch = launched  # type: ignore[method-assign]
        return made

    whole, specs = build.device, [spec(i, 13, 9, arrival_ns=20 * MS * i, **shared(0, 12)) for i in range(4)]
    sizes = server("vllm 0.33", 4, 60, 64, 4, sharing=True)
    check_texts(Run(speculating(sizes, "own"), "async", Workload(specs, len(specs)), device=device))
    assert max(admitted) == 3


@pytest.mark.parametrize(("loop", "drafter"), [("sync", "ngram"), ("async", "own"), ("async", "other")])
def test_a_worker_says_the_same(loop: str, drafter: str) -> None:
    sizes = speculating(server("vllm 0.33", 4, 90, 64, 4, sharing=True), drafter)
    run = Run(sizes, loop, some(), Setup(device="process"))
    assert run.texts == Run(sizes, loop, some()).texts


# -- who drafts -------------------------------------------------------------------------------------------------------


def reference(text: list[int], count: int) -> list[int]:
    """What prompt lookup proposes, spelled out."""
    for n in range(min(MOST_NGRAM, len(text) - 1), LEAST_NGRAM - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + count]
    return []


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 6))
def test_prompt_lookup_finds_the_first_occurrence_of_the_longest_end(texts: list[list[int]], count: int) -> None:
    padded = np.full((len(texts), 34), 1)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    drafts = looked_up(torch.from_numpy(padded), torch.tensor([len(text) for text in texts]), count)
    expected = [reference(text, count) for text in texts]
    assert drafts.tolist() == [one + [BLANK] * (count - len(one)) for one in expected]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_engine_looks_up_the_whole_text_of_a_request(loop: str) -> None:
    """... prefixes that others have computed, tokens of the very step, and what it computes again: behind each row that
    samples as many drafts as are found, and of these as many come true as the text goes on with.
    """
    specs = [spec(i, 13, 24, arrival_ns=4 * MS * i, **shared(0, 8)) for i in range(5)]
    sizes = server("vllm 0.33", 4, 18, 64, 3, sharing=True)
    run, k = Run(speculating(sizes, "ngram"), loop, Workload(specs, len(specs))), 3
    assert run.total("cached_tokens") > 0
    assert run.total("preempted") > 0
    texts = {one.index: (text.prompt.tolist(), text.outputs) for one, text in run.engine.sequences.items()}
    said, found = dict.fromkeys(texts, 0), dict.fromkeys(texts, [0][:0])
    rows = optional_tables.values_of(optional_tables.DRAFTS, run.engine.record.drafts)
    for _, request, drafts, accepted, proposed in zip(*(column.tolist() for column in rows.values()), strict=True):
        prompt, outputs = texts[request]
        if said[request] + accepted < len(outputs):  # else the row goes on behind the end of the text
            same = [a == b for a, b in zip(found[request], outputs[said[request] :], strict=False)]
            true = [*same, False].index(False)
            assert accepted == min(true, drafts)
        said[request] = min(said[request] + accepted + 1, len(outputs))
        if said[request] < len(outputs):
            found[request] = reference([*prompt, *outputs[: said[request]]], k)
            assert proposed == len(found[request])
    assert rows["accepted"].sum() > 0
    assert (rows["proposed"] > rows["accepted"]).any()


def test_ids_lie_in_the_blocks_of_whoever_shares_them() -> None:
    cache: Any = SimpleNamespace(scratch=4, block_size=2, keys=torch.zeros(1))
    lookup = Lookup(cache)
    lookup.read(torch.tensor([5, 6, 7, 5]), Rows(*[torch.zeros(0)] * 5, torch.tensor([2, 3, 4, 5]), 0, 4))
    tables = torch.tensor([[1, 2, 4], [4, 4, 4], [1, 2, 4]])  # two slots with blocks 1 and 2; none has a third
    slots, last, computed = torch.tensor([2, 0]), torch.tensor([6, 9]), torch.tensor([4, 4])
    assert lookup.propose(tables, slots, last, computed, 2).tolist() == [[7, 5], [BLANK, BLANK]]


# -- sampled tokens ---------------------------------------------------------------------------------------------------


def test_numbers_on_the_device_are_those_of_the_host() -> None:
    seeds = np.array([0, 1, request_seed(3, 7), (1 << 64) - 1, 1 << 63], dtype=np.uint64).repeat(40)
    positions = np.arange(200)
    numbers = uniforms_on_device(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions))
    assert numbers.tolist() == uniforms(seeds, positions).tolist()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_texts_are_those_of_the_same_seeds_without(drafter: str, loop: str) -> None:
    """Each token follows from its request's seed and its position, greedy requests beside it, preemptions included."""
    setup = Setup(device="inline", sampling=SAMPLED, requests=MIXED)
    sizes = server("vllm 0.33", 4, 20, 64, 4, sharing=True)
    run = Run(speculating(sizes, drafter), loop, some(), setup)
    assert run.texts == Run(sizes, loop, some(), setup).texts
    if drafter != "ngram":
        assert 0 < summary(run)["accepted_tokens"] < summary(run)["verified_tokens"]
    check_derived(run, loop)


def drawn_pairs(logits: torch.Tensor, drafted: int, count: int, biased: int = 0) -> npt.NDArray[np.int64]:
    """How often a row whose draft is `drafted` gives each pair of first tokens: its own, and what follows where the
    draft came true. The first `biased` of a thousand drafts are taken for true whatever the target says.
    """
    vocab = logits.shape[1]
    no_cache: Any = SimpleNamespace(scratch=0, block_size=1, keys=torch.zeros(1))
    drafts = Drafts(Lookup(no_cache), count, 1, torch.device("cpu"))
    ids = torch.tensor([[0, drafted]] * count, dtype=torch.int32)
    every = torch.arange(count, dtype=torch.int32)
    header = Header(count, 0, 0, 2 * count, 2, count, 0, True, False, most_drafts=1, verified=count)
    step = Arrays(*[torch.zeros(0)] * len(Arrays._fields))._replace(
        slots=every, kv_tokens=every * 0 + 2, starts=torch.arange(count + 1, dtype=torch.int32) * 2, sampled=every
    )
    step = step._replace(verifies=every * 0 + 1, tokens=ids.view(-1))
    outputs = drafts.outputs(step, header)
    seeds = np.array([request_seed(5, i) for i in range(count)], dtype=np.uint64).view(np.int64)
    numbers = uniforms_on_device(torch.from_numpy(seeds)[outputs.row], outputs.position)
    how = Sampling(temperature=1.0).on_device
    types = torch.float32, torch.int32, torch.float64
    columns = [torch.full_like(numbers, value, dtype=kind) for value, kind in zip(how, types, strict=True)]
    tokens = sample(logits[outputs.at], Draws(numbers, *columns))
    if biased:
        tokens[(outputs.row % 1000 < biased) & (outputs.at == 0)] = drafted
    rows = drafts.verified(step, header, outputs, tokens, torch.zeros((count, 1)))[: 2 * count].view(count, 2).numpy()
    assert ((rows[:, 1] == BLANK) == (rows[:, 0] != drafted)).all()
    pairs = np.where(rows[:, 1] == BLANK, rows[:, 0], vocab + rows[:, 1])
    return np.bincount(pairs, minlength=2 * vocab)


@pytest.mark.parametrize("biased", [0, 10])
def test_accepted_and_other_tokens_have_the_targets_distribution(biased: int) -> None:
    """Chi-square over 10^5 rows with a draft each: p of the draft, p of all others where it is rejected, and behind an
    accepted one the distribution there. One draft of a hundred that is taken for true regardless is found.
    """
    vocab, drafted, count = 12, 4, 100_000
    logits = torch.randn((2, vocab), generator=torch.Generator().manual_seed(1))
    first, second = logits.double().softmax(dim=1).numpy()
    expected = np.concatenate((np.where(np.arange(vocab) == drafted, 0, first), first[drafted] * second)) * count
    seen, tested = drawn_pairs(logits, drafted, count, biased), expected > 0
    chi_square = ((seen - expected)[tested] ** 2 / expected[tested]).sum()
    assert seen[~tested].sum() == 0
    freedom = tested.sum() - 1
    assert (chi_square < freedom + 3 * np.sqrt(2 * freedom)) == (not biased), (chi_square, freedom)


# -- ends -------------------------------------------------------------------------------------------------------------


def stopping(stops: frozenset[int], *of: Any) -> Sequence:
    return Sequence(*of[:3], stops)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_stop_token_ends_a_text_wherever_in_a_row_it_comes(drafter: str, loop: str) -> None:
    """Nothing behind it is delivered, and drafts behind it count as rejected: the plans follow from that."""
    sizes = server("vllm 0.33", 4, 24, 64, 4, sharing=True)
    whole, inside = Run(sizes, loop, some()).texts, 0
    for at in range(1, 6):
        stops = frozenset({text[at] for text in whole.values() if len(text) > at})
        with mock.patch.object(build, "Sequence", partial(stopping, stops)):
            run = Run(speculating(sizes, drafter), loop, some())
        for index, text in whole.items():
            ends = [i for i, token in enumerate(text) if token in stops][:1]
            assert run.texts[index] == (text[: ends[0] + 1] if ends else text)
            assert sum(run.rows[index].token_runs[1::2]) == len(run.texts[index])
        check_derived(run, loop)
        inside += run.statuses["stop"]
    assert inside >= 10


def without(token: int, drawn: Callable[..., dict[str, torch.Tensor]], *of: Any) -> dict[str, torch.Tensor]:
    """Random weights, in which one token has no embedding."""
    tensors = drawn(*of)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    return tensors


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("drafter", ["ngram", "own"])
def test_whoever_meets_a_broken_token_fails_alone(drafter: str, loop: str) -> None:
    """... with what it said before; one row's sums may spread it to the tokens before it there."""
    sizes = server("vllm 0.33", 4, 90, 64, 4, sharing=False)
    whole = Run(sizes, loop, some())
    broken = whole.texts[1][7]
    with mock.patch.object(weights, "random", partial(without, broken, weights.random)):
        run = Run(speculating(sizes, drafter), loop, some())
    check_derived(run, loop)
    failed = 0
    for one, text in run.engine.sequences.items():
        read = [*text.prompt.tolist(), *whole.texts[one.index][:-1]]
        assert (run.rows[one.index].status == "failed") == (broken in read)
        failed += broken in read
        assert text.outputs == whole.texts[one.index][: len(text.outputs)]
        assert (len(text.outputs) == one.output_tokens) == (broken not in read)
    assert 0 < failed < len(whole.rows)


# -- what is recorded -------------------------------------------------------------------------------------------------


def verifications(files: Mapping[str, bytes]) -> dict[int, list[int]]:
    """How many drafts of each request came true, step by step; rows of prompts left out."""
    rows = optional_tables.by_step(files, optional_tables.DRAFTS).values()
    by_request: dict[int, list[int]] = {}
    for request, drafts, accepted, _ in (row for step in rows for row in step):
        if drafts:
            by_request.setdefault(request, []).append(accepted)
    return by_request


@pytest.mark.parametrize("loop", LOOPS)
def test_a_measured_run_is_simulated_with_the_acceptance_that_it_had(loop: str, tmp_path: Path) -> None:
    """Its directory names the file of it, so that `cbsim run` and `cbsim replan` of the directory need nothing else."""
    sizes = server("vllm 0.33", 4, 24, 64, 4, sharing=True)
    scenario = with_load(speculating(sizes, "other"), kind="synthetic", requests=6, prompt_tokens=12, output_tokens=17)
    measured = cbengine.run(scenario, "inline", changes={"loop.mode": loop})
    path = measured.save(tmp_path)
    assert replan.rederive(path) == (len(measured.steps), len(measured.steps), None)
    assert measured.summary["drafts"]["accepted_tokens"] > 0
    assert measured.environment["draft_weights"] == "random"
    simulated = cbsim.run(path / "scenario.resolved.yaml")
    assert verifications(simulated.files) == verifications(measured.files)
    assert simulated.summary["drafts"] == measured.summary["drafts"]
    again = cbengine.run(path / "scenario.resolved.yaml", "inline")
    assert again.files[build.ACCEPTED] == (path / build.ACCEPTED).read_bytes()


def test_a_request_that_verified_nothing_is_recorded_too(tmp_path: Path) -> None:
    """... such as a refused one: the file of a measured run has all requests, as its simulation demands."""
    sizes = server("vllm 0.33", 4, 24, 64, 4, sharing=True, max_model_len=40)
    lengths = {"empirical": {"values": [12, 45]}}
    load = {"kind": "synthetic", "requests": 6, "prompt_tokens": lengths, "output_tokens": 9}
    measured = cbengine.run(with_load(speculating(sizes, "other"), **load), "inline", changes={"loop.mode": "sync"})
    path = measured.save(tmp_path)
    assert 0 < len(verifications(measured.files)) < 6
    assert verifications(cbsim.run(path / "scenario.resolved.yaml").files) == verifications(measured.files)
