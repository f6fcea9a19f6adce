"""The timeline of a run: a Chrome trace of the steps asked for, and the figures drawn of them. The table of moves: what
a driver says is what a reader finds, and what is drawn.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.written import scenario, simulated

from cbsim.draw import lane_chart
from cbsim.draw.chart import Panel, Spans
from cbsim.errors import RunError
from cbsim.machine.driver import Machine
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import Direction, Transfer
from cbsim.record import optional_tables, timeline
from cbsim.record.record import LANES, PHASES, STEP_COLUMNS, Record, TransferLog
from cbsim.record.tables import Ints, Steps

pytestmark = pytest.mark.usefixtures("drawn")

# -- timeline ---------------------------------------------------------------------------------------------------------


def events(steps: Steps, window: tuple[int, int], moves: dict[str, Ints] | None = None) -> list[dict[str, Any]]:
    """The events of a trace, which is written as the json module would write it, without spaces."""
    text = gzip.decompress(timeline.chrome_trace([steps], window, 'a "title" ü', moves)).decode()
    document = json.loads(text)
    assert text == json.dumps(document, separators=(",", ":"))
    return document["traceEvents"]


def check_no_overlap(spans: list[dict[str, Any]]) -> None:
    """Within a thread, each span starts when the one before has ended, to the nanosecond."""
    for tid in {span["tid"] for span in spans}:
        lane = sorted((round(s["ts"] * 1000), round((s["ts"] + s["dur"]) * 1000)) for s in spans if s["tid"] == tid)
        assert all(after[0] >= before[1] for before, after in pairwise(lane))


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("window", [(0, 10**9), (5, 25), (3, 4), (7, 7), (10**6, 10**6 + 5)])
def test_the_timeline_is_a_chrome_trace_of_the_window(loop: str, window: tuple[int, int]) -> None:
    """Valid gzipped JSON: a named thread a lane, complete events with start and duration in microseconds, none that
    overlap in a thread, and the steps of the window, no others. A window beyond the run is empty."""
    steps = Steps.of(simulated(scenario(), loop).record)
    found = events(steps, window)
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert names == {0: "cpu", 1: "h2d", 2: "compute", 3: "d2h"}
    spans = [e for e in found if e["ph"] == "X"]
    assert {e["args"]["step"] for e in spans} == set(range(len(steps))[slice(*window)])
    check_no_overlap(spans)
    computes = [e for e in spans if e["name"] == "compute"]
    for event in computes:
        step = event["args"]["step"]
        assert event["ts"] * 1000 == pytest.approx(steps["compute_start_ns"][step])
        assert event["dur"] * 1000 == pytest.approx(steps.lane("compute")[step])
        assert event["args"]["rows"] == steps["rows"][step]


def test_all_busy_time_of_the_window_is_in_the_timeline(server: Machine) -> None:
    """The durations of each kind of event add up to the busy time of its lane or phase."""
    steps = Steps.of(server.record)
    spans = [e for e in events(steps, (0, len(steps))) if e["ph"] == "X"]
    for name in (*PHASES, *LANES):
        total = sum(e["dur"] for e in spans if e["name"] == name)
        assert total == pytest.approx(int(steps.lane(name).sum()) / 1000)


# -- figures ----------------------------------------------------------------------------------------------------------


def idle_bars(panel: Panel) -> int:
    return sum(len(mark.row) for mark in panel.marks if isinstance(mark, Spans) and mark.hatched)


def test_idle_gaps_are_hatched() -> None:
    """Steps of 30 ms that take 10 to plan: a synchronous loop leaves the device idle between any two steps, an
    asynchronous one never. The panel of one has a hatched bar for every gap between the steps shown, the other none."""
    cost = {"kind": "constant", "step_s": 0.03, "cpu": {"schedule": {"base_s": 0.01}}}
    load = {"kind": "synthetic", "requests": 4, "prompt_tokens": 64, "output_tokens": 40}
    asked = scenario(cost=cost, workload=load)
    chart = lane_chart.lanes({loop: Steps.of(simulated(asked, loop).record) for loop in ("sync", "async")})
    sync, ahead = chart.panels
    assert idle_bars(sync) >= lane_chart.STEPS_SHOWN - 1
    assert idle_bars(ahead) == 0


@given(steps=st.integers(1, 40))
@settings(max_examples=40)
def test_the_figure_shows_the_middle_of_the_run(steps: int) -> None:
    """STEPS_SHOWN steps or all there are, as many left out before as after, give or take one. Step i takes from 100 i
    to 100 i + 60."""
    table = np.zeros((steps, len(STEP_COLUMNS)), dtype=np.int64)
    table[:, STEP_COLUMNS.index("step")] = np.arange(steps)
    for name in ("compute_start_ns", "schedule_start_ns"):
        table[:, STEP_COLUMNS.index(name)] = 100 * np.arange(steps)
    for name in ("compute_end_ns", "update_end_ns"):
        table[:, STEP_COLUMNS.index(name)] = 100 * np.arange(steps) + 60
    (panel,) = lane_chart.lanes({"run": Steps(table)}).panels
    shown = [int(label) for mark in panel.marks if isinstance(mark, Spans) for label in mark.labels]
    first, last = shown[0], shown[-1]
    assert last - first + 1 == len(shown) == min(lane_chart.STEPS_SHOWN, steps)
    assert abs(first - (steps - 1 - last)) <= 1


# -- transfers ---------------------------------------------------------------------------------------------------------


A = RequestSpec(7, "a", 0, 4, 4, 4)


@pytest.fixture
def log() -> TransferLog:
    """A copy in step 0, a job of two stores that the result of step 3 names, a load that is under way at the end."""
    log = TransferLog()
    log.moved(0, Transfer(Direction.COPY, (1,), (2,), A), 100, 110)
    log.moved(1, Transfer(Direction.OUT, (3, 4), (0, 1), job=5), 200, 400)
    log.moved(1, Transfer(Direction.OUT, (6,), (2,), job=5), 400, 500)
    log.moved(2, Transfer(Direction.IN, (0, 1, 2), (8, 9, 10), A, job=6), 450, 750)
    log.reported((5,), 3)
    return log


def values(log: TransferLog) -> dict[str, Ints]:
    return optional_tables.values_of(optional_tables.TRANSFERS, log.rows)


def test_a_table_comes_back_as_it_was(log: TransferLog, tmp_path: Path) -> None:
    record = Record(1)
    assert optional_tables.files_of(record) == {}
    record.transfers = log
    for name, content in optional_tables.files_of(record).items():
        (tmp_path / name).write_bytes(content)
    read = optional_tables.read(tmp_path, optional_tables.TRANSFERS)
    assert {name: values.tolist() for name, values in read.items()} == {
        "step": [0, 1, 1, 2],
        "request": [7, -1, -1, 7],
        "job": [-1, 5, 5, 6],
        "way": [0, 1, 1, 2],
        "blocks": [1, 2, 1, 3],
        "start_ns": [100, 200, 400, 450],
        "end_ns": [110, 400, 500, 750],
        "reported_step": [-1, 3, 3, -1],
    }
    assert optional_tables.reported_jobs(tmp_path) == {3: (5,)}


def test_no_table_has_no_moves_and_a_damaged_one_is_refused_by_name(tmp_path: Path) -> None:
    assert optional_tables.reported_jobs(tmp_path) == {}
    assert all(len(values) == 0 for values in optional_tables.read(tmp_path, optional_tables.TRANSFERS).values())
    (tmp_path / optional_tables.TRANSFERS).write_bytes(b"PAR1")
    with pytest.raises(RunError, match=r"moves\.parquet: not a parquet table"):
        optional_tables.reported_jobs(tmp_path)


def test_numbers(log: TransferLog) -> None:
    """Blocks by way; each direction is busy for what its moves took, of a span of a microsecond."""
    assert optional_tables.summarise_transfers(
        optional_tables.values_of(optional_tables.TRANSFERS, log.rows), 1e-6
    ) == {
        "copied_blocks": 1,
        "out_blocks": 3,
        "in_blocks": 3,
        "out_busy": pytest.approx(0.3),
        "in_busy": pytest.approx(0.3),
    }


def four_steps() -> Steps:
    """Four steps of 200 ns, whose compute lane is busy all the time."""
    rows = np.zeros((4, len(STEP_COLUMNS)), dtype=np.int64)
    for at, name in enumerate(STEP_COLUMNS):
        if name.endswith("_ns"):
            rows[:, at] = np.arange(4) * 200 + (200 if name in ("compute_end_ns", "update_end_ns") else 0)
    rows[:, 0] = np.arange(4)
    return Steps(rows)


def test_moves_have_lanes_in_the_timeline(log: TransferLog) -> None:
    """A thread for each way, and the moves that the plans of the window list."""
    found = events(four_steps(), (1, 3), values(log))
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    moved = [event for event in found if event["name"] in timeline.TRANSFER_LANES]
    assert all(names[event["tid"]] == event["name"] for event in moved)
    assert [(event["name"], event["ts"], event["args"]["job"]) for event in moved] == [
        ("kv out", 0.2, 5),
        ("kv out", 0.4, 5),
        ("kv in", 0.45, 6),
    ]


def test_moves_have_lanes_in_the_figure(log: TransferLog) -> None:
    """Two rows more, where something moves; copies lie on the compute lane."""
    plain = lane_chart.lanes({"run": four_steps()}, (0, 4))
    (panel,) = lane_chart.lanes({"run": four_steps()}, (0, 4), transfers={"run": values(log)}).panels
    assert panel.rows == (*plain.panels[0].rows, *lane_chart.HOST_LANES)
    drawn = {mark.name: mark.row.tolist() for mark in panel.marks if mark.name.startswith("KV")}
    assert drawn == {"KV copy": [2], "KV out": [4, 4], "KV in": [5]}
    (still,) = lane_chart.lanes({"run": four_steps()}, (0, 4), transfers={"run": values(TransferLog())}).panels
    assert still.rows == plain.panels[0].rows
