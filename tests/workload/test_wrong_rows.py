"""Files of recorded requests that cannot be used: one line names the file, the line, the field, the value and what
would be allowed; no row is dropped and none repaired. Files that hold more than memory does, small as they look, are
refused before it is taken.
"""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.calls import call, refused
from support.packs import SENT, SERVED
from support.reference import plain

from cbsim.errors import ScenarioError
from cbsim.scenario import rows
from cbsim.workload import scheduler_tests, vllm_bench
from cbsim.workload.csv_requests import azure, lengths
from cbsim.workload.requests import Workload
from cbsim.workload.traces import Arrival, agentic, mooncake
from cbsim.workload.vllm_bench import requests, series

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PLAIN = "id,arrival_s,prefill_tokens,decode_tokens\n"
LENGTHS = "num_prefill_tokens,num_decode_tokens\n"
SERIES = "t,running,waiting,kv_cache_pct\n"
TURN = {"session_id": "a", "timestamp": 9, "input_length": 5, "output_length": 1, "hash_ids": [1]}


def recorded(path: Path) -> list[vllm_bench.Taken]:
    return vllm_bench.recorded(path, [Arrival(5, 50, 7, (3, 8, 9), "0", block_tokens=16)])


def golden(path: Path) -> Workload:
    return scheduler_tests.golden(path, 0.01)


def lines(row: dict[str, Any], **changes: Any) -> str:
    return json.dumps(row | changes) + "\n"


def vllm(whole: dict[str, Any] | None = None, **changes: Any) -> str:
    """A scheduler test of vLLM, with changes of the whole or of its second request."""
    request = {"id": "first", "arrival_us": 0, "prompt_token_ids": [1, 2], "output_token_ids": [3]}
    both = [request, request | {"id": "a"} | changes]
    return json.dumps({"config": {"block_size": 16}, "requests": both, "notes": float("nan")} | (whole or {}))


def transformers(whole: dict[str, Any] | None = None, **changes: Any) -> str:
    request = {"id": "first", "prompt": [1, 2], "max_new_tokens": 4, "arrival_step": 0}
    return json.dumps(
        {"cb": {"block_size": 16}, "requests": [request, request | {"id": "a"} | changes]} | (whole or {})
    )


SOUND: list[tuple[Callable[[Path], Any], str]] = [
    (azure, AZURE + "2023-11-16 18:17:03.97,5,1\n"),
    (plain, PLAIN + "a,0,5,1\n\nb,0,5,1\n"),
    (lengths, LENGTHS + "5,1\n"),
    (mooncake, lines(TURN) + "\n" + lines(TURN)),
    (agentic, lines(TURN)),
    (requests, lines(SENT)),
    (recorded, lines(SERVED)),
    (series, SERIES + "1,2,3,4\n"),
    (golden, vllm()),
    (golden, transformers()),
]
WRONG: list[tuple[Callable[[Path], Any], str, str]] = [
    (azure, AZURE + "2023-11-16 18:17:03.97,5,1\n2023-11-16 18:17:04,5.5,1\n", ":3: ContextTokens: got '5.5'"),
    (
        azure,
        AZURE + '"' + "x" * 200_000 + '",1,2\n',
        ":2: is not a row of CSV, or a quote in it is never closed: field larger",
    ),
    (azure, f"{AZURE}2023-11-16 18:17:03.97,{'9' * 30},4\n", ":2: ContextTokens: got '9999"),
    (azure, f"{AZURE}2023-11-16 18:17:03.97,{'9' * 5000},4\n", ":2: ContextTokens: got '9999"),
    (
        azure,
        AZURE + "2023-11-16 18:17:03,5,0\n",
        ":2: GeneratedTokens: got '0', expected a whole number from 1 to 999,999,999,999",
    ),
    (azure, AZURE + "2023-11-16 18:17:03,5\n", ":2: got 2 cells, expected 3"),
    (azure, AZURE + "2023-13-16 18:17:03,5,1\n", ":2: TIMESTAMP: got '2023-13-16 18:17:03', expected seconds"),
    (azure, AZURE + "2023-11-16 18:17:03.9x,5,1\n", ":2: TIMESTAMP: got '2023-11-16 18:17:03.9x', expected"),
    (azure, "TIMESTAMP,ContextTokens\n", ":1: no column GeneratedTokens; expected TIMESTAMP,"),
    (azure, "", ":1: no column TIMESTAMP"),
    (azure, AZURE, ": holds no requests"),
    (plain, PLAIN + "a,nan,1,1\n", ":2: arrival_s: got 'nan', expected seconds >= 0"),
    (plain, PLAIN + "a,-1,1,1\n", ":2: arrival_s: got '-1', expected seconds >= 0"),
    (plain, PLAIN + "a,1e999,1,1\n", ":2: arrival_s: got '1e999', expected seconds >= 0"),
    (plain, PLAIN + "a,2,1,1\nb,1,1,1\n", ":3: arrival_s: got '1', expected seconds not before"),
    (plain, PLAIN + "a,2,1,1\n\na,3,1,1\n", ":4: id: got 'a', expected an id that no row above has"),
    (
        plain,
        PLAIN[:-1] + ",priority\na,0,5,6,high\n",
        ":2: priority: got 'high', expected a whole number from -999,999,999,999 to 999,999",
    ),
    (plain, PLAIN[:-1] + ",max_tokens\na,0,1,5,4\n", ":2: max_tokens: got '4', expected at least decode_tok"),
    (plain, "time,input_len,output_len\n2023-11-16 11:00:00,1,1\n7,1,1\n", ":3: time: got '7', expected a time"),
    (
        plain,
        "time,input_len,output_len\n2023-11-16 11:00:00,1,1\n2023-11-16 10:00:00,1,1\n",
        ":3: time: got '2023-11-16 10:00:00', expected a time not before the row above",
    ),
    (
        plain,
        "time,input_len,output_len\n0,1,1\n2023-11-16 10:00:00,1,1\n",
        ":3: time: got '2023-11-16 10:00:00', expected seconds, as in the rows above, not a date",
    ),
    (
        plain,
        "time,input_len,output_len\n2023-11-16 11:00:00,1,1\n9999-11-16 11:00:00,1,1\n",
        ":3: time: got '9999-11-16 11:00:00', expected a time less than 30 years after the first",
    ),
    (plain, "time,time,input_len,output_len\n0,0,1,1\n", ":1: time: is the name of 2 columns"),
    (plain, PLAIN + '"a\nb",0,1,1\n', ":3: id: got 'a\\nb', expected an id, a text that can be printed"),
    (plain, PLAIN + "a\x1b[31m,0,1,1\n", ":2: id: got 'a\\x1b[31m', expected an id, a text that can be printed"),
    (lengths, LENGTHS + "1_0,1\n", ":2: num_prefill_tokens: got '1_0'"),
    (lengths, LENGTHS + "\u0663,1\n", ":2: num_prefill_tokens: got"),
    (mooncake, "{", ":1: not valid JSON"),
    (mooncake, "[" * 100_000, ":1: not valid JSON"),
    (mooncake, "\n[1]", ":2: row: got [1], expected a JSON object"),
    (mooncake, '{"timestamp": 0}', ":1: input_length: is required"),
    (mooncake, lines(TURN, timestamp=float("nan")), ":1: timestamp: got nan, expected a finite number"),
    (mooncake, lines(TURN, timestamp=1e300), ":1: timestamp: got 1e+300, must be < 1000000000000.0"),
    (mooncake, lines(TURN, timestamp=True), ":1: timestamp: got true"),
    (mooncake, lines(TURN, input_length=0), ":1: input_length: got 0"),
    (mooncake, lines(TURN, input_length=513), ":1: hash_ids: got 1 ids, expected 2 ids, one for every 512 of 513"),
    (mooncake, lines(TURN, hash_ids=[-1]), ":1: hash_ids.0: got -1, must be >= 0"),
    (mooncake, lines(TURN) + lines(TURN, timestamp=8), ":2: timestamp: got 8, expected not less than in the row"),
    (agentic, lines(TURN, session_id=3), ":1: session_id: got 3, expected text"),
    (agentic, lines(TURN) + lines(TURN), ":2: delay: is required"),
    (requests, "\n\n", ": holds no requests"),
    (requests, lines(SENT, id=3), ":1: id: got 3, expected 0, the number of the row"),
    (requests, lines(SENT, output_toks=1.5), ":1: output_toks: got 1.5, expected a whole number"),
    (requests, lines(SENT, arrival_ns=-1), ":1: arrival_ns: got -1, must be >= 0"),
    (requests, lines(SENT, prompt_block_runs="abc"), ":1: prompt_block_runs: got 'abc', expected a list"),
    (requests, lines(SENT, prompt_block_runs=[[0, 2]]), ":1: prompt_block_runs: got 2 ids, expected those of 3"),
    (requests, lines(SENT, prompt_block_runs=[[0, 10**15]]), "ids, expected those of 3 blocks"),
    (requests, lines(SENT, prompt_block_runs=[[0, 4], [9, -1]]), "prompt_block_runs.1.1: got -1, must be >= 0"),
    (recorded, lines(SERVED, request_id="bench-1"), ": no request_id bench-0, which the workload has"),
    (recorded, lines(SERVED, request_id=7), ":1: request_id: got 7, expected text, each once"),
    (recorded, lines(SERVED) * 2, ":2: request_id: got 'bench-0', expected text, each once"),
    (recorded, lines(SERVED, input_toks=51), ":1: input_toks: got 51, expected 50, as in the workload"),
    (recorded, lines(SERVED, output_toks=6), ":1: output_toks: got 6, expected 7, as in the workload"),
    (recorded, lines(SERVED, last_token_ts=None), ":1: last_token_ts: got nothing, expected a number"),
    (recorded, lines(SERVED, first_token_ts=99), ":1: first_token_ts: got 99, expected a time not before scheduled_ts"),
    (series, "", ", found nothing"),
    (series, SERIES, ": holds no rows"),
    (series, SERIES + "1,2,many,4\n", ":2: waiting: got 'many', expected a number >= 0"),
    (series, SERIES + "1,-2,3,4\n", ":2: running: got '-2', expected a number >= 0"),
    (series, SERIES + "2,2,3,4\n1,2,3,4\n", ": t: goes back, expected rows in order of time"),
    (golden, "{}", ": expected `requests`, and `config`"),
    (golden, "x", ": not valid JSON"),
    (golden, "[" * 100_000, ": not valid JSON"),
    (golden, vllm({"config": {}}), ": config.block_size: is required"),
    (golden, vllm({"requests": 3}), ": requests: got 3, expected a list"),
    (golden, vllm(arrival_us=float("nan")), ": requests.1.arrival_us: got nan, expected a whole number"),
    (golden, vllm(arrival_us=10**16), ": requests.1.arrival_us: got 10000000000000000, must be <= 1000000000000000"),
    (golden, vllm(prompt_token_ids=[1, [2]]), ": requests.1.prompt_token_ids.1: got [2], expected a whole number"),
    (golden, vllm(output_token_ids=[]), ": requests.1.output_token_ids: got [], needs at least 1 entries"),
    (golden, vllm(id="first"), ": requests.1.id: got 'first', expected an id that no request before has"),
    (golden, transformers(max_new_tokens=0), ": requests.1.max_new_tokens: got 0, must be >= 1"),
    (golden, transformers(max_new_tokens=10**9), ": requests: say 1,000,000,004 tokens in all, must be <= 1,000,000"),
    (
        golden,
        transformers({"cancels": [{"step": 1, "id": "b"}]}),
        ": cancels.0.id: got 'b', expected the id of a request",
    ),
]


@pytest.mark.parametrize(("read", "content"), SOUND)
def test_the_files_themselves_are_read(read: Callable[[Path], Any], content: str, tmp_path: Path) -> None:
    """What the cases below change one field of is a file of requests; fields that mean nothing here are left alone."""
    path = tmp_path / "trace"
    path.write_text(content, encoding="utf-8")
    assert read(path)


@pytest.mark.parametrize(("read", "content", "message"), WRONG)
def test_what_is_wrong_is_named(read: Callable[[Path], Any], content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ScenarioError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{message}" if message.startswith(":") else str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff\xff")
    for read in (lengths, mooncake):
        with pytest.raises(ScenarioError, match="is not UTF-8 text"):
            read(tmp_path / "t")
        with pytest.raises(ScenarioError, match="cannot be read: No such file"):
            read(tmp_path / "none")


# -- files that hold more than memory does -----------------------------------------------------------------------------

JSON_LINE = '{"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": [1]}\n'


def packed(path: Path, head: str, part: bytes, times: int) -> None:
    """A gzipped file of `head`, and of `part` many times."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head.encode())
        for _ in range(times):
            file.write(part)


@pytest.mark.parametrize(
    ("kind", "name", "head"),
    [
        ("csv", "a.csv.gz", PLAIN),
        ("azure", "a.csv.gz", "TIMESTAMP,ContextTokens,GeneratedTokens\n"),
        ("lengths", "a.csv.gz", "num_prefill_tokens,num_decode_tokens\n"),
        ("mooncake", "a.jsonl.gz", JSON_LINE),
        ("agentic", "a.jsonl.gz", '{"session_id": "a", "timestamp": 0, "input_length": 3, "output_length": 2, '),
        ("vllm_bench", "a.jsonl.gz", "{"),
        ("golden", "a.json.gz", '{"config": {"block_size": 16}, "requests": ['),
    ],
)
def test_a_line_without_end(
    kind: str, name: str, head: str, small: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 MB in 200 KB: exit 2, and a few MB are taken. A recorded test is one document, so its bound is another one."""
    monkeypatch.setattr(rows, "MOST_DOCUMENT", 2_000_000)
    path = small.parent / name
    packed(path, head, b" " * 1_000_000, 40)
    assert path.stat().st_size < 500_000
    tracemalloc.start()
    try:
        result = call("run", small, "--set", f"workload={{kind: {kind}, path: {name}}}", "--out", out, "--quiet")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    refused(result, 2, str(path), "must have at most")
    assert most < 25_000_000


@pytest.mark.parametrize(
    ("kind", "name", "head", "row"),
    [
        ("csv", "a.csv.gz", PLAIN.removeprefix("id,"), "0,3,2\n"),
        ("csv", "a.csv", PLAIN.removeprefix("id,"), "0,3,2\n"),
        ("csv", "a.csv.gz", PLAIN, "\n"),  # blank lines say nothing, and take time
        ("mooncake", "a.jsonl.gz", "", JSON_LINE),
        ("mooncake", "a.jsonl.gz", "", "\n"),
    ],
)
def test_rows_beyond_memory(
    kind: str, name: str, head: str, row: str, small: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted while they are read: 1,500 fit a memory of 2 MB, and it is refused at the next look, every 1,000 rows."""
    monkeypatch.setattr(rows, "LOOK_ROWS", 1000)
    monkeypatch.setattr(rows, "free_bytes", lambda: 2_000_000)
    content = head + row * 5000
    (small.parent / name).write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    workload = f"workload={{kind: {kind}, path: {name}}}"
    result = call("run", small, "--set", workload, "--out", out, "--quiet")
    refused(result, 2, f"{name}: got 2,000 rows or more, must be <= 1,538 at 1,300 bytes each: 0.0 GB are free")
    if row.strip():  # as many as fit are read, however long the file
        assert call("run", small, "--set", workload, "--set", "workload.limit=2", "--out", out, "--quiet").status == 0


def test_a_gzipped_file_that_is_damaged(small: Path, out: Path) -> None:
    """A flipped byte ends in zlib's own error, which is no OSError."""
    content = bytearray(gzip.compress((PLAIN + "a,0,3,2\n" * 2000).encode()))
    content[20] ^= 0xFF
    (small.parent / "a.csv.gz").write_bytes(content)
    result = call("run", small, "--set", "workload={kind: csv, path: a.csv.gz}", "--out", out, "--quiet")
    refused(result, 2, "a.csv.gz")


def test_a_recorded_trace_is_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`conformance` reads gzipped traces whole, but no larger ones than a recorded test may be."""
    monkeypatch.setattr(rows, "MOST_DOCUMENT", 2_000_000)
    packed(tmp_path / "a.jsonl.gz", "{", b" " * 1_000_000, 3)
    result = call("conformance", tmp_path)
    assert result.status == 2 and "must have at most 2,000,000 characters" in result.out + result.err
