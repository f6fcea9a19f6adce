"""Text to token ids and back, without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns the tokens of one answer into text as they come."""

    def feed(self, token: int) -> str:
        """The text that this token completes; empty while a character is half there."""


class Tokenizer(Protocol):
    """A vocabulary of `vocab` tokens; `ends` are those that end a text."""

    vocab: int
    ends: frozenset[int]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt of a conversation (`role`, `content`), by the chat template."""

    def decoder(self) -> Decoder: ...
