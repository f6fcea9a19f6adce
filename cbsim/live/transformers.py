"""The recorder of Hugging Face transformers: its own scheduler, cache and batch processor, on the CPU.

Only the forward pass is faked: the token of a request at a position is a hash of both. In async mode its double
buffering runs with both sides in host memory. The lines are those of `cbsim.conformance.transformers_traces`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version as release
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import torch
from transformers import GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as caches
from transformers.generation.continuous_batching import cb_logits_processors as processors
from transformers.generation.continuous_batching import continuous_api as api
from transformers.generation.continuous_batching import initialization, requests, utils
from transformers.generation.continuous_batching import input_outputs as ios
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
from transformers.generation.logits_process import LogitsProcessorList

from cbsim.live.original import Line, numbers
from cbsim.live.transformers_workloads import draw  # noqa: F401  (part of the protocol)
from cbsim.workload.scheduler_tests import Tokens

versions = ("5.17.0", "5.23.0", "5.24.0")
lengths = ("prompt", "max_new_tokens")
options = "cb"
plain: Line = {
    "block_size": ...,
    "num_blocks": ...,
    "max_batch_tokens": 200,
    "scheduler_type": "fifo",
    "allow_block_sharing": False,
    "max_blocks_per_request": 0,
}

OVER = ("FINISHED", "PENDING")  # PENDING: soft reset while the row was in flight
MOST_PASSES = 3000
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}


def modes(workload: Line) -> Sequence[str]:  # noqa: ARG001  (a workload says its mode itself)
    return ("",)


def read_as(header: Line, version: str) -> Line:
    return header | {"resolved": header["resolved"] | {"transformers": version}}


def record(workload: Line, mode: str) -> list[Line]:  # noqa: ARG001
    """Return the trace of a workload: header, passes, footer."""
    with ExitStack() as stack:
        _on_a_cpu(stack)
        processor = _processor(workload)
        live = Live(workload, processor, Recorder(processor, SectorView if _sectors() else BlockView))
        live.run()
    header = {"header": True, "workload": workload["name"], "resolved": live.recorder.resolved()}
    return [header, *live.recorder.lines, {"footer": True, "outputs": live.outputs()}]


def _sectors() -> bool:
    """Whether the cache of the version installed has sectors."""
    return numbers(release("transformers")) >= [5, 18]


# -- the original without an accelerator -------------------------------------------------------------------------------


class HostAsyncIOs(ios.ContinuousBatchingAsyncIOs):  # type: ignore[misc]
    """The original's double-buffered inputs and outputs, without streams and pinned memory."""

    def __init__(self, **kwargs: Any) -> None:
        self.current_pair, self.io_pairs = 0, []
        for _ in range(2):
            pair = ios.HostDeviceIOPair.__new__(ios.HostDeviceIOPair)
            pair.host_io, pair.device_io = ios.ContinuousBatchingIOs(**kwargs), ios.ContinuousBatchingIOs(**kwargs)
            pair.h2d_over = pair.compute_over = pair.d2h_over = Mock()
            self.io_pairs.append(pair)
        self.h2d_stream = self.d2h_stream = self.compute_stream = None
        self.max_batch_tokens = kwargs["cache"].max_batch_tokens

    def get_model_kwargs(self, use_padding: bool = False) -> Any:
        pair = self.io_pairs[self.current_pair]
        pair.host_io._transfer_inputs(pair.device_io, stream=None, non_blocking=False)
        return pair.device_io.get_model_kwargs(use_padding=use_padding)

    def retrieve_device_outputs(self) -> None:
        pair = self.io_pairs[self.current_pair]
        pair.host_io.output_ids.copy_(pair.device_io.output_ids)
        self.swap_io_pairs()


def _on_a_cpu(stack: ExitStack) -> None:
    """Answer without an accelerator what the original asks of one, until the stack ends."""
    empty = torch.empty
    for owner, name, instead in (
        (caches.PagedAttentionMemoryHandler, "get_available_memory", lambda *_: 1 << 40),
        (initialization, "ensure_decode_fast_path_is_available", lambda *_, **__: None),
        (api, "ContinuousBatchingAsyncIOs", HostAsyncIOs),
        (torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options)),  # noqa: ARG005, PLW0108
    ):
        stack.enter_context(patch.object(owner, name, instead))


def _model_config(workload: Line) -> Any:
    model = dict(workload.get("model", {}))
    types, window = model.pop("layer_types", None), model.pop("sliding_window", None)
    config = LlamaConfig(**MODEL | model, max_position_embeddings=1 << 20)
    if types:
        config.layer_types, config.num_hidden_layers, config.sliding_window = types, len(types), window
    # by this name it allocates no mask, and nothing is imported for it
    config._attn_implementation = "flash_attention_2" if _sectors() else "paged|flash_attention_2"
    return config


def _cb_config(workload: Line, config: Any) -> Any:
    """Return the original's configuration, with all that it resolves; the fast path needs no GPU to be chosen."""
    chosen = dict(workload["cb"])
    if _sectors():
        chosen["page_size"] = chosen.pop("block_size")
    cb = ContinuousBatchingConfig(**chosen)
    cb.use_async_batching = workload.get("mode") == "async"
    cb.use_cuda_graph = (False, False)
    most, where = cb.max_blocks_per_request, {"device": torch.device("cpu")} if _sectors() else {}
    resolve = initialization.resolve_continuous_batching_config
    cb = resolve(config, cb, None, has_logit_processors=False, **where)
    if most is not None:
        cb.max_blocks_per_request = most
    return cb


def _processor(workload: Line) -> Any:
    """Return the original's batch processor for a workload, with everything it needs."""
    config = _model_config(workload)
    cb = _cb_config(workload, config)
    device, dtype = torch.device("cpu"), torch.float32
    distributed = DistributedHelper(device_mesh=None, cpu_group_timeout=None)
    where = {"device": device, "dtype": dtype, "distributed_helper": distributed}
    where |= {} if _sectors() else {"tp_plan": {}}
    cache = caches.PagedAttentionCache(config=config, continuous_batching_config=cb, **where)
    sizes = {"num_blocks": cache.num_blocks, "max_batch_tokens": cache.max_batch_tokens}
    sizes |= {} if _sectors() else {"use_prefix_sharing": cache.use_prefix_sharing}
    initialization.update_cb_config_after_cache_creation(cb_config=cb, **sizes)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        cb.max_blocks_per_request = 0
    scheduler = SCHEDULER_MAPPING[cb.scheduler_type](
        cache=cache, safety_margin=cb.safety_margin, max_requests_per_batch=cb.max_requests_per_batch
    )
    return api.ContinuousBatchProcessor(
        cache=cache,
        config=config,
        generation_config=GenerationConfig(do_sample=False, eos_token_id=workload.get("eos_token_id", -1)),
        continuous_batching_config=cb,
        logit_processor=processors.ContinuousBatchingLogitsProcessorList(LogitsProcessorList(), False, True),
        input_queue=queue.Queue(),
        cancel_queue=queue.Queue(),
        output_router=api.OutputRouter(),
        background_thread_status=api.BackgroundThreadStatus(),
        model_device=device,
        model_dtype=dtype,
        scheduler=scheduler,
        distributed_helper=distributed,
    )


# -- what it decides ---------------------------------------------------------------------------------------------------


class BlockView:
    """The cache of 5.17: two free lists of blocks, and a table a request in each group of layers."""

    kinds: ClassVar = {
        "FullAttentionCacheAllocator": "full_attention",
        "SlidingAttentionCacheAllocator": "sliding_attention",
    }

    def __init__(self, recorder: Recorder) -> None:
        self.note, self.cache = recorder.events.append, recorder.processor.cache
        self.recorder, self.manager = recorder, recorder.processor.offloading_manager

    def watched(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Return methods of the original, and what is done around each."""
        return [
            (self.cache, "allocate_blocks", self._allocate),
            (self.cache, "mark_shareable_blocks_as_complete", self._mark),
        ]

    def groups(self) -> list[tuple[str, dict[str, list[int]]]]:
        """Return the name of each group of layers and its tables."""
        managers = self.cache.group_cache_managers
        return [(f"{self.kinds[type(each).__name__]}.{each._index}", each.block_table) for each in managers]

    def hashed(self) -> set[int]:
        return set(self.cache._block_manager._hash_to_id.values())

    def table(self, request: str) -> dict[str, list[int]]:
        """Return a request's table in each group."""
        return {name: list(table.get(request, ())) for name, table in self.groups()}

    def _allocate(self, original: Any, count: int, request: str, allocated: int) -> Any:
        blocks = self.cache._block_manager
        before, cached = self.table(request), list(blocks._init_block_ids)
        answer = original(count, request, allocated)
        if answer is None:
            free = self.cache.get_num_free_blocks()
            self.note({"op": "alloc_fail", "req": request, "n": count, "free": free})
            return None
        evicted = [block for block in reversed(cached) if block not in blocks._init_block_ids]
        if evicted:
            self.note({"op": "evict", "blocks": evicted})
        self.note({"op": "alloc", "req": request, "n": count, "blocks": self.added(request, before)})
        return answer

    def added(self, request: str, before: dict[str, list[int]]) -> Any:
        """Return the blocks that a request's tables got since they were as before."""
        return single({name: table[len(before[name]) :] for name, table in self.table(request).items()})

    def _mark(self, original: Any, state: Any, count: Any) -> None:
        before, hashed = self.table(state.request_id), self.hashed()
        original(state, count)
        if count:
            line = {"op": "complete", "req": state.request_id, "n": single(count)}
            line["hashed"] = sorted(self.hashed() - hashed)
            pairs = {
                name: zip(before[name], table, strict=False) for name, table in self.table(state.request_id).items()
            }
            replaced = {name: [[own, now] for own, now in both if own != now] for name, both in pairs.items()}
            self.note(line | ({"dedup": single(replaced)} if any(replaced.values()) else {}))

    def pages(self) -> Any:
        """Return the tokens that the cache holds."""
        return self.cache.num_pages

    def free(self) -> Line:
        blocks = self.cache._block_manager
        lists = {"uninit": blocks._uninit_block_ids, "init": blocks._init_block_ids}
        counts = {name: len(each) for name, each in lists.items()}
        return {"free": blocks.num_free_blocks, **counts, **{f"{name}_order": list(lists[name]) for name in lists}}

    def host(self) -> Line:
        manager = self.manager
        if not manager._num_cpu_blocks:
            return {}
        blocks_of = {r: list(blocks) for r, blocks in manager._request_id_to_cpu_blocks.items()}
        counts = {r: list(each) for r, each in manager._request_id_to_group_block_counts.items()}
        return {"cpu": {"free": list(manager._free_cpu_blocks), "held": blocks_of, "per_group": counts}}

    def sizes(self) -> Line:
        on_host = self.manager._num_cpu_blocks
        return ({"cpu_blocks": on_host} if on_host else {}) | {"block_size": self.cache.block_size}


class SectorView(BlockView):
    """The cache since 5.18: sectors, and blocks of them for each kind of layers."""

    def watched(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        return [
            (self.cache, "can_store_request_tokens", self._store),
            (self.cache, "mark_complete_blocks", self._mark),
            (self.cache, "evict_cached_blocks", self._evict),
        ]

    def groups(self) -> list[tuple[str, dict[str, list[int]]]]:
        return [(name, each.block_table) for name, each in self.cache.cache_allocators.items()]

    def hashed(self) -> set[int]:
        return {block for each in self.cache.cache_allocators.values() for block in each.ledger.block_to_hash}

    def _store(self, original: Any, state: Any, tokens: int, dry_run: bool = False) -> bool:
        before, sectors = self.table(state.request_id), list(self.cache.pool.free_sectors)
        stored: bool = original(state, tokens, dry_run)
        line: Line = {"req": state.request_id, "tokens": tokens}
        added = self.added(state.request_id, before)
        if not (stored or dry_run):
            self.note({"op": "alloc_fail", **line, "free_sectors": len(sectors)})
        elif not dry_run and (any(added.values()) if isinstance(added, dict) else added):
            claimed = sectors[len(self.cache.pool.free_sectors) :][::-1]
            self.note({"op": "alloc", **line, "blocks": added, "sectors": claimed})
        return stored

    def _evict(self, original: Any) -> bool:
        cached = {name: list(each.ledger.cached_blocks) for name, each in self.cache.cache_allocators.items()}
        evicted: bool = original()
        if evicted:
            self.note({"op": "evict_all_cached", "blocks": single(cached)})
        return evicted

    def pages(self) -> Any:
        return self.cache.max_tokens_read

    def _counts(self, pool: Any) -> Line:
        return {name: pool.count_free_blocks(each.index) for name, each in self.cache.cache_allocators.items()}

    def free(self) -> Line:
        pool, kinds = self.cache.pool, self.cache.cache_allocators
        trees = {name: pool._free_blocks[each.index].trees for name, each in kinds.items()}
        cached = {name: list(each.ledger.cached_blocks) for name, each in kinds.items()}
        return {
            "free_sectors": pool.num_free_sectors,
            "free_blocks": self._counts(pool),
            "cached": {name: len(blocks) for name, blocks in cached.items()},
            "free_fraction": round(self.cache.compute_free_capacity(), 6),
            "free_sector_order": list(pool.free_sectors),
            "free_block_trees": {
                k: {str(at): list(blocks) for at, blocks in tree.items()} for k, tree in trees.items()
            },
            "cached_order": cached,
        }

    def host(self) -> Line:
        pool = self.manager._cpu_pool
        if pool is None:
            return {}
        tables = self.manager._request_id_to_cpu_blocks.items()
        blocks_of = {request: {kind: list(blocks) for kind, blocks in table.items()} for request, table in tables}
        return {"cpu": {"free_sectors": list(pool.free_sectors), "free_blocks": self._counts(pool), "held": blocks_of}}

    def sizes(self) -> Line:
        kinds = self.cache.cache_allocators.items()
        on_host = {} if self.manager._cpu_pool is None else {"cpu_sectors": self.manager._num_cpu_sectors}
        return on_host | {
            "num_sectors": self.cache.num_sectors,
            "blocks_per_sector": {name: each.blocks_per_sector for name, each in kinds},
            "page_size": {name: each.tokens_per_page for name, each in kinds},
        }


def single(value: Any) -> Any:
    """Return what there is of each group by its name, of one group without."""
    return next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else value


class Recorder:
    """The lines of one processor: what it decides, pass by pass."""

    def __init__(self, processor: Any, view: type[BlockView]) -> None:
        self.processor, self.scheduler = processor, processor.scheduler
        self.lines: list[Line] = []
        self.events: list[Line] = []
        self.view = view(self)
        self._launched: list[int] = []  # batches whose results are to come
        self._batches = 0
        self._scheduled: Any = None
        watched: list[tuple[Any, str, Callable[..., Any]]] = [
            (processor.cache, "search_prefix_match", self._lookup),
            (processor.cache, "free_blocks", self._free),
            (self.scheduler, "schedule_batch", self._schedule),
            (processor.offloading_manager, "offload_requests", self._offload),
            *self.view.watched(),
        ]
        for owner, name, around in watched:
            setattr(owner, name, partial(around, getattr(owner, name)))

    def _lookup(self, original: Any, request: str, prompt: list[int]) -> int:
        matched: int = original(request, prompt)
        line = {"op": "prefix_lookup", "req": request, "lookup_tokens": len(prompt), "matched_tokens": matched}
        self.events.append(line | {"blocks": single(self.view.table(request)) if matched else []})
        return matched

    def _free(self, original: Any, request: str, *args: Any, **kwargs: Any) -> None:
        line = {"op": "free", "req": request, "blocks": single(self.view.table(request))}
        original(request, *args, **kwargs)
        self.events.append(line | ({"no_cache": True} if kwargs.get("no_cache") or any(args) else {}))

    def _schedule(self, original: Any, *args: Any) -> Any:
        self._scheduled = answer = original(*args)
        if answer[0] is None:
            self.events.append({"op": "schedule_returned_none", "starved": self._starved()})
        return answer

    def _starved(self) -> list[str]:
        return [state.request_id for state, *_ in self.scheduler.starved_requests]

    def _offload(self, original: Any) -> Any:
        before = list(self.scheduler.active_requests)
        line: Line = {"op": "offload", "starved": self._starved()}
        self.events.append(line)
        answer = original()
        victims = [request for request in before if request not in self.scheduler.active_requests]
        out = [request for request in victims if self.scheduler.waiting_requests[request].is_cpu_offloaded]
        line["soft_reset"], line["cpu_offloaded"] = [request for request in victims if request not in out], out
        line["requeue_order"] = [each for each in self.scheduler.waiting_requests_order if each in victims]
        return answer

    def prepare(self, step: int, arrivals: list[str], cancels: list[str]) -> bool:
        """Let it plan a batch. Return whether there is one."""
        self.events.clear()
        scheduled = bool(self.processor.prepare_next_batch())
        line: Line = {"step": step, "scheduled": scheduled, "arrivals": arrivals}
        line |= {"cancels": cancels} if cancels else {}
        line |= self._batch() if scheduled else {}
        self.lines.append(line | {"schedule_events": list(self.events), "after_schedule": self._state()})
        return scheduled

    def _batch(self) -> Line:
        _, fast, query, read = self._scheduled
        settings, cache = self.processor.cb_config, self.processor.cache
        padded = [utils.pad_to_pow2(query, settings.max_requests_per_batch), 0]
        if not fast:
            intervals = settings.q_padding_interval_size or 64, settings.kv_padding_interval_size or 16384
            padded = [utils.pad_to_interval(query, intervals[0], cache.max_batch_tokens)]
            padded += [utils.pad_to_interval(read, intervals[1], self.view.pages())]
        self._launched.append(self._batches)
        self._batches += 1
        return {
            "batch": [_row(future) for future in self.host().requests_in_batch],
            "decode_fast_path": bool(fast),
            "num_q_tokens": query,
            "kv_read_charged": read,
            "padded_if_graphs": padded,
            "batch_no": self._launched[-1],
        }

    def host(self) -> Any:
        """Return the inputs and outputs of the batch at hand."""
        ios = self.processor.inputs_and_outputs
        return ios.io_pairs[ios.current_pair].host_io if self.processor.use_async_batching else ios

    def _state(self) -> Line:
        scheduler = self.scheduler
        known = dict.fromkeys(request for _, table in self.view.groups() for request in table)
        return {
            "active": [[request, state.status.name] for request, state in scheduler.active_requests.items()],
            "waiting": list(scheduler.waiting_requests_order),
            "block_new_requests": scheduler.block_new_requests,
            **self.view.free(),
            **self.view.host(),
            "block_tables": {request: single(self.view.table(request)) for request in known},
        }

    def update(self) -> None:
        """Let it apply the oldest batch in flight."""
        self.events.clear()
        futures, tokens, _ = self.host().prepare_batch_update()
        before = [(future, future.state.status.name) for future in futures if future.has_new_token]
        sampled = list(tokens)[: len(before)]
        self.processor.update_batch()
        applied = [(f.state, t) for (f, was), t in zip(before, sampled, strict=True) if was not in OVER]
        self.lines[-1] |= {
            "updated_batch_no": self._launched.pop(0),
            "new_tokens": {state.request_id: token for state, token in applied},
            "finished": [state.request_id for state, _ in applied if state.status.name == "FINISHED"],
            "discarded_tokens": [future.state.request_id for future, was in before if was in OVER],
            "update_events": list(self.events),
            "after_update": self._state(),
        }

    def resolved(self) -> Line:
        """Return the parameters in effect."""
        cache, scheduler = self.processor.cache, self.scheduler
        return {
            **self.view.sizes(),
            "transformers": release("transformers"),
            "scheduler": type(scheduler).__name__,
            "safety_margin": scheduler.safety_margin,
            "num_blocks": cache.num_blocks,
            "max_batch_tokens": cache.max_batch_tokens,
            "max_requests_per_batch": scheduler.max_requests_per_batch,
            "max_blocks_per_request": cache.max_blocks_per_request,
            "allow_block_sharing": cache.allow_block_sharing,
            "cache_budget": self.view.pages(),
            "async": self.processor.use_async_batching,
        }


def _row(future: Any) -> Line:
    return {
        "req": future.state.request_id,
        "q": future.query_length,
        "past": future.state.position_offset - future.query_length,
        "new_token": bool(future.has_new_token),
        "complete_blocks": single(future.complete_blocks),
    }


class Live:
    """A workload fed to the original, pass by pass, as its generation loop would."""

    def __init__(self, workload: Line, processor: Any, recorder: Recorder) -> None:
        self.processor, self.recorder = processor, recorder
        self._tokens, self._eos = Tokens(workload), workload.get("eos_token_id")
        self._requests, self._cancels = workload["requests"], workload.get("cancels", [])
        steps = [request.get("arrival_step", 0) for request in self._requests]
        self._last = max([*steps, *(cancel["step"] for cancel in self._cancels)])

    def run(self) -> None:
        ahead = first = self.processor.use_async_batching
        for step in range(MOST_PASSES):
            arrivals, cancels = self._feed(step)
            if self.recorder.prepare(step, arrivals, cancels):
                self._forward()
                if not first:
                    self.recorder.update()
                first = False
            elif not self.processor.has_pending_requests() and step >= self._last:
                break
        else:
            raise RuntimeError(f"the workload is not done after {MOST_PASSES} passes")
        if ahead:  # the original takes the last result after its loop
            ios = self.processor.inputs_and_outputs
            ios.current_pair = 1 - ios.current_pair
            self.recorder.lines.append({"step": step, "scheduled": False, "final_update_only": True})
            self.recorder.update()

    def _feed(self, step: int) -> tuple[list[str], list[str]]:
        coming = [request for request in self._requests if request.get("arrival_step", 0) == step]
        for request in coming:
            state = requests.RequestState(
                request_id=request["id"],
                initial_tokens=list(request["prompt"]),
                max_new_tokens=request["max_new_tokens"],
                eos_token_id=self._eos,
                num_children=request.get("num_children", 0),
            )
            self.processor.input_queue.put(state)
        cancels = [cancel["id"] for cancel in self._cancels if cancel["step"] == step]
        for name in cancels:
            self.processor.cancel_queue.put(name)
        return [request["id"] for request in coming], cancels

    def _forward(self) -> None:
        """Do what the model would: transfer, sample a token for every row that asks for one, transfer back."""
        ios = self.processor.inputs_and_outputs
        rows = self.recorder.host().requests_in_batch
        ios.get_model_kwargs(use_padding=self.processor.model_runner.pad_inputs)
        states = [future.state for future in rows if future.has_new_token]
        for i, state in enumerate(states):
            ios.output_ids[0, i] = self._tokens.at(state.request_id, state.position_offset)
        ios.retrieve_device_outputs()

    def outputs(self) -> Line:
        router, done = self.processor.output_router.output_queue, {}
        while not router.empty():
            output = router.get()
            line = {"generated": list(output.generated_tokens), "status": output.status.name}
            done[output.request_id] = line | {"prompt_len": len(output.prompt_ids)}
        return done
