"""The cost of speculation: rows that verify drafts, the passes of a drafter, and the shapes that graphs have."""

from __future__ import annotations

from typing import Any

import pytest
from support.helpers import step_plan
from support.plans import SPEC, plan

from cbsim.cost.base import CpuCost, DraftingCost, PhaseCost
from cbsim.cost.curves import CurveTimes, sources
from cbsim.cost.engine_cost import Captured, captured
from cbsim.cost.fitted import ConstantCost
from cbsim.cost.roofline import Rates, RooflineCost, Weights
from cbsim.cost.table import Attended, Attention, attention_work
from cbsim.errors import ScenarioError
from cbsim.machine.graphs import VllmBuckets
from cbsim.machine.simulate import graphs
from cbsim.policy.captures import multiples, vllm_sizes
from cbsim.policy.groups import FULL
from cbsim.policy.plan import Chunk
from cbsim.runs import assemble
from cbsim.scenario import scenario, shapes

FREE = CpuCost({})
EAGLE = {"method": "eagle", "k": 3, "acceptance": {"rate": 0.7}}


def load(*overrides: str, **fields: Any) -> scenario.Scenario:
    usual: dict[str, Any] = {"question": "?", "model": "llama-3.1-8b", "hardware": "h100-sxm"}
    usual["workload"] = {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1}
    return scenario.parse({**usual, "speculation": EAGLE, **fields}, "test", overrides)


# -- rows that verify -------------------------------------------------------------------------------------------------


def test_a_roofline_reads_a_context_once_for_all_drafts_of_a_row() -> None:
    """Two rows of 4 tokens behind 100, all at the rates of decoding. Linear layers: 16,000 FLOP at 0.5e9 = 32 us, more
    than 20 us of weights. Head for 8 positions: 3,200 FLOP = 6.4 us, more than 4. Embedding: 1.6 us. Attention: 104
    tokens of KV a row at 100 bytes = 52 us, more than 410 pairs of 40 FLOP = 32.8 us. A chunk of a prompt among them
    raises products to the rates of prefill."""
    rates = Rates(flops_prefill=1e9, flops_decode=0.5e9, bytes_weights=1e8, bytes_kv=2e8, bytes_pcie=1e6)
    sizes = Weights(linear=1000, head=200, hidden=10, attention_flop=40, decode_flop=40, bytes=2, kv_bytes=100)
    cost = RooflineCost(FREE, rates, sizes, 0.0, 0.0, listed=True)
    assert cost.gpu_ns(plan(chunks=((100, 4),) * 2, outputs=4), 8)[1] == 144_000
    chunk = Chunk(SPEC, 0, 0, 100, (), 0)
    rows = [Chunk(SPEC, 1, 100, 4, (), 4)] * 2
    products, head = 108 * 2000 / 1e9 * 1e9, 400 / 1e8 * 1e9
    attention = 104_000 + 5050 * 40
    assert cost.gpu_ns(step_plan((chunk, *rows)), 108)[1] == products + head + 108 * 200 + attention


def test_a_step_without_drafts_costs_what_it_does_without_speculation() -> None:
    """Schedulers that speculate list all rows; those of one token are decoding rows to every cost model."""
    for cost in ({}, {"compute_efficiency": {}}):
        of = load(cost={"kind": "roofline"} | cost), load(cost={"kind": "roofline"} | cost, speculation=None)
        listed, counted = (assemble.cost_model(each) for each in of)
        rows = plan(chunks=((1000, 1),) * 64)
        assert listed.gpu_ns(rows, 64)[1] == pytest.approx(
            counted.gpu_ns(plan(64, 64_000, longest_context=1000), 64)[1]
        )


def test_rows_with_guesses_are_decoding_rows_to_tables() -> None:
    """A row of 4 tokens behind 1,000, three of them guesses, reads 1,004 tokens with its own; so does one of one token
    behind 1,003. The pairs of guesses are kept beside that."""
    work = attention_work(plan(chunks=((1000, 4), (2000, 4)), outputs=4))
    assert work == Attention(0, 0, 2, 1503, 2003, guesses=6, pairs=4 * 3000 + 20)
    assert attention_work(plan(chunks=((1000, 4),), outputs=1)).prefill == 4


def test_curves_charge_every_row_with_its_own_context() -> None:
    """8,192 instead of 1,024 tokens cost 32 rows of 4 tokens as much more as they cost 32 rows of one: merged into one
    chunk of 128 tokens they would read one context for all."""
    cost = assemble.cost_model(load(speculation=None))

    def more(tokens: int) -> int:
        at = [plan(chunks=((start - tokens, tokens),) * 32, outputs=tokens) for start in (8192, 1024)]
        long, short = (cost.gpu_ns(step, 32 * tokens)[1] for step in at)
        return long - short

    assert more(4) == pytest.approx(more(1), rel=1e-6)


def test_many_guesses_take_as_long_as_their_pairs_in_a_prompt() -> None:
    """Few rows with 64 guesses each compute more than they read."""
    gpu, model = shapes.hardware("h100-sxm"), shapes.model("llama-3.1-8b")
    (attended,) = CurveTimes(sources(gpu), "vllm", gpu, model, 1).attended
    work = attention_work(plan(chunks=((8192, 65),) * 4, outputs=65))
    assert attended.rows_ns(work, skew=False) == attended.unit_ns * attended.prompt(4 * (65 * 8192 + 65 * 33))
    few = attention_work(plan(chunks=((8192, 4),) * 4, outputs=4))
    assert attended.rows_ns(few, skew=False) == attended.decode_ns(4, 8196)


def test_a_guess_is_a_row_where_attention_is_given_as_a_whole() -> None:
    """An indexer chooses for every query token, and its matrices pass through it: 2 rows of 4 tokens are 8 rows. The
    tokens of chunks beside them are those of chunks alone."""
    whole = Attended(FULL, 2.0, lambda rows, context: rows * context, lambda tokens, context: tokens, 0.0, whole=True)
    work = attention_work(plan(chunks=((996, 4),) * 2, outputs=4))
    assert whole.rows_ns(work, skew=True) == 2 * 8 * 1000
    split = whole._replace(whole=False, prompt=lambda pairs: 0.0)
    assert split.rows_ns(work, skew=True) == 2 * 2 * 1000


def test_logits_of_every_guess_are_computed() -> None:
    """With twice the vocabulary a step takes longer by what the output head does, of 4 positions a row."""
    gpu, model = shapes.hardware("h100-sxm"), shapes.model("llama-3.1-8b")
    wide = model.model_copy(update={"vocab": 2 * model.vocab})
    step = plan(chunks=((100, 4),) * 32, outputs=4)
    narrow_ns, wide_ns = (
        assemble.cost_model(load(model=of.model_dump(), speculation=None)).gpu_ns(step, 128)[1] for of in (model, wide)
    )
    heads = [CurveTimes(sources(gpu), "vllm", gpu, of, 1).head_ns(128) for of in (model, wide)]
    assert wide_ns - narrow_ns == pytest.approx(heads[1] - heads[0], abs=1)


def test_the_cpu_pays_for_drafts_that_a_step_verifies() -> None:
    """Two rows with three guesses each, 5 ns apiece in `update`."""
    cpu = CpuCost({"update": PhaseCost(base=100, per_draft=5)})
    assert cpu(plan(chunks=((100, 4),) * 2, outputs=4)) == (0, 0, 0, 130)
    assert cpu(plan(3)) == (0, 0, 0, 100)
    stated = load(cost={"kind": "roofline", "cpu": {"update": {"per_draft_s": 1e-6}}})
    step = plan(chunks=((100, 4),) * 2, outputs=4)
    assert assemble.cost_model(stated).cpu_ns(step)[3] == 6000


# -- the drafter ------------------------------------------------------------------------------------------------------


def drafting_step(drafts: int) -> Any:
    """Two rows of 4 tokens behind 100 that verify drafts, and a part of a prompt, which proposes none."""
    rows = [Chunk(SPEC, order, 100, 4, (), 4) for order in range(2)]
    return step_plan((*rows, Chunk(SPEC, 2, 0, 20, (), 0)), drafts=drafts)


@pytest.mark.parametrize(
    ("drafts", "passes_ns"),
    [(0, 0), (1, 608), (3, 608 + 2 * 330), (4, 608 + 3 * 332)],
)
def test_drafts_come_one_after_the_other(drafts: int, passes_ns: int) -> None:
    """A pass takes 100, 10 a token and 1 a KV token. The first takes in all 28 tokens of the step: 100 + 280 + 2 x 104
    + 20 = 608. Each later one has a token of both rows: 100 + 20 + 210 KV tokens, and 2 more in the middle of three.
    A step that proposes nothing has none."""
    target, drafter = ConstantCost(FREE, 5000, launch_ns=50), ConstantCost(FREE, 100, 10, 0, 1, launch_ns=7)
    cost = DraftingCost(target, drafter, 1.0, passes=4)
    assert cost.gpu_ns(drafting_step(drafts), 28) == (0, 5000 + passes_ns, 0)
    assert DraftingCost(target, drafter, 0.5, passes=4).gpu_ns(drafting_step(drafts), 28)[1] == 5000 + passes_ns / 2
    assert cost.launch_ns == 50 + 4 * 7


def passes_ms(**fields: Any) -> float:
    """The passes of a drafter behind a step of 32 rows that verify 3 drafts each and propose 3 more."""
    steps = (step_plan(tuple([Chunk(SPEC, at, 1000, 4, (), 4) for at in range(32)]), drafts=k) for k in (0, 3))
    cost = assemble.cost_model(load(**fields))
    without, beside = (cost.gpu_ns(step, 128)[1] for step in steps)
    return (beside - without) / 1e6


def test_a_head_is_a_layer_of_the_target_with_its_output_head() -> None:
    """Three passes read 3 x (437 MB of a layer and 1,051 MB of the output head) at 3.35 TB/s: 1.33 ms, of which kernels
    reach 80 to 95 %, and a KV cache of 1/32 of the target's: 3 x 0.04 ms. What a step costs beside its kernels it does
    not cost again for a pass."""
    model = shapes.model("llama-3.1-8b")
    least = 3 * (model.layer_parameters / 32 + model.vocab * model.hidden) * 2 / 3.35e12 * 1e3
    assert 1.1 * least < passes_ms() < 1.5 * least
    assert passes_ms(cost={"kind": "roofline", "step_overhead_s": 1e-3}) == passes_ms()


def test_a_drafter_has_its_own_shape_or_a_share_of_the_targets_time() -> None:
    """A head with a vocabulary of 32,000 reads a quarter of the output head. A draft model of 1B reads 2.5 GB a pass,
    2.2 ms for three. A fraction is one of the target's step with as many tokens. A cost without shapes goes by weights.
    Prompt lookup takes no kernels."""
    model = shapes.model("llama-3.1-8b")
    small = model.model_copy(update={"name": "small", "layers": 1, "vocab": 32_000}).model_dump(mode="json")
    assert passes_ms(speculation=EAGLE | {"drafter": {"model": small}}) < 0.6 * passes_ms()
    drafts = EAGLE | {"method": "draft_model"}
    assert 2.2 < passes_ms(speculation=drafts | {"drafter": {"model": "llama-3.2-1b"}}) < 6
    step = step_plan(tuple([Chunk(SPEC, at, 1000, 4, (), 4) for at in range(32)]))
    target = assemble.cost_model(load(speculation=None))
    later = target.gpu_ns(plan(32, 32 * 1004, longest_context=1004), 32)[1]
    first = target.gpu_ns(plan(32, 32 * 1003, longest_context=1003), 128)[1]
    assert passes_ms(speculation=drafts | {"drafter": {"fraction": 0.1}}) == pytest.approx(
        0.1 * (first + 2 * later) / 1e6, rel=1e-5
    )
    assert first < target.gpu_ns(step, 128)[1]  # which has the logits of all guesses
    constant = {"kind": "constant", "step_s": 0.01}
    share = shapes.model("llama-3.2-1b").weight_bytes / model.weight_bytes
    made = passes_ms(speculation=drafts | {"drafter": {"model": "llama-3.2-1b"}}, cost=constant)
    assert made == pytest.approx(3 * 10 * share, rel=1e-6)
    assert passes_ms(speculation=EAGLE | {"method": "ngram"}) == 0


def test_a_drafter_takes_memory() -> None:
    """A head has a layer's weights and its KV, not a second embedding; a draft model has its own."""
    plain, head = (load(speculation=of).options("sync") for of in (None, EAGLE))
    layer_bytes = shapes.model("llama-3.1-8b").layer_parameters / 32 * 2
    block_bytes = 16 * 131_072
    assert head.num_blocks == pytest.approx(
        (plain.num_blocks * block_bytes - layer_bytes) / (block_bytes * 33 / 32), abs=2
    )
    other = load(speculation=EAGLE | {"method": "draft_model", "drafter": {"model": "llama-3.2-1b"}})
    assert other.options("sync").num_blocks < head.num_blocks - 1000


def test_a_head_may_know_fewer_tokens_a_draft_model_must_know_the_same() -> None:
    """EAGLE-3 heads propose the most frequent tokens of the vocabulary."""
    small = shapes.model("llama-3.2-1b").model_copy(update={"vocab": 32_000}).model_dump(mode="json")
    assert load(speculation=EAGLE | {"drafter": {"model": small}})
    with pytest.raises(ScenarioError, match=r"got Llama-3.2-1B with 32,000, must have the target's vocab \(128,256\)"):
        load(speculation=EAGLE | {"method": "draft_model", "drafter": {"model": small}})
    large = small | {"vocab": 200_000}
    with pytest.raises(ScenarioError, match="must have at most the target's vocab"):
        load(speculation=EAGLE | {"drafter": {"model": large}})


# -- graphs -----------------------------------------------------------------------------------------------------------


def test_vllm_captures_multiples_of_a_row_with_its_drafts() -> None:
    """`adjust_cudagraph_sizes_for_spec_decode`: sizes are rounded up to multiples, none beyond the largest; up to twice
    the seats' tokens, 512 at most."""
    assert multiples(vllm_sizes(32), 3) == [3, 6, 9, 18, 24]
    assert multiples([1, 2, 4, 8], 1) == [1, 2, 4, 8]
    few = load("scheduler={name: vllm, max_num_seqs: 10}")
    assert few.options("sync").limits.graphs == 80
    known = graphs(few, assemble.scheduler(few, "sync"))
    shape = known.shape(plan(chunks=((100, 4),) * 5, outputs=4))
    assert (shape.tokens, shape.eager) == (24, False)
    assert known.shape(plan(chunks=((100, 1),))).tokens == 4


def test_graphs_of_decoding_alone_hold_rows_with_all_drafts() -> None:
    """FULL_DECODE_ONLY: a step in which every row has 1 + k query tokens has a graph, one with fewer drafts or with a
    decode batch of single tokens has none."""
    only = load(
        "loop={cuda_graphs: {vllm_cudagraph_mode: FULL_DECODE_ONLY}}", "scheduler={name: vllm, max_num_seqs: 10}"
    )
    known = graphs(only, assemble.scheduler(only, "sync"))
    assert not known.shape(plan(chunks=((100, 4),) * 10, outputs=4)).eager
    assert known.shape(plan(chunks=((100, 4), (100, 3)), outputs=4)).eager
    assert known.shape(plan(chunks=((100, 4),) * 11, outputs=4)).eager
    rule = VllmBuckets([4, 8], 4)
    assert (rule(plan(chunks=((9, 4),), outputs=4)), rule(plan(4))) == ((4, 4), None)
    assert captured(only) == Captured(512, decodes=True, width=4)
    assert captured(only).holds(plan(chunks=((100, 4),), outputs=4), 4)
    assert not captured(only).holds(plan(chunks=((100, 1),)), 4)


def test_our_engine_pads_rows_with_all_their_drafts() -> None:
    """Of 5 rows with 3 drafts each, and 3 more to come, 8 rows are computed; a step with a row of fewer drafts, or that
    proposes none, has no graph, nor have single tokens."""
    ours = load("loop={cuda_graphs: {padding: cbengine}}", "scheduler={name: vllm, max_num_seqs: 10}")
    known = graphs(ours, assemble.scheduler(ours, "sync"))
    rows = tuple([Chunk(SPEC, at, 100, 4, (), 4) for at in range(5)])
    full = known.shape(step_plan(rows, drafts=3))
    assert (full.tokens, full.eager) == (32, False)
    assert known.shape(step_plan(rows)).eager
    assert known.shape(step_plan((*rows, Chunk(SPEC, 5, 100, 3, (), 3)), drafts=3)).eager
    assert known.shape(step_plan((*rows, Chunk(SPEC, 5, 0, 4, (), 1)), drafts=3)).eager
    assert known.shape(plan(4)).eager
