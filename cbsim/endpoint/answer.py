"""What an answer says of itself: its ids, usage, times, and the whole of it as one document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbsim.endpoint.backend import Stream
from cbsim.endpoint.choice import Choice


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of all choices; `cached_tokens` are those whose KV the server had."""
    prompt = sum(len(choice.stream.generation.prompt) for choice in choices)
    told = sum(choice.tokens for choice in choices)
    cached = sum(choice.stream.cached_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": told,
        "total_tokens": prompt + told,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def times(choices: Sequence[Choice]) -> dict[str, float | None] | None:
    """Milliseconds of one request on the server's clock, by vLLM's definitions: time to first token is counted from
    when it was scheduled. None of several requests at once.
    """
    return _times(choices[0].stream) if len(choices) == 1 else None


def _times(stream: Stream) -> dict[str, float | None]:
    began, first, last, tokens = stream.scheduled_s, stream.first_s, stream.last_s, stream.tokens
    busy = None if began is None or last is None else last - began
    return {
        "time_to_first_token_ms": None if began is None or first is None else (first - began) * 1e3,
        "generation_time_ms": None if first is None or last is None else (last - first) * 1e3,
        "queue_time_ms": None if began is None else (began - stream.arrived_s) * 1e3,
        "mean_itl_ms": None if tokens < 2 or first is None or last is None else (last - first) / (tokens - 1) * 1e3,
        "tokens_per_second": tokens / busy if busy else None,
    }


def document(base: dict[str, Any], choices: Sequence[Choice], texts: Sequence[str], chat: bool) -> dict[str, Any]:
    """An answer that is not streamed."""
    told = [
        {
            "index": choice.index,
            **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        for choice, text in zip(choices, texts, strict=True)
    ]
    return {**base, "choices": told, "usage": usage(choices)}
