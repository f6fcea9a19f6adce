"""A Chrome trace of a window of steps (opens in ui.perfetto.dev): one lane a tid, so that nothing overlaps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cbsim.record.record import LANES, PHASES
from cbsim.record.tables import Ints, Steps

MOST_SERVERS = 8  # whose steps a trace has
TRANSFER_LANES = ("kv copy", "kv out", "kv in")  # by direction
TRANSFER_DETAILS = ("step", "request", "job", "blocks")
DETAILS = (
    "rows",
    "decode_rows",
    "prefill_tokens",
    "draft_tokens",
    "padded_tokens",
    "context_tokens",
    "running",
    "waiting",
)


def chrome_trace(
    servers: Sequence[Steps], window: tuple[int, int], title: str, transfers: Mapping[str, Ints] | None = None
) -> bytes:
    """Return gzipped JSON of steps window[0]:window[1] of each server, and of the transfers that their plans list. A
    server is a process. Times are microseconds, as the format requires.
    """
    events = list[dict[str, Any]]()
    for pid, steps in enumerate(servers[:MOST_SERVERS], 1):
        whose = f"{title} server {steps.server[0]}" if steps.server is not None and len(servers) > 1 else title
        events += [event | {"pid": pid} for event in _server_events(steps, window, whose, transfers)]
    document = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    return gzip.compress(document.encode(), compresslevel=6, mtime=0)


def _server_events(
    steps: Steps, window: tuple[int, int], title: str, transfers: Mapping[str, Ints] | None
) -> list[dict[str, Any]]:
    shown = steps.window(*window)
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for tid, lane in enumerate(("cpu", *LANES, *(TRANSFER_LANES if transfers and len(transfers["way"]) else ()))):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    numbers = shown["step"].tolist()
    details = {name: shown[name].tolist() for name in DETAILS}
    for name in (*PHASES, *LANES):
        tid = 0 if name in PHASES else 1 + LANES.index(name)
        starts, ends = (shown[f"{name}_{edge}_ns"].tolist() for edge in ("start", "end"))
        for i, (step, start, end) in enumerate(zip(numbers, starts, ends, strict=True)):
            more = {key: values[i] for key, values in details.items()} if name == "compute" else {}
            if end != start:
                events.append(_event(tid, name, start, end, {"step": step, **more}))
    if transfers and numbers:
        events += _transfer_events(transfers, (numbers[0], numbers[-1] + 1))
    return events


def _transfer_events(transfers: Mapping[str, Ints], window: tuple[int, int]) -> Iterator[dict[str, Any]]:
    inside = np.flatnonzero((transfers["step"] >= window[0]) & (transfers["step"] < window[1]))
    columns = (transfers[name][inside].tolist() for name in ("way", "start_ns", "end_ns", *TRANSFER_DETAILS))
    for lane, start, end, *details in zip(*columns, strict=True):
        arguments = dict(zip(TRANSFER_DETAILS, details, strict=True))
        yield _event(1 + len(LANES) + lane, TRANSFER_LANES[lane], start, end, arguments)


def _event(tid: int, name: str, start_ns: int, end_ns: int, arguments: Mapping[str, int]) -> dict[str, Any]:
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"ph": "X", "pid": 1, "tid": tid, "name": name, **times, "args": arguments}
