"""Admission of clients' requests to an endpoint: which are accepted, and which streams are cancelled or cut.

Everything that an endpoint stores for clients has bounds: queued requests, and tokens that were not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count

from cbsim.http.asgi import ApiError
from cbsim.http.backend import ABORT, STOP, Backend, Generation, Stream
from cbsim.http.settings import Settings

Abort = Callable[[], None]


class ClientStream(Stream):
    """A stream of this endpoint. It counts in the controller's sums: while it is queued, until it ends, until it is
    released. If `stopped`, a stop string has ended its text, and its end is not an abort. Once it is `cut`, none of its
    tokens are stored.
    """

    __slots__ = ("abort", "admission", "cut", "queued", "stopped")

    def __init__(self, generation: Generation, admission: AdmissionController, abort: Abort) -> None:
        super().__init__(generation, admission.backend.meter)
        self.admission, self.abort = admission, abort  # `abort` closes the connection of its client at once
        self.cut = self.stopped = False
        self.queued = True
        admission.streams[generation.id] = self
        admission.open += 1
        admission.queued += 1
        admission.queued_tokens += len(generation.prompt)

    def schedule(self, at_s: float, cached_tokens: int) -> None:
        self._unqueue()
        super().schedule(at_s, cached_tokens)

    def put(self, ids: Sequence[int], at_s: float) -> None:
        """Buffer tokens, unless the stream is over: steps that were in flight then may yield more."""
        if self.finish is not None or self.cut:
            return
        admission = self.admission
        admission.unread += len(ids)
        Stream.put(self, ids, at_s)
        if len(self._unread) > admission.most_of_one or admission.unread > admission.most_of_all:
            admission.bound(self)

    def end(self, finish: str, at_s: float, error: str | None = None) -> None:
        if self.finish is None:
            self._unqueue()
            self.admission.open -= 1
        super().end(STOP if finish == ABORT and self.stopped else finish, at_s, error)

    def take(self, most: int | None = None) -> list[int]:
        ids = Stream.take(self, most)
        self.admission.unread -= len(ids)
        return ids

    def drop(self) -> None:
        """Cut the stream: no more of it is written."""
        self.cut = True
        self.take()

    def release(self) -> None:
        """Release the stream, as its client no longer reads it."""
        self.take()
        self.admission.streams.pop(self.generation.id, None)

    def _unqueue(self) -> None:
        if self.queued:
            self.queued = False
            self.admission.queued -= 1
            self.admission.queued_tokens -= len(self.generation.prompt)


class AdmissionController:
    """A controller that accepts or rejects (503) requests, and cancels those whose client has gone; one per session.
    Limits: open streams, queued requests, queued prompt tokens. While `closing`, every request is rejected. Sums over
    streams: `open` have not ended, `queued` have not begun, `unread` tokens were not read; `slow` ones were cut,
    because their clients read too slowly.
    """

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self.backend, self.settings = backend, settings
        self.streams: dict[str, ClientStream] = {}  # id in the record -> stream, until it is released
        self.open = self.queued = self.queued_tokens = self.unread = self.slow = 0
        self.most_of_one, self.most_of_all = settings.max_unread_tokens, settings.max_unread_sum
        self.closing = False
        self.serials = count()  # a number for each prompt of the session

    def admit(self, prompts: int) -> None:
        """Raise ApiError 503 if there is no room for `prompts` more. Called before any work is done for them."""
        settings = self.settings
        if self.closing:
            raise self._api_error("closing", "the server is shutting down")
        if self.backend.dead is not None:
            raise self._api_error("dead", f"the server cannot go on: {self.backend.dead}")
        if self.open + prompts > settings.max_streams:
            raise self._api_error("streams", f"more than {settings.max_streams} requests are under way")
        if self.queued + prompts > settings.max_queued_requests:
            raise self._api_error("queued_requests", f"more than {settings.max_queued_requests} requests wait")

    def submit(self, generations: Sequence[Generation], abort: Abort) -> list[ClientStream]:
        """Submit all requests to the server, or none of them. Raises ApiError 503."""
        self.admit(len(generations))
        tokens, most = sum(len(generation.prompt) for generation in generations), self.settings.max_queued_tokens
        if self.queued_tokens + tokens > most:
            raise self._api_error("queued_tokens", f"more than {most} tokens of prompts wait")
        streams = [ClientStream(generation, self, abort) for generation in generations]
        for stream in streams:
            self.backend.submit(stream)
        return streams

    def abandon(self, streams: Sequence[ClientStream]) -> None:
        """Cancel streams whose client has gone or needs no more tokens."""
        for stream in streams:
            if stream.finish is None:
                self.backend.cancel(stream)

    def release(self, streams: Sequence[ClientStream]) -> None:
        """Release streams that are no longer read; those that have not ended are cancelled."""
        self.abandon(streams)
        for stream in streams:
            stream.release()

    def bound(self, stream: ClientStream) -> None:
        """Cut this stream if it exceeds its bound; else the sum of all exceeds its own, and the stream with the most
        unread tokens is cut. It is cancelled later, as this call is inside the step that produced the token.
        """
        if stream.unread <= self.most_of_one:
            stream = max(self.streams.values(), key=lambda each: each.unread)
        self.slow += 1
        stream.drop()
        asyncio.get_running_loop().call_soon(self._cut, stream)

    def _cut(self, stream: ClientStream) -> None:
        self.abandon([stream])
        stream.abort()

    def _api_error(self, reason: str, message: str) -> ApiError:
        self.backend.meter.rejected(reason)
        return ApiError(503, message, retry_s=self.settings.retry_s)
