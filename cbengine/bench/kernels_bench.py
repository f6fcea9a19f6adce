"""What the device and the kernels do, size by size: the measured roofline that everything else is a share of.

Parts: copies to and from the host; the matrix products of a step; decode and prefill attention by size; attention with
other tiles. Each is one group of findings, under a minute on a GPU, and one JSON file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbengine import build
from cbengine.bench import BENCH_PARTS, attention_bench, gemm_bench, timing
from cbengine.bench.figures import Figure, FindingGroup, shown
from cbengine.bench.timing import Ceilings, timed
from cbsim.scenario.shapes import ModelShape
from cbsim.server.status import ERROR, OK

LARGE, SMALL = 1 << 28, 4


def bench(parts: Sequence[str], model: ModelShape, out: Path, *, quick: bool, as_json: bool) -> int:
    """Measure, print, keep `out`/<part>.json; 1 if something failed. Needs a GPU."""
    return OK if shown(groups(parts, model, quick), as_json=as_json, keep=out) else ERROR


def groups(parts: Sequence[str], model: ModelShape, quick: bool, device: str = "cuda") -> list[FindingGroup]:
    """The parts in their own order. `quick` leaves out most sizes."""
    best = cache(partial(timing.ceilings, device))
    measures: dict[str, Callable[[], Iterator[Any]]] = {
        "copies": partial(_copies, best, device),
        "gemms": partial(_gemms, model, best, quick, device),
        "attention": partial(_attention, model, best, quick, device),
        "tiles": partial(_tiles, model, best, quick, device),
    }
    return [FindingGroup(name, measures[name]) for name in BENCH_PARTS if name in parts]


def _copies(best: Callable[[], Ceilings], device: str) -> Iterator[Figure]:
    yield from host_copies(device)
    yield Figure("device copy, read and write", best().bandwidth / 1e12, "TB/s")
    yield Figure("matrix product, bf16, 8192^3", best().rate / 1e12, "TFLOP/s")


def _gemms(model: ModelShape, best: Callable[[], Ceilings], quick: bool, device: str) -> Iterator[Any]:
    if quick:
        return gemm_bench.table(model, best(), device, decodes=(1, 32, 256), prefills=(2048,))
    return gemm_bench.table(model, best(), device)


def _attention(model: ModelShape, best: Callable[[], Ceilings], quick: bool, device: str) -> Iterator[Figure]:
    ops, sizes = build.ops(device), attention_bench
    batches, points = (sizes.BATCHES, sizes.PREFILLS) if not quick else ((sizes.BATCH,), sizes.PREFILLS[4:5])
    yield from sizes.decodes(ops, model, best().bandwidth, batches, sizes.CONTEXTS, device)
    yield from sizes.prefills(ops, model, best().rate, points, device)


def _tiles(model: ModelShape, best: Callable[[], Ceilings], quick: bool, device: str) -> Iterator[Any]:
    from cbengine.bench import tiles_bench as sweep  # imports triton

    yield from sweep.decodes(model, best(), device, contexts=sweep.CONTEXTS[1:2] if quick else sweep.CONTEXTS)
    yield from sweep.prefills(model, best(), device, points=sweep.PREFILLS[:1] if quick else sweep.PREFILLS)


def host_copies(device: str = "cuda", size: int = LARGE) -> Iterator[Figure]:
    """Latency of a few bytes and bandwidth of many, from and to pinned memory where there is a GPU."""
    pinned = device == "cuda"
    for name, to_device in (("host to device", True), ("device to host", False)):
        for count, unit in ((SMALL, "us"), (size, "GB/s")):
            host = torch.zeros(count, dtype=torch.uint8, pin_memory=pinned)
            there = torch.zeros(count, dtype=torch.uint8, device=device)
            target, source = (there, host) if to_device else (host, there)
            seconds = _copied(target, source, device)
            yield Figure(f"{name}, {count:,} bytes", seconds * 1e6 if unit == "us" else count / seconds / 1e9, unit)


def _copied(target: Tensor, source: Tensor, device: str) -> float:
    """Seconds of a copy, from its launch until the host knows."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return timed(copy, "cpu")
