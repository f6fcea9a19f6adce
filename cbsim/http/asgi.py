"""Request bodies, answers, streamed or whole, and errors, as ASGI messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from http import HTTPStatus
from typing import Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
JSON = "application/json"
GENERATIONS = ("/v1/chat/completions", "/v1/completions")
EXTENSION = "cbsim.response_writer"
"""An ASGI extension whose `writer` is the ResponseWriter of this request's answer, once its head was sent."""


class ApiError(Exception):
    """An error answered to a request, in the form that OpenAI's clients expect. `param` names the field."""

    def __init__(self, status: int, message: str, param: str | None = None, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.retry_s = status, message, param, retry_s

    @property
    def body(self) -> bytes:
        kind = TYPES.get(self.status) or HTTPStatus(self.status).phrase
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}, ensure_ascii=False).encode()

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        extra = [] if self.retry_s is None else [(b"retry-after", b"%d" % self.retry_s)]
        if self.status == 401:
            extra.append((b"www-authenticate", b"Bearer"))
        return extra


class ResponseWriter(Protocol):
    @property
    def full(self) -> bool:
        """True if the client is behind: call `drain` before more is written."""

    def write(self, body: bytes) -> None:
        """Write a part of the answer's body at once. Does nothing if the client has disconnected."""

    async def drain(self) -> None:
        """Return when the writer is not full, or the client has disconnected."""

    def abort(self) -> None:
        """Close the connection without writing anything more."""


class Messages:
    """A ResponseWriter for any ASGI server, which writes by ASGI messages."""

    def __init__(self, send: Send) -> None:
        self._send, self._parts = send, list[bytes]()

    @property
    def full(self) -> bool:
        return bool(self._parts)

    def write(self, body: bytes) -> None:
        self._parts.append(body)

    async def drain(self) -> None:
        if self._parts:
            parts, self._parts = self._parts, []
            await self._send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})

    def abort(self) -> None: ...


def response_writer(scope: Scope, send: Send) -> ResponseWriter:
    writer: ResponseWriter | None = scope.get("extensions", {}).get(EXTENSION, {}).get("writer")
    return writer or Messages(send)


Headers = Iterable[tuple[bytes, bytes]]


async def read_json(request: Request, most_bytes: int) -> bytes:
    """Read a JSON body. Raises ApiError: 415 if not plain JSON, 413 beyond `most_bytes`; ClientDisconnect."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != JSON:
        raise ApiError(415, "Unsupported Media Type: only 'application/json' is allowed")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "Unsupported Media Type: a body with a Content-Encoding is not taken")
    return await read_body(request, most_bytes)


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Read a body. Raises ApiError 413 beyond `most_bytes`; ClientDisconnect."""
    too_long = ApiError(413, f"the body is longer than {most_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > most_bytes:
        raise too_long
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            raise too_long
    return bytes(body)


async def until_gone(receive: Receive) -> None:
    """Return when the client has left, or has the end of its answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    head = [(b"content-type", JSON.encode()), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: ApiError, headers: Headers = ()) -> None:
    await reply(send, error.status, error.body, [*headers, *error.headers])
