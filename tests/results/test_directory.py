"""The run directory: what is written comes back, the marker tells the truth, and broken files are refused by name."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbsim.draw import lanes, render
from cbsim.draw.chart import Panel, Spans
from cbsim.machine import simulate
from cbsim.machine.driver import Machine
from cbsim.results import columns, directory, metrics, timeline
from cbsim.results.directory import MARKER, RunError, RunWriter
from cbsim.results.metrics import Steps
from cbsim.results.record import LANES, PHASES, STATUSES, STEP_COLUMNS, RequestRow
from cbsim.scenario.scenario import Scenario, dump
from cbsim.workload import generators

CLOCK = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)


def scenario(**more: Any) -> Scenario:
    """Forty requests with a shared prefix, random lengths and arrivals; some are too long for the cache."""
    data: dict[str, Any] = {
        "question": "Does it come back?",
        "seed": 7,
        "model": "llama-3.1-8b",
        "hardware": "h200-sxm",
        "workload": {
            "kind": "synthetic",
            "requests": 40,
            "prompt_tokens": {"lognormal": {"mean": 300, "sigma": 1.0, "low": 16, "high": 4000}},
            "output_tokens": {"uniform": {"low": 1, "high": 150}},
            "arrivals": {"kind": "poisson", "rate_per_s": 100},
            "shared_prefix_tokens": 64,
        },
        "scheduler": {"name": "vllm", "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 900},
        "kv_cache": {"num_blocks": 90, "block_size": 16},
        "cost": {"kind": "roofline"},
    }
    return Scenario.model_validate(data | more, context={"base": Path()})


def simulated(asked: Scenario, loop: str = "async") -> Machine:
    server = simulate.machine(asked, loop, generators.build(asked))
    simulate.run(server)
    return server


def write(out: Path, server: Machine, asked: Scenario) -> RunWriter:
    """A whole run directory, but for its figures."""
    writer = RunWriter(out, asked.name, "0123456789abcdef", CLOCK)
    writer.scenario(dump(asked))
    writer.environment({"command": "none"})
    rows, steps = writer.tables(server.record)
    summary = metrics.summarise(rows, steps, total_blocks=server.record.total_blocks)
    writer.summary({"schema_version": directory.SCHEMA_VERSION} | summary)
    return writer


@pytest.fixture(scope="module")
def server() -> Machine:
    return simulated(scenario())


@pytest.fixture
def complete(server: Machine, tmp_path: Path) -> Path:
    """A run directory that is complete."""
    writer = write(tmp_path, server, scenario())
    writer.complete()
    return writer.path


# -- round trip -------------------------------------------------------------------------------------------------------


def test_what_is_written_comes_back(complete: Path, server: Machine) -> None:
    """Tables, scenario, facts and numbers are read as they were; the run has preemptions, refusals and prefix hits, so
    that no column is empty. The directory is named after time, run and hash."""
    run = directory.load(complete)
    assert complete.name == "20260504T030201Z-scenario-01234567"
    assert run.incomplete is None
    assert run.scenario == dump(scenario())
    assert run.environment == {"command": "none"}
    assert run.requests == server.record.requests()
    assert run.steps.table.tobytes() == bytes(server.record.steps)
    for name in ("preemptions", "prefix_hit_tokens", "output_tokens"):
        assert run.summary[name] > 0, name
    assert {row.status for row in run.requests} == {"length", "refused"}


def test_metrics_of_a_run_that_was_read_are_those_that_were_written(complete: Path, server: Machine) -> None:
    """Analysis needs nothing but the directory: the summary follows from its tables."""
    run = directory.load(complete)
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
    run = directory.load(write(tmp_path, refusing, scenario()).path)
    assert (len(run.steps), {row.status for row in run.requests}) == (0, {"refused"})
    asked = scenario()
    unsent = simulate.machine(asked, "sync", generators.build(asked))
    run = directory.load(write(tmp_path, unsent, asked).path)
    assert (len(run.steps), run.requests) == (0, [])


def test_names_do_not_collide(tmp_path: Path) -> None:
    """Two runs of a second get two directories; neither is written into."""
    paths = [RunWriter(tmp_path, "a", "feedbeef00", CLOCK).path.name for _ in range(3)]
    assert paths == [f"20260504T030201Z-a-feedbeef{suffix}" for suffix in ("", "-2", "-3")]


HASHES = """
import hashlib, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_directory
for loop in ("sync", "async"):
    asked = test_directory.scenario()
    writer = test_directory.write(Path(sys.argv[2]), test_trace.simulated(asked, loop), asked)
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


def test_another_seed_writes_other_bytes(complete: Path, tmp_path: Path) -> None:
    """What the test before compares does depend on the run."""
    other = write(tmp_path, simulated(scenario(seed=8)), scenario(seed=8))
    assert (other.path / "steps.parquet").read_bytes() != (complete / "steps.parquet").read_bytes()


# -- the marker -------------------------------------------------------------------------------------------------------


def test_the_marker_is_there_from_the_first_moment_to_the_last(server: Machine, tmp_path: Path) -> None:
    """A directory is marked before anything else is in it, says so when read, and is unmarked by `complete` alone."""
    first = RunWriter(tmp_path, "under-way", "0" * 8, CLOCK)
    assert [file.name for file in first.path.iterdir()] == [MARKER]
    assert "under way" in (first.path / MARKER).read_text()
    writer = write(tmp_path, server, scenario())
    assert "under way" in (directory.load(writer.path).incomplete or "")
    writer.note("interrupted after 12 steps")
    assert directory.load(writer.path).incomplete == "interrupted after 12 steps"
    writer.complete()
    assert directory.load(writer.path).incomplete is None
    writer.complete()


def test_a_run_that_fails_stays_marked(server: Machine, tmp_path: Path) -> None:
    """An error half-way leaves the marker and whatever was written: nobody has to tidy up for that."""
    writer = RunWriter(tmp_path, "fails", "0" * 8, CLOCK)
    writer.tables(server.record)
    with pytest.raises(ValueError, match="not JSON compliant"):
        writer.summary({"ttft_s": float("nan")})
    assert sorted(file.name for file in writer.path.iterdir()) == [MARKER, "requests.parquet", "steps.parquet"]


@pytest.mark.parametrize("files", range(6))
def test_a_full_disk_leaves_a_marked_directory(
    server: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    """The disk is full after `files` files, the last of them cut short: RunError names the file, and the directory is
    marked. Where not even the marker could be written, no run pretends to be complete: nothing else is there."""
    whole, written = Path.write_bytes, []

    def until_full(path: Path, content: bytes) -> int:
        written.append(path)
        if len(written) <= files:
            return whole(path, content)
        whole(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", until_full)
    with pytest.raises(RunError, match="No space left on device") as caught:
        write(tmp_path, server, scenario())
    assert str(written[-1]) in str(caught.value)
    (path,) = tmp_path.iterdir()
    assert (path / MARKER).exists()


def test_a_marker_that_was_cut_short_still_marks(complete: Path) -> None:
    """A full disk may leave an empty marker. It is a marker."""
    (complete / MARKER).write_bytes(b"")
    assert directory.load(complete).incomplete


@pytest.mark.parametrize("out", ["file", "file/below", "/dev/null/x"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, out: str) -> None:
    """A file is in the way of the folder."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"cannot be created: Not a directory"):
        RunWriter(tmp_path / out, "run", "0" * 8, CLOCK)


def test_a_file_in_the_way_of_the_directory_is_named(tmp_path: Path) -> None:
    """The very name is taken, and not by a directory."""
    (tmp_path / "20260504T030201Z-run-00000000").write_text("in the way")
    with pytest.raises(RunError, match=r"20260504T030201Z-run-00000000: is in the way"):
        RunWriter(tmp_path, "run", "0" * 8, CLOCK)


# -- reading what is broken -------------------------------------------------------------------------------------------

FILES = ("scenario.resolved.yaml", "env.json", "summary.json", "steps.parquet", "requests.parquet")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(complete: Path, name: str) -> None:
    """Whichever file is gone, the message has its path and why it cannot be read."""
    (complete / name).unlink()
    with pytest.raises(RunError, match="cannot be read: No such file") as caught:
        directory.load(complete)
    assert str(complete / name) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 40])
@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_that_was_cut_short_is_named(complete: Path, name: str, keep: int) -> None:
    """Emptied, or cut in the middle, as a full disk leaves it."""
    content = (complete / name).read_bytes()
    (complete / name).write_bytes(content[: len(content) // 2] if keep else b"")
    with pytest.raises(RunError, match=r"not JSON|not a parquet table") as caught:
        directory.load(complete)
    assert str(complete / name) in str(caught.value)


def test_no_directory_and_other_versions_are_refused(complete: Path, tmp_path: Path) -> None:
    """What is not there, what is no object, and what another version wrote."""
    with pytest.raises(RunError, match="no such run directory"):
        directory.load(tmp_path / "nowhere")
    (complete / "summary.json").write_text('{"schema_version": 99}')
    with pytest.raises(
        RunError, match=r"summary\.json: schema_version 99, this version reads 4: make the run again.*$"
    ):
        directory.load(complete)
    (complete / "summary.json").write_text("[]")
    with pytest.raises(RunError, match=r"summary\.json: not a JSON object"):
        directory.load(complete)


@pytest.mark.parametrize(("name", "column"), [("steps.parquet", "plan_hash"), ("requests.parquet", "token_runs")])
def test_a_missing_column_is_named(complete: Path, name: str, column: str) -> None:
    """A table of an older or a foreign writer."""
    pq.write_table(pq.read_table(complete / name).drop_columns([column]), complete / name)
    with pytest.raises(RunError, match=rf"{name}: column {column} is missing"):
        directory.load(complete)


def replace_column(path: Path, column: str, values: pa.Array) -> None:
    """Write a table again with other values in a column; everything else stays as it was, its metadata too."""
    table = pq.read_table(path)
    at = table.column_names.index(column)
    pq.write_table(table.set_column(at, pa.field(column, values.type), values), path)


@pytest.mark.parametrize(
    ("name", "column", "kind", "said"),
    [
        ("steps.parquet", "rows", pa.int32(), "column rows is int32, expected int64"),
        ("steps.parquet", "compute_end_ns", pa.float64(), "column compute_end_ns is double, expected int64"),
        ("requests.parquet", "prompt_tokens", pa.string(), "column prompt_tokens is string, expected int64"),
        ("requests.parquet", "status", pa.int64(), "column status is int64, expected string"),
        ("requests.parquet", "scheduled_ns", pa.string(), "column scheduled_ns is string, expected int64"),
        ("requests.parquet", "token_runs", pa.int64(), "column token_runs is int64, expected list<int64>"),
        ("requests.parquet", "token_runs", pa.list_(pa.string()), "is list<string>, expected list<int64>"),
    ],
)
@pytest.mark.parametrize("rows", ["as many", "none"])
def test_a_column_of_another_type_is_named(
    complete: Path, name: str, column: str, kind: pa.DataType, said: str, rows: str
) -> None:
    """Of any declared column, also of one that this reader does not use, and whether the table has rows or not."""
    table = pq.read_table(complete / name)
    table = table if rows == "as many" else table.slice(0, 0)
    pq.write_table(table, complete / name)
    values = pa.array([["1"]] * len(table), kind) if pa.types.is_list(kind) else pa.array(["1"] * len(table)).cast(kind)
    replace_column(complete / name, column, values)
    with pytest.raises(RunError, match=rf"{name}: .*{said}"):
        directory.load(complete)


@pytest.mark.parametrize(("name", "column"), [("steps.parquet", "waiting"), ("requests.parquet", "prompt_tokens")])
def test_nothing_is_counted_below_0(complete: Path, name: str, column: str) -> None:
    """Tokens, blocks, rows and requests; a hash or a mark such as -1 may be below."""
    values = pq.read_table(complete / name)[column].to_pylist()
    replace_column(complete / name, column, pa.array([-1, *values[1:]]))
    with pytest.raises(RunError, match=rf"{name}: column {column} has -1, expected 0 or more"):
        directory.load(complete)


@pytest.mark.parametrize(("name", "column"), [("steps.parquet", "rows"), ("requests.parquet", "reason")])
def test_a_column_with_nulls_is_named(complete: Path, name: str, column: str) -> None:
    """Null is for times that never happened, nothing else."""
    table = pq.read_table(complete / name)
    replace_column(complete / name, column, pa.array([None] * 2 + table[column].to_pylist()[2:], table[column].type))
    with pytest.raises(RunError, match=rf"{name}: column {column} has 2 nulls, expected none"):
        directory.load(complete)


RUN, MOST = "token_runs of request NAME has", (1 << 63) - 1


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("token_runs", [1, 2, 3], "token_runs of request NAME has 3 numbers, expected pairs"),
        ("token_runs", [1, 0], f"{RUN} 0 steps from step 1 on, expected 1 or more between 0 and LAST"),
        ("token_runs", [-1, 1], f"{RUN} 1 steps from step -1 on, expected 1 or more between 0 and LAST"),
        ("token_runs", [0, 1 << 40], f"{RUN} {1 << 40} steps from step 0 on, expected 1 or more between 0 and LAST"),
        ("token_runs", [MOST, 1], f"{RUN} 1 steps from step {MOST} on, expected 1 or more between 0 and LAST"),
        ("token_runs", [3, MOST], f"{RUN} {MOST} steps from step 3 on, expected 1 or more between 0 and LAST"),
        ("token_runs", [5, 2, 6, 1], f"{RUN} 1 steps from step 6 on, expected 1 or more between 7 and LAST"),
        ("token_runs", [5, 2, 3, 1], f"{RUN} 1 steps from step 3 on, expected 1 or more between 7 and LAST"),
        ("token_runs", [None, 2], "column token_runs has 1 nulls in its lists, expected none"),
        ("token_runs", None, "column token_runs has 1 nulls, expected none"),
        ("first_step", 1 << 40, f"first_step of request NAME is {1 << 40}, expected -1 to LAST"),
        ("first_step", -2, "first_step of request NAME is -2, expected -1 to LAST"),
        ("status", "lost", f"status of request NAME is 'lost', expected one of {', '.join(STATUSES)}"),
    ],
)
def test_requests_that_contradict_the_steps_are_named(complete: Path, column: str, value: Any, said: str) -> None:
    """What would end in a wrong number, or in the middle of somebody's computation, ends here."""
    file, last = complete / "requests.parquet", pq.read_metadata(complete / "steps.parquet").num_rows - 1
    table = pq.read_table(file)
    values = table[column].to_pylist()
    values[7] = value
    replace_column(file, column, pa.array(values, table[column].type))
    with pytest.raises(RunError) as caught:
        directory.load(complete)
    assert str(caught.value) == f"{file}: {said}".replace("NAME", table["id"][7].as_py()).replace("LAST", str(last))


def test_what_is_not_declared_is_ignored(complete: Path, server: Machine) -> None:
    """Somebody's own column, and columns in another order, do no harm."""
    for name in ("steps.parquet", "requests.parquet"):
        table = pq.read_table(complete / name)
        table = table.select(table.column_names[::-1]).append_column("own", pa.array(["x"] * len(table)))
        pq.write_table(table, complete / name)
    run = directory.load(complete)
    assert run.requests == server.record.requests()
    assert run.steps.table.tobytes() == bytes(server.record.steps)


def test_the_rows_of_a_record_are_the_declared_columns() -> None:
    """The declaration names each column of a record once; the request table has what follows from the steps as well."""
    derived = {"scheduled_ns", "first_token_ns", "last_token_ns", "generated_tokens"}
    assert [column.name for column in columns.REQUESTS if column.name not in derived] == list(RequestRow._fields)
    for declared in (columns.STEPS, columns.REQUESTS):
        names = [column.name for column in declared]
        assert len(set(names)) == len(names)
    assert {column.name for column in columns.REQUESTS if column.nullable} == derived - {"generated_tokens"}


def test_a_table_of_another_version_is_named(complete: Path) -> None:
    """Each table says which version it is of: none can be put into a directory of another."""
    for name in ("steps.parquet", "requests.parquet"):
        content = (complete / name).read_bytes()
        table = pq.read_table(complete / name)
        assert table.schema.metadata[b"schema_version"] == b"4"
        pq.write_table(table.replace_schema_metadata({"schema_version": "3"}), complete / name)
        with pytest.raises(RunError, match=rf"{name}: schema_version 3, this version reads 4"):
            directory.load(complete)
        (complete / name).write_bytes(content)


@pytest.mark.parametrize("name", ["steps.parquet", "requests.parquet"])
@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_byte_changes_no_number(complete: Path, server: Machine, name: str, data: st.DataObject) -> None:
    """Whichever byte of a table has become another, in its pages or in its footer: what is read is what was written, or
    the file is refused by name. The pages have checksums for that."""
    whole = bytearray((complete / name).read_bytes())
    at, flip = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    (complete / name).write_bytes(bytes([*whole[:at], whole[at] ^ flip, *whole[at + 1 :]]))
    try:
        run = directory.load(complete)
        same = run.requests == server.record.requests()
        found = "the same" if same and run.steps.table.tobytes() == bytes(server.record.steps) else "other numbers"
    except RunError as error:
        found = str(error)
    finally:
        (complete / name).write_bytes(whole)
    assert found == "the same" or found.startswith(str(complete / name))


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


def png_size(content: bytes) -> tuple[int, int]:
    """Width and height from the header of a PNG."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[12:16] == b"IHDR"
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def drawn(*runs: tuple[str, Steps]) -> bytes:
    return render.png(lanes.lanes(dict(runs), as_given=True))


def test_one_run_and_two_are_drawn(server: Machine) -> None:
    """A picture of 10 inches at 110 dots; the second run adds a panel below. Drawing it again gives the same bytes."""
    sync = ("sync", steps_of(simulated(scenario(), "sync")))
    both = (sync, ("async", steps_of(server)))
    one, two = drawn(sync), drawn(*both)
    assert png_size(one)[0] == png_size(two)[0] == 1100
    assert png_size(two)[1] > 1.5 * png_size(one)[1]
    assert 10_000 < len(one) < len(two) < 1_000_000
    assert drawn(*both) == two


@pytest.mark.parametrize("count", [1, 2])
def test_short_runs_are_drawn(server: Machine, count: int) -> None:
    """One step or two: fewer than the figure has room for."""
    assert png_size(drawn(("short", Steps(steps_of(server).table[:count]))))[0] == 1100


def idle_bars(panel: Panel) -> int:
    return sum(len(mark.row) for mark in panel.marks if isinstance(mark, Spans) and mark.hatched)


def test_idle_gaps_are_hatched() -> None:
    """Steps of 30 ms that take 10 to plan: a synchronous loop leaves the device idle between any two steps, an
    asynchronous one never. The panel of one has a hatched bar for every gap between the steps shown, the other none."""
    cost = {"kind": "constant", "step_s": 0.03, "cpu": {"schedule": {"base_s": 0.01}}}
    load = {"kind": "synthetic", "requests": 4, "prompt_tokens": 64, "output_tokens": 40}
    asked = scenario(cost=cost, workload=load)
    chart = lanes.lanes({loop: steps_of(simulated(asked, loop)) for loop in ("sync", "async")})
    sync, ahead = chart.panels
    assert idle_bars(sync) >= lanes.STEPS_SHOWN - 1
    assert idle_bars(ahead) == 0


def test_titles_have_the_share_of_the_run_if_it_is_given(server: Machine) -> None:
    steps = {"sync": steps_of(server)}
    assert lanes.lanes(steps, active={"sync": 0.76}).panels[0].title == "sync: GPU active 76.00% of the run"
    assert lanes.lanes(steps).panels[0].title.endswith("of what is shown")


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
    (panel,) = lanes.lanes({"run": Steps(table)}).panels
    shown = [int(label) for mark in panel.marks if isinstance(mark, Spans) for label in mark.labels]
    first, last = shown[0], shown[-1]
    assert last - first + 1 == len(shown) == min(lanes.STEPS_SHOWN, steps)
    assert abs(first - (steps - 1 - last)) <= 1
