"""A recorded vLLM run as a scenario: its folder, and the pack of profiles and workloads in which it lies.

    CASE/config.json       the cluster as LLMServingSim's user described it: GPUs, parallelism, links
    CASE/meta.json         the options given to vLLM, and in newer runs the configuration that it resolved
    CASE/requests.jsonl    the times when each request was queued, scheduled, and got its first and last token
    CASE/timeseries.csv    running, waiting and KV use, once a second
    PACK/workloads, perf, arch, model_config

Of the run's measurements only the times when its engine accepted the requests enter the scenario, and the number of
cache blocks if it was recorded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from cbsim.errors import ScenarioError
from cbsim.files import read_json
from cbsim.scenario import catalog, pretrained, scenario, shapes
from cbsim.scenario.documents import Document, name_of, split
from cbsim.scenario.fields import LARGEST_REAL, Count, Form, complaint, near, shown
from cbsim.scenario.overrides import assign
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import ModelShape
from cbsim.workload import vllm_bench
from cbsim.workload.traces import Arrival
from cbsim.workload.vllm_bench import Second, Taken

GIB = 2**30
CHANGED = (0, 26)  # the first vLLM replayed by the rules of 0.33, half-way between the two known; older: of 0.19
VARIANTS = {"bfloat16": "bf16", "float16": "fp16"}
ROW_S = 3e-6  # a prior: device time per request of a step beyond the tables; docs/studies.md states its source
LINK = {"latency_s": 20e-6, "bytes_s": 16.0 * GIB}  # if config.json names none: that of the recorded RTX PRO 6000
CPU = {  # CPU costs of vLLM 0.19's own Python, measured on a shared 2-core Xeon; prepare and launch are assumptions
    "schedule": {"base_s": 11e-6, "per_request_s": 4.7e-6},
    "prepare": {"base_s": 300e-6, "per_request_s": 5e-6},
    "launch": {"base_s": 200e-6},
    "update": {"base_s": 6e-6, "per_request_s": 2.0e-6},
}


class Case(NamedTuple):
    """A recorded run. `settings` is the scenario, as plain data, that replays one of its `ranks` data-parallel servers.

    `blocks_measured` is true if vLLM recorded the size of its cache; else it is derived from the memory.
    """

    name: str
    settings: Mapping[str, Any]
    ranks: int
    blocks_measured: bool
    arrivals: Sequence[Arrival]
    taken: Sequence[Taken]
    series: Sequence[Second]
    version: str  # version of vLLM
    link_assumed: bool  # whether config.json names no link between its GPUs, so that LINK is used
    overrides: Sequence[str] = ()

    def scenario(self, changes: Mapping[str, Any] | None = None) -> Scenario:
        """Return the scenario with the fields of `changes` (dotted names) replaced. Raises ScenarioError."""
        data = json.loads(json.dumps(self.settings))
        for name, value in (changes or {}).items():
            assign(data, split(name), value, name)
        return scenario.parse(data, self.name, self.overrides)


Real = Annotated[float, Field(ge=0, lt=LARGEST_REAL)]


class _Fields(Form):
    """An object whose null fields count as absent."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class _Memory(_Fields):
    mem_size: Real | None = None
    mem_util: Real = 0.9


class _Instance(_Fields):
    """A data-parallel server. Fields unused here still count when servers are compared."""

    model_config = ConfigDict(extra="allow")

    model_name: str
    hardware: str
    tp_size: Count = 1
    ep_size: Count = 1
    npu_mem: _Memory = _Memory()


class _Node(_Fields):
    instances: list[_Instance]


class _Cluster(_Fields):
    """The content of config.json: servers that are all equal."""

    nodes: list[_Node]
    link_bw: Real | None = None
    link_latency: Real | None = None

    @model_validator(mode="after")
    def _alike(self) -> Self:
        servers = self.servers
        if not servers or any(server != servers[0] for server in servers):
            problem = f"got {len(servers)} instances{', not all alike' if servers else ''}"
            raise complaint(f"{problem}, expected one, or several that are alike", "nodes")
        return self

    @property
    def servers(self) -> list[_Instance]:
        return [instance for node in self.nodes for instance in node.instances]

    @property
    def link_missing(self) -> bool:
        """True if there are several GPUs and no link between them is named."""
        return self.link is None and len(self.servers) * self.servers[0].tp_size > 1

    @property
    def link(self) -> dict[str, float] | None:
        if not self.link_bw or self.link_latency is None:
            return None
        return {"latency_s": self.link_latency * 1e-9, "bytes_s": round(self.link_bw * GIB)}


class _Kwargs(_Fields):
    """The options given to vLLM; those that the simulator does not cover accept a single value."""

    max_num_seqs: Count
    max_num_batched_tokens: Count
    max_model_len: Count | None = None
    dtype: str = "auto"
    enforce_eager: bool = False
    enable_expert_parallel: bool | None = None
    tensor_parallel_size: Count | None = None
    data_parallel_size: Count | None = None
    pipeline_parallel_size: Literal[1] = 1
    kv_cache_dtype: Literal["auto"] = "auto"
    quantization: None = None
    speculative_config: None = None


class _Cache(_Fields):
    num_gpu_blocks: Count | None = None
    block_size: Count = 16
    enable_prefix_caching: bool = True


class _Rules(_Fields):
    async_scheduling: bool = True
    policy: Any = None
    enable_chunked_prefill: Any = None
    long_prefill_token_threshold: Any = None
    scheduler_reserve_full_isl: Any = None


class _Resolved(_Fields):
    scheduler_config: _Rules = _Rules()


class _Meta(_Fields):
    """The content of meta.json; only newer runs have `resolved_config` and `kv_cache`."""

    vllm_version: str
    dataset_path: str
    model: str | None = None
    num_requests: Count | None = None
    engine_kwargs: _Kwargs
    kv_cache: _Cache = _Cache()
    resolved_config: _Resolved = _Resolved()


def _bad(path: Path, field: str, value: object, expected: str) -> ScenarioError:
    message = f"{path}: {field}: got {shown(value)}, expected {expected}"
    return ScenarioError(message, file=path, field=field, value=value, bound=expected)


def read(folder: Path, pack: Path | None = None, hardware: str | None = None, overrides: Sequence[str] = ()) -> Case:
    """Read a case; its pack is two folders above by default. `overrides` hold in every replay. Raises ScenarioError."""
    if not folder.is_dir():
        raise ScenarioError(f"{folder}: no such folder, expected one with config.json, meta.json, requests.jsonl")
    cluster_file, meta_file = folder / "config.json", folder / "meta.json"
    cluster = Document(str(cluster_file), None, read_json(cluster_file)).checked(_Cluster)
    meta = Document(str(meta_file), None, read_json(meta_file)).checked(_Meta)
    root = Path(os.path.normpath(folder / ".." / "..")) if pack is None else pack
    for part in ("workloads", "perf"):
        if not (root / part).is_dir():
            raise ScenarioError(f"{root}: holds no folder {part!r}; name the pack of the case with --data")
    server, ranks = cluster.servers[0], len(cluster.servers)
    _check_agree(meta_file, meta, server, ranks)
    model = _model(root, server.model_name)
    workload = _workload(root, meta_file, meta.dataset_path)
    declared = meta.engine_kwargs.enable_expert_parallel
    experts = ranks * server.tp_size if (server.ep_size > 1 if declared is None else declared) else 1
    blocks, size = meta.kv_cache.num_gpu_blocks, meta.kv_cache.block_size
    settings: dict[str, Any] = {
        "name": name_of(folder.resolve().name, "case"),
        "question": f"How near does the simulator come to a recorded run of {server.model_name} on "
        f"{ranks} x {server.hardware}?",
        "model": model.model_dump(mode="json"),
        "hardware": shapes.hardware(hardware or _known(server.hardware)).model_dump(mode="json"),
        "workload": {"kind": "vllm_bench", "path": str(workload), "recorded": str(folder / "requests.jsonl")},
        "scheduler": _scheduler(meta_file, meta),
        "kv_cache": {"block_size": size, "num_blocks": blocks or _blocks(cluster_file, server, model, size, experts)},
        "loop": _loop(meta, together=ranks > 1 and model.experts > 0),
        "cost": {
            "kind": "table",
            "path": str(_tables(root, server, meta.engine_kwargs.dtype, model.dtype)),
            "tensor_parallel": server.tp_size,
            "link": LINK if cluster.link_missing else cluster.link,
            "row_s": ROW_S,
            "cpu": CPU,
        },
    }
    limit = meta.num_requests
    if limit:
        settings["workload"]["limit"] = limit
    arrivals = vllm_bench.requests(workload, limit)
    if limit and limit > len(arrivals):
        raise _bad(meta_file, "num_requests", limit, f"at most {len(arrivals)}, the requests of {workload.name}")
    return Case(
        name=folder.resolve().name,
        settings=settings,
        ranks=ranks,
        blocks_measured=blocks is not None,
        arrivals=arrivals,
        taken=vllm_bench.recorded(folder / "requests.jsonl", arrivals),
        series=vllm_bench.series(folder / "timeseries.csv"),
        version=meta.vllm_version,
        link_assumed=cluster.link_missing,
        overrides=tuple(overrides),
    )


def _check_agree(path: Path, meta: _Meta, server: _Instance, ranks: int) -> None:
    """Raise ScenarioError if the run does not agree with config.json."""
    engine = meta.engine_kwargs
    for field, value, configured in (
        ("model", meta.model, server.model_name),
        ("engine_kwargs.tensor_parallel_size", engine.tensor_parallel_size, server.tp_size),
        ("engine_kwargs.data_parallel_size", engine.data_parallel_size, ranks),
    ):
        if value not in (None, configured):
            raise _bad(path, field, value, f"{configured}, as in config.json")


def _blocks(path: Path, server: _Instance, model: ModelShape, block_size: int, experts: int) -> int:
    """Return the cache blocks that fit in the used share of the memory less the weights: LLMServingSim's rule. vLLM has
    fewer, as activations and CUDA take memory, too.
    """
    field, memory_gib, share = "nodes.instances.npu_mem.mem_size", server.npu_mem.mem_size, server.npu_mem.mem_util
    if memory_gib is None:
        raise ScenarioError(f"{path}: {field}: is required, since meta.json has no kv_cache.num_gpu_blocks")
    weights = model.shard_bytes(server.tp_size, experts // server.tp_size or 1)
    left = memory_gib * GIB * share - weights
    blocks = int(left // (block_size * model.kv_token_bytes(server.tp_size)))
    if blocks < 2:
        raise _bad(path, field, memory_gib, f"more than the {weights / GIB:.3g} GiB of weights, at mem_util {share}")
    return blocks


def _model(root: Path, name: str) -> ModelShape:
    """Return the model's shape from its Hugging Face configuration in the pack."""
    path = root / "model_config" / f"{name.rsplit('/', maxsplit=1)[-1]}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
        raise ScenarioError(f"{path}: no configuration of the case's model {name!r} (known: {known})")
    return Document(str(path), None, pretrained.shape(path) | {"name": name}).checked(ModelShape)


def _known(hardware: str) -> str:
    """Return the name of this project's data sheet of a GPU. Raises ScenarioError."""
    try:
        return catalog.shape("hardware", hardware).stem
    except ScenarioError as error:
        raise ScenarioError(f"{error}; name its data sheet with --hardware") from None


def _workload(root: Path, meta_file: Path, dataset: str) -> Path:
    stem = Path(dataset).name.removesuffix(".jsonl")
    path = root / "workloads" / f"{stem}.lengths.jsonl"
    if not path.is_file():
        known = [p.name.removesuffix(".lengths.jsonl") for p in sorted(path.parent.glob("*.lengths.jsonl"))]
        expected = f"a workload of {path.parent} ({', '.join(known) or 'none'}){near(stem, known)}"
        raise _bad(meta_file, "dataset_path", stem, expected)
    return path


def _tables(root: Path, server: _Instance, requested: str, own: str) -> Path:
    """Return the profile in the data type of the run; `own` is the model's type."""
    dtype = own if requested == "auto" else requested
    path: Path = root / "perf" / server.hardware / server.model_name / VARIANTS.get(dtype, dtype)
    if not (path / "meta.yaml").is_file():
        raise ScenarioError(f"{path}: no profile there of {server.model_name} on {server.hardware} in {dtype}")
    return path


def _scheduler(meta_file: Path, meta: _Meta) -> dict[str, Any]:
    """Return the scheduler's options: those that vLLM resolved, else those given to it, else its defaults."""
    numbers = re.match(r"(\d+)\.(\d+)", meta.vllm_version)
    if numbers is None:
        raise _bad(meta_file, "vllm_version", meta.vllm_version, "a version such as 0.19.0")
    engine, rules = meta.engine_kwargs, meta.resolved_config.scheduler_config
    return {
        "name": "vllm",
        "version": "0.19" if tuple(map(int, numbers.groups())) < CHANGED else "0.33",
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_model_len": engine.max_model_len,
        "enable_prefix_caching": meta.kv_cache.enable_prefix_caching,
        **rules.model_dump(exclude={"async_scheduling"}, exclude_none=True),
    }


def _loop(meta: _Meta, *, together: bool) -> dict[str, Any]:
    """Return the loop's fields. Kernel times are looked up at a step's own size, so graphs pad nothing; they save the
    CPU's launches. Servers that step `together` are padded: padding tokens go through experts, too, and only if all
    steps fit a graph do all servers compute equally many tokens.
    """
    graphs = {"enabled": not meta.engine_kwargs.enforce_eager, "padding": "vllm" if together else "none"}
    mode = "async" if meta.resolved_config.scheduler_config.async_scheduling else "sync"
    return {"mode": mode, "cuda_graphs": graphs}
