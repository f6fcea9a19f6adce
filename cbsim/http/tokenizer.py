"""Text to token ids and back, without a network: a folder with tokenizer.json, by the library `tokenizers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from cbsim.files import read_json, read_text
from cbsim.http.errors import ConversationError, EndpointError

EMBEDDED = Path(__file__).parent / "words"
"""The folder of the tokenizer that comes with cbsim, as transformers would have written it: clients take it, too."""
START, END = "<s>", "</s>"
PLAIN_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
"""The same as `plain`, in the words of transformers."""

Messages = Sequence[Mapping[str, str]]


class TextDecoder:
    """The text of the tokens of one answer, as they come. Special tokens have none."""

    __slots__ = ("_step", "_tokenizer")

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._step = DecodeStream(skip_special_tokens=True).step

    def feed(self, token: int) -> str:
        """The text that this token completes; empty while a character is half there."""
        return self._step(self._tokenizer, token) or ""


class Tokenizer:
    """tokenizer.json, and what tokenizer_config.json, generation_config.json and chat_template.jinja add if they are
    there: the tokens that end a text, and how a conversation is written. A vocabulary has `vocab` tokens; `ends` are
    those that end a text.
    """

    def __init__(self, folder: Path) -> None:
        """Raises EndpointError, which names the file that cannot be used."""
        path = folder / "tokenizer.json"
        content = read_text(path, EndpointError)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more special
            raise EndpointError(f"{path}: is no tokenizer: {error}", file=path) from error
        config = _settings(folder / "tokenizer_config.json")
        self.vocab: int = self._tokenizer.get_vocab_size()
        self.ends = frozenset(_ends(self._tokenizer, config, _settings(folder / "generation_config.json")))
        self._render = _template(folder, config)

    def encode(self, string: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(string).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        decoded: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return decoded

    def names(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's names of tokens; empty where it has a hole. A space may be written otherwise there."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    def chat(self, messages: Messages) -> list[int]:
        """The prompt of a conversation (`role`, `content`), by the chat template. ConversationError if the template
        refuses it.
        """
        ids: list[int] = self._tokenizer.encode(self._render(messages), add_special_tokens=False).ids
        return ids

    def decoder(self) -> TextDecoder:
        return TextDecoder(self._tokenizer)


def open_tokenizer(folder: Path | str | None = None) -> Tokenizer:
    """That of a folder with tokenizer.json, or the one that comes with cbsim. Raises EndpointError."""
    return Tokenizer(EMBEDDED if folder is None else Path(folder))


def plain(messages: Messages) -> str:
    """`<s>role: content` a line, and the beginning of an answer."""
    eos = "".join(f"{START}{message['role']}: {message['content']}\n" for message in messages)
    return f"{eos}{START}assistant: "


def _settings(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    return read_json(path, EndpointError) if path.exists() else {}


def _special(value: object) -> str | None:
    """A special token as transformers writes it: a string, or an object with `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _ends(tokenizer: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any]) -> Iterable[int]:
    name = _special(config.get("eos_token"))
    if name is not None and (end := tokenizer.token_to_id(name)) is not None:
        yield end
    eos = generation.get("eos_token_id")
    yield from (end for end in (eos if isinstance(eos, list) else [eos]) if isinstance(end, int))


def _template(folder: Path, config: dict[str, Any]) -> Callable[[Messages], str]:
    """The folder's own, or `plain` if it has none or jinja2 is not installed."""
    path = folder / "chat_template.jinja"
    source = read_text(path, EndpointError) if path.is_file() else config.get("chat_template")
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
        name: _special(config.get(name)) or "" for name in ("bos_token", "eos_token", "unk_token", "pad_token")
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
