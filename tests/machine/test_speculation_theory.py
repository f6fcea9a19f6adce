"""What theory says of speculation, against draws and runs: tokens a verification, speed-up, break-even batch."""

from __future__ import annotations

from collections import defaultdict
from math import sqrt
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.machines import table
from support.plans import plan

from cbsim.machine import simulate
from cbsim.machine.driver import Machine
from cbsim.metrics.metrics import summarise
from cbsim.policy.request import RequestSpec
from cbsim.record.optional_tables import DRAFTS, summarise_drafts, values_of
from cbsim.record.tables import Steps, requests_of
from cbsim.runs import assemble
from cbsim.scenario import scenario
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.speculation import Acceptance
from cbsim.workload.requests import Workload

SURE = 4.0  # standard errors: one in 16,000 fails by chance, and seeds are fixed
MODEL = {  # weights in layers alone, next to no KV: its steps take max(bytes / bandwidth, FLOP / peak)
    "name": "products",
    "layers": 40,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 1,
    "head_dim": 8,
    "intermediate": 16384,
    "vocab": 128,
    "max_position": 8192,
}
SHARES = {"compute_efficiency": {"prefill": 1, "decode": 1}, "memory_efficiency": {"weights": 1, "kv": 1}}


def server(speculation: dict[str, Any] | None, rows: int = 8, **fields: Any) -> Scenario:
    data: dict[str, Any] = {
        "question": "What does theory say?",
        "model": MODEL,
        "hardware": "h100-sxm",
        "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
        "scheduler": {"name": "vllm", "max_num_seqs": rows, "max_num_batched_tokens": 8192},
        "loop": {"cuda_graphs": {"padding": "none"}},
        "cost": {"kind": "roofline", "cpu": {name: {} for name in ("schedule", "prepare", "launch", "update")}}
        | SHARES,
        "speculation": speculation,
    }
    return scenario.parse(data | fields, "test")


def drafts(k: int, method: str = "ngram", drafter: dict[str, Any] | None = None, **acceptance: Any) -> dict[str, Any]:
    return {"method": method, "k": k, "acceptance": acceptance} | ({"drafter": drafter} if drafter else {})


def ran(asked: Scenario, requests: int, outputs: int, loop: str = "sync") -> tuple[Machine, Steps]:
    specs = [RequestSpec(at, str(at), 0, 8, outputs, outputs) for at in range(requests)]
    made = simulate.machine(asked, loop, Workload(specs, requests))
    simulate.run(made)
    return made, table(made.record)


def accepted(made: Machine) -> dict[int, list[int]]:
    """The numbers of every request's verifications, in order."""
    rows, numbers = values_of(DRAFTS, made.record.drafts), defaultdict(list)
    for request, tried, true in zip(*(rows[name].tolist() for name in ("request", "drafts", "accepted")), strict=True):
        if tried:
            numbers[request].append(true)
    return dict(numbers)


def mean_tpot(asked: Scenario, requests: int, outputs: int) -> float:
    made, steps = ran(asked, requests, outputs)
    return float(summarise(requests_of(made.record), steps, total_blocks=1)["tpot_s"]["mean"])


@pytest.mark.parametrize(
    ("acceptance", "survival"),
    [
        ({"rate": 0.6}, [0.6, 0.36, 0.216, 0.1296]),
        ({"rate": 1.0}, [1, 1, 1, 1]),
        ({"rate": 0.0}, [0, 0, 0, 0]),
        ({"rates": [0.8, 0.5, 0.2]}, [0.8, 0.5, 0.2, 0]),
        ({"rates": [0.8, 0.5, 0.2], "conditional": True}, [0.8, 0.4, 0.08, 0]),
        ({"length": 2.6}, [1, 0.6, 0, 0]),
        ({"length": 5}, [1, 1, 1, 1]),
        ({"curve": [1.7, 2.2, 2.5, 2.4]}, [0.7, 0.5, 0.1, 0.1]),
        ({"curve": [1.5, 2.2, 2.4]}, [0.6, 0.6, 0.2, 0]),
    ],
)
@pytest.mark.parametrize("loop", ["sync", "async"])
def test_tokens_a_verification(acceptance: dict[str, Any], survival: list[float], loop: str) -> None:
    """Draft i comes true with all before it with probability s_i, so a verification yields 1 + s_1 + ... + s_k tokens:
    (1 - a^(k+1)) / (1 - a) with a rate a. Over 10,000 tokens, within four standard errors, position by position."""
    made, _ = ran(server(drafts(4, **acceptance)), 4, 2500, loop)
    numbers = [each for of in accepted(made).values() for each in of[:-4]]  # the last ones are cut at the limit
    for at, share in enumerate(survival):
        seen = sum(each > at for each in numbers) / len(numbers)
        assert seen == pytest.approx(share, abs=SURE * sqrt(share * (1 - share) / len(numbers)) + 1e-12)
    expected = 1 + sum(survival)
    if "rate" in acceptance and 0 < (a := acceptance["rate"]) < 1:
        assert expected == pytest.approx((1 - a**5) / (1 - a))
    spread = sqrt(sum([(2 * at + 1) * share for at, share in enumerate(survival)]) - (expected - 1) ** 2)
    length = summarise_drafts(made.record.drafts)["acceptance_length"]
    assert length == pytest.approx(expected, abs=SURE * spread / sqrt(len(numbers)) + 0.01)


@example([0.43, 0.39, 0.88, 0.0])  # the sum of the differences is less than 0 by rounding
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_a_noisy_curve_keeps_its_means(steps: list[float]) -> None:
    """Whatever a measured curve looks like, its mean holds for each number of drafts, by probabilities that fall."""
    curve = [min(1 + at, 1 + at * step) for at, step in enumerate(steps, 1)]
    for drafts, length in enumerate(curve, 1):
        chained = 1.0
        survival = []
        for each in Acceptance(curve=tuple(curve)).conditional_rates(drafts):
            assert 0 <= each <= 1 + 1e-9
            survival.append(chained := chained * each)
        assert 1 + sum(survival) == pytest.approx(length, abs=1e-6)
    with pytest.raises(ValidationError, match=r"got 2.5, must be <= 2: 1 drafts"):
        Acceptance(curve=(2.5,))


def test_a_mean_length_gives_whole_tokens_always_and_the_rest_by_chance() -> None:
    """vLLM's synthetic_acceptance_length of 2.6: every verification accepts one draft, 60 % a second, none a third."""
    made, _ = ran(server(drafts(4, length=2.6)), 4, 1000)
    assert {each for of in accepted(made).values() for each in of[:-4]} == {1, 2}


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("loop", ["sync", "async"])
def test_draws_depend_on_request_and_position_alone(loop: str, rows: int) -> None:
    """Loops and schedulers are compared on the same draws, whatever else is in a step; another seed gives others."""
    of = drafts(3, rate=0.7)
    alone = accepted(ran(server(of), 8, 300)[0])
    found = accepted(ran(server(of, rows), 8, 300, loop)[0])
    assert all(found[at][: len(alone[at]) - 4] == alone[at][:-4] for at in range(8))
    assert accepted(ran(server(of, seed=1), 8, 300)[0])[0] != alone[0]
    assert alone[0] != alone[1]


def test_throughput_counts_delivered_tokens_and_gaps_within_a_step_are_none() -> None:
    """Of 4 drafts all come true: five tokens a step, at the same time, so four of five gaps are 0 and the mean gap is a
    fifth of a step. Rejected drafts are waste, and no output."""
    for rate in (1.0, 0.5):
        made, steps = ran(server(drafts(4, rate=rate)), 1, 1001)
        numbers, of = summarise(requests_of(made.record), steps, total_blocks=1), summarise_drafts(made.record.drafts)
        assert numbers["output_tokens"] == made.record.sampled_tokens == 1001
        span = numbers["makespan_s"]
        assert numbers["output_tokens_per_s"] == pytest.approx(1001 / span)
        assert of["rejected_tokens"] == of["verified_tokens"] - of["accepted_tokens"]
        assert (steps["draft_tokens"] - steps["accepted_tokens"]).sum() == of["rejected_tokens"]
        assert steps["prefill_tokens"].tolist() == [8] + [0] * (len(steps) - 1)
        assert (steps["decode_rows"][1:] == steps["rows"][1:]).all()
        assert numbers["itl_s"]["n"] == 1000
        assert numbers["itl_s"]["mean"] == pytest.approx(numbers["tpot_s"]["mean"])
        if rate == 1:
            assert of["rejected_tokens"] == 0
            assert int((steps["rows"] > 0).sum()) == 1 + 200
            assert numbers["itl_s"]["p50"] == 0
            assert numbers["tpot_s"]["mean"] == pytest.approx(numbers["step_time_s"]["min"] / 5, rel=0.01)


@pytest.mark.parametrize(("k", "rate", "fraction"), [(2, 0.8, 0.05), (5, 0.8, 0.05), (5, 0.8, 0.3), (4, 0.5, 0.1)])
def test_speed_up_of_a_row_whose_steps_read_weights(k: int, rate: float, fraction: float) -> None:
    """Leviathan et al. (2023), theorem 3.8: (1 - a^(k+1)) / (1 - a) / (k c + 1), if a draft takes the share c of a
    target's step and a step with drafts as long as one without."""
    with_drafts = drafts(k, "draft_model", {"fraction": fraction}, rate=rate)
    before, after = (mean_tpot(server(of), 4, 2000) for of in (None, with_drafts))
    expected = (1 - rate ** (k + 1)) / (1 - rate) / (k * fraction + 1)
    assert before / after == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize(("k", "rate"), [(1, 0.7), (3, 0.6), (3, 0.8), (7, 0.8)])
def test_break_even_batch(k: int, rate: float) -> None:
    """A step of B rows takes max(W / bandwidth, 2 P n B / peak) with n query tokens a row; with 16-bit weights both are
    equal at n B = R = peak / bandwidth = 295 tokens. Free drafts that yield E tokens a verification pay as long as
    E max(R, B) > max(R, (1 + k) B): up to E R / (1 + k) rows, while steps without drafts still read weights."""
    expected = (1 - rate ** (k + 1)) / (1 - rate)
    gpu = server(None).hardware
    ridge = gpu.flops.bfloat16 / gpu.memory_bandwidth_bytes_s
    even = expected * ridge / (1 + k)
    cost = assemble.cost_model(server(drafts(k, rate=rate)))

    def pays(rows: int) -> bool:
        single, wide = plan(chunks=((8, 1),) * rows), plan(chunks=((8, 1 + k),) * rows, outputs=1 + k)
        took = [cost.gpu_ns(step, step.work.tokens)[1] for step in (single, wide)]
        return expected * took[0] > took[1]

    crossing = next(rows for rows in range(1, 1000) if not pays(rows))
    assert crossing == pytest.approx(even, rel=0.03)
    assert not any(pays(rows) for rows in range(crossing, 1000))
    for rows in (round(0.7 * even), round(1.3 * even)) if k <= 3 and rate < 0.8 else ():
        before, after = (mean_tpot(server(of, rows), rows, 240) for of in (None, drafts(k, rate=rate)))
        bound = expected * max(ridge, rows) / max(ridge, (1 + k) * rows)
        assert before / after == pytest.approx(bound, rel=0.06)
