"""Where requests come in and answers go out: who may enter, under which id, and who is told to leave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from cbsim.endpoint.backend import Backend, Generation
from cbsim.endpoint.backlog import Backlog, Told
from cbsim.endpoint.errors import Refusal
from cbsim.endpoint.settings import Settings

Abort = Callable[[], None]


class Desk:
    """One for a session. Once it is `closing`, nobody may enter. `refused` counts those turned away by reason."""

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self.backend, self.settings = backend, settings
        self.backlog = Backlog(settings, self._slow)
        self.closing = False
        self.refused: Counter[str] = Counter()
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
        """Refusal 503 if there is no room for so many more. It is asked before work is done for them."""
        if self.closing:
            raise self._refusal("closing", "the server is shutting down")
        if self.backend.dead is not None:
            raise self._refusal("dead", f"the server cannot go on: {self.backend.dead}")
        if self.open + prompts > self.settings.max_streams:
            raise self._refusal("streams", f"more than {self.settings.max_streams} requests are under way")
        if self.backlog.queued + prompts > self.settings.max_queued_requests:
            raise self._refusal("queued_requests", f"more than {self.settings.max_queued_requests} requests wait")

    def submit(self, generations: Sequence[Generation], abort: Abort) -> list[Told]:
        """Hand requests over, now. All enter, or none: Refusal 503."""
        self.admit(len(generations))
        tokens = self.backlog.queued_tokens + sum(len(generation.prompt) for generation in generations)
        if tokens > self.settings.max_queued_tokens:
            raise self._refusal("queued_tokens", f"more than {self.settings.max_queued_tokens} tokens of prompts wait")
        meter = self.backend.meter
        streams = [Told(generation, meter, self.backlog, abort) for generation in generations]
        for stream in streams:
            self.backend.submit(stream)
        return streams

    def leave(self, streams: Sequence[Told]) -> None:
        """Their client has gone, or needs no more of them."""
        for stream in streams:
            if stream.finish is None:
                self.backend.cancel(stream)

    def release(self, streams: Sequence[Told]) -> None:
        """Nobody reads them any more: those that have not ended are cancelled."""
        self.leave(streams)
        for stream in streams:
            stream.release()

    def cancel_all(self) -> None:
        self.leave([*self.backlog.streams.values()])

    def _slow(self, stream: Told) -> None:
        """Not from within the step that put the token."""
        asyncio.get_running_loop().call_soon(partial(self._cut, stream))

    def _cut(self, stream: Told) -> None:
        self.leave([stream])
        stream.abort()

    def _refusal(self, reason: str, message: str) -> Refusal:
        self.refused[reason] += 1
        self.backend.meter.rejected(reason)
        return Refusal(503, message, retry_s=self.settings.retry_s)
