"""Conversion of text to token ids and back, offline: a folder with tokenizer.json, by the library `tokenizers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from cbsim.errors import EndpointError
from cbsim.files import read_json, read_text

EMBEDDED = Path(__file__).parent / "words"
"""The folder of cbsim's own tokenizer, in the format of transformers, so that clients can use it, too."""
START, END = "<s>", "</s>"
PLAIN_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
"""The chat template of transformers that is equal to `plain`."""

Messages = Sequence[Mapping[str, str]]


class ConversationError(ValueError):
    """An error raised for messages that a chat template refuses."""


class Tokenizer:
    """A tokenizer of tokenizer.json, with the end tokens and the chat template of tokenizer_config.json,
    generation_config.json and chat_template.jinja if they exist. The vocabulary has `vocab` tokens, none with a name of
    more than `longest` characters; `ends` are those that end a text. `render` returns the prompt of turns (`role`,
    `content`), or raises ConversationError if the template rejects them. Texts are converted without the interpreter's
    lock, as the library does for batches only.
    """

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer. Raises an EndpointError that names the file that cannot be used."""
        path = folder / "tokenizer.json"
        content = read_text(path, EndpointError)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises no more specific class
            raise EndpointError(f"{path}: is no tokenizer: {error}", file=path) from error
        config = _settings(folder / "tokenizer_config.json")
        names = self._tokenizer.get_vocab()
        self.vocab, self.longest = len(names), max(map(len, names), default=0)
        self.ends = frozenset(_ends(self._tokenizer, config, _settings(folder / "generation_config.json")))
        self.render = _template(folder, config)

    def encode(self, string: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch_fast([string], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        decoded: str = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0]
        return decoded

    def names(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's names of tokens; empty for an unused id. A space may be written differently there."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def decoder(self) -> Callable[[int], str]:
        """Return a decoder, token by token: the text it completes, empty within a character and for special tokens."""
        step, tokenizer = DecodeStream(skip_special_tokens=True).step, self._tokenizer
        return lambda token: step(tokenizer, token) or ""


def open_tokenizer(folder: Path | str | None = None) -> Tokenizer:
    """Open the tokenizer of a folder with tokenizer.json, or that of cbsim. Raises EndpointError."""
    return Tokenizer(EMBEDDED if folder is None else Path(folder))


def plain(messages: Messages) -> str:
    """Return a prompt with a line `<s>role: content` per message, and the beginning of an answer."""
    eos = "".join(f"{START}{message['role']}: {message['content']}\n" for message in messages)
    return f"{eos}{START}assistant: "


def _settings(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file."""
    return read_json(path, EndpointError) if path.exists() else {}


def _special(value: object) -> str | None:
    """Return a special token as transformers writes it: a string, or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _ends(tokenizer: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> Iterable[int]:
    name = _special(config.get("eos_token"))
    if name is not None and (end := tokenizer.token_to_id(name)) is not None:
        yield end
    eos = generation.get("eos_token_id")
    yield from (end for end in (eos if isinstance(eos, list) else [eos]) if isinstance(end, int))


def _template(folder: Path, config: dict[str, Any]) -> Callable[[Messages], str]:
    """Return the folder's chat template, or `plain` if it has none or jinja2 is not installed."""
    path = folder / "chat_template.jinja"
    source = read_text(path, EndpointError) if path.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str) or source == PLAIN_TEMPLATE:
        return plain
    try:
        return _jinja(source, config, path if path.is_file() else folder / "tokenizer_config.json")
    except ImportError:
        return plain


def _jinja(source: str, config: dict[str, Any], path: Path) -> Callable[[Messages], str]:
    """Return a template with the functions that transformers' templates may call, in jinja2's sandbox."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise ConversationError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    given = {"add_generation_prompt": True, "tools": None, **{name: _special(config.get(name)) or "" for name in names}}
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise EndpointError(f"{path}: its chat template cannot be read: {error}", file=path) from error

    def render(messages: Messages) -> str:
        try:
            return template.render(messages=[*map(dict, messages)], **given)
        except TemplateError as error:
            raise ConversationError(str(error)) from error
        except (TypeError, ValueError, AttributeError, KeyError) as error:  # errors of a template with these messages
            raise ConversationError(f"the chat template fails: {error}") from error

    return render
