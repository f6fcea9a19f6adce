"""Hugging Face transformers' continuous batching, 5.23: where it differs from 5.17 (scheduler.py).

The cache is cut in sectors (sectors.py), and gives a request just the blocks that it lacks. Cached blocks are not free:
no waiting request gets them. They are evicted all together, when the margin is breached or a request starves. A full
cache ends no step: a request that does not fit is passed over, so a small one overtakes a large one. Sectors are
reclaimed before a step is planned and before forks, so what is freed in between is not used before.

Layers of several kinds, or with windows, have a block table for each kind (`KindsOfLayers`): the kinds share sectors,
whose blocks are as large as a kind's layers make them. Nothing gets a key then, and nothing is cached.

Rules as in the real scheduler, line by line against its traces.
"""

from __future__ import annotations

from cbsim.kv.blocks import BlockPool
from cbsim.kv.keys import Keys
from cbsim.kv.sectors import HostSectors, KindSectors, SectorPool, Sectors
from cbsim.kv.table_pools import KindPool
from cbsim.policy.groups import Sight
from cbsim.policy.kind import SchedulerKind
from cbsim.policy.observer import NULL_OBSERVER, Observer
from cbsim.policy.request import Request
from cbsim.policy.swapping import Host
from cbsim.policy.value import mypyc_attr
from cbsim.schedulers.transformers import settings
from cbsim.schedulers.transformers.scheduler import Step, TransformersScheduler


@mypyc_attr(allow_interpreted_subclasses=True)
class Transformers523(TransformersScheduler):
    """A policy with transformers 5.23's rules."""

    def __init__(self, options: settings.TransformersOptions, observer: Observer = NULL_OBSERVER) -> None:
        super().__init__(options, observer)
        assert isinstance(self.pool, SectorPool | KindPool)
        self.cache: SectorPool | KindPool = self.pool
        self._max_requests = min(options.max_requests_per_batch, options.max_batch_tokens)
        self._not_looked_up = 1  # the last token is computed
        self._inside = True  # whether the margin was kept when the step began

    def make_pool(self, observer: Observer) -> BlockPool:
        return SectorPool(self.options.block_size, self.options.num_blocks, self.make_sectors(0), observer)

    def make_sectors(self, first: int) -> Sectors:
        """Return the sectors of the cache. The original's first two are only scratch, and never claimed."""
        per = self.options.blocks_per_sector
        return Sectors(list(range(first, first + self.options.num_blocks // per)), per)

    def make_host(self) -> Host:
        o = self.options
        return Host(self.decoding, HostSectors(o.host_blocks, o.pages, o.blocks_per_sector))

    def _attempt(self) -> Step:
        pool = self.cache
        pool.sectors.reclaim()
        self._inside = self._keeps_margin()
        if not self._inside and pool.evict_all():
            pool.sectors.reclaim()
            self._inside = self._keeps_margin()
        return super()._attempt()

    def _keeps_margin(self) -> bool:
        return self.cache.ready / self.options.num_blocks >= self.options.safety_margin

    def _breaches_margin(self, free: int) -> bool:
        """True if the margin was breached when the step began: blocks that it takes itself do not count."""
        return not self._inside

    def _ends_admission(self, request: Request, free: int) -> bool:
        """Return False: others follow, which may fit."""
        return False

    def _table_size(self, tokens: int) -> int:
        return self.pool.blocks_for(tokens)

    def _fits(self, request: Request, step: Step) -> bool:
        """True if the row may read its cache. A row without tokens pays for what it reads: no fast path."""
        if request in self.sampling.samples and request.uncomputed == 1:
            return step.kv >= self._reads(request)
        return super()._fits(request, step)

    def _fork(self) -> None:
        """Share the whole blocks written, with keys or without. Samples without room wait in their order."""
        self.cache.sectors.reclaim()
        for request, samples in self.sampling.take():
            whole = request.computed // self.options.block_size if self.options.allow_block_sharing else 0
            for sample in self._fork_off(request, samples, whole):
                self.waiting[sample] = None

    def _offload(self, step: Step) -> bool:
        """Evict what is cached; then requeue starved requests, newest first, until the blocks suffice for the others.
        Return False if nothing has changed. Requests that fit the host, the newest tried first, keep their KV there.
        """
        self._observer.reclaiming([request for request, _ in step.starved])
        evicted = self.cache.evict_all()
        victims: list[Request] = []
        while len(self.running) > 1 and not self._has_room(step.starved):
            request, _ = step.starved.pop()
            self._set_back(request)
            victims.append(request)
        self._requeue(victims)
        return evicted or bool(victims)

    def _has_room(self, starved: list[tuple[Request, int]]) -> bool:
        """True if all of these could get the blocks that they lack."""
        return sum([needed for _, needed in starved]) <= self.cache.ready


@mypyc_attr(allow_interpreted_subclasses=True)
class KindsOfLayers(Transformers523):
    """A policy with a table for each kind of layers. `num_blocks` counts pages: the largest that make all blocks."""

    def __init__(self, options: settings.TransformersOptions, observer: Observer = NULL_OBSERVER) -> None:
        super().__init__(options, observer)
        assert isinstance(self.pool, KindPool)
        self.kinds: KindPool = self.pool
        self._kv_tokens = options.num_blocks // min(options.pages) * options.block_size  # as if all had smallest blocks

    def make_pool(self, observer: Observer) -> BlockPool:
        o = self.options
        return KindPool(o.groups, o.block_size, o.num_blocks, self.make_kinds(0), observer)

    def make_kinds(self, first: int) -> KindSectors:
        o, count = self.options, self.options.num_blocks // self.options.blocks_per_sector
        return KindSectors(range(first, first + count), o.pages, o.blocks_per_sector)

    def make_keys(self) -> Keys:
        return Keys(self.pool)

    def _most_blocks(self, tokens: int) -> int:
        o, counts = self.options, self.kinds.counts(tokens)
        sectors = [-(-count * o.pages[k] // o.blocks_per_sector) for k, count in enumerate(counts)]
        return sum(sectors) * o.blocks_per_sector

    def _allocate(self, request: Request, step: Step) -> list[int] | None:
        tokens = self._query(request, step)
        if self.kinds.store(request, self.kinds.lacks(request, request.computed + tokens)):
            return []
        self._observer.lacked(request, tokens)
        step.failed = True
        if request in self.running:
            step.starved.append((request, tokens))
        return None

    def _has_room(self, starved: list[tuple[Request, int]]) -> bool:
        lacking = [0] * len(self.options.groups)
        for request, tokens in starved:
            for k, count in enumerate(self.kinds.lacks(request, request.computed + tokens)):
                lacking[k] += count
        return self.kinds.sectors.fits(lacking)

    def _fork_off(self, request: Request, samples: list[Request], whole: int) -> list[Request]:
        for i, sample in enumerate(samples):
            if not self.kinds.sectors.fits(self.kinds.own_blocks(request, whole)):
                return samples[i:]
            self._admit(request, [sample], whole)
        return []


def make(options: settings.TransformersOptions) -> TransformersScheduler:
    if options.version == "5.17":
        return TransformersScheduler(options)
    return KindsOfLayers(options) if options.groups else Transformers523(options)


def _kind(name: str, about: str) -> SchedulerKind[settings.TransformersSettings, settings.TransformersOptions]:
    return SchedulerKind(
        name=name,
        about=f"Hugging Face transformers 5.17, 5.23: {about}",
        settings=settings.TransformersSettings,
        resolve=settings.resolve,
        make=make,
        block_size=256,
        least_block_size=4,
        padding="transformers",
        serves=(Sight.FULL, Sight.SLIDING),
        rings=True,
        memory=settings.MEMORY,
    )


TRANSFORMERS_FIFO = _kind(settings.FIFO, "decoding requests first")
TRANSFORMERS_PREFILL_FIRST = _kind(settings.PREFILL_FIRST, "split prefills first")
