"""Interpolation in measured tables: exact where measured, linear between, clamped below, a line above."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.cost.table import Ladder

axis = st.lists(st.integers(0, 4096), min_size=1, max_size=5, unique=True).map(sorted)
times = st.floats(0, 1e6)


@st.composite
def ragged(draw: st.DrawFn) -> dict[tuple[int, int, int], float]:
    """A table of three axes in which every value of one has its own values of the next."""
    points = {(x, y, z) for x in draw(axis) for y in draw(axis) for z in draw(axis)}
    return {at: draw(times) for at in sorted(points)}


@given(table=ragged(), data=st.data())
def test_measured_points_are_returned_as_they_are(
    table: dict[tuple[int, int, int], float], data: st.DataObject
) -> None:
    """Whatever the order of the rows, and although the grid is not full; the same as a number of another type."""
    ladder = Ladder(data.draw(st.permutations(list(table.items()))))
    for (x, y, z), value in table.items():
        assert ladder(x, y, z) == ladder(float(x), y, z) == value


@given(xs=axis, x=st.floats(0, 5000), data=st.data())
def test_a_curve_is_numpys_interpolation_and_goes_on_as_a_line(xs: list[int], x: float, data: st.DataObject) -> None:
    """Between and below the points as numpy.interp; above the last, the line through the last two."""
    ys = [data.draw(times) for _ in xs]
    expected = float(np.interp(x, xs, ys))
    if x > xs[-1] and len(xs) > 1:
        expected = ys[-1] + (x - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    assert Ladder(((at,), value) for at, value in zip(xs, ys, strict=True))(x) == pytest.approx(expected, abs=1e-6)


@given(xs=axis, ys=axis, zs=axis, share=st.tuples(*[st.floats(0, 1)] * 3), data=st.data())
def test_a_full_grid_is_interpolated_axis_by_axis(
    xs: list[int], ys: list[int], zs: list[int], share: tuple[float, float, float], data: st.DataObject
) -> None:
    """Within a full grid the order of the axes is of no matter: numpy.interp over the last, then the one before."""
    values = np.array([data.draw(times) for _ in product(xs, ys, zs)]).reshape(len(xs), len(ys), len(zs))
    ladder = Ladder(((x, y, z), values[i, j, k]) for (i, x), (j, y), (k, z) in product(*map(enumerate, (xs, ys, zs))))
    at = [points[0] + part * (points[-1] - points[0]) for points, part in zip((xs, ys, zs), share, strict=True)]
    rest = values
    for points, one in zip((zs, ys, xs), reversed(at), strict=True):
        rest = np.apply_along_axis(lambda line, p=points, x=one: np.interp(x, p, line), -1, rest)
    assert ladder(*at) == pytest.approx(float(rest), abs=1e-6)


def test_a_grid_that_is_not_full_by_hand() -> None:
    """Under 0 only one point is known, under 10 two, at other places: each side is read at its own neighbours."""
    ladder = Ladder({(0, 5): 100.0, (10, 0): 200.0, (10, 20): 400.0}.items())
    assert ladder(0, 1000) == 100  # the only value
    assert ladder(10, 5) == 250
    assert ladder(5, 5) == 175  # half-way between 100 and 250
    assert ladder(-3, 5) == 100  # below: the first
    assert ladder(20, 5) == 400  # above: 100, 250, so 400
    assert ladder(10, 30) == 500


def test_a_point_twice_is_our_own_mistake() -> None:
    """Readers merge rows of equal coordinates before."""
    with pytest.raises(AssertionError):
        Ladder([((1, 2), 3.0), ((1, 2), 4.0)])
