"""The fields of clients' requests: https://platform.openai.com/docs/api-reference, as vLLM accepts them.

Nulls mean the default. Unknown fields are ignored; those that would change the answer, but that no server here
supports, are rejected by name. Each prompt becomes a Generation: token ids, lengths within the context.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal, TypeVar, cast

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from cbsim.http.asgi import ApiError
from cbsim.http.backend import Backend, Generation
from cbsim.http.tokenizer import ConversationError, Tokenizer

MOST_STOPS, MOST_OF_STOP = 16, 256  # strings, characters
MOST_COMPLAINTS = 5

NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("audio", "chat_template", "prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"), ()),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "documents", "functions", "tools"), ([],)),
    **dict.fromkeys(("chat_template_kwargs", "logit_bias"), ({},)),
    **dict.fromkeys(("continue_final_message", "echo", "logprobs", "return_token_ids", "use_beam_search"), (False,)),
    **dict.fromkeys(("frequency_penalty", "min_p", "presence_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "n", "repetition_penalty"), (1,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
}
"""Fields that no server here supports, with the values beside null that change nothing."""


def _whole(value: Any) -> Any:
    """Convert a whole float such as 5.0 to an int, as JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _otherwise(message: str) -> WrapValidator:
    """Return a validator with one message for a field of several types, in place of one per type."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("value", "{message}", {"message": message}) from None

    return WrapValidator(check)


Whole = Annotated[int, BeforeValidator(_whole)]
Token = Annotated[Whole, Field(ge=0, le=2**31 - 1)]
Id = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
Item = TypeVar("Item")
Some = Annotated[list[Item], Field(min_length=1, fail_fast=True)]  # reports only the first error of a long list
Text = Annotated[str, WithJsonSchema({"type": "string", "minLength": 1})]  # of one without tokens the error says so
Prompt = Annotated[
    Text | Some[Id] | Some[Text] | Some[Some[Id]],
    _otherwise("has to be a text, a list of token ids, a list of texts, or a list of lists of token ids"),
]
StopString = Annotated[str, Field(min_length=1, max_length=MOST_OF_STOP)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None,
    _otherwise(f"has to be a string or at most {MOST_STOPS} strings, each of 1 to {MOST_OF_STOP} characters"),
]
AnyOf = TypeVar("AnyOf", bound="RequestBody")


class RequestBody(BaseModel):
    """The body of a request, validated without silent conversions."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(RequestBody):
    """The options of a stream beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(RequestBody):
    """The fields that completions and chats share."""

    model: str | None = None
    max_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop: Stop = None
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

    @property
    def options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt

    def prompts(self, most: int) -> list[str | list[int]]:
        """Return the prompts. Raises ApiError 400 if there are more than `most`."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts = cast("list[str | list[int]]", [self.prompt] if one else self.prompt)
        if len(prompts) > most:
            raise ApiError(400, f"`prompt`: has {len(prompts)} prompts, at most {most} are allowed", "prompt")
        return prompts


class TextPart(RequestBody):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(RequestBody):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)] | None,
        _otherwise('only text is supported: a string, or a list of parts {"type": "text", "text": string}'),
    ] = ""

    @property
    def plain(self) -> dict[str, str]:
        content = self.content or ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": self.role, "content": content}


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=16_384)]
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None


def _given(field: str, kind: str) -> dict[str, Any]:
    return {"required": [field], "properties": {field: {"type": kind}}}


class ForwardedRequest(RequestBody):
    """What a router reads of a completion or a chat, which another server checks."""

    prompt: Prompt = ""
    messages: list[Message] = []
    max_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1, le=2**31 - 1)] | None = None
    cache_salt: str | None = None


class TokenizeRequest(RequestBody):
    """The body of POST /tokenize: a prompt, or messages."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_given("prompt", "string"), _given("messages", "array")]})
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=16_384)] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """The body of POST /detokenize."""

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
        same = [none for none in neutral or () if value == none and isinstance(value, bool) == isinstance(none, bool)]
        if neutral is not None and value is not None and not same:  # 1 equals 1.0, but not true
            allowed = " or ".join(json.dumps(none) for none in (None, *neutral))
            raise ApiError(400, f"`{field}` is not supported by this server, other than as {allowed}", field)
    messages = data.get("messages")
    for at, message in enumerate(messages if isinstance(messages, list) else ()):
        for field in ("tool_calls", "function_call", "audio"):
            if isinstance(message, dict) and message.get(field):
                name = f"messages.{at}.{field}"
                raise ApiError(400, f"`{name}` is not supported by this server", name)


def _api_error(error: ValidationError) -> ApiError:
    """Return the error that lists all invalid fields; `param` is the first one."""
    entries = error.errors(include_url=False, include_input=False)
    fields = [".".join(str(part) for part in entry["loc"]) for entry in entries]
    complaints = [f"`{field}`: {entry['msg']}" for field, entry in zip(fields, entries, strict=True)]
    more = [f"{len(complaints) - MOST_COMPLAINTS} more"] if len(complaints) > MOST_COMPLAINTS else []
    return ApiError(400, "; ".join(complaints[:MOST_COMPLAINTS] + more), fields[0])


DEFAULT_TOKENS = 16  # the output limit of a completion without `max_tokens`; a chat may fill the context
Done = TypeVar("Done")


class Encoder:
    """An encoder of texts to token ids. Long texts are encoded in a thread, one after the other: so they neither delay
    a server's steps nor are in memory together.
    """

    def __init__(self, tokenizer: Tokenizer, inline_characters: int) -> None:
        self.tokenizer, self._inline_characters = tokenizer, inline_characters
        self._thread = ThreadPoolExecutor(1, "texts")

    async def plain(self, prompt: str, context: int | None = None) -> list[int]:
        """Return the ids of a prompt. Raises ApiError 400 if it has more characters than `context` tokens."""
        self._bounded(prompt, context, "prompt")
        return await self._run(lambda: self.tokenizer.encode(prompt), len(prompt))

    async def chat(self, messages: Sequence[Message], context: int | None = None) -> list[int]:
        try:
            prompt = self.tokenizer.render([message.plain for message in messages])
        except ConversationError as error:
            raise ApiError(400, f"`messages`: {error}", "messages") from error
        self._bounded(prompt, context, "messages")
        return await self._run(lambda: self.tokenizer.encode(prompt, special=False), len(prompt))

    async def text(self, ids: Sequence[int]) -> str:
        return await self._run(lambda: self.tokenizer.decode(ids), len(ids))

    async def strings(self, ids: Sequence[int]) -> list[str]:
        """Return the names of these tokens in the vocabulary."""
        return await self._run(lambda: self.tokenizer.names(ids), len(ids))

    def checked(self, ids: list[int], field: str) -> list[int]:
        """Return the ids. Raises ApiError 400 if there is none, or one outside the vocabulary."""
        if not ids:
            raise ApiError(400, f"`{field}`: has no tokens", field)
        if min(ids) < 0 or max(ids) >= self.tokenizer.vocab:
            raise ApiError(400, f"`{field}`: token ids have to be from 0 to {self.tokenizer.vocab - 1}", field)
        return ids

    async def _run(self, work: Callable[[], Done], size: int) -> Done:
        if size <= self._inline_characters:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _bounded(self, prompt: str, context: int | None, name: str) -> None:
        if context is not None and len(prompt) > (most := context * self.tokenizer.longest):
            bound = f"more than the {most:,} that this model's context of {context} tokens can hold"
            raise ApiError(400, f"the prompt has {len(prompt):,} characters, {bound}", name)


def model_is(name: str | None, backend: Backend) -> None:
    """Raise ApiError 404 if the request names another model."""
    if name is not None and name != backend.model:
        raise ApiError(404, f"The model `{name[:200]}` does not exist.", "model")


def generations(
    request: GenerationRequest, prompts: Sequence[Sequence[int]], ids: Sequence[str], backend: Backend
) -> list[Generation]:
    """Return a Generation per prompt, with the record's `ids`. Raises ApiError 400 if one exceeds the context."""
    made = []
    for name, prompt in zip(ids, prompts, strict=True):
        longest, least = _max_tokens(request, len(prompt), backend.max_model_len), request.min_tokens or 0
        if least > longest:
            raise ApiError(400, f"`min_tokens`: {least} is more than the {longest} tokens allowed", "min_tokens")
        generation = Generation(
            id=name,
            prompt=prompt,
            max_tokens=longest,
            min_tokens=least,
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            temperature=1.0 if request.temperature is None else float(request.temperature),
            top_p=1.0 if request.top_p is None else float(request.top_p),
            top_k=max(request.top_k or 0, 0),
            seed=request.seed,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
        )
        made.append(generation)
    return made


def _max_tokens(request: GenerationRequest, prompt: int, context: int) -> int:
    chat = isinstance(request, ChatRequest)
    left = context - prompt
    if left < 1:
        answer = f"which leaves none of this model's context of {context} for an answer"
        raise ApiError(400, f"the prompt has {prompt} tokens, {answer}", "messages" if chat else "prompt")
    field = "max_completion_tokens" if getattr(request, "max_completion_tokens", None) else "max_tokens"
    requested: int | None = getattr(request, field)
    if requested is None:
        return left if chat else min(DEFAULT_TOKENS, left)
    if requested > left:
        bound = f"this model's context is {context} tokens, the prompt has {prompt}"
        raise ApiError(400, f"`{field}` is too large: {requested}; {bound}", field)
    return requested
