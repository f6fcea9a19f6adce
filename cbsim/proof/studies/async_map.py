"""What asynchronous batching buys, by model, GPU, batch, context and CPU cost of a step: a map to look a case up in.

A sweep of decode steps under both loops. Steps one after the other take cpu + gpu each, overlapped ones the larger of
the two, so a case is two times a step and its gain is min / sum of them: the map has those two as its axes, and the
sweep says where models lie on one and engines on the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cbsim.draw.chart import BLACK, GREY, Chart, Level, Line, Mark, Panel, Points, Style, series
from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.scenario import scenario as scenarios
from cbsim.sweeps import sweep_file
from cbsim.sweeps.executor import Executor, Here
from cbsim.sweeps.sweep import Sweep

MODELS: Mapping[str, int] = {  # name: GPUs that share its layers
    "llama-3.2-1b": 1,
    "llama-3.1-8b": 1,
    "qwen3-32b": 2,
    "llama-3.1-70b": 4,
}
GPUS = ("a100-80gb", "h100-sxm", "h200-sxm", "b200")
BATCHES = (1, 8, 32, 128)
CONTEXTS = (1024, 8192, 32768)
CPU_MS = (0.5, 2.0, 8.0)
STEPS = 32  # decode steps of each run; all but the first are alike
GAINS = (0.05, 0.1, 0.2, 0.5)
ACROSS, LOWEST = (0.2, 200.0), 0.04  # milliseconds that the figure shows
MATTERS = 0.05


class Engine(NamedTuple):
    """CPU time of a step of a real engine, measured. `source` says by whom and how."""

    name: str
    cpu_ms: float
    source: str


ENGINES = (
    Engine(
        "cbengine, batch 256",
        0.37,
        "docs/speed.md: the loop on the modelled device, with real waits, on a loaded machine",
    ),
    Engine(
        "vLLM 2024, batch 8",
        0.85,
        "a fork, Llama-2-7b on an A100, from Vidur's history: schedule, prepare inputs, process outputs, medians",
    ),
    Engine("vLLM 2024, batch 32", 2.37, "likewise"),
    Engine("vLLM 2024, batch 128", 6.05, "likewise"),
    Engine("transformers, batch 32", 8.81, "Hugging Face, May 2026: 300.6 s x (1 - 0.760) / 8,192 steps"),
)


class Case(NamedTuple):
    """Decode steps of `batch` requests with `context` tokens each: milliseconds of the GPU, and of a step under both
    loops by the CPU's milliseconds.
    """

    model: str
    gpu: str
    batch: int
    context: int
    gpu_ms: float
    loops: Mapping[float, tuple[float, float]]

    def saved(self, cpu_ms: float) -> float:
        """Share of the time that async saves, as the runs say."""
        sync, asynchronous = self.loops[cpu_ms]
        return 1 - asynchronous / sync

    @property
    def matters_ms(self) -> float:
        """CPU cost a step from which async saves `MATTERS` of the time."""
        return self.gpu_ms * MATTERS / (1 - MATTERS)


def study() -> Study:
    """Some 1,000 short runs. They need no data."""
    cases = swept(Here())
    return Study(
        "The map of async",
        "What does asynchronous batching save of a decode step, by model, GPU, batch, context and CPU cost of a step?",
        _findings(cases),
        [_engines(), *(_breaks_even(gpu, cases) for gpu in GPUS)],
        [_chart(cases)],
        {
            "cases": [case._asdict() | {"matters_ms": case.matters_ms} for case in cases],
            "engines": [engine._asdict() for engine in ENGINES],
        },
    )


# -- the sweep --------------------------------------------------------------------------------------------------------


def swept(
    executor: Executor, models: Sequence[str] = tuple(MODELS), gpus: Sequence[str] = GPUS, most: int = BATCHES[-1]
) -> list[Case]:
    """The cases that fit their memory."""
    places = [
        {
            **_settings(model, gpu),
            "scheduler": _rules(batch),
            "workload.requests": batch,
            "workload.prompt_tokens": context,
        }
        for model, gpu, batch, context in product(models, gpus, BATCHES, CONTEXTS)
        if batch <= most and _fits(model, gpu, batch, context)
    ]
    fields = {
        "scenario": "8k_b32",
        "set": {"workload.output_tokens": STEPS, "cost": {"kind": "roofline"}},
        "axes": [{"points": places}, {"cost.cpu": [_cpu(ms) for ms in CPU_MS]}],
        "loop": ["sync", "async"],
    }
    with tempfile.TemporaryDirectory() as store:
        rows = Sweep(sweep_file.parse(fields), Path(), Path(store)).run(executor).rows
    each = iter(rows)
    return [_case(place, [next(each).summary for _ in range(2 * len(CPU_MS))]) for place in places]


def _settings(model: str, gpu: str) -> dict[str, Any]:
    return {"model": model, "hardware": gpu, "cost.tensor_parallel": MODELS[model]}


def _rules(batch: int) -> dict[str, Any]:
    """A batch that is prefilled at once and decodes together: every step but the first is the step in question."""
    return {"name": "static", "batch_size": batch}


def _cpu(ms: float) -> dict[str, Any]:
    """All of it in one phase: when in a step it is spent makes no difference to a step that decodes."""
    nothing = {"base_s": 0, "per_request_s": 0}
    return {"schedule": nothing, "prepare": nothing | {"base_s": ms / 1e3}, "launch": {"base_s": 0}, "update": nothing}


def _fits(model: str, gpu: str, batch: int, context: int) -> bool:
    """Does the cache hold all of them to their ends?"""
    given = ["cost={kind: roofline}", "scheduler={name: vllm}", *sweep_file.overrides(_settings(model, gpu))]
    try:
        scenario = scenarios.load("8k_b32", given)
        blocks = scenarios.scheduler_options(scenario, depth=2).num_blocks
    except scenarios.ScenarioError:  # not even the weights fit
        return False
    return batch * -(-(context + STEPS) // scenario.block_size) < blocks


def _case(place: Mapping[str, Any], summaries: Sequence[Mapping[str, Any] | None]) -> Case:
    """From the runs of a place: by CPU cost, synchronous then asynchronous. A step is the median gap of two tokens."""
    gaps = [summary["itl_s"]["p50"] * 1e3 for summary in summaries if summary is not None]
    loops = {ms: (gaps[2 * i], gaps[2 * i + 1]) for i, ms in enumerate(CPU_MS)}
    return Case(
        place["model"],
        place["hardware"],
        place["workload.requests"],
        place["workload.prompt_tokens"],
        loops[CPU_MS[0]][0] - CPU_MS[0],
        loops,
    )


# -- what is said -----------------------------------------------------------------------------------------------------


def _findings(cases: Sequence[Case]) -> list[str]:
    short, long = (pick(cases, key=lambda case: case.gpu_ms) for pick in (min, max))
    off = max(abs(case.saved(ms) - min(ms, case.gpu_ms) / (ms + case.gpu_ms)) for case in cases for ms in CPU_MS)
    said = [
        f"{len(cases)} cases fit their memory.",
        f"A step takes the GPU {short.gpu_ms:.2f} ms ({_named(short)}) to {long.gpu_ms:.0f} ms ({_named(long)}).",
        f"What async saves is min(cpu, gpu) / (cpu + gpu): the runs differ from it by at most {100 * off:.2f} points.",
    ]
    for engine in ENGINES:
        gains = [min(engine.cpu_ms, case.gpu_ms) / (engine.cpu_ms + case.gpu_ms) for case in cases]
        worth = sum(gain >= MATTERS for gain in gains)
        said.append(
            f"At {engine.cpu_ms:g} ms of CPU a step ({engine.name}) async saves {min(gains):.0%} to {max(gains):.0%}, "
            f"at least {MATTERS:.0%} in {worth} of the cases."
        )
    return [*said, ABSENT]


ABSENT = (
    "Not in the map: CPU and GPU disturb each other when they overlap (2.6 % of a step in the one published pair of "
    "runs). The GPU's times are those of a data sheet with the roofline's default efficiencies."
)


def _named(case: Case) -> str:
    return f"{case.model} on {case.gpu}, batch {case.batch}, {case.context // 1024}K"


def _engines() -> Table:
    rows = [(engine.name, f"{engine.cpu_ms:g}", engine.source) for engine in ENGINES]
    return Table(
        "Measured CPU time of a step", ("engine", "ms", "measured"), rows, "None of them by us on a GPU machine."
    )


def _breaks_even(gpu: str, cases: Sequence[Case]) -> Table:
    """A row a model and context, a column a batch."""
    found = {(case.model, case.context, case.batch): case for case in cases if case.gpu == gpu}
    rows = []
    for model, context in product(MODELS, CONTEXTS):
        of = [found.get((model, context, batch)) for batch in BATCHES]
        if any(of):
            texts = ["-" if case is None else f"{case.gpu_ms:.2f} / {case.matters_ms:.2f}" for case in of]
            rows.append((f"{model} x {MODELS[model]}", f"{context // 1024}K", *texts))
    return Table(
        f"{gpu}: GPU time of a decode step / CPU time from which async saves {MATTERS:.0%}, ms",
        ("model x GPUs", "context", *(f"batch {batch}" for batch in BATCHES)),
        rows,
        "-: does not fit the memory. Most is saved, half of the time, where the CPU takes as long as the GPU.",
    )


def _chart(cases: Sequence[Case]) -> Chart:
    """GPU time across, CPU time up: lines of equal gain, engines as levels, decode steps of models below them."""
    times = np.geomspace(*ACROSS, 200)
    marks: list[Mark] = []
    for gain, dash in zip(GAINS, ("dotted", "dashdot", "dashed", "solid"), strict=True):
        ratio = gain / (1 - gain)
        marks.append(Line(f"async saves {gain:.0%}", times, times * ratio, Style(BLACK, dash)))
        if ratio < 1:  # as much where the CPU is the longer one
            marks.append(Line("", times, times / ratio, Style(BLACK, dash)))
    for number, engine in enumerate(ENGINES):
        at = np.array([ACROSS[0] * (100.0 if number % 2 else 1.0)])  # names of neighbours do not meet
        label = Points("", at, np.array([engine.cpu_ms]), Style(GREY), labels=[engine.name])
        marks += [Level("", engine.cpu_ms, Style(GREY)), label]
    axes = "GPU time of a step, ms", "CPU time of a step, ms"
    shown = {"x_log": True, "y_log": True, "x_range": ACROSS, "y_range": (LOWEST, 40.0)}
    return Chart(
        "async-map",
        "What async saves of a decode step",
        "Find the GPU time of your step across (the tables have it by model, batch and context) and its CPU time up; "
        "the lines say what async saves. Grey: CPU times that were measured. Coloured: decode steps of "
        f"{_listed(BATCHES)} requests at {CONTEXTS[0] // 1024}K, by a data sheet.",
        [Panel([*marks, *_steps(gpu, cases)], *axes, gpu, **shown) for gpu in GPUS],  # type: ignore[arg-type]
        columns=2,
    )


def _steps(gpu: str, cases: Sequence[Case]) -> list[Points]:
    """A row of points a model, each a batch."""
    rows = []
    for number, model in enumerate(MODELS):
        of = [case for case in cases if (case.gpu, case.model, case.context) == (gpu, model, CONTEXTS[0])]
        height = np.full(len(of), LOWEST * 1.4 ** (number + 1))
        texts = [f"{_named(case)}: {case.gpu_ms:.2f} ms" for case in of]
        rows.append(Points(model, np.array([case.gpu_ms for case in of]), height, series(number), texts))
    return rows


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


__all__ = ["BATCHES", "CPU_MS", "ENGINES", "GPUS", "MATTERS", "MODELS", "Case", "study", "swept"]
