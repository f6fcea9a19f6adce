"""A fitted cost model that is used beyond what it was fitted to says so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cbsim
from cbsim.cli import parser
from cbsim.metrics import coverage
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps
from cbsim.scenario.costs import RooflineSettings
from cbsim.scenario.scenario import Scenario

CALIBRATED = {"model": "Tiny", "dtype": "float32", "scheduler": "vllm", "rows": 8, "tokens": 128, "context_tokens": 900}


def steps(**columns: list[int]) -> Steps:
    rows = np.zeros((3, len(STEP_COLUMNS)), dtype=np.int64)
    for name, values in columns.items():
        rows[:, list(STEP_COLUMNS).index(name)] = values
    return Steps(rows)


def scenario(**changes: Any) -> dict[str, Any]:
    model = {"name": "Tiny", "dtype": "float32"} | changes.pop("model", {})
    cost = {"kind": "fitted", "calibrated": CALIBRATED}
    return {"model": model, "scheduler": {"name": "vllm"}, "cost": cost} | changes


def test_within_the_range_or_without_a_calibration_nothing_is_said() -> None:
    """The bounds themselves were measured."""
    assert coverage.warnings(scenario(), steps(rows=[8, 1, 1], tokens=[128, 1, 1], context_tokens=[900, 0, 0])) == []
    for cost in ({"kind": "constant"}, {"kind": "fitted", "calibrated": None}):
        assert coverage.warnings(scenario(cost=cost), steps(rows=[10**6, 1, 1])) == []


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("rows", [9, 1, 32], "2 of 3 steps have more than the 8 rows measured, up to 32"),
        ("tokens", [129, 1, 1], "1 of 3 steps have more than the 128 query tokens measured, up to 129"),
        ("context_tokens", [1, 901, 1], "1 of 3 steps have more than the 900 KV tokens read measured, up to 901"),
    ],
)
def test_beyond_the_range_it_says_how_far_and_how_often(column: str, values: list[int], says: str) -> None:
    assert coverage.warnings(scenario(), steps(**{column: values})) == [says]


def test_coefficients_hold_for_one_model_type_and_scheduler() -> None:
    other = scenario(model={"name": "Llama-3.1-8B", "dtype": "bfloat16"}, scheduler={"name": "static"})
    assert coverage.warnings(other, steps()) == [
        "the coefficients were measured with model Tiny, the scenario has Llama-3.1-8B",
        "the coefficients were measured with dtype float32, the scenario has bfloat16",
        "the coefficients were measured with scheduler vllm, the scenario has static",
    ]


def test_a_simulation_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr, for each loop, and the run is made all the same."""
    facts = {**CALIBRATED, "device": "d", "commit": "c", "date": "2026-01-01", "rows": 3}
    words = [f"{name}: {value!r}" for name, value in facts.items()]
    (tmp_path / "c.yaml").write_text(f"base_s: 0.01\ncalibrated: {{{', '.join(words)}}}\n")
    cost = f"cost={{kind: fitted, path: {tmp_path / 'c.yaml'}}}"
    few = ["--set", cost, "--set", "workload.requests=4"]
    assert parser.main(["run", "tiny_cpu", *few, "--out", str(tmp_path / "runs"), "--quiet"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in said] == [" sync", " async"]
    assert "beyond the calibration: " in said[0] and "more than the 3 rows measured, up to 4" in said[0]


OWN = {"requests": 1234, "rows": 8, "tokens": 128, "context_tokens": 900, "open_arrivals": False, "joint": {}}
TERMS: dict[str, Any] = {
    "backend": "vllm",
    "systems": ["NVIDIA L4 24GB"],
    "models": ["Llama-3.2-1B"],
    "tensor_parallel": [1],
    "users": [1, 16],
    "tables": {},
    "weights": ["bfloat16"],
    "routing": "balanced",
    "fastest": True,
    "values": {"step_overhead_s": 1e-3, "memory_efficiency.kv": 0.5, "front_s": 0.01},
    "intervals": {"step_overhead_s": [5e-4, 2e-3], "memory_efficiency.kv": [0.4, 0.6], "front_s": [0.0, 0.02]},
}
LEFT_OUT = [{"users": 4, "ttft": math.log(1.04), "tpot": math.log(0.98)}, {"users": 8, "ttft": 0.0, "tpot": 0.0}]


def own_server(left_out: int, **changes: Any) -> Scenario:
    """A server with terms that were fitted to it, as a run has it; so many loads were left out."""
    own = OWN | {"residuals": LEFT_OUT[:left_out], "undetermined": ["cpu.factor"]}
    cost = {"kind": "roofline", "terms": "own.yaml", "calibrated": TERMS | {"own": own}, "step_overhead_s": 1e-3}
    cost["memory_efficiency"] = {"weights": 0.8, "kv": 0.5}
    base = {"question": "How near?", "model": "llama-3.2-1b", "hardware": "l4", "scheduler": {"name": "vllm"}}
    users = {"arrivals": {"kind": "closed_loop", "users": 4}}
    load = {"kind": "synthetic", "requests": 4, "prompt_tokens": 8, "output_tokens": 2, **users}
    return cbsim.load({**base, "workload": load, "cost": cost, "loop": {"mode": "async"}}, changes)


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        (2, "TPOT error 1.0%, TTFT error 1.9% on 2 loads left out"),
        (1, "TPOT error 2.0%, TTFT error 3.8% on 1 load left out"),
        (0, "no load left out: their error is not known"),
    ],
)
def test_terms_of_ones_own_server_say_how_far_off_they_are(left_out: int, says: str) -> None:
    server = own_server(left_out)
    assert isinstance(server.cost, RooflineSettings)
    line = f"calibrated on 1,234 requests of this server: {says}; not determined: cpu.factor"
    values, last = coverage.sureness(server.cost)
    assert last == line and coverage.basis(server).endswith(f"terms own.yaml, {line}")
    assert "step_overhead_s 0.001 (0.0005 to 0.002), memory_efficiency.kv 0.5 (0.4 to 0.6), front_s" in values


def test_a_run_unlike_ones_own_server_says_so() -> None:
    """By its resolved scenario and its steps; in a run of either loop, as the server's own was measured."""
    within = steps(rows=[8, 1, 1], tokens=[128, 1, 1], context_tokens=[900, 0, 0])
    for loop in ("sync", "async"):
        assert coverage.warnings(own_server(2, **{"loop.mode": loop}).model_dump(mode="json"), within) == []
    changes = {"hardware": "l40s", "cost.memory_efficiency.kv": 0.25, "workload.arrivals": {"kind": "at_once"}}
    beyond = coverage.warnings(own_server(2, **changes).model_dump(mode="json"), steps(rows=[9, 1, 1]))
    for what in (
        "card NVIDIA L40S 48GB",
        "arrivals that are no closed loop",
        "memory_efficiency.kv 0.25 in place of 0.5",
    ):
        assert f"{what}, unlike what the terms own.yaml were calibrated on" in beyond
    assert beyond[-1] == "1 of 3 steps have more than the 8 rows measured, up to 9" and len(beyond) == 4
    assert coverage.bases([own_server(2, **changes)] * 2)[1:] == beyond[:-1], "a search says it, too"
