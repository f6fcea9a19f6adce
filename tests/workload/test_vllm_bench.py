"""Readers of recorded vLLM runs: what they take of requests, times and the series."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import packs
from support.packs import SENT, SERVED

from cbsim.scenario import scenario
from cbsim.workload import generators, vllm_bench
from cbsim.workload.traces import Arrival

ROW = Arrival(5, 50, 7, (3, 8, 9), "0", block_tokens=16)


def test_a_request_is_lengths_and_the_blocks_of_its_prompt(tmp_path: Path) -> None:
    """50 tokens have 3 full blocks of 16; runs are (first, how many). An empty run and no full block are fine."""
    short = SENT | {"id": 1, "input_toks": 15, "prompt_block_runs": [[4, 0]]}
    packs.lines(tmp_path / "a.jsonl", [SENT, short])
    assert vllm_bench.requests(tmp_path / "a.jsonl") == [ROW, Arrival(5, 15, 7, (), "1", block_tokens=16)]
    assert vllm_bench.requests(tmp_path / "a.jsonl", 1) == [ROW]


def test_times_count_from_the_first_request_taken_in(tmp_path: Path) -> None:
    """Seconds of the engine's clock become ns; rows are found by name, and others' are of no matter."""
    later = {name: value + 0.25 for name, value in SERVED.items() if name.endswith("_ts")}
    rows = [{"request_id": "other"}, SERVED | later | {"request_id": "bench-1"}, SERVED]
    packs.lines(tmp_path / "requests.jsonl", rows)
    taken = vllm_bench.recorded(tmp_path / "requests.jsonl", [ROW, ROW._replace(id="1")])
    assert taken[0] == (0, 0, 500_000_000, 1_750_000_000)
    assert taken[1] == (250_000_000, 250_000_000, 750_000_000, 2_000_000_000)


def test_the_time_series_is_shares(tmp_path: Path) -> None:
    """Columns by name; the KV cache's percent are a share."""
    (tmp_path / "s.csv").write_text("t,prompt_throughput,running,waiting,kv_cache_pct\n1.0,3.5,5,2,13.5\n")
    assert vllm_bench.series(tmp_path / "s.csv") == [(1.0, 5.0, 2.0, 0.135)]


def test_a_scenario_asks_for_a_recorded_run(tmp_path: Path) -> None:
    """`recorded` moves arrivals to when the engine took requests in; without it they are those that were sent. Prompts
    share what their blocks say, the rest of a prompt nothing."""
    made = packs.pack(tmp_path)
    rows = [json.loads(line) for line in made.workload.read_text().splitlines()]
    settings = {"kind": "vllm_bench", "path": str(made.workload), "limit": 5}
    values = {"question": "Who comes when?", "model": "tiny", "hardware": "rtx-4090", "workload": settings}
    sent = generators.build(scenario.parse(values, "test")).specs()
    assert [spec.arrival_ns for spec in sent] == [row["arrival_ns"] for row in rows[:5]]
    assert [spec.prefix_tokens for spec in sent] == [row["input_toks"] // 16 * 16 for row in rows[:5]]
    assert all(spec.output_tokens == spec.max_tokens for spec in sent)
    assert sent[2].prefix[0] == sent[1].prefix[0]
    late = [json.loads(line) for line in (made.folder / "requests.jsonl").read_text().splitlines()]
    for number, row in enumerate(late):
        row["queued_ts"] -= 0.001 * number
    packs.lines(made.folder / "requests.jsonl", late)
    values["workload"] = settings | {"recorded": str(made.folder / "requests.jsonl")}
    taken = generators.build(scenario.parse(values, "test")).specs()
    moved = [b.arrival_ns - a.arrival_ns for a, b in zip(sent, taken, strict=True)]
    assert moved == pytest.approx([-1_000_000 * number for number in range(5)], abs=1)
