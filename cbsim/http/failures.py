"""Failures on demand, for tests of routers and clients: statuses, streams that break, and a slow start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from cbsim.http.app import App
from cbsim.http.asgi import GENERATIONS, ApiError, response_writer

BREAK = "break"
FAILURES = ("429", "500", "503", BREAK)
MOST_PARTS = 8  # of a stream that breaks


@dataclass(frozen=True, slots=True)
class Failures:
    """The shares of requests that fail, by name of FAILURES. Which ones follows from the seed and their number. Until
    `start_s` seconds after its start a server answers everything with 503.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    start_s: float = 0.0

    def drawn(self, number: int) -> tuple[str, int]:
        """Return how request `number` fails, "" if it does not, and after how many parts if its stream breaks."""
        rng = Random(f"{self.seed}/{number}")
        at = rng.random()
        for name, share in self.shares.items():
            at -= share
            if at < 0:
                return name, rng.randint(0, MOST_PARTS)
        return "", 0


class FailingApp(App):
    """An application some of whose requests fail. It starts when it is made, on a running loop."""

    def __init__(self, failures: Failures, *of: Any) -> None:
        super().__init__(*of)
        self._failures, self._number = failures, -1
        self._ready_s = asyncio.get_running_loop().time() + failures.start_s

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure, parts = "", 0
        if asyncio.get_running_loop().time() < self._ready_s:
            failure = "503"
        elif scope.get("path") in GENERATIONS:
            self._number += 1
            failure, parts = self._failures.drawn(self._number)
        if failure == BREAK:
            send, scope = _breaking(send, response_writer(scope, send).abort, parts), {**scope, "extensions": {}}
        elif failure:
            reason = "the server fails on demand, or is starting"
            raise ApiError(int(failure), reason, retry_s=None if failure == "500" else 1)
        await super().answer(scope, receive, send)


def _breaking(send: Send, abort: Callable[[], None], parts: int) -> Send:
    """Return a `send` that closes the connection after some parts of an answer, or in place of its end."""

    async def until_broken(message: Message) -> None:
        nonlocal parts
        if message["type"] == "http.response.body":
            parts -= 1
            if parts < 0 or not message.get("more_body"):
                abort()
                return await asyncio.sleep(0)  # let the connection be lost
        return await send(message)

    return until_broken
