"""A step's time from measured tables, against the formula of the data's README computed here, and against real data."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import packs
from support.plans import padded, plan

from cbsim.cost.bundle import Bundle, Link, TableCost
from cbsim.cost.table import Attention, Ladder, attention_work, reached
from cbsim.errors import ScenarioError
from cbsim.policy.plan import StepPlan
from cbsim.runs import assemble
from cbsim.scenario import catalog, scenario, shapes
from cbsim.scenario.costs import TableSettings

LAYERS, ROW_BYTES = packs.LAYERS, packs.HIDDEN * packs.BYTES
DENSE = shapes.model("llama-3.1-8b").model_copy(update={"layers": LAYERS, "hidden": packs.HIDDEN})
MIXTURE = {"experts": packs.EXPERTS, "experts_per_token": packs.PER_TOKEN}
EXPERTS = DENSE.model_copy(update=MIXTURE | {"intermediate": packs.MOE["moe_intermediate_size"]})
LINK = Link(latency_ns=2000, bytes_ns=17.0)
DECODING: dict[str, Any] = {"decodes": 4, "context": 4 * 64, "longest_context": 64}


def cost(folder: Path, *, tensor: int = 1, moe: bool = False, skew: bool = False, **added: float) -> TableCost:
    """A cost model over a bundle of the closed forms of `packs`."""
    tables = Bundle(packs.bundle(folder, tensor=tensor, moe=moe, skew=skew), EXPERTS if moe else DENSE, tensor)
    link, launch_s = {"latency_s": 2e-6, "bytes_s": 17e9}, 7.4e-9 / LAYERS
    given = {"path": str(folder), "tensor_parallel": tensor, "link": link, "launch_s_per_layer": launch_s} | added
    return TableCost(tables, TableSettings.model_validate({"kind": "table"} | given), LAYERS, ROW_BYTES)


def linear_us(tokens: int, *without: str) -> float:
    """The README's sum: once embedding and final norm, in every layer the others, and layernorm twice."""
    time = {name: base + slope * tokens for name, (base, slope) in packs.DENSE_US.items()}
    once = time["embedding"] + time["final_layernorm"]
    names = ("layernorm", "qkv_proj", "o_proj", "layernorm", "gate_up_proj", "down_proj")
    return once + LAYERS * sum(time[name] for name in names if name not in without)


def head_us(rows: int) -> float:
    return sum(base + slope * rows for base, slope in packs.HEAD_US.values())


# -- the formula ------------------------------------------------------------------------------------------------------


def test_a_decode_step_is_the_readmes_sum(tmp_path: Path) -> None:
    """Four rows of 64 tokens of context: T = embedding + L x (layers + attention) + norm + head + sampler."""
    expected = linear_us(4) + head_us(4) + LAYERS * packs.attention_us(0, 0, 4, 64)
    assert cost(tmp_path).gpu_ns(plan(**DECODING), 4) == (0, round(1000 * expected), 0)


def test_a_mixed_step_between_the_measured_points(tmp_path: Path) -> None:
    """Three rows with 120 tokens together, a chunk of 40 behind 32: all axes between two points, mid-prefill rows are
    rows of the head, and the linear layers see all 43 tokens, or those that the graph pads them to."""
    step = plan(decodes=3, context=360, longest_context=200, chunks=((32, 40),))
    expected = linear_us(43) + head_us(4) + LAYERS * packs.attention_us(40, 32, 3, 120)
    assert cost(tmp_path).gpu_ns(step, 43)[1] == pytest.approx(1000 * expected, abs=1)
    more = linear_us(48) - linear_us(43)
    assert cost(tmp_path).gpu_ns(step, 48)[1] == pytest.approx(1000 * (expected + more), abs=1)


def test_beyond_the_tables_the_last_line_goes_on(tmp_path: Path) -> None:
    """1,000 tokens although 512 were measured, 30 rows although 16, 500 tokens of context although 256."""
    step = plan(decodes=30, context=30 * 500, longest_context=500, chunks=((0, 970),))
    expected = linear_us(1000) + head_us(31) + LAYERS * packs.attention_us(970, 0, 30, 500)
    assert cost(tmp_path).gpu_ns(step, 1000)[1] == pytest.approx(1000 * expected, abs=1)


def test_a_decode_row_is_a_chunk_of_one_token(tmp_path: Path) -> None:
    """vLLM's profiles count a request with one new token as decoding, whether its prompt has been read or not."""
    listed = plan(decodes=3, context=192, longest_context=64, chunks=((64, 1),))
    assert attention_work(listed) == attention_work(plan(**DECODING)) == Attention(0, 0, 4, 64, 64)
    model = cost(tmp_path)
    assert model.gpu_ns(listed, 4) == model.gpu_ns(plan(**DECODING), 4)
    assert attention_work(plan(chunks=((90, 1),))).longest == 90


def test_what_no_table_holds_is_added(tmp_path: Path) -> None:
    """`step` once a step and `row` for every row, padding rows of a static batch included; an empty step is free."""
    bare, more = cost(tmp_path), cost(tmp_path, step_s=5e-6, row_s=3e-7)
    assert more.gpu_ns(plan(**DECODING), 4)[1] - bare.gpu_ns(plan(**DECODING), 4)[1] == 5000 + 4 * 300
    padded = plan(**DECODING, padding_rows=2, padding_context=128)
    assert more.gpu_ns(padded, 6)[1] - bare.gpu_ns(padded, 6)[1] == 5000 + 6 * 300
    assert more.gpu_ns(plan(), 0) == (0, 0, 0)
    assert more.launch_ns == 7


def test_tensor_parallel_gpus_reduce_twice_a_layer(tmp_path: Path) -> None:
    """Ring: 2 (p - 1) messages of bytes / p. 100 tokens of 64 x 2 bytes between 4 GPUs, after o_proj and down_proj."""
    step = plan(chunks=((0, 100),))
    reduced = 2 * 3 * (2000 + 100 * ROW_BYTES / 4 / 17.0)
    expected = 1000 * (linear_us(100) + head_us(1) + LAYERS * packs.attention_us(100, 0, 0, 0)) + LAYERS * 2 * reduced
    assert cost(tmp_path, tensor=4).gpu_ns(step, 100)[1] == pytest.approx(expected, abs=1)


# -- experts ----------------------------------------------------------------------------------------------------------


@given(tokens=st.integers(1, 10**6))
def test_hit_experts_are_the_expectation_of_equal_choices(tokens: int) -> None:
    """A token hits k of E experts; one expert stays unhit by n tokens with (1 - k/E)^n."""
    assert 8 * reached(2 / 8, 1) == pytest.approx(2)
    assert 8 * reached(2 / 8, 2) == pytest.approx(2 + 2 - 2 * 2 / 8)  # two of the second's, less those hit already
    assert reached(2 / 8, tokens) <= reached(2 / 8, tokens + 1) <= 1


def test_a_mixture_of_experts_takes_the_place_of_the_dense_layer(tmp_path: Path) -> None:
    """On its own, a GPU computes all experts that its tokens hit."""
    expected = linear_us(4, "gate_up_proj", "down_proj") + head_us(4)
    expected += LAYERS * (packs.attention_us(0, 0, 4, 64) + packs.moe_us(4, 8 * (1 - (3 / 4) ** 4)))
    assert cost(tmp_path, moe=True).gpu_ns(plan(**DECODING), 4)[1] == pytest.approx(1000 * expected, abs=1)


def skipped_us(tokens: int) -> float:
    """Of pairs whose expert is on the other of two GPUs, as many as `tokens` tokens have: in elements, a gate, an up
    projection and the activation of both, and a row of the residual; `packs` reads an expert's three matrices in 30 us.
    """
    width, residual = packs.MOE["moe_intermediate_size"], packs.HIDDEN
    written = packs.PER_TOKEN * tokens * (2 * width + width + residual)
    return written / (3 * width * residual) * 30


def test_ranks_in_step_take_what_the_slowest_takes(tmp_path: Path) -> None:
    """Two ranks, 4 decoding rows on one, 16 tokens of a prompt on the other, both padded to 16. Experts are hit by 32
    tokens, half of them live here, the pairs of the others are skipped; tokens are gathered before and scattered
    after; own work is the longer."""
    ours, theirs = plan(**DECODING), plan(chunks=((0, 16),))
    own = max(
        head_us(4) + LAYERS * packs.attention_us(0, 0, 4, 64), head_us(1) + LAYERS * packs.attention_us(16, 0, 0, 0)
    )
    moe = packs.moe_us(16, 4 * (1 - (3 / 4) ** 32)) + skipped_us(16)
    expected = 1000 * (own + linear_us(16, "gate_up_proj", "down_proj") + LAYERS * moe)
    expected += LAYERS * 2 * (2000 + 16 * ROW_BYTES / 17.0)
    model = cost(tmp_path, moe=True)
    assert model.lockstep_ns([ours, theirs], [16, 16]) == pytest.approx(expected, abs=1)
    assert model.lockstep_ns([ours, theirs], [16, 16]) == model.lockstep_ns([theirs, ours], [16, 16])
    assert model.lockstep_ns([theirs], [16, 16]) == model.lockstep_ns([theirs, plan()], [16, 16])
    assert model.lockstep_ns([plan(), plan()], [0, 0]) == 0


def test_ranks_that_are_not_padded_compute_their_own_and_share_the_rest(tmp_path: Path) -> None:
    """100 tokens of a prompt here, 4 decoding rows there: linear layers and attention as the longer of the two has
    them, experts at the mean of 52 tokens, and the link, which both ways share, carries as much."""
    long, short = plan(chunks=((0, 100),)), plan(**DECODING)
    own = head_us(1) + LAYERS * packs.attention_us(100, 0, 0, 0) + linear_us(100, "gate_up_proj", "down_proj")
    moe = packs.moe_us(52, 4 * (1 - (3 / 4) ** 104)) + skipped_us(52)
    expected = 1000 * (own + LAYERS * moe) + LAYERS * 2 * (2000 + 52 * ROW_BYTES / 17.0)
    model = cost(tmp_path, moe=True)
    assert model.lockstep_ns([long, short], [100, 4]) == pytest.approx(expected, abs=1)
    assert model.lockstep_ns([short, long], [4, 100]) == model.lockstep_ns([long, short], [100, 4])
    assert model.lockstep_ns([long, short], [100, 4]) < model.lockstep_ns([long, short], [100, 100])


@given(sizes=st.lists(st.integers(1, 10**6), min_size=2, max_size=8))
def test_a_gather_takes_what_its_bytes_take(sizes: list[int]) -> None:
    """Each of p ranks gets what the others have: (p - 1) times all bytes, over the p ways that work at a time. Equal
    sizes are the ring all-gather of the README, and half of an all-reduce."""
    ranks = len(sizes)
    assert LINK.gather_ns(sizes) == pytest.approx((ranks - 1) * 2000 + (ranks - 1) * sum(sizes) / ranks / 17.0)
    assert LINK.gather_ns(sizes) == pytest.approx(LINK.gather_ns(sizes[::-1]))
    equal = [sizes[0]] * ranks
    assert 2 * LINK.gather_ns(equal) == pytest.approx(LINK.all_reduce_ns(ranks * sizes[0], ranks))


# -- chunks taken together --------------------------------------------------------------------------------------------


@given(start=st.integers(0, 10**5), tokens=st.integers(2, 8192))
def test_a_single_chunk_is_itself(start: int, tokens: int) -> None:
    assert attention_work(plan(chunks=((start, tokens),))) == Attention(tokens, start, 0, 0, 0)


@given(chunks=st.lists(st.tuples(st.integers(0, 5000), st.integers(2, 2048)), min_size=1, max_size=6))
def test_chunks_together_have_as_many_query_key_pairs(chunks: list[tuple[int, int]]) -> None:
    """Each token attends to what lies before it in its own request, and no chunk sees another's."""
    prefill, cached, *_ = attention_work(plan(chunks=tuple(chunks)))
    pairs = sum(tokens * start + tokens * (tokens + 1) / 2 for start, tokens in chunks)
    assert prefill * cached + prefill * (prefill + 1) / 2 == pytest.approx(pairs)
    assert cached >= 0
    assert cached == 0 or prefill == sum(tokens for _, tokens in chunks)


def test_padding_of_static_batches_is_computed(tmp_path: Path) -> None:
    """A prompt of 24 padded to 32 is a chunk of 32; rows that have ended decode and read on."""
    assert attention_work(padded(plan(chunks=((0, 24),)), 8)) == Attention(32, 0, 0, 0, 0)
    ended = plan(decodes=2, context=100, longest_context=60, padding_rows=2, padding_context=28)
    assert attention_work(ended) == Attention(0, 0, 4, 32, 60)


# -- interpolation: exact where measured, linear between, clamped below, a line above ---------------------------------

axis = st.lists(st.integers(0, 4096), min_size=1, max_size=5, unique=True).map(sorted)
times = st.floats(0, 1e6)


@st.composite
def ragged(draw: st.DrawFn) -> dict[tuple[int, int, int], float]:
    """A table of three axes in which every value of one has its own values of the next."""
    points = {(x, y, z) for x in draw(axis) for y in draw(axis) for z in draw(axis)}
    return {at: draw(times) for at in sorted(points)}


@given(table=ragged(), data=st.data())
def test_measured_points_are_returned_as_they_are(
    table: dict[tuple[int, int, int], float], data: st.DataObject
) -> None:
    """Whatever the order of the rows, and although the grid is not full; the same as a number of another type."""
    ladder = Ladder(data.draw(st.permutations(list(table.items()))))
    for (x, y, z), value in table.items():
        assert ladder(x, y, z) == ladder(float(x), y, z) == value


@given(xs=axis, x=st.floats(0, 5000), data=st.data())
def test_a_curve_is_numpys_interpolation_and_goes_on_as_a_line(xs: list[int], x: float, data: st.DataObject) -> None:
    """Between and below the points as numpy.interp; above the last, the line through the last two."""
    ys = [data.draw(times) for _ in xs]
    expected = float(np.interp(x, xs, ys))
    if x > xs[-1] and len(xs) > 1:
        expected = ys[-1] + (x - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    assert Ladder(((at,), value) for at, value in zip(xs, ys, strict=True))(x) == pytest.approx(expected, abs=1e-6)


@given(xs=axis, ys=axis, zs=axis, share=st.tuples(*[st.floats(0, 1)] * 3), data=st.data())
def test_a_full_grid_is_interpolated_axis_by_axis(
    xs: list[int], ys: list[int], zs: list[int], share: tuple[float, float, float], data: st.DataObject
) -> None:
    """Within a full grid the order of the axes is of no matter: numpy.interp over the last, then the one before."""
    values = np.array([data.draw(times) for _ in product(xs, ys, zs)]).reshape(len(xs), len(ys), len(zs))
    ladder = Ladder(((x, y, z), values[i, j, k]) for (i, x), (j, y), (k, z) in product(*map(enumerate, (xs, ys, zs))))
    at = [points[0] + part * (points[-1] - points[0]) for points, part in zip((xs, ys, zs), share, strict=True)]
    rest = values
    for points, one in zip((zs, ys, xs), reversed(at), strict=True):
        rest = np.apply_along_axis(lambda line, p=points, x=one: np.interp(x, p, line), -1, rest)
    assert ladder(*at) == pytest.approx(float(rest), abs=1e-6)


def test_a_grid_that_is_not_full_by_hand() -> None:
    """Under 0 only one point is known, under 10 two, at other places: each side is read at its own neighbours."""
    ladder = Ladder({(0, 5): 100.0, (10, 0): 200.0, (10, 20): 400.0}.items())
    assert ladder(0, 1000) == 100  # the only value
    assert ladder(10, 5) == 250
    assert ladder(5, 5) == 175  # half-way between 100 and 250
    assert ladder(-3, 5) == 100  # below: the first
    assert ladder(20, 5) == 400  # above: 100, 250, so 400
    assert ladder(10, 30) == 500


# -- skew -------------------------------------------------------------------------------------------------------------


def skewed(longest: int, together: int = 256) -> StepPlan:
    """Four rows."""
    return plan(decodes=4, context=together, longest_context=longest)


def test_a_longest_row_of_twice_the_mean_by_hand(tmp_path: Path) -> None:
    """The profile says 0.5 of the way at ratio 1/2 and none at 1: at 3/4, a quarter. With one row there is no skew."""
    model = cost(tmp_path, skew=True)
    mean = linear_us(4) + head_us(4) + LAYERS * packs.attention_us(0, 0, 4, 96)
    for longest, share in ((192, 0.5), (128, 0.25), (96, 0.0)):
        way = packs.attention_us(0, 0, 4, longest) - packs.attention_us(0, 0, 4, 96)
        step = skewed(longest, 4 * 96)
        assert model.gpu_ns(step, 4)[1] == pytest.approx(1000 * (mean + LAYERS * share * way), abs=1)
    work = Attention(0, 0, 1, 64, 64)
    assert model._tables.attention_ns(work, skew=True) == model._tables.attention_ns(work, skew=False)


@pytest.mark.parametrize(("rows", "share"), [(2, 0.5), (6, 0.5), (7, 16 / 7 / 2), (8, 1.0), (12, 2 / 3), (16, 0.5)])
def test_a_batch_is_found_among_those_whose_contexts_are_split_or_are_not(
    rows: int, share: float, tmp_path: Path
) -> None:
    """128 multiprocessors and 32 KV heads: 0.8 x 256 blocks are 6.4 rows. The profile has batches of 2 and of 16, which
    wait for half of the way. Up to 6 rows as with 2; from 7 on the wait is that of 16 rows in microseconds, so its
    share of a way that grows with the rows is 16/rows as large, at most all of it."""
    packs.bundle(tmp_path, skew=True)
    meta = {"architecture": "tiny", "skew_fit": {"enabled": True}, "gpu": "NVIDIA GeForce RTX 4090"}
    packs.write(tmp_path / "meta.yaml", meta)
    tables = Bundle(tmp_path, DENSE.model_copy(update={"kv_heads": 32}), 1)
    at_mean, at_longest = (packs.attention_us(0, 0, rows, context) for context in (64, 128))
    expected = at_mean + min(1.0, share) * (at_longest - at_mean)
    work = Attention(0, 0, rows, 64, 128)
    assert tables.attention_ns(work, skew=True) == pytest.approx(1000 * LAYERS * expected)
    assert tables.attention_ns(work, skew=False) == pytest.approx(1000 * LAYERS * at_mean)


def test_skew_is_off_where_the_profile_says_so(tmp_path: Path) -> None:
    """meta.yaml with skew_fit.enabled false: skew.csv is not even read; nor is it used when the scenario says no."""
    packs.bundle(tmp_path, skew=True)
    packs.write(tmp_path / "meta.yaml", {"architecture": "tiny", "skew_fit": {"enabled": False}})
    (tmp_path / "tp1" / "skew.csv").write_text("nonsense\n")
    work = Attention(0, 0, 4, 64, 256)
    tables = Bundle(tmp_path, DENSE, 1)
    assert tables.attention_ns(work, skew=True) == tables.attention_ns(work, skew=False)
    packs.bundle(tmp_path, skew=True)
    tables = Bundle(tmp_path, DENSE, 1)
    assert tables.attention_ns(work, skew=True) > tables.attention_ns(work, skew=False)


@pytest.fixture(scope="module")
def steep(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A profile whose shares lie beyond 1: batches that took longer than one of longest rows only."""
    return Bundle(packs.bundle(tmp_path_factory.mktemp("steep"), skew=True, share=1.5), DENSE, 1)


@given(
    prefill=st.integers(0, 600),
    cached=st.integers(0, 600),
    decodes=st.integers(2, 40),
    mean=st.floats(1, 2000),
    more=st.floats(1, 50),
)
def test_with_skew_time_lies_between_mean_and_longest(
    steep: Bundle, prefill: int, cached: int, decodes: int, mean: float, more: float
) -> None:
    """Whatever was measured and however far beyond it a step is."""
    at_mean, at_longest = (
        steep.attention_ns(Attention(prefill, cached, decodes, context, mean * more), skew=False)
        for context in (mean, mean * more)
    )
    found = steep.attention_ns(Attention(prefill, cached, decodes, mean, mean * more), skew=True)
    assert at_mean - 1e-6 <= found <= at_longest * (1 + 1e-12)


# -- what cannot be used ----------------------------------------------------------------------------------------------


def dense(folder: Path) -> Path:
    return folder / "tp1" / "dense.csv"


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, path
    path.write_text(text.replace(old, new))


BROKEN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a layer without times": (lambda f: rewrite(dense(f), "o_proj", "p_proj"), ("dense.csv", "'o_proj'")),
    "no sampler": (
        lambda f: rewrite(f / "tp1" / "per_sequence.csv", "sampler", "other"),
        ("per_sequence.csv", "'sampler'"),
    ),
    "a negative time": (
        lambda f: rewrite(dense(f), "embedding,1,50.5", "embedding,1,-1"),
        ("dense.csv:2: time_us: got '-1', expected a number >= 0",),
    ),
    "a time of nothing": (
        lambda f: rewrite(dense(f), "embedding,1,50.5", "embedding,1,0"),
        ("dense.csv:2: time_us: got '0', expected microseconds > 0 and <= 3.6e+09, an hour",),
    ),
    "a time of more than an hour": (
        lambda f: rewrite(dense(f), "embedding,1,50.5", "embedding,1,1e308"),
        ("dense.csv:2: time_us: got '1e308', expected microseconds > 0 and <= 3.6e+09, an hour",),
    ),
    "a row twice": (
        lambda f: rewrite(dense(f), "embedding,1,50.5", "embedding,1,50.5\nembedding,1,50.6"),
        ("dense.csv:3: tokens: got '1', expected no second row of embedding, 1",),
    ),
    "a file that is cut off": (
        lambda f: dense(f).write_text(dense(f).read_text().rstrip()[:-1]),
        ("dense.csv:", "has no end of line: the file is cut off"),
    ),
    "text for a number": (
        lambda f: rewrite(dense(f), "embedding,1,50.5", "embedding,one,50.5"),
        ("dense.csv:2: tokens: got 'one'",),
    ),
    "not a number": (lambda f: rewrite(dense(f), "1,50.5", "1,nan"), ("dense.csv:2: time_us: got 'nan'",)),
    "a cell too few": (lambda f: rewrite(dense(f), "embedding,1,50.5", "embedding,1"), ("dense.csv:2: got 2 cells",)),
    "no such column": (lambda f: rewrite(dense(f), "time_us", "time_ms"), ("dense.csv:1: no column time_us",)),
    "an empty file": (lambda f: dense(f).write_text(""), ("dense.csv:1: no column layer", "found nothing")),
    "no rows": (
        lambda f: (f / "tp1" / "attention.csv").write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n"),
        ("attention.csv", "holds no rows"),
    ),
    "no attention": (lambda f: (f / "tp1" / "attention.csv").unlink(), ("attention.csv", "cannot be read")),
    "no skew": (lambda f: (f / "tp1" / "skew.csv").unlink(), ("skew.csv", "cannot be read")),
    "a batch of nobody": (
        lambda f: packs.table(
            f / "tp1" / "skew.csv",
            ("n", "pc", "kp", "kv_big", "kv_mean", "t_mean_us", "t_max_us", "t_skew_us"),
            [(0, 0, 0, 64, 32, 1, 2, 1)],
        ),
        ("skew.csv", "no usable rows"),
    ),
    "no tables of that degree": (lambda f: (f / "tp1").rename(f / "tp2"), ("parallelism 1", "found: tp2")),
    "no meta": (lambda f: (f / "meta.yaml").unlink(), ("meta.yaml", "cannot be read")),
    "meta is a list": (lambda f: packs.write(f / "meta.yaml", [1]), ("meta.yaml", "expected fields")),
    "an unknown architecture": (
        lambda f: packs.write(f / "meta.yaml", {"architecture": "gpt"}),
        ("meta.yaml: architecture: got 'gpt'", "arch/gpt.yaml"),
    ),
    "no order of layers": (lambda f: packs.write(f / "arch" / "tiny.yaml", {}), ("tiny.yaml: sequence",)),
    "layers are no list": (
        lambda f: packs.write(f / "arch" / "tiny.yaml", {"sequence": {"head": 3}}),
        ("tiny.yaml: sequence.head: got 3, expected a list of layers",),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_bundle_is_one_message_with_file_and_field(case: str, tmp_path: Path) -> None:
    """Nothing is guessed or passed over: a table that is wrong is not used."""
    spoil, words = BROKEN[case]
    spoil(packs.bundle(tmp_path, skew=True))
    with pytest.raises(ScenarioError) as error:
        Bundle(tmp_path, DENSE, 1)
    assert len(str(error.value).splitlines()) == 1
    for word in (str(tmp_path), *words):
        assert word in str(error.value)


def test_experts_are_of_the_model_and_of_the_profile_or_of_neither(tmp_path: Path) -> None:
    packs.bundle(tmp_path / "dense")
    packs.bundle(tmp_path / "moe", moe=True)
    for folder, model in (("dense", EXPERTS), ("moe", DENSE)):
        with pytest.raises(ScenarioError, match=r"meta\.yaml: architecture: got 'tiny'; either it or the model"):
            Bundle(tmp_path / folder, model, 1)


# -- real tables ------------------------------------------------------------------------------------------------------


def real(path: str) -> Path:
    try:
        return catalog.tables(f"measured_vllm/perf/{path}")
    except ScenarioError as missing:
        pytest.skip(f"recorded vLLM profiles not present: {missing}")


PROFILES = {
    "RTX4090/meta-llama/Llama-3.1-8B/bf16": (1, "llama-3.1-8b"),
    "RTXPRO6000/meta-llama/Llama-3.1-8B/bf16": (2, "llama-3.1-8b"),
    "RTXPRO6000/Qwen/Qwen3-32B/bf16": (2, "qwen3-32b"),
    "RTXPRO6000/Qwen/Qwen3-30B-A3B-Instruct-2507/bf16": (1, "qwen3-30b-a3b"),
}


@pytest.mark.parametrize("path", PROFILES)
def test_real_measured_points_are_returned_exactly(path: str) -> None:
    """Every row of attention.csv comes back as it was measured; the head is the sum of its two layers."""
    folder = real(path)
    tensor, name = PROFILES[path]
    tables = Bundle(folder, shapes.model(name).model_copy(update={"layers": 1}), tensor)
    rows = _rows(folder / f"tp{tensor}" / "attention.csv")
    for chunk, cached, decodes, context, time in rows:
        work = Attention(float(chunk), float(cached), int(decodes), float(context), float(context))
        assert tables.attention_ns(work, skew=True) == 1000 * float(time)
    head: dict[int, dict[str, float]] = {}
    for layer, at, time in _rows(folder / f"tp{tensor}" / "per_sequence.csv"):
        head.setdefault(int(at), {})[layer] = float(time)
    for at, times in head.items():
        assert tables.head_ns(at) == 1000 * sum(times[name] for name in ("lm_head", "sampler"))


def _rows(path: Path) -> list[list[str]]:
    return [line.split(",") for line in path.read_text().splitlines()[1:]]


def test_real_skew_shots_lie_near_what_was_measured() -> None:
    """The correction comes from skew.csv itself: at its pure-decode shots the step is near the measured one, where
    without correction it would be at t_mean. Repeated shots are averaged, so near, not exact."""
    folder = real("RTXPRO6000/meta-llama/Llama-3.1-8B/bf16")
    tables = Bundle(folder, DENSE.model_copy(update={"layers": 1}), 1)
    header = (folder / "tp1" / "skew.csv").read_text().splitlines()[0].split(",")
    shots = [dict(zip(header, row, strict=True)) for row in _rows(folder / "tp1" / "skew.csv")]
    assert tables._skew is not None
    off = []
    for shot in shots:
        n, big, mean = int(shot["n"]), float(shot["kv_big"]), float(shot["kv_mean"])
        low, high, seen = (float(shot[name]) for name in ("t_mean_us", "t_max_us", "t_skew_us"))
        if high > low and mean < big:
            share = tables._skew(Attention(float(shot["pc"]), float(shot["kp"]), n, mean, big))
            off.append(share - min(1.0, max(0.0, (seen - low) / (high - low))))
    assert len(off) > 1000
    assert sum(map(abs, off)) / len(off) < 0.05


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model=qwen3-8b", "is of Llama-3.1-8B, but model.name is 'Qwen3-8B'"),
        ("hardware=h100-sxm", "is of RTX4090, but hardware.name is 'NVIDIA H100 SXM 80GB'"),
    ],
)
def test_tables_of_something_else_are_refused(override: str, says: str) -> None:
    """A profile says what it is of: it is not read as another model's or another GPU's."""
    path = "measured_vllm/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16"
    if not any((folder / path).is_dir() for folder in catalog.data_folders()):
        pytest.skip("the kernel profiles are not here: docs/data.md")
    mine = ["model=llama-3.1-8b", "hardware=rtx-4090", f"cost={{kind: table, path: {path}}}", "kv_cache.num_blocks=99"]
    assert assemble.cost_model(scenario.load("8k_b32", mine))
    with pytest.raises(ScenarioError, match=re.escape(says)):
        assemble.cost_model(scenario.load("8k_b32", [*mine, override]))
