"""`TritonOps` on a GPU, or in Triton's interpreter where there is none: answers, splits, scratch and compilation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine import interpreted  # noqa: F401 - skips this module where triton cannot run
from support.engine.ragged import BOUND, DEVICE, Step, attended, lengths_of, sights, step, worst
from support.scripts import script

from cbengine.model.kernels import attention
from cbengine.model.kernels.attention import Tiles
from cbengine.model.kernels.triton_ops import TritonOps, UnsupportedShapeError
from cbengine.model.ops import TorchOps
from cbsim.cost.fitted import MOST_SPLITS
from cbsim.policy.groups import Attention, Sight
from cbsim.scenario import shapes

F32, BF16 = torch.float32, torch.bfloat16
ON_GPU = DEVICE == "cuda"
WINDOWS = [Attention(sight, span) for sight in (Sight.SLIDING, Sight.CHUNKED) for span in (50, 64, 130)]
speed = script("hardware/speed")
each_dtype = pytest.mark.parametrize("dtype", [F32, BF16])


@pytest.fixture(autouse=True, scope="module")
def poison():
    """Fresh memory is NaN, so what a kernel leaves unwritten, or reads before it is written, shows."""
    patch, empty, empty_like = pytest.MonkeyPatch(), torch.empty, torch.empty_like
    patch.setattr(torch, "empty", lambda *shape, **kind: empty(*shape, **kind).fill_(math.nan))
    patch.setattr(torch, "empty_like", lambda other: empty_like(other).fill_(math.nan))
    patch.setattr(attention, "LEAST_PART", 32)  # short rows are split too
    yield
    patch.undo()


def attend(of: Step, ops: TritonOps) -> torch.Tensor:
    return ops.attention(of.queries, of.keys, of.values, of.rows, of.sees)


def drawn(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def shapes_of_any_step() -> st.SearchStrategy[dict]:
    """Anything in the interpreter. A GPU compiles a decode, a prefill and a reduction for each shape, so it gets three:
    tiles within blocks, tiles within blocks of padded rows, tiles across blocks.
    """
    few = [
        {"group": 3, "kv_heads": 2, "width": 16, "block_size": 16, "dtype": F32, "padded": False},
        {"group": 4, "kv_heads": 1, "width": 128, "block_size": 256, "dtype": BF16, "padded": True},
        {"group": 7, "kv_heads": 2, "width": 64, "block_size": 20, "dtype": BF16, "padded": False},
    ]
    any_shape = st.fixed_dictionaries(
        {
            "group": st.integers(1, 8),
            "kv_heads": st.integers(1, 2),
            "width": st.sampled_from((16, 32, 64, 128)),
            "block_size": st.integers(1, 20) | st.sampled_from((32, 64, 128)),
            "dtype": st.sampled_from((F32, BF16)),
            "padded": st.booleans(),
        }
    )
    return st.sampled_from(few) if ON_GPU else any_shape


@settings(max_examples=60 if ON_GPU else 16)
@given(
    lengths=lengths_of(3, 40, 150),
    shape=shapes_of_any_step(),
    splits=st.sampled_from((1, 4)),
    spare=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_attention_of_any_step(lengths, shape, splits, spare, seed):
    """Decodes and chunks of prefill in one step; `longest` is a bound, and programs beyond a row's end do nothing."""
    padded = shape["padded"]
    first = [seed * 7 % (cached + 1) for _, cached in lengths] if padded else None
    longest = max(count for count, _ in lengths) + spare
    kind = {name: value for name, value in shape.items() if name != "padded"}
    of = step(seed, lengths, first=first, longest=longest, **kind)
    assert worst(attend(of, TritonOps(1, splits=splits)), attended(of)) < BOUND[shape["dtype"]]


@settings(max_examples=24)
@given(
    lengths=lengths_of(3, 40, 150),
    shape=shapes_of_any_step(),
    sees=st.sampled_from(WINDOWS) if ON_GPU else sights(),
    splits=st.sampled_from((1, 4)),
    seed=st.integers(0, 99),
)
def test_layers_that_see_less(lengths, shape, sees, splits, seed):
    """The last tokens or those of a part. What no query sees is NaN, and so are its blocks' other tokens."""
    padded = shape["padded"] and sees.sight is not Sight.CHUNKED
    first = [seed * 7 % (cached + 1) for _, cached in lengths] if padded else None
    kind = {name: value for name, value in shape.items() if name != "padded"}
    of = step(seed, lengths, first=first, sees=sees, **kind)
    assert worst(attend(of, TritonOps(1, splits=splits)), attended(of)) < BOUND[shape["dtype"]]


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("sees", WINDOWS)
def test_windows_round_the_edges_of_tiles(sees, block_size):
    """Tiles of 64 across blocks of 16 and within blocks of 256; decodes and chunks whose windows begin one before, at
    and one after a tile's edge, whose tiles some queries see in part, all see whole, and none sees. Rows are split.
    """
    edges = [cached + sees.span for cached in (63, 64, 65)]
    lengths = [(1, cached) for cached in (1, 63, 64, 65, 400, *edges)]
    lengths += [(70, 70), (3, 259), (64, 128), (200, 330), *((40, 40 + cached) for cached in edges)]
    of = step(15, lengths, group=2, width=32, block_size=block_size, dtype=BF16, sees=sees)
    assert worst(attend(of, TritonOps(8)), attended(of)) < BOUND[BF16]


def test_a_layer_that_sees_less_reads_less():
    """Of 6,400 cached tokens a window of 64 needs one or two tiles; everything before them may lie anywhere."""
    of = step(16, [(1, 6400), (64, 6400)], group=2, width=16, sees=Attention(Sight.SLIDING, 64))
    of.rows.tables[:, : (6400 - 128) // 16] = 1 << 30  # no address of this machine
    assert worst(attend(of, TritonOps(8)), attended(of)) < BOUND[F32]


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_a_tile_reads_one_block_where_blocks_hold_whole_tiles(block_size, padded, multiprocessors):
    """Tiles of 64 across blocks of 1 and 16, as blocks of 64, within blocks of 256; rows end before, at and after a
    tile's end, and padding ends within a tile, at its edge, and behind the last token.
    """
    lengths = [(1, 63), (1, 64), (1, 65), (1, 200), (1, 257), (70, 70), (3, 259), (64, 128)]
    first = [0, 10, 64, 128, 257, 69, 70, 128] if padded else None
    of = step(13, lengths, group=2, width=32, block_size=block_size, dtype=BF16, first=first)
    assert worst(attend(of, TritonOps(multiprocessors)), attended(of)) < BOUND[BF16]


@pytest.mark.parametrize(("group", "width"), [(1, 64), (4, 128), (7, 32), (8, 64)])
@each_dtype
def test_lengths_round_the_edges_of_blocks_and_tiles(dtype, group, width):
    """Blocks of 16 tokens, tiles of 64 and query tiles of 128: one less, even, one more."""
    decodes = [(1, cached) for cached in (1, 15, 16, 17, 63, 64, 65, 128, 129)]
    edge = 128 // group
    tiles = [(edge - 1, edge - 1), (edge, edge + 16), (edge + 1, edge + 64)]
    chunks = [(count, 60 + more) for count in (2, 17) for more in range(3, 7)]
    of = step(1, decodes + chunks + tiles[: 1 if group == 1 else 3], group=group, width=width, dtype=dtype)
    assert worst(attend(of, TritonOps(8)), attended(of)) < BOUND[dtype]


def test_a_decode_and_a_chunk_of_one_token_are_the_same():
    """A row of one query token may be served by either kernel."""
    lengths = [(1, 40), (1, 1), (1, 97)]
    for decodes in range(4):
        of = step(2, lengths, decodes=decodes, group=3, kv_heads=2)
        assert worst(attend(of, TritonOps(4)), attended(of)) < BOUND[F32]


@each_dtype
def test_padding_sees_itself_and_is_seen_by_nobody(dtype):
    """Left-padded rows of a static batch: whole tiles of padding, before and among the queries, stay finite."""
    prefill = step(3, [(150, 150), (150, 150)], decodes=0, group=2, first=[140, 3], dtype=dtype)
    found = attend(prefill, TritonOps(1))
    assert worst(found, attended(prefill)) < BOUND[dtype]
    own = prefill.values.flatten(0, 1)[prefill.rows.kv_places[:140]].expand(140, 2, 16)
    assert torch.equal(found[:140], own)
    decode = step(4, [(1, 300), (1, 300)], group=2, first=[290, 0], dtype=dtype)
    assert worst(attend(decode, TritonOps(8)), attended(decode)) < BOUND[dtype]


def test_a_row_without_cached_tokens_gives_zeros():
    """The padding rows of a captured batch may have no tokens; their answers are finite."""
    of = step(5, [(1, 90), (1, 1)], group=2)
    of.rows.kv_tokens[1] = 0
    for multiprocessors in (1, 8):
        assert attend(of, TritonOps(multiprocessors))[1].count_nonzero() == 0


@given(programs=st.integers(1, 5000), multiprocessors=st.integers(1, 200))
def test_splits_bring_programs_nearest_to_two_a_multiprocessor(programs, multiprocessors):
    """So that scratch of twice the wanted programs always suffices, whatever batch a graph is captured for."""
    wanted, splits = 2 * multiprocessors, TritonOps(multiprocessors)._splits(programs)
    assert splits.bit_count() == 1
    assert splits * programs * 1.42 >= wanted or splits == MOST_SPLITS
    assert splits == 1 or splits * programs <= 1.42 * wanted


def test_other_tiles_and_splits_give_the_same_answers():
    """What a measurement tries is as right as what is shipped; scratch has room for all parts that were asked for."""
    of = step(14, [(1, 300), (1, 77), (20, 90)], group=2, kv_heads=2, width=32, block_size=32, dtype=BF16)
    right = attended(of)
    for cut, splits in ((Tiles(16, 32, 4, 3), 16), (Tiles(32, 128, 8, 2), 2), (Tiles(64, 16, 4, 2, 4), 1)):
        assert worst(attend(of, TritonOps(1, decode=cut, prefill=cut, splits=splits)), right) < BOUND[BF16]


def test_scratch_is_allocated_once_for_every_batch_size():
    """Captured graphs write to it for as long as they live, so it must neither move nor be freed."""
    ops = TritonOps(1)
    for rows in (1, 5, 2):
        for kv_heads in (1, 2):
            attend(step(6, [(1, 33)] * rows, group=4, kv_heads=kv_heads), ops)
    assert len(ops._scratch) == 1


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"width": 80}, r"head_dim: 80, where the kernels take \(16, 32, 64, 128\)"),
        ({"width": 8}, "head_dim: 8, where"),
        ({"width": 256}, "head_dim: 256, where"),
        ({"dtype": torch.float64}, "keys: of torch.float64, where the kernels take"),
    ],
)
def test_an_unfit_model_is_refused_by_name(shape, message):
    of = step(7, [(1, 5)], **shape)
    with pytest.raises(UnsupportedShapeError, match=message):
        attend(of, TritonOps(1))


@pytest.mark.parametrize("hidden", [1, 96, 512, 1000])
@each_dtype
def test_norms_are_those_of_torch(dtype, hidden):
    x, residual, weight = drawn(1, dtype, 5, hidden), drawn(2, dtype, 5, hidden), drawn(3, dtype, hidden)
    ops, reference = TritonOps(1), TorchOps()
    assert worst(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5).cpu().double()) < BOUND[dtype]
    right, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    found, kept = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(kept, total)
    assert worst(found, right.cpu().double()) < BOUND[dtype]


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize(("group", "kv_heads", "width"), [(4, 2, 64), (3, 1, 128), (1, 5, 16)])
@each_dtype
def test_rotation_rounds_where_torch_rounds_and_writes_the_cache(dtype, group, kv_heads, width, block_size, with_norms):
    rows = step(8, [(1, 9), (1, 33), (5, 5), (7, 20)], block_size=block_size).rows
    qkv = drawn(6, dtype, len(rows.positions), (group + 2) * kv_heads * width)
    norms = (drawn(7, dtype, width), drawn(8, dtype, width)) if with_norms else None
    angles = drawn(9, F32, 40, width // 2)
    rotation, found = torch.stack((angles.cos(), angles.sin()), dim=1), []
    for ops in (TritonOps(1), TorchOps()):
        shape = (2, 160 // block_size, block_size, kv_heads, width)
        keys, values = torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
        found.append((ops.rotate_and_cache(qkv, rotation, norms, 1e-5, keys, values, rows), keys, values))
    for ours, reference in zip(*found, strict=True):
        if with_norms:  # sums in another order: the last bit may differ
            torch.testing.assert_close(ours, reference, rtol=BOUND[dtype], atol=BOUND[dtype], equal_nan=True)
        else:
            torch.testing.assert_close(ours, reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
@pytest.mark.parametrize("inner", [1, 96, 1500])
@each_dtype
def test_the_gate_is_that_of_torch(dtype, inner):
    gate_up = 4 * drawn(10, dtype, 3, 2 * inner)
    gate_up[0, 0] = -200.0  # exp overflows: the answer is zero
    torch.testing.assert_close(
        TritonOps(1).silu_mul(gate_up), TorchOps().silu_mul(gate_up), rtol=BOUND[dtype], atol=1e-6
    )


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
@pytest.mark.parametrize(("group", "width"), [(4, 128), (7, 128), (8, 64), (1, 64)])
def test_long_rows_on_a_gpu(dtype, group, width):
    lengths = [(1, 3001), (1, 517), (1, 64), (300, 300), (129, 1500), (40, 41)]
    of = step(11, lengths, group=group, kv_heads=2, width=width, dtype=dtype)
    assert worst(attend(of, TritonOps()), attended(of)) < BOUND[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
def test_a_captured_decode_reads_what_the_tensors_hold_when_it_is_replayed():
    """Lengths and slots change from step to step; the graph is captured once."""
    ops = TritonOps()
    small, large = (step(12, [(1, cached)] * 6, group=4, kv_heads=2, width=64, dtype=BF16) for cached in (40, 1200))
    queries, keys, values = small.queries.clone(), large.keys.clone(), large.values.clone()
    rows = step(12, [(1, 1200)] * 6).rows
    ops.attention(queries, keys, values, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(queries, keys, values, rows)
    for of in (small, large):
        queries.copy_(of.queries)
        keys[: len(of.keys)].copy_(of.keys)
        values[: len(of.values)].copy_(of.values)
        rows.tables.zero_()
        rows.tables[:, : of.rows.tables.shape[1]].copy_(of.rows.tables)
        rows.slots.copy_(of.rows.slots)
        rows.kv_tokens.copy_(of.rows.kv_tokens)
        graph.replay()
        assert worst(out, attended(of)) < BOUND[BF16]


def test_uneven_contexts_are_answered_alike_by_any_number_of_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """`speed.py uneven` compares decodes of uneven contexts with equal ones of the same sum: each has the answers of
    plain torch, and, joined from parts, the same but for rounding.
    """
    cases = []

    def seconds(act, *_):
        act()
        return 1e-3

    def case(*sizes):
        cases.append(decode_case(*sizes))
        return cases[-1]

    decode_case = speed.decode_case
    monkeypatch.setattr(speed, "timed", seconds)
    monkeypatch.setattr(speed, "ceilings", lambda _: speed.Ceilings(1.0, 1.0, 1.0))
    monkeypatch.setattr(speed, "decode_case", case)
    sizes = replace(speed.REHEARSAL, uneven=((3, 90),))
    lines = list(speed.uneven(shapes.model("tiny"), sizes, DEVICE))
    for one in cases:
        torch.testing.assert_close(one.answers(TritonOps(4)), one.answers(TorchOps()), rtol=0.02, atol=0.02)
    uneven, equal = (one.rows.kv_tokens.tolist() for one in cases)
    assert len(set(uneven)) == 3 and len(set(equal)) == 1 and sum(uneven) == sum(equal)
    for one in cases:
        errors = {
            line["name"].removeprefix(f"{one.name}, "): line["error"] for line in lines if one.name in line["name"]
        }
        assert errors.pop("splits as shipped") == 0.0
        assert errors.keys() == {f"{splits} splits" for splits in (1, 2, 4, 8)}
        assert 0.0 < max(errors.values()) < 0.01, errors
