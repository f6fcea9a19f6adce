"""`table`: a step takes the sum of its kernels' measured times, and of what is stated to be added to them.

Measured: linear layers and small kernels by query tokens, attention by what it reads, head and sampler by rows, experts
by tokens. Added: ring all-reduces of tensor parallelism and the exchange of tokens between expert-parallel GPUs, from
latency and bandwidth of the link; and times a step, a layer and a row for what no table holds.

A step's chunks count as one chunk of as many query tokens and as many query-key pairs; where that would take a negative
cache, as the uncached chunk with as many pairs. One chunk is itself. A chunk of one token is a decoding row, as in the
profiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from cbsim.cost.cpu import CpuCost
from cbsim.cost.lookup import Attention, Tables
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
