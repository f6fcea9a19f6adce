"""The schedulers of Sarathi-Serve: Sarathi, and the baselines that its paper compares it with.

Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI 2024). Each is a policy,
which chooses the rows, of `SarathiServe`, which knows queues, blocks and preemption. Rules as in
microsoft/sarathi-serve, restated and checked line by line against traces of the real code. A request takes
blocks for all of its known tokens when it is admitted; a decoding request takes a block when one is due, from the last
in line if none is free. Or every request takes the blocks of the longest sequence, and none is ever preempted. With
several pipeline stages a request with a row in flight is passed over.

The original's defects are not shared; docs/policies.md lists them, and what proves the rules puts them back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from cbsim.policy.decode_batch import by_order
from cbsim.policy.decoding import Decoding
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Chunk, StepPlan
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.base import SchedulerBase, plain_pool
from cbsim.schedulers.sarathi import settings


class Step:
    """A step while it is being planned."""

    def __init__(self) -> None:
        self.prompts: dict[Request, Chunk] = {}  # rows of prompts; they come first
        self.decodes: dict[Request, Chunk] = {}
        self.batched = 0  # rows of the decode batch
        self.tokens = 0
        self.taken = False  # a request was taken from the queue
        self.preempts = False
        self.again = False  # if it stays without rows, another may have some

    @property
    def empty(self) -> bool:
        return not (self.prompts or self.decodes or self.batched)


Policy = Callable[["SarathiServe", Step], None]  # adds the rows of the requests that it chooses to run to a step


@mypyc_attr(allow_interpreted_subclasses=True)
class SarathiServe(SchedulerBase):
    """A scheduler of Sarathi-Serve."""

    def __init__(self, options: settings.ServeOptions[Any], policy: Policy, observer: Observer = NULL_OBSERVER) -> None:
        self.pool = plain_pool(options, observer)
        self.staged = options.stages > 1
        super().__init__(options, Decoding(self.pool, together=not self.staged, observer=observer))
        self.options = o = options
        self.policy = policy
        self._grows = o.settings.grows
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self._watermark = settings.watermark_blocks(o.num_blocks) if self._grows else 0
        self._in_line = True  # running requests are in order of arrival and of admission
        self._rows: dict[Request, int] = {}  # with stages: the step of a request's last row

    def refusal(self, spec: RequestSpec) -> str | None:
        longest, pool = self.options.max_model_len, self.pool
        if spec.prompt_tokens >= longest:
            return f"prompt of {spec.prompt_tokens} tokens, max_model_len is {longest}"
        most = min(spec.prompt_tokens + spec.max_tokens, longest) - 1 if self._grows else longest
        needed, there = pool.blocks_for(most), pool.num_blocks - self._watermark
        return f"{most} tokens need {needed} blocks, admission may fill {there}" if needed > there else None

    def add(self, spec: RequestSpec) -> None:
        limit = min(spec.max_tokens, self.options.max_model_len - spec.prompt_tokens)
        self.waiting.append(self.decoding.add(spec, limit))

    def schedule(self) -> StepPlan | None:
        step = self.attempt()
        while step.empty and step.again:
            step = self.attempt()
        return None if step.empty else self.commit(step)

    def attempt(self) -> Step:
        """Return a step that the policy has filled; it may be without rows."""
        step = Step()
        self.policy(self, step)
        return step

    def commit(self, step: Step) -> StepPlan:
        if not step.batched:
            self.decoding.split()
        rows = step.prompts | step.decodes
        plan = self.decoding.plan(rows, running=len(self.running), waiting=len(self.waiting), lead=len(step.prompts))
        if self.staged:
            self._rows.update(dict.fromkeys(rows, plan.step))
        return plan

    def runs_ahead(self, plan: StepPlan) -> bool:
        members = self.decoding.batched
        return not self.staged or members.planned - members.updated < self.options.stages

    def done(self, request: Request) -> int:
        """Return the computed tokens of a request."""
        return request.computed

    def left(self, request: Request) -> int:
        """Return the tokens that a request has to compute until its next output."""
        return request.target - self.done(request)

    def may_run(self, request: Request) -> bool:
        """True if a request may get a row: its last token is not in flight, and with stages none of its rows is."""
        if self.staged and self._rows.get(request, -1) >= self.decoding.batched.updated:
            return False
        return request.scheduled < request.limit

    def unread(self) -> list[Request]:
        """Return the running requests with prompt left, in their order."""
        unread_prompts = [r for r in self.decoding.unbatched if r.status is Status.PREFILL and self.may_run(r)]
        if self._in_line:
            return sorted(unread_prompts, key=by_order) if len(unread_prompts) > 1 else unread_prompts
        return [request for request in self.running if request in unread_prompts]

    def decode(self, step: Step, *, unread_last: bool = False) -> None:
        """Plan a token for each request whose prompt is computed, in order of arrival: together, if none can lack a
        block. With `unread_last`, requests with prompt left go behind the others.
        """
        if self._undisturbed():
            step.batched = self.decoding.go_on()
            step.tokens += step.batched
        else:
            self.decoding.split()
            self._walk(step, unread_last=unread_last)

    def line_up(self) -> None:
        """Put the running requests in order of arrival."""
        if not self._in_line:
            self._set_line(sorted(self.running, key=_arrival))

    def _set_line(self, line: Iterable[Request]) -> None:
        self.running = dict.fromkeys(line)
        self._in_line = all(a.order < b.order and _arrival(a) <= _arrival(b) for a, b in pairwise(self.running))

    def _undisturbed(self) -> bool:
        """True if planning one by one would give all members their rows, in order, and leave the line as it is."""
        decoding, last = self.decoding, self.decoding.batched.max_order
        if self.staged or not self._in_line or (self._grows and not decoding.has_blocks(spare=1)):
            return False
        for request in decoding.unbatched:
            prefills = request.status is Status.PREFILL
            if request.order < last if prefills else self.may_run(request):
                return False
        return True

    def _walk(self, step: Step, *, unread_last: bool) -> None:
        line = sorted(self.running, key=_arrival)
        staying: list[Request] = []
        reading: list[Request] = []
        first, end = 0, len(line)
        while first < end:
            request = line[first]
            first += 1
            if not self.may_run(request):
                staying.append(request)
            elif request.status is Status.PREFILL:
                (reading if unread_last else staying).append(request)
            else:
                while self._grows and not self.pool.free and first < end:
                    end -= 1
                    self.preempt(line[end], step)
                if self._grows and not self.pool.free:
                    self.preempt(request, step)
                    break
                staying.append(request)
                blocks = self.pool.grow(request, self.pool.due(request, 1))
                step.decodes[request] = self.decoding.row(request, 1, blocks)
                step.tokens += 1
        self._set_line([*staying, *reading])

    def preempt(self, request: Request, step: Step) -> None:
        """Preempt a request; it is the next to be admitted. With stages its rows in flight are dropped; else they are
        delivered before another step is planned, so this one is not tried again.
        """
        members = self.decoding.batched
        step.preempts = True
        step.again = self.staged or members.planned == members.updated
        self.decoding.preempt(request, drop_in_flight=self.staged)
        self._rows.pop(request, None)
        self.waiting.appendleft(request)

    def read(self, request: Request, tokens: int, step: Step, blocks: Sequence[int] = ()) -> None:
        """Add a row of `tokens` tokens of a prompt, for which it has got `blocks`."""
        step.prompts[request] = self.decoding.row(request, tokens, blocks)
        step.tokens += tokens

    def head(self, step: Step) -> Request | None:
        """Return the head of the queue, or None if there is no slot or no room for all of its tokens."""
        if not self.waiting or len(self.running) >= self.options.settings.max_num_seqs:
            return None
        request = self.waiting[0]
        return request if self._needed(request) <= self.pool.free - self._watermark else None

    def _needed(self, request: Request) -> int:
        return self.pool.blocks_for(request.target if self._grows else self.options.max_model_len)

    def admit(self, request: Request, tokens: int, step: Step, computed: int = 0) -> None:
        """Admit the head of the queue, with a row of its first tokens, or of those behind the `computed` ones."""
        step.taken = True
        self.waiting.popleft()
        self.decoding.admit(request, computed)
        last = next(reversed(self.running), None)
        self._in_line = self._in_line and (last is None or _arrival(last) <= _arrival(request))
        self.running[request] = None
        self.read(request, tokens, step, self.pool.grow(request, self._needed(request)))

    def _finish(self, request: Request, reason: Finish) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request]
        self._rows.pop(request, None)
        self.decoding.end(request, reason)


def _arrival(request: Request) -> int:
    return request.spec.arrival_ns


ChunkRule = Callable[[SarathiServe, Request, Step], int]  # the prompt tokens of a request that a step computes


def read_begun(chunk: ChunkRule, serve: SarathiServe, step: Step) -> None:
    """Add chunks of the prompts that are partly computed."""
    for request in serve.unread():
        tokens = chunk(serve, request, step)
        if tokens:
            serve.read(request, tokens, step)


def admit_chunks(chunk: ChunkRule, serve: SarathiServe, step: Step) -> None:
    """Admit requests from the queue, each with the first chunk of its prompt."""
    while request := serve.head(step):
        tokens = chunk(serve, request, step)
        if not tokens:
            break
        serve.admit(request, tokens, step)


class Sarathi:
    """The policy that puts chunks of prompts beside all decoding requests.

    A step has `chunk_size` tokens: those of decoding requests first, then of prompts partly computed, then of the
    queue. So no decoding request ever waits for a prompt.
    """

    def __init__(self, chosen: settings.SarathiSettings) -> None:
        self._sizes, self._stage_tokens = chosen.chunk_sizes, chosen.stage_tokens

    def __call__(self, serve: SarathiServe, step: Step) -> None:
        serve.decode(step, unread_last=True)
        read_begun(self.chunk, serve, step)
        if not step.preempts:
            admit_chunks(self.chunk, serve, step)

    def chunk(self, serve: SarathiServe, request: Request, step: Step) -> int:
        """Return the prompt tokens that the step has room for, which may depend on how many are computed."""
        stage = min(serve.done(request) // self._stage_tokens, len(self._sizes) - 1)
        return max(0, min(serve.left(request), self._sizes[stage] - step.tokens))


def orca(serve: SarathiServe, step: Step) -> None:
    """Iteration-level batching: whole prompts beside decoding requests, longest sequence reserved.

    Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models" (OSDI 2022). No table grows,
    so no request is preempted.
    """
    serve.decode(step)
    while request := serve.head(step):
        serve.admit(request, serve.left(request), step)


def faster_transformer(serve: SarathiServe, step: Step) -> None:
    """A batch decodes until its last request has ended, or the next one is admitted.

    The longest sequence is reserved for each, nothing is padded, and the row of a request that has ended is not
    computed on; `static` is a padded batch. With stages another batch is admitted while batches are in flight.
    """
    serve.decode(step)
    if not step.empty or (serve.running and not serve.staged):
        return
    while request := serve.head(step):
        serve.admit(request, serve.left(request), step)


def vllm_v0(step_tokens: int, serve: SarathiServe, step: Step) -> None:
    """The first vLLM: steps of whole prompts, of at most `step_tokens` tokens, go before steps that decode.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023): blocks
    are taken as they are needed, preemption is by recompute. While prompts fit, no request decodes.
    """
    tokens = 0
    while request := serve.head(step):
        tokens += request.target
        if tokens > step_tokens:
            break
        serve.admit(request, serve.left(request), step)
    if not step.taken:
        serve.decode(step)


class SimpleChunking:
    """The policy of prompt chunks alone, in steps that alternate with decode steps. `decodes`: the next one decodes."""

    def __init__(self, chosen: settings.SimpleChunkingSettings) -> None:
        self._size = chosen.chunk_size
        self.decodes = False

    def __call__(self, serve: SarathiServe, step: Step) -> None:
        serve.line_up()
        if not self.decodes:
            read_begun(self.chunk, serve, step)  # if none is partly computed, the queue is admitted from
            if not step.prompts:
                admit_chunks(self.chunk, serve, step)
            if step.prompts or step.taken:
                self.decodes = True
                return
        serve.decode(step)
        step.again = step.again or (self.decodes and not step.preempts)
        self.decodes = False

    def chunk(self, serve: SarathiServe, request: Request, step: Step) -> int:
        return min(serve.left(request), self._size - step.tokens)


SARATHI = SchedulerKind(
    name="sarathi",
    about="Sarathi-Serve: every request decodes in every step, chunks of prompts fill it up",
    settings=settings.SarathiSettings,
    resolve=settings.resolve,
    make=lambda options: SarathiServe(options, Sarathi(options.settings)),
    staged=True,
)
ORCA = SchedulerKind(
    name="orca",
    about="Orca (Sarathi-Serve's): iteration-level batching, the longest sequence reserved for each",
    settings=settings.OrcaSettings,
    resolve=settings.resolve,
    make=lambda options: SarathiServe(options, orca),
    staged=True,
)
FASTER_TRANSFORMER = SchedulerKind(
    name="faster_transformer",
    about="FasterTransformer (Sarathi-Serve's): nobody is admitted until the last of the batch has ended, unpadded",
    settings=settings.FasterTransformerSettings,
    resolve=settings.resolve,
    make=lambda options: SarathiServe(options, faster_transformer),
    staged=True,
)
VLLM_V0 = SchedulerKind(
    name="vllm_v0",
    about="vLLM V0 (Sarathi-Serve's): steps of whole prompts before steps that decode, preemption by recompute",
    settings=settings.VllmV0Settings,
    resolve=settings.resolve_vllm_v0,
    make=lambda options: SarathiServe(options, partial(vllm_v0, options.settings.step_tokens or options.max_model_len)),
    staged=True,
)
SIMPLE_CHUNKING = SchedulerKind(
    name="simple_chunking",
    about="simple chunking (Sarathi-Serve's): steps of prompt chunks and steps that decode, by turns",
    settings=settings.SimpleChunkingSettings,
    resolve=settings.resolve,
    make=lambda options: SarathiServe(options, SimpleChunking(options.settings)),
    staged=True,
)
