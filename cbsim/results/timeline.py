"""A window of steps as a Chrome trace (opens in ui.perfetto.dev): one lane a tid, so that nothing overlaps."""

from __future__ import annotations

import gzip
import json
from typing import Any

from cbsim.results.metrics import Steps
from cbsim.results.record import LANES, PHASES

DETAILS = ("rows", "decode_rows", "prefill_tokens", "padded_tokens", "context_tokens", "running", "waiting")


def chrome_trace(steps: Steps, window: tuple[int, int], title: str) -> bytes:
    """Gzipped JSON of steps window[0]:window[1]. Times are microseconds, as the format wants."""
    shown = steps.window(*window)
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for tid, lane in enumerate(("cpu", *LANES)):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    numbers = shown["step"].tolist()
    details = {name: shown[name].tolist() for name in DETAILS}
    for name in (*PHASES, *LANES):
        tid = 0 if name in PHASES else 1 + LANES.index(name)
        starts = shown[f"{name}_start_ns"].tolist()
        ends = shown[f"{name}_end_ns"].tolist()
        for i, step in enumerate(numbers):
            if ends[i] == starts[i]:
                continue
            event: dict[str, Any] = {"ph": "X", "pid": 1, "tid": tid, "name": name, "ts": starts[i] / 1000}
            event |= {"dur": (ends[i] - starts[i]) / 1000, "args": {"step": step}}
            if name == "compute":
                event["args"] |= {key: values[i] for key, values in details.items()}
            events.append(event)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)
