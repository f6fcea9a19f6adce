"""Layers in groups with block tables of their own: what is no longer seen is given up, and no text shows it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.engine.oracle import toy_run, toy_text
from support.engine.peer_model import to_transformers
from support.engine.served import (
    INLINE,
    LOOPS,
    MS,
    Case,
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
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import Linear
from cbsim.workload.requests import Workload

NEAR, FAR, PART = Attention(Sight.SLIDING, 6), Attention(Sight.SLIDING, 17), Attention(Sight.CHUNKED, 8)
SCHEDULER = "vllm 0.33"
MIXES = {
    "all slide": (NEAR, NEAR),
    "five of six": (*[NEAR] * 5, FULL),
    "three of five": (NEAR, FULL, NEAR, FULL, NEAR),
}
BLOCKS = {"all slide": 20, "five of six": 48, "three of five": 48}  # some requests are preempted


def seeing(plain: Scenario, *attention: Attention) -> Scenario:
    """The scenario with a model whose layers see this, norms of queries and keys as Qwen3 has them."""
    pattern = [one.text for one in attention]
    shape = plain.model.model_dump(mode="json") | {"attention": pattern, "layers": len(attention)}
    model = type(plain.model).model_validate(shape | {"qk_norm": True})
    return plain.model_copy(update={"model": model})


def load() -> Workload:
    specs = [spec(i, 5 + 7 * i, 24 - i, arrival_ns=i * 4 * MS) for i in range(6)]
    return Workload(specs, len(specs))


def case(*attention: Attention, blocks: int = 48, scheduler: str = SCHEDULER, sharing: bool = False) -> Case:
    """Chunks of a few tokens beside rows that decode, in a cache that may be too small for all."""
    return Case(seeing(server(scheduler, 4, blocks, 7, 6, sharing=sharing), *attention), load())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("sharing", [False, True])
def test_texts_are_those_of_generate(name: str, sharing: bool, loop: str) -> None:
    run = case(*MIXES[name], blocks=BLOCKS[name], sharing=sharing).run(loop)
    assert run.engine.scheduler.pool.groups
    plan = build.executor_plan(run.scenario, "sync", [], INLINE)
    model = to_transformers(plan.architecture, plan.tensors()).eval()
    for one, text in run.engine.sequences.items():
        assert text.outputs == continuation(model, text.prompt.tolist(), one.output_tokens), one.id


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("attention", "device"),
    [
        ((NEAR, FAR, NEAR), "inline"),
        ((PART, FULL, PART, PART), "inline"),
        ((PART, NEAR), "inline"),
        ((PART, NEAR), "process"),
    ],
)
def test_texts_are_those_of_one_table_for_all_layers(attention: tuple[Attention, ...], loop: str, device: Any) -> None:
    """Two windows, parts of a sequence: no model of transformers has both."""
    run = case(*attention).run(loop, Setup(device=device), tick_ns=MS if device == "inline" else 0)
    with plain_cache():
        plain = case(*attention, blocks=200, scheduler="sarathi").run("sync")
    assert len(run.engine.scheduler.pool.groups) > 1 and not plain.engine.scheduler.pool.groups
    assert run.texts == plain.texts


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=40)
@given(of=cases(SCHEDULER), attention=st.lists(st.sampled_from((FULL, NEAR, FAR, PART)), min_size=1, max_size=6))
def test_every_step_says_what_its_plan_says(loop: str, of: Case, attention: list[Attention]) -> None:
    """Random loads on a few blocks a group, with shared prefixes and cancels: every entry that a row needs is there,
    and the hash of what each group sees is right.
    """
    sized, size = of.scenario.kv_cache, of.scenario.block_size
    part = Attention(Sight.CHUNKED, -(-PART.span // size) * size)  # whole blocks
    attention = [part if one is PART else one for one in attention]
    cache = sized.model_copy(update={"num_blocks": 5 * (sized.num_blocks or 0)})
    run, _ = toy_run(Case(seeing(of.scenario.model_copy(update={"kv_cache": cache}), *attention), of.load), loop)
    sees = [group.attention for group in run.engine.scheduler.pool.groups] or [FULL]

    def check(text: Text) -> None:
        assert text.outputs == toy_text(text.prompt, len(text.outputs), sees), text.spec

    check_texts(run, check)
    event(f"preempted: {run.total('preempted') > 0}")


def test_only_a_scheduler_that_knows_of_windows_is_given_them() -> None:
    """Before anything is served."""
    plain = case(NEAR, FULL, scheduler="static").scenario
    with pytest.raises(build.UsageError, match=r"^model\.attention: layers see less .* with scheduler static$"):
        build.engine(plain, "sync", load(), INLINE)
    with plain_cache():
        assert build.adapted(plain, INLINE).model.layer_attention == (NEAR, FULL)
        build.check_windows(plain)


def test_layers_with_a_state_are_only_simulated() -> None:
    """The engine has no kernels for them."""
    plain = case(FULL).scenario
    linear = Linear(rule="kda", key_heads=2, value_heads=2, key_dim=16, value_dim=16)
    other = plain.model_copy(update={"model": plain.model.model_copy(update={"linear": linear})})
    with pytest.raises(build.UsageError, match=r"^model\.attention: got linear, must be full, sliding or chunked"):
        build.check_windows(other)
