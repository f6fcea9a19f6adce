"""Failures on demand, for tests of routers and clients: statuses, streams that break, and a slow start."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cbsim.http.asgi import EXTENSION, GENERATIONS, ApiError, ResponseWriter, response_writer, send_error

STATUSES, BREAK = ("429", "500", "503"), "break"
MOST_PARTS = 8  # of a stream that breaks


@dataclass(frozen=True, slots=True)
class Failures:
    """The shares of requests that fail, by status or BREAK. Which ones follows from the seed and their number. Until
    `start_s` seconds after its start a server answers everything with 503.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    start_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.shares) or self.start_s > 0

    def drawn(self, number: int) -> tuple[str | None, int]:
        """Return how request `number` fails, None if it does not, and after how many parts if its stream breaks."""
        rng = Random(f"{self.seed}/{number}")
        at = rng.random()
        for name, share in self.shares.items():
            at -= share
            if at < 0:
                return name, rng.randint(0, MOST_PARTS)
        return None, 0


class Failing:
    """An application some of whose requests fail. It starts when it is made, on a running loop."""

    def __init__(self, app: ASGIApp, failures: Failures) -> None:
        self._app, self._failures, self._number = app, failures, -1
        self._ready_s = asyncio.get_running_loop().time() + failures.start_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: str | None = None
        parts = 0
        if asyncio.get_running_loop().time() < self._ready_s:
            failure = "503"
        elif scope.get("path") in GENERATIONS:
            self._number += 1
            failure, parts = self._failures.drawn(self._number)
        if failure in STATUSES:
            reason = "the server fails on demand, or is starting"
            await send_error(send, ApiError(int(failure), reason, retry_s=None if failure == "500" else 1))
            return
        if failure == BREAK:
            broken = _Broken(response_writer(scope, send), parts)
            scope, send = {**scope, "extensions": {EXTENSION: {"writer": broken}}}, broken.ends(send)
        await self._app(scope, receive, send)


class _Broken:
    """A ResponseWriter that closes the connection after some parts of an answer, or in place of its end."""

    def __init__(self, writer: ResponseWriter, parts: int) -> None:
        self._writer, self._left = writer, parts
        self.drain, self.abort = writer.drain, writer.abort

    @property
    def full(self) -> bool:
        return self._writer.full

    def write(self, body: bytes) -> None:
        self._left -= 1
        if self._left < 0:
            self.abort()
        else:
            self._writer.write(body)

    def ends(self, send: Send) -> Send:
        async def until_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                self.abort()
                await asyncio.sleep(0)  # let the connection be lost
            else:
                await send(message)

        return until_body
