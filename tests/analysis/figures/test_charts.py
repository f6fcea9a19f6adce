"""What figures show is what the frames say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.calls import simulated

from analysis.figures import requests, side_by_side, steps
from analysis.figures.axis import Frames, valid
from analysis.page import report
from analysis.statistics.loading import LoadedRun, read, request_frame
from cbsim.draw import lane_chart, render
from cbsim.draw.chart import Area, Bars, Chart, Level, Line, Panel, Points, Spans, pipelined, unit
from cbsim.record.record import LANES, PHASES, STEP_COLUMNS, RequestRow
from cbsim.record.tables import Steps, token_times

CASES = {
    "example": ["worked_example", "workload.output_tokens=30"],
    "tight": ["landscape", "workload.requests=60", "kv_cache.num_blocks=400"],
    "sparse": ["tiny_cpu", "workload.arrivals={kind: poisson, rate_per_s: 8}", "workload.requests=30"],
    "static": ["landscape", "workload.requests=40", "scheduler={name: static, batch_size: 8}"],
    "drafts": ["landscape", "workload.requests=40", "speculation={method: ngram, k: 3, acceptance: {rate: 0.5}}"],
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[LoadedRun]]:
    """Async, then sync run of several scenarios."""
    more = {"sparse": ["--window", "1:3"]}
    return {
        name: read(simulated(tmp_path_factory.mktemp(name), *words, more=more.get(name, ()))[::-1])
        for name, words in CASES.items()
    }


def _steps(runs: Sequence[LoadedRun]) -> dict[str, pd.DataFrame]:
    return {run.label: run.steps for run in runs}


@pytest.fixture(params=CASES)
def runs(request: pytest.FixtureRequest, cases: dict[str, list[LoadedRun]]) -> list[LoadedRun]:
    return cases[request.param]


# -- any table --------------------------------------------------------------------------------------------------------

SPAN = st.integers(0, 3_000_000)


@st.composite
def tables(draw: Any) -> pd.DataFrame:
    """Up to ten steps of a sync loop, of any length, phases of no length and pauses included."""
    now, rows = draw(SPAN), []
    for step in range(draw(st.integers(0, 10))):
        times: dict[str, int] = {}
        for name in ("schedule", "prepare", "launch", "h2d", "compute", "d2h", "update"):
            times[f"{name}_start_ns"], now = now, now + draw(SPAN)
            times[f"{name}_end_ns"] = now
        times |= {"await_start_ns": times["launch_end_ns"], "await_end_ns": times["d2h_end_ns"]}
        now += draw(st.sampled_from([0, 0, 7_000_000]))
        prefill, decode = draw(st.integers(0, 40)), draw(st.integers(0, 9))
        counts = {"step": step, "rows": decode + (prefill > 0), "decode_rows": decode, "prefill_tokens": prefill}
        drafts = draw(st.integers(0, 9))
        counts |= {"draft_tokens": drafts, "accepted_tokens": draw(st.integers(0, drafts))}
        tokens = prefill + decode + drafts
        counts |= {"tokens": tokens, "padded_tokens": tokens + draw(st.integers(0, 5))}
        counts |= {name: draw(st.integers(0, 50)) for name in STEP_COLUMNS if name not in (*counts, *times)}
        rows.append(counts | times)
    return pd.DataFrame(rows, columns=list(STEP_COLUMNS), dtype=np.int64)


def _all(frames: Frames) -> list[Chart]:
    nothing, bounds = dict.fromkeys(frames), dict.fromkeys(frames, 99)
    made = [lane_chart.lanes(frames), lane_chart.lanes(frames, (1, 2))]
    made += [draw(frames) for draw in (steps.gpu_active, steps.step_time, steps.queues, steps.preemptions)]
    return made + [draw(frames, given) for draw in (steps.tokens, steps.blocks) for given in (nothing, bounds)]


def _valid(chart: Chart) -> None:
    """The contract of `cbsim.draw.chart`."""
    assert chart.caption.strip() and chart.title and chart.panels
    for panel in chart.panels:
        for mark in panel.marks:
            _valid_mark(panel, mark)


def _valid_mark(panel: Panel, mark: Any) -> None:
    if isinstance(mark, Line):
        assert len(mark.x) == len(mark.y) and (np.diff(mark.x) >= 0).all()
    elif isinstance(mark, Area):
        assert len(mark.x) == len(mark.low) == len(mark.high) and (mark.low <= mark.high + 1e-9).all()
    elif isinstance(mark, Spans):
        assert len(mark.row) == len(mark.start) == len(mark.end) and (mark.start < mark.end).all()
        assert all(0 <= row < len(panel.rows) for row in mark.row)
        assert len(mark.texts) in (0, len(mark.row)) and len(mark.labels) in (0, len(mark.row))
    elif isinstance(mark, Points):
        assert len(mark.x) == len(mark.y) and len(mark.texts) in (0, len(mark.x))
    elif isinstance(mark, Bars):
        assert all(0 <= x < len(panel.categories) for x in mark.x)
    for name in ("x", "y", "low", "high", "start", "end", "height"):
        assert np.isfinite(getattr(mark, name, 0.0)).all()


@given(tables(), tables())
def test_every_figure_can_be_made_of_any_table(one: pd.DataFrame, other: pd.DataFrame) -> None:
    """Of no step as of ten; what is missing is said."""
    for chart in _all({"one": one, "other": other}):
        _valid(chart)
        assert ("No step" in chart.caption) >= (len(one) == 0)


@given(tables())
def test_lanes_show_all_that_is_in_the_window_and_nothing_else(table: pd.DataFrame) -> None:
    """For each phase and lane, the drawn bars last as long as it is busy in the window; computing and idle time
    between the first and the last compute fill it without overlap.
    """
    (panel,) = lane_chart.lanes({"run": table}).panels
    if not len(table):
        return
    assert panel.x_range is not None
    first = max(0, len(table) // 2 - lane_chart.STEPS_SHOWN // 2)
    origin = int(table["compute_start_ns" if first else "schedule_start_ns"].iloc[first])
    size = _size(panel)
    end = origin + panel.x_range[1] * size
    for name in (*PHASES, *LANES):
        starts, ends = (table[f"{name}_{edge}_ns"].clip(origin, end) for edge in ("start", "end"))
        assert _length(panel, name) * size == pytest.approx(float((ends - starts).sum()), abs=1)
    gaps = (
        table["compute_start_ns"].clip(origin, end).to_numpy()[1:]
        - table["compute_end_ns"].clip(origin, end).to_numpy()[:-1]
    )
    assert _length(panel, "GPU idle") * size == pytest.approx(float(gaps.sum()), abs=1)


def _size(panel: Panel) -> float:
    """Nanoseconds of one of the panel's x."""
    return {"µs": 1e3, "ms": 1e6, "s": 1e9}[panel.x]


def _length(panel: Panel, name: str) -> float:
    return sum(
        float((mark.end - mark.start).sum()) for mark in panel.marks if isinstance(mark, Spans) and mark.name == name
    )


@given(tables())
def test_gpu_active_adds_up_to_the_compute_lane(table: pd.DataFrame) -> None:
    ran = table[table["rows"] > 0]
    panel = steps.gpu_active({"run": table}).panels[0]
    assert len(panel.marks) == bool(len(ran))
    for mark in panel.marks:
        assert isinstance(mark, Line)
        edges = [ran["schedule_start_ns"].iloc[0], *ran["compute_end_ns"]]
        assert mark.x * _size(panel) == pytest.approx(np.unique(edges), abs=1)
        busy = float((ran["compute_end_ns"] - ran["compute_start_ns"]).sum())
        assert _integral(mark) * _size(panel) == pytest.approx(busy, abs=1)


def _integral(mark: Line) -> float:
    return float(mark.y[:-1] @ np.diff(mark.x))


# -- real runs --------------------------------------------------------------------------------------------------------


def test_every_figure_of_a_real_run_is_valid(runs: list[LoadedRun]) -> None:
    for chart in report.details(runs):
        _valid(chart)


@pytest.mark.usefixtures("drawn")
def test_every_figure_can_be_drawn(cases: dict[str, list[LoadedRun]]) -> None:
    for chart in report.details(cases["sparse"]):
        assert render.images(chart, "png")[0].startswith(b"\x89PNG")


def test_a_run_without_a_request_that_is_done_says_so_and_is_drawn() -> None:
    none = RequestRow(0, "a", 0, 1, 0, 8, 8, 8, 0, -1, "waiting", "", -1, 0, 0, [])
    empty = Steps(np.empty((0, len(STEP_COLUMNS)), dtype=np.int64))
    for rows in ([], [none]):
        times = token_times(rows, empty)
        frames = {"run": request_frame(times)}
        for chart in (requests.timeline(frames), requests.latency(frames, {"run": times}, {"run": True}, {})):
            _valid(chart)
        assert "run 0" in requests.latency(frames, {"run": times}, {"run": True}, {}).caption
    assert "No run has a price" in side_by_side.cost({"run": {}}).caption


def test_the_sync_loop_stands_above_the_async_one(runs: list[LoadedRun]) -> None:
    """However they were given; a loop is told by its steps, and both panels show as long a time."""
    chart = lane_chart.lanes(_steps(runs))
    assert [pipelined(run.steps) for run in runs] == [True, False]
    assert [panel.title.split(":")[0] for panel in chart.panels] == [runs[1].label, runs[0].label]
    assert chart.panels[0].x_range == chart.panels[1].x_range
    assert chart.share_x


def test_lanes_start_with_the_step_that_was_asked_for(cases: dict[str, list[LoadedRun]]) -> None:
    (panel,) = lane_chart.lanes({"run": cases["example"][1].steps}, (10, 3)).panels
    (compute,) = (mark for mark in panel.marks if mark.name == "compute")
    assert isinstance(compute, Spans)
    assert list(compute.labels) == ["10", "11", "12"]
    assert compute.start[0] == 0.0
    assert "step" in lane_chart.lanes({"run": cases["example"][1].steps}, (10_000, 1)).panels[0].title


def test_queue_and_blocks_over_time_average_to_the_metrics(
    runs: list[LoadedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same weights as in cbsim.metrics.metrics: a count holds until the next plan, and an idle server has none. A
    cache of which little is used is drawn without its empty part, which would fill the figure.
    """
    for share, there in ((2.0, False), (0.0, True)):
        monkeypatch.setattr(steps, "SEEN", share)
        (panel,) = steps.blocks({"run": runs[0].steps}, {"run": runs[0].summary["total_blocks"]}).panels
        assert ({"empty", "total"} <= {mark.name for mark in panel.marks}) == there
        assert (panel.y_range is not None) == there
    for run in runs:
        size = unit(run.steps["update_end_ns"].max() / 1e9).size
        span = run.summary["makespan_s"] / size
        (panel,) = steps.queues({"run": run.steps}).panels
        waiting = next(mark for mark in panel.marks if isinstance(mark, Line) and mark.name == "waiting")
        assert _integral(waiting) / span == pytest.approx(run.summary["waiting"]["mean"], abs=1e-9)
        total = run.summary["total_blocks"]
        (panel,) = steps.blocks({"run": run.steps}, {"run": total}).panels
        used = next(mark for mark in panel.marks if mark.name == "used")
        assert isinstance(used, Area)
        share = float((used.high - used.low)[:-1] @ np.diff(used.x)) / span / total
        assert share == pytest.approx(run.summary["kv_utilisation"]["mean"], rel=1e-9)
        empty = next(mark for mark in panel.marks if mark.name == "empty")
        assert isinstance(empty, Area)
        assert empty.high == pytest.approx(np.full(len(empty.high), total), rel=1e-9)


def test_a_sync_loop_with_requests_left_is_not_idle_between_steps() -> None:
    """A pause between two steps of a measured sync loop belongs to the step before if requests are left, else not."""
    times = {name: [0, 100, 300] for name in ("schedule_start_ns",)} | {"update_end_ns": [90, 200, 400]}
    counts = {"running": [2, 2, 1], "waiting": [0, 0, 0], "finished": [1, 2, 1]}
    start, end = valid(pd.DataFrame(times | counts))
    assert start.tolist() == [0, 1e-7, 3e-7]
    assert end.tolist() == [1e-7, 2e-7, 4e-7]


def test_tokens_reach_their_largest_step_and_the_budget(cases: dict[str, list[LoadedRun]]) -> None:
    for name in ("sparse", "tight"):
        run = cases[name][1]
        bound = steps.budget(run.scenario)
        chart = steps.tokens({"run": run.steps}, {"run": bound})
        most = max(float(mark.high.max()) for mark in chart.panels[0].marks if isinstance(mark, Area))
        assert most == pytest.approx(int(run.steps["padded_tokens"].max()))
        assert any(isinstance(mark, Level) and mark.y == bound for mark in chart.panels[0].marks)
    assert steps.budget({"scheduler": {"name": "static", "batch_size": 4}}) is None
    assert steps.budget({}) is None, "nobody knows"
    assert "budget of 999,999" in steps.tokens({"run": run.steps}, {"run": 999_999}).caption


def test_tokens_show_what_came_of_drafts(cases: dict[str, list[LoadedRun]]) -> None:
    """Beside decode rows, and only in runs that have drafts: the rejected ones are the waste of the summary. Steps that
    verify and compute no prompt are decode steps.
    """
    run, without = cases["drafts"][1], cases["tight"][1]
    shown = steps.tokens({"run": run.steps, "without": without.steps}, {})
    assert shown.panels[1].title == "run: decode rows and drafts"
    assert [mark.name for mark in shown.panels[1].marks] == ["decode", "accepted drafts", "rejected drafts"]
    assert not {mark.name for mark in shown.panels[3].marks} & {"accepted drafts", "rejected drafts"}
    for area, came in zip(shown.panels[1].marks[1:], ("accepted_tokens", "rejected_tokens"), strict=True):
        assert isinstance(area, Area)
        assert len(area.x) <= 800, "nothing is thinned: a height a step"
        assert (area.high - area.low)[:-1].sum() == pytest.approx(run.summary["drafts"][came])
    names = [mark.name for mark in steps.step_time({"run": run.steps}).panels[0].marks if isinstance(mark, Points)]
    assert names == ["run, decode only", "run, mixed"]
    assert int((run.steps["prefill_tokens"] > 0).sum()) < 41 < int((run.steps["draft_tokens"] > 0).sum())


def test_preemptions_end_at_their_total(cases: dict[str, list[LoadedRun]]) -> None:
    runs = cases["tight"]
    chart = steps.preemptions(_steps(runs))
    for panel, metric in zip(chart.panels, ("preemptions", "recomputed_tokens"), strict=True):
        assert [mark.y[-1] for mark in panel.marks if isinstance(mark, Line)] == [run.summary[metric] for run in runs]
    assert runs[0].summary["preemptions"] > 0
    assert "none" in steps.preemptions(_steps(cases["example"])).caption


def test_a_request_is_drawn_from_arrival_to_last_token(runs: list[LoadedRun]) -> None:
    """Queue, prefill and decode of a request that is done add up to its E2E latency."""
    frame = runs[0].requests
    (panel,) = requests.timeline({"run": frame}, most=1000).panels
    size = _size(panel) / 1e9
    order = np.argsort(frame["arrival_ns"].to_numpy(), kind="stable")
    drawn = np.zeros(len(frame))
    for mark in panel.marks:
        if isinstance(mark, Spans):
            np.add.at(drawn, mark.row, mark.end - mark.start)
    done = frame["done"].to_numpy()[order]
    assert done.any()
    assert drawn[done] * size == pytest.approx(frame["e2e_s"].to_numpy()[order][done], rel=1e-9)


def test_of_many_requests_the_first_and_the_last_are_drawn(cases: dict[str, list[LoadedRun]]) -> None:
    frame = cases["tight"][0].requests
    chart = requests.timeline({"run": frame}, most=7)
    texts = [text for mark in chart.panels[0].marks if isinstance(mark, Spans) for text in mark.texts]
    ids = {text.split(":")[0] for text in texts}
    assert len(chart.panels[0].rows) == len(ids) == 7
    assert {str(frame["id"].iloc[0]), str(frame["id"].iloc[-1])} <= ids
    assert "7 of 60" in chart.caption


def test_what_an_interrupted_run_left_lasts_until_its_end() -> None:
    """A request without a first token is drawn up to the last thing known, and marked as not done."""
    frame = pd.DataFrame({"id": ["a", "b", "c"], "status": ["length", "unfinished", "refused"]})
    frame = frame.assign(arrival_ns=[0, 10, 20], scheduled_ns=[5, 15, -1], first_token_ns=[50, -1, -1])
    frame = frame.assign(last_token_ns=[100, -1, -1], prompt_tokens=1, generated_tokens=1, done=[True, False, False])
    (panel,) = requests.timeline({"run": frame}).panels
    marks = {mark.name: mark for mark in panel.marks}
    assert marks["prefill"].end.tolist() == pytest.approx([0.05, 0.1])
    assert marks["queue"].row.tolist() == [0, 1]
    assert marks["not done"].y.tolist() == [1.0, 2.0]


def test_latencies_are_exact_and_marked_as_in_the_summary(runs: list[LoadedRun]) -> None:
    """Every drawn point is the exact share of values; percentiles are the summary's, of the window, and only those
    for which there are enough values.
    """
    chart = report.latencies(runs)
    for panel, (key, _) in zip(chart.panels, requests.QUANTITIES, strict=True):
        for run in runs:
            line, points = (mark for mark in panel.marks if mark.name == run.label)
            assert isinstance(line, Line) and isinstance(points, Points)
            found, size = run.summary[key], _size(panel) / 1e9
            quoted = [q for q in (50, 95, 99) if f"p{q}" not in found["too_few_for"]]
            assert points.x * size == pytest.approx([found[f"p{q}"] for q in quoted], rel=1e-9)
            assert (line.y[0], line.y[-1]) == (0.0, 1.0)
            assert (line.x[0] * size, line.x[-1] * size) == pytest.approx((found["min"], found["max"]), rel=1e-9)
            if key != "itl_s":
                values = run.counted[key].dropna().to_numpy()
                assert line.y[1:] == pytest.approx([(values <= x * size * (1 + 1e-12)).mean() for x in line.x[1:]])


def test_measured_runs_are_solid_and_simulated_ones_dashed(runs: list[LoadedRun]) -> None:
    frames, times = {run.label: run.requests for run in runs}, {run.label: run.times for run in runs}
    measured = {runs[0].label: True, runs[1].label: False}
    for panel in requests.latency(frames, times, measured, {}).panels:
        assert [mark.style.dash for mark in panel.marks if isinstance(mark, Line)] == ["solid", "dashed"]


def test_step_times_keep_their_extremes_and_are_few(cases: dict[str, list[LoadedRun]]) -> None:
    table = cases["tight"][0].steps
    ran = table[table["rows"] > 0]
    spent = (ran["compute_end_ns"] - ran["compute_start_ns"]).to_numpy() / 1e9
    for panel in steps.step_time({"run": table}).panels:
        marks = [mark for mark in panel.marks if isinstance(mark, Points)]
        drawn = np.concatenate([mark.y for mark in marks]) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[panel.y]
        assert len(drawn) <= 2000
        assert len(drawn) < len(ran) or len(ran) <= 2000
        assert (drawn.min(), drawn.max()) == pytest.approx((spent.min(), spent.max()))


# -- money ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_frontier_is_what_no_other_point_beats(points: list[tuple[int, int]]) -> None:
    x, y = (np.array([point[i] for point in points], dtype=float) for i in (0, 1))
    best = side_by_side.frontier(x, y)
    kept = {(a, b) for a, b in points if not any(p >= a and q >= b and (p, q) != (a, b) for p, q in points)}
    assert {points[i] for i in best} == kept
    assert len(best) == len(kept)
    assert (np.diff(x[best]) > 0).all()


def test_cost_and_pareto_show_the_summaries(runs: list[LoadedRun]) -> None:
    chart = side_by_side.pareto({"all": {run.label: run.summary for run in runs}})
    (points,) = (mark for mark in chart.panels[0].marks if isinstance(mark, Points))
    assert points.x == pytest.approx([1 / run.summary["tpot_s"]["p50"] for run in runs])
    assert points.y == pytest.approx([run.summary["output_tokens_per_s"] for run in runs])
    assert list(points.labels) == [run.label for run in runs]
    priced = [run for run in runs if "cost" in run.summary]
    (panel,) = side_by_side.cost({run.label: run.summary for run in runs}).panels
    bars = [mark for mark in panel.marks if isinstance(mark, Bars)]
    for mark, key in zip(bars, ("usd_per_million_output_tokens", "usd_per_million_tokens"), strict=bool(priced)):
        assert mark.height == pytest.approx([run.summary["cost"][key] for run in priced])
