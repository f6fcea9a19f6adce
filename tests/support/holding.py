"""Scenarios whose capacity tests look for."""

from __future__ import annotations

from typing import Any

from cbsim.scenario import scenario as scenarios
from cbsim.scenario.scenario import Scenario

BASE: dict[str, Any] = {
    "question": "How much does it hold?",
    "model": "llama-3.1-8b",
    "hardware": "h200-sxm",
    "workload": {
        "kind": "synthetic",
        "requests": 20,
        "prompt_tokens": 16,
        "output_tokens": 4,
        "arrivals": {"kind": "poisson", "rate_per_s": 16},
    },
    "loop": {"mode": "sync"},
    "slo": {"ttft_s": 1.0},
}
EVEN = {"kind": "constant", "rate_per_s": 4}  # one seat, four steps of 50 ms each: five a second are as many as it can
SLOW = {
    **BASE,
    "workload": {**BASE["workload"], "arrivals": EVEN},
    "scheduler": {"name": "vllm", "max_num_seqs": 1},
    "cost": {"kind": "constant", "step_s": 0.05},
}


def base(**workload: Any) -> Scenario:
    return scenarios.parse({**BASE, "workload": {**BASE["workload"], **workload}}, "base")


def slow() -> Scenario:
    return scenarios.parse(SLOW, "slow")
