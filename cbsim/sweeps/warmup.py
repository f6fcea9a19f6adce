"""The start of a run, when the server is still empty, says nothing of its load: latencies of the requests after it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from cbsim.results import metrics
from cbsim.results.columns import NS
from cbsim.server import running
from cbsim.server.result import Result


def without(result: Result, share: float, command: str) -> Result:
    """The run, its latencies and SLO of requests that arrive when that share of all has, or later. `command` made it
    without this window.
    """
    arrivals_ns = np.sort(result.request_rows.numbers("arrival_ns"))
    if not len(arrivals_ns):
        return result
    first_ns = float(arrivals_ns[int(share * len(arrivals_ns))])
    window_s = (max(first_ns - 0.5, 0.0) / NS, math.inf)  # between two nanoseconds, so that no rounding leaves it out
    counted = running.counted(result.scenario, result.summary["total_blocks"], window_s)
    summary = {**result.summary, **metrics.summarise(result.request_rows, result.step_numbers, **counted)}
    environment = {**result.environment, "command": f"{command} --window {window_s[0]!r}:"}
    return replace(result, summary=summary, environment=environment)
