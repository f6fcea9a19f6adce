"""The body of a request as it comes, and answers that are not streamed, in ASGI's messages."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from cbsim.endpoint.errors import Refusal

JSON = b"application/json"
Headers = Iterable[tuple[bytes, bytes]]


class GoneError(Exception):
    """The client has left: nobody reads an answer."""


def header(scope: Scope, name: bytes) -> bytes | None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


async def read_json(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """Refusal 415 if it is not said to be JSON, or said to be compressed; 413 if it is too long, whatever its length is
    said to be.
    """
    kind = (header(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if kind != JSON:
        raise Refusal(415, "Unsupported Media Type: only 'application/json' is allowed")
    if (header(scope, b"content-encoding") or b"identity").strip().lower() != b"identity":
        raise Refusal(415, "Unsupported Media Type: a body with a Content-Encoding is not taken")
    too_long = Refusal(413, f"the body is longer than {most_bytes} bytes")
    length = header(scope, b"content-length") or b""
    if length.isdigit() and len(length) < 20 and int(length) > most_bytes:
        raise too_long
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most_bytes:
            raise too_long
        more = message.get("more_body", False)
    return b"".join(parts)


async def reply(send: Send, status: int, body: bytes, headers: Headers = (), kind: bytes = JSON) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", kind), length, *headers],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def refuse(send: Send, refusal: Refusal, headers: Headers = ()) -> None:
    await reply(send, refusal.status, refusal.body, [*headers, *refusal.headers])
