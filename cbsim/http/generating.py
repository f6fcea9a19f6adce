"""POST /v1/completions and /v1/chat/completions, streamed or not."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from cbsim.http.admission import AdmissionController, ClientStream
from cbsim.http.answers import DONE, Choice, Chunks, Delivery, FlushRound, Stops, compact, document, event, times, usage
from cbsim.http.asgi import ApiError, Messages, ResponseWriter, read_json, reply, response_writer, until_gone
from cbsim.http.backend import ERROR, STOP
from cbsim.http.requests import ChatRequest, CompletionRequest, Encoder, GenerationRequest, generations, model_is, read

LOG = logging.getLogger("cbsim.http")
MOST_ID = 128


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in progress: its request, the fields that all its chunks repeat, and its choices."""

    request: GenerationRequest
    base: dict[str, Any]
    choices: Sequence[Choice]
    headers: list[tuple[bytes, bytes]]
    timed: bool

    @property
    def error(self) -> ApiError | None:
        return next((error for choice in self.choices if (error := choice.error) is not None), None)

    def end(self) -> bytes:
        """Return the end of a stream: an error if there was one, usage if requested, and [DONE]."""
        if (error := self.error) is not None:
            return failed(error)
        extra: dict[str, Any] = {}
        if self.request.options.include_usage:
            extra["usage"] = usage(self.choices)
        if self.timed:
            extra["metrics"] = times(self.choices)
        return event({**self.base, "choices": [], **extra}) + DONE if extra else DONE


class Generating:
    """An ASGI application of one of the two endpoints."""

    def __init__(self, admission: AdmissionController, encoder: Encoder, chat: bool) -> None:
        self._admission, self._encoder, self._chat, self._round = admission, encoder, chat, FlushRound()
        self._model: type[GenerationRequest] = ChatRequest if chat else CompletionRequest
        self._prefix = "chatcmpl-" if chat else "cmpl-"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; its streams are cancelled when the client disconnects."""
        asked = Request(scope, receive)
        client_id = _client_id(asked)
        body = await read_json(asked, self._admission.settings.max_body_bytes)
        writer = response_writer(scope, send)
        answer = await self._submit(read(self._model, body), client_id, writer)
        streams = [choice.stream for choice in answer.choices]
        gone = asyncio.get_running_loop().create_task(self._until_gone(receive, streams))
        try:
            if answer.request.stream:
                await self._stream(answer, writer, send, gone)
            else:
                await self._whole(answer, send, gone)
        finally:
            gone.cancel()
            self._admission.release(streams)

    async def _submit(self, request: GenerationRequest, client_id: str | None, writer: ResponseWriter) -> Answer:
        """Submit the request to the server. Raises ApiError if it is not accepted, or one stream failed at once."""
        admission, backend = self._admission, self._admission.backend
        model_is(request.model, backend)
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "`stream_options`: only with `stream` true", "stream_options")
        prompts = await self._prompts(request)
        name, records = self._names(client_id or request.request_id, len(prompts))
        streams = admission.submit(generations(request, prompts, records, backend), writer.abort)
        if (failed := next((stream for stream in streams if stream.finish == ERROR), None)) is not None:
            admission.release(streams)
            raise ApiError(400, failed.error or "the server does not take this request")
        stops, include, least = request.stop_strings, bool(request.include_stop_str_in_output), request.min_tokens or 0
        kind = ("chat.completion.chunk" if request.stream else "chat.completion") if self._chat else "text_completion"
        return Answer(
            request,
            {"id": f"{self._prefix}{name}", "object": kind, "created": int(time.time()), "model": backend.model},
            [
                Choice(index, stream, backend.tokenizer.decoder(), Stops(stops, include, least) if stops else None)
                for index, stream in enumerate(streams)
            ],
            headers=[(b"x-request-id", name.encode())],
            timed=bool(request.include_metrics),
        )

    async def _prompts(self, request: GenerationRequest) -> list[list[int]]:
        encoder, admission, context = self._encoder, self._admission, self._admission.backend.max_model_len
        if isinstance(request, ChatRequest):
            admission.admit(1)
            return [encoder.checked(await encoder.chat(request.messages, context), "messages")]
        assert isinstance(request, CompletionRequest)
        prompts = request.prompts(admission.settings.max_prompts)
        admission.admit(len(prompts))
        return [
            encoder.checked(await encoder.plain(prompt, context) if isinstance(prompt, str) else prompt, "prompt")
            for prompt in prompts
        ]

    def _names(self, client_id: str | None, number: int) -> tuple[str, list[str]]:
        """Return the id for the client, and the prompts' in the record, which end with a number of the session."""
        serials = [next(self._admission.serials) for _ in range(number)]
        if client_id is None:
            return str(serials[0]), [f"{self._prefix}{serial}" for serial in serials]
        return client_id, [f"{self._prefix}{client_id}-{serial}" for serial in serials]

    async def _until_gone(self, receive: Receive, streams: Sequence[ClientStream]) -> None:
        await until_gone(receive)
        self._admission.abandon(streams)
        for stream in streams:
            stream.drop()

    async def _stream(self, answer: Answer, writer: ResponseWriter, send: Send, gone: asyncio.Task[None]) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *answer.headers]})
        counted = bool(answer.request.options.continuous_usage_stats)

        def delivery(choice: Choice) -> Delivery:
            chunks = Chunks(choice, answer.base, self._chat, counted)
            return Delivery(choice, lambda texts: writer.write(chunks.encode(texts)), writer, self._round, self._settle)

        try:
            await _all([delivery(choice).run() for choice in answer.choices])
            last = b"" if gone.done() else answer.end()
        except Exception:
            LOG.exception("an answer could not be written")
            last = failed(ApiError(500, "the answer could not be written"))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _whole(self, answer: Answer, send: Send, gone: asyncio.Task[None]) -> None:
        texts: list[list[str]] = [[] for _ in answer.choices]
        unbounded = Messages(send)  # nothing is written before the end
        pairs = zip(answer.choices, texts, strict=True)
        await _all([Delivery(one, parts.extend, unbounded, self._round, self._settle).run() for one, parts in pairs])
        if gone.done():
            return
        if (error := answer.error) is not None:
            raise error
        content = document(answer.base, answer.choices, ["".join(parts) for parts in texts], self._chat)
        if answer.timed:
            content["metrics"] = times(answer.choices)
        await reply(send, 200, compact(content), answer.headers)

    def _settle(self, choice: Choice) -> None:
        """Handle a complete choice: if a stop string ended it, its stream is cancelled in the server."""
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


def _client_id(request: Request) -> str | None:
    """Return the client's request id (X-Request-Id), or None. Raises ApiError 400 if it cannot be echoed."""
    value = request.headers.get("x-request-id")
    if value is not None and not re.fullmatch(f"[!-~]{{1,{MOST_ID}}}", value):
        message = f"the header X-Request-Id has to be 1 to {MOST_ID} printable ASCII characters without spaces"
        raise ApiError(400, message, "X-Request-Id")
    return value


def failed(error: ApiError) -> bytes:
    """Return the end of a stream that has failed."""
    return b"data: %b\n\n%b" % (error.body, DONE)
