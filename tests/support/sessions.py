"""Sessions made up for what clients wrote: simulated runs of requests of the same names, arrivals and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cbsim
from cbsim.measured.own.clients import Measured

FILES = Path(__file__).parents[1] / "measured/own/files"
STEP_S = 0.01
BASE = cbsim.load("tiny_cpu", "loop.mode=sync", f"cost={{kind: constant, step_s: {STEP_S}}}")


def session(out: Path, ids: Sequence[str], requests: Sequence[Measured]) -> Path:
    """A run whose steps take 10 ms: each request arrives when its client started it, in the client's seconds."""
    order = sorted(range(len(requests)), key=lambda index: requests[index].start_s)
    first_s = requests[order[0]].start_s
    columns = {
        "id": [ids[index] for index in order],
        "arrival_s": [requests[index].start_s - first_s for index in order],
        "prompt_tokens": [int(requests[index].prompt_tokens) for index in order],
        "output_tokens": [int(requests[index].output_tokens) for index in order],
    }
    result = cbsim.run(BASE, requests=columns)
    assert isinstance(result, cbsim.Result)
    return result.save(out)
