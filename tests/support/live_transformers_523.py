"""As live_transformers.py, of transformers 5.23: sectors in place of two free lists, and their names."""

from __future__ import annotations

import queue
from collections.abc import Callable
from importlib import import_module
from typing import Any

from cbsim.workload.scheduler_tests import Line
from support.live_transformers import Live, Recorder, _model_config, _module, _on_a_cpu

KIND = "full_attention"


def _processor(workload: Line) -> Any:
    """The original's batch processor for a workload, with everything it needs."""
    torch, api, initialization = import_module("torch"), _module("continuous_api"), _module("initialization")
    configuration = import_module("transformers.generation.configuration_utils")
    device, config, options = torch.device("cpu"), _model_config(workload), dict(workload["cb"])
    cb = configuration.ContinuousBatchingConfig(page_size=options.pop("block_size"), **options)
    cb.use_async_batching = workload["mode"] == "async"
    cb.use_cuda_graph = (False, False)
    kept = cb.max_blocks_per_request
    cb = initialization.resolve_continuous_batching_config(config, cb, None, has_logit_processors=False, device=device)
    cb.max_blocks_per_request = kept
    distributed = _module("distributed").DistributedHelper(device_mesh=None, cpu_group_timeout=None)
    where = {"device": device, "dtype": torch.float32, "distributed_helper": distributed}
    cache = _module("cache").PagedAttentionCache(config=config, continuous_batching_config=cb, **where)
    initialization.update_cb_config_after_cache_creation(
        cb_config=cb, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens
    )
    scheduler = _module("scheduler").SCHEDULER_MAPPING[cb.scheduler_type](
        cache=cache, safety_margin=cb.safety_margin, max_requests_per_batch=cb.max_requests_per_batch
    )
    no_processors = import_module("transformers.generation.logits_process").LogitsProcessorList()
    processors = _module("cb_logits_processors").ContinuousBatchingLogitsProcessorList(no_processors, False, True)
    return api.ContinuousBatchProcessor(
        cache=cache,
        config=config,
        generation_config=configuration.GenerationConfig(
            do_sample=False, eos_token_id=workload.get("eos_token_id", -1)
        ),
        continuous_batching_config=cb,
        logit_processor=processors,
        input_queue=queue.Queue(),
        cancel_queue=queue.Queue(),
        output_router=api.OutputRouter(),
        background_thread_status=api.BackgroundThreadStatus(),
        model_device=device,
        model_dtype=torch.float32,
        scheduler=scheduler,
        distributed_helper=distributed,
    )


class SectorRecorder(Recorder):
    """Wraps one processor and notes, pass by pass, what it decides."""

    def _watched(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        self.allocator = self.cache.cache_allocators[KIND]
        return [
            (self.cache, "search_prefix_match", self._lookup),
            (self.cache, "free_blocks", self._free),
            (self.cache, "can_store_request_tokens", self._store),
            (self.cache, "mark_complete_blocks", self._mark),
            (self.cache, "evict_cached_blocks", self._evict),
            (self.scheduler, "schedule_batch", self._schedule),
            (self.processor.offloading_manager, "offload_requests", self._offload),
            (self.processor.offloading_manager, "_reserve_cpu_blocks", self._reserve),
        ]

    def _table(self, request_id: str) -> list[int]:
        return list(self.allocator.block_table.get(request_id, []))

    def _hashed(self) -> set[int]:
        return set(self.allocator.ledger.block_to_hash)

    def _free(self, original: Any, request_id: str, *args: Any, **kwargs: Any) -> None:
        super()._free(original, request_id, *args, **kwargs)
        if kwargs.get("no_cache"):
            self._events[-1]["no_cache"] = True

    def _store(self, original: Any, state: Any, tokens: int) -> bool:
        before, free = self._table(state.request_id), list(self.cache.pool.free_sectors)
        stored: bool = original(state, tokens)
        line: Line = {"req": state.request_id, "tokens": tokens}
        blocks, left = self._table(state.request_id)[len(before) :], len(self.cache.pool.free_sectors)
        if not stored:
            self._events.append({"op": "alloc_fail"} | line | {"free_sectors": left})
        elif blocks:
            self._events.append({"op": "alloc"} | line | {"blocks": blocks, "sectors": free[left:][::-1]})
        return stored

    def _mark(self, original: Any, state: Any, complete: Any) -> None:
        self._complete(lambda *_: original(state, complete), state, complete.get(KIND, 0))

    def _evict(self, original: Any) -> bool:
        cached = list(self.allocator.ledger.cached_blocks)
        if cached:
            self._events.append({"op": "evict_all_cached", "blocks": cached})
        evicted: bool = original()
        return evicted

    def _reserve(self, original: Any, counts: dict[str, int]) -> Any:
        """The original counts the sectors it lacks before it reclaims, which may end its loop: here after it."""
        pool = self.processor.offloading_manager._cpu_pool
        if pool and pool.num_free_sectors < counts[KIND] - pool.count_free_blocks(0):
            pool.try_to_free_sectors()
        return original(counts)

    def _pages(self) -> int:
        pages: int = self.cache.max_tokens_read
        return pages

    @staticmethod
    def _row(future: Any) -> Line:
        complete = future.complete_blocks.get(KIND) or {}
        return Recorder._row(future) | {"complete_blocks": complete}

    def _free_lists(self) -> Line:
        pool, ledger = self.cache.pool, self.allocator.ledger
        trees = pool._free_blocks[0].trees
        return {
            "free_sectors": pool.num_free_sectors,
            "free_blocks": {KIND: pool.count_free_blocks(0)},
            "cached": {KIND: len(ledger.cached_blocks)},
            "free_fraction": round(self.cache.compute_free_capacity(), 6),
            "free_sector_order": list(pool.free_sectors),
            "free_block_trees": {KIND: {str(sector): list(blocks) for sector, blocks in trees.items()}},
            "cached_order": {KIND: list(ledger.cached_blocks)},
        }

    def _tables(self) -> dict[str, list[int]]:
        return {request: list(table) for request, table in self.allocator.block_table.items()}

    def _on_host(self) -> Line:
        manager = self.processor.offloading_manager
        if not manager._num_cpu_sectors:
            return {}
        pool = manager._cpu_pool
        held = {r: {k: list(blocks) for k, blocks in b.items()} for r, b in manager._request_id_to_cpu_blocks.items()}
        free = {"free_sectors": list(pool.free_sectors), "free_blocks": {KIND: pool.count_free_blocks(0)}}
        return {"cpu": free | {"held": held}}

    def _sizes(self) -> Line:
        cache, sectors = self.cache, self.processor.offloading_manager._num_cpu_sectors
        return {
            **({"cpu_sectors": sectors} if sectors else {}),
            "page_size": {KIND: self.allocator.tokens_per_page},
            "num_sectors": cache.num_sectors,
            "blocks_per_sector": {KIND: self.allocator.blocks_per_sector},
        }


def record(workload: Line) -> list[Line]:
    """The trace of a workload: header, passes, footer."""
    with _on_a_cpu():
        processor = _processor(workload)
        live = Live(workload, processor, SectorRecorder(processor))
        live.run()
    return live.trace()
