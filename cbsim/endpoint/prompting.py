"""From what a client asks to what a server is given: token ids, lengths within the context, one value a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from cbsim.endpoint.asking import ChatAsked, CompletionAsked, Message, Sampled
from cbsim.endpoint.backend import Backend, Generation
from cbsim.endpoint.errors import ConversationError, Refusal
from cbsim.endpoint.settings import Settings
from cbsim.endpoint.tokenizer import Tokenizer

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
            raise Refusal(400, f"`messages`: {error}", "messages") from error

    async def strings(self, ids: Sequence[int]) -> list[str]:
        """What the vocabulary calls these tokens."""
        return await self._done(lambda: self.tokenizer.names(ids), len(ids))

    async def _done(self, work: Callable[[], Done], size: int) -> Done:
        if size <= self.inline_characters:
            return work()
        return await asyncio.get_running_loop().run_in_executor(None, work)


def model_is(name: str | None, backend: Backend) -> None:
    """Refusal 404 if it is another one."""
    if name is not None and name != backend.model:
        raise Refusal(404, f"The model `{name[:200]}` does not exist.", "model")


def texts_of(request: CompletionAsked, settings: Settings) -> list[str | list[int]]:
    """Its prompts, one by one. Refusal 400 if there are too many."""
    prompt = request.prompt
    prompts = cast(
        "list[str | list[int]]", [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    )
    if len(prompts) > settings.max_prompts:
        words = f"`prompt`: has {len(prompts)} prompts, at most {settings.max_prompts} are allowed"
        raise Refusal(400, words, "prompt")
    return prompts


async def encoded(prompts: Sequence[str | list[int]], encoder: Encoder) -> list[list[int]]:
    """Their token ids. Refusal 400 if one is empty, or has an id that is not in the vocabulary."""
    return [
        checked(await encoder.text(prompt) if isinstance(prompt, str) else prompt, encoder, "prompt")
        for prompt in prompts
    ]


def checked(ids: list[int], encoder: Encoder, field: str) -> list[int]:
    if not ids:
        raise Refusal(400, f"`{field}`: has no tokens", field)
    return known(ids, encoder, field)


def known(ids: list[int], encoder: Encoder, field: str) -> list[int]:
    """Refusal 400 if one is not in the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= encoder.tokenizer.vocab):
        raise Refusal(400, f"`{field}`: token ids have to be from 0 to {encoder.tokenizer.vocab - 1}", field)
    return ids


def generations(
    request: Sampled, prompts: Sequence[Sequence[int]], ids: Sequence[str], backend: Backend
) -> list[Generation]:
    """A value a prompt, under these ids of the record. Refusal 400 if one does not fit into the context."""
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


def _max_tokens(request: Sampled, prompt: int, context: int) -> int:
    chat = isinstance(request, ChatAsked)
    left = context - prompt
    if left < 1:
        words = f"the prompt has {prompt} tokens, which leaves none of this model's context of {context} for an answer"
        raise Refusal(400, words, "messages" if chat else "prompt")
    field = (
        "max_completion_tokens" if isinstance(request, ChatAsked) and request.max_completion_tokens else "max_tokens"
    )
    asked: int | None = getattr(request, field)
    if asked is None:
        return left if chat else min(DEFAULT_TOKENS, left)
    if asked > left:
        words = f"`{field}` is too large: {asked}; this model's context is {context} tokens, the prompt has {prompt}"
        raise Refusal(400, words, field)
    return asked


def _min_tokens(request: Sampled, longest: int) -> int:
    least = request.min_tokens or 0
    if least > longest:
        raise Refusal(400, f"`min_tokens`: {least} is more than the {longest} tokens allowed", "min_tokens")
    return least
