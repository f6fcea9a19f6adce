"""The cost model `table`: a step takes the sum of its kernels' measured times and of times that the scenario adds.

Measured: linear layers and small kernels by query tokens, attention by what it reads, head and sampler by rows, experts
by tokens. Added: ring all-reduces of tensor parallelism and the exchange of tokens between expert-parallel GPUs, from
latency and bandwidth of the link; and times a step, a layer and a row for what no table holds.

A step's chunks count as one chunk of as many query tokens and as many query-key pairs; where that would need a negative
cache, as the uncached chunk with as many pairs. A single chunk is unchanged. A chunk of one token is a decoding row, as
in the profiles.

`Tables` are measured kernel times of one GPU, of whole steps, all layers counted. A `Ladder` interpolates linearly in a
measured table of any number of axes, whose grid need not be full. The table is a tree, one level an axis: under each
value of an axis are the values of the next one that were measured with it. A point is interpolated level by level
between two neighbours. Below the first value the first holds; above the last the line through the last two goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from math import sqrt
from typing import NamedTuple, Protocol

from cbsim.cost.base import NS, cpu_cost
from cbsim.policy.plan import StepPlan
from cbsim.scenario.costs import TableSettings


class Link(NamedTuple):
    """The link between the GPUs of a group: nanoseconds a message, bytes a nanosecond."""

    latency_ns: float
    bytes_ns: float

    def all_reduce_ns(self, size_bytes: float, ranks: int) -> float:
        """Return the ns of a ring: 2 (p - 1) messages of a p-th of the data."""
        return 2 * (ranks - 1) * (self.latency_ns + size_bytes / ranks / self.bytes_ns)

    def gather_ns(self, sizes_bytes: Sequence[float]) -> float:
        """Return the ns of an all-gather of so much from each, or a reduce-scatter back: p - 1 messages of mean size.
        The two directions of a link share it: one that carries less leaves its part to the other.
        """
        ranks = len(sizes_bytes)
        return (ranks - 1) * (self.latency_ns + sum(sizes_bytes) / ranks / self.bytes_ns)


def attention_work(plan: StepPlan) -> Attention:
    """Return the attention work of `plan`, its chunks merged into one."""
    work = plan.work
    decodes = work.decodes + work.padding_rows
    context, longest = work.decode_context + work.padding_context, work.longest_context
    prefill, pairs = 0, 0.0
    for chunk in work.chunks:
        tokens, start = chunk.tokens + chunk.padding, chunk.start
        if tokens == 1:
            decodes, context, longest = decodes + 1, context + start, max(longest, start)
        else:
            prefill += tokens
            pairs += tokens * start + tokens * (tokens + 1) / 2
    mean = context / decodes if decodes else 0.0
    return one_chunk(prefill, pairs, Attention(0.0, 0.0, decodes, mean, longest))


def one_chunk(prefill: int, pairs: float, rows: Attention) -> Attention:
    """Return the work of `rows` with a chunk of so many query tokens and query-key pairs."""
    if not prefill:
        return rows
    cached = pairs / prefill - (prefill + 1) / 2
    if cached >= 0:
        return rows._replace(prefill=prefill, cached=cached)
    return rows._replace(prefill=(sqrt(1 + 8 * pairs) - 1) / 2)


class TableCost:
    """A table cost model of `layers` layers, and of `row_bytes` bytes of residual stream a token."""

    def __init__(self, tables: Tables, settings: TableSettings, layers: int, row_bytes: int) -> None:
        self.cpu_ns, self.launch_ns = cpu_cost(settings.cpu), round(settings.launch_s_per_layer * layers * NS)
        self._tables, self._tensor, self._layers, self._row_bytes = tables, settings.tensor_parallel, layers, row_bytes
        link = settings.link
        self._link = Link(link.latency_s * NS, link.bytes_s / NS) if link else None
        self._step_ns, self._row_ns = (settings.step_s + settings.layer_s * layers) * NS, settings.row_s * NS
        self._linear_ns, self._head_ns, self._skew = cache(tables.linear_ns), cache(tables.head_ns), settings.skew

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        return 0, self.lockstep_ns([plan], [tokens]), 0

    def lockstep_ns(self, plans: Sequence[StepPlan], tokens: Sequence[int]) -> int:
        """Return the ns of kernels of a step that data-parallel GPUs take together, computing so many query tokens
        each; the first of them have the work of `plans`, the others none.

        Every layer ends with an exchange, so all take as long as the slowest.
        """
        own = max((self._own_ns(*at) for at in zip(plans, tokens, strict=False) if at[0].work.rows), default=-1.0)
        if own < 0:
            return 0
        ranks = len(tokens)
        experts = self._tables.experts_ns(-(-sum(tokens) // ranks), ranks)
        return round(own + experts + self._exchange_ns(tokens) + self._step_ns)

    def _own_ns(self, plan: StepPlan, tokens: int) -> float:
        work = plan.work
        rows = work.rows + work.padding_rows
        attention = self._tables.attention_ns(attention_work(plan), skew=self._skew)
        return self._linear_ns(tokens) + attention + self._head_ns(rows) + rows * self._row_ns

    def _exchange_ns(self, tokens: Sequence[int]) -> float:
        """Return the ns of two all-reduces a layer (tensor-parallel), a gather and a scatter (expert-parallel)."""
        link = self._link
        if link is None:
            return 0.0
        sizes = [count * self._row_bytes for count in tokens]
        reduced = 2 * link.all_reduce_ns(max(sizes), self._tensor) if self._tensor > 1 else 0.0
        gathered = 2 * link.gather_ns(sizes) if len(sizes) > 1 else 0.0
        return self._layers * (reduced + gathered)


class Attention(NamedTuple):
    """The attention work of a step: chunks merged into one of `prefill` query tokens behind `cached` tokens of context;
    `decodes` rows, which read `context` cached tokens on average, the longest of them `longest`.
    """

    prefill: float
    cached: float
    decodes: int
    context: float
    longest: float


def pairs(tokens: float) -> float:
    """Return the query-key pairs of a prompt, which the time of long ones is proportional to."""
    return tokens * (tokens + 1) / 2


class Measured(Protocol):
    """A function from a point of a measured table to milliseconds."""

    def __call__(self, *at: float) -> float: ...


def chunk_ms(work: Attention, prompt: Measured, decode: Measured) -> float:
    """Return the ms of a chunk's attention: its whole prompt's less the cached part's, and at least that of a chunk
    without cache and of one decoding row that reads as much. `prompt` is by pairs, `decode` by rows and tokens.
    """
    alone, end = prompt(pairs(work.prefill)), work.cached + work.prefill
    if not work.cached:
        return alone
    return max(alone, prompt(pairs(end)) - prompt(pairs(work.cached)), decode(1, end))


class Tables(Protocol):
    """A source of kernel times in ns on one GPU of a tensor-parallel group, as measured; nothing is added to them."""

    def linear_ns(self, tokens: int) -> float:
        """Return the time that depends on the number of query tokens: embedding, linear layers, any small kernels."""

    def head_ns(self, rows: int) -> float:
        """Return the time of the output head and the sampler, for `rows` rows."""

    def attention_ns(self, work: Attention, *, skew: bool) -> float:
        """Return the time of attention in all layers; `skew` adds the wait for the longest decoding row if measured."""

    def experts_ns(self, tokens: int, ranks: int) -> float:
        """Return the time of the mixture-of-experts blocks of all layers, on one of `ranks` GPUs that share the experts
        and bring `tokens` tokens each; 0 for a dense model.
        """


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
