"""CPU phases and kernels that take longer beside each other: closed forms of both loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cbsim
from cbsim.machine.simulate import Simulation
from cbsim.record.tables import Steps
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators

REQUESTS, TOKENS = 4, 40
CPU, SCHEDULE, UPDATE = 2_000_000, 300_000, 200_000  # ns


def server(step_s: float, contention: dict[str, float], **more: Any) -> Scenario:
    """Equal decode steps: `step_s` of kernels, 2 ms of CPU."""
    cpu = {"schedule": {"base_s": SCHEDULE / 1e9}, "update": {"base_s": UPDATE / 1e9}}
    cpu["prepare"] = {"base_s": (CPU - SCHEDULE - UPDATE) / 1e9}
    return cbsim.load(
        {
            "question": "How long is a step?",
            "model": "llama-3.1-8b",
            "hardware": "h200-sxm",
            "workload": {"kind": "synthetic", "requests": REQUESTS, "prompt_tokens": 8, "output_tokens": TOKENS},
            "scheduler": {"name": "vllm", "max_num_seqs": REQUESTS},
            "cost": {"kind": "constant", "step_s": step_s, "cpu": cpu, "contention": contention},
            **more,
        }
    )


def steps(of: Scenario, loop: str) -> Steps:
    made = Simulation(of, loop, generators.build(of))
    made.run()
    return Steps.of(made.machine.record)


def settled(of: Steps, name: str) -> set[int]:
    """The different times of a lane or phase once both have begun and before the last steps."""
    return set(of.lane(name)[3:-3].tolist())


def test_the_synchronous_loop_has_none() -> None:
    """Neither works beside the other: all times are the same, to the nanosecond."""
    plain, slow = (steps(server(5e-3, shares), "sync") for shares in ({}, {"cpu": 0.5, "gpu": 0.25}))
    assert np.array_equal(plain.table, slow.table)


def test_kernels_that_are_launched_ahead_are_longer() -> None:
    """5 ms of kernels above 2 ms of CPU: a step takes what its kernels do beside the CPU, but for the first, which is
    launched to an idle GPU.
    """
    made = steps(server(5e-3, {"gpu": 0.25}), "async")
    assert made.lane("compute")[0] == 5_000_000 and settled(made, "compute") == {6_250_000}
    assert set(np.diff(made["compute_start_ns"])[3:-3].tolist()) == {6_250_000}
    assert settled(made, "schedule") == {SCHEDULE} and settled(made, "update") == {UPDATE}


def test_phases_that_begin_while_kernels_run_are_longer() -> None:
    """All of them do where kernels take longer than the CPU; the first step's find an idle GPU."""
    made = steps(server(5e-3, {"cpu": 0.5}), "async")
    assert settled(made, "compute") == {5_000_000} and made.lane("schedule")[0] == SCHEDULE
    assert settled(made, "schedule") == {SCHEDULE * 3 // 2} and settled(made, "update") == {UPDATE * 3 // 2}
    assert settled(made, "prepare") == {(CPU - SCHEDULE - UPDATE) * 3 // 2}


def test_a_phase_after_the_kernels_is_as_long_as_alone() -> None:
    """0.6 ms of kernels below 2 ms of CPU. From their launch on: the update of the step before (0.3 ms) and the
    schedule (0.45 ms) begin while they run, the rest does not, and no launch is ahead.
    """
    made = steps(server(0.6e-3, {"cpu": 0.5, "gpu": 0.25}), "async")
    assert settled(made, "compute") == {600_000}
    assert settled(made, "update") == {UPDATE * 3 // 2} and settled(made, "schedule") == {SCHEDULE * 3 // 2}
    assert settled(made, "prepare") == {CPU - SCHEDULE - UPDATE}
    period = CPU + (SCHEDULE + UPDATE) // 2
    assert set(np.diff(made["compute_start_ns"])[3:-3].tolist()) == {period}


@pytest.mark.parametrize("shares", [{"cpu": -0.1}, {"gpu": -1}, {"gpu": "nan"}, {"gpus": 0.1}])
def test_shares_that_are_none(shares: dict[str, Any]) -> None:
    with pytest.raises(cbsim.UserError, match=r"cost\.contention\."):
        server(5e-3, shares)
