"""The cost part of a scenario: which model turns a step into seconds, and with which coefficients."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from cbsim.scenario import documents
from cbsim.scenario.cpu_costs import CpuSettings, MeasuredCpuSettings, Seconds
from cbsim.scenario.fields import By, Frozen, PlainPath, Real, ScenarioError, Whole, as_tuple, complaint
from cbsim.scenario.paths import too_long
from cbsim.scenario.table_costs import TableSettings

Efficiency = Annotated[Real, Field(gt=0, le=1)]


class ConstantSettings(Frozen):
    """A fixed time a step, and so much more for each thing in it: the textbook's model."""

    kind: Literal["constant"]
    """constant"""
    step_s: Seconds
    """Seconds a step."""
    per_token_s: Seconds = 0.0
    """Seconds a query token."""
    per_prefill_token_s: Seconds = 0.0
    """Seconds a query token of a prefill, on top."""
    per_context_token_s: Seconds = 0.0
    """Seconds a token of context after the step: those in the cache and the row's own."""
    cpu: CpuSettings = CpuSettings()
    """CPU time of the loop."""


class ComputeEfficiency(Frozen):
    """Share of the peak FLOP/s that is reached."""

    prefill: Efficiency = 0.6
    """By the matrix products and attention of prefills."""
    decode: Efficiency = 0.5
    """By those of decodes."""


class MemoryEfficiency(Frozen):
    """Share of the peak bandwidth that is reached."""

    weights: Efficiency = 0.85
    """Reading weights and activations."""
    kv: Efficiency = 0.7
    """Reading the KV cache."""


class RooflineSettings(Frozen):
    """Bytes and operations of the model's shape, over the data sheet's rates. Efficiencies are assumptions."""

    kind: Literal["roofline"]
    """roofline"""
    compute_efficiency: ComputeEfficiency = ComputeEfficiency()
    """Share of the peak FLOP/s."""
    memory_efficiency: MemoryEfficiency = MemoryEfficiency()
    """Share of the peak bandwidth."""
    tensor_parallel: Annotated[Whole, Field(ge=1)] = 1
    """GPUs that share every layer."""
    all_reduce_latency_s: Seconds = 5e-6
    """Seconds that each of two all-reduces a layer takes whatever its size, if there are several."""
    step_overhead_s: Seconds = 0.0
    """Seconds on the device that every step costs, whatever it holds."""
    launch_s_per_layer: Seconds = 50e-6
    """CPU seconds to launch one layer's kernels, when no graph is used: about ten kernels of 5 us."""
    cpu: MeasuredCpuSettings = MeasuredCpuSettings()
    """CPU time of the loop."""


class CurvePoint(Frozen):
    """A measured value of a function of tokens. Straight lines join them; below the first it is flat, and above the
    last it goes on as between the last two.
    """

    tokens: Annotated[Whole, Field(ge=0)]
    """At so many tokens."""
    s: Seconds
    """Seconds."""


def _ascending(value: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
    for point, following in pairwise(value):
        if point.tokens >= following.tokens:
            raise complaint(f"{point.tokens} tokens come before {following.tokens}, expected ascending numbers")
    return value


Points = Annotated[tuple[CurvePoint, ...], BeforeValidator(as_tuple), AfterValidator(_ascending)]


class FitErrors(Frozen):
    """How well one group of coefficients fits the steps it was measured on. Errors are shares of the measured time."""

    steps: Whole
    """Steps that were measured."""
    used: Whole
    """Steps that the fit rests on; the others are outliers."""
    median: Real
    """Median of a step's absolute error."""
    p95: Real
    """95th percentile of a step's absolute error."""
    total: Real
    """Error of the sum over the steps used."""


class Fits(Frozen):
    """Errors of a fit, by what was fitted."""

    kernels: FitErrors
    """Kernels of a step."""
    schedule: FitErrors
    """CPU: planning a step."""
    prepare: FitErrors
    """CPU: building its input tensors."""
    launch: FitErrors
    """CPU: queueing its copies and kernels."""
    update: FitErrors
    """CPU: applying its result."""


class EqualSteps(Frozen):
    """Decode steps that were measured in both loops. Synchronous ones may be told as longer: see docs/gpu.md."""

    steps: Whole
    """Kinds of steps that both loops ran."""
    sync_s: Real
    """Median of their kernels' seconds with one step in flight."""
    async_s: Real
    """The same with two, of steps that were launched ahead."""
    difference_s: Real
    """Median of the differences, synchronous less asynchronous."""


class Calibrated(Frozen):
    """Where the coefficients come from, the range they were measured in, and how well they fit there."""

    device: str
    """What they were measured on."""
    model: str
    """Of which model."""
    dtype: str
    """In which type."""
    scheduler: str
    """With whose planning."""
    commit: str
    """By which version of the engine; + for one with changes."""
    date: str
    """When, UTC."""
    rows: Annotated[Whole, Field(ge=0)]
    """Requests of the largest step."""
    tokens: Annotated[Whole, Field(ge=0)]
    """Query tokens of the largest step."""
    context_tokens: Annotated[Whole, Field(ge=0)]
    """KV tokens read by the step that read most."""
    settings: str = ""
    """Fingerprint of what else was probed: the model's shape, block size, graphs, made-up kernels. Empty: unknown."""
    capture_s: Seconds = 0.0
    """Seconds to capture a CUDA graph, which is done before a run."""
    equal_steps: EqualSteps | None = None
    """Do equal steps take equally long in both loops?"""
    fits: Fits | None = None
    """How well they fit the steps that were measured."""


class Coefficients(Frozen):
    """Seconds on the device that a step costs, a sum of terms in what it holds; from a calibration."""

    calibrated: Calibrated | None = None
    """Where they come from. A scenario that leaves the range is told so."""
    base_s: Seconds = 0.0
    """Seconds a step."""
    query_tokens: Points = ()
    """Seconds by the step's query tokens, padding included."""
    context_tokens: Points = ()
    """Seconds by the cached tokens that its decoding requests read."""
    per_chunk_s: Seconds = 0.0
    """Seconds a request that is being prefilled, whatever the size of its chunk."""
    per_prefill_token_s: Seconds = 0.0
    """Seconds a query token of a prefill."""
    per_prefill_attention_s: Seconds = 0.0
    """Seconds a pair of a prefill's query token and a token of its context."""
    per_cached_token_s: Seconds = 0.0
    """Seconds a token in the cache before a prefill's chunk."""
    per_decode_row_s: Seconds = 0.0
    """Seconds a decoding request, those that pad a CUDA graph included."""
    per_context_token_s: Seconds = 0.0
    """Seconds a cached token read by a decoding request."""
    h2d_s: Seconds = 0.0
    """Seconds from the launch of a step to the start of its kernels on an idle device."""
    d2h_s: Seconds = 0.0
    """Seconds from the end of its kernels until the CPU has the result."""
    gap_s: Seconds = 0.0
    """Seconds between the kernels of two steps, even if the second one has been waiting."""
    launch_s_per_layer: Seconds = 50e-6
    """CPU seconds to launch one layer's kernels, when no graph is used."""
    cpu: MeasuredCpuSettings = MeasuredCpuSettings()
    """CPU time of the loop."""


class FittedSettings(Coefficients):
    """Coefficients calibrated from a run: given here, or read from the file at `path` and overridden here."""

    kind: Literal["fitted"]
    """fitted"""
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
        if not file.is_file() and Path(path).is_file():  # given with --set, beside whoever gives it
            file = Path(path)
        return coefficients(file) | {key: value for key, value in data.items() if key != "path"}

    @model_validator(mode="after")
    def _takes_time(self) -> FittedSettings:
        every = self.base_s or any(point.s for point in self.query_tokens)
        prefills = self.per_chunk_s or self.per_prefill_token_s or self.per_prefill_attention_s
        decodes = self.per_decode_row_s or self.per_context_token_s or any(point.s for point in self.context_tokens)
        if not every and not (prefills and decodes):
            free = "decodes" if prefills else "prefills" if decodes else "steps"
            raise complaint(f"{free} take no time: base_s or query_tokens is required, here or in a file at path")
        return self


def coefficients(path: Path) -> dict[str, Any]:
    """The coefficients in a file, checked. Raises ScenarioError."""
    try:
        document = read_whole(path)
    except ScenarioError as error:
        raise ValueError(str(error)) from None
    try:
        return Coefficients.model_validate(document.data).model_dump()
    except ValidationError as error:
        raise document.explain(error) from None


SEAL = "# SHA-256 of all below: "


def sealed(text: str) -> str:
    """`text` below a line that tells whether all of it is there: a part of a coefficient file reads as a whole one."""
    return f"{SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def read_whole(path: Path) -> documents.Document:
    """A coefficient file. Raises ScenarioError, also if it is sealed and not what it was; one by hand needs no seal."""
    document = documents.read(path)
    _, seal, rest = path.read_text(encoding="utf-8").partition(SEAL)
    if seal and sealed(rest.partition("\n")[2]) != seal + rest:
        reason = "was cut short or changed after it was calibrated"
        raise ScenarioError(f"{path}: {reason}: restore it, or remove its line `{SEAL.strip()}`", file=path)
    return document


cost_by = By("kind", ConstantSettings, RooflineSettings, FittedSettings, TableSettings)

Cost = Annotated[
    Annotated[ConstantSettings, Tag("<ConstantSettings>")]
    | Annotated[RooflineSettings, Tag("<RooflineSettings>")]
    | Annotated[FittedSettings, Tag("<FittedSettings>")]
    | Annotated[TableSettings, Tag("<TableSettings>")],
    Discriminator(cost_by),
    BeforeValidator(cost_by.check),
]
