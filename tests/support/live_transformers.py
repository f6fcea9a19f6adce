"""Records traces from the transformers that is installed: its own scheduler, cache and batch processor, on the CPU.

Only the forward pass is faked: the token of a request at a position is a hash of both. In async mode its double
buffering runs with both sides in host memory. The lines are those of `cbsim.conformance.transformers_traces`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from cbsim.workload.scheduler_tests import Line, Tokens

PACKAGE = "transformers.generation.continuous_batching"
OVER = ("FINISHED", "PENDING")  # PENDING: soft reset while the row was in flight
MOST_PASSES = 3000


def _module(name: str) -> Any:
    return import_module(f"{PACKAGE}.{name}")


class _NoEvent:
    """A stream event where there are no streams."""

    def synchronize(self) -> None: ...
    def record(self, *_: Any) -> None: ...


def _host_async_ios() -> Any:
    """The original's double-buffered inputs and outputs, without streams and pinned memory."""
    ios = _module("input_outputs")

    def init(self: Any, **kwargs: Any) -> None:
        self.current_pair, self.io_pairs = 0, []
        for _ in range(2):
            pair = ios.HostDeviceIOPair.__new__(ios.HostDeviceIOPair)
            pair.host_io, pair.device_io = ios.ContinuousBatchingIOs(**kwargs), ios.ContinuousBatchingIOs(**kwargs)
            pair.h2d_over = pair.compute_over = pair.d2h_over = _NoEvent()
            self.io_pairs.append(pair)
        self.h2d_stream = self.d2h_stream = self.compute_stream = None
        self.max_batch_tokens = kwargs["cache"].max_batch_tokens

    def get_model_kwargs(self: Any, use_padding: bool = False) -> Any:
        pair = self.io_pairs[self.current_pair]
        pair.host_io._transfer_inputs(pair.device_io, stream=None, non_blocking=False)
        return pair.device_io.get_model_kwargs(use_padding=use_padding)

    def retrieve_device_outputs(self: Any) -> None:
        pair = self.io_pairs[self.current_pair]
        pair.host_io.output_ids.copy_(pair.device_io.output_ids)
        self.swap_io_pairs()

    methods = {
        "__init__": init,
        "get_model_kwargs": get_model_kwargs,
        "retrieve_device_outputs": retrieve_device_outputs,
    }
    return type("HostAsyncIOs", (ios.ContinuousBatchingAsyncIOs,), methods)


def _pageable(empty: Callable[..., Any]) -> Callable[..., Any]:
    """Memory that a GPU's driver need not know of."""

    def made(*shape: Any, pin_memory: bool = False, **given: Any) -> Any:
        del pin_memory
        return empty(*shape, **given)

    return made


@contextmanager
def _on_a_cpu() -> Iterator[None]:
    """What the original asks of an accelerator, answered without one."""
    handler = _module("cache").PagedAttentionMemoryHandler
    torch = import_module("torch")
    with ExitStack() as stack:
        for owner, name, instead in (
            (handler, "get_available_memory", lambda *_: 1 << 40),
            (_module("initialization"), "ensure_decode_fast_path_is_available", lambda *_, **__: None),
            (_module("continuous_api"), "ContinuousBatchingAsyncIOs", _host_async_ios()),
            (torch, "empty", _pageable(torch.empty)),
        ):
            stack.enter_context(patch.object(owner, name, instead))
        yield


def _model_config(workload: Line) -> Any:
    model = workload["model"]
    config = import_module("transformers").LlamaConfig(
        hidden_size=32,
        head_dim=model.get("head_dim", 16),
        intermediate_size=64,
        num_hidden_layers=model.get("layers", 2),
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=model["vocab_size"],
        max_position_embeddings=1 << 20,
    )
    config._attn_implementation = "paged|flash_attention_2"  # allocates no mask; nothing is imported for it
    return config


def _processor(workload: Line) -> Any:
    """The original's batch processor for a workload, with everything it needs."""
    torch, api, initialization = import_module("torch"), _module("continuous_api"), _module("initialization")
    configuration = import_module("transformers.generation.configuration_utils")
    config, cb = _model_config(workload), configuration.ContinuousBatchingConfig(**workload["cb"])
    cb.use_async_batching = workload["mode"] == "async"
    cb.use_cuda_graph = (False, False)
    kept = cb.max_blocks_per_request
    cb = initialization.resolve_continuous_batching_config(config, cb, None, has_logit_processors=False)
    cb.max_blocks_per_request = kept
    distributed = _module("distributed").DistributedHelper(device_mesh=None, cpu_group_timeout=None)
    where = {"device": torch.device("cpu"), "dtype": torch.float32, "distributed_helper": distributed, "tp_plan": {}}
    cache = _module("cache").PagedAttentionCache(config=config, continuous_batching_config=cb, **where)
    initialization.update_cb_config_after_cache_creation(
        cb_config=cb,
        num_blocks=cache.num_blocks,
        max_batch_tokens=cache.max_batch_tokens,
        use_prefix_sharing=cache.use_prefix_sharing,
    )
    scheduler = _module("scheduler").SCHEDULER_MAPPING[cb.scheduler_type](
        cache=cache, safety_margin=cb.safety_margin, max_requests_per_batch=cb.max_requests_per_batch
    )
    no_processors = import_module("transformers.generation.logits_process").LogitsProcessorList()
    processors = _module("cb_logits_processors").ContinuousBatchingLogitsProcessorList(no_processors, False, True)
    eos = workload.get("eos_token_id", -1)
    return api.ContinuousBatchProcessor(
        cache=cache,
        config=config,
        generation_config=configuration.GenerationConfig(do_sample=False, eos_token_id=eos),
        continuous_batching_config=cb,
        logit_processor=processors,
        input_queue=queue.Queue(),
        cancel_queue=queue.Queue(),
        output_router=api.OutputRouter(),
        background_thread_status=api.BackgroundThreadStatus(),
        model_device=torch.device("cpu"),
        model_dtype=torch.float32,
        scheduler=scheduler,
        distributed_helper=distributed,
    )


class Recorder:
    """Wraps one processor and notes, pass by pass, what it decides."""

    def __init__(self, processor: Any) -> None:
        self.processor, self.cache, self.scheduler = processor, processor.cache, processor.scheduler
        self.lines: list[Line] = []
        self._events: list[Line] = []
        self._launched: list[int] = []  # batches whose results are to come
        self._batches = 0
        self._scheduled: Any = None
        for owner, name, around in self._watched():
            self._wrap(owner, name, around)

    def _watched(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Methods of the original, and what is done around each."""
        return [
            (self.cache, "search_prefix_match", self._lookup),
            (self.cache, "free_blocks", self._free),
            (self.cache, "allocate_blocks", self._allocate),
            (self.cache, "mark_shareable_blocks_as_complete", self._complete),
            (self.scheduler, "schedule_batch", self._schedule),
            (self.processor.offloading_manager, "offload_requests", self._offload),
        ]

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    def _table(self, request_id: str) -> list[int]:
        (manager,) = self.cache.group_cache_managers
        return list(manager.block_table.get(request_id, []))

    def _hashed(self) -> set[int]:
        return set(self.cache._block_manager._hash_to_id.values())

    # -- calls of the original that are events ------------------------------------------------------------------------

    def _lookup(self, original: Any, request_id: str, prompt: list[int]) -> int:
        matched: int = original(request_id, prompt)
        line = {"op": "prefix_lookup", "req": request_id, "lookup_tokens": len(prompt), "matched_tokens": matched}
        self._events.append(line | {"blocks": self._table(request_id) if matched else []})
        return matched

    def _free(self, original: Any, request_id: str, *args: Any, **kwargs: Any) -> None:
        blocks = self._table(request_id)
        original(request_id, *args, **kwargs)
        self._events.append({"op": "free", "req": request_id, "blocks": blocks})

    def _allocate(self, original: Any, count: int, request_id: str, allocated: int) -> Any:
        before, cached = self._table(request_id), list(self.cache._block_manager._init_block_ids)
        answer = original(count, request_id, allocated)
        if answer is None:
            free = self.cache.get_num_free_blocks()
            self._events.append({"op": "alloc_fail", "req": request_id, "n": count, "free": free})
            return None
        evicted = [b for b in reversed(cached) if b not in self.cache._block_manager._init_block_ids]
        if evicted:
            self._events.append({"op": "evict", "blocks": evicted})
        added = self._table(request_id)[len(before) :]
        self._events.append({"op": "alloc", "req": request_id, "n": count, "blocks": added})
        return answer

    def _complete(self, original: Any, state: Any, count: int) -> None:
        before, hashed = self._table(state.request_id), self._hashed()
        original(state, count)
        if count:
            after = self._table(state.request_id)
            line = {"op": "complete", "req": state.request_id, "n": count, "hashed": sorted(self._hashed() - hashed)}
            replaced = [[own, now] for own, now in zip(before, after, strict=True) if own != now]
            self._events.append(line | ({"dedup": replaced} if replaced else {}))

    def _schedule(self, original: Any, *args: Any) -> Any:
        self._scheduled = answer = original(*args)
        if answer[0] is None:
            starved = [state.request_id for state, *_ in self.scheduler.starved_requests]
            self._events.append({"op": "schedule_returned_none", "starved": starved})
        return answer

    def _offload(self, original: Any) -> Any:
        before = list(self.scheduler.active_requests)
        line: Line = {"op": "offload", "starved": [state.request_id for state, *_ in self.scheduler.starved_requests]}
        self._events.append(line)
        answer = original()
        victims = [r for r in before if r not in self.scheduler.active_requests]
        out = [r for r in victims if self.scheduler.waiting_requests[r].is_cpu_offloaded]
        line["soft_reset"], line["cpu_offloaded"] = [r for r in victims if r not in out], out
        line["requeue_order"] = [r for r in self.scheduler.waiting_requests_order if r in victims]
        return answer

    # -- one pass -----------------------------------------------------------------------------------------------------

    def prepare(self, step: int, arrivals: list[str], cancels: list[str]) -> bool:
        """Plan a batch; whether there is one."""
        self._events.clear()
        scheduled = bool(self.processor.prepare_next_batch())
        line: Line = {"step": step, "scheduled": scheduled, "arrivals": arrivals}
        line |= {"cancels": cancels} if cancels else {}
        line |= self._batch() if scheduled else {}
        self.lines.append(line | {"schedule_events": list(self._events), "after_schedule": self._state()})
        return scheduled

    def _batch(self) -> Line:
        _, fast, query, read = self._scheduled
        utils, settings, cache = _module("utils"), self.processor.cb_config, self.cache
        padded = [utils.pad_to_pow2(query, settings.max_requests_per_batch), 0]
        if not fast:
            intervals = settings.q_padding_interval_size or 64, settings.kv_padding_interval_size or 16384
            padded = [utils.pad_to_interval(query, intervals[0], cache.max_batch_tokens)]
            padded += [utils.pad_to_interval(read, intervals[1], self._pages())]
        self._launched.append(self._batches)
        self._batches += 1
        return {
            "batch": [self._row(future) for future in self.host().requests_in_batch],
            "decode_fast_path": bool(fast),
            "num_q_tokens": query,
            "kv_read_charged": read,
            "padded_if_graphs": padded,
            "batch_no": self._launched[-1],
        }

    def _pages(self) -> int:
        """Tokens that the cache holds."""
        pages: int = self.cache.num_pages
        return pages

    @staticmethod
    def _row(future: Any) -> Line:
        return {
            "req": future.state.request_id,
            "q": future.query_length,
            "past": future.state.position_offset - future.query_length,
            "new_token": bool(future.has_new_token),
            "complete_blocks": future.complete_blocks,
        }

    def host(self) -> Any:
        """The inputs and outputs of the batch at hand."""
        ios = self.processor.inputs_and_outputs
        return ios.io_pairs[ios.current_pair].host_io if self.processor.use_async_batching else ios

    def _state(self) -> Line:
        scheduler = self.scheduler
        return {
            "active": [[request, state.status.name] for request, state in scheduler.active_requests.items()],
            "waiting": list(scheduler.waiting_requests_order),
            "block_new_requests": scheduler.block_new_requests,
            **self._free_lists(),
            **self._on_host(),
            "block_tables": self._tables(),
        }

    def _free_lists(self) -> Line:
        blocks = self.cache._block_manager
        return {
            "free": blocks.num_free_blocks,
            "uninit": len(blocks._uninit_block_ids),
            "init": len(blocks._init_block_ids),
            "uninit_order": list(blocks._uninit_block_ids),
            "init_order": list(blocks._init_block_ids),
        }

    def _tables(self) -> dict[str, list[int]]:
        return {r: list(t) for r, t in self.cache.group_cache_managers[0].block_table.items()}

    def _on_host(self) -> Line:
        manager = self.processor.offloading_manager
        if not manager._num_cpu_blocks:
            return {}
        held = {r: list(blocks) for r, blocks in manager._request_id_to_cpu_blocks.items()}
        counts = {r: list(counts) for r, counts in manager._request_id_to_group_block_counts.items()}
        return {"cpu": {"free": list(manager._free_cpu_blocks), "held": held, "per_group": counts}}

    def update(self) -> None:
        """Apply the oldest batch in flight."""
        self._events.clear()
        futures, tokens, _ = self.host().prepare_batch_update()
        before = [(future, future.state.status.name) for future in futures if future.has_new_token]
        sampled = list(tokens)[: len(before)]
        self.processor.update_batch()
        applied = [(f.state, t) for (f, was), t in zip(before, sampled, strict=True) if was not in OVER]
        self.lines[-1] |= {
            "updated_batch_no": self._launched.pop(0),
            "new_tokens": {state.request_id: token for state, token in applied},
            "finished": [state.request_id for state, _ in applied if state.status.name == "FINISHED"],
            "discarded_tokens": [f.state.request_id for f, was in before if was in OVER],
            "update_events": list(self._events),
            "after_update": self._state(),
        }

    def resolved(self) -> Line:
        """The header: parameters in effect."""
        cache, scheduler = self.cache, self.scheduler
        return {
            **self._sizes(),
            "transformers": import_module("transformers").__version__,
            "scheduler": type(scheduler).__name__,
            "safety_margin": scheduler.safety_margin,
            "num_blocks": cache.num_blocks,
            "max_batch_tokens": cache.max_batch_tokens,
            "max_requests_per_batch": scheduler.max_requests_per_batch,
            "max_blocks_per_request": cache.max_blocks_per_request,
            "allow_block_sharing": cache.allow_block_sharing,
            "cache_budget": self._pages(),
            "async": self.processor.use_async_batching,
        }

    def _sizes(self) -> Line:
        host_blocks = self.processor.offloading_manager._num_cpu_blocks
        return {**({"cpu_blocks": host_blocks} if host_blocks else {}), "block_size": self.cache.block_size}


class Live:
    """A workload fed to the original, pass by pass, as its generation loop would."""

    def __init__(self, workload: Line, processor: Any, recorder: Recorder) -> None:
        self.processor, self.recorder, self.name = processor, recorder, workload["name"]
        self._tokens, self._eos = Tokens(workload), workload.get("eos_token_id")
        self._requests, self._cancels = workload["requests"], workload.get("cancels", [])
        last = [r["arrival_step"] for r in self._requests] + [c["step"] for c in self._cancels]
        self._last = max(last)

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
        requests = [r for r in self._requests if r["arrival_step"] == step]
        for r in requests:
            state = _module("requests").RequestState(
                request_id=r["id"],
                initial_tokens=list(r["prompt"]),
                max_new_tokens=r["max_new_tokens"],
                eos_token_id=self._eos,
                num_children=r.get("num_children", 0),
            )
            self.processor.input_queue.put(state)
        cancels = [c["id"] for c in self._cancels if c["step"] == step]
        for request_id in cancels:
            self.processor.cancel_queue.put(request_id)
        return [r["id"] for r in requests], cancels

    def _forward(self) -> None:
        """What the model would do: transfer, sample a token for every row that asks for one, transfer back."""
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
            given = {"generated": list(output.generated_tokens), "status": output.status.name}
            done[output.request_id] = given | {"prompt_len": len(output.prompt_ids)}
        return done

    def trace(self) -> list[Line]:
        """Header, passes, footer."""
        header = {"header": True, "workload": self.name, "resolved": self.recorder.resolved()}
        return [header, *self.recorder.lines, {"footer": True, "outputs": self.outputs()}]


def record(workload: Line) -> list[Line]:
    """The trace of a workload, by transformers 5.17."""
    with _on_a_cpu():
        processor = _processor(workload)
        live = Live(workload, processor, Recorder(processor))
        live.run()
    return live.trace()
