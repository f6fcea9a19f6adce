"""The part common to all KV connectors of vLLM 0.33: blocks that are filled from elsewhere and read by others.

It is composed with `VllmScheduler`, which has none of it without a connector. A request whose prefix lies elsewhere
gets its blocks, no slot and no budget, and waits in `holding` until it is loaded; `holding` is admitted from before
`waiting`. Another server may write into the blocks of a request next, so they are not free before its last row is back:
until then an ended request keeps them, and nothing is preempted.
"""

from __future__ import annotations

from typing import Literal, Protocol

from cbsim.policy.decoding import Decoding
from cbsim.policy.observer import Observer
from cbsim.policy.plan import Chunk, StepPlan, StepResult, unpacked
from cbsim.policy.queues import Queue
from cbsim.policy.request import Finish, Request, Status
from cbsim.schedulers.vllm.settings import VllmOptions

Verdict = Literal["admitted", "skipped", "misfit"]  # the result of considering the head of a queue
Rows = list[tuple[Request, int]]  # requests, each with its query tokens


class Step:
    """A step while it is being planned."""

    def __init__(self, budget: int, threshold: int, defer_prefill: bool) -> None:
        self.budget = budget
        self.threshold = threshold
        self.defer_prefill = defer_prefill
        self.rows: dict[Request, Chunk] = {}
        self.prefill = False
        self.drafts = False  # whether drafts behind any of its rows may be verified
        self.blanks = 0  # drafts of no content that pad an admitted row of one token
        self.alone = False  # no request ran before those that are admitted


class Admission(Protocol):
    """A scheduler as `Transfers` admits requests to it; no admitted request may take its last `kept_free` blocks."""

    @property
    def options(self) -> VllmOptions: ...
    @property
    def running(self) -> dict[Request, None]: ...
    @property
    def waiting(self) -> Queue: ...
    @property
    def kept_free(self) -> int: ...

    def hits(self, request: Request) -> list[int]:
        """Return the cached blocks of a waiting request."""

    def has_room(self, request: Request, tokens: int, hits: list[int]) -> bool:
        """True if there are blocks for the first `tokens` tokens of a request."""

    def start(self, queue: Queue, computed: int, hits: list[int], step: Step) -> bool:
        """Give the head of a queue its first row; return False if it does not fit."""


class Ahead:
    """The step that is being planned, from which a connector orders its stores."""

    def __init__(self, running: Rows, admitted: Rows, loading: list[Request], grown: list[int], alone: bool) -> None:
        self.running = running  # rows of those that ran before, in the order of their admission
        self.admitted = admitted
        self.loading = loading  # requests whose loads begin with it
        self.grown = grown  # blocks that its running rows got
        self.alone = alone  # no request is left


class Connector(Protocol):
    """A way to keep KV elsewhere. The transfers that it orders are appended to those of the next plan."""

    @property
    def busy(self) -> bool:
        """Whether stores are ordered, or about to be, whose end has not been reported."""

    def match(self, request: Request, local: int) -> int | None:
        """Return the tokens that it has behind the first `local`, cached ones; None: repeat in the next step."""

    def load(self, request: Request, local: int, external: int) -> None:
        """Fetch as many tokens as `match` has just returned. The blocks for them are in the request's table."""

    def order(self, step: int, ahead: Ahead) -> None:
        """Order the stores of step number `step`, otherwise planned, and the jobs that it has to await."""

    def ended(self, request: Request, reason: Finish, computed: int) -> bool:
        """Record that a request is over and its table, with `computed` of its tokens, about to be freed. Return True if
        the table is kept until `completed` names the request.
        """

    def completed(self, step: int, jobs: list[int]) -> list[Request]:
        """Handle a step's jobs that are over. Return the requests loaded, then those whose table is freed."""

    def check(self) -> None:
        """Raise AssertionError unless every place of its tier is free or in use, exactly."""


class Load:
    """A request that got blocks for `computed` tokens without computing them."""

    def __init__(self, computed: int) -> None:
        self.computed = computed
        self.reported = False
        self.named = False  # its blocks can be found
        self.dead = False  # the request has ended meanwhile


class Transfers:
    """The requests that load or have loaded, and the tables that are not free yet."""

    def __init__(
        self, connector: Connector, decoding: Decoding, holding: Queue, observer: Observer, *, ahead: bool
    ) -> None:
        """Make the rules. `ahead`: steps are planned while others are in flight."""
        self.connector = connector
        self.holding = holding
        self._ahead = ahead
        self.loads: dict[Request, Load] = {}
        self.passed_over: set[Request] = set()  # requests that once waited for a load or a lookup, until admitted
        self._decoding, self._observer = decoding, observer
        self._loading: list[Request] = []  # since the plan before
        self._planned = self._updated = 0  # steps with rows
        self._last_row: dict[Request, int] = {}  # of requests outside the decode batch
        self._deferred: list[tuple[int, Request]] = []  # ended: tables that are free once so many steps are back

    @property
    def busy(self) -> bool:
        return bool(self.loads) or self.connector.busy

    def admit(self, scheduler: Admission, step: Step) -> None:
        """Admit holding requests, then the queue. A request that waits for a load or a lookup is passed over."""
        skipped: list[Request] = []
        while step.budget and len(scheduler.running) < scheduler.options.max_num_seqs:
            queue = self.holding if len(self.holding) else scheduler.waiting
            if not len(queue):
                break
            verdict = self._consider(scheduler, queue, step)
            if verdict == "misfit":
                break
            if verdict == "skipped":
                skipped.append(queue.pop())
        self.passed_over.update(skipped)
        for request in reversed(skipped):
            (self.holding if request in self.loads else scheduler.waiting).push_front(request)

    def _consider(self, scheduler: Admission, queue: Queue, step: Step) -> Verdict:
        request = queue.head()
        load = self.loads.get(request)
        if load is not None:
            if not load.reported:
                return "skipped"
            self._loaded(request, load, publish=scheduler.options.enable_prefix_caching)
            if self._decoding.pool.allocated(request):
                if not load.computed:  # a prompt of one token: none counts as computed, so it is looked up once more
                    self._observer.matched(request, 0, self.connector.match(request, 0))
                return self._start(scheduler, queue, load.computed, [], step)
        hits = scheduler.hits(request)
        local = len(hits) * scheduler.options.block_size
        external = self.connector.match(request, local)
        self._observer.matched(request, local, external)
        if external is None:
            return "skipped"
        if external:
            return self._load(scheduler, request, hits, local, external)
        return self._start(scheduler, queue, local, hits, step)

    def _start(self, scheduler: Admission, queue: Queue, computed: int, hits: list[int], step: Step) -> Verdict:
        request = queue.head()
        if not scheduler.start(queue, computed, hits, step):
            return "misfit"
        self.loads.pop(request, None)
        self.passed_over.discard(request)
        return "admitted"

    def _loaded(self, request: Request, load: Load, *, publish: bool) -> None:
        """Publish the blocks of a loaded request, whose last token is computed; without any it starts like others."""
        pool = self._decoding.pool
        if load.named:
            return
        load.named = True
        if not load.computed:
            pool.release(request)
            request.fetch(None)
            return
        if publish:
            pool.publish(request, load.computed // pool.block_size)
        load.computed = min(load.computed, request.target - 1)

    def _load(self, scheduler: Admission, request: Request, hits: list[int], local: int, external: int) -> Verdict:
        """Allocate blocks for the tokens found and fetched, if requests under way leave enough, and start the load."""
        pool, tokens = self._decoding.pool, local + external
        needed = pool.blocks_for(tokens) - len(hits) + pool.idle(hits) + self._reserved(scheduler)
        if needed > pool.free - scheduler.kept_free or not scheduler.has_room(request, tokens, hits):
            return "misfit"
        pool.adopt(request, hits)
        blocks = pool.blocks_for(tokens) - len(hits)
        pool.grow(request, blocks)
        self.loads[request] = Load(tokens)
        self._loading.append(request)
        self.connector.load(request, local, external)
        self._observer.loading(request, external, pool.tables[request])
        return "skipped"

    def _reserved(self, scheduler: Admission) -> int:
        """Return the blocks that loading requests and those in prefill still need for the tokens they have."""
        loading = [request for request, load in self.loads.items() if not (load.reported or load.dead)]
        prefilling = [request for request in scheduler.running if request.status is Status.PREFILL]
        pool, longest = self._decoding.pool, scheduler.options.max_model_len
        return sum([pool.missing(request, min(request.target, longest)) for request in [*loading, *prefilling]])

    def dissolving(self) -> None:
        """Note the last rows of the decode batch, which is about to be planned one by one."""
        for request in self._decoding.batched:
            self._last_row[request] = self._planned

    def order(self, running: dict[Request, None], rows: dict[Request, Chunk]) -> None:
        """Let the connector order its transfers, once all rows of the step are known."""
        decoding = self._decoding
        before: Rows = []
        admitted: Rows = []
        grown = [*unpacked(decoding.grown_blocks)]
        for request in running:
            row = rows.get(request)
            if row is None:
                if request.batch is not None:
                    before.append((request, 1))
            elif row.admitted:
                admitted.append((request, row.tokens))
            else:
                before.append((request, row.tokens))
                grown += row.blocks
        loading, self._loading = self._loading, []
        ahead = Ahead(before, admitted, loading, grown, not decoding.requests)
        self.connector.order(decoding.batched.planned, ahead)
        if before or admitted:
            self._planned += 1
            for request in rows:
                self._last_row[request] = self._planned

    def planned(self, plan: StepPlan) -> None:
        """Note the last row of each member that leaves the decode batch with it."""
        for spec in plan.changes.ends:
            self._last_row[self._decoding.requests[spec]] = self._planned

    def in_flight(self, request: Request) -> bool:
        """True if a row of this request is planned and not back; without plans ahead its result is there already."""
        if not self._ahead:
            return False
        last = self._planned if request.batch is not None else self._last_row.get(request, 0)
        return last > self._updated

    def completing(self, plan: StepPlan, result: StepResult) -> None:
        """Take a step's result: tables that waited for it are free, loads end where they are broken."""
        self._updated += plan.work.rows > 0
        while self._deferred and self._deferred[0][0] <= self._updated:
            self._decoding.pool.release(self._deferred.pop(0)[1])
        if result.broken:
            for request, load in self.loads.items():
                self._break_off(request, load, result.broken)

    def _break_off(self, request: Request, load: Load, broken: tuple[int, ...]) -> None:
        """End a load before the first of these blocks."""
        if load.reported or load.dead:
            return
        pool = self._decoding.pool
        blocks = pool.tables[request][: pool.blocks_for(load.computed)]
        bad = [i for i, block in enumerate(blocks) if block in broken]
        if bad:
            load.computed = bad[0] * pool.block_size

    def completed(self, plan: StepPlan, result: StepResult) -> None:
        """End the loads and stores that are over, once the step's tokens are handed out."""
        jobs = list(dict.fromkeys([*result.moved, *plan.awaited]))
        for request in self.connector.completed(plan.step, jobs):
            load = self.loads.get(request)
            if load is not None and not load.dead:
                load.reported = True
                continue
            self.loads.pop(request, None)
            self._decoding.pool.release(request)

    def ended(self, request: Request, reason: Finish) -> bool:
        """Record that a request is over and has left its queue. Return True if it keeps its blocks for now."""
        load, keeps = self.loads.get(request), self.in_flight(request)
        self._last_row.pop(request, None)
        self.passed_over.discard(request)
        unfetched = self.connector.ended(request, reason, request.computed if load is None else load.computed)
        if load is not None:
            load.dead = not load.reported
            if load.reported:
                del self.loads[request]
            return load.dead
        if unfetched:
            return True
        if keeps:
            self._deferred.append((self._planned, request))
        return keeps

    def check(self) -> None:
        """Raise AssertionError unless `holding` has the requests that load, and the tier's counts are right."""
        alive = {request for request, load in self.loads.items() if not load.dead}
        assert {*self.holding} == alive, (len(self.holding), len(alive))
        self.connector.check()
