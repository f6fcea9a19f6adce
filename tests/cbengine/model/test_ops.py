"""`TorchOps`, the reference that runs everywhere, against the formulas in float64."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.ragged import BOUND, DEVICE, attended, lengths_of, sights, step, worst

from cbengine.model.ops import TorchOps
from cbsim.policy.groups import Sight

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def drawn(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.cpu().double(), weight.cpu().double()
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@each_dtype
def test_rms_norm_divides_by_the_root_of_the_mean_square(dtype):
    x, weight = 3 * drawn(1, dtype, 5, 96), drawn(2, dtype, 96)
    assert worst(TorchOps().rms_norm(x, weight, 0.5), normed(x, weight, 0.5)) < BOUND[dtype]


@each_dtype
def test_add_rms_norm_gives_the_sum_and_its_norm(dtype):
    x, residual, weight = drawn(1, dtype, 4, 64), drawn(2, dtype, 4, 64), drawn(3, dtype, 64)
    total = x + residual
    found, kept = TorchOps().add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(kept, total)
    assert worst(found, normed(total, weight, 1e-6)) < BOUND[dtype]


@each_dtype
def test_silu_mul_is_the_gate_times_its_sigmoid_times_the_rest(dtype):
    gate_up = 4 * drawn(3, dtype, 6, 2 * 48)
    gate, up = gate_up.cpu().double().split(48, dim=1)
    assert worst(TorchOps().silu_mul(gate_up), gate / (1 + (-gate).exp()) * up) < BOUND[dtype]


@pytest.mark.parametrize("with_norms", [False, True])
@each_dtype
def test_rotation_turns_halves_as_complex_numbers_and_caches_at_the_places(dtype, with_norms):
    """Element j and element j + D / 2 of a head are one complex number, turned by its position's angle j."""
    group, kv_heads, width = 3, 2, 16
    given_step = step(4, [(1, 9), (1, 33), (5, 5), (7, 20)], group=group, kv_heads=kv_heads, width=width, block_size=8)
    rows, angles = given_step.rows, 3 * drawn(5, torch.float32, 40, width // 2)
    qkv = drawn(6, dtype, len(rows.positions), (group + 2) * kv_heads * width)
    norms = (drawn(7, dtype, width), drawn(8, dtype, width)) if with_norms else None
    keys, values = torch.full((2, 30, 8, kv_heads, width), math.nan, dtype=dtype, device=DEVICE)
    rotation = torch.stack((angles.cos(), angles.sin()), dim=1)
    queries = TorchOps().rotate_and_cache(qkv, rotation, norms, 1e-5, keys, values, rows)

    heads = qkv.cpu().view(len(qkv), -1, width)
    turn = torch.polar(torch.ones(40, 1, width // 2).double(), angles.cpu().double()[:, None])[rows.positions.cpu()]
    q, k, v = heads.double().split((group * kv_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = normed(q, norms[0], 1e-5), normed(k, norms[1], 1e-5)
    turned_q, turned_k = (torch.complex(*x.chunk(2, dim=-1)) * turn for x in (q, k))
    places = rows.kv_places.cpu()
    assert worst(queries, torch.cat((turned_q.real, turned_q.imag), dim=-1)) < BOUND[dtype]
    assert worst(keys.cpu().flatten(0, 1)[places], torch.cat((turned_k.real, turned_k.imag), dim=-1)) < BOUND[dtype]
    assert torch.equal(values.cpu().flatten(0, 1)[places].double(), v)
    for cache in (keys, values):  # and nowhere else
        assert int(cache.isfinite().sum()) == len(places) * kv_heads * width


@settings(max_examples=40)
@given(
    lengths=lengths_of(3, 20, 60),
    shape=st.fixed_dictionaries(
        {
            "group": st.integers(1, 8),
            "kv_heads": st.integers(1, 2),
            "width": st.sampled_from((16, 24)),
            "block_size": st.integers(1, 17),
            "dtype": st.sampled_from((torch.float32, torch.bfloat16)),
        }
    ),
    padded=st.booleans(),
    sees=sights(),
    seed=st.integers(0, 99),
)
def test_attention_is_the_softmax_over_what_a_query_may_see(lengths, shape, padded, sees, seed):
    """Each query sees what its layer does of its row's cache, up to itself, from `first` on; a padding query sees
    itself. Nothing beyond the cached tokens, or before what is seen, is used: it is NaN here.
    """
    padded = padded and sees.sight is not Sight.CHUNKED
    first = [seed * 7 % (cached + 1) for _, cached in lengths] if padded else None
    of = step(seed, lengths, first=first, sees=sees, **shape)
    found = TorchOps().attention(of.queries, of.keys, of.values, of.rows, sees)
    assert worst(found, attended(of)) < BOUND[shape["dtype"]]
