"""Terms of a cost model by least squares with priors: the solver, and the usual priors of tables.

Terms come from Gauss-Newton on the logarithms of predicted over measured TTFT and TPOT. Every term has a prior: a value
and a width from typical costs, which bound it where the data hold little information. Errors beyond HUBER count less.
The project's own calibrations (reports/calibrate_terms.py) and fits to a user's server share both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cbsim.record.tables import Floats
from cbsim.scenario.terms import FRONT

TAIL = 1.2816  # standard deviations from the centre to the ends of an 80 % interval
HUBER = 0.1
WEIGHTS = np.array([1.0, 2.5])  # weights of TTFT and TPOT errors: bars are tighter for TPOT
TRUST = 0.03  # the error in a point's TPOT that weighs as much as a term one width off its prior


class Prior(NamedTuple):
    """The expected value of a term, plus or minus `width`, never below `least`; derivatives are taken over `step`."""

    value: float
    width: float
    step: float
    least: float = 0.0


COMMON: Mapping[str, Prior] = {
    "step_s": Prior(5e-4, 5e-4, 2e-4),
    "elementwise": Prior(1.3, 0.5, 0.3),
    "decode_attention": Prior(1.2, 0.3, 0.2, 0.4),
    "products": Prior(1.0, 0.05, 0.05, 0.7),
    "row_s": Prior(3e-6, 5e-6, 3e-6),
    FRONT: Prior(0.015, 0.02, 0.01),
}
ENGINE = {
    **COMMON,
    "layer_s": Prior(1e-5, 1e-5, 3e-6),
    "launch_s_per_layer": Prior(1e-4, 1e-4, 5e-5),
    "large_products": Prior(1.1, 0.1, 0.05, 0.7),
}
MIXTURE = {
    **ENGINE,
    "layer_s": Prior(3e-5, 2e-5, 5e-6),
    "launch_s_per_layer": Prior(4e-4, 4e-4, 1e-4),
    "experts": Prior(1.0, 0.15, 0.1, 0.5),
}

Evaluate = Callable[[Mapping[str, float], int], tuple[Floats, Floats]]
"""A function from terms and requests a user to the logarithms of predicted over measured TTFT and TPOT of each point or
load, and to their derivatives in the terms, [term, point, metric].
"""


class Solution(NamedTuple):
    """The terms; and close to them the points' errors and their derivatives, at the terms `at`."""

    terms: dict[str, float]
    at: dict[str, float]
    errors: Floats
    slopes: Floats


def solve(priors: Mapping[str, Prior], evaluate: Evaluate, rounds: Sequence[int], huber: float = HUBER) -> Solution:
    """Solve for the terms, starting at the priors, in rounds of so many requests a user."""
    terms = {name: prior.value for name, prior in priors.items()}
    for requests in rounds:
        at = terms
        errors, slopes = evaluate(at, requests)
        terms = step(at, priors, errors, slopes, huber)
    return Solution(terms, at, errors, slopes)


def step(
    terms: Mapping[str, float], priors: Mapping[str, Prior], errors: Floats, slopes: Floats, huber: float = HUBER
) -> dict[str, float]:
    """Return improved terms: least squares with the priors and lower bounds."""
    names, widths = list(priors), np.array([prior.width for prior in priors.values()])
    at = np.array([terms[name] for name in names])
    expected = np.array([prior.value for prior in priors.values()])
    least = np.array([prior.least for prior in priors.values()])
    sides = (errors * WEIGHTS).ravel()
    matrix = (slopes * WEIGHTS).reshape(len(names), -1).T * widths  # derivatives per width
    matrix = np.vstack([matrix, TRUST * WEIGHTS[1] * np.eye(len(names))])
    target = -np.concatenate([sides, TRUST * WEIGHTS[1] * (at - expected) / widths])
    weights = np.ones(len(target))
    for _ in range(5):
        offsets = _bounded(matrix * weights[:, None], target * weights, (least - at) / widths)
        left = np.abs(target - matrix @ offsets)
        weights[: len(sides)] = np.sqrt(np.minimum(1.0, huber / np.maximum(left[: len(sides)], 1e-12)))
    return dict(zip(names, np.maximum(at + offsets * widths, least).tolist(), strict=True))


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
