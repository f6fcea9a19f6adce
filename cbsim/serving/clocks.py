"""What time it is for a simulated server: the wall's, a multiple of it, or that of a virtual loop."""

from __future__ import annotations

import asyncio
import time
from asyncio import Future, get_running_loop
from typing import Protocol

from cbsim.serving.virtual_loop import VirtualLoop

NS = 1_000_000_000
EARLY_S = 1.1e-3
"""A selector wakes up to a millisecond late. From so long before a deadline on this thread takes naps between two looks
at what is ready."""
NAP_S = 2.5e-4


class Clock(Protocol):
    """Simulated nanoseconds since `start`."""

    scale: float  # simulated seconds in one of the loop's

    def start(self) -> None: ...

    def now_ns(self) -> int: ...

    async def until(self, at_ns: int, news: Future[None]) -> None:
        """Return when it is `at_ns`, or soon after there is news."""

    def lag_s(self, at_ns: int) -> float:
        """How late it is for something that was due then, in seconds of this machine."""


class RealClock:
    """`scale` simulated seconds in one second of this machine. Deadlines count from the start: no lag is carried on."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self._start_s = 0.0

    def start(self) -> None:
        self._start_s = get_running_loop().time()

    def now_ns(self) -> int:
        return int((get_running_loop().time() - self._start_s) * self.scale * NS)

    async def until(self, at_ns: int, news: Future[None]) -> None:
        loop, at_s = get_running_loop(), self._start_s + at_ns / self.scale / NS
        if at_s - loop.time() > EARLY_S:
            timer = loop.call_at(at_s - EARLY_S, resolve, news)
            await news
            timer.cancel()
            if loop.time() < at_s - EARLY_S:
                return
        await asyncio.sleep(0)
        while (left_s := at_s - loop.time()) > 0:
            time.sleep(min(left_s, NAP_S))
            await asyncio.sleep(0)

    def lag_s(self, at_ns: int) -> float:
        return get_running_loop().time() - self._start_s - at_ns / self.scale / NS


class VirtualClock:
    """The time of a virtual loop. What is due happens when everybody else has done what they do at that moment."""

    scale = 1.0

    def __init__(self) -> None:
        self._loop: VirtualLoop | None = None
        self._start_s = 0.0

    def start(self) -> None:
        loop = get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._loop, self._start_s = loop, loop.time()

    def now_ns(self) -> int:
        return 0 if self._loop is None else round((self._loop.time() - self._start_s) * NS)

    async def until(self, at_ns: int, news: Future[None]) -> None:
        assert self._loop is not None
        self._loop.at_rest(self._start_s + at_ns / NS, news)
        await news

    def lag_s(self, at_ns: int) -> float:
        assert self._loop is not None
        return max(0.0, self._loop.time() - self._start_s - at_ns / NS)


def resolve(future: Future[None]) -> None:
    """Wake whoever waits for it, unless somebody has."""
    if not future.done():
        future.set_result(None)
