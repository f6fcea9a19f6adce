"""The errors of a replay against the recorded run: every latency by mean and percentile, and the series over time. The
ablations repeat this without one part of the model at a time: as errors of a few percent cancel each other, only they
show on which part the result depends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from cbsim.measured.recorded.case import Case
from cbsim.measured.recorded.reenactment import Floats, Replayed, Served, recorded, replay
from cbsim.policy.plan import WORKED
from cbsim.scenario.scenario import MOST_BLOCKS

METRICS = ("ttft", "tpot", "e2e")
PARTS = ("queue", "prefill")
STATISTICS: dict[str, Callable[[Floats], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "median": lambda values: float(np.percentile(values, 50)),
    "p90": lambda values: float(np.percentile(values, 90)),
    "p95": lambda values: float(np.percentile(values, 95)),
    "p99": lambda values: float(np.percentile(values, 99)),
}


class MetricScore(NamedTuple):
    """A statistic of a run, simulated and measured, in seconds. `metric` is ttft, tpot, e2e or makespan; or queue or
    prefill, the two parts of TTFT.
    """

    metric: str
    statistic: str
    simulated_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The error relative to the measured value; infinite if that is 0 and the simulated one is not."""
        if self.simulated_s == self.measured_s:
            return 0.0
        return self.simulated_s / self.measured_s - 1 if self.measured_s else inf

    def facts(self) -> dict[str, Any]:
        """Return the fields for report.json, with None for an infinite error."""
        return {**self._asdict(), "error": self.error if isfinite(self.error) else None}


def parts(simulated: Served, measured: Served) -> list[MetricScore]:
    """Score the two parts of TTFT: under load nearly all of it is the queue, which hides the prefills' errors."""
    return [_score(simulated, measured, metric, name) for metric in PARTS for name in STATISTICS]


def scores(simulated: Served, measured: Served) -> list[MetricScore]:
    """Score the latencies in order of `METRICS` and `STATISTICS`, then the makespan."""
    errors = [_score(simulated, measured, metric, name) for metric in METRICS for name in STATISTICS]
    return [*errors, MetricScore("makespan", "", simulated.makespan_s, measured.makespan_s)]


def _score(simulated: Served, measured: Served, metric: str, name: str) -> MetricScore:
    values = [STATISTICS[name](getattr(served, f"{metric}_s")) for served in (simulated, measured)]
    return MetricScore(metric, name, *values)


class Series(NamedTuple):
    """Series once a second as recorded: running and waiting requests, share of the KV cache in use (0 to 1)."""

    at_s: Floats
    simulated: dict[str, Floats]
    measured: dict[str, Floats]

    def difference(self, name: str) -> float:
        """Return the mean absolute difference over the recorded seconds."""
        return float(np.abs(self.simulated[name] - self.measured[name]).mean())


def series(case: Case, replayed: Replayed) -> Series:
    """Return the series of the recorded run and the replay. KV use is left out if the run recorded none: all zeros."""
    at = np.array([row.at_s for row in case.series])
    names = ("running", "waiting", "kv_use")
    measured = {name: np.array([getattr(row, name) for row in case.series]) for name in names}
    simulated = {name: replayed.at(at, name) for name in ("running", "waiting")}
    blocks = replayed.total_blocks * len(replayed.steps)
    simulated["kv_use"] = replayed.at(at, "used_blocks") / blocks
    if not measured["kv_use"].any():
        del measured["kv_use"], simulated["kv_use"]
    return Series(at, simulated, measured)


NO_CPU = {phase: {"base_s": 0.0, "per_request_s": 0.0} for phase in WORKED}
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "as the run was": {},
    "no prefix cache": {"scheduler.enable_prefix_caching": False},
    "no skew of contexts": {"cost.skew": False},
    "no CPU cost, no time a row": {"cost.cpu": NO_CPU, "cost.row_s": 0.0},
    "synchronous loop": {"loop.mode": "sync"},
    "inexact: outputs reserved": {"scheduler.reserve_output": True},
    "inexact: no limit of KV": {"kv_cache.num_blocks": MOST_BLOCKS},
    "steps padded to graph sizes": {"loop.cuda_graphs.padding": "vllm"},
    "requests arrive as sent": {"workload.recorded": None},
}


class Ablated(NamedTuple):
    """A replay of the case with `changes` to its scenario's fields."""

    name: str
    changes: Mapping[str, Any]
    scores: list[MetricScore]
    preemptions: int
    steps: int


def ablate(case: Case) -> list[Ablated]:
    """Replay the case with each of `ABLATIONS`. Raises ScenarioError if the case itself cannot be replayed."""
    ablated = []
    for name, changes in ABLATIONS.items():
        done = replay(case, case.scenario(changes))
        errors = scores(done.served, recorded(case))
        ablated.append(Ablated(name, changes, errors, done.preemptions, done.step_count))
    return ablated
