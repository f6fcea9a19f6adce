"""vLLM's own benchmark, unmodified, in virtual time: its figures are the server's, and repeat. Skipped without vLLM."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbsim.cli.parser import main
from cbsim.record.tables import token_times
from cbsim.runs import reading

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # they are others'
    pytest.importorskip("vllm.benchmarks.serve", reason="vLLM is not installed", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).resolve().parents[2]
ASKED = (
    *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--model", "rates"),
    *("--tokenizer", str(ROOT / "cbsim/http/words"), "--dataset-name", "random", "--random-input-len", "40"),
    *("--random-output-len", "12", "--num-prompts", "20", "--request-rate", "20", "--ignore-eos", "--seed", "1"),
    *("--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--save-detailed"),
)


def bench(folder: Path) -> tuple[dict[str, Any], reading.Run]:
    options = ["--out", str(folder / "runs"), "--quiet", "--", "vllm", "bench", "serve", *ASKED]
    assert main(["drive", "rates", *options, "--result-dir", str(folder), "--result-filename", "vllm.json"]) == 0
    (run,) = (folder / "runs").iterdir()
    emitted = json.loads((folder / "vllm.json").read_text())
    del emitted["date"]  # datetime.now stays real
    return emitted, reading.load(run)


def test_the_benchmark_says_what_its_server_did(tmp_path: Path) -> None:
    (emitted, run), (again, _) = bench(tmp_path / "one"), bench(tmp_path / "two")
    assert emitted == again
    assert emitted["completed"] == 20
    times = token_times(run.requests, run.steps)
    ttft_s = (times.first_token_ns - times.arrival_ns)[-20:] / 1e9  # the first request was a trial
    assert np.sort(emitted["ttfts"]) == pytest.approx(np.sort(ttft_s), abs=1e-9)
