"""vLLM's cache: one group of layers that see everything, or several over one free queue."""

from __future__ import annotations

from cbsim.policy.blocks import BlockPool, FreeQueue
from cbsim.policy.group_pool import GroupPool
from cbsim.policy.keys import GroupKeys, Keys, KeysWhenKnown
from cbsim.policy.observer import Observer
from cbsim.policy.schedulers.vllm_groups import sees_all
from cbsim.policy.schedulers.vllm_settings import VllmOptions


def cache(o: VllmOptions, observer: Observer) -> tuple[BlockPool, Keys | None]:
    """The pool of a scheduler, and when its blocks get their keys. Block 0 is handed out to nobody."""
    free, blocks = FreeQueue(range(1, o.num_blocks), unhashed_first=o.version == "0.33"), o.num_blocks - 1
    if sees_all(o.groups):
        pool = BlockPool(o.block_size, blocks, free, observer)
        return pool, KeysWhenKnown(pool) if o.enable_prefix_caching else None
    grouped = GroupPool(
        o.groups,
        o.block_size,
        blocks,
        free,
        observer,
        retention=o.prefix_cache_retention_interval,
        most_in_flight=o.most_in_flight,
        longest=o.max_model_len,
    )
    return grouped, GroupKeys(grouped) if o.enable_prefix_caching else None
