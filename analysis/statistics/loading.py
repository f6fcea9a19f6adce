"""A run directory as frames: one row a step, one row a request, with the latencies of `cbsim.metrics.metrics`.

Frames have the columns of the run directory, in its units (docs/run_directory.md), and latencies in seconds beside
them. A request that did not end with its last token has no latency: NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.statistics import labels
from cbsim.metrics import metrics
from cbsim.metrics.terminal import flat
from cbsim.record.environment import SIMULATED
from cbsim.record.record import HANDED_OFF, STEP_COLUMNS, RequestRow
from cbsim.record.tables import RUNS, TEXTS, Requests, RequestTable, Steps, token_times
from cbsim.runs import reading

LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "normalized_latency_s", "queue_s", "prefill_s", "decode_s")
VERDICT = "replay.json"
"""The file that replaces tables which are not kept: the outcome of replanning the run, null if none was tried."""


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A loaded run directory. `label` distinguishes it from the others that were read with it.

    `table` and `times` are the data of the frames, in the form that `cbsim.metrics.metrics` takes.
    """

    path: Path
    label: str
    scenario: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    incomplete: str | None
    requests: pd.DataFrame
    table: Steps
    times: Requests

    @property
    def steps(self) -> pd.DataFrame:
        """The whole step table as a frame. For a long run it is large: `table` reads a column at a time."""
        return pd.DataFrame(self.table.table, columns=list(STEP_COLUMNS), copy=False)

    @property
    def measured(self) -> bool:
        """Whether the run was on a real clock; a simulated run is marked as such."""
        return self.environment.get("device") != SIMULATED

    @property
    def whole(self) -> bool:
        """Whether its tables exist. A packed run may lack them."""
        return len(self.table) == int(self.summary["steps"])

    @property
    def loop(self) -> str:
        return str(self.summary["loop"])

    @property
    def name(self) -> str:
        return str(self.summary["name"])

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that may distinguish it: its scenario's fields by dotted name, its loop, and its world."""
        world = "measured" if self.measured else SIMULATED
        return flat(self.scenario) | {"loop.mode": self.loop, "world": world}

    @property
    def start_ns(self) -> int:
        """The start of the run's span: its first arrival."""
        return int(self.times.arrival_ns.min()) if len(self.times.rows) else 0

    @property
    def end_ns(self) -> int:
        """The end of the run's span: the end of its last step."""
        return max(int(self.table["update_end_ns"].max()), self.start_ns) if len(self.table) else self.start_ns

    @property
    def window_ns(self) -> tuple[float, float]:
        """The times from which and before which a request has to arrive to count in latencies."""
        low, high = self.summary.get("window_s") or (None, None)
        return (-np.inf if low is None else low * 1e9, np.inf if high is None else high * 1e9)

    @property
    def counted(self) -> pd.DataFrame:
        """The requests whose latencies count: those that arrive in the window."""
        low, high = self.window_ns
        arrival = self.requests["arrival_ns"]
        inside = (arrival >= low) & (arrival < high)
        return self.requests if inside.all() else self.requests[inside]


def read(paths: Sequence[Path]) -> list[LoadedRun]:
    """Read run directories, labelled by what distinguishes them. Raises RunError naming the unreadable file."""
    runs = [_read(path) for path in paths]
    names = labels.labels([run.facts for run in runs], [run.loop for run in runs])
    return [replace(run, label=label) for run, label in zip(runs, names, strict=True)]


def _read(path: Path) -> LoadedRun:
    whole = (path / "steps.parquet").exists() or not (path / VERDICT).exists()
    raw = reading.load(path, whole=whole)
    scenario = reading.fields(raw)
    reading.check_run(raw, scenario["loop"]["mode"], fleet=scenario.get("fleet") is not None, whole=whole)
    requests = RequestTable.of(raw.requests)
    if (prefills := requests.is_in((HANDED_OFF,))).any():  # whose requests have rows of their own
        requests = requests.rows(~prefills)
    times = token_times(requests, raw.steps)
    documents_read = (scenario, raw.environment, raw.summary, raw.incomplete)
    return LoadedRun(path, path.name, *documents_read, request_frame(times), raw.steps, times)


def request_frame(times: Requests) -> pd.DataFrame:
    """Return the request table without its token runs, with `done` and the latencies. Absent times are -1."""
    rows = times.rows
    names = [name for name in RequestRow._fields if name not in ("arrival_ns", "queued_ns", RUNS)]
    columns: dict[str, Any] = {
        name: rows.texts(name).to_numpy(zero_copy_only=False) if name in TEXTS else rows.numbers(name) for name in names
    }
    for name in ("arrival_ns", "queued_ns", "scheduled_ns", "first_token_ns", "last_token_ns"):
        columns[name] = getattr(times, name)
    columns["generated_tokens"] = times.generated
    columns["done"] = done = times.done
    for name, values in metrics.latencies(times).items():
        column = np.full(len(rows), np.nan)
        column[done & (times.generated > 1) if name == "tpot_s" else done] = values
        columns[name] = column
    return pd.DataFrame(columns, copy=False)
