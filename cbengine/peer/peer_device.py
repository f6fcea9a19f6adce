"""What transformers' continuous batching is told, and what it runs on: attention, options, buffers, clocks.

With `flash_attn` importable on a GPU, or our stand-in for it lent, the library takes its fast paths: paged decode, CUDA
graphs, asynchronous batches on three streams. Without, it runs paged SDPA with an attention mask. On a CPU its double
buffer, which insists on streams, is replaced by one in host memory: the same order of plans, launches and results, and
no overlap at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs, HostDeviceIOPair
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils.import_utils import is_flash_attn_2_available

from cbengine.errors import UsageError
from cbengine.peer import standin
from cbsim.policy.schedulers.static_settings import PROFILE_TOKENS
from cbsim.policy.schedulers.transformers_settings import TransformersOptions
from cbsim.scenario.scenario import Scenario, depth, scheduler_options
from cbsim.server.running import ServerError
from cbsim.workload.generators import Workload

EXACT = (
    *("scheduler_type", "max_batch_tokens", "max_requests_per_batch", "max_blocks_per_request"),
    *("safety_margin", "allow_block_sharing"),
)
FLASH, SDPA = "paged|flash_attention_2", "paged|sdpa"
FLASH_DTYPES = (torch.bfloat16, torch.float16)
DOUBLE_BUFFER = "asynchronous on a CPU: the double buffer is in host memory, nothing overlaps"
NO_FLASH = "no flash_attn: attention is SDPA with a mask, without paged decode, CUDA graphs and asynchronous batches"


class PeerError(UsageError, ServerError):
    """transformers cannot serve a scenario, or its generation loop has died: the message says why."""


def attention(device: torch.device, dtype: torch.dtype, loop: str) -> tuple[str, list[str]]:
    """The library's name of the attention that a model can run, and what that means for its figures. Raises PeerError
    where the library itself would not batch asynchronously.
    """
    if device.type != "cuda":
        return SDPA, [DOUBLE_BUFFER] if loop == "async" else []
    installed, weights = is_flash_attn_2_available(), str(dtype).removeprefix("torch.")
    if installed and dtype in FLASH_DTYPES:
        return FLASH, [standin.NOTE] if standin.is_lent() else []
    if standin.is_lent():
        text = f"flash attention computes in bfloat16 or float16 (the weights are {weights})"
        raise PeerError(
            f"--flash-attn stand-in: {text if installed else 'transformers does not take it for the package'}"
        )
    if loop == "async":
        text = f"transformers needs flash attention in bfloat16 or float16 (the weights are {weights})"
        way_out = "put a flash_attn package on PYTHONPATH, or run with loop.mode=sync, or with --flash-attn stand-in"
        raise PeerError(f"loop.mode: async: {text}: {way_out}")
    return SDPA, [NO_FLASH]


def configuration(
    scenario: Scenario, loop: str, blocks: int, workload: Workload, *, cuda: bool, graphs: bool
) -> tuple[ContinuousBatchingConfig, WorkloadHints | None, list[str]]:
    """The library's options, hints for those left open, and what could not be taken over from the scenario."""
    options = scheduler_options(scenario, depth(loop))
    common: dict[str, Any] = {
        "block_size": options.block_size,
        "num_blocks": blocks,
        "use_async_batching": cuda and loop == "async",  # on a CPU the library would refuse: see `double_buffer`
        "use_cuda_graph": graphs,
        "seed": scenario.seed,
    }
    if isinstance(options, TransformersOptions):
        exact = {name: getattr(options, name) for name in EXACT}
        memory = scenario.kv_cache.memory_fraction
        return ContinuousBatchingConfig(**common, **exact, max_memory_percent=memory), None, []
    limits = options.limits
    tokens = min(limits.tokens or PROFILE_TOKENS, blocks * options.block_size)
    specs = workload.specs()
    hints = WorkloadHints(
        max_prompt_length=max((spec.prompt_tokens for spec in specs), default=0),
        max_generated_length=max((spec.output_tokens for spec in specs), default=0),
        num_requests=len(specs),
    )
    text = f"scheduler {scenario.scheduler.name} is not one of transformers': fifo with its sizes stands in"
    config = ContinuousBatchingConfig(**common, max_batch_tokens=tokens, max_requests_per_batch=limits.seats)
    return config, hints, [text]


@contextmanager
def host_memory(device: torch.device) -> Iterator[None]:
    """While a cache is made on a CPU: the memory that is free, which the library would ask a package for that few have
    and take for nothing otherwise.
    """
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        yield
        return
    original = PagedAttentionMemoryHandler.get_available_memory
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    PagedAttentionMemoryHandler.get_available_memory = lambda _: free
    try:
        yield
    finally:
        PagedAttentionMemoryHandler.get_available_memory = original


class HostAsyncIOs(ContinuousBatchingAsyncIOs):  # type: ignore[misc]
    """The library's double-buffered inputs and outputs with both sides in host memory and no streams."""

    def __init__(self, **given: Any) -> None:  # the library's own begins by refusing to work without CUDA
        self.current_pair = 0
        self.io_pairs = [HostDeviceIOPair(**given) for _ in range(2)]
        self.h2d_stream = self.d2h_stream = self.compute_stream = None
        self.max_batch_tokens = given["cache"].max_batch_tokens

    def get_model_kwargs(self, use_padding: bool = False) -> Any:
        pair = self.io_pairs[self.current_pair]
        pair.host_io._transfer_inputs(pair.device_io, stream=None)
        return pair.device_io.get_model_kwargs(use_padding=use_padding)

    def retrieve_device_outputs(self) -> None:
        self.io_pairs[self.current_pair].transfer_outputs_d2h(None)
        self.swap_io_pairs()

    def prepare_batch_update(self) -> Any:
        return self.io_pairs[self.current_pair].host_io.prepare_batch_update()

    def reset(self) -> None:
        self.current_pair = 0
        for pair in self.io_pairs:
            pair.reset()


def double_buffer(processor: Any) -> None:
    """Turn a synchronous batch processor on a CPU into an asynchronous one."""
    processor.inputs_and_outputs = processor.model_runner.inputs_and_outputs = HostAsyncIOs(
        cache=processor.cache,
        config=processor.config,
        continuous_batching_config=processor.cb_config,
        device=processor.model_device,
        model_dtype=processor.model_dtype,
        logit_processor=processor.logit_processor,
    )
    processor.use_async_batching = processor.cb_config.use_async_batching = True


def warm_up(manager: Any) -> None:
    """Capture the library's graphs or, without them, run each of its paths once."""
    manager.warmup()
    runner = manager.batch_processor.model_runner
    if not runner.pad_inputs:
        runner.run_one_warmup(manager.model, num_q_tokens=1, max_kv_read=runner.cache.block_size)
        if runner.cache.max_blocks_per_request:
            runner.run_one_warmup(manager.model, num_q_tokens=1, max_kv_read=None)


class HostClock:
    """When kernels ran that are done as soon as they are launched. Times are absolute `perf_counter_ns`."""

    mark = staticmethod(time.perf_counter_ns)

    def interval(self, before: int, after: int, known_ns: int) -> tuple[int, int]:
        del known_ns
        return before, after


class CudaClock:
    """When kernels ran on a stream, on the host's clock.

    Times are distances from the event before, which keeps them precise. The two clocks drift apart slowly, so the
    mapping moves whenever a step would have begun before it was enqueued or ended after its tokens were there.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        stream.synchronize()
        self._last, _ = self.mark()
        self._last.synchronize()
        self._last_ns = time.perf_counter_ns()

    def mark(self) -> tuple[torch.cuda.Event, int]:
        """An event on the stream, and the moment from which on it can happen."""
        event = torch.cuda.Event(enable_timing=True)
        now = time.perf_counter_ns()
        event.record(self._stream)
        return event, now

    def interval(
        self, before: tuple[torch.cuda.Event, int], after: tuple[torch.cuda.Event, int], known_ns: int
    ) -> tuple[int, int]:
        """Start and end of what was enqueued between two marks and was over at `known_ns`; marks in order of time."""
        low = max(before[1], self._last_ns)
        start = self._last_ns + round(self._last.elapsed_time(before[0]) * 1e6)
        end = start + round(before[0].elapsed_time(after[0]) * 1e6)
        shift = max(low - start, 0) or min(known_ns - end, 0)
        start = max(low, start + shift)
        end = max(start, min(known_ns, end + shift))
        self._last, self._last_ns = after[0], end
        return start, end
