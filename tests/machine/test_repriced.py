"""Steps of a run priced again: latencies move as they do in a run with the other cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cbsim.scenario import scenario
from cbsim.scenario.scenario import Scenario
from cbsim.sweeps.work import Task, work

TERMS = {"step_overhead_s": 1e-5, "launch_s_per_layer": 1e-6}


def closed_loop(users: int, **cost: Any) -> Scenario:
    fields: dict[str, Any] = {
        "name": "closed",
        "question": "How far do latencies move?",
        "model": "llama-3.1-8b",
        "hardware": "h100-sxm",
        "workload": {
            "kind": "synthetic",
            "requests": 6 * users,
            "prompt_tokens": {"uniform": {"low": 400, "high": 800}},
            "output_tokens": {"uniform": {"low": 20, "high": 60}},
            "arrivals": {"kind": "closed_loop", "users": users},
        },
        "scheduler": {"name": "vllm"},
        "loop": {"mode": "async"},
        "cost": {"kind": "roofline", "compute_efficiency": {}, **cost},
    }
    return scenario.parse(fields, "closed")


def means(made: Scenario) -> dict[str, float]:
    summary = json.loads(work(Task("a", made, "summary")).files["summary.json"])
    return {name: summary[name]["mean"] for name in ("ttft_s", "tpot_s")}


@pytest.mark.parametrize("users", [1, 8])
@pytest.mark.parametrize(
    ("launch_s", "contention"),
    [(1e-5, 0.0), (1e-3, 0.0), (1e-5, 0.2)],
    ids=["device-bound", "launch-bound", "contended"],
)
def test_latencies_move_as_in_another_run(users: int, launch_s: float, contention: float) -> None:
    """Prefills have no graph here: their kernels are launched one by one, and may have to wait for that."""
    shares = {"gpu": contention}
    base = closed_loop(users, step_overhead_s=1e-4, launch_s_per_layer=launch_s, contention=shares)
    others = [
        base.model_copy(update={"cost": base.cost.model_copy(update={name: getattr(base.cost, name) + more})})
        for name, more in TERMS.items()
    ]
    made = work(Task("a", base, "summary", others=tuple(others)))
    assert made.reason is None
    moved, before = json.loads(made.files["repriced.json"]), means(base)
    for at, other in enumerate(others):
        after = means(other)
        for name, value in before.items():
            assert moved[name][at] == pytest.approx(after[name] - value, rel=0.25, abs=1e-9)
