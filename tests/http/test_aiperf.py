"""aiperf, unmodified, against a simulated server: every request is answered, metered, recorded, paired and replayed.

Counts, fields and statuses are asserted, no latency: how late a busy machine is says nothing about the code.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cbsim.runs import reading

pytest.importorskip("starlette", reason="needs the extra `serve`")

from support.calls import ROOT
from support.serving import serving

AIPERF = os.environ.get("CBSIM_AIPERF") or shutil.which("aiperf")
REQUESTS, TOKENS, STREAMS = 40, 20, 8
COMMAND = (
    *("--endpoint-type", "chat", "--streaming", "--synthetic-input-tokens-mean", "60"),
    *("--output-tokens-mean", str(TOKENS), "--request-count", str(REQUESTS), "--concurrency", str(STREAMS)),
    *("--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--random-seed", "1"),
    *("--ui-type", "none", "--no-gpu-telemetry"),
)
OURS = {**os.environ, "PYTHONPATH": str(ROOT)}
# a local tokenizer is looked up in the hub's cache when the hub is offline
THEIRS = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(AIPERF is None, reason="needs aiperf: `pip install aiperf`, or its path in CBSIM_AIPERF"),
]


def ran(*command: object, env: dict[str, str] = OURS) -> str:
    done = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_aiperf_runs_against_a_simulated_server(tmp_path: Path) -> None:
    art = tmp_path / "art"
    tokenizer = ROOT / "cbsim" / "http" / "words"
    with serving(tmp_path / "runs", "--loop", "async") as server:
        url = server.address.removesuffix("/v1")
        options = ("-m", "tiny_cpu", "--url", url, "--tokenizer", tokenizer, *COMMAND, "--artifact-dir", art)
        ran(AIPERF, "profile", *options, env=THEIRS)
        status, out, _ = server.end(signal.SIGINT)
        assert status == 0, out

    lines = [json.loads(line) for line in (art / "profile_export.jsonl").read_text().splitlines()]
    assert len(lines) == REQUESTS and not any(line.get("error") for line in lines)
    assert {line["metrics"]["usage_completion_tokens"]["value"] for line in lines} == {TOKENS}
    chunks = [len(line["metrics"]["inter_chunk_latency"]["value"]) for line in lines]
    assert set(chunks) == {TOKENS - 1}  # a chunk a token
    with (art / "server_metrics_export.csv").open() as file:
        scraped = {row[2] for row in csv.reader(file) if len(row) > 2}
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:generation_tokens"} <= scraped

    (run,) = (tmp_path / "runs").iterdir()
    record = reading.load(run)
    assert (record.incomplete, len(record.requests)) == (None, REQUESTS)
    assert record.summary["output_tokens"] == REQUESTS * TOKENS
    assert record.summary["requests_by_status"]["length"] == REQUESTS

    files = art / "profile_export.jsonl", art / "profile_export_aiperf.json"
    report = json.loads(ran(sys.executable, "-m", "analysis", "client", run, *files, "--json"))
    paired = [(each["paired_by"], each["pairs"], each["doubts"]) for each in report["files"]]
    assert paired == [("id", REQUESTS, []), (None, 0, [])]
    assert "plans identical" in ran(sys.executable, "-m", "cbsim", "replan", run)
