"""The construction of an engine from a scenario: sizes, weights, cache and device, put together for one run."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from cbengine.batch import Batcher, Capacity, Load
from cbengine.device.base import Clock, CpuClock, EngineDevice, Inline, Modelled
from cbengine.device.cuda import Cuda
from cbengine.device.drafts import DraftModel, Lookup
from cbengine.device.executor import Executor
from cbengine.device.process import Process
from cbengine.driver import Engine, Hooks
from cbengine.errors import UsageError
from cbengine.model import kvcache, weights
from cbengine.model.decoder import Model
from cbengine.model.kvcache import DeviceMemoryError, KvCache, host_tier
from cbengine.model.ops import TorchOps
from cbengine.model.ranks import ALONE, SHARED, Group, Rank
from cbengine.model.weights import Architecture
from cbengine.sampling import DRAWN_BYTES, SLICE, Sampling, SamplingSettings
from cbengine.sequence import Prompts, Sequence
from cbsim.errors import ScenarioError
from cbsim.policy.captures import CAPTURED
from cbsim.policy.kind import pinned
from cbsim.policy.plan import StepPlan
from cbsim.policy.request import RequestSpec
from cbsim.runs import assemble
from cbsim.runs.inbox import Client
from cbsim.scenario.fields import shown
from cbsim.scenario.rows import host_memory
from cbsim.scenario.scenario import Scenario, depth, longest_text, loops
from cbsim.scenario.shapes import ModelShape, activation_bytes
from cbsim.scenario.speculation import Acceptance, Speculation
from cbsim.workload import generators
from cbsim.workload.requests import Workload

DeviceName = Literal["inline", "process", "modelled", "cuda"]
UNKNOWN = 0.05  # share of a GPU's memory left free for what nobody has counted: libraries, graphs, fragments
ACCEPTED = "accepted.csv"  # in a run directory: the drafts that came true, as speculation.acceptance.path has them
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Setup:
    """Options beside the scenario. `requests` replace `sampling` for some; `injected`: CPU ns a step, by phase."""

    device: DeviceName
    weights: Path | None = None
    draft_weights: Path | None = None  # of the model that drafts
    sampling: Sampling = field(default_factory=Sampling)
    requests: SamplingSettings = field(default_factory=SamplingSettings)
    cuda_graphs: bool = True
    end_tokens: bool = False  # also stop at the model's end tokens
    injected: tuple[tuple[str, int], ...] = ()
    saves_tokens: bool = False
    spin: bool = False  # on a GPU: keep the CPU busy while it waits for a step

    def sampling_of(self, spec: RequestSpec) -> Sampling:
        return self.requests.of(spec, self.sampling)


def default_device() -> DeviceName:
    """Return cuda if torch finds a GPU, else process."""
    return "cuda" if torch.cuda.is_available() else "process"


def device_name(setup: Setup) -> str:
    """Return the device's name as measurements record it."""
    if setup.device == "cuda":
        return torch.cuda.get_device_name(0)
    return f"CPU, {setup.device} device: no GPU"


def adapted(scenario: Scenario, setup: Setup, *, open_ended: bool = False) -> Scenario:
    """Return the scenario as this device runs it, for the record to state: the shape of the weights, float32 on a CPU,
    on a GPU a cache that fits its memory, and which steps are CUDA graphs; the acceptance of drafts that will be
    measured. `open_ended`: requests come that are not in its workload. Raises ScenarioError, UsageError.
    """
    shape = scenario.model
    if setup.weights is not None:
        shape = shape_of(setup.weights, shape.dtype)
    if setup.device in ("inline", "process"):
        shape = shape.model_copy(update={"dtype": "float32"})
    ready = scenario.model_copy(update={"model": shape})
    if setup.draft_weights is not None and (ready.speculation is None or ready.speculation.method != "draft_model"):
        raise UsageError("--draft-weights: needs speculation.method draft_model")
    if ready.speculation is not None:
        ready = ready.model_copy(update={"speculation": _measuring(ready.speculation, shape, setup)})
    if setup.device == "modelled":
        return ready
    check_model(shape)
    check_setup(ready, setup)
    return _with_graphs(_fitted(ready, setup, open_ended=open_ended) if setup.device == "cuda" else ready, setup)


def _measuring(drafts: Speculation, target: ModelShape, setup: Setup) -> Speculation:
    """Return a speculation that names the acceptance to be measured, with the drafter that runs. Raises UsageError,
    ScenarioError.
    """
    if setup.device == "modelled":
        raise UsageError("--device modelled: got a scenario with speculation, and computes no tokens to verify by")
    if drafts.method == "eagle":
        bound = "must be ngram or draft_model: the engine reads no weights of such heads"
        raise ScenarioError(f"speculation.method: got eagle, {bound}", field="speculation.method")
    if drafts.adaptive:
        bound = "must be false: the engine verifies all drafts"
        raise ScenarioError(f"speculation.adaptive: got true, {bound}", field="speculation.adaptive")
    update: dict[str, Any] = {"acceptance": Acceptance(path=ACCEPTED)}
    if drafts.method == "draft_model":
        shape = shape_of(setup.draft_weights) if setup.draft_weights is not None else drafts.drafter.model
        if shape is None:
            field, bound = "speculation.drafter.model", "must be the shape of the model that drafts"
            raise ScenarioError(f"{field}: got null, {bound}", field=field)
        if setup.draft_weights is None:  # random weights have the vocabulary of the target, whatever that became
            shape = shape.model_copy(update={"vocab": target.vocab})
        where = "speculation.drafter.model" if setup.draft_weights is None else f"{setup.draft_weights}: model"
        if shape.vocab != target.vocab:
            raise UsageError(
                f"{setup.draft_weights}: vocab: got {shape.vocab:,}, must be the target's, {target.vocab:,}"
            )
        if not shape.sees_all:
            bound = "must be full: all layers have the same tables"
            raise UsageError(f"{where}.attention: got {', '.join(shape.attention)}, {bound}")
        try:
            check_model(shape)
        except (ScenarioError, UsageError) as error:
            raise UsageError(f"{where}.{str(error).removeprefix('model.')}") from None
        shape = shape.model_copy(update={"dtype": target.dtype})
        update["drafter"] = drafts.drafter.model_copy(update={"model": shape})
    return drafts.model_copy(update=update)


UNCOMPUTED = (
    ("experts", "0", "dense models only"),
    ("latent", "null", "attention with separate keys and values only"),
    ("full_heads", "null", "layers with the same heads only"),
    ("output_gate", "false", "attention without gates only"),
    ("sinks", "false", "attention without sinks only"),
)
"""Fields of a shape that must be absent, with what the engine computes instead."""


def check_model(shape: ModelShape) -> None:
    """Refuse a model that can be simulated but not computed, naming its field. Raises UsageError, ScenarioError."""
    for name, expected, reason in UNCOMPUTED:
        if value := getattr(shape, name):
            raise UsageError(f"model.{name}: got {shown(value)}, must be {expected}: the engine computes {reason}")
    if not shape.gated:
        raise UsageError("model.gated: got false, must be true: the engine computes gated feed-forward layers only")
    for name in ("weights_dtype", "kv_dtype"):
        if kind := getattr(shape, name):
            raise UsageError(f"model.{name}: got {kind}, must be null: the engine has one type for all")
    if shape.heads % shape.kv_heads:
        raise ScenarioError(f"model.kv_heads: got {shape.kv_heads}, must divide model.heads ({shape.heads})")
    if shape.head_dim % 2:
        raise ScenarioError(f"model.head_dim: got {shape.head_dim}, must be even: rotation pairs the values of a head")
    if shape.qkv_bias and shape.qk_norm:
        raise ScenarioError("model.qkv_bias: got true, must be false with model.qk_norm: the engine has not both")


def check_setup(scenario: Scenario, setup: Setup) -> None:
    """Refuse several servers, ranks without equal parts or processes, and what beam search lacks. Raises UsageError."""
    if scenario.fleet is not None:
        raise UsageError(f"fleet: got {scenario.fleet.count} servers, must be null: the engine is one server")
    for name in ("data_parallel", "pipeline_parallel"):
        if (count := getattr(scenario.cost, name)) > 1:
            raise UsageError(f"cost.{name}: got {count}, must be 1: the engine is one server of one stage")
    _check_ranks(scenario, setup)
    texts = beams(scenario)
    if texts and not all(sampling.greedy for sampling in (setup.sampling, *setup.requests.by_id.values())):
        raise UsageError(f"sampling.temperature: must be 0: a search of {texts} texts keeps the likeliest")
    if texts and setup.end_tokens:
        raise UsageError(f"--stop-at-end-tokens: must be left out: the {texts} texts of a search end together")


def _check_ranks(scenario: Scenario, setup: Setup) -> None:
    gpus, drafter = scenario.gpus, scenario.speculation.drafter.model if scenario.speculation else None
    for name, model in (("model", scenario.model), ("speculation.drafter.model", drafter)):
        for part in SHARED if model else ():
            if (size := getattr(model, part)) % gpus:
                raise UsageError(f"cost.tensor_parallel: got {gpus}, must divide {name}.{part} ({size})")
    if gpus > 1 and setup.device == "inline":
        raise UsageError(f"cost.tensor_parallel: got {gpus}, must be 1 with --device inline, which is one process")


def check_windows(scenario: Scenario) -> None:
    """Refuse weights whose layers attend to fewer tokens than the scheduler assumes, and rings, because a row's keys
    and values are written before any are read. Raises UsageError.
    """
    kind = scenario.kind
    if scenario.model.linear:
        raise UsageError("model.attention: got linear, must be full, sliding or chunked: states are simulated only")
    if not scenario.model.sees_all and (kind.rings or not kind.windows):
        reason = f"layers see less than the whole sequence, must be full with scheduler {scenario.scheduler.name}"
        raise UsageError(f"model.attention: {reason}")


def beams(scenario: Scenario) -> int:
    """Return the number of beams of a beam search; 0 without beam search."""
    texts = scenario.kind.samples(scenario.scheduler)
    return texts if texts > 1 else 0


def _with_graphs(scenario: Scenario, setup: Setup) -> Scenario:
    """Set which steps are replayed as a graph: decode steps on a GPU; elsewhere every step, in one launch."""
    graphs: dict[str, Any] = {"padding": "none"}
    if setup.device == "cuda":
        captured = not (scenario.kind.padded or beams(scenario))
        allowed = setup.cuda_graphs and scenario.loop.cuda_graphs.enabled and captured
        graphs = {"padding": "cbengine", "enabled": allowed}
    loop = scenario.loop.model_copy(update={"cuda_graphs": scenario.loop.cuda_graphs.model_copy(update=graphs)})
    return scenario.model_copy(update={"loop": loop})


def shape_of(folder: Path, dtype: str = "bfloat16") -> ModelShape:
    """Return the shape of a folder's weights in a scenario's fields. Raises WeightsError."""
    fields = weights.architecture(folder).model_dump(include=set(ModelShape.model_fields))
    return ModelShape.model_validate(fields | {"dtype": dtype})


def any_load(scenario: Scenario, loop: str) -> Load:
    """Return the load of requests that nobody knows yet: each has a block, and as many tokens as may be."""
    longest = longest_text(scenario, loop)
    return Load(scenario.options(loop).num_blocks, longest - 1, longest - 1, longest)


def _fitted(scenario: Scenario, setup: Setup, *, open_ended: bool) -> Scenario:
    """Lower the number of blocks if this GPU has no memory for those that the data sheet says beside weights and steps;
    explicit sizes stay as given.
    """
    if not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here")
    if scenario.gpus > max(1, torch.cuda.device_count()):
        bound = f"must be <= {torch.cuda.device_count()}: torch finds no more CUDA devices here"
        raise UsageError(f"cost.tensor_parallel: got {scenario.gpus}, {bound}")
    if scenario.kv_cache.num_blocks is not None:
        return scenario
    loop = loops(scenario)[-1]
    options = scenario.options(loop)
    free, total = min(map(torch.cuda.mem_get_info, range(scenario.gpus)))
    groups = () if scenario.model.sees_all else assemble.scheduler(scenario, loop).pool.groups
    load = any_load(scenario, loop) if open_ended else None
    plan = executor_plan(scenario, loop, [] if load else generators.build(scenario).specs(), setup, load)
    sizes = plan.capacity._replace(groups=groups)
    model = plan.rank.part(scenario.model)
    beside = step_bytes(model, replace(plan, capacity=sizes), depth(loop))
    weights_bytes = model.weight_bytes
    token_bytes = model.kv_bytes_per_token * kvcache.pages_of(model, groups) // model.layers
    if plan.drafter:
        weights_bytes += plan.drafter.part.weight_bytes
        token_bytes += plan.drafter.part.kv_bytes_per_token
    room = int(free - UNKNOWN * total) - weights_bytes - beside
    fitting = room // (options.block_size * token_bytes)
    if fitting >= options.num_blocks:
        return scenario
    if fitting < 2:
        taken = f"{weights_bytes / 1e9:.1f} GB of weights and {beside / 1e9:.1f} GB for steps of"
        taken = f"{taken} {sizes.tokens:,} query tokens in {sizes.rows:,} rows leave no room for a cache"
        lower = "lower limits of the scheduler, or model.max_position, make room"
        raise DeviceMemoryError(f"--device cuda: {taken} in {free / 1e9:.1f} GB: {lower}")
    update: dict[str, Any] = {"kv_cache": scenario.kv_cache.model_copy(update={"num_blocks": fitting})}
    update["scheduler"] = pinned(scenario.scheduler, options)
    return scenario.model_copy(update=update)


def architecture_of(scenario: Scenario, setup: Setup) -> Architecture:
    return weights.architecture(setup.weights) if setup.weights else Architecture(**dict(scenario.model))


@dataclass(frozen=True, slots=True)
class ExecutorPlan:
    """An executor's ingredients, for a worker, too. `random`: some request draws. `host_blocks`: of a host tier.
    `drafter` is a model that drafts; without it a capacity for drafts is one for prompt lookup. `shared` is the memory
    of a cache that this process reads and writes, too.
    """

    architecture: Architecture
    weights: Path | None
    seed: int
    dtype: str
    device: str
    positions: int
    num_blocks: int
    block_size: int
    capacity: Capacity
    random: bool
    host_blocks: int = 0
    drafter: ExecutorPlan | None = None
    rank: Rank = ALONE
    shared: Any = None

    @property
    def part(self) -> Architecture:
        """The shape of what one rank computes."""
        return self.rank.part(self.architecture)

    def of(self, rank: Rank) -> ExecutorPlan:
        return replace(self, rank=rank, drafter=self.drafter and replace(self.drafter, rank=rank))

    def sharing(self) -> ExecutorPlan:
        """Return the plan of an executor whose cache this process has, too. Raises DeviceMemoryError."""
        size = KvCache.bytes_for(self.architecture, self.num_blocks, self.block_size, DTYPES[self.dtype])
        if self.device != "cpu":
            return replace(self, shared=torch.zeros(size, dtype=torch.uint8, device=self.device))
        _check_memory(self)
        return replace(self, shared=multiprocessing.get_context("spawn").RawArray("B", size))

    def cache(self) -> KvCache:
        """Return the cache, or a view of the shared one."""
        memory = self.shared
        if memory is not None and not isinstance(memory, Tensor):
            memory = torch.frombuffer(memory, dtype=torch.uint8)
        sizes = self.num_blocks, self.block_size, DTYPES[self.dtype], torch.device(self.device)
        return KvCache(self.part, *sizes, self.capacity.groups, memory)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights under their Hugging Face names. Raises WeightsError."""
        dtype = DTYPES[self.dtype]
        if self.weights is not None:
            return weights.load(self.weights, dtype, torch.device(self.device), self.rank)[1]
        return weights.random(self.architecture, self.seed, dtype, torch.device(self.device), self.rank)

    def check(self) -> None:
        """Raise the errors of building the executor that a user can cause, before any memory is allocated."""
        _check_memory(self)
        for plan in (self, self.drafter):
            if plan is not None and plan.weights is not None:
                weights.load(plan.weights, DTYPES[plan.dtype], torch.device("meta"))

    def __call__(self) -> Executor:
        """Load or draw the weights and allocate the cache. Raises WeightsError, DeviceMemoryError."""
        if self.rank.count == 1:  # the ranks of one host were checked together
            _check_memory(self)
        group = self.rank.join(torch.device(self.device))
        model, cache = self._model(group)
        host, drafter = None, None
        if self.host_blocks:
            assert not self.capacity.groups, "a host tier has blocks of all layers"
            pinned, dtype = self.device != "cpu", DTYPES[self.dtype]
            host = host_tier(self.part, self.host_blocks, self.block_size, dtype, pinned=pinned)
        if self.capacity.drafts:
            drafter = DraftModel(*self.drafter._model(group)) if self.drafter else Lookup(cache)
        return Executor(model, cache, self.capacity, host, drafter)

    def _model(self, group: Group) -> tuple[Model, KvCache]:
        try:
            model = Model(self.part, self.tensors(), ops(self.device), self.positions, group)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(f"model: the weights do not fit the GPU's memory: {error}") from None
        return model, self.cache()


def step_bytes(model: ModelShape, plan: ExecutorPlan, steps: int) -> int:
    """Return the bytes that a GPU needs beside weights and cache with `steps` steps in flight: block tables, buffers,
    rotation; the largest step's tensors, and the largest captured one's, whose memory is its own.
    """
    sizes, queries = plan.capacity, model.heads * model.head_dim * model.dtype_bytes

    def tensors(tokens: int, rows: int) -> int:
        rows *= 1 + sizes.drafts
        logits = rows * (4 + model.dtype_bytes) + min(rows, SLICE) * DRAWN_BYTES * plan.random
        return activation_bytes(model, tokens, 0) + tokens * queries + logits * model.vocab

    tables = (sizes.slots + 1) * sizes.tables * sizes.width + steps * (sizes.staging + sizes.results)
    captured = min(sizes.sampling, CAPTURED[-1])
    largest = tensors(sizes.tokens, sizes.rows) + tensors(captured * (1 + sizes.drafts), captured)
    return 4 * (tables + plan.positions * model.head_dim) + largest


def ops(device: str) -> TorchOps:
    """Return Triton kernels on a GPU, plain torch elsewhere."""
    if device == "cpu":
        return TorchOps()
    from cbengine.model.kernels.triton_ops import TritonOps

    return TritonOps()


def _check_memory(plan: ExecutorPlan) -> None:
    """Check memory before allocating, since a system may overcommit a CPU's memory and kill the process later."""
    free = host_memory()
    if free is None:
        return
    if plan.device == "cpu":
        free -= _needed_on_cpu(plan, free)
    blocks, pinned = plan.host_blocks, plan.device != "cpu"
    block = plan.rank.count * KvCache.bytes_for(plan.part, 0, plan.block_size, DTYPES[plan.dtype])
    size = kvcache.pinned_size(blocks * block) if pinned else blocks * block
    if size > free:
        fit = (1 << free.bit_length() - 1 if pinned and free else free) // block
        raise DeviceMemoryError(f"{kvcache.too_large(blocks, size)}, where {free:,} are free: {fit:,} blocks would fit")


def _needed_on_cpu(plan: ExecutorPlan, free: int) -> int:
    """Return the bytes of model, cache and tables of all ranks. Raises DeviceMemoryError if they are not free."""
    dtype, sizes, ranks = DTYPES[plan.dtype], plan.capacity, plan.rank.count
    blocks = ranks * KvCache.bytes_for(plan.part, plan.num_blocks, plan.block_size, dtype, sizes.groups)
    drafting = _needed_on_cpu(plan.drafter, free) if plan.drafter else 0
    needed = {
        "model": 2 * ranks * dtype.itemsize * plan.part.parameters,  # twice: parts and joined matrices coexist
        "kv_cache.num_blocks": blocks,
        "speculation.drafter": drafting,
        "workload": 4 * ranks * (sizes.slots * sizes.tables * sizes.width + 2 * sizes.staging),
    }
    if sum(needed.values()) > free:
        model, cache, other, tables = (f"{size / 1e9:,.2f} GB" for size in needed.values())
        taken = f"the weights of {plan.architecture.name} take up to {model}, {plan.num_blocks:,} blocks {cache} and"
        taken = f"{taken} a drafter {other} and" if drafting else taken
        taken = f"{taken} tables and steps of {sizes.slots:,} requests {tables}"
        largest = max(needed, key=needed.__getitem__)
        raise DeviceMemoryError(f"{largest}: {taken}, the host has {free / 1e9:,.2f} GB free")
    return sum(needed.values())


def executor_plan(
    scenario: Scenario, loop: str, specs: list[RequestSpec], setup: Setup, load: Load | None = None
) -> ExecutorPlan:
    """Return the plan for these requests, or a load that may draw. Raises ScenarioError for too long prompts."""
    options = scenario.options(loop)
    drafts = scenario.speculation
    sizes = (load or Load.of(specs)).capacity(options, drafts.k if drafts else 0)._replace(beams=beams(scenario))
    architecture = architecture_of(scenario, setup)
    prompts = [spec.prompt_tokens for spec in specs]
    longest = max((tokens for tokens in prompts if tokens < (options.limits.longest or math.inf)), default=0)
    if longest >= architecture.max_position:
        bound = f"must be > {longest}, the longest prompt's tokens"
        raise ScenarioError(f"model.max_position: got {architecture.max_position}, {bound}")
    plan = ExecutorPlan(
        architecture=architecture,
        weights=setup.weights,
        seed=scenario.seed,
        dtype=scenario.model.dtype,
        device="cuda" if setup.device == "cuda" else "cpu",
        positions=sizes.width * options.block_size,
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        capacity=sizes,
        random=load is not None or not all(setup.sampling_of(spec).greedy for spec in specs),
        rank=Rank(count=scenario.gpus),
    )
    if drafts is None or drafts.method == "ngram":
        return plan
    return _with_drafter(plan, drafts, setup.draft_weights, longest_text(scenario, loop))


def _with_drafter(plan: ExecutorPlan, drafts: Speculation, folder: Path | None, longest: int) -> ExecutorPlan:
    """Return a plan with the model that drafts for texts of up to `longest` tokens. Raises UsageError."""
    assert drafts.drafter.model is not None
    drafter = weights.architecture(folder) if folder else Architecture(**dict(drafts.drafter.model))
    if drafter.max_position < longest:
        where = f"{folder}: model" if folder else "speculation.drafter.model"
        bound = f"must be >= {longest:,}, the longest text: scheduler.max_model_len lowers it"
        raise UsageError(f"{where}.max_position: got {drafter.max_position:,}, {bound}")
    return replace(plan, drafter=replace(plan, architecture=drafter, weights=folder))


def device(scenario: Scenario, loop: str, plan: ExecutorPlan, setup: Setup, clock: Clock) -> EngineDevice:
    """Return the device of one run. Raises DeviceError, DeviceMemoryError, WeightsError."""
    steps, graphs = depth(loop), scenario.graph_padding == "cbengine"
    if setup.device == "modelled":
        copies = assemble.copies(scenario, plan.capacity.groups)
        return Modelled(assemble.cost_model(scenario), copies, plan.capacity, steps, clock, graphs=graphs)
    options = {"graphs": graphs, "overlap": scenario.loop.streams, "random": plan.random, "spin": setup.spin}
    if setup.device == "process" or plan.rank.count > 1:
        plan.check()  # here, because an error in a worker process is not recognised as a user's mistake
        return _workers(plan, steps, options if setup.device == "cuda" else None)
    return Inline(plan(), plan.capacity, steps) if setup.device == "inline" else _gpu(plan, steps, options)


def _gpu(plan: ExecutorPlan, steps: int, options: Mapping[str, bool]) -> Cuda:
    return Cuda(plan(), plan.capacity, steps, **options)


def _workers(plan: ExecutorPlan, steps: int, gpus: Mapping[str, bool] | None) -> Process:
    """Return a worker process for each rank, each with a GPU of these options if there are any."""
    with TemporaryDirectory() as folder:  # the ranks have met once they are ready
        ranks = [replace(plan.rank, index=index, store=f"{folder}/ranks") for index in range(plan.rank.count)]
        plans = [plan.of(rank) for rank in ranks]
        first, *others = plans if gpus is None else [partial(_gpu, each, steps, gpus) for each in plans]
        return Process(first, plan.capacity, steps, others)


def engine(
    scenario: Scenario,
    loop: str,
    workload: Workload,
    setup: Setup,
    *,
    clock: Clock | None = None,
    on_plan: Callable[[StepPlan], None] | None = None,
) -> tuple[Engine, EngineDevice]:
    """Return a run's engine and device. Raises what `device` does, ScenarioError, UsageError for an unknown request."""
    specs = workload.specs()
    setup.requests.check(specs)
    plan = executor_plan(scenario, loop, specs, setup)
    texts = Prompts(scenario.seed, plan.architecture.vocab)
    ends = frozenset(plan.architecture.end_tokens if setup.end_tokens else ())

    def begin(spec: RequestSpec) -> Sequence:
        return Sequence(spec, texts.of(spec), setup.sampling_of(spec), ends)

    return assembled(scenario, loop, plan, setup, workload, texts, Hooks(begin, on_plan), clock=clock)


def assembled(
    scenario: Scenario,
    loop: str,
    plan: ExecutorPlan,
    setup: Setup,
    client: Client,
    prompts: Prompts,
    hooks: Hooks,
    *,
    clock: Clock | None = None,
    around: Callable[[EngineDevice], EngineDevice] | None = None,
) -> tuple[Engine, EngineDevice]:
    """Return an engine and its device, made by `plan`, with what is put `around` it; the other arguments are those of
    `driver.Engine`.
    """
    policy = assemble.scheduler(scenario, loop)
    if setup.device != "modelled":
        check_windows(scenario)
    sizes = plan.capacity._replace(groups=policy.pool.groups)
    plan = replace(plan, capacity=sizes, host_blocks=policy.pool.host_blocks)
    clock = clock or (CpuClock() if setup.device == "modelled" else Clock())
    made = device(scenario, loop, plan, setup, clock)
    made = around(made) if around else made
    batcher = Batcher(plan.capacity, padded=scenario.kind.padded)
    extra = dict(setup.injected)
    engine = Engine(policy, made, batcher, prompts, client, depth=depth(loop), hooks=hooks, clock=clock, injected=extra)
    return engine, made
