"""What clients may ask, field by field: https://platform.openai.com/docs/api-reference, as vLLM takes it.

Nulls mean the default. Unknown fields are taken and ignored; those that would change the answer, and that nobody here
can honour, are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from cbsim.endpoint.errors import Refusal

MOST_STOPS, MOST_STOP_BYTES = 16, 256
MOST_COMPLAINTS = 5

NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields that nobody here honours, with the values beside null that ask for nothing."""


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 5.0 is a whole one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _prompt(value: Any) -> str | list[int] | list[str] | list[list[int]]:
    """A text, its ids, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and _alike(value)):
        return value
    words = "has to be a text, a list of token ids, a list of texts, or a list of lists of token ids"
    raise PydanticCustomError("prompt", "{words}", {"words": words})


def _alike(values: list[Any]) -> bool:
    if all(type(value) is int for value in values):
        return True
    return all(isinstance(value, str) for value in values) or all(
        isinstance(value, list) and value and all(type(token) is int for token in value) for value in values
    )


def _stops(value: Any) -> Any:
    """One string or several, each of at least a character."""
    stops = [value] if isinstance(value, str) else value
    if stops is None or (isinstance(stops, list) and all(isinstance(stop, str) for stop in stops)):
        if not stops:
            return []
        if len(stops) <= MOST_STOPS and all(0 < len(stop.encode()) <= MOST_STOP_BYTES for stop in stops):
            return stops
    words = f"has to be a string or at most {MOST_STOPS} strings, each of 1 to {MOST_STOP_BYTES} bytes"
    raise PydanticCustomError("stop", "{words}", {"words": words})


def _content(value: Any) -> str:
    """A text, or parts of one, a line each; other kinds of part are not for us."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in value
    ):
        return "\n".join(part["text"] for part in value)
    words = 'only text is supported: a string, or a list of parts {"type": "text", "text": string}'
    raise PydanticCustomError("content", "{words}", {"words": words})


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_A_STOP = {"type": "string", "minLength": 1, "maxLength": MOST_STOP_BYTES // 4}
_STOPS = {"anyOf": [_A_STOP, {"type": "array", "items": _A_STOP, "maxItems": MOST_STOPS}, {"type": "null"}]}
_PROMPTS = {"anyOf": [{"type": "string"}, _IDS, _TEXTS, {"type": "array", "items": _IDS, "minItems": 1}]}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]}

Whole = Annotated[int, BeforeValidator(_whole)]
Prompt = Annotated[str | list[int] | list[str] | list[list[int]], PlainValidator(_prompt), WithJsonSchema(_PROMPTS)]
Stop = Annotated[list[str], PlainValidator(_stops), WithJsonSchema(_STOPS)]
Content = Annotated[str, PlainValidator(_content), WithJsonSchema(_CONTENT)]
Token = Annotated[Whole, Field(ge=0, le=2**31 - 1)]
AnyOf = TypeVar("AnyOf", bound="Asked")


class Asked(BaseModel):
    """A request's body. No silent conversions."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Asked):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampled(Asked):
    """What both ways of asking for text share."""

    model: str | None = None
    max_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")] | None = None
    user: str | None = None
    include_metrics: bool | None = None


class CompletionAsked(Sampled):
    """POST /v1/completions."""

    prompt: Prompt


class Message(Asked):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""

    @property
    def plain(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


class ChatAsked(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=16_384)]
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None


class TokenizeAsked(Asked):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=16_384)] | None = None
    return_token_strs: bool | None = None


class DetokenizeAsked(Asked):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Token]


def read(model: type[AnyOf], body: bytes) -> AnyOf:
    """A body as such a request. Refusal 400 if it is none, with the fields that are wrong."""
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise Refusal(400, "the body has to be a JSON object")
    if issubclass(model, Sampled):
        _supported(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _refusal(error) from error


def _supported(data: Mapping[str, Any]) -> None:
    for field, value in data.items():
        neutral = NEUTRAL.get(field)
        if neutral is not None and value is not None and not any(_same(value, none) for none in neutral):
            allowed = " or ".join(json.dumps(none) for none in (None, *neutral))
            raise Refusal(400, f"`{field}` is not supported by this server, other than as {allowed}", field)
    messages = data.get("messages")
    for at, message in enumerate(messages if isinstance(messages, list) else ()):
        for field in ("tool_calls", "function_call", "audio"):
            if isinstance(message, dict) and message.get(field):
                name = f"messages.{at}.{field}"
                raise Refusal(400, f"`{name}` is not supported by this server", name)


def _same(value: object, other: object) -> bool:
    """JSON has one kind of number, and true is none."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _refusal(error: ValidationError) -> Refusal:
    """All that is wrong in one text; `param` is the first field."""
    entries = error.errors(include_url=False, include_input=False)
    fields = [".".join(str(part) for part in entry["loc"]) for entry in entries]
    complaints = [f"`{field}`: {entry['msg']}" for field, entry in zip(fields, entries, strict=True)]
    more = [f"{len(complaints) - MOST_COMPLAINTS} more"] if len(complaints) > MOST_COMPLAINTS else []
    return Refusal(400, "; ".join(complaints[:MOST_COMPLAINTS] + more), fields[0])
