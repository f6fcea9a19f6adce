"""Efficiency curves of cards: the shares of their data sheets that measured kernels reach, and times by them.

A kernel's bound is the longer of its arithmetic and its memory traffic by the data sheet. Its time is the bound over
the share that kernels of its kind and size reached where they were measured:

    product [m, k] x [k, n]   by type, n, k and m
    decode attention          by rows x KV heads and context: groups of query heads share a read of the cache
    prompt attention          by query heads and tokens
    experts                   by type, shape and tokens; the shape nearest to the model's
    all-reduce                by GPUs and bytes, in a graph and launched by itself

`reports/fidelity/curves/make.py` distils them from the kernel tables of a card into `scenarios/curves`. Over sizes,
shares are interpolated linearly in their logarithms; times over tokens, rows and contexts linearly between the points
of a grid, as tables are. A card without curves takes the weighted mean of what those of the others say, scaled by data
sheet: the nearer, the heavier.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import exp, inf, log
from typing import Any, NamedTuple

from cbsim.cost.table import Attention, Ladder, chunk_ms, pairs
from cbsim.scenario import catalog
from cbsim.scenario.shapes import DTYPE_BYTES, GROUPED, Hardware, ModelShape

FOLDER = "curves"
FAR = 5.0  # the sum of the logarithms of three ratios, from which on a data sheet says nothing about shares
NEAR = 0.1  # a distance below which cards count alike
GATHER = 0.5  # an all-gather moves half of what an all-reduce of as many bytes does
Curves = Mapping[str, Any]  # of a card, as its file has them


class Sheet(NamedTuple):
    """The rates of a GPU by its data sheet, a nanosecond: FLOP by type, bytes of memory and of the link."""

    flops: Mapping[str, float]
    bytes: float
    link: float

    def distance(self, other: Sheet) -> float:
        """Return how far apart two data sheets are: the sum of the logarithms of the ratios of their rates."""
        flops = self.flops["bfloat16"], other.flops["bfloat16"]
        return sum(abs(log(a / b)) for a, b in (flops, (self.bytes, other.bytes), (self.link, other.link)))


def sheet(gpu: Hardware) -> Sheet:
    """Return the rates of a GPU's data sheet."""
    wide, narrow = gpu.flops.bfloat16 / 1e9, (gpu.flops.float8 or gpu.flops.bfloat16) / 1e9
    flops = dict.fromkeys((*DTYPE_BYTES, *GROUPED), wide) | {"float32": gpu.flops.float32 / 1e9}
    flops |= {"float16": gpu.flops.float16 / 1e9, "fp8": narrow, "fp8_block": narrow, "nvfp4": narrow}
    return Sheet(flops, gpu.memory_bandwidth_bytes_s / 1e9, (gpu.link_bytes_s or gpu.pcie_bytes_s) / 1e9)


class Work(NamedTuple):
    """What a kernel does: FLOP in a type, and bytes that it reads and writes."""

    flop: float
    bytes: float
    dtype: str

    def bound_ns(self, of: Sheet) -> float:
        return max(self.flop / of.flops[self.dtype], self.bytes / of.bytes)


At = tuple[float, ...]
Points = Sequence[tuple[At, float]]


def weight_bytes(dtype: str) -> float:
    """Return the bytes of a weight of that type."""
    size, group = GROUPED.get(dtype) or (DTYPE_BYTES[dtype], 1)
    return size / group


class Source(NamedTuple):
    """A card's curves, the rates of its data sheet, and the weight of what they say."""

    curves: Curves
    sheet: Sheet
    weight: float


@lru_cache(maxsize=64)
def sources(gpu: Hardware, without: str = "") -> Sequence[Source]:
    """Return the curves that say how fast a GPU is, with weights that sum to 1: its own; or else those of all cards
    with whole tables, by the inverse square of the distance of their data sheets. Empty if even the nearest is far.
    `without` leaves a card out, by its name.
    """
    cards = [(each, sheet(Hardware.model_validate(each["hardware"]))) for each in every()]
    cards = [(each, of) for each, of in cards if each["hardware"]["name"] != without]
    own = [card for card in cards if card[0]["hardware"]["name"] == gpu.name]
    cards = own or [(each, of) for each, of in cards if each["engines"]["vllm"]["reduce"]]
    distances = [sheet(gpu).distance(of) for _, of in cards]
    if min(distances, default=inf) > FAR:
        return []
    weights = [max(distance, NEAR) ** -2 for distance in distances]
    return [Source(*card, weight / sum(weights)) for card, weight in zip(cards, weights, strict=True)]


@lru_cache(maxsize=1)
def every() -> Sequence[Curves]:
    """Return the curves of all cards that come with the project."""
    return [json.loads(path.read_text()) for path in sorted((catalog.SCENARIOS / FOLDER).glob("*.json"))]


def errors(known: Sequence[Source], gpu: str, gpus: int) -> dict[int, float]:
    """Return what 90 % of steps are within of a card's kernel tables, as shares, by the most query tokens of a class of
    steps: of its own tables, or if there are none of the worst card's when it was left out. Empty without tables.
    """
    own = known[0].curves["hardware"]["name"] == gpu
    kinds = [source.curves["error" if own else "left_out"] for source in known if "error" in source.curves]
    bounds = [kind["1" if gpus == 1 else "more"] for kind in kinds]
    return {int(most): max(each[most] for each in bounds) for most in (bounds[0] if bounds else ())}


class Grid:
    """Shares on a grid of sizes, interpolated linearly in their logarithms; beyond an edge the edge holds."""

    def __init__(self, axes: Sequence[Sequence[float]], shares: Any) -> None:
        self._axes, self._shares = axes, shares

    def __call__(self, *at: float) -> float:
        return exp(self._log(self._shares, at, 0))

    def _log(self, shares: Any, at: Sequence[float], axis: int) -> float:
        if axis == len(at):
            return log(shares)
        grid, x = self._axes[axis], at[axis]
        above = bisect_right(grid, x)
        low = max(above - 1, 0)
        first = self._log(shares[low], at, axis + 1)
        if above in (0, len(grid)) or grid[low] == x:
            return first
        weight = log(x / grid[low]) / log(grid[above] / grid[low])
        return first + weight * (self._log(shares[above], at, axis + 1) - first)


class CurveTimes:
    """Times of kernels on one of `tensor` GPUs that share `model`, by curves and the data sheet of the GPU. They have
    the methods of `engine_tables.EngineTables`. Where a card has no curves of `engine`, vLLM's stand for it.
    """

    def __init__(self, known: Sequence[Source], engine: str, gpu: Hardware, model: ModelShape, tensor: int) -> None:
        self._sources, self._engine, self._sheet, self._gpu = known, engine, sheet(gpu), gpu
        self._model, self._tensor, self._layers = model, tensor, float(model.layers)
        query, kv = model.heads / tensor, max(1.0, model.kv_heads / tensor)
        width, dtype = model.head_dim, model.weights_dtype or model.dtype
        shapes = [((query + 2 * kv) * width, model.hidden), (model.hidden, query * width)]
        if not model.experts:
            shapes += [(2 * model.intermediate / tensor, model.hidden), (model.hidden, model.intermediate / tensor)]
        self._layer = [self._product(dtype, n, k) for n, k in shapes]
        self._head = self._product(model.dtype, model.vocab / tensor, model.hidden)
        self._experts = self._expert_ladder(dtype) if model.experts else None
        self._decode, self._prompt = self._decode_ladder(kv), self._prompt_ladder(query)
        self._reduce = {launch: self._reduce_ladder(launch) for launch in ("graph", "eager")} if tensor > 1 else {}

    def linear_ns(self, tokens: int) -> float:
        """Return the ns of the matrix products of all layers except those of experts."""
        return self._layers * sum([ladder(tokens) for ladder in self._layer])

    def experts_ns(self, tokens: int) -> float:
        """Return the ns of the experts of all layers."""
        return self._layers * self._experts(tokens) if self._experts else 0.0

    def head_ns(self, rows: int) -> float:
        """Return the ns of the output head's product and of the all-gather of its shares."""
        if not rows:
            return 0.0
        size = rows * self._model.vocab * self._model.dtype_bytes
        gathered = GATHER * self._reduce["eager"](size) if self._reduce else 0.0
        return self._head(rows) + gathered

    def reduce_ns(self, tokens: int, *, graph: bool) -> float:
        """Return the ns of one all-reduce of the residual stream, in a graph or launched by itself."""
        ladder = self._reduce.get("graph" if graph else "eager")
        return ladder(tokens * self._model.hidden * self._model.dtype_bytes) if ladder else 0.0

    def decode_ns(self, rows: int, context: float) -> float:
        """Return the ns of attention of decoding rows in all layers, each over `context` tokens, its own included."""
        return self._layers * self._decode(rows, context) if rows else 0.0

    def prompt_ns(self, work: Attention) -> float:
        """Return the ns of attention of a chunk in all layers."""
        return self._layers * chunk_ms(work, self._prompt, self._decode) if work.prefill else 0.0

    def _product(self, dtype: str, n: float, k: float) -> Ladder:
        """Return the ns of the product [m, k] x [k, n] by m; without curves of a type, by the shares of bfloat16."""

        def curve(source: Source) -> Points:
            of = _typed(source.curves["products"], dtype)
            share = Grid((of["n"], of["k"], of["m"]), of["share"])
            least = product(dtype, of["n"][0], of["k"][0], 1).bound_ns(source.sheet) / of["share"][0][0][0]
            return self._scaled(source, least, [((m,), product(dtype, n, k, m), share(n, k, m)) for m in of["m"]])

        return self._mean(curve)

    def _expert_ladder(self, dtype: str) -> Ladder:
        """Return the ns of a layer's experts, by tokens: at the shares of the shape nearest to theirs."""
        model = self._model
        shape = model.hidden, model.intermediate / self._tensor, model.experts_per_token, model.experts

        def far(each: Curves) -> float:
            return sum(abs(log(ours / theirs)) for ours, theirs in zip(shape, each["shape"], strict=True))

        def curve(source: Source) -> Points:
            of = _typed(self._of_engine(source)["experts"], dtype)
            shares = min(of["curves"], key=far)["share"]
            work = [experts(dtype, shape, tokens) for tokens in of["tokens"]]
            points = [((m,), *at) for m, *at in zip(of["tokens"], work, shares, strict=True)]
            return self._scaled(source, 0.0, points)

        return self._mean(curve, "experts")

    def _decode_ladder(self, kv: float) -> Ladder:
        """Return the ns of a layer's attention of decoding rows, by rows and context."""
        model = self._model
        dtype, wide = model.kv_dtype or model.dtype, kv * model.head_dim / WIDTH

        def curve(source: Source) -> Points:
            of = _typed(self._of_engine(source)["decode"], dtype)
            share = Grid((of["rows"], of["context"]), of["share"])
            least = decode(dtype, of["rows"][0] * of["context"][0]).bound_ns(source.sheet) / of["share"][0][0]
            at = [(rows, context) for rows in of["rows"] for context in of["context"]]
            points = [((rows, n), decode(dtype, rows * wide * n), share(rows * wide, n)) for rows, n in at]
            return self._scaled(source, least, points)

        return self._mean(curve)

    def _prompt_ladder(self, query: float) -> Ladder:
        """Return the ns of a layer's attention of a prompt computed at once, by its pairs."""
        model = self._model
        dtype, wide = model.dtype, query * model.head_dim / WIDTH

        def curve(source: Source) -> Points:
            of = self._of_engine(source)["prompt"]
            share = Grid((of["heads"], of["tokens"]), of["share"])
            least = prompt(dtype, of["heads"][0] * pairs(of["tokens"][0])).bound_ns(source.sheet) / of["share"][0][0]
            points = [((pairs(n),), prompt(dtype, wide * pairs(n)), share(wide, n)) for n in of["tokens"]]
            return self._scaled(source, least, points)

        return self._mean(curve)

    def _scaled(self, source: Source, least_ns: float, points: Sequence[tuple[At, Work, float]]) -> Points:
        """Return the ns on this GPU at points whose work reached a share on the source's card. `least_ns` is what the
        smallest kernel took: launching, which no data sheet scales.
        """
        scaled = []
        for at, work, share in points:
            theirs, ours = work.bound_ns(source.sheet), work.bound_ns(self._sheet)
            launched = min(least_ns, theirs / share)
            scaled.append((at, launched + (theirs / share - launched) * ours / theirs))
        return scaled

    def _mean(self, curve: Callable[[Source], Points], part: str = "") -> Ladder:
        """Return the weighted geometric mean of the sources' curves, which have the same points; of those of all other
        cards if they need a `part` that this card was not measured for.
        """
        lacking = part and not all(self._of_engine(source)[part] for source in self._sources)
        known = sources(self._gpu, self._gpu.name) if lacking else self._sources
        curves = [(curve(source), source.weight) for source in known]
        logs = [sum(log(points[i][1]) * weight for points, weight in curves) for i in range(len(curves[0][0]))]
        return Ladder((at, exp(mean)) for (at, _), mean in zip(curves[0][0], logs, strict=True))

    def _of_engine(self, source: Source) -> Curves:
        engines: Mapping[str, Curves] = source.curves["engines"]
        return engines.get(self._engine) or engines["vllm"]

    def _reduce_ladder(self, launch: str) -> Ladder:
        """Return the ns of an all-reduce by its bytes: the least that was measured is latency, the rest by the link."""

        def curve(source: Source) -> Points:
            known = self._of_engine(source)["reduce"]
            of = known[min(known, key=lambda gpus: abs(log(int(gpus) / self._tensor)))]
            times = zip(of["bytes"], of[launch], strict=True)
            least, ratio = min(of[launch]), source.sheet.link / self._sheet.link
            return [((size,), least + (ns - least) * ratio) for size, ns in times]

        return self._mean(curve, "reduce")


def _typed(curves: Curves, dtype: str) -> Curves:
    """Return the curves of a type; for types without any those of bfloat16, or of the first type that has some."""
    known: Curves = curves.get(dtype) or curves.get("bfloat16") or next(iter(curves.values()))
    return known


WIDTH = 128  # of the heads whose attention was measured


def product(dtype: str, n: float, k: float, m: float) -> Work:
    """Return the work of the product [m, k] x [k, n] with weights of that type and activations of 16 bits."""
    return Work(2 * m * n * k, weight_bytes(dtype) * n * k + 2 * m * (n + k), dtype)


def decode(dtype: str, tokens: float) -> Work:
    """Return the work of decoding rows that read so many tokens of a KV head of WIDTH between them."""
    return Work(0.0, 2 * WIDTH * weight_bytes(dtype) * tokens, dtype)


def prompt(dtype: str, head_pairs: float) -> Work:
    """Return the work of so many query-key pairs of heads of WIDTH."""
    return Work(4 * WIDTH * head_pairs, 0.0, dtype)


def experts(dtype: str, shape: Sequence[float], tokens: float) -> Work:
    """Return the work of a layer's experts: `shape` is (hidden, inner, experts a token, experts). The experts that
    tokens reach are read; each token is computed by its own.
    """
    hidden, inner, each, total = shape
    hit = total * (1 - (1 - each / total) ** tokens)
    weights = 3 * hidden * inner
    return Work(2 * tokens * each * weights, hit * weights * weight_bytes(dtype), dtype)
