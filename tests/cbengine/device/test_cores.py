"""Whether driver and worker had a core each: the system's own counts, and the notice that goes with a result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

import cbengine
from cbengine.cli.parser import main
from cbengine.device import process
from cbsim.scenario import scenario

SMALL = ["workload.requests=3", "workload.output_tokens=4", "model.layers=1"]


def counted(folder: Path, pid: int, computed_ms: int, waited_ms: int) -> None:
    (folder / str(pid)).mkdir(exist_ok=True)
    (folder / str(pid) / "schedstat").write_text(f"{computed_ms * 10**6} {waited_ms * 10**6} 99\n")


@pytest.mark.parametrize(
    ("waited_ms", "count", "noticed"),
    [
        (2, 2, ""),
        (100, 2, "here is 2 for all that runs: of the time that it had work, the driver 0%, the worker 10% waited"),
        (0, 1, "here is 1 for all that runs: of the time that it had work, the driver 0%, the worker 0% waited"),
    ],
)
def test_who_waits_for_a_core_is_no_device_beside_the_cpu(
    waited_ms: int, count: int, noticed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 5% of the time that it wanted one; what was before the run does not count."""
    monkeypatch.setattr(process, "PROC", tmp_path)
    monkeypatch.setattr(process, "cores", lambda: count)
    counted(tmp_path, 1, 10, 5000)
    counted(tmp_path, 2, 10, 7000)
    waits = process.Waits({"driver": 1, "worker": 2})
    counted(tmp_path, 1, 510, 5000)
    counted(tmp_path, 2, 910, 7000 + waited_ms)
    facts = waits.facts()
    assert facts["waited_for_core"] == {"driver": 0.0, "worker": round(waited_ms / (900 + waited_ms), 4)}
    assert noticed in "".join(facts.get("notices", [])) and bool(noticed) == ("notices" in facts)


def test_a_system_that_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the counts nothing is said but of a single core."""
    monkeypatch.setattr(process, "PROC", tmp_path)
    monkeypatch.setattr(process, "cores", lambda: 2)
    assert process.Waits({"driver": 1}).facts() == {"cores": 2, "waited_for_core": {}}
    monkeypatch.setattr(process, "cores", lambda: 1)
    (notice,) = process.Waits({"driver": 1}).facts()["notices"]
    assert notice.endswith("driver and worker want a core each, here is 1 for all that runs")


def test_the_terminal_says_that_the_loops_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one core a worker process is no device of its own: each loop's result says so, on stderr, and so does the
    Result and env.json.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        words = [word for field in SMALL for word in ("--set", field)]
        assert main(["replay", "tiny_cpu", "--device", "process", *words, "--out", str(tmp_path), "--quiet"]) == 0
        result = cbengine.run(scenario.load("tiny_cpu", [*SMALL, "loop.mode=sync"]), device="process")
    finally:
        os.sched_setaffinity(0, allowed)
    said = capsys.readouterr().err
    for loop in ("sync", "async"):
        assert f"notice: {loop}: sync against async cannot be judged on this machine: driver and worker want" in said
    (notice,) = result.notices  # type: ignore[union-attr]
    assert notice == f"sync: {result.environment['notices'][0]}"  # type: ignore[union-attr]
