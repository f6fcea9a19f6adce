"""A tokenizer from a folder with tokenizer.json, by the library `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from cbsim.http.errors import ConversationError, EndpointError

START, END = "<s>", "</s>"
PLAIN_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
"""What `plain` does, in the words of transformers."""

Messages = Sequence[Mapping[str, str]]


class TextDecoder:
    """The text of tokens that come one by one. Special tokens have none."""

    __slots__ = ("_step", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._step = DecodeStream(skip_special_tokens=True).step

    def feed(self, token: int) -> str:
        return self._step(self._tokenizer, token) or ""


class Vocabulary:
    """tokenizer.json, and what tokenizer_config.json, generation_config.json and chat_template.jinja add if they are
    there: the tokens that end a text, and how a conversation is written.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _tokenizer(folder / "tokenizer.json")
        config = _document(folder / "tokenizer_config.json")
        self.vocab: int = self._tokenizer.get_vocab_size()
        self.ends = frozenset(_ends(self._tokenizer, config, _document(folder / "generation_config.json")))
        self._render = _template(folder, config)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def names(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def chat(self, messages: Messages) -> list[int]:
        ids: list[int] = self._tokenizer.encode(self._render(messages), add_special_tokens=False).ids
        return ids

    def decoder(self) -> TextDecoder:
        return TextDecoder(self._tokenizer)


def plain(messages: Messages) -> str:
    """`<s>role: content` a line, and the beginning of an answer."""
    eos = "".join(f"{START}{message['role']}: {message['content']}\n" for message in messages)
    return f"{eos}{START}assistant: "


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise EndpointError(f"{path}: cannot be read: {reason}", file=path) from error
    except Exception as error:  # the library raises nothing more special
        raise EndpointError(f"{path}: is no tokenizer: {error}", file=path) from error


def _document(path: Path) -> dict[str, Any]:
    """Nothing if there is no such file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise EndpointError(f"{path}: cannot be read: {error}", file=path) from error
    if not isinstance(document, dict):
        raise EndpointError(f"{path}: has to be an object", file=path)
    return document


def _word(value: object) -> str | None:
    """A special token as transformers writes it: a string, or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _ends(tokenizer: Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> Iterable[int]:
    word = _word(config.get("eos_token"))
    known = None if word is None else tokenizer.token_to_id(word)
    if known is not None:
        yield known
    eos = generation.get("eos_token_id")
    yield from (end for end in (eos if isinstance(eos, list) else [eos]) if isinstance(end, int))


def _template(folder: Path, config: dict[str, Any]) -> Callable[[Messages], str]:
    """The folder's own, or `plain` if it has none or jinja2 is not installed."""
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, each with a name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str) or source == PLAIN_TEMPLATE:
        return plain
    try:
        return _jinja(source, config, path if path.is_file() else folder / "tokenizer_config.json")
    except ImportError:
        return plain


def _jinja(source: str, config: dict[str, Any], path: Path) -> Callable[[Messages], str]:
    """A template with what transformers' templates may call, in jinja2's sandbox."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise ConversationError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    special_tokens = {
        name: _word(config.get(name)) or "" for name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise EndpointError(f"{path}: its chat template cannot be read: {error}", file=path) from error

    def render(messages: Messages) -> str:
        try:
            return template.render(
                messages=[*map(dict, messages)], add_generation_prompt=True, tools=None, **special_tokens
            )
        except TemplateError as error:
            raise ConversationError(str(error)) from error
        except (TypeError, ValueError, AttributeError, KeyError) as error:  # of what a template does with messages
            raise ConversationError(f"the chat template fails: {error}") from error

    return render
