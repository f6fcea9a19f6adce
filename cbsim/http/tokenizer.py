"""Text to token ids and back, without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

EMBEDDED = Path(__file__).parent / "words"
"""The folder of the tokenizer that comes with cbsim, as transformers would have written it: clients take it, too."""


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

    def names(self, ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls them; empty where it has a hole. A space may be written otherwise there."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt of a conversation (`role`, `content`), by the chat template. ConversationError if the template
        refuses it.
        """

    def decoder(self) -> Decoder: ...


def open_tokenizer(folder: Path | str | None = None) -> Tokenizer:
    """That of a folder with tokenizer.json, or ours. EndpointError names the file that cannot be used."""
    from cbsim.http.vocabulary import Vocabulary

    return Vocabulary(EMBEDDED if folder is None else Path(folder))
