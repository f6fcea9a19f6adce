"""Layers in groups with block tables of their own: what is no longer seen is given up, and no text shows it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine.oracle import toy_run, toy_text
from support.engine.peer_model import to_transformers
from support.engine.regrouped import Regrouped, grouped, regrouped
from support.engine.served import (
    INLINE,
    LOOPS,
    MS,
    Case,
    Run,
    cases,
    check_texts,
    continuation,
    plain_cache,
    server,
    spec,
)

from cbengine import build
from cbengine.build import Setup
from cbengine.sequence import Sequence as Text
from cbsim.policy.groups import FULL, Attention, LayerGroup, Sight
from cbsim.scenario.scenario import Scenario
from cbsim.workload.requests import Workload

NEAR, FAR, PART = Attention(Sight.SLIDING, 6), Attention(Sight.SLIDING, 17), Attention(Sight.CHUNKED, 8)
SCHEDULER = "vllm 0.33"


def seeing(plain: Scenario, *attention: Attention, layers: int = 0) -> Scenario:
    """The scenario with a model whose layers see this, norms of queries and keys as Qwen3 has them."""
    pattern = [one.text for one in attention]
    shape = plain.model.model_dump(mode="json") | {"attention": pattern, "layers": layers or len(attention)}
    model = type(plain.model).model_validate(shape | {"qk_norm": True})
    return plain.model_copy(update={"model": model})


def load() -> Workload:
    specs = [spec(i, 5 + 7 * i, 24 - i, arrival_ns=i * 4 * MS) for i in range(6)]
    return Workload(specs, len(specs))


def case(*attention: Attention, blocks: int = 24, budget: int = 7, block_size: int = 4) -> Case:
    """Chunks of a few tokens beside rows that decode, in a cache that may be too small for all."""
    return Case(seeing(server(SCHEDULER, block_size, blocks, budget, 6, sharing=False), *attention), load())


def by_groups(
    of: Case, loop: str, groups: tuple[LayerGroup, ...], setup: Setup = INLINE, **more: Any
) -> tuple[Run, Regrouped]:
    """Served from tables of these groups, in a cache that has the case's blocks for each of them."""
    cache = of.scenario.kv_cache
    assert cache.num_blocks
    given = of.scenario.model_copy(
        update={"kv_cache": cache.model_copy(update={"num_blocks": cache.num_blocks * len(groups)})}
    )
    return regrouped(lambda: Run(given, loop, of.load, setup, **more), groups)


def reference(of: Scenario) -> Any:
    """transformers' model with the weights that an engine draws."""
    plan = build.executor_plan(of, "sync", [], INLINE)
    return to_transformers(plan.architecture, plan.tensors()).eval()


# -- the device and what it is told ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=40)
@given(
    of=cases(SCHEDULER),
    attention=st.lists(st.sampled_from((FULL, NEAR, FAR, PART)), min_size=1, max_size=6),
    most=st.integers(1, 3),
)
def test_every_step_says_what_the_plans_do(loop: str, of: Case, attention: list[Attention], most: int) -> None:
    """Whatever the groups: every entry that a row needs is there, and the hash of what each group sees is right."""
    plain = of.scenario
    rules = replace(plain.scheduler, enable_prefix_caching=False)  # type: ignore[call-arg]
    groups = grouped(attention, plain.block_size, most)
    blocks = plain.kv_cache.num_blocks
    assert blocks
    cache = plain.kv_cache.model_copy(update={"num_blocks": blocks * len(groups)})
    wide = Case(plain.model_copy(update={"scheduler": rules, "kv_cache": cache}), of.load)
    (run, _), policy = regrouped(partial(toy_run, wide, loop), groups)
    sees = [group.attention for group in groups]

    def check(text: Text) -> None:
        assert text.outputs == toy_text(text.prompt, len(text.outputs), sees), text.spec

    check_texts(run, check)
    event(f"gave blocks up: {policy.given_up > 0}")


# -- the model ---------------------------------------------------------------------------------------------------------

MIXES = {
    "all slide": (NEAR, NEAR),
    "five of six": (*[NEAR] * 5, FULL),
    "three of five": (NEAR, FULL, NEAR, FULL, NEAR),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("attention", [(NEAR, FAR, NEAR), (PART, FULL, PART, PART), (PART, NEAR)])
def test_texts_are_those_of_one_table_for_all_layers(attention: tuple[Attention, ...], loop: str) -> None:
    """Two windows, parts of a sequence: no model of transformers has both."""
    of = case(*attention)
    run, policy = by_groups(of, loop, grouped(attention, 4, 2))
    plain = Run(case(*attention, blocks=200).scenario, loop, load())
    assert policy.given_up > 10
    assert run.texts == plain.texts


@pytest.mark.parametrize("loop", LOOPS)
def test_a_table_may_be_a_ring(loop: str) -> None:
    """Block i of a sequence lies in entry i modulo the ring, which holds a window beside a chunk."""
    of = case(NEAR, FULL, blocks=60)
    run, _ = by_groups(of, loop, grouped((NEAR, FULL), 4, ring=4))
    assert run.texts == Run(case(NEAR, FULL, blocks=200).scenario, loop, load()).texts


def test_a_worker_process_says_the_same() -> None:
    of = case(NEAR, FULL)
    run, _ = by_groups(of, "async", grouped((NEAR, FULL), 4), Setup(device="process"), tick_ns=0)
    assert run.texts == Run(case(NEAR, FULL, blocks=200).scenario, "async", load()).texts


def test_only_a_scheduler_that_knows_of_windows_is_given_them() -> None:
    """Before anything is served."""
    plain = seeing(server("static", 4, 24, 7, 6, sharing=False), NEAR, FULL)
    with pytest.raises(build.UsageError, match=r"^model\.attention: layers see less .* with scheduler static$"):
        build.engine(plain, "sync", load(), INLINE)
    with plain_cache():
        assert build.adapted(plain, INLINE).model.layer_attention == (NEAR, FULL)
        build.check_windows(plain)


# -- vLLM's own groups -------------------------------------------------------------------------------------------------

BLOCKS = {"all slide": 20, "five of six": 48, "three of five": 48}  # some requests are preempted


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("sharing", [False, True])
def test_texts_of_own_groups_are_those_of_generate(name: str, sharing: bool, loop: str) -> None:
    plain = server("vllm 0.33", 4, BLOCKS[name], 7, 6, sharing=sharing)
    run = Case(seeing(plain, *MIXES[name]), load()).run(loop)
    assert run.engine.scheduler.pool.groups
    model = reference(run.scenario)
    for one, text in run.engine.sequences.items():
        assert text.outputs == continuation(model, text.prompt.tolist(), one.output_tokens), one.id


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=15)
@given(of=cases("vllm 0.33"), attention=st.lists(st.sampled_from((FULL, NEAR, FAR)), min_size=1, max_size=5))
def test_every_step_of_the_schedulers_own_groups_says_what_its_plan_says(
    loop: str, of: Case, attention: list[Attention]
) -> None:
    """Random loads on a few blocks a group, with shared prefixes and cancels."""
    sized = of.scenario.kv_cache
    cache = sized.model_copy(update={"num_blocks": 5 * (sized.num_blocks or 0)})
    wide = seeing(of.scenario.model_copy(update={"kv_cache": cache}), *attention)
    run, _ = toy_run(Case(wide, of.load), loop)
    sees = [group.attention for group in run.engine.scheduler.pool.groups] or [FULL]

    def check(text: Text) -> None:
        assert text.outputs == toy_text(text.prompt, len(text.outputs), sees), text.spec

    check_texts(run, check)
