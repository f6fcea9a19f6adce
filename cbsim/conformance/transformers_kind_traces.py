"""Golden traces of transformers' continuous batching that need more than one table a request: of 5.17 with layers of
several kinds, and of 5.23, whose cache has sectors and pages for each kind of layers. All that is said of tables names
the group: in 5.17 `kind.index`, in 5.23 the kind.

Last, the headers of all traces of transformers: which are compared, and with which replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbsim.conformance.defects import DefectiveSectors
from cbsim.conformance.reader import Case, Line, Reader, fields, guarded, not_followed, not_modelled, stem, workload
from cbsim.conformance.transformers_traces import (
    TOKEN_BYTES,
    Events,
    TransformersReplay,
    TransformersWorkload,
    WatchedTransformers,
)
from cbsim.kv.blocks import BlockPool, CachedLast
from cbsim.kv.keys import Keys
from cbsim.kv.sectors import HostSectors, KindSectors, SectorPool, Sectors
from cbsim.kv.table_pools import KindPool, RingPool
from cbsim.policy.decode_batch import Completion
from cbsim.policy.groups import FULL, Attention, LayerGroup, Sight
from cbsim.policy.observer import Observer
from cbsim.policy.request import Request, RequestSpec
from cbsim.schedulers.transformers.scheduler import Step
from cbsim.schedulers.transformers.scheduler_523 import KindsOfLayers
from cbsim.schedulers.transformers.settings import VERSIONS, TransformersOptions, cut
from cbsim.workload.scheduler_tests import unsupported

KINDS = {Sight.FULL: "full_attention", Sight.SLIDING: "sliding_attention"}


def sights(model: Line) -> list[Attention]:
    """What each layer of a workload's model sees."""
    window = Attention(Sight.SLIDING, model.get("sliding_window") or 1)
    return [FULL if kind == KINDS[Sight.FULL] else window for kind in model["layer_types"]]


def _names(groups: Sequence[LayerGroup], *, numbered: bool) -> list[str]:
    return [KINDS[group.attention.sight] + (f".{g}" if numbered else "") for g, group in enumerate(groups)]


def settled(line: Line) -> Line:
    """Some recorders wrote lists of free blocks down when they had grown further. What came later was in a table still,
    as the same line tells: a list ends where it names such a block.
    """
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


class ByGroup:
    """Lists that are heard group by group, put together under the groups' names."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._lists: list[list[Any]] = []

    def hear(self, part: Sequence[Any]) -> dict[str, list[Any]] | None:
        """Another group's; all of them with the last."""
        self._lists.append(list(part))
        if len(self._lists) < len(self.names):
            return None
        lists, self._lists = self._lists, []
        return dict(zip(self.names, lists, strict=True))

    @property
    def nothing(self) -> dict[str, list[Any]]:
        return {name: [] for name in self.names}


class RingTextPool(RingPool):
    """Keys are ids of the very text that the original hashes."""

    def __init__(self, options: TransformersOptions, observer: Observer, workload: TransformersWorkload) -> None:
        self.free_list = CachedLast(range(options.num_blocks))
        super().__init__(options.groups, options.block_size, options.num_blocks, self.free_list, observer)
        self._workload = workload

    def key(self, request: Request, block: int) -> int:
        return self._workload.key(request, block)


class RingEvents(Events):
    """Of 5.17. Blocks are replaced in tables of layers that see all."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.entries = 0  # wanted
        self._grown, self._freed = ByGroup(), ByGroup()
        self._dedup: dict[str, list[list[int]]] = {}
        self._merged = 0  # groups that have been
        self._full: list[str] = []

    def watch(self, scheduler: WatchedTransformers) -> None:
        super().watch(scheduler)
        assert isinstance(scheduler.pool, RingTextPool)
        self.free_list, groups = scheduler.pool.free_list, scheduler.options.groups
        self._grown.names = self._freed.names = names = _names(groups, numbered=True)
        self._full = [names[g] for g, group in enumerate(groups) if not group.ring]

    def note(self, op: str, request: Request | None = None, **fields: Any) -> Line:
        if op == "free" and not fields["blocks"]:
            fields["blocks"] = self._freed.nothing
        return super().note(op, request, **fields)

    def grew(self, request: Request, blocks: Sequence[int]) -> None:
        tables = self._grown.hear(blocks)
        if tables is not None:
            self.note("alloc", request, n=self.entries, blocks=tables)

    def released(self, request: Request, blocks: Sequence[int]) -> None:
        tables = self._freed.hear(blocks)
        if tables is not None:
            self.note("free", request, blocks=tables)

    def merged(self, request: Request, named: Sequence[int], replaced: Sequence[tuple[int, int]]) -> None:
        hashed, before = (self._hashed, self._replaced) if self._merged else ([], [])
        super().merged(request, named, replaced)
        self._dedup[self._full[self._merged]] = self._replaced
        self._hashed, self._replaced = hashed + self._hashed, before + self._replaced
        self._merged = (self._merged + 1) % len(self._full)

    def completed(self, completion: Completion, over: bool) -> None:
        lines = len(self.lines)
        super().completed(completion, over)
        if len(self.lines) > lines and "dedup" in self.lines[-1]:
            self.lines[-1]["dedup"] = self._grown.nothing | self._dedup
        self._dedup = {}


class WatchedRings(WatchedTransformers):
    """The scheduler of 5.17, and all that is heard of it."""

    heard: RingEvents

    def make_events(self, block_size: int) -> RingEvents:
        return RingEvents(block_size)

    def make_pool(self, observer: Observer) -> BlockPool:
        return RingTextPool(self.options, observer, self._workload)

    def _allocate(self, request: Request, step: Step) -> list[int] | None:
        reach = request.computed + self._query(request, step)
        self.heard.entries = self._table_size(reach) - self.pool.entries(request)
        return super()._allocate(request, step)


class RingsReplay(TransformersReplay):
    """One workload and mode of 5.17."""

    def resolve(self, resolved: Line, workload: Line) -> Line:
        made = cut(sights(workload["model"]), resolved["block_size"], "5.17")
        self._names = _names(made.groups, numbered=True)
        return resolved | {"layer_groups": made.groups}

    def make_scheduler(self, options: TransformersOptions, workload: TransformersWorkload) -> WatchedRings:
        return WatchedRings(options, workload)

    def _named(self, tables: list[list[int]]) -> Any:
        return dict(zip(self._names, (list(table) for table in tables), strict=True))


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
        (sectors,) = host.places.sectors.kinds
        loose = sectors.ready - len(sectors.stack) * sectors.per
        held = {r.spec.id: {KIND: list(tables[0])} for r, tables in host.tables.items()}
        return {"cpu": {"free_sectors": list(sectors.stack), "free_blocks": {KIND: loose}, "held": held}}

    def _completes(self, spec: RequestSpec, start: int, tokens: int) -> Any:
        """For each kind of layers that completes some: the number alone if there is one kind."""
        return super()._completes(spec, start, tokens) or {}


class KindEvents(SectorEvents):
    """Of 5.23."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._grown, self._freed = ByGroup(), ByGroup()
        self._taking = False

    def watch(self, scheduler: WatchedTransformers) -> None:
        super().watch(scheduler)
        self._grown.names = self._freed.names = _names(scheduler.options.groups, numbered=False)

    def note(self, op: str, request: Request | None = None, **fields: Any) -> Line:
        if op == "free" and not fields["blocks"]:
            fields["blocks"] = self._freed.nothing
        return super().note(op, request, **fields)

    def growing(self, request: Request, count: int) -> None:
        if not self._taking:
            super().growing(request, count)
        self._taking = True

    def grew(self, request: Request, blocks: Sequence[int]) -> None:
        tables = self._grown.hear(blocks)
        if tables is not None:
            self._taking = False
            self.note("alloc", request, tokens=self.tokens, blocks=tables, sectors=self.claimed)

    def released(self, request: Request, blocks: Sequence[int]) -> None:
        tables = self._freed.hear(blocks)
        if tables is not None:
            super().released(request, ())
            self.lines[-1]["blocks"] = tables


class WatchedKinds(WatchedSectors, KindsOfLayers):
    """The scheduler of 5.23, and all that is heard of it."""

    heard: KindEvents

    def make_events(self, block_size: int) -> KindEvents:
        return KindEvents(block_size)

    def make_pool(self, observer: Observer) -> BlockPool:
        o = self.options
        return KindPool(o.groups, o.block_size, o.num_blocks, self.make_kinds(TRASH), observer)

    def make_keys(self) -> Keys:
        return KindsOfLayers.make_keys(self)


class KindsReplay(TransformersReplay):
    """One workload and mode of 5.23."""

    def resolve(self, resolved: Line, workload: Line) -> Line:
        [size] = set(resolved["page_size"].values())
        made = cut(sights(workload["model"]), size, "5.23")
        self._kinds = _names(made.groups, numbered=False)
        per = made.per_sector(made.layers * size * TOKEN_BYTES // 2)
        sizes = {
            "block_size": size,
            "layer_groups": made.groups,
            "blocks_per_sector": per,
            "num_blocks": resolved["num_sectors"] * per,
            "cpu_blocks": resolved.get("cpu_sectors", 0) * per,
        }
        return resolved | sizes

    def make_scheduler(self, options: TransformersOptions, workload: TransformersWorkload) -> WatchedKinds:
        return WatchedKinds(options, workload)

    def _named(self, tables: list[list[int]]) -> Any:
        return dict(zip(self._kinds, (list(table) for table in tables), strict=True))

    def _by_kind(self, sectors: KindSectors) -> Line:
        return {"free_blocks": {name: kind.loose for name, kind in zip(self._kinds, sectors.kinds, strict=True)}}

    def _free(self) -> Line:
        pool = self.scheduler.pool
        assert isinstance(pool, KindPool)
        sectors = pool.sectors
        trees = [{str(sector): list(blocks) for sector, blocks in kind.trees.items()} for kind in sectors.kinds]
        return {
            "free_sectors": len(sectors.stack),
            **self._by_kind(sectors),
            "cached": dict.fromkeys(self._kinds, 0),
            "free_fraction": round(sectors.free / pool.num_blocks, 6),
            "free_sector_order": list(sectors.stack),
            "free_block_trees": dict(zip(self._kinds, trees, strict=True)),
            "cached_order": {name: [] for name in self._kinds},
        }

    def _host(self) -> Line:
        host = self.scheduler.host
        if "cpu_sectors" not in self.resolved:
            return {}
        assert isinstance(host.places, HostSectors)
        held = {r.spec.id: self._named(tables) for r, tables in host.tables.items()}
        sectors = host.places.sectors
        return {"cpu": {"free_sectors": list(sectors.stack), **self._by_kind(sectors), "held": held}}

    def _completes(self, spec: RequestSpec, start: int, tokens: int) -> Any:
        del spec, start, tokens
        return {}


OPTIONS = frozenset(
    [
        "block_size",
        "num_blocks",
        "max_batch_tokens",
        "scheduler_type",
        "allow_block_sharing",
        "max_blocks_per_request",
        "safety_margin",
        "max_requests_per_batch",
        "cpu_offload_space",
    ]
)


def case(trace: Path, header: Line) -> Case:
    (resolved,) = fields(trace, header, resolved=dict)
    (version,) = fields(trace, resolved, transformers=str)
    name, mode = stem(trace), "async" if resolved.get("async") else "sync"
    skipped = not_followed(version, VERSIONS)
    if skipped:
        return Case(name, "transformers", version, mode, skipped=skipped)
    given = workload(trace, name)
    (cb,) = fields(trace, given, cb=dict)
    skipped = not_modelled(cb, OPTIONS) or guarded(trace, lambda: unsupported(given))
    if skipped:
        return Case(name, "transformers", version, mode, skipped=skipped)
    kind = _replay(version, given)
    return Case(name, "transformers", version, mode, guarded(trace, lambda: kind(header, given)))


def _replay(version: str, given: Line) -> type[TransformersReplay]:
    """By version, and by whether there are other layers than those that see all."""
    new = version.startswith("5.23.")
    if set(given.get("model", {}).get("layer_types") or ()) - {"full_attention"}:
        return KindsReplay if new else RingsReplay
    return SectorsReplay if new else TransformersReplay


READER = Reader(lambda header: header.get("header") is True, case, settled)
