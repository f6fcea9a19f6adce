"""Whole models on a device that the engine has not met: the texts of a tiny one are those of `generate`, sampling draws
what a CPU draws, and both loops say the same at the 8B shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="texts are compared with those of transformers")

from support.engine.peer_model import to_transformers
from support.engine.served import continuation

from cbengine import build, servers
from cbengine.build import Setup
from cbengine.device import profile
from cbengine.driver import Engine
from cbengine.sampling import Sampling
from cbsim.metrics.metrics import Steps
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators

TINY = ["workload.requests=8", "workload.output_tokens=16", "workload.prompt_tokens={uniform: {low: 5, high: 60}}"]
ONE_LAYER = ["model.layers=1", "model.vocab=4096", "workload.output_tokens=64", "kv_cache.num_blocks=80"]
SMALL = ["model.hidden=256", "model.heads=4", "model.kv_heads=1", "model.intermediate=128", "model.head_dim=64"]
WHOLE = ["workload.output_tokens=192"]
LONG = ["workload.prompt_tokens=4096", "workload.output_tokens=48", "scheduler.max_batch_tokens=8192"]


def served(scenario: Scenario, setup: Setup, loop: str) -> Engine:
    """The scenario under a loop, to its end; the device's memory is given back."""
    ready = build.adapted(scenario, setup)
    engine, _ = build.engine(ready, loop, generators.build(ready), setup)
    try:
        engine.run()
        engine.check_returned()
    finally:
        engine.close()
    return engine


def outputs(engine: Engine) -> Iterator[list[int]]:
    return (sequence.outputs for sequence in engine.sequences.values())


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Weights that are the same on every device, as a folder."""
    cpu = Setup(device="inline")
    scenario = build.adapted(scenarios.load("tiny_cpu", TINY), cpu)
    plan = build.executor_plan(scenario, "sync", [], cpu)
    to_transformers(plan.architecture, plan.tensors()).save_pretrained(tmp_path)
    return tmp_path


def of_device(device: str, folder: Path | None = None) -> Setup:
    return Setup(device="cuda" if device == "cuda" else "inline", weights=folder)


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_texts_of_a_tiny_model(device: str, loop: str, tiny: Path) -> None:
    """They are those of `generate`; one may differ by rounding, where two tokens are nearly as likely."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny).float().eval()
    engine = served(scenarios.load("tiny_cpu", TINY), of_device(device, tiny), loop)
    sequences = list(engine.sequences.values())
    same = sum(continuation(model, one.prompt.tolist(), len(one.outputs)) == one.outputs for one in sequences)
    assert same >= len(sequences) - 1


def test_sampling_draws_what_a_cpu_draws(device: str, tiny: Path) -> None:
    """In replayed steps, too."""
    setup = replace(of_device(device, tiny), sampling=Sampling(temperature=1.0, top_k=50, top_p=0.9))
    scenario = scenarios.load("tiny_cpu", TINY)
    ours, right = (list(outputs(served(scenario, one, "async"))) for one in (setup, replace(setup, device="inline")))
    assert sum(a == b for a, b in zip(ours, right, strict=True)) >= len(right) - 1


@pytest.mark.parametrize("overrides", [ONE_LAYER, WHOLE], ids=["one layer", "8B"])
def test_both_loops_say_the_same(device: str, overrides: list[str]) -> None:
    """The 8B shape, captured and replayed. Prints a step's time and GPU-active."""
    if device == "cpu" and overrides is WHOLE:
        pytest.skip("no CUDA device: the model is too large for a CPU")
    scenario = scenarios.load("8k_b32", [*overrides, *(SMALL if device == "cpu" else [])])
    runs = [served(scenario, of_device(device), loop) for loop in ("sync", "async")]
    tables = [Steps.of(engine.record) for engine in runs]
    for engine, steps in zip(runs, tables, strict=True):
        span = int(steps["compute_end_ns"].max() - steps["compute_start_ns"].min())
        active = steps.lane("compute").sum() / span
        print(f"{engine.now_ns / 1e6 / len(steps):.3f} ms a step, device active {active:.2%}")
    assert list(outputs(runs[0])) == list(outputs(runs[1]))


@pytest.mark.gpu
def test_the_profiler_sees_the_kernels_of_a_step(cuda: str) -> None:
    """Prints every kernel of decode steps of the 8B model at 4,096 cached tokens a request, its time and share."""
    setup = Setup(device="cuda")
    scenario = build.adapted(scenarios.load("8k_b32", LONG), setup)
    server = servers.maker(setup, 16)(scenario, "async", generators.build(scenario))
    server.run(lambda _: None)
    table = server.files()[profile.FILE].decode()
    print(table)
    assert len(table.splitlines()) > 1, "the profiler saw no kernels"
