"""Student's t: the quantiles of printed tables, and intervals that cover what they say they do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.stats.intervals import MOST_SUMMED, of_all, t_interval, t_quantile

TABLE = {  # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2
    (1, 0.90): 3.078,
    (1, 0.975): 12.706,
    (1, 0.999): 318.309,
    (2, 0.95): 2.920,
    (3, 0.99): 4.541,
    (4, 0.975): 2.776,
    (5, 0.995): 4.032,
    (10, 0.975): 2.228,
    (19, 0.999): 3.579,
    (30, 0.95): 1.697,
    (61, 0.975): 2.000,
    (100, 0.999): 3.174,
}


@pytest.mark.parametrize(("degrees", "probability"), TABLE)
def test_quantiles_are_the_tables(degrees: int, probability: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(TABLE[degrees, probability], abs=5.1e-4)


@pytest.mark.parametrize("probability", [0.55, 0.9, 0.975, 0.999, 1 - 1e-6])
def test_closed_forms_and_the_other_side(probability: float) -> None:
    """One degree is Cauchy's distribution, two have a closed form, too; below one half the quantile is negative."""
    assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-9)
    share = 2 * probability - 1
    assert t_quantile(probability, 2) == pytest.approx(share * math.sqrt(2 / (1 - share**2)), rel=1e-9)
    assert t_quantile(1 - probability, 7) == pytest.approx(-t_quantile(probability, 7), rel=1e-9)


@given(st.floats(0.501, 1 - 1e-7))
def test_sum_and_expansion_meet(probability: float) -> None:
    """Where the one takes over from the other the quantile goes on falling, by about what it falls from there on."""
    before, at, after = (t_quantile(probability, MOST_SUMMED + step) for step in (-1, 0, 1))
    assert before >= at >= after
    assert at - after == pytest.approx(before - at, rel=0.05, abs=1e-8)


def test_one_value_says_nothing_and_equal_ones_all() -> None:
    assert t_interval([4.0], 0.95) == (4.0, -math.inf, math.inf)
    assert t_interval([4.0, 4.0, 4.0], 0.95) == (4.0, 4.0, 4.0)


def test_intervals_miss_as_often_as_they_say() -> None:
    """Of normal values, a tail of 5 % on each side: of 4,000 intervals 400 miss, give or take 4 standard errors."""
    rng, count = np.random.default_rng(5), 4000
    made = [t_interval(rng.normal(3.0, 2.0, 6).tolist(), 0.9) for _ in range(count)]
    for missed in (sum(at.low > 3 for at in made), sum(at.high < 3 for at in made)):
        assert abs(missed - 0.05 * count) < 4 * math.sqrt(0.05 * 0.95 * count)


def test_all_of_some_is_not_all_of_all() -> None:
    """Where each of n trials met it, the share is at least tail^(1/n): what n trials would all meet so often."""
    at = of_all(300, 0.01)
    assert at.low**300 == pytest.approx(0.01)
    assert (at.mean, at.high) == (1, 1)
    assert of_all(0, 0.01).low == 0
