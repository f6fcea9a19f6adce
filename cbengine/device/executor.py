"""The model's state on one device, and the computation of a step on it: everything between two copies.

The device decides when: at once, in a worker process, or on a CUDA stream, which may capture a decode step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cbengine.batch import MOST_UPDATES, Capacity
from cbengine.device.drafts import Drafter, Drafts
from cbengine.device.layout import Arrays, Header, Ints
from cbengine.device.moves import InPlace
from cbengine.model.decoder import Model
from cbengine.model.kvcache import Carrier, KvCache
from cbengine.model.ops import Rows
from cbengine.sampling import Draws, rank, sample, uniforms_on_device


class Executor:
    """An executor holds the block tables and the last sampled token of every slot, beside the model and its cache.
    Grouped layers have a table for each group. One extra slot is scratch: padding rows write to it. A tier on the host
    may lie behind the cache. A `drafter` makes it speculate.
    """

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        capacity: Capacity,
        host: Tensor | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.device, self.has_host_tier = cache.keys.device, host is not None
        self.scratch = cache.scratch  # a block that belongs to no request
        self.reach = capacity.width * cache.block_size  # the tokens that the longest block table can hold
        self._model, self._cache, self._host, self.group = model, cache, host, model.group
        shape, unused = (capacity.slots + 1, capacity.tables, capacity.width), cache.scratch * cache.pages
        self._tables = torch.full(shape, unused, dtype=torch.int32, device=self.device)  # first pages of blocks
        self._last = torch.zeros(capacity.slots + 1, dtype=torch.int64, device=self.device)
        sizes = capacity.slots + 1, capacity.drafts, self.device
        self._drafts = None if drafter is None else Drafts(drafter, *sizes)

    def carrier(self) -> Carrier:
        """Return a carrier of blocks, one for each stream."""
        return Carrier(self._cache, self._host)

    def mover(self) -> InPlace:
        """Return the KV transfers of a device that computes its steps in place."""
        return InPlace(self.carrier())

    @torch.inference_mode()
    def update_tables(self, step: Arrays[Tensor], excess: Ints | None = None) -> None:
        """Write the changed entries of the block tables, also those that `Sent` calls excess; called before `run`."""
        pieces = () if excess is None else torch.from_numpy(excess).split(MOST_UPDATES, dim=1)
        for places, blocks in (*pieces, (step.places, step.blocks)):
            if len(places):
                first = blocks.to(self.device)
                first = first if self._cache.pages == 1 else first * self._cache.pages
                self._tables.view(-1)[places.to(self.device).long()] = first

    @torch.inference_mode()
    def run(self, step: Arrays[Tensor], header: Header) -> Tensor:
        """Return int32 [results]: a token of each sampling row, -1 without numbers as logits; with beams `Ranked`."""
        if not header.rows:
            return step.tokens
        owner = _owner(step, header)
        if self._drafts is not None:
            assert owner is not None, "with speculation no row is a decode row"
            return self._speculate(self._drafts, self._drafts.resolved(step, owner), header, owner)
        rows = self._rows(step, header, owner)
        slots = step.slots.long()
        tokens = step.tokens.long()
        tokens = torch.where(tokens < 0, self._last[slots if owner is None else slots[owner]], tokens)
        hidden = self._model.forward(tokens, self._cache, *rows)
        if header.further or header.decodes < header.rows:
            read = step.starts[1:].long() - 1
            sampling = torch.cat((read[: header.decodes], read[step.sampled.long()]))
            hidden, slots = hidden[sampling], torch.cat((slots[: header.decodes], slots[step.sampled.long()]))
        if not header.sampling:
            return step.sampled
        if header.beams:  # the host rewrites beams before the next step, so no token is carried over
            return rank(self._model.logits(hidden), step.scores.view(torch.float32), header.beams)
        sampled = sample(self._model.logits(hidden), _draws(step) if header.random else None)
        self._last[slots] = sampled.clamp(min=0).long()
        return sampled

    def _speculate(self, drafts: Drafts, step: Arrays[Tensor], header: Header, owner: Tensor) -> Tensor:
        """Return the results of a resolved step, and let the drafter read it and propose drafts."""
        rows, tokens = self._rows(step, header, owner), step.tokens.clamp(min=0).long()
        hidden = self._model.forward(tokens, self._cache, *rows)
        drafts.drafter.read(tokens, rows[0])
        if not header.sampling:
            return step.sampled
        outputs = drafts.outputs(step, header)
        draws = None
        if header.random:
            single, of = torch.float32, outputs.row
            uniforms = uniforms_on_device(_wide(step.seeds, torch.int64)[of], outputs.position)
            top_p = _wide(step.top_p, torch.float64)
            draws = Draws(uniforms, step.temperature.view(single)[of], step.top_k[of], top_p[of])
        sampled = sample(self._model.logits(hidden[outputs.query]), draws)
        return drafts.verified(step, header, outputs, sampled, rows[0].tables)

    def _rows(self, step: Arrays[Tensor], header: Header, owner: Tensor | None) -> list[Rows]:
        """Return the rows as each group of layers sees them, by every token's row."""
        slots, kv_tokens, starts = step.slots.long(), step.kv_tokens.long(), step.starts.long()
        if owner is None:
            cached = kv_tokens - 1
        else:
            cached = torch.arange(header.tokens, device=starts.device) + (kv_tokens - starts[1:])[owner]
            slots = slots[owner]
        size = self._cache.block_size
        entries, offsets = cached // size, cached % size
        positions = cached
        if header.padded:
            first = step.first.long()
            positions = (cached - (first if owner is None else first[owner])).clamp(min=0)
        row, padding = (step.slots, step.kv_tokens, step.starts, positions), step.first if header.padded else None
        groups = [(tables, tables[slots, entries].long() * size + offsets) for tables in self._tables.unbind(1)]
        return [Rows(tables, *row, places, header.decodes, header.longest, padding) for tables, places in groups]


def _draws(step: Arrays[Tensor]) -> Draws:
    """Return how the sampling rows of a step's buffer draw their tokens."""
    single, top_p = torch.float32, _wide(step.top_p, torch.float64)
    return Draws(step.uniforms.view(single), step.temperature.view(single), step.top_k, top_p)


def _wide(halves: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of 64 bits by their halves, which may not be aligned to 8 bytes in the buffer."""
    return halves.clone().view(dtype)


def _owner(step: Arrays[Tensor], header: Header) -> Tensor | None:
    """Return every token's row (None: row i has token i alone)."""
    if header.decodes == header.rows:
        return None
    counts = step.starts[1:].long() - step.starts[:-1].long()
    each = torch.arange(header.rows, device=step.starts.device)
    return torch.repeat_interleave(each, counts, output_size=header.tokens)
