"""The `table` cost of a scenario: measured kernel times, and the terms that are added to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from cbsim.scenario import catalog, residuals, terms
from cbsim.scenario.cpu_costs import MeasuredCpuSettings, Seconds
from cbsim.scenario.fields import Frozen, PlainPath, Real, ScenarioError, Whole, complaint
from cbsim.scenario.terms import Ends, Range


def _anchored(path: str, info: ValidationInfo) -> str:
    """Tables beside the scenario file: their absolute path, as with other data."""
    base = (info.context or {}).get("base")
    beside = Path(base) / path if base is not None and not Path(path).is_absolute() else None
    return str(beside.resolve()) if beside is not None and catalog.begins_a_name(beside) else path


class LinkSettings(Frozen):
    """What joins the GPUs of a group."""

    latency_s: Seconds
    """Seconds that a message takes whatever its size."""
    bytes_s: Annotated[Real, Field(gt=0)]
    """Bytes a second in each direction."""


class Sureness(Frozen):
    """80 % of left-out measurements lay between these shares of what was predicted, less 1."""

    low: Real
    """From."""
    high: Real
    """To."""
    points: Whole
    """Measurements that it rests on."""


class CalibratedTerms(Range):
    """Where terms come from, what they were calibrated on, and how sure predictions with them are."""

    ttft: Sureness | None = None
    """Of mean TTFT."""
    tpot: Sureness | None = None
    """Of mean TPOT."""
    values: dict[str, Real]
    """The terms that hold for these GPUs, this card and version; front_s is no field of a scenario."""
    intervals: dict[str, Ends]
    """80 % intervals of the terms."""


class TableSettings(Frozen):
    """Measured kernel times, looked up and summed; what is not measured is stated here and added."""

    kind: Literal["table"]
    """table"""
    path: Annotated[PlainPath, AfterValidator(_anchored)]
    """Folder of vLLM layer profiles, or how the names of GEMM and attention tables begin; found as other data are."""
    tensor_parallel: Annotated[Whole, Field(ge=1)] = 1
    """GPUs that share every layer."""
    link: LinkSettings | None = None
    """What joins them; required if there are several, unless `engine` has measured it."""
    engine: Annotated[str, Field(pattern="^(vllm|trtllm|sglang)(_[0-9].*)?$")] | None = None
    """With a folder of an engine's tables: whose, such as vllm_0.14.0; without a version the newest."""
    expert_parallel: Annotated[Whole, Field(ge=1)] = 1
    """With `engine`: groups of GPUs that experts are spread over; each group shares its own."""
    routing: Literal["balanced", "power_law_1.01", "power_law_1.2"] = "balanced"
    """With `engine`: how unevenly tokens choose experts."""
    reduce_s: Seconds = 0.0
    """With `engine`: seconds an all-reduce on top of the tables: ranks that wait for each other."""
    elementwise: Annotated[Real, Field(ge=0)] = 1.0
    """With `engine`: time of norms, rope, activation and quantization, in units of their bytes over the bandwidth."""
    decode_attention: Annotated[Real, Field(gt=0)] = 1.0
    """With `engine`: attention of decoding rows takes so many times what the tables say."""
    products: Annotated[Real, Field(gt=0)] = 1.0
    """With `engine`: matrix products of steps that run as a graph take so many times what the tables say."""
    large_products: Annotated[Real, Field(gt=0)] = 1.0
    """With `engine`: those of larger steps."""
    experts: Annotated[Real, Field(gt=0)] = 1.0
    """With `engine`: experts take so many times what the tables say, on top of that."""
    terms: str | None = None
    """With `engine`: calibrated terms of that name (scenarios/terms) stand for those that are not given here."""
    calibrated: CalibratedTerms | None = None
    """What the terms were calibrated on; filled in when they are read."""
    fastest: bool = True
    """With `engine`: a product takes what the fastest of all engines in the folder takes, in its type or in 16 bits;
    false: what this one does."""
    skew: bool = True
    """Let attention wait for the longest decoding request, where the tables have measured that."""
    step_s: Seconds = 0.0
    """Seconds on the device that every step costs on top of the tables."""
    layer_s: Seconds = 0.0
    """Seconds a layer on top of the tables: kernels that they leave out, gaps between kernels."""
    row_s: Seconds = 0.0
    """Seconds a request of the step on top of the tables: inputs, block tables, bookkeeping that the device awaits."""
    launch_s_per_layer: Seconds = 50e-6
    """CPU seconds to launch one layer's kernels, when no graph is used."""
    cpu: MeasuredCpuSettings = MeasuredCpuSettings()
    """CPU time of the loop."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_terms(cls, data: Any) -> Any:
        name = data.get("terms") if isinstance(data, dict) else None
        if not isinstance(name, str) or data.get("calibrated") is not None:
            return data
        try:
            given = _terms(name, data)
        except ScenarioError as error:
            raise complaint(str(error).removeprefix("cost.terms: "), "terms") from None
        return given | data | {"engine": given["engine"]}

    @model_validator(mode="after")
    def _engine_alone(self) -> TableSettings:
        if self.terms is not None and self.engine is None:
            raise complaint("needs engine: whose tables they add to, such as vllm", "terms")
        return self

    @model_validator(mode="after")
    def _joined(self) -> TableSettings:
        if self.tensor_parallel > 1 and self.link is None and self.engine is None:
            raise complaint(f"is required with tensor_parallel {self.tensor_parallel}: latency_s and bytes_s", "link")
        return self


def _terms(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that calibrated terms give a table cost: their values for its GPUs, card and version."""
    file = terms.load(name)
    system = Path(str(data.get("path", ""))).name
    engine, tensor = data.get("engine"), data.get("tensor_parallel", 1)
    if engine == file.backend:
        engine = file.tables.get(system, engine)  # without a version: the tables that they add to
    version = engine.partition("_")[2] if isinstance(engine, str) else ""
    held = terms.resolve(file.terms, tensor if isinstance(tensor, int) else 1, system, version)
    values = {field: term.value for field, term in held.items()}
    intervals = {metric: residuals.interval(file, metric) for metric in ("ttft", "tpot")}
    sure = {
        metric: {"low": factor.low - 1, "high": factor.high - 1, "points": factor.residuals}
        for metric, factor in intervals.items()
        if factor
    }
    about = {field: getattr(file, field) for field in terms.Range.model_fields}
    ends = {field: (term.low, term.high) for field, term in held.items()}
    return {
        **{field: value for field, value in values.items() if field != terms.FRONT},
        "fastest": file.fastest,
        "routing": file.routing,
        "engine": engine,
        "calibrated": {**about, **sure, "values": values, "intervals": ends},
    }
