"""`--fail-if`: what a condition means, when it fails, and what is said of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.statistics.compare import ONE_VALUE, Condition, MetricDifference, judged, parse
from analysis.statistics.intervals import Interval
from cbsim.errors import CheckError
from cbsim.metrics.catalogue import METRICS


def _difference(metric: str, a: float, b: float, relative: tuple[float, float] | None = None) -> MetricDifference:
    interval = Interval((relative[0] * a, relative[1] * a), relative) if relative else None
    method = "how" if interval else ONE_VALUE
    return MetricDifference(metric, METRICS[metric].label, METRICS[metric].form, a, b, interval, 100, method, few=False)


@pytest.mark.parametrize(
    ("text", "metric", "compared", "bound", "relative", "magnitude"),
    [
        ("tpot.p50>+5%", "tpot_s.p50", ">", 0.05, True, False),
        ("tpot_s.p50 >= 5 %", "tpot_s.p50", ">=", 0.05, True, False),
        ("ttft.p99>+20ms", "ttft_s.p99", ">", 0.02, False, False),
        ("makespan<-1.5s", "makespan_s", "<", -1.5, False, False),
        ("gpu_active<-2pt", "gpu_active", "<", -0.02, False, False),
        ("gpu_active<-2%", "gpu_active", "<", -0.02, True, False),
        ("makespan>+-5%", "makespan_s", ">", 0.05, True, True),
        ("makespan>±5%", "makespan_s", ">", 0.05, True, True),
        ("preemptions>0", "preemptions", ">", 0.0, False, False),
        ("output_tokens_per_s<-1e2", "output_tokens_per_s", "<", -100.0, False, False),
        ("requests_by_status.refused>0", "requests_by_status.refused", ">", 0.0, False, False),
    ],
)
def test_a_condition_means(
    text: str, metric: str, compared: str, bound: float, relative: bool, magnitude: bool
) -> None:
    assert parse(text) == Condition(text, metric, compared, pytest.approx(bound), relative, magnitude)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tpto.p50>5%", "did you mean tpot.p50"),
        ("tpot.p51>5%", "did you mean tpot.p50"),
        ("tpot>5%", "tpot.p50"),
        ("tpot.p50>5", "no unit, tpot_s.p50 takes %, ns, us, ms, s, min"),
        ("tpot.p50>5pt", "unit 'pt'"),
        ("gpu_active<-2", "gpu_active takes %, pt"),
        ("gpu_active<-2ms", "gpu_active takes %, pt"),
        ("preemptions>5ms", "preemptions takes %, none"),
        ("tpot.p50>inf%", "finite"),
        ("tpot.p50>-nan%", "finite"),
        ("tpot.p50>1e999ms", "finite"),
        ("tpot.p50>1.2.3%", "finite"),
        ("tpot.p50", "expected METRIC>CHANGE"),
        ("", "expected METRIC>CHANGE"),
        ("tpot.p50>+%", "expected METRIC>CHANGE"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(CheckError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert f"--fail-if {text!r}" in str(caught.value)


PARTS = (("tpot.p50", "gpu_active", "steps", "x"), (">", "<=", "=", "=="), ("", "+", "-", "+-", "±", "--"))
ENDS = (("5", "1e-3", "1e999", "nan", ".", "e5", ""), ("", "%", "ms", "pt", "km"))


@given(st.tuples(*(st.sampled_from(part) for part in (*PARTS, *ENDS))).map("".join) | st.text(max_size=20))
def test_any_text_is_a_finite_bound_or_refused(text: str) -> None:
    """Property: nothing else comes out, neither another error nor a bound that nothing can be beyond."""
    try:
        bound = parse(text).bound
    except CheckError:
        return
    assert math.isfinite(bound)


VALUE = st.floats(0.001, 1e3)


@given(VALUE, VALUE, st.floats(-2, 2), st.sampled_from("<>"), st.booleans(), st.booleans())
def test_the_change_decides(a: float, b: float, bound: float, sign: str, relative: bool, magnitude: bool) -> None:
    """Property: a condition fails when the change is beyond its bound, whatever the interval says."""
    condition = Condition("text", "tpot_s.p50", sign, bound, relative, magnitude)
    change = b / a - 1 if relative else b - a
    change = abs(change) if magnitude else change
    failed, _ = judged(condition, [_difference("tpot_s.p50", a, b, (-0.5, 0.5))])
    assert failed is (change > bound if sign == ">" else change < bound)


@given(
    VALUE, VALUE, st.floats(-2, 2), st.sampled_from("<>"), st.booleans(), st.tuples(st.floats(-1, 1), st.floats(-1, 1))
)
def test_sure_fails_only_where_all_of_the_interval_does(
    a: float, b: float, bound: float, sign: str, magnitude: bool, edges: tuple[float, float]
) -> None:
    """Property: with `sure`, what fails fails without it too, and every change in the interval is beyond the bound."""
    low, high = min(edges), max(edges)
    condition = Condition("text", "tpot_s.p50", sign, bound, True, magnitude)
    one = _difference("tpot_s.p50", a, b, (low, high))
    failed, line = judged(condition, [one], sure=True)
    plain, _ = judged(condition, [one])
    inside = [low + (high - low) * part / 10 for part in range(11)]
    met = [condition.meets(abs(change) if magnitude else change) for change in inside]
    assert not failed or (plain and all(met))
    if plain and not failed:
        assert "not certain" in line


def test_a_line_says_values_change_interval_and_doubt() -> None:
    one = _difference("tpot_s.p50", 0.040, 0.0424, (0.04, 0.07))
    failed, line = judged(parse("tpot.p50>+5%"), [one])
    assert failed
    assert line.startswith("FAILED  tpot.p50>+5%: tpot_s.p50 is 40 ms, then 42.4 ms: +6.00 %")
    assert "+4.00 .. +7.00 %" in line
    assert line.endswith("not certain: the interval reaches back over the bound")
    failed, line = judged(parse("tpot.p50>+3%"), [one])
    assert failed
    assert "not certain" not in line
    failed, line = judged(parse("tpot.p50>+2.5ms"), [one])
    assert not failed
    assert line.startswith("ok")
    assert "+2.4 ms" in line
    assert line.endswith("not certain: the interval reaches over the bound")


def test_sure_takes_the_value_where_there_is_no_interval() -> None:
    one = _difference("makespan_s", 10.0, 12.0)
    failed, line = judged(parse("makespan>+5%"), [one], sure=True)
    assert failed
    assert ONE_VALUE in line


def test_from_nothing_to_something_is_more_than_any_percentage() -> None:
    assert judged(parse("preemptions>+1000%"), [_difference("preemptions", 0, 1)])[0]
    assert not judged(parse("preemptions<-5%"), [_difference("preemptions", 0, 1)])[0]
    assert not judged(parse("preemptions>+5%"), [_difference("preemptions", 0, 0)])[0]
