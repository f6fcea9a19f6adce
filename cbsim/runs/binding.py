"""The resources that limit a run, with the number that shows it and a remedy: slots, the tokens of a step, the cache,
the arrivals; and in a step the CPU, or the GPU's bandwidth or arithmetic.

Times are shares of the run from its first plan to its last result. A step stands for the time until the next one is
planned.
"""

from __future__ import annotations

import numpy as np

from cbsim.record.tables import Floats, Requests, Steps
from cbsim.scenario.scenario import Scenario

WORK = ("schedule", "prepare", "launch", "update")  # phases in which the CPU works, without `await`
SEEN = 0.1  # share of the time from which on something is reported to bind


def binding(scenario: Scenario, loop: str, steps: Steps, requests: Requests) -> list[str]:
    """Return the binding resources, a sentence each: why requests wait, and what limits a step. Empty without rows."""
    if not steps["rows"].any():
        return []
    starts, ends = steps["schedule_start_ns"], steps["update_end_ns"]
    spans = np.diff(starts, append=ends[-1]).astype(np.float64)
    shares = spans / max(spans.sum(), 1.0)
    return [*_waits(scenario, loop, steps, shares, requests), _step(scenario, loop, steps, float(spans.sum()))]


def _waits(scenario: Scenario, loop: str, steps: Steps, shares: Floats, requests: Requests) -> list[str]:
    """Return why requests wait, or that none waits while requests are still arriving."""
    waiting = steps["waiting"] > 0
    waits = float(shares[waiting].sum())
    if waits < SEEN:
        span = steps["update_end_ns"][-1] - steps["schedule_start_ns"][0]
        coming = float((requests.arrival_ns.max() - steps["schedule_start_ns"][0]) / max(span, 1))
        times = f"requests wait {waits:.0%} of the time, the last comes at {coming:.0%}"
        return [f"arrivals: {times}; it could serve more"] if coming > 0.5 else []
    limits = scenario.options(loop).limits
    slots, rows, budget = limits.slots or np.inf, limits.rows or np.inf, limits.tokens or np.inf
    full = waiting & ((steps["running"] >= slots) | (steps["rows"] >= rows))
    spent = waiting & ~full & (steps["tokens"] >= budget)
    causes = {"seats": full, "tokens": spent, "cache": waiting & ~full & ~spent}
    cause, share = max(
        ((name, float(shares[limited].sum())) for name, limited in causes.items()), key=lambda pair: pair[1]
    )
    used = float(np.average(steps["used_blocks"], weights=shares))
    if cause == "cache" and scenario.kind.padded:
        cause, reason = "batch", "it has to end first; a scheduler that refills it would let them in"
    elif cause == "seats":
        reason = f"all {min(slots, rows):,.0f} are taken; more seats would let them in"
    elif cause == "tokens":
        reason = f"a step's {budget:,.0f} are used up; a larger budget would let them in"
    else:
        reason = f"{used:,.0f} blocks are in use and the next request does not fit; a larger cache would let it in"
    return [f"{cause}: requests wait {waits:.0%} of the time, {share:.0%} because {reason}"]


def _step(scenario: Scenario, loop: str, steps: Steps, span_ns: float) -> str:
    """Return what limits a step. Arithmetic binds a GPU from that number of tokens on that it computes in the time of
    reading the weights, both at peak rates.
    """
    ends, starts = steps["update_end_ns"][:-1], steps["schedule_start_ns"][1:]
    idle = float(np.maximum(starts - ends, 0).sum()) / max(span_ns, 1.0)  # there was nothing to plan
    compute = steps.lane("compute").astype(np.float64)
    waits = 1 - idle - float(compute.sum()) / max(span_ns, 1.0)
    if waits >= SEEN:
        cure = "loop.mode: async would hide it"
        if loop != "sync":
            longer = sum(float(steps.lane(phase).sum()) for phase in WORK)
            cure = "its work is longer than the GPU's"
            if longer <= compute.sum():
                cure = "its work is the shorter, but steps are launched late"
        return f"CPU: the GPU has work and waits {waits:.0%} of the time for it; {cure}"
    model, gpu = scenario.model, scenario.hardware
    tokens = float((steps["padded_tokens"] * compute).sum() / max(compute.sum(), 1.0))
    turn = getattr(gpu.flops, model.dtype) * model.weight_bytes / model.parameters / (2 * gpu.memory_bandwidth_bytes_s)
    if tokens < turn:
        return f"GPU bandwidth: {tokens:,.0f} tokens a step; up to {turn:,.0f}, more would hardly take longer"
    return f"GPU arithmetic: {tokens:,.0f} tokens a step; from {turn:,.0f} on, more take longer"
