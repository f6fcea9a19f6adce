"""Runs side by side are the summaries, a row a run, and show the service level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.calls import simulated

from analysis.figures import axis
from analysis.figures.side_by_side import side_by_side
from analysis.statistics.loading import LoadedRun, read
from cbsim.draw.chart import Edge, Level, Panel, Points, Spans


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedRun]:
    """Two schedulers, both loops, one workload."""
    out, words = tmp_path_factory.mktemp("runs"), ("landscape", "workload.requests=24")
    schedulers = ("{name: vllm, max_num_seqs: 16}", "{name: static, batch_size: 16}")
    return read([path for each in schedulers for path in simulated(out, *words, f"scheduler={each}")])


def panel(runs: list[LoadedRun], title: str) -> Panel:
    return next(panel for panel in side_by_side(runs).panels if panel.title.startswith(title))


def with_metric(run: LoadedRun, **changes: Any) -> LoadedRun:
    return replace(run, summary=dict(run.summary) | changes)


@pytest.mark.parametrize(
    ("title", "metric"), [("output tokens/s", "output_tokens_per_s"), ("GPU active", "gpu_active")]
)
def test_bars_are_the_summaries_static_first_sync_before_async(runs: list[LoadedRun], title: str, metric: str) -> None:
    shown = panel(runs[::-1], title)
    assert shown.rows == ["static sync", "static async", "vllm sync", "vllm async"]
    by_label = {run.label: run.summary[metric] for run in runs}
    drawn = {shown.rows[row]: end for mark in shown.marks for row, end in zip(mark.row, mark.end, strict=True)}
    assert drawn == by_label
    assert [mark.name for mark in shown.marks] == ["sync", "async"]


def test_latencies_reach_from_the_median_to_what_may_be_quoted(runs: list[LoadedRun]) -> None:
    """24 requests are too few for p99 and p95 of TTFT: nothing but the median is drawn."""
    shown = panel(runs, "TTFT")
    spans = [mark for mark in shown.marks if isinstance(mark, Spans)]
    ends = {(float(a), float(b)) for mark in spans for a, b in zip(mark.start, mark.end, strict=True)}
    assert all(a == b for a, b in ends)
    medians = {float(x) for mark in shown.marks if isinstance(mark, Points) for x in mark.x}
    assert medians == {a for a, _ in ends}
    enough = [with_metric(run, ttft_s=dict(run.summary["ttft_s"]) | {"too_few_for": []}) for run in runs]
    spans = [mark for mark in panel(enough, "TTFT").marks if isinstance(mark, Spans)]
    assert all(float(b) > float(a) for mark in spans for a, b in zip(mark.start, mark.end, strict=True))


def test_repetitions_have_rows_of_their_own(runs: list[LoadedRun]) -> None:
    shown = side_by_side([runs[0], replace(runs[0], label="again")]).panels[0]
    assert shown.rows == [runs[0].label, "again"]


def test_what_is_the_same_for_all_is_not_drawn(runs: list[LoadedRun]) -> None:
    equal = [with_metric(run, gpu_active=0.5, tpot_s=runs[0].summary["tpot_s"]) for run in runs]
    assert [panel.title.partition(",")[0] for panel in side_by_side(equal).panels] == ["output tokens/s", "TTFT"]


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
