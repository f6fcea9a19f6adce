"""How long a long run takes to load, draw and write, and how much memory: `python -m analysis drawing-bench`.

The run is made up, column by column, but is a whole run directory: steady decoding, a request every so many steps.
Each part is timed in a process of its own, started from nothing.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from cbsim.results import directory, metrics
from cbsim.results.record import LANES, PHASES, STEP_COLUMNS, Record, RequestRow
from cbsim.scenario import scenario

STEP_NS = 10_000_000
BLOCKS = 100_000
BASE = "worked_example"


@dataclass(frozen=True, slots=True)
class Recording:
    """What a run directory's writer asks a record for."""

    steps: bytes
    rows: Sequence[RequestRow]

    def requests(self) -> list[RequestRow]:
        return list(self.rows)


def bench(steps: int, requests: int) -> int:
    """Print seconds and peak memory of loading, and of a whole report."""
    with tempfile.TemporaryDirectory() as folder:
        path = made(Path(folder), steps, requests)
        print(f"{steps:,} steps, {requests:,} requests")
        load = f"from pathlib import Path; from analysis.statistics import loading; loading.read([Path({str(path)!r})])"
        for name, words in (
            ("load", ["-c", load]),
            ("report", ["-m", "analysis", "report", str(path), "--out", f"{folder}/report"]),
        ):
            seconds, peak = _measured(words)
            print(f"{name:<7} {seconds:5.1f} s  {peak / 1e6:7,.0f} MB")
    return 0


def _measured(words: Sequence[str]) -> tuple[float, int]:
    """(seconds, bytes) of a Python process; the peak is that of the largest child so far."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def made(out: Path, steps: int, requests: int) -> Path:
    """A run directory of that size; returns its path."""
    drawn = np.random.default_rng(0).integers(max(steps // requests, 1), 20 * steps // requests + 2, requests)
    lengths = np.minimum(drawn, steps)
    first = np.linspace(0, steps - lengths.max(), requests).astype(np.int64)
    rows = [_request(i, start, count) for i, (start, count) in enumerate(zip(first.tolist(), lengths, strict=True))]
    writer = directory.RunWriter(out, "bench", "0" * 8)
    writer.scenario(scenario.dump(scenario.load(BASE, ("loop.mode=sync",))))
    writer.environment({"command": "python -m analysis drawing-bench", "device": "simulated", "workload_hash": "bench"})
    done, table = writer.tables(cast("Record", Recording(_steps(steps, first, lengths).tobytes(), rows)))
    numbers = metrics.summarise(done, table, total_blocks=BLOCKS)
    about: dict[str, Any] = {
        "schema_version": directory.SCHEMA_VERSION,
        "complete": True,
        "name": "bench",
        "loop": "sync",
    }
    writer.summary(about | {"question": "", "seed": 0} | numbers)
    writer.complete()
    return writer.path


def _request(index: int, start: int, count: int) -> RequestRow:
    arrival = start * STEP_NS
    lengths = (128, int(count), int(count), 0, start)  # prompt, output and most tokens, priority, first step
    return RequestRow(
        index, str(index), arrival, start + 1, arrival, *lengths, "length", "", -1, 0, 0, [start, int(count)]
    )


def _steps(steps: int, first: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The step table: phases one after the other, kernels for about a third of each step."""
    change = np.bincount(first, minlength=steps + 1) - np.bincount(first + lengths, minlength=steps + 1)
    running = np.cumsum(change)[:steps]
    table = dict.fromkeys(STEP_COLUMNS, np.zeros(steps, dtype=np.int64))
    number = np.arange(steps, dtype=np.int64)
    table |= dict.fromkeys(("rows", "decode_rows", "tokens", "padded_tokens", "sampled_rows", "running"), running)
    table |= {"step": number, "context_tokens": running * 200, "used_blocks": np.minimum(running * 13, BLOCKS)}
    for names in (PHASES, LANES):
        for i, name in enumerate(names):
            jitter = (number * 7919 % 1000) * 1000
            table[f"{name}_start_ns"] = number * STEP_NS + i * (STEP_NS // len(names)) + (i > 0) * jitter
            end = number * STEP_NS + (i + 1) * (STEP_NS // len(names))
            table[f"{name}_end_ns"] = end + (i + 1 < len(names)) * jitter
    return np.stack([table[name] for name in STEP_COLUMNS], axis=1)
