"""Conditions on metrics: what is understood, what it means, and what a user is told about the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbsim.errors import CheckError
from cbsim.metrics import checks
from cbsim.metrics.catalogue import METRICS
from cbsim.metrics.checks import Check, parse

SUMMARY = {
    "ttft_s": {"n": 3, "mean": 0.2, "p99": 0.5},
    "tpot_s": {"n": 0},
    "gpu_active": 0.9,
    "preemptions": 0,
    "kv_utilisation": {"mean": 0.4, "max": 1.0},
    "cost": {"usd_per_million_tokens": None},
}


@pytest.mark.parametrize(
    ("text", "metric", "compare", "bound"),
    [
        ("ttft.p99<500ms", "ttft_s.p99", "<", 0.5),
        ("ttft_s.p99 <= 0.5", "ttft_s.p99", "<=", 0.5),
        ("e2e.mean < 2min", "e2e_s.mean", "<", 120.0),
        ("itl.p50>250us", "itl_s.p50", ">", 250e-6),
        ("step_time.max<1e3ns", "step_time_s.max", "<", 1e-6),
        ("gpu_active>=90%", "gpu_active", ">=", 0.9),
        ("  preemptions == 0 ", "preemptions", "==", 0.0),
        ("requests_per_s>1.5e-2", "requests_per_s", ">", 0.015),
        ("bubble<+1s", "bubble_s", "<", 1.0),
        ("makespan<60", "makespan_s", "<", 60.0),
        ("tpot.n>0", "tpot_s.n", ">", 0.0),
        ("tpot.n<=0", "tpot_s.n", "<=", 0.0),
        ("queue.p99<=0", "queue_s.p99", "<=", 0.0),
        ("ttft.std==0", "ttft_s.std", "==", 0.0),
        ("attainment>=100%", "slo.attainment", ">=", 1.0),
        ("cost.usd_per_million_output_tokens<3", "cost.usd_per_million_output_tokens", "<", 3.0),
    ],
)
def test_what_is_understood(text: str, metric: str, compare: str, bound: float) -> None:
    """Durations need no `_s`; ns, us, ms, s, min and % scale the bound; blanks do not matter; numbers are decimal."""
    check = parse(text)
    assert (check.rule, check.metric, check.compare) == (text, metric, compare)
    assert check.bound == pytest.approx(bound)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft.p99", "expected METRIC<VALUE[UNIT] with VALUE >= 0, for example ttft.p99<500ms"),
        ("ttft.p99=500ms", "expected METRIC<VALUE"),
        ("ttft.p99<", "expected METRIC<VALUE"),
        ("ttft.p99<nan", "ttft.p99: 'nan' is not a finite number"),
        ("ttft.p99<2e307min", "'2e307' is not a finite number"),
        ("ttft.p99<inf", "'inf' is not a finite number"),
        ("ttft.p99<=-2s", "with VALUE >= 0"),
        ("preemptions>-1", "with VALUE >= 0"),
        ("ttft.p99<0ms", "ttft.p99 is never below 0"),
        ("preemptions<0", "preemptions is never below 0"),
        *(
            (f"{name}{rule}", " is always above 0")
            for name in ("ttft.p99", "tpot.min", "e2e.p50")
            for rule in ("<=0", "==0s")
        ),
        *((f"attainment{rule}", "slo.attainment is at most 100 %") for rule in (">=101%", ">1", "<=1.5", "==101%")),
        ("ttft.p99<1.2.3ms", "'1.2.3' is not a finite number"),
        ("ttft.p99<500parsecs", "unit 'parsecs', ttft.p99 takes none, ns, us, ms, s, min"),
        ("ttft<500ms", "ttft needs one of ttft.mean, ttft.std, ttft.min, ttft.max, ttft.p50"),
        ("ttft.p98<500ms", "; did you mean ttft.p90 or ttft.p95?"),
        ("tpot.p50<5%", "unit '%', tpot.p50 takes none, ns, us, ms, s, min"),
        ("requests==8ms", "unit 'ms', requests takes none"),
        ("ttfd.p99<500ms", "unknown metric 'ttfd.p99'"),
        ("gpu_activ>0.5", "gpu_active"),
        ("", "expected METRIC<VALUE"),
    ],
)
def test_what_is_not_understood_is_named(text: str, message: str) -> None:
    """A condition that cannot be understood is quoted, with what is wrong with it, and what was probably meant."""
    with pytest.raises(CheckError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"--check {text!r}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("ttft.p99<500ms", False),
        ("ttft.p99<=500ms", True),
        ("ttft.mean>200ms", False),
        ("gpu_active>=90%", True),
        ("preemptions==0", True),
        ("kv_utilisation.max<100%", False),
        ("tpot.n==0", True),
    ],
)
def test_verdicts(text: str, holds: bool) -> None:
    """Each comparison on its bound: p99 of TTFT is 0.5 s, its mean 0.2 s, the GPU is active for 0.9 of the run."""
    verdict, line = parse(text).verdict(SUMMARY)
    assert verdict is holds
    assert line.startswith("ok" if holds else "FAILED")
    assert text in line


@pytest.mark.parametrize("text", ["tpot.p99<1s", "waiting.mean<1", "cost.usd_per_million_tokens<1", "e2e.p50<1s"])
def test_a_metric_without_a_sample_fails(text: str) -> None:
    """No sample, no promise kept: empty distribution, missing part, price of nothing."""
    check = parse(text)
    assert check.value(SUMMARY) is None
    verdict, line = check.verdict(SUMMARY)
    assert not verdict
    assert line == f"FAILED  {text}: the run has no {check.spelled}"


@given(
    name=st.sampled_from(list(METRICS)),
    compare=st.sampled_from(sorted(checks.OPERATORS)),
    bound=st.floats(1e-9, 1e6).map(repr),
    unit=st.sampled_from(["", *checks.TIMES, "%"]),
)
def test_a_bound_has_the_unit_of_its_metric(name: str, compare: str, bound: str, unit: str) -> None:
    """Times take seconds and their like, shares a percentage, both also a bare number, as everything else does; any
    other unit is refused, naming the metric. The bound is the number as Python writes it, times the unit, and of a
    share at most 1, which nothing is above.
    """
    own = METRICS[name].unit
    text = f"{name}{compare}{bound}{unit}"
    scale = 0.01 if unit == "%" else checks.TIMES.get(unit, 1.0)
    if (unit in checks.TIMES and own != "s") or (unit == "%" and own != "share"):
        with pytest.raises(CheckError, match=f"unit '{unit}', {METRICS[name].spelled} takes none"):
            parse(text)
    elif own == "share" and (float(bound) * scale > 1 or (float(bound) * scale == 1 and compare == ">")):
        with pytest.raises(CheckError, match="is at most 100 %"):
            parse(text)
    else:
        assert parse(text) == Check(text, name, compare, float(bound) * scale)


@given(st.text(alphabet="abc_.<>= 0159emns%-+", max_size=20))
def test_whatever_is_written_is_understood_or_refused(text: str) -> None:
    """No input ends in anything but a condition or a CheckError."""
    try:
        understood = parse(text).rule
    except CheckError as error:
        understood = str(error)
    assert text in understood or repr(text) in understood


def test_seconds_are_said_and_a_bound_far_off_is_doubted() -> None:
    """p99 of TTFT is 0.5 s: 500 without a unit is 500 s, a thousand times as much; with one, it is as it was meant."""
    line = parse("ttft.p99<500").verdict(SUMMARY).line
    assert line.endswith("ttft.p99 is 0.5 s, the bound 500 s; a bound without a unit is in seconds: is 500ms meant?")
    for clear in ("ttft.p99<500s", "ttft.p99<3", "ttft.p99<500ms", "preemptions<500"):
        assert "meant" not in parse(clear).verdict(SUMMARY).line
