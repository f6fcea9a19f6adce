"""First come, first served, all reserved: static, and the scheduler and rules of dynamic_padded, tgi and contiguous.

An admitted request has blocks for all that it may write until its end, so none grows and none is preempted. What is
left is a rule: which requests join, and which get a row.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from cbsim.kv.blocks import BlockPool
from cbsim.kv.reservation import PiecePool, free_pieces, reserved_tokens
from cbsim.policy.decode_batch import by_order
from cbsim.policy.decoding import Decoding
from cbsim.policy.kind import Options, SchedulerKind
from cbsim.policy.plan import Chunk, Outcome, StepPlan, StepResult
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.value import mypyc_attr, replace
from cbsim.schedulers.base import SchedulerBase, plain_pool, too_large
from cbsim.schedulers.simple import settings

NO_LIMIT = 1 << 60


class Rule(Protocol):
    """A rule for which waiting requests join, and which requests get a row."""

    @property
    def pool(self) -> BlockPool:
        """The KV cache."""

    def refusal(self, spec: RequestSpec) -> str | None:
        """Return why a request can never be served, or None."""

    def rows(self, fcfs: Fcfs) -> dict[Request, Chunk]:
        """Return the rows of the next step, beside those that `go_on` counted; joining requests have been admitted."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Fcfs(SchedulerBase):
    """A scheduler of a queue, the running requests in order of admission, and a rule."""

    def __init__(self, options: Options, rule: Rule) -> None:
        super().__init__(options, Decoding(rule.pool, together=True))
        self.options = options
        self.rule = rule
        self.pool = rule.pool
        self.running: dict[Request, None] = {}
        self.waiting: deque[Request] = deque()
        self.decodes = 0  # rows of the step being planned that are counted, not listed

    def refusal(self, spec: RequestSpec) -> str | None:
        return self.rule.refusal(spec)

    def add(self, spec: RequestSpec) -> None:
        longest = self.limits.longest
        limit = spec.max_tokens if longest is None else min(spec.max_tokens, longest - spec.prompt_tokens)
        self.waiting.append(self.decoding.add(spec, limit))

    def schedule(self) -> StepPlan | None:
        self.decodes = 0
        rows = self.rule.rows(self)
        if not (rows or self.decodes):
            return None
        return self.decoding.plan(rows, running=len(self.running), waiting=len(self.waiting))

    def go_on(self) -> int:
        """Plan a token for every request of the decode batch. Return their number."""
        self.decodes = self.decoding.go_on()
        return self.decodes

    def admit(self, tokens: int, blocks: list[int], padding: int = 0) -> Chunk:
        """Admit the head of the queue and return a row of its first tokens. `blocks` are those that it got."""
        request = self.waiting.popleft()
        self.decoding.admit(request)
        self.running[request] = None
        return self.decoding.row(request, tokens, blocks, padding=padding)

    def head(self, slots: int, step: int = NO_LIMIT, total: int = NO_LIMIT) -> list[Request]:
        """Return the head of the queue as far as cache, slots, prompt tokens of a `step`, and tokens in `total` go."""
        joining: list[Request] = []
        free = self.pool.free
        for request in self.waiting:
            step -= request.spec.prompt_tokens
            total -= tokens_at_end(request.spec)
            free -= blocks_to_end(self.pool, request.spec)
            if min(step, total, free) < 0 or len(self.running) + len(joining) == slots:
                break
            joining.append(request)
        return joining

    def prefill(self, joining: list[Request], width: int = 0) -> dict[Request, Chunk]:
        """Admit the head of the queue with all blocks that it may write to. Return its prompts, padded to a `width`."""
        grown = [(r, self.pool.grow(r, blocks_to_end(self.pool, r.spec))) for r in joining]
        return {r: self.admit(r.target, blocks, max(0, width - r.target)) for r, blocks in grown}

    def _finish(self, request: Request, reason: Finish) -> None:
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request]
        self.decoding.end(request, reason)


def tokens_at_end(spec: RequestSpec) -> int:
    """Return the tokens of a prompt and its limit."""
    return spec.prompt_tokens + spec.max_tokens


def blocks_to_end(pool: BlockPool, spec: RequestSpec) -> int:
    """Return the blocks of all that a request may write; its last token is never computed."""
    return pool.blocks_for(tokens_at_end(spec) - 1)


class DynamicPadded:
    """Dynamic batching: a waiting request takes a slot as soon as one is free.

    A step has one width, that of its longest row: the rows of decoding requests have one token and are padded on the
    left to the prompts that come in beside them. So a prompt of n tokens that joins a batch, B rows with its own, costs
    (n - 1)(B - 1) tokens of padding. Only query tokens are padded; the cache holds none of it. All that a request may
    write is reserved, so none grows and none is preempted.
    """

    def __init__(self, options: settings.PaddedOptions) -> None:
        self._slots = options.batch_size
        self.pool = plain_pool(options)

    def refusal(self, spec: RequestSpec) -> str | None:
        return too_large(tokens_at_end(spec), blocks_to_end(self.pool, spec), self.pool.num_blocks)

    def rows(self, fcfs: Fcfs) -> dict[Request, Chunk]:
        decoding = fcfs.decoding
        joining = fcfs.head(self._slots)
        if joining:
            decoding.split()
        width = max([r.target for r in joining], default=1)
        going = [r for r in sorted(decoding.unbatched, key=by_order) if r.scheduled < r.limit]
        fcfs.go_on()
        return {r: decoding.row(r, 1, (), padding=width - 1) for r in going} | fcfs.prefill(joining, width)


DYNAMIC_PADDED = SchedulerKind(
    name="dynamic_padded",
    about="dynamic batching: who waits joins at once, every row padded to the longest of its step",
    settings=settings.DynamicPaddedSettings,
    resolve=settings.resolve_padded,
    make=lambda options: Fcfs(options, DynamicPadded(options)),
)


class Tgi:
    """text-generation-inference v3's batching: a batch decodes; now and then it stops for prompts, which then join it.

    Before a decode step, prompts are taken from the queue, first come, first served, as far as three bounds go: tokens
    of the step, tokens of all that run (prompts and limits), blocks for all that the new ones may ever write. The batch
    stops for them if they are enough beside it (`waiting_served_ratio`), or if it has not stopped for long
    (`max_waiting_tokens`); then they are prefilled by themselves.
    """

    def __init__(self, options: settings.TgiOptions) -> None:
        self.options = options
        self.pool = plain_pool(options)
        self._steps = 0  # since the batch stopped for prompts last, that stop included
        self._joined = False  # prompts have just joined a batch, which decodes next

    def refusal(self, spec: RequestSpec) -> str | None:
        o, tokens = self.options, tokens_at_end(spec)
        if spec.prompt_tokens > o.max_batch_prefill_tokens:
            return f"prompt of {spec.prompt_tokens} tokens, max_batch_prefill_tokens is {o.max_batch_prefill_tokens}"
        if tokens > o.max_batch_total_tokens:
            return f"{tokens} tokens with its limit, max_batch_total_tokens is {o.max_batch_total_tokens}"
        return too_large(tokens, blocks_to_end(self.pool, spec), self.pool.num_blocks)

    def rows(self, fcfs: Fcfs) -> dict[Request, Chunk]:
        decoding = fcfs.decoding
        stopped = [r for r in sorted(decoding.unbatched, key=by_order) if r.scheduled < r.limit]
        decodes = bool(stopped or decoding.batched)
        if fcfs.waiting and not (self._joined and decodes):
            o, reserved = self.options, sum([tokens_at_end(request.spec) for request in fcfs.running])
            fitting = fcfs.head(o.max_batch_size, o.max_batch_prefill_tokens, o.max_batch_total_tokens - reserved)
            least = 0 if self._steps >= o.max_waiting_tokens else int(len(fcfs.running) * o.waiting_served_ratio)
            if len(fitting) >= max(1, least):
                self._joined, self._steps = bool(fcfs.running), 1
                decoding.split()
                return fcfs.prefill(fitting)  # alone: no other request has a row
        if not decodes:
            return {}
        self._joined = False
        self._steps += 1
        fcfs.go_on()
        return {request: decoding.row(request, 1, ()) for request in stopped}


TGI = SchedulerKind(
    name="tgi",
    about="text-generation-inference v3: prompts by themselves, then joined to the batch; all reserved",
    settings=settings.TgiSettings,
    resolve=settings.resolve_tgi,
    make=lambda options: Fcfs(options, Tgi(options)),
)


class Contiguous:
    """Iteration-level batching on a contiguous cache: all that a request may need is one piece, reserved at admission.

    The servers of Orca and FasterTransformer kept their caches so before they were paged; `orca` and
    `faster_transformer` are those servers' rules as Sarathi-Serve states them, on paged blocks. Here every running
    request decodes in every step; then prompts that were begun go on, then the queue is admitted from, while a slot,
    tokens of the step and a piece are there. A request that does not fit stops those behind it. Nothing is shared.
    """

    def __init__(self, options: settings.ContiguousOptions) -> None:
        self.options = o = options
        self.pool = PiecePool(o.block_size, o.num_blocks, free_pieces(o.placement, o.num_blocks))

    def refusal(self, spec: RequestSpec) -> str | None:
        o = self.options
        if spec.prompt_tokens >= o.max_model_len:
            return f"prompt of {spec.prompt_tokens} tokens, max_model_len is {o.max_model_len}"
        needed, largest = self.piece(spec), self.pool.pieces.most
        if needed > largest:
            tokens = reserved_tokens(o.reserve, spec, o.max_model_len)
            piece = f"a piece of {needed} blocks, the largest of {o.num_blocks} has {largest}"
            return f"reserves {tokens} tokens ({o.reserve}): {piece}"
        return None

    def piece(self, spec: RequestSpec) -> int:
        """Return the blocks that a request reserves."""
        return self.pool.blocks_for(reserved_tokens(self.options.reserve, spec, self.options.max_model_len))

    def rows(self, fcfs: Fcfs) -> dict[Request, Chunk]:
        rows: dict[Request, Chunk] = {}
        left = self.options.max_num_batched_tokens - fcfs.go_on()
        # decoding requests, then partly computed prompts; each in order of admission
        for request in sorted(fcfs.decoding.unbatched, key=lambda r: (r.status is Status.PREFILL, r.order)):
            if left and request.scheduled < request.limit:  # else its last token is in flight
                rows[request] = fcfs.decoding.row(request, min(request.uncomputed, left), ())
                left -= rows[request].tokens
        self.pool.sought = 0
        self._admit(fcfs, rows, left)
        return rows

    def _admit(self, fcfs: Fcfs, rows: dict[Request, Chunk], left: int) -> None:
        """Admit the queue, head first: none is passed over."""
        chunked = self.options.enable_chunked_prefill
        while fcfs.waiting and left and len(fcfs.running) < self.options.max_num_seqs:
            request = fcfs.waiting[0]
            tokens = min(request.uncomputed, left)
            blocks = self.piece(request.spec)
            if (tokens < request.uncomputed and not chunked) or not self.pool.fits(blocks):
                break
            rows[request] = fcfs.admit(tokens, self.pool.reserve(request, blocks))
            left -= tokens


CONTIGUOUS = SchedulerKind(
    name="contiguous",
    about="iteration-level batching, all that a request may need reserved in one piece (Orca, FasterTransformer)",
    settings=settings.ContiguousSettings,
    resolve=settings.resolve_contiguous,
    make=lambda options: Fcfs(options, Contiguous(options)),
)


@mypyc_attr(allow_interpreted_subclasses=True)
class StaticScheduler(SchedulerBase):
    """Static batching: a batch is formed, left-padded to its longest prompt, and run until its last request has ended.

    This is `generate()` on a padded batch, the baseline of every introduction to continuous batching. No request is
    admitted in between; the row of a request that has ended is computed on, and every row attends to as many positions
    as the longest. The cache is reserved when the batch is formed: for every row the longest prompt and the largest
    output limit.
    """

    def __init__(self, options: settings.PaddedOptions) -> None:
        self.pool = plain_pool(options)
        super().__init__(options, Decoding(self.pool, together=True))
        self.options = options
        self.waiting: deque[Request] = deque()
        self._batch: list[Request] = []
        self._length = 0  # positions of every row, padding included

    @property
    def running(self) -> list[Request]:
        return [request for request in self._batch if request.status is not Status.FINISHED]

    def refusal(self, spec: RequestSpec) -> str | None:
        tokens = spec.prompt_tokens + spec.max_tokens
        return too_large(tokens, self.pool.blocks_for(tokens), self.pool.num_blocks)

    def add(self, spec: RequestSpec) -> None:
        self.waiting.append(self.decoding.add(spec, spec.max_tokens))

    def cancel(self, spec: RequestSpec) -> None:
        super().cancel(spec)
        self._disband()

    def schedule(self) -> StepPlan | None:
        if not self._batch:
            return self._prefill()
        return self._decode() if self.decoding.batched else None

    def _prefill(self) -> StepPlan:
        prompt, blocks = self._form()
        rows = {}
        for request in self._batch:
            self.decoding.admit(request)
            tokens, table = request.target, self.pool.grow(request, blocks)
            rows[request] = self.decoding.row(request, tokens, table, padding=prompt - tokens)
        self._length = prompt
        return self._commit(rows)

    def _form(self) -> tuple[int, int]:
        """Fill the batch from the queue, in order, as slots and cache allow: (longest prompt, blocks a row)."""
        prompt = limit = blocks = 0
        while self.waiting and len(self._batch) < self.options.batch_size:
            spec = self.waiting[0].spec
            longest, largest = max(prompt, spec.prompt_tokens), max(limit, spec.max_tokens)
            reserve = self.pool.blocks_for(longest + largest)
            if self._batch and reserve * (len(self._batch) + 1) > self.pool.num_blocks:
                break
            prompt, limit, blocks = longest, largest, reserve
            self._batch.append(self.waiting.popleft())
        return prompt, blocks

    def _decode(self) -> StepPlan:
        """Plan a row for every member of the batch, ended ones included, over the positions of the longest."""
        rows, context = len(self._batch), len(self._batch) * self._length
        self._length += 1
        self.decoding.go_on()
        plan = self._commit({})
        ended, beyond = rows - plan.work.decodes, context - plan.work.decode_context
        return replace(plan, work=replace(plan.work, padding_rows=ended, padding_context=beyond))

    def _commit(self, rows: dict[Request, Chunk]) -> StepPlan:
        plan = self.decoding.plan(rows, running=len(self.running), waiting=len(self.waiting))
        return replace(plan, counts=replace(plan.counts, table_blocks=self.pool.num_blocks - self.pool.free))

    def update(self, plan: StepPlan, result: StepResult) -> Outcome:
        outcome = super().update(plan, result)
        self._disband()
        return outcome

    def _finish(self, request: Request, reason: Finish) -> None:
        """End a request; its row and its blocks stay with the batch."""
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        self.decoding.end(request, reason, keeps_blocks=True)

    def _disband(self) -> None:
        """Free the batch once its last request has ended."""
        if self.running:
            return
        for request in self._batch:
            self.pool.release(request)
        self._batch = []


STATIC = SchedulerKind(
    name="static",
    about="batched generation: padded, nobody is admitted until the last of the batch has ended",
    settings=settings.StaticSettings,
    resolve=settings.resolve_padded,
    make=StaticScheduler,
    padded=True,
)
