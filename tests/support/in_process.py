"""Applications on the same loop as their clients: a transport of httpx without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx

from cbsim.virtual.server import Exchange


class Parts(Exchange, httpx.AsyncByteStream):
    """An answer. If the server closes the connection it ends with an error, as that of a socket."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True
        super().abort()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in super().__aiter__():
            yield part
        if self.aborted:
            raise httpx.ReadError("the server closed the connection")


class Transport(httpx.AsyncBaseTransport):
    def __init__(self, app: Any) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        parts = Parts(self._app, request, bytes(await request.aread()))
        await parts.started()
        return httpx.Response(parts.status, headers=parts.headers, stream=parts)
