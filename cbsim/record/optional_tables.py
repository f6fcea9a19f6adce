"""Tables that only some runs have: KV transfers (moves.parquet), hand-offs between servers (hand_offs.parquet), the
parents of beams (parents.parquet), what rows with speculation verified and proposed (drafts.parquet), and the times of
steps on the stages of a pipeline (stages.parquet).
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cbsim.policy.transfers import Direction
from cbsim.record import columns, parquet
from cbsim.record.record import Record, Records
from cbsim.record.tables import Ints

TRANSFERS, PARENTS, DRAFTS = "moves.parquet", "parents.parquet", "drafts.parquet"
HAND_OFFS, STAGES = "hand_offs.parquet", "stages.parquet"
FETCHED, LEASE_OVER, BROKEN, ENDED, UNDER_WAY = range(5)  # fates of a hand-off
TABLES = {f"{name}.parquet": declared for name, declared in columns.OPTIONAL.items()}
Files = Path | Mapping[str, bytes]
"""The files of a run: a folder, or their contents in memory, by name."""


def values_of(name: str, rows: array[int]) -> dict[str, Ints]:
    """Return the columns of a table from its rows, given one after the other."""
    table = np.array(rows, dtype=np.int64).reshape(-1, len(TABLES[name]))
    return {column.name: np.ascontiguousarray(table[:, at]) for at, column in enumerate(TABLES[name])}


def files_of(record: Record | Records) -> dict[str, bytes]:
    """Return the tables that have rows, as files of the run directory by name."""
    logs = {f"{name}.parquet": rows for name, rows in record.logs.items()}
    return {name: parquet.encoded(TABLES[name], values_of(name, rows)) for name, rows in logs.items() if rows}


def read(files: Files, name: str) -> dict[str, Ints]:
    """Read the columns of a table by name, without rows if this run has none. Raises RunError."""
    if isinstance(files, Path):
        source: Path | bytes | None = files / name if (files / name).exists() else None
    else:
        source = files.get(name)
    if source is None:
        return values_of(name, array("q"))
    table = parquet.TableFiles([source], TABLES[name])
    return {column.name: table[column.name].to_numpy() for column in TABLES[name]}


def reported_jobs(files: Files) -> dict[int, tuple[int, ...]]:
    """Return the jobs that the result of each step reported, ascending, by step. Raises RunError."""
    transfers = read(files, TRANSFERS)
    named: defaultdict[int, set[int]] = defaultdict(set)
    for job, step in zip(transfers["job"].tolist(), transfers["reported_step"].tolist(), strict=True):
        named[step].add(job)
    return {step: tuple(sorted(jobs)) for step, jobs in named.items() if step >= 0}


def by_step(files: Files, name: str) -> dict[int, list[tuple[int, ...]]]:
    """Return the rows of a table by step, which is their first column and left out. Raises RunError."""
    table = read(files, name)
    rows: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
    for step, *row in zip(*(table[column.name].tolist() for column in TABLES[name]), strict=True):
        rows[step].append(tuple(row))
    return dict(rows)


def unfetched(files: Files) -> dict[int, set[int]]:
    """Return, by server that decodes, the requests whose KV it did not get. Raises RunError."""
    table = read(files, HAND_OFFS)
    requests: defaultdict[int, set[int]] = defaultdict(set)
    for server, request in zip(*(table[name][table["fate"] != FETCHED] for name in ("target", "request")), strict=True):
        requests[int(server)].add(int(request))
    return requests


def summarise_drafts(rows: array[int]) -> dict[str, Any]:
    """Return the draft tokens verified, those that came true, and the share of rows in which they did, by position."""
    table = values_of(DRAFTS, rows)
    drafts, accepted = table["drafts"], table["accepted"]
    places = range(1, 1 + int(drafts.max(initial=0)))
    total, came, rows_with = int(drafts.sum()), int(accepted.sum()), int((drafts > 0).sum())
    return {
        "verified_tokens": total,
        "accepted_tokens": came,
        "rejected_tokens": total - came,
        "verifications": rows_with,
        "acceptance_length": 1 + came / rows_with if rows_with else None,
        "acceptance_rate": came / total if total else None,
        "acceptance_by_position": {f"{at}": int((accepted >= at).sum()) / int((drafts >= at).sum()) for at in places},
    }


def summarise_stages(rows: array[int]) -> dict[str, Any]:
    """Return the share of the time from the first kernel to the last in which stages of a pipeline compute, their mean
    and each, and the share in which the mean one does not.
    """
    table = values_of(STAGES, rows)
    span_ns = max(int(table["end_ns"].max() - table["start_ns"].min()), 1)
    busy_ns = np.bincount(table["stage"], table["end_ns"] - table["start_ns"])
    active = busy_ns / span_ns
    return {"gpu_active": float(active.mean()), "bubble": 1 - float(active.mean()), "by_stage": active.tolist()}


def summarise_transfers(table: Mapping[str, Ints], span_s: float) -> dict[str, Any]:
    """Return the blocks by direction, and the busy share of the span of each direction of the host's link."""
    took_s, directions = (table["end_ns"] - table["start_ns"]) / columns.NS, table["way"]
    blocks = {each: int(table["blocks"][directions == each].sum()) for each in Direction}
    busy = {each: float(took_s[directions == each].sum()) / span_s if span_s else 0.0 for each in Direction}
    return {
        "copied_blocks": blocks[Direction.COPY],
        "out_blocks": blocks[Direction.OUT],
        "in_blocks": blocks[Direction.IN],
        "out_busy": busy[Direction.OUT],
        "in_busy": busy[Direction.IN],
    }
