"""vLLM's connectors in recordings: its configuration, a worker that completes jobs a declared time after the step that
ordered them, and the fields of trace lines.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from cbsim.live.original import Line

TOKEN_BYTES = 256  # of a recording's layer
ENDED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Worker:
    """A connector's worker. `jobs` are the transfers of a plan, `over` is what a step's output reports of them, and
    `tier` the state of the host's tier.
    """

    reports: ClassVar[tuple[str, str]] = ("", "")  # a field of lines, and where vLLM has it

    def __init__(self, requests: dict[str, Line], scheduler: Any, options: Line) -> None:
        self._requests, self._scheduler, self._options = requests, scheduler, options
        self._steps = 0
        self._due: dict[Any, int] = {}  # job -> time or step from which on it is over

    def _over(self, now: int) -> list[Any]:
        """Remove and return the jobs that are over, in the order of their ends."""
        over = sorted((job for job, at in self._due.items() if at <= now), key=self._due.__getitem__)
        for job in over:
            del self._due[job]
        return over

    def over(self, output: Any) -> Line:
        line = {"recved": list(output.finished_recving or ()), "sent": list(output.finished_sending or ())}
        line["bad"] = sorted(output.invalid_block_ids)
        field, name = self.reports
        if field:
            report = output.kv_connector_worker_meta
            line[field] = sorted(getattr(report, name)) if report else []
        return line

    def tier(self) -> Line:
        return {}


class HandOffMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The transfers of a plan: (request, blocks to receive), (request, number of blocks kept to be read)."""

    def __init__(self) -> None:
        self.recv: list[list[Any]] = []
        self.send: list[list[Any]] = []


class DeclaredHandOff(KVConnectorBase_V1):  # type: ignore[misc]
    """The scheduler's side of a hand-off between servers. A request whose prompt was computed elsewhere waits for all
    of it, once; one that another server continues keeps its blocks after a normal end until they were read.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._plan = HandOffMetadata()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        fetches = (request.kv_transfer_params or {}).get("do_remote_prefill")
        external = request.num_prompt_tokens - num_computed_tokens if fetches else 0
        return max(external, 0), external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first = (request.num_prompt_tokens - num_external_tokens) // self._vllm_config.cache_config.block_size
            self._plan.recv.append([request.request_id, list(blocks.get_block_ids()[0][first:])])
        (request.kv_transfer_params or {}).pop("do_remote_prefill", None)

    def build_connector_meta(self, scheduler_output: Any) -> HandOffMetadata:  # noqa: ARG002
        plan, self._plan = self._plan, HandOffMetadata()
        return plan

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, Line | None]:
        keeps = (request.kv_transfer_params or {}).get("do_remote_decode") and request.status in ENDED and block_ids
        if not keeps:
            return False, None
        self._plan.send.append([request.request_id, len(block_ids)])
        return True, {}

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _nothing


class HandOff(Worker):
    """Transfers between servers last as long as the request says; the first step that ends then or later reports them.
    A job is (whether it is received, request, blocks).
    """

    @staticmethod
    def transfer(options: Line, block_size: int) -> Line:  # noqa: ARG004
        """Return the arguments of vLLM's KVTransferConfig."""
        path = {"kv_connector": "DeclaredHandOff", "kv_connector_module_path": __name__}
        return path | {"kv_role": options["role"]}

    def step(self, plan: Any, start: int, end: int) -> Any:
        requests = self._requests
        for name, blocks in plan.recv:
            self._due[True, name, tuple(blocks)] = start + requests[name].get("recv_us", 0)
        for name, count in plan.send:
            self._due[False, name, count] = start + requests[name].get("send_us", 0)
        over = self._over(end)
        received = {name: blocks for into, name, blocks in over if into}
        broken = {name: requests[name].get("fail_blocks", ()) for name in received}
        return KVConnectorOutput(
            finished_recving=list(received),
            finished_sending=[name for into, name, _ in over if not into],
            invalid_block_ids={ids[i] for name, ids in received.items() for i in broken[name] if i < len(ids)},
        )

    def jobs(self, plan: Any) -> Line:
        return {"recv": plan.recv, "send": plan.send}


class SimpleCpu(Worker):
    """SimpleCPUOffloadConnector's loads and stores last a number of steps; a step with a preemption first completes
    all. A job is (load or store, number).
    """

    reports = ("stored", "completed_store_events")

    @staticmethod
    def transfer(options: Line, block_size: int) -> Line:  # noqa: ARG004
        extra = {"cpu_bytes_to_use": 1 << 30, "lazy_offload": options.get("lazy", False)}
        return {"kv_connector": "SimpleCPUOffloadConnector", "kv_connector_extra_config": extra}

    def step(self, plan: Any, start: int, end: int) -> Any:  # noqa: ARG002
        from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

        self._steps += 1
        if plan.need_flush:
            self._due = dict.fromkeys(self._due, 0)
        for kind, event in (("load", plan.load_event), ("store", plan.store_event)):
            if event >= 0:
                self._due[kind, event] = self._steps + self._options[f"{kind}_steps"]
        over = self._over(self._steps)
        stored = {event: 1 for kind, event in over if kind == "store"}
        return KVConnectorOutput(
            finished_recving=[
                name for kind, event in over if kind == "load" for name in plan.load_event_to_reqs.get(event, ())
            ],
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored) if stored else None,
        )

    def jobs(self, plan: Any) -> Line:
        line: Line = {"flush": plan.need_flush}
        for kind, event in (("load", plan.load_event), ("store", plan.store_event)):
            if event >= 0:
                sides = {side: list(getattr(plan, f"{kind}_{side}_blocks")) for side in ("gpu", "cpu")}
                line[kind] = {"event": event, **sides}
        if "load" in line:
            line["load"]["reqs"] = list(plan.load_event_to_reqs[plan.load_event])
        return line

    def tier(self) -> Line:
        pool = self._scheduler.connector.scheduler_manager.cpu_block_pool
        keyed = sum(block.block_hash is not None for block in pool.blocks)
        return {"cpu": {"free": pool.get_num_free_blocks(), "cached": keyed}}


class Offloading(Worker):
    """OffloadingConnector: vLLM's own worker, over a copier that takes a number of steps."""

    reports = ("jobs_done", "completed_jobs")

    def __init__(self, *parts: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
        from vllm.v1.kv_offload.factory import OffloadingSpecFactory

        super().__init__(*parts)
        config, cache = self._scheduler.vllm_config, self._scheduler.kv_cache_config
        spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, cache))
        self._worker = OffloadingConnectorWorker(spec, config, cache)
        self._worker.worker = self

    @staticmethod
    def transfer(options: Line, block_size: int) -> Line:
        per_chunk = options.get("blocks_per_chunk", 1)
        pages = -(-TOKEN_BYTES * block_size * per_chunk // mmap.PAGESIZE)  # a chunk has whole pages of memory
        extra = {"cpu_bytes_to_use": pages * mmap.PAGESIZE * options["cpu_chunks"], "blocks_per_chunk": per_chunk}
        extra |= {"eviction_policy": options.get("eviction_policy", "lru"), **options.get("extra", {})}
        return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}

    def submit_store(self, job: int, *_: Any) -> bool:
        self._due[job] = self._steps + self._options["store_steps"]
        return True

    def submit_load(self, job: int, *_: Any, **__: Any) -> bool:
        self._due[job] = self._steps + self._options["load_steps"]
        return True

    def wait(self, jobs: Iterable[int]) -> None:
        self._due |= dict.fromkeys(self._due.keys() & jobs, 0)

    def get_finished(self) -> list[Any]:
        from vllm.v1.kv_offload.base import TransferResult

        return [TransferResult(job, True) for job in sorted(self._over(self._steps))]

    def step(self, plan: Any, start: int, end: int) -> Any:  # noqa: ARG002
        worker = self._worker
        self._steps += 1
        worker.handle_preemptions(plan)
        worker.start_kv_transfers(plan)
        worker.prepare_store_kv(plan)
        received = sorted(worker.get_finished(set())[1])
        report = worker.build_connector_worker_meta()
        return KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=report)

    def jobs(self, plan: Any) -> Line:
        loads = [[*_parts(number, job), job.sync] for number, job in plan.load_jobs.items()]
        stores = [_parts(number, job) for number, job in plan.store_jobs.items()]
        return {"load": loads, "store": stores, "flush": sorted(plan.jobs_to_flush or ())}

    def tier(self) -> Line:
        manager = self._scheduler.connector.connector_scheduler.manager
        policy = manager._policy
        line = {"free": manager._get_num_free_chunks(), "evictable": manager._num_evictable_cache_chunks}
        line["writing"] = manager._num_write_pending_chunks
        if self._options.get("eviction_policy") == "arc":
            line |= {name: len(getattr(policy, name)) for name in ("t1", "t2", "b1", "b2")}
            line["target"] = round(float(policy.target_t1_size), 6)
        return {"cpu": line}


def _parts(number: int, job: Any) -> list[Any]:
    sides = [[int(block) for block in getattr(side, "block_ids", ())] for side in (job.src_spec, job.dst_spec)]
    return [number, job.req_id, *sides]


CONNECTORS: dict[str, Any] = {"pd": HandOff, "simple_cpu": SimpleCpu, "offloading": Offloading}
