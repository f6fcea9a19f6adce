"""A server that has no model: every request gets its next token every so many seconds. For tests, and to measure what
the endpoint itself costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from cbsim.http.backend import ABORT, UNMETERED, Generation, Load, Meter, Stream, Timing
from cbsim.http.tokenizer import Tokenizer

Script = Callable[[Generation], Iterator[int]]


def counting(generation: Generation) -> Iterator[int]:
    """Ids 300, 301, ... for ever."""
    del generation
    token = 300
    while True:
        yield token
        token = 300 + (token - 299) % 3000


class Scripted:
    """All its requests run at once. A script that ends says that the model did: `stop`. A step that is late is made at
    once.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        itl_s: float,
        script: Script = counting,
        model: str = "scripted",
        max_model_len: int = 1 << 20,
    ) -> None:
        self.model, self.max_model_len, self.tokenizer = model, max_model_len, tokenizer
        self.meter: Meter = UNMETERED
        self.dead: str | None = None
        self.timing: Timing | None = None
        self.cancelled: list[str] = []
        self.forgotten = 0
        self.late_s: list[float] = []  # of each step, behind its time
        self.generations: list[Generation] = []
        self._itl_s, self._script = itl_s, script
        self._running: dict[Stream, Iterator[int]] = {}
        self._news = asyncio.Event()
        self._closed = False

    @property
    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def load(self) -> Load:
        return Load(running=len(self._running), waiting=0, kv_usage=0.0, block_size=16, num_blocks=1)

    def submit(self, stream: Stream) -> None:
        stream.arrive(self.now_s)
        stream.schedule(self.now_s, 0)
        self.generations.append(stream.generation)
        self._running[stream] = self._script(stream.generation)
        self._news.set()

    def cancel(self, stream: Stream) -> None:
        if self._running.pop(stream, None) is not None:
            self.cancelled.append(stream.generation.id)
            stream.end(ABORT, self.now_s)

    def forget_prefixes(self) -> None:
        self.forgotten += 1

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def run(self) -> None:
        due = self.now_s
        while self._running or not self._closed:
            if not self._running:
                self._news.clear()
                await self._news.wait()
                due = self.now_s
                continue
            due += self._itl_s
            await asyncio.sleep(max(0.0, due - self.now_s))
            self.late_s.append(self.now_s - due)
            self.step(due)

    def step(self, at_s: float) -> None:
        """A token for everybody."""
        for stream, tokens in [*self._running.items()]:
            token = next(tokens, None)
            if token is None:
                self._end(stream, "stop", at_s)
                continue
            stream.put((token,), at_s)
            if stream.tokens >= stream.generation.max_tokens:
                self._end(stream, "length", at_s)

    def die(self, why: str) -> None:
        """Fail: every stream ends with this error."""
        self.dead = why
        for stream in [*self._running]:
            del self._running[stream]
            stream.end("error", self.now_s, why)
        self.close()

    def _end(self, stream: Stream, finish: str, at_s: float) -> None:
        del self._running[stream]
        stream.end(finish, at_s)


async def next_tokens(stream: Stream) -> list[int]:
    """The tokens that a stream has got since the last time, at least one; none once it has ended."""
    if not stream.unread and stream.finish is None:
        there = asyncio.Event()
        stream.listen(there.set)
        await there.wait()
    return stream.take()
