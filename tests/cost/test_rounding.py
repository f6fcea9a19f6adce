"""Whole nanoseconds are those of `round`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbsim.cost.base import nearest


@given(st.floats(0, 1e300) | st.integers(0, 1 << 53).map(lambda n: n / 2))
def test_nearest_is_round(number: float) -> None:
    """Half to even included: every second half of an integer is such a case."""
    assert nearest(number) == round(number)
