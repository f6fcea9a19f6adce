"""What clients may ask, field by field: https://platform.openai.com/docs/api-reference, as vLLM takes it.

Nulls mean the default. Unknown fields are taken and ignored; those that would change the answer, and that nobody here
can honour, are refused by name.

From what a client asks to what a server is given: token ids, lengths within the context, one value a prompt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from cbsim.http.backend import Backend, Generation
from cbsim.http.errors import ApiError, ConversationError
from cbsim.http.settings import Settings
from cbsim.http.tokenizer import Tokenizer

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
    message = "has to be a text, a list of token ids, a list of texts, or a list of lists of token ids"
    raise PydanticCustomError("prompt", "{message}", {"message": message})


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
    message = f"has to be a string or at most {MOST_STOPS} strings, each of 1 to {MOST_STOP_BYTES} bytes"
    raise PydanticCustomError("stop", "{message}", {"message": message})


def _content(value: Any) -> str:
    """A text, or parts of one, a line each; other kinds of part are not for us."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in value
    ):
        return "\n".join(part["text"] for part in value)
    message = 'only text is supported: a string, or a list of parts {"type": "text", "text": string}'
    raise PydanticCustomError("content", "{message}", {"message": message})


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
AnyOf = TypeVar("AnyOf", bound="RequestBody")


class RequestBody(BaseModel):
    """A request's body. No silent conversions."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(RequestBody):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(RequestBody):
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


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompt


class Message(RequestBody):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""

    @property
    def plain(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=16_384)]
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None


class TokenizeRequest(RequestBody):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=16_384)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Token]


def read(model: type[AnyOf], body: bytes) -> AnyOf:
    """Parse a body into `model`. Raises ApiError 400, which lists the fields that are wrong."""
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ApiError(400, "the body has to be a JSON object")
    if issubclass(model, GenerationRequest):
        _supported(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _api_error(error) from error


def _supported(data: Mapping[str, Any]) -> None:
    for field, value in data.items():
        neutral = NEUTRAL.get(field)
        if neutral is not None and value is not None and not any(_same(value, none) for none in neutral):
            allowed = " or ".join(json.dumps(none) for none in (None, *neutral))
            raise ApiError(400, f"`{field}` is not supported by this server, other than as {allowed}", field)
    messages = data.get("messages")
    for at, message in enumerate(messages if isinstance(messages, list) else ()):
        for field in ("tool_calls", "function_call", "audio"):
            if isinstance(message, dict) and message.get(field):
                name = f"messages.{at}.{field}"
                raise ApiError(400, f"`{name}` is not supported by this server", name)


def _same(value: object, other: object) -> bool:
    """JSON has one kind of number, and true is none."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _api_error(error: ValidationError) -> ApiError:
    """All that is wrong in one text; `param` is the first field."""
    entries = error.errors(include_url=False, include_input=False)
    fields = [".".join(str(part) for part in entry["loc"]) for entry in entries]
    complaints = [f"`{field}`: {entry['msg']}" for field, entry in zip(fields, entries, strict=True)]
    more = [f"{len(complaints) - MOST_COMPLAINTS} more"] if len(complaints) > MOST_COMPLAINTS else []
    return ApiError(400, "; ".join(complaints[:MOST_COMPLAINTS] + more), fields[0])


DEFAULT_TOKENS = 16
"""Of a completion that does not say how many; a chat may fill the context."""
Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class Encoder:
    """Texts to token ids; long ones in a thread, so that the steps of a server are not held up."""

    tokenizer: Tokenizer
    inline_characters: int

    async def text(self, text: str) -> list[int]:
        return await self._done(lambda: self.tokenizer.encode(text), len(text))

    async def chat(self, messages: Sequence[Message]) -> list[int]:
        turns = [message.plain for message in messages]
        try:
            return await self._done(lambda: self.tokenizer.chat(turns), sum(len(turn["content"]) for turn in turns))
        except ConversationError as error:
            raise ApiError(400, f"`messages`: {error}", "messages") from error

    async def strings(self, ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls these tokens."""
        return await self._done(lambda: self.tokenizer.names(ids), len(ids))

    async def _done(self, work: Callable[[], Done], size: int) -> Done:
        if size <= self.inline_characters:
            return work()
        return await asyncio.get_running_loop().run_in_executor(None, work)


def model_is(name: str | None, backend: Backend) -> None:
    """Raise ApiError 404 if the request names another model."""
    if name is not None and name != backend.model:
        raise ApiError(404, f"The model `{name[:200]}` does not exist.", "model")


def texts_of(request: CompletionRequest, settings: Settings) -> list[str | list[int]]:
    """The prompts of a completion request. Raises ApiError 400 if there are more than `max_prompts`."""
    prompt = request.prompt
    prompts = cast(
        "list[str | list[int]]", [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    )
    if len(prompts) > settings.max_prompts:
        message = f"`prompt`: has {len(prompts)} prompts, at most {settings.max_prompts} are allowed"
        raise ApiError(400, message, "prompt")
    return prompts


async def encoded(prompts: Sequence[str | list[int]], encoder: Encoder) -> list[list[int]]:
    """Token ids of each prompt. Raises ApiError 400 if one is empty or has an id outside the vocabulary."""
    return [
        checked(await encoder.text(prompt) if isinstance(prompt, str) else prompt, encoder, "prompt")
        for prompt in prompts
    ]


def checked(ids: list[int], encoder: Encoder, field: str) -> list[int]:
    if not ids:
        raise ApiError(400, f"`{field}`: has no tokens", field)
    return known(ids, encoder, field)


def known(ids: list[int], encoder: Encoder, field: str) -> list[int]:
    """Raise ApiError 400 if an id is outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= encoder.tokenizer.vocab):
        raise ApiError(400, f"`{field}`: token ids have to be from 0 to {encoder.tokenizer.vocab - 1}", field)
    return ids


def generations(
    request: GenerationRequest, prompts: Sequence[Sequence[int]], ids: Sequence[str], backend: Backend
) -> list[Generation]:
    """One Generation a prompt, with the record's `ids`. Raises ApiError 400 if one does not fit into the context."""
    stop = tuple(request.stop_token_ids or ())
    return [
        Generation(
            id=name,
            prompt=prompt,
            max_tokens=(longest := _max_tokens(request, len(prompt), backend.max_model_len)),
            min_tokens=_min_tokens(request, longest),
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=stop,
            temperature=1.0 if request.temperature is None else float(request.temperature),
            top_p=1.0 if request.top_p is None else float(request.top_p),
            top_k=max(request.top_k or 0, 0),
            seed=request.seed,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
        )
        for name, prompt in zip(ids, prompts, strict=True)
    ]


def _max_tokens(request: GenerationRequest, prompt: int, context: int) -> int:
    chat = isinstance(request, ChatRequest)
    left = context - prompt
    if left < 1:
        message = (
            f"the prompt has {prompt} tokens, which leaves none of this model's context of {context} for an answer"
        )
        raise ApiError(400, message, "messages" if chat else "prompt")
    field = (
        "max_completion_tokens" if isinstance(request, ChatRequest) and request.max_completion_tokens else "max_tokens"
    )
    requested: int | None = getattr(request, field)
    if requested is None:
        return left if chat else min(DEFAULT_TOKENS, left)
    if requested > left:
        message = (
            f"`{field}` is too large: {requested}; this model's context is {context} tokens, the prompt has {prompt}"
        )
        raise ApiError(400, message, field)
    return requested


def _min_tokens(request: GenerationRequest, longest: int) -> int:
    least = request.min_tokens or 0
    if least > longest:
        raise ApiError(400, f"`min_tokens`: {least} is more than the {longest} tokens allowed", "min_tokens")
    return least
