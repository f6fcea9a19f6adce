"""Moments for requests of a trace that says only in which 3 s each of them came, as Mooncake's do."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from cbsim.workload.traces import Arrival

GRID_NS = 3_000_000_000
"""Its timestamps are multiples of this, give or take GRID_SLACK_NS."""
GRID_SLACK_NS = 10_000_000


def spread(rows: list[Arrival], rng: np.random.Generator) -> list[Arrival]:
    """Requests stamped with a multiple of 3 s, moved to random moments of the 3 s that follow, order kept. A trace
    with a timestamp off the grid has real times and is left as it is.
    """
    off = [(row.arrival_ns + GRID_SLACK_NS) % GRID_NS for row in rows]
    if max(off) > 2 * GRID_SLACK_NS:
        return rows
    moved: list[Arrival] = []
    for cell, group in groupby(rows, key=lambda row: (row.arrival_ns + GRID_SLACK_NS) // GRID_NS):
        members = list(group)
        offsets = np.sort(rng.integers(0, GRID_NS, len(members))).tolist()
        moved += [row._replace(arrival_ns=cell * GRID_NS + at) for row, at in zip(members, offsets, strict=True)]
    return moved
