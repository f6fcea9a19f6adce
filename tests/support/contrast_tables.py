"""Tables as sweeps write them, of numbers that a test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = tuple[Mapping[str, Any], int, Mapping[str, float] | None]  # settings, seed, metrics; None: the run failed


def written(folder: Path, rows: Sequence[Row]) -> Path:
    """The table of these runs."""
    fields = dict.fromkeys(name for settings, _, _ in rows for name in settings)
    metrics = dict.fromkeys(name for _, _, numbers in rows for name in numbers or {})
    columns: dict[str, Any] = {"loop": ["sync"] * len(rows)}
    columns |= {name: [settings.get(name) for settings, _, _ in rows] for name in fields}
    columns |= {"seed": [seed for _, seed, _ in rows], "replicate": [seed for _, seed, _ in rows]}
    columns["key"] = [str(i) for i in range(len(rows))]
    columns["status"] = ["failed" if numbers is None else "done" for _, _, numbers in rows]
    columns["reason"] = pa.array(["stuck" if numbers is None else None for _, _, numbers in rows], pa.string())
    columns |= {name: pa.array([(numbers or {}).get(name) for _, _, numbers in rows], pa.float64()) for name in metrics}
    path = folder / "sweep.parquet"
    pq.write_table(pa.table(columns), path)
    return path
