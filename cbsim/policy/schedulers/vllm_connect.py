"""Which KV connector the options of vLLM name."""

from __future__ import annotations

from cbsim.policy.decoding import Decoding
from cbsim.policy.host_blocks import HostBlocks
from cbsim.policy.host_cache import Arc, HostCache, Lru
from cbsim.policy.observer import Observer
from cbsim.policy.queues import Queue
from cbsim.policy.schedulers.vllm_hand_off import HandOff
from cbsim.policy.schedulers.vllm_native_offload import NativeOffload
from cbsim.policy.schedulers.vllm_settings import VllmOptions
from cbsim.policy.schedulers.vllm_simple_offload import EagerOffload, LazyOffload
from cbsim.policy.schedulers.vllm_transfers import Connector, Transfers


def connect(options: VllmOptions, decoding: Decoding, holding: Queue, observer: Observer) -> Transfers:
    """The connector of a scheduler, and what it adds to the rules. `holding` is a second queue, of the same kind."""
    decoding.pool.host_blocks = options.host_blocks
    ahead = options.async_scheduling and not (options.hands_on and options.kv_role == "kv_producer")
    return Transfers(_connector(options, decoding), decoding, holding, observer, ahead=ahead)


def _connector(o: VllmOptions, decoding: Decoding) -> Connector:
    if o.kv_connector == "hand_off":
        return HandOff(decoding)
    if o.kv_connector == "offloading":
        chunks = o.host_blocks // o.blocks_per_chunk
        cache = HostCache(chunks, Arc(chunks) if o.eviction_policy == "arc" else Lru())
        return NativeOffload(decoding, cache, o.blocks_per_chunk, prompts_only=o.offload_prompt_only)
    host = HostBlocks(o.host_blocks)
    if not o.lazy_offload:
        return EagerOffload(decoding, host)
    return LazyOffload(decoding, host, 2 * decoding.pool.blocks_for(o.max_num_batched_tokens))
