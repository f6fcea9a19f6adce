"""Speculation on a device: verification of drafts, what its slots know that the host has not seen, and who drafts.

A row with d drafts gives up to 1 + d tokens. The target chooses a token behind each of its query tokens, greedily or by
the number of the request and the position, as it does without speculation; the drafts that equal the tokens chosen
before them came true. Every drafter proposes single tokens: it is sure of each (q = 1). A draft is then accepted with
the target's probability p of it, and a token chosen instead of one has the distribution of max(0, p - q): this is the
rejection sampling of Leviathan, Kalman, Matias (ICML 2023). So a text does not depend on who drafts.

In the asynchronous loop the host plans a row before it knows how many drafts of the row before came true. Its first
token is then CARRIED, and it begins where the slot's row before has ended, which the device alone knows.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cbengine.device.layout import Arrays, Header
from cbengine.model.decoder import Model
from cbengine.model.kvcache import KvCache
from cbengine.model.ops import Rows
from cbengine.sequence import CARRIED

BLANK = -2  # a draft that no token equals; a token of a row that did not come
LEAST_NGRAM, MOST_NGRAM = 2, 5  # tokens; prompt_lookup_min and prompt_lookup_max of vLLM


class Drafter(Protocol):
    """Whoever proposes drafts, with what it keeps of each token in the blocks of the cache."""

    def read(self, tokens: Tensor, rows: Rows) -> None:
        """Take notice of a step's query tokens [T], drafts included."""

    def propose(self, tables: Tensor, slots: Tensor, last: Tensor, computed: Tensor, count: int) -> Tensor:
        """Return `count` drafts behind each token `last`, at position `computed`: [S, count], BLANK where it has none,
        and from there on.
        """


class Outputs(NamedTuple):
    """The tokens that a step's sampling rows may give, O in all: [O] each."""

    row: Tensor  # the sampling row
    at: Tensor  # index among its own
    query: Tensor  # the query token that each follows
    position: Tensor


class Drafts:
    """The drafts of all slots. `known` [slots, most + 2] has a slot's last token, the drafts behind it, and a BLANK; a
    negative id c in a step's tokens stands for entry -1 - c of its slot. `computed` [slots] are the tokens in the cache
    behind a slot's last sampling row.
    """

    def __init__(self, drafter: Drafter, slots: int, most: int, device: torch.device) -> None:
        self.drafter = drafter
        self._known = torch.full((slots, most + 2), BLANK, device=device)
        self._computed = torch.zeros(slots, dtype=torch.int64, device=device)

    def resolved(self, step: Arrays[Tensor], owner: Tensor) -> Arrays[Tensor]:
        """Return a step with the tokens and starts of its rows that the host has not seen; `owner` is each token's."""
        slots, starts = step.slots.long(), step.starts.long()
        known = self._known[slots[owner], (-1 - step.tokens.long()).clamp(min=0)]
        reach = self._computed[slots] + starts[1:] - starts[:-1]
        return step._replace(
            tokens=torch.where(step.tokens < 0, known, step.tokens.long()).int(),
            kv_tokens=torch.where(step.tokens[starts[:-1]] == CARRIED, reach, step.kv_tokens.long()).int(),
        )

    def outputs(self, step: Arrays[Tensor], header: Header) -> Outputs:
        """Return the tokens that a resolved step may give."""
        row, drafts = step.sampled.long(), step.verifies.long()
        counts, device = drafts + 1, drafts.device
        total = header.sampling + header.verified
        of = torch.repeat_interleave(torch.arange(header.sampling, device=device), counts, output_size=total)
        at = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[of]
        query, position = (step.starts[1:].long()[row] - counts), (step.kv_tokens.long()[row] - drafts)
        return Outputs(of, at, query[of] + at, position[of] + at)

    def verified(
        self, step: Arrays[Tensor], header: Header, outputs: Outputs, sampled: Tensor, tables: Tensor
    ) -> Tensor:
        """Return a step's results (Header.results) by the tokens `sampled` [O]; propose the next drafts."""
        slots, drafts, each = step.slots.long()[step.sampled.long()], step.verifies.long(), header.most_drafts + 1
        tokens = sampled.new_full((header.sampling, each), BLANK)
        tokens[outputs.row, outputs.at] = sampled
        true = torch.zeros_like(tokens)
        follows = step.tokens[(outputs.query + 1).clamp(max=header.tokens - 1)]
        true[outputs.row, outputs.at] = ((sampled == follows) & (outputs.at < drafts[outputs.row])).int()
        accepted = true.cumprod(dim=1).sum(dim=1)
        tokens = tokens.masked_fill(torch.arange(each, device=tokens.device) > accepted[:, None], BLANK)
        last = tokens.gather(1, accepted[:, None]).clamp(min=0).squeeze(1).long()
        computed = step.kv_tokens.long()[step.sampled.long()] - drafts + accepted
        known = self._known.new_full((header.sampling, each + 1), BLANK)
        known[:, 0] = last
        if header.proposed:
            known[:, 1 : header.proposed + 1] = self.drafter.propose(tables, slots, last, computed, header.proposed)
        self._known[slots], self._computed[slots] = known, computed
        return torch.cat((tokens.view(-1), (known[:, 1:] != BLANK).sum(dim=1))).int()


class Lookup(Drafter):
    """Prompt lookup. The ids of cached tokens lie in the cache's blocks as their keys do, so those of a shared prefix
    are there for whoever shares it.
    """

    def __init__(self, cache: KvCache) -> None:
        shape, device = (cache.scratch + 1, cache.block_size), cache.keys.device
        self._ids = torch.zeros(shape, dtype=torch.int32, device=device)

    def read(self, tokens: Tensor, rows: Rows) -> None:
        self._ids.view(-1)[rows.kv_places] = tokens.int()

    def propose(self, tables: Tensor, slots: Tensor, last: Tensor, computed: Tensor, count: int) -> Tensor:
        cached = self._ids[tables[slots].long()].flatten(1)
        ids = torch.cat((cached, torch.zeros_like(cached[:, :1])), dim=1)
        return looked_up(ids.scatter(1, computed[:, None], last[:, None].int()), computed + 1, count)


def looked_up(ids: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Return the `count` tokens, or as many as there are, behind the first occurrence of the longest n-gram at each
    text's end that occurs before, as vLLM does: [S, count], BLANK where there is none. Texts, `ids` [S, L], have
    `lengths` tokens.
    """
    places, ends = torch.arange(ids.shape[1], device=ids.device), lengths[:, None] - 1
    equal = places < ends  # at each place: whether the last n tokens up to there are those at the end
    longest = torch.zeros_like(ids, dtype=torch.int8)
    for n in range(MOST_NGRAM):
        token = ids.gather(1, (ends - n).clamp(min=0))
        equal = equal & (ids.roll(n, dims=1) == token) & (places >= n)
        longest += equal
    best = longest.amax(dim=1, keepdim=True)
    first = torch.where(longest == best, places, ids.shape[1]).amin(dim=1, keepdim=True) + 1
    behind = first + torch.arange(count, device=ids.device)
    there = (best >= LEAST_NGRAM) & (behind <= ends)
    return ids.gather(1, behind.clamp(max=ids.shape[1] - 1)).masked_fill(~there, BLANK)


class DraftModel(Drafter):
    """A model that drafts greedily, with keys and values of its own in the cache's blocks. Behind the longest text that
    a scheduler takes its tables name the scratch block, and so does what lies behind the tables.
    """

    def __init__(self, model: Model, cache: KvCache) -> None:
        self._model, self._cache = model, cache

    def read(self, tokens: Tensor, rows: Rows) -> None:
        self._model.forward(tokens.long(), self._cache, rows)

    def propose(self, tables: Tensor, slots: Tensor, last: Tensor, computed: Tensor, count: int) -> Tensor:
        size, scratch = self._cache.block_size, self._cache.scratch * self._cache.block_size
        reach = tables.shape[1] * size
        starts, drafts = torch.arange(len(slots) + 1, device=slots.device, dtype=torch.int32), [last]
        for ahead in range(count):
            position = (computed + ahead).clamp(max=reach - 1)
            kv_place = tables[slots, position // size].long() * size + position % size
            kv_place = torch.where(computed + ahead < reach, kv_place, scratch)
            kv_tokens = (position + 1).int()
            rows = Rows(tables, slots.int(), kv_tokens, starts, position, kv_place, len(slots), 1)
            drafts.append(self._model.logits(self._model.forward(drafts[-1], self._cache, rows)).argmax(dim=-1))
        return torch.stack(drafts[1:], dim=1)
