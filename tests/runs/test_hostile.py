"""What a hostile but ordinary user does: numbers beyond any run, broken files, full disks. Never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.calls import ROOT, SMALL, call, environment
from support.recordings import replayed

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize(
    "override",
    [
        "workload.requests=100000000000",  # MemoryError: 745 GiB
        "workload.prompt_tokens={uniform: {low: 1, high: 1e30}}",
        "workload.arrivals={kind: constant, rate_per_s: 1e-12}",  # struct.error: time beyond 2^63 ns
        "workload.arrivals={kind: closed_loop, users: 1, think_s: 1e300}",
        "workload.priorities=[0, 1e25]",
        "workload.max_tokens=1e30",
        "cost={kind: constant, step_s: 1e300}",
        "hardware.memory_bandwidth_bytes_s=1e-300",
        "hardware.pcie_bytes_s=1e-9",
        "loop.cuda_graphs.capture_s=1e300",
        "loop.cuda_graphs.vllm_capture_sizes=[1, 1e18]",
    ],
)
def test_numbers_beyond_any_run(small: Path, out: Path, override: str) -> None:
    """Out-of-range numbers are a user's mistake like any other: 1 or 2, one line, no traceback."""
    words = ["--set", "workload.stop_early=true"] if "max_tokens" in override else []
    said = call("run", small, *words, "--set", override, "--out", out, "--quiet")
    assert said.status in (1, 2)
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["my scenario.yaml", "größe.yaml", "_x.yaml"])
def test_a_file_name_is_no_mistake(tmp_path: Path, out: Path, name: str) -> None:
    """The default name of a run is made from the file's, whatever that is."""
    (tmp_path / name).write_text(SMALL)
    assert call("run", tmp_path / name, "--out", out, "--quiet").status == 0


def test_a_folder_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").mkdir()
    said = call("run", tmp_path / "d.yaml")
    assert said.status == 2
    assert "no such file" not in said.err


def test_stdout_that_is_full(tmp_path: Path) -> None:
    """/dev/full is a full disk: 1 and one line."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cbsim", "list"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT, env=environment(),
        )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "No space left" in done.stderr


def test_a_question_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    (tmp_path / "u.yaml").write_text(SMALL.replace("What does a small run cost?", "Größe?"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "cbsim", "run", str(tmp_path / "u.yaml"), "--out", str(tmp_path / "o")],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment() | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_a_poll_that_no_run_reaches(run: Path) -> None:
    """A request that left in poll 2^31 would be waited for for an hour."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(run / "requests.parquet")
    place, polls = table.column_names.index("cancelled_poll"), table["cancelled_poll"].to_pylist()
    broken = table.set_column(place, "cancelled_poll", pa.array([2**31, *polls[1:]], pa.int64()))
    pq.write_table(broken, run / "requests.parquet")
    status, printed, err = replayed(run)
    assert (status, printed) == (2, "")
    assert (
        f"{run / 'requests.parquet'}: no request arrives or is cancelled for so long before poll 2,147,483,648" in err
    )


def test_a_run_in_which_nothing_was_computed_is_bound_by_nothing(small: Path, out: Path) -> None:
    """All gave up before they came: the one step that tells so has no rows, and waits for nothing."""
    request = {"id": "a", "prompt": [5, 6], "max_new_tokens": 4, "arrival_step": 11}
    workload = {"cb": {"block_size": 4}, "requests": [request], "cancels": [{"id": "a", "step": 2}]}
    (small.parent / "a.json").write_text(json.dumps(workload))
    said = call("run", small, "--set", "workload={kind: golden, path: a.json}", "--out", out)
    assert said.status == 0
    assert "binds" not in said.out and "would hide it" not in said.out
