"""What clients make an endpoint keep: requests that wait, tokens that nobody has taken. All of it has bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbsim.endpoint.backend import ABORT, Generation, Meter, Stream
from cbsim.endpoint.settings import Settings

STOP = "stop"


class Backlog:
    """Sums over open streams. `overflow` is told of a stream whose reader is too slow: once, while a token is put."""

    __slots__ = ("max_sum", "max_unread", "open", "overflow", "queued", "queued_tokens", "slow", "unread")

    def __init__(self, settings: Settings, overflow: Callable[[Told], None]) -> None:
        self.open: dict[str, Told] = {}  # by the id of the record
        self.queued = self.queued_tokens = self.unread = self.slow = 0
        self.max_unread, self.max_sum, self.overflow = settings.max_unread_tokens, settings.max_unread_sum, overflow


class Told(Stream):
    """A stream of this endpoint's: it is counted while it waits, while it is unread, and until it ends.

    `held` are tokens that were put and not taken, those of a batch being written included. With `stopped` its text has
    ended by a stop string, and its end is not an abort.
    """

    __slots__ = ("abort", "backlog", "cut", "held", "queued", "stopped")

    def __init__(self, generation: Generation, meter: Meter, backlog: Backlog) -> None:
        super().__init__(generation, meter)
        self.backlog, self.held = backlog, 0
        self.cut = self.stopped = False
        self.abort: Callable[[], None] | None = None  # closes the connection of its client at once
        self.queued = True
        backlog.open[generation.id] = self
        backlog.queued += 1
        backlog.queued_tokens += len(generation.prompt)

    def schedule(self, at_s: float, cached_tokens: int) -> None:
        self._unqueue()
        super().schedule(at_s, cached_tokens)

    def put(self, ids: Sequence[int], at_s: float) -> None:
        """Nothing happens once it is over: steps that were in flight then may yield more."""
        if self.finish is not None:
            return
        backlog = self.backlog
        self.held += len(ids)
        backlog.unread += len(ids)
        super().put(ids, at_s)
        if (self.held > backlog.max_unread or backlog.unread > backlog.max_sum) and not self.cut:
            self.cut = True
            backlog.slow += 1
            backlog.overflow(self)

    def end(self, finish: str, at_s: float, error: str | None = None) -> None:
        self._unqueue()
        self.backlog.open.pop(self.generation.id, None)
        super().end(STOP if finish == ABORT and self.stopped else finish, at_s, error)

    def written(self, tokens: int) -> None:
        """So many tokens have left for the client, or will never."""
        self.held -= tokens
        self.backlog.unread -= tokens

    def _unqueue(self) -> None:
        if self.queued:
            self.queued = False
            self.backlog.queued -= 1
            self.backlog.queued_tokens -= len(self.generation.prompt)
