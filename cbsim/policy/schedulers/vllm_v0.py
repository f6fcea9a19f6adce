"""vLLM as it began: steps of whole prompts go before steps that decode.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023), as
Sarathi-Serve's baseline has it: blocks are taken as they are needed, preemption is by recompute. While prompts fit
nobody decodes.
"""

from __future__ import annotations

from typing import Final

from cbsim.policy.kind import SchedulerKind
from cbsim.policy.schedulers.sarathi_serve import SarathiServe, Step
from cbsim.policy.schedulers.sarathi_settings import (
    VllmV0Options,
    VllmV0Settings,
    reasons,
    resolve_vllm_v0,
    widened_v0,
)


class VllmV0:
    """The queue, or else those who run."""

    grows: Final = True

    def __init__(self, options: VllmV0Options) -> None:
        self._most = options.max_batched_tokens

    def choose(self, serve: SarathiServe, step: Step) -> None:
        tokens = 0
        while request := serve.head(step):
            tokens += request.target
            if tokens > self._most:
                break
            serve.admit(request, serve.left(request), step)
        if not step.taken:
            serve.decode(step)


def make(options: VllmV0Options) -> SarathiServe:
    return SarathiServe(options, VllmV0(options))


VLLM_V0 = SchedulerKind(
    name="vllm_v0",
    about="vLLM V0 (Sarathi-Serve's): steps of whole prompts before steps that decode, preemption by recompute",
    settings=VllmV0Settings,
    resolve=resolve_vllm_v0,
    make=make,
    widened=widened_v0,
    reasons=reasons,
)
