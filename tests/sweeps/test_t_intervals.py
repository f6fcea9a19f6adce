"""Student's t without a library of statistics: against printed tables, and against what an interval promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.sweeps import intervals

TABLE = [  # tail, degrees of freedom, quantile: as textbooks print them, four digits
    (0.1, 1, 3.078),
    (0.05, 1, 6.314),
    (0.025, 1, 12.706),
    (0.01, 2, 6.965),
    (0.025, 3, 3.182),
    (0.005, 5, 4.032),
    (0.001, 7, 4.785),
    (0.025, 10, 2.228),
    (0.01, 19, 2.539),
    (0.005, 30, 2.750),
    (0.001, 31, 3.375),
    (0.05, 100, 1.660),
]


@pytest.mark.parametrize(("tail", "freedom", "expected"), TABLE)
def test_quantiles_are_those_of_the_table(tail: float, freedom: int, expected: float) -> None:
    """Half a unit of the last printed digit."""
    assert intervals.t_quantile(1 - tail, freedom) == pytest.approx(expected, abs=0.5001e-3)


def test_the_first_two_have_closed_forms() -> None:
    """Of one degree of freedom tan(pi (1/2 - tail)), of two (1 - 2 tail) / sqrt(2 tail (1 - tail)); also far out."""
    for tail in (0.3, 1e-3, 1e-6):
        assert intervals.t_quantile(1 - tail, 1) == pytest.approx(math.tan(math.pi * (0.5 - tail)), rel=1e-6)
        second = (1 - 2 * tail) / math.sqrt(2 * tail * (1 - tail))
        assert intervals.t_quantile(1 - tail, 2) == pytest.approx(second, rel=1e-6)


@given(tail=st.floats(1e-5, 0.4), freedom=st.integers(1, 200))
def test_quantiles_fall_with_tail_and_freedom(tail: float, freedom: int) -> None:
    """Fatter tails and fewer values need wider intervals."""
    here = intervals.t_quantile(1 - tail, freedom)
    assert here > intervals.t_quantile(1 - tail * 1.1, freedom) > 0
    assert here > intervals.t_quantile(1 - tail, freedom + 1)


def test_intervals_miss_as_often_as_they_say() -> None:
    """Of normal values, a tail of 5 % on each side: of 4,000 intervals 400 miss, give or take 4 standard errors."""
    rng, count = np.random.default_rng(5), 4000
    made = [intervals.of_mean(rng.normal(3.0, 2.0, 6).tolist(), 0.05) for _ in range(count)]
    for missed in (sum(at.low > 3 for at in made), sum(at.high < 3 for at in made)):
        assert abs(missed - 0.05 * count) < 4 * math.sqrt(0.05 * 0.95 * count)


def test_all_of_some_is_not_all_of_all() -> None:
    """Where each of n trials met it, the share is at least tail^(1/n): what n trials would all meet so often."""
    at = intervals.of_all(300, 0.01)
    assert at.low**300 == pytest.approx(0.01)
    assert (at.mean, at.high) == (1, 1)
    assert intervals.of_all(0, 0.01).low == 0
