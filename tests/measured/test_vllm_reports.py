"""What vLLM's traces say of cancellations and of cached blocks, where no recorded trace shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cbsim.conformance.vllm_traces import VllmReplay

Line = dict[str, Any]
SIZES = {"block_size": 4, "num_blocks": 7, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}
RULES = {
    "policy": "fcfs",
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "long_prefill_token_threshold": 0,
}
TIMES = {"base_us": 1000, "per_token_us": 0, "per_kv_token_us": 0, "sched_us": 0, "update_us": 0}
CONFIG: Line = {**SIZES, **RULES, "scheduler_reserve_full_isl": True, "timing": TIMES}


def request(number: int, **fields: Any) -> Line:
    prompt = [number * 100 + i for i in range(8)]
    said = {"prompt_token_ids": prompt, "output_token_ids": [number * 100 + 50 + i for i in range(12)]}
    return {"id": f"r{number}", "arrival_us": 0, **said, **fields}


def replay(requests: list[Line], trace_format: int, mode: str, **config: Any) -> VllmReplay:
    header = {"vllm": "0.33.0", "mode": mode, "format": trace_format, "config": CONFIG | config}
    return VllmReplay(header, {"config": CONFIG | config, "requests": requests})


def test_cancellations_due_together_come_in_the_order_of_the_requests() -> None:
    """And in format 1 in that of their times."""
    requests = [request(0), request(1, abort_us=2700), request(2, abort_us=2300), request(3, abort_us=2500)]
    for trace_format, order in ((1, ["r2", "r3", "r1"]), (2, ["r1", "r2", "r3"])):
        aborts = [line["ids"] for line in replay(requests, trace_format, "sync").lines() if line["ev"] == "abort"]
        assert aborts == [order]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("trace_format", [1, 2])
def test_cached_blocks_of_nobody_else_count(mode: str, trace_format: int) -> None:
    """Every full block has a key when its request is over, also if its content is nowhere declared."""
    run = replay([request(0), request(1)], trace_format, mode, num_blocks=17)
    run._coming = [(replace(spec, prefix=(), prefix_tokens=0), abort) for spec, abort in run._coming]
    tokens = 8 + 12 - 1  # the last one is never computed
    assert list(run.lines())[-1]["prefix_cache_final_cached_blocks"] == 2 * (tokens // 4)
