"""vLLM V1's scheduler: running requests first, then the queue, one token budget; preemption by recompute.

Rules as in vLLM 0.19 and 0.33 (text only, one full-attention group, no speculation, one pipeline stage), restated and
checked line by line against traces of the real code (`cbsim conformance`). Chunked prefill has no phase of its own:
a request needs `target - computed` tokens and gets what the budget leaves, in admission order.

Most steps concern nobody in particular: every decoding request gets its token and nothing can be refused. Those
requests form the cohort. As soon as the budget or the free blocks might not do for all of them, the cohort is
dissolved for that step and every request is walked in order, so the rules are stated once, in `_run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cbsim.policy.blocks import BlockPool, FreeQueue
from cbsim.policy.cohort import Cohort, by_order
from cbsim.policy.news import News
from cbsim.policy.plan import UNCHANGED, Chunk, Outcome, Preempted, StepPlan, StepResult
from cbsim.policy.queues import ArrivalQueue, PriorityQueue, Queue
from cbsim.policy.request import Finish, Request, RequestSpec, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """vLLM's own names. `num_blocks` includes block 0, the null block, which is never handed out."""

    version: Literal["0.19", "0.33"]
    policy: Literal["fcfs", "priority"]
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    long_prefill_token_threshold: int  # 0: off
    adaptive_long_prefill_threshold: bool  # 0.33
    scheduler_reserve_full_isl: bool
    watermark: float  # 0.33: share of the blocks kept free when the queue is admitted from
    prefill_schedule_interval: int  # 0.33: executed steps between prefills, 1 = every step
    reserve_output: bool = False  # not vLLM's: admit only what can end without anybody being preempted


@dataclass(slots=True)
class _Step:
    """A step while it is being planned."""

    budget: int
    threshold: int
    defer_prefill: bool
    rows: dict[Request, Chunk]
    grown: list[tuple[RequestSpec, int]]
    prefill: bool = False


class VllmScheduler:
    """vLLM V1 as a policy. Depth 1 is `EngineCore.step`, depth 2 `step_with_batch_queue`."""

    polls_before_update = True
    awaits_when_idle = True

    def __init__(self, options: VllmOptions) -> None:
        self.options = o = options
        self._new = o.version == "0.33"
        free = FreeQueue(range(1, o.num_blocks), unhashed_first=self._new)
        self.pool = BlockPool(o.block_size, o.num_blocks - 1, free)
        self.cohort = Cohort(o.block_size)
        self.requests: dict[RequestSpec, Request] = {}
        self.running: dict[Request, None] = {}  # in admission order
        self.waiting: Queue = PriorityQueue() if o.policy == "priority" else ArrivalQueue()
        self._loose: dict[Request, None] = {}  # running and not of the cohort
        self._late_fills: list[Request] = []  # filled a block whose last token is still in flight
        self._news = News(self.cohort, self.pool, foresees=True)
        self._ordinal = 0
        self._watermark = int(o.watermark * o.num_blocks)
        self._executed = 0
        self._last_prefill = -o.prefill_schedule_interval
        self._capacity_bound = False

    # -- the queue ----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not (self.requests or self._news.ended)  # vLLM runs a step to report who has ended

    def refusal(self, spec: RequestSpec) -> str | None:
        o = self.options
        if spec.prompt_tokens >= o.max_model_len:
            return f"prompt of {spec.prompt_tokens} tokens, max_model_len is {o.max_model_len}"
        if not o.enable_chunked_prefill and spec.prompt_tokens > o.max_num_batched_tokens:
            return f"prompt of {spec.prompt_tokens} tokens, max_num_batched_tokens is {o.max_num_batched_tokens}"
        most = min(spec.prompt_tokens + spec.max_tokens, o.max_model_len)
        if self.pool.blocks_for(most - 1) > self.pool.num_blocks:
            return f"{most} tokens need {self.pool.blocks_for(most - 1)} blocks, the cache has {self.pool.num_blocks}"
        return None

    def add(self, spec: RequestSpec) -> None:
        limit = min(spec.max_tokens, self.options.max_model_len - spec.prompt_tokens)
        request = self.requests[spec] = Request(spec, limit, self.pool.block_size)
        self.waiting.push(request)

    def cancel(self, spec: RequestSpec) -> None:
        request = self.requests.get(spec)
        if request is not None:
            self._finish(request, Finish.ABORTED)

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        step = _Step(self.options.max_num_batched_tokens, self._threshold(), self._defers_prefill(), {}, [])
        growing = self.cohort.growing()
        if self._undisturbed(step, len(growing)):
            self._go_on(growing, step)
        else:
            self._dissolve()
        if self._loose:
            self._run(step)
        if self._news.preempted:
            return self._commit(step)
        if self.waiting:
            self._admit(step)
        if not step.defer_prefill:
            self._capacity_bound = bool(self.waiting)
        return self._commit(step)

    def _threshold(self) -> int:
        """Most tokens a request may prefill in this step, 0 for no limit."""
        o = self.options
        threshold = o.long_prefill_token_threshold
        if not threshold or not self._new:
            return threshold
        present = len(self.running) + len(self.waiting)
        if present <= 1:
            return 0
        return max(threshold, o.max_num_batched_tokens // present) if o.adaptive_long_prefill_threshold else threshold

    def _defers_prefill(self) -> bool:
        interval = self.options.prefill_schedule_interval
        if interval <= 1 or self._capacity_bound or self._executed + 1 - self._last_prefill >= interval:
            return False
        return bool(self.cohort) or any(r.status is Status.DECODE for r in self.running)

    def _undisturbed(self, step: _Step, growing: int) -> bool:
        """Can no member of the cohort be refused, stalled or preempted by what runs before or beside it?"""
        cohort = self.cohort
        if len(cohort) > step.budget or growing > self.pool.free:
            return False
        if not self._loose:
            return True
        active = [r.order for r in self._loose if self._demand(r, step)]
        if not active:
            return True
        return self.options.policy == "fcfs" and min(active) > cohort.max_order

    def _dissolve(self) -> None:
        for request in list(self.cohort):
            self._detach(request)
            self._loose[request] = None

    def _go_on(self, growing: list[Request], step: _Step) -> None:
        """The cohort's rows: a token each, a block where one is due, a key for every block that is full."""
        cohort, pool = self.cohort, self.pool
        step.budget -= len(cohort)
        if growing:
            blocks = pool.grow_each(growing)
            step.grown = [(request.spec, block) for request, block in zip(growing, blocks, strict=True)]
            cohort.grew(growing)
        filled = cohort.filling()
        if filled or self._late_fills:
            filled = [*self._late_fills, *filled]
            self._late_fills = []
            for request in filled:
                self._fill(request)

    def _fill(self, request: Request) -> None:
        """A member's row fills a block; it gets its key as soon as its last token is known."""
        if request.cohort is None:
            return
        size, after = self.pool.block_size, request.computed + 1
        self.pool.publish(request, min(after, request.known) // size)
        if request.known // size < after // size:
            self._late_fills.append(request)

    def _demand(self, request: Request, step: _Step) -> int:
        """Query tokens that a running request wants, before the budget; 0 to be skipped in this step."""
        if request.promised >= request.limit:
            return 0  # its last token is in flight
        if step.defer_prefill and request.status is Status.PREFILL:
            return 0
        return min(request.wanted, step.threshold) if step.threshold else request.wanted

    def _run(self, step: _Step) -> None:
        """Running requests outside the cohort, in admission order; whoever lacks a block takes it from the last."""
        line = sorted(self._loose, key=by_order)
        i = 0
        while i < len(line) and step.budget:
            request = line[i]
            tokens = min(self._demand(request, step), step.budget)
            if not tokens:
                i += 1
                continue
            needed = self._blocks_needed(request, tokens)
            while needed > self.pool.free and request in self._loose:
                i -= self._preempt_one(line, i, step)
            if request not in self._loose:
                if self._new and self.options.policy == "priority":
                    continue
                break
            step.prefill |= request.status is Status.PREFILL
            self._place(request, request.computed, tokens, needed, step)
            i += 1

    def _blocks_needed(self, request: Request, tokens: int) -> int:
        return max(0, self.pool.blocks_for(request.computed + tokens) - self.pool.held(request))

    def _preempt_one(self, line: list[Request], index: int, step: _Step) -> int:
        """Requeue the victim; returns by how much the walk's index moves back."""
        victim = line[-1] if self.options.policy == "fcfs" else max(line, key=_urgency)
        at = line.index(victim)
        del line[at]
        taken_back = step.rows.pop(victim, None)
        if taken_back:
            step.budget += taken_back.tokens
        self._news.preempted.append(Preempted(victim.spec, victim.computed, self.pool.held(victim)))
        del self.running[victim], self._loose[victim]
        self.pool.release(victim, returns=True)
        victim.requeue(drop_in_flight=False)
        self.waiting.push_front(victim)
        moved = at < index if self._new else taken_back is not None
        return int(moved)

    def _admit(self, step: _Step) -> None:
        """The queue, head first: nobody is passed over, nobody is preempted for it."""
        o, pool = self.options, self.pool
        while self.waiting and step.budget and len(self.running) < o.max_num_seqs:
            request = self.waiting.head()
            hits: list[int] = []
            if o.enable_prefix_caching:
                hits = pool.longest_prefix(request.spec, (request.target - 1) // o.block_size)
            computed = len(hits) * o.block_size
            if step.defer_prefill and computed < request.target - 1:
                break
            tokens = request.target - computed
            if step.threshold:
                tokens = min(tokens, step.threshold)
            if not o.enable_chunked_prefill and tokens > step.budget:
                break
            tokens = min(tokens, step.budget)
            if not self._has_room(request, computed + tokens, hits):
                break
            self._start(request, tokens, hits, step)

    def _has_room(self, request: Request, tokens: int, hits: list[int]) -> bool:
        o, pool = self.options, self.pool
        reach = min(request.target, o.max_model_len) if o.scheduler_reserve_full_isl else tokens
        needed = max(pool.blocks_for(max(reach, tokens)) - len(hits), 0) + pool.idle(hits)
        if o.reserve_output:
            needed = self._whole(request) - len(hits) + pool.idle(hits)
            needed += sum([self._whole(other) - pool.held(other) for other in self.running])
        return needed + (self._watermark if self._new and self.running else 0) <= pool.free

    def _whole(self, request: Request) -> int:
        """Blocks that a request holds at its end; its last token is never computed."""
        spec = request.spec
        return self.pool.blocks_for(min(spec.prompt_tokens + spec.max_tokens, self.options.max_model_len) - 1)

    def _start(self, request: Request, tokens: int, hits: list[int], step: _Step) -> None:
        """Move the head of the queue to running and give it its first row."""
        self.waiting.pop()
        computed = len(hits) * self.options.block_size
        request.admit(self._ordinal, computed)
        self._ordinal += 1
        self.running[request] = self._loose[request] = None
        self.pool.adopt(request, hits)
        step.prefill |= computed < request.target - 1
        self._place(request, computed, tokens, self._blocks_needed(request, tokens), step, admitted=True)

    def _place(
        self, request: Request, start: int, tokens: int, blocks: int, step: _Step, *, admitted: bool = False
    ) -> None:
        """Give a request its row. A block that will be full of known tokens can be found from now on."""
        pool, end = self.pool, start + tokens
        new = pool.grow(request, blocks) if blocks else ()
        if self.options.enable_prefix_caching:
            pool.publish(request, min(end, request.known) // pool.block_size)
        step.rows[request] = Chunk(
            request.spec,
            request.order,
            start,
            tokens,
            tuple(pool.tables[request] if admitted else new),
            end == request.target,
            admitted,
            admitted and request.preemptions > 0,
            start if admitted else 0,
            max(0, min(request.high_water, end) - start),
        )
        step.budget -= tokens

    def _commit(self, step: _Step) -> StepPlan:
        """Promise the rows and hand the plan out."""
        cohort = self.cohort
        ending = cohort.ending(cohort.planned)
        self._executed += bool(step.rows or cohort)
        if step.prefill:
            self._last_prefill = self._executed
        running, waiting = len(self.running), len(self.waiting)
        plan = self._news.plan(step.rows, step.grown, ending, len(cohort), running, waiting)
        cohort.commit()
        if not step.rows and not ending:
            return plan
        for request, row in step.rows.items():
            if row.samples:
                cohort.await_row(plan.step, request)
        for spec in plan.joined:
            request = self.requests[spec]
            del self._loose[request]
            self._join(request)
        for request in ending:
            if request.promised == request.limit:
                self._stand_by(request)
        return plan

    def _join(self, request: Request) -> None:
        """Into the cohort. Its blocks get their keys as they fill, unless nobody could ever ask for them."""
        full = request.computed // self.pool.block_size
        named = self.options.enable_prefix_caching and min(full + 1, request.named) > request.hashed
        self.cohort.join(request, self.pool.held(request), fills=named)
        if named and request.hashed < full:
            self._late_fills.append(request)

    def _stand_by(self, request: Request) -> None:
        """A member has its last row planned: it keeps seat and blocks until the token is back."""
        self._detach(request)
        self._loose[request] = None

    def _detach(self, request: Request) -> None:
        """Out of the cohort. Blocks that filled unwatched count as hashed, as if each had got its key in time."""
        cohort = self.cohort
        if self.options.enable_prefix_caching and cohort.planned > request.since:
            self.pool.publish(request, cohort.known_at_plan(request) // self.pool.block_size)
        cohort.leave(request, self.pool.held(request))
        self._news.left.append(request.spec)

    # -- results ------------------------------------------------------------------------------------------------------

    def runs_ahead(self, plan: StepPlan) -> bool:
        return plan.rows > 0 or (self._new and not self.idle)

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        stopped = [self.requests[s] for s in result.stopped if s in self.requests] if result.stopped else []
        received, over, wasted = self.cohort.land(plan.step, stopped)
        if not (received or over or wasted):
            return UNCHANGED
        for request in received:
            self._publish_landed(request)
        finished = [(request.spec, request.natural_end) for request in over]
        for request in over:
            self._finish(request, request.natural_end)
        return Outcome(tuple([r.spec for r in received]), tuple(finished), wasted)

    def _publish_landed(self, request: Request) -> None:
        if self.options.enable_prefix_caching and request.status is Status.DECODE:
            self.pool.publish(request, (request.known - 1) // self.pool.block_size)

    def _finish(self, request: Request, reason: Finish) -> None:
        """Take a request out, wherever it stands; its blocks are free at once."""
        if request.cohort is not None:
            self._detach(request)
            if reason is not Finish.ABORTED:
                self._publish_landed(request)
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request]
            self._loose.pop(request, None)
        self.pool.release(request)
        request.end(reason)
        del self.requests[request.spec]
        self._news.ended.append(request.spec)


def _urgency(request: Request) -> tuple[int, int]:
    return request.spec.priority, request.spec.arrival_ns
