"""The gain of asynchronous batching by model, GPU, batch, context and CPU cost of a step: a map to look a case up in.

It is a sweep of decode steps under both loops. Consecutive steps take cpu + gpu each, overlapped ones the larger of the
two, so a case is two times a step and its gain is min / sum of them: the map has those two as its axes, and the sweep
places models on one and engines on the other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.draw.chart import BLACK, GREY, Chart, Level, Line, Mark, Panel, Points, Style, series
from cbsim.draw.report import Table
from reports import page

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
        sync_ms, async_ms = self.loops[cpu_ms]
        return 1 - async_ms / sync_ms

    @property
    def matters_ms(self) -> float:
        """CPU cost a step from which async saves `MATTERS` of the time."""
        return self.gpu_ms * MATTERS / (1 - MATTERS)


def swept(
    models: Sequence[str] = tuple(MODELS), gpus: Sequence[str] = GPUS, most: int = BATCHES[-1], jobs: int = 1
) -> list[Case]:
    """The cases that fit their memory, each from the runs of all CPU costs under both loops."""
    points = [
        {
            "model": model,
            "hardware": gpu,
            "cost.tensor_parallel": MODELS[model],
            # A batch that is prefilled at once and decodes together: every step but the first is the step in question.
            "scheduler": {"name": "static", "batch_size": batch},
            "workload.requests": batch,
            "workload.prompt_tokens": context,
        }
        for model, gpu, batch, context in product(models, gpus, BATCHES, CONTEXTS)
        if batch <= most and _fits(model, gpu, batch, context)
    ]
    fields = {
        "scenario": "8k_b32",
        "set": {"workload.output_tokens": STEPS, "cost": {"kind": "roofline"}},
        "axes": [{"points": points}, {"cost.cpu": [_cpu(ms) for ms in CPU_MS]}],
        "loop": ["sync", "async"],
    }
    with tempfile.TemporaryDirectory() as store:
        rows = iter(cbsim.sweep(fields, store=store, jobs=jobs).rows)
    cases = []
    for point in points:
        loops = {ms: (_step_ms(next(rows)), _step_ms(next(rows))) for ms in CPU_MS}
        names = [point[name] for name in ("model", "hardware", "workload.requests", "workload.prompt_tokens")]
        cases.append(Case._make((*names, loops[CPU_MS[0]][0] - CPU_MS[0], loops)))
    return cases


def _step_ms(row: Any) -> float:
    """A step is the median gap of two tokens."""
    return float(row.summary["itl_s"]["p50"]) * 1e3


def _cpu(ms: float) -> dict[str, Any]:
    """All of it in one phase: when in a step it is spent makes no difference to a step that decodes."""
    none = {"base_s": 0, "per_request_s": 0}
    return {"schedule": none, "prepare": none | {"base_s": ms / 1e3}, "launch": {"base_s": 0}, "update": none}


def _fits(model: str, gpu: str, batch: int, context: int) -> bool:
    """Does the cache hold all of them to their ends?"""
    case = (f"model={model}", f"hardware={gpu}", "cost={kind: roofline}", f"cost.tensor_parallel={MODELS[model]}")
    try:
        scenario = cbsim.load("8k_b32", *case, "scheduler={name: vllm}")
    except cbsim.ScenarioError:  # not even the weights fit
        return False
    return batch * -(-(context + STEPS) // scenario.block_size) < scenario.options("async").num_blocks


def gpu_table(gpu: str, cases: Sequence[Case]) -> Table:
    """A row a model and context, a column a batch."""
    by_size = {(case.model, case.context, case.batch): case for case in cases if case.gpu == gpu}
    rows = []
    for model, context in product(MODELS, CONTEXTS):
        of = [by_size.get((model, context, batch)) for batch in BATCHES]
        if any(of):
            cells = ["-" if case is None else f"{case.gpu_ms:.2f} / {case.matters_ms:.2f}" for case in of]
            rows.append((f"{model} x {MODELS[model]}", f"{context // 1024}K", *cells))
    return Table("", ("model x GPUs", "context", *(f"batch {batch}" for batch in BATCHES)), rows)


def chart(cases: Sequence[Case]) -> Chart:
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
    shown: Any = {"x_log": True, "y_log": True, "x_range": ACROSS, "y_range": (LOWEST, 40.0)}
    panels = [Panel([*marks, *_steps(gpu, cases)], *axes, gpu, **shown) for gpu in GPUS]
    return Chart("async-map", "What async saves of a decode step", "", panels, columns=2)


def _steps(gpu: str, cases: Sequence[Case]) -> list[Points]:
    """A row of points a model, each a batch."""
    rows = []
    for number, model in enumerate(MODELS):
        of = [case for case in cases if (case.gpu, case.model, case.context) == (gpu, model, CONTEXTS[0])]
        height = np.full(len(of), LOWEST * 1.4 ** (number + 1))
        rows.append(Points(model, np.array([case.gpu_ms for case in of]), height, series(number)))
    return rows


def main() -> None:
    cases = swept(jobs=os.cpu_count() or 1)
    engines = Table("", ("engine", "ms", "measured"), [(e.name, f"{e.cpu_ms:g}", e.source) for e in ENGINES])
    data = {
        "cases": [case._asdict() | {"matters_ms": case.matters_ms} for case in cases],
        "engines": [engine._asdict() for engine in ENGINES],
    }
    page.write(__file__, {"engines": engines} | {gpu: gpu_table(gpu, cases) for gpu in GPUS}, [chart(cases)], data)


if __name__ == "__main__":
    main()
