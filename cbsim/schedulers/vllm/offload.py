"""The two connectors of vLLM that keep KV on the host: SimpleCPUOffloadConnector and OffloadingConnector."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from itertools import count
from typing import NamedTuple

from cbsim.kv.host_cache import HostBlocks, HostCache, Visitor
from cbsim.policy.decoding import Decoding
from cbsim.policy.request import Finish, Request, RequestSpec, Status
from cbsim.policy.transfers import IN_ORDER, Direction, Transfer
from cbsim.schedulers.vllm.transfers import Ahead


class SimpleOffload:
    """The SimpleCPUOffloadConnector: the host's tier is a second pool of blocks, found by the same keys.

    Eager and lazy have everything in common but the choice of stored blocks. All loads that begin with a step are a
    job, and so are its stores. What is read or stored on the device has a reference, so it is not handed out meanwhile.
    """

    def __init__(self, decoding: Decoding, host: HostBlocks) -> None:
        self.host = host
        self._decoding = decoding
        self._pool = decoding.pool
        self._pins: dict[Request, list[int]] = {}  # host blocks found for requests that do not load yet
        self._jobs = count()
        self._loading: list[tuple[Request, list[int]]] = []  # since the plan before, with the host blocks they read
        self._loads: dict[int, list[tuple[Request, list[int]]]] = {}
        self._stores: dict[int, tuple[list[int], list[int]]] = {}  # device blocks, host blocks

    @property
    def busy(self) -> bool:
        return bool(self._stores)

    def match(self, request: Request, local: int) -> int | None:
        """Find blocks and pin them until the next lookup of the request: a trial counts as a use."""
        self._unpin(request)
        size = self._pool.block_size
        hits: list[int] = []
        for i in range(local // size, (request.target - 1) // size):
            block = self.host.oldest(self._pool.key(request, i))
            if block is None:
                break
            hits.append(block)
        if hits:
            self.host.pin(hits)
            self._pins[request] = hits
        return len(hits) * size

    def _unpin(self, request: Request) -> None:
        pinned = self._pins.pop(request, None)
        if pinned is not None:
            self.host.put_back(pinned)

    def load(self, request: Request, local: int, external: int) -> None:
        pinned = self._pins.pop(request)
        assert len(pinned) * self._pool.block_size == external, (request.spec.id, len(pinned), external)
        self._loading.append((request, pinned))

    def order(self, step: int, ahead: Ahead) -> None:
        """Order the loads and stores of a step. If a request was preempted, all that are under way are awaited."""
        if self._decoding.preempted:
            self._decoding.awaited += sorted([*self._loads, *self._stores])
        if self._loading:
            job = next(self._jobs)
            for request, blocks in self._loading:
                table = self._pool.tables[request]
                targets = tuple(table[len(table) - len(blocks) :])
                self._decoding.transfers.append(Transfer(Direction.IN, tuple(blocks), targets, request.spec, job))
            self._loads[job], self._loading = self._loading, []
        sources, places = self._chosen(ahead)
        if sources:
            job = next(self._jobs)
            self._decoding.transfers.append(Transfer(Direction.OUT, tuple(sources), tuple(places), None, job))
            self._stores[job] = sources, places

    @abstractmethod
    def _chosen(self, ahead: Ahead) -> tuple[list[int], list[int]]:
        """Return the blocks that are stored with a step, referred to, and the host blocks taken for them."""

    def _known(self, block: int) -> int | None:
        """Return the key of a block whose content the host lacks; None for every other block."""
        key = self._pool.key_of(block)
        return key if key is not None and self.host.oldest(key) is None else None

    def ended(self, request: Request, reason: Finish, computed: int) -> bool:
        self._unpin(request)
        return False

    def completed(self, step: int, jobs: list[int]) -> list[Request]:
        loaded: list[Request] = []
        jobs = sorted(jobs)
        for job in jobs:
            for request, blocks in self._loads.pop(job, ()):
                self.host.put_back(blocks)
                loaded.append(request)
        for job in jobs:
            stored = self._stores.pop(job, None)
            if stored is not None:
                self._stored(*stored)
        return loaded

    def _stored(self, sources: list[int], targets: list[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            key = self._pool.key_of(source)
            assert key is not None, ("a block was handed out while it was stored", source)
            self.host.filled(target, key)
        self.host.put_back(targets)
        self._pool.let_go(sources)

    def check(self) -> None:
        self.host.check()


class EagerOffload(SimpleOffload):
    """An offload of blocks once they are computed: with every step, and the rest when a request ends."""

    def __init__(self, decoding: Decoding, host: HostBlocks, *, ahead: bool) -> None:
        """Make the rules. `ahead`: steps are planned while others are in flight, whose tokens are not stored yet."""
        super().__init__(decoding, host)
        self._ahead = ahead
        self._cursors: dict[Request, int] = {}  # blocks of a request that have been considered
        self._underway: set[int] = set()  # device blocks that are being stored
        self._rest: tuple[list[int], list[int]] = ([], [])  # of requests that have ended, for the next step

    @property
    def busy(self) -> bool:
        return bool(self._stores) or bool(self._rest[0])

    def _chosen(self, ahead: Ahead) -> tuple[list[int], list[int]]:
        sources: list[int] = []
        targets: list[int] = []
        self._cursors.update(dict.fromkeys([request for request, _ in ahead.admitted], 0))
        new = [row for row in ahead.admitted if not row[0].preemptions]
        resumed = [row for row in ahead.admitted if row[0].preemptions]
        for request, _ in (*new, *resumed, *ahead.running):
            done = self._done(request, request.computed)
            if done > self._cursors[request]:
                self._choose(request, done, sources, targets)
        rest, self._rest = self._rest, ([], [])
        return sources + rest[0], targets + rest[1]

    def _done(self, request: Request, computed: int) -> int:
        """Return the blocks that `computed` tokens fill, without the tokens in flight that were planned ahead."""
        in_flight = request.scheduled - request.seen if self._ahead else 0
        return (computed - in_flight) // self._pool.block_size

    def _choose(self, request: Request, blocks: int, sources: list[int], targets: list[int]) -> None:
        """Choose the blocks to store among the first `blocks` of a request. Those passed over are never stored, but
        where the host is full they are considered again.
        """
        if not self.host.free:
            return
        table, cursor = self._pool.tables[request], self._cursors[request]
        chosen: list[int] = []
        for block in table[cursor:blocks]:
            if block not in self._underway and self._known(block) is not None:
                if len(chosen) == self.host.free:
                    break
                chosen.append(block)
            cursor += 1
        self._cursors[request] = cursor
        self._underway.update(chosen)
        self._pool.hold(chosen)
        sources += chosen
        targets += self.host.take(len(chosen))

    def ended(self, request: Request, reason: Finish, computed: int) -> bool:
        """Store the rest with the next step; take references now, for the table is about to be freed."""
        keeps = super().ended(request, reason, computed)
        if request.status is not Status.WAITING:
            self._choose(request, self._done(request, computed), *self._rest)
        self._cursors.pop(request, None)
        return keeps

    def _stored(self, sources: list[int], targets: list[int]) -> None:
        super()._stored(sources, targets)
        self._underway.difference_update(sources)


class LazyOffload(SimpleOffload):
    """An offload of blocks when they may be handed out soon."""

    def __init__(self, decoding: Decoding, host: HostBlocks, most: int) -> None:
        """Consider at most `most` blocks of the free queue in a step."""
        super().__init__(decoding, host)
        self.most_restless = decoding.pool.num_blocks
        self._most = most
        self._cursor = -1  # the last block considered
        self._restless = 0  # blocks stored since the last request ended

    def _chosen(self, ahead: Ahead) -> tuple[list[int], list[int]]:
        """Choose blocks of the free queue. A host smaller than the device's cache never has it all, and a store puts
        its blocks behind the cursor again: vLLM stores for ever. Here it ends after as many stores as there are blocks.
        """
        line = self._pool.free_order()
        if self._cursor not in line:
            self._cursor = -1  # a block in use is no place to go on from, also when it is free again
        self._restless = self._restless if ahead.alone else 0
        if self._restless > self.most_restless:
            return [], []
        first = line.index(self._cursor) + 1 if self._cursor >= 0 else 0
        sources: list[int] = []
        for block in line[first : first + self._most]:
            if len(sources) == self.host.free:
                break
            self._cursor = block
            if self._known(block) is not None:
                sources.append(block)
        self._pool.hold(sources)
        self._restless += len(sources)
        return sources, self.host.take(len(sources))


class _Owner:
    """A request in the connector's terms. Its chunks before `cursor` are stored, or need not be."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.visitor = Visitor()
        self.cursor = 0
        self.jobs: set[int] = set()
        self.over = False
        self.table: list[int] = []  # its block table, once it is over
        self.tokens = 0  # its tokens that are worth storing, once it is over


class _Job(NamedTuple):
    """A transfer of chunks; `blocks` are those on the device."""

    owner: _Owner
    keys: list[int]
    blocks: list[int]
    loads: bool


class NativeOffload:
    """The OffloadingConnector: the host's tier is a cache of chunks, filled with prompts as they are computed.

    A chunk has `blocks_per_chunk` blocks and the key of its last one. Every load, and what a request stores in a step,
    is a job. What is stored has no reference on the device: before a block of an ended request is written again, the
    jobs that read it are awaited; so are those of preempted requests. A store that was ordered with the very step that
    writes its blocks comes before it, in order.
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
        self._read: Counter[int] = Counter()  # chunks that are being loaded, and by how many requests

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def match(self, request: Request, local: int) -> int | None:
        owner = self._owners.setdefault(request.spec, _Owner(request))
        owner.cursor = 0
        if owner.jobs:
            return None
        size, first = self._tokens, local // self._tokens
        last = request.target // size
        if last * size - local < size:
            return 0
        hits: list[int] = []
        for chunk in range(first, last):
            key = self._key(request, chunk)
            if not self.cache.has(key):
                break
            hits.append(key)
        if [key for key in hits if not self.cache.written(key)]:
            return None
        external = (first + len(hits)) * size - local
        if not hits or external < size:
            return 0
        return None if [key for key in hits if key in self._read] else external

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
        self._read.update(keys)
        owner.cursor = end
        job = self._number(_Job(owner, keys, targets, loads=True))
        self._decoding.transfers.append(Transfer(Direction.IN, tuple(sources), tuple(targets), request.spec, job))

    def _number(self, job: _Job) -> int:
        number = self._numbered
        self._numbered += 1
        self._jobs[number] = job
        job.owner.jobs.add(number)
        return number

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
        """Return how many of `tokens` tokens are stored once they are computed."""
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
        places = [chunk * per_chunk + i for chunk in self.cache.places(stored.keys) for i in range(per_chunk)]
        transfer = Transfer(Direction.OUT, tuple(stored.blocks), tuple(places), stored.owner.request.spec, job)
        self._decoding.transfers.append(transfer)

    def _flushed(self, ahead: Ahead) -> list[int]:
        """Return the jobs that have to be over before the step's rows write: those of preempted requests, and those
        that read a block that an ended request has left and another has got.
        """
        flushed: set[int] = set()
        for preempted in self._decoding.preempted:
            flushed.update(self._owners[preempted.spec].jobs)
        left = [number for number, job in self._jobs.items() if job.owner.over]
        if left:
            tables = [self._pool.tables[request] for request in [*(r for r, _ in ahead.admitted), *ahead.loading]]
            written = {*ahead.grown, *[block for table in tables for block in table]}
            flushed.update([number for number in left if not written.isdisjoint(self._jobs[number].blocks)])
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

    def completed(self, step: int, jobs: list[int]) -> list[Request]:
        loaded: list[Request] = []
        for number in sorted({*jobs, *self._at_once.pop(step, ())}):
            job = self._jobs.pop(number, None)
            if job is None:
                continue
            job.owner.jobs.remove(number)
            if job.loads:
                self.cache.has_read(job.keys)
                self._read -= Counter(job.keys)
                loaded.append(job.owner.request)
            else:
                self.cache.has_written(job.keys)
        return loaded

    def check(self) -> None:
        self.cache.check()
