"""The timeline of a run: a Chrome trace of the steps asked for, and the figures drawn of them."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.written import scenario, simulated

from cbsim.draw import lane_chart
from cbsim.draw.chart import Panel, Spans
from cbsim.machine.driver import Machine
from cbsim.record import timeline
from cbsim.record.record import LANES, PHASES, STEP_COLUMNS
from cbsim.record.tables import Steps

pytestmark = pytest.mark.usefixtures("drawn")

# -- timeline ---------------------------------------------------------------------------------------------------------


def steps_of(machine: Machine) -> Steps:
    return Steps(np.frombuffer(bytes(machine.record.steps), dtype=np.int64).reshape(-1, len(STEP_COLUMNS)))


def events(steps: Steps, window: tuple[int, int]) -> list[dict[str, Any]]:
    document = json.loads(gzip.decompress(timeline.chrome_trace(steps, window, "title")))
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
    steps = steps_of(simulated(scenario(), loop))
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
    steps = steps_of(server)
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
    chart = lane_chart.lanes({loop: steps_of(simulated(asked, loop)) for loop in ("sync", "async")})
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
