"""Tables as `cbsim sweep` writes them, made up: what several files test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

RATES, SCHEDULERS, LOOPS = (1.0, 2.0, 4.0, 16.0), ("vllm", "sarathi"), ("sync", "async")
RATE = "workload.arrivals.rate_per_s"
REASON = "stuck: request <b>3</b> needs 7 blocks | more than there are"


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A table with these columns in this order; a row without one has null."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table({**columns, "reason": pa.array(columns["reason"], pa.string())}), path)
    return path


def table(folder: Path, rows: Sequence[tuple[Mapping[str, Any], int, Mapping[str, float] | None]]) -> Path:
    """The table of runs: settings, seed, metrics; without metrics the run failed."""
    made = [row(fields, seed, **(numbers or {})) for fields, seed, numbers in rows]
    failed = {"status": "failed", "reason": "stuck"}
    return written(folder / "sweep.parquet", [each if each["status"] == "done" else each | failed for each in made])


def row(fields: Mapping[str, Any], seed: int = 0, **metrics: float | None) -> dict[str, Any]:
    """A point; one without metrics is missing."""
    about = {"seed": seed, "replicate": seed, "key": f"{seed}", "status": "done" if metrics else "missing"}
    return {"loop": "sync", **fields, **about, "reason": None, **metrics}


def rates() -> list[dict[str, Any]]:
    """Two schedulers, four rates, two loops, three replicates. At 16 a second sarathi's sync loop failed, and one
    replicate of vllm's was not run. TTFT is 0.1 s at 1 a second and twice as much at twice the rate.
    """
    rng = np.random.default_rng(0)
    rows = []
    for scheduler, rate, loop, seed in product(SCHEDULERS, RATES, LOOPS, range(3)):
        noise = float(rng.lognormal(0, 0.05))
        slow = 1.5 if loop == "sync" else 1.0
        ttft = 0.1 * rate * slow * noise
        metrics = {"ttft_s.p99": ttft, "ttft_s.n": 40.0, "tpot_s.mean": 0.01 * slow * (1 + rate / 10) * noise}
        metrics["output_tokens_per_s"] = metrics["output_tokens_per_s_per_gpu"] = 100 * rate / slow * noise
        metrics["output_tokens_per_s_per_user"] = 1 / metrics["tpot_s.mean"]
        metrics["preemptions"] = 0.0
        fields = {"loop": loop, "scheduler.name": scheduler, RATE: rate}
        missing = (rate, loop) == (16.0, "sync") and (scheduler == "sarathi" or seed == 2)
        made = row(fields, seed, **dict.fromkeys(metrics) if missing else metrics)
        if missing:
            failed = scheduler == "sarathi"
            made |= {"status": "failed", "reason": REASON} if failed else {"status": "missing"}
        rows.append(made)
    return rows
