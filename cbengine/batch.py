"""The translation of plans into what a device receives: a few int32 arrays a step, built from what changed.

Decoding requests stay in two persistent arrays, so that an undisturbed decode step costs a handful of numpy calls
whatever its size. Everything else follows on the device from these arrays: positions, cache slots, and the input tokens
that the host has not seen yet. `layout` defines the order of the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from cbengine.device.layout import Arrays, Header, Ints, arrays
from cbengine.sampling import uniforms
from cbengine.sequence import CARRIED, Sequence
from cbsim.policy.groups import LayerGroup
from cbsim.policy.kind import Options
from cbsim.policy.plan import Chunk, StepPlan
from cbsim.policy.request import RequestSpec

MOST_UPDATES = 1 << 20  # table entries in a step's buffer: what the whole tables have may be gigabytes


class Sent(NamedTuple):
    """A step in flight: its header, and the sequences that its results belong to, in the order of the sampling rows."""

    header: Header
    readers: list[Sequence]
    excess: Ints | None = None  # [2, n]: places and blocks of table updates that its buffer has no room for


class Capacity(NamedTuple):
    """A device's largest step and most requests. `beams` as in `Header`; each of `groups` has its own block tables.
    `drafts` of a row at most, 0 without speculation.
    """

    slots: int
    width: int  # entries of a block table
    rows: int
    tokens: int
    beams: int = 0
    groups: tuple[LayerGroup, ...] = ()
    drafts: int = 0

    @property
    def tables(self) -> int:
        """The number of block tables of a slot."""
        return len(self.groups) or 1

    @property
    def staging(self) -> int:
        """The size of the largest step's buffer in int32 values: every array at its longest."""
        return self._largest.size

    @property
    def results(self) -> int:
        """The size of the largest step's results in int32 values."""
        return self._largest.results

    @property
    def _largest(self) -> Header:
        rows = self.sampling
        return Header(rows, 0, 0, self.tokens, 1, rows, self.updates, True, True, self.beams, self.drafts)

    @property
    def updates(self) -> int:
        """The most table entries in a step's buffer."""
        return min(self.slots * self.tables * self.width + self.rows, MOST_UPDATES)

    @property
    def sampling(self) -> int:
        """The rows of the largest step, padding to a captured size included."""
        return self.rows + 64


class DecodingRows:
    """The decode batch: a row for each request that goes on decoding, unordered."""

    def __init__(self, capacity: int) -> None:
        self.slots = np.zeros(capacity, dtype=np.int32)
        self.kv_tokens = np.zeros(capacity, dtype=np.int32)
        self.first = np.zeros(capacity, dtype=np.int32)
        self.seeds = np.zeros(capacity, dtype=np.uint64)
        self.temperature = np.zeros(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int32)
        self.top_p = np.zeros(capacity, dtype=np.float64)
        drawn = (self.seeds, self.temperature, self.top_k, self.top_p)
        self._columns: tuple[npt.NDArray[Any], ...] = (self.slots, self.kv_tokens, self.first, *drawn)
        self.sequences: list[Sequence] = []
        self._at: dict[RequestSpec, int] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence, kv_tokens: int, first: int = 0) -> None:
        """Add a row with `kv_tokens` tokens cached before its next step; the first `first` of them are padding."""
        at = self._at[sequence.spec] = len(self.sequences)
        self.sequences = [*self.sequences, sequence]  # a new list: steps in flight hold the old one
        self.slots[at], self.kv_tokens[at], self.first[at] = sequence.slot, kv_tokens, first
        self.seeds[at] = sequence.seed
        self.temperature[at], self.top_k[at], self.top_p[at] = sequence.sampling.on_device

    def remove(self, spec: RequestSpec) -> None:
        """Remove a request's row; the last row takes its index."""
        at, last = self._at.pop(spec), len(self.sequences) - 1
        sequences = self.sequences[:last]
        if at < last:
            moved = sequences[at] = self.sequences[last]
            self._at[moved.spec] = at
            for column in self._columns:
                column[at] = column[last]
        self.sequences = sequences

    def clear(self) -> None:
        self.sequences, self._at = [], {}


class Batcher:
    """A batcher turns each plan into the arrays of a step, and keeps the state that plans do not repeat. Call `build`
    once for every plan, in order. If `padded`, batches are static: left-padded to the longest prompt, and computed
    until the whole batch ends. Otherwise the padding of a row is a row of its own on the scratch slot: it costs
    compute, and the request's cache holds none of it.
    """

    def __init__(self, capacity: Capacity, *, padded: bool) -> None:
        self.sequences: dict[RequestSpec, Sequence] = {}
        self._width, self._groups, self._most_updates = capacity.width, capacity.groups, capacity.updates
        self._scratch_slot, self._drafts = capacity.slots, capacity.drafts
        self._free = list(range(capacity.slots))[::-1]
        self._decoding = DecodingRows(capacity.rows)
        self._padded = padded
        self._places: list[int] = []
        self._blocks: list[int] = []

    def build(self, plan: StepPlan, into: Ints, bucket: Callable[[int], int]) -> Sent:
        """Write a step into `into`. `bucket` maps the rows of a step of decodes alone to the padded size."""
        self._forget(plan)
        singles, chunks = self._listed(plan)
        going = len(self._decoding) if self._padded or plan.work.decodes else 0  # else skipped in this step
        live = going + len(singles)
        beams = len(plan.ranked[0]) if plan.ranked else 0
        decodes = bucket(live) if live and not (chunks or beams) else live
        filling = self._filling(plan, chunks, bucket) if self._drafts else []
        widths = self._widths(plan, chunks) + filling
        listed = [self.sequences[chunk.spec] for chunk in _sampling(singles, chunks)]
        header = Header(
            rows=decodes + len(widths),
            decodes=decodes,
            live=live,
            tokens=decodes + sum(widths),
            longest=max(widths, default=1),
            further=len(listed) - len(singles) + len(filling),
            updates=min(len(self._places), self._most_updates),
            random=self._random(going, listed),
            padded=self._padded,
            beams=beams,
            most_drafts=self._drafts,
            verified=sum(_drafts(chunks)) + sum(filling) - len(filling),
            proposed=plan.work.drafts,
        )
        assert not beams or header.sampling == beams * len(plan.ranked), "whoever samples is a text of a search"
        self._write(header, into, singles, chunks, widths)
        readers = self._decoding.sequences if going else []
        beyond = self._places[header.updates :], self._blocks[header.updates :]
        excess = np.array(beyond, dtype=np.int32) if beyond[0] else None
        sent = Sent(header, [*readers, *listed] if listed else readers, excess)
        self._go_on(plan)
        return sent

    def _widths(self, plan: StepPlan, chunks: list[Chunk]) -> list[int]:
        """Return the query tokens of all rows but the decodes."""
        if self._padded:
            return [chunk.tokens + chunk.padding for chunk in chunks]
        return [chunk.tokens for chunk in chunks] + [c.padding for c in plan.work.chunks if c.padding]

    def _random(self, going: int, listed: list[Sequence]) -> bool:
        """Whether any of the rows that go on or are listed draws its token."""
        return bool(self._decoding.temperature[:going].any()) or any(not one.sampling.greedy for one in listed)

    def _filling(self, plan: StepPlan, chunks: list[Chunk], bucket: Callable[[int], int]) -> list[int]:
        """Return the query tokens of rows that pad a step to a captured size: all of its rows verify as many drafts as
        a row may have, and get as many.
        """
        each = 1 + self._drafts
        full = plan.work.drafts == self._drafts and all(chunk.tokens == chunk.outputs == each for chunk in chunks)
        return [each] * (bucket(len(chunks)) - len(chunks)) if chunks and full else []

    def _forget(self, plan: StepPlan) -> None:
        """Free the rows and slots that are no longer used, then bring the block tables up to this step."""
        if self._padded:
            if plan.work.chunks:
                for sequence in self._decoding.sequences:
                    self._give_back(sequence)
                self._decoding.clear()
        else:
            for spec in plan.changes.left:
                self._decoding.remove(spec)
            for spec in plan.changes.ended:
                self._give_back(self.sequences[spec])
        for preempted in plan.changes.preempted:
            self._give_back(self.sequences[preempted.spec])
        self._places, self._blocks = [], []
        self._update_tables(plan)
        if self._groups:
            self._change_tables(plan)

    def _update_tables(self, plan: StepPlan) -> None:
        for spec, index, block in plan.changes.replaced:
            if (slot := self.sequences[spec].slot) >= 0:
                self._places.append(slot * self._width + index)
                self._blocks.append(block)
        for spec, block in zip(plan.changes.grown, plan.changes.blocks, strict=True):
            self._extend(self.sequences[spec], (block,))
        for chunk in plan.work.chunks:
            sequence = self.sequences[chunk.spec]
            if chunk.admitted:
                assert sequence.slot < 0
                sequence.slot, sequence.blocks, sequence.tables = self._free.pop(), 0, {}
            self._extend(sequence, chunk.blocks)

    def _change_tables(self, plan: StepPlan) -> None:
        """Apply a plan's changes to the block tables of layer groups, none of which is a ring."""
        for change in plan.tables:
            sequence = self.sequences[change.spec]
            assert sequence.slot >= 0, (change.spec.id, "has not been let in")
            at = sequence.tables.get(change.group, change.passed)
            end = sequence.tables[change.group] = at + len(change.blocks)
            assert end <= self._width, (change.spec.id, change.group, end, self._width)
            line = (sequence.slot * len(self._groups) + change.group) * self._width
            for entry, block in (*change.replaced, *enumerate(change.blocks, at)):
                self._places.append(line + entry)
                self._blocks.append(block)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._free.append(sequence.slot)
            sequence.slot = -1

    def _extend(self, sequence: Sequence, blocks: tuple[int, ...]) -> None:
        at = sequence.slot * self._width + sequence.blocks
        sequence.blocks += len(blocks)
        assert sequence.blocks <= self._width, (sequence.spec.id, sequence.blocks, self._width)
        self._places.extend(range(at, at + len(blocks)))
        self._blocks.extend(blocks)

    def _listed(self, plan: StepPlan) -> tuple[list[Chunk], list[Chunk]]:
        """Return the chunks that are decode rows to a device, and the others."""
        listed = plan.work.chunks
        assert all(chunk.outputs <= 1 + self._drafts for chunk in listed), "a row without drafts gives one token"
        if self._padded or self._drafts or not listed:
            return [], list(listed)
        singles = [chunk for chunk in listed if chunk.tokens == 1 and chunk.outputs]
        return singles, [chunk for chunk in listed if chunk.tokens > 1 or not chunk.outputs]

    def _write(self, header: Header, into: Ints, singles: list[Chunk], chunks: list[Chunk], widths: list[int]) -> None:
        step = arrays(into, header)
        going, live, decodes = header.live - len(singles), header.live, header.decodes
        decoding = self._decoding
        decoding.kv_tokens[:going] += 1
        step.slots[:going], step.kv_tokens[:going] = decoding.slots[:going], decoding.kv_tokens[:going]
        step.slots[live:decodes], step.kv_tokens[live:decodes] = self._scratch_slot, 1
        step.starts[: decodes + 1] = np.arange(decodes + 1)
        step.starts[decodes + 1 :] = decodes + np.cumsum(widths)
        step.tokens[:going], step.tokens[live:decodes] = CARRIED, 0
        sampled = [decodes + i for i, chunk in enumerate(chunks) if chunk.outputs]
        step.sampled[: len(sampled)] = sampled
        if header.most_drafts:
            step.sampled[len(sampled) :] = range(len(chunks), header.rows)  # rows that fill a captured size
            step.verifies[: len(sampled)] = _drafts(chunks)
            step.verifies[len(sampled) :] = header.most_drafts
        step.places[:], step.blocks[:] = self._places[: header.updates], self._blocks[: header.updates]
        if self._padded:
            step.first[:going], step.first[live:decodes] = decoding.first[:going], 0
            step.first[decodes:] = [chunk.padding for chunk in chunks]
        last = decodes + len(chunks)
        rows = zip((*range(going, live), *range(decodes, last)), (*singles, *chunks), strict=True)
        for row, chunk in rows:
            self._write_chunk(chunk, row, step)
        step.slots[last:], step.kv_tokens[last:] = self._scratch_slot, widths[len(chunks) :]
        step.tokens[step.starts[last] :] = 0
        if header.beams:
            scores = np.array([self.sequences[chunk.spec].score for chunk in singles], dtype=np.float32)
            step.scores[:] = scores.view(np.int32)
        if header.random:
            self._write_draws(header, step, going, _sampling(singles, chunks))

    def _write_chunk(self, chunk: Chunk, row: int, step: Arrays[Ints]) -> None:
        sequence = self.sequences[chunk.spec]
        end, left = chunk.start + chunk.tokens, chunk.padding * self._padded
        step.slots[row], step.kv_tokens[row] = sequence.slot, end + left
        tokens = step.tokens[step.starts[row] : step.starts[row + 1]]
        tokens[:left] = 0
        drafts = max(0, chunk.outputs - 1)
        known = len(tokens) - drafts
        sequence.write(chunk.start, tokens[left:known])
        if drafts:  # entries of its slot on the device, of which an admitted row has none but the blank
            tokens[known:] = CARRIED - 1 - (self._drafts if chunk.admitted else np.arange(drafts))
        lost = chunk.admitted and tokens[known - 1] == CARRIED
        assert not lost, f"{chunk.spec.id}: its last token was left in another slot"
        if chunk.outputs:
            sequence.expect(end - drafts)

    def _write_draws(self, header: Header, step: Arrays[Ints], going: int, listed: list[Chunk]) -> None:
        """Write each sampling row's settings, and a number by its seed and the token's position. Padding is greedy."""
        decoding, live, decodes = self._decoding, header.live, header.decodes
        seeds, positions = np.zeros(header.sampling, dtype=np.uint64), np.zeros(header.sampling, dtype=np.int64)
        temperature, top_k, top_p = step.temperature.view(np.float32), step.top_k, step.top_p.view(np.float64)
        seeds[:going] = decoding.seeds[:going]
        positions[:going] = step.kv_tokens[:going] - decoding.first[:going]
        temperature[:going], top_k[:going] = decoding.temperature[:going], decoding.top_k[:going]
        top_p[:going] = decoding.top_p[:going]
        temperature[live:decodes], top_k[live:decodes], top_p[live:decodes] = 0, 0, 1
        rows = [*range(going, live), *range(decodes, header.sampling)]
        filling = rows[len(listed) :]
        temperature[filling], top_k[filling], top_p[filling] = 0, 0, 1
        for row, chunk in zip(rows, listed, strict=False):
            sequence = self.sequences[chunk.spec]
            seeds[row], positions[row] = sequence.seed, chunk.start + chunk.tokens
            temperature[row], top_k[row], top_p[row] = sequence.sampling.on_device
        if header.most_drafts:  # positions are the device's to know
            step.seeds[:] = seeds.view(np.int32)
        else:
            step.uniforms[:] = uniforms(seeds, positions).view(np.int32)

    def _go_on(self, plan: StepPlan) -> None:
        """Add the requests that decode from the next step on to the decode batch."""
        if self._padded:
            for chunk in plan.work.chunks:
                self._decoding.join(self.sequences[chunk.spec], chunk.tokens + chunk.padding, chunk.padding)
        elif plan.changes.joined:
            ends = {chunk.spec: chunk.start + chunk.tokens for chunk in plan.work.chunks}
            for spec in plan.changes.joined:
                self._decoding.join(self.sequences[spec], ends[spec])


def _sampling(singles: list[Chunk], chunks: list[Chunk]) -> list[Chunk]:
    """Return the listed rows that sample, in the order of a step's results."""
    return [*singles, *(chunk for chunk in chunks if chunk.outputs)]


def _drafts(chunks: list[Chunk]) -> list[int]:
    """Return the drafts of those that sample."""
    return [chunk.outputs - 1 for chunk in chunks if chunk.outputs]


class Load(NamedTuple):
    """The load that a server has to be ready for: requests at a time, tokens of a prompt, of an answer, and of both."""

    requests: int
    prompt: int
    answer: int
    longest: int

    @classmethod
    def of(cls, specs: Collection[RequestSpec]) -> Self:
        return cls(
            len(specs),
            max((spec.prompt_tokens for spec in specs), default=1),
            max((spec.max_tokens for spec in specs), default=1),
            max((spec.prompt_tokens + spec.max_tokens for spec in specs), default=1),
        )

    def capacity(self, options: Options, drafts: int = 0) -> Capacity:
        """Return the largest step and block table of a scheduler with these options, and so many drafts a row: of two
        rows in flight, and of one that is drafted behind them.
        """
        limits = options.limits
        longest = self.longest + 3 * (drafts + 1) * bool(drafts)
        longest = min(longest, limits.longest or longest)
        slots = max(1, min(self.requests, limits.slots or self.requests))
        rows = min(slots, limits.rows or slots)
        rows *= 1 + limits.filled  # the padding of a row is a row of its own
        budget = limits.tokens
        if budget is None:  # a prompt as long as the longest for every row, and as many outputs
            budget, longest = slots * self.prompt, self.prompt + self.answer
        budget = min(budget, rows * longest)  # a row computes no more tokens than its sequence has
        width = min(max(-(-longest // options.block_size) + 2, limits.table or 0), options.num_blocks)
        sizes = Capacity(slots=slots, width=width, rows=rows, tokens=budget, drafts=drafts)
        return sizes._replace(tokens=max(budget, sizes.sampling * (1 + drafts)))
