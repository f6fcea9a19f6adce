"""Tables of single kernels, measured one call at a time: products of matrices, and attention of one layer.

    <path>_gemm_bf16.csv                  m, n, k, latency_ms: one product, of m tokens, n outputs and k inputs
    <path>_generation_attention_bf16.csv  batch_size, isl, step, num_heads, num_key_value_heads, head_dim, latency_ms:
                                          batch_size decoding rows, each over isl + step tokens, its own included
    <path>_context_attention_bf16.csv     the same columns: batch_size prompts of isl tokens behind step cached ones

A layer is four products (QKV, output, gate with up, down) and its attention. Nothing else is in these tables: no norms,
rotary embedding, activation, token embedding, sampler, gaps between kernels, wait for the longest row, or CPU time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

from cbsim.cost.table import Attention, Ladder, chunk_ms, pairs
from cbsim.errors import ScenarioError
from cbsim.scenario.rows import CsvTable, open_text
from cbsim.scenario.shapes import ModelShape

NS_A_MS = 1e6


class Heads(NamedTuple):
    """The attention heads of one GPU: query heads, KV heads, width of a head."""

    query: int
    kv: int
    width: int

    def __str__(self) -> str:
        return f"{self.query} query and {self.kv} KV heads of {self.width}"


class Kernels:
    """The three tables at `path`, for one of `tensor_parallel` GPUs that share `model`. Raises ScenarioError.

    A chunk takes `chunk_ms`: the causal triangle of a prompt is the sum of its parts. Chunks and decoding rows of a
    step are separate kernels; decoding rows count at their mean context.
    """

    def __init__(self, path: Path, tensor_parallel: int, model: ModelShape) -> None:
        _check(path, tensor_parallel, model)
        share, products = 1 / tensor_parallel, read_products(_file(path, "gemm"))
        queries = model.heads * model.head_dim * share
        together = queries + 2 * model.kv_heads * model.head_dim * share  # queries, keys and values
        inner = model.intermediate * share
        self._layer = (
            products.curve(together, model.hidden),
            products.curve(model.hidden, queries),
            products.curve(2 * inner, model.hidden),
            products.curve(model.hidden, inner),
        )
        self._head = products.curve(model.vocab * share, model.hidden)
        heads = Heads(model.heads // tensor_parallel, model.kv_heads // tensor_parallel, model.head_dim)
        rows = _attention(_file(path, "generation_attention"), heads)
        self._rows = [(batch, isl + step) for batch, isl, step in rows]
        self._decode = Ladder(zip(self._rows, rows.values(), strict=True))
        self._prompt = _context(_file(path, "context_attention"), heads)
        self._ns = NS_A_MS * model.layers

    def linear_ns(self, tokens: int) -> float:
        return self._ns * sum([curve(tokens) for curve in self._layer])

    def head_ns(self, rows: int) -> float:
        """Return the ns of the output head's product; no sampler was measured."""
        return NS_A_MS * self._head(rows) if rows else 0.0

    def attention_ns(self, work: Attention, *, skew: bool) -> float:
        """Return the ns of attention. Rows of unequal length were not measured, so `skew` changes nothing."""
        chunk = chunk_ms(work, self._prompt, self._decode) if work.prefill else 0.0
        return self._ns * (chunk + (self._decode(work.decodes, work.context + 1) if work.decodes else 0.0))

    def experts_ns(self, tokens: int, ranks: int) -> float:
        return 0.0

    def longest(self, decodes: int) -> float:
        """Return the tokens up to which attention of `decodes` rows was measured; 0 above the most rows measured."""
        return max((length for batch, length in self._rows if batch >= decodes), default=0.0)


class Products:
    """The milliseconds of a product [m, k] x [k, n]. Raises ScenarioError.

    In m it is linear between the measured sizes of a pair (n, k). Between pairs it is a power law in n and in k: linear
    in log n, log k and log time. Below the first n or k the first holds; beyond the last, time grows in proportion.
    """

    def __init__(self, path: Path, points: Mapping[tuple[float, float], Mapping[float, float]]) -> None:
        """Take `points`, by (n, k) the milliseconds by m, as read from `path`."""
        self._path, self._points = path, points
        if not points:
            raise ScenarioError(f"{path}: holds no rows")
        self._n, self._k = (sorted({pair[axis] for pair in points}) for axis in (0, 1))

    def curve(self, n: float, k: float) -> MeanCurve:
        """Return the milliseconds of the product of that shape, by m."""
        corners = [
            (self._ladder(n_, k_), in_n * in_k) for n_, in_n in _around(self._n, n) for k_, in_k in _around(self._k, k)
        ]
        return MeanCurve(corners, max(1.0, n / self._n[-1]) * max(1.0, k / self._k[-1]))

    def _ladder(self, n: float, k: float) -> Ladder:
        if (n, k) not in self._points:
            raise ScenarioError(f"{self._path}: no rows with n = {n:g} and k = {k:g}, which the model's shape needs")
        return Ladder(((m,), ms) for m, ms in self._points[n, k].items())


class MeanCurve(NamedTuple):
    """A weighted geometric mean of measured curves, times a factor."""

    parts: Sequence[tuple[Ladder, float]]
    factor: float

    def __call__(self, m: float) -> float:
        time = self.factor
        for ladder, weight in self.parts:
            time *= ladder(m) ** weight
        return time


def _around(grid: Sequence[float], x: float) -> list[tuple[float, float]]:
    """Return the neighbours of x in `grid`, with their weights on a logarithmic scale."""
    index = bisect_right(grid, x)
    low = grid[max(index - 1, 0)]
    if index in (0, len(grid)) or low == x:
        return [(low, 1.0)]
    share = log(x / low) / log(grid[index] / low)
    return [(low, 1 - share), (grid[index], share)]


def _file(path: Path, kernel: str) -> Path:
    return path.with_name(f"{path.name}_{kernel}_bf16.csv")


def _check(path: Path, tensor_parallel: int, model: ModelShape) -> None:
    if model.experts:
        problem = f"got {path}, which holds no experts, and {model.name} has {model.experts}; use a dense model"
        raise ScenarioError(f"cost.path: {problem} or vLLM layer profiles")
    if model.dtype_bytes != 2:
        raise ScenarioError(f"model.dtype: got {model.dtype}, must be bfloat16 or float16: {path} was measured in bf16")
    for field in ("weights_dtype", "kv_dtype"):
        if getattr(model, field):
            raise ScenarioError(
                f"model.{field}: got {getattr(model, field)}, must be null: {path} was measured in bf16"
            )
    if model.heads % tensor_parallel or model.kv_heads % tensor_parallel:
        problem = f"must divide heads ({model.heads}) and kv_heads ({model.kv_heads})"
        raise ScenarioError(f"cost.tensor_parallel: got {tensor_parallel}, {problem} with the tables {path}")


def numbers(path: Path, columns: Sequence[str]) -> list[list[float]]:
    """Return these columns of a CSV file, row by row. Raises ScenarioError, also if there is no row."""
    with open_text(path) as file:
        table = CsvTable(path, file, columns)
        rows = [[table.number(i, cell) for i, cell in enumerate(row)] for row in table.rows(None)]
    if not rows:
        raise ScenarioError(f"{path}: holds no rows")
    return rows


def read_products(path: Path) -> Products:
    """Return the products of one type in the file at `path`. Raises ScenarioError."""
    points: dict[tuple[float, float], dict[float, float]] = defaultdict(dict)
    for m, n, k, ms in numbers(path, ("m", "n", "k", "latency_ms")):
        points[n, k][m] = ms
    return Products(path, points)


def _attention(path: Path, heads: Heads) -> dict[tuple[float, float, float], float]:
    """Return milliseconds by (batch_size, isl, step), for these heads."""
    columns = ("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "latency_ms")
    by_heads: dict[Heads, dict[tuple[float, float, float], float]] = defaultdict(dict)
    for batch, isl, step, query, kv, width, ms in numbers(path, columns):
        by_heads[Heads(int(query), int(kv), int(width))][batch, isl, step] = ms
    if heads not in by_heads:
        known = "; ".join(map(str, sorted(by_heads)))
        raise ScenarioError(f"{path}: no rows of {heads} a GPU (found: {known})")
    return by_heads[heads]


def _context(path: Path, heads: Heads) -> Ladder:
    """Return milliseconds by the query-key pairs of one prompt without a cache."""
    times = {(pairs(isl),): ms for (batch, isl, step), ms in _attention(path, heads).items() if (batch, step) == (1, 0)}
    if not times:
        raise ScenarioError(f"{path}: no rows of {heads} with batch_size 1 and step 0")
    return Ladder(times.items())
