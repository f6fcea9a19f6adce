"""The table of a sweep as axes, places and means: nothing is lost, nothing else passes for a table."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sweep_tables import RATE, rates, row, written

import cbsim
from analysis.figures import sweeps
from analysis.statistics import sweep_table
from cbsim.draw.chart import Line, Points
from cbsim.errors import RunError, ScenarioError, UserError


def test_what_cbsim_sweep_writes_is_read_whole(tmp_path: Path) -> None:
    """Contract of the two: every point, every axis in its order with the loop last, every metric that has a value."""
    asked = {"scenario": "worked_example", "axes": {"workload.requests": [4, 8]}, "loop": ["sync", "async"]}
    swept = cbsim.sweep({**asked, "set": {"workload.output_tokens": 4}, "replicates": 2}, store=tmp_path, jobs=1)
    table = sweep_table.read(swept.path)
    assert [axis.name for axis in table.axes] == ["workload.requests", "loop"]
    assert [axis.labels for axis in table.axes] == [["4", "8"], ["sync", "async"]]
    assert len(table) == table.count("done") == 8 and len(sweep_table.places(table)) == 4
    frame = swept.table.to_pandas()
    metrics = frame.columns[list(frame.columns).index("reason") + 1 :]
    assert set(table.metrics) == {name for name in metrics if frame[name].notna().any()}
    for name, values in table.metrics.items():
        np.testing.assert_array_equal(values, frame[name].to_numpy())


def test_numbers_rise_names_stand_as_they_come_and_one_value_is_no_axis(tmp_path: Path) -> None:
    given = product(("b", "a"), (4, 2, 10), (None, "x"))
    rows = [row({"scheduler.name": s, "n": n, "y": y, "z": 1}, preemptions=1.0) for s, n, y in given]
    table = sweep_table.read(written(tmp_path / "t.parquet", rows))
    axes = {axis.name: axis for axis in table.axes}
    assert axes["scheduler.name"].labels == ["b", "a"] and axes["scheduler.name"].numbers is None
    assert axes["n"].labels == ["2", "4", "10"] and axes["n"].codes.tolist() == [1, 1, 0, 0, 2, 2] * 2
    assert axes["y"].labels == ["not set", "x"]
    assert table.constants == {"z": "1", "loop": "sync"}


def test_objects_are_called_by_what_differs_between_them(tmp_path: Path) -> None:
    """As runs are: the scheduler's name, then the setting that one of them has. A text of JSON that is no object stays
    one of its values."""
    given = [{"name": "vllm"}, {"name": "vllm", "max_num_batched_tokens": 512}, {"name": "sglang"}, "tgi"]
    rows = [row({"scheduler": json.dumps(each)}, preemptions=1.0) for each in given]
    table = sweep_table.read(written(tmp_path / "t.parquet", rows))
    assert table.axes[0].labels == ["vllm", "vllm 512", "sglang", "tgi"]


def test_fields_that_advance_together_are_one_axis(tmp_path: Path) -> None:
    """Else a reader who fixes one of them finds one point of the other."""
    pairs = [("1b", 1), ("8b", 2), ("70b", 4)]
    rows = [row({"model": m, "gpus": g, "n": n}, preemptions=1.0) for m, g in pairs for n in (1, 2, 3)]
    table = sweep_table.read(written(tmp_path / "t.parquet", rows))
    assert [axis.fields for axis in table.axes] == [("model", "gpus"), ("n",)]
    assert table.axes[0].labels == ["1b, 1", "8b, 2", "70b, 4"]
    assert table.axes[0].values == ["1b, gpus = 1", "8b, gpus = 2", "70b, gpus = 4"]
    assert table.axes[0].name == "model, gpus"
    assert table.axis("gpus") is table.axes[0]


def test_explicit_points_are_one_axis_that_names_what_each_sets(tmp_path: Path) -> None:
    """They are no grid: apart, their fields are mostly "not set", and a curve along one of them has a point or two."""
    points = [{}, {"a.size": 4096}, {"b.slots": 16}, {"a.size": 512, "b.slots": 16}]
    rows = [row({"a.size": None, "b.slots": None, **each, "n": n}, preemptions=1.0) for each in points for n in (1, 2)]
    table = sweep_table.read(written(tmp_path / "t.parquet", rows))
    assert [axis.fields for axis in table.axes] == [("a.size", "b.slots"), ("n",)]
    assert table.axes[0].labels == ["as it is", "size = 4,096", "slots = 16", "size = 512, slots = 16"]
    view = sweep_table.view(table, None)
    assert view.x is table.axes[1] and view.series == [table.axes[0]]


def test_what_most_points_differ_in_is_named_first(tmp_path: Path) -> None:
    """A field that all share is not named; where a legend cuts a name, what differs is still there."""
    points = [{"a.on": "x", "b.on": 1, "c.size": size, "d": 7} for size in (1, 2, 3)]
    points += [points[0] | {"b.on": 2}, points[1] | {"a.on": "y"}]
    table = sweep_table.read(written(tmp_path / "t.parquet", [row(each, preemptions=1.0) for each in points]))
    assert table.axes[0].labels[3:] == ["size = 1, a.on = x, b.on = 2", "size = 2, a.on = y, b.on = 1"]
    assert table.constants["d"] == "7"


def test_a_list_of_objects_is_no_json_in_a_label(tmp_path: Path) -> None:
    given = ([], [{"at_s": 1, "server": 0}], [{"at_s": 1, "server": 0}, {"at_s": 2.5, "server": 3}])
    rows = [row({"fleet.failures": json.dumps(each)}, preemptions=1.0) for each in given]
    table = sweep_table.read(written(tmp_path / "t.parquet", rows))
    assert table.axes[0].labels == ["none", "at_s 1 server 0", "2: at_s 1 server 0; at_s 2.5 server 3"]
    view = sweep_table.view(table, None)
    assert view.x is None and view.series == [table.axes[0]]  # names too long to stand along an axis


def test_numbers_that_advance_together_are_all_written_along_the_axis(tmp_path: Path) -> None:
    """Else the second is a rise or a fall that nobody explains."""
    rows = [row({"seqs": n, "rate": rate}, preemptions=1.0) for n, rate in ((8, 2), (16, 9), (24, 4))]
    table = sweep_table.read(written(tmp_path / "t.parquet", rows))
    view = sweep_table.view(table, None)
    (panel,) = sweeps.curves(table, sweep_table.places(table), view, ["preemptions"], {}).panels
    assert (panel.x, list(panel.x_ticks), panel.categories) == ("seqs, rate", [8, 16, 24], ["8, 2", "16, 9", "24, 4"])


def test_points_alone_are_a_series_each_under_no_axis(tmp_path: Path) -> None:
    """Their names are too long to stand along one; of numbers that are no grid, too."""
    points = [(1, 1), (1, 2), (2, 5), (3, 9)]
    rows = [row({"x": x, "y": y}, preemptions=1.0) for x, y in points]
    table = sweep_table.read(written(tmp_path / "t.parquet", rows))
    places, view = sweep_table.places(table), sweep_table.view(table, None)
    assert view.x is None and [places.label(int(rows[0])) for rows in view.rows(places)] == table.axes[0].labels
    (panel,) = sweeps.curves(table, places, view, ["preemptions"], {}).panels
    assert [mark.x.tolist() for mark in panel.marks if isinstance(mark, Points)] == [[0], [1], [2], [3]]
    assert not any(isinstance(mark, Line) for mark in panel.marks)


def scattered(path: Path, count: int, beside: int = 1) -> sweep_table.SweepTable:
    points = [{"x": at, "y": at * at % 31, "z": z} for at in range(count) for z in range(beside)]
    return sweep_table.read(written(path, [row(point, preemptions=1.0) for point in points]))


@pytest.mark.parametrize(
    ("count", "beside", "numbered"), [(24, 1, False), (60, 1, True), (60, 3, True), (20, 3, False), (100, 1, True)]
)
def test_all_points_that_a_picture_holds_are_drawn(tmp_path: Path, count: int, beside: int, numbered: bool) -> None:
    """A legend of more names than it holds would be none: they stand along an axis, by their numbers."""
    table = scattered(tmp_path / "t.parquet", count, beside)
    places, view = sweep_table.places(table), sweep_table.view(table, None)
    assert (len(table.axes[0]), table.axes[0].numbered, view.fixed) == (count, numbered, {})
    chart = sweeps.curves(table, places, view, ["preemptions"], {})
    (panel,) = chart.panels
    assert sum(len(mark.x) for mark in panel.marks if isinstance(mark, Points)) == count * beside
    assert chart.title == f"t: over {view.x.name}" if view.x else "t"
    if numbered:
        assert table.axes[0].values[1] == "2: x = 1, y = 1" and not any(isinstance(m, Line) for m in panel.marks)
        assert set(panel.categories) - {""} < {f"{number + 1}" for number in range(count)}


def test_a_title_says_which_places_a_picture_has_no_room_for(tmp_path: Path) -> None:
    """Of more points than are numbered, and of grids of many axes."""
    table = scattered(tmp_path / "t.parquet", sweep_table.MOST_POINTS + 1)
    places, view = sweep_table.places(table), sweep_table.view(table, None)
    assert len(table.axes) == 2
    drawn = sum(len(own) for own in view.rows(places))
    chart = sweeps.curves(table, places, view, ["preemptions"], {})
    assert drawn < 10 and chart.title == f"t: over x; {drawn} of 101 places fit, those with y = 10"


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a.rate_per_s", "b.n"], ["rate_per_s", "n"]),
        (["a.b.n", "c.b.n"], ["a.b.n", "c.b.n"]),
        (["scheduler.name", "model.name", "n"], ["scheduler.name", "model.name", "n"]),
        (["a.name", "name"], ["a.name", "name"]),
    ],
)
def test_a_short_name_is_that_of_one_axis(tmp_path: Path, names: list[str], short: list[str]) -> None:
    grid = np.stack(np.meshgrid(*[[1, 2]] * len(names)), axis=-1).reshape(-1, len(names)).tolist()
    rows = [row(dict(zip(names, values, strict=True)), preemptions=1.0) for values in grid]
    table = sweep_table.read(written(tmp_path / "t.parquet", rows))
    assert [axis.short for axis in table.axes] == short


def test_means_and_intervals_are_those_of_student(tmp_path: Path) -> None:
    """t at 0.975: 4.303 for 2 degrees of freedom, 12.706 for 1. One value has no interval, a failed point no value."""
    values = {1: [1.0, 2.0, 3.0], 2: [4.0, 6.0, None], 3: [5.0, None, None], 4: [None, None, None]}
    rows = [
        row({"n": n}, seed, steps=v) | ({} if v else {"status": "failed", "reason": "because"})
        for n, own in values.items()
        for seed, v in enumerate(own)
    ]
    table = sweep_table.read(written(tmp_path / "t.parquet", rows))
    means = sweep_table.places(table).means(table.metrics["steps"])
    assert means.mean.tolist()[:3] == [2.0, 5.0, 5.0] and means.n.tolist() == [3, 2, 1, 0]
    assert means.half[0] == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert means.half[1] == pytest.approx(12.706205, rel=1e-6)
    assert np.isnan(means.half[2:]).all() and np.isnan(means.mean[3])
    assert means.low[1] == 0.0  # no metric is negative
    assert (means.low[2], means.high[2]) == (5.0, 5.0)


def test_values_of_any_kind_make_an_axis(tmp_path: Path) -> None:
    values = ["[1, 2]", "[3]", None]
    table = sweep_table.read(written(tmp_path / "t.parquet", [row({"a": v}, preemptions=0.0) for v in values]))
    assert table.axes[0].labels == ["[1, 2]", "[3]", "not set"]
    rows = [row({"a": v}, preemptions=0.0) for v in (1.5, math.nan, math.inf, math.nan)]
    assert sweep_table.read(written(tmp_path / "t.parquet", rows)).axes[0].labels == ["1.5", "nan", "inf"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(0, 1e6)), min_size=1, max_size=40))
def test_every_point_is_in_the_place_of_its_settings(tmp_path_factory: pytest.TempPathFactory, given: list) -> None:
    path = tmp_path_factory.mktemp("t") / "t.parquet"
    table = sweep_table.read(
        written(path, [row({"a": a, "b": f"v{b}"}, i, steps=v) for i, (a, b, v) in enumerate(given)])
    )
    made = sweep_table.places(table)
    means = made.means(table.metrics["steps"])
    for i, (a, b, _) in enumerate(given):
        own = [v for x, y, v in given if (x, y) == (a, b)]
        assert means.n[made.of[i]] == len(own)
        assert means.mean[made.of[i]] == pytest.approx(np.mean(own))


def _table(tmp_path: Path, **changes: object) -> Path:
    table = pa.table({name: [r.get(name) for r in rates()] for name in rates()[0]})
    for name, values in changes.items():
        at = table.column_names.index(name)
        table = table.remove_column(at) if values is None else table.set_column(at, name, pa.array(values))
    path = tmp_path / "t.parquet"
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": None}, "has no column seed, expected the table of a sweep"),
        ({"status": ["Done"] * 48}, "status: got 'Done', must be one of done, failed, missing, expected the table of"),
        ({"preemptions": [0.0] * 47 + [-1.0]}, r"row 47: preemptions: got -1, must be finite and >= 0"),
        ({"ttft_s.p99": [math.inf] * 48}, r"row 0: ttft_s\.p99: got inf, must be finite and >= 0"),
        ({"seed": [0, 0, *range(46)]}, "row 1: is the point and seed of row 0"),
        (
            {"status": ["failed"] * 48, "reason": ["out of memory"] * 48},
            "none of its 48 points is done, the first because",
        ),
        ({"preemptions": ["none"] * 48}, "preemptions: got a column of string, expected the table"),
    ],
)
def test_what_is_no_table_is_named(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        sweep_table.read(_table(tmp_path, **changes))


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("not Parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    for name in ("a", "b", "c"):
        with pytest.raises(ScenarioError, match=rf"{name}.parquet: .*, expected the table of a sweep"):
            sweep_table.read(tmp_path / f"{name}.parquet")


def test_unknown_metrics_and_fields_have_a_hint(tmp_path: Path) -> None:
    table = sweep_table.read(_table(tmp_path))
    assert table.metric("ttft.p99", "--metric") == "ttft_s.p99"
    with pytest.raises(RunError, match=r"no point has a metric 'ttft.p9'; did you mean ttft.p99"):
        table.metric("ttft.p9", "--metric")
    with pytest.raises(RunError, match=rf"--x 'rate': no such field; did you mean {RATE}"):
        table.axis("rate")
