"""Processes that work on a sweep, and what is lost when they or the sweep are ended: nothing that was done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.calls import environment
from support.sweeping import seats

from cbsim.errors import RunError
from cbsim.sweeps import sweep_file
from cbsim.sweeps.sweep import Sweep, Swept
from cbsim.sweeps.work import DIED, Here, Made, Processes


def swept(path: Path, store: Path) -> Swept:
    return Sweep(*sweep_file.read(path), store).run(Processes(2))


def test_processes_make_what_this_one_makes(sweep: Path, tmp_path: Path) -> None:
    """In whatever order: the same table, to the last bit."""
    here = Sweep(*sweep_file.read(sweep), tmp_path / "here").run(Here())
    assert swept(sweep, tmp_path / "there").table.equals(here.table)


def test_a_run_is_stored_by_the_process_that_made_it(sweep: Path, tmp_path: Path) -> None:
    """So the one that hands out the points gets no files, and reads nothing until it makes the table."""
    points, heard = Sweep(*sweep_file.read(sweep), tmp_path), list[Made]()
    assert points.run(Processes(2), heard.append).count("done") == len(points.points) == len(heard)
    assert not any(made.files for made in heard)
    assert all(points.store.holds(made.key, ("summary.json", "env.json")) for made in heard)


def test_who_kills_his_process_fails_and_nobody_else_does(trapped: Path, tmp_path: Path) -> None:
    """A point whose process dies is done again, and with it all that were under way; it fails if that dies, too."""
    done = swept(seats(trapped, 1, 2, 67, 3, 68, 4, 5), tmp_path / "store")
    assert [row.status for row in done.rows] == ["done", "done", "failed", "done", "done", "done", "done"]
    assert done.rows[2].reason == DIED


def test_what_a_process_was_writing_when_it_was_ended_goes(trapped: Path, tmp_path: Path) -> None:
    """Not a day later: as on a full disk, where another process could not store its run."""
    points = Sweep(*sweep_file.read(seats(trapped, 70, 71)), tmp_path)

    def stop(made: Made) -> None:
        raise RunError(made.key)

    with pytest.raises(RunError, match=points.points[1].key):
        points.run(Processes(2), stop)
    assert [path.name for path in tmp_path.glob("runs/*/*")] == [points.points[1].key]


def _started(path: Path, store: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "cbsim", "sweep", str(path), "--store", str(store), "--jobs", "2"]
    paths = environment()["PYTHONPATH"] + os.pathsep + str(path.parent)
    pipe = subprocess.PIPE
    variables = environment() | {"PYTHONPATH": paths}
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=variables, start_new_session=True)


def _until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait for what the sweep does."""
    while not reached():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_a_sweep_that_is_ended_goes_on_later(trapped: Path, tmp_path: Path, how: signal.Signals) -> None:
    """Its processes end with it, even if it was killed; what was under way is missing, and nothing else. A terminal
    sends what it sends to all of them.
    """
    store, busy = tmp_path / "store", trapped.with_name("busy")
    process = _started(seats(trapped, 1, 2, 3, 69), store)
    _until(process, lambda: busy.exists() and len(list(store.glob("runs/*/*/summary.json"))) == 3)
    if how == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, how)
    out, err = process.communicate(timeout=30)
    busy.unlink(missing_ok=True)
    if how != signal.SIGKILL:
        assert process.returncode == 130
        assert "interrupted; the same command goes on where it stopped" in err
        assert "Traceback" not in out + err and "resource_tracker" not in err
    table = Sweep(*sweep_file.read(trapped), store).now()
    assert [row.status for row in table.rows] == ["done", "done", "done", "missing"]
    for _ in range(200):  # who is still at work makes the file again
        busy.unlink(missing_ok=True)
        time.sleep(0.01)
        if not busy.exists():
            break
    assert not busy.exists()
    assert pq.read_table(store / "trap.parquet")["status"].to_pylist() == ["done", "done", "done", "missing"]
