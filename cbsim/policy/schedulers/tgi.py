"""text-generation-inference v3's batching: a batch decodes; now and then it stops for prompts, which then join it.

Before a step of decoding the queue is asked for prompts, first come, first served, as far as three bounds go: tokens
of the step, tokens of all that run (prompts and limits), blocks for all that the new ones may ever write. The batch
stops for them if they are enough beside it (`waiting_served_ratio`), or if it has not stopped for long
(`max_waiting_tokens`); then they are prefilled by themselves. Everything is reserved, so nobody grows and nobody is
preempted.
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
from cbsim.policy.schedulers.tgi_settings import TgiOptions, TgiSettings, reasons, resolve, widened
from cbsim.policy.value import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class TgiScheduler:
    """First come, first served; prompts and decoding in turns."""

    polls_before_update = False
    awaits_when_idle = True

    def __init__(self, options: TgiOptions, observer: Observer = NOBODY) -> None:
        self.options = o = options
        self.limits = o.limits
        self.pool = BlockPool(o.block_size, o.num_blocks, FreeQueue(range(o.num_blocks), unhashed_first=True), observer)
        self.decoding = Decoding(self.pool, together=True, observer=observer)
        self.requests = self.decoding.requests
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self._held = 0  # tokens of all that run, prompts and limits
        self._steps = 0  # since the batch stopped for prompts last, that stop included
        self._joined = False  # prompts have just joined a batch, which decodes next

    @property
    def idle(self) -> bool:
        return not self.requests

    def refusal(self, spec: RequestSpec) -> str | None:
        o, tokens = self.options, spec.prompt_tokens + spec.max_tokens
        if spec.prompt_tokens > o.max_batch_prefill_tokens:
            return f"prompt of {spec.prompt_tokens} tokens, max_batch_prefill_tokens is {o.max_batch_prefill_tokens}"
        if tokens > o.max_batch_total_tokens:
            return f"{tokens} tokens with its limit, max_batch_total_tokens is {o.max_batch_total_tokens}"
        needed = self._blocks(spec)
        if needed > self.pool.num_blocks:
            return f"{tokens} tokens need {needed} blocks, the cache has {self.pool.num_blocks}"
        return None

    def add(self, spec: RequestSpec) -> None:
        self.waiting.append(self.decoding.add(spec, spec.max_tokens))

    def cancel(self, spec: RequestSpec) -> None:
        request = self.requests.get(spec)
        if request is not None:
            self._finish(request, Finish.ABORTED)

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        decoding = self.decoding
        stopped = [r for r in sorted(decoding.loose, key=by_order) if r.promised < r.limit]
        if self.waiting and not (self._joined and (stopped or decoding.members)):
            fitting = self._fitting()
            if len(fitting) >= max(1, self._least()):
                return self._prefill(fitting)
        if not (stopped or decoding.members):
            return None
        self._joined = False
        self._steps += 1
        decoding.go_on()
        return self._commit({request: decoding.row(request, 1, ()) for request in stopped})

    def _least(self) -> int:
        """Prompts for which the batch stops."""
        o = self.options
        return 0 if self._steps >= o.max_waiting_tokens else int(len(self.running) * o.waiting_served_ratio)

    def _fitting(self) -> list[Request]:
        """The head of the queue, as far as the bounds go: nobody is passed over."""
        o = self.options
        fitting: list[Request] = []
        step, held, free = o.max_batch_prefill_tokens, o.max_batch_total_tokens - self._held, self.pool.free
        for request in self.waiting:
            spec = request.spec
            step -= spec.prompt_tokens
            held -= spec.prompt_tokens + spec.max_tokens
            free -= self._blocks(spec)
            if min(step, held, free) < 0 or len(self.running) + len(fitting) == o.max_batch_size:
                break
            fitting.append(request)
        return fitting

    def _blocks(self, spec: RequestSpec) -> int:
        """Blocks of all that a request may write; its last token is never computed."""
        return self.pool.blocks_for(spec.prompt_tokens + spec.max_tokens - 1)

    def _prefill(self, fitting: list[Request]) -> StepPlan:
        """Their prompts by themselves: nobody else has a row."""
        self._joined = bool(self.running)
        self._steps = 1
        rows: dict[Request, Chunk] = {}
        decoding = self.decoding
        decoding.dissolve()
        for request in fitting:
            self.waiting.popleft()
            decoding.admit(request)
            self.running[request] = None
            self._held += request.spec.prompt_tokens + request.spec.max_tokens
            blocks = self.pool.grow(request, self._blocks(request.spec))
            rows[request] = decoding.row(request, request.target, blocks)
        return self._commit(rows)

    def _commit(self, rows: dict[Request, Chunk]) -> StepPlan:
        return self.decoding.plan(rows, running=len(self.running), waiting=len(self.waiting))

    def runs_ahead(self, plan: StepPlan) -> bool:
        return True

    # -- results ------------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        return self.decoding.land(plan, result, self._finish)

    def _finish(self, request: Request, reason: Finish) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request]
            self._held -= request.spec.prompt_tokens + request.spec.max_tokens
        self.decoding.end(request, reason)


TGI = SchedulerKind(
    name="tgi",
    about="text-generation-inference v3: prompts by themselves, then joined to the batch; all reserved",
    settings=TgiSettings,
    resolve=resolve,
    make=TgiScheduler,
    reasons=reasons,
    widened=widened,
)
