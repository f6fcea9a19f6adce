"""A transport for httpx and its successor that hands requests to an ASGI application in the same process, and streams
what it answers. (Their own waits for the whole answer.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from cbsim.endpoint.way import EXTENSION

Message = MutableMapping[str, Any]
App = Callable[[Any, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Exchange:
    """One request and its answer."""

    def __init__(self, app: App, scope: Message, body: bytes) -> None:
        self._asked: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._left = asyncio.Event()
        self._started = asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.status, self.headers = 500, list[tuple[bytes, bytes]]()
        scope["extensions"] = {EXTENSION: {"way": self}}
        self._task = asyncio.ensure_future(self._answer(app, scope))

    async def started(self) -> None:
        """Return when status and headers are there. Raises what the application did before."""
        await self._started.wait()
        if self._task.done():
            self._task.result()

    async def parts(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            yield part
        await self._task

    async def leave(self) -> None:
        """The client wants no more: as if its connection had been closed."""
        self._left.set()
        if not self._task.done():
            await asyncio.wait([self._task])

    # -- the Way of a streamed answer: its client keeps what it has not read

    full = False

    def write(self, body: bytes) -> None:
        self._parts.put_nowait(body)

    async def drain(self) -> None: ...

    def abort(self) -> None:
        self._left.set()

    # -- the application

    async def _answer(self, app: App, scope: Message) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._parts.put_nowait(None)
            self._started.set()

    async def _receive(self) -> Message:
        if self._asked is not None:
            asked, self._asked = self._asked, None
            return asked
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
            self._started.set()
            return
        if body := message.get("body"):
            self._parts.put_nowait(bytes(body))


def scope_of(request: Any) -> Message:
    """The ASGI scope of a request of httpx."""
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.partition(b"?")[0],
        "query_string": url.query,
        "root_path": "",
        "server": (url.host, url.port),
        "client": ("127.0.0.1", 1),
        "state": {},
    }


def transport(app: App, http: Any) -> Any:
    """A transport for clients of the module `http`, httpx or httpx2."""

    class Parts(http.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, exchange: Exchange) -> None:
            self._exchange = exchange

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for part in self._exchange.parts():
                yield part

        async def aclose(self) -> None:
            await self._exchange.leave()

    class Transport(http.AsyncBaseTransport):  # type: ignore[misc]
        async def handle_async_request(self, request: Any) -> Any:
            exchange = Exchange(app, scope_of(request), bytes(await request.aread()))
            await exchange.started()
            return http.Response(exchange.status, headers=exchange.headers, stream=Parts(exchange))

    return Transport()
