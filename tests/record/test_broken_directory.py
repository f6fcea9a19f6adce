"""A run directory that is broken: it is refused by the name of the file, and of the column or request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cbsim.errors import RunError
from cbsim.machine.driver import Machine
from cbsim.record import columns
from cbsim.record.parquet import TableFiles
from cbsim.record.record import STATUSES
from cbsim.record.tables import requests_of
from cbsim.runs import reading

FILES = ("scenario.resolved.yaml", "env.json", "summary.json", "steps.parquet", "requests.parquet")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(complete: Path, name: str) -> None:
    """Whichever file is gone, the message has its path and why it cannot be read."""
    (complete / name).unlink()
    with pytest.raises(RunError, match="cannot be read: No such file") as caught:
        reading.load(complete)
    assert str(complete / name) in str(caught.value)


def test_a_run_that_kept_its_summary_only_says_what_keeps_its_tables(complete: Path) -> None:
    """As a sweep keeps it, unless its file says otherwise. Its documents are read."""
    for name in ("steps.parquet", "requests.parquet"):
        (complete / name).unlink()
    with pytest.raises(RunError, match=r"holds the summary of the run only, expected .* `keep: tables`$") as caught:
        reading.load(complete)
    assert str(caught.value).startswith(f"{complete}: ")
    assert reading.load(complete, whole=False).summary["schema_version"] == 4


@pytest.mark.parametrize("keep", [0, 40])
@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_that_was_cut_short_is_named(complete: Path, name: str, keep: int) -> None:
    """Emptied, or cut in the middle, as a full disk leaves it."""
    content = (complete / name).read_bytes()
    (complete / name).write_bytes(content[: len(content) // 2] if keep else b"")
    with pytest.raises(RunError, match=r"not valid JSON|not a parquet table") as caught:
        reading.load(complete)
    assert str(complete / name) in str(caught.value)


def test_no_directory_and_other_versions_are_refused(complete: Path, tmp_path: Path) -> None:
    """What is not there, what is no object, and what another version wrote."""
    with pytest.raises(RunError, match="no such run directory"):
        reading.load(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"steps\.parquet: is a file, expected a run directory"):
        reading.load(complete / "steps.parquet")
    (complete / "summary.json").write_text('{"schema_version": 99}')
    with pytest.raises(
        RunError, match=r"summary\.json: schema_version 99, this version reads 4: make the run again.*$"
    ):
        reading.load(complete)
    (complete / "summary.json").write_text('{"schema_version": "4"}')
    with pytest.raises(RunError, match=r"schema_version '4', this version reads 4"):
        reading.load(complete)
    (complete / "summary.json").write_text("[]")
    with pytest.raises(RunError, match=r"summary\.json: got .*, expected a JSON object"):
        reading.load(complete)


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
        reading.load(complete)


@pytest.mark.parametrize(
    ("name", "column", "first", "problem"),
    [
        ("steps.parquet", "plan_hash", ..., "is missing"),
        ("requests.parquet", "token_runs", ..., "is missing"),
        ("steps.parquet", "waiting", [-1], "has -1, expected 0 or more"),  # a hash or a mark may be below 0
        ("requests.parquet", "prompt_tokens", [-1], "has -1, expected 0 or more"),
        (
            "steps.parquet",
            "rows",
            [None, None],
            "has 2 null values, and may have none",
        ),  # null is for times that never happened
        ("requests.parquet", "reason", [None, None], "has 2 null values, and may have none"),
    ],
)
def test_a_broken_column_is_named(complete: Path, name: str, column: str, first: Any, problem: str) -> None:
    """A column of an older or a foreign writer, left out or with other values in its first rows."""
    table = pq.read_table(complete / name)
    if first is ...:
        pq.write_table(table.drop_columns([column]), complete / name)
    else:
        values = [*first, *table[column].to_pylist()[len(first) :]]
        replace_column(complete / name, column, pa.array(values, table[column].type))
    with pytest.raises(RunError, match=rf"{name}: column {column} {problem}"):
        reading.load(complete)


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
        ("token_runs", [5, 2, 5, 1], f"{RUN} 1 steps from step 5 on, expected 1 or more between 6 and LAST"),
        ("token_runs", [5, 2, 3, 1], f"{RUN} 1 steps from step 3 on, expected 1 or more between 6 and LAST"),
        ("token_runs", [None, 2], "column token_runs has 1 null values in its lists, and may have none"),
        ("token_runs", None, "column token_runs has 1 null values, and may have none"),
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
        reading.load(complete)
    assert str(caught.value) == f"{file}: {said}".replace("NAME", table["id"][7].as_py()).replace("LAST", str(last))


def test_what_is_not_declared_is_ignored(complete: Path, server: Machine) -> None:
    """Somebody's own column, and columns in another order, do no harm."""
    for name in ("steps.parquet", "requests.parquet"):
        table = pq.read_table(complete / name)
        table = table.select(table.column_names[::-1]).append_column("own", pa.array(["x"] * len(table)))
        pq.write_table(table, complete / name)
    run = reading.load(complete)
    assert run.requests == requests_of(server.record)
    assert run.steps.table.tobytes() == bytes(server.record.steps)


def test_tables_from_before_speculation_have_no_drafts(complete: Path, server: Machine) -> None:
    """Step tables that lack these columns are read, whole or in part: none of their tokens is a draft."""
    table = pq.read_table(complete / "steps.parquet")
    pq.write_table(table.drop_columns(["draft_tokens", "accepted_tokens"]), complete / "steps.parquet")
    run = reading.load(complete)
    assert run.steps.table.tobytes() == bytes(server.record.steps)
    files = TableFiles([complete / "steps.parquet"], columns.STEPS)
    (part,) = files.rows(1, 3)
    assert part["draft_tokens"].to_pylist() == [0, 0]
    assert part["step"].to_pylist() == [1, 2]
    assert files["accepted_tokens"].to_numpy().tolist() == [0] * len(run.steps)


def test_a_table_of_another_version_is_named(complete: Path) -> None:
    """Each table says which version it is of: none can be put into a directory of another."""
    for name in ("steps.parquet", "requests.parquet"):
        content = (complete / name).read_bytes()
        table = pq.read_table(complete / name)
        assert table.schema.metadata[b"schema_version"] == b"4"
        pq.write_table(table.replace_schema_metadata({"schema_version": "3"}), complete / name)
        with pytest.raises(RunError, match=rf"{name}: schema_version 3, this version reads 4"):
            reading.load(complete)
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
        run = reading.load(complete)
        same = run.requests == requests_of(server.record)
        found = "the same" if same and run.steps.table.tobytes() == bytes(server.record.steps) else "other numbers"
    except RunError as error:
        found = str(error)
    finally:
        (complete / name).write_bytes(whole)
    assert found == "the same" or found.startswith(str(complete / name))
