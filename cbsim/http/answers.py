"""Answers, from tokens to the bytes that clients read: text, server-sent events, a single document.

A step has a token for hundreds of streams. No task is woken for it: streams with tokens to write join a flush round,
which writes for all of them as soon as the server's step is over. Only for a client that is behind does a task wait
until it has caught up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from cbsim.http.admission import ClientStream
from cbsim.http.asgi import ApiError, ResponseWriter
from cbsim.http.backend import ABORT, ERROR, STOP

BATCH = 256  # the most tokens written at once for a client that is behind
DONE = b"data: [DONE]\n\n"


class Choice:
    """A choice: its stream's text of `tokens` so far; `finish` once over, `stop_reason` the stop string or token."""

    __slots__ = ("_decoder", "_stops", "finish", "index", "stop_reason", "stream", "tokens")

    def __init__(self, index: int, stream: ClientStream, decoder: Callable[[int], str], stops: Stops | None) -> None:
        self.index, self.stream, self._decoder, self._stops = index, stream, decoder, stops
        self.tokens = 0
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def error(self) -> ApiError | None:
        """The error that the client gets in place of an answer."""
        if self.finish == ABORT:
            return ApiError(503, "the request was given up by the server")
        if self.finish == ERROR:
            return ApiError(500, self.stream.error or "the server has failed")
        return None

    def texts(self) -> list[str]:
        """Return the texts of the tokens since the last call, one per token, at most BATCH; none once it is over."""
        stream = self.stream
        if stream.cut:
            self.finish = ABORT
            return []
        ids = stream.take(BATCH)
        if self._stops is None:
            texts = [*map(self._decoder, ids)]
            self.tokens += len(ids)
        else:
            texts = self._until_stop(ids, self._stops)
        if self.finish is None and stream.finish is not None and not stream.unread:
            self._end(texts, ids)
        return texts

    def _until_stop(self, ids: Sequence[int], stops: Stops) -> list[str]:
        texts = []
        for token in ids:
            self.tokens += 1
            delta, hit = stops.feed(self._decoder(token), self.tokens)
            texts.append(delta)
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
    """A detector of stop strings. The text ends at the stop string that ends first; of two that end together, the
    longer one counts. Text that may be the beginning of a stop string is withheld. `hit` is the one that was found.
    """

    __slots__ = ("_include", "_least", "_stops", "_withheld", "hit")

    def __init__(self, stops: Sequence[str], include: bool, min_tokens: int = 0) -> None:
        self._stops, self._include, self._least = tuple(stops), include, min_tokens
        self._withheld = ""
        self.hit: str | None = None

    def feed(self, delta: str, tokens: int) -> tuple[str, bool]:
        """Return the text to write now, and whether a stop string ends it; the first `min_tokens` tokens cannot."""
        if tokens <= self._least:
            return delta, False
        pending = self._withheld + delta
        ends = [(at + len(stop), at) for stop in self._stops if (at := pending.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self._withheld, self.hit = "", pending[start:end]
            return pending[: end if self._include else start], True
        keep = max(_beginning(pending, stop) for stop in self._stops)
        self._withheld = pending[len(pending) - keep :]
        return pending[: len(pending) - keep], False

    def rest(self) -> str:
        """Return the withheld end of a text in which no stop string followed."""
        rest, self._withheld = self._withheld, ""
        return rest


def _beginning(pending: str, stop: str) -> int:
    """Return the length of the longest end of `pending`, which does not contain `stop`, that is a prefix of `stop`."""
    at = pending.find(stop[0], max(0, len(pending) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(pending[at:]):
            return len(pending) - at
        at = pending.find(stop[0], at + 1)
    return 0


class FlushRound:
    """A round of writes, called in the order of joining when the event loop is next free. They must not raise."""

    def __init__(self) -> None:
        self._joined: list[Callable[[], None]] = []

    def join(self, write: Callable[[], None]) -> None:
        if not self._joined:
            asyncio.get_running_loop().call_soon(self._go)
        self._joined.append(write)

    def _go(self) -> None:
        joined, self._joined = self._joined, []
        for write in joined:
            write()


class Delivery:
    """The delivery of one choice: `put` takes its emitted texts, unless `writer` is full. `settle` is called once, when
    the text is complete, before its last part is put. That of a failed choice is not put: the choice has an error.
    """

    __slots__ = ("_choice", "_pause", "_put", "_round", "_settle", "_writer")

    def __init__(
        self,
        choice: Choice,
        put: Callable[[list[str]], None],
        writer: ResponseWriter,
        round_: FlushRound,
        settle: Callable[[Choice], None],
    ) -> None:
        self._choice, self._put, self._writer, self._round, self._settle = choice, put, writer, round_, settle
        self._pause: asyncio.Future[None]

    async def run(self) -> None:
        """Return when all of the choice is put. Raises the exception of a failed write."""
        choice, loop = self._choice, asyncio.get_running_loop()
        try:
            while choice.finish is None:
                self._pause = loop.create_future()
                self._flush()
                await self._pause
                await self._writer.drain()
                if choice.stream.unread:
                    await asyncio.sleep(0)  # let other tasks run first: a step may be due
        finally:
            choice.stream.listen(None)

    def _heard(self) -> None:
        self._round.join(self._flush)

    def _flush(self) -> None:
        """Write the available texts. The pause ends if the text is over, or more has to be written later."""
        if self._pause.done():  # `run` has ended
            return
        try:
            going = self._write()
        except Exception as error:
            self._pause.set_exception(error)
            return
        if going:
            self._choice.stream.listen(self._heard)
        else:
            self._pause.set_result(None)

    def _write(self) -> bool:
        """Write the available texts; return whether to wait for more tokens."""
        choice = self._choice
        texts = choice.texts()
        if choice.finish is not None:
            if choice.error is not None:
                return False
            self._settle(choice)
        elif not texts:
            return True
        self._put(texts)
        return not (choice.finish is not None or choice.stream.unread or self._writer.full)


@lru_cache(maxsize=65_536)
def escaped(string: str) -> bytes:
    """Return the characters inside the quotes of a JSON string."""
    return json.dumps(string, ensure_ascii=False)[1:-1].encode()


def compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % compact(value)


class Chunks:
    """The events of one choice. `base` are the fields of every chunk (id, object, created, model), encoded once."""

    __slots__ = ("_choice", "_close", "_continuous", "_head", "_next", "_prompt_tokens", "_role")

    def __init__(self, choice: Choice, base: dict[str, Any], chat: bool, continuous: bool) -> None:
        self._choice, self._continuous = choice, continuous
        self._prompt_tokens = len(choice.stream.generation.prompt)
        start = b'data: %b,"choices":[{"index":%d,' % (compact(base)[:-1], choice.index)
        self._head = start + (b'"delta":{"content":"' if chat else b'"text":"')
        self._close = (b'"}' if chat else b'"') + b',"logprobs":null,"finish_reason":'
        self._next = self._close + b"null}]}\n\n"
        self._role = b""
        if chat:
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            self._role = b"%b%b%b}\n\n" % (start, role, self._usage(0))

    def encode(self, texts: list[str]) -> bytes:
        """Encode the newest texts of the choice, a chunk each, the last with the finish reason if it is over."""
        choice, head = self._choice, self._head
        role, self._role = self._role, b""
        if choice.finish is None and not self._continuous:
            tail = self._next
            return role + b"".join([head + escaped(delta) + tail for delta in texts])
        texts = texts or [""]
        reasons = [b"null"] * len(texts)
        if choice.finish is not None:
            reasons[-1] = b'%b,"stop_reason":%b' % (compact(choice.finish), compact(choice.stop_reason))
        return role + b"".join(
            b"%b%b%b%b}]%b}\n\n" % (head, escaped(delta), self._close, reason, self._usage(number))
            for number, (delta, reason) in enumerate(zip(texts, reasons, strict=True), choice.tokens - len(texts) + 1)
        )

    def _usage(self, tokens: int) -> bytes:
        if not self._continuous:
            return b""
        counts = (self._prompt_tokens, tokens, self._prompt_tokens + tokens)
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % counts


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts of all choices; `cached_tokens` are those whose KV was in the prefix cache."""
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
    """Return the times of one request in milliseconds of the server's clock, by vLLM's definitions: time to first token
    is counted from when it was scheduled. None for several requests at once.
    """
    if len(choices) > 1:
        return None
    stream = choices[0].stream
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
    """Return an answer that is not streamed."""
    documents = [
        {
            "index": choice.index,
            **({"message": {"role": "assistant", "content": content}} if chat else {"text": content}),
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        for choice, content in zip(choices, texts, strict=True)
    ]
    return {**base, "choices": documents, "usage": usage(choices)}
