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
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import exp, inf, log
from typing import Any, NamedTuple

from cbsim.cost.table import HEAD_DIM, LAUNCHES, Exchange, KernelTimes, Ladder, Measured, neighbours, pairs, reached
from cbsim.scenario import catalog
from cbsim.scenario.layers import Heads, Layer, Matrix
from cbsim.scenario.shapes import WEIGHT_BYTES, Hardware, ModelShape

FOLDER = "curves"
FAR = 5.0  # the sum of the logarithms of three ratios, from which on a data sheet says nothing about shares
NEAR = 0.1  # a distance below which cards count alike
STATE_NS, STATE_SHARE = 5_000.0, 0.85  # of a layer with a state: the least of its decoding rows, their share beyond
SCAN_NS, SCAN_SHARE, TOKEN_NS = 20_000.0, 0.3, 50.0
"""Of its prompts: the least, the share, and what a sequence takes for each of its tokens, which follow each other. The
five numbers lie between the tables of SGLang 0.5.14 and vLLM 0.24 on Hopper and Blackwell, which are 9 % off on average
in decoding rows, and 40 % in prompts: their kernels differ."""
GATHER = 0.5  # an all-gather moves half of what an all-reduce of as many bytes does
Curves = Mapping[str, Any]  # of a card, as its file has them


class Sheet(NamedTuple):
    """The rates of a GPU by its data sheet, a nanosecond: FLOP by type, bytes of memory and of the link."""

    flops: Mapping[str, float]
    bytes: float
    link: float

    def distance(self, other: Sheet) -> float:
        """Return how far apart two data sheets are, by their rates."""
        return apart(*((of.flops["bfloat16"], of.bytes, of.link) for of in (self, other)))


def apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the sum of the logarithms of ratios of numbers."""
    return sum([abs(log(a / b)) for a, b in zip(ours, theirs, strict=True)])


def sheet(gpu: Hardware) -> Sheet:
    """Return the rates of a GPU's data sheet."""
    flops = {dtype: gpu.flops.of(dtype, "bfloat16") / 1e9 for dtype in WEIGHT_BYTES}
    flops |= {dtype: getattr(gpu.flops, dtype) / 1e9 for dtype in ("float16", "float32")}
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


class Source(NamedTuple):
    """A card's curves, the rates of its data sheet, and the weight of what they say."""

    curves: Curves
    sheet: Sheet
    weight: float


@lru_cache(maxsize=64)
def sources(gpu: Hardware, without: tuple[str, ...] = ()) -> Sequence[Source]:
    """Return the curves that say how fast a GPU is, with weights that sum to 1: its own; or else those of all cards
    with whole tables, by the inverse square of the distance of their data sheets. Empty if even the nearest is far.
    `without` leaves cards out, by their names.
    """
    cards = [(each, sheet(Hardware.model_validate(each["hardware"]))) for each in every()]
    cards = [(each, of) for each, of in cards if each["hardware"]["name"] not in without]
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


def servers(kind: str) -> tuple[list[str], dict[str, list[float]]]:
    """Return the cards of which published servers were predicted and, by metric, the mean error of each card: with its
    own curves left out (`left_out`), with those of its generation (`alone`), by `constant` shares of the data sheet.
    """
    known = [each for each in every() if "servers" in each]
    found = {metric: [each["servers"][kind][metric] for each in known] for metric in ("ttft", "tpot")}
    return [each["hardware"]["name"] for each in known], found


class Grid:
    """Shares on a grid of sizes, interpolated linearly in their logarithms; beyond an edge the edge holds."""

    def __init__(self, axes: Sequence[Sequence[float]], shares: Any) -> None:
        self._axes, self._shares = axes, shares

    def __call__(self, *at: float) -> float:
        return exp(self._log(self._shares, at, 0))

    def _log(self, shares: Any, at: Sequence[float], axis: int) -> float:
        if axis == len(at):
            return log(shares)
        near = neighbours(self._axes[axis], at[axis])
        return sum([weight * self._log(shares[index], at, axis + 1) for index, weight in near])


class CurveTimes(KernelTimes):
    """Times of kernels by curves and the data sheet of a GPU. Where a card has no curves of `engine`, vLLM's stand for
    it.
    """

    def __init__(
        self, known: Sequence[Source], engine: str, gpu: Hardware, model: ModelShape, tensor: int, ranks: int = 1
    ) -> None:
        self._sources, self._engine, self._sheet, self._gpu = known, engine, sheet(gpu), gpu
        self._model, self._tensor, self._ranks = model, tensor, ranks
        reduce = {launch: self._reduce_ladder(launch, tensor) for launch in (LAUNCHES if tensor > 1 else ())}
        super().__init__(
            model,
            tensor,
            1.0,
            product=self._product,
            experts=self._expert_ladder,
            attention=self._attention,
            reduce=reduce,
            gather=(lambda elements: GATHER * reduce["eager"](elements)) if reduce else None,
            exchange=self._exchange if ranks > 1 else None,
        )

    def _exchange(self, layer: Layer) -> Exchange:
        """Return the ns of an all-gather of all ranks' tokens and of a reduce-scatter back, each a part of an
        all-reduce.
        """
        eager = self._reduce_ladder("eager", self._ranks)
        return lambda tokens, _: 2 * GATHER * eager(sum(tokens) * layer.hidden)

    def _attention(self, heads: Heads) -> tuple[Measured, Measured]:
        if heads.state:
            return state_times(self._model, self._tensor, self._gpu, 1.0)
        return self._decode_ladder(heads), self._prompt_ladder(heads)

    def _product(self, matrix: Matrix) -> Ladder:
        """Return the ns of a product by tokens; without curves of a type, by the shares of bfloat16."""
        n, k, dtype = matrix

        def curve(source: Source) -> Points:
            of = _typed(source.curves["products"], dtype)
            return self._scaled(
                source, of, ("n", "k", "m"), partial(product, dtype), [((m,), (n, k, m)) for m in of["m"]]
            )

        return self._mean(curve)

    def _expert_ladder(self, layer: Layer) -> Ladder:
        """Return the ns of a layer's experts, by tokens: at the shares of the shape nearest to theirs."""
        part = layer.feed_forward
        inner = part.expert_inner * (part.inputs + 1) / 3  # of three matrices that weigh as much
        shape = layer.hidden, inner / (self._tensor * self._ranks), part.chosen, part.experts

        def curve(source: Source) -> Points:
            of = _typed(self._of_engine(source)["experts"], part.expert_dtype)
            nearest = min(of["curves"], key=lambda each: apart(shape, each["shape"]))
            points = [((tokens,), (tokens,)) for tokens in of["tokens"]]
            work = partial(experts, part.expert_dtype, shape)
            return self._scaled(source, {**of, **nearest}, ("tokens",), work, points, launched=False)

        return self._mean(curve, "experts")

    def _decode_ladder(self, heads: Heads) -> Ladder:
        """Return the ns of a layer's attention of decoding rows, by rows and context. No curve has a latent's: its rows
        count as KV heads that read as many bytes, and compute with all query heads.
        """
        dtype, wide = heads.stored or self._model.cache_dtype, heads.cached(self._tensor) / 2 / HEAD_DIM
        of_row = heads.decode_flop / self._tensor if heads.latent else 0.0

        def work(rows: float, context: float) -> Work:
            read = decode(dtype, rows, context)
            return Work(of_row * rows / wide * context, read.bytes, self._model.dtype)

        def curve(source: Source) -> Points:
            of = _typed(self._of_engine(source)["decode"], dtype)
            points = [((rows, n), (rows * wide, n)) for rows in of["rows"] for n in of["context"]]
            return self._scaled(source, of, ("rows", "context"), work, points)

        return self._mean(curve)

    def _prompt_ladder(self, heads: Heads) -> Ladder:
        """Return the ns of a layer's attention of a prompt computed at once, by its pairs."""
        wide = heads.pair_flop / self._tensor / (4 * HEAD_DIM)

        def curve(source: Source) -> Points:
            of = self._of_engine(source)["prompt"]
            points = [((pairs(n),), (wide, n)) for n in of["tokens"]]
            return self._scaled(source, of, ("heads", "tokens"), partial(prompt, self._model.dtype), points)

        return self._mean(curve)

    def _scaled(
        self,
        source: Source,
        of: Curves,
        axes: Sequence[str],
        work: Callable[..., Work],
        points: Sequence[tuple[At, At]],
        *,
        launched: bool = True,
    ) -> Points:
        """Return the ns on this GPU at points, by coordinates and sizes on `axes`, whose `work` reached a share on the
        source's card. What the smallest kernel took is launching, if it is `launched`: no data sheet scales that.
        """
        share, smallest = Grid([of[axis] for axis in axes], of["share"]), [of[axis][0] for axis in axes]
        least_ns = work(*smallest).bound_ns(source.sheet) / share(*smallest) if launched else 0.0
        scaled = []
        for at, sizes in points:
            theirs, ours = (work(*sizes).bound_ns(rates) for rates in (source.sheet, self._sheet))
            took = theirs / share(*sizes)
            least = min(least_ns, took)
            scaled.append((at, least + (took - least) * ours / theirs))
        return scaled

    def _mean(self, curve: Callable[[Source], Points], part: str = "") -> Ladder:
        """Return the weighted geometric mean of the sources' curves, which have the same points; of those of all other
        cards if they need a `part` that this card was not measured for.
        """
        lacking = part and not all(self._of_engine(source)[part] for source in self._sources)
        known = sources(self._gpu, (self._gpu.name,)) if lacking else self._sources
        curves = [(curve(source), source.weight) for source in known]
        logs = [sum(log(points[i][1]) * weight for points, weight in curves) for i in range(len(curves[0][0]))]
        return Ladder((at, exp(mean)) for (at, _), mean in zip(curves[0][0], logs, strict=True))

    def _of_engine(self, source: Source) -> Curves:
        engines: Mapping[str, Curves] = source.curves["engines"]
        return engines.get(self._engine) or engines["vllm"]

    def _reduce_ladder(self, launch: str, ranks: int) -> Ladder:
        """Return the ns of an all-reduce by elements: the least that was measured is latency, the rest by the link."""

        def curve(source: Source) -> Points:
            known = self._of_engine(source)["reduce"]
            of = known[min(known, key=lambda gpus: abs(log(int(gpus) / ranks)))]
            times = zip(of["bytes"], of[launch], strict=True)
            least, ratio = min(of[launch]), source.sheet.link / self._sheet.link
            return [((size / self._model.dtype_bytes,), least + (ns - least) * ratio) for size, ns in times]

        return self._mean(curve, "reduce")


def _typed(curves: Curves, dtype: str) -> Curves:
    """Return the curves of a type; for types without any those of the same width, of bfloat16, or of the first type
    that has some.
    """
    names = (dtype, dtype.partition("_")[0], "bfloat16", next(iter(curves)))
    known: Curves = next(curves[name] for name in names if name in curves)
    return known


def state_times(model: ModelShape, tensor: int, gpu: Hardware, unit_ns: float) -> tuple[Measured, Measured]:
    """Return what a layer with a state takes by a GPU's data sheet, in units of `unit_ns` ns: decoding rows, by their
    number; sequences, by number and tokens. A state is read and written once; what passes through takes memory and
    arithmetic.
    """
    of, rates = model.linear, sheet(gpu)
    assert of is not None
    state, token, flop = 2.0 * model.state_bytes(tensor), of.moved(tensor) * model.dtype_bytes, of.flop(tensor)

    def bound(sequences: float, tokens: float) -> float:
        return Work(sequences * tokens * flop, sequences * (state + tokens * token), model.dtype).bound_ns(rates)

    def rows(*at: float) -> float:
        return (STATE_NS + bound(at[0], 1) / STATE_SHARE) / unit_ns

    def prompts(*at: float) -> float:
        return (SCAN_NS + max(at[1] * TOKEN_NS, bound(*at) / SCAN_SHARE)) / unit_ns

    return rows, prompts


def product(dtype: str, n: float, k: float, m: float) -> Work:
    """Return the work of the product [m, k] x [k, n] with weights of that type and activations of 16 bits."""
    return Work(2 * m * n * k, WEIGHT_BYTES[dtype] * n * k + 2 * m * (n + k), dtype)


def decode(dtype: str, rows: float, context: float) -> Work:
    """Return the work of decoding rows of a KV head of HEAD_DIM that read so many tokens each."""
    return Work(0.0, 2 * HEAD_DIM * WEIGHT_BYTES[dtype] * (rows * context), dtype)


def prompt(dtype: str, heads: float, tokens: float) -> Work:
    """Return the work of the query-key pairs of a prompt in so many heads of HEAD_DIM."""
    return Work(4 * HEAD_DIM * (heads * pairs(tokens)), 0.0, dtype)


def experts(dtype: str, shape: Sequence[float], tokens: float) -> Work:
    """Return the work of a layer's experts: `shape` is (hidden, inner, experts a token, experts). The experts that
    tokens reach are read; each token is computed by its own.
    """
    hidden, inner, each, total = shape
    hit, weights = total * reached(each / total, tokens), 3 * hidden * inner
    return Work(2 * tokens * each * weights, hit * weights * WEIGHT_BYTES[dtype], dtype)
