"""Readers of recorded vLLM runs: what they take, and that what is wrong is one message with file, line and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import packs

from cbsim.errors import ScenarioError
from cbsim.scenario import scenario
from cbsim.workload import generators, vllm_bench
from cbsim.workload.traces import Arrival

ASKED: dict[str, Any] = {
    "id": 0,
    "arrival_ns": 5.4,
    "input_toks": 50,
    "output_toks": 7,
    "prompt_block_runs": [[3, 1], [8, 2]],
}
TAKEN: dict[str, Any] = {
    "request_id": "bench-0",
    "input_toks": 50,
    "output_toks": 7,
    "queued_ts": 100.5,
    "scheduled_ts": 100.5,
    "first_token_ts": 101.0,
    "last_token_ts": 102.25,
}
ROW = Arrival(5, 50, 7, (3, 8, 9), "0", block_tokens=16)


def test_a_request_is_lengths_and_the_blocks_of_its_prompt(tmp_path: Path) -> None:
    """50 tokens have 3 full blocks of 16; runs are (first, how many). An empty run and no full block are fine."""
    short = ASKED | {"id": 1, "input_toks": 15, "prompt_block_runs": [[4, 0]]}
    packs.lines(tmp_path / "a.jsonl", [ASKED, short])
    assert vllm_bench.requests(tmp_path / "a.jsonl") == [ROW, Arrival(5, 15, 7, (), "1", block_tokens=16)]
    assert vllm_bench.requests(tmp_path / "a.jsonl", 1) == [ROW]


def test_times_count_from_the_first_request_taken_in(tmp_path: Path) -> None:
    """Seconds of the engine's clock become ns; rows are found by name, and others' are of no matter."""
    later = {name: value + 0.25 for name, value in TAKEN.items() if name.endswith("_ts")}
    rows = [{"request_id": "other"}, TAKEN | later | {"request_id": "bench-1"}, TAKEN]
    packs.lines(tmp_path / "requests.jsonl", rows)
    found = vllm_bench.recorded(tmp_path / "requests.jsonl", [ROW, ROW._replace(id="1")])
    assert found[0] == (0, 0, 500_000_000, 1_750_000_000)
    assert found[1] == (250_000_000, 250_000_000, 750_000_000, 2_000_000_000)


def test_the_time_series_is_shares(tmp_path: Path) -> None:
    """Columns by name; the KV cache's percent are a share."""
    (tmp_path / "s.csv").write_text("t,prompt_throughput,running,waiting,kv_cache_pct\n1.0,3.5,5,2,13.5\n")
    assert vllm_bench.series(tmp_path / "s.csv") == [(1.0, 5.0, 2.0, 0.135)]


ASKED_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another id": ({"id": 3}, "a.jsonl:1: id: got 3, expected 0, the number of the row"),
    "no prompt": ({"input_toks": 0}, "a.jsonl:1: input_toks: got 0, must be >= 1"),
    "a fraction": ({"output_toks": 1.5}, "a.jsonl:1: output_toks: got 1.5, expected a whole number"),
    "before the start": ({"arrival_ns": -1}, "a.jsonl:1: arrival_ns: got -1, must be >= 0"),
    "no blocks": ({"prompt_block_runs": None}, "a.jsonl:1: prompt_block_runs: got nothing, expected a list"),
    "text": ({"prompt_block_runs": "abc"}, "a.jsonl:1: prompt_block_runs: got 'abc', expected a list"),
    "a block too few": ({"prompt_block_runs": [[0, 2]]}, "got 2 ids, expected those of 3 blocks"),
    "far too many": ({"prompt_block_runs": [[0, 10**15]]}, "ids, expected those of 3 blocks"),
    "a negative id": ({"prompt_block_runs": [[-1, 3]]}, "prompt_block_runs.0.0: got -1, must be >= 0"),
    "a negative run": ({"prompt_block_runs": [[0, 4], [9, -1]]}, "prompt_block_runs.1.1: got -1, must be >= 0"),
    "half a block": (
        {"prompt_block_runs": [[0, 1.5], [4, 1.5]]},
        "prompt_block_runs.0.1: got 1.5, expected a whole number",
    ),
}


@pytest.mark.parametrize("case", ASKED_WRONG)
def test_a_request_that_cannot_be(case: str, tmp_path: Path) -> None:
    change, message = ASKED_WRONG[case]
    packs.lines(tmp_path / "a.jsonl", [ASKED | change])
    refused(lambda: vllm_bench.requests(tmp_path / "a.jsonl"), message)


TAKEN_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"request_id": "bench-1"}, "requests.jsonl: no request_id bench-0, which the workload has"),
    "no name": ({"request_id": 7}, "requests.jsonl:1: request_id: got 7, expected text, each once"),
    "another prompt": ({"input_toks": 51}, "requests.jsonl:1: input_toks: got 51, expected 50, as in the workload"),
    "cut short": ({"output_toks": 6}, "requests.jsonl:1: output_toks: got 6, expected 7, as in the workload"),
    "unfinished": ({"last_token_ts": None}, "requests.jsonl:1: last_token_ts: got nothing, expected a number"),
    "text": ({"queued_ts": "noon"}, "requests.jsonl:1: queued_ts: got 'noon', expected a number"),
    "back in time": (
        {"first_token_ts": 99},
        "requests.jsonl:1: first_token_ts: got 99, expected a time not before scheduled_ts (100.5)",
    ),
}


@pytest.mark.parametrize("case", TAKEN_WRONG)
def test_a_record_that_does_not_fit_the_workload(case: str, tmp_path: Path) -> None:
    """Only finished requests of the lengths asked for can be compared."""
    change, message = TAKEN_WRONG[case]
    packs.lines(tmp_path / "requests.jsonl", [TAKEN | change])
    refused(lambda: vllm_bench.recorded(tmp_path / "requests.jsonl", [ROW]), message)


def test_a_field_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    for field in ("input_toks", "scheduled_ts"):
        packs.lines(tmp_path / "requests.jsonl", [{name: value for name, value in TAKEN.items() if name != field}])
        refused(
            lambda: vllm_bench.recorded(tmp_path / "requests.jsonl", [ROW]), f"requests.jsonl:1: {field}: is required"
        )


def test_a_request_twice(tmp_path: Path) -> None:
    packs.lines(tmp_path / "requests.jsonl", [TAKEN, TAKEN])
    message = "requests.jsonl:2: request_id: got 'bench-0', expected text, each once"
    refused(lambda: vllm_bench.recorded(tmp_path / "requests.jsonl", [ROW]), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing"),
        ("t,running,waiting,kv_cache_pct\n", "holds no rows"),
        ("t,running,waiting\n1,2,3\n", ":1: no column kv_cache_pct"),
        ("t,running,waiting,kv_cache_pct\n1,2,many,4\n", ":2: waiting: got 'many', expected a number >= 0"),
        ("t,running,waiting,kv_cache_pct\n1,-2,3,4\n", ":2: running: got '-2', expected a number >= 0"),
        ("t,running,waiting,kv_cache_pct\n1,2\n", ":2: got 2 cells, expected 4"),
    ],
)
def test_a_time_series_that_cannot_be(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "timeseries.csv").write_text(text)
    refused(lambda: vllm_bench.series(tmp_path / "timeseries.csv"), "timeseries.csv", message)


def test_files_that_are_no_rows(tmp_path: Path) -> None:
    """Empty, not JSON, not objects, not there, not text."""
    path = tmp_path / "a.jsonl"
    for content, message in {
        b"": "holds no requests",
        b"\n\n": "holds no requests",
        b"{": ":1: not valid JSON",
        b"\n[1]\n": ":2: row: got [1], expected a JSON object",
        b"[" * 100_000: "not valid JSON",
        b"\xff\xfe": "is not UTF-8 text",
    }.items():
        path.write_bytes(content)
        refused(lambda: vllm_bench.requests(path), "a.jsonl", message)
    refused(lambda: vllm_bench.requests(tmp_path / "none.jsonl"), "none.jsonl", "cannot be read: No such file")


def refused(act: Callable[[], object], *words: str) -> None:
    with pytest.raises(ScenarioError) as error:
        act()
    assert len(str(error.value).splitlines()) == 1
    for word in words:
        assert word in str(error.value)


def test_a_scenario_asks_for_a_recorded_run(tmp_path: Path) -> None:
    """`recorded` moves arrivals to when the engine took requests in; without it they are those that were sent. Prompts
    share what their blocks say, the rest of a prompt nothing."""
    made = packs.pack(tmp_path)
    rows = [json.loads(line) for line in made.workload.read_text().splitlines()]
    settings = {"kind": "vllm_bench", "path": str(made.workload), "limit": 5}
    asked = {"question": "Who comes when?", "model": "tiny", "hardware": "rtx-4090", "workload": settings}
    sent = generators.build(scenario.parse(asked, "test")).specs()
    assert [spec.arrival_ns for spec in sent] == [row["arrival_ns"] for row in rows[:5]]
    assert [spec.prefix_tokens for spec in sent] == [row["input_toks"] // 16 * 16 for row in rows[:5]]
    assert all(spec.output_tokens == spec.max_tokens for spec in sent)
    assert sent[2].prefix[0] == sent[1].prefix[0]
    late = [json.loads(line) for line in (made.folder / "requests.jsonl").read_text().splitlines()]
    for number, row in enumerate(late):
        row["queued_ts"] -= 0.001 * number
    packs.lines(made.folder / "requests.jsonl", late)
    asked["workload"] = settings | {"recorded": str(made.folder / "requests.jsonl")}
    taken = generators.build(scenario.parse(asked, "test")).specs()
    moved = [b.arrival_ns - a.arrival_ns for a, b in zip(sent, taken, strict=True)]
    assert moved == pytest.approx([-1_000_000 * number for number in range(5)], abs=1)
