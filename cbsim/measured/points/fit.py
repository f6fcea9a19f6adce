"""Calibration of the terms: Gauss-Newton on the logarithms of predicted over measured TTFT and TPOT.

Every term has a prior, a value and a width from what such things take, which bounds it where the points say little.
Points beyond HUBER count less. What predicts a curve is calibrated without it: the derivatives at the solution make
that a linear problem, whose answer is simulated again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
HUBER = 0.1
WEIGHTS = np.array([1.0, 2.5])  # of TTFT and of TPOT: bars are tighter for the latter
TRUST = 0.03  # an error of as much in a point's TPOT weighs like a term one width off its prior


class Prior(NamedTuple):
    """What a term is expected to be, give or take `width`; a derivative is taken over `step`; it is never below
    `least`.
    """

    value: float
    width: float
    step: float
    least: float = 0.0


Evaluate = Callable[[Mapping[str, float]], Floats]
"""Terms -> for each point the logarithms of predicted over measured TTFT and TPOT."""


class Solution(NamedTuple):
    """Terms, the errors of the points with them, and their derivatives by the terms: [term, point, metric]."""

    terms: dict[str, float]
    errors: Floats
    slopes: Floats


def solve(priors: Mapping[str, Prior], evaluate: Evaluate, rough: Evaluate, rounds: int = 3) -> Solution:
    """From the priors on. Derivatives are taken there, once, by `rough`, which may be shorter runs: terms add up, so
    they hardly change.
    """
    terms = {name: prior.value for name, prior in priors.items()}
    errors, slopes = evaluate(terms), _slopes(terms, priors, rough)
    for _ in range(rounds):
        terms = step(terms, priors, errors, slopes)
        errors = evaluate(terms)
    return Solution(terms, errors, slopes)


def _slopes(terms: Mapping[str, float], priors: Mapping[str, Prior], rough: Evaluate) -> Floats:
    base = rough(terms)
    moved = [rough({**terms, name: terms[name] + prior.step}) - base for name, prior in priors.items()]
    slopes: Floats = np.array(moved) / np.array([prior.step for prior in priors.values()])[:, None, None]
    return slopes


def step(
    terms: Mapping[str, float],
    priors: Mapping[str, Prior],
    errors: Floats,
    slopes: Floats,
    chosen: npt.NDArray[np.bool_] | None = None,
) -> dict[str, float]:
    """Better terms by the points that are chosen (all): least squares with the priors, each at least its least."""
    use = np.ones(len(errors), bool) if chosen is None else chosen
    names, widths = list(priors), np.array([prior.width for prior in priors.values()])
    at = np.array([terms[name] for name in names])
    expected = np.array([prior.value for prior in priors.values()])
    least = np.array([prior.least for prior in priors.values()])
    sides = (errors[use] * WEIGHTS).ravel()
    matrix = (slopes[:, use] * WEIGHTS).reshape(len(names), -1).T * widths  # by widths
    matrix = np.vstack([matrix, TRUST * WEIGHTS[1] * np.eye(len(names))])
    target = -np.concatenate([sides, TRUST * WEIGHTS[1] * (at - expected) / widths])
    weights = np.ones(len(target))
    for _ in range(5):
        offsets = _bounded(matrix * weights[:, None], target * weights, (least - at) / widths)
        left = np.abs(target - matrix @ offsets)
        weights[: len(sides)] = np.sqrt(np.minimum(1.0, HUBER / np.maximum(left[: len(sides)], 1e-12)))
    return dict(zip(names, (at + offsets * widths).tolist(), strict=True))


def _bounded(matrix: Floats, target: Floats, least: Floats) -> Floats:
    """Least squares with every unknown at least `least`: those that would fall below are held there, one by one."""
    fixed = np.zeros(len(least), bool)
    while True:
        offsets = np.where(fixed, least, 0.0)
        free = ~fixed
        offsets[free] = np.linalg.lstsq(matrix[:, free], target - matrix @ offsets, rcond=None)[0]
        below = np.where(free, least - offsets, 0.0)
        if below.max(initial=0.0) <= 1e-12:
            return offsets
        fixed[int(below.argmax())] = True


def left_out(solution: Solution, priors: Mapping[str, Prior], curves: Sequence[str]) -> dict[str, dict[str, float]]:
    """For each curve, terms by the points of all others."""
    names = np.array(curves)
    return {
        curve: step(solution.terms, priors, solution.errors, solution.slopes, names != curve)
        for curve in dict.fromkeys(curves)
    }
