"""Trace readers: what the public traces hold, and what becomes of rows."""

import json
from pathlib import Path
from statistics import mean, median

import pytest
from support import packs
from support.packs import SENT, SERVED
from support.reference import data

from cbsim.scenario import scenario
from cbsim.workload import csv_requests, generators, scheduler_tests, traces, vllm_bench
from cbsim.workload.traces import Arrival

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


# -- the public traces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "rows", "prompt", "output", "rate"),
    [("code", 8819, (2048, 1469), (28, 13), 2.57), ("conv", 19366, (1155, 1020), (211, 129), 5.53)],
)
def test_azure_counts_and_published_medians(
    part: str, rows: int, prompt: tuple[int, int], output: tuple[int, int], rate: float
) -> None:
    """Medians 1,469/13 and 1,020/129 are those of the Splitwise paper. No row has 0 tokens: those would be refused."""
    trace = csv_requests.azure(data(f"traces/azure2023/AzureLLMInferenceTrace_{part}.csv"))
    assert len(trace) == rows and trace[0].arrival_ns == 0
    assert (round(mean(r.prompt_tokens for r in trace)), median(r.prompt_tokens for r in trace)) == prompt
    assert (round(mean(r.output_tokens for r in trace)), median(r.output_tokens for r in trace)) == output
    assert rows / (trace[-1].arrival_ns / 1e9) == pytest.approx(rate, abs=0.01)


def test_mooncake_is_table_2_of_the_paper() -> None:
    """An id always follows the same id, so equal ids mean equal content up to there: what RequestSpec.prefix says."""
    trace = traces.mooncake(data("traces/mooncake/conversation_trace.jsonl"))
    assert len(trace) == 12_031
    assert round(mean(r.prompt_tokens for r in trace)) == 12_035
    assert round(mean(r.output_tokens for r in trace)) == 343
    before: dict[int, int] = {}
    for row in trace:
        for parent, own in zip((-1, *row.hash_ids), row.hash_ids, strict=False):
            assert before.setdefault(own, parent) == parent


def test_sharegpt_lengths() -> None:
    rows = csv_requests.lengths(data("traces/sharegpt_lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"))
    assert len(rows) == 30_731
    assert [median(p for p, _ in rows), median(o for _, o in rows)] == [1730, 415]


def test_agentic_sessions() -> None:
    """All share the first 63 blocks; ids of later turns are nobody else's."""
    sessions = traces.agentic(data("traces/agentic/aiperf_agentic_code_200s_seed42.jsonl"))
    assert len(sessions) == 200 and sum(len(s.turns) for s in sessions) == 4008
    assert len({tuple(s.first.hash_ids[:63]) for s in sessions}) == 1
    later = [i for s in sessions for turn in s.later for i in turn.hash_ids]
    assert len(later) == len(set(later))


def test_a_limit_of_sessions_keeps_their_later_turns(tmp_path: Path) -> None:
    """Turns of a session may stand behind the first line of another one, which the limit leaves out."""
    file = tmp_path / "made_up.jsonl"
    first = '"input_length": 5, "output_length": 2, "hash_ids": [1], "timestamp": 0}'
    later = '"input_length": 3, "output_length": 2, "hash_ids": [2], "delay": 7}'
    lines = [f'{{"session_id": "{name}", {rest}' for name, rest in (("a", first), ("b", first), ("a", later))]
    file.write_text("\n".join(lines))
    (session,) = traces.agentic(file, 1)
    assert (session.first.input_length, [(turn.input_length, turn.delay) for turn in session.later]) == (5, [(3, 7)])


# -- rows -------------------------------------------------------------------------------------------------------------


def test_azure_times_are_exact(tmp_path: Path) -> None:
    """To the 100 ns of the file, over midnight, without passing through a float."""
    path = tmp_path / "t.csv"
    path.write_text(
        AZURE + "2023-11-16 23:59:59.9999999,5,1\r\n2023-11-17 00:00:00.0000001,6,2\r\n2023-11-17 00:00:01,7,3"
    )
    assert [row.arrival_ns for row in csv_requests.azure(path)] == [0, 200, 1_000_000_100]


# -- recorded scheduler tests -----------------------------------------------------------------------------------------


def test_golden_vllm_layout(tmp_path: Path) -> None:
    """Microseconds become nanoseconds; a stop token cuts the output short; equal prompts share ids."""
    path = tmp_path / "w.json"
    path.write_text(
        '{"config": {"block_size": 2}, "requests": ['
        '{"id": "a", "arrival_us": 5, "prompt_token_ids": [7, 8, 9], "output_token_ids": [4, 2, 6],'
        ' "stop": true, "abort_us": 6},'
        '{"id": "b", "arrival_us": 3, "prompt_token_ids": [7, 8, 1], "output_token_ids": [4], "priority": 2}]}'
    )
    read = scheduler_tests.golden(path, 0.01)
    b, a = read.open
    assert (a.id, a.arrival_ns, a.output_tokens, a.max_tokens) == ("a", 5000, 2, 3)
    assert (b.id, b.arrival_ns, b.priority) == ("b", 3000, 2)
    assert a.prefix[0] == b.prefix[0] and a.prefix[1] != b.prefix[1]
    assert read.cancels == [(6000, a)]


def test_golden_transformers_layout(tmp_path: Path) -> None:
    """Arrivals and cancellations are counted in loop passes, each taken as step_s."""
    path = tmp_path / "w.json"
    path.write_text(
        '{"cb": {"block_size": 2}, "cancels": [{"step": 4, "id": "a"}], "requests": ['
        '{"id": "a", "prompt": [1, 2, 3], "max_new_tokens": 5, "arrival_step": 3}]}'
    )
    read = scheduler_tests.golden(path, 0.01)
    (a,) = read.open
    assert (a.arrival_ns, a.prompt_tokens, a.max_tokens) == (30_000_000, 3, 5) and read.cancels == [(40_000_000, a)]


# -- recorded vLLM runs ------------------------------------------------------------------------------------------------

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
