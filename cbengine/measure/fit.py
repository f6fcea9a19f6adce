"""A least-squares fit of coefficients to measured steps, with no coefficient below zero.

A step's error is relative to what the previous fit predicts, so that short steps matter as much as long ones and the
sum over many is unbiased (relative to the measured times, it would come out too small). A step that the operating
system disturbed is an outlier and left out: its error exceeds OUTLIER times the median error, and SYSTEMATIC, below
which the form itself may be at fault and the error is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
OUTLIER = 6.0
SYSTEMATIC = 0.15
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Fit:
    """The `coefficients` of a linear form through `used` of `steps` measured steps. Errors are shares of the measured
    time: the median and the 95th percentile over all steps, and that of the sum.
    """

    coefficients: tuple[float, ...]
    steps: int
    used: int
    median_error: float
    p95_error: float
    total_error: float

    def errors(self) -> dict[str, float]:
        """Return the errors in a coefficient file's fields."""
        shares = {"median": self.median_error, "p95": self.p95_error, "total": self.total_error}
        return {"steps": self.steps, "used": self.used} | {name: round(value, 5) for name, value in shares.items()}

    def __str__(self) -> str:
        errors = f"error of a step: median {self.median_error:.1%}, p95 {self.p95_error:.1%}"
        return f"{errors}; of the sum {self.total_error:+.1%}; {self.used} of {self.steps} steps used"


def fit(features: Floats, measured: Floats, weights: Floats | None = None) -> Fit:
    """Return coefficients c >= 0 such that features @ c is about `measured`. Shapes: features [steps, terms], measured
    [steps] > 0, weights [steps]: the weight of a step's squared error, 1 by default.
    """
    assert len(features) == len(measured)
    root = np.ones(len(measured)) if weights is None else np.sqrt(weights)
    keep = np.ones(len(measured), dtype=bool)
    scale = np.full(len(measured), max(float(np.median(measured)), 1.0))
    for _ in range(ROUNDS):
        shares = root[keep] / scale[keep]
        coefficients = non_negative(features[keep] * shares[:, None], measured[keep] * shares)
        predicted = features @ coefficients
        scale = np.maximum(predicted, 0.01 * max(float(np.median(measured)), 1.0))
        error = np.abs(predicted - measured) / scale
        keep = error <= max(OUTLIER * float(np.median(error)), SYSTEMATIC)
    share = np.abs(predicted - measured) / np.maximum(measured, 1.0)
    return Fit(
        tuple(coefficients.tolist()),
        len(measured),
        int(keep.sum()),
        float(np.median(share)),
        float(np.quantile(share, 0.95)),
        float(predicted[keep].sum() / measured[keep].sum() - 1),
    )


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Solve least squares with x >= 0 (Lawson and Hanson's active set, 1974), columns scaled to one length."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    x, passive = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(10 * a.shape[1]):
        gradient = a.T @ (target - a @ x)
        gradient[passive] = -np.inf
        if passive.all() or gradient.max() <= 1e-10 * max(float(np.linalg.norm(target)), 1e-300):
            break
        passive[int(gradient.argmax())] = True
        x = _inside(a, target, x, passive)
    result: Floats = x / scale
    return result


def _inside(a: Floats, target: Floats, x: Floats, passive: npt.NDArray[np.bool_]) -> Floats:
    """Move from `x` towards the unconstrained optimum of the passive set until a coordinate would become negative."""
    while True:
        trial = np.zeros_like(x)
        trial[passive] = np.linalg.lstsq(a[:, passive], target, rcond=None)[0]
        below = passive & (trial <= 0)
        if not below.any():
            return trial
        step = np.min(x[below] / np.maximum(x[below] - trial[below], 1e-300))
        x = x + step * (trial - x)
        passive &= ~(below & (x <= 1e-15))
        x[~passive] = 0.0
