"""aiperf, unmodified, against a simulated server: every request is answered, metered, recorded, paired and replayed.

Counts, fields and statuses are asserted, no latency: how late a busy machine is says nothing about the code.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cbsim.runs import reading

pytest.importorskip("starlette", reason="needs the extra `serve`")

from cbsim.scenario.catalog import ROOT

AIPERF = os.environ.get("CBSIM_AIPERF") or shutil.which("aiperf")
REQUESTS, TOKENS, STREAMS = 40, 20, 8
SCENARIO = "tiny_cpu"
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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on the wall's clock, and its address."""
    command = ["-m", "cbsim", "serve", SCENARIO, "--loop", "async", "--port", "0", "--out", str(tmp_path / "runs")]
    process = subprocess.Popen([sys.executable, *command], env=OURS, text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert address is not None
        yield process, address[0]
    finally:
        process.kill()
        process.communicate()


def ran(*command: object, env: dict[str, str] = OURS) -> str:
    done = subprocess.run([str(part) for part in command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_aiperf_runs_against_a_simulated_server(server: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    process, url = server
    art = tmp_path / "art"
    tokenizer = ROOT / "cbsim" / "http" / "words"
    options = ("-m", SCENARIO, "--url", url, "--tokenizer", tokenizer, *COMMAND, "--artifact-dir", art)
    ran(AIPERF, "profile", *options, env=THEIRS)

    lines = [json.loads(line) for line in (art / "profile_export.jsonl").read_text().splitlines()]
    assert len(lines) == REQUESTS and not any(line.get("error") for line in lines)
    assert {line["metrics"]["usage_completion_tokens"]["value"] for line in lines} == {TOKENS}
    chunks = [len(line["metrics"]["inter_chunk_latency"]["value"]) for line in lines]
    assert set(chunks) == {TOKENS - 1}  # a chunk a token
    with (art / "server_metrics_export.csv").open() as file:
        scraped = {row[2] for row in csv.reader(file) if len(row) > 2}
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:generation_tokens"} <= scraped

    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    (run,) = (tmp_path / "runs").iterdir()
    record = reading.load(run)
    assert (record.incomplete, len(record.requests)) == (None, REQUESTS)
    assert record.summary["output_tokens"] == REQUESTS * TOKENS
    assert record.summary["requests_by_status"]["length"] == REQUESTS

    files = (*sorted(art.glob("profile_export*.json*")), art / "profile_export_aiperf.csv")
    report = json.loads(ran(sys.executable, "-m", "analysis", "client", run, *files, "--json"))
    paired = [(each["paired_by"], each["pairs"], each["doubts"]) for each in report["files"]]
    assert paired == [("id", REQUESTS, []), (None, 0, []), (None, 0, [])]
    assert "plans identical" in ran(sys.executable, "-m", "cbsim", "replan", run)
