"""Which field was swept, and which load is borne."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.calls import simulated

from analysis.page import report
from analysis.statistics import sweeps
from analysis.statistics.loading import LoadedRun, read
from cbsim.draw.chart import Edge, Line, Points
from cbsim.metrics.terminal import lookup

SERVICE_S = {"sync": 10 * 0.042, "async": 10 * 0.032}  # ten tokens, one seat; planning takes 10 ms of 42
RATES = (1, 2, 2.7, 4)


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedRun]:
    """A server that can bear 1 / SERVICE_S requests a second, under constant arrivals of several rates, both loops."""
    paths = []
    for rate in RATES:
        fields = ["workload.requests=60", "workload.output_tokens=10", "scheduler={name: vllm, max_num_seqs: 1}"]
        fields += [f"workload.arrivals={{kind: constant, rate_per_s: {rate}}}"]
        paths += simulated(tmp_path_factory.mktemp("rate"), "worked_example", *fields)
    return read(paths)


@pytest.fixture(scope="module")
def seats(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedRun]:
    paths = []
    for count in (4, 8, 16):
        fields = ["workload.output_tokens=10", f"scheduler={{name: vllm, max_num_seqs: {count}}}", "loop.mode=sync"]
        paths += simulated(tmp_path_factory.mktemp("seats"), "worked_example", *fields)
    return read(paths)


def test_a_sweep_of_the_rate_is_found_with_a_group_for_each_loop(rated: list[LoadedRun]) -> None:
    """Whatever the order of the runs; groups ascend."""
    for runs in (rated, rated[::-1]):
        found = sweeps.sweep(runs)
        assert found is not None
        assert found.field == "workload.arrivals.rate_per_s" and found.by_rate
        assert list(found.values) == list(RATES)
        assert sorted(group.label for group in found.groups) == ["async", "sync"]
        for group in found.groups:
            assert list(group.values) == list(RATES)
            assert {run.loop for run in group.runs} == {group.label}


def test_the_knee_is_where_service_cannot_keep_up(rated: list[LoadedRun]) -> None:
    """Theory: a server that needs S seconds for a request, one after the other, bears rates below 1 / S."""
    found = sweeps.sweep(rated)
    assert found is not None
    for group in found.groups:
        borne = max(rate for rate in RATES if rate < 1 / SERVICE_S[group.label])
        assert sweeps.knee(group, sweeps.rates(found, group)).rate == borne
        assert [sweeps.keeps_up(run) for run in group.runs] == [rate <= borne for rate in RATES]
    assert {group.label: sweeps.knee(group, RATES).rate for group in found.groups} == {"sync": 2, "async": 2.7}


def test_no_knee_is_claimed_outside_the_range(rated: list[LoadedRun]) -> None:
    found = sweeps.sweep(rated)
    assert found is not None
    group = found.groups[0]
    low = group._replace(values=group.values[:2], runs=group.runs[:2])
    high = group._replace(values=group.values[3:], runs=group.runs[3:])
    for part, said in ((low, "2/s is sustained"), (high, "4/s is too much already")):
        knee = sweeps.knee(part, [float(value) for value in part.values])
        assert knee.rate is None
        assert "no knee in this range" in knee.sentence and said in knee.sentence


def test_the_offered_rate_is_that_of_the_arrivals(rated: list[LoadedRun], seats: list[LoadedRun]) -> None:
    """Runs that arrive at once have none."""
    for run in rated:
        assert sweeps.offered(run) == pytest.approx(run.scenario["workload"]["arrivals"]["rate_per_s"])
    assert sweeps.offered(seats[0]) is None
    assert sweeps.keeps_up(seats[0]) is None


def test_any_number_can_be_swept(seats: list[LoadedRun]) -> None:
    found = sweeps.sweep(seats)
    assert found is not None
    assert (found.field, list(found.values)) == ("scheduler.max_num_seqs", [4, 8, 16])
    assert not found.by_rate
    assert "scheduler.max_num_seqs = 16" in sweeps.findings(found)[0]


def test_what_is_no_sweep_is_none(rated: list[LoadedRun], seats: list[LoadedRun], tmp_path: Path) -> None:
    """Two values are none, nor are runs that differ in more than one field, nor the loops of one scenario."""
    assert sweeps.sweep(seats[:2]) is None
    assert sweeps.sweep(read(simulated(tmp_path, "worked_example", "workload.output_tokens=5"))) is None
    assert sweeps.sweep([*seats, rated[0]]) is None
    assert sweeps.sweep(seats[:1]) is None


def test_seeds_repeat_a_point(seats: list[LoadedRun]) -> None:
    """Runs that differ in the seed as well are the same sweep: a marker each, the line through their mean."""
    again = [replace(run, label=f"{run.label} again", scenario=dict(run.scenario) | {"seed": 1}) for run in seats]
    again = [replace(run, summary=dict(run.summary) | {"output_tokens_per_s": 0.0}) for run in again]
    found = sweeps.sweep([*seats, *again])
    assert found is not None and len(found.groups) == 1
    assert list(found.groups[0].values) == [4, 4, 8, 8, 16, 16]
    panel = report.sweep_charts(found)[0].panels[2]
    line, points = (next(mark for mark in panel.marks if isinstance(mark, kind)) for kind in (Line, Points))
    assert isinstance(line, Line) and isinstance(points, Points)
    assert len(points.x) == 6
    assert line.y == pytest.approx([run.summary["output_tokens_per_s"] / 2 for run in seats])


def test_curves_show_the_summaries(rated: list[LoadedRun]) -> None:
    """Every point is a metric of a run; the knee stands at its rate; p99 is not drawn of 60 requests."""
    found = sweeps.sweep(rated)
    assert found is not None
    chart = next(one for one in report.sweep_charts(found) if one.key == "sweep")
    metrics = ("ttft_s.p50", "tpot_s.p50", "output_tokens_per_s", "requests_per_s")
    for panel, metric in zip(chart.panels, metrics, strict=True):
        size = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}.get(panel.y, 1.0)
        for group in found.groups:
            name = group.label if size == 1.0 and "." not in metric else f"{group.label} p50"
            points = next(mark for mark in panel.marks if isinstance(mark, Points) and mark.name == name)
            assert points.x.tolist() == list(RATES)
            assert points.y * size == pytest.approx([lookup(run.summary, metric) for run in group.runs])
        assert {mark.x for mark in panel.marks if isinstance(mark, Edge)} == {2.0, 2.7}
        assert not any("p99" in mark.name for mark in panel.marks)
    assert "too few" in chart.caption
    points = [mark for mark in report.sweep_charts(found)[1].panels[0].marks if isinstance(mark, Points)]
    assert [list(mark.labels) for mark in points] == [[f"{rate:g}" for rate in RATES]] * 2


def test_the_service_level_has_a_rate_of_its_own(rated: list[LoadedRun]) -> None:
    """It may allow for a wait that a knee does not: up to which rate 99 % of the requests meet it."""
    rate = "workload.arrivals.rate_per_s"
    met = {1: 1.0, 2: 0.995, 2.7: 0.98, 4: 1.0}  # a rate above one that misses it does not count
    runs = [
        replace(run, summary={**run.summary, "slo": {"attainment": met[lookup(run.scenario, rate)]}}) for run in rated
    ]
    found = sweeps.sweep(runs)
    assert found is not None
    assert sorted(one for one in sweeps.findings(found) if "SLO" in one) == [
        f"{loop}: SLO met by at least 99% of the requests up to 2/s." for loop in ("async", "sync")
    ]
    runs[0] = replace(runs[0], summary={**runs[0].summary, "slo": {"attainment": None}})  # no request in its window
    found = sweeps.sweep(runs)
    assert found is not None
    assert sum("SLO" in one for one in sweeps.findings(found)) == 1
