"""A recorded vLLM run as a scenario: its folder, and the pack of profiles and workloads in which it lies.

    CASE/config.json       the cluster as LLMServingSim's user described it: GPUs, parallelism, links
    CASE/meta.json         what vLLM was asked to do, and, of newer runs, what it made of it
    CASE/requests.jsonl    when each request was queued, scheduled, and got its first and last token
    CASE/timeseries.csv    running, waiting and KV use, once a second
    PACK/workloads, perf, arch, model_config

Nothing that the run measured enters the scenario but when its engine took the requests in, and, where it was recorded,
the number of cache blocks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cbsim.errors import ScenarioError
from cbsim.scenario import catalog, scenario, shapes
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import LARGEST_REAL, near, shown
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import ModelShape
from cbsim.workload import vllm_bench
from cbsim.workload.traces import Arrival
from cbsim.workload.vllm_bench import Second, Taken

GIB = 2**30
CHANGED = (0, 26)
"""Versions before it are replayed by the rules of 0.19, others by those of 0.33: half-way between the two known."""
VARIANTS = {"bfloat16": "bf16", "float16": "fp16"}
ROW_S = 3e-6
"""Prior: seconds of device time that a request of a step costs beyond the tables. docs/studies.md says where from."""
LINK = {"latency_s": 20e-6, "bytes_s": 16.0 * GIB}
"""Between GPUs where config.json names no link: what it names for the recorded RTX PRO 6000."""
CPU = {  # of vLLM 0.19's own Python, measured on a shared 2-core Xeon; prepare and launch: assumptions
    "schedule": {"base_s": 11e-6, "per_request_s": 4.7e-6},
    "prepare": {"base_s": 300e-6, "per_request_s": 5e-6},
    "launch": {"base_s": 200e-6},
    "update": {"base_s": 6e-6, "per_request_s": 2.0e-6},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A recorded run. `settings` is the scenario that replays one of its `ranks` data-parallel servers, as plain data.

    `blocks_measured` says whether vLLM recorded the size of its cache; else it is derived from the memory.
    """

    name: str
    settings: Mapping[str, Any]
    ranks: int
    blocks_measured: bool
    arrivals: Sequence[Arrival]
    taken: Sequence[Taken]
    series: Sequence[Second]
    version: str  # of vLLM
    link_assumed: bool  # config.json does not say what joins its GPUs
    overrides: Sequence[str] = ()

    def scenario(self, changes: Mapping[str, Any] | None = None) -> Scenario:
        """The scenario, with the fields of `changes` (dotted names) replaced. Raises ScenarioError."""
        data = json.loads(json.dumps(self.settings))
        for name, value in (changes or {}).items():
            *above, last = name.split(".")
            part = data
            for step in above:
                part = part.setdefault(step, {})
            part[last] = value
        return scenario.parse(data, self.name, self.overrides)


def read(folder: Path, pack: Path | None = None, hardware: str | None = None, overrides: Sequence[str] = ()) -> Case:
    """The case in `folder`; its pack is two folders above unless given. `overrides` are of its scenario, and hold for
    every replay. Raises ScenarioError.
    """
    if not folder.is_dir():
        raise ScenarioError(f"{folder}: no such folder, expected one with config.json, meta.json, requests.jsonl")
    config, meta = _Json.read(folder / "config.json"), _Json.read(folder / "meta.json")
    root = Path(os.path.normpath(folder / ".." / "..")) if pack is None else pack
    for part in ("workloads", "perf"):
        if not (root / part).is_dir():
            raise ScenarioError(f"{root}: holds no folder {part!r}; name the pack of the case with --data")
    gpu = _Gpus(config)
    _check_covered(meta, gpu)
    model = _model(root, gpu.model)
    workload = _workload(root, meta)
    ranks = gpu.count
    shared = meta.get("engine_kwargs.enable_expert_parallel", gpu.shares_experts)
    experts = ranks * gpu.tensor if shared else 1
    blocks = meta.whole("kv_cache.num_gpu_blocks", None)
    size = meta.whole("kv_cache.block_size", 16)
    settings: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._") or "case",
        "question": f"How near does the simulator come to a recorded run of {gpu.model} on {ranks} x {gpu.hardware}?",
        "model": model.model_dump(mode="json"),
        "hardware": shapes.hardware(hardware or _known(gpu.hardware)).model_dump(mode="json"),
        "workload": {"kind": "vllm_bench", "path": str(workload), "recorded": str(folder / "requests.jsonl")},
        "scheduler": _scheduler(meta),
        "kv_cache": {"block_size": size, "num_blocks": blocks or gpu.blocks(model, size, experts)},
        "loop": _loop(meta, together=ranks > 1 and model.experts > 0),
        "cost": {
            "kind": "table",
            "path": str(_tables(root, gpu, meta, model.dtype)),
            "tensor_parallel": gpu.tensor,
            "link": gpu.link or (LINK if gpu.tensor * ranks > 1 else None),
            "row_s": ROW_S,
            "cpu": CPU,
        },
    }
    limit = meta.whole("num_requests", None)
    if limit:
        settings["workload"]["limit"] = limit
    arrivals = vllm_bench.requests(workload, limit)
    if limit and limit > len(arrivals):
        raise meta.bad("num_requests", limit, f"at most {len(arrivals)}, the requests of {workload.name}")
    return Case(
        name=folder.resolve().name,
        settings=settings,
        ranks=ranks,
        blocks_measured=blocks is not None,
        arrivals=arrivals,
        taken=vllm_bench.recorded(folder / "requests.jsonl", arrivals),
        series=vllm_bench.series(folder / "timeseries.csv"),
        version=meta.text("vllm_version"),
        link_assumed=gpu.link is None and gpu.tensor * ranks > 1,
        overrides=tuple(overrides),
    )


def _check_covered(meta: _Json, gpu: _Gpus) -> None:
    """Raises ScenarioError for a run that is not what config.json says, or that this model does not cover."""
    option = "engine_kwargs.{}"
    repeated: tuple[tuple[str, Any, Any], ...] = (
        ("model", meta.get("model", gpu.model), gpu.model),
        (
            option.format("tensor_parallel_size"),
            meta.whole(option.format("tensor_parallel_size"), gpu.tensor),
            gpu.tensor,
        ),
        (option.format("data_parallel_size"), meta.whole(option.format("data_parallel_size"), gpu.count), gpu.count),
    )
    for name, value, wanted in repeated:
        if value != wanted:
            raise meta.bad(name, value, f"{wanted}, as in config.json")
    only = {"pipeline_parallel_size": 1, "kv_cache_dtype": "auto", "quantization": None, "speculative_config": None}
    for name, expected in only.items():
        value = meta.get(option.format(name), expected)
        if value != expected:
            raise meta.bad(option.format(name), value, f"{expected}: anything else is not covered")
    expert = meta.get(option.format("enable_expert_parallel"), False)
    if not isinstance(expert, bool):
        raise meta.bad(option.format("enable_expert_parallel"), expert, "true or false")


class _Json:
    """A JSON file, or the part of one at `within`. Its fields have dotted names; an error names the file and the
    field.
    """

    def __init__(self, path: Path, data: Any, within: str = "") -> None:
        self.path, self._data, self._within = path, data, within

    @classmethod
    def read(cls, path: Path) -> _Json:
        try:
            data = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(data, dict):
                raise ScenarioError(f"{path}: got {shown(data)}, expected a JSON object")
            return cls(path, data)
        except ScenarioError:
            raise
        except OSError as error:
            raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ScenarioError(f"{path}: not valid JSON: {error}") from None

    def get(self, name: str, *default: Any) -> Any:
        """The field, or the default where the file leaves it out or null; without a default it is required."""
        value = self._data
        for at, part in enumerate(parts := name.split(".")):
            if value is not None and not isinstance(value, dict):
                raise self.bad(".".join(parts[:at]).rstrip("."), value, "an object")
            value = value.get(part) if value is not None else None
        if value is None and not default:
            raise ScenarioError(f"{self.path}: {self._within}{name}: is missing")
        return default[0] if value is None else value

    def whole(self, name: str, *default: Any) -> Any:
        """As `get`, of a whole number >= 1."""
        value = self.get(name, *default)
        if value is not None and (type(value) is not int or value < 1):
            raise self.bad(name, value, "a whole number >= 1")
        return value

    def real(self, name: str, *default: Any) -> Any:
        """As `get`, of a number >= 0."""
        value = self.get(name, *default)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < LARGEST_REAL):
            raise self.bad(name, value, "a number >= 0")
        return value

    def text(self, name: str, *default: Any) -> str:
        """As `get`, of text."""
        value = self.get(name, *default)
        if not isinstance(value, str):
            raise self.bad(name, value, "text")
        return value

    def bad(self, name: str, value: object, expected: str) -> ScenarioError:
        return ScenarioError(f"{self.path}: {self._within}{name}: got {shown(value)}, expected {expected}")


class _Gpus:
    """The cluster: `count` data-parallel instances of `tensor` GPUs each, all alike."""

    def __init__(self, config: _Json) -> None:
        nodes = config.get("nodes")
        lists = [node.get("instances") for node in nodes if isinstance(node, dict)] if isinstance(nodes, list) else []
        instances = [instance for listed in lists if isinstance(listed, list) for instance in listed]
        if not all(isinstance(instance, dict) for instance in instances):
            raise config.bad("nodes.instances", instances, "a list of objects")
        if not instances or any(instance != instances[0] for instance in instances):
            problem = f"got {len(instances)} instances{', not all alike' if instances else ''}"
            raise ScenarioError(f"{config.path}: nodes: {problem}, expected one, or several that are alike")
        self._first = first = _Json(config.path, instances[0], "nodes.instances.")
        self.count = len(instances)
        self.model, self.hardware = first.text("model_name"), first.text("hardware")
        self.tensor = first.whole("tp_size", 1)
        self.shares_experts = first.whole("ep_size", 1) > 1
        self.link = None
        bandwidth, latency = config.real("link_bw", None), config.real("link_latency", None)
        if bandwidth and latency is not None:
            self.link = {"latency_s": latency * 1e-9, "bytes_s": bandwidth * GIB}

    def blocks(self, model: ModelShape, block_size: int, experts: int) -> int:
        """Blocks in the memory that the weights leave, of the share given: LLMServingSim's rule. vLLM finds fewer, by
        what activations and CUDA take.
        """
        memory_gib, share = self._first.real("npu_mem.mem_size", None), self._first.real("npu_mem.mem_util", 0.9)
        if memory_gib is None:
            text = "nodes.instances.npu_mem.mem_size: is missing, and meta.json has no kv_cache.num_gpu_blocks"
            raise ScenarioError(f"{self._first.path}: {text}")
        left = memory_gib * GIB * share - model.shard_bytes(self.tensor, experts // self.tensor or 1)
        blocks = int(left * self.tensor // (block_size * model.kv_bytes_per_token))
        if blocks < 2:
            expected = f"more than the {model.shard_bytes(self.tensor, experts // self.tensor or 1) / GIB:.3g} GiB"
            raise self._first.bad("npu_mem.mem_size", memory_gib, f"{expected} of weights, at mem_util {share}")
        return blocks


def _model(root: Path, name: str) -> ModelShape:
    """The model's shape, from its Hugging Face configuration in the pack."""
    path = root / "model_config" / f"{name.rsplit('/', maxsplit=1)[-1]}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
        raise ScenarioError(f"{path}: no configuration of the case's model {name!r} (known: {known})")
    given = _Json.read(path)
    heads, hidden = given.whole("num_attention_heads"), given.whole("hidden_size")
    experts = given.get("num_experts", 0) and given.whole("num_experts")
    try:
        return ModelShape(
            name=name,
            layers=given.whole("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=given.whole("num_key_value_heads", heads),
            head_dim=given.whole("head_dim", hidden // heads),
            intermediate=given.whole("moe_intermediate_size" if experts else "intermediate_size"),
            experts=experts,
            experts_per_token=given.whole("num_experts_per_tok") if experts else 0,
            vocab=given.whole("vocab_size"),
            tied_embeddings=given.get("tie_word_embeddings", False),
            qk_norm=given.text("model_type", "").startswith("qwen3"),
            dtype=given.get("torch_dtype", "bfloat16"),
            max_position=given.whole("max_position_embeddings"),
        )
    except ValidationError as error:
        raise Document(str(given.path), None, {}).explain(error) from None


def _known(hardware: str) -> str:
    """The name of our data sheet of a GPU. Raises ScenarioError."""
    try:
        return catalog.shape("hardware", hardware).stem
    except ScenarioError as error:
        raise ScenarioError(f"{error}; name its data sheet with --hardware") from None


def _workload(root: Path, meta: _Json) -> Path:
    stem = Path(meta.text("dataset_path")).name.removesuffix(".jsonl")
    path = root / "workloads" / f"{stem}.lengths.jsonl"
    if not path.is_file():
        known = [p.name.removesuffix(".lengths.jsonl") for p in sorted(path.parent.glob("*.lengths.jsonl"))]
        expected = f"a workload of {path.parent} ({', '.join(known) or 'none'}){near(stem, known)}"
        raise meta.bad("dataset_path", stem, expected)
    return path


def _tables(root: Path, gpu: _Gpus, meta: _Json, own: str) -> Path:
    """The profile in the type that the run was made in, `own` being the model's."""
    wanted = meta.text("engine_kwargs.dtype", "auto")
    dtype = own if wanted == "auto" else wanted
    path: Path = root / "perf" / gpu.hardware / gpu.model / VARIANTS.get(dtype, dtype)
    if not (path / "meta.yaml").is_file():
        raise ScenarioError(f"{path}: no profile there of {gpu.model} on {gpu.hardware} in {dtype}")
    return path


def _scheduler(meta: _Json) -> dict[str, Any]:
    """Options of vLLM: what it resolved, else what it was asked for, else its defaults."""
    version = meta.text("vllm_version")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise meta.bad("vllm_version", version, "a version such as 0.19.0")
    ours = "0.19" if tuple(map(int, numbers.groups())) < CHANGED else "0.33"
    given, resolved = "engine_kwargs.{}", "resolved_config.scheduler_config.{}"
    settings = {
        "name": "vllm",
        "version": ours,
        "max_num_seqs": meta.whole(given.format("max_num_seqs")),
        "max_num_batched_tokens": meta.whole(given.format("max_num_batched_tokens")),
        "max_model_len": meta.whole(given.format("max_model_len"), None),
        "enable_prefix_caching": meta.get("kv_cache.enable_prefix_caching", True),
    }
    for option in ("policy", "enable_chunked_prefill", "long_prefill_token_threshold", "scheduler_reserve_full_isl"):
        value = meta.get(resolved.format(option), None)
        if value is not None:
            settings[option] = value
    return settings


def _loop(meta: _Json, *, together: bool) -> dict[str, Any]:
    """Kernel times are looked up at a step's own size, so graphs pad nothing; they spare the CPU its launches. Servers
    that step `together` are padded: tokens of nobody go through experts, too, and only where all steps fit a graph do
    all servers compute equally many.
    """
    eager = meta.get("engine_kwargs.enforce_eager", False)
    is_async = meta.get("resolved_config.scheduler_config.async_scheduling", True)
    padding = "vllm" if together else "none"
    return {"mode": "async" if is_async else "sync", "cuda_graphs": {"enabled": not eager, "padding": padding}}
