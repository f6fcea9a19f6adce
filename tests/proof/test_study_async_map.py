"""The map of async: runs agree with the closed form, the report is what runs, the marks are what was measured."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from cbsim.proof.studies import async_map
from cbsim.proof.studies.async_map import BATCHES, CPU_MS, ENGINES, MATTERS
from cbsim.scenario import catalog
from cbsim.scenario.fields import ScenarioError
from cbsim.sweeps.executor import Here

REPORT = Path(__file__).parents[2] / "reports" / "fidelity" / "async_map" / "report.json"
MODEL, GPU = "llama-3.1-8b", "h100-sxm"


def test_the_committed_report_is_what_runs() -> None:
    """The cases of one model and GPU, and their gains: min / sum of the two times of a step."""
    published = json.loads(REPORT.read_text(encoding="utf-8"))["data"]
    now = async_map.swept(Here(), [MODEL], [GPU])
    then = [case for case in published["cases"] if (case["model"], case["gpu"]) == (MODEL, GPU)]
    assert [(case.batch, case.context) for case in now] == [(case["batch"], case["context"]) for case in then]
    assert {case.batch for case in now} == {*BATCHES}
    for case, published_case in zip(now, then, strict=True):
        assert case.gpu_ms == pytest.approx(published_case["gpu_ms"], rel=1e-9)
        assert min(case.matters_ms, case.gpu_ms) / (case.matters_ms + case.gpu_ms) == pytest.approx(MATTERS)
        for ms in CPU_MS:
            assert case.saved(ms) == pytest.approx(min(ms, case.gpu_ms) / (ms + case.gpu_ms), abs=0.001)
    assert [engine._asdict() for engine in ENGINES] == published["engines"]


def test_what_does_not_fit_is_left_out() -> None:
    """Of the small model all cases fit somewhere; four GPUs hold 70B and eight long contexts, no more."""
    cases = {(case["batch"], case["context"]) for case in json.loads(REPORT.read_text())["data"]["cases"]}
    assert (128, 32768) in cases  # of the small model
    large = async_map.swept(Here(), ["llama-3.1-70b"], ["a100-80gb"], most=8)
    assert {(case.batch, case.context) for case in large} == {(b, c) for b in (1, 8) for c in (1024, 8192, 32768)}


def test_the_marks_of_the_older_engine_are_its_file_s() -> None:
    """Medians of three phases, summed, of Llama-2-7b on one GPU."""
    try:
        path = catalog.data("cpu_overhead/cpu_overheads_history_bfb80913.csv")
    except ScenarioError as missing:
        pytest.skip(str(missing))
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if "Llama-2-7b" in row["model_name"]]
    phases = ("schedule_median", "prepare_inputs_e2e_median", "process_model_outputs_median")
    for engine in ENGINES:
        if engine.name.startswith("vLLM"):
            batch = engine.name.rpartition(" ")[2]
            (row,) = (r for r in rows if (r["batch_size"], r["tensor_parallel_degree"]) == (batch, "1"))
            assert engine.cpu_ms == pytest.approx(sum(float(row[phase]) for phase in phases), abs=0.005)
