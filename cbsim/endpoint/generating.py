"""POST /v1/completions and /v1/chat/completions, streamed or not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from cbsim.endpoint.answer import document, times, usage
from cbsim.endpoint.asking import ChatAsked, CompletionAsked, Sampled, StreamOptions, read
from cbsim.endpoint.backend import ERROR
from cbsim.endpoint.backlog import STOP, Told
from cbsim.endpoint.body import header, read_json, reply
from cbsim.endpoint.choice import Choice
from cbsim.endpoint.desk import Desk
from cbsim.endpoint.errors import Refusal
from cbsim.endpoint.events import DONE, Chunks, compact, event
from cbsim.endpoint.prompting import Encoder, checked, encoded, generations, model_is, texts_of
from cbsim.endpoint.stops import Stops
from cbsim.endpoint.telling import Round, Telling
from cbsim.endpoint.way import Way, way_of

LOG = logging.getLogger("cbsim.endpoint")
MOST_ID = 128


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer under way: what all its parts say, its choices, how it is told."""

    base: dict[str, Any]
    choices: Sequence[Choice]
    chat: bool
    streamed: bool
    options: StreamOptions
    timed: bool
    headers: list[tuple[bytes, bytes]]

    @property
    def streams(self) -> list[Told]:
        return [choice.stream for choice in self.choices]


class Generating:
    """One of the two endpoints, as an ASGI application."""

    def __init__(self, desk: Desk, encoder: Encoder, chat: bool) -> None:
        self._desk, self._encoder, self._chat, self._round = desk, encoder, chat, Round()
        self._model: type[Sampled] = ChatAsked if chat else CompletionAsked
        self._prefix, self._object = ("chatcmpl-", "chat.completion") if chat else ("cmpl-", "text_completion")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _given_id(scope)
        body = await read_json(scope, receive, self._desk.settings.max_body_bytes)
        way = way_of(scope, send)
        answer = await self._submit(read(self._model, body), given, way)
        async with self._while_there(receive, answer.streams) as gone:
            if answer.streamed:
                await self._stream(answer, way, send, gone)
            else:
                await self._whole(answer, send, gone)

    async def _submit(self, request: Sampled, given: str | None, way: Way) -> Reply:
        """From here on the server works on it. Refusal if it cannot."""
        desk = self._desk
        model_is(request.model, desk.backend)
        if request.stream_options is not None and not request.stream:
            raise Refusal(400, "`stream_options`: only with `stream` true", "stream_options")
        prompts = await self._prompts(request)
        name, records = self._names(given or request.request_id, len(prompts))
        streams = desk.submit(generations(request, prompts, records, desk.backend), way.abort)
        self._began(streams)
        stops = request.stop
        choices = [
            Choice(
                index,
                stream,
                desk.backend.tokenizer.decoder(),
                Stops(stops, bool(request.include_stop_str_in_output), request.min_tokens or 0) if stops else None,
            )
            for index, stream in enumerate(streams)
        ]
        streamed = bool(request.stream)
        return Reply(
            base={
                "id": f"{self._prefix}{name}",
                "object": "chat.completion.chunk" if streamed and self._chat else self._object,
                "created": int(time.time()),
                "model": desk.backend.model,
            },
            choices=choices,
            chat=self._chat,
            streamed=streamed,
            options=request.stream_options or StreamOptions(),
            timed=desk.settings.request_metrics or bool(request.include_metrics),
            headers=[(b"x-request-id", name.encode())],
        )

    async def _prompts(self, request: Sampled) -> list[list[int]]:
        if isinstance(request, ChatAsked):
            self._desk.admit(1)
            return [checked(await self._encoder.chat(request.messages), self._encoder, "messages")]
        assert isinstance(request, CompletionAsked)
        texts = texts_of(request, self._desk.settings)
        self._desk.admit(len(texts))
        return await encoded(texts, self._encoder)

    def _began(self, streams: Sequence[Told]) -> None:
        """Refusal 400 if the server said at once that it will not take one of them: then it gets none."""
        failed = next((stream for stream in streams if stream.finish == ERROR), None)
        if failed is not None:
            self._desk.release(streams)
            raise Refusal(400, failed.error or "the server does not take this request")

    def _names(self, given: str | None, number: int) -> tuple[str, list[str]]:
        """The request's name for its client, and those of its prompts in the record. These end with a number of the
        session, so they are unique whatever clients call their requests.
        """
        serials = [self._desk.serial() for _ in range(number)]
        if given is None:
            return str(serials[0]), [f"{self._prefix}{serial}" for serial in serials]
        return given, [f"{self._prefix}{given}-{serial}" for serial in serials]

    @asynccontextmanager
    async def _while_there(self, receive: Receive, streams: Sequence[Told]) -> AsyncIterator[asyncio.Task[None]]:
        """Its streams are cancelled as soon as the client leaves, or when we leave. The task ends if it does."""
        gone = asyncio.get_running_loop().create_task(self._until_gone(receive, streams))
        try:
            yield gone
        finally:
            gone.cancel()
            self._desk.release(streams)

    async def _until_gone(self, receive: Receive, streams: Sequence[Told]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._desk.leave(streams)
        for stream in streams:
            stream.drop()

    async def _stream(self, answer: Reply, way: Way, send: Send, gone: asyncio.Task[None]) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *answer.headers]})
        counted = bool(answer.options.continuous_usage_stats)
        chunks = [Chunks(choice, answer.base, answer.chat, counted) for choice in answer.choices]
        try:
            await _all([Telling(each, way, self._round, self._settle).run() for each in chunks])
            last = b"" if gone.done() else _last(answer)
        except Exception:
            LOG.exception("an answer could not be told")
            last = _failed(Refusal(500, "the answer could not be told"))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _whole(self, answer: Reply, send: Send, gone: asyncio.Task[None]) -> None:
        texts: list[list[str]] = [[] for _ in answer.choices]
        await _all([self._collect(choice, parts) for choice, parts in zip(answer.choices, texts, strict=True)])
        if gone.done():
            return
        for choice in answer.choices:
            if (refusal := choice.error) is not None:
                raise refusal
        told = document(answer.base, answer.choices, ["".join(parts) for parts in texts], answer.chat)
        if answer.timed:
            told["metrics"] = times(answer.choices)
        await reply(send, 200, compact(told), answer.headers)

    async def _collect(self, choice: Choice, parts: list[str]) -> None:
        while not choice.over:
            await choice.ready()
            texts = choice.texts()
            parts += texts
            choice.stream.written(len(texts))
        self._settle(choice)

    def _settle(self, choice: Choice) -> None:
        """Its text is over. If a stop string said so, the server does not know yet."""
        if choice.finish == STOP:
            choice.stream.stopped = True
            self._desk.leave([choice.stream])


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """If some of it fails, the rest is cancelled."""
    if len(work) == 1:
        await work[0]
        return
    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(each)


def _given_id(scope: Scope) -> str | None:
    """The client's name of its request. Refusal 400 if it is none that can be repeated."""
    value = header(scope, b"x-request-id")
    if value is None:
        return None
    if not 1 <= len(value) <= MOST_ID or any(not 32 < letter < 127 for letter in value):
        words = f"the header X-Request-Id has to be 1 to {MOST_ID} printable ASCII characters without spaces"
        raise Refusal(400, words, "X-Request-Id")
    return value.decode()


def _failed(refusal: Refusal) -> bytes:
    return b"data: %b\n\n%b" % (refusal.body, DONE)


def _last(answer: Reply) -> bytes:
    """After the last text: an error if there was one, usage if it was asked for, and the end."""
    for choice in answer.choices:
        if (refusal := choice.error) is not None:
            return _failed(refusal)
    extra: dict[str, Any] = {}
    if answer.options.include_usage:
        extra["usage"] = usage(answer.choices)
    if answer.timed:
        extra["metrics"] = times(answer.choices)
    return event({**answer.base, "choices": [], **extra}) + DONE if extra else DONE
