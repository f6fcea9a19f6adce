"""The simulated machine: small runs against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import engine_folder
from support.machines import COSTS, Fixed, load, run, server, spec, table, vllm_options

from cbsim.machine import simulate
from cbsim.machine.graphs import Graphs, VllmBuckets
from cbsim.scenario import scenario
from cbsim.workload import generators

FIRST_STEP = {
    "schedule": (0, 3),
    "prepare": (3, 8),
    "launch": (8, 15),
    "h2d": (15, 17),
    "compute": (17, 57),
    "d2h": (57, 61),
    "await": (15, 61),
    "update": (61, 72),
}


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    """By hand: CPU phases of 3, 5, 7 and 11 ns, copies of 2 and 4, kernels of 40: one after the other, 72 ns a step."""
    steps = run(server(load(spec(0, 4, 5)), COSTS, name="transformers_fifo"))
    for name, (start, end) in FIRST_STEP.items():
        assert steps[f"{name}_start_ns"].tolist() == [start + 72 * i for i in range(5)], name
        assert steps[f"{name}_end_ns"].tolist() == [end + 72 * i for i in range(5)], name


def test_an_asynchronous_run_by_hand() -> None:
    """The first three steps of the same costs, two in flight: the second is planned at 15, while the first computes,
    and its kernels wait for those of the first (57); the third waits for the CPU to have applied the first (72)."""
    steps = run(server(load(spec(0, 4, 5)), COSTS, name="transformers_fifo", depth=2))
    assert steps["schedule_start_ns"][:3].tolist() == [0, 15, 72]
    assert steps["h2d_start_ns"][:3].tolist() == [15, 30, 87]
    assert steps["compute_start_ns"][:3].tolist() == [17, 57, 97]
    assert steps["d2h_end_ns"][:3].tolist() == [61, 101, 141]
    assert steps["update_end_ns"][:2].tolist() == [72, 112]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@given(cpu=st.tuples(*[st.integers(0, 30)] * 4), gpu=st.tuples(*[st.integers(0, 30)] * 3))
@settings(max_examples=40)
def test_the_steady_state_of_a_loop(
    depth: int, overlap: bool, cpu: tuple[int, int, int, int], gpu: tuple[int, int, int]
) -> None:
    """Synchronous: CPU and device one after the other. Asynchronous, the period is the longest cycle's: the CPU's
    phases; each lane, or all in one stream; and, over two steps, CPU and device one after the other, because step N+2
    is planned when step N has come back. So without copies it is max(cpu, gpu), which is what overlapping is for."""
    options = vllm_options(max_model_len=256, num_blocks=65)
    steps = run(server(load(spec(0, 4, 160)), Fixed(cpu, gpu), options=options, depth=depth, overlap=overlap))
    lanes = gpu if overlap else (sum(gpu),)
    twice = (3 - depth) * (sum(cpu) + sum(gpu))
    if depth == 2:
        twice = max(2 * sum(cpu), *(2 * lane for lane in lanes), twice)
    starts = steps["compute_start_ns"]
    assert int(starts[140] - starts[40]) == 50 * twice


@pytest.mark.parametrize(("compute", "period"), [(10, 37), (34, 39), (90, 95)])
def test_an_eager_step_is_not_shorter_than_its_kernel_launches(compute: int, period: int) -> None:
    """By hand: prepare 5, launch 2 and 30 more for the kernels, which run while they are launched. Kernels of 10 ns
    are done when the CPU is: 5 + 32. Kernels of 34 or 90 ns take longer than that: 5 + 34, 5 + 90."""
    cost = Fixed(cpu=(0, 5, 2, 0), gpu=(0, compute, 0), kernels=30)
    steps = run(server(load(spec(0, 4, 5)), cost, name="transformers_fifo", graphs=Graphs(None, 0)))
    assert steps["update_end_ns"].tolist() == [period * (i + 1) for i in range(5)]
    assert (steps.lane("compute") == max(compute, 32)).all()
    assert (steps.lane("launch") == 32).all()


def test_a_graph_is_captured_once_for_each_bucket() -> None:
    """A prompt of 3 runs in the bucket of 4, then single tokens in that of 1: the first of each pays 1,000 ns on the
    CPU before it is launched. A prompt of 12 fits no bucket: eager, and nothing is captured."""
    graphs = Graphs(VllmBuckets([1, 2, 4, 8]), 1000)
    workload = load(spec(0, 3, 4), spec(1, 3, 2, at=50_000), spec(2, 12, 1, at=90_000))
    cost = Fixed(cpu=(0, 0, 7, 0), gpu=(0, 5, 0), kernels=100)
    steps = run(server(workload, cost, name="transformers_fifo", graphs=graphs))
    assert steps["padded_tokens"].tolist() == [4, 1, 1, 1, 4, 1, 12]
    assert steps.lane("launch").tolist() == [1007, 1007, 7, 7, 7, 7, 107]
    assert steps["compute_start_ns"][0] == 1007


def test_kernels_of_two_steps_keep_a_gap() -> None:
    """Asynchronous, the GPU always has work: without a gap a step of 30 follows the last, with one of 7 it starts 7
    later; a synchronous step, which comes later anyway, is not moved."""
    cost = Fixed((1, 1, 1, 1), (2, 30, 2), 0)
    for depth, gaps in ((2, (0, 7)), (1, (8, 8))):
        for gap_ns, wanted in zip((0, 7), gaps, strict=True):
            machine = server(load(spec(0, 4, 40)), cost, depth=depth, gap_ns=gap_ns)
            run(machine)
            steps = table(machine.record)
            between = steps["compute_start_ns"][1:] - steps["compute_end_ns"][:-1]
            assert (between[3:-3] == wanted).all(), (depth, gap_ns, between)


@pytest.mark.parametrize(("cpu_ns", "compute_ns", "periods"), [(10, 50, (67, 50)), (60, 50, (117, 60))])
def test_only_a_cpu_that_waits_has_to_wake_up(cpu_ns: int, compute_ns: int, periods: tuple[int, int]) -> None:
    """Synchronous, every step waits, and waking takes 7. Asynchronous, it does not delay a GPU that has work, nor a CPU
    that comes later than the results.
    """
    cost = Fixed((0, cpu_ns, 0, 0), (0, compute_ns, 0), 0)
    for depth, period in zip((1, 2), periods, strict=True):
        steps = run(server(load(spec(0, 4, 40)), cost, depth=depth, wake_ns=7))
        assert (np.diff(steps["compute_start_ns"])[5:-5] == period).all(), depth


@pytest.mark.parametrize(("compute_ns", "period"), [(50, 65), (3, 30)])
def test_kernels_may_begin_before_their_launch_ends(compute_ns: int, period: int) -> None:
    """10 to prepare, 20 to launch; kernels begin 15 before the end of that, and do not end before it."""
    cost = Fixed((0, 10, 20, 0), (0, compute_ns, 0), 0)
    steps = run(server(load(spec(0, 4, 40)), cost, early_ns=15))
    assert (np.diff(steps["compute_start_ns"]) == period).all()
    assert (steps["launch_end_ns"] - steps["compute_start_ns"] == 15).all()


@pytest.mark.parametrize("cost", ["kind: roofline", "kind: table, engine: vllm_0.1.0, path: {folder}"])
def test_cost_models_hand_their_gap_to_the_machine(cost: str, tmp_path: Path) -> None:
    """Asynchronous, kernels follow each other after 1 ms with gap_s, and at once without."""
    folder = tmp_path / "h100_sxm"
    engine_folder.make(folder)
    changes = ["hardware=h100-sxm", "loop.mode=async", "workload.requests=2", "workload.output_tokens=20"]
    for gap_s in (0, 1e-3):
        given = cost.format(folder=folder)
        asked = scenario.load("worked_example", [*changes, f"cost={{{given}, gap_s: {gap_s}}}"])
        machine = simulate.machine(asked, "async", generators.build(asked))
        run(machine)
        steps = table(machine.record)
        between = steps["compute_start_ns"][1:] - steps["compute_end_ns"][:-1]
        assert (between[3:-3] == 1e9 * gap_s).all(), (gap_s, between)
