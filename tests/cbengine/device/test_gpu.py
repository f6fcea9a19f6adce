"""What the system says of a GPU, asked of a stand-in for nvidia-smi; and that a run keeps it, before and after."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from cbengine import build, servers
from cbengine.build import Setup
from cbengine.cli.parser import command_line
from cbengine.device import gpu
from cbsim.cli.arguments import run_options
from cbsim.runs import run_command
from cbsim.scenario import scenario

SAID = "1980, 1980, 2619, 412.50, 700.00, 54, 0x0000000000000004"


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what nvidia-smi prints, or raises; returns the commands that were run."""

    def given(answer: str | Exception) -> list[list[str]]:
        asked: list[list[str]] = []

        def run(words: list[str], **_: Any) -> Any:
            asked.append(words)
            if isinstance(answer, Exception):
                raise answer
            return subprocess.CompletedProcess(words, 0, answer, "")

        monkeypatch.setattr(gpu.subprocess, "run", run)
        return asked

    return given


def test_clocks_power_and_throttling_have_their_names(says: Any) -> None:
    """Numbers as numbers, in the units of their names; a bit mask stays text."""
    asked = says(SAID + "\n")
    found = gpu.state()
    assert found is not None
    assert list(found) == list(gpu.STATE)
    assert found["sm_clock_mhz"] == 1980.0
    assert found["power_w"] == 412.5
    assert found["throttle_reasons"] == "0x0000000000000004"
    assert f"--query-gpu={','.join(gpu.STATE.values())}" in asked[0]


@pytest.mark.parametrize(
    "answer", [FileNotFoundError("nvidia-smi"), subprocess.CalledProcessError(9, "nvidia-smi"), "", "No devices\n"]
)
def test_where_nobody_says_there_is_none(answer: str | Exception, says: Any) -> None:
    says(answer)
    assert gpu.state() is None


def test_the_state_is_taken_while_the_gpu_works(says: Any) -> None:
    """Ten seconds after the start and then once a minute: before and after a run a GPU may be idle."""
    says(SAID)
    states: list[Any] = []
    pauses: list[float] = []
    gpu.watch(states, lambda pause_s: pauses.append(pause_s) or len(pauses) > 3)  # type: ignore[func-returns-value]
    assert pauses == [10, 60, 60, 60]
    assert [state["power_w"] for state in states] == [412.5] * 3


def test_a_run_keeps_the_state_before_in_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """env.json is written again when the run is over; all that was said before stays."""
    states = iter(({"sm_clock_mhz": 345.0}, {"sm_clock_mhz": 1980.0}))
    monkeypatch.setattr(gpu, "watch", lambda states, over: states.append({"sm_clock_mhz": 1755.0}))
    words = ["replay", "tiny_cpu", "--set", "workload.requests=2", "--out", str(tmp_path), "--quiet"]
    options = run_options(command_line().parse_args(words))
    setup = Setup(device="inline")

    def serve(*given: Any) -> Any:
        server = servers.maker(setup)(*given)
        server._on_gpu = True
        server.facts["gpu_before"] = gpu.state()
        return server

    monkeypatch.setattr(gpu, "state", lambda: next(states))
    asked = build.adapted(scenario.load("tiny_cpu", options.overrides), setup)
    done = run_command.one_loop(asked, "sync", options, serve)
    facts = json.loads((done.path / "env.json").read_text())
    assert (facts["gpu_before"], facts["gpu_after"]) == ({"sm_clock_mhz": 345.0}, {"sm_clock_mhz": 1980.0})
    assert facts["gpu_during"] == [{"sm_clock_mhz": 1755.0}]
    assert facts["engine"] == "cbengine"
