"""A Chrome trace of a window of steps (opens in ui.perfetto.dev): one lane a tid, so that nothing overlaps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence

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
    events = list[str]()
    for pid, steps in enumerate(servers[:MOST_SERVERS], 1):
        whose = f"{title} server {steps.server[0]}" if steps.server is not None and len(servers) > 1 else title
        events += _server_events(pid, steps.window(*window), whose, transfers)
    document = f'{{"traceEvents":[{",".join(events)}],"displayTimeUnit":"ms"}}'
    return gzip.compress(document.encode(), compresslevel=6, mtime=0)


def _server_events(pid: int, steps: Steps, title: str, transfers: Mapping[str, Ints] | None) -> Iterator[str]:
    yield _about(pid, "process_name", {"name": title})
    for tid, lane in enumerate(("cpu", *LANES, *(TRANSFER_LANES if transfers and len(transfers["way"]) else ()))):
        yield _about(pid, "thread_name", {"name": lane}, tid)
        yield _about(pid, "thread_sort_index", {"sort_index": tid}, tid)
    for name in (*PHASES, *LANES):
        keys = ("step", *(DETAILS if name == "compute" else ()))
        event = _template(pid, 0 if name in PHASES else 1 + LANES.index(name), name, keys)
        busy = np.flatnonzero(steps.lane(name))
        starts, ends, *numbers = (steps[key][busy].tolist() for key in (f"{name}_start_ns", f"{name}_end_ns", *keys))
        at, length = [at / 1000 for at in starts], [(end - at) / 1000 for at, end in zip(starts, ends, strict=True)]
        yield from map(event.__mod__, zip(at, length, *numbers, strict=True))
    if not transfers or not len(steps):
        return
    inside = np.flatnonzero((transfers["step"] >= steps["step"][0]) & (transfers["step"] <= steps["step"][-1]))
    columns = (transfers[name][inside].tolist() for name in ("way", "start_ns", "end_ns", *TRANSFER_DETAILS))
    events = [_template(pid, tid, name, TRANSFER_DETAILS) for tid, name in enumerate(TRANSFER_LANES, 1 + len(LANES))]
    for lane, start, end, *numbers in zip(*columns, strict=True):
        yield events[lane] % (start / 1000, (end - start) / 1000, *numbers)


def _about(pid: int, name: str, arguments: Mapping[str, object], tid: int | None = None) -> str:
    thread = {} if tid is None else {"tid": tid}
    return json.dumps({"ph": "M", "pid": pid, **thread, "name": name, "args": arguments}, separators=(",", ":"))


def _template(pid: int, tid: int, name: str, keys: Sequence[str]) -> str:
    """Return the JSON of a lane's events, to be filled with start, duration and a whole number for each of the keys."""
    numbers = ",".join(f'"{key}":%d' for key in keys)
    return f'{{"ph":"X","pid":{pid},"tid":{tid},"name":"{name}","ts":%r,"dur":%r,"args":{{{numbers}}}}}'
