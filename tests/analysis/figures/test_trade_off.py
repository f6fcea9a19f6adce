"""Two metrics against each other: what is dominated is so by another, and the best are dominated by none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sweep_tables import rates, row, written

from analysis.figures import sweeps
from analysis.statistics import sweep_table
from analysis.statistics.sweep_table import view
from cbsim.draw.chart import Cells, Chart, Level, Line, Points, Whiskers
from cbsim.metrics import checks

PAIR = ("output_tokens_per_s_per_user", "ttft_s.p99")  # more is better, less is better


@given(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=1, max_size=12), st.integers(1, 5))
def test_the_frontier_is_that_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[int, int, int]], most: int
) -> None:
    """Replicates at x, x + 1 and y, y + spread. Only places within the limit beat any other, or are best."""
    path = tmp_path_factory.mktemp("t") / "t.parquet"
    rows = [
        row({"n": n}, seed, **{PAIR[0]: float(x + seed), PAIR[1]: float(y + seed * spread / 50)})
        for n, (x, y, spread) in enumerate(given)
        for seed in (0, 1)
    ]
    table = sweep_table.read(written(path, rows))
    made, limit = sweep_table.places(table), checks.parse(f"ttft.p99<={most}s")
    found = sweeps.trade_off(table, made, PAIR, [limit])
    x, y = found.x, found.y
    inside = [i for i in range(len(made)) if y.mean[i] <= most]

    def beats(i: int, j: int) -> bool:
        return x.mean[i] >= x.mean[j] and y.mean[i] <= y.mean[j] and (x.mean[i], y.mean[i]) != (x.mean[j], y.mean[j])

    best = {(x.mean[j], y.mean[j]) for j in inside if not any(beats(i, j) for i in inside)}
    assert {(x.mean[j], y.mean[j]) for j in found.best} == best
    sure = {j for j in inside if any(x.low[i] > x.high[j] and y.high[i] < y.low[j] for i in inside)}
    assert set(np.flatnonzero(found.dominated).tolist()) == sure
    assert np.flatnonzero(found.met).tolist() == inside


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> sweep_table.SweepTable:
    return sweep_table.read(written(tmp_path_factory.mktemp("t") / "rates.parquet", rates()))


def _marks(chart: Chart, kind: type) -> list:
    return [mark for panel in chart.panels for mark in panel.marks if isinstance(mark, kind)]


def test_curves_have_every_place_with_its_interval_and_the_limit(table: sweep_table.SweepTable) -> None:
    made = sweep_table.places(table)
    chart = sweeps.curves(table, made, view(table, None), ["ttft_s.p99"], {"ttft_s.p99": 0.5})
    lines = {mark.name: mark for mark in _marks(chart, Line)}
    assert set(lines) == {"vllm, sync", "vllm, async", "sarathi, sync", "sarathi, async"}
    means = made.means(table.metrics["ttft_s.p99"])
    drawn = np.sort(np.concatenate([mark.y for mark in lines.values()]))
    np.testing.assert_allclose(drawn, np.sort(means.mean))
    assert sum(len(mark.at) for mark in _marks(chart, Whiskers)) == np.isfinite(means.half).sum() == 15
    assert [mark.y for mark in _marks(chart, Level)] == [0.5]
    assert np.isnan(lines["sarathi, sync"].y[-1])  # all of its replicates failed: a gap, no number
    assert chart.panels[0].x_log and list(chart.panels[0].x_ticks) == [1, 2, 4, 16]


def test_names_are_not_joined_by_a_line(table: sweep_table.SweepTable) -> None:
    """There is nothing between two schedulers; a series is its markers with their intervals."""
    made = sweep_table.places(table)
    chart = sweeps.curves(table, made, view(table, "scheduler.name"), ["ttft_s.p99"], {})
    assert not _marks(chart, Line)
    assert len(_marks(chart, Points)) == len(_marks(chart, Whiskers)) == 8
    assert chart.panels[0].categories == ["vllm", "sarathi"]


def test_cells_are_means_and_those_beyond_the_limit_are_crossed(table: sweep_table.SweepTable) -> None:
    made, limit = sweep_table.places(table), checks.parse("ttft.p99<=0.35s")
    chart = sweeps.heat_map(table, made, "ttft_s.p99", limit)
    assert chart is not None
    sync, both = [cells.values for cells in _marks(chart, Cells)]
    assert sync.shape == both.shape == (2, 4) and np.isnan(sync[1, 3])
    crossed = sum(len(mark.x) for mark in _marks(chart, Points))
    assert crossed == sum((values > 0.35).sum() for values in (sync, both))
    assert [panel.title for panel in chart.panels] == ["sync", "async"]


def test_one_place_is_a_point_and_has_no_cells(tmp_path: Path) -> None:
    table = sweep_table.read(written(tmp_path / "t.parquet", [row({}, preemptions=3.0)]))
    made = sweep_table.places(table)
    assert sweeps.heat_map(table, made, "preemptions", None) is None
    chart = sweeps.curves(table, made, view(table, None), ["preemptions"], {})
    assert [mark.y.tolist() for mark in _marks(chart, Points)] == [[3.0]]


def test_single_runs_claim_no_interval(tmp_path: Path, table: sweep_table.SweepTable) -> None:
    """Where no place has two runs the captions speak of no 95 %, and where one has they do."""
    rows = [row({"n": n}, 0, **{PAIR[0]: float(n), PAIR[1]: float(n)}) for n in (1, 2)]
    single = sweep_table.read(written(tmp_path / "t.parquet", rows))
    for each, intervals in ((single, False), (table, True)):
        assert ("95 %" in sweeps.pareto(each, sweep_table.places(each), PAIR, []).caption) == intervals


def test_a_marker_is_named_by_all_that_its_point_sets(tmp_path: Path) -> None:
    """In the legend, dominated or not, where the points are few; of many, the best by their numbers."""
    for count in (3, 30):
        points = [{"x": at, "y": at * at % 7 - 1, "z": at % 2} for at in range(count)]
        rows = [row(each, **{PAIR[0]: 9.0 + at, PAIR[1]: 1.0 + at % 20}) for at, each in enumerate(points)]
        table = sweep_table.read(written(tmp_path / "t.parquet", rows))
        made = sweep_table.places(table)
        chart = sweeps.pareto(table, made, PAIR, [])
        marks = _marks(chart, Points)
        names, labels = {mark.name for mark in marks} - {""}, [label for mark in marks for label in mark.labels]
        best = np.flatnonzero(~sweeps.trade_off(table, made, PAIR, []).dominated).tolist()
        if count == 3:
            assert names == {*table.axes[0].values} and not labels and "Beside" not in chart.caption
        else:
            assert chart.caption.endswith(" Beside a marker: its point.")
            assert names == {"t"} and [*map(int, labels)] == [at + 1 for at in best]
