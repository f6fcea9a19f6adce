"""The simulator's cost of a step, by requests that run, requests that wait and tokens that are prefilled.

`python -m reports.speed.step_costs` prints the table of docs/speed.md.

A step should cost what changed in it. Microseconds of wall time a step, the best of REPEATS, each case in a fresh
process; the first steps, which admit all requests, are left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import chain
from multiprocessing import get_context
from typing import Any

from cbsim.machine import simulate
from cbsim.scenario.scenario import Scenario
from cbsim.workload import generators

SKIPPED, STEPS, REPEATS = 200, 1000, 5
RUNNING, WAITING, PROMPTS = (64, 256, 1024, 4096), (10, 1000, 100_000), (4096, 16_384, 65_536)
ENDLESS = SKIPPED + STEPS + 1000  # output tokens: more than are timed
BLOCK, CHUNK = 4096, 16

Case = dict[str, Any]


def _case(seats: int, workload: Case, *, tokens: int = 1 << 20, block_size: int = BLOCK) -> Case:
    """VLLM on a cache that is never short, of blocks so large that a request needs one, unless that is the case."""
    blocks = {"block_size": block_size, "num_blocks": (1 << 25) // block_size}
    scheduler = {"name": "vllm", "max_num_seqs": seats, "max_num_batched_tokens": tokens, "max_model_len": 1 << 17}
    return {
        "name": "step",
        "question": "What does a step cost?",
        "model": "llama-3.1-8b",
        "hardware": "a100-80gb",
        "kv_cache": blocks,
        "scheduler": scheduler,
        "workload": {"kind": "synthetic", **workload},
        "loop": {"mode": "sync"},
        "cost": {"kind": "roofline"},
    }


def _running(seats: int) -> Case:
    return _case(seats, {"requests": seats, "prompt_tokens": 16, "output_tokens": ENDLESS})


def _growing(seats: int) -> Case:
    return _case(seats, {"requests": seats, "prompt_tokens": 16, "output_tokens": ENDLESS}, block_size=16)


def _churning(seats: int) -> Case:
    """A hundredth of them ends in a step, and as many come."""
    requests = seats + (SKIPPED + STEPS) * seats // 100 + seats
    arrivals = {"kind": "closed_loop", "users": seats}
    return _case(
        seats,
        {
            "requests": requests,
            "prompt_tokens": 16,
            "output_tokens": {"uniform": {"low": 1, "high": 200}},
            "arrivals": arrivals,
        },
    )


def _waiting(queue: int) -> Case:
    return _case(64, {"requests": 64 + queue, "prompt_tokens": 16, "output_tokens": ENDLESS})


def _prefilling(prompt: int) -> Case:
    """Prompts of so many tokens, one after the other, CHUNK tokens in every step."""
    lengths = {"prompt_tokens": prompt, "output_tokens": 1}
    return _case(1, {"requests": 1 + (SKIPPED + STEPS) * CHUNK // prompt + 1, **lengths}, tokens=CHUNK, block_size=16)


CASES: Mapping[str, Case] = dict(
    chain(
        ((f"{n} running, nothing changes", _running(n)) for n in RUNNING),
        ((f"{n} running, blocks of 16 tokens", _growing(n)) for n in RUNNING),
        ((f"{n} running, 1 % end and come", _churning(n)) for n in RUNNING),
        ((f"64 running, {n} waiting", _waiting(n)) for n in WAITING),
        ((f"{CHUNK} tokens of a prompt of {n}", _prefilling(n)) for n in PROMPTS),
    )
)


class _EnoughError(Exception):
    """All steps that are timed have run."""


def microseconds(name: str) -> float:
    """A step of a case, the best of REPEATS."""
    scenario = Scenario.model_validate(CASES[name])
    return min(_once(scenario) for _ in range(REPEATS))


def _once(scenario: Scenario) -> float:
    server = simulate.machine(scenario, "sync", generators.build(scenario))
    times = [0.0, 0.0]
    count = 0

    def on_step(now_ns: int) -> None:
        del now_ns
        nonlocal count
        count += 1
        if count in (SKIPPED, SKIPPED + STEPS):
            times[count > SKIPPED] = time.perf_counter()
        if count == SKIPPED + STEPS:
            raise _EnoughError

    try:
        simulate.run(server, on_step)
    except _EnoughError:
        return (times[1] - times[0]) / STEPS * 1e6
    raise RuntimeError(f"the case ends after {count} steps, needs {SKIPPED + STEPS}")


def main() -> None:
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name, taken in zip(CASES, pool.imap(microseconds, CASES), strict=True):
            print(f"{name:<40} {taken:8.1f} us a step", flush=True)


if __name__ == "__main__":
    main()
