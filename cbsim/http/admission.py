"""What clients make an endpoint keep: requests that wait, tokens that nobody has taken. All of it has bounds.

Where requests come in and answers go out: who may enter, under which id, and who is told to leave.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from cbsim.http.backend import ABORT, Backend, Generation, Meter, Stream
from cbsim.http.errors import ApiError
from cbsim.http.settings import Settings

STOP = "stop"


class Backlog:
    """Sums over streams: `open` have not ended, `queued` have not begun, `unread` tokens have not been taken. `slow`
    streams were cut, because too many tokens were kept for them: `cut` is told of each while a token is put.
    """

    __slots__ = ("_cut", "most_of_all", "most_of_one", "open", "queued", "queued_tokens", "slow", "streams", "unread")

    def __init__(self, settings: Settings, cut: Callable[[ClientStream], None]) -> None:
        self.streams: dict[str, ClientStream] = {}  # by the id of the record, until nothing of them is kept
        self.open = self.queued = self.queued_tokens = self.unread = self.slow = 0
        self.most_of_one, self.most_of_all = settings.max_unread_tokens, settings.max_unread_sum
        self._cut = cut

    def bound(self, stream: ClientStream) -> None:
        """Cut this stream if it is past its bound; else all together are, and the one that most is kept for is cut."""
        if stream.buffered > self.most_of_one:
            slowest = stream
        else:
            slowest = max(self.streams.values(), key=lambda each: each.buffered)
        self.slow += 1
        slowest.drop()
        self._cut(slowest)


class ClientStream(Stream):
    """A stream of this endpoint's. It counts in a backlog: while it is queued, until it ends, until it is released.

    `held` tokens were put and have not left for the client. With `stopped`, a stop string has ended its text, and its
    end is not an abort. Once it is `cut` nothing is kept any more.
    """

    __slots__ = ("abort", "backlog", "buffered", "cut", "queued", "stopped")

    def __init__(self, generation: Generation, meter: Meter, backlog: Backlog, abort: Callable[[], None]) -> None:
        super().__init__(generation, meter)
        self.backlog, self.abort = backlog, abort  # `abort` closes the connection of its client at once
        self.buffered = 0
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
        self.buffered += (count := len(ids))
        backlog = self.backlog
        backlog.unread += count
        Stream.put(self, ids, at_s)
        if self.buffered > backlog.most_of_one or backlog.unread > backlog.most_of_all:
            backlog.bound(self)

    def end(self, finish: str, at_s: float, error: str | None = None) -> None:
        if self.finish is None:
            self._unqueue()
            self.backlog.open -= 1
        super().end(STOP if finish == ABORT and self.stopped else finish, at_s, error)

    def written(self, tokens: int) -> None:
        """`tokens` have been written to the client, or never will be."""
        tokens = min(tokens, self.buffered)
        self.buffered -= tokens
        self.backlog.unread -= tokens

    def drop(self) -> None:
        """Cut the stream: nothing more of it is written."""
        self.cut = True
        self.written(self.buffered)

    def release(self) -> None:
        """The client is done with it."""
        self.written(self.buffered)
        self.backlog.streams.pop(self.generation.id, None)

    def _unqueue(self) -> None:
        if self.queued:
            self.queued = False
            self.backlog.queued -= 1
            self.backlog.queued_tokens -= len(self.generation.prompt)


Abort = Callable[[], None]


class AdmissionController:
    """Accepts or rejects (503) requests, assigns their ids, and cancels those whose client has gone. One a session.

    Limits: open streams, queued requests, queued prompt tokens. While `closing`, every request is rejected; `rejected`
    counts rejections by reason.
    """

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self.backend, self.settings = backend, settings
        self.backlog = Backlog(settings, self._slow)
        self.closing = False
        self.rejected: Counter[str] = Counter()
        self._serial = 0

    @property
    def open(self) -> int:
        """Streams that have not ended."""
        return self.backlog.open

    def serial(self) -> int:
        """The next number of this session."""
        self._serial += 1
        return self._serial - 1

    def admit(self, prompts: int) -> None:
        """Raise ApiError 503 if there is no room for `prompts` more. Checked before any work is done for them."""
        if self.closing:
            raise self._api_error("closing", "the server is shutting down")
        if self.backend.dead is not None:
            raise self._api_error("dead", f"the server cannot go on: {self.backend.dead}")
        if self.open + prompts > self.settings.max_streams:
            raise self._api_error("streams", f"more than {self.settings.max_streams} requests are under way")
        if self.backlog.queued + prompts > self.settings.max_queued_requests:
            raise self._api_error("queued_requests", f"more than {self.settings.max_queued_requests} requests wait")

    def submit(self, generations: Sequence[Generation], abort: Abort) -> list[ClientStream]:
        """Submit all requests to the server, or none of them. Raises ApiError 503."""
        self.admit(len(generations))
        tokens = self.backlog.queued_tokens + sum(len(generation.prompt) for generation in generations)
        if tokens > self.settings.max_queued_tokens:
            raise self._api_error(
                "queued_tokens", f"more than {self.settings.max_queued_tokens} tokens of prompts wait"
            )
        meter = self.backend.meter
        streams = [ClientStream(generation, meter, self.backlog, abort) for generation in generations]
        for stream in streams:
            self.backend.submit(stream)
        return streams

    def abandon(self, streams: Sequence[ClientStream]) -> None:
        """Cancel streams whose client has gone or needs no more of them."""
        for stream in streams:
            if stream.finish is None:
                self.backend.cancel(stream)

    def release(self, streams: Sequence[ClientStream]) -> None:
        """Forget streams that are no longer read; those that have not ended are cancelled."""
        self.abandon(streams)
        for stream in streams:
            stream.release()

    def cancel_all(self) -> None:
        self.abandon([*self.backlog.streams.values()])

    def _slow(self, stream: ClientStream) -> None:
        """Cancel a stream whose client reads too slowly. Deferred: we are inside the step that produced the token."""
        asyncio.get_running_loop().call_soon(partial(self._cut, stream))

    def _cut(self, stream: ClientStream) -> None:
        self.abandon([stream])
        stream.abort()

    def _api_error(self, reason: str, message: str) -> ApiError:
        self.rejected[reason] += 1
        self.backend.meter.rejected(reason)
        return ApiError(503, message, retry_s=self.settings.retry_s)
