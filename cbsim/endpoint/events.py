"""Server-sent events. All bytes of a chunk but its text are made once a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from cbsim.endpoint.choice import Choice

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
