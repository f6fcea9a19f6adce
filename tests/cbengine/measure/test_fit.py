"""Least squares without negative coefficients: the optimum by brute force, and what the fit promises of noisy steps."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")

from cbengine.measure.calibrate import OUTLIER, SYSTEMATIC, Floats, fit, non_negative

TRUE = np.array([2e6, 3e4, 800.0, 0.0, 5e3, 40.0])  # nanoseconds, as a calibration's terms; one of them costs nothing


# -- the optimum ------------------------------------------------------------------------------------------------------


def loss(matrix: Floats, target: Floats, x: Floats) -> float:
    return float(np.square(matrix @ x - target).sum())


def brute_force(matrix: Floats, target: Floats) -> float:
    """The least loss over x >= 0: of all sets of columns, the unconstrained optimum, if it is not negative."""
    columns = range(matrix.shape[1])
    best = loss(matrix, target, np.zeros(matrix.shape[1]))
    for chosen in chain.from_iterable(combinations(columns, size) for size in range(1, len(columns) + 1)):
        x = np.zeros(matrix.shape[1])
        x[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
        if (x >= 0).all():
            best = min(best, loss(matrix, target, x))
    return best


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, Floats]:
    """Up to 4 columns, some of them equal, opposite or zero, of very different sizes."""
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    whole = st.lists(st.integers(-4, 4), min_size=rows, max_size=rows)
    matrix = np.array([draw(whole) for _ in range(columns)], dtype=float).T
    if draw(st.booleans()):
        matrix *= 10.0 ** np.array([draw(st.integers(-9, 9)) for _ in range(columns)])
    return matrix, np.array(draw(whole), dtype=float) * 10.0 ** draw(st.integers(-6, 6))


@example((np.zeros((2, 2)), np.ones(2)))
@example((np.ones((1, 1)), np.zeros(1)))
@example((np.array([[1.0, 1.0], [1.0, 1.0]]), np.ones(2)))
@given(problems())
def test_it_is_the_optimum(problem: tuple[Floats, Floats]) -> None:
    """No x >= 0 is better, and no coefficient is negative."""
    matrix, target = problem
    x = non_negative(matrix, target)
    assert x.shape == (matrix.shape[1],)
    assert (x >= 0).all()
    assert np.isfinite(x).all()
    assert loss(matrix, target, x) <= brute_force(matrix, target) + 1e-9 * float(target @ target)


# -- steps ------------------------------------------------------------------------------------------------------------


def steps(count: int, seed: int) -> Floats:
    """What steps did: a constant, chunks, prefill tokens, pairs, decodes, context. Decode steps and mixed ones."""
    rng = np.random.default_rng(seed)
    chunks = rng.integers(0, 3, count)
    tokens = chunks * rng.integers(1, 100, count)
    rows = rng.integers(1, 17, count)
    return np.column_stack((np.ones(count), chunks, tokens, tokens * 50, rows, rows * rng.integers(16, 160, count)))


def noisy(features: Floats, seed: int, spread: float) -> Floats:
    """Times with an error whose mean is none, a share of the time itself; skewed, as real ones are."""
    rng = np.random.default_rng(seed)
    shape = 1 / spread**2
    measured: Floats = features @ TRUE * rng.gamma(shape, 1 / shape, len(features))
    return measured


def check_predictions(found: Any, features: Floats, share: float) -> None:
    """Steps never seen are predicted within `share`."""
    predicted, true = features @ np.array(found.coefficients), features @ TRUE
    assert np.abs(predicted / true - 1).max() < share


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_out(seed: int) -> None:
    """10 % of noise a step leaves 2 % in the predictions of 1,000 steps: 6 terms share an error of 0.1 x sqrt(6 /
    1000) = 0.8 %. The reported errors are those of the noise.
    """
    features = steps(1000, seed)
    found = fit(features, noisy(features, seed, 0.1))
    check_predictions(found, steps(300, seed + 100), 0.025)
    assert 0.055 < found.errors.median < 0.08  # of a normal: 0.0674
    assert 0.17 < found.errors.p95 < 0.23  # of a normal: 0.196
    assert found.errors.used > 990


def test_the_sum_is_unbiased() -> None:
    """Over many fits predicted and measured sums agree: a fit relative to the measured times would be short by the
    noise's variance, 4 % here.
    """
    features = steps(400, 7)
    errors = []
    for seed in range(60):
        measured = noisy(features, seed, 0.2)
        found = fit(features, measured)
        errors.append(float((features @ np.array(found.coefficients)).sum() / measured.sum() - 1))
        assert found.errors.total == pytest.approx(errors[-1], abs=0.01)
    assert abs(float(np.mean(errors))) < 0.003


@pytest.mark.parametrize("factor", [0.01, 20.0])
def test_outliers_are_left_out(factor: float) -> None:
    """One step in twenty that took twenty times as long, or almost no time, moves nothing, and is counted as unused."""
    features = steps(1000, 3)
    measured = noisy(features, 3, 0.02)
    odd = np.arange(1000) % 20 == 0
    measured[odd] *= factor
    found = fit(features, measured)
    check_predictions(found, steps(300, 4), 0.01)
    assert 940 <= found.errors.used <= 950
    assert found.errors.median < 0.02


def test_an_ordinary_error_is_no_outlier() -> None:
    """Steps stay in up to OUTLIER times the median error, so a noisy probe does not lose most of its steps, and up
    to SYSTEMATIC, so that a calm one does not lose what the form fits badly.
    """
    features = np.ones((101, 1))
    for median, bound in ((0.05, OUTLIER * 0.05), (0.005, SYSTEMATIC)):
        measured = 1e6 * (1 + 2 * median * np.linspace(-1, 1, 101))
        assert fit(features, measured).errors.used == 101
        measured[0] = 1e6 * (1 + 0.9 * bound)
        assert fit(features, measured).errors.used == 101
        measured[0] = 1e6 * (1 + 1.2 * bound)
        assert fit(features, measured).errors.used == 100


def test_a_weight_is_worth_as_many_steps() -> None:
    """A kind of step that came ninety times does not drown another that came ten times: weights make them equal."""
    measured = np.array([1e6] * 90 + [1.1e6] * 10)
    (plain,) = fit(np.ones((100, 1)), measured).coefficients
    (even,) = fit(np.ones((100, 1)), measured, np.array([1 / 90] * 90 + [1 / 10] * 10)).coefficients
    assert plain == pytest.approx(1.01e6, rel=1e-3)
    assert even == pytest.approx(1.05e6, rel=5e-3)
