"""The speed of a device and of the engine's kernels, size by size; each line is printed and stored when measured.

    python reports/hardware/speed.py copies gemms attention tiles uneven [--model NAME] [--quick] [--out DIR]
    python reports/hardware/speed.py loop

copies      to and from the host; what a copy, a read and a large matrix product reach on the device
gemms       the matrix products of a step by rows, and their sum over a step
attention   decode against the bandwidth of a read, prefill against the rate of a matrix product
tiles       attention with other tiles than those shipped, best first, answers compared
uneven      decode attention of uneven contexts, and of as many equal ones of the same sum, by numbers of splits
loop        CPU time of the engine's loop a step, on the modelled device: needs no GPU

OUT/<part>.jsonl has a line a measurement. `--device cpu` rehearses on the tiny model: its numbers mean nothing. It has
neither `tiles` nor `uneven`, which measure Triton kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from cbengine import build
from cbengine.build import Setup
from cbengine.device.cuda import captured, streams
from cbengine.errors import UsageError
from cbengine.model.ops import Rows, TorchOps
from cbengine.model.weights import Architecture
from cbsim.cli.arguments import Parser
from cbsim.errors import USAGE, UserError
from cbsim.files import access
from cbsim.policy.plan import WORKED
from cbsim.record.tables import Steps
from cbsim.scenario import scenario as scenarios
from cbsim.scenario import shapes
from cbsim.scenario.shapes import ModelShape
from cbsim.workload import generators

Line = dict[str, Any]
BLOCK_TOKENS = 256  # as 8k_b32 has them
UNEVEN_BLOCK_TOKENS = 16  # vLLM's, whose batches are uneven
SIGMA = 0.8  # of the logarithm of uneven contexts
MOST_BYTES = 24 << 30  # cache of one point; two copies of it take turns


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. `span`: bytes of weights or cache that take turns, so that no GPU cache holds them."""

    span: int
    decodes: Sequence[int]
    prefills: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    chunks: Sequence[tuple[int, int]]  # query tokens, cached tokens before them
    uneven: Sequence[tuple[int, int]]  # requests that decode, their mean context
    budget_s: float = 50.0  # of a part


FULL = Sizes(
    span=1 << 28,
    decodes=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    prefills=(512, 1024, 2048, 4096, 8192),
    batches=(32, 1, 8, 128, 256),
    contexts=(4096, 8192, 1024, 128, 512, 2048, 32768),
    chunks=((8192, 0), (512, 7680), (512, 0), (1024, 0), (2048, 0), (4096, 0), (2048, 6144), (4096, 4096)),
    uneven=((32, 490), (64, 490), (16, 490), (128, 490), (32, 4096), (8, 4096)),
)
QUICK = Sizes(1 << 28, (1, 32, 256), (2048,), (32,), (4096, 1024), ((8192, 0),), ((32, 490), (64, 490), (32, 4096)))
REHEARSAL = Sizes(1 << 12, (1, 2), (8,), (2,), (40,), ((12, 5),), ((3, 400),))


# -- timing -----------------------------------------------------------------------------------------------------------


def timed(act: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """Median seconds of `act`, warm. On a GPU between events of graphs replayed back to back: launches are hidden."""
    if device == "cpu":
        act()
        return statistics.median(clocked(act) for _ in range(repeats))
    stream = streams()[0]
    graph, _ = captured(act, stream)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4 + repeats)]
    with torch.cuda.stream(stream):
        for event in events[:-1]:
            event.record(stream)
            graph.replay()
        events[-1].record(stream)
    torch.cuda.synchronize()
    samples = [before.elapsed_time(after) / 1e3 for before, after in pairwise(events[3:])]
    return float(statistics.median(samples))


def clocked(act: Callable[[], Any]) -> float:
    """Seconds of one call on the host's clock."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches: bytes a second of a copy (read and written) and of a read, FLOP/s of a bf16 product."""

    copy: float
    read: float
    rate: float


@cache
def ceilings(device: str) -> Ceilings:
    """Measured once a process, on tensors far larger than a GPU's cache."""
    size, n = (1 << 31, 8192) if device == "cuda" else (1 << 20, 64)
    source = torch.ones(size // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return Ceilings(
        copy=2 * size / timed(lambda: target.copy_(source), device),
        read=size / timed(lambda: source.sum(dtype=torch.int32), device),
        rate=2 * n**3 / timed(lambda: a @ b, device),
    )


def in_time(points: Iterable[Any], budget_s: float, name: str) -> Iterator[Any]:
    """The points that are begun within the budget; how many are left out is printed."""
    end, late = time.monotonic() + budget_s, 0
    for point in points:
        if time.monotonic() < end:
            yield point
        else:
            late += 1
    if late:
        print(f"{name}: no time left for {late} points", file=sys.stderr, flush=True)


# -- copies -----------------------------------------------------------------------------------------------------------


def copies(device: str) -> Iterator[Line]:
    """Latency of a few bytes and bandwidth of many, from and to (pinned) host memory; then the ceilings."""
    pinned = device == "cuda"
    for count in (4, 1 << 28 if pinned else 1 << 16):
        host = torch.zeros(count, dtype=torch.uint8, pin_memory=pinned)
        on_device = torch.zeros(count, dtype=torch.uint8, device=device)
        for name, target, source in (("host to device", on_device, host), ("device to host", host, on_device)):

            def copy(target: Tensor = target, source: Tensor = source) -> None:
                target.copy_(source, non_blocking=True)
                if pinned:
                    torch.cuda.synchronize()

            seconds = timed(copy, "cpu")
            yield {"name": f"{name}, {count:,} bytes", "us": seconds * 1e6, "gb_s": count / seconds / 1e9}
    best = ceilings(device)
    yield {"name": "device", "copy_tb_s": best.copy / 1e12, "read_tb_s": best.read / 1e12, "tflop_s": best.rate / 1e12}


# -- matrix products --------------------------------------------------------------------------------------------------


def matrices(model: ModelShape) -> list[tuple[str, int, int, int]]:
    """(name, outputs, inputs, times in a step) of the weights of model/decoder.py, joined as there."""
    shape = Architecture(**dict(model))
    attended = shape.heads * shape.head_dim
    return [
        ("qkv", attended + 2 * shape.kv_heads * shape.head_dim, shape.hidden, shape.layers),
        ("o", shape.hidden, attended, shape.layers),
        ("gate_up", 2 * shape.intermediate, shape.hidden, shape.layers),
        ("down", shape.hidden, shape.intermediate, shape.layers),
        ("head", shape.vocab, shape.hidden, 1),
    ]


def gemms(model: ModelShape, sizes: Sizes, device: str) -> Iterator[Line]:
    """Each matrix at each number of rows, then their sum over a step. Of a prefill one row goes through the head."""
    dtype, best = getattr(torch, model.dtype), ceilings(device)
    weights = {}
    for name, outputs, inputs, _ in matrices(model):
        count = max(2, -(-sizes.span // (outputs * inputs * model.dtype_bytes)))
        weights[name] = [torch.randn(outputs, inputs, dtype=dtype, device=device) for _ in range(count)]
    for rows in in_time([*sizes.decodes, *sizes.prefills], sizes.budget_s, "gemms, rows"):
        step_s = 0.0
        for name, outputs, inputs, times in matrices(model):
            m = 1 if name == "head" and rows not in sizes.decodes else rows
            seconds = product_s(weights[name], m, device)
            step_s += times * seconds
            read = (outputs * inputs + m * (inputs + outputs)) * model.dtype_bytes
            yield {
                "name": f"{rows} rows, {name} [{outputs}, {inputs}]",
                "us": seconds * 1e6,
                "of_read": read / seconds / best.read,
                "of_rate": 2 * m * outputs * inputs / seconds / best.rate,
            }
        yield {"name": f"{rows} rows, products of a step", "ms": step_s * 1e3}


def product_s(weights: Sequence[Tensor], rows: int, device: str) -> float:
    """Seconds of a product, over all copies of the weight one after the other."""
    x = torch.randn(rows, weights[0].shape[1], dtype=weights[0].dtype, device=device)

    def each() -> Tensor:
        for weight in weights:
            out = linear(x, weight)
        return out

    return timed(each, device) / len(weights)


# -- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Attention of one step, layer by layer, and the least that one layer has to do."""

    name: str
    queries: Tensor
    cache: Tensor  # [layers, 2, blocks, block_size, Hk, D]
    rows: Rows
    floor_s: float  # at the device's ceiling

    def answers(self, ops: TorchOps) -> Tensor:
        """Attention of the last layer, after all others were computed."""
        for keys, values in self.cache:
            out = ops.attention(self.queries, keys, values, self.rows)
        return out

    def seconds(self, ops: TorchOps) -> float:
        """Seconds that one layer takes."""
        return timed(lambda: self.answers(ops), self.queries.device.type) / len(self.cache)


def decode_case(
    model: ModelShape, contexts: Sequence[int], device: str, span: int, block_tokens: int = BLOCK_TOKENS
) -> AttentionCase:
    """Requests that decode, each with so many cached tokens."""
    rows, least, most = len(contexts), min(contexts), max(contexts)
    step, blocks = ragged([(1, context) for context in contexts], block_tokens, device)
    read = 2 * sum(contexts) * model.kv_heads * model.head_dim * 2
    shape = (max(2, -(-span // read)), 2, blocks, block_tokens, model.kv_heads, model.head_dim)
    return AttentionCase(
        f"decode, {rows} x {most:,}" if least == most else f"decode, {rows} of {least:,} to {most:,}",
        torch.randn(rows, model.heads, model.head_dim, dtype=torch.bfloat16, device=device),
        torch.randn(shape, dtype=torch.bfloat16, device=device),
        step,
        read / ceilings(device).read,
    )


def prefill_case(model: ModelShape, tokens: int, cached: int, device: str) -> AttentionCase:
    """One prompt's chunk of `tokens` behind `cached` ones."""
    step, blocks = ragged([(tokens, cached + tokens)], BLOCK_TOKENS, device)
    pairs = tokens * cached + tokens * (tokens + 1) / 2
    return AttentionCase(
        f"prefill, {tokens:,} over {cached:,}",
        torch.randn(tokens, model.heads, model.head_dim, dtype=torch.bfloat16, device=device),
        torch.randn(1, 2, blocks, BLOCK_TOKENS, model.kv_heads, model.head_dim, dtype=torch.bfloat16, device=device),
        step,
        4.0 * model.heads * model.head_dim * pairs / ceilings(device).rate,
    )


def attention(model: ModelShape, sizes: Sizes, device: str) -> Iterator[Line]:
    """Each point's time and its share of the ceiling. Points whose cache is too large are left out."""
    ops = build.ops(device)
    for rows in sizes.batches:
        for context in in_time(sizes.contexts, sizes.budget_s, f"decode of {rows}, tokens"):
            if 2 * rows * context * model.kv_bytes_per_token // model.layers <= MOST_BYTES:
                case = decode_case(model, [context] * rows, device, sizes.span)
                seconds = case.seconds(ops)
                yield {"name": case.name, "us": seconds * 1e6, "of_ceiling": case.floor_s / seconds}
    for tokens, cached in in_time(sizes.chunks, sizes.budget_s, "prefills"):
        case = prefill_case(model, tokens, cached, device)
        seconds = case.seconds(ops)
        yield {"name": case.name, "us": seconds * 1e6, "of_ceiling": case.floor_s / seconds}


def ragged(lengths: Sequence[tuple[int, int]], block_tokens: int, device: str) -> tuple[Rows, int]:
    """Rows of (query tokens, cached tokens with those), decodes first, in scattered blocks; and how many blocks."""
    needed, counts = [-(-cached // block_tokens) for _, cached in lengths], [tokens for tokens, _ in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)).split(needed)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for line, own in zip(tables, order, strict=True):
        line[: len(own)] = own
    at = [torch.arange(cached - tokens, cached) for tokens, cached in lengths]
    places = [own[i // block_tokens] * block_tokens + i % block_tokens for own, i in zip(order, at, strict=True)]
    decodes = next((row for row, tokens in enumerate(counts) if tokens > 1), len(counts))
    rows = Rows(
        tables=tables.to(device),
        slots=torch.arange(len(lengths), device=device).int(),
        kv_tokens=torch.tensor([cached for _, cached in lengths], device=device).int(),
        starts=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        positions=torch.cat(at).to(device),
        kv_places=torch.cat(places).to(device),
        decodes=decodes,
        longest=max(counts[decodes:], default=1),
    )
    return rows, sum(needed)


# -- tiles ------------------------------------------------------------------------------------------------------------


def tiles(model: ModelShape, sizes: Sizes, device: str) -> Iterator[Line]:
    """Variants of both kernels, fastest first; a variant that fails says why. The shipped one is the reference."""
    from cbengine.model.kernels.attention import DECODE, PREFILL, fitted
    from cbengine.model.kernels.triton_ops import TritonOps

    processors = None if device == "cuda" else 4
    for context in in_time(sizes.contexts[:3], sizes.budget_s / 2, "decode tiles, tokens"):
        case = decode_case(model, [context] * sizes.batches[0], device, sizes.span)
        shipped = fitted(None, DECODE, case.queries, model.kv_heads)
        variants = [(f"{astuple(cut)}", TritonOps(processors, decode=cut)) for cut in (shipped, *decode_tiles())]
        splits = (1, 2, 4, 8, 16)
        variants += [
            (f"{astuple(shipped)}, {n} splits", TritonOps(processors, decode=shipped, splits=n)) for n in splits
        ]
        yield from compared(case, variants, sizes.budget_s / 4)
    for tokens, cached in in_time(sizes.chunks[:2], sizes.budget_s / 2, "prefill tiles, tokens"):
        case = prefill_case(model, tokens, cached, device)
        shipped = fitted(None, PREFILL, case.queries, model.kv_heads)
        variants = [(f"{astuple(cut)}", TritonOps(1, prefill=cut)) for cut in (shipped, *prefill_tiles())]
        yield from compared(case, variants, sizes.budget_s / 4)


def decode_tiles() -> list[Any]:
    """(queries, cached, warps, stages[, programs]) that are tried for decode."""
    from cbengine.model.kernels.attention import Tiles

    cuts = (
        (64, 4, 4),
        (64, 4, 6),
        (64, 4, 7),
        (32, 4, 5),
        (32, 4, 7, 4),
        (128, 4, 5),
        (128, 8, 5),
        (64, 2, 5),
        (64, 8, 5),
    )
    return [Tiles(16, *cut) for cut in cuts]


def prefill_tiles() -> list[Any]:
    """... and for prefill, the most promising first: each takes seconds to compile."""
    from cbengine.model.kernels.attention import Tiles

    cuts = ((64, 64, 4, 4, 2), (64, 64, 4, 3), (128, 64, 8, 4), (128, 64, 8, 3), (64, 64, 4, 5), (128, 32, 8, 5))
    return [Tiles(*cut) for cut in (*cuts, (64, 128, 4, 3), (128, 128, 8, 3))]


def compared(case: AttentionCase, variants: Sequence[tuple[str, Any]], budget_s: float) -> list[Line]:
    """The variants that were begun in time, fastest first, failures last. The first one is shipped and must succeed."""
    right = case.answers(variants[0][1]).clone().float()
    lines = []
    for label, ops in in_time(variants, budget_s, f"{case.name}: tiles"):
        line: Line = {"name": f"{case.name}, {label}", "shipped": ops is variants[0][1]}
        try:
            error = float((case.answers(ops).float() - right).norm() / right.norm())
            seconds = case.seconds(ops)
        except Exception as failure:  # out of shared memory or registers: no answer of this variant alone
            lines.append(line | {"failed": f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"})
            continue
        kernel = {name: getattr(ops.launched, name, None) for name in ("n_regs", "n_spills")}
        lines.append(line | {"us": seconds * 1e6, "of_ceiling": case.floor_s / seconds, "error": error} | kernel)
    return sorted(lines, key=lambda line: line.get("us", float("inf")))


def uneven(model: ModelShape, sizes: Sizes, device: str) -> Iterator[Line]:
    """Uneven contexts, then equal ones of the same sum, each by numbers of splits. The shipped number, which equal
    contexts choose, is the reference.
    """
    from cbengine.model.kernels.triton_ops import TritonOps

    processors = None if device == "cuda" else 4
    variants = [("splits as shipped", TritonOps(processors))]
    variants += [(f"{splits} splits", TritonOps(processors, splits=splits)) for splits in (1, 2, 4, 8)]
    for rows, mean in in_time(sizes.uneven, sizes.budget_s, "uneven decodes"):
        apart = lengths(rows, mean)
        for contexts in (apart, [sum(apart) // rows] * rows):
            case = decode_case(model, contexts, device, sizes.span, UNEVEN_BLOCK_TOKENS)
            yield from compared(case, variants, sizes.budget_s / 4)


def lengths(rows: int, mean: int) -> list[int]:
    """Lognormal contexts in random order, at as many equal steps of probability, of a sum that `rows` divides."""
    normal = statistics.NormalDist(log(mean) - SIGMA**2 / 2, SIGMA)
    contexts = [round(exp(normal.inv_cdf((row + 0.5) / rows))) for row in range(rows)]
    contexts[-1] -= sum(contexts) % rows
    random.Random(5).shuffle(contexts)
    return contexts


# -- the engine's loop ------------------------------------------------------------------------------------------------


def loop(steps: int) -> Iterator[Line]:
    """Median CPU time of a step's phases by batch size, policy and loop."""
    for rows in (32, 256):
        for policy, size in (("vllm", 16), ("transformers_fifo", 256)):
            blocks = rows * (steps // size + 4) + 1
            overrides = [
                f"workload.requests={rows}",
                f"workload.output_tokens={steps}",
                f"scheduler={{name: {policy}}}",
            ]
            overrides += [f"kv_cache.block_size={size}", f"kv_cache.num_blocks={blocks}"]
            scenario = scenarios.load("8k_b32", [*overrides, "cost={kind: constant, step_s: 0.002}"])
            for mode in scenarios.loops(scenario):
                engine, _ = build.engine(scenario, mode, generators.build(scenario), Setup(device="modelled"))
                engine.run()
                engine.close()
                table = Steps.of(engine.record)
                full = table["decode_rows"] == rows
                work_ns = sum(table.lane(phase)[full] for phase in WORKED)
                yield {"name": f"{rows} requests, {policy}, {mode}", "ms": float(statistics.median(work_ns)) / 1e6}


# -- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("copies", "gemms", "attention", "tiles", "uneven", "loop"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="llama-3.1-8b", help="whose sizes are measured (llama-3.1-8b)")
    parser.add_argument("--quick", action="store_true", help="a few sizes only")
    parser.add_argument("--out", type=Path, default=Path("runs/speed"), metavar="DIR")
    args = parser.parse_args(argv)
    try:
        model = checked(args)
    except UserError as error:
        parser.exit(USAGE, f"{parser.prog}: {error}\n")
    sizes = REHEARSAL if args.device == "cpu" else QUICK if args.quick else FULL
    measures: dict[str, Callable[[], Iterator[Line]]] = {
        "copies": lambda: copies(args.device),
        "gemms": lambda: gemms(model, sizes, args.device),
        "attention": lambda: attention(model, sizes, args.device),
        "tiles": lambda: tiles(model, sizes, args.device),
        "uneven": lambda: uneven(model, sizes, args.device),
        "loop": lambda: loop(200 if args.quick else 1000),
    }
    return max(measured(part, measures[part], args.out) for part in args.parts)


def checked(args: argparse.Namespace) -> ModelShape:
    """The model that is measured, and a folder for the results. Raises UsageError and ScenarioError."""
    model = shapes.model(args.model)
    if args.device == "cpu" and {"tiles", "uneven"} & {*args.parts}:
        raise UsageError("--device cpu: tiles and uneven measure Triton kernels, which need a GPU")
    if args.device == "cuda" and args.parts != ["loop"] and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here")
    with access(args.out, UsageError, "written"):
        args.out.mkdir(parents=True, exist_ok=True)
    return model if args.device == "cuda" else shapes.model("tiny")


def measured(part: str, measure: Callable[[], Iterator[Line]], out: Path) -> int:
    """Print a part's lines and keep them in `out`/<part>.jsonl; 1 if it failed, which does not stop other parts."""
    try:
        with (out / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for line in measure():
                file.write(json.dumps(line) + "\n")
                file.flush()
                values = (f"{key} {value:.4g}" for key, value in line.items() if isinstance(value, float))
                print(f"{line['name']:<48} {'  '.join(values)} {line.get('failed', '')}".rstrip(), flush=True)
    except Exception as error:  # whatever a device or a library raises: the other parts are measured all the same
        print(f"failed: {part}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return 1
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
