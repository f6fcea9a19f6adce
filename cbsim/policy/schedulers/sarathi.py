"""Sarathi: everybody decodes in every step, and chunks of prompts fill the step up.

Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024). A step has
`chunk_size` tokens: those of decoding requests first, then of prompts half read, then of the queue. So nobody who
decodes ever waits for a prompt.
"""

from __future__ import annotations

from typing import Final

from cbsim.policy.kind import SchedulerKind
from cbsim.policy.request import Request
from cbsim.policy.schedulers.sarathi_serve import SarathiServe, Step
from cbsim.policy.schedulers.sarathi_settings import (
    SarathiOptions,
    SarathiSettings,
    reasons,
    resolve_sarathi,
    widened_sarathi,
)


class Sarathi:
    """Chunks of prompts beside everybody who decodes."""

    grows: Final = True

    def __init__(self, options: SarathiOptions) -> None:
        self._sizes = options.chunk_sizes
        self._stage_tokens = options.stage_tokens

    def choose(self, serve: SarathiServe, step: Step) -> None:
        serve.decode(step)
        for begun in serve.unread():
            tokens = self._chunk(serve, begun, step)
            if tokens:
                serve.read(begun, tokens, step)
        if step.preempts:
            return
        while request := serve.head(step):
            tokens = self._chunk(serve, request, step)
            if not tokens:
                break
            serve.admit(request, tokens, step)

    def _chunk(self, serve: SarathiServe, request: Request, step: Step) -> int:
        """Tokens of a prompt that the step has room for; that may depend on how much of the prompt has been read."""
        stage = min(serve.done(request) // self._stage_tokens, len(self._sizes) - 1)
        return max(0, min(serve.left(request), self._sizes[stage] - step.tokens))


def make(options: SarathiOptions) -> SarathiServe:
    return SarathiServe(options, Sarathi(options))


SARATHI = SchedulerKind(
    name="sarathi",
    about="Sarathi-Serve: everybody decodes in every step, chunks of prompts fill it up",
    settings=SarathiSettings,
    resolve=resolve_sarathi,
    make=make,
    widened=widened_sarathi,
    reasons=reasons,
)
