"""The decode batch: requests that decode one token every step, advanced all at once.

A decode step should cost what changed, not what runs. Members share two counters, the number of planned and of updated
steps, and derive their progress from them. What will change is known ahead: the step at which a member needs a block,
fills one, or produces its declared last token is kept in calendars by step. A request whose next row is not certain (a
chunk, a stall, a preemption) is not a member and is planned one by one; joining and leaving are exact.

In a step that rests no member has a row. So steps have two numbers: the step's own, and the pace, which counts the
steps that did not rest; progress and calendars go by the pace.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from heapq import heappop, heappush
from operator import attrgetter
from typing import Final

from cbsim.policy.request import Pace, Request, RequestSpec
from cbsim.policy.value import value

by_order = attrgetter("order")


class Stay:
    """A request's time as a member, which is `over` once it has left."""

    def __init__(self, request: Request) -> None:
        self.request: Final = request
        self.order: Final = request.order
        self.over = False


class Calendar:
    """Stays by the pace at which something is due, in admission order. `today` are those of the present pace."""

    def __init__(self) -> None:
        self.today: list[Stay] = []
        self._pace = 0
        self._later: dict[int, list[Stay]] = {}

    def note(self, ahead: int, stays: list[Stay]) -> None:
        """Add stays in admission order, due `ahead` of the present pace. From then on the list is the calendar's."""
        due = self._later.setdefault(self._pace + ahead, stays) if ahead else self.today
        if stays and due is not stays:
            ordered = not due or due[-1].order < stays[0].order
            due += stays
            if not ordered:
                due[:] = sorted(_current(due), key=by_order)

    def turn(self) -> None:
        """Begin the next pace."""
        self._pace += 1
        due = self._later.pop(self._pace, None) if self._later else None
        if due is not None:
            self.today = due
        elif self.today:
            self.today = []


def _current(noted: list[Stay]) -> list[Stay]:
    return [stay for stay in noted if not stay.over]


@value(init=False)
class Completion:
    """A row in flight that will change more than a count when it comes back."""

    def __init__(
        self, request: Request, epoch: int, outputs: int, end: int = 0, fills: int = 0, short: int = 0, order: int = -1
    ) -> None:
        self.request: Final = request
        self.epoch: Final = epoch  # the request's epoch when the row was planned
        self.outputs: Final = outputs  # output tokens that it may yield
        self.end: Final = end  # tokens computed once it has completed
        self.fills: Final = fills  # blocks it fills, if it yields them all
        self.short: Final = short  # outputs that it did not yield
        self.order: Final = request.order if order < 0 else order  # in the admission order, when it was noted


Noted = list[Completion]
Completions = tuple[Noted, Noted, Noted]  # of the chunks before the members, of them, and after


def in_order(notes: Completions, late: list[Completion], stopped: list[Request]) -> list[Completion]:
    """Return the rows of a step that do more than count: those noted, those of members that have left since, and those
    that sampled a stop token. Chunks come as they were listed, members in admission order.
    """
    before, middle, after = notes
    if late:
        noted = {completion.request for completion in middle}
        middle += [completion for completion in late if completion.request not in noted]
    if stopped:
        noted = {completion.request for completion in (*before, *middle, *after)}
        middle += [Completion(request, request.epoch, 1) for request in stopped if request not in noted]
    if len(middle) > 1:
        middle.sort(key=by_order)
    return [*before, *middle, *after]


class DecodeBatch(Pace):
    """Members and their calendars. `planned` and `updated` count steps and are the index of the next one of each."""

    def __init__(self, block_size: int, *, long_tokens: int = 0) -> None:
        """Make an empty batch. Members that have computed `long_tokens` or more are counted in `long`."""
        super().__init__()
        self.block_size = block_size
        self.long_tokens = long_tokens
        self.long = 0
        self.max_order = -1  # no member has a larger admission order
        self.held_blocks = 0  # blocks in the tables of the members
        self.stays: dict[Request, Stay] = {}  # of the members
        self._offset = 0  # sum over members of computed - pace
        self._grow, self._fill, self._end, self._cross = Calendar(), Calendar(), Calendar(), Calendar()
        self._late: dict[int, list[Completion]] = {}  # by step: rows of members that have left since they were planned
        self._due: list[Stay] = []  # of the members that `growing` returned last
        self._always: list[Request] = []  # with blocks of one token: members need one in every step, in admission order
        self._orders: list[int] = []  # of these
        self._specs: list[RequestSpec] = []  # of these
        self._joins = 0
        self._heads: list[tuple[int, int, Stay]] = []  # heap of (pace - computed, number, stay)

    def __len__(self) -> int:
        return len(self.stays)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.stays)

    @property
    def oldest(self) -> int:
        return next(iter(self.stays)).since if self.stays else 0

    @property
    def context(self) -> int:
        """The KV tokens that the members' next rows read, their own token not counted."""
        return self._offset + len(self.stays) * self.pace

    def longest(self) -> int:
        """The KV tokens that the longest member's next row reads, its own token not counted; 0 without members."""
        heads = self._heads
        while heads:
            head, _, stay = heads[0]
            if not stay.over:
                return self.pace - head
            heappop(heads)
        return 0

    def join(self, request: Request, blocks: int, *, fills: bool) -> None:
        """Add a request with `blocks` blocks between two steps; with `fills`, `filling` will return it."""
        request.join(self)
        stay = self.stays[request] = Stay(request)
        computed, pace, size = request.computed, self.pace, self.block_size
        self._offset += computed - pace
        self._joins += 1
        heappush(self._heads, (pace - computed, self._joins, stay))
        self.held_blocks += blocks
        if stay.order > self.max_order:
            self.max_order = stay.order
        self._grow.note(blocks * size - computed, [stay])
        if fills:
            self._fill.note(size - 1 - computed % size, [stay])
        if self.long_tokens and computed >= self.long_tokens:
            self.long += 1
        elif self.long_tokens:
            self._cross.note(self.long_tokens - computed, [stay])
        if (left := request.last - request.scheduled) > 0:
            self._end.note(left - 1, [stay])

    def leave(self, request: Request, blocks: int) -> None:
        """Remove a member that has `blocks` blocks. Its rows in flight are delivered one by one (`completion`)."""
        for step in range(max(self.updated, request.since), self.planned):
            if step not in self._rested:
                self._late.setdefault(step, []).append(Completion(request, request.epoch, 1))
        self._offset -= request.computed - self.pace
        if self.long_tokens:
            self.long -= request.computed >= self.long_tokens
        self.held_blocks -= blocks
        if self._always:
            at = bisect_left(self._orders, request.order)
            if at < len(self._always) and self._always[at] is request:
                del self._always[at], self._orders[at], self._specs[at]
        self.stays[request].over = True
        del self.stays[request]
        request.leave()
        if not self.stays:
            self.max_order = -1
            self._heads.clear()

    def growing(self) -> list[Request]:
        """Return the members that need one more block in the step being planned, in admission order."""
        due = self._due = _current(self._grow.today)
        if self.block_size > 1:
            return [stay.request for stay in due]
        self._grow.today.clear()
        for stay in due:
            at = bisect_left(self._orders, stay.order)
            self._orders.insert(at, stay.order)
            self._always.insert(at, stay.request)
            self._specs.insert(at, stay.request.spec)
        return self._always

    def grew(self) -> tuple[RequestSpec, ...]:
        """Record a block for each member that `growing` returned, its next due `block_size` steps on. Return them."""
        if self.block_size == 1:
            self.held_blocks += len(self._always)
            return tuple(self._specs)
        self.held_blocks += len(self._due)
        self._grow.note(self.block_size, self._due)
        return tuple([stay.request.spec for stay in self._due])

    def filling(self) -> list[Request]:
        """Return the members whose row in the step being planned fills a block, in admission order."""
        if not self._fill.today:
            return []
        due = _current(self._fill.today)
        self._fill.note(self.block_size, due)
        return [stay.request for stay in due]

    def ending(self) -> list[Request]:
        """Return the members whose declared last token is sampled in the step being planned, in admission order."""
        return [stay.request for stay in _current(self._end.today)] if self._end.today else []

    def completion(self, step: int) -> list[Completion]:
        """Return the rows of `step` whose requests have left the decode batch since it was planned."""
        return self._late.pop(step) if self._late and step in self._late else []

    def commit(self, *, resting: bool = False) -> None:
        """Record that the step is planned."""
        self.advance(resting=resting)
        if not resting:
            self._grow.turn()
            self._fill.turn()
            self._end.turn()
            if self.long_tokens:
                self._cross.turn()
                self.long += len(_current(self._cross.today))

    def check(self, blocks: dict[Request, int]) -> None:
        """Raise AssertionError unless the running sums equal a recount. `blocks`: blocks that each member has."""
        assert self.context == sum(r.computed for r in self), (self.context, [r.computed for r in self])
        counted = sum(blocks[r] for r in self)
        assert self.held_blocks == counted, (self.held_blocks, counted)
        assert self.longest() == max((r.computed for r in self), default=0), self.longest()
        assert not self.long_tokens or self.long == sum(r.computed >= self.long_tokens for r in self), self.long
        assert all(r.order <= self.max_order and r.batch is self for r in self)
