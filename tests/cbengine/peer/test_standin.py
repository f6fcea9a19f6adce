"""The stand-in for `flash_attn`: answers of its plain functions, what it refuses, and who gets to see it when."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from flash_calls import AS_THE_LIBRARY, varlen, with_cache
from ragged import BOUND, attended, lengths_of, step, worst

from cbengine.peer import standin
from cbengine.peer.standin.functions import FlashAttention, UnsupportedCallError, for_device, missing

CPU = torch.device("cpu")
SHAPE = st.fixed_dictionaries(
    {
        "group": st.integers(1, 4),
        "kv_heads": st.integers(1, 3),
        "width": st.sampled_from((8, 16, 80)),
        "block_size": st.integers(1, 20),
        "dtype": st.sampled_from((torch.float32, torch.bfloat16)),
    }
)


# -- answers ----------------------------------------------------------------------------------------------------------


@given(lengths=lengths_of(4, 20, 60), shape=SHAPE, padding=st.integers(0, 5), seed=st.integers(0, 99))
def test_ragged_rows_see_what_lies_before_them(lengths, shape, padding, seed):
    """A row's queries are the last of its tokens, prompts, chunks and single tokens alike; padding is not read."""
    of = step(seed, lengths, **shape)
    assert worst(varlen(for_device(CPU), of, padding), attended(of)) < BOUND[shape["dtype"]]


@given(
    cached=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    shape=SHAPE,
    padding=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_a_new_token_is_cached_and_sees_itself(cached, shape, padding, seed):
    """Keys and values go to their place and nowhere else; rows of padding answer zeros and write nothing."""
    of = step(seed, [(1, tokens) for tokens in cached], **shape)
    answers, keys, values = with_cache(for_device(CPU), of, padding)
    assert worst(answers[: len(cached)], attended(of)) < BOUND[shape["dtype"]]
    assert answers[len(cached) :].count_nonzero() == 0
    torch.testing.assert_close(keys, of.keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, of.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("other", [{"causal": False}, {"window_size": (127, 0)}, {"softmax_scale": 0.5}])
def test_other_attention_is_refused_and_not_computed_wrongly(other):
    flash, x, at = for_device(CPU), torch.zeros(3, 1, 16), torch.tensor([0, 3]).int()
    with pytest.raises(UnsupportedCallError, match="is causal, without a window, scaled by"):
        flash.flash_attn_varlen_func(x, x, x, at, at, 3, 3, **AS_THE_LIBRARY | other)
    with pytest.raises(TypeError, match="softcap"):
        flash.flash_attn_varlen_func(x, x, x, at, at, 3, 3, softcap=1.0)


def test_one_token_a_row_is_appended():
    flash, x = for_device(CPU), torch.zeros(1, 2, 1, 16)
    with pytest.raises(UnsupportedCallError, match="one token a row, not 2"):
        flash.flash_attn_with_kvcache(x, x, x, x, x, cache_seqlens=x, block_table=x, causal=True)
    with pytest.raises(UnsupportedCallError, match="serves transformers' continuous batching only"):
        missing(x)


# -- who sees it ------------------------------------------------------------------------------------------------------

pytest.importorskip("transformers")
from transformers import modeling_flash_attention_utils as user
from transformers.utils import import_utils


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers believes that there is a GPU, without which it does not look for the package."""
    if importlib.util.find_spec(standin.NAME) is not None:
        pytest.skip("the package is installed: nothing is lent")
    monkeypatch.setattr(import_utils, "is_torch_cuda_available", lambda: True)
    import_utils.is_flash_attn_2_available.cache_clear()
    yield
    import_utils.is_flash_attn_2_available.cache_clear()


def found() -> bool:
    return import_utils.is_flash_attn_2_available()


def test_transformers_finds_it_while_it_is_lent_and_not_longer(cuda):
    """Its answer of before is cached, and so are the functions of a run; neither outlives the loan, twice."""
    mapping = dict(import_utils.PACKAGE_DISTRIBUTION_MAPPING)
    for _ in range(2):
        assert not found()
        with standin.lent(CPU):
            assert found()
            assert not import_utils.is_flash_attn_4_available()
            functions = user.lazy_import_paged_flash_attention("paged|flash_attention_2")
            assert [type(one.__self__) for one in functions] == [FlashAttention] * 2
            import flash_attn

            assert standin.is_lent()
            assert flash_attn.__version__.endswith("+standin")
            assert "not those of the flash_attn package" in flash_attn.__doc__
        assert not found()
        assert not standin.is_lent()
        assert importlib.util.find_spec("flash_attn") is None
        assert user._flash_varlen_fn is None
        assert mapping == import_utils.PACKAGE_DISTRIBUTION_MAPPING


def test_it_is_given_back_after_a_failure(cuda):
    with pytest.raises(ZeroDivisionError), standin.lent(CPU):
        raise ZeroDivisionError
    assert not standin.is_lent()
    assert not found()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package flash_attn that is installed."""
    place = tmp_path / "flash_attn"
    place.mkdir()
    (place / "__init__.py").write_text("__version__ = '2.8.3'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield place
    sys.modules.pop("flash_attn", None)


def test_an_installed_package_is_never_replaced(cuda, package, monkeypatch):
    monkeypatch.setitem(import_utils.PACKAGE_DISTRIBUTION_MAPPING, "flash_attn", ["flash-attn"])
    with standin.lent(CPU):
        assert found()
        assert not standin.is_lent()
        import flash_attn

        assert flash_attn.__version__ == "2.8.3"


def test_what_transformers_does_not_take_is_not_replaced_either(cuda, package):
    """Another distribution may be importable by the same name, FlashAttention 4 for one."""
    with ExitStack() as stack, pytest.raises(RuntimeError, match="no stand-in replaces it"):
        stack.enter_context(standin.lent(CPU))
    assert importlib.util.find_spec("flash_attn").origin == str(package / "__init__.py")
