"""A run written in pieces while it works: the same files as one written whole, and readable wherever it is killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.written import scenario

from cbsim.errors import RunError
from cbsim.machine.simulate import Simulation
from cbsim.record import directory, invariants, record, tables
from cbsim.record.directory import RunWriter
from cbsim.record.record import RequestRow
from cbsim.record.tables import RequestTable, Steps, requests_of
from cbsim.runs import reading, result, running
from cbsim.runs.running import OnStep, Session, Terms
from cbsim.scenario.scenario import Scenario

TABLES = ("steps.parquet", "requests.parquet", "summary.json", "timeline.json.gz")
FEW = {"workload": {"kind": "synthetic", "requests": 4, "prompt_tokens": 300, "output_tokens": 5}}
LEFT_BEHIND = {"steps", "requests", "pieces.json"}
PROMPTS, OUTPUTS = ({"uniform": {"low": low, "high": high}} for low, high in ((20, 400), (1, 60)))
LENGTHS = {"prompt_tokens": PROMPTS, "output_tokens": OUTPUTS}
CLOSED = {"kind": "synthetic", "requests": 40, "arrivals": {"kind": "closed_loop", "users": 9}, **LENGTHS}
CALLS: Mapping[str, Any] = {  # preemptions and refusals; a closed loop that starts over at every end
    "open": {},
    "closed": {"workload": CLOSED},
    "static": {"scheduler": {"name": "static", "batch_size": 5}},
}
FLEETS: Mapping[str, Any] = {  # servers on one clock; one after the other; in a fleet alone
    router: {"fleet": {"pools": [{"count": count}], "router": {"name": router}}}
    for router, count in (("least_in_flight", 3), ("round_robin", 3), ("power_of_two", 1))
}


def run(
    asked: Scenario,
    loop: str,
    path: Path,
    group: int,
    pieces: bool,
    until: int | None = None,
    window_s: Any = None,
    serve: running.Maker = Simulation,
) -> RunWriter:
    """A run directory made as the command makes it. `until`: killed when there are so many steps."""
    writer = RunWriter.at(path)
    writer.group = group

    @contextmanager
    def watch(session: Session) -> Iterator[OnStep]:
        writer.scenario(session.resolved)
        writer.json("env.json", session.environment)
        if pieces:
            session.write_to(writer)
        done = session.server.record

        def on_step(now_ns: int) -> None:
            if done.step_count == until:
                raise KeyboardInterrupt

        yield on_step

    made = running.one_loop(asked, loop, serve, Terms("none", window_s), watch)
    made.write(writer, (3, 40))
    return writer


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("name", [*CALLS, *FLEETS])
@pytest.mark.parametrize("group", [1, 11, 64, 10_000])
def test_pieces_of_any_size_make_the_same_files(name: str, loop: str, group: int, tmp_path: Path) -> None:
    """Byte by byte: both tables, the summary, the timeline. Nothing of the pieces is left."""
    asked = scenario(**(CALLS | FLEETS)[name] | (FEW if group == 1 else {}), loop={"mode": loop})
    whole, joined = (run(asked, loop, tmp_path / str(way), group, way) for way in (False, True))
    assert whole.joined is False and joined.joined is (group < 10_000)
    for file in TABLES:
        assert (whole.path / file).read_bytes() == (joined.path / file).read_bytes(), file
    assert not LEFT_BEHIND & {file.name for file in joined.path.iterdir()}


def test_pieces_of_servers_in_processes_make_the_same_files(tmp_path: Path) -> None:
    """They are written by this one, as soon as a server is over; a server whose steps are fewer waits for the end."""
    asked, group = scenario(**FLEETS["round_robin"], loop={"mode": "sync"}), 200
    whole = run(asked, "sync", tmp_path / "whole", group, pieces=False)
    joined = run(asked, "sync", tmp_path / "joined", group, pieces=True, serve=partial(Simulation, jobs=2))
    counts = [server["steps"] for server in result.read(whole.path).summary["per_server"]]
    assert joined.joined and min(counts) < group < max(counts)
    for file in TABLES:
        assert (whole.path / file).read_bytes() == (joined.path / file).read_bytes(), file


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("until", [21, 60])
def test_a_killed_run_reads_as_one_that_was_interrupted_at_its_last_piece(
    name: str, until: int, tmp_path: Path
) -> None:
    """SIGKILL leaves whole pieces: they are read as if the run had been interrupted there, numbers included, and
    pandas reads them too."""
    asked, group = scenario(**CALLS[name]), 7
    with pytest.raises(KeyboardInterrupt):
        run(asked, "async", tmp_path / "killed", group, pieces=True, until=until, window_s=(0.1, float("inf")))
    last = until - until % group
    session = Session(asked, "async", Simulation, Terms("none", (0.1, float("inf"))))

    def on_step(now_ns: int) -> None:
        if session.server.record.step_count == last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.server.run(on_step)
    expected, killed = session.result("interrupted"), result.read(tmp_path / "killed")
    assert killed.incomplete == "the run is under way, or died without a word"
    assert len(killed.step_numbers) == last
    assert (killed.step_numbers.table == expected.step_numbers.table).all()
    assert killed.request_rows == expected.request_rows
    assert killed.summary == expected.summary
    steps, requests = (pd.read_parquet(tmp_path / "killed" / part) for part in ("steps", "requests"))
    assert (steps["plan_hash"] == expected.step_numbers["plan_hash"]).all()
    latest = requests.drop_duplicates("index", keep="last").sort_values("index")
    assert latest["status"].tolist() == [row.status for row in expected.request_rows]


@pytest.mark.parametrize("name", ["least_in_flight", "round_robin"])
def test_a_killed_fleet_reads_as_what_its_servers_had_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server up to its last piece, its steps behind those of the server before, and requests beside them."""
    asked, group = scenario(**FLEETS[name], loop={"mode": "sync"}), 7
    whole = run(asked, "sync", tmp_path / "whole", 10_000, pieces=True).path
    with pytest.raises(KeyboardInterrupt):
        run(asked, "sync", tmp_path / "killed", group, pieces=True, until=150)
    for largest in (tables.LARGE, 3):
        monkeypatch.setattr(tables, "LARGE", largest)
        killed, complete = reading.load(tmp_path / "killed"), reading.load(whole)
        assert 100 < len(killed.steps) < 150 and killed.summary["steps"] == len(killed.steps)
        assert killed.steps["step"].tolist() == [*range(len(killed.steps))]
        for part, own in zip(reading.servers(killed, 3), reading.servers(complete, 3), strict=True):
            count, of = len(part.steps), {row.index: row for row in own.requests}
            assert (part.steps.table[:, 1:] == own.steps.table[:count, 1:]).all()
            for row in part.requests:
                assert row[:5] == of[row.index][:5]
                assert delivering(row) == [step for step in delivering(of[row.index]) if step < count]


def delivering(row: RequestRow) -> list[int]:
    """The steps that delivered a request's tokens."""
    runs = zip(row.token_runs[::2], row.token_runs[1::2], strict=True)
    return [step for first, count in runs for step in range(first, first + count)]


@pytest.mark.parametrize(
    "text", ["{}", '{"about": {}, "counted": {"window_s": [1]}}', '{"about": {}, "counted": {"no": 1}}']
)
def test_terms_that_no_run_writes_are_refused(text: str, tmp_path: Path) -> None:
    """In one line that names the file: pieces.json may have been changed by anybody."""
    with pytest.raises(KeyboardInterrupt):
        run(scenario(), "sync", tmp_path / "killed", 7, pieces=True, until=21)
    (tmp_path / "killed" / directory.TERMS).write_text(text)
    with pytest.raises(RunError, match=r"pieces\.json: not what a run writes: "):
        result.read(tmp_path / "killed")


def test_a_record_forgets_what_is_over(tmp_path: Path) -> None:
    """With a sink it holds what runs or waits and the last steps, however many requests there have been."""
    asked, most = scenario(), 0
    session = Session(asked, "sync", Simulation, Terms("none"))
    writer = RunWriter.at(tmp_path / "run")
    writer.group = 5
    session.write_to(writer)
    now = session.server.record

    def on_step(now_ns: int) -> None:
        nonlocal most
        most = max(most, len(now.steps) // record.STEP_BYTES)
        if not now.steps:
            assert all(row.status in ("waiting", "unfinished") for row in requests_of(now))

    session.server.run(on_step)
    assert most == 4
    assert now.finished_count == session.requests == 40
    assert now.step_count > 50


@pytest.mark.parametrize("name", CALLS)
def test_what_is_over_is_counted_whoever_has_it(name: str, tmp_path: Path) -> None:
    """After every step a record that forgets says the same numbers as one that does not."""
    counts: list[list[tuple[int, int]]] = []
    for way in (False, True):
        session, heard = Session(scenario(**CALLS[name]), "async", Simulation, Terms("none")), []
        writer = RunWriter.at(tmp_path / str(way))
        writer.group = 3
        if way:
            session.write_to(writer)
        now = session.server.record
        session.server.run(lambda _, now=now, heard=heard: heard.append((now.finished_count, now.step_count)))
        counts.append(heard)
    assert counts[0] == counts[1]
    assert counts[0][-1][0] == 40


def test_a_table_is_its_rows() -> None:
    """Columns and rows say the same: one by one, in part, and as a mask chooses them."""
    rows = [
        RequestRow(i, f"r{i}", *range(i, i + 8), ("length", "stop", "waiting")[i % 3], "", -1, 0, 0, [i, 2] * (i % 3))
        for i in range(20)
    ]
    table = RequestTable.of(rows)
    assert table == rows and list(table) == rows and len(table) == 20
    assert table[3] == rows[3] and table[-1] == rows[-1] and table[2:9:3] == rows[2:9:3]
    waiting = table.is_in(("waiting",))
    assert table.rows(waiting) == [row for row in rows if row.status == "waiting"]
    assert RequestTable.of(()) == [] and table != rows[:-1]


def test_long_tables_are_read_column_by_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond LARGE rows nothing but the columns asked for is read, and all says the same."""
    path = run(scenario(), "sync", tmp_path / "run", 7, pieces=True).path
    short = reading.load(path)
    monkeypatch.setattr(tables, "LARGE", 3)
    long = reading.load(path)
    assert type(short.steps) is Steps is not type(long.steps)
    assert (long.steps.table == short.steps.table).all() and long.requests == short.requests
    for low, high in ((0, 5), (6, 23), (14, 14), (0, 10_000), (10_000, 10_001)):
        assert (long.steps.window(low, high).table == short.steps.window(low, high).table).all()
    assert result.read(path).summary == short.summary


@pytest.mark.parametrize(("loop", "column"), [("sync", "schedule_start_ns"), ("async", "update_end_ns")])
def test_the_cpu_does_one_thing_at_a_time_however_many_steps_are_checked_together(
    loop: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overlap is found in any block and between blocks; what only lies across their edge is fine: with two steps in
    flight, a step is planned before the result of the one before is applied."""
    steps = reading.load(run(scenario(), loop, tmp_path / "run", 10_000, pieces=False).path).steps
    for together in (1, 2, 3, 10, 1000):
        monkeypatch.setattr(invariants, "AT_ONCE", together)
        invariants.check_cpu(steps)
        for at in (1, 5, len(steps) - 2):
            table = steps.table.copy()
            table[at, record.STEP_COLUMNS.index("update_end_ns")] = steps[column][at + 1] + 1
            with pytest.raises(AssertionError, match="one thing at a time"):
                invariants.check_cpu(Steps(table))
