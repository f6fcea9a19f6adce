"""What clients make an endpoint keep: requests that wait, tokens that nobody has taken. All of it has bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbsim.endpoint.backend import ABORT, Generation, Meter, Stream
from cbsim.endpoint.settings import Settings

STOP = "stop"


class Backlog:
    """Sums over streams: `open` have not ended, `queued` have not begun, `unread` tokens have not been taken. `slow`
    streams were cut, because too many tokens were kept for them: `cut` is told of each while a token is put.
    """

    __slots__ = ("_cut", "most_of_all", "most_of_one", "open", "queued", "queued_tokens", "slow", "streams", "unread")

    def __init__(self, settings: Settings, cut: Callable[[Told], None]) -> None:
        self.streams: dict[str, Told] = {}  # by the id of the record, until nothing of them is kept
        self.open = self.queued = self.queued_tokens = self.unread = self.slow = 0
        self.most_of_one, self.most_of_all = settings.max_unread_tokens, settings.max_unread_sum
        self._cut = cut

    def bound(self, stream: Told) -> None:
        """Cut this stream if it is past its bound; else all together are, and the one that most is kept for is cut."""
        if stream.held > self.most_of_one:
            slowest = stream
        else:
            slowest = max(self.streams.values(), key=lambda each: each.held)
        self.slow += 1
        slowest.drop()
        self._cut(slowest)


class Told(Stream):
    """A stream of this endpoint's. It counts in a backlog: while it is queued, until it ends, until it is released.

    `held` tokens were put and have not left for the client. With `stopped`, a stop string has ended its text, and its
    end is not an abort. Once it is `cut` nothing is kept any more.
    """

    __slots__ = ("abort", "backlog", "cut", "held", "queued", "stopped")

    def __init__(self, generation: Generation, meter: Meter, backlog: Backlog, abort: Callable[[], None]) -> None:
        super().__init__(generation, meter)
        self.backlog, self.abort = backlog, abort  # `abort` closes the connection of its client at once
        self.held = 0
        self.cut = self.stopped = False
        self.queued = True
        backlog.streams[generation.id] = self
        backlog.open += 1
        backlog.queued += 1
        backlog.queued_tokens += len(generation.prompt)

    def schedule(self, at_s: float, cached_tokens: int) -> None:
        self._unqueue()
        super().schedule(at_s, cached_tokens)

    def put(self, ids: Sequence[int], at_s: float) -> None:
        """Nothing happens once it is over: steps that were in flight then may yield more."""
        if self.finish is not None or self.cut:
            return
        self.held += (count := len(ids))
        backlog = self.backlog
        backlog.unread += count
        Stream.put(self, ids, at_s)
        if self.held > backlog.most_of_one or backlog.unread > backlog.most_of_all:
            backlog.bound(self)

    def end(self, finish: str, at_s: float, error: str | None = None) -> None:
        if self.finish is None:
            self._unqueue()
            self.backlog.open -= 1
        super().end(STOP if finish == ABORT and self.stopped else finish, at_s, error)

    def written(self, tokens: int) -> None:
        """So many tokens have left for the client, or will never."""
        tokens = min(tokens, self.held)
        self.held -= tokens
        self.backlog.unread -= tokens

    def drop(self) -> None:
        """Nothing of it is told any more."""
        self.cut = True
        self.written(self.held)

    def release(self) -> None:
        """Its client is done with it."""
        self.written(self.held)
        self.backlog.streams.pop(self.generation.id, None)

    def _unqueue(self) -> None:
        if self.queued:
            self.queued = False
            self.backlog.queued -= 1
            self.backlog.queued_tokens -= len(self.generation.prompt)
