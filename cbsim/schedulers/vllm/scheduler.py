"""vLLM V1's scheduler: running requests first, then the queue, one token budget; preemption by recompute.

Rules as in vLLM 0.19 and 0.33 (text only), restated and checked line by line
against traces of the real code (`cbsim conformance`). What windows change is the cache's (group_pool.py). Chunked
prefill has no phase of its own: a request needs `target - computed` tokens and gets what the budget leaves, in
admission order.

Requests that decode go on together (decoding.py) while none can be refused; else every request is walked in order,
so the rules are stated once, in `_run`.
"""

from __future__ import annotations

from typing import Any

from cbsim.kv.blocks import BlockPool, FreeQueue
from cbsim.kv.group_pool import GroupPool
from cbsim.kv.host_cache import Arc, HostBlocks, HostCache, Lru
from cbsim.kv.keys import GroupKeys, Keys, KeysWhenKnown
from cbsim.policy.decode_batch import by_order
from cbsim.policy.decoding import Decoding
from cbsim.policy.groups import Sight
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.loop import Waves
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Outcome, StepPlan, StepResult
from cbsim.policy.queues import ArrivalQueue, PriorityQueue, Queue
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.swapping import Swapping
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.base import SchedulerBase, too_large
from cbsim.schedulers.hand_off import HandOff
from cbsim.schedulers.vllm.offload import EagerOffload, LazyOffload, NativeOffload
from cbsim.schedulers.vllm.settings import VllmOptions, VllmSettings, balance, may_pad, resolve, sees_all
from cbsim.schedulers.vllm.transfers import Connector, Step, Transfers


@mypyc_attr(allow_interpreted_subclasses=True)
class VllmScheduler(SchedulerBase):
    """A policy with vLLM V1's rules. Depth 1 is `EngineCore.step`, depth 2 `step_with_batch_queue`."""

    polls_before_update = True

    def __init__(self, options: VllmOptions, observer: Observer = NULL_OBSERVER) -> None:
        self.options = o = options
        self._new = o.version == "0.33"
        self.pool, keys = cache(o, observer)
        self._speculation = o.speculation
        self._staged = o.stages > 1
        self._fcfs = o.policy == "fcfs"
        together = sees_all(o.groups) and o.speculation is None and not self._staged
        super().__init__(o, Decoding(self.pool, keys, together=together, observer=observer))
        self.running: dict[Request, None] = {}  # in admission order
        self.waiting = self._queue()
        self.swapping: Swapping | None = None
        if o.preemption_mode == "swap":
            self.waiting = self.swapping = Swapping(self.decoding, self.waiting, o.host_blocks)
        self._caches = o.enable_prefix_caching
        self._seats, self._tokens = o.max_num_seqs, o.max_num_batched_tokens
        self._long_prefill, self._interval = o.long_prefill_token_threshold, o.prefill_schedule_interval
        self._longest_row = min(o.max_num_batched_tokens, o.long_prefill_token_threshold or o.max_num_batched_tokens)
        self._redoes = o.hands_on  # rows in flight of a victim are not delivered, but computed once more
        self._watermark = int(o.watermark * o.num_blocks)
        self._ahead = o.speculation.ahead if o.speculation else 0
        self._slots = o.speculation.slots if o.speculation else 0
        self.drafts = 0  # that the newest step proposes for each of its rows,
        self.drafting = False  # unless none of them would come to be verified
        self._rows: dict[Request, int] = {}  # with stages: the step of a request's last row,
        self._rests: dict[Request, int] = {}  # and the first one in which it may decode again
        self._deferred: set[Request] = set()  # that were passed over since they were preempted
        self._executed = 0
        self._last_prefill = -o.prefill_schedule_interval
        self._capacity_bound = False
        self.waves: Waves | None = None  # of servers that step together
        self.transfers = connect(o, self.decoding, self._queue(), observer) if o.kv_connector != "none" else None

    @property
    def idle(self) -> bool:
        if self.requests or self.decoding.ended:  # vLLM runs a step to report ended requests
            return False
        return self.transfers is None or not self.transfers.busy

    def _queue(self) -> Queue:
        return ArrivalQueue() if self._fcfs else PriorityQueue()

    def refusal(self, spec: RequestSpec) -> str | None:
        o = self.options
        if spec.prompt_tokens >= o.max_model_len:
            return f"prompt of {spec.prompt_tokens} tokens, max_model_len is {o.max_model_len}"
        if not o.enable_chunked_prefill and spec.prompt_tokens > o.max_num_batched_tokens:
            return f"prompt of {spec.prompt_tokens} tokens, max_num_batched_tokens is {o.max_num_batched_tokens}"
        most = min(spec.prompt_tokens + spec.max_tokens, o.max_model_len)
        room = self._end(max(most - 1, self._padded(spec, most - 1)))
        return too_large(most, self.pool.most_blocks(room), self.pool.num_blocks, room + 1 - most)

    def _padded(self, spec: RequestSpec, tokens: int) -> int:
        """Return the tokens of a request of `tokens` tokens that is admitted, or again after a preemption, with blank
        drafts: when all but one that it has by then are in the cache. 0 if that cannot be.
        """
        o, speculation = self.options, self._speculation
        if speculation is None or not may_pad(o, speculation):
            return 0
        most = min(tokens, o.max_model_len - speculation.k - 1)
        known = (most - 1) // o.block_size * o.block_size + 1
        return known + speculation.k if known >= spec.prompt_tokens else 0

    def add(self, spec: RequestSpec) -> None:
        limit = min(spec.max_tokens, self.options.max_model_len - spec.prompt_tokens)
        request = self.decoding.add(spec, limit)
        if self.transfers is not None:
            request.name_all()  # connectors keep what no other request can look up, too
        self.waiting.push(request)

    def schedule(self) -> StepPlan:
        step = Step(self._tokens - self._slots, self._threshold(), self._defers_prefill())
        decoding, transfers = self.decoding, self.transfers
        self.pool.begin()
        if self._undisturbed(step):
            step.budget -= decoding.go_on()
        else:
            if transfers is not None:
                transfers.dissolving()
            decoding.split()
        if decoding.unbatched:
            self._run(step)
        if decoding.preempted:
            return self._commit(step)
        if self._speculation is not None and not (self._speculation.by_rows or step.prefill):
            step.blanks, step.alone = self._speculation.k, not step.rows
        if transfers is not None:
            transfers.admit(self, step)
        elif self.swapping is not None and self.swapping.out:
            self._bring_in(self.swapping, step)
        elif self.waiting:
            self._admit(step)
        if self._interval > 1 and not step.defer_prefill:
            passed_over = len(transfers.passed_over if transfers is not None else self._deferred)
            self._capacity_bound = self._present() - len(self.running) > passed_over
        return self._commit(step)

    def _present(self) -> int:
        """Return the number of requests, those that load or wait with their blocks included."""
        holding = len(self.transfers.holding) if self.transfers is not None else 0
        return len(self.running) + len(self.waiting) + holding

    def _threshold(self) -> int:
        """Return the most tokens that a request may prefill in this step, 0 for no limit."""
        o, threshold = self.options, self._long_prefill
        if not threshold or not self._new:
            return threshold
        present = self._present()
        if present <= 1:
            return 0
        return max(threshold, o.max_num_batched_tokens // present) if o.adaptive_long_prefill_threshold else threshold

    def _defers_prefill(self) -> bool:
        due = self._executed + 1 - self._last_prefill >= self._interval
        if self.waves is not None:
            due = self.waves.next % self._interval == 0  # so that all prefill in the same step
        if due or self._capacity_bound:
            return False
        return bool(self.decoding.batched.stays) or any(r.status is Status.DECODE for r in self.running)

    def _undisturbed(self, step: Step) -> bool:
        """True if no member can be refused, stalled or preempted by what runs before or beside it."""
        decoding = self.decoding
        if len(decoding.batched.stays) > step.budget or not decoding.has_blocks():
            return False
        for request in decoding.unbatched:
            if self._demand(request, step) and not (self._fcfs and request.order > decoding.batched.max_order):
                return False
        return True

    def _demand(self, request: Request, step: Step) -> int:
        """Return the query tokens that a running request needs, before the budget; 0 to be skipped in this step."""
        if request.awaits_last or (self._rests and self.decoding.batched.planned < self._rests.get(request, 0)):
            return 0
        if step.defer_prefill and request.status is Status.PREFILL:
            return 0
        tokens = request.uncomputed
        if self._staged and not self.options.async_scheduling:
            tokens -= request.scheduled - request.seen  # a token in flight has no row of its own yet
        if request.drafts:
            tokens = min(tokens + request.drafts, self.options.max_model_len - request.computed - 1)
        return min(tokens, step.threshold) if step.threshold else tokens

    def _run(self, step: Step) -> None:
        """Plan running requests one by one, in admission order; one that lacks a block preempts the last."""
        unbatched = self.decoding.unbatched
        line = list(unbatched)
        if len(line) > 1:
            line.sort(key=by_order)
        i = 0
        while i < len(line) and step.budget > 0:
            request = line[i]
            computed, tokens = request.computed, self._demand(request, step)
            tokens = self._aligned(request, computed, tokens if tokens < step.budget else step.budget)
            if not tokens:
                i += 1
                continue
            end = self._end(computed + tokens)
            needed = self.pool.due(request, end - computed)
            while needed > self.pool.free and request in unbatched:
                victim = line[-1] if self._fcfs else max(line, key=_urgency)
                if self.transfers is not None and self.transfers.in_flight(victim):
                    return  # its blocks would not be free yet
                i -= self._preempt(victim, line, i, step)
            if request not in unbatched:
                if self._new and not self._fcfs:
                    continue
                break
            step.prefill |= request.status is Status.PREFILL
            self._place(request, tokens, end, needed, step)
            i += 1

    def _preempt(self, victim: Request, line: list[Request], index: int, step: Step) -> int:
        """Preempt the victim; return by how much the index of the walk has to be decremented."""
        at = line.index(victim)
        del line[at]
        taken_back = step.rows.pop(victim, None)
        if taken_back:
            step.budget += taken_back.tokens + self._slots
        del self.running[victim]
        if self.swapping is None or not self.swapping.host.park(victim, drop_in_flight=False):
            self.decoding.preempt(victim, drop_in_flight=self._redoes)
            self.waiting.push_front(victim)
        moved = at < index if self._new else taken_back is not None
        return int(moved)

    def _bring_in(self, swapping: Swapping, step: Step) -> None:
        """Swap requests in as `_admit` would: head first, none passed over; and no new request beside them."""
        for request in list(swapping.out):
            tokens = min(self._demand(request, step), step.budget)
            deferred = step.defer_prefill and request.uncomputed > 1
            if not tokens or deferred or len(self.running) == self.options.max_num_seqs:
                break
            if not swapping.has_room(request, tokens, self.kept_free):
                break
            swapping.bring_in(request)
            self.running[request] = None
            step.prefill |= request.uncomputed > 1
            end = request.computed + tokens
            self._place(request, tokens, end, self.pool.missing(request, end), step)

    def _admit(self, step: Step) -> None:
        """Admit the queue, head first: none is preempted for it, and none is passed over but those that were preempted
        and have a row in flight.
        """
        passed_over: list[Request] = []
        while self.waiting and step.budget > 0 and len(self.running) < self._seats:
            request = self.waiting.head()
            if self._rows.get(request, -1) >= self.decoding.batched.updated:
                passed_over.append(self.waiting.pop())
                self._deferred.add(request)
                continue
            hits = self.hits(request)
            if not self.start(self.waiting, self.pool.tokens_in(hits), hits, step):
                break
        for request in reversed(passed_over):
            self.waiting.push_front(request)

    def hits(self, request: Request) -> list[int]:
        """Return the cached blocks of a waiting request; its last token is computed in any case."""
        return self.pool.find(request) if self._caches else []

    def start(self, queue: Queue, computed: int, hits: list[int], step: Step) -> bool:
        """Give the head of a queue its first row, behind the `computed` tokens; return False if it does not fit."""
        o, request = self.options, queue.head()
        tokens = request.target - computed
        prefill = tokens > 1
        if step.defer_prefill and prefill:
            return False
        if tokens == 1 and self._pads(computed, step):
            tokens += step.blanks
            if tokens > step.budget:
                return False
        if step.threshold:
            tokens = min(tokens, step.threshold)
        if not o.enable_chunked_prefill and tokens > step.budget:
            return False
        tokens = self._aligned(request, computed, min(tokens, step.budget))
        end = self._end(computed + tokens)
        if not tokens or not self.has_room(request, end, hits):
            return False
        queue.pop()
        self._deferred.discard(request)
        self.decoding.admit(request, computed)
        self.running[request] = None
        if not self.pool.allocated(request):
            self.pool.adopt(request, hits)
        step.prefill |= prefill
        self._place(request, tokens, end, self.pool.missing(request, end), step)
        return True

    def _end(self, tokens: int) -> int:
        """Return the tokens for which a request needs room whose row ends behind `tokens` tokens."""
        return min(tokens + self._ahead, max(tokens, self.options.max_model_len)) if self._ahead else tokens

    def _pads(self, computed: int, step: Step) -> bool:
        """Whether an admitted row of one token, behind `computed` ones, gets the shape of those that verify drafts."""
        shaped = step.blanks > 0 and (computed > 0 or not step.alone)
        return shaped and computed + step.blanks + 2 <= self.options.max_model_len

    def _aligned(self, request: Request, start: int, tokens: int) -> int:
        """Return how many of the next `tokens` tokens a row has, so that states for later prompts are behind it."""
        return self.pool.aligned(request, start, tokens, self._longest_row) if self._caches and tokens else tokens

    def has_room(self, request: Request, tokens: int, hits: list[int]) -> bool:
        o, pool = self.options, self.pool
        whole = min(request.target, o.max_model_len) if o.scheduler_reserve_full_isl else 0
        needed = pool.needed(request, tokens, whole, hits)
        if o.reserve_output:
            needed = self._whole(request) - len(hits) + pool.idle(hits)
            needed += sum([self._whole(other) - pool.allocated(other) for other in self.running])
        return needed + self.kept_free <= pool.free

    @property
    def kept_free(self) -> int:
        """The blocks that no admitted request may take."""
        return self._watermark if self._new and self.running else 0

    def _whole(self, request: Request) -> int:
        """Return the blocks of a request at its end; its last token is never computed."""
        spec = request.spec
        return self.pool.blocks_for(min(spec.prompt_tokens + spec.max_tokens, self.options.max_model_len) - 1)

    def _place(self, request: Request, tokens: int, end: int, blocks: int, step: Step) -> None:
        """Add a row of so many tokens, and the `blocks` that are lacking for the request's tokens up to `end`."""
        added = self.pool.fill(request, end, blocks) if blocks else ()
        drafts = max(0, tokens - request.uncomputed) if self._speculation else 0
        step.drafts |= not self._ahead or self._wants_drafts(request, tokens)
        step.rows[request] = self.decoding.row(request, tokens, added, guesses=drafts)
        step.budget -= tokens + self._slots

    def _wants_drafts(self, request: Request, tokens: int) -> bool:
        """Whether drafts behind a row of so many tokens may come to be verified."""
        ahead = 1 + (request.scheduled > request.seen)
        return request.computed + tokens >= request.known and request.seen + ahead < request.spec.max_tokens

    def _commit(self, step: Step) -> StepPlan:
        if step.rows or self.decoding.batched.stays:
            self._executed += 1
        if step.prefill:
            self._last_prefill = self._executed
        transfers, speculation = self.transfers, self._speculation
        if speculation is not None:
            self.drafts, self.drafting = speculation.drafts(len(step.rows)), step.drafts
        drafts = self.drafts if self.drafting else 0
        waiting = len(self.waiting)
        if transfers is not None:
            transfers.order(self.running, step.rows)
            waiting += len(transfers.holding)
        plan = self.decoding.plan(step.rows, running=len(self.running), waiting=waiting, drafts=drafts)
        if transfers is not None:
            transfers.planned(plan)
        if speculation is not None and self.options.async_scheduling:
            self._draft(plan, NO_DRAFTS)
        if self._staged:
            self._rows.update(dict.fromkeys(step.rows, plan.step))
            sampling = [request for request, row in step.rows.items() if row.outputs and self.options.async_scheduling]
            self._rests.update(dict.fromkeys(sampling, plan.step + self.options.stages))
        return plan

    def _draft(self, plan: StepPlan, drafted: dict[RequestSpec, int]) -> None:
        """Let the next rows of those that sample in a step verify its drafts: as many as it proposes, or `drafted`."""
        for chunk in plan.work.chunks:
            if chunk.outputs and (request := self.requests.get(chunk.spec)) is not None:
                request.draft(drafted.get(chunk.spec, self.drafts))

    def runs_ahead(self, plan: StepPlan) -> bool:
        return plan.work.rows > 0 or (self._new and not self.idle)

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        transfers = self.transfers
        if transfers is not None:
            transfers.completing(plan, result)
        outcome = super().update(plan, result)
        if transfers is not None:
            transfers.completed(plan, result)
        if self._speculation is not None and not self.options.async_scheduling:
            self._draft(plan, dict(result.drafted))
        return outcome

    def _finish(self, request: Request, reason: Finish) -> None:
        transfers = self.transfers
        if request.status is not Status.WAITING:
            del self.running[request]
        elif transfers is not None and request in transfers.loads:
            transfers.holding.remove(request)
        else:
            self.waiting.remove(request)
        self._deferred.discard(request)
        self._rows.pop(request, None)
        self._rests.pop(request, None)
        keeps_blocks = transfers is not None and transfers.ended(request, reason)
        self.decoding.end(request, reason, keeps_blocks=keeps_blocks)


NO_DRAFTS: dict[RequestSpec, int] = {}


def _urgency(request: Request) -> tuple[int, int]:
    return request.spec.priority, request.spec.arrival_ns


def cache(o: VllmOptions, observer: Observer) -> tuple[BlockPool, Keys | None]:
    """Return the pool of a scheduler, and the rule by which blocks get keys. Block 0 is never handed out."""
    free, blocks = FreeQueue(range(1, o.num_blocks), unhashed_first=o.version == "0.33"), o.num_blocks - 1
    if sees_all(o.groups):
        pool = BlockPool(o.block_size, blocks, free, observer)
        if o.speculation and o.enable_prefix_caching and o.kv_connector == "none":
            pool.hashed_ahead = o.speculation.hashed_ahead
        return pool, KeysWhenKnown(pool) if o.enable_prefix_caching else None
    bounds: dict[str, Any] = {"retention": o.prefix_cache_retention_interval, "most_in_flight": o.most_in_flight}
    grouped = GroupPool(o.groups, o.block_size, blocks, free, observer, longest=o.max_model_len, **bounds)
    return grouped, GroupKeys(grouped) if o.enable_prefix_caching else None


def connect(o: VllmOptions, decoding: Decoding, holding: Queue, observer: Observer) -> Transfers:
    """Return the rules that a connector adds to a scheduler. `holding` is a second queue, of the same kind."""
    decoding.pool.host_blocks = o.host_blocks
    ahead = o.async_scheduling and not (o.hands_on and o.kv_role == "kv_producer")
    connector: Connector
    if o.kv_connector == "hand_off":
        connector = HandOff(decoding)
    elif o.kv_connector == "offloading":
        chunks = o.host_blocks // o.blocks_per_chunk
        cache = HostCache(chunks, Arc(chunks) if o.eviction_policy == "arc" else Lru())
        connector = NativeOffload(decoding, cache, o.blocks_per_chunk, prompts_only=o.offload_prompt_only)
    elif o.lazy_offload:
        most = 2 * decoding.pool.blocks_for(o.max_num_batched_tokens)
        connector = LazyOffload(decoding, HostBlocks(o.host_blocks), most)
    else:
        connector = EagerOffload(decoding, HostBlocks(o.host_blocks), ahead=o.async_scheduling)
    return Transfers(connector, decoding, holding, observer, ahead=ahead)


VLLM = SchedulerKind(
    name="vllm",
    about="vLLM V1 (0.33; 0.19 by option): running first, preemption by recompute",
    settings=VllmSettings,
    resolve=resolve,
    make=VllmScheduler,
    padding="vllm",
    serves=tuple(Sight),
    balance=balance,
    drafts=("ngram", "eagle", "draft_model"),
    hands_off=True,
    staged=True,
)
