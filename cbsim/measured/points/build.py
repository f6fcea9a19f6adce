"""Conversion of a published point into a scenario, or into all reasons why that is impossible."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from cbsim.cost.engine_files import nearest
from cbsim.errors import ScenarioError
from cbsim.measured.points import flags
from cbsim.measured.points.published import Point
from cbsim.measured.tables import TABLES
from cbsim.scenario import catalog, scenario, shapes
from cbsim.scenario.fields import bare
from cbsim.scenario.scenario import Scenario
from cbsim.scenario.shapes import Hardware, ModelShape

REQUESTS_A_USER = 10
LEAST_SHARE = 0.8  # the least length as a share of the nominal one; lengths are uniform between the two
ROUTING = "power_law_1.01"  # the distribution of tokens over experts
NOTHING_ADDED = dict.fromkeys(("step_s", "layer_s", "row_s", "reduce_s"), 0.0)  # to the tables, but by terms
NOTHING_ADDED |= {"elementwise": 1.0, "decode_attention": 1.0}
BLOCK = 128  # the block size of block-quantised weights; an expert's shard has to be a multiple of it
BLOCK_TOKENS = 64  # of servers apart, whose blocks have to be alike
NODE = 8  # the most GPUs that tables of all-reduces know
ENGINES = {  # the kernel tables to use where those of the nearest version are unsuitable; see docs/fidelity.md
    ("h200_sxm", "vllm"): "vllm_0.18.0",
    ("h100_sxm", "vllm"): "vllm_0.19.0",
    ("h200_sxm", "trtllm"): "trtllm_1.2.0rc5",
}
APART = "prefill and decode are apart, and how many servers do each is not published"
SIDES = "prefill and decode are apart, and are no single server"
UNKNOWN_LOAD = "the number of users is not published"
RANKS = "prefill and decode are apart, with attention that is data-parallel within a server, which no fleet has"
LINK = {"bandwidth_gb_s": 50.0, "latency_s": 0.0005}  # a NIC of 400 Gb/s a GPU, which is assumed
DRAFTS = "drafts of several tokens a step (MTP), which are not simulated"
WIDE = f"more than {NODE} GPUs share a layer, for which there are no tables of all-reduces"
FP4 = ("fp4", "nvfp4")


class CannotBuildError(Exception):
    """An error raised for a point that cannot be built, with all reasons that are known."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def build(point: Point, terms: Mapping[str, Any], requests: int = REQUESTS_A_USER) -> Scenario:
    """Return a point's scenario with cost fields `terms` and `requests` requests a user. Raises CannotBuildError."""
    check(point)
    if point.mode == "disagg":
        raise CannotBuildError(SIDES)
    model, hardware = model_of(point), _hardware(point)
    server = flags.fields(point, model, hardware)
    low_prompt, low_output = (max(1, int(LEAST_SHARE * nominal)) for nominal in (point.prompt, point.output))
    fields = {
        "name": "point",
        "question": f"How fast is {point.where}?",
        "model": server["model"],
        "hardware": hardware.model_dump(mode="json"),
        "workload": {
            "kind": "synthetic",
            "requests": requests * point.concurrency,
            "prompt_tokens": {"uniform": {"low": low_prompt, "high": point.prompt}},
            "output_tokens": {"uniform": {"low": low_output, "high": point.output}},
            "arrivals": {"kind": "closed_loop", "users": point.concurrency},
        },
        "scheduler": server["scheduler"],
        "kv_cache": server["kv_cache"],
        "loop": {"mode": "async"} | server["loop"],
        "cost": {
            "kind": "table",
            "path": f"{TABLES}/{point.system}",
            "engine": engine_of(point),
            "tensor_parallel": point.gpus,
            "data_parallel": point.ranks,
            "pipeline_parallel": max(1, point.stages),
            "expert_parallel": _expert_groups(point, model),
            "routing": ROUTING,
            **NOTHING_ADDED,
            **server["cost"],
            **terms,
        },
    }
    return _parsed(fields, point)


def _parsed(fields: dict[str, Any], point: Point) -> Scenario:
    try:
        return scenario.parse(fields, point.where)
    except ScenarioError as error:
        raise CannotBuildError(str(error).removeprefix(f"{point.where}: ")) from None


def build_apart(point: Point, prefill: Scenario, decode: Scenario) -> Scenario:
    """Return the fleet of a point whose prefill and decode are apart, by the scenarios of one server of each. What is
    not published is assumed: vLLM's rules for all engines (pull; requests go to the server with the fewest; steps of
    8,192 tokens, or of the prompts of a batch), and the link.
    """
    data, pools = decode.model_dump(mode="json"), list[dict[str, Any]]()
    tokens = max(8192, point.prompt * max(1, point.prefill.batch))
    scheduler = {"name": "vllm", "version": "0.33", "max_num_seqs": point.concurrency, "max_num_batched_tokens": tokens}
    for name, part, server in (("prefill", point.prefill, prefill), ("decode", point.decode, decode)):
        fields = server.model_dump(mode="json", include={"model", "loop", "cost", "kv_cache"})
        fields["kv_cache"]["block_size"] = BLOCK_TOKENS
        pools.append({"name": name, "role": name, "count": part.servers, "server": fields})
    link = {**LINK, "bandwidth_gb_s": LINK["bandwidth_gb_s"] * min(prefill.gpus, decode.gpus)}
    alike = {"name": "least_in_flight"}
    data["scheduler"] = scheduler | {"max_model_len": point.prompt + point.output + 200}
    data["fleet"] = {"pools": pools, "router": alike, "hand_off": {"router": alike, "link": link}}
    return _parsed(data, point)


def check(point: Point) -> None:
    """Check what does not depend on the content of tables. Raises CannotBuildError with all reasons."""
    reasons = list[str]()
    for part in (_check_servers, _check_drafts, _hardware, engine_of):
        try:
            part(point)
        except CannotBuildError as error:
            reasons += error.reasons
    if reasons:
        raise CannotBuildError(*reasons)


def _check_servers(point: Point) -> None:
    """Check that the point's servers and their load are known, and that they can be simulated."""
    apart = point.mode == "disagg"
    known = all(part.servers and part.tensor for part in (point.prefill, point.decode))
    sides = (point.of("prefill"), point.of("decode")) if apart and known else (point,)
    unlike = {
        APART: apart and not known,
        UNKNOWN_LOAD: apart and not point.concurrency,
        RANKS: apart and known and any(side.ranks > 1 for side in sides),
        WIDE: any(side.all_gpus > NODE for side in sides),
    }
    if reasons := [reason for reason, applies in unlike.items() if applies]:
        raise CannotBuildError(*reasons)


def _check_drafts(point: Point) -> None:
    if flags.drafts(point, flags.family(model_of(point))):
        raise CannotBuildError(DRAFTS)


def engine_of(point: Point) -> str:
    """Return the engine and version whose tables are used. Raises CannotBuildError."""
    tables = tables_of(point.system)
    if tables is None:
        raise CannotBuildError(f"no kernel tables of {point.system}")
    known = ENGINES.get((point.system, point.backend)) or nearest(tables, point.backend, point.version or None)
    if known is None:
        raise CannotBuildError(f"no kernel tables of {point.backend} on {point.system}")
    return known


@lru_cache(maxsize=64)
def tables_of(system: str) -> Path | None:
    """Return the folder of a card's tables, None if there is none."""
    try:
        return catalog.tables(f"{TABLES}/{system}") if system else None
    except ScenarioError:
        return None


def model_of(point: Point) -> ModelShape:
    """Return the model whose name is a prefix of the point's, in the point's data types. Raises CannotBuildError."""
    name = bare(point.model_name)
    known = [each for each in catalog.names("models") if name.startswith(bare(each))]
    if not known:
        raise CannotBuildError(f"no model file of {point.model_name}: scenarios/models describes none of that name")
    model = shapes.model(max(known, key=len))
    return model.model_copy(update=_types(point, model))


def _types(point: Point, model: ModelShape) -> dict[str, Any]:
    """Return the weights' types: those of the point, else of its name, else of the model. FP8 mixtures are in blocks.
    A model whose experts alone are narrow keeps its own, or has them in NVFP4; NVIDIA leaves their attention wide.
    """
    name = bare(point.model_name)
    stated = point.precision or next((each for each in ("fp8", "nvfp4") if each in name), "")
    if model.experts_dtype:
        return {"experts_dtype": "nvfp4"} if stated in FP4 and model.experts_dtype != "mxfp4" else {}
    if stated in FP4:
        return {"weights_dtype": "nvfp4"} | ({"attention_dtype": model.dtype} if model.experts else {})
    if stated == "fp8":
        return {"weights_dtype": "fp8_block" if model.experts else "fp8"}
    return {"weights_dtype": {"int4": "int4", "bf16": None}.get(stated, model.weights_dtype)}


def _hardware(point: Point) -> Hardware:
    """Return the card named like the system or like the first part of its name. Raises CannotBuildError."""
    known = {bare(each): each for each in catalog.names("hardware")}
    name = known.get(bare(point.system)) or known.get(bare(point.system.partition("_")[0]))
    if name is None:
        raise CannotBuildError(f"no hardware file of {point.system}")
    return shapes.hardware(name)


def _expert_groups(point: Point, model: ModelShape) -> int:
    """Return the groups of GPUs that experts are spread over; whole experts if BLOCK does not divide shards."""
    gpus = point.all_gpus
    if not model.experts:
        return 1
    groups = min(max(1, point.experts_ranks), gpus)
    narrow = (model.experts_dtype or model.weights_dtype) == "fp8_block"
    return gpus if narrow and model.intermediate // (gpus // groups) % BLOCK else groups
