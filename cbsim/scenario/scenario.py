"""A scenario file as one frozen value: every default written out, every rule checked, every error in plain words.

Nothing else in the project has defaults of its own or checks what a user wrote.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
    model_validator,
)

from cbsim.errors import ScenarioError, UserError, in_line
from cbsim.policy.kind import Options, Role, Settings, SettingsError, sources
from cbsim.policy.loop import Limits
from cbsim.scenario import catalog, costs, documents
from cbsim.scenario.costs import Coefficients, Cost, RooflineSettings
from cbsim.scenario.demand import Demand, Slo
from cbsim.scenario.documents import Document
from cbsim.scenario.fields import Frozen, Many, Number, Real, Seconds, Text, Whole, complaint, cut, either, shown
from cbsim.scenario.fleet import Fleet, Pool, check_roles, resolved, with_fields
from cbsim.scenario.overrides import Changes, apply, written
from cbsim.scenario.schedulers import Scheduler, plain
from cbsim.scenario.shapes import FRACTION, Hardware, ModelShape, NamedHardware, NamedModel, Place
from cbsim.scenario.speculation import Speculation
from cbsim.schedulers import registry
from cbsim.schedulers.registry import Kind
from cbsim.schedulers.vllm.settings import VllmSettings

MOST_BLOCKS = 10_000_000  # of a cache: they are tracked one by one, so more would only cost memory
LEAST_MEMORY_BYTES = 100_000_000  # of a device; a smaller number must have another unit


class KvCache(Frozen):
    """Paged KV cache."""

    block_size: Number | None = None
    """Tokens in a block; null: 256 for transformers (which wants at least 4), 32 for trtllm, 1 for sglang, else 16."""
    num_blocks: Annotated[Whole, Field(ge=2)] | None = None
    """Blocks; null: as many as fit the memory. vLLM's number includes its null block."""
    memory_fraction: Annotated[Real, Field(gt=0, le=1)] = 0.9
    """transformers: of what the weights leave free; all others: of all memory, weights included."""


def _increasing(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if sizes[0] < 1 or any(b <= a for a, b in pairwise(sizes)):
        raise complaint("must be increasing and >= 1")
    return sizes


class CudaGraphs(Frozen):
    """Shapes are padded to captured ones, and then a launch costs the CPU one call."""

    enabled: bool = True  #: Use graphs.
    capture_s: Seconds = 0.0  #: Seconds that the first use of a shape costs; 0: all were captured before the run.
    padding: Literal["auto", "transformers", "vllm", "cbengine", "none"] = "auto"
    """Rule by which shapes are padded; auto: the scheduler's own, none for static; cbengine: as our engine pads."""
    vllm_capture_sizes: Annotated[Many[Whole], Field(min_length=1), AfterValidator(_increasing)] | None = None
    """vLLM's captured batch sizes, tokens, increasing; larger steps run without a graph. Null: vLLM's own list, up to
    the scheduler's max_cudagraph_capture_size, or 512."""
    vllm_cudagraph_mode: Literal["FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"] = "FULL_AND_PIECEWISE"
    """FULL_DECODE_ONLY: only steps whose rows have one query token each run as a graph, at sizes up to max_num_seqs;
    those with a chunk are launched kernel by kernel."""


class Loop(Frozen):
    """The serving loop and its device queues."""

    mode: Literal["sync", "async", "both"] = "both"
    """sync: a step at a time; async: the next step is planned while one runs; both: compare them."""
    cuda_graphs: CudaGraphs = CudaGraphs.model_construct()  #: CUDA graphs.
    streams: bool = True
    """Copies to and from the device have streams of their own; false: one queue for copies and kernels."""


class Scenario(Frozen):
    """One question to the simulator, completely specified."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=150)] = "scenario"
    """Names the run; the file's name by default."""
    question: Annotated[Text, Field(pattern=r"^[^\n]*\S[^\n]*$", max_length=1000)]
    """What the scenario is meant to answer, in one line."""
    seed: Annotated[int, Field(ge=0, lt=10**19)] = 0  #: Root of all random numbers.
    model: NamedModel
    """A model's shape: a name in scenarios/models, the path of a file or of a config.json, or the fields themselves."""
    hardware: NamedHardware  #: A GPU: a name in scenarios/hardware, a path, or the fields themselves.
    workload: Demand  #: What is asked of the server, and when.
    scheduler: Scheduler = VllmSettings()  #: Which rules form the batches.
    kv_cache: KvCache = KvCache.model_construct()  #: Size of the KV cache.
    loop: Loop = Loop.model_construct()  #: The serving loop.
    cost: Cost = RooflineSettings.model_construct(kind="roofline")  #: How long a step takes.
    slo: Slo = Slo.model_construct()  #: What users are promised.
    speculation: Speculation | None = None  #: Drafts that steps verify; null: none.
    fleet: Fleet | None = None  #: Several servers behind a router; null: one server.
    _role: Role | None = None

    @model_validator(mode="after")
    def _parts_agree(self) -> Scenario:
        """Check the rules between parts of the scenario."""
        gpus, model, least, memory_bytes = self.gpus, self.model, self.kind.least_block_size, self.hardware.memory_bytes
        if self.block_size < least:
            family = self.scheduler.name.partition("_")[0]
            raise complaint(f"got {self.block_size}, must be >= {least} for {family}", "kv_cache.block_size")
        if memory_bytes < LEAST_MEMORY_BYTES:
            bound = f"must be >= {LEAST_MEMORY_BYTES:,} (bytes)"
            raise complaint(f"got {memory_bytes:,}, {bound}", "hardware.memory_bytes")
        joined = self.hardware.link_gpus if self.hardware.link_bytes_s else None
        if joined and gpus * self.ranks > joined and not getattr(self.cost, "link", None):
            bound = f"must be <= hardware.link_gpus ({joined}): what joins more of them is not known"
            got, field = (gpus, "tensor") if self.ranks == 1 else (f"{self.ranks} x {gpus} GPUs", "data")
            raise complaint(f"got {got}, {bound}", f"cost.{field}_parallel")
        if self.cost.kind == "roofline" and (model.heads % gpus or max(model.kv_heads, gpus) % gpus):
            bound = f"must divide heads ({model.heads}) and, if it is less, kv_heads ({model.kv_heads})"
            raise complaint(f"got {gpus}, {bound}", "cost.tensor_parallel")
        costs.check_stages(self)
        return self

    @model_validator(mode="after")
    def _ranks_agree(self) -> Scenario:
        """Check that servers which step together share experts, and that requests can be shared among them."""
        if (ranks := self.ranks) > 1:
            if not self.model.experts:
                bound = f"must be 1: {self.model.name} has no experts to share, so its servers do not step together"
                raise complaint(f"got {ranks}, {bound}", "cost.data_parallel")
            shares, groups = self.gpus * ranks, getattr(self.cost, "expert_parallel", 1)
            if self.model.experts % groups or self.model.intermediate % max(1, shares // groups):
                parts = f"{self.model.experts} experts, {self.model.intermediate} wide"
                bound = f"must give {shares} GPUs in {groups} groups equal parts of {parts}"
                raise complaint(f"got {ranks}, {bound}", "cost.data_parallel")
            if self.kind.balance(self.scheduler) is None:
                host = "KV on the host, by " if self.scheduler.name == "vllm" else ""
                bound = f"must be 1 with {host}scheduler {self.scheduler.name}"
                raise complaint(f"got {ranks}, {bound}", "cost.data_parallel")
        return self

    @model_validator(mode="after")
    def _drafts_are_verified(self) -> Scenario:
        """Check that the scheduler's rules of speculation are followed, and that drafter and sequences fit."""
        if (drafts := self.speculation) is None:
            return self
        if drafts.method not in self.kind.drafts:
            known = f"{either(self.kind.drafts)} with" if self.kind.drafts else "left out with"
            bound = f"must be {known} scheduler {self.scheduler.name}"
            raise complaint(f"got {drafts.method}, {bound}", "speculation.method")
        drafter = drafts.drafter.model
        least = 1 if drafts.method == "eagle" else self.model.vocab  # a head's may be less
        if drafter and not least <= drafter.vocab <= self.model.vocab:
            bound = f"must have {'at most ' * (least == 1)}the target's vocab ({self.model.vocab:,})"
            raise complaint(f"got {drafter.name} with {drafter.vocab:,}, {bound}", "speculation.drafter.model")
        if self.ranks > 1:
            raise complaint(f"got {self.ranks}, must be 1 with speculation", "cost.data_parallel")
        return self

    @model_validator(mode="after")
    def _layers_are_served(self) -> Scenario:
        model, gpus = self.model, self.gpus
        unserved = {sees.sight for sees in model.pattern} - {*self.kind.serves}
        if unserved or not (model.sees_all or self.cost.kind in ("roofline", "constant", "table")):
            other = f"scheduler {self.scheduler.name}" if unserved else f"cost.kind {self.cost.kind}"
            bound = f"must be {either([each.value for each in self.kind.serves]) if unserved else 'full'} with {other}"
            kinds = dict.fromkeys(sees.sight.value for sees in model.pattern)
            raise complaint(f"got {' and '.join(kinds)} layers, {bound}", "model.attention")
        if of := model.linear:
            name = "value_heads" if of.rule == "mamba2" else "key_heads"  # groups of Mamba-2 are copied
            if (heads := getattr(of, name)) % gpus:
                raise complaint(f"got {gpus}, must divide linear.{name} ({heads})", "cost.tensor_parallel")
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _servers_agree(cls, data: Any, handler: ModelWrapValidatorHandler[Scenario], info: ValidationInfo) -> Scenario:
        """Check every pool's server as a scenario of its own, and write its fields out."""
        scenario = handler(data)
        if isinstance(data, Scenario) or (fleet := scenario.fleet) is None:
            return scenario
        base, pools = scenario.model_dump(mode="json", exclude={"fleet"}), list[Pool]()
        servers = list[Scenario]()
        for at, pool in enumerate(fleet.pools):
            try:
                server = cls.model_validate(with_fields(base, pool.server), context=info.context)
            except ValidationError as error:
                first: Any = error.errors(include_url=False)[0]
                where = ".".join(map(str, documents.path_of(first)))
                raise complaint(documents.wording(first), f"fleet.pools.{at}.server.{where}") from None
            if server.ranks > 1:
                bound = "must be 1 in a fleet, whose servers do not step together"
                raise complaint(f"got {server.ranks}, {bound}", f"fleet.pools.{at}.server.cost.data_parallel")
            if pool.server.get("loop", {}).get("mode") == "both":
                bound = "expected sync or async: the fleet runs once for each loop that the scenario names"
                raise complaint(f"got 'both', {bound}", f"fleet.pools.{at}.server.loop.mode")
            given = resolved(base, pool.server, server.model_dump(mode="json"))
            pools.append(pool.model_copy(update={"server": given}))
            servers.append(server)
        if fleet.hand_off is not None:
            check_roles(fleet, servers)
        return scenario.model_copy(update={"fleet": fleet.model_copy(update={"pools": tuple(pools)})})

    @model_serializer(mode="wrap")
    def _without_a_fleet(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write no `fleet` and no `speculation` if there is none."""
        written: dict[str, Any] = handler(self)
        for name in ("fleet", "speculation"):
            if written.get(name) is None:
                written.pop(name, None)
        return written

    @property
    def servers(self) -> tuple[Scenario, ...]:
        """The scenario of each server: this one, or those of the pools, the same object for those of one pool."""
        return (self,) if self.fleet is None else self._servers

    def replicas(self, summary: Mapping[str, Any]) -> tuple[Scenario, ...]:
        """The scenario of each server that a run had: of a fleet whose servers come and go, by its summary.json."""
        if self.fleet is None or not self.fleet.changes:
            return self.servers
        of = dict(zip(self.fleet.labels, (server for _, server in self.pools), strict=True))
        return tuple([of[each["pool"]] for each in summary["per_server"] if each["pool"] in of])

    @property
    def pools(self) -> list[tuple[str, Scenario]]:
        """What precedes the names of a server's fields, and its scenario, for each pool; of one server itself."""
        if self.fleet is None:
            return [("", self)]
        firsts = accumulate((pool.count for pool in self.fleet.pools[:-1]), initial=0)
        return [(f"fleet.pools.{at}.server.", self._servers[first]) for at, first in enumerate(firsts)]

    @cached_property
    def _servers(self) -> tuple[Scenario, ...]:
        assert self.fleet is not None
        base, servers = self.model_dump(mode="json", exclude={"fleet"}), list[Scenario]()
        for pool in self.fleet.pools:
            server = Scenario.model_validate(with_fields(base, pool.server))
            server._role = pool.role if self.fleet.hand_off else None
            servers += [server] * pool.count
        return tuple(servers)

    @property
    def role(self) -> Role | None:
        """What a server does of requests that others of its fleet do the rest of; None if there are no such others."""
        return self._role

    @property
    def gpus(self) -> int:
        """GPUs that share every layer: those of a server."""
        return self.cost.tensor_parallel

    @property
    def ranks(self) -> int:
        """Servers that step together."""
        return self.cost.data_parallel

    @property
    def stages(self) -> int:
        """Stages of a server's pipeline, of `gpus` each."""
        return self.cost.pipeline_parallel

    @property
    def own_gpus(self) -> int:
        """GPUs of all stages of a server, or of servers that step together."""
        return self.gpus * self.stages * self.ranks

    @property
    def all_gpus(self) -> int:
        """GPUs of all servers."""
        return sum(server.own_gpus for server in self.servers)

    @property
    def price_usd_hour(self) -> float | None:
        """The price of an hour of all GPUs; None if that of one is not known."""
        prices = [(server.hardware.price_usd_hour, server.own_gpus) for server in self.servers]
        known = [price * gpus for price, gpus in prices if price is not None]
        return sum(known) if len(known) == len(prices) else None

    @property
    def kind(self) -> Kind:
        """The kind of the scheduler."""
        return registry.find(self.scheduler.name)

    @property
    def block_size(self) -> int:
        """Tokens in a cache block."""
        return self.kind.block_size if self.kv_cache.block_size is None else self.kv_cache.block_size

    def options(self, loop: str) -> Options:
        """Return all options of the scheduler in a loop, sizes solved from memory where they are not given: solved
        once, then cached. Raises ScenarioError if the model does not fit or sizes contradict each other.
        """
        if loop not in self._options:
            self._options[loop] = _solved_options(self, loop)
        return self._options[loop]

    @cached_property
    def _options(self) -> dict[str, Options]:
        """The options solved so far, by loop."""
        return {}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Scenario:
        """Return a copy with other fields; sizes are solved again if they follow from one of these."""
        copy = super().model_copy(update=update, deep=deep)
        if {"model", "hardware", "scheduler", "kv_cache", "cost", "speculation"} & set(update or ()):
            copy.__dict__.pop("_options", None)
        if update:
            copy.__dict__.pop("_servers", None)
        return copy

    @property
    def graph_padding(self) -> str:
        """The rule that pads step shapes to captured ones: transformers, vllm, cbengine or none."""
        graphs = self.loop.cuda_graphs
        if not graphs.enabled:
            return "none"
        return self.kind.padding if graphs.padding == "auto" else graphs.padding


def loops(scenario: Scenario) -> tuple[str, ...]:
    """Return the names of the serving loops to run: `sync` has one step in flight, `async` two."""
    return ("sync", "async") if scenario.loop.mode == "both" else (scenario.loop.mode,)


def depth(loop: str, stages: int = 1) -> int:
    """Return the steps in flight of a loop, by its name: one for each stage of a pipeline, and one more in `async`."""
    return {"sync": 0, "async": 1}[loop] + stages


def longest_text(scenario: Scenario, loop: str) -> int:
    """Return the most tokens of a prompt and its answer that model, scheduler and cache allow."""
    options = scenario.options(loop)
    bounds = (scenario.model.max_position, options.limits.longest, options.num_blocks * options.block_size)
    return min(bound for bound in bounds if bound is not None)


def load(path_or_name: str | Path, overrides: Sequence[str] = ()) -> Scenario:
    """Load the scenario in a file, or the one of that name that comes with the project. Raises ScenarioError.

    Each override is `field=value` with a dotted field and a YAML value; where the file leaves out the part that the
    field belongs to, its defaults are used. An override of a `name` or `kind` replaces that part by another kind and
    drops the fields of the file that this kind does not have.
    """
    return variants(path_or_name)(overrides)


def parse(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> Scenario:
    """Return the scenario of plain values, which messages call `where`; overrides and errors as for `load`."""
    return Variants(Document(where, None, data), Path())(overrides)  # there is no file with lines


class Variants:
    """The scenarios of a file under different overrides; the file is read once. Its paths are relative to `base`."""

    def __init__(self, document: Document, base: Path) -> None:
        self._document, self._base = document, base

    def __call__(self, overrides: Sequence[str] = ()) -> Scenario:
        """Return the scenario with these overrides. Raises ScenarioError."""
        document = self._changed(overrides)
        scenario = document.checked(Scenario, self._base)
        for loop in loops(scenario):
            for within, server in scenario.pools:
                try:
                    server.options(loop if server.loop.mode == "both" else server.loop.mode)
                except ScenarioError as error:
                    raise _placed(document, f"{within}{error}") from None
        return scenario

    @contextmanager
    def placing(self, overrides: Sequence[str]) -> Iterator[None]:
        """Let errors of a field that only a run finds, such as a file that is not there, name what set it."""
        try:
            yield
        except ScenarioError as error:
            if error.field is None or error.file is not None or not str(error).startswith(f"{error.field}: "):
                raise
            raise _placed(self._changed(overrides), str(error)) from None

    def _changed(self, overrides: Sequence[str]) -> Document:
        if not overrides:
            return self._document
        return apply(self._document, overrides, Scenario, lambda: self._defaults, self._base)

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        """The value of every field if the file alone is a scenario, else the defaults of the parts that have one."""
        try:
            return self._document.checked(Scenario, self._base).model_dump(mode="json")
        except ScenarioError:
            parts = {name: field.default for name, field in Scenario.model_fields.items()}
            defaults = {name: part.model_dump(mode="json") for name, part in parts.items() if isinstance(part, Frozen)}
            return defaults | {name: plain(part) for name, part in parts.items() if isinstance(part, Settings)}


def _placed(document: Document, message: str) -> UserError:
    """Return a message that begins with a field as the error of what set the field in a document."""
    field, _, reason = message.partition(": ")
    path = documents.split(field)
    where, given = document.where(path), ", ".join(f"--set {cut(override)}" for _, override in document.overrides)
    by = f" with {given}" if given and not where.startswith("--set ") else ""
    return document.error(f"{where}{by}: {message}", path, reason)


def variants(path_or_name: str | Path) -> Variants:
    """Read the scenario in a file, or of a name that comes with the project, as Variants. Raises ScenarioError."""
    path = catalog.scenario(path_or_name)
    document = documents.read(path)
    document.data.setdefault("name", documents.name_of(path.stem, "scenario"))
    return Variants(document, path.parent)


def dump(scenario: Scenario) -> str:
    """Return the scenario as YAML with every default written out; loading it gives an equal scenario."""
    return "".join(_section(json.dumps({name: part})) for name, part in scenario.model_dump(mode="json").items())


@lru_cache(maxsize=256)  # scenarios of a sweep have most sections in common
def _section(values: str) -> str:
    return documents.write(json.loads(values))


def site(scenario: Scenario, loop: str) -> Place:
    """Return the site that sizes are solved on: model, GPU and cache, and the steps in flight."""
    model, gpu, cache, drafts = scenario.model, scenario.hardware, scenario.kv_cache, scenario.speculation
    sizes = depth(loop, scenario.stages), scenario.block_size, cache.memory_fraction, cache.num_blocks, scenario.gpus
    rule, drafter = (drafts.rule, drafts.drafts_with(model, stored=True)) if drafts else (None, None)
    more: dict[str, Any] = {"stages": scenario.stages, "role": scenario.role, "speculation": rule, "drafter": drafter}
    return Place(model, gpu, *sizes, ranks=scenario.ranks, **more)


def _resolved(scenario: Scenario, loop: str) -> Any:
    place = site(scenario, loop)
    try:
        return scenario.kind.resolve(scenario.scheduler, place)
    except ScenarioError as error:
        if error.field == FRACTION:
            place.memory_fraction = 1.0
            scenario.kind.resolve(scenario.scheduler, place)  # raises if all of the memory is too little: then say so
        raise


def _solved_options(scenario: Scenario, loop: str) -> Options:
    try:
        options: Options = _resolved(scenario, loop)
        for field, kind in (("block_size", int), ("num_blocks", int), ("limits", Limits)):
            if not isinstance(found := getattr(options, field, None), kind):
                raise TypeError(f"{field} of {shown(options)} is {shown(found)}, expected {kind.__name__}")
    except SettingsError as error:
        raise ScenarioError(f"scheduler.{error.field}: {error}") from None
    except (Exception, SystemExit) as error:  # a user's own code may raise anything
        if isinstance(error, ScenarioError) or scenario.scheduler.name in registry.OURS:
            raise
        reason = f"{scenario.scheduler.name} cannot solve its options: {in_line(error)}"
        raise ScenarioError(f"scheduler: {reason}") from error
    longest = min(scenario.model.max_position, options.limits.longest or scenario.model.max_position)
    if scenario.speculation and scenario.speculation.k >= longest:
        bound = f"must be < {longest:,}, the longest sequence that model, scheduler and cache take"
        raise ScenarioError(f"speculation.k: got {scenario.speculation.k}, {bound}")
    if options.num_blocks > MOST_BLOCKS:
        bound = f"must be <= {MOST_BLOCKS:,}; fewer blocks or a larger block_size would do"
        raise ScenarioError(f"kv_cache.num_blocks: got {options.num_blocks:,}, {bound}")
    return options


def solved_lines(scenario: Scenario) -> str:
    """Return the values solved for what the scenario leaves open, with their source, a line for each: settings of the
    scheduler that are null, and the cache, for the loop with most steps in flight. Raises ScenarioError.
    """
    loop = loops(scenario)[-1]
    options, rules = scenario.options(loop), sources(scenario.scheduler, site(scenario, loop))
    values = []
    for field in fields(scenario.scheduler):
        value = getattr(options, field.name, None)
        if getattr(scenario.scheduler, field.name) is None and value is not None:
            said = str(value).lower() if isinstance(value, bool) else f"{value:,}"
            values.append((f"{field.name} {said}", rules.get(field.name, "solved")))
    if scenario.kv_cache.num_blocks is None:
        gpu, blocks = scenario.hardware, f"{options.num_blocks:,} blocks of {options.block_size} tokens"
        if count := len(getattr(options, "groups", ())):
            most = f"at most {longest_text(scenario, loop):,} tokens a request"
            blocks += f" (each is of one of {count} layer groups; {most})"
        share = f"{scenario.kv_cache.memory_fraction:g} of the {gpu.memory_bytes / 2**30:.1f} GiB of {gpu.name}"
        values.append((blocks, share if scenario.kind.memory is None else scenario.kind.memory.format(gpu=gpu.name)))
    groups = groupby(values, key=lambda pair: pair[1])
    lines = [f"{', '.join(value for value, _ in group)}: {reason}" for reason, group in groups]
    return "solved  " + "\n        ".join(lines) if lines else ""


def notices(scenario: Scenario) -> tuple[str, ...]:
    """Return what results should be read with, a line each: layers whose caches differ in size, which count
    by their mean; and a likely mistake that no rule forbids, a cache beyond the memory.
    """
    blocks, model, gpu, gpus = scenario.kv_cache.num_blocks, scenario.model, scenario.hardware, scenario.gpus
    lines = []
    if len({layer.attention.cached(gpus) for layer, _ in model.kinds if not layer.attention.state}) > 1:
        mean = "layers cache tokens of several sizes; a block counts by their mean, where servers make its pages equal"
        lines.append(f"model: {mean}")
    tokens, parts = (blocks or 0) * scenario.block_size * model.sees_all, model.stages(scenario.stages)
    most = max([part.shard_bytes(gpus, scenario.ranks) + tokens * part.kv_token_bytes(gpus) for part in parts])
    if blocks is not None and most > gpu.memory_bytes:
        needed, memory = (f"{size / 1e9:.2f} GB" for size in (most, gpu.memory_bytes))
        reason = f"got {blocks:,}, which need {needed} with the weights; {gpu.name} has {memory}"
        lines.append(f"kv_cache.num_blocks: {reason}: it is taken as given")
    return tuple(lines)


def json_schema(part: type[Frozen] = Scenario) -> dict[str, Any]:
    """Return the JSON schema of a scenario file, or of another part, with a description of every field."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_standard(part.model_json_schema())}


def _standard(node: Any) -> Any:
    """Return a schema with JSON Schema's keywords for bounds: pydantic keeps its own where a validator comes first."""
    if isinstance(node, list):
        return [_standard(item) for item in node]
    if not isinstance(node, dict):
        return node
    keywords = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
    known = {keywords.get(key, key): _standard(value) for key, value in node.items()}
    for of_text, of_list in (("minLength", "minItems"), ("maxLength", "maxItems")):
        if known.get("type") == "array" and of_text in known:
            known[of_list] = known.pop(of_text)
    return known


def write_schemas(folder: Path, further: Mapping[str, type[Frozen]]) -> list[Path]:
    """Write the schemas of scenario, model, hardware and coefficient files, and further ones; returns the files."""
    ours: dict[str, type[Frozen]] = {"scenario": Scenario, "model": ModelShape, "hardware": Hardware}
    parts = ours | {"coefficients": Coefficients, **further}
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.schema.json" for name in parts]
    for file, part in zip(files, parts.values(), strict=True):
        file.write_text(json.dumps(json_schema(part), indent=2) + "\n", encoding="utf-8")
    return files


def scenario_of(source: str | Path | Mapping[str, Any] | Scenario, changes: Changes = ()) -> Scenario:
    """Return the scenario that `source` is, names, or describes, with changes. Raises ScenarioError."""
    overrides = written(changes)
    if isinstance(source, Scenario):
        return parse(source.model_dump(mode="json"), "scenario", overrides) if overrides else source
    if isinstance(source, Mapping):
        return parse(deepcopy(dict(source)), "scenario", overrides)
    if isinstance(source, str | Path):
        return load(source, overrides)
    raise ScenarioError(f"scenario: got {shown(source)}, expected a name, a path or fields", value=source)


def drawn(scenario: Scenario, count: int) -> list[Scenario]:
    """Return the scenario with each of `count` draws of the calibrated terms of its servers, by its seed. Raises
    ScenarioError if none of them has intervals, or for a single draw, which shows no spread.
    """
    if count == 1:
        raise ScenarioError("draws: got 1, must be >= 2", field="draws", value=1, bound=">= 2")
    made = {f"{where}cost": costs.drawn(server.cost, count, scenario.seed) for where, server in scenario.pools}
    if count and not any(made.values()):
        bound = "draws need terms with intervals, of cbsim fit or scenarios/terms: --set cost.terms=FILE"
        message = f"cost.terms: got {shown(getattr(scenario.cost, 'terms', None))}, {bound}"
        raise ScenarioError(message, field="cost.terms", bound=bound)
    each = [{field: of[at].model_dump(mode="json") for field, of in made.items() if of} for at in range(count)]
    return [scenario_of(scenario, changes) for changes in each]
