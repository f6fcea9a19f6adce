"""Distil the efficiency curves of cards from their kernel tables: `python -m reports.fidelity.curves.make`.

Reads public_measured/aiconfigurator below $CBSIM_DATA and writes scenarios/curves/<hardware>.json, and a report of how
far step times by the curves are from those by the tables, and from a card's own by the curves of the other cards.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from cbsim.cost import bundle, curves, engine_files, engine_tables
from cbsim.cost.curves import FOLDER, sheet
from cbsim.cost.engine_files import NoRowsError
from cbsim.cost.engine_tables import EngineTables, Share
from cbsim.cost.table import Attention, KernelTimes
from cbsim.draw.report import Table
from cbsim.errors import ScenarioError
from cbsim.scenario import catalog, shapes
from cbsim.scenario.layers import Matrix
from cbsim.scenario.shapes import Hardware, ModelShape
from reports import page

TABLES = "public_measured/aiconfigurator"
CARDS = {
    "a100_sxm": "a100-80gb",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000",
}
DTYPES = {"bfloat16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "int4": "int4_wo"}
OUTPUTS, INPUTS = (128, 512, 2048, 4096, 8192, 16384, 65536), (128, 512, 2048, 4096, 8192, 16384)
TOKENS = (
    *(1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 129, 192, 193, 256, 257, 512, 513, 768, 769, 1024, 1025, 1280, 1281),
    *(1536, 1537, 2048, 2049, 3072, 3073, 4096, 4097, 8192, 16384),
)
ROWS, CONTEXT = tuple(2**i for i in range(13)), tuple(2**i for i in range(4, 18))
HEADS, PROMPT = (
    (1, 2, 4, 8, 16, 32, 64),
    (16, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
)
EXPERT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MOST_SHARE = 2.0  # of a peak: what stays in a cache is read faster than memory
ROUTING = "power_law_1.01"  # nearest to what servers were measured with (docs/fidelity.md)
GPUS = (2, 4, 8)
SLOW = "trtllm_1.3.0rc10"  # decode attention of grouped heads takes four times what all others take on the same cards


def share(value: float) -> float:
    return float(f"{value:.3g}")


def products(folder: Path, gpu: Hardware) -> dict[str, Any]:
    """Return the shares of matrix products, of the fastest of the card's engines, by type."""
    tables = engine_tables._Tables(folder, "", engine_files.engines(folder), bounded=True)
    of, made = sheet(gpu), {}
    for dtype, column in DTYPES.items():
        shares: list[list[list[float]]] = []
        try:
            for n in OUTPUTS:
                shares.append([])
                for k in INPUTS:
                    ms = tables.product(Matrix(n, k, dtype))
                    bounds = [curves.product(dtype, n, k, m).bound_ns(of) for m in TOKENS]
                    reached = [share(ns / 1e6 / ms(m)) for m, ns in zip(TOKENS, bounds, strict=True)]
                    for at, value in enumerate(reached[1:], 1):
                        if not 0 < value <= MOST_SHARE:  # a table's last line, which falls, was followed too far
                            reached[at] = reached[at - 1]
                    shares[-1].append(reached)
        except ScenarioError:
            continue
        if dtype == "bfloat16" or any(column in products_of(folder, engine) for engine in engine_files.engines(folder)):
            made[dtype] = {"n": OUTPUTS, "k": INPUTS, "m": TOKENS, "share": shares}
    return made


def products_of(folder: Path, engine: str) -> set[str]:
    import pyarrow.csv

    return set(pyarrow.csv.read_csv(folder / f"gemm__{engine}.csv.gz")["gemm_dtype"].to_pylist())


def decode(folder: Path, engine: str, gpu: Hardware) -> dict[str, Any]:
    """Return the shares of the memory bandwidth of decode attention, by the cache's type."""
    of, made = sheet(gpu), {}
    for dtype in ("bfloat16", "fp8"):
        found: dict[tuple[float, float], list[float]] = defaultdict(list)
        for kv in (1, 2, 4, 8):
            columns = ("num_heads", "batch_size", "isl", "step")
            required = {"kv_cache_dtype": dtype, "num_key_value_heads": kv}
            try:
                rows = engine_tables._believed(folder / f"generation_attention__{engine}.csv.gz", columns, required)
            except NoRowsError:
                continue
            by_heads: dict[float, dict[tuple[float, ...], float]] = defaultdict(dict)
            for (heads, batch, new, cached), ms in rows.items():
                if 4 <= heads / kv <= 8:
                    by_heads[heads][batch, new + cached] = ms
            for times in by_heads.values():
                for (batch, context), ms in engine_tables._no_slower_than_more(times).items():
                    bound = curves.decode(dtype, batch * kv, context).bound_ns(of)
                    found[batch * kv, context].append(bound / 1e6 / ms)
        if found:
            shares = {at: median(values) for at, values in found.items()}
            made[dtype] = {"rows": ROWS, "context": CONTEXT, "share": filled(shares)}
    return made


def filled(shares: Mapping[tuple[float, float], float]) -> list[list[float]]:
    """Return the shares by rows and context; where a cache was too large to be measured, those of fewer rows hold."""
    table: list[list[float]] = []
    for rows in ROWS:
        line: list[float] = []
        for at, context in enumerate(CONTEXT):
            known = shares.get((rows, context))
            line.append(share(known) if known else max(table[-1][at] if table else 0.0, line[-1] if line else 0.0))
        table.append(line)
    return table


def prompt(folder: Path, engine: str, gpu: Hardware) -> dict[str, Any]:
    """Return the shares of the arithmetic of prompt attention: the median over numbers of KV heads."""
    columns = ("num_heads", "num_key_value_heads", "batch_size", "isl", "step")
    rows = engine_tables._believed(
        folder / f"context_attention__{engine}.csv.gz", columns, {"kv_cache_dtype": "bfloat16"}
    )
    found: dict[tuple[float, float], list[float]] = defaultdict(list)
    for (heads, _, batch, new, cached), ms in rows.items():
        if (batch, cached) == (1, 0):
            found[heads, new].append(curves.prompt("bfloat16", heads, new).bound_ns(sheet(gpu)) / 1e6 / ms)
    shares = [[share(median(found[heads, tokens])) for tokens in PROMPT] for heads in HEADS]
    return {"heads": HEADS, "tokens": PROMPT, "share": shares}


def reduce(folder: Path, engine: str) -> dict[str, Any]:
    """Return the ns of all-reduces, by GPUs."""
    made = {}
    tables = engine_tables._Tables(folder, engine, [], bounded=True)
    sizes = [4.0**i for i in range(5, 15)]
    for gpus in GPUS:
        try:
            known = tables.all_reduces(gpus)
        except ScenarioError:
            continue
        times = {launch: [share(1e6 * ms(size / 2)) for size in sizes] for launch, ms in known.items()}
        made[str(gpus)] = {"bytes": sizes, **times}
    return made


def experts(folder: Path, engine: str, gpu: Hardware) -> dict[str, Any]:
    """Return the shares of mixtures of experts, by type and shape."""
    of, made = sheet(gpu), {}
    columns = ("hidden_size", "inter_size", "moe_tp_size", "topk", "num_experts", "num_tokens")
    for dtype, column in [("mxfp4", name) for name in reversed(engine_tables.MXFP4)] + [*DTYPES.items()]:
        required = {"moe_dtype": column, "moe_ep_size": 1, "distribution": ROUTING}
        try:
            rows = engine_tables._believed(folder / f"moe__{engine}.csv.gz", columns, required)
        except (NoRowsError, ScenarioError):
            continue
        by_shape: dict[tuple[float, ...], dict[float, float]] = defaultdict(dict)
        for (hidden, inter, tensor, topk, total, tokens), ms in rows.items():
            measured = by_shape[hidden, inter / tensor, topk, total]
            measured[tokens] = min(ms, measured.get(tokens, ms))
        known = [
            {"shape": shape, "share": shares}
            for shape, times in by_shape.items()
            if (shares := _expert_shares(of, dtype, shape, times))
        ]
        if known:
            made[dtype] = {"tokens": EXPERT_TOKENS, "curves": known}
    return made


def _expert_shares(of: Any, dtype: str, shape: Sequence[float], times: Mapping[float, float]) -> list[float] | None:
    if not all(tokens in times for tokens in EXPERT_TOKENS):
        return None
    return [share(curves.experts(dtype, shape, tokens).bound_ns(of) / 1e6 / times[tokens]) for tokens in EXPERT_TOKENS]


def newest(folder: Path, family: str, operation: str) -> str:
    """Return the newest version of an engine with a table of that operation, "" if there is none."""
    files = folder.glob(f"{operation}__{family}_*.csv.gz")
    versions = [path.name.partition("__")[2].removesuffix(".csv.gz") for path in files]
    return max(versions, key=engine_files.number, default="")


def distil(system: str, name: str) -> dict[str, Any]:
    """Return the curves of a card."""
    folder, gpu = catalog.tables(f"{TABLES}/{system}"), shapes.hardware(name)
    engines = {
        family: {
            "version": newest(folder, family, "gemm"),
            "decode": decode(folder, newest(folder, family, "generation_attention"), gpu),
            "prompt": prompt(folder, newest(folder, family, "context_attention"), gpu),
            "reduce": reduce(folder, newest(folder, family, "custom_allreduce")),
            "experts": experts(folder, newest(folder, family, "moe"), gpu),
        }
        for family in ("vllm", "sglang", "trtllm")
        if newest(folder, family, "gemm") not in ("", SLOW)
    }
    return card(gpu, f"kernel tables of {system} by aiconfigurator", products(folder, gpu), engines)


def card(gpu: Hardware, source: str, shares: Mapping[str, Any], engines: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a card's file."""
    hardware = gpu.model_dump(mode="json", exclude={"power_w", "price_usd_hour", "source"})
    return {"hardware": hardware, "source": source, "products": shares, "engines": engines}


PROFILED = "measured_vllm/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16"


def profiled(name: str, model_name: str) -> dict[str, Any]:
    """Return the curves of a card of which the layers of one model were profiled. Shares of other shapes of products
    are those of the nearest measured, the effects of n and of k multiplied; of other heads, those of the model's.
    """
    folder, gpu, model = catalog.tables(PROFILED) / "tp1", shapes.hardware(name), shapes.model(model_name)
    of, dense = sheet(gpu), bundle._curves(folder / "dense.csv", "tokens")
    head = bundle._curves(folder / "per_sequence.csv", "sequences")["lm_head"]
    width = model.heads * model.head_dim
    shapes_of: dict[tuple[float, float], Callable[[float], float]] = {
        (width + 2 * model.kv_heads * model.head_dim, model.hidden): dense["qkv_proj"],
        (model.hidden, width): dense["o_proj"],
        (2 * model.intermediate, model.hidden): dense["gate_up_proj"],
        (model.hidden, model.intermediate): dense["down_proj"],
        (model.vocab, model.hidden): head,
    }

    def reached(n: float, k: float, m: float) -> float:
        most = min(m, 256 if n == model.vocab else 2048)  # of what was measured
        return curves.product("bfloat16", n, k, most).bound_ns(of) / 1e3 / shapes_of[n, k](most)

    measured = sorted(n for n, k in shapes_of if k == model.hidden)
    by_n = curves.Grid((measured, TOKENS), [[reached(n, model.hidden, m) for m in TOKENS] for n in measured])

    def any_shape(n: float, k: float, m: float) -> float:
        deeper = reached(model.hidden, model.intermediate, m) / reached(model.hidden, model.hidden, m)
        effect = log(min(max(k, model.hidden), model.intermediate) / model.hidden) / log(
            model.intermediate / model.hidden
        )
        return share(by_n(n, m) * deeper**effect)

    shares = [[[any_shape(n, k, m) for m in TOKENS] for k in INPUTS] for n in OUTPUTS]
    vllm = {"version": "vllm_0.19.0", **profiled_attention(folder, model, of), "reduce": {}, "experts": {}}
    source = f"layers of {model.name} profiled by LLMServingSim's authors"
    return card(gpu, source, {"bfloat16": {"n": OUTPUTS, "k": INPUTS, "m": TOKENS, "share": shares}}, {"vllm": vllm})


def profiled_attention(folder: Path, model: ModelShape, of: curves.Sheet) -> dict[str, Any]:
    """Return the curves of attention of a card of which the layers of one model were profiled."""
    attention = bundle._ladder(folder / "attention.csv", "prefill_chunk", "n_decode", "kv_prefill", "kv_decode")

    def decoding(rows: float, context: float) -> float:
        each = min(max(rows / model.kv_heads, 1), 256)
        bound = curves.decode("bfloat16", each * model.kv_heads, min(context, 16384)).bound_ns(of)
        return share(min(1, rows / model.kv_heads) * bound / 1e3 / attention(0, each, 0, min(context, 16384)))

    def prompting(tokens: float) -> float:
        each = min(tokens, 2048)
        return share(curves.prompt("bfloat16", model.heads, each).bound_ns(of) / 1e3 / attention(each, 0, 0, 0))

    rows_by_context = [[decoding(rows, n) for n in CONTEXT] for rows in ROWS]
    heads_by_tokens = [[prompting(tokens) for tokens in PROMPT] for _ in HEADS]
    return {
        "decode": {"bfloat16": {"rows": ROWS, "context": CONTEXT, "share": rows_by_context}},
        "prompt": {"heads": HEADS, "tokens": PROMPT, "share": heads_by_tokens},
    }


MODELS = ("llama-3.1-8b", "qwen2.5-7b", "qwen3-14b", "qwen3-32b", "llama-3.1-70b")
TENSOR = (1, 2, 4, 8)
SIZES = (
    *(1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64, 100, 128, 150, 200, 256, 280, 300, 384, 512, 700, 1000, 1400, 2048),
    *(3000, 4096, 6000, 8192),
)
CONTEXTS, LARGEST_BATCH, MOST_CACHED = (200, 1000, 4000, 16000), 1024, 4_000_000
GRAPH = 512  # query tokens of the largest step that runs as a graph


class Step(NamedTuple):
    """A step: query tokens, rows that sample, and its attention."""

    tokens: int
    rows: int
    attention: Attention


def steps() -> Iterator[Step]:
    """Yield steps of every size: of decoding rows alone, of a chunk without and with a cache, and of both."""
    for tokens in SIZES:
        for context in CONTEXTS:
            if tokens <= LARGEST_BATCH and tokens * context <= MOST_CACHED:
                yield Step(tokens, tokens, Attention(0, 0, tokens, context, context))
        if tokens > 1:
            yield from (Step(tokens, 1, Attention(tokens, cached, 0, 0, 0)) for cached in (0, 4000))
        if tokens >= 64:
            rows = min(tokens // 2, 32)
            yield Step(tokens, rows + 1, Attention(tokens - rows, 0, rows, 2000, 2000))


def step_ns(kernels: KernelTimes, step: Step, reduces: int) -> float:
    """Return the ns of a step's kernels that are tabulated."""
    work = step.attention
    time = kernels.linear_ns(step.tokens) + kernels.head_ns(step.rows)
    for of in kernels.attended:
        time += of.prompt_ns(work) + of.decode_ns(work.decodes, work.context + 1)
    return time + reduces * kernels.reduce_ns(step.tokens, graph=step.tokens <= GRAPH)


def compared(system: str, name: str, family: str, *, without: bool) -> list[tuple[Step, int, float]]:
    """Return each step on so many GPUs with the error of the curves against the card's tables, relative to these;
    `without`: of the curves of all other cards.
    """
    folder, gpu = catalog.tables(f"{TABLES}/{system}"), shapes.hardware(name)
    known = curves.sources(gpu, (gpu.name,) if without else ())
    found = []
    for model in map(shapes.model, MODELS):
        for gpus in TENSOR:
            if model.heads % gpus:
                continue
            try:
                theirs = EngineTables(folder, newest(folder, family, "gemm"), model, Share(gpus))
            except NoRowsError:  # all-reduces of so many GPUs: a node of a GB200 has 4
                continue
            ours = curves.CurveTimes(known, family, gpu, model, gpus)
            reduces = 2 * model.layers + 1 if gpus > 1 else 0
            found += [
                (step, gpus, step_ns(ours, step, reduces) / step_ns(theirs, step, reduces) - 1) for step in steps()
            ]
    return found


def bounds(found: Sequence[tuple[Step, int, float]]) -> dict[str, dict[str, float]]:
    """Return what 90 % of the steps are within, by GPUs, one or more, and by the largest query tokens of a class."""
    classes: dict[str, dict[str, float]] = {}
    for gpus in ("1", "more"):
        low = 0
        for most in CLASSES:
            errors = [
                abs(error)
                for step, count, error in found
                if (count > 1) is (gpus == "more") and low < step.tokens <= most
            ]
            classes.setdefault(gpus, {})[str(most)] = share(float(np.percentile(errors, 90)))
            low = most
    return classes


CLASSES = (16, 128, 512, 8192)
WEIGHTS_SHARE = 0.8  # of the memory, which leaves something to the cache


def tabulated(system: str, gpu: Hardware) -> dict[str, int]:
    """Return the fewest GPUs that hold a model and for which the kernel tables of a card have all that it needs, by
    model.
    """
    folder, known = catalog.tables(f"{TABLES}/{system}"), dict[str, int]()
    engine = newest(folder, "vllm", "gemm")
    for name in catalog.names("models"):
        model = shapes.model(name)
        enough = (gpus for gpus in TENSOR if model.shard_bytes(gpus) < WEIGHTS_SHARE * gpu.memory_bytes)
        fewest = next((gpus for gpus in enough if _complete(folder, engine, model, gpus)), None)
        known |= {name: fewest} if fewest else {}
    return known


def _complete(folder: Path, engine: str, model: ModelShape, gpus: int) -> bool:
    for groups in sorted({1, gpus if model.experts else 1}):
        with suppress(ScenarioError):
            EngineTables(folder, engine, model, Share(gpus, groups, ROUTING))
            return True
    return False


def write(name: str, content: Mapping[str, Any]) -> None:
    """Write a card's file. What another study added to it, the errors of whole servers, stays."""
    file = catalog.SCENARIOS / FOLDER / f"{name}.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    kept = {part: known[part] for part in ("servers",) if part in known}
    file.write_text(json.dumps({**content, **kept}, separators=(",", ":")) + "\n")


def main() -> None:
    made = {name: distil(system, name) for system, name in CARDS.items()}
    made["rtx-4090"] = profiled("rtx-4090", "llama-3.1-8b")
    for name, content in made.items():
        write(name, content)
    curves.every.cache_clear()
    curves.sources.cache_clear()
    own, left_out, data = list[tuple[str, ...]](), list[tuple[str, ...]](), dict[str, dict[str, Any]]()
    for system, name in CARDS.items():
        for family in made[name]["engines"]:
            found = compared(system, name, family, without=False)
            own.append((name, family, *row(found)))
        made[name]["error"] = bounds(compared(system, name, "vllm", without=False))
        found = compared(system, name, "vllm", without=True)
        made[name]["left_out"] = bounds(found)
        left_out.append((name, "one GPU", *row([each for each in found if each[1] == 1])))
        left_out.append((name, "2 to 8 GPUs", *row([each for each in found if each[1] > 1])))
        data[name] = {"own": made[name]["error"], "left_out": made[name]["left_out"]}
        data[name]["tables"] = tabulated(system, shapes.hardware(name))
        write(name, made[name])
    columns = (
        "steps",
        "within 10 %",
        "within 25 %",
        "median",
        *(f"90 % within, to {most:,} tokens" for most in CLASSES),
    )
    tables = {
        "own": Table("", ("card", "engine", *columns), own),
        "left_out": Table("", ("card", "GPUs", *columns), left_out),
    }
    page.write(__file__, tables, [], data)


def row(found: Sequence[tuple[Step, int, float]]) -> tuple[str, ...]:
    """Return the cells of a set of steps."""
    errors = np.array([error for _, _, error in found])
    within = [f"{float((abs(errors) < bound).mean()):.0%}" for bound in (0.1, 0.25)]
    classes, low = [], 0
    for most in CLASSES:
        part = [abs(error) for step, _, error in found if low < step.tokens <= most]
        classes.append(f"{float(np.percentile(part, 90)):.1%}")
        low = most
    return (f"{len(errors):,}", *within, f"{float(np.median(errors)):+.1%}", *classes)


if __name__ == "__main__":
    main()
