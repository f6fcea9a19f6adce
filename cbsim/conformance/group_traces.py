"""Layer groups in format 3 of vLLM's traces: the groups, and an entry per group where other formats have one entry."""

from __future__ import annotations

from typing import Any

from cbsim.conformance.reader import Line
from cbsim.kv.group_pool import GroupPool
from cbsim.kv.layer_groups import Grouping, LayerKind, grouped, rules, units
from cbsim.policy.groups import FULL, Attention, Sight
from cbsim.policy.observer import Observer
from cbsim.policy.plan import Row, StepPlan
from cbsim.policy.request import Request, RequestSpec
from cbsim.schedulers.vllm.scheduler import VllmScheduler

SPANS = {Sight.SLIDING: "window", Sight.CHUNKED: "chunk"}


def grouping(config: Line) -> Grouping | None:
    """Return the groups of a workload's layers; None if it names no layers."""
    if "layers" not in config:
        return None
    size = config["block_size"]
    layers = [LayerKind(_attention(layer), _page_bytes(layer, size)) for layer in config["layers"]]
    return grouped(layers, size, together=config.get("disable_hybrid", False))


def options(config: Line) -> Line:
    """Return the scheduler options that follow from a workload's layers."""
    made = grouping(config)
    if made is None:
        return {"num_blocks": config["num_blocks"]}
    blocks = config["num_blocks"] if "num_blocks" in config else config["kv_bytes"] // made.block_bytes
    retention = config.get("retention", 0)
    return {"num_blocks": blocks, "groups": made.groups, "prefix_cache_retention_interval": retention}


def _attention(layer: Line) -> Attention:
    sight = Sight(layer["kind"])
    return Attention(sight, layer[SPANS[sight]]) if sight in SPANS else FULL


def _page_bytes(layer: Line, block_size: int) -> int:
    return int(4 * block_size * layer.get("kv_heads", 4) * layer.get("head_size", 16))


class GroupsHeard(Observer):
    """An observer of blocks that left tables of groups since the last plan, and of released tables' block counts."""

    def __init__(self) -> None:
        self.dropped: list[Line | list[Any]] = []
        self.tables: dict[Request, list[int]] = {}

    def left(self, request: Request, group: int, blocks: Any) -> None:
        self.dropped.append([request.spec.id, group, list(reversed(blocks))])

    def released(self, request: Request, blocks: Any) -> None:
        self.tables.setdefault(request, []).append(len(blocks))


class GroupLines:
    """The fields of a scheduler with groups in trace lines. A plain cache is one of a single group."""

    def __init__(self, scheduler: VllmScheduler, heard: GroupsHeard, config: Line) -> None:
        self._scheduler = scheduler
        self._heard = heard
        self._config = config

    def effective(self) -> Line:
        """Return the header's fields on groups and sizes, without the layout of tensors."""
        o, made = self._scheduler.options, grouping(self._config)
        assert made is not None
        unit = units(made.groups, caching=o.enable_prefix_caching)
        of = rules(
            made.groups,
            retention=o.prefix_cache_retention_interval,
            in_flight=o.most_in_flight,
            longest=o.max_model_len,
        )
        groups = []
        for rule in of:
            group = rule.group
            layers = [self._config["layers"][layer] for layer in group.layers]
            line = {"kind": group.attention.sight.value, "block_size": group.block_size, "layers": list(group.layers)}
            line["page_bytes"] = _page_bytes(layers[0], group.block_size)
            if not rule.full:
                line |= {SPANS[group.attention.sight]: group.attention.span, "admission_cap": rule.most}
            groups.append(line)
        several = "HybridKVCacheCoordinator" if len(groups) > 1 else "UnitaryKVCacheCoordinator"
        return {
            "coordinator": several if o.enable_prefix_caching else "KVCacheCoordinatorNoPrefixCache",
            "groups": groups,
            "num_blocks": o.num_blocks,
            "scheduler_block_size": unit.prefix,
            "hash_block_size": unit.hashed,
            "retention": o.prefix_cache_retention_interval,
            "max_in_flight_tokens": o.most_in_flight,
            "watermark_blocks": int(o.watermark * o.num_blocks),
        }

    def row(self, row: Row, plan: StepPlan) -> Line:
        """Return a row's fields: blocks added to each group's table (all if admitted), lengths, the junction."""
        request, pool = self._scheduler.requests[row.spec], self._scheduler.pool
        admitted = row.chunk is not None and row.chunk.admitted
        line: Line
        if isinstance(pool, GroupPool):
            blocks: list[list[int]] = [[] for _ in pool.groups]
            for change in plan.tables:
                if change.spec is row.spec:
                    blocks[change.group] = [*[0] * (change.passed if admitted else 0), *change.blocks]
            tables = pool.group_tables(request)
            line = {"blocks": blocks, "held": [len(table.blocks) for table in tables]}
            line["live"] = [len(table.live) for table in tables]
            if admitted:
                line["junction"] = pool.junctions.get(request, 0)
            return line
        count = [pool.allocated(request)]
        line = {"blocks": [list(row.blocks)], "held": count, "live": count}
        return line | {"junction": 0} if admitted else line

    def planned(self, plan: StepPlan, requests: dict[RequestSpec, Request]) -> Line:
        """Return a step's fields: blocks that left the windows, and the block counts of preempted requests."""
        heard, dropped = self._heard, self._heard.dropped
        preempted = [[p.spec.id, p.lost_tokens, heard.tables[requests[p.spec]]] for p in plan.changes.preempted]
        heard.dropped, heard.tables = [], {}
        return {"dropped": dropped, "preempted": preempted}

    def cached(self) -> list[int]:
        """Return the number of blocks with a key, by group."""
        pool = self._scheduler.pool
        return pool.keyed_in_groups() if isinstance(pool, GroupPool) else [pool.keyed]
