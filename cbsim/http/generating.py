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

from cbsim.http.admission import STOP, AdmissionController, ClientStream
from cbsim.http.asgi import ResponseWriter, header, read_json, reply, response_writer
from cbsim.http.backend import ERROR
from cbsim.http.choice import Choice, Stops, document, times, usage
from cbsim.http.errors import ApiError
from cbsim.http.requests import (
    ChatRequest,
    CompletionRequest,
    Encoder,
    GenerationRequest,
    StreamOptions,
    checked,
    encoded,
    generations,
    model_is,
    read,
    texts_of,
)
from cbsim.http.sse import DONE, Chunks, FlushRound, StreamWriter, compact, event

LOG = logging.getLogger("cbsim.http")
MOST_ID = 128


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer in progress: the fields all its parts repeat, its choices, and how it is written."""

    base: dict[str, Any]
    choices: Sequence[Choice]
    chat: bool
    streamed: bool
    options: StreamOptions
    timed: bool
    headers: list[tuple[bytes, bytes]]

    @property
    def streams(self) -> list[ClientStream]:
        return [choice.stream for choice in self.choices]


class Generating:
    """One of the two endpoints, as an ASGI application."""

    def __init__(self, admission: AdmissionController, encoder: Encoder, chat: bool) -> None:
        self._admission, self._encoder, self._chat, self._round = admission, encoder, chat, FlushRound()
        self._model: type[GenerationRequest] = ChatRequest if chat else CompletionRequest
        self._prefix, self._object = ("chatcmpl-", "chat.completion") if chat else ("cmpl-", "text_completion")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client_id = _given_id(scope)
        body = await read_json(scope, receive, self._admission.settings.max_body_bytes)
        writer = response_writer(scope, send)
        answer = await self._submit(read(self._model, body), client_id, writer)
        async with self._while_there(receive, answer.streams) as gone:
            if answer.streamed:
                await self._stream(answer, writer, send, gone)
            else:
                await self._whole(answer, send, gone)

    async def _submit(self, request: GenerationRequest, client_id: str | None, writer: ResponseWriter) -> Reply:
        """Hand the request to the server. Raises ApiError if it is not accepted."""
        admission = self._admission
        model_is(request.model, admission.backend)
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "`stream_options`: only with `stream` true", "stream_options")
        prompts = await self._prompts(request)
        name, records = self._names(client_id or request.request_id, len(prompts))
        streams = admission.submit(generations(request, prompts, records, admission.backend), writer.abort)
        self._began(streams)
        stops = request.stop
        choices = [
            Choice(
                index,
                stream,
                admission.backend.tokenizer.decoder(),
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
                "model": admission.backend.model,
            },
            choices=choices,
            chat=self._chat,
            streamed=streamed,
            options=request.stream_options or StreamOptions(),
            timed=admission.settings.request_metrics or bool(request.include_metrics),
            headers=[(b"x-request-id", name.encode())],
        )

    async def _prompts(self, request: GenerationRequest) -> list[list[int]]:
        if isinstance(request, ChatRequest):
            self._admission.admit(1)
            return [checked(await self._encoder.chat(request.messages), self._encoder, "messages")]
        assert isinstance(request, CompletionRequest)
        texts = texts_of(request, self._admission.settings)
        self._admission.admit(len(texts))
        return await encoded(texts, self._encoder)

    def _began(self, streams: Sequence[ClientStream]) -> None:
        """Raise ApiError 400 if the server failed one stream at once; the rest are cancelled."""
        failed = next((stream for stream in streams if stream.finish == ERROR), None)
        if failed is not None:
            self._admission.release(streams)
            raise ApiError(400, failed.error or "the server does not take this request")

    def _names(self, client_id: str | None, number: int) -> tuple[str, list[str]]:
        """The request's name for its client, and those of its prompts in the record. These end with a number of the
        session, so they are unique whatever clients call their requests.
        """
        serials = [self._admission.serial() for _ in range(number)]
        if client_id is None:
            return str(serials[0]), [f"{self._prefix}{serial}" for serial in serials]
        return client_id, [f"{self._prefix}{client_id}-{serial}" for serial in serials]

    @asynccontextmanager
    async def _while_there(
        self, receive: Receive, streams: Sequence[ClientStream]
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Cancel the streams when the client disconnects or this context ends. The task ends on a disconnect."""
        gone = asyncio.get_running_loop().create_task(self._until_gone(receive, streams))
        try:
            yield gone
        finally:
            gone.cancel()
            self._admission.release(streams)

    async def _until_gone(self, receive: Receive, streams: Sequence[ClientStream]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._admission.abandon(streams)
        for stream in streams:
            stream.drop()

    async def _stream(self, answer: Reply, writer: ResponseWriter, send: Send, gone: asyncio.Task[None]) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *answer.headers]})
        counted = bool(answer.options.continuous_usage_stats)
        chunks = [Chunks(choice, answer.base, answer.chat, counted) for choice in answer.choices]
        try:
            await _all([StreamWriter(each, writer, self._round, self._settle).run() for each in chunks])
            last = b"" if gone.done() else _last(answer)
        except Exception:
            LOG.exception("an answer could not be written")
            last = _failed(ApiError(500, "the answer could not be written"))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _whole(self, answer: Reply, send: Send, gone: asyncio.Task[None]) -> None:
        texts: list[list[str]] = [[] for _ in answer.choices]
        await _all([self._collect(choice, parts) for choice, parts in zip(answer.choices, texts, strict=True)])
        if gone.done():
            return
        for choice in answer.choices:
            if (error := choice.error) is not None:
                raise error
        answer_ = document(answer.base, answer.choices, ["".join(parts) for parts in texts], answer.chat)
        if answer.timed:
            answer_["metrics"] = times(answer.choices)
        await reply(send, 200, compact(answer_), answer.headers)

    async def _collect(self, choice: Choice, parts: list[str]) -> None:
        while not choice.over:
            await choice.ready()
            texts = choice.texts()
            parts += texts
            choice.stream.written(len(texts))
        self._settle(choice)

    def _settle(self, choice: Choice) -> None:
        """A choice is complete. The server is told to stop if a stop string ended it."""
        if choice.finish == STOP:
            choice.stream.stopped = True
            self._admission.abandon([choice.stream])


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all coroutines; if one fails, the rest are cancelled."""
    if len(work) == 1:
        await work[0]
        return
    async with asyncio.TaskGroup() as group:
        for each in work:
            group.create_task(each)


def _given_id(scope: Scope) -> str | None:
    """The request id the client chose (X-Request-Id), or None. Raises ApiError 400 if it cannot be echoed."""
    value = header(scope, b"x-request-id")
    if value is None:
        return None
    if not 1 <= len(value) <= MOST_ID or any(not 32 < letter < 127 for letter in value):
        message = f"the header X-Request-Id has to be 1 to {MOST_ID} printable ASCII characters without spaces"
        raise ApiError(400, message, "X-Request-Id")
    return value.decode()


def _failed(error: ApiError) -> bytes:
    return b"data: %b\n\n%b" % (error.body, DONE)


def _last(answer: Reply) -> bytes:
    """The end of a stream: an error if there was one, usage if requested, and [DONE]."""
    for choice in answer.choices:
        if (error := choice.error) is not None:
            return _failed(error)
    extra: dict[str, Any] = {}
    if answer.options.include_usage:
        extra["usage"] = usage(answer.choices)
    if answer.timed:
        extra["metrics"] = times(answer.choices)
    return event({**answer.base, "choices": [], **extra}) + DONE if extra else DONE
