"""Files that hold more than memory does, small as they look: refused with file and line before it is taken."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest
from support.calls import call, refused

from cbsim.scenario import rows

CSV = "id,arrival_s,prefill_tokens,decode_tokens\n"
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
        ("csv", "a.csv.gz", CSV),
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
        ("csv", "a.csv.gz", CSV.removeprefix("id,"), "0,3,2\n"),
        ("csv", "a.csv", CSV.removeprefix("id,"), "0,3,2\n"),
        ("csv", "a.csv.gz", CSV, "\n"),  # blank lines say nothing, and take time
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
    content = bytearray(gzip.compress((CSV + "a,0,3,2\n" * 2000).encode()))
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
