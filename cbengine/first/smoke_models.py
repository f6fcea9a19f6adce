"""Checks of whole models on a device: the tokens of a tiny one, the times of the 8B shape, its products and kernels."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbengine.first.smoke import CheckPlace, Found

if TYPE_CHECKING:
    from cbengine.build import Setup
    from cbengine.driver import Engine
    from cbsim.scenario.scenario import Scenario

TINY = ("workload.requests=8", "workload.output_tokens=16", "workload.prompt_tokens={uniform: {low: 5, high: 60}}")
ONE_LAYER = ("model.layers=1", "model.vocab=4096", "workload.output_tokens=64", "kv_cache.num_blocks=80")
SMALL = ("model.hidden=256", "model.heads=4", "model.kv_heads=1", "model.intermediate=128", "model.head_dim=64")
WHOLE = ("workload.output_tokens=192",)
LONG = (
    "workload.prompt_tokens=4096",
    "workload.output_tokens=48",
    "scheduler.max_batch_tokens=8192",
    "loop.mode=async",
)
PROFILED = 16  # steps, behind the prefill of LONG
SHOWN = 6


def tiny_tokens(place: CheckPlace) -> Found:
    """A tiny model's texts, in both loops, are those of `generate`, but where two tokens are nearly as likely."""
    from tempfile import TemporaryDirectory

    from cbengine import build
    from cbengine.build import Setup
    from cbengine.model import weights
    from cbsim.scenario import scenario as scenarios

    scenario, cpu = scenarios.load("tiny_cpu", list(TINY)), Setup(device="inline")
    plan = build.executor_plan(build.adapted(scenario, cpu), "sync", [], cpu)
    model = weights.to_transformers(plan.architecture, plan.tensors()).eval()
    findings: Found = {}
    with TemporaryDirectory() as folder:  # a GPU would draw other weights from the same seed
        model.save_pretrained(folder)
        setup = Setup(device="cuda" if place.device == "cuda" else "inline", weights=Path(folder))
        for loop, engine in served(build.adapted(scenario, setup), setup):
            texts = list(engine.sequences.values())
            same = sum(generated(model, text.prompt.tolist(), len(text.outputs)) == text.outputs for text in texts)
            findings[f"{loop}: texts as generate's"] = f"{same} of {len(texts)}"
            if same < len(texts) - 1:
                raise AssertionError(f"{loop}: {len(texts) - same} of {len(texts)} texts differ: one may, by rounding")
        findings["sampled: texts as a CPU's"] = _sampled(scenario, setup)
    return findings


def _sampled(scenario: Scenario, setup: Setup) -> str:
    """Sampling on the device, in replayed steps too, draws what a CPU draws."""
    from dataclasses import replace

    from cbengine import build
    from cbengine.sampling import Sampling

    drawn = replace(setup, sampling=Sampling(temperature=1.0, top_k=50, top_p=0.9))
    said = [
        [text.outputs for text in engine.sequences.values()]
        for where in (drawn, replace(drawn, device="inline"))
        for _, engine in served(build.adapted(scenario, where), where, only="async")
    ]
    same = sum(ours == theirs for ours, theirs in zip(*said, strict=True))
    if same < len(said[0]) - 1:
        raise AssertionError(f"sampled: {len(said[0]) - same} of {len(said[0])} texts differ: one may, by rounding")
    return f"{same} of {len(said[0])}"


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers says after a prompt, greedily."""
    import torch

    ids = torch.tensor([prompt])
    said = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return list(said[0, len(prompt) :].tolist())


def one_layer(place: CheckPlace) -> Found:
    """The 8B shape with one layer: captured and replayed, both loops."""
    return timed_loops(place, *ONE_LAYER, *(SMALL if place.device == "cpu" else ()))


def whole_model(place: CheckPlace) -> Found:
    """A batch of 32 on an 8B model in both loops."""
    place.only_on_gpu()
    return timed_loops(place, *WHOLE)


def kernels_of_a_step(place: CheckPlace) -> Found:
    """What a decode step of the 8B model consists of, at 4,096 cached tokens a request: every kernel, its time and
    share, and how long the GPU was idle before it. The table goes to kernels.csv.
    """
    place.only_on_gpu()
    from cbengine import build
    from cbengine.build import Setup
    from cbengine.device import profile
    from cbengine.servers import Measured
    from cbsim.scenario import scenario as scenarios
    from cbsim.workload import generators

    setup = Setup(device="cuda")
    scenario = build.adapted(scenarios.load("8k_b32", list(LONG)), setup)
    server = Measured(setup, PROFILED, scenario, "async", generators.build(scenario))
    server.run(lambda _: None)
    table = server.files()[profile.FILE]
    (place.out / profile.FILE).write_bytes(table)
    lines = list(csv.DictReader(table.decode().splitlines()))
    if not lines:
        raise AssertionError("the profiler saw no kernels")
    longest = [f"{line['name'][:40]} {float(line['share']):.1%}" for line in lines[:SHOWN]]
    idle_us = sum(float(line["gap_us"]) for line in lines)
    busy_us = sum(float(line["total_us"]) for line in lines)
    return {"ms a step": busy_us / PROFILED / 1e3, "gaps, ms a step": idle_us / PROFILED / 1e3, "longest": longest}


def timed_loops(place: CheckPlace, *overrides: str) -> Found:
    """8k_b32 with these overrides, in both loops: milliseconds a step, GPU-active, and whether equal steps take
    equally long. Greedy texts have to be the same in both.
    """
    from cbengine import build
    from cbengine.build import Setup
    from cbengine.measure.equal_steps import equal_steps
    from cbsim.results.metrics import Steps
    from cbsim.scenario import scenario as scenarios

    setup = Setup(device="cuda" if place.device == "cuda" else "inline")
    scenario = build.adapted(scenarios.load("8k_b32", ["loop.mode=both", *overrides]), setup)
    findings: Found = {}
    tables, texts = [], []
    for loop, engine in served(scenario, setup):
        steps = Steps.of(engine.record)
        tables.append(steps)
        texts.append([text.outputs for text in engine.sequences.values()])
        span = int(steps["compute_end_ns"].max() - steps["compute_start_ns"].min())
        findings[f"{loop}: ms a step"] = engine.now_ns / 1e6 / len(steps)
        findings[f"{loop}: device active"] = float(steps.lane("compute").sum()) / span
    findings["equal steps"] = str(equal_steps([(tables[0], tables[1])]) or "none was launched ahead")
    if texts[0] != texts[1]:
        raise AssertionError(f"the two loops say different texts; {json.dumps(findings)}")
    return findings


def served(scenario: Scenario, setup: Setup, only: str = "") -> Iterator[tuple[str, Engine]]:
    """The scenario under each of its loops, to its end; the device's memory is given back in between."""
    from cbengine import build
    from cbengine.bench.timing import give_back
    from cbsim.scenario import scenario as scenarios
    from cbsim.workload import generators

    for loop in [only] if only else scenarios.loops(scenario):
        engine, _ = build.engine(scenario, loop, generators.build(scenario), setup)
        try:
            engine.run()
            engine.check_returned()
            yield loop, engine
        finally:
            engine.close()
            del engine
            give_back()
