"""What asynchronous batching buys on an H100 or H200 with the kernels of today, from tables of measured kernels.

A decode step takes the GPU what its kernels were measured to take, plus ADDED_MS. Steps one after the other take
cpu + gpu each, overlapped ones the larger of the two, so async saves min(cpu, gpu) / (cpu + gpu) of the time: 5 % from
where the CPU takes a 19th of what the GPU takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from cbsim.cost.kernels import Kernels
from cbsim.draw.chart import BLACK, GREY, Chart, Floats, Level, Line, Mark, Panel, Points, Style, series
from cbsim.draw.markdown import Table
from cbsim.draw.study import Study
from cbsim.machine import simulate
from cbsim.policy.plan import StepCounts, StepPlan, StepWork
from cbsim.results.columns import NS
from cbsim.results.metrics import Steps
from cbsim.scenario import catalog
from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.table_costs import TableSettings
from cbsim.server.assemble import cost_model
from cbsim.workload import generators

GPUS = {"H100": "h100", "H200": "h200"}
ADDED_MS = 0.6  # assumed, a step: norms, rotary embeddings, activations, gaps between kernels
LAYER_S = ADDED_MS / 1e3 / 32  # in Llama-3.1-8B
CPU_MS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
LEAN_MS = 0.5  # assumed: a lean loop, whatever the batch
BATCHES = tuple(2**i for i in range(9))
CONTEXTS = tuple(1024 * 2**i for i in range(6))
MATTERS = 0.05
PUBLISHED_S = 300.6, 234.5  # transformers, sync and async, as scenarios/8k_b32.yaml quotes them
NOT_OURS = "Simulated from tables of measured kernels; nothing here was measured on a GPU of our own."


def study() -> Study:
    """Eight runs of 8k_b32, and a map of decode steps. Raises ScenarioError without the tables."""
    served = {(name, layer_s): HopperRun.of(name, layer_s) for name, layer_s in product(GPUS, (LAYER_S, 0.0))}
    maps = {name: cells(name) for name in GPUS}
    return Study(
        "What async buys on Hopper",
        "With kernels as fast as today's, what does 8k_b32 take on an H100 and an H200, and what is asynchronous "
        "batching worth there, by batch, context and CPU cost of a step?",
        [*_findings_8k(served), *(_finding_map(name, points) for name, points in maps.items()), ASSUMED, DISTURBED],
        [_table_8k(served, LAYER_S), _table_8k(served, 0.0), *(table for name in GPUS for table in _maps(name, maps))],
        [_chart_8k(served), _chart_saved(maps), _chart_matters(maps)],
        {
            "layer_s": LAYER_S,
            "8k_b32": [
                {"gpu": name, "layer_s": layer_s, "cpu": label} | row._asdict() | {"saved": row.saved}
                for (name, layer_s), run in served.items()
                for label, row in _rows(run)
            ],
            "map": [
                {"gpu": name} | cell._asdict() | {"saved": cell.saved, "matters_cpu_s": cell.matters_s}
                for name, points in maps.items()
                for cell in points
            ],
        },
    )


# -- 8k_b32 -----------------------------------------------------------------------------------------------------------


def scenario_on(gpu: str, layer_s: float, *overrides: str) -> Scenario:
    """scenarios/8k_b32 on the kernel tables of a GPU of `GPUS`, with the default CPU cost."""
    cost = f"cost={{kind: table, path: hopper_kernels/{GPUS[gpu]}_sxm, layer_s: {layer_s}}}"
    return scenarios.load("8k_b32", [f"hardware={GPUS[gpu]}-sxm", cost, *overrides])


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
        scenario = scenario_on(gpu, layer_s)
        sync_s, steps = simulated(scenario, "sync")
        cpu = sum((steps.lane(phase) for phase in ("schedule", "prepare", "launch", "update")), np.zeros(len(steps)))
        kernels = steps.lane("compute") / NS
        return cls(Both(sync_s, simulated(scenario, "async")[0], float(kernels.sum()) / sync_s), cpu / NS, kernels)

    def at(self, cpu_s: float | Floats) -> Both:
        """The same steps with another CPU cost, in closed form: cpu + gpu each, or the larger of the two."""
        sync_s = float(np.sum(cpu_s + self.gpu_s))
        return Both(sync_s, float(np.sum(np.maximum(cpu_s, self.gpu_s))), float(self.gpu_s.sum()) / sync_s)


def simulated(scenario: Scenario, loop: str) -> tuple[float, Steps]:
    """Seconds of a run, and its step table."""
    server = simulate.machine(scenario, loop, generators.build(scenario))
    simulate.run(server)
    return server.now_ns / NS, Steps.of(server.record)


def _rows(run: HopperRun) -> list[tuple[str, Both]]:
    """No CPU cost at all, the range in closed form, and the run with the default cost."""
    default = f"{run.cpu_s.mean() * 1e3:.2f} ms (default, run)"
    return [("none", run.at(0.0)), *((f"{ms:g} ms", run.at(ms / 1e3)) for ms in CPU_MS), (default, run.run)]


def _table_8k(served: dict[tuple[str, float], HopperRun], layer_s: float) -> Table:
    rows = []
    for labelled in zip(*(_rows(served[name, layer_s]) for name in GPUS), strict=True):
        row = [both for _, both in labelled]
        texts = [(f"{b.sync_s:.1f} s", f"{b.async_s:.1f} s", f"{b.saved:.1%}", f"{b.gpu_active:.1%}") for b in row]
        rows.append([labelled[0][0], *chain(*texts)])
    added = f"{ADDED_MS} ms a step" if layer_s else "nothing"
    return Table(
        f"8k_b32: measured kernels and {added} for what the tables leave out",
        ["CPU a step", *(f"{name} {what}" for name in GPUS for what in ("sync", "async", "saved", "GPU active, sync"))],
        rows,
        f"{NOT_OURS} 32 requests, 8,192 steps. The last row is the simulator's run at the default CPU cost; the others "
        "are the closed form over its steps, which a test holds to the simulator within 0.1 %.",
    )


def _findings_8k(served: dict[tuple[str, float], HopperRun]) -> list[str]:
    findings = [_finding_8k(name, served[name, LAYER_S], served[name, 0.0]) for name in GPUS]
    sync_s, async_s = PUBLISHED_S
    best = " and ".join(f"{served[name, LAYER_S].run.async_s:.0f} s on an {name}" for name in GPUS)
    findings.append(
        f"transformers' published runs of the same size, on a GPU that is not named, take {sync_s} s and {async_s} s: "
        f"there async saves {1 - async_s / sync_s:.0%}. With today's kernels and the default CPU cost the asynchronous "
        f"run takes {best}."
    )
    return findings


def _finding_8k(name: str, full: HopperRun, bare: HopperRun) -> str:
    lean, slow, cpu_ms = full.at(CPU_MS[0] / 1e3), full.at(CPU_MS[-1] / 1e3), full.cpu_s.mean() * 1e3
    return (
        f"8k_b32 on an {name}: measured kernels alone take {bare.gpu_s.sum():.1f} s; with {ADDED_MS} ms a step "
        f"for what the tables leave out, {full.gpu_s.sum():.1f} s. At the default CPU cost, {cpu_ms:.2f} ms a step, "
        f"sync takes {full.run.sync_s:.1f} s and async {full.run.async_s:.1f} s: async saves {full.run.saved:.1%} "
        f"({bare.run.saved:.1%} without that addition). At {CPU_MS[0]} ms of CPU a step it saves {lean.saved:.1%}, at "
        f"{CPU_MS[-1]:g} ms {slow.saved:.1%}."
    )


# -- the map ----------------------------------------------------------------------------------------------------------


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
    scenario = scenario_on(gpu, LAYER_S, "scheduler={name: vllm}", "kv_cache={}")
    assert isinstance(scenario.cost, TableSettings)
    cost, kernels = cost_model(scenario), Kernels(catalog.tables(scenario.cost.path), 1, scenario.model)
    blocks = scenarios.scheduler_options(scenario, depth=2).num_blocks - 1  # one is never given out
    points = []
    for context, batch in product(CONTEXTS, BATCHES):
        held = batch * -(-(context + 1) // scenario.block_size)
        work = StepWork(decodes=batch, decode_context=batch * context, longest_context=context)
        plan = StepPlan(0, work, counts=StepCounts(table_blocks=held, running=batch))
        gpu_ns, cpu_ns = cost.gpu_ns(plan, batch), cost.cpu_ns(plan)
        reach = kernels.longest(batch) >= context
        points.append(Cell(batch, context, sum(gpu_ns) / NS, sum(cpu_ns) / NS, held <= blocks, reach))
    return points


def _maps(name: str, maps: dict[str, list[Cell]]) -> list[Table]:
    least, most = (maps[name][place].cpu_s * 1e3 for place in (0, len(BATCHES) - 1))
    marks = f"{NOT_OURS} -: does not fit the memory. ~: attention measured to a shorter context, and extrapolated."
    default = f"the default CPU cost, {least:.2f} ms a step at batch 1 to {most:.2f} ms at {BATCHES[-1]}"
    return [
        _map(f"{name}: GPU time of a decode step, ms", maps[name], lambda cell: f"{cell.gpu_s * 1e3:.1f}", marks),
        _map(f"{name}: time saved by async at {default}", maps[name], lambda cell: f"{cell.saved:.1%}", marks),
        _map(
            f"{name}: CPU cost a step from which async saves {MATTERS:.0%}, ms",
            maps[name],
            lambda cell: f"{cell.matters_s * 1e3:.2f}",
            marks,
        ),
    ]


def _map(title: str, points: Sequence[Cell], shown: Callable[[Cell], str], says: str) -> Table:
    header = ["context", *(f"batch {batch}" for batch in BATCHES)]
    rows = []
    for context in CONTEXTS:
        of = [cell for cell in points if cell.context == context]
        texts = [("" if cell.measured else "~") + shown(cell) if cell.fits else "-" for cell in of]
        rows.append([f"{context // 1024}K", *texts])
    return Table(title, header, rows, says)


def _finding_map(name: str, points: Sequence[Cell]) -> str:
    fitting = [cell for cell in points if cell.fits]
    short, long = (pick(fitting, key=lambda cell: cell.gpu_s) for pick in (min, max))
    worth = sum(cell.saved >= MATTERS for cell in fitting)
    lean = sum(saved(LEAN_MS / 1e3, cell.gpu_s) >= MATTERS for cell in fitting)
    return (
        f"{name}: {len(fitting)} of {len(points)} points of the map fit its memory. There a decode step takes the GPU "
        f"{short.gpu_s * 1e3:.1f} ms (batch {short.batch} at {short.context // 1024}K) to {long.gpu_s * 1e3:.1f} ms "
        f"(batch {long.batch} at {long.context // 1024}K), and async saves {MATTERS:.0%} of the time if "
        f"the CPU takes {short.matters_s * 1e3:.2f} or {long.matters_s * 1e3:.2f} ms. At the default CPU cost it saves "
        f"that much at {worth} of the points, at {LEAN_MS} ms a step whatever the batch at {lean}."
    )


DISTURBED = (
    "The closed form lets CPU and GPU overlap without disturbing each other. In the published asynchronous run a step "
    "took 2.6 % more than the GPU was busy for in the synchronous one, which would use up what async saves here at "
    "0.3 ms of CPU a step."
)
ASSUMED = (
    f"Assumed: {ADDED_MS} ms a step for norms, rotary embeddings, activations and gaps between kernels; no time for "
    "the sampler. Of the default CPU cost schedule and update were measured, with vLLM's scheduler on a slow, shared "
    f"Xeon; prepare and launch are assumptions. {CPU_MS[0]} to {CPU_MS[-1]:g} ms are a range, not measurements."
)


# -- figures ----------------------------------------------------------------------------------------------------------


def _chart_8k(served: dict[tuple[str, float], HopperRun]) -> Chart:
    costs = np.geomspace(0.1, 20, 80)
    times: list[Mark] = []
    gains: list[Mark] = [Level("5 %", 100 * MATTERS, Style(GREY, "dotted"))]
    for index, name in enumerate(GPUS):
        run, colour = served[name, LAYER_S], series(index).colour
        both, at = [run.at(ms / 1e3) for ms in costs], np.repeat(run.cpu_s.mean() * 1e3, 2)
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
    return Chart(
        "hopper-8k-b32",
        "8k_b32 with today's kernels",
        "Left: the whole run; right: what async saves of it. Lines: closed form; points: the simulator at the default "
        f"CPU cost. {NOT_OURS}",
        [
            Panel(times, x, "seconds", "time of the run", x_log=True),
            Panel(gains, x, "%", "time saved by async", x_log=True),
        ],
        columns=2,
    )


def _chart_saved(maps: dict[str, list[Cell]]) -> Chart:
    panels = []
    for title, value in (("default CPU cost", _saved), (f"{LEAN_MS} ms of CPU a step", _lean)):
        top = 1.1 * max(value(cell) for points in maps.values() for cell in points if cell.fits)
        for name, points in maps.items():
            level = Level("5 %", 100 * MATTERS, Style(GREY, "dotted"))
            panels.append(_by_batch(_lines(points, value), level, "time saved, %", f"{name}, {title}", top))
    return Chart(
        "hopper-saved",
        "What async saves of a decode step",
        f"By batch, a line a context, as far as the requests fit the memory. {NOT_OURS}",
        panels,
        columns=2,
    )


def _saved(cell: Cell) -> float:
    return 100 * cell.saved


def _lean(cell: Cell) -> float:
    return 100 * saved(LEAN_MS / 1e3, cell.gpu_s)


def _by_batch(lines: Sequence[Line], other: Mark, y: str, title: str, top: float) -> Panel:
    return Panel([*lines, other], "batch", y, title, categories=[str(batch) for batch in BATCHES], y_range=(0.0, top))


def _chart_matters(maps: dict[str, list[Cell]]) -> Chart:
    panels, top = [], 1.1e3 * max(cell.matters_s for points in maps.values() for cell in points if cell.fits)
    for name, points in maps.items():
        default = np.array([cell.cpu_s * 1e3 for cell in points[: len(BATCHES)]])
        cpu = Line("CPU, default", np.arange(len(BATCHES), dtype=float), default, Style(BLACK, "dotted"))
        panels.append(_by_batch(_lines(points, lambda cell: cell.matters_s * 1e3), cpu, "CPU a step, ms", name, top))
    return Chart(
        "hopper-matters",
        f"The CPU cost of a step from which async saves {MATTERS:.0%}",
        "By batch, a line a context, as far as the requests fit the memory. Where the default CPU cost, which goes on "
        f"rising beyond the frame, lies above a context's line, async saves more than that. {NOT_OURS}",
        panels,
        columns=2,
    )


def _lines(points: Sequence[Cell], value: Callable[[Cell], float]) -> list[Line]:
    """A line a context over the positions of the batches, ending where the memory does."""
    lines = []
    for index, context in enumerate(CONTEXTS):
        of = [cell for cell in points if cell.context == context and cell.fits]
        x = np.arange(len(of), dtype=float)
        lines.append(Line(f"{context // 1024}K context", x, np.array([value(cell) for cell in of]), series(index)))
    return lines
