"""The table of a run's moves of KV: its file, its numbers. A run without any has none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cbsim.policy.moves import Way
from cbsim.results import columns, parquet
from cbsim.results.move_log import NAMES, MoveLog
from cbsim.results.on_disk import Place, numbers

FILE = "moves.parquet"
Ints = npt.NDArray[np.int64]


def table(log: MoveLog) -> dict[str, Ints]:
    """The columns, copied."""
    rows = np.array(log.rows, dtype=np.int64).reshape(-1, len(NAMES))
    return {name: np.ascontiguousarray(rows[:, at]) for at, name in enumerate(NAMES)}


def files(log: MoveLog) -> Mapping[str, bytes]:
    """What the run directory holds of them, by name."""
    return {FILE: parquet.encoded(columns.MOVES, table(log))} if log.rows else {}


def read(place: Place) -> dict[str, Ints]:
    """The columns of a run's, by name. Raises RunError."""
    return numbers(place, FILE, columns.MOVES)


def reports(place: Place) -> dict[int, tuple[int, ...]]:
    """The jobs that the result of a step named, ascending, by step. Raises RunError."""
    moves = read(place)
    job, step = moves["job"], moves["reported_step"]
    named: defaultdict[int, set[int]] = defaultdict(set)
    for at in np.flatnonzero(step >= 0).tolist():
        named[int(step[at])].add(int(job[at]))
    return {at: tuple(sorted(jobs)) for at, jobs in named.items()}


def summarise(log: MoveLog, span_s: float) -> dict[str, Any]:
    """Blocks by way, and for which share of the span each direction of the host's link was busy with them."""
    moves = table(log)
    took_s, ways = (moves["end_ns"] - moves["start_ns"]) / columns.NS, moves["way"]
    blocks = {way: int(moves["blocks"][ways == way].sum()) for way in Way}
    busy = {way: float(took_s[ways == way].sum()) / span_s if span_s else 0.0 for way in Way}
    return {
        "copied_blocks": blocks[Way.COPY],
        "out_blocks": blocks[Way.OUT],
        "in_blocks": blocks[Way.IN],
        "out_busy": busy[Way.OUT],
        "in_busy": busy[Way.IN],
    }
