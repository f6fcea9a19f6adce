"""Dynamic batching on padded tensors: what stands between static and ragged continuous batching.

Whoever waits takes a place as soon as one is free. A step has one width, that of its longest row: the rows of those
who decode have one token and are padded on the left to the prompts that come in beside them. So a prompt of n tokens
that joins a batch, B rows with its own, costs (n - 1)(B - 1) tokens of padding. Only query tokens are padded; the cache
holds none of it. All that a request may write is reserved, so nobody grows and nobody is preempted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from cbsim.policy.blocks import BlockPool, FreeQueue
from cbsim.policy.cohort import by_order
from cbsim.policy.decoding import Decoding
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.observer import NOBODY, Observer
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.schedulers.dynamic_padded_settings import (
    DynamicPaddedOptions,
    DynamicPaddedSettings,
    resolve,
    widened,
)
from cbsim.policy.value import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class DynamicPaddedScheduler:
    """First come, first served, into a rectangle."""

    polls_before_update = False
    awaits_when_idle = True

    def __init__(self, options: DynamicPaddedOptions, observer: Observer = NOBODY) -> None:
        self.options = o = options
        self.limits = o.limits
        self.pool = BlockPool(o.block_size, o.num_blocks, FreeQueue(range(o.num_blocks), unhashed_first=True), observer)
        self.decoding = Decoding(self.pool, together=True, observer=observer)
        self.requests = self.decoding.requests
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()

    @property
    def idle(self) -> bool:
        return not self.requests

    def refusal(self, spec: RequestSpec) -> str | None:
        needed = self._blocks(spec)
        if needed > self.pool.num_blocks:
            tokens = spec.prompt_tokens + spec.max_tokens
            return f"{tokens} tokens need {needed} blocks, the cache has {self.pool.num_blocks}"
        return None

    def _blocks(self, spec: RequestSpec) -> int:
        """Blocks of all that a request may write; its last token is never computed."""
        return self.pool.blocks_for(spec.prompt_tokens + spec.max_tokens - 1)

    def add(self, spec: RequestSpec) -> None:
        self.waiting.append(self.decoding.add(spec, spec.max_tokens))

    def cancel(self, spec: RequestSpec) -> None:
        request = self.requests.get(spec)
        if request is not None:
            self._finish(request, Finish.ABORTED)

    def schedule(self) -> StepPlan | None:
        decoding = self.decoding
        joining = self._joining() if self.waiting else []
        if joining:
            decoding.dissolve()
        rows = {r: decoding.row(r, 1, ()) for r in sorted(decoding.loose, key=by_order) if r.promised < r.limit}
        for request in joining:
            rows[request] = self._admit(request)
        decodes = decoding.go_on()
        if not (rows or decodes):
            return None
        width = max([row.tokens for row in rows.values()], default=1)
        padded = {request: replace(row, padding=width - row.tokens) for request, row in rows.items()}
        return decoding.plan(padded, running=len(self.running), waiting=len(self.waiting))

    def _joining(self) -> list[Request]:
        """The head of the queue, as far as places and cache go: nobody is passed over."""
        joining: list[Request] = []
        free = self.pool.free
        for request in self.waiting:
            free -= self._blocks(request.spec)
            if free < 0 or len(self.running) + len(joining) == self.options.batch_size:
                break
            joining.append(request)
        return joining

    def _admit(self, request: Request) -> Chunk:
        self.waiting.popleft()
        self.decoding.admit(request)
        self.running[request] = None
        return self.decoding.row(request, request.target, self.pool.grow(request, self._blocks(request.spec)))

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


DYNAMIC_PADDED = SchedulerKind(
    name="dynamic_padded",
    about="dynamic batching: who waits joins at once, every row padded to the longest of its step",
    settings=DynamicPaddedSettings,
    resolve=resolve,
    make=DynamicPaddedScheduler,
    widened=widened,
)
