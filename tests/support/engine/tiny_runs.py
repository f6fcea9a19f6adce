"""A tiny model as tests of the device run it: its samplings, its capacities, its loads and servers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from cbengine.batch import Capacity
from cbengine.build import Setup
from cbengine.device.executor import Executor
from cbengine.model import weights
from cbengine.model.decoder import Model
from cbengine.model.kvcache import KvCache
from cbengine.model.ops import TorchOps
from cbengine.model.weights import Architecture
from cbengine.sampling import Sampling, SamplingSettings
from cbsim.workload.requests import Workload
from support.engine.served import MS, SHAPE, Run, asked, spec

TINY = Architecture(name="tiny", tied_embeddings=False, max_position=256, **SHAPE)
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)
WAYS = {"greedy": Sampling(), "sampled": SAMPLED}
MIXED = SamplingSettings(
    {"r1": Sampling(), "r2": Sampling(temperature=1.2, top_p=0.8), "r4": Sampling(temperature=2.0, top_k=3)}
)
capacities = st.builds(
    lambda slots, width, rows, tokens: Capacity(slots, width, min(rows, slots), tokens + min(rows, slots) + 64),
    *(st.integers(1, 300), st.integers(1, 40), st.integers(1, 300), st.integers(0, 5000)),
)


def peak_bytes(act: Callable[[], object]) -> int:
    """The most bytes of tensors that `act` holds at a time, beside what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        act()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def tiny_executor(capacity: Capacity) -> tuple[Executor, KvCache]:
    cpu = torch.device("cpu")
    model = Model(TINY, weights.random(TINY, 1, torch.float32, cpu), TorchOps(), 4 * capacity.width)
    cache = KvCache(TINY, capacity.slots * capacity.width, 4, torch.float32, cpu)
    return Executor(model, cache, capacity), cache


def tiny_load(requests: int = 7) -> Workload:
    """Requests that come in one by one and end one by one."""
    kinds = [(13, 9), (1, 20), (8, 14), (30, 3)]
    specs = [spec(i, *kinds[i % 4], arrival_ns=6 * MS * i) for i in range(requests)]
    return Workload(specs, len(specs))


LIMITS = {
    "vllm": ("max_num_batched_tokens", "max_num_seqs"),
    "contiguous": ("max_num_batched_tokens", "max_num_seqs"),
    "static": (None, "batch_size"),
    "dynamic_padded": (None, "batch_size"),
    "tgi": (None, "max_batch_size"),
    "faster_transformer": (None, "max_num_seqs"),
    "orca": (None, "max_num_seqs"),
    "sarathi": ("chunk_size", "max_num_seqs"),
    "simple_chunking": ("chunk_size", "max_num_seqs"),
    "vllm_v0": (None, "max_num_seqs"),
    "trtllm": (None, "max_batch_size"),  # which refuses a prompt beyond the budget
    "sglang": ("chunked_prefill_size", "max_running_requests"),
}


def tiny_server(scheduler: str, *overrides: str) -> Any:
    name = scheduler.partition(" ")[0]
    limit, seats = LIMITS.get(name, ("max_batch_tokens", "max_requests_per_batch"))
    budget = [f"scheduler.{limit}=24"] if limit else []
    sizes = ("kv_cache={block_size: 4, num_blocks: 200}", f"scheduler.{seats}=6", "model.dtype=float32")
    return asked(scheduler, *sizes, *budget, *overrides)


def tiny_run(scheduler: str, loop: str, setup: Setup, tick_ns: int = MS, *overrides: str, **hooks: Any) -> Run:
    return Run(tiny_server(scheduler, *overrides), loop, tiny_load(), setup=setup, tick_ns=tick_ns, **hooks)
