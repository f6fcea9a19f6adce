"""The requests that a scheduler has let in: their rows, what the next plan has to tell, what a result changes.

A scheduler decides who runs and how far; everything that follows from it is done here. There are two ways to plan.

Rows one by one: the scheduler makes a `row` for every request that is to compute something, and hands all to `plan`.
That is all that a new policy needs.

Together: most steps concern nobody in particular, every decoding request gets its token and nothing can be refused.
Those requests are the `members` of a cohort, and `go_on` plans all of them at the cost of what changes. If budgets or
blocks might not do for all, the scheduler calls `dissolve` and plans every request by its rules; so these are stated
once. Both ways give the same rows, blocks and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cbsim.policy.blocks import BlockPool, Replaced
from cbsim.policy.cohort import Cohort, Landing, Landings, by_order, in_order
from cbsim.policy.keys import Keys
from cbsim.policy.moves import IN_ORDER, Move, arriving
from cbsim.policy.observer import NOBODY, Observer
from cbsim.policy.plan import (
    UNCHANGED,
    UNDISTURBED,
    Chunk,
    Outcome,
    Preempted,
    StepChanges,
    StepCounts,
    StepPlan,
    StepResult,
    StepWork,
)
from cbsim.policy.promised import NOTHING, Promised
from cbsim.policy.request import Finish, Request, RequestSpec, Status

NOTHING_MOVES: tuple[tuple[Move, ...], tuple[int, ...]] = ((), ())
AS_PROMISED: dict[RequestSpec, int] = {}


class Decoding:
    """The requests of a scheduler. `requests` have not ended; those that run are `members`, or else `loose`.

    `together`: who has sampled a token joins the members. `foresees`: a request whose last token is planned gets no
    further row. `wastes_chunks`: a row that was to sample nothing counts as wasted too, if its request has gone.
    `by_arrival`: members are in order of arrival, whenever they were admitted.
    """

    def __init__(
        self,
        pool: BlockPool,
        keys: Keys | None = None,
        *,
        together: bool = False,
        foresees: bool = True,
        wastes_chunks: bool = False,
        by_arrival: bool = False,
        long_tokens: int = 0,
        observer: Observer = NOBODY,
    ) -> None:
        self.pool = pool
        self.members = Cohort(pool.block_size, long_tokens=long_tokens)
        self.requests: dict[RequestSpec, Request] = {}
        self.loose: dict[Request, None] = {}
        self.ended: list[RequestSpec] = []  # since the plan before
        self.preempted: list[Preempted] = []
        self.moves: list[Move] = []  # of KV, for the next plan
        self.awaited: list[int] = []  # jobs of moves that the next plan's rows wait for
        self.grown_blocks: list[int] = []  # those that members get in the step being planned
        self.doomed: dict[Request, None] = {}  # given up: they end with their next token
        self._keys = keys or Keys(pool)
        self._together, self._foresees, self._wastes_chunks = together, foresees, wastes_chunks
        self._by_arrival = by_arrival
        self._observer = observer
        self._admissions = 0  # or arrivals, if they give the order
        self._growing: list[Request] | None = None  # members that need a block, once asked
        self._grown: list[RequestSpec] = []
        self._filling: list[Request] = []  # members that fill a block and have to be heard of when they land
        self._decodes = 0
        self._resting = False  # do the members sit the step being planned out?
        self._left: list[RequestSpec] = []
        self._replaced: list[Replaced] = []
        self._noted: dict[int, Landings] = {}  # by step

    # -- one request --------------------------------------------------------------------------------------------------

    def add(self, spec: RequestSpec, limit: int) -> Request:
        """A request has arrived. After `limit` output tokens its end is known in advance."""
        request = self.requests[spec] = Request(spec, limit, self.pool.block_size)
        if self._by_arrival:
            request.place(self._next_order())
        return request

    def admit(self, request: Request, cached_tokens: int = 0) -> None:
        """From the queue to those that run, with the first `cached_tokens` tokens in the cache."""
        request.admit(request.order if self._by_arrival else self._next_order(), cached_tokens)
        self.loose[request] = None

    def _next_order(self) -> int:
        self._admissions += 1
        return self._admissions - 1

    def row(
        self, request: Request, tokens: int, blocks: Sequence[int], *, guesses: int = 0, samples: bool = True
    ) -> Chunk:
        """A row of the next `tokens` tokens, for which `blocks` have been added to the request's table.

        With the last token that is wanted it yields an output token, if it `samples`. The last `guesses` of the tokens
        lie behind that one; each may yield one more.
        """
        start, first = request.computed, request.fresh
        end = start + tokens
        outputs = guesses + 1 if samples and end == request.target + guesses else 0
        self._keys.row(request, end - guesses)
        return Chunk(
            request.spec,
            request.order,
            start,
            tokens,
            tuple(self.pool.table(request) if first else blocks),
            outputs,
            admitted=first,
            resumed=first and request.preemptions > 0,
            cached=start - request.kept if first else 0,
            recomputed=max(0, min(request.high_water, end) - start),
        )

    def preempt(self, request: Request, *, drop_in_flight: bool) -> None:
        """Take the blocks of a loose request back; it has to wait again."""
        self.preempted.append(Preempted(request.spec, request.computed, self.pool.held(request)))
        del self.loose[request]
        self.pool.release(request, returns=True)
        request.requeue(drop_in_flight)

    def renew(self, request: Request) -> None:
        """A loose request goes behind all others in the admission order."""
        request.renew(self._next_order())

    def doom(self, request: Request) -> None:
        """A request that runs was given up, and ends with its next token. Nobody is told of that end."""
        self.dissolve()  # so that all its rows are listed
        self.doomed[request] = None

    def resume(self, request: Request) -> None:
        """From the queue to those that run, with everything computed before it was parked."""
        request.resume(request.order if self._by_arrival else self._next_order())
        self.loose[request] = None

    def exchange(self, request: Request, entries: Sequence[tuple[int, int]]) -> None:
        """Entries of a table (index, block) became other blocks, which the next plan tells."""
        self._replaced += [(request.spec, index, block) for index, block in entries]

    def call_off(self, request: Request) -> None:
        """A request is about to give up the places of its moves in order that no plan has listed yet."""
        if self.moves:
            self.moves = [m for m in self.moves if m.spec is not request.spec or m.job != IN_ORDER]

    def end(self, request: Request, reason: Finish, *, keeps_blocks: bool = False) -> None:
        """A request is over, wherever it stands; its blocks are free at once."""
        if request.cohort is not None:
            self._detach(request)
        self.loose.pop(request, None)
        self.doomed.pop(request, None)
        if not keeps_blocks:
            self.pool.release(request)
        request.end(reason)
        del self.requests[request.spec]
        self.ended.append(request.spec)

    # -- the members --------------------------------------------------------------------------------------------------

    def has_blocks(self, spare: int = 0) -> bool:
        """Is a block ready for every member that needs one more in this step, and so many to spare?"""
        return self.due_blocks() + spare <= self.pool.ready

    def due_blocks(self) -> int:
        """Blocks that the members need in this step, one each."""
        self._growing = self.members.growing()
        return len(self._growing)

    def go_on(self) -> int:
        """A row for every member: a token each, and a block where one is due, which there is. Returns their number."""
        members = self.members
        growing, self._growing = self._growing, None
        if growing is None:
            growing = members.growing()
        if growing:
            self.grown_blocks = self.pool.grow_each(growing)
            self._grown = [request.spec for request in growing]
            members.grew()
        self._filling = self._keys.go_on(members.filling())
        self._decodes = decodes = len(members)
        return decodes

    def rest(self) -> None:
        """No row for any member: they sit this step out."""
        self._growing, self._resting = None, True

    def dissolve(self) -> None:
        """Everybody out: in this step each member is planned by the rules for one request."""
        for request in list(self.members):
            self._detach(request)

    def _detach(self, request: Request) -> None:
        self._growing = None
        self._keys.leaves(request)
        self.members.leave(request, self.pool.held(request))
        self._left.append(request.spec)
        self.loose[request] = None

    # -- a step -------------------------------------------------------------------------------------------------------

    def plan(
        self,
        rows: dict[Request, Chunk],
        *,
        running: int,
        waiting: int,
        lead: int = 0,
        fast_decode: bool = False,
    ) -> StepPlan:
        """Promise the listed rows, and those of the members if they go on, and hand the plan out.

        The first `lead` rows come before the members'. `running` and `waiting` are the lengths of the queues.
        """
        members, pool, decodes = self.members, self.pool, self._decodes
        assert decodes == len(members) or self._resting, "members neither go on nor rest nor are dissolved"
        resting = self._resting
        ending = [] if resting else members.ending()
        listed = self._promise(rows, lead, ending) if rows or ending or self._filling else NOTHING
        tables = pool.tell(members.planned, rows) if pool.groups else ()
        moves, awaited = self._moved() if self.moves or self.awaited else NOTHING_MOVES
        context, longest = (members.context, members.longest) if decodes else (0, 0)
        work = StepWork(tuple(rows.values()), lead, decodes, context, longest, listed.tokens, fast_decode=fast_decode)
        counts = StepCounts(
            listed.table_blocks if resting else members.held_blocks + listed.table_blocks,
            len(self._grown) + (pool.fresh if tables else listed.new_blocks) + (arriving(moves) if moves else 0),
            running,
            waiting,
            pool.free,
            pool.cached,
        )
        plan = StepPlan(members.planned, work, self._changes(listed), counts, moves, awaited, tables=tables)
        members.commit(rests=resting)
        self._decodes, self._filling, self._resting = 0, [], False
        if plan.changes is not UNDISTURBED:
            self._grown, self.grown_blocks = [], []
            self._left, self.ended, self.preempted, self._replaced = [], [], [], []
            if listed.joined or ending:
                self._move(listed.joined, ending)
        return plan

    def _moved(self) -> tuple[tuple[Move, ...], tuple[int, ...]]:
        """Moves, and jobs to wait for, since the plan before."""
        moved = tuple(self.moves), tuple(self.awaited)
        self.moves, self.awaited = [], []
        return moved

    def _changes(self, listed: Promised) -> StepChanges:
        """What the plan has to tell beside its rows."""
        grown, left, ended, preempted, replaced = self._grown, self._left, self.ended, self.preempted, self._replaced
        joined, ends = listed.joined, listed.ends
        if not (grown or joined or left or ends or ended or preempted or replaced):
            return UNDISTURBED
        return StepChanges(
            tuple(grown) if grown else (),
            tuple(self.grown_blocks) if grown else (),
            tuple(joined) if joined else (),
            tuple(left) if left else (),
            tuple(ends) if ends else (),
            tuple(ended) if ended else (),
            tuple(preempted) if preempted else (),
            replaced=tuple(replaced) if replaced else (),
        )

    def _promise(self, rows: dict[Request, Chunk], lead: int, ending: list[Request]) -> Promised:
        """Promise the listed rows, and note those of the step that will do more than count when they come back."""
        pool, keys, hears = self.pool, self._keys, self._keys.hears_of_rows
        together, wastes_chunks = self._together, self._wastes_chunks
        joined: list[RequestSpec] = []
        ends = [request.spec for request in ending]
        noted: list[Landing] = []
        first = tokens = table_blocks = new_blocks = 0  # `first`: how many of the noted come before the members
        for position, (request, row) in enumerate(rows.items()):
            outputs, end = row.outputs, row.start + row.tokens
            tokens += row.tokens
            table_blocks += pool.held(request)
            new_blocks += len(row.blocks) - pool.blocks_for(row.cached)
            request.advance(row.tokens, outputs)
            if outputs:
                promised = request.promised
                if promised >= request.last > promised - outputs:
                    ends.append(request.spec)
                if together and outputs == 1 and (promised < request.limit or not self._foresees):
                    joined.append(request.spec)  # a member yields exactly one token a row
            if outputs or wastes_chunks:
                first += position < lead
                noted.append(
                    Landing(request, request.epoch, outputs, end, keys.completes(request, row) if hears else 0)
                )
        self._noted[self.members.planned] = noted[:first], self._members_noted(ending), noted[first:]
        return Promised(joined, ends, tokens, table_blocks, new_blocks)

    def _members_noted(self, ending: list[Request]) -> list[Landing]:
        if not (ending or self._filling):
            return []
        full = {*self._filling}
        requests = sorted({*full, *ending}, key=by_order) if full else ending
        return [Landing(r, r.epoch, 1, r.computed + 1, int(r in full)) for r in requests]

    def _move(self, joined: list[RequestSpec], ending: list[Request]) -> None:
        """Who decodes steadily from now on is a member; whose last token is planned is none any more."""
        for spec in joined:
            request = self.requests[spec]
            del self.loose[request]
            self.members.join(request, self.pool.held(request), fills=self._keys.joins(request))
        for request in ending:
            if self._foresees and request.promised == request.limit:
                self._detach(request)  # it keeps seat and blocks until its last token is back

    def land(self, plan: StepPlan, result: StepResult, end: Callable[[Request, Finish], None]) -> Outcome:
        """The oldest step in flight has come back: hand out its tokens, and `end` who is over, in order of the rows."""
        members, step = self.members, plan.step
        assert step == members.updated, (step, members.updated)
        notes, late = self._noted.pop(step, None), members.landing(step)
        members.applied()
        if self.pool.groups:
            self.pool.landed(step)
        if not (notes or late or result.stopped or result.delivered):
            return UNCHANGED
        stopped = [self.requests[spec] for spec in result.stopped if spec in self.requests]
        landings = in_order(notes or ([], [], []), late, stopped)
        ending = [*stopped, *self.doomed] if self.doomed else stopped
        delivered = dict(result.delivered) if result.delivered else AS_PROMISED
        assert not delivered or delivered.keys() <= {landing.request.spec for landing in landings}, "members yield one"
        received: list[RequestSpec] = []
        finished: list[tuple[RequestSpec, Finish]] = []
        keys, observer, wasted = self._keys, self._observer, 0
        for noted in landings:
            request, outputs = noted.request, noted.outputs
            if noted.epoch != request.epoch or request.status is Status.FINISHED:
                wasted += 1
                observer.wasted(noted, step)
                continue
            landing = noted
            if outputs and (request.cohort is None or step < request.since):
                if outputs > 1 or delivered:
                    landing = self._received(noted, step, delivered.get(request.spec))
                else:
                    request.receive(step)
                if landing.short < outputs:
                    received.append(request.spec)
            over = outputs > 0 and (request.seen == request.last or request in ending)
            if landing.short and not over:
                request.settle(landing.short)
            if replaced := keys.landed(landing, over):
                self._replaced += replaced
            if observer is not NOBODY:
                observer.landed(landing, over)
            if over:
                finished += self._ends(request, end)
        return Outcome(tuple(received), tuple(finished), wasted)

    def _ends(self, request: Request, end: Callable[[Request, Finish], None]) -> list[tuple[RequestSpec, Finish]]:
        """End who is over; returns what the outcome says of it."""
        if request in self.doomed:
            end(request, Finish.ABORTED)
            return []
        reason = request.natural_end
        end(request, reason)
        return [(request.spec, reason)]

    def lands_silently(self, request: Request) -> None:
        """A row without tokens has come back: the full blocks of the request get their keys. Who has no row yet tells
        the whole table with its first one.
        """
        computed = request.computed
        landing = Landing(request, request.epoch, 0, computed, computed // self.pool.block_size - request.hashed)
        replaced = self._keys.landed(landing, over=False)
        if not request.fresh:
            self._replaced += replaced
        self._observer.landed(landing, over=False)

    def _received(self, landing: Landing, step: int, tokens: int | None) -> Landing:
        """Hand the tokens of a row out: as many as came, or else as promised, up to the declared last one."""
        request, outputs = landing.request, landing.outputs
        left = request.last - request.seen
        if tokens is None:
            tokens = min(outputs, left)
        assert 0 <= tokens <= min(outputs, left), (request.spec.id, tokens, outputs, left)
        request.receive(step, tokens)
        short = outputs - tokens
        return replace(landing, short=short, reach=landing.reach - short) if short else landing

    def check(self) -> None:
        """Raise AssertionError unless every block is free or owned and the members' sums equal a recount."""
        self.pool.check()
        self.members.check({request: self.pool.held(request) for request in self.members})
