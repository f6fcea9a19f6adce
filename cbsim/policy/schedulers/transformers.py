"""Hugging Face transformers' continuous batching, 5.17: `fifo` and `prefill_first`.

Rules as in the real scheduler (one full-attention layer group, no forks, no CPU offload), restated and checked line by
line against its traces. Two budgets bound a step: query tokens, and KV tokens read. A request that finds no block
starves; when nothing can run, or after a step in which some starved, starved requests give up their blocks (soft
reset: generated tokens become prompt) until the others fit, and nobody new is admitted until a request has finished.

Defects of the original, shared only with `original_defects`: blocks that a finishing step completes get no content key;
keys are counted out from the first block that has none, so async mode loses those of a chunk before the last, and after
a whole-prompt hit names a block that is not full; sampling goes on for a request cancelled in flight; one request too
large for the cache fails all; admission stays closed if all active requests are cancelled after a soft reset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from cbsim.policy.blocks import BlockPool, CachedLast
from cbsim.policy.cohort import Cohort, by_order
from cbsim.policy.news import News
from cbsim.policy.plan import Chunk, Outcome, Preempted, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersOptions:
    """ContinuousBatchingConfig's own names, all resolved."""

    scheduler_type: Literal["fifo", "prefill_first"]
    block_size: int
    num_blocks: int
    max_batch_tokens: int
    max_requests_per_batch: int
    max_blocks_per_request: int  # 0: no decode fast path
    safety_margin: float
    allow_block_sharing: bool
    original_defects: bool


@dataclass(slots=True)
class _Landing:
    """A row in flight that changes more than a count when it comes back."""

    request: Request
    epoch: int
    samples: bool
    reach: int = 0  # tokens computed once it has landed
    completes: int = 0  # blocks it fills


@dataclass(slots=True)
class _Step:
    """A step while it is being planned."""

    tokens: int
    kv: int
    requests: int
    fast: bool
    rows: dict[Request, Chunk] = field(default_factory=dict)
    grown: list[tuple[RequestSpec, int]] = field(default_factory=list)
    lead: int = 0
    decodes: int = 0
    failed: bool = False  # an allocation failed
    starved: list[tuple[Request, int]] = field(default_factory=list)
    full: bool = False  # a budget is used up

    @property
    def empty(self) -> bool:
        return not self.rows and not self.decodes


class TransformersScheduler:
    """transformers 5.17 as a policy. Depth 1 is its synchronous loop, depth 2 `use_async_batching`."""

    polls_before_update = False
    awaits_when_idle = False

    def __init__(self, options: TransformersOptions) -> None:
        self.options = o = options
        self.free_list = CachedLast(range(o.num_blocks))
        self.pool = BlockPool(o.block_size, o.num_blocks, self.free_list)
        self._fast_tokens = o.max_blocks_per_request * o.block_size
        self.cohort = Cohort(o.block_size, long_tokens=self._fast_tokens)
        self.requests: dict[RequestSpec, Request] = {}
        self.active: dict[Request, None] = {}
        self.waiting: dict[Request, None] = {}
        self.block_new_requests = False
        most = min(o.max_requests_per_batch, o.max_batch_tokens)
        self._max_requests = most if o.allow_block_sharing else min(most, o.num_blocks)
        self._loose: dict[Request, None] = {}  # active and not of the cohort
        self._landings: dict[int, tuple[list[_Landing], list[_Landing], list[_Landing]]] = {}  # as a plan's rows
        self._news = News(self.cohort, self.pool, foresees=False)
        self._ordinal = 0

    @property
    def idle(self) -> bool:
        return not (self.active or self.waiting)

    def refusal(self, spec: RequestSpec) -> str | None:
        most = spec.prompt_tokens + spec.max_tokens - 1
        needed = self._table_size(most)
        if needed > self.options.num_blocks and not self.options.original_defects:
            return f"{most} tokens need {needed} blocks, the cache has {self.options.num_blocks}"
        return None

    def add(self, spec: RequestSpec) -> None:
        request = self.requests[spec] = Request(spec, spec.max_tokens, self.pool.block_size)
        self.waiting[request] = None

    def cancel(self, spec: RequestSpec) -> None:
        if request := self.requests.get(spec):
            self._finish(request, Finish.ABORTED)

    def schedule(self) -> StepPlan | None:
        step = self._attempt()
        while step.empty and step.failed and self._offload(step):
            step = self._attempt()
        if step.starved and not step.empty:
            self._offload(step)
        return None if step.empty else self._commit(step)

    def _attempt(self) -> _Step:
        o = self.options
        fast = o.max_blocks_per_request > 0
        step = _Step(o.max_batch_tokens, o.num_blocks * o.block_size, self._max_requests, fast)
        if o.scheduler_type == "prefill_first":
            self._walk(self._in_order(Status.PREFILL), step)
            step.lead = len(step.rows)
            self._decode(step)
        else:
            self._decode(step)
            self._walk(self._in_order(Status.PREFILL), step)
        if not self.block_new_requests:
            self._walk(iter(list(self.waiting)), step)
        return step

    def _in_order(self, status: Status) -> Iterator[Request]:
        return iter(sorted((r for r in self._loose if r.status is status), key=by_order))

    def _decode(self, step: _Step) -> None:
        """The decoding requests: all at once if none can be refused, else one by one."""
        if not step.full and self._undisturbed(step):
            self._go_on(step)
            return
        for request in list(self.cohort):
            self._detach(request)
            self._loose[request] = None
        self._walk(self._in_order(Status.DECODE), step)

    def _undisturbed(self, step: _Step) -> bool:
        cohort, members = self.cohort, len(self.cohort)
        return (
            members <= min(step.tokens, step.requests)
            and cohort.context < step.kv
            and len(cohort.growing()) <= self.pool.free
            and all(r.status is not Status.DECODE for r in self._loose)
        )

    def _go_on(self, step: _Step) -> None:
        """The cohort's rows. Called only when no budget can refuse one of them."""
        cohort, growing = self.cohort, self.cohort.growing()
        if growing:
            blocks = self.pool.grow_each(growing)
            step.grown = [(request.spec, block) for request, block in zip(growing, blocks, strict=True)]
            cohort.grew(growing)
        step.decodes = len(cohort)
        if step.decodes:
            self._charge(step, step.decodes, cohort.context, step.decodes, not cohort.long)

    def _charge(self, step: _Step, tokens: int, read: int, rows: int, fast: bool) -> None:
        step.tokens -= tokens
        step.kv -= read
        step.requests -= rows
        step.fast = step.fast and fast
        step.full = step.tokens == 0 or (step.kv <= 0 and not step.fast) or step.requests <= 0

    def _walk(self, candidates: Iterator[Request], step: _Step) -> None:
        """Candidates one by one, in order, until a budget is used up or admission has to stop."""
        margin = self.options.safety_margin * self.options.num_blocks
        for request in candidates:
            if step.full:
                return
            free = self.pool.free
            if free < margin and not step.empty and request.status is not Status.DECODE:
                step.full = True
                return
            if request.status is Status.WAITING and self.options.allow_block_sharing:
                self._match_prefix(request)
            if not self._fits(request, step):
                continue
            blocks = self._allocate(request, step)
            if blocks is not None:
                self._place(request, blocks, step)
            elif not free and (request.status is Status.WAITING or request.fresh):
                step.full = True
                return

    def _query(self, request: Request, step: _Step) -> int:
        return min(request.target - request.computed, step.tokens)

    def _is_fast(self, request: Request, tokens: int) -> bool:
        return tokens == 1 and request.computed < self._fast_tokens

    def _fits(self, request: Request, step: _Step) -> bool:
        """May it read its cache in this step? Only rows of the decode fast path are free to."""
        return (step.fast and self._is_fast(request, self._query(request, step))) or step.kv >= request.computed

    def _match_prefix(self, request: Request) -> None:
        """Look the prompt up; on a hit the request is active from now on, whatever becomes of it in this step."""
        size = self.options.block_size
        hits = self.pool.longest_prefix(request.spec, request.target // size)
        if hits:
            self.pool.adopt(request, hits)
            self._activate(request, min(len(hits) * size, request.target - 1))

    def _activate(self, request: Request, cached_tokens: int) -> None:
        del self.waiting[request]
        request.admit(self._ordinal, cached_tokens)
        self._ordinal += 1
        self.active[request] = self._loose[request] = None

    def _table_size(self, tokens: int) -> int:
        """Blocks the original holds for `tokens` tokens once it has had to ask: one more than the ceiling when
        `tokens` is a multiple of the block size or one less.
        """
        return (tokens + 1) // self.options.block_size + 1

    def _allocate(self, request: Request, step: _Step) -> list[int] | None:
        """The blocks its next row needs and lacks, or None when there are not enough."""
        reach, held = request.computed + self._query(request, step), self.pool.held(request)
        if held and held * self.options.block_size >= reach:
            return []
        needed = self._table_size(reach) - held
        if needed <= self.pool.free:
            return self.pool.grow(request, needed)
        step.failed = True
        if request in self.active:
            step.starved.append((request, needed))
        return None

    def _place(self, request: Request, blocks: list[int], step: _Step) -> None:
        tokens = self._query(request, step)
        if request.status is Status.WAITING:
            self._activate(request, 0)
        start, first = request.computed, request.fresh
        step.rows[request] = Chunk(
            request.spec,
            request.order,
            start,
            tokens,
            tuple(self.pool.tables[request] if first else blocks),
            samples=start + tokens == request.target,
            admitted=first,
            resumed=first and request.preemptions > 0,
            cached=start if first else 0,
            recomputed=max(0, min(request.high_water, start + tokens) - start),
        )
        self._charge(step, tokens, start, 1, self._is_fast(request, tokens))

    def _offload(self, step: _Step) -> bool:
        """Requeue starved requests, newest first, until the blocks suffice for the others. False if none can go."""
        demand, free = sum(needed for _, needed in step.starved), self.pool.free
        victims: list[Request] = []
        while demand > free and step.starved and len(self.active) - len(victims) > 1:
            request, needed = step.starved.pop()
            victims.append(request)
            demand -= needed
            free += self.pool.held(request)
        for request in reversed(victims):
            self._news.preempted.append(Preempted(request.spec, request.computed, self.pool.held(request)))
            self.pool.release(request, returns=True)
            del self.active[request], self._loose[request]
            request.requeue(drop_in_flight=True)
            self.waiting[request] = None
        self.block_new_requests |= bool(victims)
        return bool(victims)

    def _commit(self, step: _Step) -> StepPlan:
        """Promise the rows and hand the plan out."""
        cohort = self.cohort
        ending = cohort.ending(cohort.planned)
        plan = self._news.plan(
            step.rows,
            step.grown,
            ending,
            step.decodes,
            len(self.active),
            len(self.waiting),
            lead=step.lead,
            fast_decode=step.fast,
        )
        self._note_landings(plan.step, ending, step)
        cohort.commit()
        for spec in plan.joined:
            request = self.requests[spec]
            del self._loose[request]
            cohort.join(request, self.pool.held(request), fills=self.options.allow_block_sharing)
        return plan

    def _note_landings(self, number: int, ending: list[Request], step: _Step) -> None:
        """Remember, in row order, which rows will do more than deliver a token."""
        size, listed = self.options.block_size, []
        for request, row in step.rows.items():
            reach = row.start + row.tokens
            completes = reach // size - row.start // size if self.options.allow_block_sharing else 0
            listed.append(_Landing(request, request.epoch, row.samples, reach, completes))
        filling = self.cohort.filling()
        members = sorted({*filling, *ending}, key=by_order)
        middle = [_Landing(r, r.epoch, True, r.computed + 1, r in filling) for r in members]
        self._landings[number] = listed[: step.lead], middle, listed[step.lead :]

    def _detach(self, request: Request) -> None:
        self.cohort.leave(request, self.pool.held(request))
        self._news.left.append(request.spec)

    def runs_ahead(self, plan: StepPlan) -> bool:
        return True

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        assert plan.step == self.cohort.updated, (plan.step, self.cohort.updated)
        stopped = [self.requests[spec] for spec in result.stopped if spec in self.requests]
        landings = self._landed(plan.step, stopped)
        self.cohort.applied()
        received: list[RequestSpec] = []
        finished: list[tuple[RequestSpec, Finish]] = []
        wasted = 0
        for landing in landings:
            request = landing.request
            if landing.epoch != request.epoch or request.status is Status.FINISHED:
                wasted += 1
                finished += self._haunt(landing, plan.step)
                continue
            if landing.samples and (request.cohort is None or plan.step < request.since):
                request.receive(plan.step)
                received.append(request.spec)
            over = landing.samples and (request.seen == request.last or request in stopped)
            self._complete(landing, over)
            if over:
                finished.append((request.spec, request.natural_end))
                self._finish(request, request.natural_end)
                self.block_new_requests = False
        return Outcome(tuple(received), tuple(finished), wasted)

    def _landed(self, step: int, stopped: list[Request]) -> list[_Landing]:
        """The rows of a step that do more than count, in the order of the rows: the order in which blocks come free."""
        head, middle, tail = self._landings.pop(step)
        noted = {landing.request for landing in [*head, *middle, *tail]}
        middle += [_Landing(r, epoch, True) for r, epoch in self.cohort.landing(step) if r not in noted]
        noted.update(landing.request for landing in middle)
        middle += [_Landing(r, r.epoch, True) for r in stopped if r not in noted]
        middle.sort(key=lambda landing: landing.request.order)
        return [*head, *middle, *tail]

    def _haunt(self, landing: _Landing, step: int) -> list[tuple[RequestSpec, Finish]]:
        """The original goes on sampling for a request that was cancelled in flight, and may even finish it."""
        request = landing.request
        if not (self.options.original_defects and request.finish is Finish.ABORTED and landing.samples):
            return []
        request.receive(step)
        if request.seen != request.last:
            return []
        self.block_new_requests = False
        return [(request.spec, request.natural_end)]

    def _complete(self, landing: _Landing, over: bool) -> None:
        """Give content keys to the blocks that the row has filled."""
        request = landing.request
        if not landing.completes:
            return
        if not self.options.original_defects:
            self._merge(request, landing.reach // self.options.block_size)
        elif not over and (landing.samples or request.status is Status.PREFILL):
            blocks = min(request.hashed + landing.completes, self.pool.held(request))
            if blocks * self.options.block_size > request.known:
                request.misname(blocks - 1)
            self._merge(request, blocks)

    def _merge(self, request: Request, blocks: int) -> None:
        self._news.replaced += [(request.spec, *entry) for entry in self.pool.merge(request, blocks)]

    def _finish(self, request: Request, reason: Finish) -> None:
        """Take a request out, wherever it stands; its blocks are free at once."""
        if request.cohort is not None:
            self._detach(request)
        if request.status is Status.WAITING:
            del self.waiting[request]
        else:
            del self.active[request]
            self._loose.pop(request, None)
        self.pool.release(request)
        if not self.active and not self.options.original_defects:
            self.block_new_requests = False  # nobody is left whose end could lift it
        request.end(reason)
        del self.requests[request.spec]
        self._news.ended.append(request.spec)
