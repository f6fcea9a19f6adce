"""`TorchOps`, the reference that runs everywhere: norm and attention against the formulas in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.ragged import BOUND, attended, lengths_of, sights, step, worst

from cbengine.model.ops import TorchOps
from cbsim.policy.groups import Sight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_divides_by_the_root_of_the_mean_square(dtype):
    x, weight = (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in ((5, 96), (96,)))
    wide = x.to(dtype).double()
    right = weight.to(dtype).double() * wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt()
    assert worst(TorchOps().rms_norm(x.to(dtype), weight.to(dtype), 0.5), right) < BOUND[dtype]


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
