"""Efficiency curves: a share of the data sheet by size gives back the time that it was distilled from, and scales."""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
import pytest
from support.plans import plan

from cbsim.cost import curves
from cbsim.cost.curves import CurveTimes, Grid, Source, sheet, sources
from cbsim.cost.engine_cost import EngineCost
from cbsim.cost.roofline import RooflineCost
from cbsim.cost.table import Attention as Work
from cbsim.cost.table import attention_work
from cbsim.metrics import coverage
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps
from cbsim.runs.assemble import cost_model
from cbsim.scenario import catalog, scenario, shapes
from cbsim.scenario.layers import Matrix

MODEL = shapes.model("llama-3.1-8b")
H100, H200, L40S = (shapes.hardware(name) for name in ("h100-sxm", "h200-sxm", "l40s"))


def test_a_grid_is_linear_in_logarithms_and_flat_beyond_its_edges() -> None:
    grid = Grid(((1, 100), (10,)), ((0.1,), (0.4,)))
    assert grid(10, 10) == pytest.approx(0.2)  # the middle of 1 and 100, of 0.1 and 0.4
    assert (grid(0.5, 1), grid(1000, 99)) == (pytest.approx(0.1), pytest.approx(0.4))


def test_a_product_takes_its_bound_over_the_share_at_its_size() -> None:
    """4096 x 4096 in bfloat16 with one token: 33.6 MB over 3.35 TB/s, over the share of that size."""
    (own,) = sources(H100)
    curve = own.curves["products"]["bfloat16"]
    n, k = curve["n"].index(4096), curve["k"].index(4096)
    took = CurveTimes([own], "vllm", H100, MODEL, 1)._product(Matrix(4096, 4096, "bfloat16"))(1)
    size = 2 * (4096 * 4096 + 4096 + 4096)
    assert took == pytest.approx(size / 3350 / curve["share"][n][k][0])


def test_a_step_takes_longer_the_more_is_in_it() -> None:
    times = CurveTimes(sources(L40S), "vllm", L40S, MODEL, 1)
    for kernel in (times.linear_ns, times.head_ns):
        assert kernel(1) < kernel(512) < kernel(8192)
    (of,) = times.attended
    assert of.decode_ns(8, 1000) < of.decode_ns(64, 1000) < of.decode_ns(64, 8000)
    assert of.prompt_ns(Work(256, 0, 0, 0, 0)) < of.prompt_ns(Work(256, 8000, 0, 0, 0))
    assert of.decode_ns(0, 0) == of.prompt_ns(Work(0, 0, 4, 10, 10)) == times.head_ns(0) == 0


def test_gpus_share_weights_and_heads_and_reduce() -> None:
    """A GPU of four has a quarter of each matrix and head, and adds up what it has computed with the others."""
    one, four = (CurveTimes(sources(H100), "vllm", H100, MODEL, gpus) for gpus in (1, 4))
    assert one.linear_ns(4096) / 5 < four.linear_ns(4096) < one.linear_ns(4096) / 3
    assert four.attended[0].decode_ns(64, 4000) < one.attended[0].decode_ns(64, 4000) / 2.5
    assert one.reduce_ns(64, graph=True) == 0 < four.reduce_ns(64, graph=True) < four.reduce_ns(64, graph=False)


def test_a_card_with_curves_has_them_alone_and_others_the_nearest_most() -> None:
    """The H200 differs from the H100 by its bandwidth only, so without its own curves the H100 says nearly all."""
    assert [(each.curves["hardware"]["name"], each.weight) for each in sources(H200)] == [(H200.name, 1.0)]
    others = sources(H200, without=(H200.name,))
    assert sum(each.weight for each in others) == pytest.approx(1)
    assert max(others, key=lambda each: each.weight).curves["hardware"]["name"] == H100.name
    assert all(
        "RTX 4090" not in each.curves["hardware"]["name"] for each in others
    )  # one model's layers, no all-reduce
    assert sources(shapes.hardware("laptop-cpu")) == []
    assert sources(H200.model_copy(update={"memory_bandwidth_bytes_s": 1.0})) == []


def test_a_data_sheet_scales_all_but_the_launch() -> None:
    """Twice the bandwidth halves what a decoding row reads for, not what its kernel takes at the least."""
    fast = H100.model_copy(update={"memory_bandwidth_bytes_s": 2 * H100.memory_bandwidth_bytes_s})
    (own,) = sources(H100)
    before, after = (CurveTimes([own], "vllm", gpu, MODEL, 1).attended[0] for gpu in (H100, fast))
    assert after.decode_ns(256, 16000) == pytest.approx(before.decode_ns(256, 16000) / 2, rel=0.01)
    assert after.decode_ns(1, 16) > 0.9 * before.decode_ns(1, 16)


def test_several_cards_give_their_weighted_geometric_mean() -> None:
    (first,), (second,) = sources(H100), sources(H200)
    alone = [CurveTimes([each], "vllm", H100, MODEL, 1).head_ns(64) for each in (first, second)]
    both = [each._replace(weight=weight) for each, weight in ((first, 0.25), (second, 0.75))]
    mean = exp(0.25 * log(alone[0]) + 0.75 * log(alone[1]))
    assert CurveTimes(both, "vllm", H100, MODEL, 1).head_ns(64) == pytest.approx(mean)


def test_a_mixture_takes_the_curve_of_the_nearest_shape() -> None:
    """Its experts are read by the tokens that reach them: few tokens read few of 128, many all."""
    experts = shapes.model("qwen3-30b-a3b")
    times = CurveTimes(sources(H100), "vllm", H100, experts, 1)
    assert 3 * times.experts_ns(1) < times.experts_ns(64) < times.experts_ns(4096)
    assert CurveTimes(sources(H100), "vllm", H100, MODEL, 1).experts_ns(64) == 0


@pytest.mark.parametrize("name", sorted(path.stem for path in (catalog.SCENARIOS / "curves").glob("*.json")))
def test_every_card_times_every_type_on_every_engine(name: str) -> None:
    """Where a card was not measured for a type, or for experts, others stand for it; times grow with large steps."""
    gpu = shapes.hardware(name)
    for model in (MODEL, shapes.model("qwen3-30b-a3b")):
        for dtype in (None, "fp8", "fp8_block", "nvfp4", "int4"):
            typed = model.model_copy(update={"weights_dtype": dtype})
            for engine in ("vllm", "sglang", "trtllm"):
                times = CurveTimes(sources(gpu), engine, gpu, typed, 2)
                assert (
                    0
                    < times.linear_ns(4097) + times.experts_ns(4097)
                    < times.linear_ns(16384) + times.experts_ns(16384)
                )


def test_a_card_that_was_measured_alone_reduces_as_others_do() -> None:
    gpu = shapes.hardware("rtx-4090")
    assert not sources(gpu)[0].curves["engines"]["vllm"]["reduce"]
    assert CurveTimes(sources(gpu), "vllm", gpu, MODEL, 2).reduce_ns(64, graph=True) > 0


def test_an_indexer_reads_the_keys_of_all_tokens_beside_attention_to_few() -> None:
    """GLM-5 on 8 B200: attention of latents as in a window of 2,048 tokens, and the 32 heads of the indexer, which are
    on each GPU and read 128 bytes a token. So long contexts cost a tenth of what they do without an indexer.
    """
    gpu, model = shapes.hardware("b200"), shapes.model("glm-5")
    scored, chosen = CurveTimes(sources(gpu), "sglang", gpu, model, 8).attended
    assert (scored.sees, chosen.sees.span, scored.kv, chosen.kv) == (FULL, 2048, 0.0, 0.0)
    assert model.latent is not None
    plain = model.model_copy(update={"latent": model.latent.model_copy(update={"indexer": None})})
    (every,) = CurveTimes(sources(gpu), "sglang", gpu, plain, 8).attended
    assert chosen.decode_ns(64, 2048) == every.decode_ns(64, 2048)
    longer, without = (of.decode_ns(64, 60_000) - of.decode_ns(64, 30_000) for of in (scored, every))
    assert longer / without == pytest.approx(132 / 1152, rel=0.2)


def test_layers_with_windows_attend_to_what_they_see() -> None:
    """A window of 100 leaves a row of 5,000 the last 100, and 200 tokens 20,000 pairs, as many as an uncached chunk of
    199.5; full attention all of them."""
    chunks = plan(0, 0, ((4999, 1), (300, 200)))
    assert attention_work(chunks) == Work(200, 300, 1, 4999, 4999)
    window = attention_work(chunks, Attention(Sight.SLIDING, 100))
    assert (window.decodes, window.context, window.prefill) == (1, 99, pytest.approx(199.5, abs=0.01))


def load(*overrides: str) -> scenario.Scenario:
    usual: dict[str, Any] = {"question": "?", "model": "qwen3-14b", "hardware": "l40s", "scheduler": {"name": "vllm"}}
    usual["workload"] = {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1}
    return scenario.parse(usual, "test", overrides)


def test_the_default_is_curves_and_given_shares_are_constant() -> None:
    """A step of 280 tokens takes an L40S 59.8 ms by its kernel tables and 42 ms with constant shares of its data sheet;
    at 2,048 tokens both agree within a tenth (reports/fidelity/curves)."""
    default, constant = cost_model(load()), cost_model(load("cost={kind: roofline, compute_efficiency: {}}"))
    assert isinstance(default, EngineCost)
    assert isinstance(constant, RooflineCost)
    step, large = plan(24, 24 * 600, ((300, 256),)), plan(0, 0, ((0, 2048),))
    assert default.gpu_ns(step, 280)[1] > 1.3 * constant.gpu_ns(step, 280)[1]
    assert default.gpu_ns(large, 2048)[1] == pytest.approx(constant.gpu_ns(large, 2048)[1], rel=0.1)
    assert default.gpu_ns(step, 280)[0] == constant.gpu_ns(step, 280)[0]  # copies are of the host link


def test_what_step_times_rest_on_is_said_with_its_error() -> None:
    """Of the card's own tables for its size of step, of the worst card that was left out where there are none; nothing
    is claimed where nothing was compared."""
    assert coverage.basis(load()).startswith("efficiency curves of NVIDIA L40S 48GB: 90 % of steps within 1.9% to")
    small = "model=llama-3.2-1b"
    assert coverage.basis(load("hardware=a10g", small)).startswith("efficiency curves of 8 cards, NVIDIA")
    for part in ("cost={kind: roofline, memory_efficiency: {kv: 0.5}}", "cost={kind: constant, step_s: 1}"):
        assert coverage.UNKNOWN in coverage.basis(load(part))
    assert "heads of 64" in coverage.basis(load(small))


def test_a_card_without_kernels_is_said_to_be_a_data_sheet_only() -> None:
    """With how far off servers of measured cards are, predicted without their generation, or by constant shares; not
    of efficiencies that a user chose, nor of a card that has curves."""
    cards, found = curves.servers("alone")
    assert [card[:11] for card in cards] == ["NVIDIA B200", "NVIDIA H100", "NVIDIA H200"]
    low, high = min(found["tpot"]), max(found["tpot"])
    only = (
        f"; data sheet only: servers of {', '.join(cards)}, predicted so, were off by {low:.0%} to {high:.0%} in mean"
    )
    for name in ("mi300x", "mi325x", "mi355x", "gb300", "h20"):
        assert only in coverage.basis(load(f"hardware={name}"))
    for name in ("b300", "gb200", "h100-sxm", "rtx-4090"):
        assert "data sheet only" not in coverage.basis(load(f"hardware={name}", "model=llama-3.2-1b"))
    assert "predicted so" in coverage.basis(load("cost={kind: roofline, compute_efficiency: {}}"))
    assert coverage.UNKNOWN in coverage.basis(load("cost={kind: roofline, compute_efficiency: {prefill: 0.5}}"))


@pytest.mark.parametrize("gpus", [1, 4])
def test_the_bound_of_a_class_is_the_cards_own_or_the_worst_left_out(gpus: int) -> None:
    kind = "1" if gpus == 1 else "more"
    (own,) = sources(H100)
    assert curves.errors([own], H100.name, gpus) == {int(most): at for most, at in own.curves["error"][kind].items()}
    others = sources(H100, without=(H100.name,))
    worst = max(each.curves["left_out"][kind]["16"] for each in others)
    assert curves.errors(others, H100.name, gpus)[16] == worst
    assert not curves.errors(sources(shapes.hardware("rtx-4090")), "NVIDIA GeForce RTX 4090 24GB", gpus)


def test_the_bounds_are_those_of_the_sizes_that_take_the_gpus_time() -> None:
    """A tenth of the time or more, the most first; larger steps than any compared are of the last class."""
    bounds = curves.errors(sources(L40S), L40S.name, 1)
    spent = {16: 30, 17: 9, 10**6: 61}  # tokens of a step -> its share of the time, %
    table = np.zeros((len(spent), len(STEP_COLUMNS)), dtype=np.int64)
    table[:, STEP_COLUMNS.index("padded_tokens")] = [*spent]
    table[:, STEP_COLUMNS.index("compute_end_ns")] = [*spent.values()]
    long = f"of 513 to 8,192 tokens (61% of the GPU's time) within {bounds[8192]:.1%}"
    short = f"of 1 to 16 tokens (30% of the GPU's time) within {bounds[16]:.1%}"
    assert f"90 % of steps {long}, {short} of its kernel tables" in coverage.basis(load(), Steps(table))
    for steps in (None, Steps(table[:0])):
        assert "by their size" in coverage.basis(load(), steps)


def test_distance_of_data_sheets_is_the_sum_of_logarithms() -> None:
    assert sheet(H100).distance(sheet(H200)) == pytest.approx(log(4.8 / 3.35))
    assert sheet(H100).distance(sheet(H100)) == 0
    assert isinstance(sources(H100)[0], Source)


def test_ranks_wait_for_each_other_in_every_all_reduce() -> None:
    """`reduce_s` is the skew: two all-reduces a layer and one at the embedding, 65 in 32 layers; null is vLLM's usual
    3 us. Both launches have it, and one launched alone takes longer."""
    shared = ["cost.tensor_parallel=2", "hardware=h100-sxm", "model=llama-3.1-8b", "cost.cpu={}"]
    usual, none, ten, eager = (
        cost_model(scenario.load("landscape", [*shared, *more])).gpu_ns(plan(decodes=8, context=800), 8)[1]
        for more in ([], ["cost.reduce_s=0"], ["cost.reduce_s=10e-6"], ["loop.cuda_graphs.enabled=false"])
    )
    assert usual - none == pytest.approx(65 * 3000, abs=2)
    assert ten - none == pytest.approx(65 * 10_000, abs=2)
    assert eager > usual + 65 * 5000
