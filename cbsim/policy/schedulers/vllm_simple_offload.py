"""vLLM's SimpleCPUOffloadConnector: the host's tier is a second pool of blocks, found by the same keys.

Eager: blocks are stored once they are computed, those of running requests with every step and the rest when a request
ends. Lazy: blocks are stored when they near the front of the free queue, where they would be handed out next. What is
read or stored on the device has a reference, so it is not handed out meanwhile.
"""

from __future__ import annotations

from abc import abstractmethod

from cbsim.policy.decoding import Decoding
from cbsim.policy.host_blocks import HostBlocks
from cbsim.policy.moves import Move, Way
from cbsim.policy.request import Finish, Request, Status
from cbsim.policy.schedulers.vllm_transfers import Ahead, Rows


class SimpleOffload:
    """What eager and lazy have in common: everything but what is stored. All loads that begin with a step are a job,
    and so are its stores.
    """

    def __init__(self, decoding: Decoding, host: HostBlocks) -> None:
        self.host = host
        self._decoding = decoding
        self._pool = decoding.pool
        self._pins: dict[Request, list[int]] = {}  # host blocks found for requests that do not load yet
        self._jobs = 0
        self._loading: list[tuple[Request, list[int]]] = []  # since the plan before, with the host blocks they read
        self._loads: dict[int, list[tuple[Request, list[int]]]] = {}
        self._stores: dict[int, tuple[list[int], list[int]]] = {}  # device blocks, host blocks

    @property
    def busy(self) -> bool:
        return bool(self._stores)

    # -- loads --------------------------------------------------------------------------------------------------------

    def match(self, request: Request, local: int) -> int | None:
        """Blocks found are pinned until they are asked for again: to try is to use them."""
        self._unpin(request)
        size = self._pool.block_size
        found: list[int] = []
        for i in range(local // size, (request.target - 1) // size):
            block = self.host.find(self._pool.key(request, i))
            if block is None:
                break
            found.append(block)
        if found:
            self.host.pin(found)
            self._pins[request] = found
        return len(found) * size

    def _unpin(self, request: Request) -> None:
        pinned = self._pins.pop(request, None)
        if pinned is not None:
            self.host.put_back(pinned)

    def load(self, request: Request, local: int, external: int) -> None:
        pinned = self._pins.pop(request)
        assert len(pinned) * self._pool.block_size == external, (request.spec.id, len(pinned), external)
        self._loading.append((request, pinned))

    def admitted(self, request: Request) -> None:
        pass

    # -- a step -------------------------------------------------------------------------------------------------------

    def order(self, step: int, ahead: Ahead) -> None:
        """Loads and stores of a step. If somebody was preempted, all that are under way are awaited."""
        if self._decoding.preempted:
            self._decoding.awaited += sorted([*self._loads, *self._stores])
        if self._loading:
            job = self._next_job()
            for request, blocks in self._loading:
                table = self._pool.tables[request]
                targets = tuple(table[len(table) - len(blocks) :])
                self._decoding.moves.append(Move(Way.IN, tuple(blocks), targets, request.spec, job))
            self._loads[job], self._loading = self._loading, []
        sources, places = self._chosen(ahead)
        if sources:
            job = self._next_job()
            self._decoding.moves.append(Move(Way.OUT, tuple(sources), tuple(places), None, job))
            self._stores[job] = sources, places

    def _next_job(self) -> int:
        self._jobs += 1
        return self._jobs - 1

    @abstractmethod
    def _chosen(self, ahead: Ahead) -> tuple[list[int], list[int]]:
        """The blocks that are stored with a step, held, and where to: blocks that were taken."""

    def _known(self, block: int) -> int | None:
        """The key of a block whose content the host lacks; None for every other block."""
        key = self._pool.key_of(block)
        return key if key is not None and self.host.find(key) is None else None

    def ended(self, request: Request, reason: Finish, computed: int) -> bool:
        self._unpin(request)
        return False

    def landed(self, step: int, jobs: list[int]) -> list[Request]:
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
            self.host.fill(target, key)
        self.host.put_back(targets)
        self._pool.let_go(sources)

    def check(self) -> None:
        self.host.check()


class EagerOffload(SimpleOffload):
    """Blocks go to the host as soon as a step that computed them is back."""

    def __init__(self, decoding: Decoding, host: HostBlocks) -> None:
        super().__init__(decoding, host)
        self._cursors: dict[Request, int] = {}  # blocks of a request that have been looked at
        self._underway: set[int] = set()  # device blocks that are being stored
        self._rest: tuple[list[int], list[int]] = ([], [])  # of requests that have ended, for the next step

    @property
    def busy(self) -> bool:
        return bool(self._stores) or bool(self._rest[0])

    def admitted(self, request: Request) -> None:
        self._cursors[request] = 0

    def _chosen(self, ahead: Ahead) -> tuple[list[int], list[int]]:
        sources: list[int] = []
        targets: list[int] = []
        if self.host.free:
            for rows in (ahead.admitted, ahead.running):
                self._choose_all(rows, sources, targets)
        rest, self._rest = self._rest, ([], [])
        return sources + rest[0], targets + rest[1]

    def _choose_all(self, rows: Rows, sources: list[int], targets: list[int]) -> None:
        for request, _ in rows:
            done = (request.computed + request.seen - request.promised) // self._pool.block_size
            if done > self._cursors[request]:
                self._choose(request, done, sources, targets)

    def _choose(self, request: Request, blocks: int, sources: list[int], targets: list[int]) -> None:
        """Of the first `blocks` blocks of a request those that are to be stored. What is passed over is never stored,
        but where the host is full they are looked at again.
        """
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
        """What is left of it goes with the next step; it is held from now on, for its table is given up."""
        keeps = super().ended(request, reason, computed)
        if request.status is not Status.WAITING and self.host.free:
            done = (computed + request.seen - request.promised) // self._pool.block_size
            self._choose(request, done, *self._rest)
        self._cursors.pop(request, None)
        return keeps

    def _stored(self, sources: list[int], targets: list[int]) -> None:
        super()._stored(sources, targets)
        self._underway.difference_update(sources)


class LazyOffload(SimpleOffload):
    """Blocks go to the host when they may be handed out soon."""

    def __init__(self, decoding: Decoding, host: HostBlocks, most: int) -> None:
        """At most `most` blocks of the free queue are looked at in a step."""
        super().__init__(decoding, host)
        self._most = most
        self._cursor = -1  # the last block that was looked at
        self._restless = 0  # blocks stored since the last request ended

    def _chosen(self, ahead: Ahead) -> tuple[list[int], list[int]]:
        """A host smaller than what the device caches never has it all, and a store puts its blocks behind the cursor
        again: left alone, vLLM stores for ever. This ends when as many blocks have been stored as there are.
        """
        self._restless = self._restless if ahead.alone else 0
        if self._restless > self._pool.num_blocks:
            return [], []
        line = self._pool.free_order()
        first = line.index(self._cursor) + 1 if self._cursor in line else 0
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
