"""The work of one point: a run, in any process of any machine, which returns the files of the run's directory.

At the start of a run the server is still empty, so the latencies of the first requests can be left out (`warmup`).
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cbsim.errors import DeadlockError, UserError
from cbsim.machine.simulate import Simulation
from cbsim.metrics import metrics
from cbsim.record import environment
from cbsim.record.columns import NS
from cbsim.record.directory import RunWriter
from cbsim.runs import running
from cbsim.runs.guard import PolicyError
from cbsim.runs.result import TIMELINE, Result
from cbsim.runs.running import Terms
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps.sweep_file import Keep

BINDS = "binds.json"
COMMAND = "python -m cbsim run scenario.resolved.yaml"  # to be run in the point's directory


class Task(NamedTuple):
    """A run to be made, and which of its files to keep."""

    key: str
    scenario: Scenario
    keep: Keep
    warmup: float = 0.0  # the share of requests, in order of arrival, whose latencies do not count
    limits: bool = False  # whether to keep also what limits the run, as a list of sentences


class Made(NamedTuple):
    """The outcome of a task: the files of its run directory by name, or the reason why there are none."""

    key: str
    files: Mapping[str, bytes]
    reason: str | None = None
    seconds: float = 0.0


def work(task: Task) -> Made:
    """Make the run. An exception of the run is not raised but returned as the reason of the failure."""
    begun = time.perf_counter()
    try:
        scenario = task.scenario
        result = running.one_loop(scenario, scenario.loop.mode, Simulation, Terms(COMMAND, process=_process()))
        if task.warmup:
            result = without(result, task.warmup, COMMAND)
        files = _files(result, task.keep) | ({BINDS: _json(result.binding)} if task.limits else {})
    except Exception as error:
        return Made(task.key, {}, _reason(error), time.perf_counter() - begun)
    return Made(task.key, files, None, time.perf_counter() - begun)


@cache
def _process() -> dict[str, Any]:
    """Return the environment of this process, determined once."""
    return environment.of_process()


def _files(result: Result, keep: Keep) -> dict[str, bytes]:
    if keep == "summary":
        return {
            "scenario.resolved.yaml": result.resolved.encode(),
            "env.json": _json(result.environment),
            "summary.json": _json(result.summary),
        }
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter.at(Path(folder))
        writer.scenario(result.resolved)
        result.write(writer, TIMELINE)
        paths = [path for path in writer.path.rglob("*") if path.is_file()]
        files = {path.relative_to(writer.path).as_posix(): path.read_bytes() for path in paths}
    if keep == "tables":
        return {name: content for name, content in files.items() if not name.startswith(("figures/", "timeline"))}
    return files


def _json(value: Mapping[str, Any] | list[str]) -> bytes:
    return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def _reason(error: Exception) -> str:
    """Return in one line why a run failed, with the place in the code if the cause is a bug of this project."""
    if isinstance(error, DeadlockError):
        return f"stuck: {error}"
    if isinstance(error, UserError | PolicyError):
        return str(error)
    if isinstance(error, OverflowError):
        return f"a number is too large for a run: {error}"
    if isinstance(error, MemoryError):
        return "out of memory"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno}, {frame.name})"


def without(result: Result, share: float, command: str) -> Result:
    """Return the run with latencies and SLO of only those requests that arrive after the first `share` of all.
    `command` is the one that made the run without this window.
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
