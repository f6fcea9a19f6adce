"""vLLM's OffloadingConnector: the host's tier is a cache of chunks, filled with prompts as they are computed.

What is stored has no reference on the device: before a block of an ended request is written again, the jobs that read
it are awaited; so are those of preempted requests. A store that was ordered with the very step that writes its blocks
comes before it, in order.
"""

from __future__ import annotations

from cbsim.policy.decoding import Decoding
from cbsim.policy.host_cache import HostCache, Visitor
from cbsim.policy.moves import IN_ORDER, Move, Way
from cbsim.policy.request import Finish, Request, RequestSpec
from cbsim.policy.schedulers.vllm_transfers import Ahead


class _Owner:
    """A request as the connector sees it. Its chunks before `cursor` are stored, or need not be."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.visitor = Visitor()
        self.cursor = 0
        self.jobs: set[int] = set()
        self.over = False
        self.table: list[int] = []  # once it is over
        self.tokens = 0  # of them that are worth storing, once it is over


class _Job:
    """Chunks on their way; `blocks` are those on the device."""

    def __init__(self, owner: _Owner, keys: list[int], blocks: list[int], *, loads: bool) -> None:
        self.owner = owner
        self.keys = keys
        self.blocks = blocks
        self.loads = loads


class NativeOffload:
    """Chunks of `blocks_per_chunk` blocks, each under the key of its last one. Every load, and what a request stores in
    a step, is a job.
    """

    def __init__(self, decoding: Decoding, cache: HostCache, blocks_per_chunk: int, *, prompts_only: bool) -> None:
        self.cache = cache
        self._decoding = decoding
        self._pool = decoding.pool
        self._blocks = blocks_per_chunk
        self._tokens = blocks_per_chunk * decoding.pool.block_size
        self._prompts_only = prompts_only
        self._owners: dict[RequestSpec, _Owner] = {}
        self._ended: list[_Owner] = []  # since the plan before
        self._jobs: dict[int, _Job] = {}
        self._numbered = 0  # jobs so far
        self._at_once: dict[int, list[int]] = {}  # step -> its stores that are over before its rows
        self._read: dict[int, int] = {}  # chunks that are being loaded, and for how many

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    # -- loads --------------------------------------------------------------------------------------------------------

    def match(self, request: Request, local: int) -> int | None:
        owner = self._owners.setdefault(request.spec, _Owner(request))
        owner.cursor = 0
        if owner.jobs:
            return None
        size, first = self._tokens, local // self._tokens
        last = request.target // size
        if last * size - local < size:
            return 0
        found: list[int] = []
        for chunk in range(first, last):
            key = self._key(request, chunk)
            if not self.cache.has(key):
                break
            found.append(key)
        if [key for key in found if not self.cache.written(key)]:
            return None
        external = (first + len(found)) * size - local
        if not found or external < size:
            return 0
        return None if [key for key in found if key in self._read] else external

    def _key(self, request: Request, chunk: int) -> int:
        return self._pool.key(request, (chunk + 1) * self._blocks - 1)

    def load(self, request: Request, local: int, external: int) -> None:
        owner, pool, per_chunk = self._owners[request.spec], self._pool, self._blocks
        first, end = local // self._tokens, -(-(local + external) // self._tokens)
        keys = [self._key(request, chunk) for chunk in range(first, end)]
        places = self.cache.read(owner.visitor, first, keys)
        blocks = range(local // pool.block_size, (local + external) // pool.block_size)
        sources = [places[block // per_chunk - first] * per_chunk + block % per_chunk for block in blocks]
        targets = pool.tables[request][blocks.start : blocks.stop]
        for key in keys:
            self._read[key] = self._read.get(key, 0) + 1
        owner.cursor = end
        job = self._number(_Job(owner, keys, targets, loads=True))
        self._decoding.moves.append(Move(Way.IN, tuple(sources), tuple(targets), request.spec, job))

    def _number(self, job: _Job) -> int:
        number = self._numbered
        self._numbered += 1
        self._jobs[number] = job
        job.owner.jobs.add(number)
        return number

    def admitted(self, request: Request) -> None:
        pass

    # -- a step -------------------------------------------------------------------------------------------------------

    def order(self, step: int, ahead: Ahead) -> None:
        old = self._numbered
        for request, tokens in [*ahead.running, *ahead.admitted]:
            owner = self._owners[request.spec]
            worth = self._worth(request, request.computed + tokens)
            if worth // self._tokens > owner.cursor:
                self._store(owner, worth, self._pool.tables[request])
        for owner in self._ended:
            self._store(owner, owner.tokens, owner.table)
        for owner in self._ended:
            self.cache.eviction.left(owner.visitor)
        self._ended = []
        flushed = self._flushed(ahead)
        self._decoding.awaited += [number for number in flushed if number < old]
        self._at_once[step] = [number for number in flushed if number >= old]
        for number in range(old, self._numbered):
            self._order(number, IN_ORDER if number in flushed else number)

    def _worth(self, request: Request, tokens: int) -> int:
        """Of so many tokens those that are stored once they are computed."""
        return min(tokens, request.spec.prompt_tokens if self._prompts_only else request.known)

    def _store(self, owner: _Owner, tokens: int, table: list[int]) -> None:
        """Offer the chunks from the cursor on to the cache; if it refuses, they are offered again."""
        last = min(tokens // self._tokens, len(table) // self._blocks)
        if last <= owner.cursor:
            return
        first = owner.cursor
        offered = {self._key(owner.request, chunk): chunk for chunk in range(first, last)}
        new = self.cache.store(owner.visitor, first, list(offered))
        if new is None:
            return
        owner.cursor = last
        if new:
            chunks = [offered[key] * self._blocks for key in new]
            blocks = [block for at in chunks for block in table[at : at + self._blocks]]
            self._number(_Job(owner, new, blocks, loads=False))

    def _order(self, number: int, job: int) -> None:
        stored, per_chunk = self._jobs[number], self._blocks
        if stored.loads:
            return
        places = [place * per_chunk + i for place in self.cache.places(stored.keys) for i in range(per_chunk)]
        move = Move(Way.OUT, tuple(stored.blocks), tuple(places), stored.owner.request.spec, job)
        self._decoding.moves.append(move)

    def _flushed(self, ahead: Ahead) -> list[int]:
        """Jobs that have to be over before the step's rows write: those of preempted requests, and those that read a
        block that an ended request has left and somebody has got.
        """
        flushed: set[int] = set()
        for preempted in self._decoding.preempted:
            flushed.update(self._owners[preempted.spec].jobs)
        left = [number for number, job in self._jobs.items() if job.owner.over]
        if left:
            tables = [self._pool.tables[request] for request in [*(r for r, _ in ahead.admitted), *ahead.loading]]
            given = {*ahead.given, *[block for table in tables for block in table]}
            flushed.update([number for number in left if not given.isdisjoint(self._jobs[number].blocks)])
        return sorted(flushed)

    def ended(self, request: Request, reason: Finish, computed: int) -> bool:
        owner = self._owners.pop(request.spec, None)
        if owner is None:
            return False
        owner.over = True
        owner.table = list(self._pool.tables.get(request, ()))
        tokens = computed if reason is Finish.ABORTED else max(request.spec.prompt_tokens, request.known - 1)
        owner.tokens = self._worth(request, tokens)
        self._ended.append(owner)
        return False

    def landed(self, step: int, jobs: list[int]) -> list[Request]:
        loaded: list[Request] = []
        for number in sorted({*jobs, *self._at_once.pop(step, ())}):
            job = self._jobs.pop(number, None)
            if job is None:
                continue
            job.owner.jobs.remove(number)
            if job.loads:
                self.cache.has_read(job.keys)
                self._forget(job.keys)
                loaded.append(job.owner.request)
            else:
                self.cache.has_written(job.keys)
        return loaded

    def _forget(self, keys: list[int]) -> None:
        for key in keys:
            self._read[key] -= 1
            if not self._read[key]:
                del self._read[key]

    def check(self) -> None:
        self.cache.check()
