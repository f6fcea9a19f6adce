"""SGLang 0.5.23's scheduler: prefill batches before decode batches, a radix tree for a cache, retraction.

Rules as in the real scheduler (text, full attention, beside it perhaps layers with states, no speculation), restated
and checked line by line against its traces. A request is admitted if what it computes and may write fits beside what
running requests are expected to write: a share of what they may, which falls as they decode, and rises when memory runs
out and some are retracted. `full` stops admission until a request leaves. The original's defects are not shared;
docs/policies.md lists them, and what proves the rules puts them back.

A server may only prefill: then no request joins the batch that decodes, and each keeps its KV after its prefill until
another server has it. Or it may only decode: then it has the queues of apart.py, and no prefill.
"""

from __future__ import annotations

from collections.abc import Collection

from cbsim.kv.keys import KeysOfPrefills
from cbsim.kv.radix_pool import RadixPool
from cbsim.policy.decoding import Decoding
from cbsim.policy.groups import Sight
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.value import mypyc_attr, replace
from cbsim.schedulers.base import SchedulerBase
from cbsim.schedulers.hand_off import HandOff
from cbsim.schedulers.sglang.apart import BUFFERS, Receiving
from cbsim.schedulers.sglang.queue import CLIP, NO_ROOM, NOT_NOW, Entry, Prefill, WaitingQueue, by_outputs, giving_way
from cbsim.schedulers.sglang.settings import DECAY_STEPS, LEAST_RATIO, TOO_LONG, SglangOptions, SglangSettings, resolve

FULL = "{} requests wait, max_queued_requests is {}"
LOST, NO_HOST = "its KV did not arrive", "retracted, and no memory of the host is left for its KV"
RETRACT_STEPS = 20  # decode steps for which retraction makes room


@mypyc_attr(allow_interpreted_subclasses=True)
class SglangScheduler(SchedulerBase):
    """A policy with SGLang's rules. Depth 1 is its `event_loop_normal`, depth 2 `event_loop_overlap`."""

    def __init__(self, options: SglangOptions, observer: Observer = NULL_OBSERVER) -> None:
        self.options = o = options
        self.pool = self.make_pool(observer)
        self.keys = KeysOfPrefills(self.pool)
        super().__init__(o, Decoding(self.pool, self.keys, together=True, lookahead=not o.decodes, observer=observer))
        self.waiting = WaitingQueue(o, self.pool)
        self.running: dict[Request, Entry] = {}  # from admission to release
        self.batch: dict[Request, Entry] = {}  # the running requests that decode, in order
        self.chunked: Entry | None = None  # the request whose prompt is partly computed
        self._counted = [0, 0]  # outputs that these may write, at most CLIP each: of a share, and whole
        self.full = False
        self.ratio = o.first_ratio
        self._least_ratio = o.first_ratio * LEAST_RATIO
        self._ratio_decay = (o.first_ratio - self._least_ratio) / DECAY_STEPS
        self._interval, self._preempts, self._mixes = o.scheduler_recv_interval, o.preempts, o.mixes
        self._holds = 0 if o.prefills else o.prefill_decode_interval
        self.hold = 0  # passes without a prefill to come
        self._sent: list[Entry] = []  # requests that have arrived since the scheduler last looked
        self._unseen = 0  # passes since then
        self.launched: list[Entry] = []  # the requests of the pass before, if it was a prefill
        self._departed = False  # whether a request has left the batch since the pass before
        self._writes = False  # whether any request may write more than one token, of all since the batch was empty
        self.sending = HandOff(self.decoding) if o.prefills else None
        self.receiving = Receiving(o, self.waiting, self.decoding, self.pool) if o.decodes else None
        self._brought: list[tuple[RequestSpec, Finish]] = []  # requests that ended as their KV came with all outputs

    def make_pool(self, observer: Observer) -> RadixPool:
        o = self.options
        shares = not o.disable_radix_cache
        return RadixPool(o.block_size, o.num_blocks, o.radix_eviction_policy, shares=shares, observer=observer)

    def make_prefill(self) -> Prefill:
        return Prefill(self.options, self.ratio, self.batch, self.most)

    @property
    def room(self) -> int:
        """The tokens that the cache could hold beside those in use."""
        return self.pool.free * self.pool.block_size

    @property
    def idle(self) -> bool:
        return not (self.requests or self.pending)

    @property
    def pending(self) -> bool:
        """Whether KV is on its way to another server or from one, or about to be."""
        sends = self.sending is not None and self.sending.busy
        return sends or (self.receiving is not None and self.receiving.busy)

    def runs_ahead(self, plan: StepPlan) -> bool:
        return plan.work.rows > 0

    def refusal(self, spec: RequestSpec) -> str | None:
        o = self.options
        if self.sending is not None and not spec.fetched_later:
            return "a prefill server takes requests whose KV is fetched"
        if self.receiving is not None and (reason := self._never_allocated(spec)):
            return reason
        context, cache = o.context_length - TOO_LONG - 2, o.pool_tokens - max(TOO_LONG + 2, o.block_size + 1)
        if spec.prompt_tokens > min(context, cache):
            least = "context_length" if context <= cache else "the cache"
            return f"prompt of {spec.prompt_tokens} tokens, {least} allows {min(context, cache)}"
        if self.waiting.is_full and self.waiting.gives_way(self._rank(spec)) is None:
            return FULL.format(len(self.waiting), o.max_queued_requests)
        return None

    def _never_allocated(self, spec: RequestSpec) -> str | None:
        """Return why a decode server can never take blocks for a request, or None."""
        if not spec.computed_elsewhere:
            return "a decode server takes requests whose prompt was computed elsewhere"
        reserved, cache = self.options.num_reserved_decode_tokens, self.options.pool_tokens
        needed = self.pool.blocks_for(spec.prompt_tokens) * self.pool.block_size + reserved
        rule = f"prompt of {spec.prompt_tokens} tokens, num_reserved_decode_tokens is {reserved}"
        return f"{rule}, the cache holds {cache}" if needed > cache else None

    def add(self, spec: RequestSpec) -> None:
        if not self.requests:
            self.rest()
        max_new = self.outputs(spec)
        request = self.decoding.add(spec, max(1, max_new))
        root = self.pool.tree.root
        self._sent.append(Entry(request, max_new, self._rank(spec), whole=self.reserves(spec), root=root))
        if self._interval == 1 and self.sending is None:
            self._receive()

    def _receive(self) -> None:
        """Queue the requests that have arrived, on a prefill server those for which it has a buffer."""
        free, self._unseen = len(self._sent), 0
        if not free:
            return
        if self.sending is not None:
            taken = len(self.waiting) + len(self.running) + len(self.sending.unfetched)
            free = BUFFERS * self.options.max_running_requests - taken
            self._sent.sort(key=lambda entry: (entry.request.spec.arrival_ns, entry.request.spec.index))
        sent, self._sent = self._sent[: max(0, free)], self._sent[max(0, free) :]
        for entry in sent:
            self._queue(entry)

    def _rank(self, spec: RequestSpec) -> int:
        return spec.priority if self.options.schedule_low_priority_values_first else -spec.priority

    def _queue(self, entry: Entry) -> None:
        """Queue a request, new or set back. If too many wait, a less urgent one is refused, or else this one."""
        if self.receiving is not None and entry.request.preemptions:
            self.receiving.retract(entry)
            return
        if not self.waiting.is_full:
            self.waiting.push(entry)
            return
        refused = self.waiting.gives_way(entry.rank) or entry
        reason = FULL.format(len(self.waiting), self.options.max_queued_requests)
        self.waiting.remove(refused.request)
        self.refuse(refused.request, reason)
        if refused is not entry:
            self.waiting.push(entry)

    def rest(self) -> None:
        """Reset the ratio after a time without requests, in which passes went by without work."""
        self.ratio, self.hold = self.options.first_ratio, 0

    def outputs(self, spec: RequestSpec) -> int:
        """Return the output tokens that a request may write."""
        return self.most_outputs(spec.prompt_tokens, spec.max_tokens)

    def most_outputs(self, prompt_tokens: int, max_tokens: int) -> int:
        """Return the outputs of a request with this limit that fit a sequence and an empty cache."""
        o = self.options
        if self.sending is not None:
            return 1
        paged = (self.pool.blocks_for(prompt_tokens) + 1) * self.pool.block_size
        most = min(max_tokens, o.longest - prompt_tokens - 1)
        return max(0, min(most, o.pool_tokens - paged - 1))

    def reserves(self, spec: RequestSpec) -> bool:
        """True if all that the request may write is kept free for it."""
        return self.options.ignore_eos

    def cancel(self, spec: RequestSpec) -> None:
        """Cancel a request. A decoding one gets one more token; its rows count as wasted with their result."""
        request = self.requests.get(spec)
        if request is None:
            return
        self._receive()
        if self.receiving is not None and self.receiving.cancel(request):
            return
        if request.status is Status.WAITING:
            self._sent = [entry for entry in self._sent if entry.request is not request]
            self.waiting.remove(request)
            self.decoding.end(request, Finish.ABORTED)
        elif self.chunked is not None and self.chunked.request is request:
            self.chunked = None
            self._give_up(request)
        else:
            self.decoding.defer_abort(request)

    def _give_up(self, request: Request) -> None:
        """End a request, and insert nothing more of it in the tree."""
        del self.running[request]
        self.pool.release(request, returns=True)
        self.decoding.end(request, Finish.ABORTED, keeps_blocks=True)

    def schedule(self) -> StepPlan | None:
        """Plan a step. With nothing in flight, the passes that would follow an empty one are made at once."""
        plan = self.one_pass()
        more = self.hold + 1
        while plan is None and more and not self.in_flight:
            more -= 1
            plan = self.one_pass()
        ends = self.receiving is not None and bool(self.decoding.ended or self.decoding.transfers)
        if plan is None and (self.pending or ends):
            self.decoding.rest()
            plan = self._plan({})
        return plan

    @property
    def in_flight(self) -> bool:
        """Whether there is a batch whose result is not known."""
        members = self.decoding.batched
        return members.planned > members.updated

    def one_pass(self) -> StepPlan | None:
        """Return the plan of one turn of the loop, or None."""
        self._unseen += 1
        if self.launched or not self.batch or self._unseen >= self._interval:
            self._receive()
        if self.receiving is not None:
            return self._decode_received(self.receiving)
        if self.chunked is not None:
            request = self.chunked.request
            self.decoding.exchange(request, self.pool.merge(request, request.computed // self.pool.block_size))
        self._merge()
        plan = None
        if self.hold:
            self.hold -= 1
        elif (plan := self._prefill()) is not None:
            self.hold = self._holds
        if plan is None and self.batch and self._writes:
            plan = self._decode()
        return plan

    def _decode_received(self, receiving: Receiving) -> StepPlan | None:
        """Return the plan of one turn of a decode server: those whose KV is there join the batch and decode with it."""
        for entry in receiving.look(self.batch.values(), len(self.running)):
            self._drop(entry.request, LOST)
        entering, caches = receiving.entering(len(self.batch)), not self.options.disable_radix_cache
        if caches:
            self.pool.collect()
        for entry in entering:
            self._enter(entry)
        if caches:
            self.pool.put_back()
        receiving.left, self._departed = [], False
        return self._decode() if self.batch else None

    def _drop(self, request: Request, reason: str) -> None:
        """End a request that cannot go on, and cache nothing of it."""
        self.pool.release(request, returns=True)
        self.decoding.end(request, Finish.REFUSED, keeps_blocks=True)
        self.refused.append((request.spec, reason))

    def _enter(self, entry: Entry) -> None:
        """Let a request run. Its first output, which came with the KV, is delivered with the last step that is over."""
        request = entry.request
        if not request.seen:
            request.receive(self.decoding.batched.updated - 1)
        if request in self.decoding.abort_pending:
            self.decoding.end(request, Finish.ABORTED)
        elif request.seen == request.last:
            self._brought.append((request.spec, request.natural_end))
            self.decoding.end(request, request.natural_end)
        else:
            self.decoding.renew(request)
            self.batch[request] = self.running[request] = entry
            self._counted[entry.whole] += min(entry.max_new, CLIP)

    def _merge(self) -> None:
        """Add the requests of the last prefill to the decode batch."""
        launched, self.launched = self.launched, []
        if self.sending is not None:
            return
        staying = [entry for entry in launched if entry.request.status is Status.DECODE]
        if len(staying) < len(launched) or self._departed or (staying and not self.batch):
            self.full = False
        if staying:
            went_on = self._writes and (self._departed or bool(self.batch))
            self._writes = went_on or any(entry.max_new for entry in launched)
        self._departed = False
        for entry in staying:
            self.batch[entry.request] = entry
            self._counted[entry.whole] += min(entry.max_new, CLIP)

    @property
    def most(self) -> float:
        """The most tokens reserved for decoding requests; one is added for rounding, because these are fractions."""
        share, whole = self._counted
        return share * self.ratio + whole + 1

    def _slots(self, running: int) -> int:
        """Return how many requests a batch may take, of which `running` have a slot already."""
        most, unsent = self.options.max_running_requests, len(self.sending.unfetched) if self.sending is not None else 0
        return min(most - len(self.batch), max(0, most - len(self.running) - unsent + running))

    def _prefill(self) -> StepPlan | None:
        chunked, preempts = self.chunked, self._preempts
        if preempts or not self.batch:
            self.full = False
        if chunked is None:
            if self.full or not self.waiting:
                return None
            if not preempts and self._slots(0) <= 0:
                self.full = True
                return None
        self.waiting.sort()
        prefill = self.make_prefill()
        if chunked is None or self._continue(chunked, prefill):
            self._admit(prefill)
        del self.waiting.entries[: len(prefill.taken) - (chunked is not None and bool(prefill.taken))]
        for entry in prefill.preempted:
            self._queue(entry)
        return self._launch(prefill) if prefill.taken else None

    def _continue(self, entry: Entry, prefill: Prefill) -> bool:
        """Add the next chunk of a prompt, whatever is reserved for others; return False if there is no memory."""
        request, size = entry.request, self.pool.block_size
        entry.todo = request.uncomputed
        most = min(prefill.next_chunk(self.room), self.waiting.reserve(entry.todo, prefill.chunk))
        tokens = min(entry.todo, most)
        if tokens <= 0 or self.pool.missing(request, request.computed + tokens) * size > self.room:
            return False
        prefill.take(entry, tokens)
        if tokens == entry.todo:
            self.chunked = None
        return True

    def _admit(self, prefill: Prefill) -> None:
        """Admit the queue in order; none is passed over. Spent budgets end it only while there is memory."""
        taken, running = prefill.taken, len(prefill.taken)
        for entry in self.waiting.entries:
            if prefill.spent and prefill.fits(self.room):
                return
            self.full |= len(taken) >= self._slots(running)
            if self.full and not (self._preempts and self._preempt(entry, prefill)):
                return
            tokens = self._admit_one(entry, prefill)
            if tokens == NO_ROOM or (tokens > 0 and not prefill.fits(self.room)):
                self.full = bool(taken or self.batch)
                return
            if tokens == NOT_NOW or prefill.spent:
                return

    def _admit_one(self, entry: Entry, prefill: Prefill) -> int:
        """Return the tokens of a request that the batch computes, or why it has to wait."""
        pool, request = self.pool, entry.request
        entry.node = pool.match(entry.key, request.target - 1)
        entry.todo = request.target - entry.node.end * pool.block_size
        pool.lock(entry.node)
        tokens = prefill.extent(entry, self.batch.values(), self.room, cuts=self.chunked is None)
        if tokens > 0:
            prefill.take(entry, tokens)
            pool.admit(request, entry.key, entry.node)
            if tokens < entry.todo:
                self.chunked = entry
        pool.unlock(entry.node)
        return tokens

    def _preempt(self, entry: Entry, prefill: Prefill) -> bool:
        """Preempt less urgent requests, least urgent first, until a request fits; none if that is not enough."""
        needed = self.extend_tokens(entry) + min(entry.max_new, CLIP) - (self.room - prefill.total)
        less = entry.rank + self.options.priority_scheduling_preemption_threshold
        victims = giving_way([e for e in self.batch.values() if e.rank > less], needed, self.ratio)
        if not victims:
            return False
        self.decoding.split()
        for victim in [other for other in self.batch.values() if other in victims]:
            prefill.returns(victim)
            self._set_back(victim, len(self.batch) - 1)
        return True

    def extend_tokens(self, entry: Entry) -> int:
        """Return the tokens that a request computes if it is admitted."""
        return entry.request.target - self.pool.match(entry.key, entry.request.target - 1).end * self.pool.block_size

    def _launch(self, prefill: Prefill) -> StepPlan:
        pool, decoding, taken, tokens = self.pool, self.decoding, prefill.taken, 0
        for entry in taken:
            request = entry.request
            tokens += entry.extent
            if request in self.running:
                decoding.renew(request)
            else:
                decoding.admit(request, request.target - entry.todo)
                self.running[request] = entry
        pool.make_room(tokens + (pool.block_size * len(taken) if pool.block_size > 1 else 0))
        rows = {entry.request: self._row(entry.request, entry.extent) for entry in taken}
        self.keys.prefilled, self.launched = set(rows), taken
        if self._mixes and self.batch:
            self._mix(rows)
        decoding.rest()
        plan = self._plan(rows)
        self.waiting.processed += plan.work.prefill_tokens
        return plan

    def _mix(self, rows: dict[Request, Chunk]) -> None:
        """Add rows for the decoding requests, if there is room for them; else they sit this step out."""
        if self._take_out():
            self.full = False
        if self.batch and self._fits(self.batch):
            self.pool.make_room(self.pool.block_size * len(self.batch))
            self.decoding.split()
            for request in self.batch:
                self.decoding.renew(request)
                rows[request] = self._row(request, 1)
            self.launched = [*self.launched, *self.batch.values()]
            self.batch, self._counted = {}, [0, 0]

    def _decode(self) -> StepPlan | None:
        pool, decoding, before = self.pool, self.decoding, len(self.batch)
        ending = self._take_out()
        fits = self._fits(self.batch)
        if not self.batch or (ending and not fits):
            self.full = False
            return None  # the memory of those that end comes free with their result
        if fits:
            self.ratio = max(self.ratio - self._ratio_decay, self._least_ratio)
        else:
            self._retract()
        self.full &= len(self.batch) == before
        if not self.batch:
            return None
        pool.make_room(pool.block_size * len(self.batch))
        self.keys.prefilled.clear()
        if len(decoding.batched) == len(self.batch):
            decoding.go_on()
            return self._plan({})
        decoding.split()
        return self._plan({request: self._row(request, 1) for request in self.batch})

    def _take_out(self) -> bool:
        """Remove requests whose last token is in flight from the batch. Return True if there are any. On a decode
        server they decode on, for nothing.
        """
        if self.receiving is not None:
            return False
        ending = [r for r in self.decoding.unbatched if r in self.batch and r.scheduled >= r.limit]
        for request in ending:
            self.leave_batch(request)
        return bool(ending)

    def leave_batch(self, request: Request) -> None:
        """Remove a request from those that decode."""
        entry = self.batch.pop(request)
        self._counted[entry.whole] -= min(entry.max_new, CLIP)

    def _fits(self, requests: Collection[Request]) -> bool:
        """True if each request that needs a page for its next token can get one, if need be after evictions."""
        pool = self.pool
        if len(self.decoding.batched) == len(requests):
            pages = self.decoding.due_blocks()
        else:
            pages = sum([pool.missing(request, request.computed + 1) for request in requests])
        pool.make_room(pages * pool.block_size)
        return pages <= pool.ready

    def _retract(self) -> None:
        """Retract the requests with the fewest outputs, until the others have enough memory."""
        self.decoding.split()
        line = by_outputs([*self.batch.values()], ranked=self.options.retraction_policy == "priority")
        retracted: list[Entry] = []
        while (not retracted or not self._fits([entry.request for entry in line])) and len(line) > 1:
            retracted.append(line.pop())
            self._set_back(retracted[-1], len(line))
        if len(line) == 1 and not self._fits([line[0].request]):
            retracted += self.stranded(line.pop())
        self.batch = {entry.request: entry for entry in line}
        for entry in line:
            self.decoding.renew(entry.request)
        seen, most = sum([entry.request.seen for entry in line]), sum([entry.max_new for entry in line])
        self.ratio = min(1.0, (seen + RETRACT_STEPS * len(line)) / (most + 1))
        for entry in retracted:
            self._queue(entry)

    def stranded(self, entry: Entry) -> list[Entry]:
        """Preempt the last decoding request: there is no room, for prompts partly computed or received occupy it."""
        explained = self.chunked is not None or self.receiving is not None
        assert explained, (entry.request.spec.id, "does not fit an empty cache")
        self._set_back(entry, 0)
        return [entry]

    def _set_back(self, entry: Entry, remaining: int) -> None:
        """Preempt a request; it waits again. Make room for the `remaining` ones that go on."""
        self.leave_batch(entry.request)
        del self.running[entry.request]
        if self.receiving is None:
            self.decoding.preempt(entry.request, drop_in_flight=True)
        elif not self.receiving.host.park(entry.request, drop_in_flight=True):
            self._drop(entry.request, NO_HOST)
        self.pool.make_room(RETRACT_STEPS * remaining)

    def _row(self, request: Request, tokens: int) -> Chunk:
        return self.decoding.row(request, tokens, self.pool.extend(request, request.computed + tokens))

    def _plan(self, rows: dict[Request, Chunk]) -> StepPlan:
        waiting = len(self.waiting)
        if (receiving := self.receiving) is not None:
            waiting += receiving.allocated + len(receiving.retracted)
        return self.decoding.plan(rows, running=len(self.running), waiting=waiting)

    def check(self) -> None:
        """Raise AssertionError unless pages, members and slots of the batch are accounted for."""
        self.decoding.check()
        waiting, tables = len(self.waiting) + len(self._sent), {*self.running}
        if self.sending is not None:
            self.sending.check()
            tables |= self.sending.unfetched.keys()
        if (receiving := self.receiving) is not None:
            receiving.check()
            tables |= {*receiving.loading, *receiving.cancelled, *receiving.ready}
            waiting += len(receiving.loading) + len(receiving.ready) + len(receiving.retracted)
        assert len(self.running) + waiting == len(self.requests), "requests that neither wait nor run"
        assert self.batch.keys() <= self.running.keys(), "decodes and does not run"
        o = self.options
        places = o.max_running_requests if o.max_mamba_cache_size is None else o.max_mamba_cache_size
        assert len(self.running) <= min(o.max_running_requests, places), ("places, or states", len(self.running))
        assert self.pool.tables.keys() == tables, "KV of requests that neither run nor are on their way"

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        if self.sending is None:
            self.pool.collect()
        if self.receiving is not None and result.stopped:  # perhaps by a first output, which came with the KV
            running = tuple([spec for spec in result.stopped if self.requests.get(spec) in self.running])
            result = replace(result, stopped=running)
        outcome = super().update(plan, result)
        if self.sending is None:
            self.pool.put_back()
        self.moved(result.moved, result.broken)
        if self._brought:
            brought, self._brought = self._brought, []
            outcome = Outcome(outcome.received, (*brought, *outcome.finished), outcome.wasted_rows)
        return outcome

    def moved(self, jobs: tuple[int, ...], broken: tuple[int, ...] = ()) -> None:
        """Record that transfers are over."""
        if self.sending is not None:
            for request in self.sending.completed(0, [*jobs]):
                self.pool.release(request)
        if self.receiving is not None:
            self.receiving.moved(jobs, broken)

    def _finish(self, request: Request, reason: Finish) -> None:
        entry = self.running.pop(request)
        if request in self.batch:
            self.leave_batch(request)
            self._departed = True
            if self.receiving is not None:
                self.receiving.left.append(entry)
        if self.sending is None:
            self.decoding.end(request, reason)
        elif reason is Finish.ABORTED:
            self.pool.release(request, returns=True)
            self.decoding.end(request, reason, keeps_blocks=True)
        else:
            self.pool.merge(request, request.computed // self.pool.block_size)
            self.sending.ended(request, reason, request.computed)
            self.decoding.end(request, reason, keeps_blocks=True)


SGLANG = SchedulerKind(
    name="sglang",
    about="SGLang 0.5.23: prefill before decode, a radix tree, retraction",
    settings=SglangSettings,
    resolve=resolve,
    make=SglangScheduler,
    block_size=1,
    serves=(Sight.FULL, Sight.STATE),
    hands_off=True,
    brings_first=True,
    whole=True,
    balance=lambda _: "turns",
)
