"""Runs side by side, as a figure and as a table: order, factors and gains are those of the summaries, a row a run, and
the service level is shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.calls import simulated

from analysis.figures import axis, side_by_side
from analysis.statistics.loading import LoadedRun, read
from cbsim.draw.chart import Edge, Level, Panel, Points, Spans
from cbsim.metrics.terminal import shown

SCHEDULERS = ("{name: vllm, max_num_seqs: 16}", "{name: static, batch_size: 16}", "{name: transformers_fifo}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedRun]:
    """Three schedulers, both loops, one workload of mixed lengths."""
    words = ("landscape", "workload.requests=48")
    out = tmp_path_factory.mktemp("runs")
    return read([path for each in SCHEDULERS for path in simulated(out, *words, f"scheduler={each}")])


def panel(runs: list[LoadedRun], title: str) -> Panel:
    return next(panel for panel in side_by_side.side_by_side(runs).panels if panel.title.startswith(title))


def with_metric(run: LoadedRun, **changes: Any) -> LoadedRun:
    return replace(run, summary=dict(run.summary) | changes)


@pytest.mark.parametrize(
    ("title", "metric"), [("output tokens/s", "output_tokens_per_s"), ("GPU active", "gpu_active")]
)
def test_bars_are_the_summaries_static_first_sync_before_async(runs: list[LoadedRun], title: str, metric: str) -> None:
    seen = panel(runs[::-1], title)
    assert seen.rows == [
        f"{name} {loop}" for name in ("static", "transformers_fifo", "vllm") for loop in ("sync", "async")
    ]
    by_label = {run.label: run.summary[metric] for run in runs}
    drawn = {seen.rows[row]: end for mark in seen.marks for row, end in zip(mark.row, mark.end, strict=True)}
    assert drawn == by_label
    assert [mark.name for mark in seen.marks] == ["sync", "async"]


def test_latencies_reach_from_the_median_to_what_may_be_quoted(runs: list[LoadedRun]) -> None:
    """48 requests are too few for p99 and p95 of TTFT: nothing but the median is drawn."""
    seen = panel(runs, "TTFT")
    spans = [mark for mark in seen.marks if isinstance(mark, Spans)]
    ends = {(float(a), float(b)) for mark in spans for a, b in zip(mark.start, mark.end, strict=True)}
    assert all(a == b for a, b in ends)
    medians = {float(x) for mark in seen.marks if isinstance(mark, Points) for x in mark.x}
    assert medians == {a for a, _ in ends}
    enough = [with_metric(run, ttft_s=dict(run.summary["ttft_s"]) | {"too_few_for": []}) for run in runs]
    spans = [mark for mark in panel(enough, "TTFT").marks if isinstance(mark, Spans)]
    assert all(float(b) > float(a) for mark in spans for a, b in zip(mark.start, mark.end, strict=True))


def test_repetitions_have_rows_of_their_own(runs: list[LoadedRun]) -> None:
    seen = side_by_side.side_by_side([runs[0], replace(runs[0], label="again")]).panels[0]
    assert seen.rows == [runs[0].label, "again"]


def test_what_is_the_same_for_all_is_not_drawn(runs: list[LoadedRun]) -> None:
    equal = [with_metric(run, gpu_active=0.5, tpot_s=runs[0].summary["tpot_s"]) for run in runs]
    assert [panel.title.partition(",")[0] for panel in side_by_side.side_by_side(equal).panels] == [
        "output tokens/s",
        "TTFT",
    ]


def test_the_service_level_is_drawn_where_it_is_near_and_told_where_it_is_far() -> None:
    empty = Panel([], "s", title="TTFT")
    (edge,) = axis.with_slo(empty, 2.0, 1.5, 0.5).marks
    assert isinstance(edge, Edge) and edge.x == 4.0
    (level,) = axis.with_slo(empty, 2.0, 1.5, 1.0, level=True).marks
    assert isinstance(level, Level) and level.y == 2.0
    far = axis.with_slo(empty, 2.0, 0.1, 1.0)
    assert (far.marks, far.title) == ([], "TTFT (SLO 2.00 s, beyond the edge)")
    assert axis.with_slo(empty, None, 1.0, 1.0) is empty


def test_limits_are_those_that_all_have() -> None:
    both = [{"slo": {"ttft_s": 2.0, "tpot_s": 0.1}}, {"slo": {"ttft_s": 2.0, "tpot_s": 0.2}}]
    assert axis.slo_limits(both) == {"ttft_s": 2.0}
    assert axis.slo_limits([*both, {}]) == {}


# -- the table of the runs --------------------------------------------------------------------------------------------


def _rate(run: LoadedRun) -> float:
    return float(run.summary["output_tokens_per_s"])


def test_a_sweep_of_what_arrives_is_no_ranking(runs: list[LoadedRun]) -> None:
    """More traffic is not a better server: the order stays, and there is no factor and no gain."""
    table = side_by_side.table(runs, by_rate=True)
    assert [row[0] for row in table.rows] == [run.label for run in runs]
    assert not {"factor", "async gain"} & set(table.header)
    assert {len(row) for row in table.rows} == {len(table.header)}


def test_best_throughput_first_with_its_factor(runs: list[LoadedRun]) -> None:
    table = side_by_side.table(runs)
    ordered = sorted(runs, key=_rate, reverse=True)
    assert [row[0] for row in table.rows] == [run.label for run in ordered]
    assert {len(row) for row in table.rows} == {len(table.header)}
    factors = [row[table.header.index("factor")] for row in table.rows]
    assert factors == [f"{_rate(run) / _rate(ordered[-1]):.2f}x" for run in ordered]


def test_an_async_loop_gains_over_the_sync_loop_of_the_same_scheduler(runs: list[LoadedRun]) -> None:
    table = side_by_side.table(runs)
    gains = {row[0]: row[-1] for row in table.rows}
    sync = {run.scenario["scheduler"]["name"]: run for run in runs if run.loop == "sync"}
    for run in runs:
        base = sync[run.scenario["scheduler"]["name"]]
        assert gains[run.label] == ("" if run is base else f"{_rate(run) / _rate(base) - 1:+.1%}")


def test_nothing_is_gained_over_another_configuration(runs: list[LoadedRun]) -> None:
    """A measured loop is not compared with a simulated one, nor a scheduler with another, nor with one of several."""
    one = next(run for run in runs if run.loop == "async")
    other = next(run for run in runs if run.loop == "sync" and run.scenario["scheduler"] == one.scenario["scheduler"])
    real = replace(other, environment=dict(other.environment) | {"device": "a GPU"})
    assert all(not row[-1] for row in side_by_side.table([one, real]).rows)
    assert all(not row[-1] for row in side_by_side.table([one, other, replace(other, label="again")]).rows)
    stranger = next(
        run for run in runs if run.loop == "sync" and run.scenario["scheduler"] != one.scenario["scheduler"]
    )
    assert all(not row[-1] for row in side_by_side.table([one, stranger]).rows)


def test_a_percentile_of_too_few_is_marked(runs: list[LoadedRun]) -> None:
    table = side_by_side.table(runs)
    for row, run in zip(table.rows, sorted(runs, key=_rate, reverse=True), strict=True):
        cells = dict(zip(table.header, row, strict=True))
        assert cells["TTFT p99"] == shown(run.summary["ttft_s"]["p99"], "s") + "*"
        assert not cells["TTFT p50"].endswith("*")
    assert "368" in table.note


def test_what_is_the_same_for_all_is_said_once(runs: list[LoadedRun]) -> None:
    table = side_by_side.table(runs)
    same = {run.summary["preemptions"] for run in runs}
    assert len(same) == 1
    assert "preemptions" not in table.header
    assert f"preemptions {same.pop()}" in table.note


def test_findings_name_the_best_and_what_async_gains(runs: list[LoadedRun]) -> None:
    """Each sentence is about numbers of the summaries; TTFT of 48 requests may be quoted at p50 only."""
    said = side_by_side.findings(runs)
    best, worst = max(runs, key=_rate), min(runs, key=_rate)
    assert said[0].startswith(f"Most output tokens/s: {best.label}, {_rate(best):,.4g}")
    assert said[0].endswith(f"Fewest: {worst.label}, {_rate(worst):,.4g}.")
    quickest = min(runs, key=lambda run: float(run.summary["ttft_s"]["p50"]))
    assert said[1].startswith(f"TTFT p50 is least with {quickest.label}, ")
    gains = [float(row[-1].rstrip("%")) for row in side_by_side.table(runs).rows if row[-1]]
    assert f"{min(gains):+.1f} to {max(gains):+.1f} % output tokens/s, 3 times" in said[3]


def test_runs_without_an_output_token_have_a_row(runs: list[LoadedRun]) -> None:
    empty = dict(runs[0].summary) | {"output_tokens_per_s": 0.0, "tpot_s": {"n": 0}, "ttft_s": {"n": 0}}
    table = side_by_side.table([replace(runs[0], summary=empty)])
    cells = dict(zip(table.header, table.rows[0], strict=True))
    assert cells["factor"] == "-"
    assert "TTFT p50" not in cells
    assert side_by_side.table([]).rows == []
