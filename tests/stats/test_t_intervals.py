"""Intervals of what is drawn: how often they miss. The quantiles are in test_student_t.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cbsim.stats import intervals


def test_intervals_miss_as_often_as_they_say() -> None:
    """Of normal values, a tail of 5 % on each side: of 4,000 intervals 400 miss, give or take 4 standard errors."""
    rng, count = np.random.default_rng(5), 4000
    made = [intervals.t_interval(rng.normal(3.0, 2.0, 6).tolist(), 0.9) for _ in range(count)]
    for missed in (sum(at.low > 3 for at in made), sum(at.high < 3 for at in made)):
        assert abs(missed - 0.05 * count) < 4 * math.sqrt(0.05 * 0.95 * count)


def test_all_of_some_is_not_all_of_all() -> None:
    """Where each of n trials met it, the share is at least tail^(1/n): what n trials would all meet so often."""
    at = intervals.of_all(300, 0.01)
    assert at.low**300 == pytest.approx(0.01)
    assert (at.mean, at.high) == (1, 1)
    assert intervals.of_all(0, 0.01).low == 0
