"""The flags of published servers, scenarios/servers/inferencex.yaml: a table by engine, family of models, card,
precision and date. Of other sources than InferenceX only model, card, version and parallelism are known: they get the
engines' defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cbsim.measured.points.published import Point
from cbsim.scenario import catalog, documents
from cbsim.scenario.fields import Frozen, Many, Whole, as_tuple
from cbsim.scenario.overrides import assign
from cbsim.scenario.shapes import VLLM_RUNTIME_BYTES, Hardware, ModelShape, activation_bytes
from cbsim.scenario.terms import Family

NEW_RULES = (0, 26)  # vLLM is simulated by the rules of 0.33 from this version on, by those of 0.19 before it
FREE_SHARE, STATIC_SHARE = "free share", "static share"
"""TensorRT-LLM gives the cache a share of what weights and a step leave free; SGLang one of all, less the weights."""
Ends = Annotated[tuple[Whole, Whole], BeforeValidator(as_tuple)]


def family(model: ModelShape, ranks: int = 1) -> Family:
    """Return the kind of model by which flags are chosen, and with the ranks of a server calibrated terms."""
    if ranks > 1:
        return "ranks"
    if model.linear:
        return "linear"
    if model.latent:
        return "sparse" if model.latent.indexer else "latent"
    if not model.sees_all:
        return "windows"
    return "experts" if model.experts else "dense"


class Row(Frozen):
    """Fields of the scenario, by path, of servers of an engine. What is empty holds for any; `since` and `until`, which
    is the first day after them, are ISO dates; `users`, `gpus` and `groups` of them that experts are spread over are
    the least and the most; `short`: 1,024/1,024.
    """

    backend: str
    sets: Mapping[str, Any] = Field(default_factory=dict)
    families: Many[str] = ()
    systems: Many[str] = ()
    precision: str = ""
    since: str = ""
    until: str = "9999"
    source: str = ""
    users: Ends | None = None
    gpus: Ends | None = None
    groups: Ends | None = None
    short: bool = False
    of_others: bool = False  # than InferenceX
    why: str = ""

    def of(self, point: Point, kind: str) -> bool:
        """True if the row is about the server of a point, whose model is of the family `kind`."""
        kinds = {kind, "ranks"} if point.ranks > 1 else {kind}
        named = (self.families, kinds), (self.systems, {point.system})
        alike = (self.backend, point.backend), (self.precision, point.precision), (self.source, point.source)
        sizes = (self.users, point.concurrency), (self.gpus, point.gpus), (self.groups, point.experts_ranks)
        return (
            all(not names or not known.isdisjoint(names) for names, known in named)
            and all(wanted in ("", known) for wanted, known in alike)
            and all(ends is None or ends[0] <= size <= ends[1] for ends, size in sizes)
            and self.since <= point.measured < self.until
            and (not self.short or point.prompt == point.output == 1024)
            and (self.of_others or point.inferencex)
        )


class Servers(Frozen):
    """The table: `rows` in the order in which they apply, servers with drafts, and odd ones with the reason `why`."""

    rows: Many[Row]
    drafted: Many[Row]
    odd: Many[Row]


@lru_cache(maxsize=1)
def _servers() -> Servers:
    return documents.read(catalog.SCENARIOS / "servers" / "inferencex.yaml").checked(Servers)


def _rules(point: Point) -> str:
    numbers = [int(part) for part in point.version.split(".")[:2] if part.isdigit()]
    return "0.33" if tuple(numbers) >= NEW_RULES else "0.19"


def _longest(point: Point) -> int:
    """Return InferenceX's limit of a sequence's length in tokens."""
    return point.prompt + point.output + (20 if point.prompt == point.output == 1024 else 200)


def _one_prompt(point: Point) -> int:
    """Return the tokens of a prompt and of everyone's next token, a multiple of 64."""
    return -(-(point.concurrency + point.prompt + 64) // 64) * 64


VALUES: Mapping[str, Callable[[Point], Any]] = {
    "RULES": _rules,
    "LONGEST": _longest,
    "USERS": lambda point: point.concurrency,
    "GPUS": lambda point: point.all_gpus,
    "ONE_PROMPT": _one_prompt,
    "ONE_PROMPT_OR_8192": lambda point: max(8192, _one_prompt(point)),
    "TWO_PROMPTS": lambda point: 2 * point.prompt,
    "TWO_PROMPTS_TO_1024": lambda point: min(1024, 2 * point.prompt),
}
"""The values of the table that follow from a point."""
UNPUBLISHED = "max_num_tokens of TensorRT-LLM is not published: 8,192 is assumed"


def drafts(point: Point, kind: str) -> bool:
    """True if a point's server computed drafts of several tokens a step."""
    return point.mode == "agg" and any(row.of(point, kind) for row in _servers().drafted)


def doubts(point: Point, kind: str) -> list[str]:
    """Return why a point's prediction is of another server than the measured one may have been."""
    if not point.inferencex:
        unknown = ["flags are not published: engine defaults"]
        return [*unknown, UNPUBLISHED] if point.backend == "trtllm" else unknown
    return [row.why for row in _servers().odd if row.of(point, kind)]


def fields(point: Point, model: ModelShape, hardware: Hardware) -> dict[str, dict[str, Any]]:
    """Return the fields of a scenario that a server's flags set, by part, of the model all fields."""
    rows = [row for row in _servers().rows if row.of(point, family(model))]
    flat = {
        path: VALUES[value](point) if value in VALUES else value for row in rows for path, value in row.sets.items()
    }
    flat |= _cache(flat, point, model, hardware)
    parts: dict[str, dict[str, Any]] = {part: {} for part in ("scheduler", "kv_cache", "loop", "cost")}
    parts["model"] = model.model_dump(mode="json") | {"kv_dtype": None}
    for path, value in flat.items():
        assign(parts, documents.split(path), value, path)
    return parts


def _cache(flat: dict[str, Any], point: Point, model: ModelShape, hardware: Hardware) -> dict[str, Any]:
    """Return the size of the cache: as given, else the share of the memory that weights, a step and the cache take."""
    free, static = flat.pop(FREE_SHARE, None), flat.pop(STATIC_SHARE, None)
    if point.kv_blocks:
        return {"kv_cache.num_blocks": point.kv_blocks}
    tokens = flat.get("scheduler.max_num_tokens") or flat.get("scheduler.chunked_prefill_size") or 8192
    requests = 2048 if static is None else flat["scheduler.max_running_requests"]
    step = activation_bytes(model, tokens, requests) + VLLM_RUNTIME_BYTES
    if free is not None:
        taken = (model.shard_bytes(point.gpus, point.ranks) + step) / hardware.memory_bytes
        return {"kv_cache.memory_fraction": min(1.0, free + (1 - free) * taken)}
    if static is not None:
        return {"kv_cache.memory_fraction": min(1.0, static + step / hardware.memory_bytes)}
    return {}
