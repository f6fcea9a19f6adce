"""`table`: a step takes the sum of its kernels' measured times, and of what is stated to be added to them.

Measured: linear layers and small kernels by query tokens, attention by what it reads, head and sampler by rows, experts
by tokens. Added: ring all-reduces of tensor parallelism and the exchange of tokens between expert-parallel GPUs, from
latency and bandwidth of the link; and times a step, a layer and a row for what no table holds.

A step's chunks count as one chunk of as many query tokens and as many query-key pairs; where that would take a negative
cache, as the uncached chunk with as many pairs. One chunk is itself. A chunk of one token is a decoding row, as in the
profiles.

`Tables` are measured kernel times of one GPU, of whole steps, all layers counted. A `Ladder` interpolates linearly in a
measured table of any number of axes, whose grid need not be full. The table is a tree, one level an axis: under each
value of an axis lie the values of the next one that were measured with it. A point is found level by level between the
two neighbours there. Below the first value the first holds; above the last the line through the last two goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import sqrt
from typing import NamedTuple, Protocol

from cbsim.cost.base import CpuCost
from cbsim.policy.plan import StepPlan


class Link(NamedTuple):
    """Between the GPUs of a group: nanoseconds a message, bytes a nanosecond."""

    latency_ns: float
    bytes_ns: float

    def all_reduce_ns(self, size_bytes: float, ranks: int) -> float:
        """Ring: 2 (p - 1) messages of a p-th of the data."""
        return 2 * (ranks - 1) * (self.latency_ns + size_bytes / ranks / self.bytes_ns)

    def gather_ns(self, sizes_bytes: Sequence[float]) -> float:
        """All-gather of so much from each, or a reduce-scatter back: p - 1 messages of the mean size. The two ways of a
        link share it: one that carries less leaves its part to the other.
        """
        ranks = len(sizes_bytes)
        return (ranks - 1) * (self.latency_ns + sum(sizes_bytes) / ranks / self.bytes_ns)


class Group(NamedTuple):
    """The GPUs that compute together: `tensor` share every layer, of `layers` layers and a residual of `row_bytes`."""

    tensor: int
    layers: int
    row_bytes: int  # of the residual stream, a token
    link: Link | None


class Added(NamedTuple):
    """What no table holds, nanoseconds: of a step (with that of its layers), and of a row of it."""

    step_ns: float = 0.0
    row_ns: float = 0.0


def attention_work(plan: StepPlan) -> Attention:
    """What attention has to do in `plan`, its chunks taken together."""
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
    if not prefill:
        return Attention(0.0, 0.0, decodes, mean, longest)
    cached = pairs / prefill - (prefill + 1) / 2
    if cached >= 0:
        return Attention(prefill, cached, decodes, mean, longest)
    return Attention((sqrt(1 + 8 * pairs) - 1) / 2, 0.0, decodes, mean, longest)


class TableCost:
    """`launch_ns` is the CPU time to launch a step's kernels one by one; `skew` waits for the longest decoding row."""

    def __init__(
        self, cpu: CpuCost, tables: Tables, group: Group, added: Added, *, skew: bool, launch_ns: float
    ) -> None:
        self.cpu_ns = cpu
        self._tables, self._group, self._added = tables, group, added
        self._skew, self._launch_ns = skew, round(launch_ns)

    def gpu_ns(self, plan: StepPlan, tokens: int) -> tuple[int, int, int]:
        return 0, self.lockstep_ns([plan], [tokens]), 0

    def lockstep_ns(self, plans: Sequence[StepPlan], tokens: Sequence[int]) -> int:
        """Kernels of a step that data-parallel GPUs take together, computing so many query tokens each; the first of
        them have the work of `plans`, the others none.

        Every layer ends with an exchange, so all take what the slowest takes.
        """
        own = max((self._own_ns(*at) for at in zip(plans, tokens, strict=False) if at[0].work.rows), default=-1.0)
        if own < 0:
            return 0
        ranks = len(tokens)
        experts = self._tables.experts_ns(-(-sum(tokens) // ranks), ranks)
        return round(own + experts + self._exchange_ns(tokens) + self._added.step_ns)

    def _own_ns(self, plan: StepPlan, tokens: int) -> float:
        work = plan.work
        rows = work.rows + work.padding_rows
        attention = self._tables.attention_ns(attention_work(plan), skew=self._skew)
        return self._tables.linear_ns(tokens) + attention + self._tables.head_ns(rows) + rows * self._added.row_ns

    def _exchange_ns(self, tokens: Sequence[int]) -> float:
        """Two all-reduces a layer between tensor-parallel GPUs, a gather and a scatter between expert-parallel ones."""
        tensor, layers, row_bytes, link = self._group
        if link is None:
            return 0.0
        sizes = [count * row_bytes for count in tokens]
        reduced = 2 * link.all_reduce_ns(max(sizes), tensor) if tensor > 1 else 0.0
        gathered = 2 * link.gather_ns(sizes) if len(sizes) > 1 else 0.0
        return layers * (reduced + gathered)

    def eager_launch_ns(self, plan: StepPlan) -> int:
        return self._launch_ns if plan.work.rows else 0


class Attention(NamedTuple):
    """What attention has to do in a step.

    The chunks are taken together as one of `prefill` query tokens behind `cached` tokens of context; `decodes` rows
    read `context` cached tokens on average and the longest of them `longest`.
    """

    prefill: float
    cached: float
    decodes: int
    context: float
    longest: float


def pairs(tokens: float) -> float:
    """Query-key pairs of a prompt: what the time of long ones is proportional to."""
    return tokens * (tokens + 1) / 2


class Measured(Protocol):
    """Milliseconds at a point of a measured table."""

    def __call__(self, *at: float) -> float: ...


def chunk_ms(work: Attention, prompt: Measured, decode: Measured) -> float:
    """Attention of a chunk: what its whole prompt costs above the cached part, and not less than a chunk without a
    cache or than one decoding row that reads as much. `prompt` is by pairs, `decode` by rows and tokens.
    """
    alone, end = prompt(pairs(work.prefill)), work.cached + work.prefill
    if not work.cached:
        return alone
    return max(alone, prompt(pairs(end)) - prompt(pairs(work.cached)), decode(1, end))


class Tables(Protocol):
    """Nanoseconds of kernels on one GPU of a tensor-parallel group, as measured; nothing is added to them."""

    def linear_ns(self, tokens: int) -> float:
        """All that goes with the number of query tokens: embedding, linear layers, and what small kernels there are."""

    def head_ns(self, rows: int) -> float:
        """The output head and the sampler, of `rows` rows."""

    def attention_ns(self, work: Attention, *, skew: bool) -> float:
        """Attention in all layers; with `skew`, as far as measured, the wait for the longest of the decoding rows."""

    def experts_ns(self, tokens: int, ranks: int) -> float:
        """Mixture-of-experts blocks of all layers, on one of `ranks` GPUs that share the experts and bring `tokens`
        tokens each; 0 for a dense model.
        """


class Ladder:
    """`rows` are (coordinates, value), at least one, each point once, with as many coordinates as there are axes."""

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
        """The value at a point: one coordinate an axis, in order."""
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
