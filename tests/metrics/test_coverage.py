"""A fitted cost model that is used beyond what it was fitted to says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbsim.cli import parser
from cbsim.metrics import coverage
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps

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
