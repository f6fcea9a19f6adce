"""The project's calibrations: their points and priors, and the computation of the terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from math import log
from typing import NamedTuple

import numpy as np

from cbsim.errors import ScenarioError
from cbsim.measured.points import fit
from cbsim.measured.points.build import REQUESTS_A_USER, ROUTING, CannotBuildError, build, engine_of, model_of
from cbsim.measured.points.fit import Prior, Solution
from cbsim.measured.points.predict import predict
from cbsim.measured.points.published import HOPPER, Means, Point
from cbsim.scenario.terms import FRONT, Curve, Residual, Term, TermsFile, resolve
from cbsim.sweeps.work import Executor

ROUGH_REQUESTS = 5  # requests a user in the runs from which derivatives are taken
TAIL = 1.2816  # standard deviations from the centre to the ends of an 80 % interval
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
        return [
            each
            for each in points
            if each.inferencex
            and each.backend == self.backend
            and each.system in self.systems
            and each.model_name in self.models
        ]


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


def calibrate(
    name: str, points: Sequence[Point], executor: Executor, report: Callable[[str], None] = lambda _: None
) -> TermsFile:
    """Calibrate terms on those points of a calibration that can be built, with intervals from leaving out each curve.
    Raises ScenarioError.
    """
    calibration = CALIBRATIONS[name]
    used = [each for each in calibration.points(points) if _buildable(each)]
    if len({each.curve for each in used}) < 2:
        raise ScenarioError(f"{name}: {len(used)} points of {calibration.about} can be built: too few to calibrate on")

    def evaluate(terms: Mapping[str, float], requests: int = REQUESTS_A_USER) -> fit.Floats:
        errors = _errors(used, [terms] * len(used), executor, requests, fastest=calibration.fastest)
        ttft, tpot = np.abs(np.expm1(errors)).mean(axis=0)
        values = ", ".join(f"{name} {value:.3g}" for name, value in terms.items())
        report(f"{requests} requests a user: TTFT {ttft:.1%}, TPOT {tpot:.2%}: {values}")
        return errors

    solution = fit.solve(calibration.priors, evaluate, partial(evaluate, requests=ROUGH_REQUESTS))
    left_out = fit.left_out(solution, calibration.priors, [each.curve for each in used])
    own_terms = [left_out[each.curve] for each in used]
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
        terms=_terms(solution, left_out),
        curves=_curves(used, left_out, errors),
    )


def _buildable(point: Point) -> bool:
    try:
        build(point, {})
    except CannotBuildError:
        return False
    return True


def _errors(
    points: Sequence[Point], terms: Sequence[Mapping[str, float]], executor: Executor, requests: int, *, fastest: bool
) -> fit.Floats:
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


def _terms(solution: Solution, left_out: Mapping[str, Mapping[str, float]]) -> dict[str, Term]:
    """Return terms with jackknife intervals: the variance is (n - 1)/n times the sum of squares about the mean."""
    terms = {}
    for name, value in solution.terms.items():
        without = np.array([each[name] for each in left_out.values()])
        spread = TAIL * float(np.sqrt((len(without) - 1) * without.var()))
        low, high = max(0.0, value - spread), value + spread
        terms[name] = Term(value=_short(value), low=_short(low), high=_short(high))
    return terms


def _curves(
    points: Sequence[Point], left_out: Mapping[str, Mapping[str, float]], errors: fit.Floats
) -> dict[str, Curve]:
    curves = {}
    for hash_, terms in left_out.items():
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
