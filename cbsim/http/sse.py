"""Streamed answers, written as their tokens come.

A step has a token for hundreds of streams. No task is woken for it: streams with tokens to write join a flush round,
which writes for all of them as soon as the server's step is over. Only a client that is behind has its task
wait until it has caught up.

Server-sent events. All bytes of a chunk but its text are made once a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from cbsim.http.asgi import ResponseWriter
from cbsim.http.choice import Choice


class FlushRound:
    """Calls what has joined, in that order, when the event loop is next free. None of it may raise."""

    def __init__(self) -> None:
        self._joined: list[Callable[[], None]] = []

    def join(self, write: Callable[[], None]) -> None:
        if not self._joined:
            asyncio.get_running_loop().call_soon(self._go)
        self._joined.append(write)

    def _go(self) -> None:
        joined, self._joined = self._joined, []
        for write in joined:
            write()


class StreamWriter:
    """One choice of an answer, on its way. `settle` is called once, when its text is over, before the last of it is
    written. What failed is not written: its error is the choice's.
    """

    __slots__ = ("_choice", "_chunks", "_pause", "_round", "_settle", "_writer")

    def __init__(
        self, chunks: Chunks, writer: ResponseWriter, round_: FlushRound, settle: Callable[[Choice], None]
    ) -> None:
        self._choice, self._chunks, self._writer, self._round, self._settle = (
            chunks.choice,
            chunks,
            writer,
            round_,
            settle,
        )
        self._pause: asyncio.Future[None]

    async def run(self) -> None:
        """Return when all of it is written. Raises what went wrong."""
        choice, loop = self._choice, asyncio.get_running_loop()
        try:
            while not choice.over:
                self._pause = loop.create_future()
                self._flush()
                await self._pause
                await self._writer.drain()
                if choice.behind:
                    await asyncio.sleep(0)  # others first: a step may be due
        finally:
            choice.stream.listen(None)

    def _heard(self) -> None:
        self._round.join(self._flush)

    def _flush(self) -> None:
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
        self._writer.write(self._chunks.encode(texts))
        choice.stream.written(len(texts))
        return not (choice.over or choice.behind or self._writer.full)


DONE = b"data: [DONE]\n\n"


@lru_cache(maxsize=65_536)
def escaped(text: str) -> bytes:
    """A text inside the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()


def compact(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % compact(value)


class Chunks:
    """Chunks of one choice. `base` is what all chunks of an answer say: id, object, created, model."""

    __slots__ = ("_close", "_continuous", "_head", "_next", "_role", "choice", "prompt_tokens")

    def __init__(self, choice: Choice, base: dict[str, Any], chat: bool, continuous: bool) -> None:
        self.choice, self._continuous = choice, continuous
        self.prompt_tokens = len(choice.stream.generation.prompt)
        start = b'data: %b,"choices":[{"index":%d,' % (compact(base)[:-1], choice.index)
        self._head = start + (b'"delta":{"content":"' if chat else b'"text":"')
        self._close = (b'"}' if chat else b'"') + b',"logprobs":null,"finish_reason":'
        self._next = self._close + b"null}]}\n\n"
        self._role = b""
        if chat:
            role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
            self._role = b"%b%b%b}\n\n" % (start, role, self._usage(0))

    def encode(self, texts: Sequence[str]) -> bytes:
        """The texts that a choice has just given, a chunk each, the last with its finish if it is over."""
        choice, head, tail = self.choice, self._head, self._next
        whole = choice.finish is None and not self._continuous
        if whole and len(texts) == 1 and not self._role:
            return head + escaped(texts[0]) + tail
        role, self._role = self._role, b""
        if whole:
            return role + b"".join([head + escaped(text) + tail for text in texts])
        return role + b"".join(self._counted(texts))

    def _counted(self, texts: Sequence[str]) -> list[bytes]:
        """Those that say how many tokens there were, and the one that says why it is over."""
        choice, plain = self.choice, [*texts]
        last = [] if choice.finish is None else [plain.pop() if plain else ""]
        first = choice.tokens - len(texts) + 1
        chunks = [
            b"%b%b%bnull}]%b}\n\n" % (self._head, escaped(text), self._close, self._usage(first + at))
            for at, text in enumerate(plain)
        ]
        for text in last:
            why = b'%b,"stop_reason":%b}]' % (compact(choice.finish), compact(choice.stop_reason))
            chunks.append(
                b"%b%b%b%b%b}\n\n" % (self._head, escaped(text), self._close, why, self._usage(choice.tokens))
            )
        return chunks

    def _usage(self, tokens: int) -> bytes:
        if not self._continuous:
            return b""
        counts = (self.prompt_tokens, tokens, self.prompt_tokens + tokens)
        return b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % counts
