"""Measured kernel times, interpolated: the attention work of a step, tables of any number of axes, and the times of
kernels that add up to a step.

A step's chunks count as one chunk of as many query tokens and as many query-key pairs; where that would need a negative
cache, as the uncached chunk with as many pairs. A single chunk is unchanged. A chunk of one token is a decoding row, as
in the profiles; so is one whose other tokens are guesses: it reads its context once for all of them, and takes as long
as their pairs do in a prompt if that is longer.

A `Ladder` interpolates linearly in a measured table of any number of axes, whose grid need not be full. The table is a
tree, one level an axis: under each value of an axis are the values of the next one that were measured with it. A point
is interpolated level by level between two neighbours. Below the first value the first holds; above the last the line
through the last two goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log, sqrt
from typing import NamedTuple, Protocol

from cbsim.errors import RunError
from cbsim.policy import groups
from cbsim.policy.plan import StepPlan, StepWork
from cbsim.scenario.layers import Heads, Layer, Matrix
from cbsim.scenario.shapes import ModelShape

MOST_TIME_S = 3600.0  # of what a table holds: no kernel of a step takes longer
SPLIT_BLOCKS, SKEW_BLOCKS = 224, 37
"""Rows times KV heads of a GPU from which on a step without a chunk leaves each context to one multiprocessor (four
fifths of two blocks on each of 140, as FlashAttention 2 decides), and those up to which one that does waits as if all
rows were as long as the longest: beyond, its share of that is inversely proportional. The second is 33 to 40 on a 4090
up to 128 rows, 28 to 45 on an RTX PRO 6000; not known of FlashAttention 3 on Hopper, which splits longer rows more."""
HEAD_DIM = 128  # of the heads whose attention was measured, but for those of vLLM layer profiles


class Attention(NamedTuple):
    """The attention work of a step: chunks merged into one of `prefill` query tokens behind `cached` tokens of context;
    `decodes` rows, which read `context` cached tokens on average, the longest of them `longest`. They have `guesses`
    query tokens beside one each; those that have some make `pairs` query-key pairs.
    """

    prefill: float
    cached: float
    decodes: int
    context: float
    longest: float
    guesses: int = 0
    pairs: int = 0


def attention_work(plan: StepPlan, kind: groups.Attention = groups.FULL) -> Attention:
    """Return the attention work of `plan` in layers that see `kind`, its chunks merged into one. Raises RunError."""
    work = plan.work
    decodes = work.decodes + work.padding_rows
    context, longest = counted(work, kind), kind.seen(work.longest_context, 1) - 1
    prefill = pairs = guesses = guessed = 0
    for chunk in work.chunks:
        tokens, start = chunk.tokens + chunk.padding, chunk.start
        if chunk.reads_once:
            cached = kind.seen(start, tokens) - 1
            decodes, context, longest = decodes + 1, context + cached, max(longest, cached)
            if tokens > 1:
                guesses, guessed = guesses + tokens - 1, guessed + kind.pairs(start, tokens)
        else:
            prefill, pairs = prefill + tokens, pairs + kind.pairs(start, tokens)
    rows = Attention(0.0, 0.0, decodes, context / decodes if decodes else 0.0, longest, guesses, guessed)
    if not prefill:
        return rows
    before = pairs / prefill - (prefill + 1) / 2
    if before >= 0:
        return rows._replace(prefill=prefill, cached=before)
    return rows._replace(prefill=(sqrt(1 + 8 * pairs) - 1) / 2)


def counted(work: StepWork, kind: groups.Attention) -> int:
    """Return the cached tokens that rows of a decode batch read in layers that see `kind`. Of a window it is exact if
    all or none of them are longer. Raises RunError: their sum says nothing of chunks.
    """
    context = work.decode_context + work.padding_context
    if not kind.span:
        return context
    if kind.sight is groups.Sight.CHUNKED and work.decodes:
        raise RunError("rows of a decode batch do not say what chunked layers see of them: list them one by one")
    return min(context, (work.decodes + work.padding_rows) * (kind.span - 1))


def pairs(tokens: float) -> float:
    """Return the query-key pairs of a prompt, which the time of long ones is proportional to."""
    return tokens * (tokens + 1) / 2


def reached(share: float, tokens: float) -> float:
    """Return the expected share of experts that `tokens` tokens reach, if each goes through `share` of them and all
    sets are equally likely.
    """
    return float(1 - (1 - share) ** tokens)


class Measured(Protocol):
    """A function from a point of a measured table to its value."""

    def __call__(self, *at: float) -> float: ...


class Ladder:
    """An interpolated table. `rows` are (coordinates, value), at least one, each point once, a coordinate an axis."""

    __slots__ = ("_keys", "_rungs")

    def __init__(self, rows: Iterable[tuple[Sequence[float], float]]) -> None:
        grouped: dict[float, list[tuple[Sequence[float], float]]] = {}
        for at, value in rows:
            grouped.setdefault(at[0], []).append((at[1:], value))
        self._keys = sorted(grouped)
        self._rungs: list[Ladder | float] = [self._rung(grouped[key]) for key in self._keys]

    @staticmethod
    def _rung(rows: list[tuple[Sequence[float], float]]) -> Ladder | float:
        (rest, value), *more = rows
        if rest:
            return Ladder(rows)
        assert not more, rows
        return value

    def __call__(self, *at: float) -> float:
        """Return the value at a point: one coordinate an axis, in order."""
        keys, rungs, x = self._keys, self._rungs, at[0]
        index = bisect_right(keys, x)
        if index == 0 or len(keys) == 1:
            return self._value(rungs[0], at)
        if index == len(keys):
            if x == keys[-1]:
                return self._value(rungs[-1], at)
            index -= 1
        low, high = keys[index - 1], keys[index]
        below = self._value(rungs[index - 1], at)
        if x == low:
            return below
        return below + (x - low) / (high - low) * (self._value(rungs[index], at) - below)

    @staticmethod
    def _value(rung: Ladder | float, at: tuple[float, ...]) -> float:
        return rung(*at[1:]) if isinstance(rung, Ladder) else rung


def neighbours(grid: Sequence[float], x: float) -> list[tuple[int, float]]:
    """Return the indices of the neighbours of x in `grid`, and their weights on a logarithmic scale."""
    above = bisect_right(grid, x)
    low = max(above - 1, 0)
    if above in (0, len(grid)) or grid[low] == x:
        return [(low, 1.0)]
    weight = log(x / grid[low]) / log(grid[above] / grid[low])
    return [(low, 1 - weight), (above, weight)]


Curve = Callable[[float], float]
Exchange = Callable[[Sequence[int], bool], float]
"""What the exchange of tokens before and after experts takes, by the tokens of each rank, and whether all only decode.
"""
LAUNCHES = ("graph", "eager")  # of all-reduces: in a graph, or by themselves


class Attended(NamedTuple):
    """The attention of all layers of one kind, which see `sees`: functions to units of which each is `unit_ns` ns in
    those layers; `decode` by rows and context, `prompt` by the query-key pairs of a prompt. `kv` are a GPU's KV heads,
    0 for a latent, whose kernels share out all rows' tokens evenly. `whole`: the functions are of attention with its
    matrices, and `prompt` is by query tokens and their mean context.
    """

    sees: groups.Attention
    unit_ns: float
    decode: Measured
    prompt: Measured
    kv: float
    whole: bool = False

    def rows_ns(self, work: Attention, *, skew: bool) -> float:
        """Return the ns of a step's decoding rows: at their mean context or, with `skew`, between that and all at the
        longest, unless contexts are split because few rows decode alone. If `whole`, a guess is a row of its own.
        """
        if self.whole:
            return self.decode_ns(work.decodes + work.guesses, work.context + 1)
        mean, blocks = self.decode_ns(work.decodes, work.context + 1), work.decodes * self.kv
        if skew and blocks and work.longest > work.context and (blocks >= SPLIT_BLOCKS or work.prefill):
            mean += min(1.0, SKEW_BLOCKS / blocks) * (self.decode_ns(work.decodes, work.longest + 1) - mean)
        return max(mean, self.unit_ns * self.prompt(work.pairs)) if work.pairs else mean

    def decode_ns(self, rows: int, context: float) -> float:
        """Return the ns of decoding rows, each over `context` tokens, its own included."""
        return self.unit_ns * self.decode(rows, context) if rows else 0.0

    def prompt_ns(self, work: Attention, tokens: int = 0, *, graph: bool = False) -> float:
        """Return the ns of a chunk: its whole prompt's less the cached part's, and at least that of a chunk without
        cache and of one decoding row that reads as much. If `whole`, of chunks of `tokens` together; in a `graph`,
        where no launches are paid, at most that of as many decoding rows.
        """
        if not work.prefill:
            return 0.0
        if self.whole:
            at = tokens, (work.prefill * work.cached + pairs(work.prefill)) / tokens
            return self.unit_ns * (min(self.prompt(*at), self.decode(*at)) if graph else self.prompt(*at))
        alone, end = self.prompt(pairs(work.prefill)), work.cached + work.prefill
        if work.cached:
            alone = max(alone, self.prompt(pairs(end)) - self.prompt(pairs(work.cached)), self.decode(1, end))
        return self.unit_ns * alone


def counts(
    model: ModelShape, tensor: int, *, modules: bool
) -> tuple[Mapping[Matrix, int], Mapping[tuple[Heads, bool], int]]:
    """Return how many of all layers' matrices are alike, without experts, and of their heads, each with whether it is
    given as a whole.
    """
    matrices: Counter[Matrix] = Counter()
    heads: Counter[tuple[Heads, bool]] = Counter()
    for layer, count in model.kinds:
        whole = modules and layer.attention.indexer is not None
        for matrix in layer.feed_forward.matrices(model.hidden, tensor) if whole else layer.matrices(tensor):
            matrices[matrix] += count
        for each in [layer.attention] if whole else layer.attention.parts(tensor):
            heads[each, whole] += count
    return matrices, heads


class KernelTimes:
    """The times of kernels on one of `tensor` GPUs that share `model`, made of functions to units of `unit_ns`.

    `product` is given a matrix and returns times by tokens; `experts` is given layers of one kind and returns theirs by
    tokens. `attention` is given heads and returns what decoding rows take, by rows and context, and a prompt, by
    query-key pairs; of states, by rows, and by sequences and their tokens. All-reduces, by how they are launched, and
    the all-gather of the head are by elements. `exchange` of ranks that share experts is given layers of one kind; None
    for one rank. `modules`: the attention of heads with an indexer is given as a whole, its matrices and all between
    them included.
    """

    def __init__(
        self,
        model: ModelShape,
        tensor: int,
        unit_ns: float,
        *,
        product: Callable[[Matrix], Curve],
        experts: Callable[[Layer], Curve],
        attention: Callable[[Heads], tuple[Measured, Measured]],
        reduce: Mapping[str, Curve],
        gather: Curve | None,
        exchange: Callable[[Layer], Exchange] | None = None,
        modules: bool = False,
    ) -> None:
        matrices, heads = counts(model, tensor, modules=modules)
        self._linear = [(count, product(matrix)) for matrix, count in matrices.items()]
        mixed = [(layer, count) for layer, count in model.kinds if layer.feed_forward.experts]
        self._experts = [(count, experts(layer)) for layer, count in mixed]
        self._exchanges = [(count, exchange(layer)) for layer, count in mixed] if exchange else []
        self.exchanges = 2 * sum([count for count, _ in self._exchanges])  # of a step: before experts and after them
        self.attended = [
            Attended(each.sees, unit_ns * count, *attention(each), each.split(tensor), whole)
            for (each, whole), count in heads.items()
            if each.state is None
        ]
        self._states = [(unit_ns * count, *attention(each)) for (each, _), count in heads.items() if each.state]
        self.modules = modules
        self._head = product(Matrix(model.vocab / tensor, model.hidden, model.dtype)) if model.vocab else None
        self._reduce, self._gather, self._unit_ns = reduce, gather, unit_ns
        self._hidden, self._vocab = model.hidden, model.vocab

    def linear_ns(self, tokens: int) -> float:
        """Return the ns of the matrix products of all layers except those of experts."""
        return self._unit_ns * sum([count * curve(tokens) for count, curve in self._linear])

    def states_ns(self, work: StepWork) -> float:
        """Return the ns of layers that keep states: of rows of one token, and of chunks, each of the mean length."""
        if not self._states:
            return 0.0
        lengths = [chunk.tokens + chunk.padding for chunk in work.chunks]
        prompts = [tokens for tokens in lengths if tokens > 1]
        rows = work.decodes + work.padding_rows + len(lengths) - len(prompts)
        time = 0.0
        for unit_ns, decode, prompt in self._states:
            time += unit_ns * decode(rows) if rows else 0.0
            time += unit_ns * prompt(len(prompts), sum(prompts) / len(prompts)) if prompts else 0.0
        return time

    def experts_ns(self, tokens: int) -> float:
        """Return the ns of the experts of all layers and of their routing."""
        return self._unit_ns * sum([count * curve(tokens) for count, curve in self._experts])

    def exchange_ns(self, tokens: Sequence[int], *, decode: bool) -> float:
        """Return the ns of the exchange of so many tokens of each rank in all layers with experts."""
        return self._unit_ns * sum([count * of(tokens, decode) for count, of in self._exchanges])

    def head_ns(self, rows: int) -> float:
        """Return the ns of the output head's product and of the all-gather of its shares."""
        if not rows or self._head is None:
            return 0.0
        return self._unit_ns * (self._head(rows) + (self._gather(rows * self._vocab) if self._gather else 0.0))

    def reduce_ns(self, tokens: int, *, graph: bool) -> float:
        """Return the ns of one all-reduce of the residual stream, in a graph or launched by itself; 0 on one GPU."""
        curve = self._reduce.get(LAUNCHES[not graph])
        return self._unit_ns * curve(tokens * self._hidden) if curve else 0.0
