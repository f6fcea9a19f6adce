"""TensorRT-LLM's in-flight batching, the Python schedulers of its PyTorch backend: who has cache, then who has a row.

Requests are taken from the queue, as many as may be active, and stay in order of arrival. In every step the capacity
scheduler (trtllm_capacity.py) says which of them have cache, the micro batch (trtllm_batch.py) which of those get rows.
Rows are prompts, or parts of them, then one token for each that generates. A paused request gives up its blocks, keeps
its place, and reads its prompt and what it has generated again.

Rules as read, restated and checked line by line against traces of restated classes: docs/policies.md. No block reuse,
one window, one beam, no drafts.
"""

from __future__ import annotations

from collections import deque

from cbsim.policy.blocks import BlockPool, FreeQueue
from cbsim.policy.cohort import by_order
from cbsim.policy.decoding import Decoding
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.observer import NOBODY, Observer
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.schedulers.trtllm_batch import MicroBatch, Rows
from cbsim.policy.schedulers.trtllm_capacity import capacity
from cbsim.policy.schedulers.trtllm_settings import TrtllmOptions, TrtllmSettings, reasons, resolve, widened
from cbsim.policy.value import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class TrtllmScheduler:
    """TensorRT-LLM as a policy. Depth 1 is its plain executor loop, depth 2 the one with the overlap scheduler."""

    polls_before_update = False
    awaits_when_idle = True

    def __init__(self, options: TrtllmOptions, observer: Observer = NOBODY) -> None:
        self.options = o = options
        self.limits = o.limits
        self.pool = BlockPool(o.block_size, o.num_blocks, FreeQueue(range(o.num_blocks), unhashed_first=True), observer)
        self.decoding = Decoding(self.pool, together=True, by_arrival=True, observer=observer)
        self.requests = self.decoding.requests
        self.running: dict[Request, None] = {}  # have started: they hold blocks
        self.contexts: dict[Request, None] = {}  # active, their prompts not read to the end, in order of arrival
        self.queue: deque[Request] = deque()  # not active yet
        self.capacity = capacity(o, self.decoding)
        self.batch = MicroBatch(o)
        self._observer = observer

    @property
    def idle(self) -> bool:
        return not self.requests

    @property
    def waiting(self) -> list[Request]:
        """Active or not, who has no blocks."""
        return [*[request for request in self.contexts if request.status is Status.WAITING], *self.queue]

    @property
    def generating(self) -> list[Request]:
        """Whose prompt is read, in order of arrival."""
        return sorted([request for request in self.running if request.status is Status.DECODE], key=by_order)

    def refusal(self, spec: RequestSpec) -> str | None:
        o = self.options
        if spec.prompt_tokens >= o.max_seq_len:
            return f"prompt of {spec.prompt_tokens} tokens, max_seq_len is {o.max_seq_len}"
        most = min(spec.prompt_tokens + spec.max_tokens, o.max_seq_len)
        needed = self.pool.blocks_for(most)
        if needed > o.num_blocks:
            return f"{most} tokens need {needed} blocks, the cache has {o.num_blocks}"
        if o.enable_chunked_prefill:
            return None
        if spec.prompt_tokens > o.max_num_tokens:
            return f"prompt of {spec.prompt_tokens} tokens, max_num_tokens is {o.max_num_tokens}"
        if o.capacity_scheduler_policy == "MAX_UTILIZATION" and most - 1 > o.max_num_tokens:
            return f"up to {most - 1} tokens to read after a pause, max_num_tokens is {o.max_num_tokens}"
        return None

    def add(self, spec: RequestSpec) -> None:
        limit = min(spec.max_tokens, self.options.max_seq_len - spec.prompt_tokens)
        self.queue.append(self.decoding.add(spec, limit))

    def cancel(self, spec: RequestSpec) -> None:
        request = self.requests.get(spec)
        if request is not None:
            self._finish(request, Finish.ABORTED)

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        while self.queue and len(self.requests) - len(self.queue) < self.options.max_active_requests:
            self.contexts[self.queue.popleft()] = None
        together = self._undisturbed()
        rows, decodes = self._go_on() if together else (self._one_by_one(), 0)
        chunks = self._chunks(rows)
        if not (chunks or decodes or self.decoding.preempted):
            return None
        for request, _ in rows.contexts:
            if chunks[request].outputs:
                del self.contexts[request]
        waiting = len(self.requests) - len(self.running)
        return self.decoding.plan(chunks, running=len(self.running), waiting=waiting, lead=len(rows.contexts))

    def _undisturbed(self) -> bool:
        """Does everybody that generates get a row, whatever becomes of the others?"""
        decoding, o = self.decoding, self.options
        if len(decoding.members) > min(o.max_batch_size, o.max_num_tokens):
            return False
        for request in decoding.loose:
            if request.status is Status.DECODE and request.promised < request.limit:
                return False
        return self.capacity.spares_members(self.contexts)

    def _go_on(self) -> tuple[Rows, int]:
        """The members go on together; of the others, who has cache behind them."""
        begun = sum([request.status is Status.PREFILL for request in self.decoding.loose])
        fit = self.capacity.behind(len(self.running) - begun, self.contexts)
        if self._observer is not NOBODY:
            self._observer.fitting([*self.generating, *fit.requests])
        self._pause(fit.paused)
        decodes = self.decoding.go_on()
        return self.batch.rows(fit.requests, decodes), decodes

    def _one_by_one(self) -> Rows:
        self.decoding.dissolve()
        fit = self.capacity.one_by_one(self.generating, self.contexts)
        self._observer.fitting(fit.requests)
        self._pause(fit.paused)
        return self.batch.rows(fit.requests, 0)

    def _pause(self, paused: list[Request]) -> None:
        """They give up their blocks and keep their places. Tokens in flight are delivered."""
        if not paused:
            return
        for request in paused:
            self.capacity.stopped(request)
            self.decoding.preempt(request, drop_in_flight=False)
            del self.running[request]
        self.contexts = dict.fromkeys(sorted({**self.contexts, **dict.fromkeys(paused)}, key=by_order))

    def _chunks(self, rows: Rows) -> dict[Request, Chunk]:
        """Prompts first, then those that generate, which are given blocks before them."""
        pool, decoding = self.pool, self.decoding
        generating: dict[Request, Chunk] = {}
        for request in rows.generating:
            blocks = pool.grow(request, missing) if (missing := pool.missing(request, request.computed + 1)) else ()
            generating[request] = decoding.row(request, 1, blocks)
        chunks: dict[Request, Chunk] = {}
        for request, tokens in rows.contexts:
            blocks = ()
            if request.status is Status.WAITING:
                self.capacity.started(request)
                decoding.admit(request)
                self.running[request] = None
                blocks = pool.grow(request, pool.blocks_for(request.target))
            chunks[request] = decoding.row(request, tokens, blocks)
        return chunks | generating

    # -- results ------------------------------------------------------------------------------------------------------

    def runs_ahead(self, plan: StepPlan) -> bool:
        return True

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        return self.decoding.land(plan, result, self._finish)

    def _finish(self, request: Request, reason: Finish) -> None:
        if request.status is Status.WAITING and request not in self.contexts:
            self.queue.remove(request)
        self.contexts.pop(request, None)
        if request in self.running:
            del self.running[request]
            self.capacity.stopped(request)
        self.decoding.end(request, reason)


TRTLLM = SchedulerKind(
    name="trtllm",
    about="TensorRT-LLM: cache to the end, or the last started is paused, or static; in-flight batching",
    settings=TrtllmSettings,
    resolve=resolve,
    make=TrtllmScheduler,
    block_size=32,
    widened=widened,
    reasons=reasons,
)
