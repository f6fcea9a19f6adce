"""TensorRT-LLM's micro batch: which of those that have cache get a row, and how many tokens of their prompts."""

from __future__ import annotations

from typing import NamedTuple

from cbsim.policy.request import Request, Status
from cbsim.policy.schedulers.trtllm_settings import TrtllmOptions

Part = tuple[Request, int]  # so many tokens of its prompt


class Rows(NamedTuple):
    """Of a step: parts of prompts, in order, and those that generate a token each."""

    contexts: list[Part]
    generating: list[Request]


class MicroBatch:
    """Seats and tokens of a step."""

    def __init__(self, options: TrtllmOptions) -> None:
        self.options = options
        self._waited = 0  # steps for which prompts have waited

    def rows(self, line: list[Request], decodes: int) -> Rows:
        """Rows for requests that have cache, in their order, beside so many that go on generating in front of them.

        Whole prompts, unless they may be cut, stop the batch where they are too many tokens.
        """
        o = self.options
        generating: list[Request] = []
        contexts: list[Part] = []
        tokens = decodes
        for request in line:
            if decodes + len(generating) + len(contexts) >= o.max_batch_size:
                break
            generates = request.status is Status.DECODE
            if generates and request.promised >= request.limit:
                continue  # its last token is in flight
            counted = 0 if o.enable_chunked_prefill and not generates else request.wanted
            if tokens + counted > o.max_num_tokens:
                break
            tokens += counted
            if generates:
                generating.append(request)
            else:
                contexts.append((request, request.wanted))
        if o.enable_chunked_prefill and contexts:
            contexts = self._cut(contexts, o.max_num_tokens - tokens)
        if contexts and self._waits(contexts, decodes + len(generating)):
            contexts = []
        return Rows(contexts, generating)

    def _cut(self, contexts: list[Part], capacity: int) -> list[Part]:
        """Parts that fit what is left of the step; whose prompt goes on after it comes first."""
        wanted = [tokens for _, tokens in contexts]
        if sum(wanted) <= capacity:
            return contexts
        equal = self.options.context_chunking_policy == "EQUAL_PROGRESS"
        share = equal_progress if equal else first_come_first_served
        parts = share(wanted, capacity, self.options.chunk_unit_size)
        cut = [(request, part) for (request, want), part in zip(contexts, parts, strict=True) if 0 < part < want]
        return cut + [(request, part) for (request, want), part in zip(contexts, parts, strict=True) if part == want]

    def _waits(self, contexts: list[Part], generating: int) -> bool:
        """Do the prompts wait for more of them? Never if nobody generates."""
        o = self.options
        if not (generating and o.batch_wait_timeout_iters):
            return False
        tokens = generating + sum([part for _, part in contexts])
        waits = self._waited < o.batch_wait_timeout_iters and tokens < o.batch_wait_max_tokens_ratio * o.max_num_tokens
        self._waited = self._waited + 1 if waits else 0
        return waits


def first_come_first_served(wanted: list[int], capacity: int, unit: int) -> list[int]:
    """Each gets what is left; if that is not all, a multiple of `unit` of it."""
    parts: list[int] = []
    for want in wanted:
        part = want if want <= capacity else capacity // unit * unit
        parts.append(part)
        capacity -= part
    return parts


def equal_progress(wanted: list[int], capacity: int, unit: int) -> list[int]:
    """Round by round each gets up to `unit` more, if that is left, until nobody gets anything."""
    parts = [0] * len(wanted)
    grew = True
    while grew and capacity:
        grew = False
        for i, want in enumerate(wanted):
            more = min(unit, want - parts[i])
            if 0 < more <= capacity:
                parts[i] += more
                capacity -= more
                grew = True
    return parts
