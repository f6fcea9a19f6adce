"""Step times and chunking overheads published with Sarathi-Serve (OSDI'24), and the roofline's prediction of each.

The measured values are from the paper's artifact, github.com/microsoft/sarathi-serve at 02d2567e, the files README.md,
*.sh and *.ipynb in osdi-experiments/figure-2, figure-9 and table-2: Yi-34B-200K on two A100 80GB PCIe, joined by an
NVLink bridge, tensor parallelism 2. Figure 2: prompts prefilled alone, in one step; decode batches of 1,020 prompt
tokens and 4 outputs, so 1,020 to 1,022 tokens cached (the batch numbers of the file agree). Figure 9: the sum of a
prompt's steps, mean of five requests. Table 2: prompts of 1,024 and 16 outputs, medians over runs of which half are
profiled. The times are wall times of whole engine steps, scheduling and output processing included
(sarathi/engine/base_llm_engine.py, read at another commit).

The roofline models one GPU: it gets half of the heads, of the feed-forward layers and of the vocabulary, and no
all-reduce. Its efficiencies are our defaults; nothing is fitted except where stated.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import cbsim
from cbsim.cost.base import Cost
from cbsim.draw.chart import BLACK, BLUE, GREEN, ORANGE, PINK, RED, Chart, Level, Line, Mark, Panel, Points, Style
from cbsim.draw.report import Table
from cbsim.policy.plan import Chunk, StepPlan, StepWork
from cbsim.policy.request import RequestSpec
from cbsim.runs import assemble
from cbsim.scenario import catalog, shapes
from cbsim.scenario.costs import ComputeEfficiency, MemoryEfficiency
from reports import page

SHARD: dict[str, Any] = {  # config.json of 01-ai/Yi-34B-200K: 56 heads, 8 KV heads, 20480 wide, vocab 64000, halved
    "name": "Yi-34B-200K, one of 2 GPUs",
    "layers": 60,
    "hidden": 7168,
    "heads": 28,
    "kv_heads": 4,
    "head_dim": 128,
    "intermediate": 10240,
    "vocab": 32000,
    "max_position": 200_000,
}
PCIE_BANDWIDTH = 1.935e12  # NVIDIA A100 80GB data sheet, PCIe; its peak FLOP/s are those of the SXM card
FIGURE_2_CACHED, TABLE_2_CACHED = 1021, 1031  # tokens a decoding row has in the cache: the mean over its steps
REFERENCE, WHOLE = 2048, 16384  # chunk sizes that others are compared with; WHOLE splits no prompt
MS = 1e-3
CONSTANT: Any = {"kind": "roofline", "compute_efficiency": {}, "memory_efficiency": {}}  # shares, whatever the size
COMPUTE, MEMORY = ComputeEfficiency(), MemoryEfficiency()
SPEC = RequestSpec(0, "0", 0, 1, 1, 1)


class Point(NamedTuple):
    """A published time: of a prompt in chunks of `chunk` tokens (0: none), or of one step, perhaps with decodes."""

    prompt: int
    chunk: int
    decodes: int
    cached: int  # by each decoding row
    published_s: float
    cold: bool = False  # the first batch of its run
    linear_s: float = 0.0  # kernels of the linear layers, from a profile; 0: not published

    @property
    def steps(self) -> list[StepPlan]:
        spans = [(at, min(self.chunk, self.prompt - at)) for at in range(0, self.prompt, self.chunk or 1)]
        chunks = [Chunk(SPEC, 0, at, size, (), outputs=int(at + size == self.prompt)) for at, size in spans]
        return [self._step((chunk,)) for chunk in chunks] or [self._step(())]

    def _step(self, chunks: tuple[Chunk, ...]) -> StepPlan:
        tokens = sum(chunk.tokens for chunk in chunks)
        return StepPlan(0, StepWork(chunks, 0, self.decodes, self.decodes * self.cached, prefill_tokens=tokens))


class Answer(NamedTuple):
    """A point with what the roofline says of it."""

    point: Point
    roofline_s: float

    @property
    def error(self) -> float:
        return self.roofline_s / self.point.published_s - 1

    @property
    def efficiency(self) -> float:
        """The share of peak FLOP/s with which a roofline bound by arithmetic would be right."""
        return COMPUTE.prefill * (1 + self.error)


def scenario() -> cbsim.Scenario:
    """Half of the model on one GPU of the two, by the roofline with constant shares."""
    hardware = shapes.hardware("a100-80gb").model_dump()
    hardware |= {"name": "NVIDIA A100 PCIe 80GB", "memory_bandwidth_bytes_s": PCIE_BANDWIDTH}
    workload = {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1}
    fields = {"question": "How long does a step take?", "model": SHARD, "hardware": hardware, "workload": workload}
    return cbsim.load({**fields, "cost": CONSTANT})


def linear_s(tokens: int) -> float:
    """The roofline's seconds for the linear layers of a step: their arithmetic, or reading their weights."""
    of = scenario()
    weights = of.model.layer_parameters
    reached = of.hardware.flops.bfloat16 * COMPUTE.prefill
    read_s = weights * of.model.dtype_bytes / (PCIE_BANDWIDTH * MEMORY.weights)
    return max(2 * tokens * weights / reached, read_s)


def roofline_s(model: Cost, point: Point) -> float:
    """Seconds on the device; the CPU's phases are not in it."""
    return sum(model.gpu_ns(step, step.work.tokens)[1] for step in point.steps) * 1e-9


def published(name: str) -> list[dict[str, float]]:
    """The rows of a file. Raises ScenarioError if it is absent."""
    with catalog.data(f"sarathi_osdi24/{name}.csv", "the study of chunks").open(newline="") as file:
        return [
            {key: float(cell) for key, cell in row.items() if key and _number(cell)} for row in csv.DictReader(file)
        ]


def _number(cell: str) -> bool:
    return cell.replace(".", "", 1).replace("e-", "", 1).isdigit()


def points() -> tuple[list[Point], ...]:
    """Decode batches and prefills of figure 2, chunked prompts of figure 9, the batches of table 2."""
    prompt, decodes, time = "batch_num_prefill_tokens", "batch_num_decode_tokens", "batch_execution_time"
    made = (
        [Point(0, 0, int(r[decodes]), FIGURE_2_CACHED, r[time]) for r in published("figure-2_decode")],
        [
            Point(int(r[prompt]), int(r[prompt]), 0, 0, r[time], cold=r["Batch Id"] == 0)
            for r in published("figure-2_prefill")
        ],
        [
            Point(int(r["prefill_length"]), int(r["chunk_size"]), 0, 0, r["prefill_execution_time"] * MS)
            for r in published("figure-9_chunking-overhead")
        ],
        [
            Point(
                int(r[prompt]), int(r[prompt]), int(r[decodes]), TABLE_2_CACHED, r[time] * MS, False, r["linear"] * MS
            )
            for r in published("table-2_results")
        ],
    )
    return tuple(sorted(of) for of in made)


def floor(decodes: Sequence[Point]) -> tuple[float, float]:
    """Fitted: seconds a step and seconds a row of a line through decode batches, least squares of relative errors."""
    size, time = np.array([p.decodes for p in decodes]), np.array([p.published_s for p in decodes])
    slope, base = np.polyfit(size, time, 1, w=1 / time)
    return float(base), float(slope)


# -- tables and figures -----------------------------------------------------------------------------------------------


def _ms(seconds: float) -> str:
    return f"{seconds / MS:,.0f}" if seconds >= 1 else f"{seconds / MS:,.1f}"


def _cells(answer: Answer) -> tuple[str, str, str]:
    return _ms(answer.point.published_s), _ms(answer.roofline_s), f"{answer.error:+z.0%}"


TIMES = ("published, ms", "roofline, ms", "error")


def overheads(chunked: Sequence[Answer]) -> list[tuple[Answer, float, float, float]]:
    """Each with its time over that of the same prompt in one step, in chunks of `REFERENCE`, and the roofline's."""
    times = {(a.point.prompt, a.point.chunk): a for a in chunked}
    made = []
    for a in chunked:
        whole, reference = times[a.point.prompt, WHOLE], times[a.point.prompt, REFERENCE]
        ratios = [a.point.published_s / base.point.published_s for base in (whole, reference)]
        made.append((a, ratios[0], ratios[1], a.roofline_s / whole.roofline_s))
    return made


def chunk_table(chunked: Sequence[Answer]) -> Table:
    rows = []
    for answer, *ratios in overheads(chunked):
        prompt, chunk = answer.point.prompt, answer.point.chunk
        name = f"{prompt:,} in {chunk:,}" if chunk < prompt else f"{prompt:,} ({chunk:,})"
        rows.append((name, *_cells(answer), *(f"{ratio:.3f}" for ratio in ratios)))
    header = ("prompt in chunks", *TIMES, "over one step", f"over chunks of {REFERENCE:,}", "roofline over one step")
    return Table("", header, rows)


def hybrid_table(hybrids: Sequence[Answer]) -> Table:
    rows = []
    for a in hybrids:
        parts = [f"{a.point.prompt:,} prefill"] * bool(a.point.prompt)
        parts += [f"{a.point.decodes} decode"] * bool(a.point.decodes)
        linear = _ms(a.point.linear_s), _ms(linear_s(a.point.prompt + a.point.decodes))
        rows.append((" + ".join(parts), *_cells(a), *linear))
    return Table("", ("batch", *TIMES, "linear layers published, ms", "linear layers roofline, ms"), rows)


def steps_chart(model: Cost, decodes: Sequence[Answer], prefills: Sequence[Answer]) -> Chart:
    published, roofline = Style(BLACK, "solid", "circle"), Style(BLUE)
    base_s, row_s = floor([a.point for a in decodes])
    sizes = np.arange(1, 129, dtype=np.float64)
    by_size = np.array([roofline_s(model, Point(0, 0, int(size), FIGURE_2_CACHED, 1)) for size in sizes]) / MS
    floored = np.maximum(by_size, (base_s + row_s * sizes) / MS)
    marks: list[Mark] = [
        Line("roofline, nothing fitted", sizes, by_size, roofline),
        Line("roofline over a fitted CPU floor", sizes, floored, Style(ORANGE, "dashed")),
        Points(
            "published",
            np.array([float(a.point.decodes) for a in decodes]),
            np.array([a.point.published_s / MS for a in decodes]),
            published,
        ),
    ]
    tokens = np.array([float(a.point.prompt) for a in prefills])
    lengths = np.unique(np.geomspace(128, 16384, 80).round())
    by_length = np.array([roofline_s(model, Point(int(n), int(n), 0, 0, 1)) for n in lengths]) / lengths * 1e6
    each = np.array([a.point.published_s for a in prefills]) / tokens * 1e6
    more: list[Mark] = [
        Line("roofline, nothing fitted", lengths, by_length, roofline),
        Points("published", tokens, each, published),
    ]
    panels = [
        Panel(marks, "rows", "ms", "Decode batches, 1,021 tokens cached a row", x_log=True),
        Panel(more, "prompt tokens", "us a token", "Prefills in one step", x_log=True),
    ]
    return Chart("chunks_steps", "Steps of Yi-34B on two A100 PCIe: published and roofline", "", panels, columns=2)


def overhead_chart(chunked: Sequence[Answer]) -> Chart:
    styles = {
        512: Style(RED, "solid", "square"),
        1024: Style(GREEN, "dashed", "diamond"),
        REFERENCE: Style(PINK, "dotted", "triangle"),
    }
    panels = []
    for number, title in ((1, "Over the same prompt in one step"), (2, f"Over the same prompt in {REFERENCE:,}s")):
        marks: list[Mark] = [Level("roofline, any of these chunks", 1.0, Style(BLUE))]
        for chunk, style in styles.items():
            of = [entry for entry in overheads(chunked) if entry[0].point.chunk == chunk]
            tokens = np.array([float(entry[0].point.prompt) for entry in of])
            ratios = np.array([float(entry[number]) for entry in of])  # type: ignore[arg-type]
            marks += [Line("", tokens, ratios, style), Points(f"published, chunks of {chunk:,}", tokens, ratios, style)]
        panels.append(Panel(marks, "prompt tokens", "ratio of times", title, y_range=(0.75, 1.3)))
    title = "Overhead of chunked prefills: published and roofline"
    return Chart("chunks_overhead", title, "", panels, columns=2)


def main() -> None:
    model = assemble.cost_model(scenario())
    decodes, prefills, chunked, hybrids = ([Answer(p, roofline_s(model, p)) for p in of] for of in points())
    base_s, row_s = floor([a.point for a in decodes])
    rows = []
    for a in decodes:
        floored = max(a.roofline_s, base_s + row_s * a.point.decodes)
        rows.append((f"{a.point.decodes}", *_cells(a), _ms(floored)))
    names = [f"{a.point.prompt:,}{' (first of its run)' if a.point.cold else ''}" for a in prefills]
    lines = [(name, *_cells(a), f"{a.efficiency:.2f}") for name, a in zip(names, prefills, strict=True)]
    tables = {
        "decodes": Table("", ("rows", *TIMES, "with the fitted floor, ms"), rows),
        "prefills": Table("", ("tokens", *TIMES, "efficiency needed"), lines),
        "chunked": chunk_table(chunked),
        "hybrids": hybrid_table(hybrids),
    }
    groups = {"decode": decodes, "prefill": prefills, "chunked": chunked, "hybrid": hybrids}
    data = {name: [a.point._asdict() | {"roofline_s": a.roofline_s} for a in of] for name, of in groups.items()}
    page.write(__file__, tables, [steps_chart(model, decodes, prefills), overhead_chart(chunked)], data)


if __name__ == "__main__":
    main()
