"""Arrow arrays made from bytes are those that Arrow makes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given
from hypothesis import strategies as st

from cbsim.record import parquet

NUMBERS = st.integers(-(1 << 62), 1 << 62)


@given(st.lists(st.none() | NUMBERS))
def test_whole_numbers(values: list[int | None]) -> None:
    numbers = np.array([value or 0 for value in values], dtype=np.int64)
    missing = np.array([value is None for value in values], dtype=bool)
    made = parquet.int_array(numbers, missing)
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.int64()))
    assert parquet.int_array(numbers).equals(pa.array(numbers))


@given(st.lists(st.text()))
def test_texts(values: list[str]) -> None:
    try:
        expected = pa.array(values, pa.string())
    except UnicodeEncodeError:  # half a surrogate pair is no text of a file
        return
    made = parquet.text_array(values)
    made.validate(full=True)
    assert made.equals(expected)


@given(st.lists(st.lists(NUMBERS)))
def test_lists(values: list[list[int]]) -> None:
    lengths = np.array([len(part) for part in values], dtype=np.int64)
    made = parquet.list_array(lengths, np.array([number for part in values for number in part], dtype=np.int64))
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.list_(pa.int64())))


@given(st.lists(st.sampled_from("abc")), st.integers(0, 9))
def test_masks_are_read_from_their_bits(values: list[str], skipped: int) -> None:
    found = pc.is_in(parquet.text_array(values), parquet.text_array("ab")).slice(skipped)
    assert parquet.bool_mask(found).tolist() == [value in "ab" for value in values[skipped:]]
