"""Calibration of the terms: Gauss-Newton on the logarithms of predicted over measured TTFT and TPOT.

Every term has a prior: a value and a width from typical costs, which bound it where the points hold little information.
Points with errors beyond HUBER count less. A curve is predicted with terms calibrated without it: the derivatives at
the solution make that a linear problem, and the prediction is simulated again with its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
HUBER = 0.1
WEIGHTS = np.array([1.0, 2.5])  # weights of TTFT and TPOT errors: bars are tighter for TPOT
TRUST = 0.03  # the error in a point's TPOT that weighs as much as a term one width off its prior


class Prior(NamedTuple):
    """The expected value of a term, plus or minus `width`; a derivative is taken over `step`; the term is never below
    `least`.
    """

    value: float
    width: float
    step: float
    least: float = 0.0


Evaluate = Callable[[Mapping[str, float]], Floats]
"""A function from terms to the logarithms of predicted over measured TTFT and TPOT of each point."""


class Solution(NamedTuple):
    """A calibration's terms, the points' errors with them, and the derivatives of the errors, [term, point, metric]."""

    terms: dict[str, float]
    errors: Floats
    slopes: Floats


def solve(priors: Mapping[str, Prior], evaluate: Evaluate, rough: Evaluate, rounds: int = 3) -> Solution:
    """Solve for the terms, starting at the priors. Derivatives are taken once, at the priors, by `rough`, which may use
    shorter runs: the terms are additive, so derivatives hardly change.
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
    """Return improved terms by the chosen points (default all): least squares with the priors and lower bounds."""
    use = np.ones(len(errors), bool) if chosen is None else chosen
    names, widths = list(priors), np.array([prior.width for prior in priors.values()])
    at = np.array([terms[name] for name in names])
    expected = np.array([prior.value for prior in priors.values()])
    least = np.array([prior.least for prior in priors.values()])
    sides = (errors[use] * WEIGHTS).ravel()
    matrix = (slopes[:, use] * WEIGHTS).reshape(len(names), -1).T * widths  # derivatives per width
    matrix = np.vstack([matrix, TRUST * WEIGHTS[1] * np.eye(len(names))])
    target = -np.concatenate([sides, TRUST * WEIGHTS[1] * (at - expected) / widths])
    weights = np.ones(len(target))
    for _ in range(5):
        offsets = _bounded(matrix * weights[:, None], target * weights, (least - at) / widths)
        left = np.abs(target - matrix @ offsets)
        weights[: len(sides)] = np.sqrt(np.minimum(1.0, HUBER / np.maximum(left[: len(sides)], 1e-12)))
    return dict(zip(names, (at + offsets * widths).tolist(), strict=True))


def _bounded(matrix: Floats, target: Floats, least: Floats) -> Floats:
    """Solve least squares with every unknown at least `least`: those that would be lower are fixed there one by one."""
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
    """Return for each curve the terms calibrated on the points of all other curves."""
    names = np.array(curves)
    return {
        curve: step(solution.terms, priors, solution.errors, solution.slopes, names != curve)
        for curve in dict.fromkeys(curves)
    }
