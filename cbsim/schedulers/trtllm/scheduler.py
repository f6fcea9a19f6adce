"""TensorRT-LLM's in-flight batching, the Python schedulers of its PyTorch backend: cache first, then rows.

Requests are taken from the queue, as many as may be active, and stay in order of arrival. In every step the capacity
scheduler chooses those that have cache, the micro batch those of them that get rows. Rows are prompts, or
parts of them, then one token for each generating request. A paused request loses its blocks, keeps its position, and
computes its prompt and what it has generated again.

Rules as read, restated and checked line by line against traces of restated classes: docs/policies.md. No block reuse,
one window, one beam, no drafts.
"""

from __future__ import annotations

from collections import deque

from cbsim.policy.decode_batch import by_order
from cbsim.policy.decoding import Decoding
from cbsim.policy.groups import Sight
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.loop import Waves
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.plan import Chunk, StepPlan
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.base import SchedulerBase, plain_pool, too_large
from cbsim.schedulers.trtllm.settings import TrtllmOptions, TrtllmSettings, resolve

Part = tuple[Request, int]  # a request, tokens of its prompt
Rows = tuple[list[Part], list[Request]]  # of a step: parts of prompts, in order; requests that generate a token each
Fit = tuple[list[Request], list[Request]]  # those that have cache, in the order of their rows; those that lose it


@mypyc_attr(allow_interpreted_subclasses=True)
class Capacity:
    """The GUARANTEED_NO_EVICT rule: cache is reserved to a request's end, so no started request is paused.

    STATIC_BATCH is the same, but no request starts while another generates.
    """

    def __init__(self, options: TrtllmOptions, decoding: Decoding) -> None:
        self.options = options
        self.decoding = decoding
        self.pool = decoding.pool
        self._static = options.capacity_scheduler_policy == "STATIC_BATCH"
        self.reserved = 0  # blocks that all started requests will have at their ends

    def whole(self, request: Request) -> int:
        """Return the blocks that are reserved for a request: its prompt and all that it may generate."""
        return self.pool.blocks_for(request.spec.prompt_tokens + request.limit)

    def spares_members(self, contexts: dict[Request, None]) -> bool:
        """True if all generating requests have cache, in front of these requests that may not."""
        return True

    def behind(self, generating: int, contexts: dict[Request, None]) -> Fit:
        """Return which of `contexts` fit behind `generating` others: in order, up to the first misfit."""
        fits: list[Request] = []
        if self._static and generating:
            return fits, []
        available = self._available()
        for request in contexts:
            needed = self.whole(request) - self.pool.allocated(request)
            if generating + len(fits) == self.options.max_num_requests or needed > available:
                break
            available -= needed
            fits.append(request)
        return fits, []

    def _available(self) -> int:
        """Return the free blocks, less what all generating requests will need."""
        available = self.pool.num_blocks - self.reserved
        for request in self.decoding.unbatched:
            if request.status is Status.PREFILL:
                available += self.whole(request) - self.pool.allocated(request)
        return available

    def one_by_one(self, generating: list[Request], contexts: dict[Request, None]) -> Fit:
        """Return the requests that fit: generating ones, then the others, each in order of arrival."""
        front = generating[: self.options.max_num_requests]
        return [*front, *self.behind(len(front), contexts)[0]], []


class MaxUtilization(Capacity):
    """The MAX_UTILIZATION rule: a request needs room for its next step; if it lacks it, the last started is paused."""

    def __init__(self, options: TrtllmOptions, decoding: Decoding) -> None:
        super().__init__(options, decoding)
        self._ahead = 2 if options.two_step_lookahead else 1

    def one_step(self, request: Request) -> int:
        """Return the blocks that a request needs beside those it has."""
        pool = self.pool
        if request.status is not Status.DECODE:
            return 0 if pool.allocated(request) else pool.blocks_for(request.target)
        ahead = min(self._ahead, request.limit - request.scheduled)
        return pool.blocks_for(request.computed + ahead) - pool.blocks_for(request.computed)

    def spares_members(self, contexts: dict[Request, None]) -> bool:
        for first in contexts:
            if first.order < self.decoding.batched.max_order:
                return False
            break
        return self._members_need() <= self.pool.free

    def _members_need(self) -> int:
        if self._ahead > 1:
            return sum([self.one_step(request) for request in self.decoding.batched])
        return self.decoding.due_blocks()

    def behind(self, generating: int, contexts: dict[Request, None]) -> Fit:
        return self._walk(list(contexts), generating, self._members_need())

    def one_by_one(self, generating: list[Request], contexts: dict[Request, None]) -> Fit:
        return self._walk(sorted([*generating, *contexts], key=by_order), 0, 0)

    def _walk(self, line: list[Request], slots: int, used: int) -> Fit:
        """Return the fitting requests, in order of arrival, behind `slots` slots and `used` blocks. For a misfit, the
        last started from it on, perhaps itself, is paused and ends the line; if none has started, the walk ends.
        """
        fits: list[Request] = []
        paused: list[Request] = []
        free, end, at = self.pool.free, len(line), 0
        while at < end:
            request = line[at]
            needed = self.one_step(request)
            if slots + len(fits) < self.options.max_num_requests and used + needed <= free:
                used += needed
                fits.append(request)
                at += 1
                continue
            last = end - 1
            while last >= at and line[last].status is Status.WAITING:
                last -= 1
            if last < at:
                break
            free += self.pool.allocated(line[last])
            paused.append(line[last])
            end = last
        return fits, paused


class MicroBatch:
    """The rows of a step: which requests that have cache get one, and how many tokens of their prompts."""

    def __init__(self, options: TrtllmOptions) -> None:
        self.options = options
        self._waited = 0  # steps for which prompts have waited

    def rows(self, line: list[Request], decodes: int) -> Rows:
        """Return rows for requests that have cache, in their order, behind `decodes` members that go on generating.
        Whole prompts, unless they may be cut, stop the batch where they are too many tokens.
        """
        o = self.options
        generating: list[Request] = []
        contexts: list[Part] = []
        tokens = decodes
        for request in line:
            if decodes + len(generating) + len(contexts) >= o.max_batch_size:
                break
            generates = request.status is Status.DECODE
            if generates and request.scheduled >= request.limit:
                continue  # its last token is in flight
            counted = 0 if o.enable_chunked_prefill and not generates else request.uncomputed
            if tokens + counted > o.max_num_tokens:
                break
            tokens += counted
            if generates:
                generating.append(request)
            else:
                contexts.append((request, request.uncomputed))
        if o.enable_chunked_prefill and contexts:
            contexts = self._cut(contexts, o.max_num_tokens - tokens)
        if contexts and self._waits(contexts, decodes + len(generating)):
            contexts = []
        return contexts, generating

    def _cut(self, contexts: list[Part], capacity: int) -> list[Part]:
        """Return the parts that fit what is left of the step; prompts that go on after it come first."""
        missing = [tokens for _, tokens in contexts]
        if sum(missing) <= capacity:
            return contexts
        equal = self.options.context_chunking_policy == "EQUAL_PROGRESS"
        share = equal_progress if equal else first_come_first_served
        parts = share(missing, capacity, self.options.chunk_unit_size)
        cut = [(request, part) for (request, whole), part in zip(contexts, parts, strict=True) if 0 < part < whole]
        return cut + [(request, part) for (request, whole), part in zip(contexts, parts, strict=True) if part == whole]

    def _waits(self, contexts: list[Part], generating: int) -> bool:
        """True if the prompts wait for more of them; never if no request generates."""
        o = self.options
        if not (generating and o.batch_wait_timeout_iters):
            return False
        tokens = generating + sum([part for _, part in contexts])
        waits = self._waited < o.batch_wait_timeout_iters and tokens < o.batch_wait_max_tokens_ratio * o.max_num_tokens
        self._waited = self._waited + 1 if waits else 0
        return waits


def first_come_first_served(missing: list[int], capacity: int, unit: int) -> list[int]:
    """Return the tokens of each: all that it misses, or a multiple of `unit` of what is left."""
    parts: list[int] = []
    for whole in missing:
        part = whole if whole <= capacity else capacity // unit * unit
        parts.append(part)
        capacity -= part
    return parts


def equal_progress(missing: list[int], capacity: int, unit: int) -> list[int]:
    """Return the tokens of each: round by round up to `unit` more, as long as any gets some."""
    parts = [0] * len(missing)
    grew = True
    while grew and capacity:
        grew = False
        for i, whole in enumerate(missing):
            more = min(unit, whole - parts[i])
            if 0 < more <= capacity:
                parts[i] += more
                capacity -= more
                grew = True
    return parts


@mypyc_attr(allow_interpreted_subclasses=True)
class TrtllmScheduler(SchedulerBase):
    """A policy with TensorRT-LLM's rules. Depth 1 is its plain executor loop, depth 2 the overlap scheduler's."""

    def __init__(self, options: TrtllmOptions, observer: Observer = NULL_OBSERVER) -> None:
        self.pool = plain_pool(options, observer)
        super().__init__(options, Decoding(self.pool, together=True, by_arrival=True, observer=observer))
        self.options = options
        self.running: dict[Request, None] = {}  # started requests: they have blocks
        self.contexts: dict[Request, None] = {}  # active, prompts not computed to the end, in order of arrival
        self.queue: deque[Request] = deque()  # not active yet
        packs = options.capacity_scheduler_policy == "MAX_UTILIZATION"
        self.capacity = MaxUtilization(options, self.decoding) if packs else Capacity(options, self.decoding)
        self.batch = MicroBatch(options)
        self.waves: Waves | None = None  # of servers that step together
        self._observer = observer

    @property
    def waiting(self) -> list[Request]:
        """The requests without blocks, active or not."""
        return [*[request for request in self.contexts if request.status is Status.WAITING], *self.queue]

    @property
    def generating(self) -> list[Request]:
        """The requests whose prompts are computed, in order of arrival."""
        return sorted([request for request in self.running if request.status is Status.DECODE], key=by_order)

    def refusal(self, spec: RequestSpec) -> str | None:
        o = self.options
        if spec.prompt_tokens >= o.max_seq_len:
            return f"prompt of {spec.prompt_tokens} tokens, max_seq_len is {o.max_seq_len}"
        most = min(spec.prompt_tokens + spec.max_tokens, o.max_seq_len)
        large = too_large(most, self.pool.blocks_for(most), o.num_blocks)
        if large or o.enable_chunked_prefill:
            return large
        if spec.prompt_tokens > o.max_num_tokens:
            return f"prompt of {spec.prompt_tokens} tokens, max_num_tokens is {o.max_num_tokens}"
        if o.capacity_scheduler_policy == "MAX_UTILIZATION" and most - 1 > o.max_num_tokens:
            return f"up to {most - 1} tokens to read after a pause, max_num_tokens is {o.max_num_tokens}"
        return None

    def add(self, spec: RequestSpec) -> None:
        limit = min(spec.max_tokens, self.options.max_seq_len - spec.prompt_tokens)
        self.queue.append(self.decoding.add(spec, limit))

    def schedule(self) -> StepPlan | None:
        while self.queue and len(self.requests) - len(self.queue) < self.options.max_active_requests:
            self.contexts[self.queue.popleft()] = None
        together = self._undisturbed()
        rows, decodes = self._go_on() if together else (self._one_by_one(), 0)
        if rows[0] and self.waves is not None and not self.waves.prefills(self.waves.next, bool(decodes or rows[1])):
            rows = [], rows[1]
        chunks = self._chunks(rows)
        if not (chunks or decodes or self.decoding.preempted):
            return None
        for request, _ in rows[0]:
            if chunks[request].outputs:
                del self.contexts[request]
        waiting = len(self.requests) - len(self.running)
        return self.decoding.plan(chunks, running=len(self.running), waiting=waiting, lead=len(rows[0]))

    def _undisturbed(self) -> bool:
        """True if every generating request gets a row, whatever happens to the others."""
        decoding, o = self.decoding, self.options
        if len(decoding.batched) > min(o.max_batch_size, o.max_num_tokens):
            return False
        for request in decoding.unbatched:
            if request.status is Status.DECODE and request.scheduled < request.limit:
                return False
        return self.capacity.spares_members(self.contexts)

    def _go_on(self) -> tuple[Rows, int]:
        """Plan the members together; of the others, those that have cache behind them."""
        begun = sum([request.status is Status.PREFILL for request in self.decoding.unbatched])
        fits, paused = self.capacity.behind(len(self.running) - begun, self.contexts)
        if self._observer is not NULL_OBSERVER:
            self._observer.fitting([*self.generating, *fits])
        self._pause(paused)
        decodes = self.decoding.go_on()
        return self.batch.rows(fits, decodes), decodes

    def _one_by_one(self) -> Rows:
        self.decoding.split()
        fits, paused = self.capacity.one_by_one(self.generating, self.contexts)
        self._observer.fitting(fits)
        self._pause(paused)
        return self.batch.rows(fits, 0)

    def _pause(self, paused: list[Request]) -> None:
        """Preempt requests, which keep their positions. Tokens in flight are delivered."""
        if not paused:
            return
        for request in paused:
            self.capacity.reserved -= self.capacity.whole(request)
            self.decoding.preempt(request, drop_in_flight=False)
            del self.running[request]
        self.contexts = dict.fromkeys(sorted({**self.contexts, **dict.fromkeys(paused)}, key=by_order))

    def _chunks(self, rows: Rows) -> dict[Request, Chunk]:
        """Return the rows: prompts first, then generating requests, which get blocks before them."""
        pool, decoding = self.pool, self.decoding
        contexts, generates = rows
        generating: dict[Request, Chunk] = {}
        for request in generates:
            blocks = pool.grow(request, missing) if (missing := pool.missing(request, request.computed + 1)) else ()
            generating[request] = decoding.row(request, 1, blocks)
        chunks: dict[Request, Chunk] = {}
        for request, tokens in contexts:
            blocks = ()
            if request.status is Status.WAITING:
                self.capacity.reserved += self.capacity.whole(request)
                decoding.admit(request)
                self.running[request] = None
                blocks = pool.grow(request, pool.blocks_for(request.target))
            chunks[request] = decoding.row(request, tokens, blocks)
        return chunks | generating

    def _finish(self, request: Request, reason: Finish) -> None:
        if request.status is Status.WAITING and request not in self.contexts:
            self.queue.remove(request)
        self.contexts.pop(request, None)
        if request in self.running:
            del self.running[request]
            self.capacity.reserved -= self.capacity.whole(request)
        self.decoding.end(request, reason)


TRTLLM = SchedulerKind(
    name="trtllm",
    about="TensorRT-LLM: cache to the end, or the last started is paused, or static; in-flight batching",
    settings=TrtllmSettings,
    resolve=resolve,
    make=TrtllmScheduler,
    block_size=32,
    serves=(Sight.FULL, Sight.SLIDING),
    whole=True,  # without max_attention_window, which has no default
    balance=lambda _: "fewest tokens",
)
