"""Trace readers: what the public traces hold, and that no bad row passes or is dropped."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from cbsim.errors import ScenarioError
from cbsim.scenario import catalog
from cbsim.workload import csv_requests, scheduler_tests, traces

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PLAIN = "id,arrival_s,prefill_tokens,decode_tokens\n"
LENGTHS = "num_prefill_tokens,num_decode_tokens\n"


def real(path: str) -> Path:
    """A public trace, which is not shipped with the project."""
    try:
        return catalog.data(path)
    except ScenarioError as error:
        pytest.skip(f"public trace not present: {error}")


# -- the public traces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "rows", "prompt", "output", "rate"),
    [("code", 8819, (2048, 1469), (28, 13), 2.57), ("conv", 19366, (1155, 1020), (211, 129), 5.53)],
)
def test_azure_counts_and_published_medians(
    part: str, rows: int, prompt: tuple[int, int], output: tuple[int, int], rate: float
) -> None:
    """Medians 1,469/13 and 1,020/129 are those of the Splitwise paper. No row has 0 tokens: those would be refused."""
    trace = csv_requests.azure(real(f"traces/azure2023/AzureLLMInferenceTrace_{part}.csv"))
    assert len(trace) == rows and trace[0].arrival_ns == 0
    assert (round(mean(r.prompt_tokens for r in trace)), median(r.prompt_tokens for r in trace)) == prompt
    assert (round(mean(r.output_tokens for r in trace)), median(r.output_tokens for r in trace)) == output
    assert rows / (trace[-1].arrival_ns / 1e9) == pytest.approx(rate, abs=0.01)


def test_mooncake_is_table_2_of_the_paper() -> None:
    trace = traces.mooncake(real("traces/mooncake/conversation_trace.jsonl"))
    assert len(trace) == 12_031
    assert round(mean(r.prompt_tokens for r in trace)) == 12_035
    assert round(mean(r.output_tokens for r in trace)) == 343


def test_mooncake_hash_ids_are_chained() -> None:
    """An id always follows the same id, so equal ids mean equal content up to there: what RequestSpec.prefix says."""
    before: dict[int, int] = {}
    for row in traces.mooncake(real("traces/mooncake/conversation_trace.jsonl")):
        for parent, own in zip((-1, *row.hash_ids), row.hash_ids, strict=False):
            assert before.setdefault(own, parent) == parent


def test_sharegpt_lengths() -> None:
    rows = csv_requests.lengths(real("traces/sharegpt_lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"))
    assert len(rows) == 30_731
    assert [median(p for p, _ in rows), median(o for _, o in rows)] == [1730, 415]


def test_plain_csv() -> None:
    rows = csv_requests.plain(real("traces/speed/splitwise_conv_q6.45_n19366.csv"))
    assert len(rows) == 19_366 and rows[0][:5] == (158_148_882, 395, 112, (), "0")


def test_a_csv_may_have_limits_and_priorities(tmp_path: Path) -> None:
    """In any order of columns; without them the limit is the output and the priority 0."""
    file = tmp_path / "t.csv"
    file.write_text("id,priority,arrival_s,prefill_tokens,decode_tokens,max_tokens\na,-2,0,5,6,7\nb,3,1,5,6,6\n")
    assert [(row.max_tokens, row.priority) for row in csv_requests.plain(file)] == [(7, -2), (6, 3)]
    file.write_text("id,arrival_s,prefill_tokens,decode_tokens\na,0,5,6\n")
    assert [(row.max_tokens, row.priority) for row in csv_requests.plain(file)] == [(None, 0)]
    file.write_text("id,arrival_s,prefill_tokens,decode_tokens,max_tokens\na,0,5,6,5\n")
    with pytest.raises(ScenarioError, match=r"t.csv:2: max_tokens: got '5', expected at least decode_tokens \(6\)"):
        csv_requests.plain(file)
    file.write_text("id,arrival_s,prefill_tokens,decode_tokens,priority\na,0,5,6,high\n")
    with pytest.raises(ScenarioError, match="priority: got 'high', expected a whole number"):
        csv_requests.plain(file)


def test_agentic_sessions() -> None:
    """All share the first 63 blocks; ids of later turns are nobody else's."""
    sessions = traces.agentic(real("traces/agentic/aiperf_agentic_code_200s_seed42.jsonl"))
    assert len(sessions) == 200 and sum(len(s.turns) for s in sessions) == 4008
    assert len({s.turns[0].hash_ids[:63] for s in sessions}) == 1
    later = [i for s in sessions for turn in s.turns[1:] for i in turn.hash_ids]
    assert len(later) == len(set(later)) and all(s.turns[0].delay_ns == 0 for s in sessions)


def test_limit_reads_the_first_rows() -> None:
    path = real("traces/azure2023/AzureLLMInferenceTrace_conv.csv")
    assert csv_requests.azure(path, 10) == csv_requests.azure(path)[:10]
    path = real("traces/agentic/aiperf_agentic_code_200s_seed42.jsonl")
    assert traces.agentic(path, 3) == traces.agentic(path)[:3]


def test_a_limit_of_sessions_keeps_their_later_turns(tmp_path: Path) -> None:
    """Turns of a session may stand behind the first line of another one, which the limit leaves out."""
    file = tmp_path / "made_up.jsonl"
    first = '"input_length": 5, "output_length": 2, "hash_ids": [1], "timestamp": 0}'
    later = '"input_length": 3, "output_length": 2, "hash_ids": [2], "delay": 7}'
    lines = [f'{{"session_id": "{name}", {rest}' for name, rest in (("a", first), ("b", first), ("a", later))]
    file.write_text("\n".join(lines))
    (session,) = traces.agentic(file, 1)
    assert [(turn.new_tokens, turn.delay_ns) for turn in session.turns] == [(5, 0), (3, 7_000_000)]


# -- rows -------------------------------------------------------------------------------------------------------------


def test_azure_times_are_exact(tmp_path: Path) -> None:
    """To the 100 ns of the file, over midnight, without passing through a float."""
    path = tmp_path / "t.csv"
    path.write_text(
        AZURE + "2023-11-16 23:59:59.9999999,5,1\r\n2023-11-17 00:00:00.0000001,6,2\r\n2023-11-17 00:00:01,7,3"
    )
    assert [row.arrival_ns for row in csv_requests.azure(path)] == [0, 200, 1_000_000_100]


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (
            csv_requests.azure,
            AZURE + "2023-11-16 18:17:03.97,5,1\n2023-11-16 18:17:04,5.5,1\n",
            ":3: ContextTokens: got '5.5', expected a whole",
        ),
        (csv_requests.azure, AZURE + "2023-11-16 18:17:03.97,-5,1\n", ":2: ContextTokens: got '-5'"),
        (
            csv_requests.azure,
            AZURE + "2023-11-16 18:17:03.97,5,0\n",
            ":2: GeneratedTokens: got '0', expected a whole number >= 1",
        ),
        (csv_requests.azure, AZURE + "2023-11-16 18:17:03.97,5\n", ":2: got 2 cells, expected 3"),
        (csv_requests.azure, AZURE + "2023-11-16 18:17:03.97,5,\n", ":2: GeneratedTokens: got ''"),
        (
            csv_requests.azure,
            AZURE + "2023-13-16 18:17:03.97,5,1\n",
            ":2: TIMESTAMP: got '2023-13-16 18:17:03.97', expected seconds >= 0, less than 30 years, or a time",
        ),
        (csv_requests.azure, AZURE + "2023-11-16 18:17:03.9x,5,1\n", ":2: TIMESTAMP: got"),
        (csv_requests.azure, AZURE + "2023-11-16 18:17:03,5,1\n2023-11-16 18:17:02,5,1\n", ":3: TIMESTAMP: got"),
        (csv_requests.azure, "TIMESTAMP,ContextTokens\n", ":1: no column GeneratedTokens; expected TIMESTAMP,"),
        (csv_requests.azure, "", ":1: no column TIMESTAMP"),
        (csv_requests.azure, AZURE, "holds no requests"),
        (csv_requests.plain, PLAIN + "a,nan,1,1\n", ":2: arrival_s: got 'nan', expected seconds >= 0"),
        (csv_requests.plain, PLAIN + "a,-1,1,1\n", ":2: arrival_s: got '-1'"),
        (csv_requests.plain, PLAIN + "a,1e999,1,1\n", ":2: arrival_s: got '1e999'"),
        (csv_requests.plain, PLAIN + "a,2,1,1\nb,1,1,1\n", ":3: arrival_s: got '1', expected seconds not before"),
        (csv_requests.plain, PLAIN + "a,2,1,1\n\na,3,1,1\n", ":4: id: got 'a', expected an id that no row above has"),
        (csv_requests.lengths, LENGTHS + "1_0,1\n", ":2: num_prefill_tokens: got '1_0'"),
        (csv_requests.lengths, LENGTHS + "\u0663,1\n", ":2: num_prefill_tokens: got"),
        (traces.mooncake, "{", ":1: not valid JSON"),
        (traces.mooncake, "[1]", ":1: row: got [1], expected a JSON object"),
        (traces.mooncake, '{"timestamp": 0}', ":1: input_length: is required"),
        (
            traces.mooncake,
            '{"input_length": 3, "output_length": 1, "hash_ids": [1], "timestamp": NaN}',
            ":1: timestamp: got nan, expected a finite number",
        ),
        (
            traces.mooncake,
            '{"input_length": 3, "output_length": 1, "hash_ids": [1], "timestamp": true}',
            ":1: timestamp: got true",
        ),
        (traces.mooncake, '{"timestamp": 0, "input_length": 0}', ":1: input_length: got 0"),
        (
            traces.mooncake,
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            ":1: hash_ids: got 1 ids, expected 2 ids, one for every 512 of 513 tokens",
        ),
        (
            traces.mooncake,
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}',
            ":1: hash_ids.0: got -1, must be >= 0",
        ),
        (
            traces.mooncake,
            '{"timestamp": 9, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' * 1
            + '{"timestamp": 8, "input_length": 5, "output_length": 1, "hash_ids": [1]}',
            ":2: timestamp: got 8",
        ),
        (
            traces.agentic,
            '{"session_id": "a", "input_length": 3, "output_length": 1, "hash_ids": [1]}',
            ":1: timestamp: is required",
        ),
        (traces.agentic, '{"session_id": 3}', ":1: session_id: got 3, expected text"),
    ],
)
def test_bad_rows_are_named(read: Callable[[Path], Any], text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path)) and expected in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff\xff")
    with pytest.raises(ScenarioError, match="is not UTF-8 text"):
        csv_requests.lengths(tmp_path / "t")
    with pytest.raises(ScenarioError, match="cannot be read: No such file"):
        csv_requests.lengths(tmp_path / "none")


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
    (b, a), cancels = scheduler_tests.golden(path, 0.01)
    assert (a.id, a.arrival_ns, a.output_tokens, a.max_tokens) == ("a", 5000, 2, 3)
    assert (b.id, b.arrival_ns, b.priority) == ("b", 3000, 2)
    assert a.prefix[0] == b.prefix[0] and a.prefix[1] != b.prefix[1]
    assert cancels == [(6000, a)]


def test_golden_transformers_layout(tmp_path: Path) -> None:
    """Arrivals and cancellations are counted in loop passes, each taken as step_s."""
    path = tmp_path / "w.json"
    path.write_text(
        '{"cb": {"block_size": 2}, "cancels": [{"step": 4, "id": "a"}], "requests": ['
        '{"id": "a", "prompt": [1, 2, 3], "max_new_tokens": 5, "arrival_step": 3}]}'
    )
    (a,), cancels = scheduler_tests.golden(path, 0.01)
    assert (a.arrival_ns, a.prompt_tokens, a.max_tokens) == (30_000_000, 3, 5) and cancels == [(40_000_000, a)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "expected `requests`, and `config`"),
        ("x", "not valid JSON"),
        ('{"config": {}, "requests": [{}]}', "w.json: config.block_size: is required"),
    ],
)
def test_golden_errors(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(ScenarioError) as caught:
        scheduler_tests.golden(tmp_path / "w.json", 0.01)
    assert expected in str(caught.value)
