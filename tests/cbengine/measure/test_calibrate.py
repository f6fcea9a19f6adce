"""Calibration: coefficients that are known come back from made-up steps, the file is one the simulator reads, and the
command says what to do next. How long anything took here is never looked at.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")

from support.engine.made_up_steps import CPU, D2H, EAGER_S, H2D, LAYERS, MATRICES, compute_s, made_up, plan, simulated
from support.engine.served import INLINE, LOOPS, SCHEDULERS, asked, spec

from cbengine import build
from cbengine.batch import Load
from cbengine.cli import parser
from cbengine.errors import UsageError
from cbengine.measure import calibrate, probes
from cbengine.measure.calibrate import CPU_TERMS, GPU_TERMS
from cbengine.measure.probes import EqualStepTimes, Probe, ProbeTable, Reach
from cbsim.cli import parser as simulator
from cbsim.cost.base import PHASES
from cbsim.cost.fitted import Curve, splits
from cbsim.policy.plan import Chunk
from cbsim.record.record import STEP_COLUMNS
from cbsim.record.tables import Steps
from cbsim.scenario import documents, scenario
from cbsim.scenario.costs import Coefficients
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators


def test_known_coefficients_come_back() -> None:
    """Without noise: the CPU's and the copies' to the file's digits, and what eager steps cost more."""
    found = calibrate.calibration(made_up(400, 1, 0.0), LAYERS)
    assert (found.coefficients["h2d_s"], found.coefficients["wake_s"]) == (H2D, D2H)
    assert found.coefficients["launch_overlap_s"] == 0
    assert found.coefficients["launch_s_per_layer"] == pytest.approx(EAGER_S / LAYERS, rel=1e-3)
    for phase, terms in found.coefficients["cpu"].items():
        assert tuple(terms) == CPU_TERMS
        assert {term: terms[term] for term in CPU[phase]} == pytest.approx(CPU[phase], rel=1e-3)
    assert tuple(found.fits) == ("kernels", *PHASES)
    assert set(GPU_TERMS) < set(found.coefficients)


@pytest.mark.parametrize("seed", range(3))
def test_the_simulator_makes_of_them_what_was_measured(seed: int) -> None:
    """5 % of noise a step leaves 2.5 % in the simulator's time of a step, prefilling or decoding, left and right of the
    bend in the matrix products.
    """
    model = simulated(made_up(900, seed, 0.05))
    few, many = (plan((), decodes=n, decode_context=n * 200, longest_context=400) for n in (4, 16))
    even = plan((), decodes=16, decode_context=16 * 200, longest_context=200)
    mixed = plan((Chunk(spec(0, 90, 4), 0, 20, 90, (), 0),), decodes=4, decode_context=4 * 100, longest_context=100)
    for step, work in (
        (few, (4, 0, 0, 0, 4, 804, 401 / 4 - 804 / 12)),
        (many, (16, 0, 0, 0, 16, 3216, 401 - 3216 / 12)),
        (even, (16, 0, 0, 0, 16, 3216, 0)),
        (mixed, (94, 1, 20, 5895, 4, 404, 0)),
    ):
        h2d, kernels, _ = model.gpu_ns(step, work[0])
        assert kernels == pytest.approx(compute_s(*work) * 1e9, rel=0.025)
        assert h2d == pytest.approx(H2D * 1e9, rel=0.01)


def test_kernels_that_begin_before_their_launch_ends_overlap_it() -> None:
    """Of replayed steps the median counts; those launched kernel by kernel always begin before."""
    table = made_up(400, 1, 0.0)
    table.lines = [line._replace(h2d=-90_000 if line.eager else -8_000) for line in table.lines]
    found = calibrate.calibration(table, LAYERS).coefficients
    assert (found["launch_overlap_s"], found["h2d_s"]) == (8e-6, 0)


def test_a_larger_batch_may_be_the_faster_one() -> None:
    """Matrix products go in tiles: 24 rows may take less than 16. A curve through measured sizes shows it."""
    table = made_up(600, 1, 0.0)
    slower = Curve([8, 16, 24], [0, 1e6, 0])
    slow = [line._replace(compute=line.compute + round(slower(min(line.tokens, 24)))) for line in table.lines]
    curve = calibrate.calibration(replace(table, lines=slow), LAYERS).coefficients["query_tokens"]
    at = {point["tokens"]: point["s"] for point in curve}
    assert at[16] > at[24] > 0


def test_steps_that_waited_for_their_launches_do_not_count() -> None:
    """Their kernels would have been faster."""
    table = made_up(600, 1, 0.0)
    waited = [
        line._replace(compute=line.compute * 3, bound=True) if i % 3 == 0 else line
        for i, line in enumerate(table.lines)
    ]
    late = replace(table, lines=waited)
    assert calibrate.calibration(late, LAYERS).fits["kernels"].errors.steps == 400
    step = plan((), decodes=8, decode_context=800)
    assert simulated(late).gpu_ns(step, 8)[1] == pytest.approx(simulated(table).gpu_ns(step, 8)[1], rel=0.01)


def test_steps_whose_launch_was_disturbed_do_not_count() -> None:
    """Launching kernel by kernel takes alike for all steps. Where it took 2 ms longer, kernels waited in between, even
    if the last of them ended long after it. What is no tenth of the kernels' time does no harm and is kept.
    """
    table = made_up(900, 1, 0.0)
    step = plan((Chunk(spec(0, 90, 4), 0, 20, 90, (), 0),), decodes=4, decode_context=4 * 100, longest_context=100)
    for longer_ns, left_out in ((2_000_000, 300), (100_000, 0)):
        disturbed = [
            line._replace(launch=line.launch + longer_ns, compute=line.compute + longer_ns)
            if line.eager and i % 2 == 0
            else line
            for i, line in enumerate(table.lines)
        ]
        late = replace(table, lines=disturbed)
        kernels = calibrate.calibration(late, LAYERS).fits["kernels"]
        assert 900 - kernels.errors.steps == pytest.approx(left_out, abs=10)
        assert simulated(late).gpu_ns(step, 94)[1] == pytest.approx(simulated(table).gpu_ns(step, 94)[1], rel=0.01)


def test_a_curve_has_points_only_where_steps_are() -> None:
    """FEW steps between two points, and the last one is the largest size; hats add up to 1 everywhere."""
    counted = np.array([3.0] * 20 + [30.0] * 2 + [100.0] * 20)
    assert calibrate.points(counted, calibrate.SIZES) == [4, 100]
    assert calibrate.points(np.array([0.0] * 30), calibrate.SIZES) == [1]
    assert sum(calibrate.hats(counted, [4, 50, 100])) == pytest.approx(np.ones(len(counted)))


def test_too_few_steps() -> None:
    with pytest.raises(UsageError, match="calibrate: 23 steps are too few, 24 would do: give a larger"):
        calibrate.calibration(made_up(23, 1, 0.0), LAYERS)
    calibrate.calibration(made_up(24, 1, 0.0), LAYERS)


def test_kernels_that_only_wait_say_nothing() -> None:
    """On a busy machine equal steps may take longer one by one than they take at all. What is left of them after that
    is nothing, and coefficients of 1 ns would be written as if they were measured.
    """
    table = ProbeTable([line._replace(eager=False, ahead=False) for line in made_up(100, 1, 0.0).lines])
    table.equal = EqualStepTimes(20, 3.0, 1.0, 2.0)
    with pytest.raises(UsageError, match=r"calibrate: kernels of .* us cannot be told from the 2,000,000\.0 us that"):
        calibrate.calibration(table, LAYERS)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_one_that_the_simulator_reads(tmp_path: Path) -> None:
    """It is what the coefficients' schema wants, comments say where it comes from, and a scenario with it simulates."""
    base = asked("vllm")
    file = tmp_path / "a new" / "folder" / "fitted.yaml"
    calibrate.check_writable(file)
    assert not file.exists()
    found = calibrate.calibration(made_up(100, 1, 0.01), LAYERS)
    held = calibrate.write(file, found, base, "a device")
    read = Coefficients.model_validate(documents.read(file).data)
    assert read == Coefficients.model_validate(held)
    told = read.calibrated
    assert told is not None
    assert (told.device, told.model, told.dtype, told.scheduler) == ("a device", "Tiny", "float32", "vllm")
    assert (told.rows, told.tokens) == (18, max(line.tokens for line in found.table.lines))
    assert told.fits is not None and told.fits.kernels.steps == 100
    assert file.read_text().startswith("# Measured with `python -m cbengine calibrate`.")
    cost = f"cost={{kind: fitted, path: {json.dumps(str(file))}}}"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = simulator.main(["run", "tiny_cpu", "--set", cost, "--out", str(tmp_path / "runs"), "--json"])
    assert status == 0
    summary = json.loads(out.getvalue())["sync"]
    assert summary["makespan_s"] > summary["steps"] * MATRICES(1)


def test_a_file_is_fitted_again_from_the_steps_beside_it(tmp_path: Path) -> None:
    """A better fit needs no device: origin and range stay, and so do the coefficients, as long as the fit does."""
    file = tmp_path / "8b.fitted.yaml"
    held = calibrate.write(file, calibrate.calibration(made_up(100, 1, 0.01), LAYERS), asked("vllm"), "a device")
    assert calibrate.steps_of(file) == tmp_path / "8b.probes.parquet"
    assert calibrate.refit(file, LAYERS) == held == documents.read(file).data
    whole = file.read_text()
    file.write_text(whole[: whole.index("per_chunk_s")])
    with pytest.raises(UsageError, match="was cut short or changed after it was calibrated"):
        calibrate.refit(file, LAYERS)
    file.write_text(whole)
    older = pq.read_table(calibrate.steps_of(file)).drop_columns(["ahead", "longest"])
    pq.write_table(older, calibrate.steps_of(file))
    again = calibrate.refit(file, LAYERS)
    assert (again["per_uneven_token_s"], again["wake_s"]) == (0, held["wake_s"]), "a file from before these columns"
    steps, says = pq.read_table(calibrate.steps_of(file)), r"8b\.probes\.parquet: not a calibration: "
    for name, values, expected in (
        ("compute", ["7"] * 100, "compute: expected numbers from 1 to"),
        ("schedule", [None] * 100, "schedule: expected numbers from 0 to"),
        ("eager", ["True"] * 100, "eager: expected numbers"),
        ("bound", [True] * 100, "expected 24 steps or more, and some that waited for nothing"),
        (None, [], "expected 24 steps or more"),
    ):
        damaged = steps.set_column(steps.column_names.index(name), name, [values]) if name else steps[:23]
        pq.write_table(damaged, calibrate.steps_of(file))
        with pytest.raises(UsageError, match=says + expected):
            calibrate.refit(file, LAYERS)
    calibrate.steps_of(file).write_bytes(b"no table")
    with pytest.raises(UsageError, match=says):
        calibrate.refit(file, LAYERS)


@pytest.mark.parametrize("place", ["file/fitted.yaml", "file/deeper/fitted.yaml", "."])
def test_where_nothing_can_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("kept")
    found = calibrate.calibration(made_up(30, 1, 0.0), LAYERS)
    for attempt in (
        lambda: calibrate.check_writable(tmp_path / place),
        lambda: calibrate.write(tmp_path / place, found, asked("vllm"), "process"),
    ):
        with pytest.raises(UsageError, match="cannot be written: "):
            attempt()
    assert (tmp_path / "file").read_text() == "kept"


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
    assert parser.main([*words, "--set", "workload.requests=3", "--set", "model.layers=1"]) == 0
    said = capsys.readouterr()
    assert said.err.count("probe ") == 7
    assert said.out.startswith(Path(out).read_text())
    (line,) = (line for line in said.out.splitlines() if line.startswith("use it"))
    command = shlex.split(line.removeprefix("use it"))
    assert command[:4] == ["python", "-m", "cbsim", "run"]
    assert simulator.main([*command[3:], "--loop", "sync", "--quiet"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    resolved = scenario.load(run / "scenario.resolved.yaml")
    assert resolved.cost.kind == "fitted"
    assert (resolved.model.layers, resolved.workload.requests) == (1, 3)  # type: ignore[union-attr]


def test_probes_that_tell_nothing_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Larger steps would be a guess. What is beyond a scenario is called by the name that a user gives it."""
    monkeypatch.setattr(build, "default_device", lambda: "modelled")
    words = ["calibrate", "--quick", "--out", str(tmp_path / "c.yaml"), "--set", "model=tiny"]
    assert parser.main([*words, "--rows", "1", "--longest", "8", "--tokens", "8"]) == 0
    said = capsys.readouterr().err
    assert "warning: the largest step probed has " in said and "caches of their own" not in said
    few = ["--rows", "4", "--longest", "16", "--tokens", "16", "--set", "scheduler.name=static", "--set"]
    assert parser.main([*words, *few, "kv_cache={num_blocks: 2, block_size: 4}"]) == 0
    says = "warning: the scenario's cache holds 8 tokens, less than the longest sequence probed, 16"
    assert says in capsys.readouterr().err
    for option in ("--longest", "--tokens"):
        assert parser.main([*words, option, "7"]) == 2
        assert f"{option}: got 7, must be >= 8: shorter steps all cost the same" in capsys.readouterr().err
    assert parser.main([*words, "--rows", str(10**16)]) == 2
    said = capsys.readouterr().err
    assert "calibrate: --rows, --longest or --tokens is too large: workload.requests" in said
    assert "<Synthetic>" not in said and "probe " not in said


def test_nothing_is_measured_for_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "default_device", lambda: "inline")
    assert parser.main(["calibrate", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"cbengine: {tmp_path}: cannot be written: Is a directory\n"


# -- what calibration takes from the steps of a run -------------------------------------------------------------------


def steps_of(**edges: list[int]) -> Steps:
    """A step table with these columns, 0 in all others."""
    rows = np.zeros((len(next(iter(edges.values()))), len(STEP_COLUMNS)), dtype=np.int64)
    for name, values in edges.items():
        rows[:, list(STEP_COLUMNS).index(name)] = values
    return Steps(rows)


def test_a_line_counts_from_launch_to_kernels_and_from_kernels_to_the_cpu() -> None:
    """Kernels begin 5 after the launch and end at 40; the CPU has the result at 47. Padding counts as decoding rows."""
    steps = steps_of(
        padded_tokens=[8], launch_start_ns=[10], launch_end_ns=[15], compute_start_ns=[20], compute_end_ns=[40],
        await_end_ns=[47], context_tokens=[99],
    )  # fmt: skip
    at = {name: int(steps.table[0][i]) for i, name in enumerate(STEP_COLUMNS)}
    line = probes._line(plan((), decodes=5, decode_context=94), at, [8, 16])
    assert (line.launch, line.h2d, line.compute, line.d2h, line.read) == (5, 5, 20, 7, 99)
    assert (line.tokens, line.decodes, line.query_tokens, line.eager) == (8, 8, 5, False)


@pytest.mark.parametrize(("end", "bound"), [(1010, True), (1400, False)])
def test_kernels_that_end_with_their_launch_were_bound_by_it(end: int, bound: bool) -> None:
    steps = steps_of(padded_tokens=[20], launch_end_ns=[1000], compute_start_ns=[0], compute_end_ns=[end])
    at = {name: int(steps.table[0][i]) for i, name in enumerate(STEP_COLUMNS)}
    line = probes._line(plan((Chunk(spec(0, 90, 4), 0, 0, 20, (), 0),)), at, [8, 16])
    assert (line.eager, line.bound, line.h2d) == (True, bound, -1000)
    assert not probes._line(plan((Chunk(spec(0, 90, 4), 0, 0, 20, (), 0),)), at, []).eager, "launched in one go"


def test_the_gap_is_that_of_steps_which_waited() -> None:
    """Steps 1 and 2 were launched while the one before ran and began 3 and 5 later; step 3 was late itself."""
    steps = steps_of(
        launch_end_ns=[0, 12, 112, 400], compute_start_ns=[10, 103, 205, 450], compute_end_ns=[100, 200, 300, 500]
    )
    assert probes._gaps(steps).tolist() == [3, 5]
    assert len(probes._gaps(steps_of(launch_end_ns=[5]))) == 0


def test_of_the_asynchronous_loop_count_kernels_that_did_not_wait() -> None:
    """Steps that were launched as a whole while the one before ran, replayed or kernel by kernel: not the late one.
    What the CPU took in that loop is not used.
    """
    table, n = ProbeTable(), 7
    plans = [plan((), decodes=4, decode_context=400)] * (n - 1)
    plans.append(plan((Chunk(spec(0, 90, 4), 0, 0, 20, (), 0),)))
    start = np.arange(n) * 100
    launched = start - 50
    launched[5] = 499  # after the kernels of step 4 had ended
    times = {"launch_end_ns": launched, "compute_start_ns": start, "compute_end_ns": start + 80}
    table.add_ahead(plans, steps_of(rows=[4] * n, padded_tokens=[8] * 6 + [20], **times), [8, 16])
    seen = [(line.tokens, line.compute, line.ahead, line.eager, line.bound) for line in table.lines]
    assert seen == [(8, 80, True, False, False)] * 2 + [(20, 80, True, True, False)]
    assert table.alone().lines == []


def test_equal_steps_of_both_loops_are_compared() -> None:
    """By what they computed. Kernels that waited for their launch are longer, and only synchronous ones may wait."""
    lines = [line._replace(compute=530 - 30 * line.ahead) for line in both_loops(0, 0.0, 0.0).lines]
    found = ProbeTable(lines[:5] + lines[60:66]).equal_steps()
    assert found is not None
    assert (found.steps, found.sync_s, found.async_s) == pytest.approx((5, 530e-9, 500e-9))
    assert found.difference_s == pytest.approx(30e-9)
    both = "0.5 us synchronous, 0.5 us asynchronous"
    assert str(found) == f"kernels of 5 equal steps: {both}, median of their differences +0.0 us (+6.00%)"
    assert ProbeTable(lines[:60]).equal_steps() is None, "nothing was launched ahead"
    assert ProbeTable().equal_steps() is None


def both_loops(seed: int, gpu: float, noise: float) -> ProbeTable:
    """Decode steps with kernels of 0.3 to 0.9 ms, of both loops. Synchronous kernels wait 0.3 us for their launch; the
    others contend."""
    random, table = np.random.default_rng(seed), made_up(900, 1, 0.0)
    like = next(line for line in table.lines if not (line.chunks or line.eager))
    made = []
    for ahead in (False, True):
        for read in range(60):
            wobble = 1 + noise * random.standard_normal()
            kernels = (300_000 + 10_000 * read) * (1 + gpu * ahead) * wobble + 300 * (not ahead)
            made.append(like._replace(read=read, ahead=ahead, compute=round(kernels)))
    return ProbeTable(made)


def test_contention_is_what_equal_steps_take_longer() -> None:
    """In the median, so that a few kinds of steps do not matter; none within the noise, or of few kinds of steps."""
    lines = both_loops(0, 0.02, 0.0).lines
    assert ProbeTable(lines).contention() == pytest.approx(0.02, rel=0.05)
    odd = [line._replace(compute=round(line.compute * (1 + 0.1 * (line.ahead and line.read < 15)))) for line in lines]
    assert ProbeTable(odd).contention() == pytest.approx(0.02, rel=0.05)
    found = [both_loops(seed, 0.02, 0.01).contention() for seed in range(40)]
    assert np.mean(found) == pytest.approx(0.02, abs=0.003)
    assert sum(both_loops(seed, 0, 0.01).contention() > 0 for seed in range(40)) <= 4
    assert ProbeTable(lines[:7] + lines[60:67]).contention() == 0
    assert ProbeTable(lines[:60]).contention() == 0, "nothing was launched ahead"


def test_kernels_are_fitted_without_contention() -> None:
    """Those of steps launched ahead are longer by it, alone ones by their wait: the terms are those of neither."""
    clean, waited_ns = made_up(900, 1, 0.0), 1000
    late = [line._replace(compute=line.compute + waited_ns * (not line.eager)) for line in clean.lines]
    slow = [line._replace(compute=round(line.compute * 1.25), ahead=True) for line in clean.lines if not line.eager]
    kernels_s = float(np.median([line.compute for line in slow])) / 1e9
    equal = EqualStepTimes(9, 1.0, kernels_s, waited_ns / 1e9 - 0.2 * kernels_s)
    both = replace(clean, lines=[*late, *slow], equal=equal)
    found, right = (calibrate.calibration(one, LAYERS).coefficients for one in (both, clean))
    assert found["contention"]["gpu"] == pytest.approx(0.25, rel=0.02)
    for curve in ("query_tokens", "context_tokens"):
        assert [p["s"] for p in found[curve]] == pytest.approx([p["s"] for p in right[curve]], rel=0.02, abs=1e-8)


def test_waiting_for_a_launch_is_no_work_of_the_kernels() -> None:
    """Replayed steps of the synchronous loop are told as longer by what they wait; the fit takes that off, and leaves
    eager steps and those that were launched ahead as they are.
    """
    clean, waited_ns = made_up(600, 1, 0.0), 40_000
    late = [
        line._replace(compute=line.compute + waited_ns * (not line.eager and i % 2 == 0), ahead=i % 2 == 1)
        for i, line in enumerate(clean.lines)
        if i % 2 == 0 or not line.eager
    ]
    table = replace(clean, lines=late, equal=EqualStepTimes(9, 1e-3, 9.6e-4, waited_ns / 1e9))
    prompt = [line._replace(compute=line.compute - waited_ns * (not line.eager and not line.ahead)) for line in late]
    same = replace(clean, lines=prompt)
    found, right = (calibrate.calibration(one, LAYERS).coefficients for one in (table, same))
    assert found["query_tokens"] == right["query_tokens"]
    assert found["context_tokens"] == right["context_tokens"]


def test_what_eager_steps_wait_for_at_their_start_is_no_work_of_the_kernels() -> None:
    """Behind an idle GPU the first, small kernels end sooner than they are launched. Where some eager steps were
    launched ahead, the fit finds that wait and leaves it out of the coefficients; else it cannot be told apart.
    """
    clean = made_up(900, 1, 0.0)

    def waiting(ahead: int) -> ProbeTable:
        """Of three steps so many were launched ahead; what is eager and was not waited 100 us."""
        given = [(line, i % 3 < ahead) for i, line in enumerate(clean.lines)]
        lines = [
            one._replace(compute=one.compute + 100_000 * (one.eager and not early), ahead=early) for one, early in given
        ]
        return replace(clean, lines=lines)

    found, right, biased = (calibrate.calibration(one, LAYERS).coefficients for one in (waiting(1), clean, waiting(0)))
    assert found["per_chunk_s"] == pytest.approx(right["per_chunk_s"], abs=3e-6)
    assert biased["per_chunk_s"] > right["per_chunk_s"] + 3e-5
    assert [p["s"] for p in found["query_tokens"]] == pytest.approx([p["s"] for p in right["query_tokens"]], rel=0.01)


@pytest.mark.parametrize("missing", [(), ("ahead",)])
def test_steps_of_older_files_are_those_of_the_synchronous_loop(missing: tuple[str, ...]) -> None:
    made = made_up(30, 1, 0.0)
    assert ProbeTable.of(made.arrow().drop_columns(list(missing))).lines == made.lines


# -- the probes -------------------------------------------------------------------------------------------------------


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
@given(
    rows=st.integers(1, 80), longest=st.integers(8, 500), tokens=st.integers(8, 300), context=st.integers(1, 9000),
    quick=st.booleans(),
)  # fmt: skip
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_probes_are_scenarios(scheduler: str, rows: int, longest: int, tokens: int, context: int, quick: bool) -> None:
    """Whatever the reach and the base: each has a cache for all seats at once, so that nothing is refused or preempted,
    and a device of the right size follows from it.
    """
    base = BASES[scheduler]
    for probe in probes.probes(Reach(rows, longest, tokens, context), quick=quick):
        assert 1 <= probe.low <= probe.prompt
        assert probe.prompt + probe.output <= longest
        assert probe.slots <= rows
        ready = probes._scenario(base, probe)
        assert Scenario.model_validate(ready.model_dump(mode="json")) == ready
        options: Any = ready.options("sync")
        assert options.num_blocks * options.block_size >= probe.slots * (probe.prompt + probe.output)
        sizes = Load.of(generators.build(ready).specs()).capacity(options)
        assert sizes.slots <= max(probe.slots, probe.requests)


BASES = {one: asked(one, *HOSTILE, *(VLLM if one.startswith("vllm ") else ())) for one in SCHEDULERS}


def test_probes_cover_what_was_asked_for() -> None:
    """All seats, whole prompts, chunks, one request alone, as much context as asked for; `quick` shortens outputs."""
    for quick in (False, True):
        found = probes.probes(Reach(16, 160, 128, 1000), quick=quick)
        assert max(probe.slots for probe in found) == 16
        assert min(probe.slots for probe in found) == 1
        assert max(probe.prompt + probe.output for probe in found) == 160
        assert any(probe.chunk >= probe.prompt for probe in found)
        assert any(probe.chunk < probe.prompt for probe in found)
        assert max(probe.slots * probe.low for probe in found) >= 0.8 * 1000


@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_base_scenario_says_of_its_loop_does_not_matter(loop: str) -> None:
    """Probes run the synchronous loop, in which every step has its own time; some run the other one, too."""
    base, said = asked("vllm", f"loop.mode={loop}"), []
    few = Probe("few", 3, 2, 1, 6, 8, 6)
    table = probes.measure(base, INLINE, [few, few._replace(ahead=True)], said.append)
    assert said[:2] == ["probe 1 of 2: few", "probe 2 of 2: few, in both loops"]
    assert table.lines
    assert all(line.requests >= 1 and line.d2h >= 0 and not line.eager for line in table.lines)
    assert ProbeTable.of(table.arrow()).lines == table.lines


def test_rows_that_fill_the_device_are_those_that_its_kernel_splits_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs for each multiprocessor, one for each row and head: of so many rows none is split, as the kernel
    does it. A device that does not say how many it has leaves the term out.
    """
    few, base, run = Probe("few", 3, 2, 1, 6, 8, 6), asked("vllm"), probes._run
    assert probes.measure(base, INLINE, [few], lambda _: None).unsplit_rows == 0

    def on_a_gpu(*args: Any) -> tuple[Any, Any, dict[str, Any]]:
        plans, steps, facts = run(*args)
        return plans, steps, facts | {"multiprocessors": 132}

    monkeypatch.setattr(probes, "_run", on_a_gpu)
    table = probes.measure(base, INLINE, [few], lambda _: None)
    heads = base.model.kv_heads
    assert table.unsplit_rows == 264 / heads
    triton_ops = pytest.importorskip("cbengine.model.kernels.triton_ops", reason="no Triton for this system")
    for rows in range(1, 300):
        assert splits(table.unsplit_rows / rows) == triton_ops.TritonOps(132)._splits(rows * heads)
