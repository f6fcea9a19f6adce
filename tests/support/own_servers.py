"""Servers with hidden terms, and what a client would measure of them: simulated loads, with noise."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

import cbsim
from cbsim.measured.own.clients import Measured
from cbsim.measured.own.fit import Simulated, play, priors
from cbsim.measured.own.measurement import Floats, Load, load_of
from cbsim.scenario.scenario import Scenario

SMALL = {
    "name": "own",
    "question": "What are the terms of this server?",
    "model": "llama-3.2-1b",
    "hardware": "l4",
    "workload": {"kind": "synthetic", "requests": 1, "prompt_tokens": 1, "output_tokens": 1},
    "scheduler": {"name": "vllm", "max_num_seqs": 64, "max_num_batched_tokens": 2048},
    "kv_cache": {"block_size": 16, "num_blocks": 8192},
    "loop": {"mode": "async"},
    "cost": {"kind": "roofline", "compute_efficiency": {}, "memory_efficiency": {}},
}


def small() -> Scenario:
    """A roofline with constant efficiencies, for which no data are needed."""
    return cbsim.load(SMALL)


def unmeasured(
    name: str, users: int | None, prompts: list[int], outputs: list[int], starts: list[float] | None = None
) -> Load:
    """A load before it was measured: its times are not known."""
    at = starts or [0.0] * len(prompts)
    rows = [Measured(start_s=s, prompt_tokens=p, output_tokens=o) for s, p, o in zip(at, prompts, outputs, strict=True)]
    return load_of(name, users, rows)


def campaign(seed: int) -> list[Load]:
    """Unloaded prompts of several lengths, decode at several concurrencies, mixed loads, one of them open."""
    random = np.random.default_rng(seed)
    loads = [unmeasured(f"prompt {n}", 1, [n] * 5, [4] * 5) for n in (64, 512, 1500, 4000)]
    loads += [unmeasured(f"decode {n}", n, [32] * (2 * n), [16] * (2 * n)) for n in (1, 16, 48)]
    loads.append(unmeasured("long 16", 16, [2000] * 16, [48] * 16))
    for users in (8, 24):
        count = 3 * users
        prompts, outputs = random.integers(64, 2000, count).tolist(), random.integers(8, 64, count).tolist()
        loads.append(unmeasured(f"mixed {users}", users, prompts, outputs))
    starts = np.cumsum(random.exponential(0.25, 24)).tolist()
    prompts, outputs = random.integers(64, 1500, 24).tolist(), random.integers(8, 40, 24).tolist()
    return [*loads, unmeasured("open", None, prompts, outputs, starts)]


def measured(
    server: Scenario,
    load: Load,
    front_s: float,
    random: np.random.Generator,
    of_request: float = 0.01,
    of_load: float = 0.0,
) -> Load:
    """The load as a client would measure it, with relative noise of each request, and of the whole load."""
    made = play(server, load, front_s).load
    noise = [
        np.exp(of_request * random.standard_normal(len(load)) + of_load * random.standard_normal()) for _ in range(2)
    ]
    ttft = made.ttft_s * noise[0]
    e2e = ttft + (made.e2e_s - made.ttft_s) * noise[1]
    return replace(load, ttft_s=ttft, e2e_s=e2e, start_s=sent(load, e2e))


def sent(load: Load, e2e_s: Floats) -> Floats:
    """When the requests were sent: in a closed loop when the first of those before had ended."""
    if load.users is None:
        return load.start_s
    ends, starts = list[float](), list[float]()
    for at, duration in enumerate(e2e_s.tolist()):
        starts.append(heapq.heappop(ends) if at >= load.users else 0.0)
        heapq.heappush(ends, starts[-1] + duration)
    return np.array(starts)


def hidden(scenario: Scenario, random: np.random.Generator) -> Mapping[str, float]:
    """Terms drawn from their priors."""
    drawn = {}
    for name, prior in priors(scenario).items():
        value = -1.0
        while value < prior.least:
            value = prior.value + prior.width * float(random.standard_normal())
        drawn[name] = value
    return drawn


def server(scenario: Scenario, terms: Mapping[str, float]) -> Scenario:
    return Simulated(scenario, priors(scenario)).server(terms)


def write_csv(path: Path, loads: Sequence[Load], **columns: str) -> Path:
    """Write loads as a CSV file of requests, with further columns of one value each."""
    names = ("load", "users", "start_s", "ttft_ms", "e2e_s", "prompt_tokens", "output_tokens", *columns)
    rows = [",".join(names)]
    for load in loads:
        times = zip(load.start_s, load.ttft_s, load.e2e_s, load.prompt_tokens, load.output_tokens, strict=True)
        for start, ttft, e2e, prompt, output in times:
            cells = (load.name, load.users or "", start, 1e3 * ttft, e2e, prompt, output, *columns.values())
            rows.append(",".join(map(str, cells)))
    path.write_text("\n".join(rows) + "\n")
    return path
