"""The same case without one part of the model at a time.

Errors of a few percent cancel each other; this shows which part carries the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cbsim.policy.phases import WORKED
from cbsim.proof.recorded.case import Case
from cbsim.proof.recorded.reenactment import recorded, replay
from cbsim.proof.recorded.score import MetricScore, scores
from cbsim.scenario.scenario import MOST_BLOCKS

NO_CPU = {phase: {"base_s": 0.0, "per_request_s": 0.0} for phase in WORKED}
PARTS: Mapping[str, Mapping[str, Any]] = {
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
    """The case with `changes` to its scenario's fields."""

    name: str
    changes: Mapping[str, Any]
    scores: list[MetricScore]
    preemptions: int
    steps: int


def ablate(case: Case) -> list[Ablated]:
    """The case by all of `PARTS`. Raises ScenarioError if the case itself cannot be replayed."""
    return [_ablated(case, name, changes) for name, changes in PARTS.items()]


def _ablated(case: Case, name: str, changes: Mapping[str, Any]) -> Ablated:
    done = replay(case, case.scenario(changes))
    errors = scores(done.served, recorded(case))
    return Ablated(name, changes, errors, done.preemptions, sum(len(table) for table in done.steps))
