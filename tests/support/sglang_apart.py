"""SGLang's servers that prefill or decode for others, recorded: its own scheduler and queues for both roles, with a
transport that takes as many passes as a workload says. Wants SGLang, as cbsim/live/sglang.py does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

from cbsim.live import sglang, sglang_workloads
from cbsim.live.original import Line
from cbsim.live.sglang import managers, torch
from cbsim.workload import served

decode, prefill, utils, base = (
    import_module(f"sglang.srt.disaggregation.{name}") for name in ("decode", "prefill", "utils", "base")
)
KVPoll = base.KVPoll
BACKUP = {"disaggregation_decode_retraction_backup": "cpu_tensor"}


def draw(number: int) -> Line:
    """A workload for a server with a role, which depends on its number alone."""
    rng = random.Random(f"apart {number}")
    workload = sglang_workloads.draw(rng, number)
    requests = give_role(rng, workload["config"], workload["requests"])
    return workload | {"name": f"pd{number}", "requests": requests}


def give_role(rng: random.Random, config: Line, requests: list[Line]) -> list[Line]:
    """Give the server a role. Return the requests that it can serve, each with the passes until the other server is
    `ready` for it, and in which its KV `moves`.
    """
    page, seats, tokens = config["page_size"], config["max_running_requests"], config["max_total_num_tokens"]
    longest = min(config["context_length"], tokens) - 7
    config |= {"max_mamba_cache_size": None, "disaggregation_mode": rng.choice(["prefill", "decode"])}
    decodes = config["disaggregation_mode"] == "decode"
    if decodes:
        cached, kept = rng.random() < 0.3, rng.choice([0, 1, 8, 40])
        config |= {"disaggregation_decode_enable_radix_cache": cached, "disable_radix_cache": not cached}
        more, ordered = rng.choice([0, 2, 2 * seats]), cached or config["enable_priority_scheduling"]
        config |= {"num_reserved_decode_tokens": kept, "disaggregation_decode_extra_slots": more}
        config |= {"schedule_policy": config["schedule_policy"] if ordered else "fcfs"}
        longest = min(longest, tokens - kept - page)
    slowest = rng.choice([1, 3, 20])
    for request in requests:
        request["kv"] = {"ready": 0 if decodes else rng.randint(0, slowest), "moves": rng.randint(1, 2 * slowest)}
        if rng.random() < 0.05:
            request["kv"]["fails"] = True
    return [request for request in requests if len(request["prompt"]) <= longest]


def record(workload: Line, mode: str) -> list[Line]:
    """Run a workload as `sglang.record` does. Raises besides where a cancellation takes SGLang several passes."""
    role = workload["config"]["disaggregation_mode"]
    kind = Prefilling if role == "prefill" else DecodingServer
    with (
        patch.object(utils, "all_reduce_flags", lambda flags, **_: flags),
        patch.object(decode, "all_reduce_flags", lambda flags, **_: flags),
        patch.object(decode, "get_kv_class", lambda *_: Receiver),
        patch.object(prefill, "get_kv_class", lambda *_: Sender),
        patch.object(decode.DecodePreallocQueue, "_init_kv_manager", lambda queue: queue.scheduler.wire),
        patch.object(prefill.PrefillBootstrapQueue, "_init_kv_manager", lambda queue: queue.scheduler.wire),
    ):
        given = workload | {"config": workload["config"] | BACKUP}
        header, *lines = sglang.record(given, mode, kind, f"event_loop_{{}}_disagg_{role}")
    return [header | {"config": workload["config"]}, *lines]


KEPT = sglang.Inert(cpu_copy_carries_mamba=True)  # the memory of the cache, as far as a retraction asks for it


class Wire(sglang.Inert):
    """The transport of a server with a role, whose transfers take as many passes as their requests say."""

    kv_args, prefill_info_table = sglang.Inert(state_types=[]), {"other:1": sglang.Inert(dp_size=1)}
    enable_deferred_decode_kv_release = is_dummy_cp_rank = True
    bootstrap_room = torch.ones((4096, 1))
    recorder: Any
    ends: dict[int, int]
    rooms: dict[int, int]
    allocated: list[Any]

    def is_abort_release_safe(self, room: int, acks: int) -> bool:
        return bool(self.recorder.now >= self.ends[room])

    def get_buf(self, index: int) -> Any:
        """Return what comes with the KV: the first output."""
        request = self.recorder.numbered[self.rooms[index]]
        room = torch.tensor([self.rooms[index]])
        return torch.tensor([request["output"][0]]), torch.zeros(8), *[None] * 11, room


class End:
    """One end of a transfer. `sent_at`: the pass in which it begins."""

    supports_host_destination = supports_host_tensor_indices = require_staging = abort_notified = failed = False
    conclude_state = sent_at = None
    bootstrap_infos = ()

    def __init__(self, mgr: Wire, bootstrap_addr: str, bootstrap_room: int, **_: Any) -> None:
        self.kv_mgr, self.room = mgr, bootstrap_room
        self.request = mgr.recorder.numbered[bootstrap_room]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return sglang.Inert.__getattr__(sglang.Inert(), name)

    def poll(self) -> Any:
        now, kv = self.kv_mgr.recorder.now, self.request["kv"]
        if self.failed:
            return KVPoll.Failed
        if now < self.request["arrival_step"] + kv["ready"]:
            return KVPoll.Bootstrapping
        if self.sent_at is None:
            return KVPoll.WaitingForInput
        if now < self.sent_at + kv["moves"]:
            return KVPoll.Transferring
        return KVPoll.Failed if kv.get("fails") else KVPoll.Success

    def send_now(self) -> None:
        self.sent_at = self.kv_mgr.recorder.now
        self.kv_mgr.ends[self.room] = self.sent_at + self.request["kv"]["moves"]

    def abort(self) -> None:
        self.failed, self.abort_notified = True, self.sent_at is not None

    def failure_exception(self) -> None:
        raise RuntimeError("failed")


class Sender(End):
    def pop_decode_prefix_len(self) -> int:
        return 0

    def should_send_kv_chunk(self, pages: int, last: bool) -> bool:
        if last:
            self.send_now()
        return True


class Receiver(End):
    def abort(self) -> None:
        if self.poll() in (KVPoll.Success, KVPoll.Failed):
            raise RuntimeError("a request is cancelled as its KV arrives, whose blocks SGLang holds a pass longer")
        super().abort()

    def send_metadata(self, pages: Any, index: int, states: Any, decode_prefix_len: int) -> None:
        if not len(pages):
            raise RuntimeError("a prompt is found whole, so that nothing comes but the first output")
        self.kv_mgr.rooms[index] = self.room
        self.kv_mgr.allocated.append([self.request["id"], decode_prefix_len, served.runs(pages.tolist())])
        self.send_now()


class Apart(sglang.Recorder):
    """A server with a role. Lines have its queues, and aborts are seen as they are reported."""

    mode: Any

    def __init__(self, workload: Line, arguments: Line) -> None:
        super().__init__(workload, arguments)
        self.init_queues()

    def surround(self) -> None:
        super().surround()
        self.disaggregation_mode = self.mode
        self.tp_worker.is_hybrid_swa = False
        self.tp_worker.model_runner.effective_logical_max_total_num_tokens = 1 << 30

    def ingest_requests(self, stop_at_pause: bool = False) -> None:
        del stop_at_pause
        super().ingest_requests()

    def noted(self, planned: Any) -> Any:
        super().noted(planned)
        self.lines[-1] |= self.queues()
        self.lines[-1]["aborted"].sort()
        return planned

    def queues(self) -> Line:
        raise NotImplementedError

    def init_queues(self) -> None:
        self.numbered = dict(enumerate(self.requests.values(), 1))
        self.output_streamer.stream_output = self.streamed
        self.wire = Wire(recorder=self, ends={}, rooms={}, allocated=[])

    def streamed(self, requests: list[Any], *_: Any) -> None:
        for request in requests:
            over = self.over[request.rid]
            if over["reason"] is None and isinstance(request.finished_reason, managers.FINISH_ABORT):
                self.send_abort_output(None, request)
            elif over["reason"] is None and request.finished() and self.mode is Prefilling.mode:
                over |= {"end_step": self.now, "reason": "length"}

    def handle_generate_request(self, recv_req: Any) -> None:
        room = next(n for n, request in self.numbered.items() if request["id"] == recv_req.rid)
        recv_req.bootstrap_room, recv_req.bootstrap_host, recv_req.bootstrap_port = room, "other", 1
        super().handle_generate_request(recv_req)


class Prefilling(Apart):
    """A server whose requests others decode."""

    mode = managers.DisaggregationMode.PREFILL

    def init_queues(self) -> None:
        super().init_queues()
        self.transfer_backend = utils.TransferBackend.MOONCAKE
        self.req_to_metadata_buffer_idx_allocator = utils.ReqToMetadataIdxAllocator(2 * self.max_running_requests)
        self.disagg_metadata_buffers, self.kv_checksum_computer, self.enable_staging = sglang.Inert(), None, False
        self.attn_cp_cpu_group = self.attn_tp_cpu_group = None
        self.kv_shard_widening, self.maybe_send_cached_prefix_chunk = 1, sglang._none
        self.disagg_prefill_inflight_queue, self.disagg_prefill_pending_chunk_rids = list[Any](), set[str]()
        parts = dict.fromkeys(("token_to_kv_pool", "draft_token_to_kv_pool", "gpu_id", "bootstrap_port"))
        parts |= {"req_to_metadata_buffer_idx_allocator": self.req_to_metadata_buffer_idx_allocator}
        parts |= {"metadata_buffers": None, "scheduler": self, "scheduler_stage_metrics": self.scheduler_stage_metrics}
        parts |= {"max_total_num_tokens": 0, "transfer_backend": self.transfer_backend}
        self.disagg_prefill_bootstrap_queue = prefill.PrefillBootstrapQueue(**parts)

    def get_next_disagg_prefill_batch_to_run(self, running_batch: Any, last_batch: Any, **more: Any) -> Any:
        return self.noted(super().get_next_disagg_prefill_batch_to_run(running_batch, last_batch, **more))

    def queues(self) -> Line:
        queues = self.disagg_prefill_bootstrap_queue.queue, self.disagg_prefill_inflight_queue
        return dict(zip(("bootstrapping", "sending"), [[req.rid for req in queue] for queue in queues], strict=True))

    def process_disagg_prefill_inflight_queue(self, rids_to_check: Any = None) -> Any:
        done = super().process_disagg_prefill_inflight_queue(rids_to_check)
        if done:
            self.lines.append({"ev": "sent", "step": self.now, "requests": [req.rid for req in done], **self.memory()})
        return done


class DecodingServer(Apart):
    """A server that decodes what others prefill."""

    mode = managers.DisaggregationMode.DECODE

    def rows(self) -> Any:
        more, longest = managers.get_disagg().disaggregation_decode_extra_slots, self.context_length + 8
        return decode.DecodeReqToTokenPool(self.max_running_requests, longest, "cpu", False, more)

    def init_queues(self) -> None:
        super().init_queues()
        self.entering, slots = list[Any](), self.token_to_kv_pool_allocator
        slots.get_kvcache, slots.get_cpu_copy, slots.load_cpu_copy = lambda: KEPT, sglang._none, sglang._none
        self.transfer_backend, self.kv_checksum_computer = utils.TransferBackend.MOONCAKE, None
        self.enable_decode_hicache, self.random_seed = False, 0
        buffers = utils.ReqToMetadataIdxAllocator(2 * self.max_running_requests)
        self.req_to_metadata_buffer_idx_allocator, self.disagg_prefill_bootstrap_queue = buffers, None
        shared = {"req_to_metadata_buffer_idx_allocator": buffers, "metadata_buffers": self.wire, "scheduler": self}
        shared |= {"tree_cache": self.tree_cache}
        self.disagg_decode_prealloc_queue: Any = None
        self.disagg_decode_transfer_queue = decode.DecodeTransferQueue(**shared)
        parts = {"transfer_queue": self.disagg_decode_transfer_queue, "transfer_backend": self.transfer_backend}
        parts |= dict.fromkeys(("draft_token_to_kv_pool", "gpu_id", "bootstrap_port"))
        for name in ("req_to_token_pool", "token_to_kv_pool_allocator", "max_total_num_tokens"):
            parts[name] = getattr(self, name)
        parts["num_reserved_decode_tokens"] = managers.get_disagg().num_reserved_decode_tokens
        self.disagg_decode_prealloc_queue = decode.DecodePreallocQueue(**shared, **parts)

    def get_new_prebuilt_batch(self, running_batch: Any) -> Any:
        batch = super().get_new_prebuilt_batch(running_batch)
        self.entering = [] if batch is None else [*batch.reqs]
        return batch

    def begun(self, request: Any) -> list[Any]:
        """Return a request that has entered the batch, with the reason if that was its end."""
        over, reason = self.over[request.rid], None
        over["first_step"] = self.now if over["first_step"] is None else over["first_step"]
        over["n_out"] = len(request.output_ids)
        if request.finished():
            reason = request.finished_reason.to_json()["type"]
            over |= {"end_step": self.now, "reason": reason}
        return [request.rid, reason]

    def get_next_disagg_decode_batch_to_run(self, running_batch: Any) -> Any:
        return self.noted(super().get_next_disagg_decode_batch_to_run(running_batch))

    def queues(self) -> Line:
        waits, moves = self.disagg_decode_prealloc_queue, self.disagg_decode_transfer_queue
        if any(entry.kv_receiver.failed for entry in (*waits.queue, *moves.queue)):
            raise RuntimeError("a request is cancelled, and SGLang does not look at its queue in this pass")
        allocated, self.wire.allocated = self.wire.allocated, []
        return {
            "entered": [self.begun(request) for request in self.entering],
            "allocated": allocated,
            "allocating": [entry.req.rid for entry in waits.queue],
            "receiving": [entry.req.rid for entry in moves.queue],
            "retracted_queue": [request.rid for request in waits.retracted_queue],
        }
