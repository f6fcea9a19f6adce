"""Continuous batching changes when a token is computed, never which: every request's text is what it would be alone.

Greedy text is compared with transformers' own `generate`, token by token; see `served.check_text` for what happens at
a near tie. Sampled text is compared with that of a server with one seat.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine.served import (
    LOOPS,
    MS,
    PAGED,
    PROMPTS,
    SCHEDULERS,
    Case,
    Run,
    cases,
    check_texts,
    drawn_weights,
    server,
    shared,
    spec,
    transformers_model,
)

from cbengine.build import Setup
from cbengine.sampling import Sampling
from cbsim.policy.request import RequestSpec
from cbsim.workload.requests import Workload

Specs = list[RequestSpec]
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)


def note(run: Run) -> None:
    """What a random run has shown, for `--hypothesis-show-statistics`."""
    for column in ("preempted", "cached_tokens", "wasted_rows"):
        if run.total(column):
            event(column)
    if run.replaced:
        event("blocks replaced")
    for status in run.statuses:
        event(status)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(data=st.data())
@settings(max_examples=16)
def test_every_text_is_that_of_generate(scheduler: str, loop: str, data: st.DataObject) -> None:
    """Whatever the load, the cache and the budgets: batching, chunks, shared and merged blocks, preemption, soft
    resets, rows computed for nothing, requests given up and steps in flight leave no trace in anyone's text.
    """
    run = data.draw(cases(scheduler)).run(loop)
    check_texts(run)
    note(run)


# -- what must have happened ------------------------------------------------------------------------------------------


def alike(count: int, prompt: int, outputs: int, *, apart_ns: int = 0, common: int = 0, most: int = 0) -> Specs:
    """Requests of one kind, apart in time, with `common` first tokens and perhaps a limit beyond their end."""
    prefix = shared(0, common) if common else {}
    most = most or outputs
    return [spec(i, prompt, outputs, arrival_ns=i * apart_ns, max_tokens=most, **prefix) for i in range(count)]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", PAGED)
def test_prefix_hits(scheduler: str, loop: str) -> None:
    """The first of six fills blocks, the others find them; a hit may reach to the last token of a prompt."""
    first, *others = alike(6, 13, 6, common=12)
    later = [replace(one, arrival_ns=200 * MS + i * MS) for i, one in enumerate(others)]
    whole = spec(6, 12, 5, arrival_ns=250 * MS, **shared(0, 12))
    run = Case(server(scheduler, 4, 40, 64, 6, sharing=True), Workload([first, *later, whole], 7)).run(loop)
    check_texts(run)
    assert run.total("cached_tokens") >= 5 * 12 + 8


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", PAGED[2:])
def test_merged_blocks(scheduler: str, loop: str) -> None:
    """Requests that compute equal blocks side by side end up with one copy: entries of their tables are replaced."""
    run = Case(server(scheduler, 4, 60, 4096, 6, sharing=True), Workload(alike(4, 13, 8, common=12), 4)).run(loop)
    check_texts(run)
    assert run.replaced >= 3 * 3


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_stop_tokens_seen_one_step_late(scheduler: str) -> None:
    """With two steps in flight a row runs on after an end that nobody could foresee; its token reaches nobody."""
    specs = alike(4, 8, 5, most=11)
    run = Case(server(scheduler, 4, 60, 64, 4, sharing=True), Workload(specs, 4)).run("async")
    check_texts(run)
    assert run.statuses == {"stop": 4}
    assert run.total("wasted_rows") == 4


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("reserve", "placement"), [("max_model_len", "best_fit"), ("power_of_two", "buddy"), ("exact", "first_fit")]
)
def test_contiguous_reservations(reserve: str, placement: str, loop: str) -> None:
    """However a piece is measured and placed, also one longer than any sequence and one that ends with it: the text is
    that of vLLM's blocks. Ends come as a surprise, so that a row in flight writes one token beyond.
    """
    specs = alike(6, 13, 7, apart_ns=3 * MS, most=20)
    more = {"reserve": reserve, "placement": placement, "max_model_len": 40}
    run = Case(server("contiguous", 4, 21, 64, 6, sharing=False, **more), Workload(specs, 6)).run(loop)
    check_texts(run)
    paged = Case(server("vllm", 4, 21, 64, 6, sharing=False), Workload(alike(6, 13, 7, apart_ns=3 * MS, most=20), 6))
    assert run.texts == paged.run(loop).texts
    assert int(run.steps["waiting"].max()) > 0


# -- on a GPU ---------------------------------------------------------------------------------------------------------

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_weights(tmp_path_factory.mktemp("weights"))


def mixed(scheduler: str, dtype: str) -> Case:
    """Shared prefixes, chunks, unforeseen ends and a cache that is too small, in one load."""
    specs = [spec(i, PROMPTS[i % 5], 20 - i, max_tokens=20, **(shared(i % 2, 4) if i % 5 else {})) for i in range(12)]
    sizes = server(scheduler, 16, 14, 24, 6, sharing=True)
    model = sizes.model.model_copy(update={"dtype": dtype})
    return Case(sizes.model_copy(update={"model": model}), Workload(specs, 12))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_text_on_a_gpu_in_bfloat16(scheduler: str, loop: str, folder: Path) -> None:
    """In bfloat16 every token is one that float32 finds nearly the likeliest after the same text: its logit is below
    the largest by at most 3e-2 of the largest magnitude. (Texts themselves drift apart after the first near tie.)
    """
    run = mixed(scheduler, "bfloat16").run(loop, Setup(device="cuda", weights=folder), tick_ns=0)
    model = transformers_model(torch.bfloat16)
    for text in run.engine.sequences.values():
        ids = torch.tensor([[*text.prompt.tolist(), *text.outputs]])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(text.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(text.outputs)[:, None]).squeeze(1)
        assert float(((logits.amax(1) - chosen) / logits.abs().amax(1)).max()) < 3e-2
        assert len(text.outputs) == text.spec.output_tokens
