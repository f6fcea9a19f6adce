"""SGLang's event loops on a CPU: its own scheduler, radix tree and allocators; its forward pass gives the tokens of a
workload. Time is the number of the pass.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from cbsim.conformance.reader import due
from cbsim.live import sglang_workloads, stubs
from cbsim.live.original import Line
from cbsim.workload import served
from cbsim.workload.scheduler_tests import STOP_TOKEN

stubs.install()  # before the first import of SGLang

import torch  # noqa: E402
from sglang.srt.arg_groups import overrides  # noqa: E402
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape  # noqa: E402
from sglang.srt.managers import scheduler as managers  # noqa: E402
from sglang.srt.mem_cache.allocator import paged, token  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.version import __version__  # noqa: E402

versions, lengths, options = ("0.5.23",), sglang_workloads.LENGTHS, "config"
plain, draw = sglang_workloads.PLAIN, sglang_workloads.draw
LAST_PASS = 5_000
HAPPENED = ("arrivals", "cancels", "aborted", "retracted", "preempted", "evicted")
NO_ARGUMENTS = ("max_total_num_tokens", "vocab_size")  # options that are no arguments of the server
ABSENT = """sliding_window_size max_new_tokens_limit tokenizer hisparse_coordinator decode_offload_manager draft_worker
min_free_slots_delayer dllm_config dynamic_chunk_sizer scripted_scheduler_hook mm_receiver rust_server metrics_collector
truncation_align_size"""
OFF = """enable_lora enable_overlap_mlx enable_pdmux enable_hierarchical_cache enable_lmcache enable_hicache_storage
enable_unified_cache_external_linker enable_hisparse enable_unified_memory enable_fpm attn_dp_enabled is_hybrid_swa
require_mlp_sync abort_on_priority_when_disabled processed_tokens_counter _sched_idled _war_barrier_enabled"""
SHAPE, CHUNK = "intermediate_size n_groups num_heads head_dim state_size", 64  # of a state; a kernel's tokens
INERT = "load_publisher kv_events_publisher profiler_manager output_streamer pool_stats_observer dllm_manager"
IGNORED = """publish_load_snapshot maybe_sleep_on_idle update_cache_from_scheduler _record_step_counters
_maybe_namespace_elastic_radix_cache _maybe_clear_mm_inputs _record_kv_event_lora_name"""


def modes(workload: Line) -> Sequence[str]:  # noqa: ARG001
    return "normal", "overlap"


def read_as(header: Line, version: str) -> Line:
    return header | {"sglang": version}


def record(workload: Line, mode: str, kind: type[Recorder] | None = None, loop: str = "event_loop_{}") -> list[Line]:
    """Run a workload in an event loop. Raises what SGLang raises, and where SGLang leaves an order open. `kind` and
    `loop`, of another sort of server: what records it, and what its loops are called.
    """
    config, normal = workload["config"], mode == "normal"
    arguments = {name: value for name, value in config.items() if name not in NO_ARGUMENTS}
    arguments |= {"pp_max_micro_batch_size": config["max_running_requests"], "disable_overlap_schedule": normal}
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank"), 0)
    context, batch, adder = managers.get_context(), managers.ScheduleBatch, managers.PrefillAdder
    retract, preempt = batch.retract_decode, adder.preempt_to_schedule
    with (
        context.override_server_args(device="cpu", **arguments),
        context.parallel.override(**ranks, attn_tp_group=Inert(cpu_group=None)),
        patch.object(overrides, "mamba_cache_chunk_size", lambda _: CHUNK),
    ):
        made = (kind or Recorder)(workload, arguments)
        with (
            patch.object(batch, "retract_decode", lambda batch: made.retracted(*retract(batch))),
            patch.object(adder, "preempt_to_schedule", lambda adder, one: made.preempted(preempt(adder, one), adder)),
        ):
            getattr(made, loop.format("normal" if normal else "overlap"))()
    header = {"ev": "header", "format": 1, "sglang": __version__, "loop": mode, "workload": workload["name"]}
    return [header | {"config": config}, *made.lines, made.footer()]


class Inert(SimpleNamespace):
    """A part of the server that answers every call with None, but for those that are given."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _none


class Recorder(managers.Scheduler):  # type: ignore[misc]
    """SGLang's scheduler, made without its constructor, and the lines of what it decides. `pending`: what has happened
    in the pass. `freed`: the nodes of the eviction under way.
    """

    def __init__(self, workload: Line, arguments: Line) -> None:
        requests = workload["requests"]
        cancels = [request for request in requests if "cancel_step" in request]
        self.coming = sorted(requests, key=lambda request: request["arrival_step"])[::-1]
        self.cancels = sorted(cancels, key=lambda request: request["cancel_step"])[::-1]
        none: Line = {"first_step": None, "end_step": None, "reason": None, "n_out": 0, "retractions": 0, "wasted": 0}
        self.requests = {request["id"]: request for request in requests}
        self.over = {name: dict(none) for name in self.requests}
        self.now, self.lines, self.freed = -1, list[Line](), list[Any]()
        self.pending: dict[str, list[Any]] = {name: [] for name in HAPPENED}
        given = arguments | dict.fromkeys(ABSENT.split()) | dict.fromkeys(OFF.split(), 0)
        self.__dict__ |= given | {name: Inert() for name in INERT.split()} | dict.fromkeys(IGNORED.split(), _none)
        self.surround()
        self.take_memory(workload["config"]["max_total_num_tokens"])
        self.init_running_status()
        with patch.object(managers, "get_resolved_model_impl", lambda _: None):  # it matters for images
            self.init_chunked_prefill()
        self.init_schedule_policy()
        self.init_overlap()
        self.init_batch_result_processor()

    def surround(self) -> None:
        """Add what the server has round its scheduler, the model included."""
        self.enable_overlap, self.is_generation, self.device = not self.disable_overlap_schedule, True, "cpu"
        self.disaggregation_mode = managers.DisaggregationMode.NULL
        self.spec_algorithm = managers.SpeculativeAlgorithm.from_string(None)
        model = dict.fromkeys(("is_encoder_decoder", "is_multimodal", "self_opened_think_start_ids"))
        self.model_config = Inert(vocab_size=1 << 30, context_len=self.context_length, hf_eos_token_id=set(), **model)
        counts = dict.fromkeys(("enable_metrics", "num_generated_tokens", "forward_ct_decode", "num_retracted_reqs"), 0)
        self.metrics_reporter = Inert(**counts)
        self.scheduler_stage_metrics = Inert(_trace_stage=None, record=lambda _: nullcontext())
        self.load_inquirer = Inert(_get_num_pending_tokens=lambda **_: 0)
        self.grammar_manager = Inert(grammar_queue=[])
        self.dp_attn_adapter = Inert(maybe_prepare_mlp_sync_batch=_same, maybe_convert_decode_to_extend=_same)
        self.ngram_embedding_manager = Inert(prepare_for_forward=_same)
        self.invariant_checker = Inert(_check_all_pools=lambda _: (False, []))
        runner = Inert(attn_backend=Inert(needs_cpu_seq_lens=True), prefill_aware_swa=False)
        self.tp_worker = self.model_worker = Inert(model_runner=runner, forward_batch_generation=self.forward)
        self.forward_stream = self.schedule_stream = torch.cpu.Stream()
        vars(self.schedule_stream)["synchronize"] = _none

    def take_memory(self, size: int) -> None:
        """Make the tables, the slots and the tree; evictions are noted from now on."""
        page, kind, rest = self.page_size, token.TokenToKVPoolAllocator, (torch.float16, "cpu", None, False)
        self.max_total_num_tokens, self.max_req_len = size, min(self.context_length, size) - 1
        self.max_req_input_len = self.max_req_len - 5  # as the model's worker computes it
        rows = self.req_to_token_pool = self.rows()
        slots = kind(size, *rest) if page == 1 else paged.PagedTokenToKVPoolAllocator(size, page, *rest)
        parts = {"req_to_token_pool": rows, "token_to_kv_pool_allocator": slots, "page_size": page}
        parts |= {"disable": self.disable_radix_cache, "eviction_policy": self.radix_eviction_policy}
        kinds = (ComponentType.FULL, *[ComponentType.MAMBA] * bool(self.max_mamba_cache_size))
        tree = UnifiedRadixCache(CacheInitParams(tree_components=kinds, **parts))
        self.token_to_kv_pool_allocator, self.tree_cache = slots, tree
        evict, free = tree._evict, slots.free_segment

        def evicted(*arguments: Any, **more: Any) -> Any:
            self.freed = []
            result = evict(*arguments, **more)
            self.pending["evicted"].append(self.freed)
            self.freed = []
            return result

        def freed(taken: Any, *, start_pos: int) -> Any:
            self.freed.append(served.runs(taken.tolist()))
            return free(taken, start_pos=start_pos)

        tree._evict, slots.free_segment = evicted, freed

    def rows(self) -> Any:
        """Return the tables of requests, with slots for states of the least size if layers keep some."""
        size = {"size": self.max_running_requests, "max_context_len": self.context_length + 8, "device": "cpu"}
        size["enable_memory_saver"], states = False, self.max_mamba_cache_size
        if not states:
            return ReqToTokenPool(**size)
        shape = Mamba2StateShape.create(tp_world_size=1, conv_kernel=2, **dict.fromkeys(SHAPE.split(), 1))
        size |= {"mamba_size": states, "mamba_spec_state_size": states, "mamba_layer_ids": [0]}
        params = Mamba2CacheParams(shape=shape, layers=[0])
        return HybridReqToTokenPool(cache_params=params, enable_mamba_extra_buffer=False, **size)

    def ingest_requests(self) -> None:
        """Begin a pass with what is due in it. The first pass that begins with nothing left to do is the last one."""
        self.now += 1
        arrived = due(self.coming, self.now, lambda request: request["arrival_step"])
        cancelled = due(self.cancels, self.now, lambda request: request["cancel_step"])
        ended = not self.cancels and all(over["reason"] for over in self.over.values())
        self.gracefully_exit = ended and self.is_fully_idle()
        self.pending |= {"arrivals": [each["id"] for each in arrived], "cancels": [each["id"] for each in cancelled]}
        for request in arrived:
            self.handle_generate_request(_asked(request))
        for request in cancelled:
            self.abort_request(managers.AbortReq(rid=request["id"]))
        if self.now > LAST_PASS:
            raise RuntimeError(f"requests are left after {LAST_PASS} passes")

    def send_abort_output(self, abort_req: Any, req: Any) -> None:  # noqa: ARG002
        self.pending["aborted"].append(req.rid)
        if self.over[req.rid]["reason"] is None:
            self.over[req.rid] |= {"end_step": self.now, "reason": "abort"}

    def lost(self, kind: str, requests: list[Any]) -> None:
        """Note that requests have lost their KV."""
        for request in requests:
            self.pending[kind].append([request.rid, len(request.output_ids)])
            self.over[request.rid]["retractions"] += 1

    def retracted(self, retracted: list[Any], ratio: float, aborted: list[Any]) -> Any:
        self.lost("retracted", [*retracted, *aborted])
        return retracted, ratio, aborted

    def preempted(self, done: bool, adder: Any) -> bool:
        victims = adder.preempt_list[len(self.pending["preempted"]) :]
        if len(victims) > 1:
            raise RuntimeError("several requests are preempted for one, and SGLang queues them in no defined order")
        self.lost("preempted", victims)
        return done

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        return self.noted(super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch))

    def noted(self, planned: Any) -> Any:
        """Write the line of a decision."""
        batch, running, chunked = planned.batch_to_run, planned.running_batch, self.chunked_req
        line: Line = {"ev": "sched", "step": self.now, **self.pending, "kind": "none", "rows": [], "decoding": []}
        if batch is not None:
            decodes, mixed = batch.forward_mode.is_decode(), batch.forward_mode.is_mixed()
            line |= {"kind": "decode" if decodes else "mixed" if mixed else "extend", "batch": self.forward_ct}
            line |= {"rows": _rows(batch), "decoding": [r.rid for r in batch.decoding_reqs or ()] if mixed else []}
        line |= {
            "n": len(line["rows"]),
            "chunked": None if chunked is None else chunked.rid,
            "waiting": [request.rid for request in self.waiting_queue],
            "running": [request.rid for request in running.reqs],
            "full": bool(running.batch_is_full),
            "ratio": round(self.new_token_ratio_tracker.current, 9),
        }
        self.lines.append(line | self.memory())
        self.pending = {name: [] for name in HAPPENED}
        return planned

    def process_batch_result(self, batch: Any, result: Any) -> None:
        before = {request.rid: (len(request.output_ids), request.finished()) for request in batch.reqs}
        super().process_batch_result(batch, result)
        self.pending["evicted"] = []  # a line has those of the decision
        tokens, finished, dropped = list[str](), list[list[Any]](), list[str]()
        for request in batch.reqs:
            name, outputs, (had, ended) = request.rid, len(request.output_ids), before[request.rid]
            over = self.over[name]
            if outputs > had:
                tokens.append(name)
                over |= {"n_out": outputs, "first_step": self.now if over["first_step"] is None else over["first_step"]}
            elif ended or request.is_retracted:
                dropped.append(name)
                over["wasted"] += 1
            if request.finished() and not ended:
                over |= {"end_step": self.now, "reason": request.finished_reason.to_json()["type"]}
                finished.append([name, over["reason"], outputs])
        line = {"ev": "result", "step": self.now, "of": batch.forward_iter - 1, "tokens": tokens, "finished": finished}
        self.lines.append(line | {"dropped": dropped} | self.memory())

    def memory(self) -> Line:
        slots, tree = self.token_to_kv_pool_allocator, self.tree_cache
        sizes = {
            "avail": slots.available_size(),
            "evictable": tree.evictable_size(),
            "protected": tree.protected_size(),
        }
        if self.max_mamba_cache_size:
            sizes["states"] = self.req_to_token_pool.mamba_allocator.available_size()
        return {name: int(tokens) for name, tokens in sizes.items()}

    def forward(self, batch: Any, **_: Any) -> Any:
        """Return the workload's tokens; 0 in the middle of a prompt and after the last one."""
        tokens = []
        for request, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            prompt, output = self.requests[request.rid]["prompt"], self.requests[request.rid]["output"]
            at = length - len(prompt)
            tokens.append(output[at] if 0 <= at < len(output) else 0)
        return managers.GenerationBatchResult(next_token_ids=torch.tensor(tokens, dtype=torch.int64))

    def footer(self) -> Line:
        """Return the last line. All memory and every row of the table is free or can be evicted."""
        memory = self.memory()
        assert memory["avail"] + memory["evictable"] == self.max_total_num_tokens, memory
        assert self.req_to_token_pool.available_size() == len(self.req_to_token_pool.req_to_token) - 1
        assert memory.get("states") == self.max_mamba_cache_size, memory
        return {"ev": "footer", "steps": self.now + 1, "batches": self.forward_ct, "requests": self.over}


def _none(*_: Any, **__: Any) -> None:
    pass


def _same(batch: Any, **_: Any) -> Any:
    return batch


def _rows(batch: Any) -> list[list[Any]]:
    """Return [id, first position, tokens, row of the table, slots] of each row of a batch."""
    ends, slots = batch.seq_lens_cpu.tolist(), batch.out_cache_loc.tolist()
    counts = [1] * len(ends) if batch.forward_mode.is_decode() else batch.extend_lens
    rows, at = [], 0
    for request, end, count, row in zip(batch.reqs, ends, counts, batch.req_pool_indices_cpu.tolist(), strict=True):
        rows.append([request.rid, end - count, count, row, served.runs(slots[at : at + count])])
        at += count
    return rows


def _asked(request: Line) -> Any:
    """Return a request as the tokenizer hands it over."""
    whole, most = bool(request.get("ignore_eos")), request["max_new_tokens"]
    sampling = SamplingParams(temperature=0.0, max_new_tokens=most, ignore_eos=whole, stop_token_ids={STOP_TOKEN})
    sampling.normalize(None)
    given = {"rid": request["id"], "input_text": "", "priority": request.get("priority"), "sampling_params": sampling}
    given |= dict.fromkeys(("input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
    given |= {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": False}
    prompt = array("q", request["prompt"])
    return managers.TokenizedGenerateReqInput(input_ids=prompt, time_stats=APIServerReqTimeStats(), **given)
