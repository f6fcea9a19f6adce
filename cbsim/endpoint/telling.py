"""Streamed answers, written as their tokens come.

A step has a token for hundreds of streams. Nobody is woken for it: streams that have something to tell join a round,
and the round writes for all of them as soon as the server's step is over. Only a client that is behind has its task
wait until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cbsim.endpoint.choice import Choice
from cbsim.endpoint.events import Chunks
from cbsim.endpoint.way import Way


class Round:
    """Calls what has joined, in that order, when the event loop is next free. None of it may raise."""

    def __init__(self) -> None:
        self._joined: list[Callable[[], None]] = []

    def join(self, tell: Callable[[], None]) -> None:
        if not self._joined:
            asyncio.get_running_loop().call_soon(self._go)
        self._joined.append(tell)

    def _go(self) -> None:
        joined, self._joined = self._joined, []
        for tell in joined:
            tell()


class Telling:
    """One choice of an answer, on its way. `settle` is called once, when its text is over, before the last of it is
    written. What failed is not written: its error is the choice's.
    """

    __slots__ = ("_choice", "_chunks", "_pause", "_round", "_settle", "_way")

    def __init__(self, chunks: Chunks, way: Way, round_: Round, settle: Callable[[Choice], None]) -> None:
        self._choice, self._chunks, self._way, self._round, self._settle = chunks.choice, chunks, way, round_, settle
        self._pause: asyncio.Future[None]

    async def run(self) -> None:
        """Return when all of it is written. Raises what went wrong."""
        choice, loop = self._choice, asyncio.get_running_loop()
        try:
            while not choice.over:
                self._pause = loop.create_future()
                self._tell()
                await self._pause
                await self._way.drain()
                if choice.behind:
                    await asyncio.sleep(0)  # others first: a step may be due
        finally:
            choice.stream.listen(None)

    def _heard(self) -> None:
        self._round.join(self._tell)

    def _tell(self) -> None:
        """Write what there is. The pause ends if that was all, or more cannot be written now."""
        if self._pause.done():  # nobody is there any more
            return
        try:
            going = self._write()
        except Exception as error:
            self._pause.set_exception(error)
            return
        if going:
            self._choice.stream.listen(self._heard)
        else:
            self._pause.set_result(None)

    def _write(self) -> bool:
        """Whether it goes on without a pause."""
        choice = self._choice
        texts = choice.texts()
        if choice.over:
            if choice.error is not None:
                return False
            self._settle(choice)
        elif not texts:
            return True
        self._way.write(self._chunks.encode(texts))
        choice.stream.written(len(texts))
        return not (choice.over or choice.behind or self._way.full)
