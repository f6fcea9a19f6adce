"""Run directories as frames: labels tell runs apart, columns are the documented ones, and what is broken is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.calls import simulated

import cbsim
from analysis.statistics import loading
from analysis.statistics.loading import LATENCIES
from cbsim.errors import RunError
from cbsim.metrics import metrics
from cbsim.metrics.terminal import flat
from cbsim.record.record import STEP_COLUMNS

FIELDS = ("workload.output_tokens=8", "workload.requests=12", "workload.arrivals={kind: constant, rate_per_s: 20}")


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Path]]:
    def run(*overrides: str, window: str = "") -> list[Path]:
        more = ["--window", window] if window else []
        return simulated(tmp_path_factory.mktemp("runs"), "worked_example", *FIELDS, *overrides, more=more)

    return run


@pytest.fixture(scope="module")
def paths(simulate: Callable[..., list[Path]]) -> list[Path]:
    return simulate()


def _copy(path: Path, to: Path, file: str = "", **changes: Any) -> Path:
    """A run with other values in one of its JSON files."""
    copy = Path(shutil.copytree(path, to / "copy"))
    if file:
        values = json.loads((copy / file).read_text()) | changes
        (copy / file).write_text(json.dumps(values))
    return copy


def test_frames_have_the_documented_columns_and_the_latencies_of_metrics(paths: list[Path]) -> None:
    """One definition of every latency: the frame's columns are those of `cbsim.metrics.metrics`, request by request."""
    (run,) = loading.read(paths[:1])
    assert tuple(run.steps.columns) == STEP_COLUMNS
    assert {"index", "status", "arrival_ns", "last_token_ns", "done", *LATENCIES} <= set(run.requests.columns)
    for name, values in metrics.latencies(run.times).items():
        np.testing.assert_array_equal(run.requests[name].dropna().to_numpy(), values)
        assert metrics.distribution(values) == run.summary[name]


def test_labels_are_unique_and_say_what_differs(paths: list[Path], simulate: Callable[..., list[Path]]) -> None:
    other = simulate("workload.output_tokens=9", "loop.mode=sync")
    labels = [run.label for run in loading.read([*paths, *other, *other])]
    assert labels[:2] == ["output_tokens=8 sync", "output_tokens=8 async"]
    assert labels[2:] == ["output_tokens=9 sync", "output_tokens=9 sync #2"]
    assert [run.label for run in loading.read(paths)] == ["sync", "async"]


def test_a_window_counts_the_requests_that_arrive_in_it(simulate: Callable[..., list[Path]]) -> None:
    """From A to before B: of a request every 50 ms those of 0.1, 0.15, 0.2 s; `summary.json` counts the same."""
    run = loading.read(simulate("loop.mode=sync", window="0.1:0.25"))[0]
    assert run.window_ns == (0.1e9, 0.25e9)
    assert len(run.counted) == run.summary["ttft_s"]["n"]
    assert ((run.counted["arrival_ns"] >= 0.1e9) & (run.counted["arrival_ns"] < 0.25e9)).all()


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        ("summary.json", {"loop": 3}, "loop is 3, expected sync or async"),
        ("summary.json", {"makespan_s": -1}, "makespan_s is -1, expected a number from 0 to 1e+30"),
        ("summary.json", {"requests": None}, "requests is missing or null"),
        ("summary.json", {"ttft_s": None}, "ttft_s is missing or null"),
        ("summary.json", {"gpu_active": "0.7"}, "gpu_active is '0.7', expected a number"),
        ("summary.json", {"gpu_active": float("nan")}, "gpu_active is nan, expected a number"),
        ("summary.json", {"requests": True}, "requests is true, expected a whole number"),
        ("summary.json", {"window_s": [1]}, "window_s is [1], expected a list of two"),
        ("summary.json", {"output_tokens_per_s": 0}, "output_tokens_per_s is 0, that of the tables beside it is"),
        ("summary.json", {"preemptions": -1}, "preemptions is -1, expected a whole number from 0"),
        ("summary.json", {"ttft_s": {"n": 1}}, "ttft_s.n is 1, that of the tables beside it is"),
        ("summary.json", {"bubble_s": None}, "bubble_s is nothing, that of the tables beside it is"),
        ("summary.json", {"steps": 1}, "steps is 1, that of steps.parquet is"),
        ("summary.json", {"schema_version": 1}, "schema_version 1, this version reads 4: make the run again"),
        ("env.json", {"device": None}, "device is missing or null, expected text"),
        ("env.json", {"git": "main"}, "git is 'main', expected fields"),
        ("env.json", {"injected_ms": {"launch": "1"}}, "injected_ms is {'launch': '1'}, expected names with numbers"),
    ],
)
def test_a_wrong_value_is_named(paths: list[Path], tmp_path: Path, file: str, changes: Any, said: str) -> None:
    """File, key, value and what it has to be: a directory that was edited by hand is a user's mistake, no crash. The
    front door reads a directory as strictly as a report does.
    """
    copy = _copy(paths[0], tmp_path, file, **changes)
    for read in (lambda: loading.read([copy]), lambda: cbsim.read(copy)):
        with pytest.raises(RunError) as error:
            read()
        assert str(error.value).startswith(str(copy / file)) and said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]", "not a scenario"),
        ("name: a\nscheduler: null\n", "scheduler is missing or null"),
        ("{", "not valid YAML"),
        ("name: a\nmore: &self {inner: *self}\n", "*self stands inside of what it names"),
    ],
)
def test_a_scenario_that_is_none_is_refused(paths: list[Path], tmp_path: Path, text: str, said: str) -> None:
    copy = _copy(paths[0], tmp_path)
    (copy / "scenario.resolved.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"scenario\.resolved\.yaml") as error:
        loading.read([copy])
    assert said in str(error.value)


Harm = Callable[[pd.DataFrame], pd.DataFrame]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda table: table.iloc[::-1], "steps are numbered 0, 1, 2 ...: row 0 has "),
        (lambda table: table.assign(used_blocks=2**40), "blocks in use and cached blocks exist: row 0 has "),
    ],
)
def test_steps_that_no_machine_can_run_are_refused(paths: list[Path], tmp_path: Path, harm: Harm, said: str) -> None:
    """A table whose columns are all there may still be none of a run: its numbers would be nonsense, said with care."""
    file = _copy(paths[0], tmp_path) / "steps.parquet"
    table = pq.read_table(file)
    pq.write_table(pa.Table.from_pandas(harm(table.to_pandas()), table.schema, preserve_index=False), file)
    with pytest.raises(RunError) as error:
        loading.read([file.parent])
    assert str(error.value).startswith(f"{file}: ") and "\n" not in str(error.value)
    assert said in str(error.value)
    with pytest.raises(RunError) as refused:
        cbsim.read(file.parent)
    assert str(refused.value) == str(error.value)


def test_fields_are_told_by_dotted_name() -> None:
    assert flat({"a": {"b": 1, "c": {"d": None}}, "e": [1]}) == {"a.b": 1, "a.c.d": None, "e": [1]}
