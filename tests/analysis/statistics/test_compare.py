"""Differences of two runs: what is covered, what is sure, and how it reads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import simulated

from analysis.statistics import compare, intervals
from analysis.statistics.compare import (
    MARK,
    NOT_SEEN,
    ONE_VALUE,
    SHOWN,
    TOO_FEW,
    Condition,
    Incomparable,
    MetricDifference,
    judged,
    parse,
)
from analysis.statistics.intervals import SHARES, Interval
from analysis.statistics.loading import LoadedRun, read
from cbsim.errors import CheckError
from cbsim.metrics.catalogue import METRICS
from cbsim.metrics.terminal import lookup


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedRun]:
    return read(simulated(tmp_path_factory.mktemp("example"), "worked_example", "workload.output_tokens=50"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedRun]:
    return read(simulated(tmp_path_factory.mktemp("mixed"), "tiny_cpu", "workload.requests=80"))


def _by_name(found: list[MetricDifference]) -> dict[str, MetricDifference]:
    return {one.metric: one for one in found}


def test_every_metric_that_both_runs_have_is_there_with_the_summaries_values(mixed: list[LoadedRun]) -> None:
    a, b = mixed
    found = _by_name(compare.differences(a, b))
    both = [name for name in METRICS if None not in (lookup(a.summary, name), lookup(b.summary, name))]
    assert list(found) == both
    for name, one in found.items():
        assert (one.a, one.b) == (lookup(a.summary, name), lookup(b.summary, name))
        assert one.delta == one.b - one.a


def test_shares_of_several_servers_are_of_the_time_in_which_all_are_there(tmp_path: Path) -> None:
    """Each step drawn once gives the share of the summary: also with a server without a step, one that comes late, and
    servers with different numbers of GPUs. So no interval of a share is wider than a share can be.
    """
    pools = "fleet.pools=[{count: 3}, {server: {cost: {tensor_parallel: 2}}}]"
    late = "workload.arrivals={kind: constant, rate_per_s: 20}"
    few = ("workload.requests=3", "workload.output_tokens=40", late)
    runs = read(simulated(tmp_path, "tiny_cpu", pools, "fleet.router.name=round_robin", *few))
    for run in runs:
        [*_, last] = run.summary["per_server"]
        assert last["steps"] == 0
        parts = intervals._of_steps(run)[""]
        whole = parts.statistics(np.ones((1, len(run.table)), dtype=np.int64))[0]
        assert dict(zip(parts.names, whole, strict=True)) == pytest.approx({name: run.summary[name] for name in SHARES})
    known = _by_name(compare.differences(*runs))
    for name in SHARES:
        assert known[name].range is not None and max(map(abs, known[name].range)) < 1


def test_what_planning_meanwhile_saves_is_exact(example: list[LoadedRun]) -> None:
    """Theory: 50 steps of 42 ms against 50 of 32 ms and one plan before the first; all requests are alike, so there is
    no doubt about any latency, and the GPU's share is near 32 / 42 in all blocks of steps.
    """
    found = _by_name(compare.differences(*example))
    assert found["makespan_s"].change == pytest.approx((50 * 0.032 + 0.010 + 0.032) / (50 * 0.042) - 1, abs=0.02)
    tpot = found["tpot_s.p50"]
    assert tpot.change == pytest.approx(32 / 42 - 1)
    assert tpot.range == pytest.approx((32 / 42 - 1, 32 / 42 - 1))
    assert tpot.seen
    assert found["ttft_s.p50"].seen is False
    active = found["gpu_active"]
    assert active.a == pytest.approx(32 / 42)
    assert active.range is not None
    assert 0.15 < active.range[0] <= active.delta <= active.range[1] < 0.25


def test_a_run_does_not_differ_from_itself(mixed: list[LoadedRun]) -> None:
    """Latencies are paired: no doubt at all. Steps are not, but their interval holds 0."""
    for one in compare.differences(mixed[0], mixed[0]):
        assert one.delta == 0
        assert one.change == 0
        assert compare.change_text(one) == "="
        if one.interval:
            assert one.seen is False
            assert compare.range_text(one).endswith(NOT_SEEN)


def test_totals_are_one_value_a_run(mixed: list[LoadedRun]) -> None:
    """One makespan from one run says nothing of the next one."""
    found = _by_name(compare.differences(*mixed))
    for name in ("makespan_s", "output_tokens_per_s", "preemptions", "steps", "ttft_s.max", "itl_s.n"):
        assert found[name].interval is None
        assert found[name].seen is None
        assert compare.range_text(found[name]) == found[name].method == ONE_VALUE


def test_small_samples_are_marked(mixed: list[LoadedRun], example: list[LoadedRun]) -> None:
    """80 requests are enough for p95 (72), not for p99 (368); 32 only for what needs 30; a total is no sample."""
    found = _by_name(compare.differences(*mixed))
    assert not found["ttft_s.p95"].few
    assert found["ttft_s.p99"].few
    assert found["ttft_s.p99"].n == 80
    found = _by_name(compare.differences(*example))
    assert not found["ttft_s.mean"].few
    assert found["ttft_s.p95"].few
    assert not found["makespan_s"].few
    rows = compare.table(list(found.values()), *example).rows
    assert [row[0] for row in rows if row[0].startswith("TTFT")] == [
        "TTFT p50",
        "TTFT p90",
        *(f"TTFT p{q} *" for q in (95, 99)),
    ]


def test_requests_that_one_run_did_not_finish_are_left_out_and_counted(mixed: list[LoadedRun]) -> None:
    """The values stay those of all requests; only the interval rests on those that can be paired."""
    a, b = mixed
    requests = b.requests.copy()
    requests.loc[:4, "done"] = False
    cut = replace(b, requests=requests)
    one = _by_name(compare.differences(a, cut))["ttft_s.p50"]
    assert "over 75 requests" in one.method
    assert "without 5 of 80 in A" in one.method
    assert one.a == a.summary["ttft_s"]["p50"]


def test_only_requests_of_the_window_are_paired(mixed: list[LoadedRun]) -> None:
    a, b = mixed
    late = [replace(run, summary={**run.summary, "window_s": [1.0, None]}) for run in (a, b)]
    assert len(intervals.pairs(*late)[0]) == 0
    whole = [replace(run, summary={**run.summary, "window_s": [0.0, 1.0]}) for run in (a, b)]
    assert len(intervals.pairs(*whole)[0]) == 80


def test_requests_are_paired_by_index_not_by_row(mixed: list[LoadedRun]) -> None:
    """Two runs may list other requests: the third row of one is not the third of the other."""
    a, b = mixed
    fewer = replace(b, requests=b.requests.iloc[3:].reset_index(drop=True))
    left, right = intervals.pairs(a, fewer)
    assert left.tolist() == list(range(3, 80))
    assert right.tolist() == list(range(77))


def test_the_table_has_what_the_terminal_shows_and_everything_when_asked(mixed: list[LoadedRun]) -> None:
    found = compare.differences(*mixed)
    table = compare.table(found, *mixed)
    assert list(table.header[1:3]) == [run.label for run in mixed]
    assert {metric.name for metric in METRICS.values() if metric.listed} <= set(SHOWN)
    assert {f"itl_s.p{q}" for q in (50, 90, 95, 99)} <= set(SHOWN)
    assert len(SHOWN) == len(set(SHOWN))
    assert all(len(row) == len(table.header) for row in table.rows)
    assert len(compare.table(found, *mixed, everything=True).rows) == len(found)
    assert "bootstrap over 80 requests" in table.note


def _difference(
    a: float, b: float, unit: str, delta: tuple[float, float] | None, relative: tuple[float, float] | None
) -> MetricDifference:
    interval = Interval(delta, relative) if delta else None
    return MetricDifference("x", "X", unit, a, b, interval, 100, "how" if interval else ONE_VALUE, few=False)


@pytest.mark.parametrize(
    ("one", "change", "interval"),
    [
        (_difference(1.0, 1.061, "s", (0.05, 0.07), (0.052, 0.07)), "+6.1 %", "+5.2 .. +7.0 %"),
        (_difference(1.0, 0.9996, "s", (-0.001, 0.002), (-0.001, 0.002)), "-0.04 %", f"-0.10 .. +0.20 %: {NOT_SEEN}"),
        (_difference(0.5, 0.48, "share", (-0.03, -0.01), (-0.06, -0.02)), "-2.0 pt", "-3.0 .. -1.0 pt"),
        (_difference(0.0, 0.012, "s", (0.01, 0.02), None), "+12 ms", "+10 ms .. +20 ms"),
        (_difference(0, 7, "count", None, None), "+7", ONE_VALUE),
        (_difference(7, 7, "count", None, None), "=", ONE_VALUE),
        (_difference(1.0, 1.0, "s", (0.0, 0.0), (0.0, 0.0)), "=", NOT_SEEN),
    ],
)
def test_cells_read_well(one: MetricDifference, change: str, interval: str) -> None:
    assert compare.change_text(one) == change
    assert compare.range_text(one) == interval


def test_the_verdict_is_short_and_says_what_is_sure(mixed: list[LoadedRun], example: list[LoadedRun]) -> None:
    sentences = compare.verdict(compare.differences(*example))
    assert 2 <= len(sentences) <= 3
    assert "makespan: -21.8 %" in sentences[0]
    assert ONE_VALUE in sentences[0]
    assert "TPOT p50: -23.8 %" in sentences[1]
    same = compare.verdict(compare.differences(mixed[0], mixed[0]))
    assert "no change" in same[0]
    assert same[2].startswith("0 of ")


def test_the_verdict_prefers_percentiles_with_enough_samples() -> None:
    """A p99 of ten requests changes a lot, and says little."""
    small = _difference(1, 2, "s", (0.5, 1.5), (0.5, 1.5))._replace(metric="ttft_s.p99", label="TTFT p99", few=True)
    large = _difference(1, 1.1, "s", (0.05, 0.15), (0.05, 0.15))._replace(metric="ttft_s.p50", label="TTFT p50")
    assert compare.verdict([small, large])[0].startswith("TTFT p50: +10.0 %")
    assert MARK == "*"


def test_what_only_one_run_has_is_shown_of_it(mixed: list[LoadedRun]) -> None:
    """Such as what came of drafts, of a run with speculation beside one without: a condition on it fails."""
    a, b = mixed[0], replace(mixed[1], summary={**mixed[1].summary, "drafts": {"rejected_tokens": 7}})
    found = compare.differences(a, b)
    for one, other, values in ((a, b, ("-", "7")), (b, a, ("7", "-"))):
        rows = {label: cells for label, *cells in compare.table(found, one, other).rows}
        assert rows["draft tokens rejected"] == [*values, "-", "one run has none"]
        assert "draft tokens accepted" not in rows
    assert compare.judged(compare.parse("drafts.rejected_tokens>0"), found)[0]


@pytest.mark.parametrize(
    ("overrides", "latencies"), [(["workload.prompt_tokens=3000"], False), (["workload.output_tokens=1"], True)]
)
def test_runs_with_next_to_nothing_in_them_can_be_compared(
    tmp_path: Path, overrides: list[str], latencies: bool
) -> None:
    """All requests refused, or two of one token: no interval, and a reason; never an error."""
    runs = read(simulated(tmp_path, "tiny_cpu", "workload.requests=2", *overrides))
    found = _by_name(compare.differences(*runs))
    assert all(one.interval is None for one in found.values())
    assert ("ttft_s.p50" in found) is latencies
    assert "tpot_s.p50" not in found
    assert compare.range_text(found["gpu_active"]) == TOO_FEW
    assert compare.range_text(found["makespan_s"]) == ONE_VALUE
    assert compare.verdict(list(found.values()))
    assert compare.table(list(found.values()), *runs).rows


# -- which runs may be compared ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedRun]:
    """Both loops of one workload, and one of another."""
    out, small = tmp_path_factory.mktemp("runs"), ("tiny_cpu", "workload.requests=12")
    other = simulated(out, *small, "seed=3", "workload.shared_prefix_tokens=0", "loop.mode=sync")
    return read([*simulated(out, *small), *other])


def test_runs_of_one_workload_may_be_compared(runs: list[LoadedRun]) -> None:
    compare.check(runs[:2])
    compare.check(runs[:1])
    compare.check([])


def test_another_workload_is_refused_with_the_fields_that_differ(runs: list[LoadedRun]) -> None:
    with pytest.raises(Incomparable) as caught:
        compare.differences(runs[0], runs[2])
    text = str(caught.value)
    assert runs[0].label in text
    assert runs[2].label in text
    assert "seed is 0 and 3" in text
    assert "workload.shared_prefix_tokens is 16 and 0" in text
    assert "scheduler" not in text


def test_all_reasons_are_said_at_once(runs: list[LoadedRun]) -> None:
    cut = replace(
        runs[1], incomplete="interrupted, after 7 steps", summary={**runs[1].summary, "window_s": [2.0, None]}
    )
    with pytest.raises(Incomparable) as caught:
        compare.check([runs[0], cut, runs[2]])
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert any("interrupted, after 7 steps" in line and str(cut.path) in line for line in lines)
    assert any("window_s is null and [2.0, None]" in line for line in lines)


@pytest.mark.parametrize("key", ["schema_version", "percentile_method", "window_s"])
def test_what_is_counted_otherwise_is_refused(runs: list[LoadedRun], key: str) -> None:
    other = replace(runs[1], summary={**runs[1].summary, key: "other"})
    with pytest.raises(Incomparable, match=f"{key} is .* and other"):
        compare.check([runs[0], other])


def test_a_run_that_does_not_say_its_workload_is_not_taken_for_the_same(runs: list[LoadedRun]) -> None:
    unknown = [replace(run, environment={**run.environment, "workload_hash": None}) for run in runs[:2]]
    with pytest.raises(Incomparable, match="no workload_hash"):
        compare.check(unknown)


def test_equal_fields_with_another_hash_point_to_data_or_code(runs: list[LoadedRun]) -> None:
    changed = replace(runs[1], environment={**runs[1].environment, "workload_hash": "0" * 64})
    with pytest.raises(Incomparable, match="the data that it was made from or the code"):
        compare.check([runs[0], changed])


# -- conditions on the change: what they mean, when they fail, and what is said of it ---------------------------------


def _changed(metric: str, a: float, b: float, relative: tuple[float, float] | None = None) -> MetricDifference:
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
        ("tpot.p50>5", "no unit, tpot.p50 takes %, ns, us, ms, s, min"),
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
    failed, _ = judged(condition, [_changed("tpot_s.p50", a, b, (-0.5, 0.5))])
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
    one = _changed("tpot_s.p50", a, b, (low, high))
    failed, line = judged(condition, [one], sure=True)
    plain, _ = judged(condition, [one])
    inside = [low + (high - low) * part / 10 for part in range(11)]
    met = [condition.meets(abs(change) if magnitude else change) for change in inside]
    assert not failed or (plain and all(met))
    if plain and not failed:
        assert "not certain" in line


def test_a_line_says_values_change_interval_and_doubt() -> None:
    one = _changed("tpot_s.p50", 0.040, 0.0424, (0.04, 0.07))
    failed, line = judged(parse("tpot.p50>+5%"), [one])
    assert failed
    assert line.startswith("FAILED  tpot.p50>+5%: tpot.p50 is 40 ms, then 42.4 ms: +6.00 %")
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
    one = _changed("makespan_s", 10.0, 12.0)
    failed, line = judged(parse("makespan>+5%"), [one], sure=True)
    assert failed
    assert ONE_VALUE in line


def test_from_nothing_to_something_is_more_than_any_percentage() -> None:
    assert judged(parse("preemptions>+1000%"), [_changed("preemptions", 0, 1)])[0]
    assert not judged(parse("preemptions<-5%"), [_changed("preemptions", 0, 1)])[0]
    assert not judged(parse("preemptions>+5%"), [_changed("preemptions", 0, 0)])[0]
