"""The schedulers of Sarathi-Serve: Sarathi, and the baselines that its paper compares it with.

Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024). Each is a policy
of `SarathiServe` (scheduler.py), which knows queues, blocks and preemption.
"""

from __future__ import annotations

from typing import Protocol

from cbsim.policy.kind import SchedulerKind
from cbsim.policy.request import Request
from cbsim.schedulers.sarathi.scheduler import SarathiServe, Step
from cbsim.schedulers.sarathi.settings import (
    FasterTransformerSettings,
    OrcaSettings,
    SarathiSettings,
    SimpleChunkingSettings,
    VllmV0Settings,
    resolve,
    resolve_vllm_v0,
)


class Chunking(Protocol):
    """A rule for the number of prompt tokens that a step computes."""

    def chunk(self, serve: SarathiServe, request: Request, step: Step) -> int: ...


def read_begun(policy: Chunking, serve: SarathiServe, step: Step) -> None:
    """Add chunks of the prompts that are partly computed."""
    for request in serve.unread():
        tokens = policy.chunk(serve, request, step)
        if tokens:
            serve.read(request, tokens, step)


def admit_chunks(policy: Chunking, serve: SarathiServe, step: Step) -> None:
    """Admit requests from the queue, each with the first chunk of its prompt."""
    while request := serve.head(step):
        tokens = policy.chunk(serve, request, step)
        if not tokens:
            break
        serve.admit(request, tokens, step)


class Sarathi:
    """The policy that puts chunks of prompts beside all decoding requests.

    A step has `chunk_size` tokens: those of decoding requests first, then of prompts partly computed, then of the
    queue. So no decoding request ever waits for a prompt.
    """

    def __init__(self, settings: SarathiSettings) -> None:
        self._sizes = settings.chunk_sizes
        self._stage_tokens = settings.stage_tokens

    def choose(self, serve: SarathiServe, step: Step) -> None:
        serve.decode(step)
        read_begun(self, serve, step)
        if not step.preempts:
            admit_chunks(self, serve, step)

    def chunk(self, serve: SarathiServe, request: Request, step: Step) -> int:
        """Return the prompt tokens that the step has room for, which may depend on how many are computed."""
        stage = min(serve.done(request) // self._stage_tokens, len(self._sizes) - 1)
        return max(0, min(serve.left(request), self._sizes[stage] - step.tokens))


class Orca:
    """The policy of iteration-level batching: whole prompts beside decoding requests, longest sequence reserved.

    Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models" (OSDI 2022). No table grows,
    so no request is preempted.
    """

    def choose(self, serve: SarathiServe, step: Step) -> None:
        serve.decode(step)
        while request := serve.head(step):
            serve.admit(request, serve.left(request), step)


class FasterTransformer:
    """The policy by which a batch decodes until its last request has ended, or the next one is admitted.

    The longest sequence is reserved for each, nothing is padded, and the row of a request that has ended is not
    computed on; `static` is a padded batch. With stages another batch is admitted while batches are in flight.
    """

    def choose(self, serve: SarathiServe, step: Step) -> None:
        serve.decode(step)
        if not step.empty or (serve.running and not serve.staged):
            return
        while request := serve.head(step):
            serve.admit(request, serve.left(request), step)


class VllmV0:
    """The first vLLM: steps of whole prompts go before steps that decode.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023): blocks
    are taken as they are needed, preemption is by recompute. While prompts fit, no request decodes. Prompts have
    `step_tokens` tokens in a step at most.
    """

    def __init__(self, step_tokens: int) -> None:
        self._most = step_tokens

    def choose(self, serve: SarathiServe, step: Step) -> None:
        tokens = 0
        while request := serve.head(step):
            tokens += request.target
            if tokens > self._most:
                break
            serve.admit(request, serve.left(request), step)
        if not step.taken:
            serve.decode(step)


class SimpleChunking:
    """The policy of prompt chunks alone, in steps that alternate with decode steps. `decodes`: the next one decodes."""

    def __init__(self, settings: SimpleChunkingSettings) -> None:
        self._size = settings.chunk_size
        self.decodes = False

    def choose(self, serve: SarathiServe, step: Step) -> None:
        if not self.decodes:
            read_begun(self, serve, step)  # if none is partly computed, the queue is admitted from
            if not step.prompts:
                admit_chunks(self, serve, step)
            if step.prompts or step.taken:
                self.decodes = True
                return
        serve.decode(step)
        step.again = step.again or (self.decodes and not step.preempts)
        self.decodes = False

    def chunk(self, serve: SarathiServe, request: Request, step: Step) -> int:
        return min(serve.left(request), self._size - step.tokens)


# -- the kinds --------------------------------------------------------------------------------------------------------

SARATHI = SchedulerKind(
    name="sarathi",
    about="Sarathi-Serve: every request decodes in every step, chunks of prompts fill it up",
    settings=SarathiSettings,
    resolve=resolve,
    make=lambda options: SarathiServe(options, Sarathi(options.settings)),
)
ORCA = SchedulerKind(
    name="orca",
    about="Orca (Sarathi-Serve's): iteration-level batching, the longest sequence reserved for each",
    settings=OrcaSettings,
    resolve=resolve,
    make=lambda options: SarathiServe(options, Orca()),
)
FASTER_TRANSFORMER = SchedulerKind(
    name="faster_transformer",
    about="FasterTransformer (Sarathi-Serve's): nobody is admitted until the last of the batch has ended, unpadded",
    settings=FasterTransformerSettings,
    resolve=resolve,
    make=lambda options: SarathiServe(options, FasterTransformer()),
)
VLLM_V0 = SchedulerKind(
    name="vllm_v0",
    about="vLLM V0 (Sarathi-Serve's): steps of whole prompts before steps that decode, preemption by recompute",
    settings=VllmV0Settings,
    resolve=resolve_vllm_v0,
    make=lambda options: SarathiServe(options, VllmV0(options.max_batched_tokens or options.max_model_len)),
)
SIMPLE_CHUNKING = SchedulerKind(
    name="simple_chunking",
    about="simple chunking (Sarathi-Serve's): steps of prompt chunks and steps that decode, by turns",
    settings=SimpleChunkingSettings,
    resolve=resolve,
    make=lambda options: SarathiServe(options, SimpleChunking(options.settings)),
)
