"""A prefill batch of SGLang while it is built: its budgets, and the room that admission reserves."""

from __future__ import annotations

from collections.abc import Iterable

from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.sglang.queue import CLIP, Entry
from cbsim.schedulers.sglang.settings import SglangOptions

NO_LIMIT = 1 << 60
NO_ROOM, NOT_NOW = -1, 0  # why a request is not admitted
Finishing = tuple[float, int]  # of a request: the tokens it has left to write, the tokens it occupies


@mypyc_attr(allow_interpreted_subclasses=True)
class Prefill:
    """The budgets of a prefill batch. `total` are the tokens reserved for running and taken requests, `current` those
    written at once; both must stay below what the cache has room for. `inputs`, `chunk`: query tokens left.
    """

    def __init__(self, options: SglangOptions, ratio: float, batch: dict[Request, Entry], most: float) -> None:
        """Start with the decoding requests `batch`, for which at most `most` tokens are reserved in all."""
        self._options = options
        mixed = len(batch) if options.mixes else 0
        self.inputs = options.max_prefill_tokens - mixed
        self.chunk = options.chunked_prefill_size - mixed if options.chunks else NO_LIMIT
        self.current = mixed
        self.bound = mixed + most  # `total` is not more
        self.taken: list[Entry] = []
        self.preempted: list[Entry] = []
        self._page, self._ratio, self._batch, self._mixed = options.block_size, ratio, batch, mixed
        self._charges: list[float] = []
        self._total: float | None = None
        self._finishing: list[Finishing] | None = None  # soonest first, once computed

    @property
    def total(self) -> float:
        """The tokens reserved, summed only when read and always in the same order, because it is no whole number."""
        if self._total is None:
            owed = 0.0
            for entry in self._batch.values():
                owed += entry.owes(self._ratio)
            self._total = self._mixed + owed
            for tokens in self._charges:
                self._total += tokens
        return self._total

    def _charge(self, tokens: float) -> None:
        self._charges.append(tokens)
        if self._total is not None:
            self._total += tokens

    def has_room(self, tokens: int, room: int) -> bool:
        """True if there is room for more than `tokens` tokens beside those reserved."""
        return tokens < room - self.bound or tokens < room - self.total

    def returns(self, entry: Entry) -> None:
        """Record that a decoding request is preempted and about to leave the batch."""
        assert self._total is not None, "summed up when it was in it"
        self._charge(-entry.owes(self._ratio))
        self.preempted.append(entry)

    def paged(self, tokens: int) -> int:
        return -(-tokens // self._page) * self._page

    @property
    def spent(self) -> bool:
        return self.inputs <= 0 or self.chunk <= 0

    def fits(self, room: int) -> bool:
        return self.has_room(0, room) and room > self.current

    def take(self, entry: Entry, tokens: int) -> None:
        """Take a request with `tokens` tokens. If these are all that it has to compute, reserve what it may write."""
        entry.extent = tokens
        self.taken.append(entry)
        paged = self.paged(tokens)
        charge = paged + self._page + (min(entry.max_new, CLIP) if tokens == entry.todo else 0)
        self.bound += charge
        self._charge(charge)
        self.current += paged + self._page
        self.inputs -= paged
        self.chunk -= paged

    def next_chunk(self, room: int) -> int:
        """Return the most tokens of the partly computed prompt. It has to go on, whatever is reserved for others."""
        if self.has_room(self.chunk, room):
            return self.chunk
        fits = min(self.chunk, int(room - self.total))
        return fits if fits > 0 else self.chunk

    def extent(self, entry: Entry, running: Iterable[Entry], room: int, *, cuts: bool) -> int:
        """Return a request's tokens in the batch, or why it waits. `cuts`: no prompt is partly computed."""
        o, todo = self._options, entry.todo
        if o.prefill_max_requests is not None and len(self.taken) >= o.prefill_max_requests:
            return NOT_NOW
        if entry.whole and o.disable_radix_cache:
            return min(todo, max(self.chunk, NOT_NOW)) if self.lasts(entry, running, room) else NO_ROOM
        outputs = min(max(entry.max_new - entry.request.seen, 0), CLIP)
        if not self.has_room(todo + outputs + self._page, room):
            return NO_ROOM
        if not o.chunks:
            return NOT_NOW if self.taken and self.paged(todo) >= self.inputs else todo
        if self.paged(todo) <= self.chunk:
            return todo
        if o.schedule_policy == "shortest-prefill-first" and not cuts:
            return NOT_NOW
        return max(self.chunk // self._page * self._page, NOT_NOW)

    def lasts(self, entry: Entry, running: Iterable[Entry], room: int) -> bool:
        """True if memory lasts until all have written what they may, if those with the least left end first."""
        needed = self.paged(entry.todo) + self._page
        if needed > room - self.current or needed > room - self.total:
            return False
        line = self._line(entry, running)
        free, freed = room - self.current - needed, 0
        for i, (left, occupied) in enumerate(line):
            ahead = len(line) - i
            if free + freed - left * ahead <= ahead:
                return False
            freed += occupied
        return True

    def _line(self, entry: Entry, running: Iterable[Entry]) -> list[Finishing]:
        """Return all requests in the order of their ends, this one among them."""
        if self._finishing is None:
            line = [self._end(other) for other in (entry, *running, *self.taken)]
            self._finishing = sorted([end for end in line if end[0] > 0], key=_left)
        elif (end := self._end(entry))[0] > 0:
            later = [i for i, other in enumerate(self._finishing) if end[0] <= other[0]]
            self._finishing.insert(later[0] if later else self.behind(self._finishing), end)
        return self._finishing

    def behind(self, line: list[Finishing]) -> int:
        """Return the index in a line for a request that ends after all others."""
        return len(line)

    def _end(self, entry: Entry) -> Finishing:
        request = entry.request
        left = entry.max_new * (1.0 if entry.whole else self._ratio) - request.seen
        return left, request.spec.prompt_tokens + request.seen


def _left(end: Finishing) -> float:
    return end[0]


def giving_way(candidates: list[Entry], needed: float, ratio: float) -> list[Entry]:
    """Return enough of the candidates to free the tokens needed, least urgent first, of equals the last one queued;
    none if all of them are not enough.
    """
    victims: list[Entry] = []
    for entry in sorted(candidates, key=_least_urgent):
        victims.append(entry)
        needed -= entry.owes(ratio)
        if needed <= 0:
            return victims
    return []


def _least_urgent(entry: Entry) -> tuple[int, int]:
    return -entry.rank, -entry.queued
