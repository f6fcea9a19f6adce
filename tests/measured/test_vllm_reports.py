"""What vLLM's traces say at their end: of requests that were given up, of cancellations, of cached blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cbsim.conformance.vllm_traces import VllmReplay

Line = dict[str, Any]
CONFIG: Line = {
    "block_size": 4,
    "num_blocks": 7,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "enable_chunked_prefill": True,
    "policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "enable_prefix_caching": True,
    "scheduler_reserve_full_isl": True,
    "timing": {"base_us": 1000, "per_token_us": 0, "per_kv_token_us": 0, "sched_us": 0, "update_us": 0},
}


def request(number: int, **fields: Any) -> Line:
    prompt = [number * 100 + i for i in range(8)]
    said = {"prompt_token_ids": prompt, "output_token_ids": [number * 100 + 50 + i for i in range(12)]}
    return {"id": f"r{number}", "arrival_us": 0, **said, **fields}


def replayed(requests: list[Line], trace_format: int, mode: str = "sync", **config: Any) -> list[Line]:
    header = {"vllm": "0.33.0", "mode": mode, "format": trace_format, "config": CONFIG | config}
    return list(VllmReplay(header, {"config": CONFIG | config, "requests": requests}).lines())


def report(lines: list[Line], name: str) -> Line:
    said: Line = lines[-1]["requests"][name]
    return said


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_is_aborted_before_it_is_scheduled_was_never_said_to_be_queued(mode: str) -> None:
    """An engine tells of its events with tokens, and there was none. Format 1 asked the request itself."""
    waits = request(2, abort_us=3500)
    requests = [request(0), request(1), waits]
    assert report(replayed(requests, 2, mode), "r2") == {"arrival": 0, "preemptions": 0, "n_out": 0}
    assert report(replayed(requests, 1, mode), "r2") == {"arrival": 0, "preemptions": 0, "n_out": 0, "queued_ts": 0}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_who_is_aborted_before_its_first_token_was_never_said_to_be_scheduled(mode: str) -> None:
    requests = [request(0, abort_us=500)]
    assert report(replayed(requests, 3, mode), "r0") == {"arrival": 0, "preemptions": 0, "n_out": 0}
    assert report(replayed(requests, 1, mode), "r0")["scheduled_ts"] == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_preemption_that_was_never_reported_does_not_count(mode: str) -> None:
    """A preemption is told with the next token, which the one does not live to see, and the other does."""
    lines = replayed([request(0), request(1)], 2, mode)
    step = next(i for i, line in enumerate(lines) if line.get("preempted"))
    assert [entry[0] for entry in lines[step]["preempted"]] == ["r1"]
    back = next(line["t"] for line in lines[step:] if any(row["id"] == "r1" for row in line.get("reqs", ())))
    assert report(lines, "r1")["preemptions"] == 1
    aborted = [request(0), request(1, abort_us=back)]
    given_up = [report(replayed(aborted, trace_format, mode), "r1") for trace_format in (1, 2)]
    assert [said["preemptions"] for said in given_up] == [1, int(mode == "async")]
    assert given_up[0]["n_out"] == given_up[1]["n_out"] > 0


def test_a_token_in_flight_tells_of_the_preemption_that_came_before_it() -> None:
    """Async: what was in flight when its request was preempted comes back, and the news with it."""
    lines = replayed([request(0), request(1)], 2, "async")
    step = next(i for i, line in enumerate(lines) if line.get("preempted"))
    assert lines[step + 1]["ev"] == "update" and ["r1", 1] in lines[step + 1]["tokens"]


def test_cancellations_due_together_come_in_the_order_of_the_requests() -> None:
    """And in format 1 in that of their times."""
    requests = [request(0), request(1, abort_us=2700), request(2, abort_us=2300), request(3, abort_us=2500)]
    for trace_format, order in ((1, ["r2", "r3", "r1"]), (2, ["r1", "r2", "r3"])):
        aborts = [line["ids"] for line in replayed(requests, trace_format) if line["ev"] == "abort"]
        assert aborts == [order]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("trace_format", [1, 2])
def test_cached_blocks_of_nobody_else_count(mode: str, trace_format: int) -> None:
    """Every full block has a key when its request is over, also if its content is nowhere declared."""
    header = {"vllm": "0.33.0", "mode": mode, "format": trace_format, "config": CONFIG | {"num_blocks": 17}}
    replay = VllmReplay(header, {"config": header["config"], "requests": [request(0), request(1)]})
    replay._coming = [(replace(spec, prefix=(), prefix_tokens=0), abort) for spec, abort in replay._coming]
    tokens = 8 + 12 - 1  # the last one is never computed
    assert list(replay.lines())[-1]["prefix_cache_final_cached_blocks"] == 2 * (tokens // 4)
