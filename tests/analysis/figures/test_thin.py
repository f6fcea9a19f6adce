"""Thinning for drawing keeps what is read off a picture: means, extremes, shares."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.figures.axis import binned, cdf, chosen, filled

PIECES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(-50, 50)), max_size=60)


def _pieces(drawn: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gap before, length, value) as start, end, value."""
    gaps, lengths, values = (np.array([one[i] for one in drawn], dtype=float) for i in range(3))
    end = np.cumsum(gaps + lengths)
    return end - lengths, end, values


@given(PIECES)
def test_gaps_are_filled_with_zero_and_nothing_else_changes(drawn: list[tuple[int, int, int]]) -> None:
    start, end, y = _pieces(drawn)
    edges, values = filled(start, end, y)
    assert (np.diff(edges) > 0).all()
    assert len(edges) == len(values) + bool(len(values))
    assert values @ np.diff(edges) == y @ (end - start)
    for left, right, value in zip(edges[:-1], edges[1:], values, strict=True):
        inside = (start <= left) & (right <= end) & (end > start)
        assert value == (y[inside][0] if inside.any() else 0.0)


@given(PIECES, st.integers(1, 20))
def test_bins_keep_the_integral_and_the_extremes(drawn: list[tuple[int, int, int]], bins: int) -> None:
    """The means of bins, times their widths, add up to the integral; the least and the greatest value are drawn."""
    edges, y = filled(*_pieces(drawn))
    made = binned(edges, y, bins)
    assert made.exact == (len(y) <= bins)
    assert made.mean[:-1] @ np.diff(made.x) == pytest.approx(float(y @ np.diff(edges)), abs=1e-9)
    if len(y):
        assert (made.low.min(), made.high.max()) == (y.min(), y.max())
        assert (made.x[0], made.x[-1]) == (edges[0], edges[-1])
    assert ((made.low <= made.mean) & (made.mean <= made.high)).all()


@given(PIECES.filter(len), st.integers(1, 20))
def test_each_bin_has_the_extremes_of_what_holds_in_it(drawn: list[tuple[int, int, int]], bins: int) -> None:
    edges, y = filled(*_pieces(drawn))
    made = binned(edges, y, bins)
    for left, right, low, high in zip(made.x[:-1], made.x[1:], made.low, made.high, strict=False):
        held = y[(edges[1:] > left) & (edges[:-1] < right)]
        assert (low, high) == (held.min(), held.max())


@given(st.integers(0, 5000), st.integers(2, 300))
def test_chosen_are_evenly_spaced_with_both_ends(n: int, most: int) -> None:
    indices = chosen(n, most)
    assert len(indices) == min(n, most)
    if n:
        assert (indices[0], indices[-1]) == (0, n - 1)
        gaps = np.diff(indices)
        assert n == 1 or 0 < gaps.min() >= gaps.max() - 1 - (n > most)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(1, 5)), min_size=1, max_size=80), st.integers(2, 30))
def test_every_point_of_a_distribution_is_exact(drawn: list[tuple[int, int]], most: int) -> None:
    """Share of the values that are <= x, however few points are left; the least and the greatest value are there."""
    values, counts = np.array([float(v) for v, _ in drawn]), np.array([n for _, n in drawn])
    x, share = cdf(values, counts, most)
    every = np.repeat(values, counts)
    assert len(x) <= most
    assert (np.diff(x) > 0).all()
    assert (x[0], x[-1], share[-1]) == (every.min(), every.max(), 1.0)
    for at, part in zip(x, share, strict=True):
        assert part == float(Fraction(int((every <= at).sum()), len(every)))


def test_nothing_gives_nothing() -> None:
    none = np.empty(0)
    assert [len(part) for part in filled(none, none, none)] == [0, 0]
    assert len(binned(none, none).x) == len(cdf(none)[0]) == len(chosen(0, 5)) == 0
