"""The project's calibrations: their points and priors, and the computation of the terms.

Terms come from Gauss-Newton on the logarithms of predicted over measured TTFT and TPOT. Every term has a prior: a value
and a width from typical costs, which bound it where the points hold little information. Points with errors beyond HUBER
count less. A curve is predicted with terms calibrated without it: the derivatives at the solution make that a linear
problem, and the prediction is simulated again with its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from math import log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cbsim.errors import ScenarioError
from cbsim.measured.points.build import REQUESTS_A_USER, ROUTING, CannotBuildError, build, engine_of, model_of
from cbsim.measured.points.published import HOPPER, Means, Point
from cbsim.measured.points.score import predict
from cbsim.scenario.terms import FRONT, Curve, Residual, Term, TermsFile, resolve
from cbsim.sweeps.work import Executor

Floats = npt.NDArray[np.float64]
ROUGH_REQUESTS = 5  # requests a user in the runs from which derivatives are taken
TAIL = 1.2816  # standard deviations from the centre to the ends of an 80 % interval
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


COMMON: Mapping[str, Prior] = {
    "step_s": Prior(5e-4, 5e-4, 2e-4),
    "elementwise": Prior(1.3, 0.5, 0.3),
    "decode_attention": Prior(1.2, 0.3, 0.2, 0.4),
    "products": Prior(1.0, 0.05, 0.05, 0.7),
    "row_s": Prior(3e-6, 5e-6, 3e-6),
    FRONT: Prior(0.015, 0.02, 0.01),
}
LAYER = Prior(1e-5, 1e-5, 3e-6)
LAUNCH = Prior(1e-4, 1e-4, 5e-5)
LARGE = Prior(1.1, 0.1, 0.05, 0.7)


def _reduces(*gpus: int) -> dict[str, Prior]:
    return {f"reduce_s@{each}": Prior((1 + np.log2(each)) * 1e-6, 4e-6, 2e-6) for each in gpus}


class Calibration(NamedTuple):
    """A choice of points, and the terms that are calibrated on them."""

    about: str
    backend: str
    systems: tuple[str, ...]
    experts: bool
    models: tuple[str, ...]
    priors: Mapping[str, Prior]
    fastest: bool = True
    """Whether matrix products take the time of the card's fastest engine where the engine's own tables hold more than
    the kernel: TensorRT-LLM's, and those of block-quantised weights.
    """

    def points(self, points: Sequence[Point]) -> list[Point]:
        """Return the points of InferenceX that this calibration uses; the flags of other sources are unknown."""
        ours = [each for each in points if each.inferencex and each.backend == self.backend]
        return [each for each in ours if each.system in self.systems and each.model_name in self.models]


CALIBRATIONS: Mapping[str, Calibration] = {
    "vllm-dense": Calibration(
        "Dense models on vLLM, H100 and H200: InferenceX's Llama-3.1-70B in FP8, October 2025, vLLM 0.11.",
        "vllm",
        HOPPER,
        False,
        ("Llama-3.1-70B",),
        {
            **{name: prior for name, prior in COMMON.items() if name != "products"},
            "layer_s": LAYER,
            "launch_s_per_layer": LAUNCH,
            **{f"products@{card}": COMMON["products"] for card in HOPPER},
            **{f"large_products@{card}": LARGE for card in HOPPER},
            **_reduces(2, 4, 8),
        },
        fastest=False,
    ),
    "trtllm-dense": Calibration(
        "Dense models on TensorRT-LLM, H200: InferenceX's Llama-3.1-70B in FP8, October 2025.",
        "trtllm",
        ("h200_sxm",),
        False,
        ("Llama-3.1-70B",),
        {**COMMON, "layer_s": LAYER, "launch_s_per_layer": LAUNCH, "large_products": LARGE, **_reduces(2, 4, 8)},
    ),
    "vllm-experts": Calibration(
        "Mixtures of experts on vLLM, H100 and H200: InferenceX's MiniMax-M2.5 in FP8, March 2026, vLLM 0.16 and 0.18.",
        "vllm",
        HOPPER,
        True,
        ("MiniMax-M2.5",),
        {
            **COMMON,
            "layer_s@0.16.0": Prior(6e-5, 3e-5, 5e-6),
            "layer_s@0.18.0": Prior(3e-5, 2e-5, 5e-6),
            "launch_s_per_layer": Prior(4e-4, 4e-4, 1e-4),
            "large_products": LARGE,
            "experts": Prior(1.0, 0.15, 0.1, 0.5),
            **_reduces(4, 8),
        },
    ),
}


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
    errors, base = evaluate(terms), rough(terms)
    moved = [rough({**terms, name: terms[name] + prior.step}) - base for name, prior in priors.items()]
    slopes: Floats = np.array(moved) / np.array([prior.step for prior in priors.values()])[:, None, None]
    for _ in range(rounds):
        terms = step(terms, priors, errors, slopes)
        errors = evaluate(terms)
    return Solution(terms, errors, slopes)


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


def calibrate(
    name: str, points: Sequence[Point], executor: Executor, report: Callable[[str], None] = lambda _: None
) -> TermsFile:
    """Calibrate terms on those points of a calibration that can be built, with intervals from leaving out each curve.
    Raises ScenarioError.
    """
    calibration = CALIBRATIONS[name]
    used = list[Point]()
    for point in calibration.points(points):
        with suppress(CannotBuildError):
            build(point, {})
            used.append(point)
    if len({each.curve for each in used}) < 2:
        raise ScenarioError(f"{name}: {len(used)} points of {calibration.about} can be built: too few to calibrate on")

    def evaluate(terms: Mapping[str, float], requests: int = REQUESTS_A_USER) -> Floats:
        errors = _errors(used, [terms] * len(used), executor, requests, fastest=calibration.fastest)
        ttft, tpot = np.abs(np.expm1(errors)).mean(axis=0)
        values = ", ".join(f"{name} {value:.3g}" for name, value in terms.items())
        report(f"{requests} requests a user: TTFT {ttft:.1%}, TPOT {tpot:.2%}: {values}")
        return errors

    solution = solve(calibration.priors, evaluate, partial(evaluate, requests=ROUGH_REQUESTS))
    without = left_out(solution, calibration.priors, [each.curve for each in used])
    own_terms = [without[each.curve] for each in used]
    errors = _errors(used, own_terms, executor, REQUESTS_A_USER, fastest=calibration.fastest)
    return TermsFile(
        name=name,
        about=calibration.about,
        backend=calibration.backend,
        systems=calibration.systems,
        experts=calibration.experts,
        tables={point.system: engine_of(point) for point in used},
        weights=tuple(sorted({str(model_of(point).weights_dtype) for point in used})),
        routing=ROUTING,
        fastest=calibration.fastest,
        models=calibration.models,
        tensor_parallel=tuple(sorted({each.tensor for each in used})),
        users=(min(each.concurrency for each in used), max(each.concurrency for each in used)),
        calibrated=datetime.now(UTC).date().isoformat(),
        terms=_terms(solution, without),
        curves=_curves(used, without, errors),
    )


def _errors(
    points: Sequence[Point], terms: Sequence[Mapping[str, float]], executor: Executor, requests: int, *, fastest: bool
) -> Floats:
    """Return logarithms of predicted over measured TTFT and TPOT, [point, metric]; each point has its own terms."""
    values = [resolve(t, p.tensor, p.system, p.version) for p, t in zip(points, terms, strict=True)]
    fronts = [known.pop(FRONT, 0.0) for known in values]
    costs = [{"fastest": fastest, **known} for known in values]
    scenarios = [build(point, cost, requests) for point, cost in zip(points, costs, strict=True)]
    errors = []
    for point, front_s, means in zip(points, fronts, predict(scenarios, executor), strict=True):
        if not isinstance(means, Means):
            raise ScenarioError(f"{point.where}: {means}")
        errors.append([log((means.ttft_ms + 1e3 * front_s) / point.ttft_ms), log(means.tpot_ms / point.tpot_ms)])
    return np.array(errors)


def _terms(solution: Solution, curves: Mapping[str, Mapping[str, float]]) -> dict[str, Term]:
    """Return terms with jackknife intervals: the variance is (n - 1)/n times the sum of squares about the mean."""
    terms = {}
    for name, value in solution.terms.items():
        values = np.array([each[name] for each in curves.values()])
        spread = TAIL * float(np.sqrt((len(values) - 1) * values.var()))
        low, high = max(0.0, value - spread), value + spread
        terms[name] = Term(value=_short(value), low=_short(low), high=_short(high))
    return terms


def _curves(points: Sequence[Point], without: Mapping[str, Mapping[str, float]], errors: Floats) -> dict[str, Curve]:
    curves = {}
    for hash_, terms in without.items():
        rows = [(point, error) for point, error in zip(points, errors, strict=True) if point.curve == hash_]
        first = rows[0][0]
        residuals = tuple(
            Residual(users=point.concurrency, ttft=round(-float(error[0]), 4), tpot=round(-float(error[1]), 4))
            for point, error in rows
        )
        short = {name: _short(value) for name, value in terms.items()}
        curves[hash_] = Curve(prompt=first.prompt, output=first.output, terms=short, residuals=residuals)
    return curves


def _short(value: float) -> float:
    """Round to five digits, so that the simulated value is the written one."""
    return float(f"{value:.5g}")
