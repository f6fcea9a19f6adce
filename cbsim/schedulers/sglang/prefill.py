"""SGLang's prefill batch while it is put together: its budgets, and what admission foresees."""

from __future__ import annotations

from collections.abc import Iterable

from cbsim.policy.request import Request
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.sglang.queue import CLIP, Entry
from cbsim.schedulers.sglang.settings import SglangOptions

NO_LIMIT = 1 << 60
NO_ROOM, NOT_NOW = -1, 0  # why a request is not let in
Finishing = tuple[float, int]  # a request: what it has left to write, what it holds by now


@mypyc_attr(allow_interpreted_subclasses=True)
class Prefill:
    """`total` are the tokens promised to those that run and are let in, `current` those written at once; both have to
    stay below what the cache has room for. `inputs` and `chunk` are the query tokens left.
    """

    def __init__(self, options: SglangOptions, ratio: float, batch: dict[Request, Entry], most: float) -> None:
        """`batch` are those that decode; all in all they are owed `most` at most."""
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
        self._finishing: list[Finishing] | None = None  # soonest first, once asked

    @property
    def total(self) -> float:
        """Summed up only when asked, and always in the same order: it is no whole number."""
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
        """Is there more room than for what was promised and so many tokens?"""
        return tokens < room - self.bound or tokens < room - self.total

    def returns(self, entry: Entry) -> None:
        """One that decodes gives way, and is about to leave the batch."""
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
        """It computes so many tokens. If these are all, what it may write is reserved."""
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
        """Most tokens of the prompt in the middle. It has to go on, whatever is promised to others."""
        if self.has_room(self.chunk, room):
            return self.chunk
        fits = min(self.chunk, int(room - self.total))
        return fits if fits > 0 else self.chunk

    def extent(self, entry: Entry, running: Iterable[Entry], room: int, *, cuts: bool) -> int:
        """Tokens of a request that the batch may compute, or why it has to wait. `cuts`: no prompt is in the middle."""
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
        """Is there memory until all have written what they may, if those end first who have least left?"""
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
        """All in the order of their ends, this one among them."""
        if self._finishing is None:
            line = [self._end(other) for other in (entry, *running, *self.taken)]
            self._finishing = sorted([end for end in line if end[0] > 0], key=_left)
        elif (end := self._end(entry))[0] > 0:
            later = [i for i, other in enumerate(self._finishing) if end[0] <= other[0]]
            self._finishing.insert(later[0] if later else self.behind(self._finishing), end)
        return self._finishing

    def behind(self, line: list[Finishing]) -> int:
        """Where in a line somebody goes who ends after all others."""
        return len(line)

    def _end(self, entry: Entry) -> Finishing:
        request = entry.request
        left = entry.max_new * (1.0 if entry.whole else self._ratio) - request.seen
        return left, request.spec.prompt_tokens + request.seen


def _left(end: Finishing) -> float:
    return end[0]


def giving_way(candidates: list[Entry], needed: float, ratio: float) -> list[Entry]:
    """As many of these as it takes to come by the tokens needed, least urgent first, of equals the last one queued;
    nobody if all of them are not enough.
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
