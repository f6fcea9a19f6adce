"""Hugging Face transformers' continuous batching, 5.17: `fifo` and `prefill_first`.

Rules as in the real scheduler (one full-attention layer group), restated and checked line by line against its traces.
Two budgets bound a step: query tokens, and KV tokens read. A request that finds no block starves; when nothing can run,
or after a step in which some starved, starved requests give up their blocks until the others fit (soft reset: generated
tokens become prompt; or their KV is kept on the host, host.py), and nobody new is admitted until a request has
finished. Samples of one prompt share it (forks.py).

The original's defects are not shared; docs/policies.md lists them, and what proves the rules puts them back.
"""

from __future__ import annotations

from collections.abc import Iterator

from cbsim.policy.blocks import BlockPool, CachedLast
from cbsim.policy.cohort import by_order
from cbsim.policy.decoding import Decoding
from cbsim.policy.forks import Forks
from cbsim.policy.host import Host
from cbsim.policy.keys import Keys, KeysWhenLanded
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.observer import NOBODY, Observer
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.schedulers.transformers_settings import (
    FIFO,
    PREFILL_FIRST,
    TransformersOptions,
    TransformersSettings,
    reasons,
    resolve,
    settled,
    widened,
)
from cbsim.policy.value import mypyc_attr


class _Step:
    """A step while it is being planned."""

    __slots__ = (
        "decodes",
        "failed",
        "fast",
        "full",
        "held_back",
        "kv",
        "lead",
        "requests",
        "rows",
        "starved",
        "tokens",
    )

    def __init__(self, tokens: int, kv: int, requests: int, fast: bool) -> None:
        self.tokens = tokens
        self.kv = kv
        self.requests = requests
        self.fast = fast
        self.rows: dict[Request, Chunk] = {}
        self.held_back: list[Request] = []  # rows without tokens: all that is left is the last one before a fork
        self.lead = 0
        self.decodes = 0
        self.failed = False  # an allocation failed
        self.starved: list[tuple[Request, int]] = []
        self.full = False  # a budget is used up

    @property
    def empty(self) -> bool:
        return not (self.rows or self.decodes or self.held_back)


@mypyc_attr(allow_interpreted_subclasses=True)
class TransformersScheduler:
    """transformers 5.17 as a policy. Depth 1 is its synchronous loop, depth 2 `use_async_batching`."""

    polls_before_update = False
    awaits_when_idle = False

    def __init__(self, options: TransformersOptions, observer: Observer = NOBODY) -> None:
        self.options = o = options
        self.limits = o.limits
        self.free_list = CachedLast(range(o.num_blocks))
        self.pool = self.make_pool(observer)
        self._fast_tokens = o.max_blocks_per_request * o.block_size
        self.decoding = Decoding(
            self.pool,
            self.make_keys() if o.allow_block_sharing else None,
            together=True,
            foresees=False,
            wastes_chunks=True,
            long_tokens=self._fast_tokens,
            observer=observer,
        )
        self.requests = self.decoding.requests
        self.running: dict[Request, None] = {}
        self.waiting: dict[Request, None] = {}
        self.forks = Forks(self.decoding)
        self.host = Host(self.decoding, o.host_blocks)
        self.returned: list[Request] = []  # from the host, in the step planned last
        self._silent: dict[int, list[tuple[Request, int]]] = {}  # step -> those of them without tokens, their epochs
        self.block_new_requests = False
        most = min(o.max_requests_per_batch, o.max_batch_tokens)
        self._max_requests = most if o.allow_block_sharing else min(most, o.num_blocks)
        self._observer = observer

    def make_pool(self, observer: Observer) -> BlockPool:
        return BlockPool(self.options.block_size, self.options.num_blocks, self.free_list, observer)

    def make_keys(self) -> Keys:
        return KeysWhenLanded(self.pool)

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting)

    def refusal(self, spec: RequestSpec) -> str | None:
        most = spec.prompt_tokens + spec.max_tokens - 1
        needed = self._table_size(most)
        if needed > self.options.num_blocks:
            return f"{most} tokens need {needed} blocks, the cache has {self.options.num_blocks}"
        return None

    def add(self, spec: RequestSpec) -> None:
        request = self.decoding.add(spec, spec.max_tokens)
        first = self.requests.get(spec.sample_of) if spec.sample_of else None
        if first and first.status is Status.WAITING and not first.seen:
            self.forks.expect(first, request)
        else:
            self.waiting[request] = None

    def cancel(self, spec: RequestSpec) -> None:
        if request := self.requests.get(spec):
            self._finish(request, Finish.ABORTED)
            if not self.running:
                self.block_new_requests = False  # nobody is left whose end could lift it

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
            self._observer.stuck([request for request, _ in step.starved])
        return step

    def _in_order(self, status: Status) -> Iterator[Request]:
        return iter(sorted((r for r in self.decoding.loose if r.status is status), key=by_order))

    def _in_queue(self) -> Iterator[Request]:
        """Those that come back from the host and the others by turns, each in order of the queue."""
        waiting, held = list(self.waiting), self.host.held
        if not held:
            return iter(waiting)
        back, others = [r for r in waiting if r in held], [r for r in waiting if r not in held]
        turns = [request for pair in zip(back, others, strict=False) for request in pair]
        return iter([*turns, *back[len(others) :], *others[len(back) :]])

    def _decode(self, step: _Step) -> None:
        """The decoding requests: all at once if none can be refused, else one by one."""
        members = self.decoding.members
        if not step.full and self._undisturbed(step):
            read, fast = members.context, not members.long
            rows = self.decoding.go_on()
            if rows:
                step.decodes = rows
                self._charge(step, rows, read, rows, fast)
            return
        self.decoding.dissolve()
        self._walk(self._in_order(Status.DECODE), step)

    def _undisturbed(self, step: _Step) -> bool:
        decoding, members = self.decoding, self.decoding.members
        return (
            len(members) <= min(step.tokens, step.requests)
            and members.context < step.kv
            and decoding.has_blocks()
            and all(r.status is not Status.DECODE for r in decoding.loose)
        )

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
            if request.status is Status.WAITING and self.options.allow_block_sharing and request not in self.host.held:
                self._match_prefix(request)
            if not self._fits(request, step):
                continue
            blocks = self._allocate(request, step)
            if blocks is not None:
                self._place(request, blocks, step)
            elif not free and (
                request.status is Status.WAITING or (request.fresh and not self.forks.has_begun(request))
            ):
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
        target = request.target
        hits = self.pool.longest_prefix(request.spec, target // size)
        if hits:
            self.pool.adopt(request, hits)
            self._activate(request, min(len(hits) * size, target - 1))
        self._observer.looked_up(request, target, hits)

    def _activate(self, request: Request, cached_tokens: int) -> None:
        del self.waiting[request]
        if request in self.host.held:
            self.decoding.resume(request)
        else:
            self.decoding.admit(request, cached_tokens)
        self.running[request] = None

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
        self._observer.lacked(request, needed)
        step.failed = True
        if request in self.running:
            step.starved.append((request, needed))
        return None

    def _place(self, request: Request, blocks: list[int], step: _Step) -> None:
        tokens = self._query(request, step)
        if request.status is Status.WAITING:
            self._activate(request, 0)
        if request in self.forks and tokens >= request.wanted - 1:
            tokens = request.wanted - 1
            self.forks.reached(request)
        if tokens:
            step.rows[request] = self.decoding.row(request, tokens, self.forks.told(request, blocks))
        else:
            self._observer.held_back(request, len(step.rows) + step.decodes + len(step.held_back))
            self.forks.hold(request, blocks)
            step.held_back.append(request)
        self._charge(step, tokens, request.computed, 1, self._is_fast(request, tokens))

    def _fork(self) -> None:
        """Who has read its prompt but for one token shares what it has with its samples, as many as find room for what
        each needs of its own. The others wait like any request, the last of them first.
        """
        for request, samples in self.forks.take():
            own = self.pool.held(request) - request.hashed
            fit = min(len(samples), self.pool.free // own) if own else len(samples)
            for sample in samples[:fit]:
                self.forks.fork(request, sample)
                self.running[sample] = None
            for sample in reversed(samples[fit:]):
                self.waiting[sample] = None

    def _offload(self, step: _Step) -> bool:
        """Requeue starved requests, newest first, until the blocks suffice for the others. False if none can go.

        Whose blocks fit the host, asked in order of the queue, keeps its KV there; the others give theirs up.
        """
        self._observer.reclaiming([request for request, _ in step.starved])
        demand, free = sum(needed for _, needed in step.starved), self.pool.free
        victims: list[Request] = []
        while demand > free and step.starved and len(self.running) - len(victims) > 1:
            request, needed = step.starved.pop()
            victims.append(request)
            demand -= needed
            free += self.pool.held(request)
        for request in reversed(victims):
            if not self.host.park(request, drop_in_flight=True):
                self.decoding.call_off(request)
                self.decoding.preempt(request, drop_in_flight=True)
            self.forks.set_back(request)
            del self.running[request]
            self.waiting[request] = None
        self._observer.reclaimed(victims[::-1])
        self.block_new_requests |= bool(victims)
        return bool(victims)

    def _commit(self, step: _Step) -> StepPlan:
        if self.host.held or self.returned:
            self._restore(step)
        queues = {"running": len(self.running), "waiting": len(self.waiting)}
        return self.decoding.plan(step.rows, **queues, lead=step.lead, fast_decode=step.fast)

    def _restore(self, step: _Step) -> None:
        held = self.host.held
        self.returned = [request for request in (*step.rows, *step.held_back) if request in held]
        for request in self.returned:
            self.host.restore(request)
        if step.held_back and self.options.allow_block_sharing:
            silent = [(request, request.epoch) for request in step.held_back if request in self.returned]
            self._silent[self.decoding.members.planned] = silent

    def runs_ahead(self, plan: StepPlan) -> bool:
        return True

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        outcome = self.decoding.land(plan, result, self._end)
        if self._silent:
            for request, epoch in self._silent.pop(plan.step, ()):
                if request.epoch == epoch and request.status is Status.PREFILL:
                    self.decoding.lands_silently(request)
        if self.forks.due:
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
            self.forks.drop(request)
        for sample in self.forks.orphans(request):
            self.waiting[sample] = None
        self.host.forget(request)
        self.decoding.call_off(request)
        self.decoding.end(request, reason)


def _kind(name: str, about: str) -> SchedulerKind[TransformersSettings, TransformersOptions]:
    return SchedulerKind(
        name=name,
        about=f"Hugging Face transformers 5.17: {about}",
        settings=TransformersSettings,
        resolve=resolve,
        make=TransformersScheduler,
        block_size=256,
        least_block_size=4,
        padding="transformers",
        settled=settled,
        widened=widened,
        reasons=reasons,
    )


TRANSFORMERS_FIFO = _kind(FIFO, "decoding requests first")
TRANSFORMERS_PREFILL_FIRST = _kind(PREFILL_FIRST, "split prefills first")
