"""Adaptive verification against its formula, tried out for every number of drafts."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import Fixed

import cbsim
from cbsim.machine.adaptive import SPEC, Adaptive
from cbsim.policy.plan import Chunk, StepPlan, StepWork
from cbsim.runs import replan

SIZES = [1, 2, 4, 8, 16, 24, 32]
MOST = 120


class Rising(Fixed):
    """Steps of up to 16 tokens take 40, larger ones 2 more for each token; a draft takes 3."""

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        return 0, 40 + 2 * max(0, tokens - 16) + 3 * plan.work.drafts, 0


def verify_ns(tokens: int) -> int:
    padded = next((size for size in SIZES if tokens <= size), tokens)
    return 40 + 2 * max(0, padded - 16)


def step(drafts: list[int], *, prompt: int = 0, blanks: int = 0) -> StepPlan:
    rows = [Chunk(SPEC, at, 100, 1 + count, (), 1 + count) for at, count in enumerate(drafts)]
    rows += [Chunk(SPEC, 90, 0, prompt, (), 0)] * (prompt > 0) + [
        Chunk(SPEC, 91, 15, 1 + blanks, (), 1 + blanks, admitted=True)
    ] * (blanks > 0)
    return StepPlan(0, StepWork(tuple(rows), prefill_tokens=sum(row.tokens for row in rows), drafts=3))


@given(
    drafts=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    rates=st.lists(st.floats(0.05, 1), min_size=3, max_size=3),
    prompt=st.integers(0, 20),
    blanks=st.sampled_from([0, 3]),
)
def test_most_tokens_a_second(drafts: list[int], rates: list[float], prompt: int, blanks: int) -> None:
    """No other number of drafts gives more tokens a second; rows lose their last drafts, and nothing else changes."""
    plan = step(drafts, prompt=prompt, blanks=blanks)
    ran = Adaptive(Rising(), rates, SIZES, MOST, 9000).verified(plan)
    survival = list(accumulate(rates, mul))
    slots = sorted((survival[at] for count in drafts for at in range(count)), reverse=True)
    rows = len(drafts) + (blanks > 0)
    fixed = plan.work.tokens - len(slots)

    def speed(verified: int) -> float:
        return (rows + sum(slots[:verified])) / (3 * 3 + verify_ns(fixed + verified))

    took = [chunk.outputs - 1 for chunk in ran.work.chunks][: len(drafts)]
    assert speed(sum(took)) == pytest.approx(max(map(speed, range(len(slots) + 1))))
    assert all(one <= all_ for one, all_ in zip(took, drafts, strict=True))
    assert max(took) - min([one for one, all_ in zip(took, drafts, strict=True) if one < all_], default=max(took)) <= 1
    assert ran.work.tokens == fixed + sum(took)
    assert [(c.order, c.start, c.admitted) for c in ran.work.chunks] == [
        (c.order, c.start, c.admitted) for c in plan.work.chunks
    ]
    assert ran.work.chunks[len(drafts) :] == plan.work.chunks[len(drafts) :]


SCENARIO = {
    "question": "How many drafts?",
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm",
    "workload": {"kind": "synthetic", "requests": 96, "prompt_tokens": 64, "output_tokens": 24},
    "loop": {"mode": "async"},
    "speculation": {"method": "eagle", "k": 5, "acceptance": {"rate": 0.5}},
}


def test_a_large_batch_verifies_less(tmp_path: Path) -> None:
    """96 rows of 6 tokens are bound by arithmetic: fewer drafts are computed for nothing, every request gets its
    tokens, and the recorded run is derived again, steps with fewer drafts than planned included."""
    runs = {}
    for adaptive in (False, True):
        drafts = {**SCENARIO["speculation"], "adaptive": adaptive}  # type: ignore[dict-item]
        result = cbsim.run({**SCENARIO, "speculation": drafts})
        path = result.save(tmp_path / str(adaptive))
        assert replan.rederive(path).difference is None
        runs[adaptive] = result.summary
    fewer, all_ = runs[True]["drafts"], runs[False]["drafts"]
    assert fewer["rejected_tokens"] < 0.6 * all_["rejected_tokens"]
    assert runs[True]["output_tokens"] == runs[False]["output_tokens"] == 96 * 24
    first, again = (each["acceptance_by_position"]["1"] for each in (fewer, all_))
    assert abs(first - again) <= 0.05


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"method": "ngram"}, "adaptive"), ({"acceptance": {"path": "x.csv"}}, "adaptive")],
)
def test_what_cannot_adapt_is_said(changes: dict[str, object], field: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("request,accepted\n0,1\n")
    drafts = {**SCENARIO["speculation"], "adaptive": True, **changes}  # type: ignore[dict-item]
    with pytest.raises(cbsim.ScenarioError, match=f"speculation.{field}: got true, must be false"):
        cbsim.load({**SCENARIO, "speculation": drafts})
