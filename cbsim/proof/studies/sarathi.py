"""Step times and chunking overheads published with Sarathi-Serve (OSDI'24), and what the roofline says of each.

What was measured is said by the paper's artifact, github.com/microsoft/sarathi-serve at 02d2567e, the files README.md,
*.sh and *.ipynb in osdi-experiments/figure-2, figure-9 and table-2: Yi-34B-200K on two A100 80GB PCIe, joined by an
NVLink bridge, tensor parallelism 2. Figure 2: prompts prefilled alone, in one step; decode batches of 1,020 prompt
tokens and 4 outputs, so 1,020 to 1,022 tokens cached (the batch numbers of the file agree). Figure 9: the sum of a
prompt's steps, mean of five requests. Table 2: prompts of 1,024 and 16 outputs, medians over runs of which half are
profiled. The times are wall times of whole engine steps, scheduling and output processing included
(sarathi/engine/base_llm_engine.py, read at another commit).

The roofline knows one GPU: it gets half of the heads, of the feed-forward layers and of the vocabulary, and no
all-reduce. Its efficiencies are our defaults; nothing is fitted but what is called fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

import numpy as np

from cbsim.cost.base import Cost
from cbsim.policy.plan import Chunk, StepPlan, StepWork
from cbsim.policy.request import RequestSpec
from cbsim.scenario import catalog, rows, shapes
from cbsim.scenario.costs import RooflineSettings
from cbsim.scenario.fields import ScenarioError
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import Hardware, ModelShape
from cbsim.server import assemble

SHARD = ModelShape(  # config.json of 01-ai/Yi-34B-200K: 56 heads, 8 KV heads, intermediate 20480, vocab 64000, halved
    name="Yi-34B-200K, one of 2 GPUs",
    layers=60,
    hidden=7168,
    heads=28,
    kv_heads=4,
    head_dim=128,
    intermediate=10240,
    vocab=32000,
    max_position=200_000,
)
PCIE_BANDWIDTH = 1.935e12  # NVIDIA A100 80GB data sheet, PCIe; its peak FLOP/s are those of the SXM card
LINK_BYTES_S = 300e9  # NVLink bridge of that card, each direction, same source
MULTIPROCESSORS = 108  # of an A100
FIGURE_2_CACHED, TABLE_2_CACHED = 1021, 1031  # tokens a decoding row has in the cache: the mean over its steps
REFERENCE, WHOLE = 2048, 16384  # chunk sizes that others are compared with; WHOLE splits no prompt
TIMES = ("batch_execution_time", "prefill_execution_time", "linear")  # columns
MS = 1e-3
DEFAULT = RooflineSettings(kind="roofline")


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
        listed = [Chunk(SPEC, 0, at, size, (), outputs=int(at + size == self.prompt)) for at, size in spans]
        return [_step(self, (chunk,)) for chunk in listed] or [_step(self, ())]


class Answer(NamedTuple):
    """A point with what the roofline says of it."""

    point: Point
    roofline_s: float

    @property
    def published_s(self) -> float:
        return self.point.published_s

    @property
    def error(self) -> float:
        return self.roofline_s / self.published_s - 1

    @property
    def efficiency(self) -> float:
        """The share of peak FLOP/s with which a roofline bound by arithmetic would be right."""
        return DEFAULT.compute_efficiency.prefill * (1 + self.error)


class Chunked(NamedTuple):
    """A prompt's time over that of the same prompt in one step, and in chunks of `REFERENCE` tokens."""

    answer: Answer
    over_whole: float
    over_reference: float
    roofline_over_whole: float


class Compared(NamedTuple):
    """All points with the roofline's answers, and a line fitted through the decode batches."""

    decodes: list[Answer]
    prefills: list[Answer]
    chunked: list[Chunked]
    hybrids: list[Answer]
    base_s: float
    row_s: float

    def floored_s(self, answer: Answer) -> float:
        """The roofline, or the fitted time of the CPU if that is longer."""
        return max(answer.roofline_s, self.base_s + self.row_s * answer.point.decodes)


SPEC = RequestSpec(0, "0", 0, 1, 1, 1)


def _step(point: Point, chunks: tuple[Chunk, ...]) -> StepPlan:
    context = point.decodes * point.cached
    tokens = sum(chunk.tokens for chunk in chunks)
    return StepPlan(0, StepWork(chunks, 0, point.decodes, context, prefill_tokens=tokens))


# -- what was published -----------------------------------------------------------------------------------------------

Key = tuple[int, int, int]  # prompt, chunk and decode tokens
DECODES: list[Key] = [(0, 0, 1 << i) for i in range(8)]
PREFILLS: list[Key] = [(128 << i, 128 << i, 0) for i in range(8)]
CHUNKED: list[Key] = [((2048 << i) - 1, chunk, 0) for i in range(4) for chunk in (512, 1024, REFERENCE, WHOLE)]
HYBRIDS: list[Key] = [(0, 0, 4), (1021, 1021, 3), (1024, 1024, 0)]


def decodes() -> list[Point]:
    """Figure 2: decode batches, by rows. Raises ScenarioError."""
    columns = ("batch_num_decode_tokens", "batch_execution_time")
    return _read("figure-2_decode.csv", columns, DECODES, lambda n, s: Point(0, 0, n[0], FIGURE_2_CACHED, s[1]))


def prefills() -> list[Point]:
    """Figure 2: prompts in one step, by tokens. Raises ScenarioError."""
    columns = ("batch_num_prefill_tokens", "batch_execution_time", "Batch Id")
    return _read("figure-2_prefill.csv", columns, PREFILLS, lambda n, s: Point(n[0], n[0], 0, 0, s[1], cold=n[2] == 0))


def chunked() -> list[Point]:
    """Figure 9: prompts in chunks, by both sizes; chunks of `WHOLE` tokens split no prompt. Raises ScenarioError."""
    columns = ("prefill_length", "chunk_size", "prefill_execution_time")
    name = "figure-9_chunking-overhead.csv"
    return _read(name, columns, CHUNKED, lambda n, s: Point(n[0], n[1], 0, 0, s[2] * MS))


def hybrids() -> list[Point]:
    """Table 2: a decode batch, a hybrid batch, a prefill. Raises ScenarioError."""
    columns = ("batch_num_prefill_tokens", "batch_num_decode_tokens", "batch_execution_time", "linear")
    name = "table-2_results.csv"
    return _read(
        name, columns, HYBRIDS, lambda n, s: Point(n[0], n[0], n[1], TABLE_2_CACHED, s[2] * MS, linear_s=s[3] * MS)
    )


def _read(
    name: str, columns: Sequence[str], expected: Sequence[Key], point: Callable[[list[int], list[float]], Point]
) -> list[Point]:
    """The points of a file, made from its cells as whole numbers and as they are. Raises ScenarioError for a file that
    is absent, and for one with other points than those published.
    """
    path = catalog.data(f"sarathi_osdi24/{name}", "study chunks")
    with rows.text(path) as file:
        table = rows.CsvTable(path, file, columns)
        cells = [[_cell(table, i, cell) for i, cell in enumerate(row)] for row in table.rows(None)]
    points = sorted(point([int(cell) for cell in row], row) for row in cells)
    for entry, key in zip_longest(points, expected):
        if entry is None or entry[:3] != key:
            got = entry and entry[:3]
            raise ScenarioError(f"{path}: (prompt, chunk, decodes): got {got}, expected the published {key}")
    return points


def _cell(table: rows.CsvTable, column: int, cell: str) -> float:
    """A time, which is > 0, or a whole number."""
    value, is_time = table.number(column, cell), table.columns[column] in TIMES
    if is_time and not value:
        raise table.bad(column, cell, "a number > 0")
    if not is_time and not value.is_integer():
        raise table.bad(column, cell, "a whole number")
    return value


# -- what the roofline says -------------------------------------------------------------------------------------------


def gpu() -> Hardware:
    """The A100 of the artifact: our SXM card with the memory of the PCIe one."""
    changed = {"name": "NVIDIA A100 PCIe 80GB", "memory_bandwidth_bytes_s": PCIE_BANDWIDTH}
    return shapes.hardware("a100-80gb").model_copy(update=changed)


def cost() -> Cost:
    """The roofline at our default efficiencies, of one GPU of the two."""
    workload = {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1}
    parts = {"model": SHARD, "hardware": gpu(), "workload": workload, "cost": {"kind": "roofline"}}
    return assemble.cost_model(Scenario.model_validate({"question": "How long does a step take?", **parts}))


def roofline_s(model: Cost, point: Point) -> float:
    """Seconds on the device; the CPU's phases are not in it."""
    return sum(model.gpu_ns(step, step.work.tokens)[1] for step in point.steps) * 1e-9


def linear_s(tokens: int, *, prefill: bool) -> float:
    """The roofline's seconds for the linear layers of a step."""
    share, weights = DEFAULT.compute_efficiency, SHARD.layers * SHARD.layer_parameters
    reached = gpu().flops.bfloat16 * (share.prefill if prefill else share.decode)
    read_s = weights * SHARD.dtype_bytes / (PCIE_BANDWIDTH * DEFAULT.memory_efficiency.weights)
    return max(2 * tokens * weights / reached, read_s)


def ridge_tokens(*, prefill: bool) -> float:
    """Query tokens of a step at which the linear layers' arithmetic takes as long as reading their weights."""
    return 10**6 * linear_s(0, prefill=prefill) / linear_s(10**6, prefill=prefill)


def filled(tokens: int, tile: tuple[int, int] = (256, 128)) -> float:
    """Share of the multiprocessors' time that is used when a layer's products are cut into output tiles, a wave of one
    a multiprocessor at a time: tile and wave quantisation, as NVIDIA's matrix multiplication guide has it.
    """
    wide = SHARD.head_dim * SHARD.heads
    up, kv = 2 * SHARD.intermediate, 2 * SHARD.head_dim * SHARD.kv_heads
    products = ((SHARD.hidden, up), (SHARD.intermediate, SHARD.hidden), (SHARD.hidden, wide + kv), (wide, SHARD.hidden))
    used = sum(depth * width * tokens / (tile[0] * tile[1]) / MULTIPROCESSORS for depth, width in products)
    tiles = [(depth, ceil(tokens / tile[0]) * ceil(width / tile[1])) for depth, width in products]
    return used / sum(depth * ceil(count / MULTIPROCESSORS) for depth, count in tiles)


def named(point: Point) -> str:
    """What a step holds, in a few words."""
    parts = [f"{point.prompt:,} prefill"] * bool(point.prompt) + [f"{point.decodes} decode"] * bool(point.decodes)
    return " + ".join(parts)


def overheads(answers: Sequence[Answer]) -> list[Chunked]:
    """Chunked prompts against the same prompts in one step and in chunks of `REFERENCE` tokens."""
    times = {(answer.point.prompt, answer.point.chunk): answer for answer in answers}
    against = []
    for answer in answers:
        whole, reference = times[answer.point.prompt, WHOLE], times[answer.point.prompt, REFERENCE]
        ratios = [answer.published_s / base.published_s for base in (whole, reference)]
        against.append(Chunked(answer, ratios[0], ratios[1], answer.roofline_s / whole.roofline_s))
    return against


def floor(points: Sequence[Point]) -> tuple[float, float]:
    """Fitted: seconds a step and seconds a row of a line through decode batches, least squares of relative errors."""
    size, time = np.array([p.decodes for p in points]), np.array([p.published_s for p in points])
    slope, base = np.polyfit(size, time, 1, w=1 / time)
    return float(base), float(slope)


def compared() -> Compared:
    """Every published point and what the roofline says of it. Raises ScenarioError."""
    model = cost()
    read = decodes(), prefills(), chunked(), hybrids()
    answers = [[Answer(point, roofline_s(model, point)) for point in points] for points in read]
    return Compared(answers[0], answers[1], overheads(answers[2]), answers[3], *floor(read[0]))
