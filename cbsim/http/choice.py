"""The text of one answer, as its tokens come.

Stop strings, found in a text that comes in pieces.

What an answer says of itself: its ids, usage, times, and the whole of it as one document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cbsim.http.admission import STOP, ClientStream
from cbsim.http.backend import ABORT, ERROR, Stream
from cbsim.http.errors import ApiError
from cbsim.http.tokenizer import Decoder

BATCH = 256
"""Tokens of a client that has fallen behind that are written at once."""


class Choice:
    """`tokens` of its stream have become text. `finish` is None until the last of it: `stop`, `length`, `abort` or
    `error`; `stop_reason` is the stop string or token that ended it, where one did.
    """

    __slots__ = ("_decoder", "_ids", "_stops", "finish", "index", "stop_reason", "stream", "tokens")

    def __init__(self, index: int, stream: ClientStream, decoder: Decoder, stops: Stops | None) -> None:
        self.index, self.stream, self._decoder, self._stops = index, stream, decoder, stops
        self.tokens = 0
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self._ids: Sequence[int] = ()

    @property
    def over(self) -> bool:
        return self.finish is not None

    @property
    def error(self) -> ApiError | None:
        """What its client is told if it does not get an answer."""
        if self.finish == ABORT:
            return ApiError(503, "the request was given up by the server")
        if self.finish == ERROR:
            return ApiError(500, self.stream.error or "the server has failed")
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


class Stops:
    """The text ends at the stop string that ends first; of two that end together, the longer one counts. What may be
    the beginning of a stop string is withheld. `hit` is the one that was found.
    """

    __slots__ = ("_held", "_include", "_least", "_stops", "hit")

    def __init__(self, stops: Sequence[str], include: bool, min_tokens: int = 0) -> None:
        self._stops, self._include, self._least = tuple(stops), include, min_tokens
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str, tokens: int) -> tuple[str, bool]:
        """What may be told now, and whether a stop string ends it. The first `min_tokens` tokens stop nothing."""
        if tokens <= self._least:
            return text, False
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self._held, self.hit = "", text[start:end]
            return text[: end if self._include else start], True
        keep = max(_beginning(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def rest(self) -> str:
        """What was withheld of a text that has ended otherwise."""
        withheld, self._held = self._held, ""
        return withheld


def _beginning(text: str, stop: str) -> int:
    """Characters at the end of `text`, which does not contain `stop`, that `stop` begins with."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(stop[0], at + 1)
    return 0


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of all choices; `cached_tokens` are those whose KV the server had."""
    prompt = sum(len(choice.stream.generation.prompt) for choice in choices)
    completion_tokens = sum(choice.tokens for choice in choices)
    cached = sum(choice.stream.cached_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def times(choices: Sequence[Choice]) -> dict[str, float | None] | None:
    """Milliseconds of one request on the server's clock, by vLLM's definitions: time to first token is counted from
    when it was scheduled. None of several requests at once.
    """
    return _times(choices[0].stream) if len(choices) == 1 else None


def _times(stream: Stream) -> dict[str, float | None]:
    began, first, last, tokens = stream.scheduled_s, stream.first_s, stream.last_s, stream.tokens
    busy = None if began is None or last is None else last - began
    return {
        "time_to_first_token_ms": None if began is None or first is None else (first - began) * 1e3,
        "generation_time_ms": None if first is None or last is None else (last - first) * 1e3,
        "queue_time_ms": None if began is None else (began - stream.arrived_s) * 1e3,
        "mean_itl_ms": None if tokens < 2 or first is None or last is None else (last - first) / (tokens - 1) * 1e3,
        "tokens_per_second": tokens / busy if busy else None,
    }


def document(base: dict[str, Any], choices: Sequence[Choice], texts: Sequence[str], chat: bool) -> dict[str, Any]:
    """An answer that is not streamed."""
    documents = [
        {
            "index": choice.index,
            **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        for choice, text in zip(choices, texts, strict=True)
    ]
    return {**base, "choices": documents, "usage": usage(choices)}
