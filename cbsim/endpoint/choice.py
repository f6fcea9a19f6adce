"""The text of one answer, as its tokens come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cbsim.endpoint.backend import ABORT, ERROR
from cbsim.endpoint.backlog import STOP, Told
from cbsim.endpoint.errors import Refusal
from cbsim.endpoint.stops import Stops
from cbsim.endpoint.tokenizer import Decoder

BATCH = 256
"""Tokens of a client that has fallen behind that are written at once."""


class Choice:
    """`tokens` of its stream have become text. `finish` is None until the last of it: `stop`, `length`, `abort` or
    `error`; `stop_reason` is the stop string or token that ended it, where one did.
    """

    __slots__ = ("_decoder", "_ids", "_stops", "finish", "index", "stop_reason", "stream", "tokens")

    def __init__(self, index: int, stream: Told, decoder: Decoder, stops: Stops | None) -> None:
        self.index, self.stream, self._decoder, self._stops = index, stream, decoder, stops
        self.tokens = 0
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self._ids: Sequence[int] = ()

    @property
    def over(self) -> bool:
        return self.finish is not None

    @property
    def error(self) -> Refusal | None:
        """What its client is told if it does not get an answer."""
        if self.finish == ABORT:
            return Refusal(503, "the request was given up by the server")
        if self.finish == ERROR:
            return Refusal(500, self.stream.error or "the server has failed")
        return None

    @property
    def behind(self) -> bool:
        """There are more texts at once."""
        return bool(self._ids) or self.stream.unread > 0

    async def ready(self) -> None:
        """Return when there is a text, or it is over."""
        if self.behind:
            await asyncio.sleep(0)  # others first: a step may be due
        else:
            await self.stream.ready()

    def texts(self) -> list[str]:
        """What has come since the last time, a text a token, at most BATCH; none once it is over. The stream has to be
        told when they were `written`.
        """
        stream = self.stream
        if stream.cut:
            self.finish = ABORT
            return []
        ids = self._ids or stream.unread_ids()
        self._ids = ids[BATCH:]
        ids = ids[:BATCH]
        if self._stops is None:
            feed = self._decoder.feed
            texts = [feed(token) for token in ids]
            self.tokens += len(ids)
        else:
            texts = self._until_stop(ids, self._stops)
        if self.finish is None and stream.finish is not None and not self._ids and not stream.unread:
            self._end(texts, ids)
        return texts

    def _until_stop(self, ids: Sequence[int], stops: Stops) -> list[str]:
        texts = []
        for token in ids:
            self.tokens += 1
            text, hit = stops.feed(self._decoder.feed(token), self.tokens)
            texts.append(text)
            if hit:
                self.finish, self.stop_reason = STOP, stops.hit
                break
        return texts

    def _end(self, texts: list[str], ids: Sequence[int]) -> None:
        stream = self.stream
        self.finish = stream.finish
        if self._stops is not None and (rest := self._stops.rest()):
            texts[-1:] = [texts[-1] + rest] if texts else [rest]
        if self.finish == STOP and ids and ids[-1] in stream.generation.stop_token_ids:
            self.stop_reason = ids[-1]
