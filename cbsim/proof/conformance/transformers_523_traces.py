"""Golden traces of transformers' continuous batching, 5.23: what its lines say otherwise than those of 5.17.

Its cache has sectors and pages, for each kind of layers; here there is one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cbsim.policy.blocks import BlockPool
from cbsim.policy.observer import Observer
from cbsim.policy.request import Request, RequestSpec
from cbsim.policy.schedulers.transformers_settings import TransformersOptions
from cbsim.policy.schedulers.transformers_step import Step
from cbsim.policy.sectors import HostSectors, KindSectors, SectorPool, Sectors
from cbsim.policy.table_pools import KindPool
from cbsim.proof.conformance.defects import DefectiveSectors
from cbsim.proof.conformance.transformers_traces import (
    Events,
    Line,
    TransformersReplay,
    TransformersWorkload,
    WatchedTransformers,
)

KIND = "full_attention"
TRASH = 2  # sectors in front that are never claimed


class SectorEvents(Events):
    """Allocations name tokens and sectors, and who is set back is freed twice."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.sectors: Sectors | KindSectors = Sectors([], 1)  # the scheduler's, once there is one
        self.tokens = 1  # of the row that blocks are wanted for
        self._stack: list[int] = []  # before blocks are taken
        self._setting_back = False

    def watch(self, scheduler: WatchedTransformers) -> None:
        super().watch(scheduler)
        assert isinstance(scheduler.pool, SectorPool | KindPool)
        self.sectors = scheduler.pool.sectors

    def growing(self, request: Request, count: int) -> None:
        del request, count
        self._stack = list(self.sectors.stack)

    @property
    def claimed(self) -> list[int]:
        """Sectors, since blocks are being taken."""
        return self._stack[len(self.sectors.stack) :][::-1]

    def grew(self, request: Request, blocks: Sequence[int]) -> None:
        self.note("alloc", request, tokens=self.tokens, blocks=list(blocks), sectors=self.claimed)

    def lacked(self, request: Request, blocks: int) -> None:
        del blocks
        self.note("alloc_fail", request, tokens=self.tokens, free_sectors=len(self.sectors.stack))

    def evicted(self, blocks: Sequence[int]) -> None:
        self.note("evict_all_cached", blocks=list(blocks))

    def reclaiming(self, starved: Sequence[Request]) -> None:
        super().reclaiming(starved)
        self._setting_back = True

    def released(self, request: Request, blocks: Sequence[int]) -> None:
        super().released(request, blocks)
        if self._setting_back:
            self.lines[-1]["no_cache"] = True

    def reclaimed(self, victims: Sequence[Request]) -> None:
        super().reclaimed(victims)
        self._setting_back = False
        for request in victims:
            self.note("free", request, blocks=[])


class SectorTextPool(SectorPool):
    """Keys are ids of the very text that the original hashes."""

    def __init__(
        self, options: TransformersOptions, sectors: Sectors, observer: Observer, workload: TransformersWorkload
    ) -> None:
        super().__init__(options.block_size, options.num_blocks, sectors, observer)
        self._workload = workload

    def key(self, request: Request, block: int) -> int:
        return self._workload.key(request, block)


class WatchedSectors(WatchedTransformers, DefectiveSectors):
    """The scheduler of 5.23, and all that is heard of it."""

    heard: SectorEvents

    def make_events(self, block_size: int) -> SectorEvents:
        return SectorEvents(block_size)

    def make_pool(self, observer: Observer) -> BlockPool:
        return SectorTextPool(self.options, self.make_sectors(TRASH), observer, self._workload)

    def _allocate(self, request: Request, step: Step) -> list[int] | None:
        self.heard.tokens = self._query(request, step)
        blocks = super()._allocate(request, step)
        self.heard.tokens = 1
        return blocks


class SectorsReplay(TransformersReplay):
    """One workload and mode of 5.23."""

    scheduler: WatchedSectors

    def resolve(self, resolved: Line, workload: Line) -> Line:
        del workload
        sizes = {"block_size": resolved["page_size"][KIND], "blocks_per_sector": resolved["blocks_per_sector"][KIND]}
        if "cpu_sectors" in resolved:
            sizes["cpu_blocks"] = resolved["cpu_sectors"] * sizes["blocks_per_sector"]
        return resolved | sizes

    def make_scheduler(self, options: TransformersOptions, workload: TransformersWorkload) -> WatchedSectors:
        return WatchedSectors(options, workload)

    def check(self) -> None:
        super().check()
        self.scheduler.pool.check()

    def _free(self) -> Line:
        pool = self.scheduler.pool
        assert isinstance(pool, SectorPool)
        sectors = pool.sectors
        loose = sectors.ready - len(sectors.stack) * sectors.per
        return {
            "free_sectors": len(sectors.stack),
            "free_blocks": {KIND: loose},
            "cached": {KIND: len(sectors.cached)},
            "free_fraction": round(sectors.ready / self.resolved["num_blocks"], 6),
            "free_sector_order": list(sectors.stack),
            "free_block_trees": {KIND: {str(sector): list(blocks) for sector, blocks in sectors.trees.items()}},
            "cached_order": {KIND: list(sectors.cached)},
        }

    def _host(self) -> Line:
        host = self.scheduler.host
        if "cpu_sectors" not in self.resolved:
            return {}
        assert isinstance(host.places, HostSectors)
        sectors = host.places.sectors
        loose = sectors.ready - len(sectors.stack) * sectors.per
        held = {r.spec.id: {KIND: list(tables[0])} for r, tables in host.held.items()}
        return {"cpu": {"free_sectors": list(sectors.stack), "free_blocks": {KIND: loose}, "held": held}}

    def _completes(self, spec: RequestSpec, start: int, tokens: int) -> Any:
        """For each kind of layers that completes some: the number alone if there is one kind."""
        return super()._completes(spec, start, tokens) or {}
