"""The recorder of vLLM: its engine core, scheduler, KV cache and connectors, on a virtual clock.

The executor computes nothing: a step takes the time and gives the tokens that the workload declares. Trace formats,
order of events and clock are those of the reader (conformance/vllm_traces.py). Hooked are the objects of one engine
only, so that no recording changes the next.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="")
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1 import engine, kv_cache_interface
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched import scheduler as scheduling
from vllm.v1.engine import core
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from cbsim.conformance.reader import due
from cbsim.live import vllm_workloads
from cbsim.live.original import Line, rules_for
from cbsim.live.vllm_connectors import CONNECTORS
from cbsim.workload.scheduler_tests import STOP_TOKEN

versions = ("0.19.0", "0.33.0")
lengths = ("prompt_token_ids", "output_token_ids", "outputs")
options = "config"
plain = vllm_workloads.PLAIN

OLD = rules_for(vllm.__version__, versions) == versions[0]  # without connectors and layer groups
START_S = 1000.0
MOST_STEPS = 10_000
MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 65536}
OTHERS = "block_size num_blocks enable_prefix_caching timing connector layers kv_bytes retention layout stop_when_done "
OTHERS += "state_checkpoints pipeline"
RENAMED = {"disable_hybrid": "disable_hybrid_kv_cache_manager"}  # the other options have vLLM's names
LAYERS = {  # the beginning of vLLM's class names; the span of a layer, as in workloads and as vLLM calls it
    "full": ("FullAttention", "", ""),
    "sliding": ("SlidingWindow", "window", "sliding_window"),
    "chunked": ("ChunkedLocalAttention", "chunk", "attention_chunk_size"),
    "linear": ("Mamba", "", ""),
}


def draw(rng: random.Random, number: int) -> Line:
    return vllm_workloads.draw(rng, number, old=OLD)


def modes(workload: Line) -> Sequence[str]:
    modes: Sequence[str] = workload.get("modes", ("sync", "async"))
    return modes


def record(workload: Line, mode: str) -> list[Line]:
    return Recording(workload, mode).lines()


def read_as(header: Line, version: str) -> Line:
    return header | {"vllm": version}


class Clock(ModuleType):
    """A stand-in for the module `time` where vLLM takes times: `now`, and until when the GPU is busy; in us."""

    now = gpu_free = 0

    def monotonic(self) -> float:
        return START_S + self.now / 1e6

    time = monotonic

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


CLOCK = Clock("time")
engine.time = scheduling.time = CLOCK
core.freeze_gc_heap = lambda: None  # engines that are over may go
type(current_platform).support_hybrid_kv_cache = classmethod(lambda _: True)  # as every GPU says
FOLDER = tempfile.TemporaryDirectory(prefix="conformance-model-")
atexit.register(FOLDER.cleanup)
Path(FOLDER.name, "config.json").write_text(json.dumps(MODEL))


class InOrder(dict[str, None]):
    """A stand-in for a set whose order of iteration vLLM leaves open: the order of insertion."""

    def add(self, name: str) -> None:
        self[name] = None


class Result(Future[Any]):
    """A step's result. Who waits for it finds the clock at the end of the step, and what was cancelled until then."""

    def __init__(self, recording: Recording, output: Any, ready: int) -> None:
        super().__init__()
        self._recording, self._output, self._ready = recording, output, ready

    def done(self) -> bool:
        return CLOCK.now >= self._ready

    def result(self, timeout: float | None = None) -> Any:  # noqa: ARG002
        CLOCK.now = max(CLOCK.now, self._ready)
        if aborted := self._recording.due_aborts():
            self._recording.engine.aborts_queue.put_nowait(aborted)
        return self._output


class DeclaredExecutor(Executor):  # type: ignore[misc]
    """An executor that runs what the workload of a recording declares."""

    def __init__(self, recording: Recording, vllm_config: Any) -> None:
        self._recording, self._config = recording, recording.config
        self._given: dict[str, int] = {}  # tokens sampled so far
        super().__init__(vllm_config)

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return []

    _init_executor = initialize_from_config = compile_or_warm_up_model = check_health = collective_rpc = _nothing
    set_kv_cache_layout = _nothing

    @property
    def max_concurrent_batches(self) -> int:
        return 2 if self.scheduler_config.async_scheduling else 1

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        layers = self._config.get("layers", [{"kind": "full"}])
        return [{f"layer.{i}": _layer(layer, self._config) for i, layer in enumerate(layers)}]

    def determine_available_memory(self) -> list[int]:
        return [self._config.get("kv_bytes", 1 << 40)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        only = self._config.get("layout")
        return [[layout.name for layout in KVCacheLayout if only in (None, layout.name)]]

    def get_simple_cpu_offload_num_blocks(self) -> int:
        return int(self._config["connector"]["cpu_blocks"])

    def get_kv_connector_handshake_metadata(self) -> None:
        return None

    def execute_model(self, step: Any, non_block: bool = False) -> Any:
        """Run a step when it is launched: its outputs, and its time behind the steps before it."""
        timing, connector, cached = self._config["timing"], self._recording.connector, step.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        for name in (*computed, *cached.resumed_req_ids):
            self._given[name] = self._recording.scheduler.requests[name].num_output_tokens
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends = {name: computed[name] + count for name, count in step.num_scheduled_tokens.items()}
        tokens: int = step.total_num_scheduled_tokens
        lasts = timing["base_us"] + timing["per_token_us"] * tokens + timing["per_kv_token_us"] * sum(ends.values())
        start = end = CLOCK.now
        if tokens or connector:
            start = max(CLOCK.now, CLOCK.gpu_free)
            end = CLOCK.gpu_free = start + (lasts if tokens else timing["empty_us"])
        output = ModelRunnerOutput(
            req_ids=list(ends),
            req_id_to_index={name: i for i, name in enumerate(ends)},
            sampled_token_ids=[self._sampled(name, end) for name, end in ends.items()],
            kv_connector_output=connector.step(step.kv_connector_metadata, start, end) if connector else None,
        )
        self._last = Result(self._recording, output, end)
        return self._last if non_block else output

    def _sampled(self, name: str, position: int) -> list[int]:
        """Return the token of a row up to a position, 0 behind the declared ones; none before the end of what is known.
        Raises RuntimeError for a row beyond it.
        """
        request, given = self._recording.requests[name], self._given[name]
        known = len(request["prompt_token_ids"]) + given
        if position > known:
            raise RuntimeError(f"{name}: {position} tokens computed, {known} known")
        self._given[name] += position == known
        return (request["output_token_ids"][given : given + 1] or [0]) if position == known else []

    def sample_tokens(self, *_: Any, **__: Any) -> Any:
        return self._last


def _layer(layer: Line, config: Line) -> Any:
    """Return the cache specification of a layer."""
    name, span, theirs = LAYERS[layer["kind"]]
    if layer["kind"] == "linear":
        return _state(layer, config)
    sizes = {
        "block_size": config["block_size"],
        "num_kv_heads": layer.get("kv_heads", 4),
        "head_size": layer.get("head_size", 16),
    }
    spans = {theirs: layer[span]} if span else {}
    return getattr(kv_cache_interface, f"{name}Spec")(dtype=torch.float16, **sizes, **spans)


def _state(layer: Line, config: Line) -> Any:
    """Return the specification of a layer with a state, as vLLM's models and its platform make it: with the page of
    attention, in a block of its tokens if prefixes are cached.
    """
    attention = [_layer(each, config).page_size_bytes for each in config["layers"] if each["kind"] != "linear"]
    mode, tokens = states(config)
    exports = bool(config.get("state_checkpoints"))
    return kv_cache_interface.MambaSpec(
        block_size=tokens,
        shapes=((layer["state_bytes"] // 2,),),
        dtypes=(torch.float16,),
        page_size_padded=max(attention, default=None),
        mamba_cache_mode=mode,
        num_prefill_checkpoint_blocks=int(exports),
        prefill_checkpoint_alignment=1 if exports else None,
    )


def states(config: Line) -> tuple[str, int]:
    """Return vLLM's mode for states, and the tokens of their blocks."""
    return ("align", config["block_size"]) if config["enable_prefix_caching"] else ("none", config["max_model_len"])


def configuration(config: Line, *, ahead: bool) -> Any:
    """Return vLLM's configuration for a workload's."""
    scheduler = {RENAMED.get(name, name): config[name] for name in config if name not in OTHERS.split()}
    cache = {"block_size": config["block_size"], "enable_prefix_caching": config["enable_prefix_caching"]}
    cache |= {} if OLD else {"prefix_cache_retention_interval": config.get("retention", 0)}
    if any(layer["kind"] == "linear" for layer in config.get("layers", ())):
        cache |= dict(zip(("mamba_cache_mode", "mamba_block_size"), states(config), strict=True))
    transfer = {}
    if "connector" in config:
        kind = CONNECTORS[config["connector"]["kind"]]
        made = kind.transfer(config["connector"], config["block_size"])
        made = KVTransferConfig(engine_id="0", kv_load_failure_policy="recompute", **{"kv_role": "kv_both", **made})
        transfer = {"kv_transfer_config": made}
    model = {"model": FOLDER.name, "skip_tokenizer_init": True, "dtype": "float16", "seed": 0}
    return VllmConfig(
        model_config=ModelConfig(max_model_len=config["max_model_len"], **model),
        scheduler_config=SchedulerConfig(is_encoder_decoder=False, async_scheduling=ahead, **scheduler),
        cache_config=CacheConfig(num_gpu_blocks_override=config.get("num_blocks"), **cache),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(pipeline_parallel_size=config.get("pipeline", 1)),
        **transfer,
    )


class Recording:
    """One run of a workload, and the lines of its trace."""

    def __init__(self, workload: Line, mode: str) -> None:
        self.config = config = workload["config"]
        self.requests = {request["id"]: request for each in workload["requests"] for request in _samples(each)}
        self.connector: Any = None
        self._ahead = mode == "async"
        samples = any("outputs" in request for request in workload["requests"])
        self._format = 3 if "layers" in config else 2 if "connector" in config or samples else 1
        CLOCK.now = CLOCK.gpu_free = 0
        made = configuration(config, ahead=self._ahead)
        self.engine = core.EngineCore(made, partial(DeclaredExecutor, self), log_stats=True)
        self.scheduler = self.engine.scheduler
        self._cache = self.scheduler.kv_cache_manager
        self._pool, self._groups = self._cache.block_pool, self._cache.coordinator.single_type_managers
        if "connector" in config:
            kind = CONNECTORS[config["connector"]["kind"]]
            self.connector = kind(self.requests, self.scheduler, config["connector"])
        self._reports: Line = {
            name: {"arrival": request["arrival_us"], "preemptions": 0, "n_out": 0}
            for name, request in self.requests.items()
        }
        self._coming = sorted(self.requests.values(), key=lambda request: request["arrival_us"])[::-1]
        aborts = [request for request in self.requests.values() if "abort_us" in request]
        self._aborts = sorted(aborts, key=lambda request: request["abort_us"])[::-1]
        self._steps = 0
        self._underway: deque[int] = deque()
        self._added: list[str] = []
        self._heard: defaultdict[str, list[Any]] = defaultdict(list)
        header = {"ev": "header", "format": self._format, "vllm": vllm.__version__, "mode": mode, "config": config}
        header |= {"workload": workload["name"], "scheduler": type(self.scheduler).__name__}
        self._lines = [header | ({"effective": self._effective()} if self._format == 3 else {})]
        self._check()
        self._hook()

    def lines(self) -> list[Line]:
        """Run the engine's loop until nothing is left."""
        scheduler, engine = self.scheduler, self.engine
        while self._coming or scheduler.has_requests() or engine.batch_queue:
            if not (scheduler.has_requests() or engine.batch_queue):
                CLOCK.now = max(CLOCK.now, self._coming[-1]["arrival_us"])
            for request in due(self._coming, CLOCK.now, lambda request: int(request["arrival_us"])):
                self._add(request)
            if aborted := self.due_aborts():
                engine.abort_requests(aborted)
            engine.step_fn()
            left = self._coming or scheduler.requests or scheduler.finished_req_ids
            if self.config.get("stop_when_done") and not left:
                break
            if self._steps > MOST_STEPS:
                raise RuntimeError(f"vLLM has not come to an end after {MOST_STEPS} steps")
        cached = self._keyed() if self._format == 3 else sum(self._keyed())
        line = {"ev": "summary", "steps": self._steps, "end_us": CLOCK.now, "requests": self._reports}
        return [*self._lines, line | {"prefix_cache_final_cached_blocks": cached}]

    def due_aborts(self) -> list[str]:
        """Return the requests whose abort is due; from format 2 on only the first."""
        names: list[str] = []
        while self._aborts and self._aborts[-1]["abort_us"] <= CLOCK.now and (self._format == 1 or not names):
            names.append(self._aborts.pop()["id"])
        return names

    def _add(self, request: Line) -> None:
        name, wish = request["id"], {"kv_transfer_params": dict(request["kv"])} if "kv" in request else None
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request.get("max_tokens", len(request["output_token_ids"])),
            ignore_eos=True,
            stop_token_ids=[STOP_TOKEN] if request.get("stop") else None,
            extra_args=wish,
        )
        rest = {"priority": request.get("priority", 0), "block_hasher": self.engine.request_block_hasher}
        prompt, arrival_s = list(request["prompt_token_ids"]), START_S + request["arrival_us"] / 1e6
        self.engine.add_request(Request(name, prompt, sampling, None, arrival_time=arrival_s, **rest))
        self._added.append(name)

    def _effective(self) -> Line:
        """Return what vLLM made of the layers."""
        groups: list[Line] = []
        for group, manager in zip(self._cache.kv_cache_config.kv_cache_groups, self._groups, strict=True):
            kind = next(kind for kind, (name, *_) in LAYERS.items() if type(manager).__name__ == f"{name}Manager")
            _, span, theirs = LAYERS[kind]
            line = {"kind": kind, "block_size": manager.block_size, "page_bytes": group.kv_cache_spec.page_size_bytes}
            line |= {"layers": [int(layer.split(".")[1]) for layer in group.layer_names]}
            if span:
                line |= {span: getattr(manager, theirs), "admission_cap": manager.max_admission_blocks_per_request}
            groups.append(line)
        coordinator = self._cache.coordinator
        return {
            "coordinator": type(coordinator).__name__,
            "groups": groups,
            "num_blocks": self._pool.num_gpu_blocks,
            "scheduler_block_size": coordinator.scheduler_block_size,
            "hash_block_size": self.scheduler.hash_block_size,
            "retention": coordinator.retention_interval,
            "max_in_flight_tokens": self.engine.vllm_config.max_in_flight_tokens,
            "watermark_blocks": self._cache.watermark_blocks,
        }

    def _check(self) -> None:
        """Raise ValueError if vLLM took other options than it was given."""
        took = {
            "num_blocks": self._pool.num_gpu_blocks,
            "max_num_batched_tokens": self.scheduler.max_num_scheduled_tokens,
            "max_model_len": self.scheduler.max_model_len,
            "enable_prefix_caching": self._cache.enable_caching,
            "enable_chunked_prefill": self.scheduler.scheduler_config.enable_chunked_prefill,
        }
        other = {name: value for name, value in took.items() if self.config.get(name, value) != value}
        if other or self.engine.batch_queue_size != self.config.get("pipeline", 1) + self._ahead:
            raise ValueError(f"vLLM took other options than it was given: {other or 'sync or async'}")

    # -- what the engine's objects do ----------------------------------------------------------------------------------

    def _hook(self) -> None:
        """Put methods of the recording in the place of the engine's, which they call."""
        scheduler = self.scheduler
        hooks: list[tuple[Any, str, Callable[..., Any]]] = [
            (scheduler, "_preempt_request", self._preempting),
            (scheduler, "finish_requests", self._finishing),
            (scheduler, "schedule", self._scheduling),
            (scheduler, "update_from_output", self._updating),
        ]
        if self._format == 3:
            for number, group in enumerate(self._groups):
                hooks.append((group, "_remove_blocks_in_range", partial(self._removing, number, group)))
        if self.connector:
            hooks.append((scheduler.connector, "get_num_new_matched_tokens", self._looking))
            hooks.append((scheduler.connector, "update_state_after_alloc", self._allocating))
        for owner, name, instead in hooks:
            setattr(owner, name, partial(instead, getattr(owner, name)))
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = InOrder(), InOrder()

    def _preempting(self, original: Callable[..., Any], request: Any, *rest: Any, **named: Any) -> Any:
        name = request.request_id
        held = self._live(name) if self._format == 3 else self._held(name)[0]
        self._heard["preempted"].append([name, request.num_computed_tokens, held])
        return original(request, *rest, **named)

    def _finishing(self, original: Callable[..., Any], names: Iterable[str], status: Any) -> Any:
        requests = self.scheduler.requests
        gone = sorted(name for name in names if name in requests and not requests[name].is_finished())
        done = original(names, status)
        line = {"ev": "abort", "t": CLOCK.now, "ids": gone, "free": self._pool.get_num_free_blocks()}
        self._lines += [line] if gone else []
        return done

    def _removing(self, number: int, group: Any, original: Callable[..., Any], name: str, *span: int) -> None:
        before = list(group.req_to_blocks.get(name, ()))
        original(name, *span)
        pairs = zip(before, group.req_to_blocks.get(name, ()), strict=True)
        if gone := [old.block_id for old, new in pairs if old is not new]:
            self._heard["dropped"].append([name, number, gone[::-1]])

    def _looking(self, original: Callable[..., Any], request: Any, local: int) -> Any:
        external, later = original(request, local)
        self._heard["match"].append([request.request_id, local, external, bool(later)])
        return external, later

    def _allocating(self, original: Callable[..., Any], request: Any, blocks: Any, external: int) -> Any:
        if external:
            self._heard["alloc"].append([request.request_id, external, list(blocks.get_block_ids()[0])])
        return original(request, blocks, external)

    def _held(self, name: str) -> list[int]:
        return [len(group.req_to_blocks.get(name, ())) for group in self._groups]

    def _live(self, name: str) -> list[int]:
        return [sum(not block.is_null for block in group.req_to_blocks.get(name, ())) for group in self._groups]

    def _keyed(self) -> list[int]:
        """Return the number of blocks with a key, by group."""
        groups = [get_group_id(block.block_hash) for block in self._pool.blocks if block.block_hash is not None]
        return [groups.count(number) for number in range(len(self._groups))]

    def _scheduling(self, original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        """Plan a step, and write its line."""
        scheduler, now, heard = self.scheduler, CLOCK.now, self._heard
        heard.clear()
        step = original(*rest, **named)
        scheduler.finished_req_ids, scheduler.reset_preempted_req_ids = InOrder(), InOrder()
        CLOCK.now += self.config["timing"]["sched_us"]
        self._steps += 1
        self._underway.append(self._steps)
        line = {"ev": "schedule", "step": self._steps, "t": now, "added": self._added, "reqs": self._rows(step)}
        line |= {"total": step.total_num_scheduled_tokens, "finished": sorted(step.finished_req_ids)}
        line |= {"running": _names(scheduler.running), "waiting": _names(scheduler.waiting)}
        line |= {"free": self._pool.get_num_free_blocks(), "preempted": heard["preempted"]}
        if self._format == 3:
            line["dropped"] = heard["dropped"]
        if self.connector:
            holding = scheduler.kv_holding_waiting
            loading = [request for request in holding if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
            line |= {"holding": _names(holding), "remote": _names(loading)}
            line |= {"match": heard["match"], "alloc": heard["alloc"]}
            line |= {"jobs": self.connector.jobs(step.kv_connector_metadata), **self.connector.tier()}
        heard.clear()
        self._added = []
        self._lines.append(line)
        return step

    def _rows(self, step: Any) -> list[Line]:
        cached, rows = step.scheduled_cached_reqs, {}
        for new in step.scheduled_new_reqs:
            kind = "resumed" if self.scheduler.requests[new.req_id].num_preemptions else "new"
            rows[new.req_id] = kind, new.num_computed_tokens, new.block_ids
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            rows[name] = "resumed" if name in cached.resumed_req_ids else "running", computed, blocks
        return [self._row(name, count, *rows[name]) for name, count in step.num_scheduled_tokens.items()]

    def _row(self, name: str, count: int, kind: str, computed: int, added: Any) -> Line:
        request, held = self.scheduler.requests[name], self._held(name)
        blocks = [list(ids) for ids in added] if added else [[] for _ in held]
        line: Line = {"id": name, "kind": kind, "n": count, "computed": computed}
        if self._format == 3:
            line |= {"held": held, "live": self._live(name), "blocks": blocks}
            line |= {"junction": request.shared_prefix_boundary} if kind != "running" else {}
        else:
            line |= {"held": held[0], "blocks": blocks[0]}
            line |= {"cached": computed} if kind != "running" and self._format == 1 else {}
        return line | ({"ph": request.num_output_placeholders} if self._ahead else {})

    def _updating(self, original: Callable[..., Any], step: Any, result: Any) -> Any:
        """Take a step's result, and write its line."""
        now = CLOCK.now
        CLOCK.now += self.config["timing"]["update_us"]
        moved = self.connector.over(result.kv_connector_output) if self.connector else {}
        outputs = original(step, result)
        tokens: list[Any] = []
        finished: list[str] = []
        for each in outputs.values():
            for output in each.outputs:
                name, count = output.request_id, len(output.new_token_ids)
                self._report(output, _us(each.timestamp))
                tokens += ([[name, count]] if self._format == 2 else [name]) if count else []
                finished += [name] if output.finish_reason is not None else []
        line = {"ev": "update", "step": self._underway.popleft(), "t": now, "tokens": tokens, "finished": finished}
        line |= {"free": self._pool.get_num_free_blocks()}
        if self.connector:
            kept = [request for request in self.scheduler.requests.values() if request.is_finished()]
            line |= {**moved, "kept": _names(kept), **self.connector.tier()}
        if self._format == 3:
            line["cached"] = self._keyed()
        self._lines.append(line)
        return outputs

    def _report(self, output: Any, now: int) -> None:
        """Take an output and its events into the summary. Raises ValueError for an output that is not declared."""
        name = output.request_id
        report = self._reports[name]
        for event in output.events or ():
            if event.type.name == "PREEMPTED":
                report["preemptions"] += 1
            else:
                report.setdefault(f"{event.type.name.lower()}_ts", _us(event.timestamp))
        if output.new_token_ids:
            report["n_out"] += len(output.new_token_ids)
            if report["n_out"] > len(self.requests[name]["output_token_ids"]):
                raise ValueError(f"requests.{name}: goes on behind its last declared output")
            report.setdefault("first_token_ts", now)
            report["last_token_ts"] = now


def _us(timestamp_s: float) -> int:
    return round((timestamp_s - START_S) * 1e6)


def _names(requests: Iterable[Any]) -> list[str]:
    return [request.request_id for request in requests]


def _samples(request: Line) -> list[Line]:
    """Return the requests that vLLM makes of one, named as it names them: one for each sample."""
    if "outputs" not in request:
        return [request]
    return [request | {"id": f"{i}_{request['id']}", "output_token_ids": o} for i, o in enumerate(request["outputs"])]
