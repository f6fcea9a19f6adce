"""Cost models against arithmetic on paper: a plan in, nanoseconds out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import SPEC, padded, plan

import cbsim
from cbsim.cost.base import Cost, CpuCost, PhaseCost, nearest
from cbsim.cost.fitted import ConstantCost, Curve, FittedCost, splits
from cbsim.cost.roofline import Rates, RooflineCost, Weights
from cbsim.errors import ScenarioError
from cbsim.runs import assemble
from cbsim.scenario import shapes
from cbsim.scenario.scenario import load

FREE = CpuCost({})


# -- CPU --------------------------------------------------------------------------------------------------------------


def test_cpu_phases_are_linear_in_rows_tokens_and_blocks() -> None:
    """Three rows, of which one brings 10 tokens, and 7 blocks in their tables: 3 rows, 12 tokens. Schedule:
    100 + 3 x 10 + 12 x 2 + 7 x 1 = 161; prepare has a base alone; what is not given costs nothing."""
    cpu = CpuCost({"schedule": PhaseCost(100, 10, 2, 1), "prepare": PhaseCost(base=50)})
    assert cpu(plan(2, 90, ((0, 10),), table_blocks=7)) == (161, 50, 0, 0)
    assert cpu(None) == (100, 50, 0, 0)


def test_cpu_pays_for_what_is_new_in_a_step() -> None:
    """A row that is listed, and decoding requests that get a block, leave or end, two of each kind here: 20 + 6 x 3."""
    cpu = CpuCost({"schedule": PhaseCost(per_chunk=20, per_change=3)})
    two = (SPEC, SPEC)
    step = plan(2, 90, ((0, 10),), grown=two, listed=(7, 7), left=two, ended=two)
    assert cpu(step) == (38, 0, 0, 0)
    assert cpu(plan(2, 90)) == (0, 0, 0, 0)


def test_cpu_times_are_rounded_phase_by_phase() -> None:
    """1.4 + 0.4 x 3 rows = 2.6 ns are 3; the clock is whole nanoseconds."""
    assert CpuCost({"update": PhaseCost(1.4, 0.4)})(plan(3)) == (0, 0, 0, 3)
    assert CpuCost({"launch": PhaseCost(1.4)})(plan(3)) == (0, 0, 1, 0)


# -- constant ---------------------------------------------------------------------------------------------------------


def test_constant_by_hand() -> None:
    """1,000 a step, 10 a token computed, 5 more for each of 20 prompt tokens, 1 a KV token: two decoding rows have 302
    after the step, the chunk behind 40 tokens 60. 1000 + 32 x 10 + 20 x 5 + 362 = 1782, 10 tokens of it padding."""
    cost = ConstantCost(FREE, 1000, 10, 5, 1)
    assert cost.gpu_ns(plan(2, 300, ((40, 20),)), 32) == (0, 1782, 0)
    assert ConstantCost(FREE, 1000).gpu_ns(plan(2, 300), 2) == (0, 1000, 0)


def test_constant_charges_the_context_of_rows_that_have_ended() -> None:
    """A static batch reads `padding_context` tokens more than the requests' own; a row that has ended adds its own."""
    cost = ConstantCost(FREE, 0, per_context=1)
    assert cost.gpu_ns(plan(2, 300, padding_context=100, padding_rows=1), 3) == (0, 403, 0)


# -- fitted -----------------------------------------------------------------------------------------------------------


FITTED = FittedCost(
    cpu_ns=FREE,
    base=1000,
    query_tokens=Curve([10, 20], [0, 40]),
    context_tokens=Curve([], []),
    per_chunk=30,
    per_prefill_token=10,
    per_cached_token=2,
    per_prefill_pair=0.5,
    per_decode_row=100,
    per_context_token=1,
    h2d=2,
    d2h=3,
    per_uneven_token=7,
    unsplit_rows=0,
    launch_ns=77,
)


def test_fitted_by_hand() -> None:
    """A chunk of 20 tokens behind 40: its tokens attend to 20 x 40 + 1 + 2 + ... + 20 = 1010 KV tokens, half a ns each.
    1000 + 30 + 20 x 10 + 40 cached x 2 + 505 + 2 rows x 100 + 302 KV tokens = 2317, and 22 query tokens are 12 beyond
    the curve's first, 4 each: 48."""
    assert FITTED.gpu_ns(plan(2, 300, ((40, 20),)), 22) == (2, 2317 + 48, 3)
    assert FITTED.launch_ns == 77


def test_fitted_pays_for_the_padding_of_a_static_batch() -> None:
    """A prompt of 20 padded to 24: 24 x 10 + 300 x 0.5, and 14 x 4 of the curve.
    A row that has ended is a row, its context context."""
    assert FITTED.gpu_ns(padded(plan(chunks=((0, 20),)), 4), 24) == (2, 1000 + 30 + 240 + 150 + 56, 3)
    step = plan(2, 300, padding_rows=3, padding_context=450)
    assert FITTED.gpu_ns(step, 5) == (2, 1000 + 500 + 755, 3)


def test_fitted_pays_for_the_padding_of_a_graph() -> None:
    """Two rows computed as 8 are 8 rows to the kernels; those that pad have nothing to read."""
    assert FITTED.gpu_ns(plan(2, 300), 8) == (2, 1000 + 800 + 302, 3)


def test_fitted_pays_for_the_longest_part_of_a_decoding_row() -> None:
    """32 rows fill the device. Two of them are split into 16 parts: the longest, of 6,400 tokens, into parts of 400. An
    even share of all 8,000 tokens is 250, so that the device ends 150 tokens later, 7 ns each. Of 64 rows none is
    split. Nothing is added to rows that are alike, or where it is unknown how many fill the device.
    """
    cost = replace(FITTED, unsplit_rows=32)
    two = plan(2, 7998, longest_context=6399)
    assert cost.gpu_ns(two, 2)[1] - FITTED.gpu_ns(two, 2)[1] == 150 * 7
    many = plan(64, 64 * 99, longest_context=999)
    assert cost.gpu_ns(many, 64)[1] - FITTED.gpu_ns(many, 64)[1] == (1000 - 200) * 7
    for rows in (1, 2, 16, 32):
        alike = plan(rows, rows * 99, longest_context=99)
        assert cost.gpu_ns(alike, rows) == FITTED.gpu_ns(alike, rows)
    assert replace(FITTED, unsplit_rows=5e-324).gpu_ns(two, 2) == FITTED.gpu_ns(two, 2), "the least number there is"
    assert [splits(times) for times in (1e-3, 1.4, 1.5, 2.8, 2.9, 1e9)] == [1, 1, 2, 2, 4, 64]


def test_a_curve_is_straight_between_its_points() -> None:
    """Flat below the first, beyond the last as before it, but never negative; through one point it is flat."""
    curve = Curve([10, 20, 40], [5, 10, 6])
    assert [curve(x) for x in (0, 10, 15, 20, 30, 40, 50, 100)] == [5, 5, 7.5, 10, 8, 6, 4, 0]
    assert [Curve([10], [5])(x) for x in (0, 100)] == [5, 5]
    assert Curve([], [])(7) == 0


# -- roofline ---------------------------------------------------------------------------------------------------------


RATES = Rates(flops_prefill=1e9, flops_decode=0.5e9, bytes_weights=1e8, bytes_kv=2e8, bytes_pcie=1e6)
WEIGHTS = Weights(linear=1000, head=200, hidden=10, attention_flop=40, decode_flop=40, bytes=2, kv_bytes=100)


def roofline(overhead_s: float = 0.0) -> RooflineCost:
    return RooflineCost(FREE, RATES, WEIGHTS, overhead_s, 3e-6)


def test_roofline_of_a_decode_step_by_hand() -> None:
    """Two rows, 298 KV tokens before and 300 with their own. Linear layers: weights 2,000 bytes at 1e8 = 20 us, more
    than 4,000 FLOP at 0.5e9 = 8 us. Head: 400 bytes = 4 us, more than 800 FLOP = 1.6 us. Embedding: 2 x 20 bytes = 0.4
    us. KV: 30,000 bytes at 2e8 = 150 us, more than 12,000 FLOP = 24 us. Sum 174.4 us. Copies at 1 MB/s: 3 x 2 numbers
    and 5 blocks to the device, 4 bytes each: 44 us; 2 tokens back: 8 us."""
    assert roofline().gpu_ns(plan(2, 298, table_blocks=5), 2) == (44_000, 174_400, 8_000)
    assert roofline(1e-6).gpu_ns(plan(2, 298, table_blocks=5), 2) == (44_000, 175_400, 8_000)


def test_roofline_of_a_prefill_by_hand() -> None:
    """100 tokens behind 50. Linear layers: 200,000 FLOP at 1e9 = 200 us, more than 20 us of weights. Attention: pairs
    100 x 50 + 5,050 = 10,050, 40 FLOP each: 402 us, more than 150 x 100 bytes = 75 us. Head for one row: 4 us of
    weights. Embedding: 2,000 bytes = 20 us. A chunk that does not sample needs no head."""
    assert roofline().gpu_ns(plan(chunks=((50, 100),)), 100)[1] == 626_000
    assert roofline().gpu_ns(plan(chunks=((50, 100),), outputs=0), 100)[1] == 622_000


def test_roofline_takes_the_longer_of_arithmetic_and_traffic_in_each_part() -> None:
    """Many rows turn the linear layers from traffic (20 us) to arithmetic: 100 rows, 2e5 FLOP at 0.5e9 = 400 us; so the
    head: 4e4 FLOP = 80 us. The embeddings are 20 us and each row's one KV token 0.5 us, of which there are 100."""
    assert roofline().gpu_ns(plan(100, 0), 100)[1] == 400_000 + 80_000 + 20_000 + 50_000


def test_roofline_pays_for_graph_padding_in_the_linear_layers() -> None:
    """100 rows computed as 128: 512 us instead of 400 and 25.6 us of embeddings instead of 20; nobody attends or
    samples for the padding, which is not copied."""
    exact, rounded = (roofline().gpu_ns(plan(100, 0), tokens) for tokens in (100, 128))
    assert rounded[1] - exact[1] == 112_000 + 5_600
    assert (rounded[0], rounded[2]) == (exact[0], exact[2])


def test_roofline_reads_the_padding_of_a_static_batch() -> None:
    """100 KV tokens beyond the requests' own are 10,000 bytes at 2e8: 50 us."""
    own, padded_ns = (roofline().gpu_ns(plan(2, 298, padding_context=more), 2)[1] for more in (0, 100))
    assert padded_ns - own == 50_000


def test_roofline_of_weights_with_a_type_of_their_own() -> None:
    """Linear weights of 1,000 bytes are read in 10 us instead of 20; computed at twice the rate, 100 rows take 200 us
    instead of 400. Head, embedding and attention stay what they are."""
    rates, narrow = RATES._replace(linear=2.0), WEIGHTS._replace(linear_bytes=1000)
    same = RooflineCost(FREE, RATES, narrow, 0.0, 0.0)
    fast = RooflineCost(FREE, rates, narrow, 0.0, 0.0)
    step, many = plan(2, 298), plan(100, 0)
    assert roofline().gpu_ns(step, 2)[1] - same.gpu_ns(step, 2)[1] == 10_000
    assert roofline().gpu_ns(many, 100)[1] == same.gpu_ns(many, 100)[1] == fast.gpu_ns(many, 100)[1] + 200_000


def decode_ns(*overrides: str, context: int = 0, rows: int = 1) -> int:
    """Of a decoding step on an H100, at full efficiency and with no overhead."""
    full = "cost={kind: roofline, compute_efficiency: {prefill: 1, decode: 1}, memory_efficiency: {weights: 1, kv: 1}}"
    base = ["model=llama-3.1-8b", "hardware=h100-sxm", "scheduler.name=vllm", full]
    return assemble.cost_model(load("worked_example", [*base, *overrides])).gpu_ns(plan(rows, context), rows)[1]


def test_roofline_reads_quantized_weights_and_cache_at_their_width() -> None:
    """Llama-3.1-8B on an H100 at full efficiency: 6.98e9 linear weights of 2 bytes; of 1; of 66.5 a group of 128. A
    token of fp8 context is 65,536 bytes. At many rows fp8 computes at the data sheet's fp8 rate, int4 in bfloat16."""
    linear, ns = 32 * (2 * 4096 * 128 * 40 + 3 * 4096 * 14336), 1e9 / 3.35e12
    for weights, width in (("fp8", 1), ("int4", 66.5 / 128)):
        saved = decode_ns() - decode_ns(f"model.weights_dtype={weights}")
        assert saved == pytest.approx(linear * (2 - width) * ns, abs=2)
    longer = decode_ns("model.kv_dtype=fp8", context=1000) - decode_ns("model.kv_dtype=fp8")
    assert longer == pytest.approx(1000 * 65_536 * ns, abs=2)
    wide, fp8, int4 = (decode_ns(f"model.weights_dtype={weights}", rows=4096) for weights in ("null", "fp8", "int4"))
    assert wide == int4
    assert wide - fp8 == pytest.approx(4096 * 2 * linear * (1 / 9.894e14 - 1 / 1.9789e15) * 1e9, rel=1e-6)
    slow = ["hardware.flops.float8=null", "model.weights_dtype=fp8"]
    assert decode_ns(*slow, rows=4096) == wide


def test_roofline_reads_the_experts_that_tokens_are_expected_to_need() -> None:
    """Closed form: of 4 experts of which a token takes 2, one token reads half, two tokens 3/4, three 7/8. 8,000 bytes
    at 1e8 are 80 us, on top of the 20 us of the other weights; at 1,000 rows arithmetic, 4 ms, takes longer."""
    mixed = RooflineCost(FREE, RATES, WEIGHTS._replace(experts_share=2 / 4, experts_bytes=8000), 0.0, 0.0)
    for rows, share in ((1, 1 / 2), (2, 3 / 4), (3, 7 / 8)):
        assert mixed.gpu_ns(plan(rows, 0), rows)[1] - roofline().gpu_ns(plan(rows, 0), rows)[1] == 80_000 * share
    assert mixed.gpu_ns(plan(1000, 0), 1000) == roofline().gpu_ns(plan(1000, 0), 1000)


def test_roofline_of_a_mixture_reads_its_active_weights_for_one_token() -> None:
    """Qwen3-30B-A3B, one row: 48 layers of attention, router and 8 of 128 experts, and the head, 2 bytes a weight; for
    many rows all 128 experts."""
    attention, router, expert = 2 * 2048 * 128 * 36, 2048 * 128, 3 * 2048 * 768
    few, many = (48 * (attention + router + n * expert) + 151936 * 2048 for n in (8, 128))
    one, all_ = (decode_ns("model=qwen3-30b-a3b", rows=rows) for rows in (1, 1000))
    assert one == pytest.approx(2 * few / 3.35e12 * 1e9, rel=1e-3)
    assert all_ > 2 * many / 3.35e12 * 1e9


def test_roofline_of_gpus_that_share_every_layer() -> None:
    """Llama-3.1-8B over 4 H100: a row reads a quarter of the weights, a token of context a quarter of its keys and
    values. 64 all-reduces take 5 us each and 2 x 3/4 of 8,192 bytes a row over NVLink. One GPU is as before."""
    four = "cost.tensor_parallel=4"
    ns = 1e9 / 3.35e12
    embedding, others = 8192 * ns, decode_ns() - (8192 + 131_072) * ns
    reduces = 64 * (5000 + 1.5 * 8192 / 450)
    assert decode_ns(four) == pytest.approx(others / 4 + embedding + 131_072 / 4 * ns + reduces, abs=2)
    longer = decode_ns(four, context=1000) - decode_ns(four)
    assert longer == pytest.approx(1000 * 131_072 / 4 * ns, abs=2)
    free, slow = ["cost.all_reduce_latency_s=0", four], "hardware.link_bytes_s=null"
    more = decode_ns(*free, slow) - decode_ns(*free)
    assert more == pytest.approx(64 * 1.5 * 8192 * (1 / 64 - 1 / 450), abs=2)  # over PCIe
    assert decode_ns("cost.tensor_parallel=1", slow) == decode_ns()


def test_gpus_that_share_every_layer_share_weights_and_cache() -> None:
    """Llama-3.1-70B does not fit one H100; over 4 it has the blocks that vLLM would find. Heads must divide, and
    transformers' sizes are those of one GPU."""
    asked = ["model=llama-3.1-70b", "hardware=h100-sxm", "scheduler.name=vllm", "cost={kind: roofline}"]
    with pytest.raises(ScenarioError, match="too little for a cache"):
        load("worked_example", asked)
    shared = load("worked_example", [*asked, "cost.tensor_parallel=4"])
    h100, llama = shapes.hardware("h100-sxm"), shapes.model("llama-3.1-70b")
    blocks = shapes.Place(llama, h100, 2, 16, 0.9, None, 4).blocks(8192, 1024)
    assert shared.options("sync").num_blocks == pytest.approx(blocks, rel=0.1) and blocks > 10_000
    with pytest.raises(
        ScenarioError,
        match=r"cost\.tensor_parallel: got 3, must divide heads \(64\) and, if it is less",
    ):
        load("worked_example", [*asked, "cost.tensor_parallel=3"])
    with pytest.raises(ScenarioError, match=r"cost\.tensor_parallel: got 2, must be 1"):
        load("worked_example", ["cost={kind: roofline}", "cost.tensor_parallel=2", "model=llama-3.1-8b"])


def test_gpus_beyond_the_link_share_no_model() -> None:
    """Eight GPUs of an HGX board; a rack has 72, fewer than a model's heads allow; without a link there is no bound,
    and one that is given needs none."""
    asked = ["model=llama-3.1-405b", "scheduler.name=vllm", "cost={kind: roofline, tensor_parallel: 16}"]
    with pytest.raises(ScenarioError, match=r"cost\.tensor_parallel: got 16, must be <= hardware\.link_gpus \(8\)"):
        load("worked_example", [*asked, "hardware=b200", "model.kv_heads=16"])
    for card in (["hardware=gb200"], ["hardware=b200", "hardware.link_bytes_s=null"]):
        assert load("worked_example", [*asked, *card, "model.kv_heads=16"]).gpus == 16


@pytest.mark.parametrize(
    ("card", "weights", "rate"),
    [
        ("b200", {}, 2.25e15),
        ("b200", {"weights_dtype": "fp8_block"}, 4.5e15),
        ("b200", {"weights_dtype": "nvfp4"}, 9.0e15),
        ("mi355x", {"weights_dtype": "mxfp4"}, 1.00663e16),
        ("h200-sxm", {"weights_dtype": "nvfp4"}, 9.894e14),
        ("a100-80gb", {"weights_dtype": "fp8"}, 3.119e14),
        ("b200", {"weights_dtype": "int4"}, 2.25e15),
    ],
)
def test_matrices_are_computed_at_the_rate_of_their_type(card: str, weights: dict[str, str], rate: float) -> None:
    """A type without a rate of its own is computed in the model's."""
    model = shapes.model("llama-3.1-8b").model_copy(update=weights)
    assert shapes.hardware(card).flops.of_layers(model) == pytest.approx(rate, rel=1e-12)


def test_each_type_of_a_mixture_counts_by_its_weights() -> None:
    """gpt-oss-20b: of its 3.03e9 weights that a token goes through 2.39e9 are of experts, in mxfp4: on a B200 a quarter
    as long as in bfloat16."""
    model, flops = shapes.model("gpt-oss-20b"), shapes.hardware("b200").flops
    experts = model.expert_parameters * model.experts_per_token / model.experts
    dense = sum(count * matrix.weights for matrix, count in model.matrices())
    assert flops.of_layers(model) == pytest.approx((dense + experts) / (dense / 2.25e15 + experts / 9e15), rel=1e-12)
    assert experts / (dense + experts) == pytest.approx(0.79, abs=0.01)


def test_several_gpus_cost_what_several_cost() -> None:
    """A run on two H100 is charged two of them, 3 USD an hour each; one as before."""
    asked = ["model=llama-3.1-8b", "hardware=h100-sxm", "scheduler.name=vllm", "workload.output_tokens=2"]
    for gpus in (1, 2):
        cost = f"cost={{kind: roofline, tensor_parallel: {gpus}}}"
        result = cbsim.run(load("worked_example", [*asked, "loop.mode=sync", cost]))
        assert result.summary["cost"]["price_usd_hour"] == 3.0 * gpus


def test_roofline_of_a_scenario_has_the_data_sheets_numbers() -> None:
    """Llama-3.1-8B on an H100 at full efficiency, one row: its 6.98e9 linear weights and the 0.525e9 of the head are
    read at 3.35e12 bytes/s, which is 4.48 ms; a token of context is 131,072 bytes. 1000 more of them take 39.1 us."""
    model = shapes.model("llama-3.1-8b")
    weights = model.parameters - model.vocab * model.hidden - (2 * model.layers + 1) * model.hidden
    short, long = (decode_ns(context=context) for context in (1, 1001))
    assert short == pytest.approx(2 * weights / 3.35e12 * 1e9, rel=1e-3)
    assert long - short == pytest.approx(1000 * 131_072 / 3.35e12 * 1e9, rel=1e-3)
    usual = ["model=llama-3.1-8b", "hardware=h100-sxm", "scheduler.name=vllm", "cost={kind: roofline}"]
    assert assemble.cost_model(load("worked_example", usual)).launch_ns == 32 * 50_000


# -- all --------------------------------------------------------------------------------------------------------------


COSTS = pytest.mark.parametrize(
    "cost", [ConstantCost(FREE, 1000, 10, 5, 1), FITTED, roofline(1e-6)], ids=["constant", "fitted", "roofline"]
)


@COSTS
def test_an_empty_step_takes_the_device_no_time(cost: Cost) -> None:
    """vLLM's step that only reports who has ended: nothing is copied, launched or computed."""
    assert cost.gpu_ns(plan(), 0) == (0, 0, 0)


@COSTS
@given(
    rows=st.integers(1, 200), context=st.integers(0, 10**6), start=st.integers(0, 10**4), tokens=st.integers(1, 4096)
)
def test_more_work_takes_no_less_time(cost: Cost, rows: int, context: int, start: int, tokens: int) -> None:
    """One more decoding row, KV token or prompt token never makes a step shorter; times are whole nanoseconds."""
    base = cost.gpu_ns(plan(rows, context, ((start, tokens),)), rows + tokens)
    for more in (
        cost.gpu_ns(plan(rows + 1, context, ((start, tokens),)), rows + 1 + tokens),
        cost.gpu_ns(plan(rows, context + 1, ((start, tokens),)), rows + tokens),
        cost.gpu_ns(plan(rows, context, ((start + 1, tokens),)), rows + tokens),
        cost.gpu_ns(plan(rows, context, ((start, tokens + 1),)), rows + tokens + 1),
        cost.gpu_ns(plan(rows, context, ((start, tokens), (0, 1))), rows + tokens + 1),
    ):
        assert all(type(time) is int for time in more)
        assert all(a <= b for a, b in zip(base, more, strict=True))


@COSTS
def test_a_cost_model_has_no_state(cost: Cost) -> None:
    """The same plan costs the same however often it is asked for."""
    step = plan(3, 500, ((10, 20),))
    assert cost.gpu_ns(step, 23) == cost.gpu_ns(step, 23)
    assert cost.cpu_ns(step) == (0, 0, 0, 0)


@given(st.floats(0, 1e300) | st.integers(0, 1 << 53).map(lambda n: n / 2))
def test_nearest_is_round(number: float) -> None:
    """Half to even included: every second half of an integer is such a case."""
    assert nearest(number) == round(number)


def test_an_indexer_scores_all_tokens_and_few_are_attended_to() -> None:
    """DeepSeek-V3.2 on a GPU that would hold it: of 100,000 tokens a decoding row reads 132 bytes each in a layer, and
    the latents of 2,048; of 1,000 all. A prompt has the indexer's 2 x 64 x 128 FLOP a pair, and attends in latents to
    at most 2,048 tokens: 2 x 128 x 1,088 FLOP a pair.
    """
    big, gpu = ("model=deepseek-v3.2", "hardware.memory_bytes=2e12"), shapes.hardware("h100-sxm")
    bandwidth, rate = gpu.memory_bandwidth_bytes_s / 1e9, gpu.flops.bfloat16 / 1e9
    heads = 128 * 2 * 1088 / rate  # ns of an attended token
    for context, attended in ((1_000, 1_000), (100_000, 2_047)):
        longer = decode_ns(*big, context=context) - decode_ns(*big)
        each = context * 132 / bandwidth + attended * max(heads, 1152 / bandwidth)
        assert longer == pytest.approx(61 * each, rel=1e-3)
    full = "cost={kind: roofline, compute_efficiency: {prefill: 1, decode: 1}, memory_efficiency: {weights: 1, kv: 1}}"
    cost = assemble.cost_model(load("worked_example", ["hardware=h100-sxm", "scheduler.name=vllm", full, *big]))
    behind, alone = (cost.gpu_ns(plan(0, 0, ((start, 1000),)), 1000)[1] for start in (50_000, 0))
    pairs = {0: 1000 * 1001 / 2, 50_000: 1000 * 50_000 + 1000 * 1001 / 2}
    scores = 61 * 2 * 64 * 128 * (pairs[50_000] - pairs[0])
    latents = 61 * 128 * 2 * 1088 * (1000 * 2048 - pairs[0])
    assert behind - alone == pytest.approx((scores + latents) / rate, rel=1e-3)


def test_decoding_rows_read_a_latent_with_every_head() -> None:
    """A latent of 576 values is read once by all heads: 2 x 128 x (2 x 512 + 64) FLOP a pair and layer, more than its
    bytes take where one GPU has all heads and the cache is in fp8; a prompt computes with keys and values made of it,
    2 x 128 x (192 + 128).
    """
    (heads,) = {layer.attention for layer, _ in shapes.model("deepseek-v3").kinds}
    assert heads.cached(1) == heads.cached(8) == 576
    assert (heads.decode_flop, heads.pair_flop) == (2 * 128 * 1088, 2 * 128 * 320)
    narrow = ("model=deepseek-v3", "model.kv_dtype=fp8", "hardware.memory_bytes=2e12")
    longer = decode_ns(*narrow, context=100_000) - decode_ns(*narrow)
    pairs = 100_000 * 61 * heads.decode_flop
    assert longer == pytest.approx(pairs / shapes.hardware("h100-sxm").flops.bfloat16 * 1e9, rel=0.001)
