"""Hugging Face transformers' continuous batching, 5.17: `fifo` and `prefill_first`.

Rules as in the real scheduler, restated and checked line by line against its traces. What layers with windows change is
the cache's (table_pools.py), which then finds no prefixes; members are not counted together, for their tables differ.
Two budgets bound a step: query tokens, and KV tokens read. A request that finds no block starves; when nothing can run,
or after a step in which some starved, starved requests lose their blocks until the others fit (soft reset: generated
tokens become prompt; or their KV is kept on the host, host.py), and no new request is admitted until one has finished.

The original's defects are not shared; docs/policies.md lists them, and what proves the rules puts them back.
"""

from __future__ import annotations

from collections.abc import Iterator

from cbsim.kv.blocks import BlockPool, CachedLast
from cbsim.kv.keys import Keys, KeysWhenCompleted
from cbsim.kv.table_pools import RingPool
from cbsim.policy.decode_batch import by_order
from cbsim.policy.decoding import Decoding
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.swapping import Host, LowestFirst
from cbsim.policy.transfers import Direction, Transfer
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.base import SchedulerBase, too_large
from cbsim.schedulers.transformers.settings import PREFILL_FIRST, TransformersOptions


class Forks:
    """The samples (n > 1) that wait for their first request, which has not computed its prompt yet.

    The prompt is computed up to its last token by the request that came first. Its samples then take over what it has,
    and each computes the last token by itself, so that each samples a first output of its own.
    """

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self.samples: dict[Request, list[Request]] = {}  # that wait, by the request for which they do
        self.due: list[Request] = []  # requests whose prompts will be computed but for one token, in the order planned
        self.begun: dict[Request, list[int]] = {}  # no row since an empty one or a fork: blocks that none has listed

    def expect(self, request: Request, sample: Request) -> None:
        assert sample.spec.prompt_tokens == request.spec.prompt_tokens, (request.spec.id, sample.spec.id)
        self.samples.setdefault(request, []).append(sample)

    def hold(self, request: Request, blocks: list[int]) -> None:
        """Keep the blocks of a row without tokens; the request's next row lists them."""
        self.begun.setdefault(request, []).extend(blocks)

    def unlisted(self, request: Request, blocks: list[int]) -> list[int]:
        """Return the blocks to list with a row: `blocks`, behind those of rows that were not listed."""
        return [*self.begun.pop(request, ()), *blocks] if self.begun else blocks

    def take(self) -> list[tuple[Request, list[Request]]]:
        """Return the requests that are due, the last planned first, with their samples, which do not wait any more."""
        due, self.due = self.due, []
        return [(request, self.samples.pop(request)) for request in reversed(due) if request in self.samples]

    def fork(self, request: Request, samples: list[Request], whole: int) -> None:
        """Admit samples with all that the request has computed. The first `whole` blocks are shared; of the others each
        gets its own, with copies of what is written there.
        """
        decoding, computed = self._decoding, request.computed
        pool = decoding.pool
        pool.fan_out(request, samples, whole)
        for sample in samples:
            sources: list[int] = []
            targets: list[int] = []
            own, written = pool.tables_of(sample), pool.blocks_for(computed)
            for group, table in enumerate(pool.tables_of(request)):
                copied = [i for i, block in enumerate(table[:written]) if block != own[group][i]]
                sources += pool.pages(group, [table[i] for i in copied])
                targets += pool.pages(group, [own[group][i] for i in copied])
            if sources:
                decoding.transfers.append(Transfer(Direction.COPY, tuple(sources), tuple(targets), sample.spec))
            decoding.admit(sample, computed)
            self.hold(sample, [])

    def set_back(self, request: Request) -> None:
        """Forget the blocks that a request has lost. Its samples go on waiting."""
        self.begun.pop(request, None)
        self.due = [due for due in self.due if due is not request]

    def orphans(self, request: Request) -> list[Request]:
        """Return the samples that waited for a request that is over; they have to wait for themselves."""
        self.set_back(request)
        return self.samples.pop(request, [])

    def drop(self, sample: Request) -> None:
        """Remove a waiting sample that is over."""
        for request, samples in self.samples.items():
            if sample in samples:
                samples.remove(sample)
                if not samples:
                    del self.samples[request]
                return


class Step:
    """A step while it is being planned."""

    def __init__(self, tokens: int, kv: int, requests: int, fast: bool) -> None:
        self.tokens = tokens
        self.kv = kv
        self.requests = requests
        self.fast = fast
        self.rows: dict[Request, Chunk] = {}
        self.held_back: list[Request] = []  # rows without tokens: only the last token before a fork is left
        self.lead = 0
        self.decodes = 0
        self.failed = False  # an allocation failed
        self.starved: list[tuple[Request, int]] = []
        self.full = False  # a budget is used up

    @property
    def empty(self) -> bool:
        return not (self.rows or self.decodes or self.held_back)


@mypyc_attr(allow_interpreted_subclasses=True)
class TransformersScheduler(SchedulerBase):
    """A policy with transformers 5.17's rules. Depth 1 is its synchronous loop, depth 2 `use_async_batching`."""

    awaits_when_idle = False

    def __init__(self, options: TransformersOptions, observer: Observer = NULL_OBSERVER) -> None:
        self.options = o = options
        self.pool = self.make_pool(observer)
        self._fast_tokens = o.max_blocks_per_request * o.block_size
        decoding = Decoding(
            self.pool,
            self.make_keys() if o.allow_block_sharing else None,
            together=not o.groups,
            lookahead=False,
            wastes_chunks=True,
            long_tokens=self._fast_tokens,
            observer=observer,
        )
        super().__init__(o, decoding)
        self.running: dict[Request, None] = {}
        self.waiting: dict[Request, None] = {}
        self.sampling = Forks(self.decoding)
        self.host = self.make_host()
        self.returned: list[Request] = []  # requests swapped in with the step planned last
        self._silent: dict[int, list[tuple[Request, int]]] = {}  # step -> those without tokens, with epochs
        self.block_new_requests = False
        self._max_requests = min(o.max_requests_per_batch, o.max_batch_tokens)
        if not o.shares_prefixes:
            self._max_requests = min(self._max_requests, o.num_blocks)
        self._kv_tokens = o.num_blocks * o.block_size  # that the rows of a step may read between them
        self._not_looked_up = 0  # tokens at the end of a prompt
        self._window = o.window  # the most that any layer sees, 0 if one sees all
        self._observer = observer

    def make_pool(self, observer: Observer) -> BlockPool:
        o = self.options
        free = CachedLast(range(o.num_blocks))
        if o.groups:
            return RingPool(o.groups, o.block_size, o.num_blocks, free, observer)
        return BlockPool(o.block_size, o.num_blocks, free, observer)

    def make_keys(self) -> Keys:
        return KeysWhenCompleted(self.pool)

    def make_host(self) -> Host:
        return Host(self.decoding, LowestFirst(self.options.host_blocks))

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting)

    def refusal(self, spec: RequestSpec) -> str | None:
        most = spec.prompt_tokens + spec.max_tokens - 1
        return too_large(most, self._most_blocks(most), self.options.num_blocks)

    def _most_blocks(self, tokens: int) -> int:
        """Return the blocks that a request of `tokens` tokens has in the end."""
        return self.pool.in_groups(self._table_size(tokens))

    def add(self, spec: RequestSpec) -> None:
        request = self.decoding.add(spec, spec.max_tokens)
        first = self.requests.get(spec.sample_of) if spec.sample_of else None
        if first and first.status is Status.WAITING and not first.seen:
            self.sampling.expect(first, request)
        else:
            self.waiting[request] = None

    def cancel(self, spec: RequestSpec) -> None:
        if request := self.requests.get(spec):
            self._finish(request, Finish.ABORTED)
            if not self.running:
                self.block_new_requests = False  # no request is left whose end could lift it

    def schedule(self) -> StepPlan | None:
        step = self._attempt()
        while step.empty and step.failed and self._offload(step):
            step = self._attempt()
        if step.starved and not step.empty:
            self._offload(step)
        return None if step.empty else self._commit(step)

    def _attempt(self) -> Step:
        o = self.options
        fast = o.max_blocks_per_request > 0
        step = Step(o.max_batch_tokens, self._kv_tokens, self._max_requests, fast)
        if o.name == PREFILL_FIRST:
            self._walk(self._in_order(Status.PREFILL), step)
            step.lead = len(step.rows)
            self._decode(step)
        else:
            self._decode(step)
            self._walk(self._in_order(Status.PREFILL), step)
        if not self.block_new_requests:
            self._walk(self._in_queue(), step)
        if step.empty and step.failed:
            self._observer.starved([request for request, _ in step.starved])
        return step

    def _in_order(self, status: Status) -> Iterator[Request]:
        return iter(sorted((r for r in self.decoding.unbatched if r.status is status), key=by_order))

    def _in_queue(self) -> Iterator[Request]:
        """Return requests from the host and other waiting ones alternately, each in order of the queue."""
        waiting, parked = list(self.waiting), self.host.tables
        if not parked:
            return iter(waiting)
        back, rest = [r for r in waiting if r in parked], [r for r in waiting if r not in parked]
        turns = [request for pair in zip(back, rest, strict=False) for request in pair]
        return iter([*turns, *back[len(rest) :], *rest[len(back) :]])

    def _decode(self, step: Step) -> None:
        """Plan the decoding requests: all at once if none can be refused, else one by one."""
        members = self.decoding.batched
        if not step.full and self._undisturbed(step):
            read, fast = members.context, not members.long
            rows = self.decoding.go_on()
            if rows:
                step.decodes = rows
                self._charge(step, rows, read, rows, fast)
            return
        self.decoding.split()
        self._walk(self._in_order(Status.DECODE), step)

    def _undisturbed(self, step: Step) -> bool:
        decoding, members = self.decoding, self.decoding.batched
        return (
            len(members) <= min(step.tokens, step.requests)
            and members.context < step.kv
            and decoding.has_blocks()
            and all(r.status is not Status.DECODE for r in decoding.unbatched)
        )

    def _charge(self, step: Step, tokens: int, read: int, rows: int, fast: bool) -> None:
        step.tokens -= tokens
        step.kv -= read
        step.requests -= rows
        step.fast = step.fast and fast
        step.full = step.tokens == 0 or (step.kv <= 0 and not step.fast) or step.requests <= 0

    def _walk(self, candidates: Iterator[Request], step: Step) -> None:
        """Plan candidates one by one, in order, until a budget is used up or admission has to stop."""
        for request in candidates:
            if step.full:
                return
            free = self.pool.free
            if request.status is not Status.DECODE and not step.empty and self._breaches_margin(free):
                step.full = True
                return
            if request.status is Status.WAITING and self.options.shares_prefixes and request not in self.host.tables:
                self._match_prefix(request)
            if not self._fits(request, step):
                continue
            blocks = self._allocate(request, step)
            if blocks is not None:
                self._place(request, blocks, step)
            elif self._ends_admission(request, free):
                step.full = True
                return

    def _breaches_margin(self, free: int) -> bool:
        """True if the free blocks are too few for any request to begin or continue a prompt."""
        return free < self.options.safety_margin * self.options.num_blocks

    def _ends_admission(self, request: Request, free: int) -> bool:
        """True if a request that found too few blocks, with `free` free, ends admission for all behind it."""
        begins = request.status is Status.WAITING or (request.fresh and request not in self.sampling.begun)
        return not free and begins

    def _query(self, request: Request, step: Step) -> int:
        return min(request.target - request.computed, step.tokens)

    def _is_fast(self, request: Request, tokens: int) -> bool:
        return tokens == 1 and request.computed < self._fast_tokens

    def _fits(self, request: Request, step: Step) -> bool:
        """True if the row's KV reads fit this step's budget. Only rows of the decode fast path are exempt."""
        return (step.fast and self._is_fast(request, self._query(request, step))) or step.kv >= self._reads(request)

    def _reads(self, request: Request) -> int:
        """Return the KV tokens that a row of a request is charged for."""
        return min(request.computed, self._window) if self._window else request.computed

    def _match_prefix(self, request: Request) -> None:
        """Look the prompt up; on a hit the request is active from then on, even if it gets no row in this step."""
        size = self.options.block_size
        target = request.target
        hits = self.pool.longest_prefix(request.spec, (target - self._not_looked_up) // size)
        if hits:
            self.pool.adopt(request, hits)
            self._activate(request, min(len(hits) * size, target - 1))
        self._observer.looked_up(request, target, hits)

    def _activate(self, request: Request, cached_tokens: int) -> None:
        del self.waiting[request]
        if request in self.host.tables:
            self.decoding.resume(request)
        else:
            self.decoding.admit(request, cached_tokens)
        self.running[request] = None

    def _table_size(self, tokens: int) -> int:
        """Return the blocks that the original allocates for `tokens` tokens when it allocates at all: one more than the
        ceiling when `tokens` is a multiple of the block size or one less.
        """
        return (tokens + 1) // self.options.block_size + 1

    def _allocate(self, request: Request, step: Step) -> list[int] | None:
        """Return the blocks that a request lacks for its next row, or None when there are not enough."""
        reach, have = request.computed + self._query(request, step), self.pool.entries(request)
        if have and have * self.options.block_size >= reach:
            return []
        entries = self._table_size(reach) - have
        needed = self.pool.in_groups(entries, have)
        if needed <= self.pool.ready:
            return self.pool.grow(request, entries)
        self._observer.lacked(request, entries)
        step.failed = True
        if request in self.running:
            step.starved.append((request, needed))
        return None

    def _place(self, request: Request, blocks: list[int], step: Step) -> None:
        tokens = self._query(request, step)
        if request.status is Status.WAITING:
            self._activate(request, 0)
        if request in self.sampling.samples and tokens >= request.uncomputed - 1:
            tokens = request.uncomputed - 1
            self.sampling.due.append(request)
        if tokens:
            step.rows[request] = self.decoding.row(request, tokens, self.sampling.unlisted(request, blocks))
        else:
            self._observer.held_back(request, len(step.rows) + step.decodes + len(step.held_back))
            self.sampling.hold(request, blocks)
            step.held_back.append(request)
        self._charge(step, tokens, self._reads(request), 1, self._is_fast(request, tokens))

    def _fork(self) -> None:
        """Share a request's blocks with as many samples as find room. The others wait, the last of them first."""
        for request, samples in self.sampling.take():
            for sample in reversed(self._fork_off(request, samples, request.hashed)):
                self.waiting[sample] = None

    def _fork_off(self, request: Request, samples: list[Request], whole: int) -> list[Request]:
        """Share the first `whole` blocks with as many samples as find room. Return the others."""
        own = self.pool.unshared(request, whole)
        fit = min(len(samples), self.pool.ready // own) if own else len(samples)
        self._admit(request, samples[:fit], whole)
        return samples[fit:]

    def _admit(self, request: Request, samples: list[Request], whole: int) -> None:
        self.sampling.fork(request, samples, whole)
        for sample in samples:
            self.running[sample] = None

    def _offload(self, step: Step) -> bool:
        """Requeue starved requests, newest first, until the blocks suffice for the others. Return False if none can go.

        A request whose blocks fit the host, tried in order of the queue, keeps its KV there; the others lose theirs.
        """
        self._observer.reclaiming([request for request, _ in step.starved])
        demand, free = sum(needed for _, needed in step.starved), self.pool.free
        victims: list[Request] = []
        while demand > free and step.starved and len(self.running) - len(victims) > 1:
            request, needed = step.starved.pop()
            victims.append(request)
            demand -= needed
            free += self.pool.allocated(request)
        for request in reversed(victims):
            self._set_back(request)
        self._requeue(victims)
        return bool(victims)

    def _set_back(self, request: Request) -> None:
        """Take a request's blocks. Its KV waits on the host, if there is room."""
        if not self.host.park(request, drop_in_flight=True):
            self.decoding.call_off(request)
            self.decoding.preempt(request, drop_in_flight=True)
        self.sampling.set_back(request)
        del self.running[request]

    def _requeue(self, victims: list[Request]) -> None:
        """Queue preempted requests, given newest first, again; no new request is admitted beside them."""
        for request in reversed(victims):
            self.waiting[request] = None
        self._observer.reclaimed(victims[::-1])
        self.block_new_requests |= bool(victims)

    def _commit(self, step: Step) -> StepPlan:
        if self.host.tables or self.returned:
            self._restore(step)
        queues = {"running": len(self.running), "waiting": len(self.waiting)}
        return self.decoding.plan(step.rows, **queues, lead=step.lead, fast_decode=step.fast)

    def _restore(self, step: Step) -> None:
        parked = self.host.tables
        self.returned = [request for request in (*step.rows, *step.held_back) if request in parked]
        for request in self.returned:
            self.host.restore(request)
        if step.held_back and self.options.allow_block_sharing:
            silent = [(request, request.epoch) for request in step.held_back if request in self.returned]
            self._silent[self.decoding.batched.planned] = silent

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        outcome = self.decoding.complete(plan, result, self._end)
        if self._silent:
            for request, epoch in self._silent.pop(plan.step, ()):
                if request.epoch == epoch and request.status is Status.PREFILL:
                    self.decoding.complete_without_tokens(request)
        if self.sampling.due:
            self._fork()
        return outcome

    def _end(self, request: Request, reason: Finish) -> None:
        self._finish(request, reason)
        self.block_new_requests = False

    def _finish(self, request: Request, reason: Finish) -> None:
        if request.status is not Status.WAITING:
            del self.running[request]
        elif request in self.waiting:
            del self.waiting[request]
        else:
            self.sampling.drop(request)
        for sample in self.sampling.orphans(request):
            self.waiting[sample] = None
        self.host.forget(request)
        self.decoding.call_off(request)
        self.decoding.end(request, reason)
