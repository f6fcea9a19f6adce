"""The requests that a scheduler has admitted: their rows, the changes that a plan lists, the effects of a result.

A scheduler decides which requests run and how far; everything that follows from it is done here. There are two ways to
plan.

Rows one by one: the scheduler makes a `row` for every request that is to compute something, and hands all to `plan`.
That is all that a new policy needs.

Together: in most steps every decoding request gets its token and none can be refused. Those requests are the members
of a decode batch, and `go_on` plans them all at the cost of what changes. If budgets or blocks might not do for all,
the scheduler calls `split` and plans every request by its rules; so these are stated once. Both ways give the same
rows, blocks and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cbsim.kv.blocks import BlockPool, Replaced
from cbsim.kv.keys import Keys
from cbsim.policy.decode_batch import Completion, Completions, DecodeBatch, by_order, in_order
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import (
    UNCHANGED,
    UNDISTURBED,
    Chunk,
    Listed,
    Outcome,
    Preempted,
    StepChanges,
    StepCounts,
    StepPlan,
    StepResult,
    StepWork,
    length,
)
from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.policy.transfers import IN_ORDER, Transfer, arriving
from cbsim.policy.value import replace

NO_TRANSFERS: Final[tuple[tuple[Transfer, ...], tuple[int, ...]]] = ((), ())
Scheduled = tuple[tuple[Chunk, ...], list[RequestSpec], list[RequestSpec], int, int, int]
"""The listed rows of a step: requests that join or sample a declared last token, tokens, blocks, new blocks."""
NOTHING: Final[Scheduled] = (), [], [], 0, 0, 0
ALL: Final[dict[RequestSpec, int]] = {}  # guesses came true


class Decoding:
    """The requests of a scheduler. `requests` are those that have not ended; running ones are `batched` or `unbatched`.

    With `together`, a request that has sampled a token joins the members. With `lookahead`, a request whose last token
    is planned gets no further row. With `wastes_chunks`, a row that was to sample nothing counts as wasted too, if its
    request has ended. With `by_arrival`, members are in order of arrival, whenever they were admitted.
    """

    def __init__(
        self,
        pool: BlockPool,
        keys: Keys | None = None,
        *,
        together: bool = False,
        lookahead: bool = True,
        wastes_chunks: bool = False,
        by_arrival: bool = False,
        long_tokens: int = 0,
        observer: Observer = NULL_OBSERVER,
    ) -> None:
        self.pool = pool
        self.batched = DecodeBatch(pool.block_size, long_tokens=long_tokens)
        self.requests: dict[RequestSpec, Request] = {}
        self.unbatched: dict[Request, None] = {}
        self.ended: list[RequestSpec] = []  # since the plan before
        self.preempted: list[Preempted] = []
        self.transfers: list[Transfer] = []  # of KV, for the next plan
        self.awaited: list[int] = []  # jobs of transfers that the next plan's rows wait for
        self.grown_blocks: Listed = ()  # blocks that members get in the step being planned
        self.abort_pending: dict[Request, None] = {}  # cancelled requests that end with their next token
        self._keys = keys or Keys(pool)
        self._together, self._lookahead, self._wastes_chunks = together, lookahead, wastes_chunks
        self._by_arrival = by_arrival
        self._observer, self._observed = observer, observer is not NULL_OBSERVER
        self._admissions = 0  # or arrivals, if they give the order
        self._growing: list[Request] | None = None  # members that need a block, once they have been looked up
        self._grown: tuple[RequestSpec, ...] = ()
        self._filling: list[Request] = []  # members that fill a block and whose completion has to be noted
        self._decodes = 0
        self._resting = False  # whether the members get no row in the step being planned
        self._left: list[RequestSpec] = []
        self._replaced: list[Replaced] = []
        self._noted: dict[int, Completions] = {}  # by step

    def add(self, spec: RequestSpec, limit: int) -> Request:
        """Register a request that has arrived. After `limit` output tokens its end is known in advance."""
        request = self.requests[spec] = Request(spec, limit, self.pool.block_size, self.pool.hashed_ahead)
        if self._by_arrival:
            request.renew(self._next_order())
        return request

    def admit(self, request: Request, cached_tokens: int = 0) -> None:
        """Admit a waiting request, with its first `cached_tokens` tokens in the cache."""
        request.admit(request.order if self._by_arrival else self._next_order(), cached_tokens)
        self.unbatched[request] = None

    def _next_order(self) -> int:
        self._admissions += 1
        return self._admissions - 1

    def row(self, request: Request, tokens: int, blocks: Sequence[int], *, guesses: int = 0, padding: int = 0) -> Chunk:
        """Return a row of the next `tokens` tokens, for which `blocks`, perhaps packed, have been added to the table.

        If the row reaches the request's target, it yields an output token. The last `guesses` of the tokens lie behind
        the target; each may yield one more.
        """
        start, first, before = request.computed, request.fresh, request.high_water
        end = start + tokens
        outputs = guesses + 1 if tokens == request.uncomputed + guesses else 0
        self._keys.row(request, end - guesses)
        return Chunk(
            request.spec,
            request.order,
            start,
            tokens,
            self.pool.listed(request) if first else blocks if isinstance(blocks, bytes) else tuple(blocks),
            outputs,
            admitted=first,
            resumed=first and request.preemptions > 0,
            cached=start - request.restored if first else 0,
            recomputed=min(before, end) - start if before > start else 0,
            padding=padding,
        )

    def preempt(self, request: Request, *, drop_in_flight: bool) -> None:
        """Release the blocks of a request outside the decode batch; it has to wait again."""
        self.preempted.append(Preempted(request.spec, request.computed, self.pool.allocated(request)))
        del self.unbatched[request]
        self.pool.release(request, returns=True)
        request.requeue(drop_in_flight)

    def renew(self, request: Request) -> None:
        """Move a request outside the decode batch behind all others in the admission order."""
        request.renew(self._next_order())

    def defer_abort(self, request: Request) -> None:
        """Let a running request that was cancelled end with its next token. That end is not reported in an outcome."""
        self.split()  # so that all its rows are listed
        self.abort_pending[request] = None

    def resume(self, request: Request) -> None:
        """Admit a parked request again, with everything computed before it was parked."""
        request.resume(request.order if self._by_arrival else self._next_order())
        self.unbatched[request] = None

    def exchange(self, request: Request, entries: Sequence[tuple[int, int]]) -> None:
        """Record for the next plan that entries of a table, each (index, block), became other blocks."""
        self._replaced += [(request.spec, index, block) for index, block in entries]

    def call_off(self, request: Request) -> None:
        """Drop in-order transfers of a request that no plan has listed, before it loses their blocks."""
        if self.transfers:
            self.transfers = [m for m in self.transfers if m.spec is not request.spec or m.job != IN_ORDER]

    def end(self, request: Request, reason: Finish, *, keeps_blocks: bool = False) -> None:
        """End a request, wherever it stands; its blocks are free at once, unless `keeps_blocks`."""
        if request.batch is not None:
            self._detach(request)
        self.unbatched.pop(request, None)
        self.abort_pending.pop(request, None)
        if not keeps_blocks:
            self.pool.release(request)
        request.end(reason, keeps_blocks=keeps_blocks)
        del self.requests[request.spec]
        self.ended.append(request.spec)

    def has_blocks(self, spare: int = 0) -> bool:
        """True if a block is ready for every member that needs one more in this step, and `spare` blocks beside."""
        return self.due_blocks() + spare <= self.pool.ready

    def due_blocks(self) -> int:
        """Return how many blocks the members need in this step, one each."""
        self._growing = self.batched.growing()
        return len(self._growing)

    def go_on(self) -> int:
        """Plan a row of one token for every member, and a block where one is due. Return their number."""
        members = self.batched
        growing, self._growing = self._growing, None
        if growing is None:
            growing = members.growing()
        if growing:
            self.grown_blocks = self.pool.grow_each(growing)
            self._grown = members.grew()
        self._filling = self._keys.go_on(members.filling())
        self._decodes = decodes = len(members.stays)
        return decodes

    def rest(self) -> None:
        """Plan no row for any member in this step."""
        self._growing, self._resting = None, True

    def split(self) -> None:
        """Take every member out: in this step each is planned by the rules for one request."""
        for request in list(self.batched):
            self._detach(request)

    def _detach(self, request: Request) -> None:
        self._growing = None
        self._keys.leaves(request)
        self.batched.leave(request, self.pool.allocated(request))
        self._left.append(request.spec)
        self.unbatched[request] = None

    def plan(
        self,
        rows: dict[Request, Chunk],
        *,
        running: int,
        waiting: int,
        lead: int = 0,
        fast_decode: bool = False,
        drafts: int = 0,
    ) -> StepPlan:
        """Return the plan of a step: the listed rows, and those of the members if they go on.

        The first `lead` rows come before the members'. `running` and `waiting` are the lengths of the queues. The step
        proposes `drafts` draft tokens behind each row that samples.
        """
        members, pool, decodes = self.batched, self.pool, self._decodes
        resting = self._resting
        if decodes != len(members.stays) and not resting:
            raise AssertionError("members neither go on nor rest nor are split")
        ending = [] if resting else members.ending()
        listed = self._schedule_rows(rows, lead, ending) if rows or ending or self._filling else NOTHING
        chunks, joined, ends, tokens, table_blocks, new_blocks = listed
        tables = pool.table_changes(members.planned, rows) if pool.groups else ()
        transfers, awaited = self._take_transfers()
        context, longest = (members.context, members.longest()) if decodes else (0, 0)
        work = StepWork(chunks, lead, decodes, context, longest, tokens, drafts, fast_decode=fast_decode)
        if not resting:
            table_blocks += members.held_blocks
        if pool.groups:
            new_blocks = pool.fresh
        elif transfers:
            new_blocks += arriving(transfers, [preempted.spec for preempted in self.preempted])
        new_blocks += len(self._grown)
        counts = StepCounts(table_blocks, new_blocks, running, waiting, pool.free, pool.cached)
        changes = self._take_changes(joined, ends)
        plan = StepPlan(members.planned, work, changes, counts, transfers, awaited, tables)
        members.commit(resting=resting)
        self._decodes, self._filling, self._resting = 0, [], False
        if joined or ending:
            self._move(joined, ending)
        return plan

    def _take_transfers(self) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
        if not (self.transfers or self.awaited):
            return NO_TRANSFERS
        taken = tuple(self.transfers), tuple(self.awaited)
        self.transfers, self.awaited = [], []
        return taken

    def _take_changes(self, joined: list[RequestSpec], ends: list[RequestSpec]) -> StepChanges:
        """Return the plan's changes: whatever happened to requests and tables since the plan before."""
        grown, blocks, left, ended = self._grown, self.grown_blocks, self._left, self.ended
        if grown:
            self._grown, self.grown_blocks = (), ()
        if not (joined or left or ends or ended or self.preempted or self._replaced):
            return StepChanges(grown, blocks) if grown else UNDISTURBED
        preempted, replaced = tuple(self.preempted), tuple(self._replaced)
        changes = StepChanges(
            grown, blocks, tuple(joined), tuple(left), tuple(ends), tuple(ended), preempted, replaced=replaced
        )
        left.clear()
        ended.clear()
        self.preempted.clear()
        self._replaced.clear()
        return changes

    def _schedule_rows(self, rows: dict[Request, Chunk], lead: int, ending: list[Request]) -> Scheduled:
        """Advance the requests of the listed rows; note the step's rows that do more than count on completion."""
        pool, keys, hears = self.pool, self._keys, self._keys.hears_of_rows
        together, wastes_chunks = self._together, self._wastes_chunks
        joined: list[RequestSpec] = []
        ends = [request.spec for request in ending]
        noted: list[Completion] = []
        chunks: list[Chunk] = []
        first = tokens = table_blocks = new_blocks = 0  # `first`: how many of the noted come before the members
        for position, (request, row) in enumerate(rows.items()):
            outputs, end = row.outputs, row.start + row.tokens
            chunks.append(row)
            tokens += row.tokens
            table_blocks += pool.allocated(request)
            new_blocks += length(row.listed)
            if row.admitted:
                new_blocks -= pool.blocks_for(row.start)
            request.advance(row.tokens, outputs)
            if outputs:
                scheduled = request.scheduled
                if scheduled >= request.last > scheduled - outputs:
                    ends.append(request.spec)
                if together and outputs == 1 and (scheduled < request.limit or not self._lookahead):
                    joined.append(request.spec)  # a member yields exactly one token a row
            if outputs or wastes_chunks:
                first += position < lead
                noted.append(Completion(request, request.epoch, outputs, end, keys.fills(request, row) if hears else 0))
        members = self._members_noted(ending)
        if noted or members:
            self._noted[self.batched.planned] = noted[:first], members, noted[first:]
        return tuple(chunks), joined, ends, tokens, table_blocks, new_blocks

    def _members_noted(self, ending: list[Request]) -> list[Completion]:
        if not (ending or self._filling):
            return []
        full = {*self._filling}
        requests = sorted({*full, *ending}, key=by_order) if full else ending
        return [Completion(r, r.epoch, 1, r.computed + 1, int(r in full)) for r in requests]

    def _move(self, joined: list[RequestSpec], ending: list[Request]) -> None:
        """Add the requests that decode steadily from the next step on; remove those whose last token is planned."""
        for spec in joined:
            request = self.requests[spec]
            del self.unbatched[request]
            self.batched.join(request, self.pool.allocated(request), fills=self._keys.joins(request))
        for request in ending:
            if self._lookahead and request.scheduled == request.limit:
                self._detach(request)  # it keeps its slot and blocks until its last token is back

    def complete(self, plan: StepPlan, result: StepResult, end: Callable[[Request, Finish], None]) -> Outcome:
        """Apply the result of the oldest step in flight: deliver tokens, `end` finished requests in row order."""
        step, stopped = plan.step, [self.requests[spec] for spec in result.stopped if spec in self.requests]
        completions = self._collect(step, result, stopped)
        if not completions:
            return UNCHANGED
        accepted = dict(result.accepted) if result.accepted else ALL
        received: list[RequestSpec] = []
        finished: list[tuple[RequestSpec, Finish]] = []
        wasted = 0
        for row in completions:
            request, completion = row.request, row
            if row.epoch != request.epoch or request.finish is not None:
                wasted += 1
                self._observer.wasted(row, step)
                continue
            if row.outputs and (request.batch is None or step < request.since):
                completion = self._receive(row, step, accepted)
                if completion.short < row.outputs:
                    received.append(request.spec)
            if self._apply(completion, stopped):
                finished += self._ends(request, end)
        return Outcome(tuple(received), tuple(finished), wasted)

    def _collect(self, step: int, result: StepResult, stopped: list[Request]) -> list[Completion]:
        """Return the rows of the oldest step in flight that do more than count, in order."""
        members = self.batched
        assert step == members.updated, (step, members.updated)
        notes = self._noted.pop(step) if step in self._noted else None
        late = members.completion(step)
        members.applied()
        if self.pool.groups:
            self.pool.completed(step)
        if not (notes or late or result.stopped or result.accepted):
            return []
        completions = in_order(notes or ([], [], []), late, stopped)
        if result.accepted:
            listed = {completion.request.spec for completion in completions}
            assert listed.issuperset([spec for spec, _ in result.accepted]), "members yield one"
        return completions

    def _apply(self, completion: Completion, stopped: list[Request]) -> bool:
        """Count what a row has computed and give its full blocks their keys. Return True if its request is over."""
        request = completion.request
        over = completion.outputs > 0 and (
            request.seen == request.last or request in stopped or request in self.abort_pending
        )
        if completion.short and not over:
            request.reconcile(completion.short)
        if replaced := self._keys.completed(completion, over):
            self._replaced += replaced
        if self._observed:
            self._observer.completed(completion, over)
        return over

    def _ends(self, request: Request, end: Callable[[Request, Finish], None]) -> list[tuple[RequestSpec, Finish]]:
        """End a request that is over; return its entries in the outcome."""
        if request in self.abort_pending:
            end(request, Finish.ABORTED)
            return []
        reason = request.natural_end
        end(request, reason)
        return [(request.spec, reason)]

    def complete_without_tokens(self, request: Request) -> None:
        """Give the full blocks of a request their keys when a row without tokens has come back. A request that has had
        no row yet lists its whole table with its first one.
        """
        computed = request.computed
        completion = Completion(request, request.epoch, 0, computed, computed // self.pool.block_size - request.hashed)
        replaced = self._keys.completed(completion, over=False)
        if not request.fresh:
            self._replaced += replaced
        self._observer.completed(completion, over=False)

    def _receive(self, completion: Completion, step: int, accepted: dict[RequestSpec, int]) -> Completion:
        """Deliver the tokens of a row, up to the declared last one: one, and one for each guess that came true, which
        are all unless `accepted` says otherwise.
        """
        request, outputs = completion.request, completion.outputs
        if outputs == 1:
            request.receive(step)
            return completion
        true = accepted.get(request.spec, outputs - 1)
        assert 0 <= true < outputs, (request.spec.id, true, outputs)
        tokens = min(1 + true, request.last - request.seen)
        request.receive(step, tokens)
        short = outputs - tokens
        return replace(completion, short=short, end=completion.end - short) if short else completion

    def check(self) -> None:
        """Raise AssertionError unless every block is free or owned and the members' sums equal a recount."""
        self.pool.check()
        self.batched.check({request: self.pool.allocated(request) for request in self.batched})
