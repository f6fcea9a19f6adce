"""The table of moves: what a driver says is what a reader finds, and what is drawn."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from cbsim.draw import lane_chart
from cbsim.errors import RunError
from cbsim.policy.request import RequestSpec
from cbsim.policy.transfers import Direction, Transfer
from cbsim.record import optional_tables, timeline
from cbsim.record.record import STEP_COLUMNS, Record, TransferLog
from cbsim.record.tables import Ints, Steps

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
    assert optional_tables.summarise_transfers(log, 1e-6) == {
        "copied_blocks": 1,
        "out_blocks": 3,
        "in_blocks": 3,
        "out_busy": pytest.approx(0.3),
        "in_busy": pytest.approx(0.3),
    }


def steps() -> Steps:
    """Four steps of 200 ns, whose compute lane is busy all the time."""
    rows = np.zeros((4, len(STEP_COLUMNS)), dtype=np.int64)
    for at, name in enumerate(STEP_COLUMNS):
        if name.endswith("_ns"):
            rows[:, at] = np.arange(4) * 200 + (200 if name in ("compute_end_ns", "update_end_ns") else 0)
    rows[:, 0] = np.arange(4)
    return Steps(rows)


def test_moves_have_lanes_in_the_timeline(log: TransferLog) -> None:
    """A thread for each way, and the moves that the plans of the window list."""
    text = gzip.decompress(timeline.chrome_trace(steps(), (1, 3), "run", values(log)))
    events = json.loads(text)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    moved = [event for event in events if event["name"] in timeline.TRANSFER_LANES]
    assert all(names[event["tid"]] == event["name"] for event in moved)
    assert [(event["name"], event["ts"], event["args"]["job"]) for event in moved] == [
        ("kv out", 0.2, 5),
        ("kv out", 0.4, 5),
        ("kv in", 0.45, 6),
    ]


def test_moves_have_lanes_in_the_figure(log: TransferLog) -> None:
    """Two rows more, where something moves; copies lie on the compute lane."""
    plain = lane_chart.lanes({"run": steps()}, (0, 4))
    (panel,) = lane_chart.lanes({"run": steps()}, (0, 4), transfers={"run": values(log)}).panels
    assert panel.rows == (*plain.panels[0].rows, *lane_chart.HOST_LANES)
    drawn = {mark.name: mark.row.tolist() for mark in panel.marks if mark.name.startswith("KV")}
    assert drawn == {"KV copy": [2], "KV out": [4, 4], "KV in": [5]}
    (still,) = lane_chart.lanes({"run": steps()}, (0, 4), transfers={"run": values(TransferLog())}).panels
    assert still.rows == plain.panels[0].rows
