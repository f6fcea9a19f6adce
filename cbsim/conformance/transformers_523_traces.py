"""Golden traces of transformers' continuous batching, 5.23. Its cache has sectors, and with layers of several kinds a
table and blocks per kind. This file also decides by the header which traces of transformers are compared, and how.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbsim.conformance import reader, transformers_traces
from cbsim.conformance.reader import Case, Line, Reader, header_fields, not_followed, not_modelled
from cbsim.conformance.transformers_traces import Events, NamedByContent, TransformersReplay, WatchedTransformers
from cbsim.kv.blocks import BlockPool
from cbsim.kv.keys import Keys
from cbsim.kv.sectors import HostSectors, KindSectors, SectorPool, Sectors
from cbsim.kv.table_pools import KindPool
from cbsim.policy.groups import Sight
from cbsim.policy.observer import Observer
from cbsim.policy.request import Request, RequestSpec
from cbsim.schedulers.transformers.scheduler import Step, TransformersScheduler
from cbsim.schedulers.transformers.scheduler_523 import KindsOfLayers, Transformers523
from cbsim.schedulers.transformers.settings import VERSIONS, TransformersOptions, cut
from cbsim.workload.scheduler_tests import unsupported

KIND = transformers_traces.KINDS[Sight.FULL]
FOLLOWED = (*VERSIONS, "5.24")  # 5.24 decides as 5.23 does
TRASH = 2  # leading sectors that are never claimed
OPTIONS = frozenset(["block_size", "num_blocks", "scheduler_type", "cpu_offload_space", *transformers_traces.SETTINGS])


class SectorEvents(Events):
    """The events of 5.23: allocations name tokens and sectors, and a preempted request is freed twice."""

    def __init__(self, options: TransformersOptions, names: list[str]) -> None:
        super().__init__(options, names)
        self.tokens = 1  # tokens of the row that needs blocks
        self._stack: list[int] = []  # the free blocks before some are taken
        self._taking = self._setting_back = False

    @property
    def sectors(self) -> Sectors | KindSectors:
        pool = self.scheduler.pool
        assert isinstance(pool, SectorPool | KindPool)
        return pool.sectors

    def growing(self, request: Request, count: int) -> None:
        del request, count
        if not self._taking:
            self._stack = list(self.sectors.stack)
        self._taking = True

    def grew(self, request: Request, blocks: Sequence[int]) -> None:
        tables = self._by_group(self._grown, blocks)
        if tables is not None:
            self._taking = False
            claimed = self._stack[len(self.sectors.stack) :][::-1]
            self.note("alloc", request, tokens=self.tokens, blocks=tables, sectors=claimed)

    def lacked(self, request: Request, blocks: int) -> None:
        del blocks
        self.note("alloc_fail", request, tokens=self.tokens, free_sectors=len(self.sectors.stack))

    def evicted(self, blocks: Sequence[int]) -> None:
        self.note("evict_all_cached", blocks=list(blocks))

    def reclaiming(self, starved: Sequence[Request]) -> None:
        super().reclaiming(starved)
        self._setting_back = True

    def released(self, request: Request, blocks: Sequence[int]) -> None:
        lines = len(self.lines)
        super().released(request, blocks)
        if self._setting_back and len(self.lines) > lines:
            self.lines[-1]["no_cache"] = True

    def reclaimed(self, victims: Sequence[Request]) -> None:
        super().reclaimed(victims)
        self._setting_back = False
        for request in victims:
            self.note("free", request, blocks=[])


class FullKeys(transformers_traces.CountedKeys):
    """The counting rule of 5.23: blocks with keys are skipped, and no block gets a key before it is full."""

    def reach(self, request: Request, count: int) -> int:
        pool = self.pool
        for i, block in enumerate(pool.tables[request]):
            if pool.key_of(block) is not None:
                continue
            if not count or (i + 1) * pool.block_size > request.known:
                return i
            count -= 1
        return pool.allocated(request)


class ContentSectors(NamedByContent, SectorPool):
    """A pool keyed by content, for layers that all have full attention."""


class WatchedSectors(WatchedTransformers, Transformers523):
    """The rules of 5.23 with their defects; but the host counts its missing sectors after it has reclaimed some."""

    events = SectorEvents
    heard: SectorEvents

    def make_pool(self, observer: Observer) -> BlockPool:
        o = self.options
        pool = ContentSectors(o.block_size, o.num_blocks, self.make_sectors(TRASH), observer)
        pool.workload = self.workload
        return pool

    def make_keys(self) -> Keys:
        return FullKeys(self.pool, self)

    def _fits(self, request: Request, step: Step) -> bool:
        return TransformersScheduler._fits(self, request, step)

    def _allocate(self, request: Request, step: Step) -> list[int] | None:
        self.heard.tokens = self._query(request, step)
        blocks = super()._allocate(request, step)
        self.heard.tokens = 1
        return blocks


class WatchedKinds(WatchedSectors, KindsOfLayers):
    """The watched scheduler for layers of several kinds."""

    def make_pool(self, observer: Observer) -> BlockPool:
        o = self.options
        return KindPool(o.groups, o.block_size, o.num_blocks, self.make_kinds(TRASH), observer)

    def make_keys(self) -> Keys:
        return KindsOfLayers.make_keys(self)


class SectorsReplay(TransformersReplay):
    """The replay of one workload and mode of 5.23."""

    scheduler: WatchedSectors
    scheduler_type = WatchedSectors
    _kinds: Sequence[str] = (KIND,)

    def resolve(self, resolved: Line, workload: Line) -> Line:
        if not transformers_traces.several_kinds(workload):
            per = resolved["blocks_per_sector"][KIND]
            sizes = {"block_size": resolved["page_size"][KIND], "blocks_per_sector": per}
            return resolved | sizes | _on_host(resolved, per)
        self.scheduler_type = WatchedKinds
        [size] = set(resolved["page_size"].values())
        made = cut(transformers_traces.sights(workload["model"]), size, "5.23")
        self._kinds = [transformers_traces.KINDS[group.attention.sight] for group in made.groups]
        self._names = self._kinds if len(self._kinds) > 1 else []
        per = made.per_sector(made.layers * size * transformers_traces.TOKEN_BYTES // 2)
        sizes = {"block_size": size, "layer_groups": made.groups, "blocks_per_sector": per, "cpu_blocks": 0}
        sizes["max_blocks_per_request"] = 0  # no fast path, whatever the header says
        return resolved | sizes | {"num_blocks": resolved["num_sectors"] * per} | _on_host(resolved, per)

    def _by_kind(self, sectors: Sectors | KindSectors) -> dict[str, Sectors]:
        kinds = sectors.kinds if isinstance(sectors, KindSectors) else [sectors]
        return dict(zip(self._kinds, kinds, strict=True))

    def _free(self) -> Line:
        pool, sectors = self.scheduler.pool, self.scheduler.heard.sectors
        stack, kinds = sectors.stack, self._by_kind(sectors)
        trees = {name: {str(at): list(blocks) for at, blocks in kind.trees.items()} for name, kind in kinds.items()}
        return {
            "free_sectors": len(stack),
            "free_blocks": {name: kind.claimed_free for name, kind in kinds.items()},
            "cached": {name: len(kind.cached) for name, kind in kinds.items()},
            "free_fraction": round(pool.ready / pool.num_blocks, 6),
            "free_sector_order": list(stack),
            "free_block_trees": trees,
            "cached_order": {name: list(kind.cached) for name, kind in kinds.items()},
        }

    def _host(self) -> Line:
        host = self.scheduler.host
        if "cpu_sectors" not in self.resolved:
            return {}
        sectors = host.places
        assert isinstance(sectors, HostSectors)
        tables = {
            r.spec.id: dict(zip(self._kinds, map(list, tables), strict=True)) for r, tables in host.tables.items()
        }
        free = {name: kind.claimed_free for name, kind in self._by_kind(sectors).items()}
        return {"cpu": {"free_sectors": list(sectors.stack), "free_blocks": free, "held": tables}}

    def _completes(self, spec: RequestSpec, start: int, tokens: int) -> Any:
        """Return the number of blocks that a row completes; an empty dict if none or with windows."""
        return {} if self.scheduler.options.groups else super()._completes(spec, start, tokens) or {}


def _on_host(resolved: Line, per_sector: int) -> Line:
    """Return the number of host blocks, if the trace states the host's sectors."""
    return {"cpu_blocks": resolved["cpu_sectors"] * per_sector} if "cpu_sectors" in resolved else {}


def comparable(line: Line) -> Line:
    """Return the line with its free lists, some of which were recorded too late, cut at the first block of a table."""
    for state in (line.get("after_schedule"), line.get("after_update")):
        if not isinstance(state, dict) or len(trees := state.get("free_block_trees", {})) < 2:
            continue
        tables = [table for table in state.get("block_tables", {}).values() if isinstance(table, dict)]
        for kind, sectors in trees.items():
            used = {block for table in tables for block in table.get(kind, ())}
            for sector, blocks in sectors.items():
                later = next((i for i, block in enumerate(blocks) if block in used), len(blocks))
                sectors[sector] = blocks[:later]
    return line


def case(trace: Path, header: Line) -> Case:
    (resolved,) = header_fields(trace, header, resolved=dict)
    (version,) = header_fields(trace, resolved, transformers=str)
    skipped = not_followed(version, FOLLOWED)
    if not skipped:
        recorded = reader.workload(trace, reader.stem(trace))
        (cb,) = header_fields(trace, recorded, cb=dict)
        skipped = not_modelled(cb, OPTIONS) or unsupported(recorded)
    replay = TransformersReplay if version.startswith("5.17.") else SectorsReplay
    mode = "async" if resolved.get("async") else "sync"
    return Case("transformers", version, mode, skipped, lambda recorded: replay(header, recorded))


READER = Reader(lambda header: header.get("header") is True, case, comparable, (None,))
