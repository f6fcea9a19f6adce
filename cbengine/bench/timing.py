"""How long something takes on a device, and what the device can do at best: what all else is a share of."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cbengine.device.graphs import captured, streams

LARGE_BYTES = 1 << 31
PRODUCT = 8192


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device reaches: bytes read and written a second by a copy, FLOP/s of a large bf16 matrix product."""

    bandwidth: float
    rate: float


def ceilings(device: str = "cuda") -> Ceilings:
    return Ceilings(copy_bandwidth(device=device), matrix_rate(device=device))


def timed(act: Callable[[], Any], device: str = "cuda", repeats: int = 20) -> float:
    """Median seconds of `act`, warm. On a GPU between events round a replayed graph: launching costs nothing."""
    if device == "cpu":
        act()
        return statistics.median(_clocked(act) for _ in range(repeats))
    stream = streams()[0]
    graph, _ = captured(act, stream)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    with torch.cuda.stream(stream):
        for _ in range(3 + repeats):
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            samples.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(samples[3:]))


def _clocked(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def copy_bandwidth(size: int = LARGE_BYTES, device: str = "cuda") -> float:
    """Bytes read and written a second by a copy on the device, far larger than its cache."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device)


def matrix_rate(n: int = PRODUCT, device: str = "cuda") -> float:
    """FLOP/s of a bf16 matrix product of random numbers."""
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b, device)


def launch_latency(repeats: int = 200) -> float:
    """Seconds from a launch until the host knows that it is over."""
    x = torch.zeros(1, device="cuda")

    def there_and_back() -> None:
        x.add_(1)
        torch.cuda.synchronize()

    there_and_back()
    return statistics.median(_clocked(there_and_back) for _ in range(repeats))


def launch_and_wake(*, blocking: bool, repeats: int = 100) -> float:
    """Seconds that launching a kernel and hearing of its end take beside the kernel: median. `blocking`: the CPU sleeps
    until then, else it is kept busy. What the two differ by is the waking up.
    """
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")  # some 200 us: long enough to fall asleep
    start, end = (torch.cuda.Event(enable_timing=True, blocking=blocking) for _ in range(2))

    def beside() -> float:
        began = time.perf_counter()
        start.record()
        _ = x @ x
        end.record()
        end.synchronize()
        return time.perf_counter() - began - float(start.elapsed_time(end)) / 1e3

    beside()
    return statistics.median(beside() for _ in range(repeats))


def give_back() -> None:
    """The memory of what ran before, also where a failure's traceback held it in a circle."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
