"""Tables that only some runs have: KV transfers (moves.parquet), and the parents of beams (parents.parquet)."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from cbsim.policy.transfers import Direction
from cbsim.record import columns, parquet
from cbsim.record.on_disk import Place, numbers
from cbsim.record.record import MoveLog
from cbsim.record.tables import Ints

TRANSFERS_FILE, PARENTS_FILE = "moves.parquet", "parents.parquet"
MOVES = tuple(column.name for column in columns.MOVES)
PARENTS = tuple(column.name for column in columns.PARENTS)


def transfer_table(log: MoveLog) -> dict[str, Ints]:
    """The columns of a log, copied."""
    rows = np.array(log.rows, dtype=np.int64).reshape(-1, len(MOVES))
    return {name: np.ascontiguousarray(rows[:, at]) for at, name in enumerate(MOVES)}


def transfer_files(log: MoveLog) -> Mapping[str, bytes]:
    """The table as a file of the run directory, by name; none if nothing was transferred."""
    return {TRANSFERS_FILE: parquet.encoded(columns.MOVES, transfer_table(log))} if log.rows else {}


def read_transfers(place: Place) -> dict[str, Ints]:
    """The columns of the table, by name; without rows if nothing was transferred. Raises RunError."""
    return numbers(place, TRANSFERS_FILE, columns.MOVES)


def reported_jobs(place: Place) -> dict[int, tuple[int, ...]]:
    """The jobs that the result of a step named, ascending, by step. Raises RunError."""
    moves = read_transfers(place)
    job, step = moves["job"], moves["reported_step"]
    named: defaultdict[int, set[int]] = defaultdict(set)
    for at in np.flatnonzero(step >= 0).tolist():
        named[int(step[at])].add(int(job[at]))
    return {at: tuple(sorted(jobs)) for at, jobs in named.items()}


def summarise_transfers(log: MoveLog, span_s: float) -> dict[str, Any]:
    """Blocks by way, and for which share of the span each direction of the host's link was busy with them."""
    moves = transfer_table(log)
    took_s, ways = (moves["end_ns"] - moves["start_ns"]) / columns.NS, moves["way"]
    blocks = {way: int(moves["blocks"][ways == way].sum()) for way in Direction}
    busy = {way: float(took_s[ways == way].sum()) / span_s if span_s else 0.0 for way in Direction}
    return {
        "copied_blocks": blocks[Direction.COPY],
        "out_blocks": blocks[Direction.OUT],
        "in_blocks": blocks[Direction.IN],
        "out_busy": busy[Direction.OUT],
        "in_busy": busy[Direction.IN],
    }


def parent_files(log: array[int]) -> Mapping[str, bytes]:
    """The table as a file of the run directory, by name; none if no beam took over another's text."""
    table = np.array(log, dtype=np.int64).reshape(-1, len(PARENTS))
    values = {name: np.ascontiguousarray(table[:, at]) for at, name in enumerate(PARENTS)}
    return {PARENTS_FILE: parquet.encoded(columns.PARENTS, values)} if log else {}


def read_parents(place: Place) -> dict[int, list[tuple[int, int]]]:
    """(request, the one whose text it took over) by step. Raises RunError."""
    table = numbers(place, PARENTS_FILE, columns.PARENTS)
    pairs: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for step, request, parent in zip(*(table[name].tolist() for name in PARENTS), strict=True):
        pairs[step].append((request, parent))
    return dict(pairs)
