"""The replay of a case by simulated servers, and its errors against the recorded run: every latency by mean and
percentile, and the series over time. The ablations repeat this without one part of the model at a time: as errors of a
few percent cancel each other, only they show on which part the result depends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from cbsim.errors import ScenarioError
from cbsim.machine import simulate
from cbsim.measured.recorded.case import Case
from cbsim.policy.plan import WORKED
from cbsim.record.columns import NS
from cbsim.record.tables import Floats, Ints, Steps, requests_of, token_times
from cbsim.scenario.scenario import MOST_BLOCKS, Scenario
from cbsim.workload import generators


class Served(NamedTuple):
    """Times of requests by index, in seconds since the first was queued; a TTFT starts when its request is queued."""

    queued_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    output_tokens: Ints

    @property
    def ttft_s(self) -> Floats:
        return self.first_token_s - self.queued_s

    @property
    def queue_s(self) -> Floats:
        return self.scheduled_s - self.queued_s

    @property
    def prefill_s(self) -> Floats:
        return self.first_token_s - self.scheduled_s

    @property
    def e2e_s(self) -> Floats:
        return self.last_token_s - self.queued_s

    @property
    def tpot_s(self) -> Floats:
        return (self.last_token_s - self.first_token_s) / np.maximum(1, self.output_tokens - 1)

    @property
    def makespan_s(self) -> float:
        return float(self.last_token_s.max() - self.queued_s.min())


class Replayed(NamedTuple):
    """The outcome of the simulated servers. `steps` has a table per rank."""

    served: Served
    steps: Sequence[Steps]
    total_blocks: int  # cache blocks of one rank
    cached_tokens: int = 0  # prompt tokens found in prefix caches when requests were first admitted

    @property
    def step_count(self) -> int:
        return sum(len(table) for table in self.steps)

    @property
    def kv_use_peak(self) -> float:
        """The largest share of a rank's cache blocks in use."""
        return max(int(table["used_blocks"].max()) for table in self.steps if len(table)) / self.total_blocks

    @property
    def preemptions(self) -> int:
        return sum(int(table["preempted"].sum()) for table in self.steps)

    @property
    def recomputed_tokens(self) -> int:
        return sum(int(table["recomputed_tokens"].sum()) for table in self.steps)

    def at(self, seconds: Floats, column: str) -> Floats:
        """Return a step column at times after the first token, summed over ranks; 0 where a rank has no step."""
        tables = [table for table in self.steps if len(table)]
        at_ns, total = min(int(table["await_end_ns"][0]) for table in tables) + seconds * NS, np.zeros(len(seconds))
        for table in tables:
            ends = table["await_end_ns"]
            step = np.searchsorted(ends, at_ns, side="right") - 1
            total += np.where((step < 0) | (at_ns > ends[-1]), 0.0, table[column][step])
        return total


def recorded(case: Case) -> Served:
    """Return the times that the real run recorded."""
    queued, scheduled, first, last = np.array(case.taken, dtype=np.int64).T / NS
    outputs = np.array([row.output_tokens for row in case.arrivals], dtype=np.int64)
    return Served(queued, scheduled, first, last, outputs)


def replay(case: Case, scenario: Scenario) -> Replayed:
    """Serve the case's requests by `scenario`, which the case has made. Raises ScenarioError."""
    load = generators.build(scenario)
    if load.total != len(case.arrivals):
        raise ScenarioError(f"workload: got {load.total} requests, the recorded run has {len(case.arrivals)}")
    check_loop(scenario)
    ranks = max(case.ranks, scenario.ranks)
    return run_fleet(simulate.Fleet([scenario] * ranks, load, together=ranks > 1 and scenario.model.experts > 0))


def run_fleet(fleet: simulate.Fleet) -> Replayed:
    """Run several servers. Return the times of their requests, by index. Raises ScenarioError if one was rejected."""
    fleet.run()
    records = [server.record for server in fleet.machines]
    for spec, reason in (each for record in records for each in record.refusals.items()):
        raise ScenarioError(f"kv_cache, scheduler: request {spec.id} cannot be served: {reason}")
    tables, served, cached = [Steps.of(record) for record in records], list[tuple[Any, ...]](), 0
    for record, table in zip(records, tables, strict=True):
        of = token_times(requests_of(record), table)
        cached += int(of.rows.numbers("cached_tokens").sum())
        marks = (of.queued_ns, of.scheduled_ns, of.first_token_ns, of.last_token_ns, of.generated)
        served += zip(*(part.tolist() for part in (of.rows.numbers("index"), *marks)), strict=True)
    _, *times, generated = (np.array(part) for part in zip(*sorted(served), strict=True))
    queued, scheduled, first, last = ((part - times[0].min()) / NS for part in times)
    return Replayed(Served(queued, scheduled, first, last, generated), tables, records[0].total_blocks, cached)


def check_loop(scenario: Scenario) -> None:
    if scenario.loop.mode == "both":
        raise ScenarioError("loop.mode: got 'both', expected sync or async: a recorded run has one loop")


METRICS = ("ttft", "tpot", "e2e")
PARTS = ("queue", "prefill")


QUANTILES = {"median": 50, "p90": 90, "p95": 95, "p99": 99}
STATISTICS: dict[str, Callable[[Floats], Any]] = {
    "mean": np.mean,
    **{name: partial(np.percentile, q=rank) for name, rank in QUANTILES.items()},
}


class MetricScore(NamedTuple):
    """A statistic in seconds, simulated and measured, of ttft, its parts queue and prefill, tpot, e2e or makespan."""

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

    @property
    def shown(self) -> str:
        """The error in percent; a dash where it is infinite, which says nothing of its size."""
        return f"{self.error:+.2%}" if isfinite(self.error) else "-"

    def facts(self) -> dict[str, Any]:
        """Return the fields for report.json, with None for an infinite error."""
        return {**self._asdict(), "error": self.error if isfinite(self.error) else None}


def scores(simulated: Served, measured: Served) -> list[MetricScore]:
    """Score the latencies in order of `METRICS` and `STATISTICS`, then the makespan."""
    makespan = MetricScore("makespan", "", simulated.makespan_s, measured.makespan_s)
    return [*latencies(simulated, measured, METRICS), makespan]


def latencies(simulated: Served, measured: Served, metrics: Sequence[str]) -> list[MetricScore]:
    """Score latencies, such as the PARTS of TTFT, in which under load the queue hides the prefills' errors."""
    both = {metric: [getattr(served, f"{metric}_s") for served in (simulated, measured)] for metric in metrics}
    return [
        MetricScore(metric, name, *(float(statistic(each)) for each in values))
        for metric, values in both.items()
        for name, statistic in STATISTICS.items()
    ]


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
    errors: list[MetricScore]
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
