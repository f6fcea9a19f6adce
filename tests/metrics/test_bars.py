"""How near is near: errors, bounds and verdicts, on numbers made up."""

from __future__ import annotations

from typing import Any

import pytest

from cbsim.metrics import bars
from cbsim.metrics.bars import BARS, SPEED_UP, Score


def summary(makespan_s: float = 10.0, **others: float) -> dict[str, Any]:
    """A summary with all that is compared; `others` by their place, `tpot_s__p50` or `gpu_active`."""
    found: dict[str, Any] = {"makespan_s": makespan_s, "output_tokens_per_s": 100.0, "gpu_active": 0.75}
    found |= {"tpot_s": {"p50": 0.01, "p99": 0.02}, "ttft_s": {"p50": 0.1}}
    for name, value in others.items():
        first, _, second = name.partition("__")
        if second:
            found[first] = found[first] | {second: value}
        else:
            found[first] = value
    return found


def by_label(scores: list[Score], loop: str) -> dict[str, Score]:
    return {one.bar.label: one for one in scores if one.loop == loop}


def test_a_time_is_compared_by_ratio_and_a_share_by_points() -> None:
    """Simulated 11 s against measured 10 s is +10 %; 80 % active against 75 % is +5 points, not +6.7 %."""
    found = by_label(bars.scores({"sync": summary(11.0, gpu_active=0.8)}, {"sync": [summary()]}, None), "sync")
    assert found["makespan"].error == pytest.approx(0.1)
    assert found["GPU active"].error == pytest.approx(0.05)
    assert found["makespan"].shown() == ("11.00 s", "10.00 s", "+10.0%")
    assert found["GPU active"].shown()[-1] == "+5.00 pt"
    assert found["TPOT p50"].error == 0 and found["TPOT p50"].verdict == "met"


def test_what_asynchrony_gains_is_compared_in_points() -> None:
    """12 s against 10 s is a gain of 20 %; measured 11 against 10 is 10 %: 10 points too many. One loop has no gain."""
    predicted = {"sync": summary(12.0), "async": summary(10.0)}
    (gain,) = by_label(
        bars.scores(predicted, {"sync": [summary(11.0)], "async": [summary(10.0)]}, None), "both"
    ).values()
    assert (gain.simulated, gain.measured, gain.error) == pytest.approx((0.2, 0.1, 0.1))
    assert gain.verdict == "missed"
    assert SPEED_UP not in {one.bar.label for one in bars.scores(predicted, {"async": [summary()]}, None)}


@pytest.mark.parametrize(("simulated", "verdict"), [(10.29, "met"), (9.71, "met"), (10.31, "missed"), (9.69, "missed")])
def test_a_bar_is_kept_up_to_its_bound(simulated: float, verdict: str) -> None:
    """3 % of the makespan, in either direction."""
    found = by_label(bars.scores({"sync": summary(simulated)}, {"sync": [summary()]}, None), "sync")
    assert found["makespan"].verdict == verdict


@pytest.mark.parametrize(("load", "asked"), [(None, False), (0.6, True), (0.85, True), (1.0, False)])
def test_ttft_counts_below_saturation_only(load: float | None, asked: bool) -> None:
    """A queue that grows until the arrivals end is as long as the run: its median says nothing of the model."""
    found = by_label(bars.scores({"sync": summary(ttft_s__p50=0.2)}, {"sync": [summary()]}, load), "sync")
    assert found["TTFT p50"].verdict == ("missed" if asked else "not asked")


def test_runs_that_differ_among_themselves_decide_nothing() -> None:
    """Measured 10.0, 10.2 and 10.8 s: the median counts, and they lie 7.8 % apart. The bar is 3 %: an error of 10 % may
    be theirs, one of 18 % is not.
    """
    measured = {"sync": [summary(10.2), summary(10.8), summary(10.0)]}
    far, near, within = (
        by_label(bars.scores({"sync": summary(one)}, measured, None), "sync")["makespan"] for one in (12.0, 11.2, 10.3)
    )
    assert (far.measured, far.spread) == pytest.approx((10.2, 0.8 / 10.2))
    assert (far.verdict, near.verdict, within.verdict) == ("missed", "undecided", "met")
    alike = {"sync": [summary(10.0), summary(10.1)]}
    assert by_label(bars.scores({"sync": summary(12.0)}, alike, None), "sync")["makespan"].verdict == "missed"


def test_gains_of_repeats_are_those_of_pairs() -> None:
    """Runs are paired in the order in which they were measured: 11/10 and 12/10."""
    measured = {"sync": [summary(11.0), summary(12.0)], "async": [summary(10.0), summary(10.0)]}
    assert bars.speed_ups(measured) == pytest.approx([0.1, 0.2])


def test_what_is_no_number_is_not_met() -> None:
    """Nothing measured, nothing met; a metric that neither run has is left out."""
    empty = summary(tpot_s__p50=0.0)
    found = by_label(bars.scores({"sync": summary()}, {"sync": [empty]}, None), "sync")
    assert found["TPOT p50"].verdict == "missed"
    assert found["makespan"].shown()[-1] == "+0.0%"
    again = by_label(bars.scores({"sync": summary()}, {"sync": [empty, empty]}, None), "sync")
    assert again["TPOT p50"].verdict == "missed"
    without = {**summary(), "tpot_s": {"n": 0}}
    left = by_label(bars.scores({"sync": without}, {"sync": [without]}, None), "sync")
    assert set(left) == {bar.label for bar in BARS} - {SPEED_UP, "TPOT p50", "TPOT p99"}
