"""vLLM's layer groups on the engine: texts are those of `generate`, and of a hash that sees what each group sees."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="the text is compared with transformers'")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.oracle import toy_run, toy_text
from support.engine.served import LOOPS, Case, cases, check_texts, continuation, server
from test_group_tables import FAR, FULL, MIXES, NEAR, load, reference, seeing

from cbengine.sequence import Sequence as Text
from cbsim.policy.groups import Attention

BLOCKS = {"all slide": 20, "five of six": 48, "three of five": 48}  # some requests are preempted


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("sharing", [False, True])
def test_texts_are_those_of_generate(name: str, sharing: bool, loop: str) -> None:
    plain = server("vllm 0.33", 4, BLOCKS[name], 7, 6, sharing=sharing)
    run = Case(seeing(plain, *MIXES[name]), load()).run(loop)
    assert run.engine.scheduler.pool.groups
    model = reference(run.scenario)
    for spec, text in run.engine.sequences.items():
        assert text.outputs == continuation(model, text.prompt.tolist(), spec.output_tokens), spec.id


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=15)
@given(of=cases("vllm 0.33"), attention=st.lists(st.sampled_from((FULL, NEAR, FAR)), min_size=1, max_size=5))
def test_every_step_says_what_its_plan_says(loop: str, of: Case, attention: list[Attention]) -> None:
    """Random loads on a few blocks a group, with shared prefixes and cancels."""
    sized = of.scenario.kv_cache
    cache = sized.model_copy(update={"num_blocks": 5 * (sized.num_blocks or 0)})
    wide = seeing(of.scenario.model_copy(update={"kv_cache": cache}), *attention)
    run, _ = toy_run(Case(wide, of.load), loop)
    sees = [group.attention for group in run.engine.scheduler.pool.groups] or [FULL]

    def check(text: Text) -> None:
        assert text.outputs == toy_text(text.prompt, len(text.outputs), sees), text.spec

    check_texts(run, check)
