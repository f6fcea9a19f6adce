"""The gain of asynchronous batching on an H100 or H200 with current kernels, from tables of measured kernels.

A decode step takes the measured time of its kernels plus ADDED_MS on the GPU. Consecutive steps take cpu + gpu each,
overlapped ones the larger of the two, so async saves min(cpu, gpu) / (cpu + gpu) of the time: at least 5 % if the CPU
takes a 19th of the GPU's time or more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.cost.engine_files import select
from cbsim.draw.chart import BLACK, GREY, Chart, Floats, Level, Line, Mark, Panel, Points, Style, series
from cbsim.draw.report import Table
from cbsim.policy.plan import StepCounts, StepPlan, StepWork
from cbsim.runs.assemble import cost_model
from cbsim.scenario import catalog
from reports import page

NS = 1e9
GPUS = {"H100": "h100", "H200": "h200"}
TABLES, ENGINE = "public_measured/aiconfigurator", "vllm_0.24.0"
ADDED_MS = 0.6  # assumed, a step: norms, rotary embeddings, activations, gaps between kernels
LAYER_S = ADDED_MS / 1e3 / 32  # in Llama-3.1-8B
CPU_MS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
LEAN_MS = 0.5  # assumed: a lean loop, whatever the batch
BATCHES = tuple(2**i for i in range(9))
CONTEXTS = tuple(1024 * 2**i for i in range(6))
MATTERS = 0.05


def scenario_on(gpu: str, layer_s: float, *overrides: str) -> cbsim.Scenario:
    """scenarios/8k_b32 on the kernel tables of a GPU of `GPUS`, with the default CPU cost."""
    tables = f"path: {TABLES}/{GPUS[gpu]}_sxm, engine: {ENGINE}, fastest: false, layer_s: {layer_s}"
    cost = f"cost={{kind: table, {tables}, step_s: 0, row_s: 0, elementwise: 0, decode_attention: 1}}"
    return cbsim.load("8k_b32", f"hardware={GPUS[gpu]}-sxm", cost, *overrides)


def longest(scenario: Any) -> Callable[[int], float]:
    """Return the tokens up to which attention of so many rows was measured; 0 above the most rows measured."""
    model = scenario.model
    path = catalog.tables(scenario.cost.path) / f"generation_attention__{ENGINE}.csv.gz"
    heads = {"kv_cache_dtype": model.dtype, "num_key_value_heads": model.kv_heads, "num_heads": model.heads}
    rows = select(path, ("batch_size", "isl", "step"), heads)
    return lambda batch: max((new + cached for each, new, cached in rows if each >= batch), default=0.0)


class Both(NamedTuple):
    """Seconds under the two loops, and the share of its time that the GPU works in the synchronous one."""

    sync_s: float
    async_s: float
    gpu_active: float

    @property
    def saved(self) -> float:
        return 1 - self.async_s / self.sync_s


class HopperRun(NamedTuple):
    """8k_b32 simulated under both loops: CPU and GPU seconds of each step of the synchronous one."""

    run: Both
    cpu_s: Floats
    gpu_s: Floats

    @classmethod
    def of(cls, gpu: str, layer_s: float) -> HopperRun:
        results: Any = cbsim.run(scenario_on(gpu, layer_s, "loop.mode=both"))
        sync_s, async_s = (results[loop].summary["makespan_s"] for loop in ("sync", "async"))
        steps = results["sync"].step_numbers
        cpu = sum((steps.lane(phase) for phase in ("schedule", "prepare", "launch", "update")), np.zeros(len(steps)))
        kernels = steps.lane("compute") / NS
        return cls(Both(sync_s, async_s, float(kernels.sum()) / sync_s), cpu / NS, kernels)

    def at(self, cpu_s: float | Floats) -> Both:
        """The same steps with another CPU cost, in closed form: cpu + gpu each, or the larger of the two."""
        sync_s = float(np.sum(cpu_s + self.gpu_s))
        return Both(sync_s, float(np.sum(np.maximum(cpu_s, self.gpu_s))), float(self.gpu_s.sum()) / sync_s)


def by_cpu(run: HopperRun) -> list[tuple[str, Both]]:
    """No CPU cost at all, the range in closed form, and the run with the default cost."""
    default = f"{run.cpu_s.mean() * 1e3:.2f} ms (default, run)"
    return [("none", run.at(0.0)), *((f"{ms:g} ms", run.at(ms / 1e3)) for ms in CPU_MS), (default, run.run)]


def run_table(runs: Sequence[HopperRun]) -> Table:
    rows = []
    for labelled in zip(*map(by_cpu, runs), strict=True):
        cells = [
            (f"{b.sync_s:.1f} s", f"{b.async_s:.1f} s", f"{b.saved:.1%}", f"{b.gpu_active:.1%}") for _, b in labelled
        ]
        rows.append([labelled[0][0], *chain(*cells)])
    columns = (f"{name} {what}" for name in GPUS for what in ("sync", "async", "saved", "GPU active, sync"))
    return Table("", ["CPU a step", *columns], rows)


class Cell(NamedTuple):
    """A decode step of `batch` requests that read `context` cached tokens each: seconds on the GPU, on the CPU by
    default; do the requests fit the cache, was attention measured that far.
    """

    batch: int
    context: int
    gpu_s: float
    cpu_s: float
    fits: bool
    measured: bool

    @property
    def saved(self) -> float:
        return saved(self.cpu_s, self.gpu_s)

    @property
    def matters_s(self) -> float:
        """The CPU cost a step from which async saves `MATTERS`."""
        return self.gpu_s * MATTERS / (1 - MATTERS)


def saved(cpu_s: float, gpu_s: float) -> float:
    """Share of the time of synchronous steps that asynchronous ones save."""
    return 1 - max(cpu_s, gpu_s) / (cpu_s + gpu_s)


def cells(gpu: str) -> list[Cell]:
    """Every context with every batch. Memory as vLLM's defaults share it out."""
    scenario: Any = scenario_on(gpu, LAYER_S, "scheduler={name: vllm}", "kv_cache={}")
    cost, measured = cost_model(scenario), longest(scenario)
    blocks = scenario.options("async").num_blocks - 1  # one is never given out
    points = []
    for context, batch in product(CONTEXTS, BATCHES):
        allocated = batch * -(-(context + 1) // scenario.block_size)
        work = StepWork(decodes=batch, decode_context=batch * context, longest_context=context)
        plan = StepPlan(0, work, counts=StepCounts(table_blocks=allocated, running=batch))
        gpu_s, cpu_s = sum(cost.gpu_ns(plan, batch)) / NS, sum(cost.cpu_ns(plan)) / NS
        points.append(Cell(batch, context, gpu_s, cpu_s, allocated <= blocks, measured(batch) >= context))
    return points


def map_tables(name: str, points: Sequence[Cell]) -> dict[str, Table]:
    values: Mapping[str, Callable[[Cell], str]] = {
        "gpu": lambda cell: f"{cell.gpu_s * 1e3:.1f}",
        "saved": lambda cell: f"{cell.saved:.1%}",
        "matters": lambda cell: f"{cell.matters_s * 1e3:.2f}",
    }
    header = ["context", *(f"batch {batch}" for batch in BATCHES)]
    tables = {}
    for key, value in values.items():
        rows = []
        for context in CONTEXTS:
            of = [cell for cell in points if cell.context == context]
            shown = [("" if cell.measured else "~") + value(cell) if cell.fits else "-" for cell in of]
            rows.append([f"{context // 1024}K", *shown])
        tables[f"{name}-{key}"] = Table("", header, rows)
    return tables


def run_chart(runs: Mapping[str, HopperRun]) -> Chart:
    costs = np.geomspace(0.1, 20, 80)
    times: list[Mark] = []
    gains: list[Mark] = [Level("5 %", 100 * MATTERS, Style(GREY, "dotted"))]
    for index, (name, run) in enumerate(runs.items()):
        colour, both = series(index).colour, [run.at(ms / 1e3) for ms in costs]
        at = np.repeat(run.cpu_s.mean() * 1e3, 2)
        times += [
            Line(f"{name} sync", costs, np.array([b.sync_s for b in both]), Style(colour)),
            Line(f"{name} async", costs, np.array([b.async_s for b in both]), Style(colour, "dashed")),
            Points("simulated", at, np.array([run.run.sync_s, run.run.async_s]), Style(BLACK)),
        ]
        gains += [
            Line(f"{name} sync", costs, 100 * np.array([b.saved for b in both]), Style(colour)),
            Points("simulated", at[:1], np.array([100 * run.run.saved]), Style(BLACK)),
        ]
    x = "CPU cost a step, ms"
    panels = [
        Panel(times, x, "seconds", "time of the run", x_log=True),
        Panel(gains, x, "%", "time saved by async", x_log=True),
    ]
    return Chart("hopper-8k-b32", "8k_b32 with today's kernels", "", panels, columns=2)


def saved_chart(maps: Mapping[str, Sequence[Cell]]) -> Chart:
    """By batch, a line a context over the positions of the batches, ending where the memory does."""
    panels = []
    level = Level("5 %", 100 * MATTERS, Style(GREY, "dotted"))
    for title, cpu_s in (("default CPU cost", None), (f"{LEAN_MS} ms of CPU a step", LEAN_MS / 1e3)):
        for name, points in maps.items():
            lines: list[Mark] = []
            for index, context in enumerate(CONTEXTS):
                of = [cell for cell in points if cell.context == context and cell.fits]
                gains = np.array([100 * saved(cell.cpu_s if cpu_s is None else cpu_s, cell.gpu_s) for cell in of])
                lines.append(Line(f"{context // 1024}K context", np.arange(float(len(of))), gains, series(index)))
            batches = [str(batch) for batch in BATCHES]
            panels.append(Panel([*lines, level], "batch", "time saved, %", f"{name}, {title}", categories=batches))
    return Chart("hopper-saved", "What async saves of a decode step", "", panels, columns=2)


def main() -> None:
    added = {name: HopperRun.of(name, LAYER_S) for name in GPUS}
    alone = {name: HopperRun.of(name, 0.0) for name in GPUS}
    maps = {name: cells(name) for name in GPUS}
    tables = {"kernels-and-added": run_table([*added.values()]), "kernels-alone": run_table([*alone.values()])}
    tables |= {key: made for name in GPUS for key, made in map_tables(name, maps[name]).items()}
    data = {
        "layer_s": LAYER_S,
        "8k_b32": [
            {"gpu": name, "layer_s": layer_s, "cpu": label} | row._asdict() | {"saved": row.saved}
            for layer_s, runs in ((LAYER_S, added), (0.0, alone))
            for name, run in runs.items()
            for label, row in by_cpu(run)
        ],
        "map": [
            {"gpu": name} | cell._asdict() | {"saved": cell.saved, "matters_cpu_s": cell.matters_s}
            for name, points in maps.items()
            for cell in points
        ],
    }
    page.write(__file__, tables, [run_chart(added), saved_chart(maps)], data)


if __name__ == "__main__":
    main()
