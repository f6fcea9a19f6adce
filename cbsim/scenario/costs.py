"""The cost part of a scenario: which model turns a step into seconds, and with which coefficients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from cbsim.errors import ScenarioError
from cbsim.files import too_long
from cbsim.scenario import documents, terms
from cbsim.scenario.fields import (
    By,
    DataPath,
    Frozen,
    Many,
    Number,
    PerSecond,
    PlainPath,
    Positive,
    Real,
    Seconds,
    Whole,
    complaint,
)
from cbsim.scenario.fleet import with_fields
from cbsim.scenario.terms import Ends, Range, TermsFile

Efficiency = Annotated[Real, Field(gt=0, le=1)]
Share = Annotated[Real, Field(ge=0)]

# -- CPU time of the loop ----------------------------------------------------------------------------------------------


class PhaseSettings(Frozen):
    """CPU seconds of one phase of a step, linear in what the step holds."""

    base_s: Seconds = 0.0  #: Seconds a step.
    per_request_s: Seconds = 0.0  #: Seconds a row (request) of the step.
    per_token_s: Seconds = 0.0  #: Seconds a query token.
    per_block_s: Seconds = 0.0  #: Seconds a cache block in the tables of the step.
    per_chunk_s: Seconds = 0.0
    """Seconds a request that is listed by itself: a chunk of its prompt, a first or a resumed row."""
    per_change_s: Seconds = 0.0  #: Seconds a decoding request that gets a block, leaves the others or ends.
    per_draft_s: Seconds = 0.0  #: Seconds a draft token that the step verifies: prompt lookup is CPU time of `update`.


class CpuSettings(Frozen):
    """CPU time of the loop's phases; nothing by default."""

    factor: Positive = 1.0  #: All phases take so many times what they say.
    schedule: PhaseSettings = PhaseSettings.model_construct()  #: Planning a step.
    prepare: PhaseSettings = PhaseSettings.model_construct()  #: Building its input tensors.
    launch: PhaseSettings = PhaseSettings.model_construct()  #: Queueing its copies and its graph or kernels.
    update: PhaseSettings = PhaseSettings.model_construct()  #: Applying its result.


class MeasuredCpuSettings(CpuSettings):
    """CPU time of the loop's phases. schedule and update: vLLM 0.33 measured on a shared 2-core Xeon (an upper guess);
    prepare and launch: assumptions, to be replaced by a calibration.
    """

    schedule: PhaseSettings = PhaseSettings.model_construct(base_s=20e-6, per_request_s=6.8e-6)
    prepare: PhaseSettings = PhaseSettings.model_construct(base_s=300e-6, per_request_s=5e-6)
    launch: PhaseSettings = PhaseSettings.model_construct(base_s=200e-6)
    update: PhaseSettings = PhaseSettings.model_construct(base_s=10e-6, per_request_s=3.3e-6)


class Contention(Frozen):
    """How much longer CPU and GPU take beside each other, as shares. Whether a whole CPU phase is longer is decided
    when it begins, and of a step's kernels when its launch ends: so a step's times are known at its launch, and these
    are the shares by which equal steps differ in the two loops. In the synchronous one neither works beside the other.
    """

    cpu: Share = 0.0  #: Of a CPU phase that begins before the kernels of all launched steps have ended.
    gpu: Share = 0.0  #: Of the kernels of a step whose launch ends before those of the steps before it.


class ConstantSettings(Frozen):
    """A fixed time a step, and so much more for each thing in it: the textbook's model."""

    about: ClassVar[str] = "a fixed time a step plus linear terms"
    builder: ClassVar[str] = "cbsim.cost.fitted:constant"
    tensor_parallel: ClassVar[int] = 1
    data_parallel: ClassVar[int] = 1
    pipeline_parallel: ClassVar[int] = 1
    kind: Literal["constant"]
    step_s: Seconds  #: Seconds a step.
    per_token_s: Seconds = 0.0  #: Seconds a query token.
    per_prefill_token_s: Seconds = 0.0  #: Seconds a query token of a prefill, on top.
    per_context_token_s: Seconds = 0.0
    """Seconds a token of context after the step: those in the cache and the row's own."""
    cpu: CpuSettings = CpuSettings.model_construct()  #: CPU time of the loop.
    contention: Contention = Contention.model_construct()  #: Of CPU and GPU that work at the same time.


class ComputeEfficiency(Frozen):
    """Share of the peak FLOP/s that is reached."""

    prefill: Efficiency = 0.6  #: By the matrix products and attention of prefills.
    decode: Efficiency = 0.5  #: By those of decodes.


class MemoryEfficiency(Frozen):
    """Share of the peak bandwidth that is reached."""

    weights: Efficiency = 0.85  #: Reading weights and activations.
    kv: Efficiency = 0.7  #: Reading the KV cache.


class Sureness(Frozen):
    """80 % of left-out measurements lay between these shares of what was predicted, less 1."""

    low: Real  #: From.
    high: Real  #: To.
    points: Whole  #: Measurements that it rests on.


class CalibratedTerms(Range):
    """Where terms come from, what they were calibrated on, and how sure predictions with them are."""

    ttft: Sureness | None = None  #: Of mean TTFT.
    tpot: Sureness | None = None  #: Of mean TPOT.
    values: dict[str, Real]
    """The terms that hold for these GPUs, this card and version; front_s is no field of a scenario."""
    intervals: dict[str, Ends]  #: 80 % intervals of the terms.

    def changed(self, cost: Any) -> dict[str, float]:
        """Return the values in a cost of those terms that it overrides; those that are no number of it are left out."""
        now: dict[str, Any] = {}
        for name in self.values:
            now[name] = cost
            for part in name.split("."):
                now[name] = now[name].get(part) if isinstance(now[name], Mapping) else getattr(now[name], part, None)
        return {name: at for name, at in now.items() if isinstance(at, int | float) and at != self.values[name]}


def _with_terms(data: Any, info: ValidationInfo) -> Any:
    """Return the fields of a cost with the calibrated terms of the name, or in the file, that `terms` says, where it
    gives none; else with what usually stands for those of its engine.
    """
    part = data if isinstance(data, dict) else {}
    name, engine = part.get("terms"), part.get("engine")
    if not isinstance(name, str) or part.get("calibrated") is not None:
        return {**untabulated(engine), **data} if isinstance(engine, str) else data
    try:
        file = terms.load(name, (info.context or {}).get("base"))
    except ScenarioError as error:
        raise complaint(str(error).removeprefix("cost.terms: "), "terms") from None
    if file.kind != data.get("kind"):
        raise complaint(f"{name}: are terms of cost.kind {file.kind}, this one is {data.get('kind')}", "terms")
    calibrated = _terms(file, data)
    return with_fields(calibrated, data) | {field: calibrated[field] for field in ("engine",) if field in calibrated}


def _fields(values: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a cost that terms stand for."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        part, _, field = name.rpartition(".")
        fields |= {part: fields.get(part, {}) | {field: value}} if part else {field: value}
    fields.pop(terms.FRONT, None)
    return fields


def _terms(file: TermsFile, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that calibrated terms give a cost: their values for its GPUs, card and version."""
    system = Path(str(data.get("path", ""))).name
    engine, tensor = data.get("engine"), data.get("tensor_parallel", 1)
    if engine == file.backend:
        engine = file.tables.get(system, engine)  # without a version: the tables that they add to
    version = engine.partition("_")[2] if isinstance(engine, str) else ""
    resolved = terms.resolve(file.terms, tensor if isinstance(tensor, int) else 1, system, version)
    values = {field: term.value for field, term in resolved.items()}
    sure = {
        metric: {"low": factor.low - 1, "high": factor.high - 1, "points": factor.residuals}
        for metric in ("ttft", "tpot")
        if (factor := terms.interval(file, metric))
    }
    about = {field: getattr(file, field) for field in terms.Range.model_fields}
    ends = {field: (term.low, term.high) for field, term in resolved.items()}
    tabled = {"fastest": file.fastest, "routing": file.routing, "engine": engine} if file.kind == "table" else {}
    calibrated = {**about, **sure, "values": values, "intervals": ends}
    return {**_fields(values), **tabled, "calibrated": calibrated}


class LinkSettings(Frozen):
    """What joins the GPUs of a group."""

    latency_s: Seconds  #: Seconds that a message takes whatever its size.
    bytes_s: PerSecond  #: Bytes a second in each direction.


STAGE_LATENCY_S = 10e-6  # aiconfigurator's p2p_latency, on all of its systems


class RooflineSettings(Frozen):
    """Bytes and operations of the model's shape, over the data sheet's rates times an efficiency: by curves that were
    distilled from measured kernels, as long as no efficiency is given.
    """

    about: ClassVar[str] = "FLOPs and bytes of the model's shape, data sheet, and efficiency curves of measured kernels"
    builder: ClassVar[str] = "cbsim.cost.engine_cost:roofline"
    kind: Literal["roofline"]
    compute_efficiency: ComputeEfficiency | None = None
    """Share of the peak FLOP/s, the same for all sizes; null: measured curves, or 0.6 and 0.5 beside the other."""
    memory_efficiency: MemoryEfficiency | None = None
    """Share of the peak bandwidth, the same for all sizes; null: measured curves, or 0.85 and 0.7 beside the other."""
    tensor_parallel: Number = 1  #: GPUs that share every layer.
    data_parallel: Number = 1
    """Servers of `tensor_parallel` GPUs, each with a scheduler and a cache, that step together and share experts."""
    pipeline_parallel: Number = 1
    """Stages of a pipeline, of `tensor_parallel` GPUs each: the layers are split over them, and each computes another
    step."""
    stage_link: LinkSettings | None = None
    """What joins one stage to the next; null: 10 us, and the GPU's link if it joins all, else the host's."""
    all_reduce_latency_s: Seconds = 5e-6
    """With constant efficiencies: seconds that each of two all-reduces a layer takes whatever its size, if there are
    several."""
    reduce_s: Seconds | None = None
    """On curves, which have all-reduces in a graph and launched alone: seconds of each on top, as ranks wait for each
    other; null: what is usual for the engine."""
    step_overhead_s: Seconds = 0.0  #: Seconds on the device that every step costs, whatever it holds.
    gap_s: Seconds = 0.0  #: Seconds between the kernels of two steps, even if the second one has been waiting.
    launch_s_per_layer: Seconds = 50e-6
    """CPU seconds to launch one layer's kernels, when no graph is used: about ten kernels of 5 us."""
    cpu: MeasuredCpuSettings = MeasuredCpuSettings.model_construct()  #: CPU time of the loop.
    contention: Contention = Contention.model_construct()  #: Of CPU and GPU that work at the same time.
    terms: str | None = None
    """File of terms that `cbsim fit` calibrated on a server: they stand for those that are not given here."""
    calibrated: CalibratedTerms | None = None  #: What the terms were calibrated on; filled in when they are read.

    _fill_from_terms = model_validator(mode="before")(_with_terms)

    @property
    def efficiencies(self) -> tuple[ComputeEfficiency, MemoryEfficiency]:
        """The shares of the data sheet where they are constant."""
        return self.compute_efficiency or ComputeEfficiency(), self.memory_efficiency or MemoryEfficiency()


class CurvePoint(Frozen):
    """A measured value of a function of tokens. Straight lines join them; below the first it is flat, and above the
    last it goes on as between the last two.
    """

    tokens: Annotated[Whole, Field(ge=0)]  #: At so many tokens.
    s: Seconds  #: Seconds.


def _ascending(value: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
    for point, following in pairwise(value):
        if point.tokens >= following.tokens:
            raise complaint(f"{point.tokens} tokens come before {following.tokens}, expected ascending numbers")
    return value


Points = Annotated[Many[CurvePoint], AfterValidator(_ascending)]


class FitErrors(Frozen):
    """How well one group of coefficients fits the steps it was measured on. Errors are shares of the measured time."""

    steps: Whole  #: Steps that were measured.
    used: Whole  #: Steps that the fit rests on; the others are outliers.
    median: Real  #: Median of a step's absolute error.
    p95: Real  #: 95th percentile of a step's absolute error.
    total: Real  #: Error of the sum over the steps used.


class Fits(Frozen):
    """Errors of a fit, by what was fitted."""

    kernels: FitErrors  #: Kernels of a step.
    schedule: FitErrors  #: CPU: planning a step.
    prepare: FitErrors  #: CPU: building its input tensors.
    launch: FitErrors  #: CPU: queueing its copies and kernels.
    update: FitErrors  #: CPU: applying its result.


class EqualSteps(Frozen):
    """Decode steps that were measured in both loops. Synchronous ones may be told as longer: see docs/gpu.md."""

    steps: Whole  #: Kinds of steps that both loops ran.
    sync_s: Real  #: Median of their kernels' seconds with one step in flight.
    async_s: Real  #: The same with two, of steps that were launched ahead.
    difference_s: Real  #: Median of the differences, synchronous less asynchronous.


class Calibrated(Frozen):
    """Where the coefficients come from, the range they were measured in, and how well they fit there."""

    device: str  #: What they were measured on.
    model: str  #: Of which model.
    dtype: str  #: In which type.
    scheduler: str  #: With whose planning.
    commit: str  #: By which version of the engine; + for one with changes.
    date: str  #: When, UTC.
    rows: Annotated[Whole, Field(ge=0)]  #: Requests of the largest step.
    tokens: Annotated[Whole, Field(ge=0)]  #: Query tokens of the largest step.
    context_tokens: Annotated[Whole, Field(ge=0)]  #: KV tokens read by the step that read most.
    settings: str = ""
    """Fingerprint of what else was probed: the model's shape, block size, graphs, made-up kernels. Empty: unknown."""
    capture_s: Seconds = 0.0  #: Seconds to capture a CUDA graph, which is done before a run.
    equal_steps: EqualSteps | None = None  #: Do equal steps take equally long in both loops?
    fits: Fits | None = None  #: How well they fit the steps that were measured.


class Coefficients(Frozen):
    """Seconds on the device that a step costs, a sum of terms in what it holds; from a calibration."""

    calibrated: Calibrated | None = None  #: Where they come from. A scenario that leaves the range is told so.
    base_s: Seconds = 0.0  #: Seconds a step.
    query_tokens: Points = ()  #: Seconds by the step's query tokens, padding included.
    context_tokens: Points = ()  #: Seconds by the cached tokens that its decoding requests read.
    per_chunk_s: Seconds = 0.0  #: Seconds a request that is being prefilled, whatever the size of its chunk.
    per_prefill_token_s: Seconds = 0.0  #: Seconds a query token of a prefill.
    per_prefill_attention_s: Seconds = 0.0  #: Seconds a pair of a prefill's query token and a token of its context.
    per_cached_token_s: Seconds = 0.0  #: Seconds a token in the cache before a prefill's chunk.
    per_decode_row_s: Seconds = 0.0  #: Seconds a decoding request, those that pad a CUDA graph included.
    per_context_token_s: Seconds = 0.0  #: Seconds a cached token read by a decoding request.
    per_uneven_token_s: Seconds = 0.0
    """Seconds a cached token of the longest part of a decoding request beyond an even share over `unsplit_rows`."""
    unsplit_rows: Annotated[Real, Field(ge=0)] = 0.0
    """Decoding requests that fill the device: attention splits each of fewer into 2, 4, 8 ... parts. 0: unknown."""
    launch_overlap_s: Seconds = 0.0
    """Seconds by which the kernels of a replayed step begin before the CPU has launched it, on an idle device."""
    h2d_s: Seconds = 0.0  #: Seconds from the launch of a step to the start of its kernels on an idle device.
    d2h_s: Seconds = 0.0  #: Seconds from the end of its kernels until its results are on the host.
    wake_s: Seconds = 0.0  #: Seconds until a CPU that waits for results goes on. One that comes later does not wait.
    gap_s: Seconds = 0.0  #: Seconds between the kernels of two steps, even if the second one has been waiting.
    launch_s_per_layer: Seconds = 50e-6  #: CPU seconds to launch one layer's kernels, when no graph is used.
    cpu: MeasuredCpuSettings = MeasuredCpuSettings.model_construct()  #: CPU time of the loop.
    contention: Contention = Contention.model_construct()  #: Of CPU and GPU that work at the same time.


class FittedSettings(Coefficients):
    """Coefficients calibrated from a run: given here, or read from the file at `path` and overridden here."""

    about: ClassVar[str] = "coefficients calibrated on an engine's own run, from a YAML file"
    builder: ClassVar[str] = "cbsim.cost.fitted:fitted"
    tensor_parallel: ClassVar[int] = 1
    data_parallel: ClassVar[int] = 1
    pipeline_parallel: ClassVar[int] = 1
    kind: Literal["fitted"]
    path: PlainPath | None = None
    """YAML file of coefficients, from the scenario's or the current folder. Once read they stand here, this is null."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_file(cls, data: Any, info: ValidationInfo) -> Any:
        path = data.get("path") if isinstance(data, dict) else None
        if not isinstance(path, str) or too_long(path):
            return data
        base: Path = (info.context or {}).get("base") or Path()
        file = base / path
        if not file.is_file() and Path(path).is_file():  # given with --set: from the current folder
            file = Path(path)
        return coefficients(file) | {key: value for key, value in data.items() if key != "path"}

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        every = self.base_s or any(point.s for point in self.query_tokens)
        prefills = self.per_chunk_s or self.per_prefill_token_s or self.per_prefill_attention_s
        decodes = self.per_decode_row_s or self.per_context_token_s or any(point.s for point in self.context_tokens)
        if not every and not (prefills and decodes):
            free = "decodes" if prefills else "prefills" if decodes else "steps"
            raise complaint(f"{free} take no time: base_s or query_tokens is required, here or in a file at path")
        return self


def coefficients(path: Path) -> dict[str, Any]:
    """Read and check the coefficients in a file. Raises ScenarioError, or ValueError if the file cannot be read."""
    try:
        document = read_whole(path)
    except ScenarioError as error:
        raise ValueError(str(error)) from None
    return document.checked(Coefficients).model_dump()


SEAL = "# SHA-256 of all below: "


def sealed(content: str) -> str:
    """Return `content` below a line with its checksum: a part of a coefficient file would also read as a file."""
    return f"{SEAL}{hashlib.sha256(content.encode()).hexdigest()}\n{content}"


def read_whole(path: Path) -> documents.Document:
    """Read a coefficient file. Raises ScenarioError, also if its seal does not match; one by hand needs no seal."""
    document = documents.read(path)
    _, seal, rest = path.read_text(encoding="utf-8").partition(SEAL)
    if seal and sealed(rest.partition("\n")[2]) != seal + rest:
        reason = "was cut short or changed after it was calibrated"
        raise ScenarioError(f"{path}: {reason}: restore it, or remove its line `{SEAL.strip()}`", file=path)
    return document


UNTABULATED: Mapping[str, Mapping[str, float]] = {
    "vllm": {"step_s": 3e-4, "layer_s": 8e-6, "row_s": 12e-6, "reduce_s": 3e-6}
    | {"elementwise": 1.5, "decode_attention": 1.05},
    "trtllm": {"row_s": 15e-6, "reduce_s": 2.5e-6, "elementwise": 2.0},
}
"""What no kernel table holds, by engine: terms of TableSettings where neither they nor `terms` are given. Round numbers
near those that were calibrated on dense models of Hopper; nothing of SGLang was, and vLLM's stand for it. Attention of
decoding rows: caches are not read as they were when they were tabulated; what rows wait for the longest is `skew`."""


def untabulated(engine: str) -> Mapping[str, float]:
    """Return the terms of an engine, by the name that it begins with."""
    return UNTABULATED.get(engine.partition("_")[0], UNTABULATED["vllm"])


ENGINE = "^(vllm|trtllm|sglang)(_[0-9].*)?$"


class TableSettings(Frozen):
    """Measured kernel times, looked up and summed; what is not measured is stated here and added."""

    about: ClassVar[str] = "measured kernel times: an engine's tables of a card, or vLLM layer profiles"
    builder: ClassVar[str] = "cbsim.cost.engine_cost:table"
    kind: Literal["table"]
    path: DataPath
    """Folder of an engine's tables of a card (then `engine` says whose), or of a vLLM layer profile; found as other
    data are."""
    tensor_parallel: Number = 1  #: GPUs that share every layer.
    data_parallel: Number = 1
    """Servers of `tensor_parallel` GPUs, each with a scheduler and a cache, that step together and share experts."""
    pipeline_parallel: Number = 1
    """Stages of a pipeline, of `tensor_parallel` GPUs each: the layers are split over them, and each computes another
    step."""
    stage_link: LinkSettings | None = None
    """What joins one stage to the next; null: 10 us, and the GPU's link if it joins all, else the host's."""
    all_to_all: Literal["allgather", "deepep"] = "allgather"
    """With `engine`: how these exchange tokens. deepep: by its low-latency kernels if all only decode, else by the
    others."""
    link: LinkSettings | None = None
    """What joins them; required if there are several, unless `engine` has measured it."""
    engine: Annotated[str, Field(pattern=ENGINE)] | None = None
    """With a folder of an engine's tables: whose, such as vllm_0.14.0; without a version the newest."""
    expert_parallel: Number = 1
    """With `engine`: groups of GPUs that experts are spread over; each group shares its own."""
    experts_engine: Annotated[str, Field(pattern=ENGINE)] | None = None
    """With `engine`: whose experts are used, such as sglang_0.5.14, as servers may choose others' kernels; null: its
    own."""
    routing: Literal["balanced", "power_law_1.01", "power_law_1.2"] = "balanced"
    """With `engine`: how unevenly tokens choose experts."""
    reduce_s: Seconds = 0.0
    """With `engine`: seconds an all-reduce on top of the tables: ranks that wait for each other. This, `elementwise`,
    `decode_attention`, `step_s`, `layer_s` and `row_s` have defaults by engine, written out when they are read."""
    elementwise: Annotated[Real, Field(ge=0)] = 1.0
    """With `engine`: time of norms, rope, activation and quantization, in units of their bytes over the bandwidth."""
    decode_attention: Positive = 1.0
    """With `engine`: attention of decoding rows takes so many times what the tables say."""
    products: Positive = 1.0
    """With `engine`: matrix products of steps that run as a graph take so many times what the tables say."""
    large_products: Positive = 1.0  #: With `engine`: those of larger steps.
    experts: Positive = 1.0  #: With `engine`: experts take so many times what the tables say, on top of that.
    terms: str | None = None
    """With `engine`: calibrated terms of that name (scenarios/terms), or in the file at that path, which `cbsim fit`
    wrote, stand for those that are not given here."""
    calibrated: CalibratedTerms | None = None  #: What the terms were calibrated on; filled in when they are read.
    fused_all_reduce: bool = False
    """With `engine`: an all-reduce adds the residual and norms the sum (vLLM's fuse_allreduce_rms), whose bytes are
    then not paid in `elementwise`, in steps with a small enough message."""
    fused_all_reduce_bytes: Number | None = None
    """With `engine`: largest message of a fused all-reduce, bytes; null: the engine's limit for the card and GPUs."""
    fastest: bool = True
    """With `engine`: a product takes what the fastest of all engines in the folder takes, in its type or in 16 bits;
    false: what this one does."""
    skew: bool = True
    """Let attention wait for the longest decoding request: as the tables measured it, with `engine` as profiles did."""
    step_s: Seconds = 0.0  #: Seconds on the device that every step costs on top of the tables.
    layer_s: Seconds = 0.0  #: Seconds a layer on top of the tables: kernels that they leave out, gaps between kernels.
    row_s: Seconds = 0.0
    """Seconds a request of the step on top of the tables: inputs, block tables, bookkeeping that the device awaits."""
    gap_s: Seconds = 0.0  #: Seconds between the kernels of two steps, even if the second one has been waiting.
    launch_s_per_layer: Seconds = 50e-6  #: CPU seconds to launch one layer's kernels, when no graph is used.
    cpu: MeasuredCpuSettings = MeasuredCpuSettings.model_construct()  #: CPU time of the loop.
    contention: Contention = Contention.model_construct()  #: Of CPU and GPU that work at the same time.

    _fill_from_terms = model_validator(mode="before")(_with_terms)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.all_to_all != "allgather" and self.data_parallel == 1:
            raise complaint(f"got {self.all_to_all}, must be allgather with data_parallel 1", "all_to_all")
        if self.terms is not None and self.engine is None and not (self.calibrated and self.calibrated.own):
            raise complaint("needs engine: whose tables they add to, such as vllm", "terms")
        for field in ("tensor_parallel", "data_parallel"):
            if (gpus := getattr(self, field)) > 1 and self.link is None and self.engine is None:
                raise complaint(f"is required with {field} {gpus}: latency_s and bytes_s", "link")
        return self


def drawn(cost: Cost, count: int, seed: int) -> list[Cost]:
    """Return the cost with each of `count` draws of its calibrated terms; none without intervals. Terms that the
    scenario overrides stay as they are.
    """
    if not isinstance(cost, RooflineSettings | TableSettings) or cost.calibrated is None:
        return []
    known, changed = cost.calibrated, cost.calibrated.changed(cost)
    columns = []
    for name, value in known.values.items():
        drawn = terms.draws(name, value, known.intervals[name], count, seed)
        columns.append([changed[name]] * count if name in changed else drawn)
    return [with_terms(cost, dict(zip(known.values, row, strict=True))) for row in zip(*columns, strict=True)]


def with_terms(cost: RooflineSettings | TableSettings, values: Mapping[str, float]) -> RooflineSettings | TableSettings:
    """Return a cost with other values of its terms, the factor of CPU phases included."""
    plain = {"terms": None, "calibrated": None}
    return type(cost).model_validate(with_fields(cost.model_dump(), _fields(values) | plain))


Cost = Annotated[ConstantSettings | RooflineSettings | FittedSettings | TableSettings, By("kind")]


def models() -> dict[str, str]:
    """Return what each cost model is, by its kind."""
    return {get_args(each.model_fields["kind"].annotation)[0]: each.about for each in get_args(get_args(Cost)[0])}


def check_stages(scenario: Any) -> None:
    """Raise ValueError for a scenario whose layers cannot be split over stages, or with parts that are not staged."""
    model, scheduler, cost = scenario.model, scenario.scheduler.name, scenario.cost
    if scenario.stages == 1:
        if getattr(cost, "stage_link", None):
            raise complaint("must be null with pipeline_parallel 1", "cost.stage_link")
        return
    for holds, bound in (
        (scenario.stages <= model.layers, f"must be <= layers ({model.layers})"),
        (scenario.kind.staged, f"must be 1 with scheduler {scheduler}, whose rules for a pipeline are not known"),
        (scenario.ranks == 1, f"must be 1 with cost.data_parallel {scenario.ranks}"),
        (scenario.speculation is None, "must be 1 with speculation"),
        (model.sees_all, f"must be 1 with layers that have windows or states ({model.name})"),
        (getattr(cost, "engine", None) or cost.kind != "table", "must be 1 with cost.kind table without cost.engine"),
    ):
        if not holds:
            raise complaint(f"got {scenario.stages}, {bound}", "cost.pipeline_parallel")
