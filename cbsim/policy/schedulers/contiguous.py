"""Iteration-level batching on a cache that is reserved whole: what Orca and FasterTransformer's servers did.

Every running request decodes in every step. Then prompts that were begun go on, then the queue is let in, first come,
first served: while a seat, tokens of the step and a piece of the cache for all that the request may need are there.
Whoever does not fit stops those behind it. Nobody grows, so nobody is preempted; nothing is shared.
"""

from __future__ import annotations

from collections import deque

from cbsim.policy.decoding import Decoding
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.observer import NOBODY, Observer
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.reservation import PiecePool, free_pieces, reserved_tokens
from cbsim.policy.schedulers.contiguous_settings import (
    ContiguousOptions,
    ContiguousSettings,
    reasons,
    resolve,
    settled,
    widened,
)
from cbsim.policy.value import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class ContiguousScheduler:
    """First come, first served, with all of the cache that a request may need."""

    polls_before_update = False
    awaits_when_idle = True

    def __init__(self, options: ContiguousOptions, observer: Observer = NOBODY) -> None:
        self.options = o = options
        self.limits = o.limits
        self.pool = PiecePool(o.block_size, o.num_blocks, free_pieces(o.placement, o.num_blocks), observer)
        self.decoding = Decoding(self.pool, together=True, observer=observer)
        self.requests = self.decoding.requests
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()

    @property
    def idle(self) -> bool:
        return not self.requests

    def refusal(self, spec: RequestSpec) -> str | None:
        o = self.options
        if spec.prompt_tokens >= o.max_model_len:
            return f"prompt of {spec.prompt_tokens} tokens, max_model_len is {o.max_model_len}"
        needed, largest = self.piece(spec), self.pool.pieces.most
        if needed > largest:
            tokens = reserved_tokens(o.reserve, spec, o.max_model_len)
            piece = f"a piece of {needed} blocks, the largest of {o.num_blocks} has {largest}"
            return f"reserves {tokens} tokens ({o.reserve}): {piece}"
        return None

    def piece(self, spec: RequestSpec) -> int:
        """Blocks that a request reserves."""
        return self.pool.blocks_for(reserved_tokens(self.options.reserve, spec, self.options.max_model_len))

    def add(self, spec: RequestSpec) -> None:
        limit = min(spec.max_tokens, self.options.max_model_len - spec.prompt_tokens)
        self.waiting.append(self.decoding.add(spec, limit))

    def cancel(self, spec: RequestSpec) -> None:
        request = self.requests.get(spec)
        if request is not None:
            self._finish(request, Finish.ABORTED)

    def schedule(self) -> StepPlan | None:
        rows: dict[Request, Chunk] = {}
        decoding = self.decoding
        decodes = decoding.go_on()
        left = self.options.max_num_batched_tokens - decodes
        if decoding.loose:
            left = self._go_on(rows, left)
        self.pool.sought = 0
        if self.waiting:
            self._admit(rows, left)
        if not (rows or decodes):
            return None
        return decoding.plan(rows, running=len(self.running), waiting=len(self.waiting))

    def _go_on(self, rows: dict[Request, Chunk], left: int) -> int:
        """Who decodes, then prompts of which a part was read; each in order of admission. Returns the tokens left."""
        for request in sorted(self.decoding.loose, key=_turn):
            if left and request.promised < request.limit:  # else its last token is in flight
                rows[request] = self.decoding.row(request, min(request.wanted, left), ())
                left -= rows[request].tokens
        return left

    def _admit(self, rows: dict[Request, Chunk], left: int) -> None:
        """The queue, head first: nobody is passed over."""
        chunked = self.options.enable_chunked_prefill
        while self.waiting and left and len(self.running) < self.options.max_num_seqs:
            request = self.waiting[0]
            tokens = min(request.wanted, left)
            if tokens < request.wanted and not chunked:
                break
            blocks = self.piece(request.spec)
            if not self.pool.fits(blocks):
                break
            self.waiting.popleft()
            self.decoding.admit(request)
            self.running[request] = None
            rows[request] = self.decoding.row(request, tokens, self.pool.reserve(request, blocks))
            left -= tokens

    def runs_ahead(self, plan: StepPlan) -> bool:
        return True

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        return self.decoding.land(plan, result, self._finish)

    def _finish(self, request: Request, reason: Finish) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request]
        self.decoding.end(request, reason)


def _turn(request: Request) -> tuple[bool, int]:
    return request.status is Status.PREFILL, request.order


CONTIGUOUS = SchedulerKind(
    name="contiguous",
    about="iteration-level batching, all that a request may need reserved in one piece (Orca, FasterTransformer)",
    settings=ContiguousSettings,
    resolve=resolve,
    make=ContiguousScheduler,
    settled=settled,
    widened=widened,
    reasons=reasons,
)
