"""What crosses to an executor and back: frozen values, no request state.

A plan lists what is new. Rows that merely go on decoding (one token each) are counted, not listed: `Batch` keeps them
from plan to plan, and is what an executor or a check uses when it wants every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cbsim.policy.request import Finish, RequestSpec


class Chunk(NamedTuple):
    """A row listed one by one: `tokens` query tokens of a request, behind `start` tokens already in the cache.

    `blocks` are the block ids added to its table, or the whole table when `admitted` (first chunk after the queue).
    With `samples` the row yields an output token. `recomputed` of its tokens had been computed before a preemption.
    `padding` tokens are computed to its left for nothing but shape.
    """

    spec: RequestSpec
    order: int
    start: int
    tokens: int
    blocks: tuple[int, ...]
    samples: bool
    admitted: bool = False
    resumed: bool = False
    cached: int = 0
    recomputed: int = 0
    padding: int = 0


class Preempted(NamedTuple):
    """A request that lost its blocks in this step, with the tokens computed and the blocks held until then."""

    spec: RequestSpec
    lost_tokens: int
    blocks: int


class StepPlan(NamedTuple):
    """One step. Rows run in the order chunks[:lead], the decoding rows by admission order, chunks[lead:].

    `decodes` rows go on decoding from the plans before; together they read `decode_context` cached tokens, the longest
    of them `longest_context`. `grown` gives those that got a block; `joined` decode without being listed from the next
    step on; `left` had been decoding and are no longer, as of this step. `ends` are the requests whose declared last
    token this step samples, `ended` those that have ended since the plan before: an executor forgets them.
    `replaced` gives (request, index in its table, block): since the plan before, that entry became another block of
    equal content, and the old one is free.

    Static batches compute for nothing but shape: `padding_rows` decode rows that have ended, and `padding_context` KV
    tokens beyond the requests' own. `free_blocks`, `running`, `waiting` hold after planning, and `cached_blocks`, the
    number of free blocks with content that has a key in the prefix cache.
    """

    step: int
    chunks: tuple[Chunk, ...]
    lead: int
    decodes: int
    decode_context: int
    grown: tuple[tuple[RequestSpec, int], ...]
    joined: tuple[RequestSpec, ...]
    left: tuple[RequestSpec, ...]
    ends: tuple[RequestSpec, ...]
    ended: tuple[RequestSpec, ...]
    preempted: tuple[Preempted, ...]
    prefill_tokens: int  # query tokens of the chunks
    table_blocks: int  # blocks in the tables of all rows
    new_blocks: int
    running: int
    waiting: int
    free_blocks: int
    padding_rows: int = 0
    padding_context: int = 0
    fast_decode: bool = False
    replaced: tuple[tuple[RequestSpec, int, int], ...] = ()
    cached_blocks: int = 0
    longest_context: int = 0

    @property
    def rows(self) -> int:
        return len(self.chunks) + self.decodes

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decodes

    @property
    def computed_tokens(self) -> int:
        """Query tokens that the step computes by itself, with the padding of a static batch."""
        tokens = self.prefill_tokens + self.decodes + self.padding_rows
        for chunk in self.chunks:
            tokens += chunk.padding
        return tokens


class StepResult(NamedTuple):
    """What came back: the requests that sampled a stop token. Every sampling row delivered one token."""

    stopped: tuple[RequestSpec, ...] = ()


NOTHING_STOPPED = StepResult()


class Outcome(NamedTuple):
    """What a result changed: requests that got a token one by one or ended, rows computed for nothing."""

    received: tuple[RequestSpec, ...]
    finished: tuple[tuple[RequestSpec, Finish], ...]
    wasted_rows: int


UNCHANGED = Outcome((), (), 0)


class Row(NamedTuple):
    """A row of a step, whoever listed it."""

    spec: RequestSpec
    start: int
    tokens: int
    blocks: tuple[int, ...]
    chunk: Chunk | None


class Batch:
    """The rows of every step, rebuilt from plans alone: what an executor that keeps state has to do."""

    def __init__(self) -> None:
        self._decoding: dict[RequestSpec, list[int]] = {}  # -> [order, computed]
        self._known: dict[RequestSpec, tuple[int, int]] = {}  # last listed (order, computed)

    def rows(self, plan: StepPlan) -> list[Row]:
        """Every row of `plan`, in order. Call it once for every plan, in order."""
        for spec in plan.left:
            del self._decoding[spec]
        grown = {spec: (block,) for spec, block in plan.grown}
        decoding = sorted(self._decoding.items(), key=lambda item: item[1][0])
        assert len(decoding) == plan.decodes
        assert sum(at for _, (_, at) in decoding) == plan.decode_context
        assert max((at for _, (_, at) in decoding), default=0) == plan.longest_context
        rows = [Row(spec, at, 1, grown.get(spec, ()), None) for spec, (_, at) in decoding]
        for _, state in decoding:
            state[1] += 1
        listed = [Row(c.spec, c.start, c.tokens, c.blocks, c) for c in plan.chunks]
        ends = {c.spec: [c.order, c.start + c.tokens] for c in plan.chunks}
        self._decoding.update((spec, ends[spec]) for spec in plan.joined)
        return [*listed[: plan.lead], *rows, *listed[plan.lead :]]

    def __iter__(self) -> Iterator[RequestSpec]:
        return iter(self._decoding)
