"""How a streamed answer leaves for its client."""

from __future__ import annotations

from typing import Protocol

from starlette.types import Scope, Send

EXTENSION = "cbsim.way"
"""An ASGI extension: `way` is the Way of this request's answer, once its head was sent."""


class Way(Protocol):
    @property
    def full(self) -> bool:
        """Its client is behind: `drain` before more is written."""

    def write(self, body: bytes) -> None:
        """Some of the answer's body, at once. Nothing happens if the client has left."""

    async def drain(self) -> None:
        """Return when it is not full, or the client has left."""

    def abort(self) -> None:
        """Close the connection without another word."""


class Messages:
    """The way of an ASGI server that has no other: by its messages."""

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


def way_of(scope: Scope, send: Send) -> Way:
    way: Way | None = scope.get("extensions", {}).get(EXTENSION, {}).get("way")
    return way or Messages(send)
