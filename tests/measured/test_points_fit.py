"""Calibration: terms that made the points are found again, bounds and priors hold, a curve does not teach itself."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.measured.own import least_squares as fit
from cbsim.measured.own.least_squares import Prior
from cbsim.measured.points import score
from cbsim.measured.points.published import Means
from cbsim.scenario import terms
from cbsim.scenario.terms import Like, TermsFile
from reports import calibrate_terms

TRUTH = {"base": 2.0, "slope": 0.5}
PRIORS = {"base": Prior(1.7, 2.0, 0.1), "slope": Prior(0.6, 0.5, 0.02)}
AT = np.arange(1.0, 21.0)
CURVES = [str(int(at) % 4) for at in AT]


def errors(terms: Mapping[str, float], measured: np.ndarray | None = None) -> fit.Floats:
    """Two metrics of servers that take base + slope x, and base + 2 slope x."""
    truth = times(TRUTH) if measured is None else measured
    return np.log(times(terms) / truth)


def evaluate(measured: np.ndarray | None = None, slower: float = 1.0) -> fit.Evaluate:
    """Errors, and derivatives by finite differences; `slower` multiplies the latter, as a rough run may."""

    def both(terms: Mapping[str, float], requests: int) -> tuple[fit.Floats, fit.Floats]:
        del requests
        here = errors(terms, measured)
        moved = [errors({**terms, name: terms[name] + prior.step}, measured) for name, prior in PRIORS.items()]
        steps = np.array([prior.step for prior in PRIORS.values()])[:, None, None]
        return here, slower * (np.array(moved) - here) / steps

    return both


def times(terms: Mapping[str, float]) -> np.ndarray:
    return np.stack([terms["base"] + terms["slope"] * AT, terms["base"] + 2 * terms["slope"] * AT], axis=1)


def test_terms_that_made_the_points_are_found_again() -> None:
    """The priors' pull is what TRUST says: far less than 20 points of exact data."""
    found = fit.solve(PRIORS, evaluate(), [10] * 8)
    assert found.terms == {name: pytest.approx(value, rel=0.01) for name, value in TRUTH.items()}
    assert np.abs(found.errors).max() < 0.01


def test_one_wild_point_hardly_moves_them() -> None:
    measured = times(TRUTH)
    measured[3] *= 3.0
    found = fit.solve(PRIORS, evaluate(measured), [10] * 8)
    assert found.terms == {name: pytest.approx(value, rel=0.1) for name, value in TRUTH.items()}


def test_a_term_is_never_below_its_least() -> None:
    """The truth is a base of 2, and 2.5 is the least allowed: it is held there, and the slope makes up for it."""
    priors = {**PRIORS, "base": Prior(3.0, 2.0, 0.1, 2.5)}
    found = fit.solve(priors, evaluate(), [10] * 8)
    assert found.terms["base"] == 2.5
    assert 0.4 < found.terms["slope"] < 0.5


def test_a_term_without_data_keeps_its_prior() -> None:
    priors = {**PRIORS, "unseen": Prior(7.0, 1.0, 1.0)}

    def blind(terms: Mapping[str, float], requests: int) -> tuple[fit.Floats, fit.Floats]:
        here, slopes = evaluate()(terms, requests)
        return here, np.concatenate([slopes, np.zeros((1, *here.shape))])

    assert fit.solve(priors, blind, [10]).terms["unseen"] == pytest.approx(7.0)


def test_what_is_before_the_engine_adds_to_ttft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A term of one card has no derivative for points of another; TPOT has none at all."""
    monkeypatch.setattr(calibrate_terms, "build", lambda point, cost, requests: SimpleNamespace(cost=cost))
    priors = {"front_s@x": Prior(0.1, 0.1, 0.01), "front_s@y": Prior(0.2, 0.1, 0.01)}
    of = calibrate_terms.calibrations()["vllm-dense"].model_copy(
        update={"usual": None, "scopes": {}, "gpus": (), "more": priors}
    )
    point = SimpleNamespace(gpus=1, system="y", version="")
    made = calibrate_terms._perturbed(of, point, {"front_s@x": 0.1, "front_s@y": 0.2}, 10, slopes=True)  # type: ignore[arg-type]
    assert made.waits_s == 0.2 and made.perturbed == {}
    assert made.front_s == {0: 0.0, 1: pytest.approx(1.0)}


def test_a_left_out_curve_teaches_nothing() -> None:
    """Curve 2's points are a fifth too slow: without it the truth is found, with it, not quite."""
    measured = times(TRUTH)
    measured[[name == "2" for name in CURVES]] *= 1.2
    found = fit.solve(PRIORS, evaluate(measured), [10] * 8)
    left_out = calibrate_terms.left_out(found, PRIORS, CURVES)
    assert sorted(left_out) == ["0", "1", "2", "3"]
    assert left_out["2"] == {name: pytest.approx(value, rel=0.03) for name, value in TRUTH.items()}
    slow, right = (times(left_out[name]).mean() for name in ("1", "2"))
    assert slow > right


# -- how sure ---------------------------------------------------------------------------------------------------------


NAMED = {"name": "made-up", "about": "", "backend": "vllm", "systems": ["card"], "models": ["m"], "weights": ["fp8"]}
KNOWN = {"family": "dense", "tables": {"card": "vllm_0.1.0"}, "routing": "balanced", "fastest": True, "terms": {}}
RANGE = {"tensor_parallel": [1], "users": [4, 64], "calibrated": "2026-11-23"}


def terms_file(curves: Mapping[str, list[float]], prompt: int = 1024, output: int = 1024) -> TermsFile:
    """Curves with these residuals of both metrics."""
    residuals = {name: [{"users": 4, "ttft": r, "tpot": r} for r in values] for name, values in curves.items()}
    lengths = {"prompt": prompt, "output": output, "terms": {}}
    made = {name: lengths | {"residuals": values} for name, values in residuals.items()}
    return TermsFile.model_validate({**NAMED, **KNOWN, **RANGE, "curves": made})


def test_an_interval_is_two_order_statistics() -> None:
    """Of 19 residuals the 2nd smallest and largest: floor(0.1 x 20) = 2."""
    values = [i / 100 for i in range(-9, 10)]
    found = terms.interval(terms_file({"a": values}), "tpot", Like(1024, 1024))
    assert found == (pytest.approx(exp(-0.08)), pytest.approx(exp(0.08)), 19)
    assert found.holds(1.0) and not found.holds(exp(0.085))


def test_too_few_residuals_give_no_interval() -> None:
    assert terms.interval(terms_file({"a": [0.0] * 8}), "ttft", Like(1024, 1024)) is None
    assert terms.interval(terms_file({"a": [0.0] * 9}), "ttft", Like(1024, 1024)) is not None


def test_a_curve_does_not_vouch_for_itself() -> None:
    file = terms_file({"a": [0.0] * 10, "b": [0.5] * 10})
    assert terms.interval(file, "tpot", Like(1024, 1024), without="b") == (1.0, 1.0, 10)
    assert terms.coverage(file, "tpot") == (0, 20)


def test_residuals_of_like_lengths_count_where_there_are_enough() -> None:
    file = terms_file({f"a{server}": [0.0] * 3 for server in range(5)})
    longer = terms_file({f"b{server}": [0.5] * 3 for server in range(5)}, prompt=8192)
    both = file.model_copy(update={"curves": {**file.curves, **longer.curves}})
    assert terms.interval(both, "tpot", Like(8192, 1024)) == (pytest.approx(exp(0.5)), pytest.approx(exp(0.5)), 15)
    assert terms.interval(both, "tpot", Like(1024, 8192)) == (1.0, pytest.approx(exp(0.5)), 30)
    assert terms.interval(both, "tpot") == (1.0, pytest.approx(exp(0.5)), 30), "of lengths that nobody told"


def test_residuals_of_one_server_are_too_alike() -> None:
    """15 of four servers whose prompts are as long are not enough: all residuals count."""
    file = terms_file({"a": [0.0] * 15})
    longer = terms_file({f"b{server}": [0.5] * 4 for server in range(4)}, prompt=8192)
    both = file.model_copy(update={"curves": {**file.curves, **longer.curves}})
    assert terms.interval(both, "tpot", Like(8192, 1024)) == (1.0, pytest.approx(exp(0.5)), 31)


def test_a_servers_other_curves_do_not_vouch_for_it() -> None:
    """Curve c is curve b's server on another day."""
    file = terms_file({"a": [0.0] * 10, "b": [0.5] * 10, "c": [0.5] * 10})
    server = {
        name: curve.model_copy(update={"server": "b" if name == "c" else name}) for name, curve in file.curves.items()
    }
    assert terms.interval(file.model_copy(update={"curves": server}), "tpot", without="c") == (1.0, 1.0, 10)


def test_residuals_of_the_card_and_of_as_many_users_come_first() -> None:
    """15 of 4 users on each of two cards; of other users there are too few."""
    one, other = (terms_file({f"{of}{n}": [of] * 3 for n in range(5)}) for of in (0.1, 0.2))
    cards = {
        name: curve.model_copy(update={"system": card})
        for card, file in (("x", one), ("y", other))
        for name, curve in file.curves.items()
    }
    file = one.model_copy(update={"curves": cards})
    for card, users, value in (("x", 4, 0.1), ("y", 8, 0.2), ("y", 99, 0.2)):
        found = terms.interval(file, "tpot", Like(1024, 1024, card, users))
        assert found == (pytest.approx(exp(value)), pytest.approx(exp(value)), 15)


def test_an_interval_that_says_nothing_is_withdrawn() -> None:
    file = terms_file({"a": [0.0] * 10 + [0.8] * 10})
    assert terms.interval(file, "tpot") is None
    assert terms.coverage(file, "tpot") == (0, 0)


@given(st.integers(0, 2**32 - 1))
def test_coverage_is_what_is_promised(seed: int) -> None:
    """Theory: with exchangeable residuals an end is passed with probability k / (n + 1). 400 new residuals beside 59
    old ones fall inside with probability 1 - 2 x 6 / 60 = 0.8 in the mean over draws of the old ones; five draws of
    these have a standard error near 0.023.
    """
    random = np.random.default_rng(seed)
    shares = []
    for _ in range(5):
        found = terms.interval(terms_file({"a": random.normal(0.0, 0.1, size=59).tolist()}), "tpot", Like(1, 1))
        assert found is not None
        new = np.exp(random.normal(0.0, 0.1, size=400))
        shares.append(np.mean((new >= found.low) & (new <= found.high)))
    assert abs(np.mean(shares) - 0.8) < 5 * 0.023


def test_logarithms_are_measured_over_predicted() -> None:
    """A server that is slower than predicted has a positive residual, so an interval above 1."""
    found = terms.interval(terms_file({"a": [log(1.2)] * 10}), "tpot", Like(1024, 1024))
    assert found is not None and found.low == pytest.approx(1.2)


def test_a_server_that_serves_nobody_has_no_means() -> None:
    """All requests were refused: that is why there is no prediction, in a calibration as in a score."""
    served = {"ttft_s": {"n": 2, "mean": 0.5}, "tpot_s": {"n": 2, "mean": 0.02}}
    assert score.means_of(served) == Means(500.0, 20.0)
    for metric in served:
        assert "no request got two tokens" in str(score.means_of({**served, metric: {"n": 0}}))


def test_a_server_that_serves_nobody_is_no_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its point has a reason for having no prediction; a run that died is said to have failed."""
    monkeypatch.setattr(score, "predict", lambda *_: [score.UNSERVED, "its process died"])
    built: Any = [SimpleNamespace(point=name, scenario=None) for name in ("unserved", "died")]
    predicted, rest = score.score(built, *[cast("Any", None)] * 3)
    assert not predicted
    assert rest == [("unserved", (score.UNSERVED,)), ("died", ("the run failed: its process died",))]
