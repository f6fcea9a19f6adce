"""What async buys on Hopper: closed forms against the simulator, and the map against arithmetic."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from cbsim.draw.chart import Line
from cbsim.draw.study import Study
from cbsim.proof.studies import hopper
from cbsim.proof.studies.hopper import BATCHES, CONTEXTS, LAYER_S, Cell, HopperRun, cells, saved, simulated
from cbsim.scenario import catalog, scenario
from cbsim.scenario.fields import ScenarioError

NS = 1e9


@pytest.fixture(scope="module", autouse=True)
def _tables() -> None:
    """Every test here needs the measured tables."""
    try:
        for gpu in hopper.GPUS.values():
            catalog.tables(f"hopper_kernels/{gpu}_sxm")
    except ScenarioError as error:
        pytest.skip(f"no kernel tables: {error}")


@pytest.fixture(scope="module")
def study() -> Study:
    return hopper.study()


def stated(cpu_s: float) -> str:
    """An override: so much CPU time a step, whatever is in it."""
    none = "{base_s: 0, per_request_s: 0}"
    prepare = f"{{base_s: {cpu_s}, per_request_s: 0}}"
    return f"cost.cpu={{schedule: {none}, prepare: {prepare}, launch: {none}, update: {none}}}"


def test_closed_forms_are_the_simulators_runs() -> None:
    """One run's kernels give the time of any other CPU cost: the sum of cpu + gpu, or of the larger of the two. At
    1.01 ms the CPU is the shorter in every step, at 10 ms in the later half of them, at 25 ms in none.
    """
    run = HopperRun.of("H100", LAYER_S)
    default = run.at(run.cpu_s)
    assert default.sync_s == pytest.approx(run.run.sync_s, rel=1e-6)
    assert default.async_s == pytest.approx(run.run.async_s, rel=1e-3)
    assert default.gpu_active == pytest.approx(run.run.gpu_active, rel=1e-6)
    assert (run.gpu_s.min() < 10e-3 < run.gpu_s.max() < 25e-3) and (run.cpu_s.max() < run.gpu_s.min())
    for cpu_s in (10e-3, 25e-3):
        asked, closed = hopper.scenario_on("H100", LAYER_S, stated(cpu_s)), run.at(cpu_s)
        assert simulated(asked, "sync")[0] == pytest.approx(closed.sync_s, rel=1e-3)
        assert simulated(asked, "async")[0] == pytest.approx(closed.async_s, rel=1e-3)


@pytest.mark.parametrize(
    ("gpu", "batch", "context"), [("H100", 1, 1024), ("H100", 256, 1024), ("H200", 16, 32768), ("H200", 128, 4096)]
)
def test_the_map_is_what_the_simulator_takes(gpu: str, batch: int, context: int) -> None:
    """At corners of the map, vLLM's scheduler with all requests decoding: the steps around the one at which their mean
    context is that of the map, from one to the next. Every request is one token longer each step, so the mean of a few
    steps is the middle one's time.
    """
    (cell,) = [cell for cell in cells(gpu) if (cell.batch, cell.context) == (batch, context)]
    assert cell.fits
    workload = f"workload={{kind: synthetic, requests: {batch}, prompt_tokens: {context - 160}, output_tokens: 400}}"
    asked = hopper.scenario_on(gpu, LAYER_S, "scheduler={name: vllm}", "kv_cache={}", workload)
    expected = {"sync": cell.cpu_s + cell.gpu_s, "async": max(cell.cpu_s, cell.gpu_s)}
    for loop, step_s in expected.items():
        _, steps = simulated(asked, loop)
        means = steps["context_tokens"] / np.maximum(steps["decode_rows"], 1)
        (around,) = np.nonzero((steps["decode_rows"] == batch) & (np.abs(means - context) <= 8))
        assert len(around) in (16, 17)
        assert (np.diff(around) == 1).all()
        assert np.diff(steps["update_end_ns"][around]).mean() / NS == pytest.approx(step_s, rel=1e-3)


@pytest.mark.parametrize(("blocks", "largest"), [(8 * 65 + 1, 8), (8 * 65, 4)])
def test_what_fits_is_what_vllm_has_blocks_for(monkeypatch: pytest.MonkeyPatch, blocks: int, largest: int) -> None:
    """A request of 1,024 cached tokens needs a 65th block of 16 for the step's token, and vLLM never gives out one of
    its blocks: with one less than eight requests need, four are the most.
    """
    monkeypatch.setattr(scenario, "scheduler_options", lambda asked, depth: SimpleNamespace(num_blocks=blocks))
    found = cells("H100")
    assert [(cell.context, cell.batch) for cell in found] == [(c, b) for c in CONTEXTS for b in BATCHES]
    assert [cell.batch for cell in found if cell.fits and cell.context == 1024][-1] == largest


def test_where_async_begins_to_matter() -> None:
    """At a 19th of the GPU's time on the CPU async saves exactly 5 %; most, a half, where both take the same."""
    cell = Cell(batch=1, context=1024, gpu_s=0.019, cpu_s=0.002, fits=True, measured=True)
    assert cell.matters_s == pytest.approx(0.001)
    assert saved(cell.matters_s, cell.gpu_s) == pytest.approx(0.05)
    assert cell.saved == pytest.approx(2 / 21)
    assert saved(0.019, 0.019) == 0.5
    assert saved(0.038, 0.019) == pytest.approx(1 / 3)
    assert saved(0.0, 0.019) == 0.0


def test_what_the_study_says(study: Study) -> None:
    """Known sums: kernels alone take 97 to 99 s and 69 to 74 s, with 0.6 ms a step about 104 s and 78 s; the
    asynchronous run at the default CPU cost hides all of it. What does not fit has a dash, and no point in a figure.
    """
    kernels = {(row["gpu"], row["layer_s"] > 0): row["sync_s"] for row in study.data["8k_b32"] if row["cpu"] == "none"}
    assert kernels["H100", False] == pytest.approx(98, abs=1.6)
    assert kernels["H200", False] == pytest.approx(72, abs=2.5)
    assert kernels["H100", True] == pytest.approx(104, abs=1)
    assert kernels["H200", True] == pytest.approx(78, abs=1)
    misfits = sum(not point["fits"] for point in study.data["map"] if point["gpu"] == "H100")
    for table in study.tables:
        if table.title.startswith("H100"):
            assert sum(cell == "-" for row in table.rows for cell in row) == misfits > 0
    for chart in study.charts[1:]:
        for panel in chart.panels:
            of_contexts = [mark for mark in panel.marks if isinstance(mark, Line) and mark.name.endswith("context")]
            fitting = [p for p in study.data["map"] if p["fits"] and p["gpu"] == panel.title[:4]]
            assert sum(len(line.x) for line in of_contexts) == len(fitting)
    json.dumps(study.data, allow_nan=False)
