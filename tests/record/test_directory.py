"""The run directory: what is written comes back, and the marker tells the truth."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.written import CLOCK, scenario, simulated, tables, write

from cbsim.machine import simulate
from cbsim.machine.driver import Machine
from cbsim.metrics import metrics
from cbsim.record import directory, parquet
from cbsim.record.directory import MARKER, RunWriter
from cbsim.record.tables import requests_of
from cbsim.runs import reading
from cbsim.scenario.scenario import dump
from cbsim.workload import generators

# -- round trip -------------------------------------------------------------------------------------------------------


def test_what_is_written_comes_back(complete: Path, server: Machine) -> None:
    """Tables, scenario, facts and numbers are read as they were; the run has preemptions, refusals and prefix hits, so
    that no column is empty. The directory is named after time, run and hash."""
    run = reading.load(complete)
    assert complete.name == "20260504T030201Z-scenario-01234567"
    assert run.incomplete is None
    assert run.scenario == dump(scenario())
    assert run.environment == {"command": "none"}
    assert run.requests == requests_of(server.record)
    assert run.steps.table.tobytes() == bytes(server.record.steps)
    for name in ("preemptions", "prefix_hit_tokens", "output_tokens"):
        assert run.summary[name] > 0, name
    assert {row.status for row in run.requests} == {"length", "refused"}


def test_metrics_of_a_run_that_was_read_are_those_that_were_written(complete: Path, server: Machine) -> None:
    """Analysis needs nothing but the directory: the summary follows from its tables."""
    run = reading.load(complete)
    again = metrics.summarise(run.requests, run.steps, total_blocks=server.record.total_blocks)
    assert {"schema_version": directory.SCHEMA_VERSION} | json.loads(json.dumps(again)) == run.summary


def test_times_that_never_happened_are_null(complete: Path) -> None:
    """A refused request was never scheduled: its row says null, not -1 or 0."""
    table = pq.read_table(complete / "requests.parquet").to_pylist()
    refused = [row for row in table if row["status"] == "refused"]
    assert refused
    for row in refused:
        assert row["scheduled_ns"] is row["first_token_ns"] is row["last_token_ns"] is None
        assert row["generated_tokens"] == 0
        assert row["reason"]


def test_a_run_without_steps_or_requests_can_be_written(tmp_path: Path) -> None:
    """All requests refused, or none sent yet when it was stopped: the tables are there, and empty."""
    refusing = simulated(scenario(kv_cache={"num_blocks": 2, "block_size": 8}, scheduler={"name": "static"}))
    run = reading.load(write(tmp_path, refusing, scenario()).path)
    assert (len(run.steps), {row.status for row in run.requests}) == (0, {"refused"})
    asked = scenario()
    unsent = simulate.machine(asked, "sync", generators.build(asked))
    run = reading.load(write(tmp_path, unsent, asked).path)
    assert (len(run.steps), run.requests) == (0, [])


def test_names_do_not_collide(tmp_path: Path) -> None:
    """Two runs of a second get two directories; neither is written into."""
    paths = [RunWriter.new(tmp_path, "a", "feedbeef00", CLOCK).path.name for _ in range(3)]
    assert paths == [f"20260504T030201Z-a-feedbeef{suffix}" for suffix in ("", "-2", "-3")]


HASHES = """
import hashlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support import written
for loop in ("sync", "async"):
    asked = written.scenario()
    writer = written.write(Path(sys.argv[2]), written.simulated(asked, loop), asked)
    for name in ("steps.parquet", "requests.parquet", "summary.json"):
        print(loop, name, hashlib.sha256((writer.path / name).read_bytes()).hexdigest())
"""


def test_the_same_scenario_and_seed_write_the_same_bytes(tmp_path: Path) -> None:
    """In two processes whose string hashes differ: tables and summary are the same files, the hash of every plan
    included."""
    outputs = []
    for seed in ("1", "4242"):
        words = [sys.executable, "-c", HASHES, str(Path(__file__).parent), str(tmp_path / seed)]
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == 6


# -- the marker -------------------------------------------------------------------------------------------------------


def test_the_marker_is_there_from_the_first_moment_to_the_last(server: Machine, tmp_path: Path) -> None:
    """A directory is marked before anything else is in it, says so when read, and is unmarked by `complete` alone."""
    first = RunWriter.new(tmp_path, "under-way", "0" * 8, CLOCK)
    assert [file.name for file in first.path.iterdir()] == [MARKER]
    assert "under way" in (first.path / MARKER).read_text()
    writer = write(tmp_path, server, scenario())
    assert "under way" in (reading.load(writer.path).incomplete or "")
    writer.note("interrupted after 12 steps")
    assert reading.load(writer.path).incomplete == "interrupted after 12 steps"
    writer.complete()
    assert reading.load(writer.path).incomplete is None
    writer.complete()


def test_a_run_that_fails_stays_marked(server: Machine, tmp_path: Path) -> None:
    """An error half-way leaves the marker and whatever was written: nobody has to tidy up for that."""
    writer = RunWriter.new(tmp_path, "fails", "0" * 8, CLOCK)
    tables(writer, server.record)
    with pytest.raises(ValueError, match="not JSON compliant"):
        writer.json("summary.json", {"ttft_s": float("nan")})
    assert sorted(file.name for file in writer.path.iterdir()) == [MARKER, "requests.parquet", "steps.parquet"]


def test_a_marker_that_was_cut_short_still_marks(complete: Path) -> None:
    """A full disk may leave an empty marker. It is a marker."""
    (complete / MARKER).write_bytes(b"")
    assert reading.load(complete).incomplete


# -- arrow arrays made from bytes are those that Arrow makes -----------------------------------------------------------


NUMBERS = st.integers(-(1 << 62), 1 << 62)


@given(st.lists(st.none() | NUMBERS))
def test_whole_numbers(values: list[int | None]) -> None:
    numbers = np.array([value or 0 for value in values], dtype=np.int64)
    missing = np.array([value is None for value in values], dtype=bool)
    made = parquet.int_array(numbers, missing)
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.int64()))
    assert parquet.int_array(numbers).equals(pa.array(numbers))


@pytest.mark.parametrize(
    ("kind", "arrow", "one"),
    [(int, pa.int64(), NUMBERS), (float, pa.float64(), st.floats(allow_nan=False)), (str, pa.string(), st.text())],
)
@given(data=st.data())
def test_columns_with_gaps(
    kind: type[Any], arrow: pa.DataType, one: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.none() | one))
    with suppress(UnicodeEncodeError):
        made = parquet.optional(values, kind)
        made.validate(full=True)
        assert made.equals(pa.array(values, arrow))


@given(st.lists(st.text()))
def test_texts(values: list[str]) -> None:
    try:
        expected = pa.array(values, pa.string())
    except UnicodeEncodeError:  # half a surrogate pair is no text of a file
        return
    made = parquet.text_array(values)
    made.validate(full=True)
    assert made.equals(expected)


@given(st.lists(st.lists(NUMBERS)))
def test_lists(values: list[list[int]]) -> None:
    lengths = np.array([len(part) for part in values], dtype=np.int64)
    made = parquet.list_array(lengths, np.array([number for part in values for number in part], dtype=np.int64))
    made.validate(full=True)
    assert made.equals(pa.array(values, pa.list_(pa.int64())))


@given(st.lists(st.text("ab", max_size=3)), st.integers(0, 9), st.sets(st.text("ab", max_size=3)))
def test_texts_that_are_one_of_some_words(values: list[str], skipped: int, words: set[str]) -> None:
    found = parquet.is_in(parquet.text_array(values).slice(skipped), sorted(words))
    assert found.tolist() == [value in words for value in values[skipped:]]
