"""The simulator's speed at many short runs: a sweep of 200 points in one process and in JOBS, in turn.

`python -m reports.speed.many_runs` prints the figures of docs/speed.md; with another installation in PYTHONPATH it
measures that one. The processes are started before the clock is; a sweep takes what its points, runs and table take.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cbsim.metrics.swept import DONE
from cbsim.policy.value import running
from cbsim.sweeps import sweep, sweep_file
from cbsim.sweeps.store import Runs
from cbsim.sweeps.work import Executor, Here, Processes, Task

JOBS, REPEATS = 2, 3
POINTS = 20, 10  # token budgets, rates
WARM_UP = 4  # points, among which each process gets one

SCENARIO: dict[str, Any] = {
    "question": "How many points a second?",
    "model": "llama-3.1-8b",
    "hardware": "a100-80gb",
    "kv_cache": {"block_size": 16, "num_blocks": 29697},
    "scheduler": {"name": "vllm", "max_num_seqs": 128},
    "loop": {"mode": "async"},
    "workload": {
        "kind": "synthetic",
        "requests": 200,
        "prompt_tokens": {"lognormal": {"mean": 500, "sigma": 1.0, "low": 3, "high": 4096}},
        "output_tokens": {"lognormal": {"mean": 100, "sigma": 0.9, "low": 1, "high": 600}},
        "arrivals": {"kind": "poisson", "rate_per_s": 1},
    },
}


class Took(NamedTuple):
    """Seconds of a sweep: on the clock, of CPU of this process, and of CPU of the others."""

    wall_s: float
    own_s: float
    others_s: float

    @property
    def least_s(self) -> float:
        """By the clock if every process had a core of its own, and this one worked only while the others did not."""
        return self.own_s + self.others_s / JOBS


def file(budgets: int, rates: int) -> sweep_file.SweepFile:
    """Return the sweep: each token budget at each rate."""
    axes = {
        "scheduler.max_num_batched_tokens": [512 + 128 * at for at in range(budgets)],
        "workload.arrivals.rate_per_s": [2 + at for at in range(rates)],
    }
    return sweep_file.read({"name": "many", "scenario": SCENARIO, "axes": axes})[0]


def once(make: Callable[[], Executor], points: tuple[int, int] = POINTS) -> Took:
    """Run the sweep once, with fresh processes and in an empty store."""
    with tempfile.TemporaryDirectory() as folder:
        executor = make()
        warm = sweep.Sweep(file(WARM_UP, 1), Path(), Path(folder) / "warm")
        Runs(warm.store, executor).make(_tasks(warm))
        begun_s = _used_s(executor)
        swept = sweep.Sweep(file(*points), Path(), Path(folder) / "store")
        runs = Runs(swept.store, executor)
        runs.make(_tasks(swept))
        table = swept.now()
        took = Took(*(end_s - start_s for start_s, end_s in zip(begun_s, _used_s(executor), strict=True)))
        executor.close()
        assert table.count(DONE) == len(table.rows) == runs.made
    return took


def _tasks(swept: sweep.Sweep) -> list[Task]:
    return [Task(point.key, point.scenario, "summary") for point in swept.points]


def _used_s(executor: Executor) -> Took:
    """Return the time now, on the clock and of CPU."""
    pool: Any = getattr(executor, "_pool", None)
    processes = pool._processes if pool else ()
    stats = [Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split() for number in processes]
    others_s = sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")
    return Took(time.perf_counter(), time.process_time(), others_s)


def main() -> None:
    count = POINTS[0] * POINTS[1]
    ways: dict[int, Callable[[], Executor]] = {1: Here, JOBS: lambda: Processes(JOBS)}
    took = [[once(make) for make in ways.values()] for _ in range(REPEATS)]
    for jobs, each in zip(ways, zip(*took, strict=True), strict=True):
        wall, own, others = (statistics.median(part) / count * 1e3 for part in zip(*each, strict=True))
        print(f"{jobs} at a time: {1e3 / wall:.1f} points/s; CPU {own + others:.2f} ms each, {own:.2f} in this process")
    clock, cpu = (
        statistics.median(one / many for one, many in pairs)
        for pairs in (
            [(one.wall_s, many.wall_s) for one, many in took],
            [(one.own_s, many.least_s) for one, many in took],
        )
    )
    print(f"{JOBS} at a time make {clock:.2f} times the points a second, {cpu:.2f} by CPU time ({running()} core)")


if __name__ == "__main__":
    main()
