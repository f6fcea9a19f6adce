"""Calibration: coefficients that are known come back from made-up steps, the file is one the simulator reads, and the
probes are scenarios on every scheduler. How long anything took here is never looked at.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")

from served import INLINE, LOOPS, SCHEDULERS, asked, spec

from cbengine import build, calibrate, cli
from cbengine.calibrate import CPU_TERMS, GPU_TERMS, Probe, Table
from cbengine.errors import UsageError
from cbsim import assemble, documents, scenario, workload
from cbsim import cli as simulator
from cbsim.cost.cpu import PHASES
from cbsim.cost.fitted import Work
from cbsim.policy.plan import Chunk, StepPlan
from cbsim.record import STEP_COLUMNS
from cbsim.scenario import Scenario
from cbsim.timing import Coefficients

KERNELS = {  # seconds
    "base_s": 2e-3,
    "per_chunk_s": 3e-4,
    "per_prefill_token_s": 2e-5,
    "per_prefill_attention_s": 4e-8,
    "per_decode_row_s": 5e-5,
    "per_context_token_s": 3e-7,
}
CPU = {phase: {"base_s": 1e-4 * (i + 1), "per_request_s": 1e-6 * i} for i, phase in enumerate(PHASES)}
H2D, D2H = 7e-6, 9e-6
EDGES = ("start_ns", "end_ns")


def column(name: str) -> int:
    return list(STEP_COLUMNS).index(name)


def made_up(count: int, seed: int, noise: float) -> Table:
    """Steps that take what KERNELS and CPU say, give or take `noise`."""
    rng = np.random.default_rng(seed)
    table = Table()
    for _ in range(count):
        chunks, rows = int(rng.integers(0, 3)), int(rng.integers(1, 17))
        prefill, context = chunks * int(rng.integers(2, 64)), rows * int(rng.integers(8, 160))
        step = Work(chunks, prefill, prefill * float(rng.integers(1, 80)), rows, context)
        size = (chunks + rows, prefill + rows, context // 16 + 1)
        times = np.zeros(len(STEP_COLUMNS), dtype=np.int64)
        takes = {phase: CPU[phase]["base_s"] + CPU[phase]["per_request_s"] * size[0] for phase in PHASES}
        takes["compute"] = float(np.dot(list(KERNELS.values()), [1, *step]))
        takes |= {"h2d": H2D, "d2h": D2H}
        for name, seconds in takes.items():
            start, end = (column(f"{name}_{edge}") for edge in EDGES)
            times[start] = rng.integers(0, 10**9)
            times[end] = times[start] + round(seconds * 1e9 * (1 + noise * rng.standard_normal()))
        table.work.append(step)
        table.size.append(size)
        table.times.append(times)
    return table


def plan(chunks: tuple[Chunk, ...], **counts: int) -> StepPlan:
    """A plan of these chunks and counts, and nothing else."""
    tuples = ("grown", "joined", "left", "ends", "ended", "preempted", "replaced")
    fields: dict[str, Any] = {name: () if name in tuples else 0 for name in StepPlan._fields}
    return StepPlan(**(fields | {"chunks": chunks, "prefill_tokens": sum(c.tokens for c in chunks)} | counts))


def test_known_coefficients_come_back() -> None:
    """Without noise, to the six digits of the file."""
    found = calibrate.calibration(made_up(200, 1, 0.0))
    for term, seconds in KERNELS.items():
        assert found.coefficients[term] == pytest.approx(seconds, rel=1e-3), term
    assert (found.coefficients["h2d_s"], found.coefficients["d2h_s"]) == (H2D, D2H)
    assert found.coefficients["launch_s_per_layer"] == 0
    for phase, terms in found.coefficients["cpu"].items():
        assert tuple(terms) == CPU_TERMS
        assert terms["base_s"] == pytest.approx(CPU[phase]["base_s"], rel=1e-3)
    assert tuple(found.fits) == ("kernels", *PHASES)
    assert found.covers.startswith("steps of up to 18 requests, ")


@pytest.mark.parametrize("seed", range(3))
def test_the_simulator_makes_of_them_what_was_measured(seed: int) -> None:
    """5 % of noise a step leaves 1.5 % in the simulator's time of a step, prefilling or decoding."""
    found = calibrate.calibration(made_up(600, seed, 0.05))
    base = asked("vllm").model_dump(mode="json")
    model = assemble.cost_model(Scenario.model_validate(base | {"cost": {"kind": "fitted", **found.coefficients}}))
    decode = plan((), decodes=8, decode_context=8 * 79)
    mixed = plan((Chunk(spec(0, 90, 4), 0, 20, 40, (), False),), decodes=4, decode_context=4 * 100)
    for step, work in ((decode, (0, 0, 0, 8, 640)), (mixed, (1, 40, 40 * 20 + 820, 4, 404))):
        h2d, kernels, d2h = model.gpu_ns(step, 0)
        true = float(np.dot(list(KERNELS.values()), [1, *work])) * 1e9
        assert kernels == pytest.approx(true, rel=0.015)
        assert (h2d, d2h) == pytest.approx((H2D * 1e9, D2H * 1e9), rel=0.01)


def test_too_few_steps() -> None:
    with pytest.raises(UsageError, match="calibrate: 23 steps are too few to fit 6 terms, 24 would do: give a larger"):
        calibrate.calibration(made_up(23, 1, 0.0))
    calibrate.calibration(made_up(24, 1, 0.0))
    assert len(GPU_TERMS) == 6


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_one_that_the_simulator_reads(tmp_path: Path) -> None:
    """It is what the coefficients' schema wants, comments say where it comes from, and a scenario with it simulates."""
    base = asked("vllm")
    file = tmp_path / "a new" / "folder" / "fitted.yaml"
    calibrate.check_writable(file)
    assert not file.exists()
    found = calibrate.calibration(made_up(100, 1, 0.01))
    calibrate.write(file, found, base, "process")
    assert Coefficients.model_validate(documents.read(file).data).model_dump() == found.coefficients
    header = [line for line in file.read_text().splitlines() if line.startswith("# ")]
    assert header[0].startswith("# Measured with `python -m cbengine calibrate` on process, commit ")
    assert header[1] == "# Model Tiny, float32; scheduler vllm; synchronous loop."
    assert header[3].startswith("# kernels: error of a step: median ")
    cost = f"cost={{kind: fitted, path: {json.dumps(str(file))}}}"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = simulator.main(["run", "tiny_cpu", "--set", cost, "--out", str(tmp_path / "runs"), "--json"])
    assert status == 0
    summary = json.loads(out.getvalue())["sync"]
    assert summary["makespan_s"] > summary["steps"] * KERNELS["base_s"]


@pytest.mark.parametrize("place", ["file/fitted.yaml", "file/deeper/fitted.yaml", "."])
def test_where_nothing_can_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("kept")
    found = calibrate.calibration(made_up(30, 1, 0.0))
    for attempt in (
        lambda: calibrate.check_writable(tmp_path / place),
        lambda: calibrate.write(tmp_path / place, found, asked("vllm"), "process"),
    ):
        with pytest.raises(UsageError, match="cannot be written: "):
            attempt()
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_that_is_there_is_kept_until_the_end(tmp_path: Path) -> None:
    """Looking whether it could be written does not touch it."""
    file = tmp_path / "fitted.yaml"
    file.write_text("the last one")
    calibrate.check_writable(file)
    assert file.read_text() == "the last one"


# -- probes -----------------------------------------------------------------------------------------------------------

HOSTILE = (  # what a base scenario may say, and a probe has to do without
    "workload.requests=3",
    "kv_cache.num_blocks=2",
    "slo={ttft_s: 1}",
)
VLLM = (
    "scheduler.enable_chunked_prefill=false",
    "scheduler.max_model_len=20",
    "scheduler.max_num_seqs=1",
    "scheduler.max_num_batched_tokens=8192",
    "scheduler.enable_prefix_caching=true",
)


@settings(max_examples=40)
@given(rows=st.integers(1, 80), longest=st.integers(1, 500), quick=st.booleans())
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_probes_are_scenarios(scheduler: str, rows: int, longest: int, quick: bool) -> None:
    """Whatever the sizes and the base: each has a cache for all seats at once, so that nothing is refused or preempted,
    and a device of the right size follows from it.
    """
    base = BASES[scheduler]
    for probe in calibrate.probes(rows, longest, quick=quick):
        assert min(probe.prompt, probe.output) >= 4
        assert probe.prompt + probe.output <= max(longest, calibrate.SHORTEST)
        assert probe.seats <= max(rows, 2)
        ready = calibrate._scenario(base, probe)
        assert Scenario.model_validate(ready.model_dump(mode="json")) == ready
        options: Any = scenario.scheduler_options(ready, 1)
        assert options.num_blocks * options.block_size >= probe.seats * (probe.prompt + probe.output)
        sizes = build.capacity(ready, "sync", workload.build(ready).specs())
        assert sizes.slots <= max(probe.seats, probe.requests)


BASES = {one: asked(one, *HOSTILE, *(VLLM if one.startswith("vllm") else ())) for one in SCHEDULERS}


def test_probes_cover_what_was_asked_for() -> None:
    """All seats, whole prompts, and one request alone; `quick` only shortens outputs."""
    for quick in (False, True):
        probes = calibrate.probes(16, 160, quick=quick)
        assert max(probe.seats for probe in probes) == 16
        assert min(probe.seats for probe in probes) == 1
        assert max(probe.prompt + probe.output for probe in probes) == 160
        assert any(probe.chunk >= probe.prompt for probe in probes)
        assert any(probe.chunk < probe.prompt for probe in probes)


@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_base_scenario_says_of_its_loop_does_not_matter(loop: str) -> None:
    """Probes run the synchronous loop: every step has its own time."""
    base = asked("vllm", f"loop.mode={loop}")
    table = calibrate.measure(base, INLINE, [Probe(3, 2, 6, 8, 6)], lambda _: None)
    steps = table.steps
    assert (steps["await_end_ns"][:-1] <= steps["schedule_start_ns"][1:]).all()
    assert len(table.work) == len(table.size) == len(steps)
    assert all(size[0] >= 1 for size in table.size)


@pytest.mark.parametrize(
    ("rows", "longest", "words"),
    [
        (4, 9000, "--longest: got 9000, must be <= 8192, model.max_position"),
        (10**12, 8192, "calibrate: --rows or --longest is too large: kv_cache.num_blocks: got "),
    ],
)
def test_sizes_that_cannot_be(rows: int, longest: int, words: str) -> None:
    with pytest.raises(UsageError) as error:
        calibrate.calibrate(asked("vllm"), INLINE, lambda _: None, rows=rows, longest=longest, quick=True)
    assert str(error.value).startswith(words)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_and_what_it_says_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole of it on the device that needs no worker: the file is written and printed, and the line `use it` is a
    shell command that simulates the scenario as it was calibrated, whatever its path looks like.
    """
    monkeypatch.setattr(build, "default_device", lambda: "inline")
    monkeypatch.chdir(tmp_path)
    out = "it's {a, b}: #1.yaml"
    words = ["calibrate", "--quick", "--rows", "4", "--longest", "32", "--out", out]
    assert cli.main([*words, "--set", "workload.requests=3", "--set", "model.layers=1"]) == 0
    said = capsys.readouterr()
    assert said.err.count("probe ") == 4
    assert said.out.startswith(Path(out).read_text())
    (line,) = (line for line in said.out.splitlines() if line.startswith("use it"))
    command = shlex.split(line.removeprefix("use it"))
    assert command[:4] == ["python", "-m", "cbsim", "run"]
    assert simulator.main([*command[3:], "--loop", "sync", "--quiet"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    resolved = scenario.load(run / "scenario.resolved.yaml")
    assert resolved.cost.kind == "fitted"
    assert (resolved.model.layers, resolved.workload.requests) == (1, 3)  # type: ignore[union-attr]


def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "default_device", lambda: "inline")
    assert cli.main(["calibrate", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"cbengine: {tmp_path}: cannot be written: Is a directory\n"
